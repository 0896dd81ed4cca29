//! Mount system calls: fsopen, fspick, fsconfig, fsmount, move_mount, open_tree, mount_setattr, umount2.
//!
//! Does not use mount.cifs: a few fsconfig calls do its work, which is to resolve the server's address and to pass the
//! password. So no password is ever in an argument or a file. The kernel requires the following without that helper
//! (fs/smb/client/fs_context.c, read at 6.8 to 7.x):
//! - `source` is `//host/share`. The kernel derives `unc` and `prefixpath` from it, and ignores them as options.
//! - `ip` is a numeric address. Without it, the host itself must be one: the kernel does not resolve names here.
//! - `port` is always set; otherwise the kernel tries 139 after a refused 445.
//! - Every value is a string (`fsconfig` SET_STRING), even a number; a leading 0 makes a number octal. Options without a value
//!   are flags (SET_FLAG). A value of more than 255 bytes, also of a password, fails with EINVAL.
//! - CMD_CREATE uses the network: it hangs while a server does not respond.
//! - The kernel's messages about a refused option are read from the context's descriptor, one message per read, each with the
//!   prefix `e `, `w ` or `i `.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
    fsconfig_create, fsconfig_reconfigure, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, fspick,
    move_mount, open_tree,
};
use tonic::Code;

use crate::limits::MOUNT_MESSAGES_MAX;

/// An option for fsconfig.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setting<'a> {
    Flag(&'a str),
    Value(&'a str, &'a str),
    /// A value that appears in no message.
    Secret(&'a str, &'a str),
}

/// The system call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Open,
    Option(String),
    Create,
    Attach,
    Clone,
    SetAttributes,
    Reconfigure,
    Unmount,
}

/// A failed mount or unmount: the path, the step, the error and the kernel's messages.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) struct MountError {
    pub(crate) what: String,
    pub(crate) step: Step,
    pub(crate) errno: Errno,
    pub(crate) messages: Vec<String>,
}

impl MountError {
    /// The gRPC code that shows the orchestrator, or its administrator, which side must act.
    pub(crate) fn code(&self) -> Code {
        match (&self.step, self.errno) {
            // The kernel's client does not support it.
            (Step::Option(name), _) if name == "rdma" => Code::FailedPrecondition,
            (Step::Open, _) | (_, Errno::PERM | Errno::LIBACC) => Code::FailedPrecondition,
            (Step::Option(_), _) | (_, Errno::INVAL) => Code::InvalidArgument,
            (Step::Create, Errno::ACCESS | Errno::KEYEXPIRED | Errno::KEYREJECTED | Errno::NOKEY) => {
                Code::Unauthenticated
            }
            (Step::Create, Errno::NOENT | Errno::NODEV | Errno::NXIO) => Code::NotFound,
            (Step::Create, Errno::OPNOTSUPP | Errno::PROTONOSUPPORT) => Code::FailedPrecondition,
            (Step::Create, errno) if is_unreachable(errno) => Code::Unavailable,
            (Step::Unmount, Errno::BUSY) => Code::FailedPrecondition,
            (_, Errno::NOMEM) => Code::ResourceExhausted,
            _ => Code::Internal,
        }
    }

    /// Whether another address of the same server may work.
    pub(crate) fn is_unreachable(&self) -> bool {
        self.step == Step::Create && is_unreachable(self.errno)
    }
}

fn is_unreachable(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::HOSTDOWN
            | Errno::HOSTUNREACH
            | Errno::NETUNREACH
            | Errno::NETDOWN
            | Errno::CONNREFUSED
            | Errno::CONNRESET
            | Errno::CONNABORTED
            | Errno::NOTCONN
            | Errno::TIMEDOUT
            | Errno::PIPE
            | Errno::AGAIN
    )
}

impl fmt::Display for MountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = match &self.step {
            Step::Open => "the kernel does not offer this file system here".to_owned(),
            Step::Option(name) => format!("option {name}"),
            Step::Create => "connecting".to_owned(),
            Step::Attach => "attaching".to_owned(),
            Step::Clone => "cloning the mount".to_owned(),
            Step::SetAttributes => "setting the mount's attributes".to_owned(),
            Step::Reconfigure => "setting the options of the mount".to_owned(),
            Step::Unmount => "unmounting".to_owned(),
        };
        write!(f, "{}: {step}: {}", self.what, io::Error::from(self.errno))?;
        for message in &self.messages {
            write!(f, "; {message}")?;
        }
        Ok(())
    }
}

