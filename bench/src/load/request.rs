//! Requests: built once by the codec, then patched for the next use.

use std::sync::Arc;

use forebay_smb::ids::FileId;
use forebay_smb::wire::create::{CreateDisposition, CreateOptions, ImpersonationLevel, OplockLevel};
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::name_info::FileRenameInformation;
use forebay_smb::wire::header::MESSAGE_ID_OFFSET;
use forebay_smb::wire::{
    AccessMask, Capabilities, Command, FileAttributes, HEADER_LEN, Header, Ids, SecurityMode, ShareAccess,
    close, create, flush, query_directory, query_info, read, session_setup, set_info, write,
};

use super::credits;

// Offsets of the fields that change, [MS-SMB2] 2.2.1.2.
const CREDITS_OFFSET: usize = 14;
const TREE_ID_OFFSET: usize = 36;
const SESSION_ID_OFFSET: usize = 40;
// Same offsets in READ and in WRITE, [MS-SMB2] 2.2.19 and 2.2.21.
const LENGTH_OFFSET: usize = HEADER_LEN + 4;
const OFFSET_OFFSET: usize = HEADER_LEN + 8;
const FILE_ID_OFFSET: usize = HEADER_LEN + 16;

/// Requested length of a QUERY_DIRECTORY response: what one credit covers.
pub(crate) const DIRECTORY_BYTES: u32 = 64 * 1024;

/// Requested length of a QUERY_INFO response: enough for the longest name.
const INFORMATION_BYTES: u32 = 4096;

/// The identity that a connection puts into each request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Identity {
    pub(crate) session_id: u64,
    pub(crate) tree_id: u32,
}

/// A request without its frame. The next request reuses the buffer.
#[derive(Debug, Default)]
pub(crate) struct Request {
    /// From the SMB2 header on, without the payload of a WRITE.
    message: Vec<u8>,
    command: Option<Command>,
    charge: u16,
    payload: Option<Arc<[u8]>>,
}

impl Request {
    /// Header and body, without the payload of a WRITE.
    pub(crate) fn message(&mut self) -> &mut Vec<u8> {
        &mut self.message
    }

    /// The payload of a WRITE.
    pub(crate) fn payload(&self) -> Option<&Arc<[u8]>> {
        self.payload.as_ref()
    }

    /// SESSION_SETUP with a security token.
    pub(crate) fn set_session_setup(&mut self, flags: session_setup::Flags, token: &[u8]) {
        self.set(Command::SESSION_SETUP, |body| {
            session_setup::Request {
                flags,
                security_mode: SecurityMode::SIGNING_ENABLED,
                capabilities: Capabilities::empty(),
                channel: 0,
                previous_session_id: 0,
                security_buffer: token,
            }
            .encode(body);
        });
    }

    /// Its credit charge.
    pub(crate) fn charge(&self) -> u16 {
        self.charge
    }

    /// Fills in the fields that are only known when it is sent.
    pub(crate) fn address(&mut self, id: u64, credits: u16, identity: Identity) {
        self.patch(MESSAGE_ID_OFFSET, &id.to_le_bytes());
        self.patch(CREDITS_OFFSET, &credits.to_le_bytes());
        self.patch(TREE_ID_OFFSET, &identity.tree_id.to_le_bytes());
        self.patch(SESSION_ID_OFFSET, &identity.session_id.to_le_bytes());
    }

