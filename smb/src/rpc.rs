//! Remote procedure calls over named pipes ([MS-RPCE], [C706]): the subset that clients need to list a server's shares.
//!
//! An [`Association`] is the server's end of a pipe that a client has opened. It accepts protocol data units (PDUs) as the
//! client writes them, in pieces of any size, and queues the answers for reading. It looks nothing up and never waits: the
//! data that calls can report are passed in as [`Exposed`].

mod ndr;
mod pdu;
mod srvsvc;
mod wkssvc;

use std::collections::VecDeque;

use self::pdu::{Bind, ContextResult, Fragment, Header, PacketType, Syntax};
use crate::limits::{RPC_ANSWER_BYTES_MAX, RPC_CONTEXTS_MAX, RPC_REQUEST_BYTES_MAX, RPC_WRITE_BYTES_MAX};
use crate::wire::Malformed;

/// Data that calls can report to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exposed {
    /// NetBIOS name of the server.
    pub server_name: String,
    /// The shares that this client may connect to.
    pub shares: Vec<Share>,
}

/// A share as listed in [MS-SRVS] 2.2.4.23 (SHARE_INFO_1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Its name.
    pub name: String,
    /// Its type.
    pub kind: ShareKind,
    /// A remark for users.
    pub remark: String,
}

/// Type of a share ([MS-SRVS] 2.2.2.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareKind {
    /// Files: STYPE_DISKTREE.
    Disk,
    /// Named pipes: STYPE_IPC with STYPE_SPECIAL.
    Pipes,
}

/// An interface that is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interface {
    /// Server service ([MS-SRVS]).
    Srvsvc,
    /// Workstation service ([MS-WKST]).
    Wkssvc,
}

impl Interface {
    /// The interface of a pipe; pipe names are case-insensitive.
    #[must_use]
    pub fn of_pipe(name: &str) -> Option<Self> {
        [Self::Srvsvc, Self::Wkssvc].into_iter().find(|i| name.eq_ignore_ascii_case(i.pipe()))
    }

    const fn pipe(self) -> &'static str {
        match self {
            Self::Srvsvc => "srvsvc",
            Self::Wkssvc => "wkssvc",
        }
    }

    const fn syntax(self) -> Syntax {
        match self {
            Self::Srvsvc => srvsvc::SYNTAX,
            Self::Wkssvc => wkssvc::SYNTAX,
        }
    }

    fn call(self, opnum: u16, stub: &[u8], exposed: &Exposed) -> Result<Vec<u8>, FaultStatus> {
        match self {
            Self::Srvsvc => srvsvc::call(opnum, stub, exposed),
            Self::Wkssvc => wkssvc::call(opnum, stub, exposed),
        }
    }
}

/// The status of a fault PDU ([C706] appendix E, [MS-RPCE] 2.2.2.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FaultStatus(u32);

impl FaultStatus {
    /// `nca_s_op_rng_error`: no such operation.
    const OP_RANGE: Self = Self(0x1c01_0002);
    /// `nca_s_unk_if`: the presentation context was not negotiated.
    const UNKNOWN_INTERFACE: Self = Self(0x1c01_0003);
    /// `RPC_X_BAD_STUB_DATA`.
    const BAD_STUB_DATA: Self = Self(0x0000_06f7);
}

impl From<Malformed> for FaultStatus {
    fn from(_: Malformed) -> Self {
        Self::BAD_STUB_DATA
    }
}

/// The peer violates the protocol; the pipe cannot be used any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

impl From<Malformed> for Broken {
    fn from(_: Malformed) -> Self {
        Self
    }
}

/// A message, or the part of it that was requested, and whether more of it follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Bytes to send.
    pub bytes: Vec<u8>,
    /// Whether the message continues.
    pub more: bool,
}

/// The server's end of a pipe.
#[derive(Debug)]
pub struct Association {
    interface: Interface,
    /// Negotiated presentation contexts; `None` before the client has bound.
    contexts: Option<Vec<u16>>,
    /// The longest PDU that the client accepts.
    fragment_bytes_max: usize,
    /// A PDU that has not been received completely.
    input: Vec<u8>,
    /// A request with more fragments to follow.
    request: Option<Request>,
    /// PDUs that have not been read yet.
    output: VecDeque<Vec<u8>>,
}

#[derive(Debug)]
struct Request {
    call_id: u32,
    context_id: u16,
    opnum: u16,
    stub: Vec<u8>,
}

impl Association {
    /// A pipe that was just opened.
    #[must_use]
    pub const fn new(interface: Interface) -> Self {
        Self {
            interface,
            contexts: None,
            fragment_bytes_max: pdu::FRAGMENT_BYTES_MAX,
            input: Vec::new(),
            request: None,
            output: VecDeque::new(),
        }
    }

