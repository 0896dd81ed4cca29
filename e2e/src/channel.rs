//! The host's side of the stream to an agent: many concurrent requests over one socket.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::limits::STREAM_CHUNK_BYTES;
use crate::wire::{Decoder, Exec, Exit, Frame, Hello, Message};

/// A connection to one guest's agent.
#[derive(Debug)]
pub struct Channel {
    writer: Mutex<UnixStream>,
    /// Requests that wait for frames; `None` once the guest is gone.
    waiting: Mutex<Option<HashMap<u32, Sender<Message>>>>,
    next: AtomicU32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder of this lock panics")
}

impl Channel {
    /// Connects to the socket of a guest's port, or to a supervisor's socket for it.
    pub fn connect(path: &Path) -> Result<Arc<Self>> {
        let stream = UnixStream::connect(path).with_context(|| format!("connect to {}", path.display()))?;
        Self::over(stream)
    }

    /// Creates a channel over this stream.
    pub fn over(stream: UnixStream) -> Result<Arc<Self>> {
        let mut reader = stream.try_clone()?;
        let channel = Arc::new(Self {
            writer: Mutex::new(stream),
            waiting: Mutex::new(Some(HashMap::new())),
            next: AtomicU32::new(1),
        });
        let weak = Arc::downgrade(&channel);
        std::thread::spawn(move || {
            let mut decoder = Decoder::default();
            let mut buffer = vec![0; STREAM_CHUNK_BYTES];
            'stream: while let Ok(count @ 1..) = reader.read(&mut buffer) {
                decoder.push(&buffer[..count]);
                loop {
                    match decoder.next_frame() {
                        Ok(Some(frame)) => {
                            let Some(channel) = weak.upgrade() else { break 'stream };
                            channel.deliver(frame);
                        }
                        Ok(None) => break,
                        Err(_) => break 'stream,
                    }
                }
            }
            if let Some(channel) = weak.upgrade() {
                // Dropping the senders wakes every waiting request.
                *lock(&channel.waiting) = None;
            }
        });
        Ok(channel)
    }

    fn deliver(&self, frame: Frame) {
        if let Some(waiting) = lock(&self.waiting).as_mut() {
            let last = matches!(frame.message, Message::Exit(_));
            if let Some(sender) = waiting.get(&frame.id) {
                let _ = sender.send(frame.message);
            }
            if last {
                waiting.remove(&frame.id);
            }
        }
    }

