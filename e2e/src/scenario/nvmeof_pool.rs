//! A pool on a namespace of a fabric: made, served, refused, and taken over by another host.

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::nvmeof::{
    CLIENT, Cut, FILE, FIRST, Fabric, INSTANCE, KEY, NQN, OTHER_KEY, RDMA, SECOND, TCP, UUID, conflict, port,
};
use super::{MIB, Scenario, on_fabric};
use crate::guest::GUEST_BINARY;
use crate::guest::calls::data::{Shards, Sum, Sums};
use crate::guest::calls::grpc::{AdminCall, AdminRequest, Answer};
use crate::guest::calls::mounting::Mount;
use crate::guest::calls::nvmeof::{Held, Seen};
use crate::guest::calls::space::Space;
use crate::guest::calls::writer::Records;
use crate::lab::{Lab, Node};
use crate::progress::say;
use crate::site::{ADMIN_SOCKET, POOL, SERVER_CONFIG};

pub(super) fn scenarios() -> Vec<Scenario> {
    let scenarios = vec![
        on_fabric("pool on a namespace: made, served, left and taken again, over TCP", |lab| {
            served(lab, "tcp")
        }),
        on_fabric("pool on a namespace: made, served, left and taken again, over RDMA", |lab| {
            served(lab, "rdma")
        }),
        on_fabric("pool on a namespace: what is refused, and nothing written", refusals),
        on_fabric("pool on a namespace: its server's node dies, another takes it over", killed),
        on_fabric("pool on a namespace: its server is cut off, ends itself, another has it", cut_off),
        on_fabric("pool on a namespace: the target is away too long, and comes back", away),
    ];
    scenarios.into_iter().map(|scenario| Scenario { on_trial: true, ..scenario }).collect()
}

const FILE_BYTES: u64 = 1 << 30;
const VOLUME_BYTES: u64 = 256 * MIB;
/// As docs/server.md has them.
const EXIT_POOL: i32 = 4;
const EXIT_FENCED: i32 = 7;
/// How long the reservation may go unconfirmed here.
const LOSS_TIME_S: u64 = 60;
/// As emulated guests on a busy machine keep it.
const KEEP_ALIVE_S: u64 = 30;
/// What emulation may add to that.
const EMULATED_S: u64 = 25;
/// Names a service of the lab's nodes.
const SERVICE: &str = "pool-server";
const SEED: u64 = 123;

/// What a server is told of its namespace.
#[derive(Clone)]
struct Told {
    epoch: u32,
    instance: String,
    nqn: String,
    transport: &'static str,
    format: bool,
    key: Option<&'static str>,
    connect_time_s: u32,
    /// A second path, where nothing listens.
    dead_path: bool,
}

impl Told {
    fn epoch(epoch: u32) -> Self {
        Self {
            epoch,
            instance: INSTANCE.into(),
            nqn: NQN.into(),
            transport: "tcp",
            format: false,
            key: None,
            connect_time_s: 200,
            dead_path: false,
        }
    }

    fn config(&self, host: &Node, target: &Node) -> String {
        let Self { epoch, instance, nqn, transport, format, connect_time_s, .. } = self;
        let service = if *transport == "rdma" { RDMA } else { TCP };
        let at = target.address();
        let dead = if self.dead_path { format!(", \"{transport}://{at}:{NOBODY}\"") } else { String::new() };
        let key = self.key.map(|_| format!("dhchap_key = \"{KEY_FILE}\"\n")).unwrap_or_default();
        format!(
            "[instance]\nname = \"{instance}\"\nepoch = {epoch}\n\
             [server]\nlisten = [\"0.0.0.0:445\"]\nadvertise = [\"{address}:445\"]\nrdma = \"off\"\n\
             [admin]\nsocket = \"{ADMIN_SOCKET}\"\n\
             [[pool]]\nname = \"default\"\npath = \"{POOL}\"\nquota = \"project\"\n\
             [pool.nvmeof]\nnqn = \"{nqn}\"\nnamespace = \"uuid:{UUID}\"\n\
             paths = [\"{transport}://{at}:{service}\"{dead}]\nformat = {format}\n\
             connect_time_s = {connect_time_s}\nkeep_alive_s = {KEEP_ALIVE_S}\nloss_time_s = {LOSS_TIME_S}\n{key}",
            address = host.address(),
        )
    }
}

