//! The Unix socket on which the orchestrator calls.

use std::fs;
use std::io::{self, Read};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::os::unix::net::{UnixListener as StdListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::fs::{FlockOperation, Mode, OFlags, chmod, flock, fstat, lstat, open};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use tokio::net::UnixListener;
use tokio::time::{MissedTickBehavior, interval};
use tracing::warn;

use crate::limits::{SOCKET_PATIENCE, SOCKET_PAUSE};

/// Pending connections.
const BACKLOG: i32 = 128;

/// A socket file, identified by its inode: a new file at the same path is a different one.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Keeps the inode open, so that its number is not reused.
    pin: OwnedFd,
}

impl SocketFile {
    /// The file that is at `path` now.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Self { path: path.to_owned(), pin: open(path, flags, Mode::empty())? })
    }

    fn is_there(&self) -> io::Result<bool> {
        let own = fstat(&self.pin)?;
        match lstat(&self.path) {
            Ok(found) => Ok((found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Completes when the file at the path is no longer this one; checks at this interval.
    pub(crate) async fn vanished(&self, every: Duration) {
        let mut ticks = interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            match self.is_there() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    let error = error.to_string();
                    warn!(path = %self.path.display(), error, "cannot look at the socket");
                }
            }
        }
    }
}

/// The file of a socket that this process listens on. Dropping this removes the file, unless another process has replaced it.
#[derive(Debug)]
pub(crate) struct OwnSocket(SocketFile);

impl Deref for OwnSocket {
    type Target = SocketFile;

    fn deref(&self) -> &SocketFile {
        &self.0
    }
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        let remove = || -> io::Result<()> {
            let _folder = lock_folder(&self.path)?;
            if self.is_there()? { fs::remove_file(&self.path) } else { Ok(()) }
        };
        match remove() {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                warn!(path = %self.path.display(), error = error.to_string(), "cannot remove the socket");
            }
            _ => {}
        }
    }
}

/// A process holds this lock while it creates or removes a socket in a directory: no other process replaces the file between
/// check and removal.
fn lock_folder(path: &Path) -> io::Result<OwnedFd> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = open(folder, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    flock(&folder, FlockOperation::LockExclusive)?;
    Ok(folder)
}

/// Whether a process serves HTTP/2 at the socket.
///
/// A successful connect proves nothing: a killed process keeps its listener as long as one of its threads hangs in the kernel,
/// and connections to it wait forever. A server sends first (RFC 9113 3.4), after it has accepted the connection.
fn is_served(path: &Path, patience: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + patience;
    loop {
        // Without NONBLOCK, connect would block if the listener's backlog is full.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&socket, &SocketAddrUnix::new(path)?) {
            Ok(()) => match speaks(UnixStream::from(socket), deadline) {
                // The listener was closed in the meantime.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
                result => return result,
            },
            Err(Errno::CONNREFUSED) => return Ok(false),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
        thread::sleep(SOCKET_PAUSE);
    }
}