    /// Opens a request. The receiver yields its answers and ends when the guest is gone.
    pub fn open(&self, message: Message) -> Result<(u32, Receiver<Message>)> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = channel();
        match lock(&self.waiting).as_mut() {
            Some(waiting) => waiting.insert(id, sender),
            None => bail!("the guest is gone"),
        };
        self.send(id, message)?;
        Ok((id, receiver))
    }

    /// Sends a further frame of an open request.
    pub fn send(&self, id: u32, message: Message) -> Result<()> {
        lock(&self.writer).write_all(&Frame { id, message }.encode()).context("the guest is gone")
    }

    /// Drops a request if its answers are no longer needed.
    pub fn forget(&self, id: u32) {
        if let Some(waiting) = lock(&self.waiting).as_mut() {
            waiting.remove(&id);
        }
    }

    /// Retries until the agent answers or the deadline has passed.
    pub fn wait_for_agent(&self, deadline: Instant, mut alive: impl FnMut() -> Result<()>) -> Result<Hello> {
        // Frames written before the agent has opened its port may be lost: ping again, with new ids.
        let mut pings: Vec<(u32, Receiver<Message>)> = Vec::new();
        let result = loop {
            if let Err(error) = alive() {
                break Err(error);
            }
            if Instant::now() >= deadline {
                break Err(anyhow::anyhow!("no answer from the guest's agent within the deadline"));
            }
            match self.open(Message::Ping) {
                Ok(ping) => pings.push(ping),
                Err(error) => break Err(error),
            }
            let (_, newest) = pings.last().expect("one was just pushed");
            match newest.recv_timeout(Duration::from_millis(250)) {
                Ok(Message::Hello(hello)) => break Ok(hello),
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break Err(anyhow::anyhow!("the guest is gone")),
            }
            let early = pings.iter().find_map(|(_, ping)| match ping.try_recv() {
                Ok(Message::Hello(hello)) => Some(hello),
                _ => None,
            });
            if let Some(hello) = early {
                break Ok(hello);
            }
        };
        for (id, _) in pings {
            self.forget(id);
        }
        result
    }

    /// The processes of the guest, as evidence of why a command is not done.
    fn processes(&self) -> String {
        let argv = ["sh", "-c", PROCESSES].map(str::to_owned).to_vec();
        let Ok((id, answers)) = self.open(Message::Exec(Exec { argv, ..Exec::default() })) else {
            return "the guest is gone".to_owned();
        };
        let until = Instant::now() + PROCESSES_DEADLINE;
        let mut said = Vec::new();
        loop {
            match answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Message::Stdout(bytes) | Message::Stderr(bytes)) => said.extend_from_slice(&bytes),
                Ok(Message::Exit(_)) => break,
                Ok(_) => {}
                Err(_) => {
                    self.forget(id);
                    said.extend_from_slice(b"and no more: the agent does not answer");
                    break;
                }
            }
        }
        String::from_utf8_lossy(&said).into_owned()
    }

    /// Runs a command to completion and collects its output. Kills it after the deadline.
    pub fn run(&self, exec: Exec, stdin: &[u8], deadline: Duration) -> Result<Output> {
        let shown = exec.argv.join(" ");
        let until = Instant::now() + deadline;
        let (id, answers) = self.open(Message::Exec(Exec { stdin: !stdin.is_empty(), ..exec }))?;
        for chunk in stdin.chunks(STREAM_CHUNK_BYTES) {
            self.send(id, Message::Stdin(chunk.to_vec()))?;
        }
        if !stdin.is_empty() {
            self.send(id, Message::StdinEof)?;
        }
        let mut output = Output::default();
        loop {
            match answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Message::Stdout(bytes)) => output.stdout.extend_from_slice(&bytes),
                Ok(Message::Stderr(bytes)) => output.stderr.extend_from_slice(&bytes),
                Ok(Message::Exit(exit)) => {
                    output.exit = exit;
                    return Ok(output);
                }
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("the guest died while it ran: {shown}"),
                Err(RecvTimeoutError::Timeout) => {
                    let processes = self.processes();
                    let late = if answers.try_iter().any(|message| matches!(message, Message::Exit(_))) {
                        "; its end was reported as soon as the agent had another request"
                    } else {
                        ""
                    };
                    let _ = self.send(id, Message::Signal(9));
                    self.forget(id);
                    bail!(
                        "not done after {} s{late}: {shown}\n{}\nthe guest's processes:\n{processes}",
                        deadline.as_secs(),
                        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).trim_end()
                    );
                }
            }
        }
    }
}

