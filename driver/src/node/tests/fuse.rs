//! A FUSE file system that is served by the test: it responds to statfs on request.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::mpsc;
use std::thread;

use forebay_testing::{Need, skip};
use rustix::mount::MountAttrFlags;

use crate::mount::{self, Setting};

/// The kernel's `linux/fuse.h`.
const STATFS: u32 = 17;
const INIT: u32 = 26;
/// Smallest buffer that the kernel accepts (FUSE_MIN_READ_BUFFER).
const BUFFER_BYTES: usize = 8192;

/// A mount without a server. The file system ends with the device.
pub(super) fn mount(source: &str, at: &Path) -> Option<File> {
    let device = match OpenOptions::new().read(true).write(true).open("/dev/fuse") {
        Ok(device) => device,
        Err(error) => {
            skip(Need::Fuse, format!("open /dev/fuse: {error}"));
            return None;
        }
    };
    let fd = device.as_raw_fd().to_string();
    let settings = [
        Setting::Value("source", source),
        Setting::Value("fd", &fd),
        Setting::Value("rootmode", "40000"),
        Setting::Value("user_id", "0"),
        Setting::Value("group_id", "0"),
    ];
    mount::mount("fuse", source, &settings, MountAttrFlags::empty(), at).expect("mounted");
    Some(device)
}

/// A mount that is served slowly.
pub(super) struct Slow {
    /// Signalled for each statfs that has arrived.
    pub(super) asked: mpsc::Receiver<()>,
    /// Each message triggers one statfs response.
    pub(super) answer: mpsc::Sender<()>,
}

impl Slow {
    pub(super) fn mount(source: &str, at: &Path) -> Option<Self> {
        let mut device = mount(source, at)?;
        let (reported, asked) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        // Ends with the file system, or when the test drops its channel ends.
        thread::spawn(move || while serve(&mut device, &reported, &answers).is_ok() {});
        Some(Self { asked, answer })
    }
}

fn serve(device: &mut File, reported: &mpsc::Sender<()>, answers: &mpsc::Receiver<()>) -> io::Result<()> {
    let mut request = [0; BUFFER_BYTES];
    let _ = device.read(&mut request)?;
    let number = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().expect("four bytes"));
    let body = match number(4) {
        INIT => {
            // major, minor, and the rest of struct fuse_init_out
            let mut body = vec![0; 64];
            body[..4].copy_from_slice(&7u32.to_ne_bytes());
            body[4..8].copy_from_slice(&31u32.to_ne_bytes());
            Some(body)
        }
        STATFS => {
            let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
            reported.send(()).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
            answers.recv().map_err(gone)?;
            let mut body = vec![0; 80];
            for (at, blocks) in [(0, 100u64), (8, 60), (16, 50)] {
                body[at..at + 8].copy_from_slice(&blocks.to_ne_bytes());
            }
            for at in [40, 48] {
                body[at..at + 4].copy_from_slice(&4096u32.to_ne_bytes());
            }
            Some(body)
        }
        _ => None,
    };
    let (error, body) = body.map_or((-libc::ENOSYS, Vec::new()), |body| (0, body));
    let length = u32::try_from(16 + body.len()).expect("short");
    let answer = [&length.to_ne_bytes()[..], &error.to_ne_bytes(), &request[8..16], &body].concat();
    device.write_all(&answer)
}
