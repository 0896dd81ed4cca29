//! NVMe Qualified Names (NVMe Base 4.7).

use std::fmt;
use std::str::FromStr;

use crate::limits::{NQN_BYTES_MAX, TEXT_CHARS_MAX};

/// The well-known name of every discovery service (NVMe Base 4.7, NVMe-oF 1.1 5).
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// The name of a subsystem or a host. It is valid as a value of a kernel option: it contains no commas, white space or control
/// characters.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nqn(String);

/// A text that is not a valid name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {what}")]
pub struct InvalidName {
    text: String,
    what: &'static str,
}

impl InvalidName {
    pub(crate) fn new(text: &str, what: &'static str) -> Self {
        Self { text: text.chars().take(TEXT_CHARS_MAX).collect(), what }
    }
}

impl Nqn {
    /// The name of every discovery service.
    #[must_use]
    pub fn discovery() -> Self {
        Self(DISCOVERY_NQN.into())
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Nqn {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let fits = text.len() <= NQN_BYTES_MAX && text.starts_with("nqn.") && is_option_value(text);
        if fits {
            Ok(Self(text.into()))
        } else {
            Err(InvalidName::new(
                text,
                "an NQN (nqn.YYYY-MM.domain:name, at most 223 bytes, no comma or space)",
            ))
        }
    }
}

/// Whether the kernel accepts this text, unmodified, as the value of an option.
pub(crate) fn is_option_value(text: &str) -> bool {
    !text.is_empty()
        && !text.contains([',', '\\'])
        && !text.chars().any(|c| c.is_whitespace() || c.is_control())
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_nqns_and_option_injection_are_rejected() {
        for text in
            ["", "nqn", "iqn.2014-08.org:x", "nqn.2014-08.org:a,tls", "nqn.2014-08.org:a b", "nqn.a\n"]
        {
            assert!(text.parse::<Nqn>().is_err(), "{text:?}");
        }
        assert!(format!("nqn.{}", "a".repeat(220)).parse::<Nqn>().is_err());
        assert!(format!("nqn.{}", "a".repeat(219)).parse::<Nqn>().is_ok());
        assert_eq!(DISCOVERY_NQN.parse(), Ok(Nqn::discovery()));
    }
}
