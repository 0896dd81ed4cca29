//! Control codes and their structures ([MS-FSCC] 2.3, [MS-SMB2] 2.2.31).

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::ids::FileId;
use crate::wire::cursor::{Put, Reader, align, len_u16, len_u32, patch_u32, zeros};
use crate::wire::negotiate::{Capabilities, Dialect, SecurityMode};
use crate::wire::newtype::{layout, open_enum, open_flags};
use crate::wire::{Fault, Malformed, limits, utf16};

open_enum!(
    /// `CtlCode` of IOCTL.
    FsctlCode(u32) {
        DFS_GET_REFERRALS = 0x0006_0194, DFS_GET_REFERRALS_EX = 0x0006_01b0,
        REQUEST_OPLOCK_LEVEL_1 = 0x0009_0000, LOCK_VOLUME = 0x0009_0018, UNLOCK_VOLUME = 0x0009_001c,
        IS_PATHNAME_VALID = 0x0009_002c, GET_COMPRESSION = 0x0009_003c, SET_COMPRESSION = 0x0009_c040,
        FILESYSTEM_GET_STATISTICS = 0x0009_0060, GET_NTFS_VOLUME_DATA = 0x0009_0064,
        FIND_FILES_BY_SID = 0x0009_008f, SET_OBJECT_ID = 0x0009_0098, GET_OBJECT_ID = 0x0009_009c,
        DELETE_OBJECT_ID = 0x0009_00a0, SET_REPARSE_POINT = 0x0009_00a4, GET_REPARSE_POINT = 0x0009_00a8,
        DELETE_REPARSE_POINT = 0x0009_00ac, SET_OBJECT_ID_EXTENDED = 0x0009_00bc,
        CREATE_OR_GET_OBJECT_ID = 0x0009_00c0, SET_SPARSE = 0x0009_00c4, SET_ZERO_DATA = 0x0009_80c8,
        QUERY_ALLOCATED_RANGES = 0x0009_40cf, SET_ENCRYPTION = 0x0009_00d7, READ_FILE_USN_DATA = 0x0009_00eb,
        WRITE_USN_CLOSE_RECORD = 0x0009_00ef, QUERY_SPARING_INFO = 0x0009_0138,
        SET_ZERO_ON_DEALLOCATION = 0x0009_0194, SET_DEFECT_MANAGEMENT = 0x0009_8134,
        FILE_LEVEL_TRIM = 0x0009_8208, OFFLOAD_READ = 0x0009_4264, OFFLOAD_WRITE = 0x0009_8268,
        GET_INTEGRITY_INFORMATION = 0x0009_027c, SET_INTEGRITY_INFORMATION = 0x0009_c280,
        QUERY_FILE_REGIONS = 0x0009_0284, REFS_STREAM_SNAPSHOT_MANAGEMENT = 0x0009_0440,
        DUPLICATE_EXTENTS_TO_FILE = 0x0009_8344, DUPLICATE_EXTENTS_TO_FILE_EX = 0x0009_83e8,
        SET_INTEGRITY_INFORMATION_EX = 0x0009_0380,
        PIPE_ASSIGN_EVENT = 0x0011_0000, PIPE_DISCONNECT = 0x0011_0004, PIPE_LISTEN = 0x0011_0008,
        PIPE_PEEK = 0x0011_400c, PIPE_WAIT = 0x0011_0018, PIPE_TRANSCEIVE = 0x0011_c017,
        QUERY_NETWORK_INTERFACE_INFO = 0x0014_01fc, VALIDATE_NEGOTIATE_INFO = 0x0014_0204,
        SRV_REQUEST_RESUME_KEY = 0x0014_0078, SRV_ENUMERATE_SNAPSHOTS = 0x0014_4064,
        SRV_COPYCHUNK = 0x0014_40f2, SRV_COPYCHUNK_WRITE = 0x0014_80f2, SRV_READ_HASH = 0x0014_41bb,
        LMR_REQUEST_RESILIENCY = 0x0014_01d4, LMR_GET_LINK_TRACKING_INFORMATION = 0x0014_00e8,
        LMR_SET_LINK_TRACKING_INFORMATION = 0x0014_00ec, SVHDX_SYNC_TUNNEL_REQUEST = 0x0009_0304,
        SVHDX_ASYNC_TUNNEL_REQUEST = 0x0009_0364,
    }
);

/// VALIDATE_NEGOTIATE_INFO: the client's values from the negotiation ([MS-SMB2] 2.2.31.4).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct ValidateNegotiateInfoRequest {
    pub capabilities: Capabilities,
    pub guid: [u8; 16],
    pub security_mode: SecurityMode,
    pub dialects: Vec<Dialect>,
}

