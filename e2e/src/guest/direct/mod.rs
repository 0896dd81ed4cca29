//! Our own SMB Direct client, on the active side of `smbdirect` and `rdma`: independent of the kernel's client and of the
//! server, and able to misbehave on request.

pub mod client;
pub mod link;
pub mod seal;
