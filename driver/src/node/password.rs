//! Updates the password of a mounted volume.
//!
//! The kernel's client stores the password of a mount for reconnections, and accepts a second one on a remount, which it tries
//! if the first one is refused (`password2`, Linux 6.9). The kubelet periodically publishes volumes again, with the current
//! contents of their Secret (CSIDriver.spec.requiresRepublish): a mount then gets a password that it does not have yet.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tracing::{info, warn};

use super::claims::Claim;
use super::group::belongs;
use super::stage::under;
use super::{NodeService, io_error, mounts};
use crate::address::ServerAddress;
use crate::capability::Capability;
use crate::context::{Location, VolumeContext};
use crate::error::Error;
use crate::mount::{self, Setting, Step};
use crate::mountinfo::{MountEntry, resolve};
use crate::options::MountOptions;
use crate::secrets::Given;

/// The last password of each mount, as a hash that is useless elsewhere.
#[derive(Clone, Debug, Default)]
pub(super) struct Passwords {
    hasher: Arc<RandomState>,
    known: Arc<Mutex<HashMap<PathBuf, u64>>>,
}

impl Passwords {
    /// Records that the mount at `path` has this password.
    pub(super) fn note(&self, path: &Path, password: &str) {
        self.lock().insert(path.to_owned(), self.hasher.hash_one(password));
    }

    fn knows(&self, path: &Path, password: &str) -> bool {
        self.lock().get(path) == Some(&self.hasher.hash_one(password))
    }

    /// Removes the records of the mounts at `staging`, and beside it for other groups, after they were unmounted.
    pub(super) fn forget(&self, staging: &Path) {
        self.lock().retain(|path, _| path.parent() != staging.parent() || !belongs(path, staging));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, u64>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NodeService {
    /// Gives the mount the current password if it does not have it. If that fails, the mount keeps working with its existing
    /// passwords, so the volume is still published.
    pub(super) async fn renew_password(
        &self,
        claim: Claim,
        path: &Path,
        entry: &MountEntry,
        capability: &Capability,
        context: &HashMap<String, String>,
        given: Given,
    ) -> Result<Claim, Error> {
        let context = VolumeContext::parse(context)?;
        let credentials = given.for_volume(&context.share);
        let (password, _) = credentials.expose_passwords();
        if !entry.is_smb() || self.passwords.knows(path, password) {
            return Ok(claim);
        }
        // A remount of an unresponsive mount would hang.
        if !self.answers(path, entry.id).await? {
            return Ok(claim);
        }
        let flags = &capability.mount.mount_flags;
        let options = MountOptions::build(&context.dialect, context.protection, capability.group()?, flags)?;
        let servers = match &context.location {
            Location::Servers(servers) => servers.clone(),
            Location::Instance { namespace, name } => match self.locate(namespace, name).await {
                Ok((servers, _)) => servers,
                Err(error) => {
                    warn!(share = %context.share, error = error.to_string(), "the volume's new password waits for its server's address");
                    return Ok(claim);
                }
            },
        };
        // The claim covers the path; the check confirms that the same mount is still there.
        let (work_path, entry, given) = (path.to_owned(), entry.clone(), credentials.clone());
        let (claim, renewed) = under(claim, "remount", self.deadlines.mount, move || {
            let resolved = resolve(&work_path).map_err(|e| io_error("resolve", &work_path, e))?;
            let table = mounts()?;
            if resolved.and_then(|at| table.at(&at)).is_none_or(|there| there.id != entry.id) {
                return Ok(None);
            }
            let (password, _) = given.expose_passwords();
            Ok(Some(remount(&work_path, &entry, &servers, &given.username, password, &options)))
        })
        .await?;
        match renewed {
            None => {}
            Some(Ok(())) => {
                info!(share = %context.share, path = %path.display(), "the mount has the volume's new password");
                self.passwords.note(path, password);
            }
            Some(Err(error)) if error.step == Step::Option("password2".to_owned()) => {
                warn!(
                    share = %context.share,
                    path = %path.display(),
                    "this kernel cannot change the password of a mount (Linux 6.9 can): recreate the pods that use the volume before its \
                     next rotation"
                );
                self.passwords.note(path, password);
            }
            Some(Err(error)) => {
                warn!(share = %context.share, error = error.to_string(), "cannot set the volume's new password on the mount; trying again");
            }
        }
        Ok(claim)
    }
}

/// Passes all options again: omitted ones would revert to the client's defaults.
fn remount(
    path: &Path,
    entry: &MountEntry,
    servers: &[ServerAddress],
    username: &str,
    password: &str,
    options: &MountOptions,
) -> Result<(), mount::MountError> {
    let source = entry.source.to_string_lossy();
    let ip = entry.address().map(|ip| ip.to_string());
    let port = servers.first().map(|server| server.port.to_string());
    let mut settings = vec![Setting::Value("source", &source), Setting::Value("username", username)];
    settings.extend(ip.as_deref().map(|ip| Setting::Value("ip", ip)));
    settings.extend(port.as_deref().map(|port| Setting::Value("port", port)));
    settings.extend(options.settings());
    settings.extend(entry.has_super_flag("rdma").then_some(Setting::Flag("rdma")));
    settings.push(Setting::Secret("password2", password));
    mount::reconfigure(path, &settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_remembered_per_mount_until_forgotten() {
        let passwords = Passwords::default();
        let (staging, beside) = (Path::new("/v/globalmount"), Path::new("/v/globalmount.gid-7"));
        let other = Path::new("/w/globalmount");
        for path in [staging, beside, other] {
            assert!(!passwords.knows(path, "first"));
            passwords.note(path, "first");
            assert!(passwords.knows(path, "first") && !passwords.knows(path, "second"));
        }
        passwords.note(staging, "second");
        assert!(passwords.knows(staging, "second") && !passwords.knows(staging, "first"));
        passwords.forget(staging);
        assert!(!passwords.knows(staging, "second") && !passwords.knows(beside, "first"));
        assert!(passwords.knows(other, "first"));
    }
}