/// Checks whether the kernel supports this file system; loads its module if possible.
pub(crate) fn is_available(fs_type: &str) -> Result<(), MountError> {
    let opened = fsopen(fs_type, FsOpenFlags::FSOPEN_CLOEXEC);
    opened.map(drop).map_err(|errno| MountError {
        what: fs_type.to_owned(),
        step: Step::Open,
        errno,
        messages: Vec::new(),
    })
}

/// Creates a file system and mounts it at `target`. Can hang in the kernel while a server does not respond.
pub(crate) fn mount(
    fs_type: &str,
    what: &str,
    settings: &[Setting<'_>],
    attributes: MountAttrFlags,
    target: &Path,
) -> Result<(), MountError> {
    let failed = |step, errno, context: Option<&OwnedFd>| MountError {
        what: what.to_owned(),
        step,
        errno,
        messages: context.map(|c| read_messages(c, settings)).unwrap_or_default(),
    };
    let context = fsopen(fs_type, FsOpenFlags::FSOPEN_CLOEXEC).map_err(|e| failed(Step::Open, e, None))?;
    set(&context, settings).map_err(|(name, e)| failed(Step::Option(name), e, Some(&context)))?;
    fsconfig_create(&context).map_err(|e| failed(Step::Create, e, Some(&context)))?;
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
        .map_err(|e| failed(Step::Attach, e, Some(&context)))?;
    attach(&mount, target).map_err(|e| failed(Step::Attach, e, None))
}

/// Sets the options of the file system at `target` to these, and all others to defaults.
pub(crate) fn reconfigure(target: &Path, settings: &[Setting<'_>]) -> Result<(), MountError> {
    let failed = |step, errno, context: Option<&OwnedFd>| MountError {
        what: target.display().to_string(),
        step,
        errno,
        messages: context.map(|c| read_messages(c, settings)).unwrap_or_default(),
    };
    let context =
        fspick(CWD, target, FsPickFlags::FSPICK_CLOEXEC).map_err(|e| failed(Step::Reconfigure, e, None))?;
    set(&context, settings).map_err(|(name, e)| failed(Step::Option(name), e, Some(&context)))?;
    fsconfig_reconfigure(&context).map_err(|e| failed(Step::Reconfigure, e, Some(&context)))
}

fn set(context: &OwnedFd, settings: &[Setting<'_>]) -> Result<(), (String, Errno)> {
    for setting in settings {
        let (name, result) = match *setting {
            Setting::Flag(name) => (name, fsconfig_set_flag(context, name)),
            Setting::Value(name, value) | Setting::Secret(name, value) => {
                (name, fsconfig_set_string(context, name, value))
            }
        };
        result.map_err(|errno| (name.to_owned(), errno))?;
    }
    Ok(())
}

/// Bind-mounts `source` at `target`, with `attributes` added.
pub(crate) fn bind(source: &Path, target: &Path, attributes: MountAttrFlags) -> Result<(), MountError> {
    let failed = |step, errno| MountError {
        what: format!("{} at {}", source.display(), target.display()),
        step,
        errno,
        messages: Vec::new(),
    };
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let clone = open_tree(CWD, source, flags).map_err(|e| failed(Step::Clone, e))?;
    if !attributes.is_empty() {
        // Set before attaching, so that the mount is never visible as writable.
        set_attributes(&clone, attributes).map_err(|e| failed(Step::SetAttributes, e))?;
    }
    attach(&clone, target).map_err(|e| failed(Step::Attach, e))
}

/// Removes the topmost mount at `target`. Can hang while written data is sent.
pub(crate) fn unmount(target: &Path) -> Result<(), MountError> {
    umount2(target, UnmountFlags::NOFOLLOW)
}

/// Removes the mount from the tree immediately; the kernel cleans up after its last user.
pub(crate) fn detach(target: &Path) -> Result<(), MountError> {
    umount2(target, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)
}

fn umount2(target: &Path, flags: UnmountFlags) -> Result<(), MountError> {
    rustix::mount::unmount(target, flags).map_err(|errno| MountError {
        what: target.display().to_string(),
        step: Step::Unmount,
        errno,
        messages: Vec::new(),
    })
}

fn attach(mount: &OwnedFd, target: &Path) -> Result<(), Errno> {
    move_mount(mount, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

/// Reads the kernel's messages about a context, without secrets.
fn read_messages(context: &OwnedFd, settings: &[Setting<'_>]) -> Vec<String> {
    let mut messages = Vec::new();
    let mut buffer = [0u8; 1024];
    // ENODATA if there are no more messages.
    while messages.len() < MOUNT_MESSAGES_MAX {
        let Ok(length) = rustix::io::read(context, &mut buffer) else { break };
        let text = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default());
        let text = text.trim();
        let text = ["e ", "w ", "i "].iter().find_map(|level| text.strip_prefix(level)).unwrap_or(text);
        if text.is_empty() {
            break;
        }
        messages.push(redact(text, settings));
    }
    messages
}

/// Removes secrets. The client currently prints no password; this protects against future changes.
fn redact(text: &str, settings: &[Setting<'_>]) -> String {
    let mut text = text.to_owned();
    for setting in settings {
        if let Setting::Secret(_, secret) = setting
            && !secret.is_empty()
        {
            text = text.replace(secret, "***");
        }
    }
    text
}

/// mount_setattr(2), which rustix does not have.
#[allow(unsafe_code)]
fn set_attributes(mount: &OwnedFd, attributes: MountAttrFlags) -> Result<(), Errno> {
    let change =
        libc::mount_attr { attr_set: attributes.bits().into(), attr_clr: 0, propagation: 0, userns_fd: 0 };
    let fd: BorrowedFd<'_> = rustix::fd::AsFd::as_fd(mount);
    // SAFETY: fd is open for the call; the path is a terminated empty string, allowed by AT_EMPTY_PATH; the
    // kernel reads exactly size_of::<mount_attr>() bytes of `change`, which lives until the call returns.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            fd.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const change,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 {
        return Ok(());
    }
    let errno = io::Error::last_os_error();
    Err(errno.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(step: Step, errno: Errno) -> MountError {
        MountError { what: "//h/s".into(), step, errno, messages: vec!["cifs: no".into()] }
    }

    #[test]
    fn mount_errors_map_to_grpc_codes() {
        for (step, errno, code) in [
            (Step::Create, Errno::ACCESS, Code::Unauthenticated),
            (Step::Create, Errno::KEYEXPIRED, Code::Unauthenticated),
            (Step::Create, Errno::NOENT, Code::NotFound),
            (Step::Create, Errno::HOSTDOWN, Code::Unavailable),
            (Step::Create, Errno::CONNREFUSED, Code::Unavailable),
            (Step::Create, Errno::TIMEDOUT, Code::Unavailable),
            (Step::Create, Errno::OPNOTSUPP, Code::FailedPrecondition),
            (Step::Create, Errno::IO, Code::Internal),
            (Step::Option("rsize".into()), Errno::INVAL, Code::InvalidArgument),
            (Step::Option("rdma".into()), Errno::INVAL, Code::FailedPrecondition),
            (Step::Open, Errno::NODEV, Code::FailedPrecondition),
            (Step::Open, Errno::PERM, Code::FailedPrecondition),
            (Step::Attach, Errno::NOENT, Code::Internal),
            (Step::Unmount, Errno::BUSY, Code::FailedPrecondition),
        ] {
            assert_eq!(error(step.clone(), errno).code(), code, "{step:?} {errno:?}");
        }
    }

    #[test]
    fn error_text_contains_step_errno_and_kernel_message() {
        assert_eq!(
            error(Step::Create, Errno::CONNREFUSED).to_string(),
            "//h/s: connecting: Connection refused (os error 111); cifs: no"
        );
    }

    #[test]
    fn secrets_are_redacted_from_kernel_messages() {
        let settings = [Setting::Value("username", "u"), Setting::Secret("password", "hunter2!")];
        assert_eq!(redact("bad option hunter2! given", &settings), "bad option *** given");
    }
}
