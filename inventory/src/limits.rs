//! Limits for reading: a broken or hostile tree must not exhaust its reader.

/// Maximum size of a sysfs attribute; the kernel returns at most a page.
pub(crate) const ATTRIBUTE_BYTES_MAX: usize = 4096;

/// Maximum size of one of the kernel's lists: modules.dep of a distribution has about 1 MiB.
pub(crate) const LIST_BYTES_MAX: usize = 16 << 20;

/// Maximum number of entries of a directory.
pub(crate) const ENTRIES_MAX: usize = 4096;

/// Maximum number of a port's GIDs for which the network device is read. Drivers have 16 to 256; used ones come first.
pub(crate) const GIDS_MAX: usize = 256;

/// Maximum number of oddities that are kept.
pub(crate) const ODDITIES_MAX: usize = 32;

/// Longest name of a network device, with its terminating zero (IFNAMSIZ).
pub(crate) const NETDEV_BYTES_MAX: usize = 16;

/// Maximum length of a text from a device.
pub(crate) const TEXT_CHARS_MAX: usize = 128;

const _: () = assert!(TEXT_CHARS_MAX <= ATTRIBUTE_BYTES_MAX && ATTRIBUTE_BYTES_MAX <= LIST_BYTES_MAX);
