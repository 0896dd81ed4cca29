//! The server under test, as its clients see it.

use std::fmt;
use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::rundir;

/// Time limit until a server listens.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// Its port: some tests support no other.
const PORT: u16 = 445;

/// A share and the user with access to it.
#[derive(Clone)]
pub(super) struct Share {
    /// The share's name.
    pub(super) share: String,
    /// The user.
    pub(super) user: String,
    /// The password. Random for each run, but still never passed as an argument.
    pub(super) password: String,
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Share").field("share", &self.share).field("user", &self.user).finish_non_exhaustive()
    }
}

/// The server's Kerberos identity.
#[derive(Debug, Clone)]
pub(super) struct Principal {
    /// The name under which clients address it: Samba's clients request no tickets for IP addresses.
    pub(super) name: &'static str,
    /// The realm.
    pub(super) realm: &'static str,
}

/// The server under test.
#[derive(Debug, Clone)]
pub(super) struct Target {
    /// Its address.
    pub(super) host: String,
    /// Its name and realm, if users can log on with Kerberos.
    pub(super) kerberos: Option<Principal>,
    /// Its TCP port.
    pub(super) port: u16,
    /// The share that the tests use.
    pub(super) volume: Share,
    /// Another share with other credentials.
    pub(super) other: Share,
}

impl Target {
    /// A server in the lane's own network, where every port is free.
    pub(super) fn local(volume: Share, other: Share) -> Self {
        Self { host: Ipv4Addr::LOCALHOST.to_string(), kerberos: None, port: PORT, volume, other }
    }

    /// Writes credentials in the format that Samba's tools read with `-A`.
    pub(super) fn write_auth(&self, path: &Path) -> Result<()> {
        private(path, &format!("username={}\npassword={}\n", self.volume.user, self.volume.password))
    }

    /// Writes all parameters for `clients.py`.
    pub(super) fn write_json(&self, path: &Path) -> Result<()> {
        let share =
            |share: &Share| json!({ "share": share.share, "user": share.user, "password": share.password });
        let kerberos = self.kerberos.as_ref().map(|its| json!({ "name": its.name, "realm": its.realm }));
        let target = json!({
            "host": self.host, "port": self.port, "volume": share(&self.volume), "other": share(&self.other), "kerberos": kerberos
        });
        private(path, &target.to_string())
    }

    /// Waits until the server listens. Fails if `server` ends before that.
    pub(super) fn wait(&self, server: &mut Server) -> Result<()> {
        let address: SocketAddr = format!("{}:{}", self.host, self.port).parse()?;
        let deadline = Instant::now() + START_DEADLINE;
        while TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_err() {
            if let Some(status) = server.child.try_wait()? {
                bail!(
                    "the server ended with {status} before it listened on {address}:\n{}",
                    server.log_tail()
                );
            }
            if Instant::now() > deadline {
                let waited = START_DEADLINE.as_secs();
                bail!("the server does not listen on {address} after {waited} s:\n{}", server.log_tail());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

/// Writes a file that only its owner can read.
pub(super) fn private(path: &Path, text: &str) -> Result<()> {
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes()).with_context(|| format!("write {}", path.display()))
}

/// A server's process. Ended when dropped.
#[derive(Debug)]
pub(super) struct Server {
    child: Child,
    log: std::path::PathBuf,
}

impl Server {
    /// Takes ownership of a started server that logs to this file.
    pub(super) fn new(child: Child, log: &Path) -> Self {
        rundir::guard_process(child.id());
        Self { child, log: log.to_owned() }
    }

    /// The end of its log.
    pub(super) fn log_tail(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().rev().take(20).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }

    /// Its log.
    pub(super) fn log(&self) -> &Path {
        &self.log
    }

    /// Whether it still runs.
    pub(super) fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SIGTERM first: a killed server leaves its children running until they detect it.
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.is_running() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        rundir::release_process(self.child.id());
    }
}
