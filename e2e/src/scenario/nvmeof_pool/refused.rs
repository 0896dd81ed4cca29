//! Configurations that the server refuses without writing anything.

use std::cell::Cell;
use std::time::Duration;

use anyhow::{Result, bail, ensure};

use super::server::*;
use crate::lab::Lab;
use crate::scenario::MIB;
use crate::scenario::nvmeof::{FILE, FIRST, KEY, NQN, OTHER_KEY, TCP, UUID};

/// NVMe's Set Features, Namespace Write Protection Config (NVMe Base 5.1.25.1.32): all hosts see the namespace as read-only.
pub(in crate::scenario) const WRITE_PROTECT: &str = "import fcntl, struct, sys
f = open('/dev/' + sys.argv[1], 'rb')
fcntl.ioctl(f, 0xc0484e41, struct.pack('<BBHIIIQQII6III', 9, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0x84, int(sys.argv[2]), 0, 0, 0, 0, 0, 0))";

/// Another subsystem, below nvmet's folder.
const COPY: &str = "subsystems/nqn.2026-01.io.forebay:copy";

pub(in crate::scenario) fn refusals(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, "tcp")?;
    let target = fabric.target();
    let tried = Cell::new(0);
    let refused = |settings: Settings, says: &str| -> Result<()> {
        // Any write to the file changes its times, and new blocks change their count.
        let state = || target.run(&format!("sync {FILE}; stat -c '%s %b %z %y' {FILE}"));
        let before = state()?;
        ended_with(&fabric, FIRST, settings, says)?;
        let after = state()?;
        ensure!(before == after, "{says}: the namespace was written to: {before}, then {after}");
        tried.set(tried.get() + 1);
        Ok(())
    };
    let format = || Settings { format: true, ..Settings::epoch(1) };
    let filled = |bytes: u64, fill: &str| renew(&fabric, "tcp", bytes, None, fill);

    // The server retries for a while if it cannot connect.
    let soon = || Settings { connect_time_s: 5, ..format() };
    refused(Settings { nqn: format!("{NQN}-other"), ..soon() }, "the target has no subsystem of this name")?;
    // This instance has a different host NQN.
    refused(Settings { instance: "lab-1".into(), ..soon() }, "the target does not allow this host")?;
    refused(Settings::epoch(1), "the namespace is blank: set pool.nvmeof.format = true")?;
    filled(64 * MIB, "true")?;
    refused(format(), "a pool needs at least")?;
    filled(FILE_BYTES, &format!("mkfs.ext4 -q -F {FILE}"))?;
    refused(format(), "the namespace holds something that is no pool")?;
    filled(FILE_BYTES, &format!("printf x | dd of={FILE} bs=1 seek=1048576 conv=notrunc status=none"))?;
    refused(format(), "the namespace holds something that is no pool")?;
    filled(FILE_BYTES, &format!("mkfs.xfs -q -L forebay {FILE}"))?;
    refused(format(), "which is not that of this pool")?;

    // Read-only from the first connect.
    filled(FILE_BYTES, "true")?;
    let seen = fabric.seen(FIRST, 1, "tcp");
    fabric.connect(&seen)?;
    let host = fabric.node(FIRST);
    let protect = |value: &str| -> Result<()> {
        let name = host.run("ls /dev | grep -E '^nvme[0-9]+n1$' ")?;
        let argv = ["python3", "-c", WRITE_PROTECT, &name, value];
        let output = host.attempt(&argv, &[], Duration::from_secs(30))?;
        ensure!(output.success(), "write protection: {}", output.complaint());
        Ok(())
    };
    protect("1")?;
    fabric.ask::<usize>(&seen, "nvmeof-disconnect")?;
    refused(format(), "the namespace is read-only")?;

    // A copy of the namespace, with its UUID, that this host has connected to before.
    filled(FILE_BYTES, "true")?;
    target.run(&format!(
        "cd /sys/kernel/config/nvmet; truncate -s 64M {FILE}-copy
         mkdir -p {COPY}/namespaces/1; echo 1 > {COPY}/attr_allow_any_host
         echo -n {FILE}-copy > {COPY}/namespaces/1/device_path; echo {UUID} > {COPY}/namespaces/1/device_uuid
         echo 1 > {COPY}/namespaces/1/enable; ln -s $PWD/{COPY} ports/1/subsystems/"
    ))?;
    let (nqn, at) = (COPY.trim_start_matches("subsystems/"), target.address());
    host.run(&format!("echo transport=tcp,traddr={at},trsvcid={TCP},nqn={nqn} > /dev/nvme-fabrics"))?;
    refused(soon(), "one of them is a copy that must be given another identifier")?;
    host.run(&format!(
        "for c in /sys/class/nvme/nvme*; do if grep -qx {nqn} $c/subsysnqn; then echo 1 > $c/delete_controller; fi; done"
    ))?;
    target.run(&format!(
        "cd /sys/kernel/config/nvmet; rm ports/1/{COPY}; rmdir {COPY}/namespaces/1 {COPY}; rm {FILE}-copy"
    ))?;
    fabric.ask::<usize>(&seen, "nvmeof-disconnect")?;

    // A damaged pool of ours: the free space of its first group, at the second sector.
    filled(FILE_BYTES, "true")?;
    let server = Server::start(&fabric, FIRST, format())?;
    server.stop()?;
    drop(server);
    target.run(&format!(
        "dd if=/dev/zero of={FILE} bs=4096 seek=1 count=1 conv=notrunc status=none; sync {FILE}"
    ))?;
    fabric.ask::<usize>(&seen, "nvmeof-disconnect")?;
    ended_with(&fabric, FIRST, format(), "the file system is damaged")?;
    tried.set(tried.get() + 1);

    if renew(&fabric, "tcp", FILE_BYTES, Some(KEY), "true")? {
        refused(soon(), "the target asks for authentication")?;
        refused(Settings { key: Some(OTHER_KEY), ..soon() }, "authentication failed")?;
        let server = Server::start(&fabric, FIRST, Settings { key: Some(KEY), ..format() })?;
        server.stop()?;
    } else {
        bail!("this kernel's target has no authentication");
    }
    Ok(format!("{} cases", tried.get()))
}
