//! The parameters of a StorageClass.

use std::collections::{BTreeMap, HashMap};

use forebay_proto::admin::{Protection, Quota};

use crate::address::{self, ServerAddress};
use crate::error::Error;
use crate::limits::MAP_BYTES_MAX;

/// What the sidecars add with `--extra-create-metadata`; kept as labels of the volume.
const METADATA_PREFIX: &str = "csi.storage.k8s.io/";

const KNOWN: &str =
    "pool, quota (hard or none), protection (optional, sign or seal), server, csi.storage.k8s.io/*";

/// Checked parameters; `None` and `Unspecified` leave the choice to the server.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Parameters {
    pub(crate) pool: Option<String>,
    pub(crate) quota: Quota,
    pub(crate) protection: Protection,
    /// Instead of the addresses that the server advertises.
    pub(crate) server: Option<Vec<ServerAddress>>,
    pub(crate) labels: BTreeMap<String, String>,
}

impl Parameters {
    pub(crate) fn parse(map: &HashMap<String, String>) -> Result<Self, Error> {
        check_size("parameters", map)?;
        let mut parameters = Self::default();
        for (key, value) in map {
            match key.as_str() {
                "pool" => {
                    if value.is_empty() {
                        return Err(Error::invalid("parameter pool", "is empty"));
                    }
                    parameters.pool = Some(value.clone());
                }
                "quota" => {
                    parameters.quota = match value.as_str() {
                        "hard" => Quota::Hard,
                        "none" => Quota::None,
                        _ => return Err(Error::invalid("parameter quota", "neither hard nor none")),
                    }
                }
                "protection" => {
                    parameters.protection = protection_from(value).ok_or_else(|| {
                        Error::invalid("parameter protection", "none of optional, sign and seal")
                    })?;
                }
                "server" => parameters.server = Some(address::parse_list("parameter server", value)?),
                _ if key.starts_with(METADATA_PREFIX) => {
                    parameters.labels.insert(key.clone(), value.clone());
                }
                _ => return Err(Error::UnknownParameter { key: key.clone(), known: KNOWN }),
            }
        }
        Ok(parameters)
    }
}

/// CSI: a map's keys and values have a common limit.
pub(crate) fn check_size(field: &'static str, map: &HashMap<String, String>) -> Result<(), Error> {
    let bytes: usize = map.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > MAP_BYTES_MAX {
        return Err(Error::invalid(field, format!("{bytes} bytes are more than {MAP_BYTES_MAX}")));
    }
    Ok(())
}

/// Reads the word that parameters and volume contexts use.
pub(crate) fn protection_from(word: &str) -> Option<Protection> {
    match word {
        "optional" => Some(Protection::Optional),
        "sign" => Some(Protection::Sign),
        "seal" => Some(Protection::Seal),
        _ => None,
    }
}

/// The word for it; what the server leaves open is optional for a client.
pub(crate) fn protection_word(protection: Protection) -> &'static str {
    match protection {
        Protection::Unspecified | Protection::Optional => "optional",
        Protection::Sign => "sign",
        Protection::Seal => "seal",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Parameters, Error> {
        Parameters::parse(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    }

    #[test]
    fn known_parameters_are_read() {
        let parameters = parse(&[
            ("pool", "fast"),
            ("quota", "none"),
            ("protection", "seal"),
            ("server", "a:1,b"),
            ("csi.storage.k8s.io/pvc/name", "data"),
        ])
        .expect("known");
        assert_eq!(parameters.pool.as_deref(), Some("fast"));
        assert_eq!((parameters.quota, parameters.protection), (Quota::None, Protection::Seal));
        assert_eq!(parameters.server.expect("given").len(), 2);
        assert_eq!(parameters.labels["csi.storage.k8s.io/pvc/name"], "data");
        assert_eq!(parse(&[]).expect("nothing to refuse"), Parameters::default());
    }

    #[test]
    fn unknown_parameters_are_named_with_the_known_ones() {
        let message = parse(&[("Pool", "x")]).expect_err("unknown").to_string();
        assert!(
            message.contains("\"Pool\"") && message.contains("protection (optional, sign or seal)"),
            "{message}"
        );
    }

    #[test]
    fn bad_values_are_refused() {
        let long = "x".repeat(5000);
        for pair in [
            ("pool", ""),
            ("quota", "soft"),
            ("protection", "SEAL"),
            ("server", "a/b"),
            ("csi.storage.k8s.io/pvc/name", &*long),
        ] {
            let status = tonic::Status::from(parse(&[pair]).expect_err(pair.0));
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{pair:?}");
        }
    }
}
