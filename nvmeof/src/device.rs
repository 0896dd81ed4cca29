//! The block device of a namespace, opened for its reservations.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use crate::ioctl::{self, Command, Queue, Status};
use crate::key::ReservationKey;
use crate::report::{MalformedReport, REPORT_BYTES, Report};
use crate::sysfs::Namespace;

/// `PR_EXCLUSIVE_ACCESS` of linux/pr.h.
const PR_EXCLUSIVE_ACCESS: u32 = 2;
/// Reservation Register and Reservation Report (NVMe Base 7.5, 7.6).
const OPCODE_REGISTER: u8 = 0x0d;
const OPCODE_REPORT: u8 = 0x0e;

/// Reservation commands of a namespace. A trait, so that tests can run the rules on targets in memory.
pub trait Reservations {
    /// Reads the reservation and its registrants.
    ///
    /// # Errors
    /// For all methods: if the target refuses or cannot be reached.
    fn report(&self) -> Result<Report, ReservationError>;
    /// Registers this host, which is not registered yet, with this key.
    fn register(&self, key: ReservationKey) -> Result<(), ReservationError>;
    /// Replaces the key of this host's registration; a reservation that it holds continues.
    fn replace(&self, old: ReservationKey, new: ReservationKey) -> Result<(), ReservationError>;
    /// Acquires the reservation, for exclusive access.
    fn reserve(&self, key: ReservationKey) -> Result<(), ReservationError>;
    /// Unregisters all hosts with the key `old`, aborts their commands, and takes the reservation if one of them held it.
    fn preempt_and_abort(&self, old: ReservationKey, key: ReservationKey) -> Result<(), ReservationError>;
    /// Releases the reservation.
    fn release(&self, key: ReservationKey) -> Result<(), ReservationError>;
    /// Ends this host's registration.
    fn unregister(&self, key: ReservationKey) -> Result<(), ReservationError>;
}

/// Why a reservation command failed.
#[derive(Debug, thiserror::Error)]
pub enum ReservationError {
    /// Another host has the reservation, or we are not registered with this key.
    #[error("reservation conflict: another host holds it, or this host is not registered with this key")]
    Conflict,
    /// The target does not support reservations for this namespace.
    #[error(
        "the target has no reservations for this namespace: switch them on (nvmet: resv_enable, kernel 6.13 or later)"
    )]
    Unsupported,
    /// No path, or the path failed during the command. The command may have been executed anyway.
    #[error("no path to the target: the command may or may not have reached it")]
    NoPath,
    /// The namespace is gone.
    #[error("the namespace is gone")]
    Gone,
    /// The namespace is write-protected. nvmet then refuses even a report.
    #[error("the namespace is read-only: the target has it write-protected")]
    WriteProtected,
    /// We lack permission.
    #[error("this process may not: it needs CAP_SYS_ADMIN")]
    NotPermitted,
    /// The report is malformed.
    #[error(transparent)]
    Malformed(#[from] MalformedReport),
    /// NVMe status (type and code) or status of the kernel's PR layer.
    #[error("the target answered with status {0:#x}")]
    Status(u32),
    /// Any other error of the system call.
    #[error("the kernel says: {0}")]
    System(io::Error),
}

/// Why a namespace's device was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It could not be opened.
    #[error("cannot open {path}: {source}")]
    Open {
        /// The device.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// Another device has its name now.
    #[error("{path} is not the device that sysfs reported: names have changed meanwhile, look again")]
    Another {
        /// The device.
        path: String,
    },
}

impl OpenError {
    /// Whether the kernel was creating or removing the device, so that a retry can succeed.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Open { source, .. } => {
                matches!(source.raw_os_error(), Some(libc::ENOENT | libc::ENXIO | libc::ENODEV))
            }
            Self::Another { .. } => true,
        }
    }
}

/// Offset of RESCAP in the response to Identify Namespace.
const RESCAP_AT: usize = 31;

/// Capabilities of a target for reservations of a namespace (RESCAP).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationCapabilities {
    /// Reservations persist through power loss (PTPLS).
    pub persist: bool,
    /// Supports Exclusive Access.
    pub exclusive_access: bool,
}

impl ReservationCapabilities {
    fn parse(rescap: u8) -> Self {
        Self { persist: rescap & 1 != 0, exclusive_access: rescap & 4 != 0 }
    }
}

/// A namespace's block device.
#[derive(Debug)]
pub struct NamespaceDevice {
    file: File,
    nsid: u32,
}

