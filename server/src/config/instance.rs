//! `[instance]`: the identity of this server on any host.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::Deserialize;

use super::is_label;
use crate::limits::{CLUSTER_UID_BYTES_MAX, INSTANCE_ADDRESSES_MAX, INTERFACE_NAME_BYTES_MAX};

/// `[instance]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct InstanceSection {
    /// Name of this instance; empty for none.
    pub name: String,
    /// Increases with each start on any host.
    pub epoch: u64,
    /// The UID of its cluster: another cluster may have an instance of the same name. Empty for none.
    pub cluster_uid: String,
    /// Seconds after which a silent node is taken over; 0 if no other node does that automatically.
    pub takeover_after_s: u32,
    /// The instance's own addresses, which move with it.
    pub addresses: Vec<InstanceAddress>,
    /// The interface that gets them; empty to use the interfaces that have their networks.
    pub interface: String,
}

/// An address with the length of its network's prefix, for example `192.168.77.200/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InstanceAddress {
    ip: IpAddr,
    prefix: u8,
}

impl InstanceAddress {
    /// `None` if the prefix is invalid.
    #[must_use]
    pub fn new(ip: IpAddr, prefix: u8) -> Option<Self> {
        (prefix <= bits(ip)).then_some(Self { ip, prefix })
    }

    /// The address.
    #[must_use]
    pub fn ip(self) -> IpAddr {
        self.ip
    }

    /// Length of its network's prefix.
    #[must_use]
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// Whether `other` is in its network.
    #[must_use]
    pub fn has_in_network(self, other: IpAddr) -> bool {
        match (self.ip, other) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                (a.to_bits() ^ b.to_bits()).checked_shr(32 - u32::from(self.prefix)).unwrap_or(0) == 0
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                (a.to_bits() ^ b.to_bits()).checked_shr(128 - u32::from(self.prefix)).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

/// Number of bits of an address of this family.
fn bits(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 32 } else { 128 }
}

impl FromStr for InstanceAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('/').and_then(|(ip, prefix)| {
            // Only the canonical form: no sign, no leading zeros.
            let prefix: u8 = prefix.parse().ok().filter(|number: &u8| number.to_string() == prefix)?;
            Self::new(ip.parse().ok()?, prefix)
        });
        let found = parsed.ok_or_else(|| {
            format!("{text:?} is not an address with a prefix length, like \"192.168.77.200/24\"")
        })?;
        let ip = found.ip;
        let link_local = match ip {
            IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
            IpAddr::V6(ip) => ip.is_unicast_link_local() || ip.to_ipv4_mapped().is_some(),
        };
        if found.prefix == 0 || ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || link_local {
            return Err(format!("{text:?} is not an address that clients on a network can reach"));
        }
        Ok(found)
    }
}

impl<'de> Deserialize<'de> for InstanceAddress {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl fmt::Display for InstanceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix)
    }
}

impl InstanceSection {
    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        let wrong = |key, message: String| Err((key, message));
        if !self.name.is_empty() && !is_label(&self.name) {
            return wrong(
                "name",
                "must be 1 to 63 characters from a-z, 0-9 and '-', and begin and end with a letter or digit"
                    .to_owned(),
            );
        }
        if self.cluster_uid.len() > CLUSTER_UID_BYTES_MAX || self.cluster_uid.chars().any(char::is_control) {
            return wrong(
                "cluster_uid",
                format!("must be at most {CLUSTER_UID_BYTES_MAX} bytes without control characters"),
            );
        }
        if self.addresses.len() > INSTANCE_ADDRESSES_MAX {
            return wrong("addresses", format!("must be at most {INSTANCE_ADDRESSES_MAX} addresses"));
        }
        for (nth, address) in self.addresses.iter().enumerate() {
            if self.addresses[..nth].iter().any(|other| other.ip() == address.ip()) {
                return wrong("addresses", format!("{} is listed twice", address.ip()));
            }
        }
        if !self.addresses.is_empty() && self.name.is_empty() {
            return wrong("addresses", "an instance with addresses needs instance.name".to_owned());
        }
        let interface = &self.interface;
        if interface.len() > INTERFACE_NAME_BYTES_MAX || interface.contains(['/', ' ']) {
            return wrong("interface", format!("{interface:?} is not the name of an interface"));
        }
        if self.addresses.is_empty() && !interface.is_empty() {
            return wrong("interface", "needs instance.addresses".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    const POOL: &str = "[[pool]]\nname = \"p\"\npath = \"/p\"\n";

    fn error(lines: &str) -> String {
        let text = format!("[instance]\nname = \"fast-0\"\n{lines}{POOL}");
        Config::parse("server.toml", &text).expect_err("it is wrong").to_string()
    }

    #[test]
    fn instance_addresses_require_a_prefix_and_must_be_usable() {
        let address = |text: &str| text.parse::<InstanceAddress>();
        let one = address("192.168.77.200/24").expect("an address");
        assert_eq!((one.to_string().as_str(), one.prefix()), ("192.168.77.200/24", 24));
        assert!(one.has_in_network("192.168.77.2".parse().expect("one")));
        assert!(!one.has_in_network("192.168.78.2".parse().expect("one")));
        assert!(!one.has_in_network("fd00::1".parse().expect("one")));
        let six = address("fd00:1::200/64").expect("an address");
        assert!(six.has_in_network("fd00:1::7".parse().expect("one")));
        assert!(!six.has_in_network("fd00:2::7".parse().expect("one")));
        for bad in [
            "",
            "192.168.77.200",
            "192.168.77.200/33",
            "192.168.77.200/024",
            "fd00::1/129",
            "x/8",
            "10.0.0.1/+8",
        ] {
            assert!(address(bad).is_err(), "{bad}");
        }
        for unusable in [
            "0.0.0.0/8",
            "127.0.0.1/8",
            "224.0.0.1/4",
            "169.254.1.1/16",
            "fe80::1/64",
            "::1/128",
            "::ffff:10.0.0.1/120",
            "10.0.0.1/0",
        ] {
            assert!(address(unusable).is_err(), "{unusable}");
        }
    }

    #[test]
    fn invalid_instance_settings_are_reported_with_their_line() {
        assert!(error("addresses = [\"10.0.0.1\"]\n").starts_with("server.toml:3: "));
        let twice = error("addresses = [\"10.0.0.1/24\", \"10.0.0.1/16\"]\n");
        assert_eq!(twice, "server.toml:3: instance.addresses: 10.0.0.1 is listed twice");
        assert!(error("interface = \"eth1\"\n").contains("instance.interface: needs instance.addresses"));
        assert!(error("addresses = [\"10.0.0.1/24\"]\ninterface = \"a/b\"\n").starts_with("server.toml:4: "));
        let listened = error("addresses = [\"10.0.0.1/24\"]\n[server]\nlisten = [\"10.0.0.1:445\"]\n");
        assert!(
            listened.starts_with("server.toml:5: server.listen: 10.0.0.1 is assigned only while"),
            "{listened}"
        );
        let nameless =
            Config::parse("server.toml", &format!("[instance]\naddresses = [\"10.0.0.1/24\"]\n{POOL}"));
        assert!(nameless.expect_err("it has no name").to_string().contains("needs instance.name"));
    }
}
