//! Commands that run natively in the nodes' root file system: third-party suites and clients without emulation.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::cache::{Artefact, Cache};
use crate::host;
use crate::images::{clients, root};

/// Mounts a tmpfs over the cached tree (which must never change), bind-mounts what a program needs, and changes root. It runs
/// in a separate mount namespace, so nothing is left to unmount.
const SCRIPT: &str = r#"
tree=$1 site=$2 site_at=$3 work=$4; shift 4
# The mount hides an existing empty folder, in this namespace only: nothing to remove afterwards.
base=/mnt
mount -t tmpfs -o size=2g,mode=755 forebay-root "$base"
mkdir "$base/upper" "$base/work" "$base/root"
mount -t overlay -o "lowerdir=$tree,upperdir=$base/upper,workdir=$base/work" overlay "$base/root"
root=$base/root
for folder in proc sys dev tmp; do mount --rbind "/$folder" "$root/$folder"; done
mount -t tmpfs -o mode=755 run "$root/run"
mkdir -p "$root/scratch"
if [ -n "$site" ]; then
    mkdir -p "$root/$site_at"
    mount --bind "$site" "$root/$site_at"
fi
mount --bind "$work" "$root/scratch"
for file in hosts resolv.conf; do [ -e "/etc/$file" ] && cat "/etc/$file" > "$root/etc/$file"; done
exec chroot "$root" /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    LC_ALL=C.UTF-8 TERM="${TERM:-dumb}" sh -c 'cd /scratch && exec "$@"' sh "$@"
"#;

/// The command that runs `argv` in the root, with `work` as its `/scratch` and current folder. It shares the machine's
/// network, `/proc`, `/dev` and `/tmp`. Everything it writes elsewhere is gone when it ends. It has the clients from the
/// Python index, which are fetched if they are missing. Needs root.
pub fn command(cache: &Cache, work: &Path, argv: &[String]) -> Result<Command> {
    enter(cache, Some(clients::get(cache)?), work, argv)
}

/// Fetches everything that [`command`] needs into the cache.
pub fn prepare(cache: &Cache) -> Result<()> {
    root::get(cache)?;
    clients::get(cache)?;
    Ok(())
}

/// Same, without those clients.
pub fn plain_command(cache: &Cache, work: &Path, argv: &[String]) -> Result<Command> {
    enter(cache, None, work, argv)
}

fn enter(cache: &Cache, clients: Option<Artefact>, work: &Path, argv: &[String]) -> Result<Command> {
    if !host::is_root() {
        bail!("root-exec changes root, which needs root; run it with sudo");
    }
    if argv.is_empty() {
        bail!("no command given");
    }
    let root = root::get(cache)?;
    let site = clients.as_ref().map(|clients| clients.file("site")).unwrap_or_default();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-euc", SCRIPT, "root-exec"]);
    command.arg(root.file("tree")).arg(site).arg(clients::MOUNT_POINT).arg(work).args(argv);
    // The command may use the entries until it ends, and only the caller knows when: keep them locked as long as this process
    // lives.
    std::mem::forget((root, clients));
    Ok(command)
}
