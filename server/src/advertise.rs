//! Selects the addresses that are announced to clients for mounting.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use serde::Deserialize;

use crate::limits::INTERFACE_NAME_BYTES_MAX;

/// One entry of `server.advertise`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Advertised {
    /// Used unchanged: "host:port", "ip:port".
    Literal(String),
    /// This machine's addresses in a network: address and prefix length.
    Network(IpAddr, u8),
    /// The addresses of an interface.
    Interface(String),
}

/// One address of one of this machine's interfaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    /// Name of the interface.
    pub interface: String,
    /// Address.
    pub address: IpAddr,
}

impl FromStr for Advertised {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(name) = text.strip_prefix("interface:") {
            let right =
                !name.is_empty() && name.len() <= INTERFACE_NAME_BYTES_MAX && !name.contains(['/', ' ']);
            let wrong = || format!("{name:?} is no name of an interface");
            return right.then(|| Self::Interface(name.to_owned())).ok_or_else(wrong);
        }
        if let Some((address, length)) = text.split_once('/') {
            let wrong =
                || format!("{text:?} is no network: it must be like \"10.1.0.0/16\" or \"fd00:1::/32\"");
            let address: IpAddr = address.parse().map_err(|_| wrong())?;
            let length: u8 = length.parse().map_err(|_| wrong())?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            return if length <= most { Ok(Self::Network(address, length)) } else { Err(wrong()) };
        }
        if text.is_empty() || text.contains(char::is_whitespace) {
            return Err(format!("{text:?} is no address"));
        }
        Ok(Self::Literal(text.to_owned()))
    }
}

impl<'de> Deserialize<'de> for Advertised {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl std::fmt::Display for Advertised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Literal(text) => f.write_str(text),
            Self::Network(address, length) => write!(f, "{address}/{length}"),
            Self::Interface(name) => write!(f, "interface:{name}"),
        }
    }
}

impl Advertised {
    /// One address of this machine.
    #[must_use]
    pub fn address(address: IpAddr) -> Self {
        Self::Network(address, if address.is_ipv4() { 32 } else { 128 })
    }

    /// Whether it selects among this machine's addresses.
    #[must_use]
    pub fn chooses(&self) -> bool {
        !matches!(self, Self::Literal(_))
    }

    /// Whether it selects this address.
    #[must_use]
    pub fn takes(&self, local: &Local) -> bool {
        match self {
            Self::Literal(_) => false,
            Self::Network(network, length) => contains(*network, *length, local.address),
            Self::Interface(name) => *name == local.interface,
        }
    }
}

fn contains(network: IpAddr, length: u8, address: IpAddr) -> bool {
    match (network, address) {
        (IpAddr::V4(n), IpAddr::V4(a)) => {
            let shift = 32 - u32::from(length);
            (n.to_bits() ^ a.to_bits()).checked_shr(shift).unwrap_or(0) == 0
        }
        (IpAddr::V6(n), IpAddr::V6(a)) => {
            let shift = 128 - u32::from(length);
            (n.to_bits() ^ a.to_bits()).checked_shr(shift).unwrap_or(0) == 0
        }
        _ => false,
    }
}

/// The addresses to mount, and the entries that match no address of this machine that a client could reach. `listening` are
/// the SMB addresses.
#[must_use]
pub fn resolve<'a>(
    entries: &'a [Advertised],
    locals: &[Local],
    listening: &[SocketAddr],
) -> (Vec<String>, Vec<&'a Advertised>) {
    if entries.is_empty() {
        return (listening.iter().map(ToString::to_string).collect(), Vec::new());
    }
    let mut found = Vec::new();
    let mut empty = Vec::new();
    for entry in entries {
        let texts: Vec<String> = match entry {
            Advertised::Literal(text) => vec![text.clone()],
            _ => {
                let taken = locals.iter().filter(|l| entry.takes(l));
                let offered = taken.filter_map(|l| {
                    let port = listener(l.address, listening)?.port();
                    Some(SocketAddr::new(l.address, port).to_string())
                });
                offered.collect()
            }
        };
        if texts.is_empty() {
            empty.push(entry);
        }
        for text in texts {
            if !found.contains(&text) {
                found.push(text);
            }
        }
    }
    (found, empty)
}