/// Port where nothing listens.
const NOBODY: u16 = 4499;
const KEY_FILE: &str = "/etc/forebay/dhchap.key";

/// Starts the server and notes its process number and what it ends with.
const RUNNER: &str = "rm -f /run/pool-server.exit /run/pool-server.pid; \
     forebay-server run --config \"$1\" & echo $! > /run/pool-server.pid; \
     set +e; wait $!; echo $? > /run/pool-server.exit";

/// A server of the pool on one of the hosts. Dropped, it is killed and what it left is unmounted.
struct Server<'a> {
    fabric: &'a Fabric<'a>,
    node: &'a Node,
    told: Told,
}

impl<'a> Server<'a> {
    /// Starts it, and waits until it serves.
    fn start(fabric: &'a Fabric<'a>, host: &str, told: Told) -> Result<Self> {
        let server = Self::begin(fabric, host, told)?;
        server.wait_until_it_serves()?;
        Ok(server)
    }

    fn begin(fabric: &'a Fabric<'a>, host: &str, told: Told) -> Result<Self> {
        let node = fabric.node(host);
        let server = Self { fabric, node, told };
        node.put(SERVER_CONFIG, server.told.config(node, fabric.target()).as_bytes(), 0o600)?;
        if let Some(key) = server.told.key {
            node.put(KEY_FILE, key.as_bytes(), 0o600)?;
        }
        node.run(&format!(
            "mkdir -p /run/forebay; rm -f /run/{SERVICE}.exit; : > /var/log/{SERVICE}-runner.log"
        ))?;
        node.start_service(&format!("{SERVICE}-runner"), &["sh", "-c", RUNNER, "runner", SERVER_CONFIG])?;
        Ok(server)
    }

    fn wait_until_it_serves(&self) -> Result<()> {
        self.node
            .wait_until("the server serves, or ends", Duration::from_secs(60), || {
                Ok(self.log()?.contains("serving") || self.exit()?.is_some())
            })
            .and_then(|()| {
                let exit = self.exit()?;
                ensure!(exit.is_none(), "the server ended with {exit:?}");
                Ok(())
            })
            .with_context(|| self.log().unwrap_or_default())
    }

    /// All that it has said.
    fn log(&self) -> Result<String> {
        self.node.run(&format!("cat /var/log/{SERVICE}-runner.log"))
    }

    /// What it ended with.
    fn exit(&self) -> Result<Option<i32>> {
        let text = self.node.run(&format!("cat /run/{SERVICE}.exit 2>/dev/null || true"))?;
        Ok(text.trim().parse().ok())
    }

    fn wait_for_exit(&self, deadline: Duration) -> Result<i32> {
        self.node
            .wait_until("the server ends", deadline, || Ok(self.exit()?.is_some()))
            .with_context(|| self.log().unwrap_or_default())?;
        self.exit()?.context("it has ended")
    }

    /// SIGTERM, and a good end.
    fn stop(&self) -> Result<()> {
        ensure!(self.node.signal_service(SERVICE, "TERM")?, "the server was not running");
        let exit = self.wait_for_exit(Duration::from_secs(20))?;
        ensure!(exit == 0, "the server ended with {exit}: {}", self.log()?);
        Ok(())
    }

    /// kill -9.
    fn kill(&self) -> Result<()> {
        ensure!(self.node.signal_service(SERVICE, "KILL")?, "the server was not running");
        self.wait_for_exit(Duration::from_secs(20)).map(drop)
    }

    fn admin(&self, request: AdminRequest) -> Result<Answer> {
        self.node.call::<Answer>("admin", &AdminCall { socket: ADMIN_SOCKET.into(), request })?.ok()
    }

