//! Splits a frame into its messages, and combines messages into a frame ([MS-SMB2] 3.3.5.2.7, 3.2.4.1.4).

use std::ops::Range;

use super::cursor::{Reader, align, patch_u32};
use super::header::NEXT_COMMAND_OFFSET;
use super::{Fault, HEADER_LEN, Malformed};

/// The messages of `frame`, as ranges of it. Each contains at least a header; padding belongs to the preceding message,
/// because signatures cover it. The first error ends the iteration: later messages cannot be located.
#[must_use]
pub const fn split(frame: &[u8]) -> Messages<'_> {
    Messages { frame, start: Some(0) }
}

/// See [`split`].
#[derive(Clone, Debug)]
pub struct Messages<'a> {
    frame: &'a [u8],
    start: Option<usize>,
}

impl Iterator for Messages<'_> {
    type Item = Result<Range<usize>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = self.start.take()?;
        Some(self.range(start))
    }
}

impl Messages<'_> {
    fn range(&mut self, start: usize) -> Result<Range<usize>, Malformed> {
        let malformed = |fault| Malformed { fault, what: "compound", offset: start as u32 };
        let rest = &self.frame[start..];
        if rest.len() < HEADER_LEN {
            return Err(malformed(Fault::Truncated));
        }
        let mut r = Reader::new(rest, "compound");
        r.skip(NEXT_COMMAND_OFFSET)?;
        let next = r.get::<u32>()? as usize;
        if next == 0 {
            return Ok(start..self.frame.len());
        }
        // [MS-SMB2] 2.2.1: NextCommand is aligned to eight bytes. At least a header comes before and after it.
        if !next.is_multiple_of(8) || next < HEADER_LEN {
            return Err(malformed(Fault::Offset));
        }
        if next > rest.len() - HEADER_LEN {
            return Err(malformed(Fault::Truncated));
        }
        self.start = Some(start + next);
        Ok(start..start + next)
    }
}

/// Ends the message that begins at `start` of `frame` so that another can follow: pads it to eight bytes and writes its
/// `NextCommand`. Sign after this, not before.
pub fn chain(frame: &mut Vec<u8>, start: usize) {
    align(frame, start, 8);
    let next = frame.len() - start;
    patch_u32(frame, start + NEXT_COMMAND_OFFSET, next);
}
