//! The `:authority` of the kubelet's requests.
//!
//! The kubelet's plugin watcher uses the socket's path as the authority of its gRPC requests (CSI calls use `localhost`). A
//! path is not a valid authority (RFC 3986 3.2), and the HTTP/2 library refuses such requests with PROTOCOL_ERROR. So data read
//! from a connection is passed on with every literal `:authority` replaced by `localhost`.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

use crate::limits::FRAME_BYTES_MAX;

/// RFC 9113 3.4: the connection preface of a client.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// RFC 9113 4.1: length, type, flags, stream.
const FRAME_HEADER_BYTES: usize = 9;

/// RFC 9113 6.2.
const HEADERS: u8 = 1;
const END_HEADERS: u8 = 0x04;
const PADDED: u8 = 0x08;
const PRIORITY: u8 = 0x20;

/// RFC 7541 appendix A: the entry of the static table with the name `:authority`.
const AUTHORITY_INDEX: usize = 1;

/// `localhost` as a string literal (RFC 7541 5.2) without Huffman code.
const LOCALHOST: &[u8] = b"\x09localhost";

/// A connection that rewrites the authority of requests to `localhost`.
#[derive(Debug)]
pub(crate) struct Localhost<S> {
    inner: S,
    repair: Repair,
    /// Read and rewritten data; the first `given` bytes have been passed on.
    repaired: Vec<u8>,
    given: usize,
}

impl<S> Localhost<S> {
    pub(crate) fn new(inner: S) -> Self {
        Self { inner, repair: Repair::default(), repaired: Vec::new(), given: 0 }
    }
}

impl<S> Connected for Localhost<S> {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl<S: AsyncRead + Unpin> AsyncRead for Localhost<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.given == this.repaired.len() {
            this.repaired.clear();
            this.given = 0;
            let mut bytes = [0; 4096];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.inner).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                // A truncated frame is left for the library to reject.
                this.repair.finish(&mut this.repaired);
                if this.repaired.is_empty() {
                    return Poll::Ready(Ok(()));
                }
                break;
            }
            this.repair.push(read.filled(), &mut this.repaired);
        }
        let length = out.remaining().min(this.repaired.len() - this.given);
        out.put_slice(&this.repaired[this.given..this.given + length]);
        this.given += length;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Localhost<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// Rewrites one direction of a connection, frame by frame.
#[derive(Debug, Default)]
struct Repair {
    /// Received bytes of the incomplete preface or frame.
    pending: Vec<u8>,
    preface_passed: bool,
    /// The data is not valid HTTP/2 for the library: everything is passed on unchanged.
    given_up: bool,
}

impl Repair {
    fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        self.pending.extend_from_slice(bytes);
        if !self.preface_passed && !self.given_up {
            if self.pending.len() < PREFACE.len() {
                return;
            }
            self.given_up = !self.pending.starts_with(PREFACE);
            self.preface_passed = true;
            out.extend(self.pending.drain(..PREFACE.len()));
        }
        while !self.given_up {
            let Some(header) = self.pending.first_chunk::<FRAME_HEADER_BYTES>() else { return };
            let [a, b, c, kind, flags, ..] = *header;
            let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            if length > FRAME_BYTES_MAX {
                self.given_up = true;
                break;
            }
            let end = FRAME_HEADER_BYTES + length;
            if self.pending.len() < end {
                return;
            }
            let frame: Vec<u8> = self.pending.drain(..end).collect();
            let stream = &frame[5..FRAME_HEADER_BYTES];
            let repaired = match kind {
                HEADERS => repair_headers(flags, &frame[FRAME_HEADER_BYTES..]),
                _ => None,
            };
            match repaired {
                Some(payload) => {
                    // The original length was within the frame limit and grew by less than LOCALHOST.
                    let length = u32::try_from(payload.len()).expect("a frame is small").to_be_bytes();
                    out.extend_from_slice(&length[1..]);
                    out.extend_from_slice(&[kind, flags & !PADDED]);
                    out.extend_from_slice(stream);
                    out.extend_from_slice(&payload);
                }
                None => out.extend_from_slice(&frame),
            }
        }
        self.finish(out);
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.pending);
    }
}

/// Rewrites the payload of a HEADERS frame to `localhost` and removes its padding; `None` if no change is needed or the payload
/// is malformed.
fn repair_headers(flags: u8, payload: &[u8]) -> Option<Vec<u8>> {
    // A block that continues in the next frame may end within a string. The kubelet's blocks have a few hundred bytes.
    if flags & END_HEADERS == 0 {
        return None;
    }
    let mut payload = payload;
    if flags & PADDED != 0 {
        let (padding, rest) = payload.split_first()?;
        payload = &rest[..rest.len().checked_sub(usize::from(*padding))?];
    }
    let fields_at = if flags & PRIORITY != 0 { 5 } else { 0 };
    let (priority, fields) = payload.split_at_checked(fields_at)?;
    let mut repaired = priority.to_vec();
    let mut at = 0;
    let mut changed = false;
    while at < fields.len() {
        let start = at;
        let first = fields[at];
        // RFC 7541 6: the meaning of the first bits.
        let prefix = match first {
            0x80.. => 7,
            0x40..0x80 => 6,
            0x20..0x40 => 5,
            _ => 4,
        };
        let index = integer(fields, &mut at, prefix)?;
        let is_literal = !matches!(first, 0x80.. | 0x20..0x40);
        if !is_literal {
            repaired.extend_from_slice(&fields[start..at]);
            continue;
        }
        if index == 0 {
            skip_string(fields, &mut at)?;
        }
        let value_at = at;
        skip_string(fields, &mut at)?;
        if index == AUTHORITY_INDEX {
            // Indexed as before: both ends' dynamic tables count the same entries.
            repaired.extend_from_slice(&fields[start..value_at]);
            repaired.extend_from_slice(LOCALHOST);
            changed = true;
        } else {
            repaired.extend_from_slice(&fields[start..at]);
        }
    }
    changed.then_some(repaired)
}

