//! Key derivation, signing, sealing and preauthentication integrity ([MS-SMB2] 3.1.4).
//!
//! Nothing here generates random numbers or reads a clock: keys come from [`crate::auth`], nonces from a [`NonceSequence`]
//! that the owner of the session seeds.

mod gmac;
mod kdf;
mod nonce;
mod preauth;
mod seal;
mod sign;
#[cfg(test)]
pub(crate) mod vectors;

pub use kdf::{
    CipherKey, KeyDerivation, SessionKey, application_key, client_to_server_key, server_to_client_key,
    signing_key,
};
pub use nonce::{Nonce, NonceExhausted, NonceSequence};
pub use preauth::PreauthHash;
pub use seal::{Cipher, OpenError, OpeningKey, SealError, SealedFrame, SealingKey, TRANSFORM_HEADER_LEN};
pub use sign::{SigningAlgorithm, SigningKey};
