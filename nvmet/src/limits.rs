//! Upper limits for reads, objects and retries.

use std::time::Duration;

/// Size of the configuration file.
pub(crate) const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Ports of one target.
pub(crate) const PORTS_MAX: usize = 8;

/// Port numbers that one target uses: enough to replace all ports at the same time.
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

/// Longest name of a network device (IFNAMSIZ without the terminating zero).
pub(crate) const INTERFACE_BYTES_MAX: usize = 15;

/// Smallest file that is created.
pub(crate) const FILE_BYTES_MIN: u64 = 1 << 20;

/// Entries of one directory of configfs that are read.
pub(crate) const ENTRIES_MAX: usize = 4096;

/// Size of one configfs attribute; the kernel returns at most a page.
pub(crate) const ATTRIBUTE_BYTES_MAX: u64 = 4096;

/// Passes of one round: each pass can do what the previous one has made possible.
pub(crate) const PASSES_MAX: usize = 6;

/// Interval between the starts of two rounds.
pub(crate) const ROUND_EVERY: Duration = Duration::from_secs(2);

/// How long an unfit drive is not examined again, unless the configuration changes.
pub(crate) const UNFIT_FOR: Duration = Duration::from_secs(10);

/// Rounds that take longer are reported as hung.
pub(crate) const ROUND_TIME_MAX: Duration = Duration::from_secs(60);

/// How long `remove` and the read-only commands wait for another program's round.
pub(crate) const LOCK_TIME_MAX: Duration = Duration::from_secs(60);

const _: () = assert!(PORTS_MAX <= PORT_SLOTS as usize / 2);
