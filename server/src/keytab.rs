//! The keytab for Kerberos, reloaded when its file changes: `kadmin ktadd` gives the server new keys without a restart.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_smb::auth::{Kerberos, Keytab};
use tracing::{error, info};
use zeroize::Zeroizing;

use crate::limits::{KEYTAB_BYTES_MAX, KEYTAB_REFRESH};

/// Why a keytab cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("server.keytab: {}: {problem}", path.display())]
pub struct KeytabFileError {
    path: PathBuf,
    problem: String,
}

/// A keytab's file and the keys loaded from it.
pub struct KeytabFile {
    path: PathBuf,
    kerberos: Arc<Kerberos>,
    state: Mutex<State>,
}

struct State {
    contents: Zeroizing<Vec<u8>>,
    principals: Vec<String>,
    /// Why the current file is not in use.
    problem: Option<String>,
}

impl std::fmt::Debug for KeytabFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeytabFile").field("path", &self.path).finish_non_exhaustive()
    }
}

impl KeytabFile {
    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read, or has no key of this server.
    pub fn load(path: &Path) -> Result<Self, KeytabFileError> {
        let failed = |problem| KeytabFileError { path: path.to_owned(), problem };
        let contents = read(path).map_err(failed)?;
        let keytab = Keytab::parse(&contents).map_err(|error| failed(error.to_string()))?;
        let principals = keytab.principals().to_vec();
        let state = Mutex::new(State { contents, principals, problem: None });
        Ok(Self { path: path.to_owned(), kerberos: Arc::new(Kerberos::new(keytab)), state })
    }

    /// The acceptor of tickets.
    #[must_use]
    pub fn kerberos(&self) -> Arc<Kerberos> {
        Arc::clone(&self.kerberos)
    }

    /// The principals for which it has keys.
    #[must_use]
    pub fn principals(&self) -> Vec<String> {
        self.state().principals.clone()
    }

    /// The current problem, if any.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.state().problem.clone()
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks the file. An unusable file leaves the keys unchanged.
    pub fn refresh(&self) {
        let read = read(&self.path);
        let mut state = self.state();
        let problem = match read {
            Ok(contents) if *contents == *state.contents => None,
            Ok(contents) => match Keytab::parse(&contents) {
                Ok(keytab) => {
                    state.principals = keytab.principals().to_vec();
                    state.contents = contents;
                    info!(principals = ?state.principals, "the keytab has been read again");
                    self.kerberos.replace(keytab);
                    None
                }
                Err(error) => Some(error.to_string()),
            },
            Err(error) => Some(error),
        };
        let problem = problem.map(|problem| {
            format!("server.keytab: {}: {problem}; the keys from before are in use", self.path.display())
        });
        if state.problem != problem {
            if let Some(problem) = &problem {
                error!("{problem}");
            }
            state.problem = problem;
        }
    }

    /// Checks the file periodically.
    pub async fn keep_fresh(self: Arc<Self>) {
        let mut tick = tokio::time::interval(KEYTAB_REFRESH);
        loop {
            tick.tick().await;
            let this = Arc::clone(&self);
            if tokio::task::spawn_blocking(move || this.refresh()).await.is_err() {
                error!("looking at the keytab panicked");
            }
        }
    }
}

fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, String> {
    let mut contents = Zeroizing::new(Vec::new());
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    let mode = file.metadata().map_err(|error| error.to_string())?.mode();
    if mode & 0o007 != 0 {
        return Err(format!("every user of this machine can use it (mode {:o}): chmod 600", mode & 0o7777));
    }
    file.take(KEYTAB_BYTES_MAX).read_to_end(&mut contents).map_err(|error| error.to_string())?;
    Ok(contents)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A keytab with one AES-256 key of `cifs/HOST@EXAMPLE`.
    fn keytab(host: &str) -> Vec<u8> {
        let counted = |bytes: &[u8]| [&(bytes.len() as u16).to_be_bytes(), bytes].concat();
        let record = [
            &2u16.to_be_bytes()[..],
            &counted(b"EXAMPLE"),
            &counted(b"cifs"),
            &counted(host.as_bytes()),
            &1u32.to_be_bytes(),
            &[0; 4],
            &[1],
            &18u16.to_be_bytes(),
            &counted(&[1; 32]),
        ]
        .concat();
        [&[5, 2][..], &(record.len() as i32).to_be_bytes(), &record].concat()
    }

    fn write(path: &Path, contents: &[u8], mode: u32) {
        fs::write(path, contents).expect("written");
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("ours");
    }

    #[test]
    fn keytab_is_reloaded_and_a_damaged_file_keeps_the_old_keys() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("krb5.keytab");
        write(&path, &keytab("one"), 0o600);
        let file = KeytabFile::load(&path).expect("a good keytab");
        assert_eq!(file.principals(), ["cifs/one@EXAMPLE"]);
        write(&path, b"\x05\x02rubbish", 0o600);
        file.refresh();
        assert_eq!(file.principals(), ["cifs/one@EXAMPLE"]);
        let problem = file.problem().expect("it is damaged");
        assert!(problem.contains("damaged") && problem.contains("in use"), "{problem}");
        write(&path, &keytab("two"), 0o600);
        file.refresh();
        assert_eq!((file.principals(), file.problem()), (vec!["cifs/two@EXAMPLE".to_owned()], None));
    }

    #[test]
    fn world_readable_keytab_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("krb5.keytab");
        let refused = || KeytabFile::load(&path).expect_err("of no use").to_string();
        assert!(refused().contains("No such file"), "{}", refused());
        write(&path, &keytab("one"), 0o644);
        assert!(refused().contains("chmod 600"), "{}", refused());
        write(&path, &keytab("one"), 0o640);
        KeytabFile::load(&path).expect("its group may");
    }
}
