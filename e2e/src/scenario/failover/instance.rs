//! An instance with its own address, on one of the fabric's hosts, and a client that has mounted it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::super::given_up::{self, GivenUp};
use super::super::nvmeof::{CLIENT, FILE, FIRST, Fabric, INSTANCE, NQN, SECOND, TCP, UUID, port};
use super::super::{MIB, bundled};
use crate::guest::GUEST_BINARY;
use crate::guest::calls::data::{Shards, Sum, Sums};
use crate::guest::calls::grpc::{AdminCall, AdminRequest, Answer};
use crate::guest::calls::mounting::Mount;
use crate::guest::calls::nvmeof::{Held, Seen};
use crate::guest::calls::writer::Records;
use crate::lab::{Lab, Node, Process};
use crate::site::{ADMIN_SOCKET, POOL, SERVER_CONFIG};

/// The instance's address.
pub(super) const ADDRESS: &str = "192.168.77.200";
/// From docs/reference/server.md.
pub(super) const EXIT_POOL: i32 = 4;
pub(super) const EXIT_FENCED: i32 = 7;
pub(super) const FILE_BYTES: u64 = 768 << 20;
/// How long the reservation may stay unconfirmed here.
pub(super) const LOSS_TIME_S: u64 = 30;
/// A value that emulated guests on a busy machine meet most of the time. Before a target grants its reservation to another
/// host, it waits this long for a silent host, at most twice.
const KEEP_ALIVE_S: u64 = 12;
/// As in the CSI driver.
const ECHO_INTERVAL_S: &str = "10";
/// Time after which a host no longer has the address that its server has left.
const ADDRESS_TIME_MAX: Duration = Duration::from_secs(15);
/// Name of the service on the lab's nodes.
const SERVICE: &str = "instance";
const SEED: u64 = 321;
/// The volume, and its user's name.
const VOLUME: &str = "moves";
const PASSWORD: &str = "secret of what moves";

/// Starts the server and records its PID and exit code.
const RUNNER: &str = "rm -f /run/instance.exit /run/instance.pid; \
     forebay-server run --config \"$1\" & echo $! > /run/instance.pid; \
     set +e; wait $!; echo $? > /run/instance.exit";

/// A fabric that offers a blank namespace to both hosts at these addresses of the target.
pub(super) fn offered<'a>(lab: &'a Lab, addresses: &[&str]) -> Result<Fabric<'a>> {
    let fabric = Fabric::start(lab)?;
    fabric.target().run_within(
        &format!("rm -f {FILE}; truncate -s {FILE_BYTES} {FILE}; sync {FILE}"),
        Duration::from_secs(60),
    )?;
    offer(&fabric, addresses)?;
    Ok(fabric)
}

/// Makes the bundled target offer the file, which is blank or contains the pool.
pub(super) fn offer(fabric: &Fabric<'_>, addresses: &[&str]) -> Result<()> {
    let hosts = vec![fabric.allowed(FIRST, None)?, fabric.allowed(SECOND, None)?];
    let ports = (1..).zip(addresses).map(|(id, address)| port(id, "tcp", address, TCP)).collect();
    bundled::offer(fabric, hosts, ports, FILE_BYTES).context("have the bundled target offer the namespace")
}

/// A server of the instance. Dropping this kills it and unmounts what it left behind.
pub(super) struct Instance<'a> {
    pub(super) fabric: &'a Fabric<'a>,
    pub(super) node: &'a Node,
    pub(super) epoch: u32,
    started: Instant,
}

impl<'a> Instance<'a> {
    /// Starts it, and waits until it serves.
    pub(super) fn start(fabric: &'a Fabric<'a>, host: &str, epoch: u32) -> Result<Self> {
        let instance = Self::begin(fabric, host, epoch)?;
        instance.wait_until_it_serves()?;
        Ok(instance)
    }

