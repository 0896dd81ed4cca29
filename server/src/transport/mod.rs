//! Transports: how frames come in and responses go out.

mod frame;
pub(crate) mod smb_direct;
pub mod tcp;
