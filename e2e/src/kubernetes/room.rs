//! A network namespace for a lab with a control plane. Guests and native processes share one network, and the machine's own
//! network is not touched. The only connection is a relay from a port on the machine's loopback to the API server.

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

/// The side of the namespace that this process is on.
#[derive(Debug)]
pub enum Entered {
    /// Inside.
    Inside(Room),
    /// This program has run inside, and has ended with this code.
    Ended(u8),
}

/// The namespace, from inside.
#[derive(Debug)]
pub struct Room {
    relay_port: u16,
    relay: PathBuf,
}

/// Runs this program again with the same arguments in a new namespace. `prepare` runs before that, outside, where the
/// machine's network is available.
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
        // The owner of a user namespace may do in it what needs root elsewhere.
        command.args(["--user", "--map-current-user", "--keep-caps"]);
    }
    // Called inside of unshare: a later change of credentials would clear the death signal.
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
    /// The port on the machine's loopback at which clients outside reach the API server.
    pub fn relay_port(&self) -> u16 {
        self.relay_port
    }

    /// Gives clients outside access to this port of the inner loopback.
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

    /// Connects to the switch that listens at `lan`.
    pub fn plug(&self, lan: &Path) -> Result<()> {
        let tap = tap::open(DEVICE)?;
        let ip = |line: String| host::run(Command::new("ip").args(line.split(' ')));
        ip(format!("link set {DEVICE} mtu {MTU} up"))?;
        ip(format!("address add {ADDRESS}/24 dev {DEVICE}"))?;
        let stream = UnixStream::connect(lan).context("connect to the lab's switch")?;
        let (mut frames, mut port) = (tap.try_clone()?, stream.try_clone()?);
        std::thread::spawn(move || {
            // The length prefix and the frame, in one write.
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
                // A frame that the kernel does not accept is lost, as on a real network.
                let _ = frames.write_all(frame);
            }
        });
        Ok(())
    }

    /// Routes this network through this node.
    pub fn route(&self, network: &str, via: &str) -> Result<()> {
        host::run(Command::new("ip").args(["route", "replace", network, "via", via])).map(drop)
    }
}

/// Relays bytes in both directions until both have ended.
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
    fn relay_forwards_both_directions_and_their_shutdown() {
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