    /// Starts it at the target's own address.
    pub(super) fn begin(fabric: &'a Fabric<'a>, host: &str, epoch: u32) -> Result<Self> {
        let target = fabric.target().address();
        Self::begin_at(fabric, host, epoch, &[target])
    }

    /// Starts it with a path to each of these addresses.
    pub(super) fn begin_at(fabric: &'a Fabric<'a>, host: &str, epoch: u32, targets: &[&str]) -> Result<Self> {
        let node = fabric.node(host);
        let paths: Vec<String> = targets.iter().map(|target| format!("\"tcp://{target}:{TCP}\"")).collect();
        let config = format!(
            "[instance]\nname = \"{INSTANCE}\"\nepoch = {epoch}\naddresses = [\"{ADDRESS}/24\"]\n\
             [server]\nlisten = [\"0.0.0.0:445\"]\nrdma = \"off\"\n\
             [admin]\nsocket = \"{ADMIN_SOCKET}\"\n[http]\nlisten = \"0.0.0.0:9445\"\n\
             [[pool]]\nname = \"default\"\npath = \"{POOL}\"\nquota = \"project\"\n\
             [pool.nvmeof]\nnqn = \"{NQN}\"\nnamespace = \"uuid:{UUID}\"\npaths = [{paths}]\nformat = true\n\
             connect_time_s = 200\nkeep_alive_s = {KEEP_ALIVE_S}\nloss_time_s = {LOSS_TIME_S}\n",
            paths = paths.join(", "),
        );
        node.put(SERVER_CONFIG, config.as_bytes(), 0o600)?;
        node.run(&format!(
            "mkdir -p /run/forebay; rm -f /run/{SERVICE}.exit; : > /var/log/{SERVICE}-runner.log"
        ))?;
        let started = Instant::now();
        node.start_service(&format!("{SERVICE}-runner"), &["sh", "-c", RUNNER, "runner", SERVER_CONFIG])?;
        Ok(Self { fabric, node, epoch, started })
    }

    pub(super) fn wait_until_it_serves(&self) -> Result<()> {
        let serves =
            || -> Result<bool> { Ok(self.log()?.contains(" serving version=") || self.exit()?.is_some()) };
        self.node
            .wait_until("the server serves, or ends", Duration::from_secs(60), serves)
            .and_then(|()| {
                let exit = self.exit()?;
                ensure!(exit.is_none(), "the server ended with {exit:?}");
                Ok(())
            })
            .with_context(|| self.log().unwrap_or_default())
    }

    /// Its complete log.
    pub(super) fn log(&self) -> Result<String> {
        self.node.run(&format!("cat /var/log/{SERVICE}-runner.log"))
    }

    /// Its exit code.
    pub(super) fn exit(&self) -> Result<Option<i32>> {
        let text = self.node.run(&format!("cat /run/{SERVICE}.exit 2>/dev/null || true"))?;
        Ok(text.trim().parse().ok())
    }

    /// Waits until it has ended with this code, and returns its log.
    pub(super) fn ends_with(&self, expected: i32, deadline: Duration) -> Result<String> {
        self.node
            .wait_until("the server ends", deadline, || Ok(self.exit()?.is_some()))
            .with_context(|| self.log().unwrap_or_default())?;
        let (exit, log) = (self.exit()?, self.log()?);
        ensure!(exit == Some(expected), "the server ended with {exit:?} and not {expected}: {log}");
        Ok(log)
    }

    /// Sends SIGTERM and expects a clean exit.
    pub(super) fn stop(&self) -> Result<()> {
        ensure!(self.node.signal_service(SERVICE, "TERM")?, "the server was not running");
        self.ends_with(0, Duration::from_secs(20)).map(drop)
    }

    /// Sends SIGKILL.
    pub(super) fn kill(&self) -> Result<()> {
        ensure!(self.node.signal_service(SERVICE, "KILL")?, "the server was not running");
        self.ends_with(137, Duration::from_secs(20)).map(drop)
    }

