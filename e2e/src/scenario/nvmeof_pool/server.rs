//! The server of a pool on a namespace, on one of the hosts, and its client.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::guest::calls::grpc::{AdminCall, AdminRequest, Answer};
use crate::guest::calls::mounting::Mount;
use crate::guest::calls::nvmeof::{Held, Seen};
use crate::lab::{Lab, Node};
use crate::scenario::MIB;
use crate::scenario::nvmeof::{CLIENT, FILE, FIRST, Fabric, INSTANCE, NQN, RDMA, SECOND, TCP, UUID, port};
use crate::scenario::smb_direct::statuses;
use crate::site::{ADMIN_SOCKET, POOL, SERVER_CONFIG};

pub(in crate::scenario) const FILE_BYTES: u64 = 1 << 30;
pub(in crate::scenario) const VOLUME_BYTES: u64 = 256 * MIB;
/// From docs/reference/server.md.
pub(in crate::scenario) const EXIT_POOL: i32 = 4;
pub(in crate::scenario) const EXIT_FENCED: i32 = 7;
/// How long the reservation may stay unconfirmed here.
pub(in crate::scenario) const LOSS_TIME_S: u64 = 60;
/// A value that emulated guests on a busy machine can meet.
pub(in crate::scenario) const KEEP_ALIVE_S: u64 = 30;
/// What emulation may add to that.
pub(in crate::scenario) const EMULATED_S: u64 = 25;
/// Name of the service on the lab's nodes.
pub(in crate::scenario) const SERVICE: &str = "pool-server";
pub(in crate::scenario) const SEED: u64 = 123;

/// The server's configuration of its namespace.
#[derive(Clone)]
pub(in crate::scenario) struct Settings {
    pub(in crate::scenario) epoch: u32,
    pub(in crate::scenario) instance: String,
    pub(in crate::scenario) nqn: String,
    pub(in crate::scenario) transport: &'static str,
    pub(in crate::scenario) format: bool,
    pub(in crate::scenario) key: Option<&'static str>,
    /// TLS key, and the version of its identity.
    pub(in crate::scenario) tls: Option<(&'static str, u8)>,
    pub(in crate::scenario) connect_time_s: u32,
    /// Whether there is a second path to a port without a listener.
    pub(in crate::scenario) dead_path: bool,
    /// How its volumes are limited.
    pub(in crate::scenario) quota: &'static str,
}

impl Settings {
    pub(in crate::scenario) fn epoch(epoch: u32) -> Self {
        Self {
            epoch,
            instance: INSTANCE.into(),
            nqn: NQN.into(),
            transport: "tcp",
            format: false,
            key: None,
            tls: None,
            connect_time_s: 200,
            dead_path: false,
            quota: "project",
        }
    }

    pub(in crate::scenario) fn config(&self, host: &Node, target: &Node) -> String {
        let Self { epoch, instance, nqn, transport, format, connect_time_s, quota, .. } = self;
        let service = if *transport == "rdma" { RDMA } else { TCP };
        let at = target.address();
        let dead =
            if self.dead_path { format!(", \"{transport}://{at}:{UNUSED_PORT}\"") } else { String::new() };
        let smb_direct = if *transport == "rdma" { "auto" } else { "off" };
        let key = self.key.map(|_| format!("dhchap_key = \"{KEY_FILE}\"\n")).unwrap_or_default();
        let tls =
            self.tls.map(|(_, identity)| format!("tls_key = \"{PSK_FILE}\"\ntls_identity = {identity}\n"));
        let tls = tls.unwrap_or_default();
        format!(
            "[instance]\nname = \"{instance}\"\nepoch = {epoch}\n\
             [server]\nlisten = [\"0.0.0.0:445\"]\nadvertise = [\"{address}:445\"]\nrdma = \"{smb_direct}\"\n\
             [admin]\nsocket = \"{ADMIN_SOCKET}\"\n\
             [[pool]]\nname = \"default\"\npath = \"{POOL}\"\nquota = \"{quota}\"\n\
             [pool.nvmeof]\nnqn = \"{nqn}\"\nnamespace = \"uuid:{UUID}\"\n\
             paths = [\"{transport}://{at}:{service}\"{dead}]\nformat = {format}\n\
             connect_time_s = {connect_time_s}\nkeep_alive_s = {KEEP_ALIVE_S}\nloss_time_s = {LOSS_TIME_S}\n{key}{tls}",
            address = host.address(),
        )
    }
}

/// A port without a listener.
pub(in crate::scenario) const UNUSED_PORT: u16 = 4499;
pub(in crate::scenario) const KEY_FILE: &str = "/etc/forebay/dhchap.key";
pub(in crate::scenario) const PSK_FILE: &str = "/etc/forebay/tls.psk";

/// Starts the server and records its PID and exit code.
pub(in crate::scenario) const RUNNER: &str = "rm -f /run/pool-server.exit /run/pool-server.pid; \
     forebay-server run --config \"$1\" & echo $! > /run/pool-server.pid; \
     set +e; wait $!; echo $? > /run/pool-server.exit";

/// A server of the pool on one of the hosts. Dropping this kills it and unmounts what it left behind.
pub(in crate::scenario) struct Server<'a> {
    pub(in crate::scenario) fabric: &'a Fabric<'a>,
    pub(in crate::scenario) node: &'a Node,
    pub(in crate::scenario) settings: Settings,
}

