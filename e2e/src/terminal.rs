//! Commands with this process's own input and output: `exec` and `shell`.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

use crate::channel::Channel;
use crate::limits::STREAM_CHUNK_BYTES;
use crate::wire::{Exec, Message};

/// Restores the terminal's settings.
struct Raw(Option<Termios>);

impl Raw {
    fn enter() -> Self {
        let Ok(before) = tcgetattr(std::io::stdin()) else { return Self(None) };
        let mut raw = before.clone();
        raw.make_raw();
        Self(tcsetattr(std::io::stdin(), OptionalActions::Now, &raw).ok().map(|()| before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
        }
    }
}

fn size() -> (u16, u16) {
    tcgetwinsize(std::io::stdin()).map_or((24, 80), |size| (size.ws_row, size.ws_col))
}

/// Runs the command with this process's streams. Returns the exit status.
pub fn attach(channel: &Arc<Channel>, argv: Vec<String>, interactive: bool) -> Result<i32> {
    let terminal = interactive.then(size);
    let raw = (interactive && isatty(std::io::stdin())).then(Raw::enter);
    let (id, answers) =
        channel.open(Message::Exec(Exec { argv, stdin: true, terminal, ..Exec::default() }))?;
    let input = channel.clone();
    std::thread::spawn(move || {
        let mut buffer = vec![0; STREAM_CHUNK_BYTES];
        while let Ok(count @ 1..) = std::io::stdin().read(&mut buffer) {
            if input.send(id, Message::Stdin(buffer[..count].to_vec())).is_err() {
                return;
            }
        }
        let _ = input.send(id, Message::StdinEof);
    });
    let mut known = terminal;
    loop {
        match answers.recv_timeout(Duration::from_millis(500)) {
            Ok(Message::Stdout(bytes)) => write_now(std::io::stdout(), &bytes)?,
            Ok(Message::Stderr(bytes)) => write_now(std::io::stderr(), &bytes)?,
            Ok(Message::Exit(exit)) => {
                drop(raw);
                if let Some(error) = exit.error {
                    bail!("{error}");
                }
                return Ok(exit.code.unwrap_or_else(|| 128 + exit.signal.unwrap_or(0)));
            }
            Ok(_) => {}
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                if known.is_some_and(|known| known != size()) {
                    let (rows, columns) = size();
                    known = Some((rows, columns));
                    channel.send(id, Message::Resize(rows, columns))?;
                }
            }
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => bail!("the guest is gone"),
        }
    }
}

fn write_now(mut to: impl Write, bytes: &[u8]) -> Result<()> {
    to.write_all(bytes)?;
    Ok(to.flush()?)
}
