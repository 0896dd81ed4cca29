//! NodeGetVolumeStats and NodeGetVolumeHealth: report the usage of a volume, and whether it responds.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_proto::csi::volume_health::VolumeHealthEntry;
use forebay_proto::csi::volume_usage::Unit;
use forebay_proto::csi::{
    NodeGetVolumeHealthRequest, NodeGetVolumeHealthResponse, NodeGetVolumeStatsRequest,
    NodeGetVolumeStatsResponse, VolumeCondition, VolumeHealth, VolumeHealthErrorType, VolumeUsage,
};
use rustix::fs::StatVfs;
use rustix::io::Errno;

use super::measure::Answer;
use super::{NodeService, check_path, check_volume_id, io_error, mounts};
use crate::capacity::to_csi;
use crate::deadline::run_until;
use crate::error::Error;
use crate::handle::Handle;
use crate::mountinfo::resolve;

impl NodeService {
    /// CSI NodeGetVolumeStats. A volume that does not respond is a condition, not an error: the orchestrator shows it to the
    /// user.
    pub(super) async fn stats(
        &self,
        request: NodeGetVolumeStatsRequest,
    ) -> Result<NodeGetVolumeStatsResponse, Error> {
        check_volume_id(&request.volume_id)?;
        if request.volume_path.is_empty() {
            return Err(Error::Missing("volume_path"));
        }
        let path = check_path("volume_path", &request.volume_path)
            .map_err(|_| Error::NotMounted(request.volume_path.clone()))?;
        let (answer, over) = self.ask(&request.volume_id, &path).await?;
        let reported = self.reported.of(&request.volume_id);
        let (usage, condition) = match answer {
            Ok(stat) => {
                let message = healthy(over, reported.and_then(|choice| choice.why).as_deref());
                (usage(&stat), VolumeCondition { abnormal: false, message })
            }
            Err(fault) => (Vec::new(), VolumeCondition { abnormal: true, message: fault.to_string() }),
        };
        Ok(NodeGetVolumeStatsResponse { usage, volume_condition: Some(condition) })
    }

    /// CSI NodeGetVolumeHealth. Without a path nothing is known about the volume's mount.
    pub(super) async fn health(
        &self,
        request: NodeGetVolumeHealthRequest,
    ) -> Result<NodeGetVolumeHealthResponse, Error> {
        check_volume_id(&request.volume_id)?;
        let (field, path) = match (request.volume_publish_path, request.staging_target_path) {
            (published, _) if !published.is_empty() => ("volume_publish_path", published),
            (_, staged) => ("staging_target_path", staged),
        };
        let mut health_statuses = Vec::new();
        if !path.is_empty()
            && let (Err(fault), _) = self.ask(&request.volume_id, &check_path(field, &path)?).await?
        {
            health_statuses.push(VolumeHealthEntry {
                status: VolumeHealthErrorType::Inaccessible.into(),
                reason: fault.reason().to_owned(),
                message: fault.to_string(),
            });
        }
        let health = VolumeHealth { volume_id: request.volume_id, health_statuses };
        Ok(NodeGetVolumeHealthResponse { volume_health: Some(health) })
    }

    /// Asks the volume mounted at `path` for its usage, and reads the mount's transport.
    async fn ask(
        &self,
        volume_id: &str,
        path: &Path,
    ) -> Result<(Result<Arc<StatVfs>, Fault>, Option<Shown>), Error> {
        let handle = Handle::parse(volume_id);
        let deadline = self.deadlines.stats;
        let mounted = path.to_owned();
        let (mount_id, over) = run_until("look", deadline, move || look(handle.as_ref(), &mounted)).await??;
        let answer = match self.measuring.measure(path, mount_id, deadline).await? {
            Answer::Measured(measured) => measured.map_err(Fault::Refuses),
            Answer::Silent => Err(Fault::Silent(deadline)),
        };
        Ok((answer, over))
    }
}

/// Why a mounted volume cannot be used.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("statfs: {}", std::io::Error::from(*.0))]
    Refuses(Errno),
    #[error("the volume has not answered for {} s", .0.as_secs())]
    Silent(Duration),
}

impl Fault {
    /// For machines.
    fn reason(&self) -> &'static str {
        match self {
            Self::Refuses(_) => "StatfsFails",
            Self::Silent(_) => "NoAnswer",
        }
    }
}

/// The transport of an SMB mount, as shown by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Rdma,
    Tcp,
}

/// The condition message of a volume that responds. A mount over TCP where RDMA was preferred is not a fault.
fn healthy(over: Option<Shown>, why: Option<&str>) -> String {
    match (over, why) {
        (None, _) => "the volume answers".to_owned(),
        (Some(Shown::Rdma), _) => "the volume answers; it is mounted over RDMA".to_owned(),
        (Some(Shown::Tcp), None) => "the volume answers; it is mounted over TCP".to_owned(),
        (Some(Shown::Tcp), Some(why)) => format!("the volume answers; it is mounted over TCP: {why}"),
    }
}

/// The mount ID and the transport of the volume at `path`. Reads only the mount table, not the volume.
fn look(handle: Option<&Handle>, path: &Path) -> Result<(u64, Option<Shown>), Error> {
    let not_mounted = || Error::NotMounted(path.display().to_string());
    let resolved = resolve(path).map_err(|e| io_error("resolve", path, e))?.ok_or_else(not_mounted)?;
    let table = mounts()?;
    let entry = table.at(&resolved).ok_or_else(not_mounted)?;
    // An SMB mount of another volume is not this volume. An ID that this driver did not assign, such as in a manually created
    // PersistentVolume, names no share.
    if let Some(handle) = handle
        && entry.is_smb()
        && entry.share() != Some(handle.share().as_str())
    {
        return Err(not_mounted());
    }
    let over = entry.is_smb().then(|| if entry.has_super_flag("rdma") { Shown::Rdma } else { Shown::Tcp });
    Ok((entry.id, over))
}

fn usage(stat: &StatVfs) -> Vec<VolumeUsage> {
    let bytes = |blocks: u64| to_csi(blocks.saturating_mul(stat.f_frsize));
    let mut usage = vec![VolumeUsage {
        unit: Unit::Bytes.into(),
        total: bytes(stat.f_blocks),
        available: bytes(stat.f_bavail),
        used: bytes(stat.f_blocks.saturating_sub(stat.f_bfree)),
    }];
    // SMB reports no inode count unless the POSIX extensions are enabled; 0 means "unknown".
    if stat.f_files != 0 {
        usage.push(VolumeUsage {
            unit: Unit::Inodes.into(),
            total: to_csi(stat.f_files),
            available: to_csi(stat.f_ffree),
            used: to_csi(stat.f_files.saturating_sub(stat.f_ffree)),
        });
    }
    usage
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_condition_names_the_transport() {
        assert_eq!(healthy(None, Some("x")), "the volume answers");
        assert!(healthy(Some(Shown::Rdma), Some("stale")).ends_with("over RDMA"));
        assert!(healthy(Some(Shown::Tcp), None).ends_with("over TCP"));
        assert!(healthy(Some(Shown::Tcp), Some("no RDMA device")).ends_with("over TCP: no RDMA device"));
    }
}
