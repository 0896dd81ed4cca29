//! The folder of one measurement and the servers started for it. Both are gone when it ends, regardless of how.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use forebay_e2e::rundir;
use rustix::process::{Pid, Signal, kill_process_group};

/// Time limit until a server accepts connections.
const START_DEADLINE: Duration = Duration::from_secs(20);

/// Time limit until a server ends; after that it is killed.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// Lines of a server's log shown when it fails.
const LOG_TAIL_LINES: usize = 20;

/// The account of the client, on every server.
pub(crate) const USER: &str = "bench";

/// The name of the share, on every server.
pub(crate) const SHARE: &str = "bench";

/// `<dir>/forebay-bench-…`: logs, private folders, and the served files, all on one file system.
#[derive(Debug)]
pub(crate) struct Place {
    folder: tempfile::TempDir,
    password: String,
}

impl Place {
    /// Creates the folder below `dir`.
    pub(crate) fn create(dir: &Path) -> Result<Self> {
        rundir::clean_up_on_signals()?;
        let folder = tempfile::Builder::new()
            .prefix("forebay-bench-")
            .permissions(fs::Permissions::from_mode(0o755))
            .tempdir_in(dir)
            .with_context(|| format!("make a folder in {}", dir.display()))?;
        rundir::guard_path(folder.path());
        let mut random = [0; 16];
        getrandom::fill(&mut random)
            .map_err(|error| anyhow::anyhow!("get random bytes for a password: {error}"))?;
        let password = forebay_e2e::cache::hex(&random);
        let place = Self { folder, password };
        fs::create_dir(place.share())?;
        // Samba accesses files as the client's user.
        fs::set_permissions(place.share(), fs::Permissions::from_mode(0o777))?;
        place.write_secret("credentials", &format!("username = {USER}\npassword = {}\n", place.password))?;
        Ok(place)
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The folder that Samba shares and the bare loops read.
    pub(crate) fn share(&self) -> PathBuf {
        self.path().join("share")
    }

    /// The same folder, as its path inside the lab's root.
    pub(crate) fn share_in_root(&self) -> &'static str {
        "/scratch/share"
    }

    /// The client's password, which is new for each measurement.
    pub(crate) fn password(&self) -> &str {
        &self.password
    }

    /// Writes a file that only its owner can read.
    pub(crate) fn write_secret(&self, name: &str, content: &str) -> Result<PathBuf> {
        use std::io::Write;
        let path = self.path().join(name);
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&path)?;
        file.write_all(content.as_bytes())?;
        Ok(path)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        rundir::release_path(self.folder.path());
    }
}

/// A server's process, ended when dropped.
#[derive(Debug)]
pub(crate) struct Server {
    name: &'static str,
    child: Child,
    log: PathBuf,
}

impl Server {
    /// Starts a program with its arguments and environment. Its output is written to `<place>/<name>.log`, except its
    /// standard output if `stdout_piped` is set. Its standard input is a pipe that closes when this process ends.
    pub(crate) fn start(
        place: &Place,
        name: &'static str,
        command: &Command,
        stdout_piped: bool,
    ) -> Result<Self> {
        let log = place.path().join(format!("{name}.log"));
        let file = File::create(&log)?;
        // A server must not outlive this process, even if no destructor runs.
        let mut guarded = Command::new("setpriv");
        guarded.args(["--pdeathsig", "KILL", "--"]).arg(command.get_program()).args(command.get_args());
        guarded.envs(command.get_envs().filter_map(|(key, value)| Some((key, value?))));
        // When smbd ends it kills its whole process group, so it gets a separate one.
        guarded.process_group(0).stdin(Stdio::piped()).stderr(file.try_clone()?);
        guarded.stdout(if stdout_piped { Stdio::piped() } else { file.into() });
        let child = guarded.spawn().context("start setpriv")?;
        rundir::guard_process(child.id());
        Ok(Self { name, child, log })
    }

    /// The server's name.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// The process at the root of the server's processes.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its standard output if that is a pipe; available once.
    pub(crate) fn stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Waits until it accepts connections.
    pub(crate) fn wait_for_port(&mut self, port: u16) -> Result<()> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        self.wait_until(|| TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok())
    }

    /// Waits until it serves, according to `ready`.
    pub(crate) fn wait_until(&mut self, ready: impl Fn() -> bool) -> Result<()> {
        let deadline = Instant::now() + START_DEADLINE;
        loop {
            if ready() {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status} instead of serving:\n{}", self.name, self.said());
            }
            if Instant::now() > deadline {
                bail!("{} does not answer after {START_DEADLINE:?}:\n{}", self.name, self.said());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The end of its log.
    pub(crate) fn said(&self) -> String {
        let text = String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].join("\n")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = self.child.id();
        let group = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let signal_group = |signal| group.map(|group| kill_process_group(group, signal));
        signal_group(Signal::TERM);
        drop(self.child.stdin.take());
        let deadline = Instant::now() + STOP_DEADLINE;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        signal_group(Signal::KILL);
        let _ = self.child.wait();
        rundir::release_process(pid);
    }
}

/// A loopback port that is currently free.
pub(crate) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}