    /// Sends SIGSTOP or SIGCONT.
    pub(super) fn signal(&self, signal: &str) -> Result<()> {
        self.node.run(&format!("kill -s {signal} $(cat /run/{SERVICE}.pid)")).map(drop)
    }

    /// This server as the fabric's host library identifies it.
    pub(super) fn seen(&self) -> Seen {
        self.fabric.seen(self.node.name(), self.epoch, "tcp")
    }

    /// Checks that this server alone has reservation and address.
    pub(super) fn is_the_one(&self) -> Result<()> {
        self.is_the_one_of(&[FIRST, SECOND])
    }

    /// Same as [`Self::is_the_one`], if only these hosts can be queried.
    pub(super) fn is_the_one_of(&self, hosts: &[&str]) -> Result<()> {
        let held: Held = self.fabric.ask(&self.seen(), "nvmeof-check")?;
        ensure!(held.held, "{} epoch {}: {held:?}", self.node.name(), self.epoch);
        for &host in hosts {
            let node = self.fabric.node(host);
            let has = || node.run(&format!("ip -o address | grep -c ' {ADDRESS}/' || true"));
            if host == self.node.name() {
                ensure!(has()? == "1", "{host} does not have the address");
            } else {
                // A server that ends in haste may leave the address to the kernel, which keeps it for 10 s at a time.
                node.wait_until("the address is gone", ADDRESS_TIME_MAX, || Ok(has()? == "0"))?;
            }
        }
        Ok(())
    }

    pub(super) fn volume(&self) -> Result<()> {
        let request = AdminRequest::CreateVolume {
            id: VOLUME.into(),
            pool: "default".into(),
            bytes: 256 * MIB,
            username: VOLUME.into(),
            password: PASSWORD.into(),
            snapshot: String::new(),
        };
        let call = AdminCall { socket: ADMIN_SOCKET.into(), request };
        self.node.call::<Answer>("admin", &call)?.ok().context("create a volume").map(drop)
    }

    /// Milliseconds from its start to the log lines with these texts, by its own clock.
    pub(super) fn times(&self, marks: &[&str]) -> Result<Vec<u64>> {
        let log = self.log()?;
        let first = log.lines().find_map(time_of_day_ms).context("no line has a time")?;
        let time = |mark: &&str| {
            let line = log.lines().find(|line| line.contains(mark));
            let at = line.and_then(time_of_day_ms).with_context(|| format!("no {mark:?} in {log}"))?;
            // The clock may have passed midnight.
            Ok((at + DAY_MS - first) % DAY_MS)
        };
        marks.iter().map(time).collect()
    }

    /// What an earlier server has left on a host. Dropping this cleans it up.
    pub(super) fn left(fabric: &'a Fabric<'a>, host: &str) -> Self {
        Self { fabric, node: fabric.node(host), epoch: 0, started: Instant::now() }
    }

    pub(super) fn started(&self) -> Instant {
        self.started
    }
}

impl Drop for Instance<'_> {
    fn drop(&mut self) {
        let _ = self.node.run(&format!(
            "if [ ! -e /run/{SERVICE}.exit ]; then kill -9 $(cat /run/{SERVICE}.pid); fi
             for i in $(seq 100); do [ -e /run/{SERVICE}.exit ] && break; sleep 0.2; done
             while grep -q ' {POOL} ' /proc/mounts; do umount {POOL} || umount -l {POOL}; done
             ip address del {ADDRESS}/24 dev eth0 2> /dev/null || true"
        ));
    }
}

const DAY_MS: u64 = 24 * 3600 * 1000;

/// Parses the time of day from a line that begins with a time like `2026-11-22T13:17:32.123456Z`.
fn time_of_day_ms(line: &str) -> Option<u64> {
    let (_, time) = line.split_whitespace().next()?.strip_suffix('Z')?.split_once('T')?;
    let mut fields = time.split(':');
    let (hours, minutes): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let seconds: f64 = fields.next()?.parse().ok()?;
    Some((hours * 60 + minutes) * 60_000 + (seconds * 1000.0) as u64)
}