impl ValidateNegotiateInfoRequest {
    /// Reads the input of the control.
    pub fn parse(input: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(input, "validate negotiate info");
        let capabilities = r.get()?;
        let guid = r.get()?;
        let security_mode = r.get()?;
        let count = r.get::<u16>()?;
        if usize::from(count) > limits::DIALECTS_MAX {
            return Err(r.fault(Fault::TooMany));
        }
        let dialects = (0..count).map(|_| r.get()).collect::<Result<_, _>>()?;
        Ok(Self { capabilities, guid, security_mode, dialects })
    }

    /// Appends the input of the control.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(self.capabilities);
        out.put(self.guid);
        out.put(self.security_mode);
        out.put(len_u16(self.dialects.len()));
        self.dialects.iter().for_each(|dialect| out.put(*dialect));
    }
}

layout!(
    /// VALIDATE_NEGOTIATE_INFO: the server's values from the negotiation ([MS-SMB2] 2.2.32.6).
    ValidateNegotiateInfoResponse[24] {
        capabilities: Capabilities, guid: [u8; 16], security_mode: SecurityMode, dialect: Dialect,
    }
);

open_flags!(
    /// `Capability` of a network interface ([MS-SMB2] 2.2.32.5).
    InterfaceCapability(u32) { RSS_CAPABLE = 0x0000_0001, RDMA_CAPABLE = 0x0000_0002 }
);

/// An address in a list of interfaces. No client uses the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub enum SocketAddress {
    /// [MS-SMB2] 2.2.32.5.1.1.
    V4 { port: u16, address: Ipv4Addr },
    /// [MS-SMB2] 2.2.32.5.1.2.
    V6 { port: u16, flow_info: u32, address: Ipv6Addr, scope_id: u32 },
    /// Any other family, which clients skip.
    Other { family: u16 },
}

const FAMILY_V4: u16 = 0x0002;
const FAMILY_V6: u16 = 0x0017;
const SOCKADDR_STORAGE_LEN: usize = 128;
const INTERFACE_LEN: usize = 24 + SOCKADDR_STORAGE_LEN;

/// QUERY_NETWORK_INTERFACE_INFO: one interface of the server ([MS-SMB2] 2.2.32.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct NetworkInterfaceInfo {
    pub if_index: u32,
    pub capability: InterfaceCapability,
    /// Bits per second; Linux clients treat zero as 1 Gb/s.
    pub link_speed_bps: u64,
    pub sockaddr: SocketAddress,
}

impl NetworkInterfaceInfo {
    /// Reads the output of the control.
    pub fn parse_list(output: &[u8]) -> Result<Vec<Self>, Malformed> {
        let mut interfaces = Vec::new();
        let mut rest = output;
        while !rest.is_empty() {
            let mut r = Reader::new(rest, "network interface info");
            if interfaces.len() == limits::LIST_MAX {
                return Err(r.fault(Fault::TooMany));
            }
            let next = r.get::<u32>()? as usize;
            let if_index = r.get()?;
            let capability = r.get()?;
            r.skip(4)?;
            let link_speed_bps = r.get()?;
            let mut a = Reader::new(r.take(SOCKADDR_STORAGE_LEN)?, "socket address");
            // The port and the address are in network byte order, as in a `sockaddr`; the rest is not.
            let sockaddr = match a.get()? {
                FAMILY_V4 => SocketAddress::V4 {
                    port: u16::from_be_bytes(a.array()?),
                    address: Ipv4Addr::from(a.array::<4>()?),
                },
                FAMILY_V6 => SocketAddress::V6 {
                    port: u16::from_be_bytes(a.array()?),
                    flow_info: a.get()?,
                    address: Ipv6Addr::from(a.array::<16>()?),
                    scope_id: a.get()?,
                },
                family => SocketAddress::Other { family },
            };
            interfaces.push(Self { if_index, capability, link_speed_bps, sockaddr });
            if next == 0 {
                break;
            }
            if next < INTERFACE_LEN || next > rest.len() {
                return Err(r.fault(Fault::Offset));
            }
            rest = &rest[next..];
        }
        Ok(interfaces)
    }

    /// Appends the output of the control.
    pub fn encode_list(interfaces: &[Self], out: &mut Vec<u8>) {
        for (index, interface) in interfaces.iter().enumerate() {
            let last = index + 1 == interfaces.len();
            out.put_u32(if last { 0 } else { INTERFACE_LEN as u32 });
            out.put(interface.if_index);
            out.put(interface.capability);
            zeros(out, 4);
            out.put(interface.link_speed_bps);
            let start = out.len();
            match interface.sockaddr {
                SocketAddress::V4 { port, address } => {
                    out.put_u16(FAMILY_V4);
                    out.put(port.to_be_bytes());
                    out.put(address.octets());
                }
                SocketAddress::V6 { port, flow_info, address, scope_id } => {
                    out.put_u16(FAMILY_V6);
                    out.put(port.to_be_bytes());
                    out.put(flow_info);
                    out.put(address.octets());
                    out.put(scope_id);
                }
                SocketAddress::Other { family } => out.put_u16(family),
            }
            align(out, start, SOCKADDR_STORAGE_LEN);
        }
    }
}

