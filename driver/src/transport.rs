//! Selects the transport of a mount from the StorageClass and the capabilities of both ends.

use forebay_inventory::{self as inventory, Addresses, Inventory, Presence};

use crate::error::Error;
use crate::options::MountOptions;

/// The only port on which Linux tries SMB Direct over InfiniBand and RoCE; if the server's TCP port differs, another server may
/// use this port.
const RDMA_PORT: u16 = 445;

/// The requested transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Transport {
    /// RDMA if both ends support it, otherwise TCP.
    #[default]
    Auto,
    /// RDMA only.
    Rdma,
    /// TCP.
    Tcp,
}

impl Transport {
    /// Parses the value used in parameters and volume contexts.
    pub(crate) fn from_word(word: &str) -> Option<Self> {
        match word {
            "auto" => Some(Self::Auto),
            "rdma" => Some(Self::Rdma),
            "tcp" => Some(Self::Tcp),
            _ => None,
        }
    }

    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }

    /// Combines the requested transport with the mount options. RDMA transfers are neither signed nor sealed, so a volume that
    /// requires either cannot use them.
    pub(crate) fn with(self, options: &MountOptions) -> Result<Self, Error> {
        let wanted = match (self, options.has("rdma")) {
            (Self::Tcp, true) => {
                return Err(Error::invalid("mount_flags", "rdma contradicts the volume's transport, tcp"));
            }
            (_, true) => Self::Rdma,
            (wanted, false) => wanted,
        };
        if wanted == Self::Rdma && is_protected(options) {
            let reason = "rdma transfers a volume's data unencrypted, but this volume must be signed or sealed: use \
                          transport auto or tcp, or protection optional";
            return Err(Error::invalid("transport", reason));
        }
        Ok(wanted)
    }
}

fn is_protected(options: &MountOptions) -> bool {
    options.is_sealed() || options.has("sign")
}

/// Known properties of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// It does not belong to a StorageCluster, and was not queried.
    Unknown,
    /// An instance of a StorageCluster.
    Instance {
        /// Transports that it serves now, according to its status.
        transports: Vec<String>,
        /// SMB port.
        port: u16,
        /// Whether every session is signed or sealed.
        is_protected: bool,
    },
}

/// Capabilities of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Client {
    /// Whether the kernel's SMB client supports SMB Direct.
    pub(crate) smb_direct: Presence,
    /// Why no port is usable; `None` if one is.
    pub(crate) no_port: Option<String>,
}

impl Client {
    pub(crate) fn of(inventory: &Inventory, addresses: &Addresses) -> Self {
        let assessed = inventory.rdma.iter().flat_map(|device| {
            let assess = |port| inventory::assess(device, port, &inventory.netdevs, addresses).unusable;
            device.ports.iter().map(move |port| (format!("{}/{}", device.name, port.number), assess(port)))
        });
        let mut no_port = Some("the node has no RDMA device".to_owned());
        for (n, (name, unusable)) in assessed.enumerate() {
            match unusable {
                None => {
                    no_port = None;
                    break;
                }
                Some(why) if n == 0 => {
                    no_port = Some(format!("no RDMA port of the node is usable; {name}: {why}"))
                }
                Some(_) => {}
            }
        }
        Self { smb_direct: inventory.kernel.cifs_smb_direct, no_port }
    }
}

/// How a volume is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) over: Over,
    /// Why RDMA is not used, unless the volume itself rules it out.
    pub(crate) why: Option<String>,
    /// The server accepts RDMA, but the node cannot use it.
    pub(crate) is_less: bool,
}

/// The transports to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    Tcp,
    Rdma,
    /// RDMA, and TCP if the RDMA mount fails.
    RdmaOrTcp,
}

impl Choice {
    pub(crate) fn tcp() -> Self {
        Self { over: Over::Tcp, why: None, is_less: false }
    }

    pub(crate) fn short_of(why: String) -> Self {
        Self { over: Over::Tcp, why: Some(why), is_less: true }
    }
}

/// The decision that needs no inspection of the node. `None` if the node decides.
pub(crate) fn by_server(
    wanted: Transport,
    options: &MountOptions,
    served: &Served,
) -> Result<Option<Choice>, Error> {
    let tcp = |why: &str| Ok(Some(Choice { over: Over::Tcp, why: Some(why.to_owned()), is_less: false }));
    match (wanted, served) {
        (Transport::Tcp, _) => Ok(Some(Choice::tcp())),
        (Transport::Auto, _) if is_protected(options) => tcp("the volume is signed or sealed"),
        (Transport::Auto, Served::Unknown) => tcp("it is unknown whether the server accepts RDMA"),
        (Transport::Rdma, Served::Unknown) => Ok(None),
        (_, Served::Instance { transports, port, is_protected }) => {
            let why = if *is_protected {
                "the StorageCluster requires every session to be signed or sealed".to_owned()
            } else if !transports.iter().any(|t| t == "RDMA") {
                format!(
                    "the server accepts only {}, according to its StorageCluster's status",
                    or_nothing(transports)
                )
            } else if *port != RDMA_PORT {
                format!("the server's port is {port}, but clients use only port {RDMA_PORT} for RDMA")
            } else {
                return Ok(None);
            };
            match wanted {
                Transport::Rdma => Err(refused(&why)),
                _ => tcp(&why),
            }
        }
    }
}

