//! Frames between host and guest: pure encoding, no I/O.
//!
//! A frame is `length: u32 LE` (of what follows), `id: u32 LE`, `kind: u8`, payload. The id names a request; the side
//! that asks chooses it. Structured payloads are JSON, streams are raw bytes.

use serde::{Deserialize, Serialize};

use crate::limits::FRAME_BYTES_MAX;

/// The information that a guest reports when its agent is up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Node name.
    pub node: String,
    /// Kernel release.
    pub kernel: String,
    /// Milliseconds since the guest's kernel started.
    pub uptime_ms: u64,
}

/// A command to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables added to the agent's environment.
    #[serde(default)]
    pub env: Vec<(String, String)>,
    /// Working directory; the agent's own if absent.
    #[serde(default)]
    pub cwd: Option<String>,
    /// Whether [`Message::Stdin`] frames follow; otherwise standard input is empty.
    #[serde(default)]
    pub stdin: bool,
    /// Rows and columns of its terminal; it runs on pipes if absent.
    #[serde(default)]
    pub terminal: Option<(u16, u16)>,
}

/// How a command ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Its exit status.
    pub code: Option<i32>,
    /// The signal that killed it.
    pub signal: Option<i32>,
    /// Why it could not be started or waited for.
    pub error: Option<String>,
}

/// The content of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Host: requests a [`Message::Hello`] with the same id.
    Ping,
    /// Guest: the agent is up (id 0), or the answer to a ping.
    Hello(Hello),
    /// Host: runs this command.
    Exec(Exec),
    /// Host: bytes for the command's standard input.
    Stdin(Vec<u8>),
    /// Host: end of standard input.
    StdinEof,
    /// Host: sends this signal to the command's process group.
    Signal(i32),
    /// Host: the terminal now has this many rows and columns.
    Resize(u16, u16),
    /// Guest: bytes of standard output, or of the terminal.
    Stdout(Vec<u8>),
    /// Guest: bytes of standard error.
    Stderr(Vec<u8>),
    /// Guest: the command has ended; the last frame of its id.
    Exit(Exit),
}

/// A message and the request it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Request.
    pub id: u32,
    /// Content.
    pub message: Message,
}

/// Why bytes are not a frame.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The announced length is beyond the limit or too short for a header.
    #[error("frame of {0} bytes")]
    Length(usize),
    /// No such kind of message.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// The payload does not fit its kind.
    #[error("payload of frame kind {kind} is malformed: {reason}")]
    Payload {
        /// The kind's number.
        kind: u8,
        /// What is wrong.
        reason: String,
    },
}

const HEADER_BYTES: usize = 5;

impl Frame {
    /// The frame as bytes, length first.
    pub fn encode(&self) -> Vec<u8> {
        fn json<T: Serialize>(value: &T) -> Vec<u8> {
            serde_json::to_vec(value).expect("plain structs of strings and numbers always serialize")
        }
        let (kind, payload) = match &self.message {
            Message::Ping => (0u8, Vec::new()),
            Message::Hello(hello) => (1, json(hello)),
            Message::Exec(exec) => (2, json(exec)),
            Message::Stdin(bytes) => (3, bytes.clone()),
            Message::StdinEof => (4, Vec::new()),
            Message::Signal(number) => (5, number.to_le_bytes().to_vec()),
            Message::Resize(rows, columns) => (6, [rows.to_le_bytes(), columns.to_le_bytes()].concat()),
            Message::Stdout(bytes) => (7, bytes.clone()),
            Message::Stderr(bytes) => (8, bytes.clone()),
            Message::Exit(exit) => (9, json(exit)),
        };
        let mut out = Vec::with_capacity(4 + HEADER_BYTES + payload.len());
        out.extend_from_slice(&((HEADER_BYTES + payload.len()) as u32).to_le_bytes());
        out.extend_from_slice(&self.id.to_le_bytes());
        out.push(kind);
        out.extend_from_slice(&payload);
        out
    }
}

/// Collects incoming bytes and returns whole frames.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    taken: usize,
}

