//! External.Storage: Kubernetes' own tests for drivers of volumes, on a cluster of the lab.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use super::service::Service;
use super::stage::Stage;
use super::story;
use super::tools::{SNAPSHOT_DEFINITIONS, SNAPSHOT_KINDS, Tools};
use crate::cache::Cache;
use crate::foreign::known::{KnownFailures, Outcome, Verdict};
use crate::images::conformance;
use crate::progress::say;
use crate::report::Table;

const DRIVER: &str = include_str!("../../external-storage/driver.yaml");
const ATTRIBUTES: &str = include_str!("../../external-storage/attributes.yaml");
const KNOWN: &str = include_str!("../../external-storage/known-failures.txt");
const SKIPS: &str = include_str!("../../external-storage/skips.txt");

/// Tests that the lab cannot run: `Disruptive` ones log in to nodes with ssh; Windows and its file system; a feature that is not
/// enabled.
const NOT_HERE: &str = r"\[Disruptive\]|\[Feature:Windows\]|\(ntfs\)|\[Feature:SELinux";

/// What every test of the suite has in its name.
const SUITE: &str = "External.Storage";

/// Builds everything that needs the machine's network. Returns the archives of the images that the tests' pods need.
pub fn prepare() -> Result<[PathBuf; 2]> {
    let cache = Cache::open()?;
    Ok(conformance::archives(&conformance::get(&cache, &programs(&cache)?)?))
}

fn programs(cache: &Cache) -> Result<Tools> {
    Tools::prepare(cache, conformance::TOOLS)
}

/// Which tests run, and where their results go.
#[derive(Debug, clap::Args)]
pub struct Choice {
    /// Only tests with a name that matches this regular expression.
    #[arg(default_value = "")]
    focus: String,
    /// Not the tests with a name that matches this regular expression.
    #[arg(long, default_value = NOT_HERE)]
    skip: String,
    /// Ends the suite after this time, e.g. 90m, which is a failure of the test that runs then.
    #[arg(long, default_value = "12h")]
    timeout: String,
    /// The folder for the suite's output and report.
    #[arg(long, default_value = "target/test-logs/external-storage")]
    logs: PathBuf,
}

/// Installs Forebay and runs the tests. Returns whether everything went as expected.
pub fn run(stage: &Stage, choice: &Choice, table: &mut Table) -> Result<bool> {
    let logs = &choice.logs;
    let started = Instant::now();
    let tools = programs(&Cache::open()?)?;
    fs::create_dir_all(logs).with_context(|| format!("create {}", logs.display()))?;
    let _snapshots = snapshot_controller(stage, &tools, logs)?;
    if let Err(error) = story::install(stage, table) {
        say(format!("{error:#}\n{}", stage.describe()));
    } else {
        table.run(SUITE, || suite(stage, &tools, choice));
        table.run("no container of Forebay has restarted", || stage.nothing_restarted());
        if table.failed() > 0 {
            say(stage.describe());
        }
    }
    print!("\n{}", table.render());
    println!("{:.0} s in all", started.elapsed().as_secs_f64());
    Ok(table.failed() == 0)
}

/// What a cluster has once for all drivers with snapshots: the chart finds the definitions.
fn snapshot_controller(stage: &Stage, tools: &Tools, logs: &Path) -> Result<Service> {
    let program = tools.path("snapshot-controller");
    stage.kubectl().apply(&fs::read_to_string(program.with_file_name(SNAPSHOT_DEFINITIONS))?)?;
    let wait = ["wait", "--for=condition=Established", "--timeout=60s", "customresourcedefinition"];
    stage.kubectl().run(&[&wait[..], &SNAPSHOT_KINDS].concat())?;
    let mut command = Command::new(program);
    command.arg("--kubeconfig").arg(stage.kubectl().kubeconfig());
    command.args(["--leader-election=false", "--http-endpoint="]);
    Service::start("snapshot-controller", &command, logs)
}

fn suite(stage: &Stage, tools: &Tools, choice: &Choice) -> Result<String> {
    let Choice { focus, skip, timeout, logs } = choice;
    let (driver, report, output) =
        (logs.join("driver.yaml"), logs.join("report.json"), logs.join("output.txt"));
    fs::write(&driver, DRIVER)?;
    stage.kubectl().apply(ATTRIBUTES)?;
    if report.exists() {
        fs::remove_file(&report)?;
    }
    say(format!("the suite's output: {}", output.display()));
    let log = fs::File::create(&output)?;
    let mut suite = Command::new(tools.path("e2e.test"));
    suite
        .arg(format!("--kubeconfig={}", stage.kubectl().kubeconfig().display()))
        .arg(format!("--kubectl-path={}", stage.kubectl().program().display()))
        .arg(format!("--storage.testdriver={}", driver.display()))
        .arg(format!("--ginkgo.focus={SUITE}.*{focus}"))
        .arg(format!("--ginkgo.timeout={timeout}"))
        .arg(format!("--ginkgo.json-report={}", report.display()))
        .args(["--provider=skeleton", "--ginkgo.no-color", "--ginkgo.v", "--disable-log-dump"])
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    if !skip.is_empty() {
        suite.arg(format!("--ginkgo.skip={skip}"));
    }
    // A test that fails is in the report.
    suite.status().context("start e2e.test")?;
    let text = fs::read(&report).with_context(|| format!("it left no report; see {}", output.display()))?;
    judge(&results(&serde_json::from_slice::<Vec<Report>>(&text)?))
}

