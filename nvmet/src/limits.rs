//! How much is read, made and tried at most.

use std::time::Duration;

/// The configuration.
pub(crate) const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Ports of one target.
pub(crate) const PORTS_MAX: usize = 8;

/// Port numbers that one target uses: room for all ports to be replaced at once.
pub(crate) const PORT_SLOTS: u16 = 16;

/// Subsystems of one target.
pub(crate) const SUBSYSTEMS_MAX: usize = 256;

/// Namespaces of one subsystem.
pub(crate) const NAMESPACES_MAX: usize = 64;

/// Hosts of one subsystem.
pub(crate) const HOSTS_MAX: usize = 256;

/// Largest namespace identifier; nvmet's own limit.
pub(crate) const NAMESPACE_ID_MAX: u32 = 1024;

/// Longest path of a drive or file.
pub(crate) const PATH_BYTES_MAX: usize = 1024;

/// Longest name of a target.
pub(crate) const NAME_BYTES_MAX: usize = 253;

/// Longest name of a network device (IFNAMSIZ without its zero).
pub(crate) const INTERFACE_BYTES_MAX: usize = 15;

/// Smallest file that is made.
pub(crate) const FILE_BYTES_MIN: u64 = 1 << 20;

/// Entries of one directory of configfs that are read.
pub(crate) const ENTRIES_MAX: usize = 4096;

/// One attribute of configfs; the kernel gives a page at most.
pub(crate) const ATTRIBUTE_BYTES_MAX: u64 = 4096;

/// Looks and plans of one round: what one makes possible the next one does.
pub(crate) const PASSES_MAX: usize = 6;

/// Between two rounds.
pub(crate) const ROUND_EVERY: Duration = Duration::from_secs(2);

/// How long a drive that was found unfit is not looked at again, unless the configuration changes.
pub(crate) const UNFIT_FOR: Duration = Duration::from_secs(10);

/// A round that takes longer is reported as one that hangs.
pub(crate) const ROUND_TIME_MAX: Duration = Duration::from_secs(60);

/// How long `remove` and the commands that look wait for another program's round.
pub(crate) const LOCK_TIME_MAX: Duration = Duration::from_secs(60);

const _: () = assert!(PORTS_MAX <= PORT_SLOTS as usize / 2);
