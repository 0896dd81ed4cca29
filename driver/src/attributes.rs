//! Attributes of a volume that can be changed while it is in use (CSI mutable_parameters): the parameters of a
//! VolumeAttributesClass.

use std::collections::HashMap;

use forebay_proto::admin::{Priority, Qos};

use crate::error::Error;
use crate::limits::{BYTES_PER_SECOND_MIN, OPERATIONS_PER_SECOND_MIN};
use crate::parameters::check_size;

const BYTES_PER_SECOND: &str = "bytesPerSecond";
const OPERATIONS_PER_SECOND: &str = "operationsPerSecond";
const PRIORITY: &str = "priority";
const KNOWN: &str = "bytesPerSecond (a quantity such as 500Mi; 0: no limit), operationsPerSecond (0: no limit), priority (low, \
                     normal or high)";

/// Checked attributes; unset ones remain unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes {
    bytes_per_second: Option<u64>,
    operations_per_second: Option<u64>,
    priority: Option<Priority>,
}

impl Attributes {
    pub(crate) fn parse(map: &HashMap<String, String>) -> Result<Self, Error> {
        check_size("mutable_parameters", map)?;
        let mut attributes = Self::default();
        for (key, value) in map {
            match key.as_str() {
                BYTES_PER_SECOND => {
                    let bytes = quantity(value).filter(|bytes| *bytes == 0 || *bytes >= BYTES_PER_SECOND_MIN);
                    let reason = "must be 0 or a quantity of at least 1Mi, such as 500Mi";
                    attributes.bytes_per_second =
                        Some(bytes.ok_or_else(|| Error::invalid("parameter bytesPerSecond", reason))?);
                }
                OPERATIONS_PER_SECOND => {
                    let count =
                        quantity(value).filter(|count| *count == 0 || *count >= OPERATIONS_PER_SECOND_MIN);
                    let reason = "must be 0 or a number of at least 10";
                    attributes.operations_per_second =
                        Some(count.ok_or_else(|| Error::invalid("parameter operationsPerSecond", reason))?);
                }
                PRIORITY => {
                    attributes.priority = Some(match value.as_str() {
                        "low" => Priority::Low,
                        "normal" => Priority::Normal,
                        "high" => Priority::High,
                        _ => {
                            return Err(Error::invalid("parameter priority", "must be low, normal or high"));
                        }
                    });
                }
                _ => return Err(Error::UnknownParameter { key: key.clone(), known: KNOWN }),
            }
        }
        Ok(attributes)
    }

    /// The new values for a volume with `present`; `None` if nothing changes.
    pub(crate) fn over(self, present: Option<&Qos>) -> Option<Qos> {
        let present = present.copied().unwrap_or_default();
        let wanted = Qos {
            bytes_per_second: self.bytes_per_second.unwrap_or(present.bytes_per_second),
            operations_per_second: self.operations_per_second.unwrap_or(present.operations_per_second),
            priority: self.priority.map_or(present.priority, i32::from),
        };
        (wanted != present).then_some(wanted)
    }
}

/// A whole Kubernetes quantity (k8s.io/apimachinery resource.Quantity), without exponents and fractions.
fn quantity(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let factor: u64 = match suffix {
        "" => 1,
        "k" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Attributes, Error> {
        Attributes::parse(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    }

    #[test]
    fn only_specified_attributes_are_changed() {
        let present =
            Qos { bytes_per_second: 7 << 20, operations_per_second: 100, priority: Priority::Low.into() };
        let limit = parse(&[("bytesPerSecond", "500Mi")]).expect("known");
        assert_eq!(limit.over(Some(&present)), Some(Qos { bytes_per_second: 500 << 20, ..present }));
        let all = parse(&[("bytesPerSecond", "0"), ("operationsPerSecond", "20k"), ("priority", "high")]);
        let wanted =
            Qos { bytes_per_second: 0, operations_per_second: 20_000, priority: Priority::High.into() };
        assert_eq!(all.expect("known").over(Some(&present)), Some(wanted));
        assert_eq!(apply_all(&wanted), None, "nothing to do");
        assert_eq!(parse(&[]).expect("nothing").over(Some(&present)), None);
    }

    fn apply_all(present: &Qos) -> Option<Qos> {
        let pairs = [("bytesPerSecond", "0"), ("operationsPerSecond", "20000"), ("priority", "high")];
        parse(&pairs).expect("known").over(Some(present))
    }

    #[test]
    fn invalid_attributes_are_invalid_arguments() {
        for pair in [
            ("bytesPerSecond", "1Ki"),
            ("bytesPerSecond", "-1"),
            ("bytesPerSecond", "1.5Gi"),
            ("bytesPerSecond", "99999999999Ti"),
            ("bytesPerSecond", "Mi"),
            ("operationsPerSecond", "9"),
            ("priority", "HIGH"),
            ("colour", "blue"),
        ] {
            let status = tonic::Status::from(parse(&[pair]).expect_err(pair.1));
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{pair:?}");
        }
    }
}
