//! Removes mounts without waiting for a server that is gone.

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

/// What to do with the mount point directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Directory {
    /// It belongs to the orchestrator.
    Keep,
    /// The driver created it.
    Remove,
}

/// One attempt to remove the topmost mount.
pub(super) type How = fn(&Path) -> Result<(), mount::MountError>;

impl NodeService {
    /// Removes all mounts at `path` under `claim`, and returns the claim.
    pub(super) async fn unmount(
        &self,
        volume_id: &str,
        path: PathBuf,
        directory: Directory,
        claim: Claim,
    ) -> Result<Claim, Error> {
        self.unmount_by(mount::unmount, volume_id, path, directory, claim).await
    }

    /// Uses a system call that may hang. The unmount runs to its end even if the caller does not wait.
    pub(super) async fn unmount_by(
        &self,
        how: How,
        volume_id: &str,
        path: PathBuf,
        directory: Directory,
        claim: Claim,
    ) -> Result<Claim, Error> {
        let (node, volume_id) = (self.clone(), volume_id.to_owned());
        // If a caller gives up, its future is dropped, and nothing would take the claim back from a thread that hangs.
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
        // A statfs makes the mount busy: wait for one that will finish.
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
            // The kernel is waiting for a server. Data of closed files was sent at close; the rest cannot be sent now, and the
            // pod must be able to terminate. The first thread ends when the kernel call returns, and does nothing more.
            Err(Error::Deadline { seconds, .. }) => {
                warn!(volume_id, path = %path.display(), seconds, "unmount hangs, detaching the mount");
            }
            // The mount's user is our own thread, which hangs in the statfs of an unresponsive volume.
            Ok(Err(Error::Busy { .. })) if is_silent => {
                warn!(volume_id, path = %path.display(), "a statfs hangs and holds the mount, detaching it");
            }
            result => return result?.map(|()| lent.take_back()),
        }
        self.detach(path, directory, lent.take_back()).await
    }

    /// Detaches the mounts at `path`; the kernel cleans up after their last user.
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

/// Unmounts with `how` until nothing is mounted at `path`, or the permit is revoked.
pub(super) fn unmount_all(path: &Path, permit: &Permit, how: How) -> Result<(), Error> {
    while permit.holds() {
        let Some(resolved) = resolve(path).map_err(|e| io_error("resolve", path, e))? else { return Ok(()) };
        if mounts()?.at(&resolved).is_none() {
            return Ok(());
        }
        match how(&resolved) {
            Ok(()) => {}
            // It was unmounted in the meantime.
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

/// Removes the empty directory that a publish created. Never removes its contents: they might be a volume.
fn remove(path: &Path, directory: Directory, permit: &Permit) -> Result<(), Error> {
    if directory == Directory::Keep || !permit.holds() {
        return Ok(());
    }
    match std::fs::remove_dir(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(io_error("remove", path, e)),
        _ => Ok(()),
    }
}
