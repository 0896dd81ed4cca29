//! Real processes under test: started on sockets in a scratch directory, and terminated and waited for at the end.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs::{self, File};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tonic::transport::{Channel, Endpoint};

/// Timeout of every wait.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// A process with its standard error in a file.
pub struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    pub fn start(command: &mut Command, log: PathBuf) -> Self {
        let stderr = File::create(&log).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).spawn().unwrap();
        Self { child, log }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    pub async fn terminate(&mut self) -> ExitStatus {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.ended().await
    }

    /// Waits until the process has exited.
    pub async fn ended(&mut self) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(started.elapsed() < DEADLINE, "it does not end:\n{}", self.log());
            // Lets the client on this runtime run: it answers the GOAWAY.
            tokio::task::yield_now().await;
        }
    }

    pub fn assert_running(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("it ended with {status}:\n{}", self.log());
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- {}\n{}", self.log.display(), self.log());
        }
    }
}

/// The driver's binary: the one in `$FOREBAY_BINARIES` if the tests do not run where they were built, or cargo's.
pub fn driver_binary() -> PathBuf {
    let cargos = env!("CARGO_BIN_EXE_forebay-csi");
    std::env::var_os("FOREBAY_BINARIES")
        .map_or(cargos.into(), |folder| Path::new(&folder).join("forebay-csi"))
}

/// The server's binary.
pub fn server_binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        forebay_e2e::sibling::server_binary(Path::new(env!("CARGO_BIN_EXE_forebay-csi"))).unwrap()
    })
}

/// The driver in this mode, on `csi.sock` in `dir`, with the server's API at `admin.sock` there.
pub fn start_driver(dir: &Path, mode: &str, arguments: &[&str]) -> Process {
    let mut command = Command::new(driver_binary());
    command.args(["--mode", mode]).args(arguments);
    command.arg("--endpoint").arg(format!("unix://{}", dir.join("csi.sock").display()));
    command.arg("--admin-endpoint").arg(format!("unix://{}", dir.join("admin.sock").display()));
    Process::start(&mut command, dir.join(format!("csi-{mode}.log")))
}

/// Retries until it succeeds.
pub async fn eventually<T, E: std::fmt::Debug, F: Future<Output = Result<T, E>>>(
    process: &mut Process,
    mut attempt: impl FnMut() -> F,
) -> T {
    let started = Instant::now();
    loop {
        process.assert_running();
        match attempt().await {
            Ok(value) => return value,
            Err(error) => assert!(started.elapsed() < DEADLINE, "{error:?}\n{}", process.log()),
        }
        tokio::task::yield_now().await;
    }
}

/// A channel to a socket that the process will listen on.
pub async fn connect(process: &mut Process, socket: &Path) -> Channel {
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap().timeout(DEADLINE);
    eventually(process, || endpoint.connect()).await
}
