//! The lab's scenarios: what a user may expect, on real parts.

mod coherence;
mod crash;
mod csi;
mod drain;
mod everyday;
mod locks;
mod mounts;
mod refusal;
mod space;

use anyhow::Result;

use crate::lab::{Lab, client, storage};
use crate::progress::say;
use crate::report::Table;
use crate::site::{Kind, Site, check_built};

/// One scenario.
pub struct Scenario {
    /// Its name, which filters match.
    pub name: String,
    /// Whether it needs our own server and driver.
    pub ours_only: bool,
    run: Body,
}

/// What a scenario does: a note for its row, or why it failed.
type Body = Box<dyn Fn(&Site) -> Result<String>>;

/// The first client.
const ONE: &str = "node1";
/// The second.
const TWO: &str = "node2";
/// A mebibyte.
const MIB: u64 = 1 << 20;

fn scenario(name: impl Into<String>, run: impl Fn(&Site) -> Result<String> + 'static) -> Scenario {
    Scenario { name: name.into(), ours_only: false, run: Box::new(run) }
}

fn ours(name: impl Into<String>, run: impl Fn(&Site) -> Result<String> + 'static) -> Scenario {
    Scenario { ours_only: true, ..scenario(name, run) }
}

/// All scenarios, in the order they run.
pub fn all() -> Vec<Scenario> {
    [
        mounts::scenarios(),
        refusal::scenarios(),
        coherence::scenarios(),
        everyday::scenarios(),
        locks::scenarios(),
        space::scenarios(),
        csi::scenarios(),
        drain::scenarios(),
        crash::scenarios(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Runs the scenarios whose name contains one of `filters` (all where there are none) in one lab; whether all passed.
pub fn run(filters: &[String], kind: Kind) -> Result<bool> {
    let chosen: Vec<Scenario> = all()
        .into_iter()
        .filter(|scenario| filters.is_empty() || filters.iter().any(|filter| scenario.name.contains(filter)))
        .filter(|scenario| kind == Kind::Forebay || !scenario.ours_only)
        .collect();
    anyhow::ensure!(!chosen.is_empty(), "no scenario's name contains any of {filters:?}");
    check_built(kind)?;
    let lab = Lab::start(&format!("test-{}", std::process::id()), &[storage(), client(ONE), client(TWO)])?;
    let mut table = Table::default();
    let mut site = None;
    table.run("server up", || {
        site = Some(Site::start(lab, kind)?);
        Ok(String::new())
    });
    if let Some(site) = &site {
        for scenario in &chosen {
            if table.run(&scenario.name, || (scenario.run)(site)).is_none() {
                site.lab().check()?;
                say(format!("the server's log ends with:\n{}", site.server_log()));
            }
        }
    }
    print!("\n{}", table.render());
    println!("{} passed, {} failed", table.passed(), table.failed());
    Ok(table.failed() == 0)
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_are_unique() {
        let mut names: Vec<String> = super::all().into_iter().map(|scenario| scenario.name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
