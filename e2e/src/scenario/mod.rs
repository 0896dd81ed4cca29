//! The lab's scenarios: what a user can expect, on real components.

pub mod beside_ksmbd;
mod bundled;
mod client_kernel;
mod clock;
mod coherence;
mod crash;
mod csi;
mod drain;
mod everyday;
mod exercised;
mod failover;
mod given_up;
mod kerberos;
mod locks;
mod mounts;
mod multichannel;
mod nvmeof;
mod nvmeof_pool;
mod owners;
mod programs;
mod refusal;
mod smb_direct;
mod smb_direct_faults;
mod snapshots;
mod space;
mod system_calls;
mod target;
mod watching;

use std::time::Instant;

use anyhow::Result;

use crate::lab::{Lab, NodeSpec, client, storage};
use crate::progress::say;
use crate::report::Table;
use crate::site::{Kind, Site, check_built};

/// One scenario.
pub struct Scenario {
    /// Its name. Filters match it.
    pub name: String,
    /// Whether it needs our own server and driver.
    pub ours_only: bool,
    /// The lab that it runs in.
    pub place: Place,
    /// Has not passed often enough to gate every change: runs only if a filter matches its name, or with all of these
    /// scenarios.
    pub on_trial: bool,
    run: Body,
}

/// A lab of the scenarios.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Place {
    /// A file server and two clients, with Debian's own kernel.
    Plain,
    /// The same with SMB Direct in the kernel.
    SmbDirect,
    /// A target, two hosts and a client, with nothing on them.
    Fabric,
}

/// The body of a scenario. Returns a note for its row, or the reason for the failure.
type Run<T> = Box<dyn Fn(&T) -> Result<String>>;

/// What a scenario runs on.
enum Body {
    /// A lab with a file server.
    Site(Run<Site>),
    /// The lab of the fabric.
    Fabric(Run<Lab>),
}

/// The first client.
const ONE: &str = "node1";
/// The second.
const TWO: &str = "node2";
/// A mebibyte.
const MIB: u64 = 1 << 20;

fn scenario(name: impl Into<String>, run: impl Fn(&Site) -> Result<String> + 'static) -> Scenario {
    Scenario {
        name: name.into(),
        ours_only: false,
        place: Place::Plain,
        on_trial: false,
        run: Body::Site(Box::new(run)),
    }
}

fn ours(name: impl Into<String>, run: impl Fn(&Site) -> Result<String> + 'static) -> Scenario {
    Scenario { ours_only: true, ..scenario(name, run) }
}

fn on_fabric(name: impl Into<String>, run: impl Fn(&Lab) -> Result<String> + 'static) -> Scenario {
    Scenario {
        name: name.into(),
        ours_only: true,
        place: Place::Fabric,
        on_trial: false,
        run: Body::Fabric(Box::new(run)),
    }
}

/// All scenarios, in the order they run.
pub fn all() -> Vec<Scenario> {
    [
        // First: these need the kernel's modules before another scenario has used them.
        smb_direct::scenarios(),
        smb_direct_faults::scenarios(),
        mounts::scenarios(),
        multichannel::scenarios(),
        refusal::scenarios(),
        kerberos::scenarios(),
        coherence::scenarios(),
        everyday::scenarios(),
        programs::scenarios(),
        exercised::scenarios(),
        owners::scenarios(),
        system_calls::scenarios(),
        locks::scenarios(),
        watching::scenarios(),
        space::scenarios(),
        snapshots::scenarios(),
        csi::scenarios(),
        drain::scenarios(),
        clock::scenarios(),
        crash::scenarios(),
        nvmeof::scenarios(),
        nvmeof_pool::scenarios(),
        failover::scenarios(),
        target::scenarios(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Runs the scenarios of `places` with a name that contains one of `filters`. Without filters it runs all of them, and those
/// on trial only if `on_trial` is set. Without places it runs those of all labs. One lab runs after the other. Returns whether
/// all passed.
pub fn run(filters: &[String], places: &[Place], on_trial: bool, kind: Kind) -> Result<bool> {
    let chosen: Vec<Scenario> = all()
        .into_iter()
        .filter(|scenario| match filters {
            [] => on_trial || !scenario.on_trial,
            filters => filters.iter().any(|filter| scenario.name.contains(filter)),
        })
        .filter(|scenario| kind == Kind::Forebay || !scenario.ours_only)
        .filter(|scenario| places.is_empty() || places.contains(&scenario.place))
        .collect();
    anyhow::ensure!(
        !chosen.is_empty(),
        "no scenario of these labs has a name that contains any of {filters:?}"
    );
    check_built(kind)?;
    let [plain, smb_direct, fabric] = [Place::Plain, Place::SmbDirect, Place::Fabric]
        .map(|place| chosen.iter().filter(|scenario| scenario.place == place).collect::<Vec<_>>());
    let started = Instant::now();
    let mut table = Table::default();
    if !plain.is_empty() {
        let lab =
            Lab::start(&format!("test-{}", std::process::id()), &[storage(), client(ONE), client(TWO)])?;
        run_in(lab, kind, "server up", &plain, &mut table)?;
    }
    if !smb_direct.is_empty() {
        let nodes = [storage(), client(ONE), client(TWO)].map(NodeSpec::with_smb_direct);
        let lab = Lab::start(&format!("test-smb-direct-{}", std::process::id()), &nodes)?;
        run_in(lab, kind, "server up beside SMB Direct", &smb_direct, &mut table)?;
    }
    if !fabric.is_empty() {
        let lab = Lab::start(&format!("test-nvmeof-{}", std::process::id()), &nvmeof::nodes())?;
        run_on_fabric(&lab, &fabric, &mut table)?;
    }
    print!("\n{}", table.render());
    println!(
        "{} passed, {} failed, {:.0} s in all",
        table.passed(),
        table.failed(),
        started.elapsed().as_secs_f64()
    );
    Ok(table.failed() == 0)
}

fn run_in(lab: Lab, kind: Kind, up: &str, scenarios: &[&Scenario], table: &mut Table) -> Result<()> {
    let mut site = None;
    table.run(up, || {
        site = Some(Site::start(lab, kind)?);
        Ok(String::new())
    });
    let Some(site) = site else { return Ok(()) };
    for scenario in scenarios {
        let Body::Site(run) = &scenario.run else { continue };
        if table.run(&scenario.name, || run(&site)).is_none() {
            site.lab().check()?;
            say(format!("the server's log ends with:\n{}", site.server_log()));
            for node in [ONE, TWO] {
                say(client_kernel::state(site.node(node)));
            }
        }
    }
    Ok(())
}

fn run_on_fabric(lab: &Lab, scenarios: &[&Scenario], table: &mut Table) -> Result<()> {
    for scenario in scenarios {
        let Body::Fabric(run) = &scenario.run else { continue };
        if table.run(&scenario.name, || run(lab)).is_none() {
            lab.check()?;
            for node in lab.nodes() {
                let said = node.run("dmesg | grep -i nvme | tail -n 30").unwrap_or_default();
                say(format!("{} says of nvme:\n{said}", node.name()));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Body, Place};

    #[test]
    fn scenario_body_matches_its_lab() {
        for scenario in super::all() {
            let on_fabric = matches!(scenario.run, Body::Fabric(_));
            assert_eq!(on_fabric, scenario.place == Place::Fabric, "{}", scenario.name);
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<String> = super::all().into_iter().map(|scenario| scenario.name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
