//! The agent: runs commands for the host, several concurrently, over one stream.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::limits::{OUTPUT_LINGER, STREAM_CHUNK_BYTES};
use crate::wire::{Decoder, Exec, Exit, Frame, Hello, Message};

/// The stream to the host. Every thread writes only whole frames.
#[derive(Clone)]
struct Outbox(Arc<Mutex<Box<dyn Write + Send>>>);

impl Outbox {
    fn send(&self, id: u32, message: Message) {
        // If the host has disconnected, keep running: the next host starts with a ping.
        let _ = lock(&self.0).write_all(&Frame { id, message }.encode());
    }
}

/// The state of a running command.
struct Running {
    stdin: Option<Sender<Vec<u8>>>,
    group: Option<Pid>,
    terminal: Option<std::fs::File>,
}

type Table = Arc<Mutex<HashMap<u32, Running>>>;

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder of this lock panics")
}

/// Serves until the stream ends. A virtio port reads as ended while no host is connected; with `persistent`, the agent waits
/// until one connects.
pub fn serve(
    mut reader: impl Read,
    writer: impl Write + Send + 'static,
    node: &str,
    persistent: bool,
) -> anyhow::Result<()> {
    let outbox = Outbox(Arc::new(Mutex::new(Box::new(writer))));
    let table: Table = Arc::default();
    outbox.send(0, Message::Hello(hello(node)));
    let mut decoder = Decoder::default();
    let mut buffer = vec![0; STREAM_CHUNK_BYTES];
    loop {
        let count = match reader.read(&mut buffer) {
            Ok(0) if persistent => {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.into()),
        };
        decoder.push(&buffer[..count]);
        while let Some(frame) = decoder.next_frame()? {
            handle(frame, node, &outbox, &table);
        }
    }
}

fn hello(node: &str) -> Hello {
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
    let uptime: f64 = uptime.split(' ').next().and_then(|text| text.parse().ok()).unwrap_or(0.0);
    Hello { node: node.to_owned(), kernel, uptime_ms: (uptime * 1000.0) as u64 }
}

fn handle(Frame { id, message }: Frame, node: &str, outbox: &Outbox, table: &Table) {
    match message {
        Message::Ping => outbox.send(id, Message::Hello(hello(node))),
        Message::Exec(exec) => start(id, exec, outbox, table),
        Message::Stdin(bytes) => {
            if let Some(stdin) = lock(table).get(&id).and_then(|running| running.stdin.as_ref()) {
                // The command may have closed its input, which is allowed.
                let _ = stdin.send(bytes);
            }
        }
        Message::StdinEof => {
            if let Some(running) = lock(table).get_mut(&id) {
                running.stdin = None;
            }
        }
        Message::Signal(number) => {
            let group = lock(table).get(&id).and_then(|running| running.group);
            if let (Some(group), Some(signal)) = (group, Signal::from_named_raw(number)) {
                let _ = kill_process_group(group, signal);
            }
        }
        Message::Resize(rows, columns) => {
            if let Some(terminal) = lock(table).get(&id).and_then(|running| running.terminal.as_ref()) {
                let _ = tcsetwinsize(terminal, winsize(rows, columns));
            }
        }
        Message::Hello(_) | Message::Stdout(_) | Message::Stderr(_) | Message::Exit(_) => {}
    }
}

