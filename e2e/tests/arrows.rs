//! The allowed dependencies between the rooms (ARCHITECTURE.md), compared with `cargo metadata`.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Room → the rooms it may use. Development dependencies count, too.
const ARROWS: &[(&str, &[&str])] = &[
    ("forebay-proto", &[]),
    ("forebay-smb", &["forebay-smbdirect"]),
    ("forebay-smbdirect", &[]),
    ("forebay-rdma", &[]),
    ("forebay-testing", &[]),
    ("forebay-nvmeof", &["forebay-testing"]),
    ("forebay-target", &["forebay-nvmeof", "forebay-testing"]),
    (
        "forebay-server",
        &[
            "forebay-proto",
            "forebay-smb",
            "forebay-smbdirect",
            "forebay-rdma",
            "forebay-nvmeof",
            "forebay-inventory",
            "forebay-testing",
        ],
    ),
    ("forebay-api", &[]),
    ("forebay-inventory", &[]),
    ("forebay-csi", &["forebay-proto", "forebay-api", "forebay-inventory", "forebay-testing", "forebay-e2e"]),
    (
        "forebay-operator",
        &["forebay-proto", "forebay-api", "forebay-nvmeof", "forebay-testing", "forebay-e2e"],
    ),
    ("kubectl-forebay", &["forebay-api", "forebay-inventory", "forebay-testing"]),
    (
        "forebay-e2e",
        &[
            "forebay-proto",
            "forebay-smb",
            "forebay-smbdirect",
            "forebay-rdma",
            "forebay-nvmeof",
            "forebay-inventory",
            "forebay-testing",
        ],
    ),
    ("forebay-bench", &["forebay-e2e", "forebay-smb"]),
];

fn workspace() -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("metadata is JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let name = |v: &serde_json::Value| v["name"].as_str().expect("a name").to_owned();
    let rooms: BTreeSet<String> = packages.iter().map(name).collect();
    packages
        .iter()
        .map(|p| {
            let uses = p["dependencies"].as_array().expect("dependencies").iter().map(name);
            (name(p), uses.filter(|d| rooms.contains(d)).collect())
        })
        .collect()
}

#[test]
fn crates_depend_only_on_crates_allowed_by_the_architecture() {
    let rooms = workspace();
    let allowed: BTreeMap<&str, &[&str]> = ARROWS.iter().copied().collect();
    let known: BTreeSet<&str> = allowed.keys().copied().collect();
    assert_eq!(rooms.keys().map(String::as_str).collect::<BTreeSet<_>>(), known, "a room without arrows");
    for (room, uses) in &rooms {
        for used in uses {
            assert!(allowed[room.as_str()].contains(&used.as_str()), "{room} must not use {used}");
        }
    }
}

#[test]
fn the_protocol_cores_have_no_io_runtime_or_randomness() {
    for core in ["forebay-smb", "forebay-smbdirect"] {
        let output = Command::new(env!("CARGO"))
            .args(["tree", "-p", core, "-e", "normal", "--prefix", "none", "--offline"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .expect("cargo runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let tree = String::from_utf8_lossy(&output.stdout);
        for forbidden in ["tokio", "mio", "io-uring", "rustix", "rand", "tracing", "forebay-server"] {
            assert!(
                !tree.lines().any(|l| l.split_whitespace().next() == Some(forbidden)),
                "{core} must not depend on {forbidden}:\n{tree}"
            );
        }
    }
}
