//! Maximum numbers of elements in a message. A message beyond these is [`super::Fault::TooMany`].

/// Dialects in a NEGOTIATE; six exist, and some clients list a few more to probe.
pub const DIALECTS_MAX: usize = 64;
/// Negotiate contexts in one message; eight are defined.
pub const NEGOTIATE_CONTEXTS_MAX: usize = 32;
/// Algorithms in one negotiate context.
pub const ALGORITHMS_MAX: usize = 64;
/// Create contexts in one message; about fifteen are defined, and smbtorture also sends unknown ones.
pub const CREATE_CONTEXTS_MAX: usize = 64;
/// Ranges in a LOCK ([MS-SMB2] specifies no limit; Windows clients send one, Samba accepts 64 KiB of them).
pub const LOCKS_MAX: usize = 1024;
/// Chunks in a server-side copy ([MS-SMB2] 3.3.3: `ServerSideCopyMaxNumberofChunks`).
pub const COPY_CHUNKS_MAX: usize = 256;
/// Extended attributes in one list.
pub const EXTENDED_ATTRIBUTES_MAX: usize = 1024;
/// Access control entries in one list.
pub const ACES_MAX: usize = 1024;
/// Sub-authorities of a SID ([MS-DTYP] 2.4.2.2).
pub const SUB_AUTHORITIES_MAX: usize = 15;
/// Elements of any other list that a structure repeats up to the end of its buffer.
pub const LIST_MAX: usize = 4096;
/// Entries in one listing: an 8 MiB response of the shortest entries contains about half a million.
pub const DIRECTORY_ENTRIES_MAX: usize = 1 << 20;
