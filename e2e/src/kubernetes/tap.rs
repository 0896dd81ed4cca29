//! A TAP device: the host's end of the lab's network, in the lab's own network namespace.
#![allow(unsafe_code)]

use std::fs::File;

use anyhow::{Context, Result};
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

/// linux/if_tun.h
const TUNSETIFF: Opcode = opcode::write::<i32>(b'T', 202);
const IFF_TAP: u16 = 0x0002;
/// No header before the frames.
const IFF_NO_PI: u16 = 0x1000;

/// linux/if.h `struct ifreq`, as TUNSETIFF reads it.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

/// Creates the device, which exists until the file is closed. A read receives a frame, a write sends one.
pub(super) fn open(name: &str) -> Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .context("open /dev/net/tun (modprobe tun?)")?;
    let mut request = InterfaceRequest { name: [0; 16], flags: IFF_TAP | IFF_NO_PI, rest: [0; 22] };
    // One byte stays zero: it ends the name.
    anyhow::ensure!(
        name.len() < request.name.len(),
        "an interface's name has at most 15 bytes, not {name:?}"
    );
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: TUNSETIFF reads a struct ifreq; InterfaceRequest has its size and layout (40 bytes on 64-bit Linux), and
    // writes nothing that we read; the descriptor is open for the call.
    unsafe { ioctl(&file, Setter::<TUNSETIFF, InterfaceRequest>::new(request)) }
        .context("make a TAP device")?;
    Ok(file)
}

const _: () = assert!(size_of::<InterfaceRequest>() == 40);
