//! SPNEGO tokens ([RFC 4178] 4.2, [MS-SPNG] 2.2).

use super::AuthError;
use super::der::{self, Reader, context};
use super::kerberos::{KERBEROS, MS_KERBEROS};

/// 1.3.6.1.5.5.2
const SPNEGO: &[u8] = &[0x2B, 0x06, 0x01, 0x05, 0x05, 0x02];
/// 1.3.6.1.4.1.311.2.2.10, [MS-NLMP] 1.9
pub(super) const NTLMSSP: &[u8] = &[0x2B, 0x06, 0x01, 0x04, 0x01, 0x82, 0x37, 0x02, 0x02, 0x0A];

/// Maximum number of mechanisms that we read from one list; the rest is ignored. Windows offers four.
const MECHANISMS_MAX: usize = 16;

/// [RFC 4178] 4.2.2 negState.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NegState {
    AcceptCompleted = 0,
    AcceptIncomplete = 1,
    Reject = 2,
    RequestMic = 3,
}

/// The initiator's first token.
#[derive(Debug)]
pub(super) struct NegTokenInit<'a> {
    /// The DER of the mechanism list, as sent: what mechListMIC covers.
    pub(super) mech_list: &'a [u8],
    /// The object identifiers in the list, the preferred one first.
    pub(super) mech_types: Vec<&'a [u8]>,
    /// The optimistic token of the preferred mechanism.
    pub(super) mech_token: Option<&'a [u8]>,
}

impl<'a> NegTokenInit<'a> {
    pub(super) fn parse(token: &'a [u8]) -> Result<Self, AuthError> {
        // RFC 2743 3.1: [APPLICATION 0] { thisMech, innerToken }
        let mut frame = Reader::new(der::only(token, der::APPLICATION_0)?);
        if frame.expect(der::OID)? != SPNEGO {
            return Err(AuthError::Incompatible("GSS-API mechanism is not SPNEGO"));
        }
        let inner = frame.expect(context(0))?;
        frame.finish()?;
        let mut fields = Reader::new(der::only(inner, der::SEQUENCE)?);
        let mut list = Reader::new(fields.expect(context(0))?);
        let mech_list = list.expect_whole(der::SEQUENCE)?;
        list.finish()?;
        let mut oids = Reader::new(der::only(mech_list, der::SEQUENCE)?);
        let mut mech_types = Vec::new();
        while !oids.is_empty() && mech_types.len() < MECHANISMS_MAX {
            mech_types.push(oids.expect(der::OID)?);
        }
        let _req_flags = fields.optional(context(1))?;
        let mech_token = octets(fields.optional(context(2))?)?;
        // negHints in a server's token ([MS-SPNG] 2.2.1), mechListMIC in a client's: not meaningful this early.
        let _ = fields.optional(context(3))?;
        let _ = fields.optional(context(4))?;
        fields.finish()?;
        Ok(NegTokenInit { mech_list, mech_types, mech_token })
    }
}

/// Every later token, in either direction.
#[derive(Debug, Default)]
pub(super) struct NegTokenResp<'a> {
    pub(super) neg_state: Option<u8>,
    pub(super) supported_mech: Option<&'a [u8]>,
    pub(super) response_token: Option<&'a [u8]>,
    pub(super) mech_list_mic: Option<&'a [u8]>,
}

impl<'a> NegTokenResp<'a> {
    pub(super) fn parse(token: &'a [u8]) -> Result<Self, AuthError> {
        let mut fields = Reader::new(der::only(der::only(token, context(1))?, der::SEQUENCE)?);
        let neg_state = match fields.optional(context(0))? {
            Some(value) => match der::only(value, der::ENUMERATED)? {
                &[state] => Some(state),
                _ => return Err(AuthError::Malformed("negState is not one byte")),
            },
            None => None,
        };
        let supported_mech =
            fields.optional(context(1))?.map(|value| der::only(value, der::OID)).transpose()?;
        let response_token = octets(fields.optional(context(2))?)?;
        let mech_list_mic = octets(fields.optional(context(3))?)?;
        fields.finish()?;
        Ok(NegTokenResp { neg_state, supported_mech, response_token, mech_list_mic })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let neg_state = field(0, der::ENUMERATED, self.neg_state.as_ref().map(std::slice::from_ref));
        let supported_mech = field(1, der::OID, self.supported_mech);
        let response_token = field(2, der::OCTET_STRING, self.response_token);
        let mech_list_mic = field(3, der::OCTET_STRING, self.mech_list_mic);
        let fields =
            der::encode(der::SEQUENCE, &[&neg_state, &supported_mech, &response_token, &mech_list_mic]);
        der::encode(context(1), &[&fields])
    }
}

fn octets(value: Option<&[u8]>) -> Result<Option<&[u8]>, AuthError> {
    value.map(|value| der::only(value, der::OCTET_STRING)).transpose()
}

fn field(n: u8, tag: u8, contents: Option<&[u8]>) -> Vec<u8> {
    contents.map_or_else(Vec::new, |contents| der::encode(context(n), &[&der::encode(tag, &[contents])]))
}

/// The DER of a mechanism list.
pub(super) fn encode_mech_list(mech_types: &[&[u8]]) -> Vec<u8> {
    let oids: Vec<u8> = mech_types.iter().flat_map(|oid| der::encode(der::OID, &[oid])).collect();
    der::encode(der::SEQUENCE, &[&oids])
}

/// The initiator's first token, in its GSS-API frame.
pub(super) fn encode_init(mech_list: &[u8], mech_token: Option<&[u8]>) -> Vec<u8> {
    frame_init(&[&der::encode(context(0), &[mech_list]), &field(2, der::OCTET_STRING, mech_token)])
}

fn frame_init(fields: &[&[u8]]) -> Vec<u8> {
    let inner = der::encode(context(0), &[&der::encode(der::SEQUENCE, fields)]);
    der::encode(der::APPLICATION_0, &[&der::encode(der::OID, &[SPNEGO]), &inner])
}

/// The security buffer of a NEGOTIATE response: the mechanisms that we accept, Kerberos first ([MS-SMB2] 3.3.5.4, [MS-SPNG] 3.2.5.2).
pub fn negotiate_hint(ntlm: bool, kerberos: bool) -> Vec<u8> {
    // [MS-SPNG] 2.2.1: the hint's text is fixed and has no meaning; Windows and Samba send it.
    let name = der::encode(der::GENERAL_STRING, &[b"not_defined_in_RFC4178@please_ignore"]);
    let hints = der::encode(der::SEQUENCE, &[&der::encode(context(0), &[&name])]);
    let mut mechanisms = Vec::new();
    if kerberos {
        mechanisms.extend([MS_KERBEROS, KERBEROS]);
    }
    if ntlm {
        mechanisms.push(NTLMSSP);
    }
    frame_init(&[
        &der::encode(context(0), &[&encode_mech_list(&mechanisms)]),
        &der::encode(context(3), &[&hints]),
    ])
}
