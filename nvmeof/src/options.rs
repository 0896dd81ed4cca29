//! Connections to be made, and their options in the text format of `/dev/nvme-fabrics`.

use std::fmt::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use zeroize::Zeroizing;

use crate::host::HostIdentity;
use crate::keyring::KeySerial;
use crate::limits::INTERFACE_BYTES_MAX;
use crate::nqn::{InvalidName, Nqn, is_option_value};
use crate::secret::DhChapKey;
use crate::tls::Tls;

/// The transport to a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// NVMe/TCP.
    Tcp,
    /// NVMe/RDMA: RoCE, iWARP or InfiniBand.
    Rdma,
}

impl Transport {
    /// The kernel's name for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }

    /// The kernel module for the host side.
    #[must_use]
    pub fn module(self) -> &'static str {
        match self {
            Self::Tcp => "nvme-tcp",
            Self::Rdma => "nvme-rdma",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Name of a network device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Interface(String);

impl Interface {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Interface {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        if text.len() <= INTERFACE_BYTES_MAX && is_option_value(text) && !text.contains(['/', ':']) {
            Ok(Self(text.into()))
        } else {
            Err(InvalidName::new(text, "the name of a network device"))
        }
    }
}

/// One path to a subsystem: a port of a target, and optionally our source address and device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FabricPath {
    /// The transport.
    pub transport: Transport,
    /// Address and port of the target (`traddr`, `trsvcid`). An IPv6 address with a scope is not supported.
    pub target: SocketAddr,
    /// Source address; `None` for the one that routing selects.
    pub host_address: Option<IpAddr>,
    /// Network device for outgoing connections; TCP only.
    pub host_interface: Option<Interface>,
}

impl FabricPath {
    /// A path with source address and device selected by routing.
    #[must_use]
    pub fn new(transport: Transport, target: SocketAddr) -> Self {
        Self { transport, target, host_address: None, host_interface: None }
    }
}

impl FromStr for FabricPath {
    type Err = InvalidName;

    /// Parses `tcp://192.168.77.1:4420` or `rdma://[fd00::1]:4420`.
    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let parsed = text.split_once("://").and_then(|(transport, target)| {
            let transport = match transport {
                "tcp" => Transport::Tcp,
                "rdma" => Transport::Rdma,
                _ => return None,
            };
            let target: SocketAddr = target.parse().ok()?;
            let scoped = matches!(target, SocketAddr::V6(v6) if v6.scope_id() != 0);
            (target.port() != 0 && !scoped).then(|| Self::new(transport, target))
        });
        parsed.ok_or_else(|| InvalidName::new(text, "a path (tcp://ADDRESS:PORT or rdma://ADDRESS:PORT)"))
    }
}

impl fmt::Display for FabricPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.transport, self.target)?;
        if let Some(address) = self.host_address {
            write!(f, " from {address}")?;
        }
        if let Some(interface) = &self.host_interface {
            write!(f, " by {}", interface.as_str())?;
        }
        Ok(())
    }
}

/// Timeouts and intervals of the kernel, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Interval of keep-alives.
    pub keep_alive_s: u32,
    /// Interval between two attempts to reconnect.
    pub reconnect_delay_s: u32,
    /// Time after which a controller that cannot be reached is removed; `None` for never.
    pub controller_loss_s: Option<u32>,
    /// Time after which I/O on a lost path fails, or is sent on another path. The kernel's default is never; a server would
    /// then hang for as long as its target is unreachable.
    pub fast_io_fail_s: u32,
}

impl Default for Timing {
    fn default() -> Self {
        Self { keep_alive_s: 5, reconnect_delay_s: 2, controller_loss_s: None, fast_io_fail_s: 10 }
    }
}

/// DH-HMAC-CHAP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authentication {
    /// The key that we prove to have.
    pub host: DhChapKey,
    /// The key that the target must prove to have; `None` to not authenticate the target.
    pub controller: Option<DhChapKey>,
}

/// A subsystem to be connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subsystem {
    /// Its name.
    pub nqn: Nqn,
    /// Our identity.
    pub host: HostIdentity,
    /// Keys, if the target requires them.
    pub authentication: Option<Authentication>,
    /// TLS. Excludes paths over RDMA, which has no TLS.
    pub tls: Option<Tls>,
    /// Timeouts and intervals of the kernel.
    pub timing: Timing,
    /// Queues per path; `None` for one per processor.
    pub io_queues: Option<u16>,
    /// Commands in flight per queue; `None` for the kernel's 128.
    pub queue_size: Option<u16>,
    /// CRC-32C over headers; TCP only.
    pub header_digest: bool,
    /// CRC-32C over data; TCP only.
    pub data_digest: bool,
    /// Type of service of outgoing packets (`tos`).
    pub type_of_service: Option<u8>,
}

