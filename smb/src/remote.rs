//! Memory of a peer that a transport reaches by RDMA, and what proves that data from there are the client's.

use forebay_smbdirect::wire::BufferDescriptor;

use crate::crypto::{OpeningKey, SigningKey};
use crate::status::NtStatus;

/// The part of a peer's memory that a request is about: as many bytes as the request says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteBuffer {
    pub(crate) descriptors: Vec<BufferDescriptor>,
}

impl RemoteBuffer {
    /// The pieces of its first `length` bytes, in order; fewer where it is shorter.
    pub fn pieces(&self, length: u32) -> impl Iterator<Item = BufferDescriptor> + '_ {
        let mut left = length;
        self.descriptors.iter().filter_map(move |descriptor| {
            let taken = left.min(descriptor.length);
            left -= taken;
            (taken > 0).then_some(BufferDescriptor { length: taken, ..*descriptor })
        })
    }
}

/// What the data of a WRITE have to go through once they have come from the peer's memory.
#[derive(Debug)]
pub struct RemoteProof(pub(crate) Proof);

#[derive(Debug)]
pub(crate) enum Proof {
    Sealed { key: OpeningKey, nonce: [u8; 12], tag: [u8; 16] },
    Signed { key: SigningKey, nonce: [u8; 12], signature: [u8; 16] },
}

impl RemoteProof {
    /// Makes of what was fetched what the client meant, where it lies.
    ///
    /// # Errors
    /// `STATUS_AUTH_TAG_MISMATCH`, `STATUS_INVALID_SIGNATURE` where they are not what the client sealed or signed: they
    /// must not be used then.
    pub fn open(&self, data: &mut [u8]) -> Result<(), NtStatus> {
        match &self.0 {
            Proof::Sealed { key, nonce, tag } => key
                .open_payload(&nonce[..key.nonce_len()], tag, data)
                .map_err(|_| NtStatus::AUTH_TAG_MISMATCH),
            Proof::Signed { key, nonce, signature } => {
                if key.verify_payload(*nonce, data, signature) {
                    Ok(())
                } else {
                    Err(NtStatus::INVALID_SIGNATURE)
                }
            }
        }
    }
}