impl<'a> Server<'a> {
    /// Starts it, and waits until it serves.
    pub(in crate::scenario) fn start(fabric: &'a Fabric<'a>, host: &str, settings: Settings) -> Result<Self> {
        let server = Self::begin(fabric, host, settings)?;
        server.wait_until_it_serves()?;
        Ok(server)
    }

    pub(in crate::scenario) fn begin(fabric: &'a Fabric<'a>, host: &str, settings: Settings) -> Result<Self> {
        let node = fabric.node(host);
        let server = Self { fabric, node, settings };
        node.put(SERVER_CONFIG, server.settings.config(node, fabric.target()).as_bytes(), 0o600)?;
        if let Some(key) = server.settings.key {
            node.put(KEY_FILE, key.as_bytes(), 0o600)?;
        }
        if let Some((psk, _)) = server.settings.tls {
            node.put(PSK_FILE, psk.as_bytes(), 0o600)?;
        }
        node.run(&format!(
            "mkdir -p /run/forebay; rm -f /run/{SERVICE}.exit; : > /var/log/{SERVICE}-runner.log"
        ))?;
        node.start_service(&format!("{SERVICE}-runner"), &["sh", "-c", RUNNER, "runner", SERVER_CONFIG])?;
        Ok(server)
    }

    pub(in crate::scenario) fn wait_until_it_serves(&self) -> Result<()> {
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

    /// Its complete log.
    pub(in crate::scenario) fn log(&self) -> Result<String> {
        self.node.run(&format!("cat /var/log/{SERVICE}-runner.log"))
    }

    /// Its exit code.
    pub(in crate::scenario) fn exit(&self) -> Result<Option<i32>> {
        let text = self.node.run(&format!("cat /run/{SERVICE}.exit 2>/dev/null || true"))?;
        Ok(text.trim().parse().ok())
    }

    pub(in crate::scenario) fn wait_for_exit(&self, deadline: Duration) -> Result<i32> {
        self.node
            .wait_until("the server ends", deadline, || Ok(self.exit()?.is_some()))
            .with_context(|| self.log().unwrap_or_default())?;
        self.exit()?.context("it has ended")
    }

    /// Sends SIGTERM and expects a clean exit.
    pub(in crate::scenario) fn stop(&self) -> Result<()> {
        ensure!(self.node.signal_service(SERVICE, "TERM")?, "the server was not running");
        let exit = self.wait_for_exit(Duration::from_secs(20))?;
        ensure!(exit == 0, "the server ended with {exit}: {}", self.log()?);
        Ok(())
    }

    /// Sends SIGKILL.
    pub(in crate::scenario) fn kill(&self) -> Result<()> {
        ensure!(self.node.signal_service(SERVICE, "KILL")?, "the server was not running");
        self.wait_for_exit(Duration::from_secs(20)).map(drop)
    }

    pub(in crate::scenario) fn admin(&self, request: AdminRequest) -> Result<Answer> {
        self.node.call::<Answer>("admin", &AdminCall { socket: ADMIN_SOCKET.into(), request })?.ok()
    }

    /// Creates a volume. Its name is also its user's name.
    pub(in crate::scenario) fn volume(&self, id: &str) -> Result<()> {
        let request = AdminRequest::CreateVolume {
            id: id.into(),
            pool: "default".into(),
            bytes: VOLUME_BYTES,
            username: id.into(),
            password: password(id),
            snapshot: String::new(),
        };
        self.admin(request).context("create a volume").map(drop)
    }

    /// The client's mount of it.
    pub(in crate::scenario) fn mount(&self, id: &str) -> Result<Mounted<'a>> {
        self.mount_with(id, "tcp", &[])
    }

