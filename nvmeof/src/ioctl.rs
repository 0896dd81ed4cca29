//! The ioctls for persistent reservations (linux/pr.h) and NVMe commands (linux/nvme_ioctl.h). Only this module and `keyctl`
//! contain unsafe code.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::limits::COMMAND_TIMEOUT_MS;

/// A request with a structure of `T` that the kernel reads (`_IOW`).
const fn write_request<T>(group: u8, number: u8) -> libc::c_ulong {
    request::<T>(1, group, number)
}

/// A request with a structure of `T` that, according to its number, the kernel writes (`_IOR`).
const fn read_request<T>(group: u8, number: u8) -> libc::c_ulong {
    request::<T>(2, group, number)
}

/// A request with a structure of `T` that the kernel reads and writes (`_IOWR`).
const fn read_write_request<T>(group: u8, number: u8) -> libc::c_ulong {
    request::<T>(3, group, number)
}

/// asm-generic/ioctl.h: direction, size, group and number.
const fn request<T>(direction: libc::c_ulong, group: u8, number: u8) -> libc::c_ulong {
    direction << 30
        | (size_of::<T>() as libc::c_ulong) << 16
        | (group as libc::c_ulong) << 8
        | number as libc::c_ulong
}

/// `struct pr_reservation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PrReservation {
    key: u64,
    kind: u32,
    flags: u32,
}

/// `struct pr_registration`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PrRegistration {
    old_key: u64,
    new_key: u64,
    flags: u32,
    padding: u32,
}

/// `struct pr_preempt`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PrPreempt {
    old_key: u64,
    new_key: u64,
    kind: u32,
    flags: u32,
}

/// `struct pr_clear`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PrClear {
    key: u64,
    flags: u32,
    padding: u32,
}

/// `struct nvme_passthru_cmd`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PassthroughCommand {
    opcode: u8,
    flags: u8,
    reserved: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    address: u64,
    metadata_bytes: u32,
    data_bytes: u32,
    cdw10: u32,
    cdw11: u32,
    cdw12: u32,
    cdw13: u32,
    cdw14: u32,
    cdw15: u32,
    timeout_ms: u32,
    result: u32,
}

const IOC_PR_REGISTER: libc::c_ulong = write_request::<PrRegistration>(b'p', 200);
const IOC_PR_RESERVE: libc::c_ulong = write_request::<PrReservation>(b'p', 201);
const IOC_PR_RELEASE: libc::c_ulong = write_request::<PrReservation>(b'p', 202);
const IOC_PR_PREEMPT: libc::c_ulong = write_request::<PrPreempt>(b'p', 203);
const IOC_PR_PREEMPT_ABORT: libc::c_ulong = write_request::<PrPreempt>(b'p', 204);
const IOC_PR_CLEAR: libc::c_ulong = write_request::<PrClear>(b'p', 205);
const NVME_IOCTL_ADMIN_CMD: libc::c_ulong = read_write_request::<PassthroughCommand>(b'N', 0x41);
const NVME_IOCTL_IO_CMD: libc::c_ulong = read_write_request::<PassthroughCommand>(b'N', 0x43);
/// `XFS_IOC_GOINGDOWN`, named `FS_IOC_SHUTDOWN` in other file systems: the kernel reads the argument, although the number says
/// otherwise.
const FS_IOC_SHUTDOWN: libc::c_ulong = read_request::<u32>(b'X', 125);

/// The result of an ioctl of this module: 0, or a status of the device or the kernel's PR layer.
pub(crate) type Status = io::Result<u32>;

/// The queue that a command is sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    Admin,
    Io,
}

/// A command that transfers data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Command {
    pub(crate) opcode: u8,
    pub(crate) nsid: u32,
    pub(crate) cdw10: u32,
    pub(crate) cdw11: u32,
    pub(crate) cdw12: u32,
    pub(crate) cdw13: u32,
}

