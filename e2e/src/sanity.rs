//! csi-sanity, the conformance suite for CSI drivers, against the real driver and server in a guest.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::cache::Cache;
use crate::kubernetes::tools::{self, Tools};
use crate::lab::{Lab, storage};
use crate::progress::step;
use crate::site::{ADMIN_SOCKET, Kind, STORAGE, Site, check_built};

const SOCKET: &str = "/run/forebay/sanity.sock";
const SECRETS: &str = "/run/forebay/sanity-secrets.yaml";
const ATTRIBUTES: &str = "/run/forebay/sanity-attributes.yaml";
const REPORT: &str = "/tmp/sanity.json";
/// Deadline on hardware.
const DEADLINE: Duration = Duration::from_secs(120);

/// Why specs are skipped, keyed by the exact text of their skip message: all need features that the driver does not offer.
const EXPLAINED: &[(&str, &[&str])] = &[
    (
        "accessibility of snapshots: every node reaches every server",
        &["SNAPSHOT_ACCESSIBILITY_CONSTRAINTS not supported"],
    ),
    (
        "health of all volumes, and of the storage as seen from a node: not offered",
        &["ControllerListVolumeHealth not supported", "NodeGetStorageHealth not supported"],
    ),
    (
        "attaching: a volume of a file server is not attached (attachRequired false)",
        &[
            "ControllerPublishVolume not supported",
            "ControllerPublishVolume.readonly field not supported",
            "Controller Publish, UnpublishVolume not supported",
            "ControllerUnpublishVolume not supported",
        ],
    ),
    (
        "expanding on the node: a file server's volume grows on the server",
        &["NodeExpandVolume not supported"],
    ),
];

/// Number of specs of csi-sanity 5.6 that apply to the driver's capabilities. If fewer pass, the driver no longer reports its
/// capabilities.
const PASSED_MIN: usize = 85;

/// Runs it. Returns whether all applicable specs passed.
pub fn run() -> Result<bool> {
    check_built(Kind::Forebay)?;
    let tools = Tools::prepare(&Cache::open()?, &[tools::SANITY])?;
    let lab = Lab::start(&format!("sanity-{}", std::process::id()), &[storage()])?;
    let site = Site::start(lab, Kind::Forebay)?;
    let node = site.storage();
    let program = std::fs::read(tools.path("csi-sanity"))?;
    step("copying csi-sanity to the guest", || node.put("/usr/local/bin/csi-sanity", &program, 0o755))?;
    let secrets = "CreateVolumeSecret: {password: sanity-password-1}\nNodeStageVolumeSecret: {password: sanity-password-1}\n";
    node.put(SECRETS, secrets.as_bytes(), 0o600)?;
    node.put(ATTRIBUTES, b"bytesPerSecond: 500Mi\npriority: low\n", 0o600)?;
    let admin = format!("unix://{ADMIN_SOCKET}");
    let endpoint = format!("unix://{SOCKET}");
    let driver = [
        "forebay-csi",
        "--mode",
        "all",
        "--endpoint",
        &endpoint,
        "--admin-endpoint",
        &admin,
        "--node-id",
        STORAGE,
    ];
    node.start_service("forebay-csi-all", &driver)?;
    node.wait_until("the driver listens", Duration::from_secs(10), || {
        Ok(node.attempt(&["test", "-S", SOCKET], &[], Duration::from_secs(5))?.success())
    })?;
    let argv = [
        "csi-sanity",
        "--csi.endpoint",
        SOCKET,
        "--csi.secrets",
        SECRETS,
        "--csi.testvolumemutableparameters",
        ATTRIBUTES,
        "--csi.testvolumesize=104857600",
        "--csi.testvolumeexpandsize=209715200",
        "--ginkgo.no-color",
        "--ginkgo.json-report",
        REPORT,
    ];
    let output = step("csi-sanity", || node.attempt(&argv, &[], DEADLINE))?;
    let report =
        node.get(REPORT).with_context(|| format!("no report: {}{}", output.text(), output.complaint()))?;
    let summary = Summary::read(&serde_json::from_slice(&report)?)?;
    print!("{summary}");
    if !output.success() {
        println!("{}\nthe driver's log ends with:\n{}", output.text(), node.service_log("forebay-csi-all"));
    }
    ensure!(
        summary.passed >= PASSED_MIN,
        "only {} specs passed, and {PASSED_MIN} apply: is one that the driver used to offer skipped now?",
        summary.passed
    );
    Ok(output.success() && summary.failed.is_empty() && summary.unexplained.is_empty())
}

/// Summary of a ginkgo report.
#[derive(Debug, Default)]
struct Summary {
    passed: usize,
    failed: Vec<String>,
    skipped: BTreeMap<&'static str, usize>,
    unexplained: Vec<String>,
}

impl Summary {
    fn read(report: &Value) -> Result<Self> {
        let mut summary = Self::default();
        let suites = report.as_array().context("the report is a list of suites")?;
        for spec in suites.iter().filter_map(|suite| suite["SpecReports"].as_array()).flatten() {
            if spec["LeafNodeType"] != "It" {
                continue;
            }
            let mut name: Vec<&str> = spec["ContainerHierarchyTexts"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect();
            name.extend(spec["LeafNodeText"].as_str());
            let name = name.join(" ");
            let message = spec["Failure"]["Message"].as_str().unwrap_or("");
            match spec["State"].as_str() {
                Some("passed") => summary.passed += 1,
                Some("pending") => *summary.skipped.entry("pending in the suite itself").or_default() += 1,
                Some("skipped") => {
                    match EXPLAINED.iter().find(|(_, messages)| messages.contains(&message.trim())) {
                        Some((reason, _)) => *summary.skipped.entry(*reason).or_default() += 1,
                        None => summary.unexplained.push(format!("{name}: {message}")),
                    }
                }
                _ => summary.failed.push(format!("{name}: {message}")),
            }
        }
        Ok(summary)
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "csi-sanity: {} passed, {} failed", self.passed, self.failed.len())?;
        for (reason, count) in &self.skipped {
            writeln!(f, "  {count:>3} skipped: {reason}")?;
        }
        for name in &self.unexplained {
            writeln!(f, "  skipped, and not on the list of what may be: {name}")?;
        }
        self.failed.iter().try_for_each(|name| writeln!(f, "  FAILED {name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn summary_counts_results_and_lists_unexplained_skips() {
        let spec = |state: &str, text: &str, message: &str| {
            json!({"LeafNodeType": "It", "State": state, "LeafNodeText": text,
                   "ContainerHierarchyTexts": ["Node Service"], "Failure": {"Message": message}})
        };
        let report = json!([{"SpecReports": [
            {"LeafNodeType": "BeforeSuite", "State": "passed"},
            spec("passed", "works", ""),
            spec("skipped", "NodeExpandVolume", "NodeExpandVolume not supported"),
            spec("skipped", "something new", "not supported"),
            spec("skipped", "should CreateSnapshot", "NodeStageVolume not supported"),
            spec("skipped", "group of nodes", "Service does not have single node multi writer capability"),
            spec("pending", "later", ""),
            spec("failed", "breaks", "expected 1"),
        ]}]);
        let summary = Summary::read(&report).expect("a summary");
        assert_eq!((summary.passed, summary.skipped.len()), (1, 2));
        assert_eq!(
            summary.unexplained,
            [
                "Node Service something new: not supported",
                "Node Service should CreateSnapshot: NodeStageVolume not supported",
                "Node Service group of nodes: Service does not have single node multi writer capability",
            ]
        );
        assert_eq!(summary.failed, ["Node Service breaks: expected 1"]);
    }
}