fn winsize(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

fn start(id: u32, exec: Exec, outbox: &Outbox, table: &Table) {
    let started = match exec.terminal {
        Some(size) => start_on_terminal(&exec, size),
        None => start_on_pipes(&exec),
    };
    let (child, streams, stdin, terminal) = match started {
        Ok(started) => started,
        Err(error) => {
            let error = Some(format!(
                "cannot start {}: {error}",
                exec.argv.first().map_or("nothing", String::as_str)
            ));
            return outbox.send(id, Message::Exit(Exit { error, ..Exit::default() }));
        }
    };
    let (input, output) = channel();
    let running = Running {
        stdin: stdin.is_some().then_some(input),
        group: Pid::from_raw(child.id() as i32),
        terminal,
    };
    lock(table).insert(id, running);
    if let Some(stdin) = stdin {
        std::thread::spawn(move || feed(stdin, output));
    }
    let (outbox, table) = (outbox.clone(), table.clone());
    std::thread::spawn(move || {
        let exit = see_through(id, child, streams, &outbox);
        lock(&table).remove(&id);
        outbox.send(id, Message::Exit(exit));
    });
}

type Streams = Vec<(Box<dyn Read + Send>, fn(Vec<u8>) -> Message)>;
type Started = (Child, Streams, Option<Box<dyn Write + Send>>, Option<std::fs::File>);

fn command(exec: &Exec, prefix: &[&str]) -> io::Result<Command> {
    let argv: Vec<&str> = prefix.iter().copied().chain(exec.argv.iter().map(String::as_str)).collect();
    let (program, arguments) =
        argv.split_first().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "an empty command"))?;
    let mut command = Command::new(program);
    command.args(arguments).envs(exec.env.iter().map(|(name, value)| (name, value)));
    if let Some(folder) = &exec.cwd {
        command.current_dir(folder);
    }
    Ok(command)
}

fn start_on_pipes(exec: &Exec) -> io::Result<Started> {
    let mut command = command(exec, &[])?;
    command.stdin(if exec.stdin { Stdio::piped() } else { Stdio::null() });
    // A separate process group, so that a signal also reaches the command's children.
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0).spawn()?;
    let mut streams: Streams = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        streams.push((Box::new(stdout), Message::Stdout));
    }
    if let Some(stderr) = child.stderr.take() {
        streams.push((Box::new(stderr), Message::Stderr));
    }
    let stdin = child.stdin.take().map(|stdin| Box::new(stdin) as Box<dyn Write + Send>);
    Ok((child, streams, stdin, None))
}

fn start_on_terminal(exec: &Exec, (rows, columns): (u16, u16)) -> io::Result<Started> {
    let main = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&main)?;
    unlockpt(&main)?;
    let name = ptsname(&main, Vec::new())?;
    let name = name.to_str().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?.to_owned();
    let side = std::fs::File::options().read(true).write(true).open(name)?;
    tcsetwinsize(&side, winsize(rows, columns))?;
    // setsid(1) makes the terminal the controlling one without unsafe code here.
    let mut command = command(exec, &["setsid", "--ctty", "--wait"])?;
    command.stdin(side.try_clone()?).stdout(side.try_clone()?).stderr(side).process_group(0);
    let child = command.spawn()?;
    drop(command);
    let main = std::fs::File::from(main);
    let streams: Streams = vec![(Box::new(main.try_clone()?), Message::Stdout)];
    Ok((child, streams, Some(Box::new(main.try_clone()?)), Some(main)))
}

fn feed(mut stdin: Box<dyn Write + Send>, input: Receiver<Vec<u8>>) {
    for bytes in input {
        if stdin.write_all(&bytes).is_err() {
            return;
        }
    }
}

/// Forwards the output, waits for the end, and reports how the command ended.
fn see_through(id: u32, mut child: Child, streams: Streams, outbox: &Outbox) -> Exit {
    let (done, ended) = channel::<()>();
    for (mut stream, wrap) in streams {
        let (outbox, done) = (outbox.clone(), done.clone());
        std::thread::spawn(move || {
            let mut buffer = vec![0; STREAM_CHUNK_BYTES];
            // The last reader of a terminal gets EIO instead of end of file.
            while let Ok(count @ 1..) = stream.read(&mut buffer) {
                outbox.send(id, wrap(buffer[..count].to_vec()));
            }
            drop(done);
        });
    }
    drop(done);
    let status = child.wait();
    // Output that a left-behind child keeps open must not delay the response.
    let patience = Instant::now() + OUTPUT_LINGER;
    let _ = ended.recv_timeout(patience.saturating_duration_since(Instant::now()));
    match status {
        Ok(status) => Exit { code: status.code(), signal: status.signal(), error: None },
        Err(error) => Exit { error: Some(format!("cannot wait for it: {error}")), ..Exit::default() },
    }
}