/// A suite's report in ginkgo's format, as far as it is used here.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Report {
    spec_reports: Vec<SpecReport>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SpecReport {
    #[serde(default)]
    container_hierarchy_texts: Option<Vec<String>>,
    leaf_node_text: String,
    leaf_node_type: String,
    state: String,
    #[serde(default)]
    failure: Failure,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase")]
struct Failure {
    #[serde(default)]
    message: String,
}

/// The results of the tests that were chosen, by name.
fn results(reports: &[Report]) -> BTreeMap<String, Outcome> {
    let mut results = BTreeMap::new();
    for spec in reports.iter().flat_map(|report| &report.spec_reports) {
        let said = || spec.failure.message.clone();
        let outcome = match spec.state.as_str() {
            "passed" => Outcome::Pass,
            // Not chosen.
            "skipped" if spec.failure.message.is_empty() => continue,
            "skipped" | "pending" => Outcome::Skip(said()),
            state => Outcome::Fail(format!("{state}: {}", said())),
        };
        if spec.leaf_node_type != "It" && outcome == Outcome::Pass {
            continue;
        }
        let mut words: Vec<&str> =
            spec.container_hierarchy_texts.iter().flatten().map(String::as_str).collect();
        words.push(&spec.leaf_node_text);
        let name = words.join(" ");
        // The part before it names the suite and the driver.
        let name = name.find("[Testpattern:").map_or(name.as_str(), |at| &name[at..]);
        results.insert(name.to_owned(), outcome);
    }
    results
}

fn judge(results: &BTreeMap<String, Outcome>) -> Result<String> {
    let known = KnownFailures::parse(KNOWN)?;
    let skips = skips(SKIPS)?;
    let (mut passed, mut listed, mut wrong) = (0, 0, Vec::new());
    let mut skipped: BTreeMap<&str, u32> = BTreeMap::new();
    for (name, outcome) in results {
        match (known.judge(name, outcome), outcome) {
            (Verdict::Passed, _) => passed += 1,
            (Verdict::Known, _) => listed += 1,
            (Verdict::Unexpected, Outcome::Skip(said)) => {
                match skips.iter().find(|(part, _)| said.contains(part)) {
                    Some((_, reason)) => *skipped.entry(reason).or_default() += 1,
                    None => wrong.push(format!("{name}\n  skipped: {said}")),
                }
            }
            (verdict, outcome) => wrong.push(format!("{name}\n  {verdict:?}: {outcome:?}")),
        }
    }
    for (reason, count) in &skipped {
        say(format!("{count} skipped: {reason}"));
    }
    let count: u32 = skipped.values().sum();
    let note = format!("{passed} passed, {listed} known failures, {count} skipped for known reasons");
    ensure!(wrong.is_empty(), "{note}, and\n{}", wrong.join("\n"));
    ensure!(passed > 0, "no test passed: {note}");
    Ok(note)
}

/// Parses lines of `PART OF THE MESSAGE: REASON`.
fn skips(text: &str) -> Result<Vec<(&str, &str)>> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| match line.rsplit_once(": ") {
            Some((part, reason)) if !part.is_empty() && !reason.is_empty() => Ok((part, reason)),
            _ => bail!("{line:?} is not MESSAGE: REASON"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_failures_and_skips_parse() {
        KnownFailures::parse(KNOWN).expect("a good list");
        skips(SKIPS).expect("a good list");
        skips("no reason").expect_err("no reason");
    }

    #[test]
    fn report_is_read_into_test_outcomes() {
        let report = r#"[{"SpecReports": [
            {"ContainerHierarchyTexts": ["External.Storage [Driver: x]", "[Testpattern: a] io"], "LeafNodeText": "should b",
             "LeafNodeType": "It", "State": "passed"},
            {"ContainerHierarchyTexts": ["other"], "LeafNodeText": "c", "LeafNodeType": "It", "State": "skipped"},
            {"ContainerHierarchyTexts": null, "LeafNodeText": "", "LeafNodeType": "SynchronizedBeforeSuite", "State": "passed"},
            {"ContainerHierarchyTexts": ["[Testpattern: a] io"], "LeafNodeText": "d", "LeafNodeType": "It", "State": "timedout",
             "Failure": {"Message": "late"}},
            {"ContainerHierarchyTexts": ["[Testpattern: e] io"], "LeafNodeText": "f", "LeafNodeType": "It", "State": "skipped",
             "Failure": {"Message": "not here"}}]}]"#;
        let reports: Vec<Report> = serde_json::from_str(report).expect("a report");
        let expected = [
            ("[Testpattern: a] io d".to_owned(), Outcome::Fail("timedout: late".into())),
            ("[Testpattern: a] io should b".to_owned(), Outcome::Pass),
            ("[Testpattern: e] io f".to_owned(), Outcome::Skip("not here".into())),
        ];
        assert_eq!(results(&reports), BTreeMap::from(expected));
    }
}