    /// A volume; its name is also its user's.
    fn volume(&self, id: &str) -> Result<()> {
        let request = AdminRequest::CreateVolume {
            id: id.into(),
            pool: "default".into(),
            bytes: VOLUME_BYTES,
            username: id.into(),
            password: password(id),
        };
        self.admin(request).context("create a volume").map(drop)
    }

    /// The client's mount of it.
    fn mount(&self, id: &str) -> Result<Mounted<'a>> {
        let client = self.fabric.node(CLIENT);
        let at = format!("/mnt/{id}-{}-{}", self.node.name(), self.told.epoch);
        let options = [
            ("username", id),
            ("password", &password(id)),
            ("vers", "3.1.1"),
            ("nosharesock", ""),
            ("actimeo", "1"),
            ("hard", ""),
        ];
        let options = options.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let server = self.node.address().to_owned();
        let mount = Mount { server, share: id.into(), at: at.clone().into(), options };
        client.call_within::<()>("mount", &mount, Duration::from_secs(60))?;
        Ok(Mounted { client, at })
    }

    /// Itself, as the crate of the fabric's hosts names it.
    fn seen(&self) -> Seen {
        let Told { epoch, transport, .. } = self.told;
        self.fabric.seen(self.node.name(), epoch, transport)
    }

    fn holds_the_reservation(&self) -> Result<()> {
        let held: Held = self.fabric.ask(&self.seen(), "nvmeof-check")?;
        ensure!(held.held, "{held:?}");
        Ok(())
    }

    /// Milliseconds from its first line to those that say these.
    fn times(&self, marks: &[&str]) -> Result<Vec<u64>> {
        let log = self.log()?;
        let first = log.lines().find_map(time_of_day_ms).context("no line has a time")?;
        marks
            .iter()
            .map(|mark| {
                let line = log.lines().find(|line| line.contains(mark));
                let at = line.and_then(time_of_day_ms).with_context(|| format!("no {mark:?} in {log}"))?;
                // Past midnight.
                Ok((at + DAY_MS - first) % DAY_MS)
            })
            .collect()
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        let _ = self.node.run(&format!(
            "if [ ! -e /run/{SERVICE}.exit ]; then kill -9 $(cat /run/{SERVICE}.pid); fi
             for i in $(seq 100); do [ -e /run/{SERVICE}.exit ] && break; sleep 0.2; done
             while grep -q ' {POOL} ' /proc/mounts; do umount {POOL} || umount -l {POOL}; done"
        ));
    }
}

const DAY_MS: u64 = 24 * 3600 * 1000;

/// Of a line that begins with a time like `2026-11-22T13:17:32.123456Z`.
fn time_of_day_ms(line: &str) -> Option<u64> {
    let (_, time) = line.split_whitespace().next()?.strip_suffix('Z')?.split_once('T')?;
    let mut fields = time.split(':');
    let (hours, minutes): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let seconds: f64 = fields.next()?.parse().ok()?;
    Some((hours * 60 + minutes) * 60_000 + (seconds * 1000.0) as u64)
}

fn password(id: &str) -> String {
    format!("secret-of-{id}!")
}

/// A mount of the client's; dropped, it is unmounted, lazily where its server is gone.
struct Mounted<'a> {
    client: &'a Node,
    at: String,
}

impl Mounted<'_> {
    fn unmount(self) -> Result<()> {
        let result = self.client.call::<()>("unmount", &self.at);
        std::mem::forget(self);
        result
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = self.client.attempt(&["umount", "-l", &self.at], &[], Duration::from_secs(10));
    }
}

/// A fabric with a blank namespace offered to both hosts.
fn offered<'a>(lab: &'a Lab, transport: &str) -> Result<Fabric<'a>> {
    let mut fabric = Fabric::start(lab)?;
    if transport == "rdma" {
        fabric = fabric.with_rdma()?;
    }
    renew(&fabric, transport, FILE_BYTES, None, &format!("truncate -s {FILE_BYTES} {FILE}"))?;
    Ok(fabric)
}

