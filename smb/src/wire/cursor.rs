//! Reads and writes little-endian fields, with bounds checks in one place.

use super::{Fault, HEADER_LEN, Malformed};
use crate::ids::FileId;

/// A value of fixed size on the wire.
pub(crate) trait Field: Sized {
    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed>;
    fn write(&self, out: &mut Vec<u8>);
}

/// A position in bytes that a peer sent.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    position: usize,
    what: &'static str,
}

impl<'a> Reader<'a> {
    pub(crate) const fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { bytes, position: 0, what }
    }

    /// The body of a message that starts with its SMB2 header; checks `StructureSize`.
    pub(crate) fn body(msg: &'a [u8], structure_size: u16, what: &'static str) -> Result<Self, Malformed> {
        let mut r = Self { bytes: msg, position: HEADER_LEN, what };
        if r.get::<u16>()? != structure_size {
            return Err(Malformed { fault: Fault::StructureSize, what, offset: HEADER_LEN as u32 });
        }
        Ok(r)
    }

    pub(crate) fn get<T: Field>(&mut self) -> Result<T, Malformed> {
        T::read(self)
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        // The position exceeds the length only for a message shorter than its header.
        let rest = self.bytes.get(self.position..).ok_or(self.fault(Fault::Truncated))?;
        let taken = rest.get(..len).ok_or(self.fault(Fault::Truncated))?;
        self.position += len;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let bytes = self.take(N)?;
        Ok(bytes.try_into().expect("take returns what was asked for"))
    }

    pub(crate) fn skip(&mut self, len: usize) -> Result<(), Malformed> {
        self.take(len).map(drop)
    }

    /// All remaining bytes.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        let rest = self.bytes.get(self.position..).unwrap_or_default();
        self.position = self.bytes.len();
        rest
    }

    pub(crate) fn remaining(&self) -> usize {
        self.bytes.len().saturating_sub(self.position)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.remaining() == 0
    }

    pub(crate) const fn position(&self) -> usize {
        self.position
    }

    /// A variable part given by offset (from the start of `bytes`) and length. It follows everything read so far: an offset
    /// into the header or the fixed part is invalid. Without a length the offset has no meaning.
    pub(crate) fn variable(&self, offset: usize, len: usize) -> Result<&'a [u8], Malformed> {
        if len == 0 {
            return Ok(&[]);
        }
        if offset < self.position {
            return Err(Malformed { fault: Fault::Offset, what: self.what, offset: offset as u32 });
        }
        let end = offset.checked_add(len);
        end.and_then(|end| self.bytes.get(offset..end)).ok_or(Malformed {
            fault: Fault::Truncated,
            what: self.what,
            offset: offset as u32,
        })
    }

    /// As [`Reader::variable`], for a part that extends to the end.
    pub(crate) fn variable_to_end(&self, offset: usize) -> Result<&'a [u8], Malformed> {
        let len = self.bytes.len().saturating_sub(offset);
        if len == 0 {
            return Err(Malformed { fault: Fault::Truncated, what: self.what, offset: offset as u32 });
        }
        self.variable(offset, len)
    }

    pub(crate) const fn fault(&self, fault: Fault) -> Malformed {
        Malformed { fault, what: self.what, offset: self.position as u32 }
    }
}

macro_rules! integer_fields {
    ($($int:ty),*) => {$(
        impl Field for $int {
            #[inline]
            fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
                r.array().map(Self::from_le_bytes)
            }
            #[inline]
            fn write(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
integer_fields!(u8, u16, u32, u64, i32, i64);

impl<const N: usize> Field for [u8; N] {
    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        r.array()
    }
    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
}

/// One byte; any value except zero is true, as in Windows.
impl Field for bool {
    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(r.get::<u8>()? != 0)
    }
    fn write(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
}

impl Field for FileId {
    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self { persistent: r.get()?, volatile: r.get()? })
    }
    fn write(&self, out: &mut Vec<u8>) {
        self.persistent.write(out);
        self.volatile.write(out);
    }
}

/// Appends to a message.
pub(crate) trait Put {
    fn put<T: Field>(&mut self, value: T);
    fn put_u16(&mut self, value: u16);
    fn put_u32(&mut self, value: u32);
}

impl Put for Vec<u8> {
    #[inline]
    fn put<T: Field>(&mut self, value: T) {
        value.write(self);
    }
    #[inline]
    fn put_u16(&mut self, value: u16) {
        value.write(self);
    }
    #[inline]
    fn put_u32(&mut self, value: u32) {
        value.write(self);
    }
}

pub(crate) fn zeros(out: &mut Vec<u8>, count: usize) {
    out.resize(out.len() + count, 0);
}

/// Appends zeros up to a multiple of `alignment` counted from `start`.
pub(crate) fn align(out: &mut Vec<u8>, start: usize, alignment: usize) {
    let len = out.len() - start;
    zeros(out, len.next_multiple_of(alignment) - len);
}

/// The distance from the SMB2 header, which precedes the body that began at `start`, to the end of `out`.
pub(crate) fn offset_from_header(out: &[u8], start: usize) -> usize {
    out.len() - start + HEADER_LEN
}

/// Overwrites two bytes reserved earlier, `at` counted from the start of `out`.
pub(crate) fn patch_u16(out: &mut [u8], at: usize, value: usize) {
    let value = u16::try_from(value).unwrap_or(u16::MAX);
    out[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

/// Overwrites four bytes reserved earlier, `at` counted from the start of `out`.
pub(crate) fn patch_u32(out: &mut [u8], at: usize, value: usize) {
    let value = u32::try_from(value).unwrap_or(u32::MAX);
    out[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// A length in its wire format. Callers limit the parts that they encode. A longer part would be a bug; its length is clamped
/// to a value that the peer rejects rather than wrapped to one that it accepts.
pub(crate) fn len_u16(len: usize) -> u16 {
    u16::try_from(len).unwrap_or(u16::MAX)
}

/// See [`len_u16`].
pub(crate) fn len_u32(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}
