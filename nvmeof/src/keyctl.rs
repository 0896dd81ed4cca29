//! System calls on keys: add_key(2), keyctl(2).
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;

use crate::keyring::KeySerial;

/// `KEY_SPEC_THREAD_KEYRING`: destroyed when the thread ends.
pub(crate) const THREAD_KEYRING: KeySerial = KeySerial(-1);

/// A number, or an error from the kernel.
fn checked(result: libc::c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// A serial number of a key.
fn serial(result: libc::c_long) -> io::Result<KeySerial> {
    let number = checked(result)?;
    i32::try_from(number).map(KeySerial).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Creates a key in a keyring. An existing key of the same type and description is removed from it, or gets this payload.
pub(crate) fn add(kind: &CStr, description: &CStr, payload: &[u8], ring: KeySerial) -> io::Result<KeySerial> {
    // SAFETY: both strings are NUL-terminated and the length is that of the payload; the kernel reads them during the call only.
    serial(unsafe {
        libc::syscall(
            libc::SYS_add_key,
            kind.as_ptr(),
            description.as_ptr(),
            payload.as_ptr(),
            payload.len(),
            ring.0,
        )
    })
}

/// Puts a key or a keyring into a keyring.
pub(crate) fn link(key: KeySerial, ring: KeySerial) -> io::Result<()> {
    // SAFETY: numbers only.
    checked(unsafe { libc::syscall(libc::SYS_keyctl, libc::KEYCTL_LINK, key.0, ring.0) }).map(drop)
}

/// Removes a key or a keyring from a keyring.
pub(crate) fn unlink(key: KeySerial, ring: KeySerial) -> io::Result<()> {
    // SAFETY: numbers only.
    checked(unsafe { libc::syscall(libc::SYS_keyctl, libc::KEYCTL_UNLINK, key.0, ring.0) }).map(drop)
}

/// Reads a key's payload, or a keyring's serial numbers: returns the length, and fills the buffer if the data fits.
pub(crate) fn read(key: KeySerial, buffer: &mut [u8]) -> io::Result<usize> {
    with_buffer(libc::KEYCTL_READ, key, buffer)
}

/// Reads `type;uid;gid;permissions;description` and a NUL byte, in the same way.
pub(crate) fn describe(key: KeySerial, buffer: &mut [u8]) -> io::Result<usize> {
    with_buffer(libc::KEYCTL_DESCRIBE, key, buffer)
}

fn with_buffer(operation: u32, key: KeySerial, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the kernel writes to the buffer at most as many bytes as the given length, during the call only.
    checked(unsafe { libc::syscall(libc::SYS_keyctl, operation, key.0, buffer.as_mut_ptr(), buffer.len()) })
}
