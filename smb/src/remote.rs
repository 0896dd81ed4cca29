//! Memory of a peer that a transport reaches by RDMA, and the proof that data fetched from it are the client's.

use forebay_smbdirect::wire::BufferDescriptor;

use crate::crypto::{OpeningKey, SigningKey};
use crate::status::NtStatus;

/// The part of a peer's memory that a request refers to: exactly the length that the request specifies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteBuffer {
    pub(crate) descriptors: Vec<BufferDescriptor>,
}

impl RemoteBuffer {
    /// The pieces of its first `length` bytes, in order; fewer if it is shorter.
    pub fn pieces(&self, length: u32) -> impl Iterator<Item = BufferDescriptor> + '_ {
        let mut left = length;
        self.descriptors.iter().filter_map(move |descriptor| {
            let taken = left.min(descriptor.length);
            left -= taken;
            (taken > 0).then_some(BufferDescriptor { length: taken, ..*descriptor })
        })
    }
}

/// Decryption or verification that the data of a WRITE need after they were fetched from the peer's memory.
#[derive(Debug)]
pub struct RemoteProof(pub(crate) Proof);

#[derive(Debug)]
pub(crate) enum Proof {
    Sealed { key: OpeningKey, nonce: [u8; 12], tag: [u8; 16] },
    Signed { key: SigningKey, nonce: [u8; 12], signature: [u8; 16] },
}

impl RemoteProof {
    /// Decrypts or verifies the fetched data in place.
    ///
    /// # Errors
    /// `STATUS_AUTH_TAG_MISMATCH`, `STATUS_INVALID_SIGNATURE` if they are not what the client sealed or signed: the caller
    /// must not use them then.
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