/// Offers another namespace: this many bytes, filled by a script on the target.
fn renew(fabric: &Fabric<'_>, transport: &str, bytes: u64, key: Option<&str>, fill: &str) -> Result<bool> {
    for host in [FIRST, SECOND] {
        fabric.ask::<usize>(&fabric.seen(host, 1, transport), "nvmeof-disconnect")?;
    }
    fabric.target().call::<()>("nvmet-withdraw", &())?;
    fabric.target().run_within(
        &format!("rm -f {FILE}; truncate -s {bytes} {FILE}; {fill}; sync {FILE}"),
        Duration::from_secs(60),
    )?;
    let hosts = vec![fabric.allowed(FIRST, key)?, fabric.allowed(SECOND, key)?];
    let service = if transport == "rdma" { RDMA } else { TCP };
    let ports = vec![port(1, transport, fabric.target().address(), service)];
    Ok(fabric.offer_to(hosts, ports)?.authentication)
}

fn served(lab: &Lab, transport: &'static str) -> Result<String> {
    let fabric = offered(lab, transport)?;
    let client = fabric.node(CLIENT);
    let id = format!("served-{transport}");
    let told = |epoch| Told { transport, ..Told::epoch(epoch) };
    let server = Server::start(&fabric, FIRST, Told { format: true, ..told(1) })?;
    server.holds_the_reservation()?;
    server.volume(&id)?;
    let mounted = server.mount(&id)?;
    let space: Space = client.call("space", &mounted.at)?;
    ensure!(space.total_bytes == VOLUME_BYTES, "df shows {} bytes", space.total_bytes);
    let fio = |what: &str| {
        let script = format!(
            "cd /tmp; fio --name=v --directory={at} --size=24m --rw=randwrite --bs=64k --iodepth=8 --ioengine=libaio \
             --direct=1 --verify=crc32c --verify_fatal=1 {what} --output=/tmp/fio.out || {{ cat /tmp/fio.out; exit 1; }}",
            at = mounted.at
        );
        client.run_within(&script, Duration::from_secs(60)).context("fio")
    };
    fio("--do_verify=1")?;
    let shards = Shards {
        folder: mounted.at.as_str().into(),
        prefix: "s".into(),
        count: 3,
        bytes: 2 * MIB,
        seed: SEED,
    };
    let sums: Vec<Sum> = client.call_within("write-shards", &shards, Duration::from_secs(60))?;
    let verify = |at: &str| -> Result<u64> {
        client.run("sync; echo 3 > /proc/sys/vm/drop_caches")?;
        client.call_within(
            "verify-sums",
            &Sums { folder: at.into(), sums: sums.clone() },
            Duration::from_secs(60),
        )
    };
    verify(&mounted.at)?;

    // An orderly end gives everything back.
    mounted.unmount()?;
    server.stop()?;
    let left = server.node.run(&format!("grep -c ' {POOL} ' /proc/mounts || true"))?;
    ensure!(left == "0", "the pool stays mounted: {}", server.log()?);
    fabric.lost(&server.seen(), "Forgotten")?;
    let registered: usize = fabric.ask(&server.seen(), "nvmeof-release")?;
    ensure!(registered == 0, "{registered} hosts are registered after an orderly end");
    drop(server);

    // The same pool, without format; and once more after kill -9, which leaves mount and reservation.
    let server = Server::start(&fabric, FIRST, told(1))?;
    server.holds_the_reservation()?;
    let mounted = server.mount(&id)?;
    verify(&mounted.at).context("after a restart")?;
    server.kill()?;
    server.holds_the_reservation().context("after kill -9")?;
    std::mem::forget(server);
    let server = Server::start(&fabric, FIRST, told(1))?;
    server.holds_the_reservation()?;
    verify(&mounted.at).context("after kill -9, by the same mount")?;
    mounted.unmount()?;
    server.stop()?;
    drop(server);

    // Elsewhere, by a later epoch; then the earlier one steps back, though nobody holds the reservation.
    let server = Server::start(&fabric, SECOND, Told { dead_path: true, ..told(2) })?;
    let mounted = server.mount(&id)?;
    verify(&mounted.at).context("on the other host")?;
    let get = |path: &str| {
        server.node.run(&format!("printf 'GET {path} HTTP/1.0\\r\\n\\r\\n' | nc -w 5 127.0.0.1 9445"))
    };
    server.node.wait_until("health tells of the path that is missing", Duration::from_secs(10), || {
        Ok(get("/readyz")?.contains("pool default: 1 of 2 paths to its namespace take I/O"))
    })?;
    let metrics = get("/metrics")?;
    for (name, value) in [("paths", 2), ("paths_up", 1)] {
        let line = format!("forebay_namespace_{name}{{pool=\"default\"}} {value}");
        ensure!(metrics.contains(&line), "no {line} in {metrics}");
    }
    let grown = grows(&server)?;
    mounted.unmount()?;
    server.stop()?;
    drop(server);
    ended_with(&fabric, FIRST, told(1), "was used in epoch 2 of this instance; this is epoch 1")?;
    Ok(format!("grown from {} to {} MiB while serving", grown.0 / MIB, grown.1 / MIB))
}

