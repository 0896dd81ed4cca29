//! The kernel's log messages during a connect.
//!
//! A refused connect fails with EIO or EINVAL whatever the reason; the reason is only in the kernel's log. If the log cannot be
//! read, the error lists the possible reasons.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::limits::{LOG_LINES_MAX, LOG_RECORD_BYTES_MAX, TEXT_CHARS_MAX};

/// The log from a given moment on.
pub(crate) struct KernelLog(Option<File>);

impl KernelLog {
    /// Starts at the current end of the log. Empty if the log cannot be read.
    pub(crate) fn from_now(kmsg: &Path) -> Self {
        let open = || -> std::io::Result<File> {
            let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(kmsg)?;
            file.seek(SeekFrom::End(0))?;
            Ok(file)
        };
        Self(open().ok())
    }

    /// The messages of NVMe since then, oldest first.
    pub(crate) fn lines(self) -> Vec<String> {
        let Some(mut file) = self.0 else { return Vec::new() };
        let mut lines = Vec::new();
        let mut record = vec![0; LOG_RECORD_BYTES_MAX];
        for _ in 0..LOG_LINES_MAX {
            match file.read(&mut record) {
                Ok(0) => break,
                Ok(count) => lines.extend(message(&record[..count])),
                // Records were overwritten before we read them: the next read continues after them.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        lines
    }
}

/// The text of one record of `/dev/kmsg` (Documentation/ABI/testing/dev-kmsg), if it is from NVMe.
fn message(record: &[u8]) -> Option<String> {
    let record = String::from_utf8_lossy(record);
    let (_, text) = record.split_once(';')?;
    let line = text.lines().next()?;
    let line: String = line.chars().filter(|c| !c.is_control()).take(TEXT_CHARS_MAX * 2).collect();
    line.starts_with("nvme").then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kmsg_parser_keeps_only_the_text_of_nvme_messages() {
        let record = b"3,1234,5678,-;nvme nvme0: failed to connect queue: 0 ret=16772\n SUBSYSTEM=nvme\n DEVICE=c1:2\n";
        assert_eq!(message(record).as_deref(), Some("nvme nvme0: failed to connect queue: 0 ret=16772"));
        assert_eq!(message(b"6,1,2,-;nvme_fabrics: unknown\n").as_deref(), Some("nvme_fabrics: unknown"));
        assert_eq!(message(b"6,1,2,-;eth0: link up\n"), None);
        assert_eq!(message(b"garbage"), None);
        assert_eq!(message(b"\xff;"), None);
    }

    #[test]
    fn unreadable_kernel_log_is_empty() {
        assert_eq!(KernelLog::from_now(Path::new("/nonexistent/kmsg")).lines(), Vec::<String>::new());
    }
}