layout!(
    /// SRV_REQUEST_RESUME_KEY, the response ([MS-SMB2] 2.2.32.3); no context follows.
    ResumeKeyResponse[32] { resume_key: [u8; 24], _: 4, _: 4, }
);

layout!(
    /// One range of a server-side copy ([MS-SMB2] 2.2.31.1.1).
    CopyChunk[24] { source_offset: u64, target_offset: u64, length: u32, _: 4, }
);

/// SRV_COPYCHUNK and SRV_COPYCHUNK_WRITE ([MS-SMB2] 2.2.31.1).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct CopyChunkRequest {
    /// From [`ResumeKeyResponse`]: the source file.
    pub source_key: [u8; 24],
    pub chunks: Vec<CopyChunk>,
}

impl CopyChunkRequest {
    /// Reads the input of the control. More than [`limits::COPY_CHUNKS_MAX`] chunks are [`Fault::TooMany`]; [MS-SMB2]
    /// 3.3.5.15.6 requires an answer with the limits in a [`CopyChunkResponse`].
    pub fn parse(input: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(input, "copychunk request");
        let source_key = r.get()?;
        let count = r.get::<u32>()?;
        r.skip(4)?;
        if count as usize > limits::COPY_CHUNKS_MAX {
            return Err(r.fault(Fault::TooMany));
        }
        let chunks = (0..count).map(|_| r.get()).collect::<Result<_, _>>()?;
        Ok(Self { source_key, chunks })
    }

    /// Appends the input of the control.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(self.source_key);
        out.put(len_u32(self.chunks.len()));
        zeros(out, 4);
        self.chunks.iter().for_each(|chunk| chunk.encode(out));
    }
}

layout!(
    /// Number of chunks and bytes copied; with STATUS_INVALID_PARAMETER, the limits instead ([MS-SMB2] 2.2.32.1).
    CopyChunkResponse[12] { chunks_written: u32, chunk_bytes_written: u32, total_bytes_written: u32, }
);

layout!(
    /// A range of a file: QUERY_ALLOCATED_RANGES, input and output ([MS-FSCC] 2.3.49, 2.3.50), and FILE_LEVEL_TRIM ([MS-FSCC]
    /// 2.3.13.1).
    FileRange[16] { file_offset: u64, length: u64, }
);

impl FileRange {
    /// Reads ranges up to the end of `output`.
    pub fn parse_list(output: &[u8]) -> Result<Vec<Self>, Malformed> {
        let mut r = Reader::new(output, "file ranges");
        let mut ranges = Vec::new();
        while !r.is_empty() {
            if ranges.len() == limits::LIST_MAX {
                return Err(r.fault(Fault::TooMany));
            }
            ranges.push(r.get()?);
        }
        Ok(ranges)
    }
}

layout!(
    /// SET_ZERO_DATA: from the offset up to, but not including, `beyond_final_zero` ([MS-FSCC] 2.3.71).
    ZeroData[16] { file_offset: u64, beyond_final_zero: u64, }
);

/// SET_SPARSE ([MS-FSCC] 2.3.69): an empty buffer means true.
pub fn parse_set_sparse(input: &[u8]) -> bool {
    input.first().is_none_or(|byte| *byte != 0)
}

layout!(
    /// DUPLICATE_EXTENTS_TO_FILE ([MS-FSCC] 2.3.7): share the blocks of another file.
    DuplicateExtents[40] { source_file_id: FileId, source_file_offset: u64, target_file_offset: u64, byte_count: u64, }
);

layout!(
    /// FILE_LEVEL_TRIM, the fixed part; [`FileRange`]s follow ([MS-FSCC] 2.3.13).
    FileLevelTrim[8] { key: u32, num_ranges: u32, }
);

layout!(
    /// The response to FILE_LEVEL_TRIM ([MS-FSCC] 2.3.14).
    FileLevelTrimOutput[4] { num_ranges_processed: u32, }
);

layout!(
    /// CREATE_OR_GET_OBJECT_ID, GET_OBJECT_ID ([MS-FSCC] 2.1.3.1).
    ObjectIdBuffer[64] {
        object_id: [u8; 16], birth_volume_id: [u8; 16], birth_object_id: [u8; 16], domain_id: [u8; 16],
    }
);

layout!(
    /// LMR_REQUEST_RESILIENCY ([MS-SMB2] 2.2.31.3).
    ResiliencyRequest[8] { timeout_ms: u32, _: 4, }
);

