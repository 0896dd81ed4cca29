//! Receives data: a small buffer for headers, and payload that is received directly into its buffer, or dropped, without a
//! copy.

use std::net::TcpStream;

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// Maximum number of bytes that one call discards. The memory is never touched, so it costs only address space.
const DISCARD_BYTES: usize = 1 << 20;

/// Bytes of a socket, in order.
#[derive(Debug)]
pub(crate) struct Intake {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    untouched: Vec<u8>,
}

impl Intake {
    /// `bytes` is the maximum that one call reads ahead: a large value saves calls, a small one saves copies of payload.
    pub(crate) fn new(bytes: usize) -> Self {
        Self { buffer: vec![0; bytes].into(), start: 0, end: 0, untouched: vec![0; DISCARD_BYTES] }
    }

    /// The buffered bytes.
    pub(crate) fn buffered(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Receives until `count` bytes are buffered, at most the size of the buffer. They stay buffered. Returns `None` if the
    /// peer has ended the connection before the first of them.
    pub(crate) fn need_or_end(&mut self, socket: &TcpStream, count: usize) -> Result<Option<&[u8]>> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start + count > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        while self.end - self.start < count {
            match receive(socket, &mut self.buffer[self.end..], RecvFlags::empty())? {
                0 if self.start == self.end => return Ok(None),
                0 => bail!("the peer ended the connection within a message"),
                got => self.end += got,
            }
        }
        Ok(Some(&self.buffer[self.start..self.start + count]))
    }

    /// Same as [`Self::need_or_end`], but the end of the connection is an error.
    pub(crate) fn need(&mut self, socket: &TcpStream, count: usize) -> Result<&[u8]> {
        self.need_or_end(socket, count)?.context("the peer ended the connection")
    }

    /// Skips buffered bytes.
    pub(crate) fn pass(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end, "only what is there can be passed");
    }

    /// Fills `out` with the next bytes.
    pub(crate) fn take(&mut self, socket: &TcpStream, out: &mut [u8]) -> Result<()> {
        let ready = out.len().min(self.end - self.start);
        out[..ready].copy_from_slice(&self.buffer[self.start..self.start + ready]);
        self.pass(ready);
        let mut done = ready;
        while done < out.len() {
            match receive(socket, &mut out[done..], RecvFlags::WAITALL)? {
                0 => bail!("the peer ended the connection within a message"),
                got => done += got,
            }
        }
        Ok(())
    }

    /// Skips bytes without reading them. tcp(7): with MSG_TRUNC the kernel drops them instead of copying them.
    pub(crate) fn discard(&mut self, socket: &TcpStream, count: usize) -> Result<()> {
        let ready = count.min(self.end - self.start);
        self.pass(ready);
        let mut rest = count - ready;
        while rest > 0 {
            let piece = rest.min(self.untouched.len());
            match receive(socket, &mut self.untouched[..piece], RecvFlags::WAITALL | RecvFlags::TRUNC)? {
                0 => bail!("the peer ended the connection within a message"),
                got => rest -= got,
            }
        }
        Ok(())
    }
}

/// recv(2), retried after an interruption.
fn receive(socket: &TcpStream, into: &mut [u8], flags: RecvFlags) -> Result<usize> {
    loop {
        match recv(socket, &mut *into, flags) {
            Ok((_, got)) => return Ok(got),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => bail!("no answer came within the time limit"),
            Err(error) => return Err(error).context("receive"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::TcpListener;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let near = TcpStream::connect(listener.local_addr().expect("its address")).expect("a connection");
        (near, listener.accept().expect("the other end").0)
    }

    #[test]
    fn intake_keeps_order_across_headers_payload_and_discarded_data() {
        let (near, mut far) = pair();
        let sent: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251) as u8).collect();
        let copy = sent.clone();
        let sender = std::thread::spawn(move || far.write_all(&copy));
        let mut intake = Intake::new(100);
        assert_eq!(intake.need(&near, 10).expect("ten bytes"), &sent[..10]);
        intake.pass(10);
        intake.discard(&near, 2_500_000).expect("more than one call discards");
        let mut out = vec![0; 400_000];
        intake.take(&near, &mut out).expect("the next");
        assert_eq!(out, sent[2_500_010..2_900_010]);
        assert_eq!(intake.need(&near, 90).expect("the next"), &sent[2_900_010..2_900_100]);
        intake.pass(50);
        assert_eq!(intake.need(&near, 90).expect("the same and more"), &sent[2_900_060..2_900_150]);
        intake.discard(&near, sent.len() - 2_900_060).expect("the rest");
        assert_eq!(intake.need_or_end(&near, 1).expect("no error"), None);
        sender.join().expect("no panic").expect("sent");
    }
}
