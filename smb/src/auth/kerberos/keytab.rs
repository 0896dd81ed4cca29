//! Keytab files: the keys that the KDC shares with this server. The format is version 2 of MIT Kerberos (`0x05 0x02`),
//! written by `kadmin ktadd`, `ktutil`, `msktutil`, `net ads keytab` and Windows' `ktpass`.

use super::encryption::{EncryptionType, Key};
use crate::limits;

/// The service in the principals of an SMB server ([MS-SMB2] 3.2.4.2.3).
const SERVICE: &str = "cifs";

/// A principal of this server and one of its keys.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) realm: String,
    pub(super) version: u32,
    pub(super) key: Key,
}

/// The keys of the principals `cifs/…` in a keytab.
#[derive(Clone, Debug, Default)]
pub struct Keytab {
    entries: Vec<Entry>,
    principals: Vec<String>,
}

/// Why a keytab is unusable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeytabError {
    /// It does not start with the version.
    #[error("this is not a keytab of version 2 (0x0502)")]
    Version,
    /// It ends within an entry.
    #[error("the keytab is truncated or damaged at byte {0}")]
    Truncated(usize),
    /// More keys than [`limits::KEYTAB_KEYS_MAX`].
    #[error("the keytab has more than {} keys of {SERVICE}/…", limits::KEYTAB_KEYS_MAX)]
    TooMany,
    /// It has no usable key.
    #[error(
        "the keytab has no AES key of a principal {SERVICE}/HOST; add one, for example with `kadmin ktadd -k FILE {SERVICE}/HOST`"
    )]
    NoKey,
}

impl Keytab {
    /// Reads the contents of a keytab. Keys of other services, and of encryption types that are not accepted, are left out.
    ///
    /// # Errors
    /// [`KeytabError`].
    pub fn parse(file: &[u8]) -> Result<Self, KeytabError> {
        let mut rest = file.strip_prefix(&[5, 2]).ok_or(KeytabError::Version)?;
        let mut keytab = Self::default();
        while !rest.is_empty() {
            let at = file.len() - rest.len();
            let damaged = || KeytabError::Truncated(at);
            let (len, after) = rest.split_first_chunk::<4>().ok_or_else(damaged)?;
            let len = i32::from_be_bytes(*len);
            // A negative length is a hole left by a removed entry.
            let (record, after) = after.split_at_checked(len.unsigned_abs() as usize).ok_or_else(damaged)?;
            rest = after;
            // Some writers pad the file with zeros.
            if len > 0
                && let Some((name, entry)) = entry(record).ok_or_else(damaged)?
            {
                if keytab.entries.len() == limits::KEYTAB_KEYS_MAX {
                    return Err(KeytabError::TooMany);
                }
                keytab.entries.push(entry);
                if !keytab.principals.contains(&name) {
                    keytab.principals.push(name);
                }
            }
        }
        if keytab.entries.is_empty() { Err(KeytabError::NoKey) } else { Ok(keytab) }
    }

    /// The principals, like `cifs/server.example@EXAMPLE`.
    #[must_use]
    pub fn principals(&self) -> &[String] {
        &self.principals
    }

    /// The keys with which a ticket of this encryption type can be encrypted. `version` is the key version in the ticket, if
    /// present.
    pub(super) fn candidates(
        &self,
        realm: &str,
        etype: EncryptionType,
        version: Option<u32>,
    ) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(move |entry| {
            entry.realm == realm
                && entry.key.etype() == etype
                && version.is_none_or(|version| version == entry.version)
        })
    }
}

/// One entry, with its principal's name; `Some(None)` if it is not used here, `None` if it is damaged.
fn entry(record: &[u8]) -> Option<Option<(String, Entry)>> {
    let mut fields = Fields(record);
    let components = fields.u16()?;
    let realm = fields.counted()?;
    let name = (0..components).map(|_| fields.counted()).collect::<Option<Vec<&[u8]>>>()?;
    let _name_type = fields.u32()?;
    let _timestamp = fields.u32()?;
    let short_version = fields.array::<1>()?[0];
    let etype = fields.u16()?;
    let key = fields.counted()?;
    // A 32-bit version follows in newer files; 0 there means that it is not set.
    let version = fields.u32().filter(|version| *version != 0).unwrap_or(u32::from(short_version));
    let Some(etype) = EncryptionType::from_number(i32::from(etype)) else {
        return Some(None);
    };
    let key = Key::new(etype, key)?;
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
    let (Some(realm), Some(name)) = (text(realm), name.into_iter().map(text).collect::<Option<Vec<_>>>())
    else {
        return Some(None);
    };
    match name.as_slice() {
        [service, _host] if service.eq_ignore_ascii_case(SERVICE) => {
            Some(Some((format!("{}@{realm}", name.join("/")), Entry { realm, version, key })))
        }
        _ => Some(None),
    }
}

struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*array)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// Bytes preceded by their length.
    fn counted(&mut self) -> Option<&'a [u8]> {
        let len = usize::from(self.u16()?);
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An entry as written by `ktadd`.
    pub(in crate::auth) fn record(
        name: &[&str],
        realm: &str,
        version: u32,
        etype: u16,
        key: &[u8],
    ) -> Vec<u8> {
        let counted = |bytes: &[u8]| [&(bytes.len() as u16).to_be_bytes(), bytes].concat();
        let mut record = (name.len() as u16).to_be_bytes().to_vec();
        record.extend(counted(realm.as_bytes()));
        name.iter().for_each(|component| record.extend(counted(component.as_bytes())));
        record.extend(1u32.to_be_bytes());
        record.extend(1_700_000_000u32.to_be_bytes());
        record.push(version as u8);
        record.extend(etype.to_be_bytes());
        record.extend(counted(key));
        record.extend(version.to_be_bytes());
        [&(record.len() as i32).to_be_bytes()[..], &record].concat()
    }

    pub(in crate::auth) fn file(records: &[Vec<u8>]) -> Vec<u8> {
        [&[5, 2][..], &records.concat()].concat()
    }

    #[test]
    fn parser_keeps_cifs_keys_and_skips_other_entries() {
        let hole = [&(-7i32).to_be_bytes()[..], &[0; 7]].concat();
        let keytab = Keytab::parse(&file(&[
            record(&["host", "a.example"], "EXAMPLE", 3, 18, &[1; 32]),
            record(&["cifs", "a.example"], "EXAMPLE", 300, 18, &[2; 32]),
            hole,
            record(&["cifs", "a.example"], "EXAMPLE", 300, 23, &[3; 16]),
            record(&["CIFS", "b"], "OTHER", 4, 19, &[4; 16]),
            vec![0; 8],
        ]))
        .expect("a good keytab");
        assert_eq!(keytab.principals(), ["cifs/a.example@EXAMPLE", "CIFS/b@OTHER"]);
        let found = |realm, etype, version| {
            keytab.candidates(realm, etype, version).map(|e| e.key.as_bytes()[0]).collect::<Vec<_>>()
        };
        assert_eq!(found("EXAMPLE", EncryptionType::Aes256Sha1, Some(300)), [2]);
        assert_eq!(found("EXAMPLE", EncryptionType::Aes256Sha1, None), [2]);
        assert_eq!(found("EXAMPLE", EncryptionType::Aes256Sha1, Some(44)), [0u8; 0]);
        assert_eq!(found("OTHER", EncryptionType::Aes256Sha1, None), [0u8; 0]);
        assert_eq!(found("OTHER", EncryptionType::Aes128Sha256, None), [4]);
        assert!(!format!("{keytab:?}").contains("[2, 2"), "keys are not printed");
    }

    #[test]
    fn invalid_keytabs_give_specific_errors() {
        let wrong = |file: &[u8]| Keytab::parse(file).expect_err("invalid");
        assert_eq!(wrong(b""), KeytabError::Version);
        assert_eq!(wrong(b"\x05\x01rest"), KeytabError::Version);
        assert_eq!(wrong(&file(&[])), KeytabError::NoKey);
        let good = file(&[record(&["cifs", "a"], "EXAMPLE", 1, 18, &[1; 32])]);
        for len in 3..good.len() {
            assert_eq!(wrong(&good[..len]), KeytabError::Truncated(2), "{len}");
        }
        let short_key = file(&[record(&["cifs", "a"], "EXAMPLE", 1, 18, &[1; 16])]);
        assert_eq!(wrong(&short_key), KeytabError::Truncated(2));
        assert_eq!(
            wrong(&file(&[record(&["cifs", "a"], "EXAMPLE", 1, 23, &[1; 16])])),
            KeytabError::NoKey,
            "RC4"
        );
        let many: Vec<_> = (0..=limits::KEYTAB_KEYS_MAX as u32)
            .map(|version| record(&["cifs", "a"], "EXAMPLE", version, 18, &[1; 32]))
            .collect();
        assert_eq!(wrong(&file(&many)), KeytabError::TooMany);
    }
}
