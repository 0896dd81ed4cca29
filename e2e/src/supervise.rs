//! A lab that outlives the command that started it: a supervisor holds it and forwards requests to its nodes.
//!
//! QEMU serves one client per socket, so the supervisor owns those sockets and listens on a separate socket per node. It uses
//! the same frames and only renumbers the requests: a client cannot distinguish it from an agent.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::channel::Channel;
use crate::lab::{self, Lab, NodeSpec};
use crate::limits::STREAM_CHUNK_BYTES;
use crate::progress::say;
use crate::rundir;
use crate::wire::{Decoder, Frame, Message};

/// Contains the supervisor's PID. Written when all nodes answer.
const READY: &str = "supervisor.pid";

/// Boots the nodes and serves them until a signal arrives or the last guest ends. Runs in a separate process.
pub fn supervise(name: &str, specs: &[NodeSpec]) -> Result<()> {
    let lab = Lab::start(name, specs)?;
    open_doors(&lab)?;
    // Signals end this process through the cleanup. This loop only waits for a guest to die unexpectedly.
    loop {
        std::thread::sleep(Duration::from_millis(500));
        lab.check()?;
    }
}

/// Gives other processes of this user access to the nodes of this process's lab.
pub fn open_doors(lab: &Lab) -> Result<()> {
    let folder = lab.folder().expect("it runs in this process").to_owned();
    for node in lab.nodes() {
        let listener = UnixListener::bind(socket(&folder, node.name()))?;
        let node = node.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let channel = node.channel();
                std::thread::spawn(move || serve(client, &channel));
            }
        });
    }
    std::fs::write(folder.join(lab::DESCRIPTION), serde_json::to_vec(&lab.describe())?)?;
    // Renamed into place: a process that finds the file also finds the PID in it.
    std::fs::write(folder.join("ready"), std::process::id().to_string())?;
    std::fs::rename(folder.join("ready"), folder.join(READY))?;
    Ok(())
}

fn socket(folder: &Path, node: &str) -> PathBuf {
    folder.join(format!("{node}.sock"))
}

/// Serves one client of one node: maps its request numbers to the channel's and back.
fn serve(client: UnixStream, channel: &Arc<Channel>) {
    let Ok(mut reader) = client.try_clone() else { return };
    let writer = Arc::new(Mutex::new(client));
    let open: Arc<Mutex<HashMap<u32, u32>>> = Arc::default();
    let lock = |open: &Mutex<HashMap<u32, u32>>, id: u32| {
        open.lock().expect("no holder of this lock panics").get(&id).copied()
    };
    let mut decoder = Decoder::default();
    let mut buffer = vec![0; STREAM_CHUNK_BYTES];
    'client: while let Ok(count @ 1..) = reader.read(&mut buffer) {
        decoder.push(&buffer[..count]);
        loop {
            let Frame { id, message } = match decoder.next_frame() {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(_) => break 'client,
            };
            if matches!(message, Message::Exec(_) | Message::Ping) {
                let Ok((inner, answers)) = channel.open(message) else { break 'client };
                open.lock().expect("no holder of this lock panics").insert(id, inner);
                let (writer, open, channel) = (writer.clone(), open.clone(), channel.clone());
                std::thread::spawn(move || {
                    for message in answers {
                        let last = matches!(message, Message::Exit(_) | Message::Hello(_));
                        let bytes = Frame { id, message }.encode();
                        let sent = writer.lock().expect("no holder of this lock panics").write_all(&bytes);
                        if sent.is_err() || last {
                            break;
                        }
                    }
                    channel.forget(inner);
                    open.lock().expect("no holder of this lock panics").remove(&id);
                });
            } else if let Some(inner) = lock(&open, id)
                && channel.send(inner, message).is_err()
            {
                break 'client;
            }
        }
    }
    // A client that is interrupted at the keyboard ends the commands that it has started.
    for inner in open.lock().expect("no holder of this lock panics").values() {
        let _ = channel.send(*inner, Message::Signal(1));
    }
}

/// Starts a supervisor and waits until its lab is up. Its progress is printed to this process's standard error.
pub fn up(name: &str, nodes: &str, smb_direct: bool) -> Result<()> {
    if find(Some(name)).is_ok() {
        bail!("a lab named {name} is already up; `forebay-lab down --lab {name}` ends it");
    }
    let mut command = Command::new("setsid");
    command.arg(std::env::current_exe()?).args(["supervise", "--name", name, "--nodes", nodes]);
    if smb_direct {
        command.arg("--smb-direct");
    }
    let log = std::env::temp_dir()
        .join(format!("forebay-supervisor-{}-{name}.log", rustix::process::getuid().as_raw()));
    let output = std::fs::File::create(&log).with_context(|| format!("make {}", log.display()))?;
    let mut child = command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).spawn()?;
    let mut shown = 0;
    loop {
        let text = std::fs::read(&log).unwrap_or_default();
        eprint!("{}", String::from_utf8_lossy(&text[shown..]));
        shown = text.len();
        if let Some(status) = child.try_wait()? {
            let _ = std::fs::remove_file(&log);
            bail!("the lab did not come up ({status})");
        }
        if find(Some(name)).is_ok_and(|folder| folder.join(READY).exists()) {
            let _ = std::fs::remove_file(&log);
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The folder of the lab of this name, or of the only one that is up.
pub fn find(name: Option<&str>) -> Result<PathBuf> {
    let mut running = rundir::running()?;
    if name.is_none() {
        // No other user may access a test's lab.
        running.retain(|(_, folder)| folder.join(READY).exists());
    }
    match name {
        Some(name) => running
            .into_iter()
            .find(|(running, _)| running == name)
            .map(|(_, folder)| folder)
            .with_context(|| format!("no lab named {name} is up")),
        None => match &running[..] {
            [(_, folder)] => Ok(folder.clone()),
            [] => bail!("no lab is up; `forebay-lab up` starts one"),
            many => {
                let names: Vec<&str> = many.iter().map(|(name, _)| name.as_str()).collect();
                bail!("several labs are up, say which with --lab: {}", names.join(", "))
            }
        },
    }
}

/// Connects to a node of a supervised lab.
pub fn connect(folder: &Path, node: &str) -> Result<Arc<Channel>> {
    if !folder.join(READY).exists() {
        bail!("the lab in {} has no supervisor: it belongs to a running test", folder.display());
    }
    Channel::connect(&socket(folder, node)).with_context(|| format!("the lab has no node {node}"))
}

/// Ends a supervised lab and waits until it is gone.
pub fn down(name: Option<&str>) -> Result<()> {
    let folder = find(name)?;
    let pid = std::fs::read_to_string(folder.join(READY)).context("the lab has no supervisor")?;
    let pid =
        pid.trim().parse().ok().and_then(rustix::process::Pid::from_raw).context("no process number")?;
    rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
    let until = Instant::now() + Duration::from_secs(20);
    while folder.exists() {
        if Instant::now() > until {
            bail!("the supervisor does not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    say(format!("{} is down", folder.file_name().unwrap_or_default().display()));
    Ok(())
}
