//! NTLM messages on the wire ([MS-NLMP] 2.2).

use crate::auth::AuthError;

/// Negotiate flags ([MS-NLMP] 2.2.2.5).
pub(in crate::auth) mod flags {
    pub(in crate::auth) const UNICODE: u32 = 0x0000_0001;
    pub(in crate::auth) const REQUEST_TARGET: u32 = 0x0000_0004;
    pub(in crate::auth) const SIGN: u32 = 0x0000_0010;
    pub(in crate::auth) const SEAL: u32 = 0x0000_0020;
    pub(in crate::auth) const NTLM: u32 = 0x0000_0200;
    pub(in crate::auth) const ANONYMOUS: u32 = 0x0000_0800;
    pub(in crate::auth) const ALWAYS_SIGN: u32 = 0x0000_8000;
    pub(in crate::auth) const TARGET_TYPE_SERVER: u32 = 0x0002_0000;
    pub(in crate::auth) const EXTENDED_SESSIONSECURITY: u32 = 0x0008_0000;
    pub(in crate::auth) const TARGET_INFO: u32 = 0x0080_0000;
    pub(in crate::auth) const VERSION: u32 = 0x0200_0000;
    pub(in crate::auth) const STRENGTH_128: u32 = 0x2000_0000;
    pub(in crate::auth) const KEY_EXCH: u32 = 0x4000_0000;
    pub(in crate::auth) const STRENGTH_56: u32 = 0x8000_0000;
}

/// Every message begins with this.
pub(in crate::auth) const SIGNATURE: &[u8; 8] = b"NTLMSSP\0";

/// AV_PAIR identifiers ([MS-NLMP] 2.2.2.1).
pub(in crate::auth) mod av {
    pub(in crate::auth) const EOL: u16 = 0;
    pub(in crate::auth) const NB_COMPUTER_NAME: u16 = 1;
    pub(in crate::auth) const NB_DOMAIN_NAME: u16 = 2;
    pub(in crate::auth) const DNS_COMPUTER_NAME: u16 = 3;
    pub(in crate::auth) const DNS_DOMAIN_NAME: u16 = 4;
    pub(in crate::auth) const FLAGS: u16 = 6;
    pub(in crate::auth) const TIMESTAMP: u16 = 7;
    pub(in crate::auth) const TARGET_NAME: u16 = 9;
    /// In FLAGS: the AUTHENTICATE message has a MIC.
    pub(in crate::auth) const FLAG_MIC: u32 = 0x2;
}

/// Position of the MIC in AUTHENTICATE ([MS-NLMP] 2.2.1.3).
pub(in crate::auth) const MIC: std::ops::Range<usize> = 72..88;

/// Longest user or domain name, in UTF-16 units; more than Windows allows.
const NAME_UNITS_MAX: usize = 256;

fn u16_at(message: &[u8], at: usize) -> Result<u16, AuthError> {
    let bytes = message.get(at..at + 2).ok_or(TRUNCATED)?;
    Ok(u16::from_le_bytes([bytes[0], bytes[1]]))
}

pub(in crate::auth) fn u32_at(message: &[u8], at: usize) -> Result<u32, AuthError> {
    let bytes = message.get(at..at + 4).ok_or(TRUNCATED)?;
    Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

const TRUNCATED: AuthError = AuthError::Malformed("truncated NTLM message");

/// Checks the signature and the type.
pub(in crate::auth) fn expect_type(message: &[u8], message_type: u32) -> Result<(), AuthError> {
    if !message.starts_with(SIGNATURE) {
        return Err(AuthError::Malformed("not an NTLM message"));
    }
    match u32_at(message, 8)? {
        found if found == message_type => Ok(()),
        1..=3 => Err(AuthError::OutOfOrder("another NTLM message is due")),
        _ => Err(AuthError::Malformed("unknown NTLM message type")),
    }
}

/// A payload field: length, allocated length, offset. The second length has no meaning ([MS-NLMP] 2.2.1).
pub(in crate::auth) fn field(message: &[u8], at: usize) -> Result<&[u8], AuthError> {
    let len = usize::from(u16_at(message, at)?);
    let offset = u32_at(message, at + 4)? as usize;
    if len == 0 {
        return Ok(&[]);
    }
    offset
        .checked_add(len)
        .and_then(|end| message.get(offset..end))
        .ok_or(AuthError::Malformed("NTLM field lies outside of its message"))
}

pub(in crate::auth) fn utf16(bytes: &[u8]) -> Result<String, AuthError> {
    if !bytes.len().is_multiple_of(2) || bytes.len() > NAME_UNITS_MAX * 2 {
        return Err(AuthError::Malformed("NTLM name of an impossible length"));
    }
    let units = bytes.chunks_exact(2).map(|unit| u16::from_le_bytes([unit[0], unit[1]]));
    char::decode_utf16(units)
        .collect::<Result<_, _>>()
        .map_err(|_| AuthError::Malformed("NTLM name is not UTF-16"))
}

pub(in crate::auth) fn to_utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

/// The AUTHENTICATE message ([MS-NLMP] 2.2.1.3).
pub(in crate::auth) struct Authenticate<'a> {
    pub(in crate::auth) flags: u32,
    pub(in crate::auth) lm_response: &'a [u8],
    pub(in crate::auth) nt_response: &'a [u8],
    pub(in crate::auth) domain: String,
    pub(in crate::auth) user: String,
    pub(in crate::auth) workstation: String,
    pub(in crate::auth) encrypted_random_session_key: &'a [u8],
}

