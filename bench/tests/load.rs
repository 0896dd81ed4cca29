//! Runs short loads on a real server, from the command line to the JSON results.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::Command;

/// Runs `forebay-bench load` with small files and returns the results.
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
fn reads_and_writes_are_measured_against_their_floors() {
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
fn signed_and_sealed_workloads_complete_on_every_channel() {
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
    for workload in ["retinanet", "unet3d", "create", "stat", "list", "checkpoint", "safetensors"] {
        let options = ["--servers", "forebay", "--cold", "--connections", "3", "--channels", "2"];
        let results = load(&[&["--workload", workload], &options[..]].concat());
        positive(&run(&results, "forebay")["operations_per_second"]);
    }
}

#[test]
fn sessions_and_idle_connections_are_measured() {
    let results = load(&["--workload", "sessions", "--servers", "forebay"]);
    positive(&run(&results, "forebay")["operations_per_second"]);
    let results = load(&["--workload", "idle", "--servers", "forebay", "--connections", "20"]);
    let run = run(&results, "forebay");
    positive(&run["server_rss_mb"]);
    positive(&run["server_pss_mb"]);
    assert!(run["connection_rss_kb"].is_f64() && run["connection_pss_kb"].is_f64(), "{run}");
}

#[test]
fn reads_during_a_burst_are_counted_separately_also_with_churn() {
    let options = ["--servers", "forebay", "--checkpoint-size", "4M", "--depth", "2"];
    for churn in [&["--channels", "2"][..], &["--churn", "0.1"]] {
        let results = load(&[&["--workload", "mixed"], &options[..], churn].concat());
        let burst = &run(&results, "forebay")["burst"];
        positive(&burst["p99_us"]);
        positive(&burst["write_gb_per_second"]);
        assert_eq!(burst["replaced"].as_f64().unwrap() > 0.0, churn[0] == "--churn", "{burst}");
    }
}

#[test]
fn quick_suite_writes_results_plots_and_a_table() {
    let own = Path::new(env!("CARGO_BIN_EXE_forebay-bench"));
    let server = forebay_e2e::sibling::server_binary(own).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut command = Command::new(own);
    command.args(["suite", "--quick", "--only", "read-1m-c1,create,connections", "--out"]).arg(&out);
    // Without the lab's cache there is no Samba, which is not a failure.
    command.arg("--server").arg(server).arg("--dir").arg(folder.path());
    command.env("FOREBAY_CACHE", folder.path().join("no-cache"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let table = std::fs::read_to_string(out.join("results.md")).unwrap();
    assert!(table.contains("* Samba: cannot be started here"), "{table}");
    assert!(table.contains("× its own best"), "{table}");
    for name in ["read-1m-c1.json", "create.json", "connections-64.json", "read-1m-c1.svg", "connections.svg"]
    {
        assert!(out.join(name).is_file(), "{name}");
    }
}
