//! Transports: how frames come in and responses go out.

pub(crate) mod acknowledged;
mod frame;
pub(crate) mod smb_direct;
pub mod tcp;