    /// The client's mount of it over SMB Direct.
    pub(in crate::scenario) fn mount_by_rdma(&self, id: &str) -> Result<Mounted<'a>> {
        let mounted = self.mount_with(id, "rdma", &[("rdma", "")])?;
        let status = statuses(mounted.client)?;
        ensure!(status.starts_with("CONNECTED"), "not over SMB Direct: {status}");
        Ok(mounted)
    }

    fn mount_with(&self, id: &str, by: &str, more: &[(&str, &str)]) -> Result<Mounted<'a>> {
        let client = self.fabric.node(CLIENT);
        let at = format!("/mnt/{id}-{}-{}-{by}", self.node.name(), self.settings.epoch);
        let options = [
            ("username", id),
            ("password", &password(id)),
            ("vers", "3.1.1"),
            ("nosharesock", ""),
            ("actimeo", "1"),
            ("hard", ""),
        ];
        let options =
            options.iter().chain(more).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let options = options.collect();
        let server = self.node.address().to_owned();
        let mount = Mount { server, share: id.into(), at: at.clone().into(), options };
        client.call_within::<()>("mount", &mount, Duration::from_secs(60))?;
        Ok(Mounted { client, at })
    }

    /// This server as the fabric's host library identifies it.
    pub(in crate::scenario) fn seen(&self) -> Seen {
        let Settings { epoch, transport, .. } = self.settings;
        self.fabric.seen(self.node.name(), epoch, transport)
    }

    pub(in crate::scenario) fn holds_the_reservation(&self) -> Result<()> {
        let held: Held = self.fabric.ask(&self.seen(), "nvmeof-check")?;
        ensure!(held.held, "{held:?}");
        Ok(())
    }

    /// Milliseconds from its first log line to the lines with these texts.
    pub(in crate::scenario) fn times(&self, marks: &[&str]) -> Result<Vec<u64>> {
        let log = self.log()?;
        let first = log.lines().find_map(time_of_day_ms).context("no line has a time")?;
        marks
            .iter()
            .map(|mark| {
                let line = log.lines().find(|line| line.contains(mark));
                let at = line.and_then(time_of_day_ms).with_context(|| format!("no {mark:?} in {log}"))?;
                // The clock may have passed midnight.
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

pub(in crate::scenario) const DAY_MS: u64 = 24 * 3600 * 1000;

/// Parses the time of day from a line that begins with a time like `2026-11-22T13:17:32.123456Z`.
pub(in crate::scenario) fn time_of_day_ms(line: &str) -> Option<u64> {
    let (_, time) = line.split_whitespace().next()?.strip_suffix('Z')?.split_once('T')?;
    let mut fields = time.split(':');
    let (hours, minutes): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let seconds: f64 = fields.next()?.parse().ok()?;
    Some((hours * 60 + minutes) * 60_000 + (seconds * 1000.0) as u64)
}

pub(in crate::scenario) fn password(id: &str) -> String {
    format!("secret-of-{id}!")
}

/// A client's mount. Unmounted when dropped, lazily if its server is gone.
pub(in crate::scenario) struct Mounted<'a> {
    pub(in crate::scenario) client: &'a Node,
    pub(in crate::scenario) at: String,
}

impl Mounted<'_> {
    pub(in crate::scenario) fn unmount(self) -> Result<()> {
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
pub(in crate::scenario) fn offered<'a>(lab: &'a Lab, transport: &str) -> Result<Fabric<'a>> {
    let mut fabric = Fabric::start(lab)?;
    if transport == "rdma" {
        fabric = fabric.with_rdma()?;
    }
    renew(&fabric, transport, FILE_BYTES, None, &format!("truncate -s {FILE_BYTES} {FILE}"))?;
    Ok(fabric)
}

/// Offers another namespace with this many bytes, filled by a script on the target.
pub(in crate::scenario) fn renew(
    fabric: &Fabric<'_>,
    transport: &str,
    bytes: u64,
    key: Option<&str>,
    fill: &str,
) -> Result<bool> {
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

/// Starts a server that fails to come up. Its log must contain `says`.
pub(in crate::scenario) fn ended_with(
    fabric: &Fabric<'_>,
    host: &str,
    settings: Settings,
    says: &str,
) -> Result<()> {
    let server = Server::begin(fabric, host, settings)?;
    let exit = server.wait_for_exit(Duration::from_secs(60))?;
    let log = server.log()?;
    ensure!(exit == EXIT_POOL && log.contains(says), "{says:?} was expected, but {exit}: {log}");
    let left = server.node.run(&format!("grep -c ' {POOL} ' /proc/mounts || true"))?;
    ensure!(left == "0", "the pool stays mounted: {log}");
    Ok(())
}
