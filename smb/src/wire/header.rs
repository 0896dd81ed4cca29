//! The SMB2 packet header ([MS-SMB2] 2.2.1).

use super::cursor::{Put, Reader};
use super::newtype::{open_enum, open_flags};
use super::{Fault, Malformed};
use crate::status::NtStatus;

/// Bytes of the SMB2 header.
pub const HEADER_LEN: usize = 64;
/// The first four bytes of an SMB2 message.
pub const PROTOCOL_ID: [u8; 4] = *b"\xfeSMB";
/// Offset of `Status` in a header.
pub const STATUS_OFFSET: usize = 8;
/// Offset of `Flags` in a header.
pub const FLAGS_OFFSET: usize = 16;
/// Offset of `NextCommand` in a header.
pub const NEXT_COMMAND_OFFSET: usize = 20;
/// Offset of `MessageId` in a header.
pub const MESSAGE_ID_OFFSET: usize = 24;
/// Offset of `Signature` in a header.
pub const SIGNATURE_OFFSET: usize = 48;
/// The message id of all messages that do not answer a request: break notifications ([MS-SMB2] 2.2.23.1).
pub const UNSOLICITED_MESSAGE_ID: u64 = u64::MAX;

open_enum!(
    /// `Command` ([MS-SMB2] 2.2.1.2).
    Command(u16) {
        NEGOTIATE = 0x00, SESSION_SETUP = 0x01, LOGOFF = 0x02, TREE_CONNECT = 0x03, TREE_DISCONNECT = 0x04,
        CREATE = 0x05, CLOSE = 0x06, FLUSH = 0x07, READ = 0x08, WRITE = 0x09, LOCK = 0x0a, IOCTL = 0x0b,
        CANCEL = 0x0c, ECHO = 0x0d, QUERY_DIRECTORY = 0x0e, CHANGE_NOTIFY = 0x0f, QUERY_INFO = 0x10,
        SET_INFO = 0x11, OPLOCK_BREAK = 0x12, SERVER_TO_CLIENT_NOTIFICATION = 0x13,
    }
);

open_flags!(
    /// `Flags` of the header ([MS-SMB2] 2.2.1.2).
    HeaderFlags(u32) {
        SERVER_TO_REDIR = 0x0000_0001, ASYNC_COMMAND = 0x0000_0002, RELATED_OPERATIONS = 0x0000_0004,
        SIGNED = 0x0000_0008, PRIORITY_MASK = 0x0000_0070, DFS_OPERATIONS = 0x1000_0000,
        REPLAY_OPERATION = 0x2000_0000,
    }
);

/// The eight bytes that depend on [`HeaderFlags::ASYNC_COMMAND`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// [MS-SMB2] 2.2.1.2.
    Sync {
        /// Reserved; clients set a process number or 0xFEFF here.
        process_id: u32,
        /// `TreeId`.
        tree_id: u32,
    },
    /// [MS-SMB2] 2.2.1.1.
    Async {
        /// `AsyncId`.
        async_id: u64,
    },
}

/// The SMB2 packet header, sync or async.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// `CreditCharge`; zero in dialect 2.0.2.
    pub credit_charge: u16,
    /// `Status` in responses; in requests of 3.x the low half is [`Header::channel_sequence`].
    pub status: NtStatus,
    /// `Command`.
    pub command: Command,
    /// `CreditRequest` or `CreditResponse`.
    pub credits: u16,
    /// `Flags`. [`HeaderFlags::ASYNC_COMMAND`] follows [`Header::ids`] when encoded.
    pub flags: HeaderFlags,
    /// `NextCommand`: bytes to the next header of the compound, zero in the last message.
    pub next_command: u32,
    /// `MessageId`.
    pub message_id: u64,
    /// `TreeId` or `AsyncId`.
    pub ids: Ids,
    /// `SessionId`.
    pub session_id: u64,
    /// `Signature`.
    pub signature: [u8; 16],
}