layout!(
    /// GET_COMPRESSION and SET_COMPRESSION ([MS-FSCC] 2.3.18, 2.3.67).
    CompressionState[2] { state: u16, }
);

layout!(
    /// GET_INTEGRITY_INFORMATION, the response ([MS-FSCC] 2.3.28).
    IntegrityInformation[16] {
        checksum_algorithm: u16, _: 2, flags: u32, checksum_chunk_size: u32, cluster_size: u32,
    }
);

layout!(
    /// SET_INTEGRITY_INFORMATION ([MS-FSCC] 2.3.73).
    SetIntegrityInformation[8] { checksum_algorithm: u16, _: 2, flags: u32, }
);

/// DFS_GET_REFERRALS ([MS-DFSC] 2.2.2).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct DfsReferralRequest {
    pub max_referral_level: u16,
    pub request_file_name: String,
}

impl DfsReferralRequest {
    /// Reads the input of the control. The name ends with a terminator.
    pub fn parse(input: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(input, "dfs referral request");
        let max_referral_level = r.get()?;
        let name = r.rest();
        let (units, _) = name.as_chunks::<2>();
        let end = units.iter().position(|unit| *unit == [0, 0]).unwrap_or(units.len());
        Ok(Self { max_referral_level, request_file_name: utf16::decode(&name[..2 * end])? })
    }

    /// Appends the input of the control.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(self.max_referral_level);
        utf16::encode(&self.request_file_name, out);
        zeros(out, 2);
    }
}

/// SRV_ENUMERATE_SNAPSHOTS, the response ([MS-SMB2] 2.2.32.2).
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct SnapshotArray {
    pub number_of_snapshots: u32,
    /// `@GMT-YYYY.MM.DD-HH.MM.SS`; incomplete if the client's buffer was too small.
    pub snapshots: Vec<String>,
    /// Bytes needed for all snapshots.
    pub snapshot_array_size: u32,
}

impl SnapshotArray {
    /// A response with all `snapshots`.
    #[must_use]
    pub fn complete(snapshots: Vec<String>) -> Self {
        let size = snapshots.iter().map(|token| utf16::encoded_len(token) + 2).sum::<usize>() + 2;
        Self {
            number_of_snapshots: len_u32(snapshots.len()),
            // Windows and Samba count the final terminator only if the list is not empty.
            snapshot_array_size: if snapshots.is_empty() { 0 } else { len_u32(size) },
            snapshots,
        }
    }

    /// Reads the output of the control.
    pub fn parse(output: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(output, "snapshot array");
        let number_of_snapshots = r.get()?;
        let returned = r.get::<u32>()?;
        let snapshot_array_size = r.get()?;
        if returned as usize > limits::LIST_MAX {
            return Err(r.fault(Fault::TooMany));
        }
        let mut snapshots = Vec::new();
        let mut rest = r.rest();
        for _ in 0..returned {
            let (units, _) = rest.as_chunks::<2>();
            let end = units.iter().position(|unit| *unit == [0, 0]).ok_or(r.fault(Fault::Truncated))?;
            snapshots.push(utf16::decode(&rest[..2 * end])?);
            rest = &rest[2 * end + 2..];
        }
        Ok(Self { number_of_snapshots, snapshots, snapshot_array_size })
    }

    /// Appends the output of the control.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(self.number_of_snapshots);
        out.put(len_u32(self.snapshots.len()));
        out.put(self.snapshot_array_size);
        for token in &self.snapshots {
            utf16::encode(token, out);
            zeros(out, 2);
        }
        // The terminator of the list. A client's buffer is at least 16 bytes ([MS-SMB2] 3.3.5.15.1), so an empty list is
        // padded to that length.
        zeros(out, if self.snapshots.is_empty() { 4 } else { 2 });
    }
}

/// PIPE_WAIT ([MS-FSCC] 2.3.47).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct PipeWait {
    /// In units of 100 ns.
    pub timeout: u64,
    pub timeout_specified: bool,
    pub name: String,
}

impl PipeWait {
    /// Reads the input of the control.
    pub fn parse(input: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(input, "pipe wait");
        let timeout = r.get()?;
        let name_len = r.get::<u32>()?;
        let timeout_specified = r.get()?;
        r.skip(1)?;
        Ok(Self { timeout, timeout_specified, name: utf16::decode(r.take(name_len as usize)?)? })
    }

    /// Appends the input of the control.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(self.timeout);
        let len_at = out.len();
        zeros(out, 4);
        out.put(self.timeout_specified);
        zeros(out, 1);
        utf16::encode(&self.name, out);
        patch_u32(out, len_at, utf16::encoded_len(&self.name));
    }
}