/// What the guest's processes wait for.
const PROCESSES: &str =
    "cat /proc/loadavg /proc/uptime; ps -eLo pid,stat,time,wchan:24,args --ppid 2 -N | tail -n 80
     for pid in $(pgrep -f 'forebay-guest call'); do cat /proc/$pid/task/*/stack; done";
const PROCESSES_DEADLINE: Duration = Duration::from_secs(30);

/// The output of a command and how it ended.
#[derive(Debug, Default)]
pub struct Output {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// How it ended.
    pub exit: Exit,
}

impl Output {
    /// Whether it ended with status 0.
    pub fn success(&self) -> bool {
        self.exit.code == Some(0)
    }

    /// Standard output as text, without white space at its ends.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim().to_owned()
    }

    /// How it ended and its standard error, as a readable message.
    pub fn complaint(&self) -> String {
        let how = match &self.exit {
            Exit { error: Some(error), .. } => error.clone(),
            Exit { signal: Some(signal), .. } => format!("killed by signal {signal}"),
            Exit { code, .. } => format!("exit status {}", code.unwrap_or(-1)),
        };
        format!("{how}\n{}", String::from_utf8_lossy(&self.stderr).trim_end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::agent;

    fn agent() -> Arc<Channel> {
        let (host, guest) = UnixStream::pair().expect("a pair of sockets");
        let writer = guest.try_clone().expect("a second handle");
        std::thread::spawn(move || agent::serve(guest, writer, "here", false));
        Channel::over(host).expect("a channel")
    }

    fn sh(script: &str) -> Exec {
        Exec { argv: vec!["sh".into(), "-c".into(), script.into()], ..Exec::default() }
    }

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn agent_answers_a_ping() {
        let hello = agent().wait_for_agent(Instant::now() + SOON, || Ok(())).expect("an answer");
        assert_eq!(hello.node, "here");
        assert!(!hello.kernel.is_empty());
    }

    #[test]
    fn command_gets_its_environment_and_directory_and_returns_its_output() {
        let exec = Exec {
            env: vec![("WORD".into(), "käse".into())],
            cwd: Some("/usr".into()),
            ..sh("pwd; echo $WORD; echo no >&2; exit 7")
        };
        let output = agent().run(exec, &[], SOON).expect("it runs");
        assert_eq!(output.text(), "/usr\nkäse");
        assert_eq!(output.stderr, b"no\n");
        assert_eq!(output.exit, Exit { code: Some(7), ..Exit::default() });
    }

    #[test]
    fn a_megabyte_passes_through_standard_input_and_output() {
        let bytes: Vec<u8> = (0..1_500_000u32).map(|i| (i.wrapping_mul(31) >> 3) as u8).collect();
        let output = agent().run(sh("cat"), &bytes, SOON).expect("it runs");
        assert!(output.stdout == bytes, "{} bytes came back", output.stdout.len());
    }

    #[test]
    fn commands_run_concurrently() {
        let agent = agent();
        let folder = tempfile::tempdir().expect("a folder");
        let fifo = folder.path().join("fifo").display().to_string();
        assert!(agent.run(sh(&format!("mkfifo {fifo}")), &[], SOON).expect("it runs").success());
        std::thread::scope(|scope| {
            // Each end of the fifo blocks until the other is opened: run one after the other, they would never finish.
            let reader =
                scope.spawn(|| agent.run(sh(&format!("cat {fifo}")), &[], SOON).expect("it runs").text());
            let writer = agent.run(sh(&format!("echo through > {fifo}")), &[], SOON).expect("it runs");
            assert!(writer.success());
            assert_eq!(reader.join().expect("no panic"), "through");
        });
    }

    #[test]
    fn timed_out_command_is_killed_with_its_children() {
        let agent = agent();
        let folder = tempfile::tempdir().expect("a folder");
        let pids = folder.path().join("pid").display().to_string();
        let script = format!("sleep 1000 & echo $! > {pids}; echo begun; wait");
        let error = agent.run(sh(&script), &[], Duration::from_millis(800)).expect_err("it is too slow");
        assert!(error.to_string().contains("begun"), "{error}");
        let pid = std::fs::read_to_string(&pids).expect("the pid was written");
        let until = Instant::now() + SOON;
        // A zombie that belongs to another parent process still has an entry in /proc, but no memory: check its state.
        while std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()))
            .is_ok_and(|stat| !stat.contains(") Z "))
        {
            assert!(Instant::now() < until, "the child still runs");
            std::thread::yield_now();
        }
    }

    #[test]
    fn background_child_with_open_output_does_not_delay_the_answer() {
        let output =
            agent().run(sh("sleep 20 & echo started"), &[], Duration::from_secs(10)).expect("it answers");
        assert_eq!(output.text(), "started");
    }

    #[test]
    fn error_for_a_missing_program_names_it() {
        let exec = Exec { argv: vec!["/no/such/program".into()], ..Exec::default() };
        let output = agent().run(exec, &[], SOON).expect("an answer");
        assert!(output.exit.error.expect("an error").contains("/no/such/program"));
    }

    #[test]
    fn command_can_run_in_a_terminal_of_the_requested_size() {
        let exec = Exec { terminal: Some((33, 99)), ..sh("tty && stty size") };
        let output = agent().run(exec, &[], SOON).expect("it runs");
        let text = output.text();
        assert!(text.contains("/dev/pts/") && text.contains("33 99"), "{text}");
    }

    #[test]
    fn pending_requests_fail_when_the_guest_disconnects() {
        let (host, guest) = UnixStream::pair().expect("a pair of sockets");
        let channel = Channel::over(host).expect("a channel");
        let (_, answers) = channel.open(Message::Ping).expect("sent");
        drop(guest);
        assert!(answers.recv_timeout(SOON).is_err());
    }
}
