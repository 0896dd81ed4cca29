//! A pool over TLS: traffic is encrypted on the wire, and access without TLS is refused.

use std::cell::Cell;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::server::*;
use crate::lab::{Lab, Node};
use crate::scenario::nvmeof::{CLIENT, FILE, FIRST, Fabric, NQN, SECOND, TCP, port};

/// A key for SHA-256 and one for SHA-384, from libnvme's tests.
const PSK: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
const LONG_PSK: &str =
    "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";
/// A key that no other host has.
const OTHER_PSK: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

/// Puts a key into the target's keyring: text, host NQN, subsystem NQN, version of the identity. Implements NVMe/TCP 3.6.1
/// without any of our code.
const PUT_KEY: &str = r"import base64, hashlib, hmac, subprocess, sys
text, host, subsystem, version = sys.argv[1:]
_, number, key, _ = text.split(':')
key = base64.b64decode(key)[:-4]
name = {'01': 'sha256', '02': 'sha384'}[number]
mac = lambda key, message: hmac.new(key, message, name).digest()
def expand_label(secret, label, context):
    label, context = b'tls13 ' + label, context.encode()
    info = len(key).to_bytes(2, 'big') + bytes([len(label)]) + label + bytes([len(context)]) + context
    return mac(mac(bytes(hashlib.new(name).digest_size), secret), info + bytes([1]))
retained = expand_label(key, b'HostNQN', host)
identity = context = f'NVMe{version}R{number} {host} {subsystem}'
if version == '1':
    digest = base64.b64encode(mac(retained, f'{host} {subsystem} NVMe-over-Fabrics'.encode())).decode()
    identity, context = f'{identity} {digest}', f'{number} {digest}'
psk = expand_label(retained, b'nvme-tls-psk', context)
subprocess.run(['keyctl', 'padd', 'psk', identity, '%:.nvme'], input=psk, check=True, stdout=subprocess.DEVNULL)";

/// Counts packets of a TCP port until a file exists: those that contain a given text, those that begin with a TLS record of
/// application data, and all with a payload.
const LISTEN: &str = r"import os, socket, sys
port, marker, out = int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3]
s = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
s.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)
s.settimeout(0.2)
text = records = full = 0
open(out + '.ready', 'w').close()
while not os.path.exists(out + '.stop'):
    try: packet = s.recv(1 << 17)
    except TimeoutError: continue
    tcp = packet[4 * (packet[0] & 15):]
    if packet[9] != 6 or port not in (int.from_bytes(tcp[0:2], 'big'), int.from_bytes(tcp[2:4], 'big')): continue
    payload = tcp[4 * (tcp[12] >> 4):]
    full += len(payload) > 0
    text += marker in payload
    records += payload[:3] == bytes([23, 3, 3])
with open(out + '.new', 'w') as f: f.write(f'{text} {records} {full}')
os.rename(out + '.new', out)";

/// Prints a hash of all nonzero data in a sparse file and of its offsets. Reading the holes as well takes half a minute on an
/// emulated guest.
const CONTENTS: &str = r"import hashlib, os, sys
piece, found, at = 1 << 16, hashlib.sha256(), 0
with open(sys.argv[1], 'rb') as file:
    while True:
        try: start = os.lseek(file.fileno(), at, os.SEEK_DATA)
        except OSError: break
        end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
        for at in range(max(at, start - start % piece), end, piece):
            data = os.pread(file.fileno(), piece, at)
            if data.count(0) < len(data): found.update(f'{at} '.encode() + data)
        at += piece
print(found.hexdigest())";

/// The text to search for on the wire.
const MARKER: &str = "this-must-not-be-readable-on-the-wire";
const HEARD: &str = "/run/heard";

/// The captured traffic.
#[derive(Debug)]
struct Heard {
    with_marker: u64,
    records: u64,
    packets: u64,
}

/// tlshd on a node. Dropping this ends it and removes all keys from the node.
struct Tlshd<'a> {
    node: &'a Node,
}

