//! The unix socket that the orchestrator calls.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener as StdListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::fs::{Mode, chmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use tokio::net::UnixListener;
use tokio::time::{MissedTickBehavior, interval};
use tracing::warn;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Listens at `path`, for this user alone. A socket that nobody listens on is replaced, one in use is not.
pub(crate) fn listen_at(path: &Path) -> anyhow::Result<UnixListener> {
    let shown = path.display();
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => bail!("{shown} exists and is no socket"),
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => bail!("{shown} is in use by another process"),
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).with_context(|| format!("remove the stale {shown}"))?;
            }
            Err(e) => return Err(e).with_context(|| format!("look at {shown}")),
        },
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e).with_context(|| format!("look at {shown}")),
    }
    // The kubelet's folder for the sockets of plugins is there, ours in it is for us to make. Only that one: a folder
    // above that is missing was not mounted into the container.
    if let Some(folder) = path.parent()
        && let Err(e) = fs::DirBuilder::new().mode(0o750).create(folder)
        && e.kind() != io::ErrorKind::AlreadyExists
        && !folder.as_os_str().is_empty()
    {
        return Err(e).with_context(|| format!("make {} for the socket", folder.display()));
    }
    let listen_private = || -> io::Result<UnixListener> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        // Nobody can connect before listen, so nobody ever sees other permissions.
        chmod(path, Mode::RUSR | Mode::WUSR)?;
        listen(&socket, BACKLOG)?;
        UnixListener::from_std(StdListener::from(socket))
    };
    listen_private().with_context(|| format!("listen on {shown}"))
}

/// Which file it is that lies at `path`.
pub(crate) fn inode(path: &Path) -> io::Result<u64> {
    fs::symlink_metadata(path).map(|found| found.ino())
}

/// Ends when the file at `path` is not `own` any more; looks this often.
pub(crate) async fn vanished(path: &Path, own: u64, every: Duration) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match inode(path) {
            Ok(found) if found == own => {}
            Ok(_) => return,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => {
                warn!(path = %path.display(), error = error.to_string(), "cannot look at the socket")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_one_in_use_is_kept() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("csi.sock");
        let first = listen_at(&path).expect("free");
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = listen_at(&path).expect_err("in use").to_string();
        assert!(error.contains("in use"), "{error}");
        drop(first);
        listen_at(&path).expect("stale");
        fs::remove_file(&path).expect("there");
        fs::write(&path, "data").expect("writable");
        assert!(listen_at(&path).is_err());
        assert_eq!(fs::read(&path).expect("kept"), b"data");
    }

    #[tokio::test]
    async fn its_own_folder_is_made_and_none_above() {
        let dir = tempfile::tempdir().expect("a directory");
        listen_at(&dir.path().join("csi.forebay.io/csi.sock")).expect("the folder is made");
        let error =
            listen_at(&dir.path().join("absent/csi.forebay.io/csi.sock")).expect_err("no such folder");
        assert!(error.to_string().contains("csi.forebay.io"), "{error}");
    }

    #[tokio::test]
    async fn a_path_too_long_is_an_error() {
        assert!(listen_at(Path::new(&format!("/tmp/{}", "x".repeat(200)))).is_err());
    }
}
