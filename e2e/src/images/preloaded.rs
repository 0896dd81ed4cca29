//! The writable disk of a Kubernetes node with all images imported: a guest under emulation hashes 20 MB per second, so
//! importing would take minutes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{Artefact, Cache, Recipe};
use crate::progress::step;
use crate::{host, native};

/// The nodes' own containerd, running natively in the nodes' root file system, imports the images into a folder, which
/// becomes the disk. /scratch is that folder; /scratch/in contains the node's disk and the archives.
const SCRIPT: &str = r#"
cd /scratch
export PATH=/scratch/in/bin:$PATH
cat > /tmp/$$.toml <<CONFIG
version = 3
root = "/scratch/disk/var/lib/containerd"
state = "/run/containerd"
imports = []
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.nri.v1.nri"]
[grpc]
address = "/run/containerd/containerd.sock"
CONFIG
mkdir -p disk/var/lib/containerd
containerd -c /tmp/$$.toml > /scratch/containerd.log 2>&1 &
daemon=$!
trap 'kill $daemon; wait $daemon || true; rm -f /tmp/$$.toml' EXIT
tries=0
until ctr version >/dev/null 2>&1; do
    tries=$((tries + 1))
    if [ $tries -gt 300 ]; then tail -n 20 containerd.log >&2; exit 1; fi
    sleep 0.1
done
for image in in/images/*.tar; do
    ctr -n k8s.io images import "$image" >/dev/null
    echo "/k8s/images/${image##*/}" >> disk/imported
done
"#;

/// The cache entry: `scratch.ext4` of this size, sparse. `None` if this user cannot build it: then the guests import.
pub fn get(cache: &Cache, node: &Artefact, archives: &[PathBuf], bytes: u64) -> Result<Option<Artefact>> {
    if !host::is_root() {
        return Ok(None);
    }
    let mut hashes = String::new();
    if !archives.is_empty() {
        hashes = host::run(Command::new("sha256sum").args(archives))?;
        // Without their paths.
        hashes = hashes.lines().filter_map(|line| Some(format!("{}\n", line.split(' ').next()?))).collect();
    }
    let recipe = Recipe::default()
        .with("node", node.key())
        .with("archives", hashes)
        .with("bytes", bytes.to_string())
        .with("script", SCRIPT)
        .with("layout", "1");
    let entry = cache.get("preloaded", &recipe, |into| {
        step("importing the images into the nodes' disk", || make(cache, node, archives, bytes, into))
    })?;
    // Each build of our sources creates a new entry, and they are large.
    let own = format!("preloaded/{}", entry.key());
    cache.prune(|name| !name.starts_with("preloaded/") || name == own)?;
    Ok(Some(entry))
}

fn make(cache: &Cache, node: &Artefact, archives: &[PathBuf], bytes: u64, into: &Path) -> Result<()> {
    let work = into.join("work");
    let (given, disk) = (work.join("in"), work.join("disk"));
    fs::create_dir_all(&disk)?;
    host::run(
        Command::new("fsck.erofs").arg(format!("--extract={}", given.display())).arg(node.file("node.erofs")),
    )
    .context("unpack the nodes' disk")?;
    for (index, archive) in archives.iter().enumerate() {
        fs::copy(archive, given.join("images").join(format!("archive-{index}.tar")))
            .with_context(|| format!("copy {}", archive.display()))?;
    }
    let argv = ["sh", "-euc", SCRIPT].map(str::to_owned);
    // The cluster's room, in which this runs, has no access to the Python index.
    host::run(&mut native::plain_command(cache, &work, &argv)?).context("import the images")?;
    let image = into.join("scratch.ext4");
    fs::File::create(&image)?.set_len(bytes)?;
    host::run(
        Command::new("mkfs.ext4")
            // Written once, copied often: no journal to write, nothing to initialise later.
            .args(["-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,discard", "-d"])
            .arg(&disk)
            .arg(&image),
    )?;
    fs::remove_dir_all(&work)?;
    Ok(())
}