    fn patch(&mut self, at: usize, bytes: &[u8]) {
        self.message[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Any request; `encode` appends its body.
    pub(crate) fn set(&mut self, command: Command, encode: impl FnOnce(&mut Vec<u8>)) {
        self.set_with_charge(command, 1, encode);
    }

    fn set_with_charge(&mut self, command: Command, charge: u16, encode: impl FnOnce(&mut Vec<u8>)) {
        let mut header = Header::request(command, 0);
        header.credit_charge = charge;
        header.ids = Ids::Sync { process_id: 0xfeff, tree_id: 0 };
        self.message.clear();
        header.encode(&mut self.message);
        encode(&mut self.message);
        self.command = Some(command);
        self.charge = charge;
        self.payload = None;
    }

    /// READ.
    pub(crate) fn set_read(&mut self, file_id: FileId, offset: u64, length: u32) {
        if self.command == Some(Command::READ) {
            self.charge = credits::charge(length as usize);
            self.patch(6, &self.charge.to_le_bytes());
            self.patch(LENGTH_OFFSET, &length.to_le_bytes());
            return self.patch_range(file_id, offset);
        }
        self.set_with_charge(Command::READ, credits::charge(length as usize), |body| {
            read::Request {
                padding: read::RESPONSE_DATA_OFFSET,
                flags: read::Flags(0),
                length,
                offset,
                file_id,
                minimum_count: 0,
                channel: read::Channel::NONE,
                remaining_bytes: 0,
                channel_info: &[],
            }
            .encode(body);
        });
    }

    /// WRITE of the whole `payload`.
    pub(crate) fn set_write(&mut self, file_id: FileId, offset: u64, payload: &Arc<[u8]>) {
        let is_alike = self.payload.as_ref().is_some_and(|mine| mine.len() == payload.len());
        if self.command == Some(Command::WRITE) && is_alike {
            self.payload = Some(Arc::clone(payload));
            return self.patch_range(file_id, offset);
        }
        self.set_with_charge(Command::WRITE, credits::charge(payload.len()), |body| {
            write::Request {
                data_offset: write::REQUEST_DATA_OFFSET,
                length: u32::try_from(payload.len()).unwrap_or(u32::MAX),
                offset,
                file_id,
                channel: read::Channel::NONE,
                remaining_bytes: 0,
                flags: write::Flags(0),
                channel_info: &[],
            }
            .encode(body);
        });
        self.payload = Some(Arc::clone(payload));
    }

    fn patch_range(&mut self, file_id: FileId, offset: u64) {
        self.patch(OFFSET_OFFSET, &offset.to_le_bytes());
        self.patch(FILE_ID_OFFSET, &file_id.persistent.to_le_bytes());
        self.patch(FILE_ID_OFFSET + 8, &file_id.volatile.to_le_bytes());
    }

    /// CREATE that shares everything and requests no oplock.
    pub(crate) fn set_create(&mut self, name: &str, how: Opening) {
        self.set(Command::CREATE, |body| {
            create::Request {
                requested_oplock_level: OplockLevel::NONE,
                impersonation_level: ImpersonationLevel::IMPERSONATION,
                smb_create_flags: 0,
                desired_access: how.access,
                file_attributes: FileAttributes::NORMAL,
                share_access: ShareAccess::READ | ShareAccess::WRITE | ShareAccess::DELETE,
                create_disposition: how.disposition,
                create_options: how.options,
                name: name.to_owned(),
                contexts: Vec::new(),
            }
            .encode(body);
        });
    }

    /// CLOSE.
    pub(crate) fn set_close(&mut self, file_id: FileId) {
        self.set(Command::CLOSE, |body| close::Request { flags: close::Flags(0), file_id }.encode(body));
    }

    /// QUERY_INFO for the information that a stat(2) needs.
    pub(crate) fn set_query_info(&mut self, file_id: FileId) {
        self.set(Command::QUERY_INFO, |body| {
            query_info::Request {
                info_type: query_info::InfoType::FILE,
                file_info_class: FileInformationClass::FILE_ALL_INFORMATION.0,
                output_buffer_length: INFORMATION_BYTES,
                additional_information: 0,
                flags: query_info::Flags(0),
                file_id,
                input_buffer: &[],
            }
            .encode(body);
        });
    }

    /// FLUSH.
    pub(crate) fn set_flush(&mut self, file_id: FileId) {
        self.set(Command::FLUSH, |body| flush::Request { file_id }.encode(body));
    }

    /// SET_INFO that renames a file over another.
    pub(crate) fn set_rename(&mut self, file_id: FileId, to: &str) {
        let mut buffer = Vec::new();
        let name =
            FileRenameInformation { replace_if_exists: true, root_directory: 0, file_name: to.to_owned() };
        name.encode(&mut buffer);
        self.set(Command::SET_INFO, |body| {
            set_info::Request {
                info_type: query_info::InfoType::FILE,
                file_info_class: FileInformationClass::FILE_RENAME_INFORMATION.0,
                additional_information: 0,
                file_id,
                buffer: &buffer,
            }
            .encode(body);
        });
    }

    /// QUERY_DIRECTORY for the next entries, with the information that Linux and Windows request for a listing.
    pub(crate) fn set_query_directory(&mut self, file_id: FileId) {
        self.set(Command::QUERY_DIRECTORY, |body| {
            query_directory::Request {
                file_information_class: FileInformationClass::FILE_ID_FULL_DIRECTORY_INFORMATION,
                flags: query_directory::Flags(0),
                file_index: 0,
                file_id,
                output_buffer_length: DIRECTORY_BYTES,
                file_name: "*".to_owned(),
            }
            .encode(body);
        });
    }
}

/// Parameters of a CREATE.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opening {
    pub(crate) access: AccessMask,
    pub(crate) disposition: CreateDisposition,
    pub(crate) options: CreateOptions,
}

impl Opening {
    /// Reads an existing file.
    pub(crate) const READ: Self = Self {
        access: AccessMask::FILE_GENERIC_READ,
        disposition: CreateDisposition::OPEN,
        options: CreateOptions::NON_DIRECTORY_FILE,
    };
    /// Reads the attributes of an existing file.
    pub(crate) const ATTRIBUTES: Self = Self {
        access: AccessMask::FILE_READ_ATTRIBUTES,
        disposition: CreateDisposition::OPEN,
        options: CreateOptions::empty(),
    };
    /// Reads and writes an existing or a new file.
    pub(crate) const WRITE: Self = Self {
        access: AccessMask::FILE_GENERIC_READ.union(AccessMask::FILE_GENERIC_WRITE).union(AccessMask::DELETE),
        disposition: CreateDisposition::OPEN_IF,
        options: CreateOptions::NON_DIRECTORY_FILE,
    };
    /// Writes a file that is new or truncated.
    pub(crate) const REPLACE: Self = Self { disposition: CreateDisposition::OVERWRITE_IF, ..Self::WRITE };
    /// Writes a file that must be new.
    pub(crate) const NEW: Self = Self { disposition: CreateDisposition::CREATE, ..Self::WRITE };
    /// Removes a file when it is closed.
    pub(crate) const REMOVE: Self = Self {
        access: AccessMask::DELETE,
        disposition: CreateDisposition::OPEN,
        options: CreateOptions::DELETE_ON_CLOSE,
    };
    /// An existing directory.
    pub(crate) const DIRECTORY: Self = Self {
        access: AccessMask::FILE_GENERIC_READ,
        disposition: CreateDisposition::OPEN,
        options: CreateOptions::DIRECTORY_FILE,
    };
    /// A directory, created if it does not exist.
    pub(crate) const MAKE_DIRECTORY: Self =
        Self { disposition: CreateDisposition::OPEN_IF, ..Self::DIRECTORY };
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId { persistent: 7, volatile: 9 };
    const IDENTITY: Identity = Identity { session_id: 0x1122_3344_5566, tree_id: 77 };