/// The target makes the namespace larger, and the pool follows by itself; its size before and after.
fn grows(server: &Server<'_>) -> Result<(u64, u64)> {
    let size = || -> Result<u64> {
        let space: Space = server.node.call("space", &POOL)?;
        Ok(space.total_bytes)
    };
    let before = size()?;
    let (namespace, bytes) = ("/sys/kernel/config/nvmet/subsystems", FILE_BYTES + FILE_BYTES / 4);
    server.fabric.target().run(&format!(
        "truncate -s {bytes} {FILE}; echo 1 > {namespace}/{NQN}/namespaces/1/revalidate_size"
    ))?;
    server.node.wait_until("the pool has grown", Duration::from_secs(20), || {
        Ok(size()? >= before + FILE_BYTES / 5)
    })?;
    Ok((before, size()?))
}

/// Starts a server that does not come up; what it says must contain this.
fn ended_with(fabric: &Fabric<'_>, host: &str, told: Told, says: &str) -> Result<()> {
    let server = Server::begin(fabric, host, told)?;
    let exit = server.wait_for_exit(Duration::from_secs(60))?;
    let log = server.log()?;
    ensure!(exit == EXIT_POOL && log.contains(says), "{says:?} was expected, but {exit}: {log}");
    let left = server.node.run(&format!("grep -c ' {POOL} ' /proc/mounts || true"))?;
    ensure!(left == "0", "the pool stays mounted: {log}");
    Ok(())
}

/// NVMe's Set Features, Namespace Write Protection Config (NVMe Base 5.1.25.1.32): all hosts see it read-only.
const WRITE_PROTECT: &str = "import fcntl, struct, sys
f = open('/dev/' + sys.argv[1], 'rb')
fcntl.ioctl(f, 0xc0484e41, struct.pack('<BBHIIIQQII6III', 9, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0x84, int(sys.argv[2]), 0, 0, 0, 0, 0, 0))";

