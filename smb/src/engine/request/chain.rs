//! The requests of a frame, processed in order, and their responses, which are sent as one frame ([MS-SMB2] 3.3.5.2.7,
//! 3.3.4.1.3).

use std::ops::Range;
use std::sync::Arc;

use forebay_smbdirect::wire::Token;
use smallvec::SmallVec;

use crate::crypto::SigningKey;
use crate::engine::request::step::{RemoteWrite, Reply, Request, Resumption, SHORT_BODY_MAX};
use crate::engine::tally::Taken;
use crate::fs::{Frame, Payload};
use crate::ids::FileId;
use crate::status::NtStatus;
use crate::wire::{HEADER_LEN, Header, HeaderFlags};

/// Requests with their ranges in their frame. Most frames have one request, which needs no allocation.
pub(in crate::engine) type Requests = SmallVec<[(Header, Range<usize>); 1]>;

/// The responses of a frame, stored like [`Requests`].
pub(in crate::engine) type Responses = SmallVec<[Response; 1]>;

/// The parts of a frame to send. A response to a READ has two.
pub type Segments = SmallVec<[Segment; 2]>;

/// A frame in progress.
pub(in crate::engine) struct Chain {
    pub(in crate::engine) frame: Arc<dyn Frame>,
    /// Requests with their ranges in the frame, without CANCEL.
    pub(in crate::engine) requests: Requests,
    /// The index of the next request to begin.
    pub(in crate::engine) next: usize,
    /// The request that waits, if any.
    pub(in crate::engine) waiting: Option<Waiting>,
    /// State that related operations inherit.
    pub(in crate::engine) related: Related,
    pub(in crate::engine) responses: Responses,
    /// The session with the key that opened the frame; the answer is sealed for it.
    pub(in crate::engine) sealed_for: Option<u64>,
    /// Bytes that the chain keeps in memory: its frame and the answers in preparation.
    pub(in crate::engine) pinned_bytes: u64,
    /// Set while a request waits after its interim response. The final response carries it and grants no credits.
    pub(in crate::engine) async_id: Option<u64>,
}

/// A request that waits for a backend or for another request.
pub(in crate::engine) struct Waiting {
    pub(in crate::engine) request: Request,
    pub(in crate::engine) resumption: Resumption,
}

/// State that a related operation inherits from the operation before it ([MS-SMB2] 3.3.5.2.7.2).
#[derive(Default, Clone)]
pub(in crate::engine) struct Related {
    pub(in crate::engine) session_id: u64,
    pub(in crate::engine) tree_id: u32,
    pub(in crate::engine) file: Option<FileId>,
    /// The operation before it had no session, or was a related operation without a predecessor: there is nothing to
    /// inherit.
    pub(in crate::engine) broken: bool,
    /// A CREATE of this chain failed: the operations that rely on it have no file.
    pub(in crate::engine) create_error: Option<NtStatus>,
}

/// A response that is complete except for its NextCommand and signature.
pub(in crate::engine) struct Response {
    pub(in crate::engine) header: Header,
    pub(in crate::engine) body: Vec<u8>,
    pub(in crate::engine) payload: Option<Box<dyn Payload>>,
    pub(in crate::engine) remote: Option<RemoteWrite>,
    pub(in crate::engine) invalidate: Option<Token>,
    pub(in crate::engine) sign: Option<SigningKey>,
    /// Its share of a limit until it is sent.
    pub(in crate::engine) counted: Option<Taken>,
}

impl Response {
    /// Its length in a frame, in bytes.
    pub(in crate::engine) fn length(&self) -> u64 {
        (HEADER_LEN + self.body.len() + self.payload.as_ref().map_or(0, |p| p.length())) as u64
    }
}

/// The body of the ERROR response without data ([MS-SMB2] 2.2.2): one byte of ErrorData is always present.
pub(in crate::engine) const ERROR_BODY: [u8; 9] = [9, 0, 0, 0, 0, 0, 0, 0, 0];

impl Response {
    pub(in crate::engine) fn error(header: Header) -> Self {
        Self::reply(header, Reply::ok(ERROR_BODY.to_vec()))
    }

    pub(in crate::engine) fn reply(header: Header, reply: Reply) -> Self {
        let Reply { status: _, body, payload, remote, counted } = reply;
        Self { header, body, payload, remote, invalidate: None, sign: None, counted }
    }
}

/// A part of a frame to send.
pub enum Segment {
    /// Bytes made by the protocol: headers, bodies, padding.
    Bytes(Vec<u8>),
    /// Data that a backend read.
    Payload(Box<dyn Payload>),
}

impl Segment {
    /// Bytes to send.
    #[must_use]
    pub fn length(&self) -> usize {
        match self {
            Self::Bytes(b) => b.len(),
            Self::Payload(p) => p.length(),
        }
    }

    /// The bytes to send.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(b) => b,
            Self::Payload(p) => p.bytes(),
        }
    }
}

/// Puts the header before a body, in place if the body is short and has capacity for the header ([`Reply::short`]).
fn with_header(header: &Header, mut body: Vec<u8>) -> Vec<u8> {
    let length = body.len();
    let mut copy = [0; SHORT_BODY_MAX];
    if length > SHORT_BODY_MAX || body.capacity() < HEADER_LEN + length {
        let mut head = Vec::with_capacity(HEADER_LEN + length + 8);
        header.encode(&mut head);
        head.extend_from_slice(&body);
        return head;
    }
    copy[..length].copy_from_slice(&body);
    body.clear();
    header.encode(&mut body);
    body.extend_from_slice(&copy[..length]);
    body
}

/// Lays the responses out as one frame: sets NextCommand, signs, and pads each of several responses to 8 bytes. The
/// specification leaves the padding of the last one open; Windows pads it.
pub(in crate::engine) fn assemble(responses: Responses) -> Segments {
    let mut segments = Segments::new();
    let last = responses.len().saturating_sub(1);
    let compounded = last > 0;
    for (index, response) in responses.into_iter().enumerate() {
        let Response { mut header, body, payload, sign, .. } = response;
        let length = HEADER_LEN + body.len() + payload.as_ref().map_or(0, |p| p.length());
        let padding = if compounded { length.next_multiple_of(8) - length } else { 0 };
        header.next_command = if index == last { 0 } else { (length + padding) as u32 };
        if sign.is_some() {
            header.flags.insert(HeaderFlags::SIGNED);
        }
        let mut head = with_header(&header, body);
        let pad = [0u8; 8];
        let pad = pad.get(..padding).unwrap_or_default();
        match payload {
            None => {
                head.extend_from_slice(pad);
                if let Some(key) = sign {
                    let signature = key.sign(&[&head]);
                    head[48..64].copy_from_slice(&signature);
                }
                match segments.last_mut() {
                    Some(Segment::Bytes(before)) => before.extend_from_slice(&head),
                    _ => segments.push(Segment::Bytes(head)),
                }
            }
            Some(payload) => {
                if let Some(key) = sign {
                    let signature = key.sign(&[&head, payload.bytes(), pad]);
                    head[48..64].copy_from_slice(&signature);
                }
                match segments.last_mut() {
                    Some(Segment::Bytes(before)) => before.extend_from_slice(&head),
                    _ => segments.push(Segment::Bytes(head)),
                }
                segments.push(Segment::Payload(payload));
                if padding > 0 {
                    segments.push(Segment::Bytes(pad.to_vec()));
                }
            }
        }
    }
    segments
}
