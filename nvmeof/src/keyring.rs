//! The kernel's keyring for NVMe, `.nvme`, in which `tlshd` and the kernel look up TLS keys.

use std::ffi::{CStr, CString};
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use crate::keyctl;
use crate::limits::{KEY_BYTES_MAX, KEY_LINE_BYTES_MAX, KEY_LINES_MAX, KEYS_MAX};
use crate::nqn::Nqn;
use crate::tls::{PairPsk, TooLong, is_of};

/// The kernel's serial number of a key or a keyring. It differs after each boot, and for each new key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeySerial(pub i32);

/// In the format of sysfs.
impl fmt::Display for KeySerial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

impl fmt::Debug for KeySerial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a key is not in the keyring.
#[derive(Debug, thiserror::Error)]
pub enum KeyringError {
    /// The module is not loaded, or the kernel was built without it.
    #[error(
        "the kernel has no keyring {NAME}: load the module nvme-keyring, which nvme-tcp brings along where it can do TLS (Linux 6.7 \
         or later, CONFIG_NVME_TCP_TLS)"
    )]
    NoKeyring,
    /// Keyrings cannot be listed.
    #[error(
        "cannot look for the keyring {NAME} in {path}: {source} (a container must not have it masked, which a privileged one has \
         not)"
    )]
    NotListed {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// EPERM, EACCES or ENOSYS.
    #[error(
        "this process may not {what} the keyring {NAME}: {source} (it must be root of the node itself, and no seccomp profile may \
         keep add_key and keyctl from it)"
    )]
    NotPermitted {
        /// The operation.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// Any other error.
    #[error("cannot {what} the keyring {NAME}: {source}")]
    Failed {
        /// The operation.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// No key can be made for these names.
    #[error(transparent)]
    TooLong(#[from] TooLong),
}

/// The keyring's name.
const NAME: &str = ".nvme";
/// The type of its keys.
const PSK: &CStr = c"psk";

fn failed(what: &'static str) -> impl Fn(io::Error) -> KeyringError {
    move |source| match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => KeyringError::NotPermitted { what, source },
        _ => KeyringError::Failed { what, source },
    }
}

/// A keyring with keys of one type.
#[derive(Debug)]
pub(crate) struct Keyring {
    serial: KeySerial,
    kind: &'static CStr,
}

impl Keyring {
    /// The kernel's own keyring for NVMe.
    pub(crate) fn of_nvme(proc: &Path) -> Result<Self, KeyringError> {
        let path = proc.join("keys");
        let listed = File::open(&path).and_then(|file| find(BufReader::new(file)));
        let serial = listed.map_err(|source| KeyringError::NotListed { path, source })?;
        Ok(Self { serial: serial.ok_or(KeyringError::NoKeyring)?, kind: PSK })
    }

    /// Returns the key of this pair, and adds it if it is not there. Replaces a key with the same identity and another payload.
    pub(crate) fn put(&self, pair: &PairPsk) -> Result<KeySerial, KeyringError> {
        // Only a process that has the keyring in one of its own keyrings can read its keys.
        keyctl::link(self.serial, keyctl::THREAD_KEYRING).map_err(failed("have"))?;
        let found = self.keys()?.into_iter().find(|(_, identity)| *identity == pair.identity);
        let mut there = Zeroizing::new([0; KEY_BYTES_MAX]);
        if let Some((serial, _)) = found
            && let Ok(count) = keyctl::read(serial, there.as_mut_slice())
            && there.get(..count) == Some(pair.key.as_slice())
        {
            return Ok(serial);
        }
        let identity = CString::new(pair.identity.as_str()).expect("names have no zero byte");
        keyctl::add(self.kind, &identity, &pair.key, self.serial).map_err(failed("add a key to"))
    }

    /// Removes the keys of this host and this subsystem, except the one to keep and those in use; returns the removed keys.
    pub(crate) fn retire(
        &self,
        host: &Nqn,
        subsystem: &Nqn,
        keep: KeySerial,
        used: &[KeySerial],
    ) -> Result<Vec<KeySerial>, KeyringError> {
        let old = self.keys()?.into_iter().filter(|(serial, identity)| {
            *serial != keep && !used.contains(serial) && is_of(identity, host, subsystem)
        });
        let mut retired = Vec::new();
        for (serial, _) in old {
            keyctl::unlink(serial, self.serial).map_err(failed("take a key out of"))?;
            retired.push(serial);
        }
        Ok(retired)
    }

    /// Its visible keys, with their identities.
    fn keys(&self) -> Result<Vec<(KeySerial, String)>, KeyringError> {
        let mut numbers = vec![0; KEYS_MAX * size_of::<i32>()];
        let count = keyctl::read(self.serial, &mut numbers).map_err(failed("list"))?;
        let numbers = numbers.get(..count).ok_or_else(|| {
            let many = io::Error::other(format!("it has more than {KEYS_MAX} keys"));
            KeyringError::Failed { what: "list", source: many }
        })?;
        let serials = numbers.chunks_exact(size_of::<i32>()).map(|bytes| {
            let bytes = bytes.try_into().expect("chunks are of that size");
            KeySerial(i32::from_ne_bytes(bytes))
        });
        // A key that was removed meanwhile, or that we have no permission to see, is treated as absent.
        Ok(serials.filter_map(|serial| Some((serial, self.identity(serial)?))).collect())
    }

    fn identity(&self, key: KeySerial) -> Option<String> {
        let mut text = vec![0; KEY_LINE_BYTES_MAX];
        let count = keyctl::describe(key, &mut text).ok()?;
        let text = CStr::from_bytes_until_nul(text.get(..count)?).ok()?.to_str().ok()?;
        let mut fields = text.splitn(5, ';');
        (fields.next()?.as_bytes() == self.kind.to_bytes()).then_some(())?;
        fields.nth(3).map(str::to_owned)
    }
}

/// Finds the keyring in the lines of `/proc/keys`: `21cc057b I------     1 perm 1f0b0000     0     0 keyring   .nvme: 2`.
fn find(mut lines: impl BufRead) -> io::Result<Option<KeySerial>> {
    for _ in 0..KEY_LINES_MAX {
        let mut line = Vec::new();
        if lines.by_ref().take(KEY_LINE_BYTES_MAX as u64).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        if let Some(serial) = is_ours(&String::from_utf8_lossy(&line)) {
            return Ok(Some(serial));
        }
    }
    Ok(None)
}

fn is_ours(line: &str) -> Option<KeySerial> {
    let mut words = line.split_whitespace();
    let serial = u32::from_str_radix(words.next()?, 16).ok()?;
    // After its module is removed, the keyring stays, revoked.
    let usable = words.next()?.starts_with("I-");
    // Only the kernel can create a keyring with a name that begins with a dot.
    let owner = words.nth(3)?;
    let (kind, name) = (words.nth(1)?, words.next()?);
    let ours = usable && owner == "0" && kind == "keyring" && name.strip_suffix(':') == Some(NAME);
    ours.then_some(KeySerial(serial.cast_signed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = "\
0a981b3a I--Q---     1 perm 3f010000     0     0 keyring   fb-test: empty
0b981b3a I--Q---     1 perm 3f010000     0     0 user      .nvme: 3
0c981b3a IR-Q---     1 perm 3f010000     0     0 keyring   .nvme: empty
0d981b3a I--Q---     1 perm 3f010000  1000     0 keyring   .nvme: empty
0e981b3a I--Q---     1 perm 3f010000     0     0 keyring   .nvme.more: empty
21cc057b I------     2 perm 1f3f0000     0     0 keyring   .nvme: 1
";

    #[test]
    fn nvme_keyring_is_found_among_similar_entries_of_proc_keys() {
        assert_eq!(find(LINES.as_bytes()).expect("read"), Some(KeySerial(0x21cc_057b)));
        let others = LINES.rsplit_once("21cc").expect("the last line").0;
        for text in [others, "", "\n\n", "21cc057b", "x I- 1 perm 0 0 0 keyring .nvme: 1"] {
            assert_eq!(find(text.as_bytes()).expect("read"), None, "{text}");
        }
        let long = format!("{}\n{LINES}", "x".repeat(3 * KEY_LINE_BYTES_MAX));
        assert_eq!(find(long.as_bytes()).expect("read"), Some(KeySerial(0x21cc_057b)));
        assert_eq!(KeySerial(0x1cc_057b).to_string(), "01cc057b");
    }

    #[test]
    fn missing_nvme_keyring_is_distinguished_from_missing_proc_keys() {
        let proc = tempfile::tempdir().expect("tmp");
        let error = Keyring::of_nvme(proc.path()).expect_err("no file");
        assert!(matches!(error, KeyringError::NotListed { .. }), "{error}");
        std::fs::write(proc.path().join("keys"), "").expect("written");
        let error = Keyring::of_nvme(proc.path()).expect_err("no keyring").to_string();
        assert!(error.contains("load the module nvme-keyring"), "{error}");
    }

    fn pair(identity: &str, key: &[u8]) -> PairPsk {
        PairPsk { identity: identity.into(), key: Zeroizing::new(key.to_vec()) }
    }

    /// Uses a keyring of this thread, with keys of a type that every kernel has.
    #[test]
    fn key_is_added_once_replaced_on_change_and_removed_when_unused() {
        let serial = match keyctl::add(c"keyring", c"forebay-test", &[], keyctl::THREAD_KEYRING) {
            // Tests may run in a container with a seccomp profile that forbids keys.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) => {
                return forebay_testing::skip(forebay_testing::Need::Keyrings, error);
            }
            result => result.expect("a keyring"),
        };
        let ring = Keyring { serial, kind: c"user" };
        let payload = |key: KeySerial| {
            let mut bytes = [0; KEY_BYTES_MAX];
            let count = keyctl::read(key, &mut bytes).expect("readable");
            bytes[..count].to_vec()
        };
        let first = ring.put(&pair("NVMe1R01 nqn.h nqn.s aaa=", b"secret")).expect("put");
        assert_eq!(ring.put(&pair("NVMe1R01 nqn.h nqn.s aaa=", b"secret")).expect("unchanged"), first);
        assert_eq!(payload(first), b"secret");
        let replaced = ring.put(&pair("NVMe1R01 nqn.h nqn.s aaa=", b"other")).expect("replaced");
        assert_eq!((payload(replaced), ring.keys().expect("listed").len()), (b"other".to_vec(), 1));

        let second = ring.put(&pair("NVMe1R01 nqn.h nqn.s bbb=", b"new")).expect("put");
        let stranger = ring.put(&pair("NVMe1R01 nqn.h nqn.other ccc=", b"x")).expect("put");
        let (host, subsystem) = ("nqn.h".parse().expect("an NQN"), "nqn.s".parse().expect("an NQN"));
        let retired = |used: &[KeySerial]| ring.retire(&host, &subsystem, second, used).expect("retired");
        assert_eq!(retired(&[replaced]), [], "a controller uses it");
        assert_eq!(retired(&[]), [replaced]);
        let left: Vec<KeySerial> =
            ring.keys().expect("listed").into_iter().map(|(serial, _)| serial).collect();
        assert_eq!((left.len(), left.contains(&second), left.contains(&stranger)), (2, true, true));
    }
}
