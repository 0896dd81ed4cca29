//! Payload that travels by RDMA ([MS-SMB2] 2.2.19 and 2.2.21, Channel): READ and WRITE then carry descriptors of the
//! peer's memory, which the transport reaches into.

use forebay_smbdirect::wire::{BufferDescriptor, Descriptors};

use super::step::Ctx;
use crate::fs::Payload;
use crate::status::NtStatus;
use crate::wire::Dialect;
use crate::wire::read::Channel;

/// The part of a peer's memory that a request is about: as many bytes as the request says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteBuffer {
    descriptors: Vec<BufferDescriptor>,
}

impl RemoteBuffer {
    /// The pieces of its first `length` bytes, in order; fewer where it is shorter.
    pub fn pieces(&self, length: u32) -> impl Iterator<Item = BufferDescriptor> + '_ {
        let mut left = length;
        self.descriptors.iter().filter_map(move |descriptor| {
            let taken = left.min(descriptor.length);
            left -= taken;
            (taken > 0).then_some(BufferDescriptor { length: taken, ..*descriptor })
        })
    }
}

/// Data that are to be in the peer's memory before the response that says so.
pub struct RemoteWrite {
    /// What was read.
    pub payload: Box<dyn Payload>,
    /// Where to.
    pub target: RemoteBuffer,
}

/// What the channel fields of a READ or WRITE of `length` bytes come to: none without a channel. The token that the
/// response is to invalidate is noted in the request, since every response has to, that of a failure too.
///
/// # Errors
/// `STATUS_INVALID_PARAMETER` for a channel that the dialect or the transport does not have and for descriptors that hold
/// less than `length` bytes; `STATUS_ACCESS_DENIED` where the payload has to be protected, which it is not by RDMA.
pub(crate) fn channel(
    ctx: &mut Ctx<'_>,
    channel: Channel,
    info: &[u8],
    length: u32,
) -> Result<Option<RemoteBuffer>, NtStatus> {
    // [MS-SMB2] 2.2.19: before SMB 3.0 the field means nothing.
    if channel == Channel::NONE || !ctx.core.is_smb3() {
        return Ok(None);
    }
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
    if ctx.request.sealed || ctx.session().signing_required.load(std::sync::atomic::Ordering::Relaxed) {
        return Err(NtStatus::ACCESS_DENIED);
    }
    if descriptors.total_bytes() < u64::from(length) {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    ctx.request.by_rdma = true;
    Ok(Some(RemoteBuffer { descriptors: descriptors.iter().collect() }))
}
