//! Protocol data units of connection-oriented RPC ([C706] 12.6, [MS-RPCE] 2.2.2).

use crate::limits::RPC_CONTEXTS_MAX;
use crate::wire::cursor::{Put, Reader, align, len_u16, len_u32, patch_u16, zeros};
use crate::wire::{Fault, Malformed};

/// `PTYPE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PacketType(u8);

impl PacketType {
    pub(super) const REQUEST: Self = Self(0);
    pub(super) const RESPONSE: Self = Self(2);
    pub(super) const FAULT: Self = Self(3);
    pub(super) const BIND: Self = Self(11);
    pub(super) const BIND_ACK: Self = Self(12);
    pub(super) const BIND_NAK: Self = Self(13);
    pub(super) const ALTER_CONTEXT: Self = Self(14);
    pub(super) const ALTER_CONTEXT_RESP: Self = Self(15);
    pub(super) const CO_CANCEL: Self = Self(18);
    pub(super) const ORPHANED: Self = Self(19);
}

// `pfc_flags`.
const FIRST_FRAG: u8 = 0x01;
const LAST_FRAG: u8 = 0x02;
const OBJECT_UUID: u8 = 0x80;
const WHOLE: u8 = FIRST_FRAG | LAST_FRAG;

/// Bytes of the common header.
pub(super) const HEADER_LEN: usize = 16;
/// Bytes of a response before its stub data.
const RESPONSE_HEADER_LEN: usize = HEADER_LEN + 8;
/// The longest PDU that is sent and that clients are asked to send: the value that Windows uses for pipes.
pub(super) const FRAGMENT_BYTES_MAX: usize = 4280;
/// `MustRecvFragSize`: every implementation accepts this length ([C706] 12.6.2).
const FRAGMENT_BYTES_MIN: usize = 1432;
/// Reason of a BIND_NAK: the authentication type is not recognized ([MS-RPCE] 2.2.2.5).
pub(super) const AUTHENTICATION_NOT_RECOGNIZED: u16 = 8;
/// `packed_drep` of little-endian integers, ASCII and IEEE numbers.
const LITTLE_ENDIAN: [u8; 4] = [0x10, 0, 0, 0];
/// `assoc_group_id`: one group for all clients, without meaning.
const GROUP: u32 = 0x53f0;

/// An interface, or an encoding of data: `p_syntax_id_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Syntax {
    /// In wire format.
    uuid: [u8; 16],
    version: u32,
}

impl Syntax {
    const NONE: Self = Self { uuid: [0; 16], version: 0 };
    /// NDR, version 2 ([C706] appendix I).
    const NDR: Self = Self::new(0x8a88_5d04_1ceb_11c9_9fe8_0800_2b10_4860, 2, 0);

    /// `uuid` in its textual order.
    pub(super) const fn new(uuid: u128, major: u16, minor: u16) -> Self {
        let b = uuid.to_be_bytes();
        // The first three parts are integers.
        let uuid = [
            b[3], b[2], b[1], b[0], b[5], b[4], b[7], b[6], b[8], b[9], b[10], b[11], b[12], b[13], b[14],
            b[15],
        ];
        Self { uuid, version: (minor as u32) << 16 | major as u32 }
    }

    fn parse(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self { uuid: r.get()?, version: r.get()? })
    }

    fn encode(self, out: &mut Vec<u8>) {
        out.put(self.uuid);
        out.put(self.version);
    }
}

/// The common header.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) packet_type: PacketType,
    flags: u8,
    /// The total length, from [`HEADER_LEN`] to [`FRAGMENT_BYTES_MAX`].
    pub(super) fragment_len: u16,
    pub(super) auth_len: u16,
    pub(super) call_id: u32,
}

impl Header {
    /// `None` if the header is incomplete.
    pub(super) fn parse(bytes: &[u8]) -> Result<Option<Self>, Malformed> {
        if bytes.len() < HEADER_LEN {
            return Ok(None);
        }
        let mut r = Reader::new(bytes, "RPC header");
        let (major, minor) = (r.get::<u8>()?, r.get::<u8>()?);
        let packet_type = PacketType(r.get()?);
        let flags = r.get()?;
        let representation: [u8; 4] = r.get()?;
        let fragment_len = r.get()?;
        if major != 5 || minor > 1 || representation != LITTLE_ENDIAN {
            return Err(r.fault(Fault::ProtocolId));
        }
        if !(HEADER_LEN..=FRAGMENT_BYTES_MAX).contains(&usize::from(fragment_len)) {
            return Err(r.fault(Fault::StructureSize));
        }
        Ok(Some(Self { packet_type, flags, fragment_len, auth_len: r.get()?, call_id: r.get()? }))
    }

    pub(super) fn is_first(self) -> bool {
        self.flags & FIRST_FRAG != 0
    }

    pub(super) fn is_last(self) -> bool {
        self.flags & LAST_FRAG != 0
    }
}

/// BIND and ALTER_CONTEXT ([C706] 12.6.4.3).
pub(super) struct Bind {
    max_recv_frag: u16,
    pub(super) contexts: Vec<Context>,
}

/// A presentation context: `p_cont_elem_t`.
pub(super) struct Context {
    pub(super) id: u16,
    pub(super) interface: Syntax,
    pub(super) takes_ndr: bool,
}

