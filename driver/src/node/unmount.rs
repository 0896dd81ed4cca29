//! Taking mounts away, without waiting for a server that is gone.

use std::path::{Path, PathBuf};

use rustix::io::Errno;
use tracing::warn;

use super::claims::{Claim, Permit};
use super::stage::under;
use super::{NodeService, io_error, mounts};
use crate::deadline::run_until;
use crate::error::Error;
use crate::mount;
use crate::mountinfo::resolve;

/// What becomes of the directory that was mounted at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Directory {
    /// It is the orchestrator's.
    Keep,
    /// The driver made it.
    Remove,
}

/// One try to take the topmost mount away.
pub(super) type How = fn(&Path) -> Result<(), mount::MountError>;

impl NodeService {
    /// Takes everything away that is mounted at `path`, under `claim`, which it gives back.
    pub(super) async fn unmount(
        &self,
        volume_id: &str,
        path: PathBuf,
        directory: Directory,
        claim: Claim,
    ) -> Result<Claim, Error> {
        self.unmount_by(mount::unmount, volume_id, path, directory, claim).await
    }

    /// By a system call that may hang. It goes on to its end although the caller may not wait for that.
    pub(super) async fn unmount_by(
        &self,
        how: How,
        volume_id: &str,
        path: PathBuf,
        directory: Directory,
        claim: Claim,
    ) -> Result<Claim, Error> {
        let (node, volume_id) = (self.clone(), volume_id.to_owned());
        // A caller that gives up ends its future, and nothing would take the claim back from a thread that hangs.
        let task = async move { node.unmount_and_wait(how, &volume_id, path, directory, claim).await };
        tokio::spawn(task).await.map_err(|_| Error::Thread("unmount"))?
    }

    async fn unmount_and_wait(
        &self,
        how: How,
        volume_id: &str,
        path: PathBuf,
        directory: Directory,
        claim: Claim,
    ) -> Result<Claim, Error> {
        let hold = self.measuring.hold(&path);
        // A statfs makes the mount busy: one that is answered is waited for.
        let target = path.clone();
        let (claim, mounted) = under(claim, "look", self.deadlines.unmount, move || {
            let resolved = resolve(&target).map_err(|e| io_error("resolve", &target, e))?;
            let table = mounts()?;
            Ok(resolved.and_then(|resolved| table.at(&resolved).map(|entry| entry.id)))
        })
        .await?;
        let is_silent = match mounted {
            Some(mount_id) => hold.hangs(mount_id, self.deadlines.stats).await,
            None => false,
        };
        let (lent, permit) = claim.lend();
        let target = path.clone();
        let unmounting = run_until("unmount", self.deadlines.unmount, move || {
            unmount_all(&target, &permit, how)?;
            remove(&target, directory, &permit)
        });
        match unmounting.await {
            // The kernel is waiting for a server. What is closed was sent at close; the rest cannot be sent now, and a
            // pod must be able to go. The first thread ends when the kernel lets it, and does nothing more then.
            Err(Error::Deadline { seconds, .. }) => {
                warn!(volume_id, path = %path.display(), seconds, "unmount hangs, detaching the mount");
            }
            // The user is our own thread, which hangs in the statfs of a silent volume.
            Ok(Err(Error::Busy { .. })) if is_silent => {
                warn!(volume_id, path = %path.display(), "a statfs hangs and holds the mount, detaching it");
            }
            result => return result?.map(|()| lent.take_back()),
        }
        self.detach(path, directory, lent.take_back()).await
    }

    /// Takes the mounts at `path` out of the tree; the kernel cleans up when their last user is gone.
    pub(super) async fn detach(
        &self,
        path: PathBuf,
        directory: Directory,
        claim: Claim,
    ) -> Result<Claim, Error> {
        let (lent, permit) = claim.lend();
        run_until("detach", self.deadlines.unmount, move || {
            unmount_all(&path, &permit, mount::detach)?;
            remove(&path, directory, &permit)
        })
        .await??;
        Ok(lent.take_back())
    }
}

/// Unmounts with `how` until nothing is mounted at `path`, or the permit is gone.
pub(super) fn unmount_all(path: &Path, permit: &Permit, how: How) -> Result<(), Error> {
    while permit.holds() {
        let Some(resolved) = resolve(path).map_err(|e| io_error("resolve", path, e))? else { return Ok(()) };
        if mounts()?.at(&resolved).is_none() {
            return Ok(());
        }
        match how(&resolved) {
            Ok(()) => {}
            // Gone in the meantime.
            Err(error) if matches!(error.errno, Errno::INVAL | Errno::NOENT) => {
                if mounts()?.at(&resolved).is_some() {
                    return Err(error.into());
                }
            }
            Err(error) if error.errno == Errno::BUSY => {
                return Err(Error::Busy { path: path.display().to_string() });
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Removes the empty directory that a publish made. Never what is in it: it might be a volume.
fn remove(path: &Path, directory: Directory, permit: &Permit) -> Result<(), Error> {
    if directory == Directory::Keep || !permit.holds() {
        return Ok(());
    }
    match std::fs::remove_dir(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(io_error("remove", path, e)),
        _ => Ok(()),
    }
}
