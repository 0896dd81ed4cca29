//! SMB2_RDMA_TRANSFORM ([MS-SMB2] 2.2.43): payload that is sealed or signed for its transfer by RDMA.

use forebay_smbdirect::wire::{CryptoTransform, Descriptors, RdmaTransform as Frame};

use crate::engine::request::step::Ctx;
use crate::engine::transforms::Transforms;
use crate::fs::Payload;
use crate::remote::{Proof, RemoteProof};
use crate::status::NtStatus;
use crate::wire::HeaderFlags;

/// The transform of READ data before it is written to the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outgoing {
    Sealed,
    Signed,
}

/// The transform for the data of a READ that names none itself; `None` if the data is sent in the clear.
///
/// # Errors
/// `STATUS_ACCESS_DENIED` if the data must be protected and the peer has negotiated no transform for that.
pub(crate) fn outgoing(ctx: &Ctx<'_>) -> Result<Option<Outgoing>, NtStatus> {
    let transforms = ctx.core.transforms();
    // [MS-SMB2] 3.3.5.12
    if ctx.request.sealed {
        return if transforms.encryption { Ok(Some(Outgoing::Sealed)) } else { Err(NtStatus::ACCESS_DENIED) };
    }
    if transforms.signing && ctx.request.header.flags.contains(HeaderFlags::SIGNED) {
        return Ok(Some(Outgoing::Signed));
    }
    if ctx.must_protect() { Err(NtStatus::ACCESS_DENIED) } else { Ok(None) }
}

/// The four bytes after the MessageId in the nonce for a signature of READ data. In the nonces of messages, only the first
/// of them is set ([MS-SMB2] 3.1.4.1), so no message has this nonce. A message is a READ or a WRITE, so a client that does
/// the same for its WRITEs does not use this nonce, either.
const PAYLOAD_NONCE_TAIL: [u8; 4] = [1, 0, 0, 0x80];

/// Seals the data of a READ in place, or signs it. Returns the transform for the response ([MS-SMB2] 3.3.5.12).
///
/// # Errors
/// `STATUS_USER_SESSION_DELETED` if the session has ended in the meantime, `STATUS_INSUFFICIENT_RESOURCES` if its nonces
/// are exhausted.
pub(crate) fn protect(
    ctx: &mut Ctx<'_>,
    outgoing: Outgoing,
    payload: &mut dyn Payload,
) -> Result<Vec<u8>, NtStatus> {
    let id = ctx.session().id;
    let channel = ctx.core.channels.get_mut(&id).ok_or(NtStatus::USER_SESSION_DELETED)?;
    let mut transform = Vec::with_capacity(Frame::LEN + CryptoTransform::LEN_MAX);
    transform.extend_from_slice(&Frame::encode_fixed(Frame::CHANNEL_NONE, 1, 0, 0));
    match outgoing {
        Outgoing::Sealed => {
            let seal = channel.seal.as_mut().ok_or(NtStatus::USER_SESSION_DELETED)?;
            let nonce = seal.nonces.next_nonce().map_err(|_| NtStatus::INSUFFICIENT_RESOURCES)?;
            let (nonce, tag) = seal
                .sealing
                .seal_payload(nonce, payload.bytes_mut())
                .map_err(|_| NtStatus::INSUFFICIENT_RESOURCES)?;
            CryptoTransform {
                transform_type: CryptoTransform::ENCRYPTION,
                signature: &tag,
                nonce: &nonce[..seal.sealing.nonce_len()],
            }
            .encode(&mut transform);
        }
        Outgoing::Signed => {
            let mut nonce = [0; 12];
            nonce[..8].copy_from_slice(&ctx.request.header.message_id.to_le_bytes());
            nonce[8..].copy_from_slice(&PAYLOAD_NONCE_TAIL);
            let signature = channel.signing.sign_payload(nonce, payload.bytes());
            CryptoTransform {
                transform_type: CryptoTransform::SIGNING,
                signature: &signature,
                nonce: if channel.signing.takes_nonce() { &nonce } else { &[] },
            }
            .encode(&mut transform);
        }
    }
    Ok(transform)
}

/// Parses the channel information of a WRITE with SMB2_CHANNEL_RDMA_TRANSFORM ([MS-SMB2] 3.3.5.13). Records in the request
/// the token that the response must invalidate.
///
/// # Errors
/// `STATUS_INVALID_PARAMETER` if the information is malformed, was not negotiated or does not match the protection of the
/// request; `STATUS_AUTH_TAG_MISMATCH` and `STATUS_INVALID_SIGNATURE` for signatures and nonces of invalid length;
/// `STATUS_ACCESS_DENIED` if the request was sealed and its payload is not.
pub(crate) fn incoming<'a>(
    ctx: &mut Ctx<'_>,
    info: &'a [u8],
) -> Result<(Descriptors<'a>, RemoteProof), NtStatus> {
    const INVALID: NtStatus = NtStatus::INVALID_PARAMETER;
    let transforms = ctx.core.transforms();
    if transforms == Transforms::default() {
        return Err(INVALID);
    }
    let frame = Frame::parse(info).map_err(|_| INVALID)?;
    let descriptors = frame.descriptors.ok_or(INVALID)?;
    if frame.channel == Frame::CHANNEL_RDMA_V1_INVALIDATE {
        ctx.request.invalidate = Some(descriptors.first_token());
    }
    let crypto = CryptoTransform::parse(frame.transforms).map_err(|_| INVALID)?;
    let is_aligned = crypto.padded_len() == frame.transforms.len();
    let is_empty = descriptors.iter().next().is_none_or(|first| first.length == 0);
    if frame.transform_count != 1 || !is_aligned || is_empty {
        return Err(INVALID);
    }
    let id = ctx.session().id;
    let channel = ctx.core.channels.get(&id).ok_or(NtStatus::USER_SESSION_DELETED)?;
    let signed = ctx.request.header.flags.contains(HeaderFlags::SIGNED);
    let proof = match crypto.transform_type {
        CryptoTransform::ENCRYPTION if transforms.encryption && ctx.request.sealed => {
            let key = channel.seal.as_ref().ok_or(NtStatus::USER_SESSION_DELETED)?.opening.clone();
            // A truncated tag could be guessed.
            let tag = crypto.signature.try_into().map_err(|_| NtStatus::AUTH_TAG_MISMATCH)?;
            if crypto.nonce.len() != key.nonce_len() {
                return Err(NtStatus::AUTH_TAG_MISMATCH);
            }
            let mut nonce = [0; 12];
            nonce[..crypto.nonce.len()].copy_from_slice(crypto.nonce);
            Proof::Sealed { key, nonce, tag }
        }
        CryptoTransform::SIGNING if transforms.signing && signed => {
            if ctx.request.sealed {
                return Err(NtStatus::ACCESS_DENIED);
            }
            let key = channel.signing.clone();
            let signature = crypto.signature.try_into().map_err(|_| NtStatus::INVALID_SIGNATURE)?;
            let nonce = match crypto.nonce.try_into() {
                Ok(nonce) => nonce,
                Err(_) if !key.takes_nonce() => [0; 12],
                Err(_) => return Err(NtStatus::INVALID_SIGNATURE),
            };
            Proof::Signed { key, nonce, signature }
        }
        _ => return Err(INVALID),
    };
    Ok((descriptors, RemoteProof(proof)))
}
