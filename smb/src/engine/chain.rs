//! A frame's requests, one after the other, and their responses, which leave as one frame
//! ([MS-SMB2] 3.3.5.2.7, 3.3.4.1.3).

use std::ops::Range;
use std::sync::Arc;

use forebay_smbdirect::wire::Token;

use super::remote::RemoteWrite;
use super::step::{Reply, Request, Resumption};
use super::tally::Taken;
use crate::crypto::SigningKey;
use crate::fs::{Frame, Payload};
use crate::ids::FileId;
use crate::status::NtStatus;
use crate::wire::{HEADER_LEN, Header, HeaderFlags};

/// A frame being worked on.
pub(super) struct Chain {
    pub(super) frame: Arc<dyn Frame>,
    /// Requests with their ranges in the frame, CANCEL taken out.
    pub(super) requests: Vec<(Header, Range<usize>)>,
    /// The next one to begin.
    pub(super) next: usize,
    /// The one that waits, if any.
    pub(super) waiting: Option<Waiting>,
    /// What related operations inherit.
    pub(super) related: Related,
    pub(super) responses: Vec<Response>,
    /// The session whose key opened the frame; the answer is sealed for it.
    pub(super) sealed_for: Option<u64>,
    /// Bytes that it keeps in memory: its frame, and the answers that are being made.
    pub(super) pinned_bytes: u64,
    /// Set while the request waits whose interim response was sent: the final one carries it and grants nothing.
    pub(super) async_id: Option<u64>,
}

/// A request that waits for a backend or for another request.
pub(super) struct Waiting {
    pub(super) request: Request,
    pub(super) resumption: Resumption,
}

/// What a related operation takes from the one before it ([MS-SMB2] 3.3.5.2.7.2).
#[derive(Default, Clone)]
pub(super) struct Related {
    pub(super) session_id: u64,
    pub(super) tree_id: u32,
    pub(super) file: Option<FileId>,
    /// The one before it had no session, or nothing before it either: there is nothing to take over.
    pub(super) broken: bool,
    /// A CREATE of this chain failed: there is no file for those that rely on it.
    pub(super) create_error: Option<NtStatus>,
}

/// A response that is ready but for its NextCommand and signature.
pub(super) struct Response {
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    pub(super) payload: Option<Box<dyn Payload>>,
    pub(super) remote: Option<RemoteWrite>,
    pub(super) invalidate: Option<Token>,
    pub(super) sign: Option<SigningKey>,
    /// What it takes of a limit until it is sent.
    pub(super) counted: Option<Taken>,
}

impl Response {
    /// Bytes of it in a frame.
    pub(super) fn length(&self) -> u64 {
        (HEADER_LEN + self.body.len() + self.payload.as_ref().map_or(0, |p| p.length())) as u64
    }
}

/// The body of the ERROR response without data ([MS-SMB2] 2.2.2): one byte of ErrorData is always there.
pub(super) const ERROR_BODY: [u8; 9] = [9, 0, 0, 0, 0, 0, 0, 0, 0];

impl Response {
    pub(super) fn error(header: Header) -> Self {
        Self::reply(header, Reply::ok(ERROR_BODY.to_vec()))
    }

    pub(super) fn reply(header: Header, reply: Reply) -> Self {
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

/// Lays the responses out as one frame: padding between them to 8 bytes, NextCommand, signatures.
pub(super) fn assemble(responses: Vec<Response>) -> Vec<Segment> {
    let mut segments = Vec::with_capacity(responses.len() * 2);
    let last = responses.len().saturating_sub(1);
    for (index, response) in responses.into_iter().enumerate() {
        let Response { mut header, body, payload, sign, .. } = response;
        let length = HEADER_LEN + body.len() + payload.as_ref().map_or(0, |p| p.length());
        let padding = if index == last { 0 } else { length.next_multiple_of(8) - length };
        header.next_command = if index == last { 0 } else { (length + padding) as u32 };
        if sign.is_some() {
            header.flags.insert(HeaderFlags::SIGNED);
        }
        let mut head = Vec::with_capacity(HEADER_LEN + body.len() + 8);
        header.encode(&mut head);
        head.extend_from_slice(&body);
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
