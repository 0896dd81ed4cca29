//! Addresses of a volume's servers: `host`, `host:port`, `[v6]:port`, or a comma-separated list of them.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use crate::error::Error;
use crate::limits::{ADDRESSES_BYTES_MAX, ADDRESSES_MAX};

/// The port of SMB over TCP ([MS-SMB2] 2.1).
const SMB_PORT: u16 = 445;

/// Longest DNS name (RFC 1035 2.3.4).
const HOST_BYTES_MAX: usize = 253;

/// One address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerAddress {
    /// A name or an IP address without brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl ServerAddress {
    /// Whether it names no particular host (0.0.0.0 or ::), so it cannot be mounted.
    pub(crate) fn is_unspecified(&self) -> bool {
        self.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified())
    }
}

impl FromStr for ServerAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (host, after) = rest.split_once(']').ok_or_else(|| format!("{text:?} lacks a ]"))?;
            let port = match after {
                "" => None,
                _ => Some(after.strip_prefix(':').ok_or_else(|| format!("{text:?} is not an address"))?),
            };
            host.parse::<Ipv6Addr>().map_err(|_| format!("{host:?} is not an IPv6 address"))?;
            (host, port)
        } else if text.parse::<Ipv6Addr>().is_ok() {
            (text, None)
        } else {
            match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            }
        };
        let port = match port {
            None => SMB_PORT,
            Some(port) => {
                port.parse().ok().filter(|&p| p != 0).ok_or_else(|| format!("{port:?} is not a port"))?
            }
        };
        // A host becomes part of //host/share, so it must not contain characters that act as separators there.
        let usable = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
        let is_v6 = host.parse::<Ipv6Addr>().is_ok();
        if host.is_empty() || host.len() > HOST_BYTES_MAX || !(is_v6 || host.bytes().all(usable)) {
            return Err(format!("{host:?} is neither a host name nor an IP address"));
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Parses a comma-separated list.
pub(crate) fn parse_list(field: &'static str, text: &str) -> Result<Vec<ServerAddress>, Error> {
    let addresses = text
        .split(',')
        .map(|part| part.trim().parse())
        .collect::<Result<Vec<ServerAddress>, String>>()
        .map_err(|reason| Error::invalid(field, reason))?;
    if addresses.len() > ADDRESSES_MAX || format_list(&addresses).len() > ADDRESSES_BYTES_MAX {
        let reason = format!("more than {ADDRESSES_MAX} addresses or {ADDRESSES_BYTES_MAX} bytes");
        return Err(Error::invalid(field, reason));
    }
    Ok(addresses)
}

/// The list as one string.
pub(crate) fn format_list(addresses: &[ServerAddress]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_lists_are_parsed_and_formatted() {
        for (text, written) in [
            ("10.0.0.1", "10.0.0.1:445"),
            ("10.0.0.1:1445", "10.0.0.1:1445"),
            ("fb-0.storage.svc:445", "fb-0.storage.svc:445"),
            ("fd00::1", "[fd00::1]:445"),
            ("[fd00::1]:4450, a", "[fd00::1]:4450,a:445"),
        ] {
            assert_eq!(format_list(&parse_list("server", text).expect(text)), written);
        }
    }

    #[test]
    fn invalid_address_lists_are_refused() {
        for text in [
            "", "a,", "a:b", "a:0", "a:70000", "a/b", "a\\b", "a,b c", "[fd00::1", "[a]:1", "[::1]x",
            "a:1:2", "a@b",
        ] {
            assert!(parse_list("server", text).is_err(), "{text:?}");
        }
        assert!(parse_list("server", &vec!["a"; ADDRESSES_MAX + 1].join(",")).is_err());
        assert!(parse_list("server", &vec!["a".repeat(250); 5].join(",")).is_err());
    }

    #[test]
    fn unspecified_addresses_are_detected() {
        for (text, is) in [("0.0.0.0:445", true), ("[::]:445", true), ("10.0.0.1", false), ("host", false)] {
            assert_eq!(text.parse::<ServerAddress>().expect(text).is_unspecified(), is);
        }
    }
}