    fn header(request: &Request) -> Header {
        Header::parse(&request.message).expect("a header")
    }

    #[test]
    fn patched_read_equals_a_newly_encoded_read() {
        let mut patched = Request::default();
        patched.set_read(FileId { persistent: 1, volatile: 2 }, 4096, 4096);
        patched.address(3, 10, Identity { session_id: 1, tree_id: 1 });
        patched.set_read(FILE, 5 << 32, 1 << 20);
        patched.address(1 << 40, 20, IDENTITY);
        let mut built = Request::default();
        built.set_read(FILE, 5 << 32, 1 << 20);
        built.address(1 << 40, 20, IDENTITY);
        assert_eq!(patched.message, built.message);
        assert_eq!(patched.charge(), 16);
        let (header, body) = (header(&patched), read::Request::parse(&patched.message).expect("a READ"));
        assert_eq!((header.command, header.message_id), (Command::READ, 1 << 40));
        assert_eq!((header.credit_charge, header.credits), (16, 20));
        assert_eq!((header.session_id, header.tree_id()), (IDENTITY.session_id, 77));
        assert_eq!((body.file_id, body.offset, body.length), (FILE, 5 << 32, 1 << 20));
    }

    #[test]
    fn patched_write_has_the_new_range_and_payload() {
        let payload = |count| Arc::<[u8]>::from(vec![1; count]);
        let mut request = Request::default();
        for (offset, count) in [(0, 100), (100, 100), (1 << 33, 200_000), (7, 1)] {
            request.set_write(FILE, offset, &payload(count));
            request.address(5, 1, IDENTITY);
            let body = write::Request::parse(&request.message).expect("a WRITE");
            assert_eq!((body.offset, body.length as usize, body.file_id), (offset, count, FILE));
            assert_eq!(usize::from(body.data_offset), request.message.len(), "the payload follows");
            assert_eq!(request.payload().expect("a payload").len(), count);
            assert_eq!(header(&request).credit_charge, credits::charge(count));
        }
        request.set_close(FILE);
        assert!(request.payload().is_none(), "the next request has none");
    }

    #[test]
    fn create_rename_query_directory_and_flush_requests_parse() {
        let mut request = Request::default();
        request.set_create(r"d\a", Opening::REMOVE);
        let body = create::Request::parse(&request.message).expect("a CREATE");
        assert_eq!((body.name.as_str(), body.desired_access), (r"d\a", AccessMask::DELETE));
        request.set_rename(FILE, "b");
        let body = set_info::Request::parse(&request.message).expect("a SET_INFO");
        let name = FileRenameInformation::parse(body.buffer).expect("a name");
        assert_eq!((name.file_name.as_str(), name.replace_if_exists), ("b", true));
        request.set_query_directory(FILE);
        assert_eq!(query_directory::Request::parse(&request.message).expect("it").file_name, "*");
        request.set_flush(FILE);
        assert_eq!(flush::Request::parse(&request.message).expect("a FLUSH").file_id, FILE);
    }
}
