//! What all transports do with frames: where their parts lie in a buffer, and how they are sealed.

use std::ops::Range;

use forebay_smb::engine::{Disconnect, Sealer, Segment, Segments};

use crate::buffers::{Buffer, PAGE, ReadBuffer};
use crate::memory::Allowance;

/// Where the data of a WRITE begin: 64 bytes of header, 48 of the request ([MS-SMB2] 2.2.21).
pub(crate) const WRITE_DATA: isize = 112;
/// Length of a transform header ([MS-SMB2] 2.2.41).
pub(crate) const TRANSFORM: isize = 52;
/// Most bytes that a transport puts before a frame.
const PREFIX: usize = 4;

/// Puts a response into one buffer, in the range returned, sealed where that is asked for. Before it there is place for a
/// prefix.
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

/// Puts all segments in one buffer, from the position returned on: before the data that were read, if there is place.
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
