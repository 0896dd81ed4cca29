//! The network between the guests: a learning Ethernet switch in this process.
//!
//! QEMU's stream network backend connects to a unix socket and puts a big-endian u32 length before each frame. The switch
//! does not use the host's network, so any number of labs can run in parallel, and it drops only frames that a real switch
//! would drop.

use std::collections::HashMap;
use std::io::{BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result};

use crate::limits::{ETHERNET_FRAME_BYTES_MAX, SWITCH_QUEUE_FRAMES};
use crate::progress::say;

type Address = [u8; 6];

#[derive(Default)]
struct Ports {
    next: usize,
    queues: HashMap<usize, SyncSender<Arc<[u8]>>>,
    learned: HashMap<Address, usize>,
}

/// Listens on `path` and forwards frames between all connected peers until the process ends.
pub fn start(path: &Path) -> Result<()> {
    let listener = UnixListener::bind(path).with_context(|| format!("bind {}", path.display()))?;
    std::thread::Builder::new().name("switch".into()).spawn(move || {
        let ports = Arc::new(Mutex::new(Ports::default()));
        for stream in listener.incoming().flatten() {
            let ports = ports.clone();
            std::thread::spawn(move || {
                if let Ok(writer) = stream.try_clone() {
                    serve(stream, writer, &ports);
                }
            });
        }
    })?;
    Ok(())
}

fn serve(reader: UnixStream, writer: UnixStream, ports: &Mutex<Ports>) {
    let lock = || ports.lock().expect("no holder of this lock panics");
    let own = {
        let mut ports = lock();
        let own = ports.next;
        ports.next += 1;
        // A queue for each port: a stalled guest must not delay frames to the others.
        let (queue, frames) = sync_channel(SWITCH_QUEUE_FRAMES);
        ports.queues.insert(own, queue);
        std::thread::spawn(move || drain(writer, frames));
        own
    };
    let mut reader = BufReader::with_capacity(256 << 10, reader);
    let mut frame = Vec::with_capacity(ETHERNET_FRAME_BYTES_MAX);
    let mut lost = 0u64;
    while read_frame(&mut reader, &mut frame).is_ok() {
        let Some((to, from)) = addresses(&frame) else { continue };
        let targets: Vec<SyncSender<Arc<[u8]>>> = {
            let mut ports = lock();
            ports.learned.insert(from, own);
            match ports.learned.get(&to) {
                Some(port) if *port == own => Vec::new(),
                Some(port) => ports.queues.get(port).into_iter().cloned().collect(),
                None => {
                    ports.queues.iter().filter(|(port, _)| **port != own).map(|(_, q)| q.clone()).collect()
                }
            }
        };
        let shared: Arc<[u8]> = frame.as_slice().into();
        for target in targets {
            match target.try_send(shared.clone()) {
                Ok(()) if lost > 0 => {
                    say(format!("the switch lost {lost} frames of {from:02x?} to a node that is too slow"));
                    lost = 0;
                }
                Ok(()) | Err(TrySendError::Disconnected(_)) => {}
                Err(TrySendError::Full(_)) => lost += 1,
            }
        }
    }
    let mut ports = lock();
    ports.queues.remove(&own);
    ports.learned.retain(|_, port| *port != own);
}

/// Reads one frame, its length prefix included.
fn read_frame(reader: &mut impl Read, frame: &mut Vec<u8>) -> std::io::Result<()> {
    frame.resize(4, 0);
    reader.read_exact(frame)?;
    let length = u32::from_be_bytes([frame[0], frame[1], frame[2], frame[3]]) as usize;
    if length > ETHERNET_FRAME_BYTES_MAX {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    frame.resize(4 + length, 0);
    reader.read_exact(&mut frame[4..])
}

fn addresses(frame: &[u8]) -> Option<(Address, Address)> {
    let to = frame.get(4..10)?.try_into().ok()?;
    let from = frame.get(10..16)?.try_into().ok()?;
    Some((to, from))
}

/// Sends the queued frames of a port until the port or the switch is gone.
fn drain(mut writer: UnixStream, frames: Receiver<Arc<[u8]>>) {
    for frame in frames {
        if writer.write_all(&frame).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn port(path: &Path) -> UnixStream {
        let stream = UnixStream::connect(path).expect("the switch listens");
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
        stream
    }

    fn send(stream: &mut UnixStream, to: u8, from: u8, payload: &[u8]) {
        let mut frame = ((12 + payload.len()) as u32).to_be_bytes().to_vec();
        frame.extend([2, 0, 0, 0, 0, to]);
        frame.extend([2, 0, 0, 0, 0, from]);
        frame.extend(payload);
        stream.write_all(&frame).expect("sent");
    }

    fn receive(stream: &mut UnixStream) -> Vec<u8> {
        let mut frame = Vec::new();
        read_frame(stream, &mut frame).expect("a frame");
        frame[16..].to_vec()
    }

    #[test]
    fn stuck_port_does_not_block_other_ports() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("lan");
        start(&path).expect("a switch");
        let (mut from, mut stuck, mut other) = (port(&path), port(&path), port(&path));
        // The switch has learned each address once the other two ports have received a frame from it.
        for (address, stream) in [(2, &mut stuck), (3, &mut other)] {
            loop {
                send(stream, 1, address, b"here");
                from.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
                let mut frame = Vec::new();
                if read_frame(&mut from, &mut frame).is_ok() && frame[10..16] == [2, 0, 0, 0, 0, address] {
                    break;
                }
            }
        }
        // More than socket and queue can hold: the rest is dropped, and the sender never blocks.
        let payload = [0; 9000];
        for _ in 0..2 * SWITCH_QUEUE_FRAMES {
            send(&mut from, 2, 1, &payload);
        }
        send(&mut from, 3, 1, b"to another");
        loop {
            if receive(&mut other) == b"to another" {
                break;
            }
        }
    }

    #[test]
    fn only_frames_to_unknown_addresses_are_flooded() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("lan");
        start(&path).expect("a switch");
        let (mut a, mut b, mut c) = (port(&path), port(&path), port(&path));
        // Each port is connected once the others receive its flooded frames.
        let hear = |from: &mut UnixStream, byte: u8, others: [&mut UnixStream; 2]| {
            let [x, y] = others;
            for stream in [x, y] {
                stream.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
                let mut frame = Vec::new();
                loop {
                    send(from, 99, byte, b"flood");
                    if read_frame(stream, &mut frame).is_ok() {
                        break;
                    }
                }
            }
        };
        hear(&mut a, 1, [&mut b, &mut c]);
        hear(&mut b, 2, [&mut a, &mut c]);
        hear(&mut c, 3, [&mut a, &mut b]);
        send(&mut a, 2, 1, b"to b");
        send(&mut a, 3, 1, b"to c");
        let next = |stream: &mut UnixStream| loop {
            let payload = receive(stream);
            if payload != b"flood" {
                break payload;
            }
        };
        assert_eq!(next(&mut b), b"to b");
        assert_eq!(next(&mut c), b"to c");
    }
}