impl<'a> Tlshd<'a> {
    fn start(node: &'a Node) -> Result<Self> {
        // Logs to stderr.
        node.start_service("tlshd", &["/usr/sbin/tlshd", "-s"])?;
        let tlshd = Self { node };
        node.wait_until("tlshd listens", Duration::from_secs(10), || {
            // Its generic netlink socket; the kernel's own has no port.
            let listens = node.run("awk '$2 == 16 && $3 != 0' /proc/net/netlink")?;
            Ok(!listens.is_empty())
        })
        .with_context(|| node.service_log("tlshd"))?;
        Ok(tlshd)
    }

    fn stop(&self) -> Result<()> {
        self.node.signal_service("tlshd", "KILL")?;
        self.node
            .wait_until("tlshd ends", Duration::from_secs(10), || Ok(!self.node.service_runs("tlshd")?))
    }
}

impl Drop for Tlshd<'_> {
    fn drop(&mut self) {
        let _ = self.stop();
        let _ = self.node.run("keyctl clear %:.nvme");
    }
}

/// Counts the packets on the wire during `act`.
fn heard(fabric: &Fabric<'_>, act: impl FnOnce() -> Result<()>) -> Result<Heard> {
    let target = fabric.target();
    target.run(&format!("rm -f {HEARD} {HEARD}.stop {HEARD}.ready"))?;
    target.start_service("listen", &["python3", "-c", LISTEN, &TCP.to_string(), MARKER, HEARD])?;
    let is_there = |what: &str, file: &str| {
        target.wait_until(what, Duration::from_secs(20), || {
            Ok(target.run(&format!("ls {file} 2>/dev/null || true"))? == file)
        })
    };
    is_there("the listener is ready", &format!("{HEARD}.ready"))?;
    act()?;
    target.run(&format!("touch {HEARD}.stop"))?;
    is_there("what was heard is reported", HEARD).with_context(|| target.service_log("listen"))?;
    let text = target.run(&format!("cat {HEARD}"))?;
    let numbers: Vec<u64> = text.split_whitespace().filter_map(|number| number.parse().ok()).collect();
    let [with_marker, records, packets] = numbers[..] else { anyhow::bail!("{text:?}") };
    Ok(Heard { with_marker, records, packets })
}

