//! Network Data Representation ([C706] chapter 14): the few constructs that the interfaces here use.

use crate::wire::cursor::{Put, Reader, align, len_u32};
use crate::wire::{Fault, Malformed, utf16};

/// The parameters of a call.
pub(super) struct Parameters<'a>(Reader<'a>);

impl<'a> Parameters<'a> {
    pub(super) const fn new(stub: &'a [u8]) -> Self {
        Self(Reader::new(stub, "RPC parameters"))
    }

    /// `unsigned long`.
    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        let padding = self.0.position().next_multiple_of(4) - self.0.position();
        self.0.skip(padding)?;
        self.0.get()
    }

    /// A pointer; returns whether it is not null.
    pub(super) fn pointer(&mut self) -> Result<bool, Malformed> {
        Ok(self.u32()? != 0)
    }

    /// `[string] wchar_t*`: conformant and varying, with its terminator.
    pub(super) fn string(&mut self) -> Result<String, Malformed> {
        let (size, offset, count) = (self.u32()?, self.u32()?, self.u32()?);
        let units = count as usize;
        if offset != 0 || count > size || units > self.0.remaining() / 2 {
            return Err(self.0.fault(Fault::Truncated));
        }
        let text = utf16::decode(self.0.take(2 * units)?)?;
        Ok(text.strip_suffix('\0').unwrap_or(&text).to_owned())
    }

    /// `[unique, string] wchar_t*`.
    pub(super) fn optional_string(&mut self) -> Result<Option<String>, Malformed> {
        if self.pointer()? { self.string().map(Some) } else { Ok(None) }
    }
}

/// The results of a call.
#[derive(Default)]
pub(super) struct Results {
    out: Vec<u8>,
    pointers: u32,
}

impl Results {
    /// `unsigned long`.
    pub(super) fn u32(&mut self, value: u32) -> &mut Self {
        align(&mut self.out, 0, 4);
        self.out.put_u32(value);
        self
    }

    /// A pointer to a value that follows later.
    pub(super) fn pointer(&mut self) -> &mut Self {
        // Numbered as by Windows; only zero has a meaning.
        let referent = 0x0002_0000 + 4 * self.pointers;
        self.pointers += 1;
        self.u32(referent)
    }

    /// A null pointer.
    pub(super) fn null(&mut self) -> &mut Self {
        self.u32(0)
    }

    /// `[string] wchar_t*`.
    pub(super) fn string(&mut self, text: &str) -> &mut Self {
        let units = len_u32(text.encode_utf16().count() + 1);
        self.u32(units).u32(0).u32(units);
        utf16::encode(text, &mut self.out);
        self.out.put_u16(0);
        self
    }

    pub(super) fn into_stub(self) -> Vec<u8> {
        self.out
    }
}
