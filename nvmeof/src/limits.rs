//! Upper limits for reads and retries: sysfs, a target and other hosts must not exhaust our resources.

/// Size of one sysfs attribute; the kernel returns at most a page.
pub(crate) const ATTRIBUTE_BYTES_MAX: u64 = 4096;

/// Entries of one directory of sysfs.
pub(crate) const ENTRIES_MAX: usize = 4096;

/// Longest NQN, its terminating zero included (NVMe Base 4.7: 223 bytes).
pub(crate) const NQN_BYTES_MAX: usize = 223;

/// Longest name of a network device, without its terminating zero (IFNAMSIZ).
pub(crate) const INTERFACE_BYTES_MAX: usize = 15;

/// Longest name of an instance or a node that an identity is derived from.
pub(crate) const NAME_BYTES_MAX: usize = 253;

/// Size of the kernel's response to a connect, and of its list of options.
pub(crate) const REPLY_BYTES_MAX: usize = 4096;

/// Paths to one subsystem.
pub(crate) const PATHS_MAX: usize = 32;

/// Records of a discovery log that are read.
pub(crate) const DISCOVERY_RECORDS_MAX: u64 = 1024;

/// Bytes of a log page that one command requests.
pub(crate) const LOG_CHUNK_BYTES: usize = 4096;

/// Number of times that a discovery log is read again because it changed during the read.
pub(crate) const DISCOVERY_READS_MAX: usize = 5;

/// Registrants of a namespace that are read.
pub(crate) const REGISTRANTS_MAX: usize = 128;

/// Commands that one acquisition may issue: other hosts may register and reserve at the same time.
pub(crate) const ACQUIRE_STEPS_MAX: usize = 16;

/// Lines of the kernel's log that are read for one connect.
pub(crate) const LOG_LINES_MAX: usize = 256;

/// Size of one record of the kernel's log.
pub(crate) const LOG_RECORD_BYTES_MAX: usize = 8192;

/// Longest text of the kernel or a target that is passed on.
pub(crate) const TEXT_CHARS_MAX: usize = 256;

/// Lines of `/proc/keys` that are read.
pub(crate) const KEY_LINES_MAX: usize = 65_536;

/// Size of one line of `/proc/keys`, and of a key's description with the fields before it: the kernel's own limit is a page.
pub(crate) const KEY_LINE_BYTES_MAX: usize = 8192;

/// Keys of a keyring that are checked.
pub(crate) const KEYS_MAX: usize = 4096;

/// Size of a key's payload that is compared with ours.
pub(crate) const KEY_BYTES_MAX: usize = 256;

/// Timeout of a passthrough command.
pub(crate) const COMMAND_TIMEOUT_MS: u32 = 10_000;

const _: () = assert!(LOG_CHUNK_BYTES.is_multiple_of(4) && LOG_CHUNK_BYTES >= 1024);
