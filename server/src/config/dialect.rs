//! `server.min_dialect`.

use forebay_smb::wire::Dialect;
use serde::Deserialize;

/// The oldest dialect that is accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum MinDialect {
    /// SMB 2.0.2.
    #[serde(rename = "2.0.2")]
    Smb202,
    /// SMB 2.1.
    #[serde(rename = "2.1")]
    Smb21,
    /// SMB 3.0.
    #[serde(rename = "3.0")]
    Smb30,
    /// SMB 3.0.2.
    #[serde(rename = "3.0.2")]
    Smb302,
    /// SMB 3.1.1, in which a relayed logon is useless.
    #[default]
    #[serde(rename = "3.1.1")]
    Smb311,
}

impl MinDialect {
    /// The dialect as a protocol value.
    #[must_use]
    pub fn wire(self) -> Dialect {
        match self {
            Self::Smb202 => Dialect::SMB2_0_2,
            Self::Smb21 => Dialect::SMB2_1,
            Self::Smb30 => Dialect::SMB3_0,
            Self::Smb302 => Dialect::SMB3_0_2,
            Self::Smb311 => Dialect::SMB3_1_1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn min_dialect_accepts_every_dialect_and_defaults_to_the_newest() {
        #[derive(Deserialize)]
        struct Section {
            #[serde(default)]
            min_dialect: MinDialect,
        }
        let parsed = |text: &str| toml::from_str::<Section>(text).map(|section| section.min_dialect.wire());
        assert_eq!(parsed(""), Ok(Dialect::SMB3_1_1));
        for dialect in
            [Dialect::SMB2_0_2, Dialect::SMB2_1, Dialect::SMB3_0, Dialect::SMB3_0_2, Dialect::SMB3_1_1]
        {
            assert_eq!(parsed(&format!("min_dialect = {:?}", dialect.name())), Ok(dialect));
        }
        assert!(parsed("min_dialect = \"1.0\"").is_err());
    }
}