fn or_nothing(transports: &[String]) -> String {
    if transports.is_empty() { "no connections yet, or TCP".to_owned() } else { transports.join(", ") }
}

fn refused(why: &str) -> Error {
    Error::Refused(format!("the volume must be mounted over RDMA (transport rdma): {why}"))
}

/// The decision for a server that accepts RDMA. `client` is `Err` if the node could not be inspected.
pub(crate) fn by_client(wanted: Transport, client: Result<&Client, &str>) -> Result<Choice, Error> {
    let missing = match client {
        Err(why) => Some(why.to_owned()),
        Ok(client) => match (client.smb_direct, &client.no_port) {
            (Presence::No, _) => Some(
                "the kernel's SMB client is built without SMB Direct (CONFIG_CIFS_SMB_DIRECT)".to_owned(),
            ),
            (_, Some(why)) => Some(why.clone()),
            // If RDMA is required, the kernel's result of the mount decides.
            (Presence::Unknown, None) if wanted == Transport::Auto => {
                Some("it is unknown whether the kernel's SMB client has SMB Direct".to_owned())
            }
            (_, None) => None,
        },
    };
    match (wanted, missing) {
        (Transport::Rdma, Some(why)) => Err(refused(&why)),
        (_, Some(why)) => Ok(Choice::short_of(why)),
        (Transport::Auto, None) => Ok(Choice { over: Over::RdmaOrTcp, why: None, is_less: false }),
        (_, None) => Ok(Choice { over: Over::Rdma, why: None, is_less: false }),
    }
}

#[cfg(test)]
mod tests {
    use forebay_proto::admin::Protection;
    use tonic::{Code, Status};

    use super::*;

    fn options(protection: Protection, flags: &[&str]) -> MountOptions {
        let flags: Vec<String> = flags.iter().map(|f| (*f).to_owned()).collect();
        MountOptions::build("3.1.1", protection, None, &flags).expect("options")
    }

    fn plain() -> MountOptions {
        options(Protection::Optional, &[])
    }

    fn instance(transports: &[&str]) -> Served {
        let transports = transports.iter().map(|t| (*t).to_owned()).collect();
        Served::Instance { transports, port: 445, is_protected: false }
    }

    #[test]
    fn signed_or_sealed_volumes_do_not_use_rdma() {
        for options in [
            options(Protection::Seal, &[]),
            options(Protection::Sign, &[]),
            options(Protection::Optional, &["seal"]),
        ] {
            let error = Transport::Rdma.with(&options).expect_err("refused");
            assert_eq!(Status::from(error).code(), Code::InvalidArgument);
            assert_eq!(Transport::Auto.with(&options).expect("TCP does"), Transport::Auto);
            let choice = by_server(Transport::Auto, &options, &instance(&["TCP", "RDMA"])).expect("a choice");
            assert_eq!(choice.expect("decided").over, Over::Tcp);
        }
        assert!(Transport::Auto.with(&options(Protection::Optional, &["rdma", "sign"])).is_err());
        let mut served = instance(&["RDMA", "TCP"]);
        if let Served::Instance { is_protected, .. } = &mut served {
            *is_protected = true;
        }
        assert_eq!(
            by_server(Transport::Auto, &plain(), &served).expect("TCP").map(|c| c.over),
            Some(Over::Tcp)
        );
        assert!(by_server(Transport::Rdma, &plain(), &served).is_err());
    }

    #[test]
    fn rdma_mount_option_equals_transport_rdma() {
        let options = options(Protection::Optional, &["rdma"]);
        assert_eq!(Transport::Auto.with(&options).expect("asked for"), Transport::Rdma);
        assert_eq!(Transport::Rdma.with(&options).expect("asked for"), Transport::Rdma);
        assert!(Transport::Tcp.with(&options).is_err());
    }