/// RFC 7541 5.1.
fn integer(bytes: &[u8], at: &mut usize, prefix: u32) -> Option<usize> {
    let mask = (1_usize << prefix) - 1;
    let mut value = usize::from(*bytes.get(*at)?) & mask;
    *at += 1;
    if value < mask {
        return Some(value);
    }
    for shift in [0, 7, 14] {
        let byte = usize::from(*bytes.get(*at)?);
        *at += 1;
        value += (byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    // Larger than any frame.
    None
}

/// RFC 7541 5.2.
fn skip_string(bytes: &[u8], at: &mut usize) -> Option<()> {
    let length = integer(bytes, at, 7)?;
    let end = at.checked_add(length).filter(|&end| end <= bytes.len())?;
    *at = end;
    Some(())
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A frame on stream `stream`.
    pub(crate) fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).expect("small").to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
    }

    fn literal(prefix: u8, value: &str) -> Vec<u8> {
        [&[prefix, u8::try_from(value.len()).expect("short")], value.as_bytes()].concat()
    }

    /// `:method POST`, `:scheme http`, `:path`, `:authority`, `content-type`, `te` of a gRPC call.
    pub(crate) fn call(path: &str, authority: &[u8]) -> Vec<u8> {
        let mut fields = vec![0x83, 0x86];
        fields.extend(literal(0x44, path));
        fields.extend_from_slice(authority);
        fields.extend(literal(0x5f, "application/grpc"));
        fields.extend([&[0x40, 2], b"te".as_slice(), &[8], b"trailers"].concat());
        fields
    }

    pub(crate) fn authority(value: &str) -> Vec<u8> {
        literal(0x41, value)
    }

    fn repaired(bytes: &[u8], step: usize) -> Vec<u8> {
        let mut repair = Repair::default();
        let mut out = Vec::new();
        bytes.chunks(step).for_each(|chunk| repair.push(chunk, &mut out));
        repair.finish(&mut out);
        out
    }

    const PATH: &str = "/var/lib/kubelet/plugins_registry/csi.forebay.io-reg.sock";

    #[test]
    fn only_the_authority_is_replaced_at_any_chunk_size() {
        let fields = call("/pluginregistration.Registration/GetInfo", &authority(PATH));
        let settings = frame(4, 0, 0, &[]);
        let data = frame(0, 1, 1, &[0; 5]);
        let padded = [&[2], [0, 0, 0, 0, 15].as_slice(), &fields, &[0, 0]].concat();
        let sent = [
            PREFACE,
            &settings,
            &frame(HEADERS, END_HEADERS, 1, &fields),
            &data,
            &frame(HEADERS, END_HEADERS | PADDED | PRIORITY, 3, &padded),
        ]
        .concat();
        let right = call("/pluginregistration.Registration/GetInfo", &authority("localhost"));
        let wanted = [
            PREFACE,
            &settings,
            &frame(HEADERS, END_HEADERS, 1, &right),
            &data,
            &frame(HEADERS, END_HEADERS | PRIORITY, 3, &[[0, 0, 0, 0, 15].as_slice(), &right].concat()),
        ]
        .concat();
        for step in [1, 7, 24, 1000] {
            assert_eq!(repaired(&sent, step), wanted, "{step}");
        }
    }

    #[test]
    fn non_http2_and_malformed_headers_pass_unchanged() {
        for bytes in [
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n and more than a preface".to_vec(),
            b"PRI".to_vec(),
            [PREFACE, &[0xff; 64]].concat(),
            // Blocks that continue in another frame, are truncated, or contain a wrong length.
            [PREFACE, &frame(HEADERS, 0, 1, &call("/p", &authority("/a")))].concat(),
            [PREFACE, &frame(HEADERS, END_HEADERS, 1, &[0x41, 0x7f, 0xff])].concat(),
            [PREFACE, &frame(HEADERS, END_HEADERS | PADDED, 1, &[9, 0x41, 1, b'a'])].concat(),
            [PREFACE, &frame(HEADERS, END_HEADERS, 1, &[0x41, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff])].concat(),
        ] {
            assert_eq!(repaired(&bytes, 5), bytes);
        }
    }

    proptest! {
        #[test]
        fn arbitrary_headers_lose_no_frames(fields in prop::collection::vec(any::<u8>(), 0..200), flags: u8, step in 1_usize..50) {
            let sent = [PREFACE, &frame(HEADERS, flags, 1, &fields), &frame(6, 0, 0, &[7; 8])].concat();
            let out = repaired(&sent, step);
            prop_assert!(out.starts_with(PREFACE));
            prop_assert!(out.ends_with(&frame(6, 0, 0, &[7; 8])));
        }
    }
}
