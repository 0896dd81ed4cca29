//! The last user of a pool, recorded in the pool itself: a target that loses its reservations would grant the pool to the
//! first host that requests it.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use forebay_nvmeof::{Epoch, InstanceHash, ReservationKey};

use crate::limits::EPOCH_SLOT_BYTES;
use crate::slots::{self, Content};

/// Owner and epoch of a pool's last user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolRecord {
    pub(crate) epoch: u64,
    /// Empty if the instance belongs to no cluster, or if a version without clusters recorded it.
    pub(crate) cluster: String,
}

/// An instance's claim to a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) instance: String,
    pub(crate) ours: PoolRecord,
    /// The key of an owner that an administrator has declared permanently gone.
    pub(crate) adopts: Option<ReservationKey>,
}

/// Why a pool belongs to another instance.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error(
        "the pool was used in epoch {recorded} of this instance; this is epoch {ours}, which is the older one and steps back \
         (where the record of epochs was lost: start the instance in epoch {next} or later)", next = recorded + 1
    )]
    Superseded { recorded: u64, ours: u64 },
    #[error(
        "the pool is that of an instance of the same name in another cluster ({cluster:?}), in epoch {epoch}; if that is gone for \
         good, adopt the pool by pool.nvmeof.adopt_key = \"{key}\""
    )]
    OtherOwner { cluster: String, epoch: u64, key: ReservationKey },
}

impl Claim {
    /// Whether the record permits us to use the pool; if so, whether we must write our own record first.
    pub(crate) fn judge(&self, recorded: Option<&PoolRecord>) -> Result<bool, Refused> {
        let Some(recorded) = recorded else { return Ok(true) };
        let epoch = recorded.epoch;
        if recorded.cluster == self.ours.cluster {
            if epoch > self.ours.epoch {
                return Err(Refused::Superseded { recorded: epoch, ours: self.ours.epoch });
            }
            return Ok(epoch < self.ours.epoch);
        }
        // The instance itself, recorded before it had a cluster.
        if recorded.cluster.is_empty() {
            if epoch >= self.ours.epoch {
                return Err(Refused::Superseded { recorded: epoch, ours: self.ours.epoch });
            }
            return Ok(true);
        }
        let owner = InstanceHash::in_cluster(&recorded.cluster, &self.instance);
        let number = u32::try_from(epoch).ok().and_then(Epoch::new);
        let key = number.map_or(ReservationKey::from_number(0), |epoch| ReservationKey::new(owner, epoch));
        let adopted = self.adopts.and_then(|adopts| adopts.epoch_of(owner));
        if adopted.is_some_and(|adopted| epoch <= u64::from(adopted.number())) {
            return Ok(true);
        }
        Err(Refused::OtherOwner { cluster: recorded.cluster.clone(), epoch, key })
    }
}

fn parse(text: &str) -> Option<PoolRecord> {
    let mut record = PoolRecord::default();
    for line in text.lines() {
        match line.split_once(' ')? {
            ("epoch", number) => record.epoch = number.parse().ok()?,
            ("cluster", cluster) => cluster.clone_into(&mut record.cluster),
            // Written by a later version.
            _ => return None,
        }
    }
    (record.epoch > 0).then_some(record)
}

/// Reads the record of the pool; `None` if there is none.
pub(crate) fn read(pool: &Path) -> io::Result<Option<PoolRecord>> {
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "the record of the pool's epoch is damaged");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).map_err(|_| damaged());
    match slots::read(&pool.join(".forebay/epoch"), EPOCH_SLOT_BYTES)? {
        Content::Missing => Ok(None),
        Content::Record(bytes) => parse(&text(bytes)?).ok_or_else(damaged).map(Some),
        // Written by a version before slots: the number alone.
        Content::Plain(bytes) => {
            let text = text(bytes)?;
            let number = text.trim().parse().ok().map(|epoch| PoolRecord { epoch, cluster: String::new() });
            number.or_else(|| parse(&text)).ok_or_else(damaged).map(Some)
        }
        Content::Damaged => Err(damaged()),
    }
}

/// Writes the record.
pub(crate) fn write(pool: &Path, record: &PoolRecord) -> io::Result<()> {
    let folder = pool.join(".forebay");
    match std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let PoolRecord { epoch, cluster } = record;
    let text = format!("epoch {epoch}\ncluster {cluster}\n");
    let path = folder.join("epoch");
    match slots::write(&path, EPOCH_SLOT_BYTES, text.as_bytes()) {
        // On a full file system, overwrite a record of a version before slots in its existing block: it fits into one
        // sector, which a device writes atomically.
        Err(error) if error.kind() == io::ErrorKind::StorageFull => {
            if text.len() > SECTOR_BYTES
                || !matches!(slots::read(&path, EPOCH_SLOT_BYTES)?, Content::Plain(_))
            {
                return Err(error);
            }
            let file = std::fs::File::options().write(true).open(&path)?;
            file.write_all_at(text.as_bytes(), 0)?;
            file.set_len(text.len() as u64)?;
            file.sync_all()
        }
        written => written,
    }
}