/// A client's load on hard mounts of the instance's address: a writer that fsyncs file after file, and a reader that compares
/// the earlier content, bypassing any cache.
pub(super) struct Load<'a> {
    client: &'a Node,
    lab: &'a Lab,
    writer: Process,
    reader: Process,
    done: bool,
}

pub(super) const WRITTEN: &str = "/mnt/moves-written";
pub(super) const READ: &str = "/mnt/moves-read";

/// Path of the volume on its server.
pub(super) fn data() -> String {
    format!("{POOL}/volumes/{VOLUME}")
}

impl<'a> Load<'a> {
    pub(super) fn start(lab: &'a Lab) -> Result<Self> {
        let client = lab.node(CLIENT);
        given_up::watch(client)?;
        for (at, cache) in [(WRITTEN, "strict"), (READ, "none")] {
            let options = [
                ("username", VOLUME),
                ("password", PASSWORD),
                ("vers", "3.1.1"),
                ("nosharesock", ""),
                ("cache", cache),
                ("actimeo", "1"),
                ("hard", ""),
                ("echo_interval", ECHO_INTERVAL_S),
            ];
            let options = options.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
            let mount = Mount { server: ADDRESS.into(), share: VOLUME.into(), at: at.into(), options };
            client.call_within::<()>("mount", &mount, Duration::from_secs(60))?;
        }
        client.run(&format!("mkdir -p {WRITTEN}/written {WRITTEN}/read"))?;
        let shards = Shards {
            folder: format!("{WRITTEN}/read").into(),
            prefix: "s".into(),
            count: 2,
            bytes: MIB,
            seed: SEED,
        };
        let sums: Vec<Sum> = client.call_within("write-shards", &shards, Duration::from_secs(60))?;
        let sums = serde_json::to_string(&Sums { folder: format!("{READ}/read").into(), sums })?;
        let reader = client.spawn(&[GUEST_BINARY, "verify-repeatedly", &sums])?;
        let folder = format!("{WRITTEN}/written");
        let writer = client.spawn(&[GUEST_BINARY, "record-writes", &folder, &SEED.to_string()])?;
        let mut load = Self { client, lab, writer, reader, done: false };
        load.goes_on("at first", 8)?;
        Ok(load)
    }

    /// Files that have been fsynced.
    pub(super) fn synced(&mut self) -> Vec<u64> {
        synced(self.writer.lines())
    }

    /// Waits until this many more files are fsynced and the reader has completed one more pass.
    pub(super) fn goes_on(&mut self, when: &str, files: usize) -> Result<()> {
        self.writes(when, files)?;
        let before = verified(self.reader.lines()) + 1;
        let deadline = Duration::from_secs(40);
        self.reader.wait_for(&format!("the reader goes on {when}"), deadline, |l| verified(l) > before)
    }

    /// Waits until this many more files are fsynced.
    pub(super) fn writes(&mut self, when: &str, files: usize) -> Result<()> {
        let until = self.synced().len() + files;
        let deadline = Duration::from_secs(40);
        self.writer.wait_for(&format!("the writer goes on {when}"), deadline, |l| synced(l).len() >= until)
    }

    /// Errors that the writer and the reader received.
    pub(super) fn failed(&mut self) -> (Vec<String>, Vec<String>) {
        let of = |process: &mut Process| {
            let lines = process.lines().iter();
            lines.filter(|line| line.starts_with("failed")).cloned().collect::<Vec<_>>()
        };
        (of(&mut self.writer), of(&mut self.reader))
    }