impl Subsystem {
    /// A subsystem with the defaults.
    #[must_use]
    pub fn new(nqn: Nqn, host: HostIdentity) -> Self {
        Self {
            nqn,
            host,
            authentication: None,
            tls: None,
            timing: Timing::default(),
            io_queues: None,
            queue_size: None,
            header_digest: false,
            data_digest: false,
            type_of_service: None,
        }
    }

    /// The options to connect this path with this TLS key.
    pub(crate) fn options(&self, path: &FabricPath, tls: Option<KeySerial>) -> Options {
        let mut options = self.base(path, &self.nqn, tls);
        if let Some(queues) = self.io_queues {
            options.add("nr_io_queues", queues);
        }
        if let Some(size) = self.queue_size {
            options.add("queue_size", size);
        }
        options
    }

    /// The options to connect the discovery controller at this path: without I/O options, and without options that would keep
    /// it alive after we have read the log.
    pub(crate) fn discovery_options(&self, path: &FabricPath, tls: Option<KeySerial>) -> Options {
        let mut options = self.base(path, &Nqn::discovery(), tls);
        // Another process may have its own connection to the same address.
        options.beside();
        options
    }

    fn base(&self, path: &FabricPath, nqn: &Nqn, tls: Option<KeySerial>) -> Options {
        let mut options = Options::default();
        let Timing { keep_alive_s, reconnect_delay_s, controller_loss_s, fast_io_fail_s } = self.timing;
        let tcp = path.transport == Transport::Tcp;
        options.add("transport", path.transport);
        options.add("traddr", path.target.ip());
        options.add("trsvcid", path.target.port());
        options.add("nqn", nqn);
        options.add("hostnqn", self.host.nqn());
        options.add("hostid", self.host.id());
        if let Some(address) = path.host_address {
            options.add("host_traddr", address);
        }
        if let Some(interface) = path.host_interface.as_ref().filter(|_| tcp) {
            options.add("host_iface", interface.as_str());
        }
        options.add("keep_alive_tmo", keep_alive_s);
        options.add("reconnect_delay", reconnect_delay_s);
        match controller_loss_s {
            Some(seconds) => options.add("ctrl_loss_tmo", seconds),
            None => options.add("ctrl_loss_tmo", -1),
        }
        options.add("fast_io_fail_tmo", fast_io_fail_s);
        if tcp && self.header_digest {
            options.flag("hdr_digest");
        }
        if tcp && self.data_digest {
            options.flag("data_digest");
        }
        if let Some(tos) = self.type_of_service {
            options.add("tos", tos);
        }
        if let Some(authentication) = &self.authentication {
            options.secret("dhchap_secret", authentication.host.expose());
            if let Some(key) = &authentication.controller {
                options.secret("dhchap_ctrl_secret", key.expose());
            }
        }
        if let Some(key) = tls {
            options.flag("tls");
            // A decimal number; from the keyring `.nvme`, which the kernel uses if none is given.
            options.add("tls_key", key.0);
        }
        options
    }
}

/// Options in the kernel's format. `Debug` and `Display` show no secrets.
#[derive(Default)]
pub(crate) struct Options {
    text: Zeroizing<String>,
    shown: String,
    names: Vec<&'static str>,
}

impl Options {
    fn add(&mut self, name: &'static str, value: impl fmt::Display) {
        let value = value.to_string();
        debug_assert!(is_option_value(&value), "{name}={value}");
        self.put(name, &format!("={value}"), &format!("={value}"));
    }

    fn flag(&mut self, name: &'static str) {
        self.put(name, "", "");
    }

    /// Connects even if a controller with the same path exists.
    pub(crate) fn beside(&mut self) {
        self.flag("duplicate_connect");
    }

    fn secret(&mut self, name: &'static str, value: &str) {
        let value = Zeroizing::new(format!("={value}"));
        self.put(name, &value, "=(redacted)");
    }

    fn put(&mut self, name: &'static str, value: &str, shown: &str) {
        if self.text.capacity() == 0 {
            // A later reallocation would leave copies of secrets behind.
            self.text.reserve(4096);
        }
        let comma = if self.names.is_empty() { "" } else { "," };
        let _ = write!(self.text, "{comma}{name}{value}");
        let _ = write!(self.shown, "{comma}{name}{shown}");
        self.names.push(name);
    }

    /// The text for the kernel.
    pub(crate) fn expose(&self) -> &[u8] {
        self.text.as_bytes()
    }

