//! Negotiate contexts of dialect 3.1.1 ([MS-SMB2] 2.2.3.1, 2.2.4.1).

use super::cursor::{Field, Put, Reader, align, len_u16, patch_u16, zeros};
use super::newtype::open_enum;
use super::{Fault, Malformed, limits};

open_enum!(
    /// `ContextType`.
    ContextType(u16) {
        PREAUTH_INTEGRITY_CAPABILITIES = 0x0001, ENCRYPTION_CAPABILITIES = 0x0002,
        COMPRESSION_CAPABILITIES = 0x0003, NETNAME_NEGOTIATE_CONTEXT_ID = 0x0005,
        TRANSPORT_CAPABILITIES = 0x0006, RDMA_TRANSFORM_CAPABILITIES = 0x0007, SIGNING_CAPABILITIES = 0x0008,
        POSIX_EXTENSIONS_AVAILABLE = 0x0100,
    }
);
open_enum!(
    /// Preauthentication hash ([MS-SMB2] 2.2.3.1.1).
    HashAlgorithm(u16) { SHA_512 = 0x0001 }
);
open_enum!(
    /// Cipher ([MS-SMB2] 2.2.3.1.2); zero in a response means none in common.
    Cipher(u16) { NONE = 0x0000, AES_128_CCM = 0x0001, AES_128_GCM = 0x0002, AES_256_CCM = 0x0003, AES_256_GCM = 0x0004 }
);
open_enum!(
    /// Compression ([MS-SMB2] 2.2.3.1.3).
    CompressionAlgorithm(u16) {
        NONE = 0x0000, LZNT1 = 0x0001, LZ77 = 0x0002, LZ77_HUFFMAN = 0x0003, PATTERN_V1 = 0x0004, LZ4 = 0x0005,
    }
);
open_enum!(
    /// RDMA transform ([MS-SMB2] 2.2.3.1.6).
    RdmaTransform(u16) { NONE = 0x0000, ENCRYPTION = 0x0001, SIGNING = 0x0002 }
);
open_enum!(
    /// Signing algorithm ([MS-SMB2] 2.2.3.1.7).
    SigningAlgorithm(u16) { HMAC_SHA256 = 0x0000, AES_CMAC = 0x0001, AES_GMAC = 0x0002 }
);

/// `Flags` of a compression context: chained payloads ([MS-SMB2] 2.2.3.1.3).
pub const COMPRESSION_CAPABILITIES_FLAG_CHAINED: u32 = 1;
/// `Flags` of a transport context: the transport encrypts, SMB need not ([MS-SMB2] 2.2.3.1.5).
pub const ACCEPT_TRANSPORT_LEVEL_SECURITY: u32 = 1;
/// The identifier in the POSIX context ([SMB2-POSIX] 2.2.3.1.1, as Samba and the Linux kernel send it).
pub const POSIX_CREATE_TAG: [u8; 16] =
    [0x93, 0xad, 0x25, 0x50, 0x9c, 0xb4, 0x11, 0xe7, 0xb4, 0x23, 0x83, 0xde, 0x96, 0x8b, 0xcd, 0x7c];

/// One negotiate context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NegotiateContext<'a> {
    /// [MS-SMB2] 2.2.3.1.1.
    PreauthIntegrity {
        /// `HashAlgorithms`.
        hash_algorithms: Vec<HashAlgorithm>,
        /// `Salt`.
        salt: &'a [u8],
    },
    /// [MS-SMB2] 2.2.3.1.2, best first.
    Encryption {
        /// `Ciphers`.
        ciphers: Vec<Cipher>,
    },
    /// [MS-SMB2] 2.2.3.1.3.
    Compression {
        /// `Flags`.
        flags: u32,
        /// `CompressionAlgorithms`.
        algorithms: Vec<CompressionAlgorithm>,
    },
    /// [MS-SMB2] 2.2.3.1.4: the name of the client's intended server, UTF-16LE.
    Netname {
        /// `NetName`, not decoded: a server ignores it.
        name: &'a [u8],
    },
    /// [MS-SMB2] 2.2.3.1.5.
    Transport {
        /// `Flags`.
        flags: u32,
    },
    /// [MS-SMB2] 2.2.3.1.6.
    RdmaTransform {
        /// `RDMATransformIds`.
        transforms: Vec<RdmaTransform>,
    },
    /// [MS-SMB2] 2.2.3.1.7.
    Signing {
        /// `SigningAlgorithms`, best first.
        algorithms: Vec<SigningAlgorithm>,
    },
    /// The POSIX extensions ([SMB2-POSIX]).
    Posix {
        /// Requested versions, each a GUID; see [`POSIX_CREATE_TAG`].
        data: &'a [u8],
    },
    /// Any other context; ignored ([MS-SMB2] 3.3.5.4).
    Unknown {
        /// `ContextType`.
        context_type: ContextType,
        /// `Data`.
        data: &'a [u8],
    },
}

fn algorithms<T: Field>(r: &mut Reader<'_>, count: u16) -> Result<Vec<T>, Malformed> {
    if usize::from(count) > limits::ALGORITHMS_MAX {
        return Err(r.fault(Fault::TooMany));
    }
    (0..count).map(|_| r.get()).collect()
}

