//! Transports: how frames come in and responses go out.

pub mod tcp;
