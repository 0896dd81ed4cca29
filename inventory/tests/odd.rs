//! Trees that are odd, broken or hostile: what can be read is reported, and nothing panics.
#![allow(clippy::unwrap_used)]

mod tree;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_inventory::Host;
use proptest::prelude::*;
use tree::{read, unpacked};

const TREES: [&str; 9] = [
    include_str!("trees/connectx-roce.tree"),
    include_str!("trees/connectx-infiniband.tree"),
    include_str!("trees/connectx3-two-ports.tree"),
    include_str!("trees/broadcom.tree"),
    include_str!("trees/intel.tree"),
    include_str!("trees/rxe.tree"),
    include_str!("trees/siw.tree"),
    include_str!("trees/stacked.tree"),
    include_str!("trees/nvme.tree"),
];

fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> = fs::read_dir(dir).unwrap().flatten().collect();
    entries.sort_by_key(fs::DirEntry::path);
    for entry in entries {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            files(&entry.path(), found);
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
}

#[test]
fn missing_files_and_directories_in_their_place_are_tolerated() {
    for text in TREES {
        let dir = unpacked(&[text]);
        let whole = Host::at(dir.path()).read();
        let mut paths = Vec::new();
        files(dir.path(), &mut paths);
        for path in paths {
            let content = fs::read(&path).unwrap();
            fs::remove_file(&path).unwrap();
            let without = Host::at(dir.path()).read();
            // At most one device is missing: the one with an unknown type or transport.
            assert!(without.rdma.len() + 1 >= whole.rdma.len(), "{}", path.display());
            assert!(without.nvme.len() + 1 >= whole.nvme.len(), "{}", path.display());
            assert_eq!(without.oddities, [], "a missing file is no oddity: {}", path.display());
            fs::create_dir(&path).unwrap();
            let instead = Host::at(dir.path()).read();
            assert!(instead.rdma.len() + 1 >= whole.rdma.len(), "{}", path.display());
            fs::remove_dir(&path).unwrap();
            fs::write(&path, content).unwrap();
        }
        assert_eq!(Host::at(dir.path()).read(), whole);
    }
}

#[test]
fn symlink_loops_hide_only_the_affected_entries() {
    let dir = unpacked(&[TREES[0]]);
    let device = dir.path().join("sys/class/infiniband/mlx5_9");
    symlink("mlx5_9", &device).unwrap();
    let state = dir.path().join("sys/class/infiniband/mlx5_0/ports/1/state");
    fs::remove_file(&state).unwrap();
    symlink("state", &state).unwrap();
    symlink("..", dir.path().join("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/up")).unwrap();
    let inventory = Host::at(dir.path()).read();
    assert_eq!(inventory.rdma.len(), 2);
    assert_eq!(inventory.rdma[0].ports[0].state, "");
    assert_eq!(inventory.rdma[0].ports[0].rate_mbps, 400_000);
    let odd: Vec<&str> = inventory.oddities.iter().map(|o| o.path.as_str()).collect();
    assert!(odd.contains(&"sys/class/infiniband/mlx5_0/ports/1/state"), "{odd:?}");
    assert!(odd.iter().any(|p| p.starts_with("sys/class/infiniband/mlx5_9")), "{odd:?}");
}

#[test]
fn unreadable_files_are_reported_as_oddities() {
    let dir = unpacked(&[TREES[5]]);
    let rate = dir.path().join("sys/class/infiniband/rxe0/ports/1/rate");
    fs::set_permissions(&rate, fs::Permissions::from_mode(0o000)).unwrap();
    // For root no file is unreadable.
    if fs::read(&rate).is_ok() {
        fs::remove_file(&rate).unwrap();
        fs::create_dir(&rate).unwrap();
    }
    let inventory = Host::at(dir.path()).read();
    assert_eq!(inventory.rdma[0].ports[0].rate_mbps, 0);
    assert_eq!(inventory.rdma[0].ports[0].state, "ACTIVE");
    assert_eq!(inventory.oddities.len(), 1, "{:?}", inventory.oddities);
    assert_eq!(inventory.oddities[0].path, "sys/class/infiniband/rxe0/ports/1/rate");
}