fn refusals(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, "tcp")?;
    let target = fabric.target();
    let tried = Cell::new(0);
    let refused = |told: Told, says: &str| -> Result<()> {
        // Any write to the file changes its times, and blocks that were not there.
        let state = || target.run(&format!("sync {FILE}; stat -c '%s %b %z %y' {FILE}"));
        let before = state()?;
        ended_with(&fabric, FIRST, told, says)?;
        let after = state()?;
        ensure!(before == after, "{says}: the namespace was written to: {before}, then {after}");
        tried.set(tried.get() + 1);
        Ok(())
    };
    let format = || Told { format: true, ..Told::epoch(1) };
    let filled = |bytes: u64, fill: &str| renew(&fabric, "tcp", bytes, None, fill);

    // What cannot be connected is tried for a while.
    let soon = || Told { connect_time_s: 5, ..format() };
    refused(Told { nqn: format!("{NQN}-other"), ..soon() }, "the target has no subsystem of this name")?;
    // Its host NQN is another one.
    refused(Told { instance: "lab-1".into(), ..soon() }, "the target does not let this host in")?;
    refused(Told::epoch(1), "the namespace is blank: set pool.nvmeof.format = true")?;
    filled(64 * MIB, "true")?;
    refused(format(), "a pool needs at least")?;
    filled(FILE_BYTES, &format!("mkfs.ext4 -q -F {FILE}"))?;
    refused(format(), "the namespace holds something that is no pool")?;
    filled(FILE_BYTES, &format!("printf x | dd of={FILE} bs=1 seek=1048576 conv=notrunc status=none"))?;
    refused(format(), "the namespace holds something that is no pool")?;
    filled(FILE_BYTES, &format!("mkfs.xfs -q -L forebay {FILE}"))?;
    refused(format(), "which is not that of this pool")?;

    // Read-only from the first connect on.
    filled(FILE_BYTES, "true")?;
    let seen = fabric.seen(FIRST, 1, "tcp");
    fabric.connect(&seen)?;
    let host = fabric.node(FIRST);
    let protect = |value: &str| -> Result<()> {
        let name = host.run("ls /dev | grep -E '^nvme[0-9]+n1$' ")?;
        let argv = ["python3", "-c", WRITE_PROTECT, &name, value];
        let output = host.attempt(&argv, &[], Duration::from_secs(30))?;
        ensure!(output.success(), "write protection: {}", output.complaint());
        Ok(())
    };
    protect("1")?;
    fabric.ask::<usize>(&seen, "nvmeof-disconnect")?;
    refused(format(), "the namespace is read-only")?;

    // A pool that was ours and is damaged: its first group's free space, at the second sector.
    filled(FILE_BYTES, "true")?;
    let server = Server::start(&fabric, FIRST, format())?;
    server.stop()?;
    drop(server);
    target.run(&format!(
        "dd if=/dev/zero of={FILE} bs=4096 seek=1 count=1 conv=notrunc status=none; sync {FILE}"
    ))?;
    fabric.ask::<usize>(&seen, "nvmeof-disconnect")?;
    ended_with(&fabric, FIRST, format(), "the file system is damaged")?;
    tried.set(tried.get() + 1);

    if renew(&fabric, "tcp", FILE_BYTES, Some(KEY), "true")? {
        refused(soon(), "the target asks for authentication")?;
        refused(Told { key: Some(OTHER_KEY), ..soon() }, "authentication failed")?;
        let server = Server::start(&fabric, FIRST, Told { key: Some(KEY), ..format() })?;
        server.stop()?;
    } else {
        bail!("this kernel's target has no authentication");
    }
    Ok(format!("{} cases", tried.get()))
}

/// A node without power, until this is dropped.
struct Off<'a>(&'a Lab, &'static str);

impl<'a> Off<'a> {
    fn cut(lab: &'a Lab, name: &'static str) -> Result<Self> {
        lab.power_off(name)?;
        Ok(Self(lab, name))
    }
}

impl Drop for Off<'_> {
    fn drop(&mut self) {
        let _ = self.0.power_on(self.1);
    }
}

/// The client, to be booted anew when this is dropped: a hard mount of a server that is gone cannot be unmounted.
struct BootedAnew<'a>(&'a Lab);

impl Drop for BootedAnew<'_> {
    fn drop(&mut self) {
        let _ = self.0.power_off(CLIENT).and_then(|()| self.0.power_on(CLIENT));
    }
}

fn synced(lines: &[String]) -> Vec<u64> {
    lines.iter().filter_map(|line| line.strip_prefix("synced ")?.parse().ok()).collect()
}

/// Files that are fsynced before the first server goes.
const FILES: usize = 20;

/// What a takeover needs, by its parts, as the second server's log has it.
fn breakdown(server: &Server<'_>, mounted_ms: u128) -> Result<String> {
    let at = server.times(&["namespace found", "the reservation is ours", "its log replayed", " serving"])?;
    Ok(format!(
        "connect {} ms, preempt {} ms, mount and log replay {} ms, until it serves {} ms; with start of the process and the \
         client's mount {mounted_ms} ms",
        at[0],
        at[1] - at[0],
        at[2] - at[1],
        at[3] - at[2],
    ))
}