/// Whether the other end sends data, or closes an accepted connection.
fn speaks(mut stream: UnixStream, deadline: Instant) -> io::Result<bool> {
    stream.set_nonblocking(false)?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut [0]) {
            Ok(_) => return Ok(true),
            // The deadline has passed, or almost.
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Listens at `path`, for this user only. Replaces a socket that no process serves, but not one that is in use.
pub(crate) fn listen_at(path: &Path) -> anyhow::Result<(UnixListener, OwnSocket)> {
    let shown = path.display();
    // The kubelet's directory for plugin sockets exists; this driver creates its own directory in it. It creates only that one:
    // a missing parent directory was not mounted into the container.
    if let Some(folder) = path.parent()
        && let Err(e) = fs::DirBuilder::new().mode(0o750).create(folder)
        && e.kind() != io::ErrorKind::AlreadyExists
        && !folder.as_os_str().is_empty()
    {
        return Err(e).with_context(|| format!("make {} for the socket", folder.display()));
    }
    let _folder = lock_folder(path).with_context(|| format!("lock the folder of {shown}"))?;
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => bail!("{shown} exists and is not a socket"),
        Ok(_) => {
            if is_served(path, SOCKET_PATIENCE).with_context(|| format!("look at {shown}"))? {
                bail!("{shown} is in use by another process");
            }
            fs::remove_file(path).with_context(|| format!("remove the stale {shown}"))?;
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e).with_context(|| format!("look at {shown}")),
    }
    let listen_private = || -> io::Result<(UnixListener, OwnSocket)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        let own = OwnSocket(SocketFile::at(path)?);
        // No client can connect before listen, so other permissions are never visible.
        chmod(path, Mode::RUSR | Mode::WUSR)?;
        listen(&socket, BACKLOG)?;
        Ok((UnixListener::from_std(StdListener::from(socket))?, own))
    };
    listen_private().with_context(|| format!("listen on {shown}"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use forebay_proto::csi::identity_server::IdentityServer;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::transport::Server;

    use super::*;
    use crate::identity::{IdentityService, Look};

    // The check of a socket blocks while another thread serves it.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn stale_socket_is_replaced_and_a_socket_in_use_is_kept() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("csi.sock");
        let (first, own) = listen_at(&path).expect("free");
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let identity = IdentityService { servers: None, is_node: true, look: Look::default() };
        let router = Server::builder().add_service(IdentityServer::new(identity));
        let serving = tokio::spawn(router.serve_with_incoming(UnixListenerStream::new(first)));
        let error = listen_at(&path).expect_err("in use").to_string();
        assert!(error.contains("in use"), "{error}");
        // As left by a killed process.
        serving.abort();
        assert!(serving.await.is_err_and(|error| error.is_cancelled()));
        std::mem::forget(own);
        assert!(path.exists());
        let second = listen_at(&path).expect("stale");
        drop(second);
        assert!(!path.exists(), "the socket is removed with its listener");
        fs::write(&path, "data").expect("writable");
        assert!(listen_at(&path).is_err());
        assert_eq!(fs::read(&path).expect("kept"), b"data");
    }

    #[tokio::test]
    async fn socket_of_a_hung_process_is_replaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("csi.sock");
        // The socket of a killed process, with a thread that hangs in the kernel.
        let (hung, own) = listen_at(&path).expect("free");
        std::mem::forget(own);
        let (_new, new) = listen_at(&path).expect("silent");
        assert!(new.is_there().expect("readable"));
        drop(hung);
    }

    #[test]
    fn socket_with_a_full_backlog_is_not_served() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("csi.sock");
        let address = SocketAddrUnix::new(&path).expect("short");
        let socket = |flags| socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("new");
        let listener = socket(SocketFlags::CLOEXEC);
        bind(&listener, &address).expect("free");
        listen(&listener, 0).expect("bound");
        let mut waiting = Vec::new();
        loop {
            let one = socket(SocketFlags::NONBLOCK);
            match connect(&one, &address) {
                Ok(()) => waiting.push(one),
                Err(error) => break assert_eq!(error, Errno::AGAIN),
            }
        }
        assert!(!is_served(&path, Duration::from_millis(1)).expect("it can be asked"));
    }

    #[tokio::test]
    async fn old_process_does_not_remove_its_successors_socket() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("csi.sock");
        let (old, old_file) = listen_at(&path).expect("free");
        // The old process has stopped listening and still waits for calls to end.
        drop(old);
        let (_new, new_file) = listen_at(&path).expect("stale");
        let deadline = Duration::from_secs(60);
        let vanished = old_file.vanished(Duration::from_millis(1));
        tokio::time::timeout(deadline, vanished).await.expect("the old one is notified");
        drop(old_file);
        UnixStream::connect(&path).expect("the new one listens");
        drop(new_file);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn only_the_parent_directory_of_the_socket_is_created() {
        let dir = tempfile::tempdir().expect("a directory");
        listen_at(&dir.path().join("csi.forebay.io/csi.sock")).expect("the folder is made");
        let error =
            listen_at(&dir.path().join("absent/csi.forebay.io/csi.sock")).expect_err("no such folder");
        assert!(error.to_string().contains("csi.forebay.io"), "{error}");
    }

    #[tokio::test]
    async fn overlong_socket_path_is_an_error() {
        assert!(listen_at(Path::new(&format!("/tmp/{}", "x".repeat(200)))).is_err());
    }
}
