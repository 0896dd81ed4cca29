//! How much is read at most: a broken or hostile tree must not exhaust its reader.

/// One attribute of sysfs; the kernel gives a page at most.
pub(crate) const ATTRIBUTE_BYTES_MAX: usize = 4096;

/// One file of the kernel's lists: modules.dep of a distribution has about 1 MiB.
pub(crate) const LIST_BYTES_MAX: usize = 16 << 20;

/// Entries of one directory.
pub(crate) const ENTRIES_MAX: usize = 4096;

/// GIDs of a port for which the network device is asked for. Drivers have 16 to 256; those in use come first.
pub(crate) const GIDS_MAX: usize = 256;

/// Oddities that are kept.
pub(crate) const ODDITIES_MAX: usize = 32;

/// Longest name of a network device, with its terminating zero (IFNAMSIZ).
pub(crate) const NETDEV_BYTES_MAX: usize = 16;

/// Longest text of a device that is passed on.
pub(crate) const TEXT_CHARS_MAX: usize = 128;

const _: () = assert!(TEXT_CHARS_MAX <= ATTRIBUTE_BYTES_MAX && ATTRIBUTE_BYTES_MAX <= LIST_BYTES_MAX);
