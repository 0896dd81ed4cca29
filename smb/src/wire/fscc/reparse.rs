//! Reparse points ([MS-FSCC] 2.1.2).

use crate::wire::cursor::{Put, Reader, len_u16, patch_u16, zeros};
use crate::wire::newtype::open_enum;
use crate::wire::{Malformed, utf16};

open_enum!(
    /// `ReparseTag` ([MS-FSCC] 2.1.2.1).
    ReparseTag(u32) {
        RESERVED_ZERO = 0x0000_0000, RESERVED_ONE = 0x0000_0001, MOUNT_POINT = 0xa000_0003,
        SYMLINK = 0xa000_000c, NFS = 0x8000_0014, AF_UNIX = 0x8000_0023, LX_SYMLINK = 0xa000_001d,
        LX_FIFO = 0x8000_0024, LX_CHR = 0x8000_0025, LX_BLK = 0x8000_0026,
    }
);

/// `REPARSE_DATA_BUFFER` ([MS-FSCC] 2.1.2.2), for Microsoft tags; others have a GUID before their data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct ReparseDataBuffer<'a> {
    pub reparse_tag: ReparseTag,
    pub data: &'a [u8],
}

impl<'a> ReparseDataBuffer<'a> {
    /// Reads the buffer of a control.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "reparse data buffer");
        let reparse_tag = r.get()?;
        let len = r.get::<u16>()?;
        r.skip(2)?;
        Ok(Self { reparse_tag, data: r.take(len.into())? })
    }

    /// Appends the buffer.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(self.reparse_tag);
        out.put(len_u16(self.data.len()));
        zeros(out, 2);
        out.extend_from_slice(self.data);
    }
}

open_enum!(
    /// `Type` at the start of the data of [`ReparseTag::NFS`] ([MS-FSCC] 2.1.2.6).
    NfsSpecialFile(u64) {
        SYMLINK = 0x0000_0000_014b_4e4c, CHARACTER_DEVICE = 0x0000_0000_0052_4843, BLOCK_DEVICE = 0x0000_0000_004b_4c42,
        FIFO = 0x0000_0000_4f46_4946, SOCKET = 0x0000_0000_4b43_4f53,
    }
);

impl NfsSpecialFile {
    /// Reads the type from the data of a reparse point.
    pub fn parse(data: &[u8]) -> Result<Self, Malformed> {
        Reader::new(data, "NFS special file").get()
    }
}

/// The data of [`ReparseTag::SYMLINK`] ([MS-FSCC] 2.1.2.4).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct SymbolicLink {
    pub substitute_name: String,
    pub print_name: String,
    /// 1 if relative.
    pub flags: u32,
}

impl SymbolicLink {
    /// Reads the data of a reparse point.
    pub fn parse(data: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(data, "symbolic link");
        let mut field = || r.get::<u16>().map(usize::from);
        let (substitute_offset, substitute_len, print_offset, print_len) =
            (field()?, field()?, field()?, field()?);
        let flags = r.get()?;
        let names = Reader::new(r.rest(), "symbolic link");
        Ok(Self {
            substitute_name: utf16::decode(names.variable(substitute_offset, substitute_len)?)?,
            print_name: utf16::decode(names.variable(print_offset, print_len)?)?,
            flags,
        })
    }

    /// Appends the data.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        zeros(out, 8);
        out.put(self.flags);
        utf16::encode(&self.substitute_name, out);
        utf16::encode(&self.print_name, out);
        let substitute_len = utf16::encoded_len(&self.substitute_name);
        let print_len = utf16::encoded_len(&self.print_name);
        for (index, value) in [0, substitute_len, substitute_len, print_len].into_iter().enumerate() {
            patch_u16(out, start + 2 * index, value);
        }
    }
}