impl Header {
    /// A request with only a command and a message id.
    #[must_use]
    pub const fn request(command: Command, message_id: u64) -> Self {
        Self {
            credit_charge: 1,
            status: NtStatus::SUCCESS,
            command,
            credits: 1,
            flags: HeaderFlags::empty(),
            next_command: 0,
            message_id,
            ids: Ids::Sync { process_id: 0, tree_id: 0 },
            session_id: 0,
            signature: [0; 16],
        }
    }

    /// The header of the response to this request: no credits, not signed, not compounded; the caller sets those.
    #[must_use]
    pub fn response(&self, status: NtStatus) -> Self {
        Self {
            credit_charge: self.credit_charge,
            status,
            command: self.command,
            credits: 0,
            // [MS-SMB2] 3.3.4.1: the response keeps the request's flags for relation and priority.
            flags: HeaderFlags::SERVER_TO_REDIR
                | (self.flags & (HeaderFlags::RELATED_OPERATIONS | HeaderFlags::PRIORITY_MASK)),
            next_command: 0,
            message_id: self.message_id,
            ids: match self.ids {
                Ids::Sync { .. } => self.ids,
                Ids::Async { .. } => Ids::Sync { process_id: 0, tree_id: 0 },
            },
            session_id: self.session_id,
            signature: [0; 16],
        }
    }

    /// Reads the header at the start of `msg`.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(msg, "header");
        if r.array()? != PROTOCOL_ID {
            return Err(Malformed { fault: Fault::ProtocolId, what: "header", offset: 0 });
        }
        if r.get::<u16>()? != HEADER_LEN as u16 {
            return Err(Malformed { fault: Fault::StructureSize, what: "header", offset: 4 });
        }
        let credit_charge = r.get()?;
        let status = r.get()?;
        let command = r.get()?;
        let credits = r.get()?;
        let flags: HeaderFlags = r.get()?;
        let next_command = r.get()?;
        let message_id = r.get()?;
        let ids = if flags.contains(HeaderFlags::ASYNC_COMMAND) {
            Ids::Async { async_id: r.get()? }
        } else {
            Ids::Sync { process_id: r.get()?, tree_id: r.get()? }
        };
        let session_id = r.get()?;
        let signature = r.get()?;
        Ok(Self {
            credit_charge,
            status,
            command,
            credits,
            flags,
            next_command,
            message_id,
            ids,
            session_id,
            signature,
        })
    }

    /// Appends the header, [`HEADER_LEN`] bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(PROTOCOL_ID);
        out.put_u16(HEADER_LEN as u16);
        out.put(self.credit_charge);
        out.put(self.status);
        out.put(self.command);
        out.put(self.credits);
        let flags = self.flags.without(HeaderFlags::ASYNC_COMMAND);
        match self.ids {
            Ids::Sync { .. } => out.put(flags),
            Ids::Async { .. } => out.put(flags | HeaderFlags::ASYNC_COMMAND),
        }
        out.put(self.next_command);
        out.put(self.message_id);
        match self.ids {
            Ids::Sync { process_id, tree_id } => {
                out.put(process_id);
                out.put(tree_id);
            }
            Ids::Async { async_id } => out.put(async_id),
        }
        out.put(self.session_id);
        out.put(self.signature);
    }

    /// `ChannelSequence` of a request in dialects 3.x ([MS-SMB2] 2.2.1.2).
    #[must_use]
    pub const fn channel_sequence(&self) -> u16 {
        self.status.0 as u16
    }

    /// `TreeId`, or zero for an async header, which has none.
    #[must_use]
    pub const fn tree_id(&self) -> u32 {
        match self.ids {
            Ids::Sync { tree_id, .. } => tree_id,
            Ids::Async { .. } => 0,
        }
    }

    /// `AsyncId`, if this is an async header.
    #[must_use]
    pub const fn async_id(&self) -> Option<u64> {
        match self.ids {
            Ids::Async { async_id } => Some(async_id),
            Ids::Sync { .. } => None,
        }
    }

    /// Whether a server sent this message.
    #[must_use]
    pub const fn is_response(&self) -> bool {
        self.flags.contains(HeaderFlags::SERVER_TO_REDIR)
    }
}