#[test]
fn pipe_in_place_of_a_file_does_not_block_the_reader() {
    let dir = unpacked(&[TREES[5]]);
    let state = dir.path().join("sys/class/infiniband/rxe0/ports/1/state");
    fs::remove_file(&state).unwrap();
    let made = std::process::Command::new("mkfifo").arg(&state).status().unwrap();
    assert!(made.success());
    let root = dir.path().to_owned();
    let reader = std::thread::spawn(move || Host::at(root).read());
    let started = Instant::now();
    while !reader.is_finished() {
        assert!(started.elapsed() < Duration::from_secs(60), "it waits for a writer");
        std::thread::yield_now();
    }
    assert_eq!(reader.join().unwrap().rdma[0].ports[0].state, "");
}

#[test]
fn network_device_names_cannot_escape_the_tree() {
    let hostile = TREES[5].replace("\teth1", "\t../../../../etc");
    let inventory = read(&[&hostile]);
    // The name is derived from another source than the hostile text.
    assert_eq!(inventory.rdma[0].ports[0].netdevs, ["eth1"]);
}

#[test]
fn garbage_values_are_reported_and_ignored() {
    let garbage = TREES[0]
        .replace("400 Gb/sec (4X NDR)", "\u{fffd}\u{7}fast")
        .replace("numa_node\t1", "numa_node\tone");
    let inventory = read(&[&garbage]);
    assert_eq!(inventory.rdma[0].ports[0].rate_mbps, 0);
    assert_eq!(inventory.rdma[0].numa_node, None);
    assert!(inventory.oddities.iter().any(|o| o.what.contains("is not a rate")), "{:?}", inventory.oddities);
    assert!(inventory.oddities.iter().any(|o| o.what.contains("\"one\"")), "{:?}", inventory.oddities);
}

#[test]
fn oversized_files_and_directories_are_truncated() {
    let dir = unpacked(&[TREES[5]]);
    let node_desc = dir.path().join("sys/class/infiniband/rxe0/hca_type");
    fs::write(node_desc, "x".repeat(1 << 20)).unwrap();
    let ndevs = dir.path().join("sys/class/infiniband/rxe0/ports/1/gid_attrs/ndevs");
    for index in 0..600 {
        fs::write(ndevs.join(index.to_string()), format!("v{index}")).unwrap();
    }
    let inventory = Host::at(dir.path()).read();
    assert_eq!(inventory.rdma[0].board.as_ref().unwrap().len(), 128);
    assert!(inventory.rdma[0].ports[0].netdevs.len() <= 257);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_file_contents_are_read_without_panic(
        tree in 0..TREES.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), content()), 1..12),
    ) {
        let dir = unpacked(&[TREES[tree]]);
        let mut paths = Vec::new();
        files(dir.path(), &mut paths);
        for (index, content) in &changes {
            fs::write(index.get(&paths), content).unwrap();
        }
        let inventory = Host::at(dir.path()).read();
        let addresses = forebay_inventory::Addresses::new();
        for device in &inventory.rdma {
            for port in &device.ports {
                let assessment = forebay_inventory::assess(device, port, &inventory.netdevs, &addresses);
                // Without an address nothing is usable.
                prop_assert!(assessment.unusable.is_some());
                for netdev in &port.netdevs {
                    prop_assert!(!netdev.contains('/') && netdev.len() < 16);
                }
            }
            let texts = [&device.driver, &device.board, &device.firmware];
            prop_assert!(texts.iter().all(|t| t.as_ref().is_none_or(|t| t.chars().count() <= 128)));
        }
    }
}

/// Arbitrary bytes, and numbers and texts near the limits of the expected formats.
fn content() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..64),
        any::<i128>().prop_map(|n| n.to_string().into_bytes()),
        "[0-9.]{0,12} Gb/sec.{0,8}".prop_map(String::into_bytes),
        "[0-9]{1,2}:.{0,8}".prop_map(String::into_bytes),
        "[0-9a-f:]{0,40}".prop_map(String::into_bytes),
        "0x[0-9a-f]{0,40}".prop_map(String::into_bytes),
    ]
}
