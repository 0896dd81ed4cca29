//! Payload that is transferred by RDMA ([MS-SMB2] 2.2.19 and 2.2.21, Channel): READ and WRITE carry descriptors of the
//! peer's memory, which the transport accesses.

use forebay_smbdirect::wire::Descriptors;

use crate::engine::commands::transform::{self, Outgoing};
use crate::engine::request::step::Ctx;
use crate::remote::{RemoteBuffer, RemoteProof};
use crate::status::NtStatus;
use crate::wire::Dialect;
use crate::wire::read::Channel;

/// The destination of READ data.
pub(crate) struct Target {
    pub(crate) buffer: RemoteBuffer,
    /// The transform of the data before the transfer.
    pub(crate) outgoing: Option<Outgoing>,
}

/// The source of WRITE data.
pub(crate) struct Source {
    pub(crate) buffer: RemoteBuffer,
    /// The verification of the data after the transfer.
    pub(crate) proof: Option<RemoteProof>,
}

/// Evaluates the channel fields of a READ of `length` bytes; `None` without a channel. Records in the request the token
/// that the response must invalidate: every response must do so, even after a failure.
///
/// # Errors
/// `STATUS_INVALID_PARAMETER` for a channel that the dialect or the transport does not support and for descriptors of less
/// than `length` bytes; `STATUS_ACCESS_DENIED` if the payload must be protected and the peer has no transform for that.
pub(crate) fn target(
    ctx: &mut Ctx<'_>,
    channel: Channel,
    info: &[u8],
    length: u32,
) -> Result<Option<Target>, NtStatus> {
    // [MS-SMB2] 2.2.19: before SMB 3.0 the field has no meaning.
    if channel == Channel::NONE || !ctx.core.is_smb3() {
        return Ok(None);
    }
    let descriptors = plain(ctx, channel, info)?;
    let outgoing = transform::outgoing(ctx)?;
    Ok(Some(Target { buffer: buffer(ctx, &descriptors, length)?, outgoing }))
}

/// Evaluates the channel fields of a WRITE.
///
/// # Errors
/// As [`target`], and those of [`transform::incoming`].
pub(crate) fn source(
    ctx: &mut Ctx<'_>,
    channel: Channel,
    info: &[u8],
    length: u32,
) -> Result<Option<Source>, NtStatus> {
    if channel == Channel::NONE || !ctx.core.is_smb3() {
        return Ok(None);
    }
    let (descriptors, proof) = if channel == Channel::RDMA_TRANSFORM {
        let (descriptors, proof) = transform::incoming(ctx, info)?;
        (descriptors, Some(proof))
    } else {
        let descriptors = plain(ctx, channel, info)?;
        if ctx.must_protect() {
            return Err(NtStatus::ACCESS_DENIED);
        }
        (descriptors, None)
    };
    Ok(Some(Source { buffer: buffer(ctx, &descriptors, length)?, proof }))
}

/// The descriptors of a channel without a transform.
fn plain<'a>(ctx: &mut Ctx<'_>, channel: Channel, info: &'a [u8]) -> Result<Descriptors<'a>, NtStatus> {
    let known = match channel {
        Channel::RDMA_V1 => true,
        Channel::RDMA_V1_INVALIDATE => ctx.core.dialect() != Dialect::SMB3_0,
        _ => false,
    };
    if !known || !ctx.core.over_rdma {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    let descriptors = Descriptors::parse(info).map_err(|_| NtStatus::INVALID_PARAMETER)?;
    if channel == Channel::RDMA_V1_INVALIDATE {
        ctx.request.invalidate = Some(descriptors.first_token());
    }
    Ok(descriptors)
}

fn buffer(ctx: &mut Ctx<'_>, descriptors: &Descriptors<'_>, length: u32) -> Result<RemoteBuffer, NtStatus> {
    if descriptors.total_bytes() < u64::from(length) {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    ctx.request.by_rdma = true;
    Ok(RemoteBuffer { descriptors: descriptors.iter().collect() })
}