impl NamespaceDevice {
    /// Opens the device of a namespace that was found in sysfs, below `dev`. Opens it read-only: this is sufficient for
    /// reservations, and closing does not make udev probe the device again.
    ///
    /// # Errors
    /// If it cannot be opened, or is another device now.
    pub fn open(dev: &Path, namespace: &Namespace) -> Result<Self, OpenError> {
        let path = dev.join(&namespace.name);
        let shown = || path.display().to_string();
        let open = || -> io::Result<(File, bool)> {
            let file = File::open(&path)?;
            let metadata = file.metadata()?;
            let number = (libc::major(metadata.rdev()), libc::minor(metadata.rdev()));
            Ok((file, metadata.file_type().is_block_device() && number == namespace.device))
        };
        match open() {
            Ok((file, true)) => Ok(Self { file, nsid: namespace.nsid }),
            Ok((_, false)) => Err(OpenError::Another { path: shown() }),
            Err(source) => Err(OpenError::Open { path: shown(), source }),
        }
    }

    /// Reads the target's reservation capabilities: Identify Namespace (NVMe Base 5.17, RESCAP).
    ///
    /// # Errors
    /// If the target refuses.
    pub fn reservation_capabilities(&self) -> Result<ReservationCapabilities, ReservationError> {
        const OPCODE_IDENTIFY: u8 = 0x06;
        let mut data = vec![0; 4096];
        let command = Command { opcode: OPCODE_IDENTIFY, nsid: self.nsid, ..Command::default() };
        done(ioctl::passthrough(&self.file, Queue::Admin, command, &mut data))?;
        Ok(ReservationCapabilities::parse(data[RESCAP_AT]))
    }

    /// Removes all registrations and the reservation of any owner. For manual repairs.
    ///
    /// # Errors
    /// If the target refuses: this host must be registered with the key.
    pub fn clear(&self, key: ReservationKey) -> Result<(), ReservationError> {
        done(ioctl::pr_clear(&self.file, key.number()))
    }
}

impl Reservations for NamespaceDevice {
    /// Sends the NVMe command directly: `IOC_PR_READ_KEYS` and `IOC_PR_READ_RESERVATION` exist only in new kernels, and do not
    /// name the owner of a key.
    fn report(&self) -> Result<Report, ReservationError> {
        let mut data = vec![0; REPORT_BYTES];
        let command = Command {
            opcode: OPCODE_REPORT,
            nsid: self.nsid,
            // In dwords, zero-based.
            cdw10: u32::try_from(REPORT_BYTES / 4 - 1).expect("limits are small"),
            // Extended data structure: hosts over fabrics have identifiers of 128 bits.
            cdw11: 1,
            ..Command::default()
        };
        done(ioctl::passthrough(&self.file, Queue::Io, command, &mut data))?;
        Ok(Report::parse(&data)?)
    }

    fn register(&self, key: ReservationKey) -> Result<(), ReservationError> {
        done(ioctl::pr_register(&self.file, 0, key.number(), 0))
    }

    fn replace(&self, old: ReservationKey, new: ReservationKey) -> Result<(), ReservationError> {
        done(ioctl::pr_register(&self.file, old.number(), new.number(), 0))
    }

    fn reserve(&self, key: ReservationKey) -> Result<(), ReservationError> {
        done(ioctl::pr_reserve(&self.file, key.number(), PR_EXCLUSIVE_ACCESS))
    }

    /// The kernel passes `old_key` as our own key and `new_key` as the key to preempt, contrary to their names.
    fn preempt_and_abort(&self, old: ReservationKey, key: ReservationKey) -> Result<(), ReservationError> {
        done(ioctl::pr_preempt(&self.file, key.number(), old.number(), PR_EXCLUSIVE_ACCESS, true))
    }

    fn release(&self, key: ReservationKey) -> Result<(), ReservationError> {
        done(ioctl::pr_release(&self.file, key.number(), PR_EXCLUSIVE_ACCESS))
    }

    /// Sends the NVMe command directly: on the kernel's `IOC_PR_REGISTER` with a new key of 0, the NVMe driver replaces the key
    /// with 0 instead of unregistering.
    fn unregister(&self, key: ReservationKey) -> Result<(), ReservationError> {
        let mut data = [0; 16];
        data[..8].copy_from_slice(&key.number().to_le_bytes());
        // Reservation Register Action 1: unregister.
        let command = Command { opcode: OPCODE_REGISTER, nsid: self.nsid, cdw10: 1, ..Command::default() };
        done(ioctl::passthrough(&self.file, Queue::Io, command, &mut data))
    }
}

