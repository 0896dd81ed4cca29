//! Configuration of a server.

use std::net::IpAddr;
use std::sync::Arc;

use crate::auth::Kerberos;
use crate::wire::Dialect;

/// Whether SMB 3.x encryption is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Encryption {
    /// Not offered.
    Off,
    /// Offered; used if the client or the volume requires it.
    #[default]
    Offered,
    /// Sessions that cannot seal are refused.
    Required,
}

/// Configuration of a server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// ServerGuid.
    pub guid: [u8; 16],
    /// NetBIOS-style name, at most 15 characters, for NTLM target information.
    pub server_name: String,
    /// ServerStartTime, FILETIME; sent as 0 to be unremarkable, kept for the session list.
    pub started: u64,
    /// The oldest dialect that the server supports.
    pub min_dialect: Dialect,
    /// Names under which clients address the server. If there are any, a client that sends a server name in NTLM must send
    /// one of them.
    pub target_names: Vec<String>,
    /// Users may log on by NTLM.
    pub ntlm: bool,
    /// Users may log on by Kerberos, with these keys.
    pub kerberos: Option<Arc<Kerberos>>,
    /// Every session must sign or seal.
    pub signing_required: bool,
    /// Sealing.
    pub encryption: Encryption,
    /// Random number, different at each start: a FileId of one start has no meaning at the next.
    pub instance: u64,
    /// Earlier starts of the server.
    pub predecessors: Vec<Predecessor>,
    /// MaxReadSize, MaxWriteSize and MaxTransactSize, at most [`crate::limits::IO_BYTES_MAX`].
    pub io_bytes_max: u32,
    /// Grants oplocks, leases and durable handles, so that clients cache.
    pub caching: bool,
    /// Also grants leases on directories, if `caching` is on.
    pub directory_leases: bool,
}

/// An earlier start of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Predecessor {
    /// Its [`ServerConfig::instance`].
    pub instance: u64,
    /// Whether all WRITEs that it acknowledged are on stable storage by now.
    pub durable: bool,
}

/// An interface as advertised by FSCTL_QUERY_NETWORK_INTERFACE_INFO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkInterface {
    /// IfIndex.
    pub index: u32,
    /// One of its addresses.
    pub address: IpAddr,
    /// LinkSpeed in bits per second.
    pub speed_bits_per_second: u64,
    /// RSS_CAPABLE: clients open further channels to the same address only if it is set.
    pub rss_capable: bool,
    /// RDMA_CAPABLE.
    pub rdma_capable: bool,
}
