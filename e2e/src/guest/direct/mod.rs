//! A client over SMB Direct of our own, on the connecting side of `smbdirect` and `rdma`: foreign to the kernel's client and to
//! the server, and one that can be made to misbehave.

pub mod client;
pub mod link;
pub mod seal;