impl<'a> NegotiateContext<'a> {
    /// `ContextType`.
    #[must_use]
    pub const fn context_type(&self) -> ContextType {
        match self {
            Self::PreauthIntegrity { .. } => ContextType::PREAUTH_INTEGRITY_CAPABILITIES,
            Self::Encryption { .. } => ContextType::ENCRYPTION_CAPABILITIES,
            Self::Compression { .. } => ContextType::COMPRESSION_CAPABILITIES,
            Self::Netname { .. } => ContextType::NETNAME_NEGOTIATE_CONTEXT_ID,
            Self::Transport { .. } => ContextType::TRANSPORT_CAPABILITIES,
            Self::RdmaTransform { .. } => ContextType::RDMA_TRANSFORM_CAPABILITIES,
            Self::Signing { .. } => ContextType::SIGNING_CAPABILITIES,
            Self::Posix { .. } => ContextType::POSIX_EXTENSIONS_AVAILABLE,
            Self::Unknown { context_type, .. } => *context_type,
        }
    }

    fn parse(context_type: ContextType, data: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(data, "negotiate context");
        Ok(match context_type {
            ContextType::PREAUTH_INTEGRITY_CAPABILITIES => {
                let count = r.get()?;
                let salt_len = r.get::<u16>()?;
                let hash_algorithms = algorithms(&mut r, count)?;
                Self::PreauthIntegrity { hash_algorithms, salt: r.take(salt_len.into())? }
            }
            ContextType::ENCRYPTION_CAPABILITIES => {
                let count = r.get()?;
                Self::Encryption { ciphers: algorithms(&mut r, count)? }
            }
            ContextType::COMPRESSION_CAPABILITIES => {
                let count = r.get()?;
                r.skip(2)?;
                let flags = r.get()?;
                Self::Compression { flags, algorithms: algorithms(&mut r, count)? }
            }
            ContextType::NETNAME_NEGOTIATE_CONTEXT_ID => Self::Netname { name: data },
            ContextType::TRANSPORT_CAPABILITIES => Self::Transport { flags: r.get()? },
            ContextType::RDMA_TRANSFORM_CAPABILITIES => {
                let count = r.get()?;
                r.skip(6)?;
                Self::RdmaTransform { transforms: algorithms(&mut r, count)? }
            }
            ContextType::SIGNING_CAPABILITIES => {
                let count = r.get()?;
                Self::Signing { algorithms: algorithms(&mut r, count)? }
            }
            ContextType::POSIX_EXTENSIONS_AVAILABLE => Self::Posix { data },
            _ => Self::Unknown { context_type, data },
        })
    }

    fn encode_data(&self, out: &mut Vec<u8>) {
        match self {
            Self::PreauthIntegrity { hash_algorithms, salt } => {
                out.put(len_u16(hash_algorithms.len()));
                out.put(len_u16(salt.len()));
                hash_algorithms.iter().for_each(|algorithm| out.put(*algorithm));
                out.extend_from_slice(salt);
            }
            Self::Encryption { ciphers } => {
                out.put(len_u16(ciphers.len()));
                ciphers.iter().for_each(|cipher| out.put(*cipher));
            }
            Self::Compression { flags, algorithms } => {
                out.put(len_u16(algorithms.len()));
                zeros(out, 2);
                out.put(*flags);
                algorithms.iter().for_each(|algorithm| out.put(*algorithm));
            }
            Self::Transport { flags } => out.put(*flags),
            Self::RdmaTransform { transforms } => {
                out.put(len_u16(transforms.len()));
                zeros(out, 6);
                transforms.iter().for_each(|transform| out.put(*transform));
            }
            Self::Signing { algorithms } => {
                out.put(len_u16(algorithms.len()));
                algorithms.iter().for_each(|algorithm| out.put(*algorithm));
            }
            Self::Netname { name: data } | Self::Posix { data } | Self::Unknown { data, .. } => {
                out.extend_from_slice(data);
            }
        }
    }
}

/// Reads `count` contexts, the first at `offset` from the header, each padded to eight bytes from there.
pub(crate) fn parse_list<'a>(
    body: &Reader<'a>,
    offset: u32,
    count: u16,
) -> Result<Vec<NegotiateContext<'a>>, Malformed> {
    if usize::from(count) > limits::NEGOTIATE_CONTEXTS_MAX {
        return Err(body.fault(Fault::TooMany));
    }
    if count == 0 {
        return Ok(Vec::new());
    }
    // [MS-SMB2] 2.2.3: the list is aligned to eight bytes. Samba requires it as well. smbprotocol 1.17 misplaces the list if
    // configured to offer an even number of dialects; by default it offers five.
    if !offset.is_multiple_of(8) {
        return Err(body.fault(Fault::Offset));
    }
    parse_contexts(body.variable_to_end(offset as usize)?, count)
}

/// Reads `count` contexts from the start of `list`.
pub fn parse_contexts(list: &[u8], count: u16) -> Result<Vec<NegotiateContext<'_>>, Malformed> {
    let mut r = Reader::new(list, "negotiate context list");
    if usize::from(count) > limits::NEGOTIATE_CONTEXTS_MAX {
        return Err(r.fault(Fault::TooMany));
    }
    let mut contexts = Vec::new();
    for index in 0..count {
        if index > 0 {
            // Padding counts from the start of the list, and follows every context except the last.
            r.skip(r.position().next_multiple_of(8) - r.position())?;
        }
        let context_type = r.get()?;
        let len = r.get::<u16>()?;
        r.skip(4)?;
        contexts.push(NegotiateContext::parse(context_type, r.take(len.into())?)?);
    }
    Ok(contexts)
}

/// Appends the contexts; the caller has aligned `out`.
pub fn encode_list(contexts: &[NegotiateContext<'_>], out: &mut Vec<u8>) {
    let start = out.len();
    for context in contexts {
        align(out, start, 8);
        out.put(context.context_type());
        let len_at = out.len();
        zeros(out, 6);
        let data = out.len();
        context.encode_data(out);
        let len = out.len() - data;
        patch_u16(out, len_at, len);
    }
}
