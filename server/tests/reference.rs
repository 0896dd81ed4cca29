//! The reference in docs/reference: configuration, metrics and command line as in the code.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use forebay_server::config;
use forebay_server::lanes::Lanes;
use forebay_server::metrics::{Contents, Metrics, PoolSpace, VolumeFigures};
use forebay_smb::status::NtStatus;
use forebay_smb::wire::Command;
use forebay_testing::generated;

const PACKAGE: &str = "forebay-server --test reference";

#[test]
fn every_option_of_the_configuration_is_in_the_reference() {
    let mut text = String::new();
    let mut section = "";
    for option in config::options() {
        if option.section != section {
            section = option.section;
            let _ = write!(
                text,
                "\n### `[{section}]`\n\n| key | default or example | meaning |\n|---|---|---|\n"
            );
        }
        let help = generated::cell(option.help);
        let _ = writeln!(text, "| `{}` | `{}` | {help} |", option.key, option.value);
    }
    generated::part("docs/reference/configuration.md", "forebay-server", &text, PACKAGE);
}

#[test]
fn every_metric_is_in_the_reference() {
    let pool = PoolSpace {
        pool: "p".to_owned(),
        total_bytes: 1,
        free_bytes: 1,
        provisioned_bytes: 1,
        volumes: 1,
        snapshots: 0,
        unserved: 0,
    };
    let lanes = Lanes::start(1).expect("threads");
    let volume = VolumeFigures {
        id: "v".to_owned(),
        pool: "p".to_owned(),
        claim: String::new(),
        claim_namespace: String::new(),
        persistent_volume: String::new(),
        capacity_bytes: 1,
        sessions: 0,
        open_files: 0,
        throttled: 0,
        activity: Arc::default(),
    };
    let contents = Contents { pools: vec![pool], volumes: vec![volume] };
    let metrics =
        Metrics::new("io_uring", lanes.queues().clone(), Box::new(move || contents.clone()), Vec::new());
    metrics.request(Command::READ, NtStatus::SUCCESS, Duration::from_micros(1), 1, false);
    let table = generated::metrics(&metrics.text());
    generated::part("docs/reference/metrics.md", "forebay-server", &table, PACKAGE);

    // Metrics of pools on namespaces exist only with a target: the page describes them by hand.
    let page =
        std::fs::read_to_string(generated::root().join("docs/reference/metrics.md")).expect("the page");
    let source = concat!(include_str!("../src/metrics.rs"), include_str!("../src/metrics/volumes.rs"));
    let names: BTreeSet<&str> = source
        .split('"')
        .filter(|text| text.starts_with("forebay_"))
        .filter(|text| text.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
        .collect();
    assert!(names.len() > 20, "{names:?}");
    let missing: Vec<_> = names.iter().filter(|name| !page.contains(**name)).collect();
    assert!(missing.is_empty(), "not in docs/reference/metrics.md: {missing:?}");
}

#[test]
fn the_command_line_is_in_the_reference() {
    let binary = env!("CARGO_BIN_EXE_forebay-server");
    let text = generated::help(binary, "forebay-server", Some("Options of the configuration file"));
    generated::part("docs/reference/cli.md", "forebay-server", &text, PACKAGE);
}