/// The entry of `listening` that accepts clients of a local address, if that address may be announced to clients. Clients on
/// other machines cannot use link-local addresses, which are never announced, or loopback addresses, which are announced
/// only if all listeners are on loopback.
pub(crate) fn listener(address: IpAddr, listening: &[SocketAddr]) -> Option<SocketAddr> {
    let only_loopback = listening.iter().all(|l| l.ip().is_loopback());
    if is_link_local(address) || address.is_loopback() && !only_loopback {
        return None;
    }
    let by_name = listening.iter().find(|l| l.ip() == address);
    let by_any = || {
        listening.iter().find(|l| match l.ip() {
            IpAddr::V4(any) => any.is_unspecified() && address.is_ipv4(),
            // Dual-stack: "[::]" accepts IPv4 too.
            IpAddr::V6(any) => any.is_unspecified(),
        })
    };
    by_name.or_else(by_any).copied()
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(a) => a.is_link_local(),
        IpAddr::V6(a) => a.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(texts: &[&str]) -> Vec<Advertised> {
        texts.iter().map(|text| text.parse().expect("an entry")).collect()
    }

    fn locals() -> Vec<Local> {
        [
            ("lo", "127.0.0.1"),
            ("eth0", "192.0.2.7"),
            ("eth1", "10.1.4.2"),
            ("eth1", "fd00:1::2"),
            ("eth1", "fe80::2"),
        ]
        .map(|(interface, a)| Local {
            interface: interface.to_owned(),
            address: a.parse().expect("an address"),
        })
        .to_vec()
    }

    #[test]
    fn networks_and_interfaces_select_local_addresses() {
        let listening = ["[::]:445".parse().expect("an address")];
        let of = |texts: &[&str]| resolve(&entries(texts), &locals(), &listening).0;
        assert_eq!(of(&[]), ["[::]:445"]);
        assert_eq!(of(&["storage.example:1445"]), ["storage.example:1445"]);
        assert_eq!(of(&["10.0.0.0/8"]), ["10.1.4.2:445"]);
        assert_eq!(of(&["10.1.4.2/32", "10.1.0.0/16"]), ["10.1.4.2:445"]);
        assert_eq!(of(&["interface:eth1"]), ["10.1.4.2:445", "[fd00:1::2]:445"]);
        assert_eq!(of(&["0.0.0.0/0"]), ["192.0.2.7:445", "10.1.4.2:445"]);
        assert_eq!(of(&["fd00::/16"]), ["[fd00:1::2]:445"]);
    }

    #[test]
    fn each_address_is_advertised_with_the_port_of_its_listener() {
        let of = |entry: &str, listening: &[&str]| {
            let listening: Vec<SocketAddr> =
                listening.iter().map(|l| l.parse().expect("an address")).collect();
            let (entries, locals) = (entries(&[entry]), locals());
            let (found, empty) = resolve(&entries, &locals, &listening);
            assert_eq!(empty.is_empty(), !found.is_empty());
            found
        };
        let two = ["192.0.2.7:1445", "10.1.4.2:2445"];
        assert_eq!(of("0.0.0.0/0", &two), ["192.0.2.7:1445", "10.1.4.2:2445"]);
        assert_eq!(of("interface:eth1", &two), ["10.1.4.2:2445"], "nothing listens on its IPv6");
        assert_eq!(of("interface:eth1", &["192.0.2.7:445"]), Vec::<String>::new());
        assert_eq!(
            of("interface:eth1", &["0.0.0.0:445", "10.1.4.2:2445"]),
            ["10.1.4.2:2445"],
            "by name first"
        );
        assert_eq!(of("::/0", &["0.0.0.0:445"]), Vec::<String>::new());
        assert_eq!(of("interface:lo", &["127.0.0.1:0"]), ["127.0.0.1:0"]);
        assert_eq!(of("interface:lo", &["127.0.0.1:445", "192.0.2.7:445"]), Vec::<String>::new());
    }

    #[test]
    fn entries_without_a_matching_address_are_reported() {
        let entries = entries(&["10.2.0.0/16", "interface:eth9", "interface:eth0"]);
        let (found, empty) = resolve(&entries, &locals(), &["0.0.0.0:1445".parse().expect("an address")]);
        assert_eq!(found, ["192.0.2.7:1445"]);
        assert_eq!(
            empty.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["10.2.0.0/16", "interface:eth9"]
        );
    }

    #[test]
    fn malformed_entries_are_rejected() {
        for bad in ["", "a b", "10.0.0.0/33", "10.0.0/8", "fd00::/129", "interface:", "interface:a/b", "x/8"]
        {
            assert!(bad.parse::<Advertised>().is_err(), "{bad}");
        }
    }
}