    /// The longest time between two files while `what` runs.
    pub(super) fn longest_pause<T>(
        &mut self,
        what: impl FnOnce() -> Result<T> + Send,
    ) -> Result<(T, Duration)>
    where
        T: Send,
    {
        let files = 3;
        std::thread::scope(|scope| {
            let doing = scope.spawn(what);
            let (mut last, mut count, mut longest) = (Instant::now(), self.synced().len(), Duration::ZERO);
            let mut enough = usize::MAX;
            let until = Instant::now() + Duration::from_secs(300);
            while count < enough && Instant::now() < until {
                let now = self.synced().len();
                if now > count {
                    longest = longest.max(last.elapsed());
                    (last, count) = (Instant::now(), now);
                }
                // And some more files after it.
                if enough == usize::MAX && doing.is_finished() {
                    enough = count + files;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            let done = doing.join().expect("no panic")?;
            ensure!(count >= enough, "the writer does not go on");
            Ok((done, longest))
        })
    }

    /// Ends both. Checks that every fsynced file is intact, byte for byte, on the server and through the mount.
    pub(super) fn finish(mut self, on: &Instance<'_>) -> Result<Written> {
        let (_, reader_failed) = self.failed();
        self.writer.close_input()?;
        self.reader.close_input()?;
        let numbers = self.wait_for_the_end()?;
        let records =
            |folder: String| Records { folder: folder.into(), seed: SEED, numbers: numbers.clone() };
        let deadline = Duration::from_secs(60);
        let on_server = records(format!("{}/written", data()));
        let bytes: u64 = on.node.call_within("verify-records", &on_server, deadline)?;
        self.client.run("echo 3 > /proc/sys/vm/drop_caches")?;
        let read: u64 =
            self.client.call_within("verify-records", &records(format!("{READ}/written")), deadline)?;
        ensure!(read == bytes, "{read} bytes through the mount, {bytes} on the server");
        let (writer_failed, _) = self.failed();
        let given_up = GivenUp::by(self.client)?;
        for at in [WRITTEN, READ] {
            self.client.call::<()>("unmount", &at)?;
        }
        self.done = true;
        Ok(Written { files: numbers.len(), bytes, writer_failed, reader_failed, given_up })
    }

    fn wait_for_the_end(&mut self) -> Result<Vec<u64>> {
        for process in [&mut self.writer, &mut self.reader] {
            process.wait_for_exit(Duration::from_secs(40))?;
        }
        Ok(self.synced())
    }
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        // A hard mount cannot be unmounted without its server.
        if !self.done {
            let _ = self.lab.power_off(CLIENT).and_then(|()| self.lab.power_on(CLIENT));
        }
    }
}

/// The result of a writer.
pub(super) struct Written {
    pub(super) files: usize,
    pub(super) bytes: u64,
    pub(super) writer_failed: Vec<String>,
    pub(super) reader_failed: Vec<String>,
    pub(super) given_up: GivenUp,
}

impl Written {
    /// Checks that no program received an error, except those that the client's kernel is known to generate
    /// (docs/guides/failover.md) and that no server response can have caused.
    pub(super) fn without_error(self) -> Result<Self> {
        let Self { writer_failed, reader_failed, given_up, .. } = &self;
        given_up.explains(&writer_failed.iter().chain(reader_failed).collect::<Vec<_>>(), usize::MAX)?;
        Ok(self)
    }
}

impl std::fmt::Display for Written {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let error = match self.writer_failed.len() + self.reader_failed.len() {
            0 => "no error".to_owned(),
            count => format!("no error but {count} of the client's own"),
        };
        write!(f, "{} files ({} KiB) synced and intact, {error}", self.files, self.bytes >> 10)
    }
}

fn synced(lines: &[String]) -> Vec<u64> {
    lines.iter().filter_map(|line| line.strip_prefix("synced ")?.parse().ok()).collect()
}

fn verified(lines: &[String]) -> usize {
    lines.iter().filter(|line| line.starts_with("verified ")).count()
}
