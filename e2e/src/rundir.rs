//! The folder of one running lab, which is removed in every case.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};

/// What to clean up when this process receives a signal to end.
static LEFTOVERS: Mutex<Vec<Leftover>> = Mutex::new(Vec::new());

#[derive(Debug, Clone, PartialEq, Eq)]
enum Leftover {
    Process(i32),
    Path(PathBuf),
}

fn leftovers() -> std::sync::MutexGuard<'static, Vec<Leftover>> {
    LEFTOVERS.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Registers a child process for the cleanup on a signal.
pub fn guard_process(pid: u32) {
    leftovers().push(Leftover::Process(pid as i32));
}

/// Unregisters a child process that was waited for: its PID may already belong to another process.
pub fn release_process(pid: u32) {
    leftovers().retain(|leftover| *leftover != Leftover::Process(pid as i32));
}

/// Registers a file or folder for the cleanup on a signal.
pub fn guard_path(path: &Path) {
    leftovers().push(Leftover::Path(path.to_owned()));
}

/// Unregisters a removed path from the cleanup.
pub fn release_path(path: &Path) {
    leftovers().retain(|leftover| *leftover != Leftover::Path(path.to_owned()));
}

/// From now on SIGINT, SIGTERM and SIGHUP kill the guests and remove the folders before this process ends.
pub fn clean_up_on_signals() -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async {
            let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
            let [Ok(mut interrupt), Ok(mut terminate), Ok(mut hangup)] = kinds.map(signal) else { return };
            let code = tokio::select! {
                _ = interrupt.recv() => 130,
                _ = terminate.recv() => 143,
                _ = hangup.recv() => 129,
            };
            clean_up();
            std::process::exit(code);
        });
    })?;
    Ok(())
}

/// From now on SIGINT, SIGTERM and SIGHUP are forwarded to this child, which cleans up and ends.
pub fn forward_signals(pid: u32) -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let child = Pid::from_raw(pid as i32).context("a child has a process number")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async {
            let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
            let [Ok(mut interrupt), Ok(mut terminate), Ok(mut hangup)] = kinds.map(signal) else { return };
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = hangup.recv() => {}
                }
                let _ = kill_process(child, Signal::TERM);
            }
        });
    })?;
    Ok(())
}

fn clean_up() {
    for leftover in leftovers().drain(..).rev() {
        match leftover {
            Leftover::Process(pid) => {
                if let Some(pid) = Pid::from_raw(pid) {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
            Leftover::Path(path) => {
                let _ = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            }
        }
    }
}

/// A lab's folder: sockets, consoles, images built for it. Locked while it exists; removed when dropped.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    scratch: PathBuf,
    _lock: File,
}

impl RunDir {
    /// Creates the folder of the lab `name`, and removes the folders of labs without a process.
    pub fn create(name: &str) -> Result<Self> {
        let valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if name.is_empty() || name.len() > 40 || !name.bytes().all(valid) {
            bail!("a lab's name is 1 to 40 letters, digits and hyphens, not {name:?}");
        }
        let base = base()?;
        sweep(&base);
        let path = base.join(name);
        let lock = lock_of(&path)?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            bail!("a lab named {name} is already up; `forebay-lab down --lab {name}` ends it");
        }
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
        fs::create_dir(&path)?;
        // Guest disks are stored in /var/tmp, which is on a disk: /tmp may be in memory.
        let scratch = Path::new("/var/tmp").join(format!("{}-{name}", base_name()));
        let _ = fs::remove_dir_all(&scratch);
        fs::create_dir(&scratch).with_context(|| format!("make {}", scratch.display()))?;
        leftovers().extend([
            Leftover::Path(path.with_extension("lock")),
            Leftover::Path(path.clone()),
            Leftover::Path(scratch.clone()),
        ]);
        Ok(Self { path, scratch, _lock: lock })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Folder of the guests' writable disks.
    pub fn scratch(&self) -> &Path {
        &self.scratch
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        for path in [&self.path, &self.scratch] {
            let _ = fs::remove_dir_all(path);
            leftovers().retain(|leftover| *leftover != Leftover::Path(path.clone()));
        }
        let lock = self.path.with_extension("lock");
        let _ = fs::remove_file(&lock);
        leftovers().retain(|leftover| *leftover != Leftover::Path(lock.clone()));
    }
}

fn base_name() -> String {
    format!("forebay-{}", rustix::process::getuid().as_raw())
}

/// Folder of this user's labs. The path is short: the paths of the sockets in it must fit in 108 bytes.
fn base() -> Result<PathBuf> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};
    let base = Path::new("/tmp").join(base_name());
    match fs::DirBuilder::new().mode(0o700).create(&base) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            let meta = fs::symlink_metadata(&base)?;
            if !meta.is_dir() || meta.uid() != rustix::process::getuid().as_raw() {
                bail!("{} belongs to another user", base.display());
            }
        }
        Err(error) => return Err(error).with_context(|| format!("make {}", base.display())),
    }
    Ok(base)
}

fn lock_of(path: &Path) -> Result<File> {
    let lock = path.with_extension("lock");
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&lock)
        .context("open the lab's lock")
}

/// Whether a process holds the lab in this folder.
fn is_held(path: &Path) -> bool {
    File::open(path.with_extension("lock"))
        .is_ok_and(|lock| flock(&lock, FlockOperation::NonBlockingLockShared).is_err())
}

/// Folders of labs that are up, by name.
pub fn running() -> Result<Vec<(String, PathBuf)>> {
    let mut out = Vec::new();
    for entry in fs::read_dir(base()?)? {
        let path = entry?.path();
        if path.is_dir() && is_held(&path) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            out.push((name, path));
        }
    }
    out.sort();
    Ok(out)
}

/// Removes what a killed lab left behind.
fn sweep(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && !is_held(&path) {
            let name = entry.file_name();
            let _ = fs::remove_dir_all(&path);
            let _ =
                fs::remove_dir_all(Path::new("/var/tmp").join(format!("{}-{}", base_name(), name.display())));
            let _ = fs::remove_file(path.with_extension("lock"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_directory_is_exclusive_and_removed_at_the_end() {
        let name = format!("unit-test-{}", std::process::id());
        let first = RunDir::create(&name).expect("the folder is made");
        let (path, scratch) = (first.path().to_owned(), first.scratch().to_owned());
        assert!(running().expect("a list").iter().any(|(running, _)| *running == name));
        let error = RunDir::create(&name).expect_err("a second one is refused");
        assert!(error.to_string().contains("already up"), "{error}");
        drop(first);
        assert!(!path.exists() && !scratch.exists() && !path.with_extension("lock").exists());
        drop(RunDir::create(&name).expect("and then it is free again"));
    }

    #[test]
    fn invalid_lab_names_are_refused() {
        for name in ["", "../x", "a/b", "a b", &"x".repeat(41)] {
            assert!(RunDir::create(name).is_err(), "{name:?}");
        }
    }
}