/// The unit that every device writes atomically.
const SECTOR_BYTES: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch_disk::Disk;

    fn record(epoch: u64, cluster: &str) -> PoolRecord {
        PoolRecord { epoch, cluster: cluster.into() }
    }

    fn claim(epoch: u64, cluster: &str) -> Claim {
        Claim { instance: "fast-0".into(), ours: record(epoch, cluster), adopts: None }
    }

    #[test]
    fn older_epoch_is_superseded_by_a_later_recorded_one() {
        for cluster in ["", "c1"] {
            let judged = |ours, recorded| claim(ours, cluster).judge(Some(&record(recorded, cluster)));
            assert_eq!(judged(3, 3), Ok(false));
            assert_eq!(judged(4, 3), Ok(true));
            assert_eq!(judged(3, 4), Err(Refused::Superseded { recorded: 4, ours: 3 }));
        }
        assert_eq!(claim(1, "").judge(None), Ok(true));
        assert!(Refused::Superseded { recorded: 7, ours: 1 }.to_string().contains("epoch 8 or later"));
    }

    #[test]
    fn instance_without_a_recorded_cluster_continues_in_a_later_epoch() {
        assert_eq!(claim(5, "c1").judge(Some(&record(4, ""))), Ok(true));
        let same = claim(4, "c1").judge(Some(&record(4, "")));
        assert_eq!(same, Err(Refused::Superseded { recorded: 4, ours: 4 }));
    }

    #[test]
    fn pool_of_another_cluster_is_refused_until_it_is_adopted() {
        let theirs = record(7, "c1");
        let Err(Refused::OtherOwner { key, .. }) = claim(9, "c2").judge(Some(&theirs)) else {
            panic!("another cluster owns it")
        };
        let adopting = Claim { adopts: Some(key), ..claim(1, "c2") };
        assert_eq!(adopting.judge(Some(&theirs)), Ok(true));
        // In the form that the target may show.
        let owner = InstanceHash::in_cluster("c1", "fast-0");
        let pending = ReservationKey::pending(owner, Epoch::new(7).expect("not 0"));
        let by_pending = Claim { adopts: Some(pending), ..claim(1, "c2") };
        assert_eq!(by_pending.judge(Some(&theirs)), Ok(true));
        // The pool was used since the administrator looked, or by a third cluster.
        assert!(adopting.judge(Some(&record(8, "c1"))).is_err());
        assert!(adopting.judge(Some(&record(7, "c3"))).is_err());
        assert_eq!(adopting.judge(Some(&record(1, "c2"))), Ok(false));
        assert!(claim(9, "").judge(Some(&theirs)).is_err());
    }

    #[test]
    fn records_of_earlier_versions_are_read_and_malformed_ones_rejected() {
        let pool = tempfile::tempdir().expect("a directory");
        assert_eq!(read(pool.path()).expect("nothing"), None);
        std::fs::create_dir(pool.path().join(".forebay")).expect("made");
        let path = pool.path().join(".forebay/epoch");
        std::fs::write(&path, "3\n").expect("written");
        assert_eq!(read(pool.path()).expect("read"), Some(record(3, "")));
        write(pool.path(), &record(4, "c1")).expect("recorded");
        assert_eq!(read(pool.path()).expect("read"), Some(record(4, "c1")));
        // Written by hand to replace a damaged record.
        std::fs::write(&path, "epoch 5\ncluster c1\n").expect("written");
        assert_eq!(read(pool.path()).expect("read"), Some(record(5, "c1")));
        for text in ["many", "", "\u{0}"] {
            std::fs::write(&path, text).expect("written");
            assert!(read(pool.path()).is_err(), "{text:?}");
        }
        std::fs::write(&path, [0; 2 * EPOCH_SLOT_BYTES]).expect("written");
        assert!(read(pool.path()).is_err(), "no slot is whole");
    }

    #[test]
    fn epoch_is_recorded_on_a_full_file_system() {
        // In this version's format, and in that of a version before slots.
        for plain in [false, true] {
            let Some(disk) = Disk::new("epoch_is_recorded_on_a_full_file_system") else { return };
            write(&disk.path(), &record(1, "")).expect("there is space");
            if plain {
                let path = disk.path().join(".forebay/epoch");
                std::fs::remove_file(&path).and_then(|()| std::fs::write(&path, "1\n")).expect("written");
            }
            disk.fill();
            for epoch in 2..5 {
                write(&disk.path(), &record(epoch, "a1")).expect("it takes no space");
                disk.lose_power();
                assert_eq!(read(&disk.path()).expect("read"), Some(record(epoch, "a1")), "plain: {plain}");
            }
        }
    }

    /// Tests a takeover after a crash with a log that was not replayed.
    #[test]
    fn epoch_is_read_without_replaying_the_log() {
        let Some(disk) = Disk::new("epoch_is_read_without_replaying_the_log") else { return };
        write(&disk.path(), &record(6, "")).expect("recorded");
        disk.lose_power();
        write(&disk.path(), &record(7, "")).expect("recorded");
        std::fs::write(disk.path().join("in the log"), "x").expect("made");
        let recorded = disk.with_dirty_log(|device, at| {
            super::super::filesystem::peek(device, at).expect("it is looked into")
        });
        assert_eq!(recorded, Some(record(7, "")));
        assert!(disk.path().join("in the log").exists(), "the log was still there to be replayed");
    }
}
