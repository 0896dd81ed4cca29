//! `kubectl forebay bench`: measures a StorageClass with the shapes of MLPerf Storage's workloads. A Job mounts a new volume in
//! one or more pods, each of which runs `kubectl-forebay measure`; the results are read from their logs.

mod files;
mod measure;
mod outcome;
mod plan;

use anyhow::{Context, ensure};
use kube::ResourceExt;

use self::outcome::Measured;
use self::plan::Scope;
pub(crate) use self::plan::{Plan, Workload, size};
use crate::job::{Load, MOUNTED_AT, Until};
use crate::options::{Bench, BenchFormat, Measure};
use crate::paint::Paint;

/// Measures a StorageClass, and returns the results for the terminal.
pub(crate) fn run(options: &Bench, paint: Paint) -> anyhow::Result<String> {
    let scope = Scope {
        pods: options.pods,
        accelerators: options.accelerators,
        seconds: options.seconds,
        volume_bytes: options.size,
        scale: options.scale,
    };
    let mut workloads = options.workload.clone();
    workloads.sort_unstable();
    workloads.dedup();
    let plans = workloads
        .into_iter()
        .map(|workload| Plan::new(workload, &scope))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    let results = outcome::combine(&runtime.block_on(measured(options, &plans))?)?;
    match options.output {
        BenchFormat::Json => crate::json(&results),
        BenchFormat::Table => Ok(outcome::render(&results, paint)),
    }
}

/// The part of one pod.
pub(crate) fn measure(options: &Measure) -> anyhow::Result<()> {
    let plans: Vec<Plan> = serde_json::from_str(&options.plans).context("--plans")?;
    ensure!(options.index < options.pods, "--index {} of {} pods", options.index, options.pods);
    let pod = measure::Pod { index: options.index, of: options.pods };
    outcome::print(&measure::run(&plans, pod, &options.folder)?)
}

async fn measured(options: &Bench, plans: &[Plan]) -> anyhow::Result<Vec<Vec<Measured>>> {
    let load = Load {
        verb: "bench",
        class: &options.class,
        place: &options.place,
        pods: options.pods,
        bytes: options.size,
        arguments: vec![
            "measure".to_owned(),
            format!("--folder={MOUNTED_AT}"),
            format!("--pods={}", options.pods),
            format!("--plans={}", serde_json::to_string(plans)?),
        ],
    };
    load.with(&options.connection, async |running| {
        let mut measured = Vec::new();
        for pod in running.wait(Until::Succeeded).await? {
            let name = pod.name_any();
            let log = running.log(&name, None).await?;
            measured.push(outcome::parse(&log).with_context(|| format!("pod {name}"))?);
        }
        Ok(measured)
    })
    .await
}

/// A factor above 0 and up to 1.
pub(crate) fn scale(text: &str) -> Result<f64, String> {
    let factor: f64 = text.parse().map_err(|_| "a number".to_owned())?;
    if factor > 0.0 && factor <= 1.0 { Ok(factor) } else { Err("a number above 0 and up to 1".to_owned()) }
}

/// `KEY=VALUE`.
pub(crate) fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| "KEY=VALUE".to_owned())?;
    Ok((key.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_factors_and_labels_are_parsed() {
        assert_eq!(scale("0.01"), Ok(0.01));
        for bad in ["0", "-1", "1.1", "nan", "x"] {
            assert!(scale(bad).is_err(), "{bad}");
        }
        assert_eq!(label("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        assert!(label("a").is_err());
    }
}
