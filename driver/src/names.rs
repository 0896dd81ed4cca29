//! Maps the name that the orchestrator gives a volume to its ID on the server.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::limits::{NAME_BYTES_MAX, VOLUME_ID_BYTES_MAX};

/// Prefix of IDs that are hashes.
const HASHED_PREFIX: &str = "fb-";

/// Bytes of SHA-256 in a hashed ID: 160 bits rule out accidental collisions.
const HASH_BYTES: usize = 20;

/// The ID of a volume: 1..=63 of `[a-z0-9-]`, with a letter or digit at both ends. It is also the share's name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct VolumeId(String);

impl VolumeId {
    /// The ID of the volume named `name`: the name itself if it is a valid ID, otherwise its hash. The same name always yields
    /// the same ID, which makes CreateVolume idempotent.
    pub(crate) fn from_name(name: &str) -> Result<Self, Error> {
        if name.is_empty() {
            return Err(Error::Missing("name"));
        }
        if name.len() > NAME_BYTES_MAX {
            return Err(Error::invalid(
                "name",
                format!("{} bytes are more than the {NAME_BYTES_MAX} that CSI allows", name.len()),
            ));
        }
        // CSI CreateVolumeRequest.name: the control characters it forbids.
        if let Some(bad) = name.chars().find(|&c| is_forbidden(c)) {
            return Err(Error::invalid("name", format!("character U+{:04X} is not allowed", u32::from(bad))));
        }
        // A name that looks like a hashed ID is hashed as well, so it cannot collide with another name's hash.
        if is_valid(name) && !name.starts_with(HASHED_PREFIX) {
            return Ok(Self(name.to_owned()));
        }
        Ok(Self::hashed(name))
    }

    /// The ID of the snapshot of one volume in the group named `group`: a hash, so that it cannot collide with the ID of a
    /// volume or snapshot that has its name.
    pub(crate) fn of_member(group: &str, volume_id: &str) -> Self {
        Self::hashed(&format!("{group}\0{volume_id}"))
    }

    fn hashed(name: &str) -> Self {
        let digest = Sha256::digest(name.as_bytes());
        let hex: String = digest.iter().take(HASH_BYTES).map(|b| format!("{b:02x}")).collect();
        Self(format!("{HASHED_PREFIX}{hex}"))
    }

    /// Parses an ID from the orchestrator. `None` if no volume can have it.
    pub(crate) fn parse(id: &str) -> Option<Self> {
        is_valid(id).then(|| Self(id.to_owned()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_valid(id: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = id.as_bytes();
    match (bytes.first(), bytes.last()) {
        (Some(&first), Some(&last)) => {
            bytes.len() <= VOLUME_ID_BYTES_MAX
                && alphanumeric(first)
                && alphanumeric(last)
                && bytes.iter().all(|&b| alphanumeric(b) || b == b'-')
        }
        _ => false,
    }
}

fn is_forbidden(c: char) -> bool {
    matches!(c, '\u{0}'..='\u{8}' | '\u{b}' | '\u{c}' | '\u{e}'..='\u{1f}' | '\u{7f}'..='\u{9f}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(name: &str) -> String {
        VolumeId::from_name(name).expect("a usable name").0
    }

    #[test]
    fn valid_names_are_kept() {
        for name in ["a", "pvc-8b2c4f1e-0d0e-4ac3-9f3f-0f6f1f9e5a11", "0", &"x".repeat(63)] {
            assert_eq!(id(name), name);
        }
    }

    #[test]
    fn other_names_are_hashed_to_distinct_ids() {
        let long = "x".repeat(128);
        let names =
            ["A", "a", "a_b", "-a", "a-", "a.b", "volume name", "größe", "fb-0", &"x".repeat(64), &long];
        let mut ids: Vec<String> = names.iter().map(|n| id(n)).collect();
        assert!(ids.iter().filter(|i| i.starts_with("fb-")).count() == names.len() - 1, "{ids:?}");
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), names.len());
    }

    #[test]
    fn unusable_names_are_refused() {
        for (name, part) in [
            ("", "name is required"),
            (&*"x".repeat(200), "200 bytes"),
            ("a\u{7}b", "U+0007"),
            ("a\u{9f}", "U+009F"),
        ] {
            let error = VolumeId::from_name(name).expect_err(name);
            assert!(error.to_string().contains(part), "{error}");
            assert_eq!(tonic::Status::from(error).code(), tonic::Code::InvalidArgument);
        }
    }

    proptest! {
        #[test]
        fn ids_derived_from_names_are_valid_and_stable(name in "\\PC{1,32}") {
            let first = VolumeId::from_name(&name).expect("at most 128 bytes, no control characters");
            prop_assert!(VolumeId::parse(first.as_str()).is_some());
            prop_assert_eq!(first, VolumeId::from_name(&name).expect("as before"));
        }
    }
}
