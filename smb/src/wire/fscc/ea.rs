//! Extended attributes ([MS-FSCC] 2.4.16, 2.4.16.1). Names are bytes of the server's code page, ASCII in practice.

use crate::wire::cursor::{Put, Reader, align, len_u16, patch_u32, zeros};
use crate::wire::newtype::open_flags;
use crate::wire::{Fault, Malformed, limits};

open_flags!(
    /// `Flags`.
    EaFlags(u8) { FILE_NEED_EA = 0x80 }
);

/// `FILE_FULL_EA_INFORMATION`: a name and its value. When set, an empty value deletes the attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct FullEa<'a> {
    pub flags: EaFlags,
    pub name: &'a [u8],
    pub value: &'a [u8],
}

impl<'a> FullEa<'a> {
    /// Reads a list; an empty buffer has no attributes.
    pub fn parse_list(bytes: &'a [u8]) -> Result<Vec<Self>, Malformed> {
        parse_list(bytes, |r| {
            let flags = r.get()?;
            let name_len = r.get::<u8>()?;
            let value_len = r.get::<u16>()?;
            let name = r.take(name_len.into())?;
            // The terminator, which the length does not include.
            if r.get::<u8>()? != 0 {
                return Err(r.fault(Fault::Value));
            }
            Ok(Self { flags, name, value: r.take(value_len.into())? })
        })
    }

    /// Appends a list. Names have at most 255 bytes, values at most 65535.
    pub fn encode_list(attributes: &[Self], out: &mut Vec<u8>) {
        encode_list(attributes, out, |attribute, out| {
            out.put(attribute.flags);
            out.put(u8::try_from(attribute.name.len()).unwrap_or(u8::MAX));
            out.put(len_u16(attribute.value.len()));
            out.extend_from_slice(attribute.name);
            zeros(out, 1);
            out.extend_from_slice(attribute.value);
        });
    }
}

/// `FILE_GET_EA_INFORMATION`: the name of a requested attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct GetEa<'a> {
    pub name: &'a [u8],
}

impl<'a> GetEa<'a> {
    /// Reads a list; an empty buffer has no names.
    pub fn parse_list(bytes: &'a [u8]) -> Result<Vec<Self>, Malformed> {
        parse_list(bytes, |r| {
            let len = r.get::<u8>()?;
            let name = r.take(len.into())?;
            if r.get::<u8>()? != 0 {
                return Err(r.fault(Fault::Value));
            }
            Ok(Self { name })
        })
    }

    /// Appends a list.
    pub fn encode_list(names: &[Self], out: &mut Vec<u8>) {
        encode_list(names, out, |ea, out| {
            out.put(u8::try_from(ea.name.len()).unwrap_or(u8::MAX));
            out.extend_from_slice(ea.name);
            zeros(out, 1);
        });
    }
}

fn parse_list<'a, T>(
    bytes: &'a [u8],
    parse: impl Fn(&mut Reader<'a>) -> Result<T, Malformed>,
) -> Result<Vec<T>, Malformed> {
    let mut elements = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let mut r = Reader::new(rest, "extended attributes");
        if elements.len() == limits::EXTENDED_ATTRIBUTES_MAX {
            return Err(r.fault(Fault::TooMany));
        }
        let next = r.get::<u32>()? as usize;
        elements.push(parse(&mut r)?);
        if next == 0 {
            break;
        }
        if next < r.position() || !next.is_multiple_of(4) || next > rest.len() {
            return Err(r.fault(Fault::Offset));
        }
        rest = &rest[next..];
    }
    Ok(elements)
}

fn encode_list<T>(elements: &[T], out: &mut Vec<u8>, encode: impl Fn(&T, &mut Vec<u8>)) {
    for (index, element) in elements.iter().enumerate() {
        let start = out.len();
        zeros(out, 4);
        encode(element, out);
        if index + 1 < elements.len() {
            align(out, start, 4);
            let next = out.len() - start;
            patch_u32(out, start, next);
        }
    }
}
