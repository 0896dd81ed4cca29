//! A network namespace for a lab with a control plane: guests and native processes meet on one network, and nothing of
//! the machine's own network is touched. The only door is a relay from a port on the machine's loopback to the API
//! server.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::tap;
use crate::guest::init::MTU;
use crate::host;
use crate::limits::ETHERNET_FRAME_BYTES_MAX;
use crate::rundir;

/// In the inner process: `<port>:<socket>` of the relay.
const ROOM: &str = "FOREBAY_LAB_ROOM";
/// The machine's address on the lab's network.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 168, 77, 254);
const DEVICE: &str = "lab0";

/// Which side this process is on.
#[derive(Debug)]
pub enum Entered {
    /// Within.
    Inside(Room),
    /// This program has run within, and ended with this code.
    Ended(u8),
}

/// The namespace, seen from within.
#[derive(Debug)]
pub struct Room {
    relay_port: u16,
    relay: PathBuf,
}

/// Runs this program again, with the same arguments, in a namespace of its own. `prepare` runs before, outside, where
/// the machine's network is.
pub fn enter(prepare: impl FnOnce() -> Result<()>) -> Result<Entered> {
    if let Ok(value) = std::env::var(ROOM) {
        let (port, relay) = value.split_once(':').context("FOREBAY_LAB_ROOM is not ours")?;
        let room = Room { relay_port: port.parse()?, relay: PathBuf::from(relay) };
        host::run(Command::new("ip").args(["link", "set", "lo", "up"])).context("the lab's own network")?;
        return Ok(Entered::Inside(room));
    }
    host::ensure_packages(&["iproute2", "util-linux"])?;
    prepare()?;
    let folder = tempfile::Builder::new().prefix("forebay-relay-").tempdir()?;
    let relay = folder.path().join("api");
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let mut command = Command::new("unshare");
    command.arg("--net");
    if !host::is_root() {
        // Its owner may do in it what needs root elsewhere.
        command.args(["--user", "--map-current-user", "--keep-caps"]);
    }
    // Inside of unshare: a change of rights would undo the death signal.
    command.args(["--", "setpriv", "--pdeathsig", "KILL", "--"]);
    command.arg(std::env::current_exe()?).args(std::env::args_os().skip(1));
    command.env(ROOM, format!("{port}:{}", relay.display()));
    let mut child = command.spawn().context("start unshare")?;
    rundir::forward_signals(child.id())?;
    std::thread::spawn(move || {
        for outer in listener.incoming().flatten() {
            // Refused until the API server is up.
            if let Ok(inner) = UnixStream::connect(&relay) {
                join(outer, inner);
            }
        }
    });
    let status = child.wait()?;
    Ok(Entered::Ended(status.code().map_or(1, |code| code as u8)))
}

impl Room {
    /// The port on the machine's loopback at which the API server is seen from outside.
    pub fn relay_port(&self) -> u16 {
        self.relay_port
    }

    /// Lets outsiders reach this port of the inner loopback.
    pub fn open_relay(&self, port: u16) -> Result<()> {
        let listener = UnixListener::bind(&self.relay)?;
        std::thread::spawn(move || {
            for outer in listener.incoming().flatten() {
                if let Ok(inner) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                    join(inner, outer);
                }
            }
        });
        Ok(())
    }

    /// Joins the lab with the switch that listens here.
    pub fn plug(&self, lan: &Path) -> Result<()> {
        let tap = tap::open(DEVICE)?;
        let ip = |line: String| host::run(Command::new("ip").args(line.split(' ')));
        ip(format!("link set {DEVICE} mtu {MTU} up"))?;
        ip(format!("address add {ADDRESS}/24 dev {DEVICE}"))?;
        let stream = UnixStream::connect(lan).context("connect to the lab's switch")?;
        let (mut frames, mut port) = (tap.try_clone()?, stream.try_clone()?);
        std::thread::spawn(move || {
            // The length before the frame, both in one write.
            let mut buffer = vec![0; 4 + ETHERNET_FRAME_BYTES_MAX];
            while let Ok(count @ 1..) = frames.read(&mut buffer[4..]) {
                buffer[..4].copy_from_slice(&(count as u32).to_be_bytes());
                if port.write_all(&buffer[..4 + count]).is_err() {
                    break;
                }
            }
        });
        let (mut frames, mut port) = (tap, std::io::BufReader::with_capacity(256 << 10, stream));
        std::thread::spawn(move || {
            let mut length = [0; 4];
            let mut frame = vec![0; ETHERNET_FRAME_BYTES_MAX];
            while port.read_exact(&mut length).is_ok() {
                let count = u32::from_be_bytes(length) as usize;
                let Some(frame) = frame.get_mut(..count) else { break };
                if port.read_exact(frame).is_err() {
                    break;
                }
                // A frame that the kernel does not take is lost, as on a wire.
                let _ = frames.write_all(frame);
            }
        });
        Ok(())
    }

    /// Sends what is for this network through this node.
    pub fn route(&self, network: &str, via: &str) -> Result<()> {
        host::run(Command::new("ip").args(["route", "replace", network, "via", via])).map(drop)
    }
}

/// Passes bytes both ways until both have ended.
fn join(tcp: TcpStream, unix: UnixStream) {
    let (Ok(tcp_reader), Ok(unix_reader)) = (tcp.try_clone(), unix.try_clone()) else { return };
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut &tcp_reader, &mut &unix);
        let _ = unix.shutdown(Shutdown::Write);
    });
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut &unix_reader, &mut &tcp);
        let _ = tcp.shutdown(Shutdown::Write);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_relay_passes_both_directions_and_their_ends() {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bound");
        let folder = tempfile::tempdir().expect("a folder");
        let room = Room { relay_port: 0, relay: folder.path().join("api") };
        room.open_relay(server.local_addr().expect("an address").port()).expect("open");
        let mut client = UnixStream::connect(folder.path().join("api")).expect("connected");
        let (mut served, _) = server.accept().expect("accepted");
        client.write_all(b"question").expect("sent");
        client.shutdown(Shutdown::Write).expect("ended");
        let mut text = String::new();
        served.read_to_string(&mut text).expect("read to the end");
        assert_eq!(text, "question");
        served.write_all(b"answer").expect("sent");
        drop(served);
        text.clear();
        client.read_to_string(&mut text).expect("read to the end");
        assert_eq!(text, "answer");
    }
}