    /// Accepts bytes that the client writes, and answers the calls that they complete.
    ///
    /// # Errors
    /// [`Broken`] if the bytes are not a PDU, or are one that clients must not send, or exceed the limits. The caller must
    /// then abandon the pipe.
    pub fn write(&mut self, bytes: &[u8], exposed: &Exposed) -> Result<(), Broken> {
        if bytes.len() > RPC_WRITE_BYTES_MAX {
            return Err(Broken);
        }
        let mut rest = bytes;
        loop {
            // First the header, then the length in it.
            let wanted = match Header::parse(&self.input)? {
                None => pdu::HEADER_LEN,
                Some(header) => header.fragment_len.into(),
            };
            let missing = wanted.saturating_sub(self.input.len());
            if missing == 0 && self.input.len() >= pdu::HEADER_LEN {
                let pdu = std::mem::take(&mut self.input);
                self.handle(&pdu, exposed)?;
                continue;
            }
            if rest.is_empty() {
                return Ok(());
            }
            let (now, later) = rest.split_at(missing.min(rest.len()));
            self.input.extend_from_slice(now);
            rest = later;
        }
    }

    /// Returns at most `bytes_max` bytes of the next PDU; `None` if there is no answer to read.
    pub fn read(&mut self, bytes_max: usize) -> Option<Message> {
        let mut bytes = self.output.pop_front()?;
        let more = bytes.len() > bytes_max;
        if more {
            let rest = bytes.split_off(bytes_max);
            self.output.push_front(rest);
        }
        Some(Message { bytes, more })
    }

    /// Whether there is an answer to read.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        !self.output.is_empty()
    }

    fn handle(&mut self, pdu: &[u8], exposed: &Exposed) -> Result<(), Broken> {
        let Some(header) = Header::parse(pdu)? else { return Err(Broken) };
        match header.packet_type {
            PacketType::BIND if self.contexts.is_none() => self.bind(header, pdu, PacketType::BIND_ACK)?,
            PacketType::ALTER_CONTEXT if self.contexts.is_some() => {
                self.bind(header, pdu, PacketType::ALTER_CONTEXT_RESP)?;
            }
            PacketType::REQUEST if self.contexts.is_some() => self.request(header, pdu, exposed)?,
            // [C706] 12.6.4.8, 12.6.4.11: calls complete before a client can cancel or orphan them.
            PacketType::CO_CANCEL | PacketType::ORPHANED => {}
            _ => return Err(Broken),
        }
        let unread: usize = self.output.iter().map(Vec::len).sum();
        if unread > RPC_ANSWER_BYTES_MAX { Err(Broken) } else { Ok(()) }
    }

    /// [MS-RPCE] 3.3.1.5.2: negotiates presentation contexts, each an interface and an encoding of its data.
    fn bind(&mut self, header: Header, pdu: &[u8], answer: PacketType) -> Result<(), Broken> {
        // The session has authenticated the client; no further authentication is offered here.
        if header.auth_len != 0 {
            if answer != PacketType::BIND_ACK {
                return Err(Broken);
            }
            self.output.push_back(pdu::bind_nak(header.call_id, pdu::AUTHENTICATION_NOT_RECOGNIZED));
            return Ok(());
        }
        let bind = Bind::parse(pdu)?;
        let known = self.contexts.get_or_insert_default();
        let mut results = Vec::new();
        for context in &bind.contexts {
            let result = if context.interface != self.interface.syntax() {
                ContextResult::UnknownInterface
            } else if !context.takes_ndr {
                ContextResult::UnknownEncoding
            } else if known.len() >= RPC_CONTEXTS_MAX {
                ContextResult::TooMany
            } else {
                known.push(context.id);
                ContextResult::Accepted
            };
            results.push(result);
        }
        if answer == PacketType::BIND_ACK {
            self.fragment_bytes_max = bind.fragment_bytes_max();
        }
        self.output.push_back(pdu::bind_ack(answer, header.call_id, self.interface.pipe(), &results));
        Ok(())
    }

    fn request(&mut self, header: Header, pdu: &[u8], exposed: &Exposed) -> Result<(), Broken> {
        if header.auth_len != 0 {
            return Err(Broken);
        }
        let Fragment { context_id, opnum, stub } = Fragment::parse(header, pdu)?;
        let mut request = match self.request.take() {
            None if header.is_first() => {
                Request { call_id: header.call_id, context_id, opnum, stub: Vec::new() }
            }
            Some(request) if !header.is_first() && request.call_id == header.call_id => request,
            _ => return Err(Broken),
        };
        if request.stub.len() + stub.len() > RPC_REQUEST_BYTES_MAX {
            return Err(Broken);
        }
        request.stub.extend_from_slice(stub);
        if !header.is_last() {
            self.request = Some(request);
            return Ok(());
        }
        let Request { call_id, context_id, opnum, stub } = request;
        let known = self.contexts.as_ref().is_some_and(|contexts| contexts.contains(&context_id));
        let result = if known {
            self.interface.call(opnum, &stub, exposed)
        } else {
            Err(FaultStatus::UNKNOWN_INTERFACE)
        };
        match result {
            Ok(stub) => {
                self.output.extend(pdu::response(call_id, context_id, &stub, self.fragment_bytes_max));
            }
            Err(FaultStatus(status)) => self.output.push_back(pdu::fault(call_id, context_id, status)),
        }
        Ok(())
    }
}