impl Decoder {
    /// Adds bytes as read.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.taken > 0 {
            self.buffer.drain(..self.taken);
            self.taken = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame, if there is one. After an error the stream is lost.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, WireError> {
        let rest = &self.buffer[self.taken..];
        let Some((length, rest)) = rest.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if !(HEADER_BYTES..=FRAME_BYTES_MAX).contains(&length) {
            return Err(WireError::Length(length));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let (id, body) = body.split_first_chunk::<4>().expect("length was checked against the header's");
        let frame = Frame { id: u32::from_le_bytes(*id), message: decode(body[0], &body[1..])? };
        self.taken += 4 + length;
        Ok(Some(frame))
    }
}

fn decode(kind: u8, payload: &[u8]) -> Result<Message, WireError> {
    let malformed = |reason: String| WireError::Payload { kind, reason };
    fn json<'a, T: Deserialize<'a>>(payload: &'a [u8]) -> Result<T, String> {
        serde_json::from_slice(payload).map_err(|error| error.to_string())
    }
    Ok(match kind {
        0 => Message::Ping,
        1 => Message::Hello(json(payload).map_err(malformed)?),
        2 => Message::Exec(json(payload).map_err(malformed)?),
        3 => Message::Stdin(payload.to_vec()),
        4 => Message::StdinEof,
        5 => {
            let number = payload.try_into().map_err(|_| malformed("not four bytes".to_owned()))?;
            Message::Signal(i32::from_le_bytes(number))
        }
        6 => match payload {
            [a, b, c, d] => Message::Resize(u16::from_le_bytes([*a, *b]), u16::from_le_bytes([*c, *d])),
            _ => return Err(malformed("not four bytes".to_owned())),
        },
        7 => Message::Stdout(payload.to_vec()),
        8 => Message::Stderr(payload.to_vec()),
        9 => Message::Exit(json(payload).map_err(malformed)?),
        other => return Err(WireError::Kind(other)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Frame> {
        let exec = Exec {
            argv: vec!["sh".into(), "-c".into(), "true".into()],
            env: vec![("A".into(), "ü".into())],
            cwd: Some("/tmp".into()),
            stdin: true,
            terminal: Some((24, 80)),
        };
        let hello = Hello { node: "node1".into(), kernel: "7.2".into(), uptime_ms: 5 };
        let exit = Exit { code: Some(3), signal: None, error: Some("x".into()) };
        [
            Message::Ping,
            Message::Hello(hello),
            Message::Exec(exec),
            Message::Stdin(vec![0; 70_000]),
            Message::StdinEof,
            Message::Signal(-9),
            Message::Resize(50, 132),
            Message::Stdout(vec![1, 2]),
            Message::Stderr(Vec::new()),
            Message::Exit(exit),
        ]
        .into_iter()
        .enumerate()
        .map(|(i, message)| Frame { id: i as u32 * 7, message })
        .collect()
    }

    #[test]
    fn every_message_survives_any_split_of_the_stream() {
        let bytes: Vec<u8> = samples().iter().flat_map(Frame::encode).collect();
        for step in [1, 3, 4096, bytes.len()] {
            let mut decoder = Decoder::default();
            let mut got = Vec::new();
            for chunk in bytes.chunks(step) {
                decoder.push(chunk);
                while let Some(frame) = decoder.next_frame().expect("own frames decode") {
                    got.push(frame);
                }
            }
            assert_eq!(got, samples(), "split into {step}");
        }
    }

    #[test]
    fn invalid_lengths_kinds_and_payloads_are_refused() {
        for length in [0u32, 4, FRAME_BYTES_MAX as u32 + 1, u32::MAX] {
            let mut decoder = Decoder::default();
            decoder.push(&length.to_le_bytes());
            assert!(matches!(decoder.next_frame(), Err(WireError::Length(_))), "{length}");
        }
        let mut decoder = Decoder::default();
        decoder.push(&[5, 0, 0, 0, 1, 0, 0, 0, 99]);
        assert!(matches!(decoder.next_frame(), Err(WireError::Kind(99))));
        let mut decoder = Decoder::default();
        decoder.push(&[6, 0, 0, 0, 1, 0, 0, 0, 5, 1]);
        assert!(matches!(decoder.next_frame(), Err(WireError::Payload { kind: 5, .. })));
    }
}
