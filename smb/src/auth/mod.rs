//! SPNEGO ([RFC 4178], [MS-SPNG]) with NTLMv2 ([MS-NLMP]) and Kerberos ([RFC 4120], [RFC 4121], [MS-KILE]): authenticates the
//! user and establishes the session key of both sides.
//!
//! [`Acceptor`] is the server's side of one SESSION_SETUP exchange, [`Initiator`] the client's, for tests and tools.
//! Challenge, time and random keys are parameters.
//!
//! Refused by design: NTLMv1, LM and LMv2 responses, anonymous and guest logons.

mod acceptor;
mod client;
mod der;
mod kerberos;
mod nt_hash;
mod ntlm;
mod spnego;
#[cfg(test)]
mod tests;

pub use acceptor::{Acceptor, AcceptorConfig, Authenticated, Lookup, Step};
pub use client::{ClientStep, Initiator, InitiatorConfig};
pub use kerberos::{Kerberos, Keytab, KeytabError};
pub use nt_hash::{NtHash, NtHashParseError};
pub use spnego::negotiate_hint;

use crate::status::NtStatus;

/// Why an exchange ends without a user. An exchange that has failed stays failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The peer's bytes are invalid. Answer: STATUS_INVALID_PARAMETER.
    #[error("malformed security token: {0}")]
    Malformed(&'static str),
    /// The peer's bytes arrived at the wrong time. Answer: STATUS_INVALID_PARAMETER.
    #[error("security token out of order: {0}")]
    OutOfOrder(&'static str),
    /// The peer does not support what we require, or refuses it. Answer: STATUS_LOGON_FAILURE.
    #[error("no acceptable way to authenticate: {0}")]
    Incompatible(&'static str),
    /// The peer requests an anonymous logon, which is never granted. Answer: STATUS_ACCESS_DENIED.
    #[error("anonymous logon refused")]
    Anonymous,
    /// Unknown user, wrong password, or a message modified in transit: deliberately indistinguishable.
    /// Answer: STATUS_LOGON_FAILURE.
    #[error("logon failure")]
    LogonFailure,
    /// Kerberos refuses, for a reason that the administrator must know but the peer need not. Answer: STATUS_LOGON_FAILURE.
    #[error("Kerberos: {0}")]
    Refused(String),
}

impl AuthError {
    /// The status of the SESSION_SETUP response.
    pub fn status(&self) -> NtStatus {
        match self {
            AuthError::Malformed(_) | AuthError::OutOfOrder(_) => NtStatus::INVALID_PARAMETER,
            AuthError::Incompatible(_) | AuthError::LogonFailure | AuthError::Refused(_) => {
                NtStatus::LOGON_FAILURE
            }
            AuthError::Anonymous => NtStatus::ACCESS_DENIED,
        }
    }
}