    #[test]
    fn server_without_rdma_leads_to_tcp_or_an_error() {
        let mut elsewhere = instance(&["RDMA", "TCP"]);
        if let Served::Instance { port, .. } = &mut elsewhere {
            *port = 1445;
        }
        for (served, part) in [
            (instance(&["TCP"]), "accepts only TCP"),
            (instance(&[]), "no connections yet"),
            (elsewhere, "port is 1445"),
        ] {
            let choice = by_server(Transport::Auto, &plain(), &served).expect("TCP").expect("decided");
            assert_eq!((choice.over, choice.is_less), (Over::Tcp, false));
            assert!(choice.why.as_ref().is_some_and(|why| why.contains(part)), "{choice:?}");
            let status = Status::from(by_server(Transport::Rdma, &plain(), &served).expect_err("refused"));
            assert_eq!(status.code(), Code::FailedPrecondition);
            assert!(status.message().contains(part), "{status}");
        }
        let both = instance(&["RDMA", "TCP"]);
        for wanted in [Transport::Auto, Transport::Rdma] {
            assert_eq!(by_server(wanted, &plain(), &both).expect("the node decides"), None);
        }
        assert_eq!(by_server(Transport::Tcp, &plain(), &both).expect("TCP"), Some(Choice::tcp()));
        assert_eq!(by_server(Transport::Rdma, &plain(), &Served::Unknown).expect("it is tried"), None);
        let choice = by_server(Transport::Auto, &plain(), &Served::Unknown).expect("TCP").expect("decided");
        assert_eq!(choice.over, Over::Tcp);
    }

    #[test]
    fn node_without_rdma_uses_tcp_or_fails_with_the_cause() {
        let client =
            |smb_direct, no_port: Option<&str>| Client { smb_direct, no_port: no_port.map(str::to_owned) };
        for (client, part) in [
            (client(Presence::No, None), "CONFIG_CIFS_SMB_DIRECT"),
            (client(Presence::Yes, Some("the node has no RDMA device")), "no RDMA device"),
        ] {
            let choice = by_client(Transport::Auto, Ok(&client)).expect("TCP");
            assert_eq!((choice.over, choice.is_less), (Over::Tcp, true));
            assert!(choice.why.as_ref().is_some_and(|why| why.contains(part)), "{choice:?}");
            let status = Status::from(by_client(Transport::Rdma, Ok(&client)).expect_err("refused"));
            assert_eq!(status.code(), Code::FailedPrecondition);
            assert!(status.message().contains(part), "{status}");
        }
        let able = client(Presence::Yes, None);
        assert_eq!(by_client(Transport::Auto, Ok(&able)).expect("RDMA").over, Over::RdmaOrTcp);
        assert_eq!(by_client(Transport::Rdma, Ok(&able)).expect("RDMA").over, Over::Rdma);
        let perhaps = client(Presence::Unknown, None);
        assert_eq!(by_client(Transport::Auto, Ok(&perhaps)).expect("TCP").over, Over::Tcp);
        assert_eq!(by_client(Transport::Rdma, Ok(&perhaps)).expect("tried").over, Over::Rdma);
        assert_eq!(
            by_client(Transport::Auto, Err("it hangs")).expect("TCP").why.as_deref(),
            Some("it hangs")
        );
        assert!(by_client(Transport::Rdma, Err("it hangs")).is_err());
    }

    #[test]
    fn one_usable_port_suffices_and_unusable_ports_are_explained() {
        let port = |state: &str| inventory::RdmaPort {
            number: 1,
            link_layer: inventory::LinkLayer::Ethernet,
            state: state.into(),
            physical_state: "LinkUp".into(),
            rate_mbps: 100_000,
            netdevs: vec!["e0".into()],
        };
        let device = |ports: &[&str]| inventory::RdmaDevice {
            name: "mlx5_0".into(),
            driver: None,
            board: None,
            firmware: None,
            transport: inventory::Transport::InfiniBand,
            software: false,
            numa_node: None,
            ports: ports.iter().map(|state| port(state)).collect(),
        };
        let netdev = inventory::Netdev {
            name: "e0".into(),
            operstate: "up".into(),
            enabled: true,
            ..Default::default()
        };
        let addresses = Addresses::from([("e0".to_owned(), vec!["10.0.0.1".parse().expect("an address")])]);
        let of = |rdma: Vec<inventory::RdmaDevice>| {
            let found = Inventory { rdma, netdevs: vec![netdev.clone()], ..Inventory::default() };
            Client::of(&found, &addresses).no_port
        };
        assert_eq!(of(vec![device(&["DOWN", "ACTIVE"])]), None);
        assert_eq!(of(vec![]).as_deref(), Some("the node has no RDMA device"));
        let why = of(vec![device(&["DOWN", "DOWN"])]).expect("none");
        assert!(why.contains("mlx5_0/1") && why.contains("DOWN"), "{why}");
    }
}