    /// Names, in order.
    pub(crate) fn names(&self) -> &[&'static str] {
        &self.names
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subsystem() -> Subsystem {
        let host = HostIdentity::of("fast-0", "node-a").expect("names");
        Subsystem::new("nqn.2026-01.io.example:pool".parse().expect("an NQN"), host)
    }

    fn path(transport: Transport) -> FabricPath {
        FabricPath::new(transport, "192.168.77.1:4420".parse().expect("an address"))
    }

    const HOST: &str = "hostnqn=nqn.2014-08.org.nvmexpress:uuid:3217c216-9228-581d-a80f-93c26bebe2af,\
                        hostid=3217c216-9228-581d-a80f-93c26bebe2af";

    #[test]
    fn defaults_fail_io_fast_and_reconnect_controllers_forever() {
        let options = subsystem().options(&path(Transport::Rdma), None);
        assert_eq!(
            options.to_string(),
            format!(
                "transport=rdma,traddr=192.168.77.1,trsvcid=4420,nqn=nqn.2026-01.io.example:pool,{HOST},\
                 keep_alive_tmo=5,reconnect_delay=2,ctrl_loss_tmo=-1,fast_io_fail_tmo=10"
            )
        );
        assert_eq!(options.expose(), options.to_string().as_bytes());
    }

    #[test]
    fn all_options_reach_the_kernel_and_secrets_are_redacted_elsewhere() {
        let key = DhChapKey::parse(&crate::secret::tests::dhchap("01", &[7; 32])).expect("a key");
        let wanted = Subsystem {
            authentication: Some(Authentication { host: key.clone(), controller: Some(key.clone()) }),
            timing: Timing { controller_loss_s: Some(60), ..Timing::default() },
            io_queues: Some(4),
            queue_size: Some(64),
            header_digest: true,
            data_digest: true,
            type_of_service: Some(104),
            ..subsystem()
        };
        let path = FabricPath {
            target: "[fd00::1]:4421".parse().expect("an address"),
            host_address: Some("fd00::2".parse().expect("an address")),
            host_interface: Some("eth1".parse().expect("a name")),
            ..path(Transport::Tcp)
        };
        let options = wanted.options(&path, Some(KeySerial(34)));
        let text = String::from_utf8(options.expose().to_vec()).expect("text");
        assert!(text.starts_with(
            "transport=tcp,traddr=fd00::1,trsvcid=4421,nqn=nqn.2026-01.io.example:pool,hostnqn="
        ));
        let rest = text.split_once(",host_traddr").expect("more").1;
        let key = key.expose();
        assert_eq!(
            rest,
            format!(
                "=fd00::2,host_iface=eth1,keep_alive_tmo=5,reconnect_delay=2,ctrl_loss_tmo=60,fast_io_fail_tmo=10,\
                 hdr_digest,data_digest,tos=104,dhchap_secret={key},dhchap_ctrl_secret={key},tls,tls_key=34,\
                 nr_io_queues=4,queue_size=64"
            )
        );
        for shown in [format!("{options}"), format!("{options:?}"), format!("{wanted:?}")] {
            assert!(shown.contains("redacted") && !shown.contains(key) && !shown.contains("BwcH"), "{shown}");
        }
        // RDMA has no digests, no TLS and no choice of network device; the kernel would refuse them.
        let rdma = wanted.options(&FabricPath { transport: Transport::Rdma, ..path }, None).to_string();
        for name in ["digest", "tls", "host_iface"] {
            assert!(!rdma.contains(name), "{rdma}");
        }
    }

    #[test]
    fn discovery_options_omit_io_queues() {
        let wanted = Subsystem { io_queues: Some(4), ..subsystem() };
        let options = wanted.discovery_options(&path(Transport::Tcp), None).to_string();
        assert!(options.contains(",nqn=nqn.2014-08.org.nvmexpress.discovery,"), "{options}");
        assert!(!options.contains("nr_io_queues") && options.ends_with(",duplicate_connect"), "{options}");
    }

    #[test]
    fn fabric_path_display_and_parse_round_trip() {
        for text in ["tcp://192.168.77.1:4420", "rdma://[fd00::1]:4420"] {
            assert_eq!(text.parse::<FabricPath>().map(|path| path.to_string()).as_deref(), Ok(text));
        }
        for text in
            ["", "tcp://", "fc://1.2.3.4:1", "tcp://1.2.3.4", "tcp://1.2.3.4:0", "tcp://[fe80::1%3]:4420"]
        {
            assert!(text.parse::<FabricPath>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn interface_name_cannot_inject_options() {
        for text in ["", "eth0,tls", "a b", "a/b", "abcdefghijklmnop"] {
            assert!(text.parse::<Interface>().is_err(), "{text:?}");
        }
    }
}