/// The files that were fsynced, as a client of this server and the server's own file system have them.
fn intact(server: &Server<'_>, id: &str, numbers: &[u64], mounted: &Mounted<'_>) -> Result<u64> {
    let records = |folder: String| Records { folder: folder.into(), seed: SEED, numbers: numbers.to_vec() };
    let deadline = Duration::from_secs(60);
    let on_server = records(format!("{POOL}/volumes/{id}"));
    let bytes: u64 = server.node.call_within("verify-records", &on_server, deadline)?;
    let read: u64 = mounted.client.call_within("verify-records", &records(mounted.at.clone()), deadline)?;
    ensure!(read == bytes, "{read} bytes through the mount, {bytes} on the server");
    Ok(bytes)
}

fn killed(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, "tcp")?;
    let client = BootedAnew(lab);
    let id = "killed";
    let first = Server::start(&fabric, FIRST, Told { format: true, ..Told::epoch(1) })?;
    first.volume(id)?;
    let mounted = first.mount(id)?;
    let seed = SEED.to_string();
    let mut writer = mounted.client.spawn(&[GUEST_BINARY, "record-writes", &mounted.at, &seed])?;
    writer.wait_for("files are synced", Duration::from_secs(60), |lines| synced(lines).len() >= FILES)?;

    // Nothing of it can be asked any more, not even to clean up.
    std::mem::forget(first);
    let off = Off::cut(lab, FIRST)?;
    let started = Instant::now();
    let numbers = synced(writer.lines());
    let second = Server::start(&fabric, SECOND, Told::epoch(2))?;
    let again = second.mount(id)?;
    let took = started.elapsed().as_millis();
    let numbers_after = synced(writer.lines());
    ensure!(
        numbers_after.len() <= numbers.len() + 1,
        "the writer goes on without a server: {numbers_after:?}"
    );
    second.holds_the_reservation()?;
    let bytes = intact(&second, id, &numbers_after, &again)?;
    let parts = breakdown(&second, took)?;
    say(&parts);

    // The first one's node comes back, and its server steps back. The client is booted anew: where a node refuses connections,
    // Linux tries a hard mount's writes again without a pause, and leaves an only processor to nothing else.
    drop(writer);
    std::mem::forget((mounted, again));
    drop(client);
    let again = second.mount(id)?;
    drop(off);
    fabric.node(FIRST).run("modprobe -a nvme-fabrics nvme-tcp")?;
    ended_with(&fabric, FIRST, Told::epoch(1), "epoch 2 of this instance has the namespace")?;
    second.holds_the_reservation()?;
    intact(&second, id, &numbers_after, &again)?;
    again.unmount()?;
    second.stop()?;
    Ok(format!("{} files ({} KiB) synced and intact; {parts}", numbers_after.len(), bytes >> 10))
}

