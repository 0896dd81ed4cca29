//! A short load on a real server: the whole path from the command line to the JSON.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::Command;

/// Runs `forebay-bench load` with small files; the results.
fn load(arguments: &[&str]) -> serde_json::Value {
    let own = Path::new(env!("CARGO_BIN_EXE_forebay-bench"));
    let server = forebay_e2e::sibling::server_binary(own).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let mut command = Command::new(own);
    command.args(["load", "--runs", "1", "--time", "0.5", "--file-size", "1M", "--files", "3"]);
    command.args(arguments).arg("--server").arg(server);
    command.arg("--dir").arg(folder.path()).arg("--json").arg(&json);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("forebay"), "the table");
    serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap()
}

/// The first run of one server.
fn run<'a>(results: &'a serde_json::Value, server: &str) -> &'a serde_json::Value {
    let series = results["series"].as_array().unwrap();
    &series.iter().find(|series| series["server"] == server).unwrap()["runs"][0]
}

fn positive(value: &serde_json::Value) {
    assert!(value.as_f64().unwrap() > 0.0, "{value}");
}

#[test]
fn reads_and_writes_are_measured_beside_their_floors() {
    for (workload, floor) in [("read", "floor-read"), ("write", "floor-write")] {
        let servers = format!("forebay,{floor}");
        let results = load(&["--workload", workload, "--io-size", "64K", "--servers", &servers]);
        for server in ["forebay", floor] {
            let run = run(&results, server);
            positive(&run["gb_per_second"]);
            positive(&run["p99_us"]);
            positive(&run["server_peak_mb"]);
        }
        assert_eq!(results["ratios"][0]["to"], floor);
    }
}

#[test]
fn signed_and_sealed_messages_are_understood_on_every_channel() {
    for how in ["--sign", "--seal"] {
        for (workload, channels) in [("randread", "1"), ("randwrite", "2")] {
            let common = ["--io-size", "4K", "--servers", "forebay", "--channels", channels];
            let results = load(&[&["--workload", workload, how], &common[..]].concat());
            positive(&run(&results, "forebay")["operations_per_second"]);
        }
    }
}

#[test]
fn whole_files_and_metadata_are_measured() {
    for workload in ["retinanet", "unet3d", "create", "list", "checkpoint"] {
        let options = ["--servers", "forebay", "--cold", "--connections", "3", "--channels", "2"];
        let results = load(&[&["--workload", workload], &options[..]].concat());
        positive(&run(&results, "forebay")["operations_per_second"]);
    }
}
