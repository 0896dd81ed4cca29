//! Transports: receive frames and send responses.

pub(crate) mod acknowledged;
mod frame;
pub(crate) mod smb_direct;
pub mod tcp;