impl Bind {
    pub(super) fn parse(pdu: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(pdu, "RPC bind");
        r.skip(HEADER_LEN + 2)?;
        let max_recv_frag = r.get()?;
        r.skip(4)?;
        let count: u8 = r.get()?;
        r.skip(3)?;
        let mut contexts = Vec::new();
        if usize::from(count) > RPC_CONTEXTS_MAX {
            return Err(r.fault(Fault::TooMany));
        }
        for _ in 0..count {
            let id = r.get()?;
            let encodings: u8 = r.get()?;
            r.skip(1)?;
            let interface = Syntax::parse(&mut r)?;
            let mut takes_ndr = false;
            for _ in 0..encodings {
                takes_ndr |= Syntax::parse(&mut r)? == Syntax::NDR;
            }
            contexts.push(Context { id, interface, takes_ndr });
        }
        Ok(Self { max_recv_frag, contexts })
    }

    /// The longest PDU to send to this client.
    pub(super) fn fragment_bytes_max(&self) -> usize {
        usize::from(self.max_recv_frag).clamp(FRAGMENT_BYTES_MIN, FRAGMENT_BYTES_MAX)
    }
}

/// The result for a presentation context: `p_result_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContextResult {
    Accepted,
    UnknownInterface,
    UnknownEncoding,
    TooMany,
}

/// A fragment of a request ([C706] 12.6.4.9).
pub(super) struct Fragment<'a> {
    pub(super) context_id: u16,
    pub(super) opnum: u16,
    pub(super) stub: &'a [u8],
}

impl<'a> Fragment<'a> {
    pub(super) fn parse(header: Header, pdu: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(pdu, "RPC request");
        r.skip(HEADER_LEN + 4)?;
        let context_id = r.get()?;
        let opnum = r.get()?;
        if header.flags & OBJECT_UUID != 0 {
            r.skip(16)?;
        }
        Ok(Self { context_id, opnum, stub: r.rest() })
    }
}

fn begin(packet_type: PacketType, flags: u8, call_id: u32) -> Vec<u8> {
    let mut out = vec![5, 0, packet_type.0, flags];
    out.put(LITTLE_ENDIAN);
    zeros(&mut out, 4);
    out.put(call_id);
    out
}

fn end(mut out: Vec<u8>) -> Vec<u8> {
    let len = out.len();
    patch_u16(&mut out, 8, len);
    out
}

/// BIND_ACK and ALTER_CONTEXT_RESP ([C706] 12.6.4.4).
pub(super) fn bind_ack(
    packet_type: PacketType,
    call_id: u32,
    pipe: &str,
    results: &[ContextResult],
) -> Vec<u8> {
    let mut out = begin(packet_type, WHOLE, call_id);
    out.put_u16(FRAGMENT_BYTES_MAX as u16);
    out.put_u16(FRAGMENT_BYTES_MAX as u16);
    out.put_u32(GROUP);
    let address = format!("\\PIPE\\{pipe}\0");
    out.put_u16(len_u16(address.len()));
    out.extend_from_slice(address.as_bytes());
    align(&mut out, 0, 4);
    out.put_u32(len_u32(results.len()));
    for result in results {
        // `provider_rejection`, and the reason.
        let (result, reason, encoding) = match result {
            ContextResult::Accepted => (0, 0, Syntax::NDR),
            ContextResult::UnknownInterface => (2, 1, Syntax::NONE),
            ContextResult::UnknownEncoding => (2, 2, Syntax::NONE),
            ContextResult::TooMany => (2, 3, Syntax::NONE),
        };
        out.put_u16(result);
        out.put_u16(reason);
        encoding.encode(&mut out);
    }
    end(out)
}

/// BIND_NAK ([C706] 12.6.4.5).
pub(super) fn bind_nak(call_id: u32, reason: u16) -> Vec<u8> {
    let mut out = begin(PacketType::BIND_NAK, WHOLE, call_id);
    out.put_u16(reason);
    // The supported versions: 5.0.
    out.extend_from_slice(&[1, 5, 0]);
    align(&mut out, 0, 4);
    end(out)
}

/// FAULT ([C706] 12.6.4.7).
pub(super) fn fault(call_id: u32, context_id: u16, status: u32) -> Vec<u8> {
    let mut out = begin(PacketType::FAULT, WHOLE, call_id);
    out.put_u32(0);
    out.put_u16(context_id);
    out.put_u16(0);
    out.put_u32(status);
    out.put_u32(0);
    end(out)
}

/// RESPONSE ([C706] 12.6.4.10), in as many PDUs as needed.
pub(super) fn response(call_id: u32, context_id: u16, stub: &[u8], bytes_max: usize) -> Vec<Vec<u8>> {
    // [C706] 12.6.3.1: stub data continue at a multiple of 8.
    let most = (bytes_max - RESPONSE_HEADER_LEN) & !7;
    let pieces = if stub.is_empty() { vec![stub] } else { stub.chunks(most).collect() };
    let last = pieces.len() - 1;
    let mut left = stub.len();
    let mut pdus = Vec::new();
    for (at, piece) in pieces.into_iter().enumerate() {
        let mut flags = 0;
        if at == 0 {
            flags |= FIRST_FRAG;
        }
        if at == last {
            flags |= LAST_FRAG;
        }
        let mut out = begin(PacketType::RESPONSE, flags, call_id);
        out.put_u32(len_u32(left));
        out.put_u16(context_id);
        out.put_u16(0);
        out.extend_from_slice(piece);
        left -= piece.len();
        pdus.push(end(out));
    }
    pdus
}
