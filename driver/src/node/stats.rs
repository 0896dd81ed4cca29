//! NodeGetVolumeStats: reports the usage of a volume, and whether it responds.

use std::path::Path;

use forebay_proto::csi::volume_usage::Unit;
use forebay_proto::csi::{
    NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, VolumeCondition, VolumeUsage,
};
use rustix::fs::StatVfs;

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
        let handle = Handle::parse(&request.volume_id);
        let reported = self.reported.of(&request.volume_id);
        let deadline = self.deadlines.stats;
        let mounted = path.clone();
        let (mount_id, over) = run_until("look", deadline, move || look(handle.as_ref(), &mounted)).await??;
        match self.measuring.measure(&path, mount_id, deadline).await? {
            Answer::Measured(Ok(stat)) => Ok(NodeGetVolumeStatsResponse {
                usage: usage(&stat),
                volume_condition: Some(VolumeCondition {
                    abnormal: false,
                    message: healthy(over, reported.and_then(|choice| choice.why).as_deref()),
                }),
            }),
            Answer::Measured(Err(errno)) => Ok(abnormal(&format!("statfs: {}", std::io::Error::from(errno)))),
            Answer::Silent => {
                Ok(abnormal(&format!("the volume has not answered for {} s", deadline.as_secs())))
            }
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

fn abnormal(message: &str) -> NodeGetVolumeStatsResponse {
    let condition = VolumeCondition { abnormal: true, message: message.to_owned() };
    NodeGetVolumeStatsResponse { usage: Vec::new(), volume_condition: Some(condition) }
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
    fn the_condition_says_by_what_a_volume_is_mounted() {
        assert_eq!(healthy(None, Some("x")), "the volume answers");
        assert!(healthy(Some(Shown::Rdma), Some("stale")).ends_with("over RDMA"));
        assert!(healthy(Some(Shown::Tcp), None).ends_with("over TCP"));
        assert!(healthy(Some(Shown::Tcp), Some("no RDMA device")).ends_with("over TCP: no RDMA device"));
    }
}