impl<'a> Authenticate<'a> {
    pub(in crate::auth) fn parse(message: &'a [u8]) -> Result<Self, AuthError> {
        expect_type(message, 3)?;
        let flags = u32_at(message, 60)?;
        if flags & flags::UNICODE == 0 {
            return Err(AuthError::Incompatible("names are not in Unicode"));
        }
        Ok(Authenticate {
            flags,
            lm_response: field(message, 12)?,
            nt_response: field(message, 20)?,
            domain: utf16(field(message, 28)?)?,
            user: utf16(field(message, 36)?)?,
            workstation: utf16(field(message, 44)?)?,
            encrypted_random_session_key: field(message, 52)?,
        })
    }
}

/// The NTLMv2_RESPONSE in AUTHENTICATE ([MS-NLMP] 2.2.2.8).
pub(in crate::auth) struct NtlmV2Response<'a> {
    pub(in crate::auth) nt_proof: &'a [u8; 16],
    /// Everything after NTProofStr: the bytes that it covers.
    pub(in crate::auth) temp: &'a [u8],
    /// Whether the client states, protected by NTProofStr, that the message has a MIC.
    pub(in crate::auth) has_mic: bool,
    /// The SPN of the client's intended server, in UTF-16; `None` if the client sends none.
    pub(in crate::auth) target_name: Option<&'a [u8]>,
}

impl<'a> NtlmV2Response<'a> {
    pub(in crate::auth) fn parse(response: &'a [u8]) -> Result<Self, AuthError> {
        // An NTLMv1 response has 24 bytes, an NTLMv2 one at least 16 + 28 and an AV_PAIR ([MS-NLMP] 2.2.2.7, 2.2.2.8).
        const FIXED_LEN: usize = 28;
        if response.len() <= 24 {
            return Err(AuthError::Incompatible("response is not NTLMv2"));
        }
        let (nt_proof, temp) = response.split_first_chunk().ok_or(TRUNCATED)?;
        if temp.len() < FIXED_LEN + 4 {
            return Err(AuthError::Malformed("truncated NTLMv2 response"));
        }
        // RespType and HiRespType
        if temp[..2] != [1, 1] {
            return Err(AuthError::Incompatible("response is not NTLMv2"));
        }
        let (mut av_flags, mut target_name) = (0, None);
        for pair in AvPairs(&temp[FIXED_LEN..]) {
            let (id, value) = pair?;
            match id {
                av::FLAGS => av_flags = u32_at(value, 0)?,
                av::TARGET_NAME if !value.is_empty() => target_name = Some(value),
                _ => {}
            }
        }
        Ok(NtlmV2Response { nt_proof, temp, has_mic: av_flags & av::FLAG_MIC != 0, target_name })
    }
}

/// Iterates over AV_PAIRs up to MsvAvEOL, which is mandatory. Clients pad with zeros after it.
pub(in crate::auth) struct AvPairs<'a>(pub(in crate::auth) &'a [u8]);

impl<'a> Iterator for AvPairs<'a> {
    type Item = Result<(u16, &'a [u8]), AuthError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut read = || {
            let id = u16_at(self.0, 0)?;
            let len = usize::from(u16_at(self.0, 2)?);
            let value = self.0.get(4..4 + len).ok_or(TRUNCATED)?;
            self.0 = &self.0[4 + len..];
            Ok((id, value))
        };
        match read() {
            Ok((av::EOL, _)) => None,
            Ok(pair) => Some(Ok(pair)),
            Err(error) => {
                // The next call must end the iteration, not fail forever.
                self.0 = &[0; 4];
                Some(Err(error))
            }
        }
    }
}

/// Appends one AV_PAIR. Values are our names: far below 64 KiB.
pub(in crate::auth) fn push_av(out: &mut Vec<u8>, id: u16, value: &[u8]) {
    let len = u16::try_from(value.len()).expect("names of our own are short");
    out.extend_from_slice(&id.to_le_bytes());
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(value);
}

/// Builds a message with a fixed part that refers to a payload after it.
pub(in crate::auth) struct Builder {
    fixed: Vec<u8>,
    payload: Vec<u8>,
    fixed_len: usize,
}

impl Builder {
    pub(in crate::auth) fn new(message_type: u32, fixed_len: usize) -> Self {
        let mut fixed = Vec::with_capacity(fixed_len);
        fixed.extend_from_slice(SIGNATURE);
        fixed.extend_from_slice(&message_type.to_le_bytes());
        Builder { fixed, payload: Vec::new(), fixed_len }
    }

    pub(in crate::auth) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.fixed.extend_from_slice(bytes);
        self
    }

    pub(in crate::auth) fn field(&mut self, value: &[u8]) -> &mut Self {
        let len = u16::try_from(value.len()).expect("fields of our own are short").to_le_bytes();
        let offset = u32::try_from(self.fixed_len + self.payload.len()).expect("a message is short");
        self.payload.extend_from_slice(value);
        self.bytes(&len).bytes(&len).bytes(&offset.to_le_bytes())
    }

    pub(in crate::auth) fn build(&mut self) -> Vec<u8> {
        assert_eq!(self.fixed.len(), self.fixed_len, "the fixed part is complete");
        let mut message = std::mem::take(&mut self.fixed);
        message.append(&mut self.payload);
        message
    }
}
