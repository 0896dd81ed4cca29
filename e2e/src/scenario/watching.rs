//! Directories that a program on one node watches (`CIFS_IOC_NOTIFY_INFO` of cifs.ko) while the other node changes them.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::{MIB, ONE, Scenario, TWO, scenario};
use crate::site::Site;

/// Waits for one response and prints a line for each change: action and name. The request is `_IOWR(0xCF, 11, struct
/// smb3_notify_info)`, packed: completion filter (names), tree, room; then the room.
const WATCH: &str = r#"
import fcntl, os, struct, sys
room = 4096
buffer = bytearray(struct.pack("<IBI", 3, 1, room)) + bytearray(room)
directory = os.open(sys.argv[1], os.O_RDONLY)
print("watching", flush=True)
fcntl.ioctl(directory, 0xC009CF0B, buffer, True)
data = bytes(buffer[9:9 + struct.unpack_from("<I", buffer, 5)[0]])
while data:
    following, action, length = struct.unpack_from("<III", data)
    print(action, data[12:12 + length].decode("utf-16-le"), flush=True)
    data = data[following:] if following else b""
"#;

const SOON: Duration = Duration::from_secs(20);
/// `FILE_ACTION_ADDED`.
const ADDED: &str = "1";

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![scenario("a program is notified of changes by the other node", reported)]
}

fn reported(site: &Site) -> Result<String> {
    let volume = site.volume(64 * MIB)?;
    let one = site.mount(site.node(ONE), &volume, &[])?;
    let two = site.mount(site.node(TWO), &volume, &[])?;
    for (watcher, other) in [(&one, &two), (&two, &one)] {
        watcher.node().run(&format!("mkdir -p {}", watcher.join("d/sub")))?;
        let directory = watcher.join("d");
        let mut process = watcher.node().spawn(&["python3", "-c", WATCH, &directory])?;
        process.wait_for("it watches", SOON, |lines| lines == ["watching"])?;
        // It may have printed that before its request reached the server.
        let mut made = 0;
        let name = other.node().name().to_owned();
        watcher.node().wait_until("the watcher is notified", SOON, || {
            made += 1;
            let file = format!("d/sub/{name}{made}");
            other.node().run(&format!("touch {}", other.join(&file)))?;
            Ok(process
                .wait_for("(it is notified)", Duration::from_millis(500), |lines| lines.len() > 1)
                .is_ok())
        })?;
        let lines = process.finish(SOON)?;
        let is_one = |line: &String| line.starts_with(&format!("{ADDED} sub\\{name}"));
        ensure!(lines[1..].iter().all(is_one), "the watcher says {lines:?}");
    }
    one.unmount()?;
    two.unmount()?;
    site.delete(&volume)?;
    Ok("each way".into())
}