/// # Safety
/// `argument` must be the structure that `request` is defined with, and all that it points to must be valid for what the kernel
/// does with it.
unsafe fn call<T>(file: &File, request: libc::c_ulong, argument: &mut T) -> Status {
    loop {
        // SAFETY: the descriptor is open for as long as `file` is borrowed, the argument is a valid, exclusively borrowed `T`,
        // and the caller guarantees that the request takes it.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, std::ptr::from_mut(argument)) };
        if let Ok(status) = u32::try_from(result) {
            return Ok(status);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

pub(crate) fn pr_register(file: &File, old_key: u64, new_key: u64, flags: u32) -> Status {
    let mut argument = PrRegistration { old_key, new_key, flags, padding: 0 };
    // SAFETY: IOC_PR_REGISTER takes a pr_registration, which points to nothing.
    unsafe { call(file, IOC_PR_REGISTER, &mut argument) }
}

pub(crate) fn pr_reserve(file: &File, key: u64, kind: u32) -> Status {
    let mut argument = PrReservation { key, kind, flags: 0 };
    // SAFETY: IOC_PR_RESERVE takes a pr_reservation, which points to nothing.
    unsafe { call(file, IOC_PR_RESERVE, &mut argument) }
}

pub(crate) fn pr_release(file: &File, key: u64, kind: u32) -> Status {
    let mut argument = PrReservation { key, kind, flags: 0 };
    // SAFETY: IOC_PR_RELEASE takes a pr_reservation, which points to nothing.
    unsafe { call(file, IOC_PR_RELEASE, &mut argument) }
}

pub(crate) fn pr_preempt(file: &File, old_key: u64, new_key: u64, kind: u32, abort: bool) -> Status {
    let mut argument = PrPreempt { old_key, new_key, kind, flags: 0 };
    let request = if abort { IOC_PR_PREEMPT_ABORT } else { IOC_PR_PREEMPT };
    // SAFETY: both requests take a pr_preempt, which points to nothing.
    unsafe { call(file, request, &mut argument) }
}

pub(crate) fn pr_clear(file: &File, key: u64) -> Status {
    let mut argument = PrClear { key, flags: 0, padding: 0 };
    // SAFETY: IOC_PR_CLEAR takes a pr_clear, which points to nothing.
    unsafe { call(file, IOC_PR_CLEAR, &mut argument) }
}

/// Shuts down the file system that contains this directory: from now on, it fails with EIO, and nothing that it has in memory
/// is written, not even its log. It can then be unmounted, no matter which host has its device.
///
/// # Errors
/// If the file system does not support this, or we lack CAP_SYS_ADMIN.
pub fn shut_down_file_system(directory: &File) -> io::Result<()> {
    /// `XFS_FSOP_GOING_FLAGS_NOLOGFLUSH`.
    const WITHOUT_LOG: u32 = 2;
    let mut argument = WITHOUT_LOG;
    // SAFETY: the request takes a u32 by reference.
    unsafe { call(directory, FS_IOC_SHUTDOWN, &mut argument) }.map(drop)
}

/// Sends a command with this data, which a read command overwrites. The status is an NVMe status, 0 for success.
pub(crate) fn passthrough(file: &File, queue: Queue, command: Command, data: &mut [u8]) -> Status {
    let too_long = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let Command { opcode, nsid, cdw10, cdw11, cdw12, cdw13 } = command;
    let mut argument = PassthroughCommand {
        opcode,
        nsid,
        address: data.as_mut_ptr() as u64,
        data_bytes: u32::try_from(data.len()).map_err(too_long)?,
        cdw10,
        cdw11,
        cdw12,
        cdw13,
        timeout_ms: COMMAND_TIMEOUT_MS,
        ..PassthroughCommand::default()
    };
    let request = match queue {
        Queue::Admin => NVME_IOCTL_ADMIN_CMD,
        Queue::Io => NVME_IOCTL_IO_CMD,
    };
    // SAFETY: both requests take an nvme_passthru_cmd. Its only address is that of `data`, exclusively borrowed until the call
    // returns; the kernel maps or copies at most `data_bytes` of it, regardless of the length in the command itself, and
    // releases it before it returns, even if the command times out.
    unsafe { call(file, request, &mut argument) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ioctl_numbers_match_the_kernel_headers() {
        assert_eq!(IOC_PR_REGISTER, 0x4018_70c8);
        assert_eq!(IOC_PR_RESERVE, 0x4010_70c9);
        assert_eq!(IOC_PR_RELEASE, 0x4010_70ca);
        assert_eq!(IOC_PR_PREEMPT, 0x4018_70cb);
        assert_eq!(IOC_PR_PREEMPT_ABORT, 0x4018_70cc);
        assert_eq!(IOC_PR_CLEAR, 0x4010_70cd);
        assert_eq!(NVME_IOCTL_ADMIN_CMD, 0xc048_4e41);
        assert_eq!(NVME_IOCTL_IO_CMD, 0xc048_4e43);
        assert_eq!(FS_IOC_SHUTDOWN, 0x8004_587d);
    }

    #[test]
    fn ioctls_fail_with_enotty_on_a_non_block_device() {
        let file = File::open("/dev/null").expect("/dev/null exists");
        for result in [
            pr_register(&file, 0, 1, 0),
            pr_reserve(&file, 1, 2),
            pr_release(&file, 1, 2),
            pr_preempt(&file, 1, 2, 2, true),
            pr_clear(&file, 1),
            passthrough(&file, Queue::Admin, Command::default(), &mut [0; 8]),
        ] {
            assert_eq!(result.expect_err("not a block device").raw_os_error(), Some(libc::ENOTTY));
        }
    }
}