pub(super) fn encrypted(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, "tcp")?;
    let (target, host, client) = (fabric.target(), fabric.node(FIRST), fabric.node(CLIENT));
    let host_nqn = fabric.allowed(FIRST, None)?.nqn;
    let settings = |tls| Settings { tls, ..Settings::epoch(1) };
    let write = |at: &str, file: &str| {
        client.run(&format!("yes {MARKER} | head -c 4194304 > {at}/{file}; sync {at}/{file}")).map(drop)
    };
    let verify = |at: &str, files: &[&str]| -> Result<()> {
        client.run("sync; echo 3 > /proc/sys/vm/drop_caches")?;
        for file in files {
            let sums = client.run(&format!("yes {MARKER} | head -c 4194304 | cmp - {at}/{file}"))?;
            ensure!(sums.is_empty(), "{file}: {sums}");
        }
        Ok(())
    };

    // In the clear first, to prove that the search finds the text on the wire.
    let server = Server::start(&fabric, FIRST, Settings { format: true, ..settings(None) })?;
    server.volume("tls")?;
    let mounted = server.mount("tls")?;
    let clear = heard(&fabric, || write(&mounted.at, "clear"))?;
    ensure!(clear.with_marker > 0 && clear.records == 0, "in the clear: {clear:?}");
    mounted.unmount()?;
    server.stop()?;
    drop(server);

    // The same namespace at a port that accepts only TLS.
    fabric.ask::<usize>(&fabric.seen(FIRST, 1, "tcp"), "nvmeof-disconnect")?;
    target.call::<()>("nvmet-withdraw", &())?;
    for node in [target, host] {
        node.run("modprobe tls; keyctl clear %:.nvme")?;
    }
    let put_key = |psk: &str, version: &str| {
        let argv = ["python3", "-c", PUT_KEY, psk, &host_nqn, NQN, version];
        let output = target.attempt(&argv, &[], Duration::from_secs(30))?;
        ensure!(output.success(), "a key for the target: {}", output.complaint());
        Ok(())
    };
    let at_target = Tlshd::start(target)?;
    put_key(PSK, "1")?;
    let hosts = vec![fabric.allowed(FIRST, None)?, fabric.allowed(SECOND, None)?];
    let only = crate::guest::calls::nvmet::Port { tls: true, ..port(1, "tcp", target.address(), TCP) };
    fabric.offer_to(hosts, vec![only])?;

    let tried = Cell::new(0);
    let refused = |tls, says: &str| -> Result<()> {
        let state = || -> Result<(String, String)> {
            let attributes = target.run(&format!("sync {FILE}; stat -c '%s %b %z %y' {FILE}"))?;
            let hash = target.attempt(&["python3", "-c", CONTENTS, FILE], &[], Duration::from_secs(30))?;
            ensure!(hash.success(), "the hash of the namespace: {}", hash.complaint());
            Ok((attributes, hash.text()))
        };
        let before = state()?;
        ended_with(&fabric, FIRST, Settings { connect_time_s: 5, ..settings(tls) }, says).with_context(
            || format!("tlshd: {}; {}", target.service_log("tlshd"), host.service_log("tlshd")),
        )?;
        ensure!(before == state()?, "{says}: the namespace was written to");
        tried.set(tried.get() + 1);
        Ok(())
    };
    refused(Some((PSK, 1)), "no program does the TLS handshake: run tlshd")?;
    let at_host = Tlshd::start(host)?;
    refused(None, "the target closed the connection while we connected")?;
    refused(Some((OTHER_PSK, 1)), "the TLS handshake failed")?;
    // The target has the key only under the other identity.
    refused(Some((PSK, 0)), "the TLS handshake failed")?;

    let serial = || -> Result<String> {
        let found = host.run("cat /sys/class/nvme/nvme*/tls_key")?;
        ensure!(found.lines().count() == 1 && !found.is_empty(), "one path with one key: {found:?}");
        Ok(found)
    };
    let keys = || host.run("keyctl rlist %:.nvme | wc -w");
    let server = Server::start(&fabric, FIRST, settings(Some((PSK, 1))))
        .with_context(|| format!("tlshd: {}; {}", target.service_log("tlshd"), host.service_log("tlshd")))?;
    server.holds_the_reservation()?;
    let first = serial()?;
    let mounted = server.mount("tls")?;
    verify(&mounted.at, &["clear"])?;
    let sealed = heard(&fabric, || write(&mounted.at, "sealed"))?;
    ensure!(sealed.with_marker == 0 && sealed.records > 0, "over TLS: {sealed:?}");
    verify(&mounted.at, &["clear", "sealed"])?;
    // Reconnected by the kernel alone.
    host.run("for c in /sys/class/nvme/nvme*; do echo 1 > $c/reset_controller; done")?;
    host.wait_until("the path is back", Duration::from_secs(30), || {
        Ok(host.run("cat /sys/class/nvme/nvme*/state")? == "live")
    })?;
    write(&mounted.at, "again")?;
    verify(&mounted.at, &["clear", "sealed", "again"])?;
    ensure!(serial()? == first, "another key after a reset");
    mounted.unmount()?;
    server.stop()?;
    drop(server);

    // Another key, while the path with the previous one still exists; then the other version.
    put_key(LONG_PSK, "1")?;
    put_key(PSK, "0")?;
    let mut before = first;
    for tls in [(LONG_PSK, 1), (PSK, 0)] {
        let server = Server::start(&fabric, FIRST, settings(Some(tls)))?;
        let now = serial()?;
        ensure!(now != before, "the path has its old key: {}", server.log()?);
        ensure!(keys()? == "1", "old keys stay: {}", host.run("cat /proc/keys")?);
        let mounted = server.mount("tls")?;
        verify(&mounted.at, &["clear", "sealed", "again"])?;
        mounted.unmount()?;
        server.stop()?;
        before = now;
    }

    // No program on the target performs the handshake.
    fabric.ask::<usize>(&fabric.seen(FIRST, 1, "tcp"), "nvmeof-disconnect")?;
    at_target.stop()?;
    refused(Some((PSK, 1)), "the TLS handshake")?;
    drop(at_host);
    Ok(format!(
        "{} cases refused; on the wire {} packets of {} with the text in the clear, {} of {} over TLS, {} records",
        tried.get(),
        clear.with_marker,
        clear.packets,
        sealed.with_marker,
        sealed.packets,
        sealed.records
    ))
}
