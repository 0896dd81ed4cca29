//! A program that runs natively next to the lab, with its log and its end.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};

use anyhow::{Context, Result, bail};

use crate::limits::CONSOLE_TAIL_LINES;
use crate::rundir;

/// A running program. It is killed when dropped, and by the kernel when this process ends.
#[derive(Debug)]
pub struct Service {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Service {
    /// Starts it and appends its output to `<folder>/<name>.log`.
    pub fn start(name: &str, command: &Command, folder: &Path) -> Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let output = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("open {}", log.display()))?;
        let mut tied = Command::new("setpriv");
        tied.args(["--pdeathsig", "KILL", "--"]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => tied.env(name, value),
                None => tied.env_remove(name),
            };
        }
        if let Some(folder) = command.get_current_dir() {
            tied.current_dir(folder);
        }
        tied.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = spawn_from_keeper(tied).with_context(|| format!("start {name}"))?;
        rundir::guard_process(child.id());
        Ok(Self { name: name.to_owned(), child, log })
    }

    /// Fails with the end of its log if it is no longer running.
    pub fn check(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("{} ended with {status}; its log ends with:\n{}", self.name, self.log_tail());
        }
        Ok(())
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(CONSOLE_TAIL_LINES)..].join("\n")
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        rundir::release_process(self.child.id());
    }
}

type Order = (Command, Sender<std::io::Result<Child>>);

/// The death signal is bound to the thread that started a program, and a test's thread ends with its test. So a single thread
/// that lives as long as the process starts all programs.
fn spawn_from_keeper(command: Command) -> Result<Child> {
    static KEEPER: OnceLock<Mutex<Sender<Order>>> = OnceLock::new();
    let keeper = KEEPER.get_or_init(|| {
        let (orders, inbox) = channel::<Order>();
        std::thread::spawn(move || {
            for (mut command, answer) in inbox {
                let _ = answer.send(command.spawn());
            }
        });
        Mutex::new(orders)
    });
    let (answer, child) = channel();
    keeper
        .lock()
        .expect("no holder of this lock panics")
        .send((command, answer))
        .ok()
        .context("the keeper thread is gone")?;
    Ok(child.recv().context("the keeper thread is gone")??)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn service_outlives_the_thread_that_started_it_but_not_its_owner() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().to_owned();
        let started = std::thread::spawn(move || {
            let mut command = Command::new("sh");
            Service::start("sleeper", command.args(["-c", "echo here; exec sleep 1000"]), &path)
        });
        let mut service = started.join().expect("the thread ends").expect("it starts");
        let until = Instant::now() + Duration::from_secs(10);
        while !service.log_tail().contains("here") {
            service.check().expect("it runs on");
            assert!(Instant::now() < until, "it said nothing");
            std::thread::yield_now();
        }
        service.check().expect("it runs on");
        let process = PathBuf::from(format!("/proc/{}", service.child.id()));
        drop(service);
        assert!(!process.exists());
    }

    #[test]
    fn error_of_an_ended_service_includes_its_output() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = Command::new("sh");
        let mut service = Service::start("failing", command.args(["-c", "echo why; exit 3"]), folder.path())
            .expect("starts");
        let until = Instant::now() + Duration::from_secs(10);
        let error = loop {
            match service.check() {
                Ok(()) => assert!(Instant::now() < until, "it does not end"),
                Err(error) => break error.to_string(),
            }
        };
        assert!(error.contains("why") && error.contains("failing"), "{error}");
    }
}