fn cut_off(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, "tcp")?;
    let _client = BootedAnew(lab);
    let id = "cut-off";
    let first = Server::start(&fabric, FIRST, Told { format: true, ..Told::epoch(1) })?;
    first.volume(id)?;
    let mounted = first.mount(id)?;
    let seed = SEED.to_string();
    let mut writer = mounted.client.spawn(&[GUEST_BINARY, "record-writes", &mounted.at, &seed])?;
    writer.wait_for("files are synced", Duration::from_secs(60), |lines| synced(lines).len() >= FILES)?;

    let cut = Cut::at(first.node, fabric.target().address())?;
    let started = Instant::now();
    // Both at once: the second does not wait until the first has ended itself.
    let second = Server::start(&fabric, SECOND, Told::epoch(2))?;
    let again = second.mount(id)?;
    let parts = breakdown(&second, started.elapsed().as_millis())?;
    let exit = first.wait_for_exit(Duration::from_secs(LOSS_TIME_S + 10))?;
    let fenced = started.elapsed();
    let said = first.log()?;
    ensure!(exit == EXIT_FENCED, "the server that was cut off ended with {exit}: {said}");
    let reason =
        said.lines().find_map(|line| line.split_once("reason=")).map(|(_, reason)| reason.to_owned());
    let reason = reason.with_context(|| format!("no reason in {said}"))?;
    let limit = Duration::from_secs(LOSS_TIME_S + EMULATED_S);
    ensure!(fenced <= limit, "it ended itself {} s after the cut", fenced.as_secs());
    let numbers = synced(writer.lines());
    intact(&second, id, &numbers, &again)?;

    // The network is back. What the first one's kernel still wanted to write, and what anybody there tries, is refused.
    drop(cut);
    fabric.wait_for_paths(&first.seen(), 1)?;
    fabric.lost(&first.seen(), "Taken")?;
    let end = FILE_BYTES / 4096 - 16;
    let late = fabric.write(&first.seen(), 1, end, 4)?;
    ensure!(late == conflict(), "late writes of the first host: {late:?}");
    let found = fabric.writers(end, 4)?;
    ensure!(found == [0; 4], "the target has blocks of {found:?}");
    // A server there finds what its predecessor has left, ends it without writing, and steps back.
    let superseded = Server::begin(&fabric, FIRST, Told::epoch(1))?;
    let exit = superseded.wait_for_exit(Duration::from_secs(60))?;
    let log = superseded.log()?;
    let says = "epoch 2 of this instance has the namespace";
    ensure!(exit == EXIT_POOL && log.contains(says), "{exit}: {log}");
    drop(superseded);
    drop(first);
    second.holds_the_reservation()?;
    std::mem::forget(mounted);
    let bytes = intact(&second, id, &numbers, &again)?;
    again.unmount()?;

    // And back, by a later epoch, on the node with that history.
    second.stop()?;
    drop(second);
    let third = Server::start(&fabric, FIRST, Told::epoch(3))?;
    let again = third.mount(id)?;
    intact(&third, id, &numbers, &again)?;
    again.unmount()?;
    third.stop()?;
    Ok(format!(
        "{} files ({} KiB) synced and intact; {parts}; the first ended after {} s: {reason}",
        numbers.len(),
        bytes >> 10,
        fenced.as_secs()
    ))
}

/// Longer than the file system endures, which is as long as I/O waits for a path.
fn away(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, "tcp")?;
    let _client = BootedAnew(lab);
    let id = "away";
    let first = Server::start(&fabric, FIRST, Told { format: true, ..Told::epoch(1) })?;
    first.volume(id)?;
    let mounted = first.mount(id)?;
    let seed = SEED.to_string();
    let mut writer = mounted.client.spawn(&[GUEST_BINARY, "record-writes", &mounted.at, &seed])?;
    let reach = |writer: &mut crate::lab::Process, what: &str, count: usize| {
        writer.wait_for(what, Duration::from_secs(60), move |lines| synced(lines).len() >= count)
    };
    reach(&mut writer, "files are synced", FILES)?;
    let cut = Cut::at(first.node, fabric.target().address())?;
    let started = Instant::now();
    let exit = first.wait_for_exit(Duration::from_secs(LOSS_TIME_S + 10))?;
    let ended = started.elapsed();
    ensure!(exit == EXIT_FENCED, "the server ended with {exit}: {}", first.log()?);
    drop(cut);
    fabric.wait_for_paths(&first.seen(), 1)?;
    first.holds_the_reservation()?;

    // It stays mounted, ended, for the next one to find.
    std::mem::forget(first);
    let again = Server::start(&fabric, FIRST, Told::epoch(1))?;
    let before = synced(writer.lines()).len();
    reach(&mut writer, "the client reconnects by itself and writes on", before + FILES)?;
    let lines = writer.finish(Duration::from_secs(60))?;
    let numbers = synced(&lines);
    let failed = lines.iter().filter(|line| line.starts_with("failed")).count();
    let bytes = intact(&again, id, &numbers, &mounted)?;
    mounted.unmount()?;
    again.stop()?;
    Ok(format!(
        "ended itself after {} s; {} files ({} KiB) synced and intact, {failed} writes failed",
        ended.as_secs(),
        numbers.len(),
        bytes >> 10
    ))
}
