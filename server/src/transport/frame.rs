//! Common handling of frames in all transports: layout in a buffer, and sealing.

use std::ops::Range;

use forebay_smb::engine::{Disconnect, Sealer, Segment, Segments};

use crate::buffers::{Buffer, PAGE, ReadBuffer};
use crate::memory::Allowance;

/// Offset of the data of a WRITE: 64 bytes of header, 48 of the request ([MS-SMB2] 2.2.21).
pub(crate) const WRITE_DATA: isize = 112;
/// Length of a transform header ([MS-SMB2] 2.2.41).
pub(crate) const TRANSFORM: isize = 52;
/// Maximum number of bytes that a transport puts before a frame.
const PREFIX: usize = 4;

/// Puts a response into one buffer, in the returned range, sealed if `seal` is set. There is room for a prefix in front of it.
pub(crate) fn in_one_piece(
    segments: Segments,
    seal: Option<Sealer>,
    memory: &Allowance,
) -> Result<(Buffer, Range<isize>), Disconnect> {
    let length: usize = segments.iter().map(|segment| segment.length()).sum();
    let (mut buffer, start) = contiguous(segments, length, memory)?;
    let end = start + length.cast_signed();
    let Some(sealer) = seal else { return Ok((buffer, start..end)) };
    let header = sealer.seal(buffer.bytes_mut(start..end))?;
    buffer.bytes_mut(start - TRANSFORM..start).copy_from_slice(&header);
    Ok((buffer, start - TRANSFORM..end))
}

/// Puts all segments in one buffer, from the returned position: headers in front of the read data if there is room.
fn contiguous(segments: Segments, length: usize, memory: &Allowance) -> Result<(Buffer, isize), Disconnect> {
    let segments = match segments.into_inner() {
        Ok([Segment::Bytes(headers), Segment::Payload(payload)])
            if headers.len() + TRANSFORM.unsigned_abs() + PREFIX <= PAGE =>
        {
            match payload.into_any().downcast::<ReadBuffer>() {
                Ok(read) => {
                    let (mut buffer, _) = read.into_parts();
                    let start = -headers.len().cast_signed();
                    buffer.bytes_mut(start..0).copy_from_slice(&headers);
                    return Ok((buffer, start));
                }
                Err(_) => return Err(Disconnect("data read by another backend than this transport knows")),
            }
        }
        Ok(segments) => Segments::from(segments),
        Err(segments) => segments,
    };
    let mut buffer = memory.owed(length)?;
    let mut at = 0_isize;
    for segment in &segments {
        let bytes = segment.bytes();
        let end = at + bytes.len().cast_signed();
        buffer.bytes_mut(at..end).copy_from_slice(bytes);
        at = end;
    }
    Ok((buffer, 0))
}
