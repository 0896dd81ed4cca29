//! A lock that is held until standard input ends.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::io::Errno;

/// Takes an exclusive lock of kind `flock` or `fcntl` and prints `locked`, or `busy` if another process holds it and `wait`
/// is not set. Holds it until standard input ends; closing the file releases it.
pub fn hold(path: &Path, kind: &str, wait: bool) -> Result<()> {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
    let file = file.with_context(|| path.display().to_string())?;
    let operation =
        if wait { FlockOperation::LockExclusive } else { FlockOperation::NonBlockingLockExclusive };
    let mut out = std::io::stdout();
    if wait {
        writeln!(out, "waiting")?;
        out.flush()?;
    }
    let taken = match kind {
        "flock" => flock(&file, operation),
        "fcntl" => fcntl_lock(&file, operation),
        other => bail!("no kind of lock {other}"),
    };
    match taken {
        Ok(()) => writeln!(out, "locked")?,
        Err(Errno::WOULDBLOCK | Errno::ACCESS) if !wait => {
            writeln!(out, "busy")?;
            return Ok(());
        }
        Err(error) => bail!("{kind} {}: {error}", path.display()),
    }
    out.flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    // No explicit unlock: the test includes that closing releases the lock.
    drop(file);
    writeln!(out, "closed")?;
    Ok(())
}