/// Maps a status: of linux/pr.h (`enum pr_status`), of NVMe (from passthrough, and from PR ioctls before 6.3), or an error of
/// the call.
fn done(status: Status) -> Result<(), ReservationError> {
    /// `PR_STS_*`.
    const PR_CONFLICT: u32 = 0x18;
    const PR_PATH: [u32; 3] = [0xe0000, 0xf0000, 0x10000];
    /// NVMe: status code type and code, without "do not retry", "more" and the retry delay.
    const NVME_STATUS: u32 = 0x7ff;
    const NVME_INVALID_OPCODE: u32 = 0x01;
    const NVME_INVALID_NAMESPACE: u32 = 0x0b;
    const NVME_WRITE_PROTECTED: u32 = 0x20;
    const NVME_CONFLICT: u32 = 0x83;
    let status = match status {
        Ok(0) => return Ok(()),
        Ok(status) => status,
        Err(error) => return Err(system(error)),
    };
    if PR_PATH.contains(&status) {
        return Err(ReservationError::NoPath);
    }
    Err(match status & NVME_STATUS {
        PR_CONFLICT | NVME_CONFLICT => ReservationError::Conflict,
        NVME_INVALID_OPCODE => ReservationError::Unsupported,
        NVME_INVALID_NAMESPACE => ReservationError::Gone,
        NVME_WRITE_PROTECTED => ReservationError::WriteProtected,
        // Status code type 3: path related.
        path if path >> 8 == 3 => ReservationError::NoPath,
        other => ReservationError::Status(other),
    })
}

fn system(error: io::Error) -> ReservationError {
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::EINVAL) => ReservationError::Unsupported,
        Some(libc::EBADE) => ReservationError::Conflict,
        Some(libc::EAGAIN | libc::EINTR | libc::ENOLINK | libc::ETIMEDOUT | libc::EIO | libc::ECONNRESET) => {
            ReservationError::NoPath
        }
        Some(libc::ENODEV | libc::ENXIO) => ReservationError::Gone,
        Some(libc::EPERM | libc::EACCES) => ReservationError::NotPermitted,
        _ => ReservationError::System(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_errors_of_an_appearing_or_vanishing_device_are_transient() {
        let open =
            |errno| OpenError::Open { path: String::new(), source: io::Error::from_raw_os_error(errno) };
        assert!([libc::ENOENT, libc::ENXIO, libc::ENODEV].into_iter().all(|errno| open(errno).is_passing()));
        assert!(OpenError::Another { path: String::new() }.is_passing());
        assert!(![libc::EACCES, libc::EMFILE, libc::EBUSY].into_iter().any(|errno| open(errno).is_passing()));
    }

    #[test]
    fn nvme_statuses_and_errnos_map_to_reservation_errors() {
        let error = |status: Status| done(status).expect_err("an error");
        assert!(done(Ok(0)).is_ok());
        // With and without "do not retry".
        for status in [0x18, 0x83, 0x4083] {
            assert!(matches!(error(Ok(status)), ReservationError::Conflict), "{status:#x}");
        }
        for status in [0xe0000, 0xf0000, 0x10000, 0x370, 0x371, 0x4371] {
            assert!(matches!(error(Ok(status)), ReservationError::NoPath), "{status:#x}");
        }
        assert!(matches!(error(Ok(0x4001)), ReservationError::Unsupported));
        assert!(matches!(error(Ok(0x400b)), ReservationError::Gone));
        assert!(matches!(error(Ok(0x4020)), ReservationError::WriteProtected));
        assert!(matches!(error(Ok(0x6)), ReservationError::Status(0x6)));
        let system = |errno| error(Err(io::Error::from_raw_os_error(errno)));
        assert!(matches!(system(libc::EOPNOTSUPP), ReservationError::Unsupported));
        assert!(matches!(system(libc::EAGAIN), ReservationError::NoPath));
        assert!(matches!(system(libc::ENODEV), ReservationError::Gone));
        assert!(matches!(system(libc::EPERM), ReservationError::NotPermitted));
        assert!(matches!(system(libc::ENOMEM), ReservationError::System(_)));
    }

    #[test]
    fn reservation_capabilities_are_parsed_from_rescap_bits() {
        let of = ReservationCapabilities::parse;
        assert_eq!(of(0), ReservationCapabilities { persist: false, exclusive_access: false });
        assert_eq!(of(0x7e), ReservationCapabilities { persist: false, exclusive_access: true });
        assert_eq!(of(0x05), ReservationCapabilities { persist: true, exclusive_access: true });
    }

    #[test]
    fn open_rejects_a_device_with_another_number_than_in_sysfs() {
        let namespace = Namespace {
            name: "null".into(),
            device: (259, 7),
            nsid: 1,
            uuid: None,
            nguid: None,
            size_bytes: 0,
            block_bytes: 512,
            read_only: false,
        };
        let opened = NamespaceDevice::open(Path::new("/dev"), &namespace);
        assert!(matches!(opened, Err(OpenError::Another { .. })), "{opened:?}");
        let opened = NamespaceDevice::open(Path::new("/nonexistent"), &namespace);
        assert!(matches!(opened, Err(OpenError::Open { .. })), "{opened:?}");
    }
}
