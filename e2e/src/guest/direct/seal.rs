//! Sealing of the client's messages and payload.

use anyhow::{Context, Result, ensure};
use forebay_smb::crypto::{
    Cipher, KeyDerivation, NonceSequence, OpeningKey, SealedFrame, SealingKey, SessionKey,
    TRANSFORM_HEADER_LEN, client_to_server_key, server_to_client_key,
};
use forebay_smbdirect::wire::{CryptoTransform, RdmaTransform};

/// The keys of a session that seals with AES-128-GCM.
#[derive(Debug)]
pub struct Seal {
    sealing: SealingKey,
    opening: OpeningKey,
    nonces: NonceSequence,
}

/// The seal of a payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tag {
    signature: [u8; 16],
    nonce: Vec<u8>,
}

impl Tag {
    /// Parses it from the response to a READ ([MS-SMB2] 3.2.5.11).
    pub fn parse(data: &[u8]) -> Result<Self> {
        let frame = RdmaTransform::parse(data)?;
        ensure!(
            (frame.channel, frame.transform_count) == (RdmaTransform::CHANNEL_NONE, 1),
            "an odd transform: {frame:?}"
        );
        let crypto = CryptoTransform::parse(frame.transforms)?;
        ensure!(crypto.transform_type == CryptoTransform::ENCRYPTION, "not sealed: {crypto:?}");
        let signature = crypto.signature.try_into().context("a tag of 16 bytes")?;
        Ok(Self { signature, nonce: crypto.nonce.to_vec() })
    }

    /// The channel information of a WRITE with such a payload ([MS-SMB2] 3.2.4.7).
    pub fn channel_info(&self, channel: u32, descriptors: &[u8]) -> Vec<u8> {
        let crypto = CryptoTransform {
            transform_type: CryptoTransform::ENCRYPTION,
            signature: &self.signature,
            nonce: &self.nonce,
        };
        let mut info = Vec::new();
        RdmaTransform::encode(channel, &crypto, descriptors, &mut info);
        info
    }
}

impl Seal {
    /// Derives the keys from a session's key.
    pub fn derive(derivation: KeyDerivation<'_>, key: &SessionKey) -> Self {
        let (key, cipher) = (key.as_bytes(), Cipher::Aes128Gcm);
        Self {
            sealing: SealingKey::new(&client_to_server_key(derivation, key, cipher)),
            opening: OpeningKey::new(&server_to_client_key(derivation, key, cipher)),
            nonces: NonceSequence::new([0; 3], 1),
        }
    }

    /// Seals a message into a frame.
    pub fn seal(&mut self, session_id: u64, message: &mut [u8]) -> Result<Vec<u8>> {
        let header = self.sealing.seal_in_place(self.nonces.next_nonce()?, session_id, message)?;
        Ok([&header[..], message].concat())
    }

    /// Unseals the message in a frame.
    pub fn open(&self, mut frame: Vec<u8>) -> Result<Vec<u8>> {
        ensure!(SealedFrame::claims(&frame), "an answer that is not sealed");
        self.opening.open_in_place(&mut frame)?;
        Ok(frame.split_off(TRANSFORM_HEADER_LEN))
    }

    /// Seals payload in place.
    pub fn seal_payload(&mut self, data: &mut [u8]) -> Result<Tag> {
        let (nonce, signature) = self.sealing.seal_payload(self.nonces.next_nonce()?, data)?;
        Ok(Tag { signature, nonce: nonce[..self.sealing.nonce_len()].to_vec() })
    }

    /// Unseals payload in place.
    pub fn open_payload(&self, tag: &Tag, data: &mut [u8]) -> Result<()> {
        Ok(self.opening.open_payload(&tag.nonce, &tag.signature, data)?)
    }
}
