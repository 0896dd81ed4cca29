//! Sizes in configurations and on command lines.

use serde::Deserialize;

/// A size: a number of bytes, or text with a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl std::str::FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let shift = match unit.trim() {
            "" | "B" => 0,
            "K" | "Ki" | "KiB" => 10,
            "M" | "Mi" | "MiB" => 20,
            "G" | "Gi" | "GiB" => 30,
            "T" | "Ti" | "TiB" => 40,
            _ => {
                return Err(format!(
                    "{text:?} is not a size: use a number of bytes, or a number with KiB, MiB, GiB or TiB"
                ));
            }
        };
        let number: u64 =
            number.parse().map_err(|_| format!("{text:?} is not a size: it must begin with a number"))?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(|| format!("{text:?} is too large"))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Raw {
            Number(u64),
            Text(String),
        }
        match Raw::deserialize(deserializer)? {
            Raw::Number(bytes) => Ok(Self(bytes)),
            Raw::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}
