//! The cases of the suite, and the targets.

use crate::load::figure::Figure;
use crate::load::{BURST_WRITE_BYTES, Contender, Mix, Plan, Report, Security, Workload};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The extent of the measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Effort {
    pub(crate) runs: u32,
    pub(crate) seconds: f64,
    pub(crate) is_quick: bool,
}

impl Effort {
    pub(crate) fn quick() -> Self {
        Self { runs: 1, seconds: 0.3, is_quick: true }
    }
}

/// The servers that Forebay is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// The best of the Samba variants.
    Samba,
    /// The best of the floors with this name prefix.
    Floor(&'static str),
    /// No peer: the bound applies to the figure itself.
    None,
    /// Forebay with fewer connections, the best of those runs.
    Fewer,
}

/// A bound on a ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// A line of the acceptance table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Goal {
    pub(crate) figure: Figure,
    pub(crate) peer: Peer,
    pub(crate) bound: Bound,
}

/// One workload with its sizes.
pub(crate) struct Case {
    /// Name of its files.
    pub(crate) name: &'static str,
    pub(crate) plan: Plan,
    pub(crate) servers: Vec<Contender>,
    pub(crate) runs: u32,
    pub(crate) goals: Vec<Goal>,
    /// Numbers of connections to measure one after the other instead of the plan's.
    pub(crate) connections: Vec<usize>,
}

impl Case {
    /// The name of one of this case's reports.
    pub(crate) fn name_of(&self, report: &Report) -> String {
        if self.connections.is_empty() {
            return self.name.to_owned();
        }
        format!("{}-{}", self.name, report.plan.connections)
    }
}

fn goal(figure: Figure, peer: Peer, bound: Bound) -> Goal {
    Goal { figure, peer, bound }
}

/// All cases, in the order of the acceptance table.
pub(crate) fn all(effort: Effort) -> Vec<Case> {
    use Bound::{AtLeast, AtMost};
    use Contender::{FloorRead, FloorSendfile, FloorWrite};
    use Figure::{BurstP99, BurstRatio, ConnectionPss, ConnectionRss, CpuPerGb, CpuPerOperation};
    use Figure::{GbPerSecond, OperationsPerSecond};
    use Workload::{Checkpoint, Create, Idle, List, RandRead, Read, Retinanet};
    use Workload::{Safetensors, Sessions, Stat, Unet3d, Write};
    let make = Maker { effort };
    let samba = Peer::Samba;
    let list_files = if effort.is_quick { 2_000 } else { 100_000 };
    let idle = if effort.is_quick { 50 } else { 1_000 };
    let sealed = |plan: Plan| Plan { security: Security::Sealed, ..plan };
    vec![
        make.case("read-1m-c8", make.plan(Read, MIB, 8, 4), &[FloorSendfile])
            .to(CpuPerGb, Peer::Floor("floor-sendfile"), AtMost(1.15))
            .to(CpuPerGb, samba, AtMost(0.40))
            .to(GbPerSecond, samba, AtLeast(1.8)),
        make.case("read-1m-c1", make.plan(Read, MIB, 1, 4), &[]).to(GbPerSecond, samba, AtLeast(1.5)),
        make.case("read-4m-c1", make.plan(Read, 4 * MIB, 1, 4), &[]).to(GbPerSecond, samba, AtLeast(1.5)),
        make.case("write-1m-c1", make.plan(Write, MIB, 1, 4), &[]).to(GbPerSecond, samba, AtLeast(1.3)),
        make.case("write-4m-c1", make.plan(Write, 4 * MIB, 1, 4), &[]).to(GbPerSecond, samba, AtLeast(1.3)),
        make.case("read-64k-c4", make.plan(Read, 64 * KIB, 4, 8), &[FloorSendfile, FloorRead])
            .to(CpuPerGb, samba, AtMost(0.25))
            .to(CpuPerGb, Peer::Floor("floor"), AtMost(1.3))
            .to(GbPerSecond, samba, AtLeast(3.0)),
        make.case("write-64k-c4", make.plan(Write, 64 * KIB, 4, 8), &[]).to(CpuPerGb, samba, AtMost(0.30)),
        make.case("randread-4k-c4", make.plan(RandRead, 4 * KIB, 4, 16), &[FloorRead])
            .to(CpuPerOperation, samba, AtMost(0.10))
            .to(OperationsPerSecond, samba, AtLeast(5.0)),
        make.case("write-1m-c2", make.plan(Write, MIB, 2, 4), &[FloorWrite])
            .to(CpuPerGb, Peer::Floor("floor-write"), AtMost(1.15))
            .to(CpuPerGb, samba, AtMost(0.5)),
        make.case("retinanet", make.plan(Retinanet, MIB, 4, 4), &[])
            .to(OperationsPerSecond, samba, AtLeast(5.0))
            .to(CpuPerOperation, samba, AtMost(0.15)),
        make.case("checkpoint", Plan { file_bytes: 128 << 20, ..make.plan(Checkpoint, MIB, 2, 4) }, &[]).to(
            CpuPerGb,
            samba,
            AtMost(0.5),
        ),
        make.case("read-1m-sealed", sealed(make.plan(Read, MIB, 2, 4)), &[]).to(CpuPerGb, samba, AtMost(0.4)),
        make.case("create", make.plan(Create, MIB, 4, 4), &[]).to(OperationsPerSecond, samba, AtLeast(12.0)),
        make.case("list", Plan { files: list_files, ..make.plan(List, MIB, 2, 1) }, &[]).to(
            OperationsPerSecond,
            samba,
            AtLeast(4.0),
        ),
        make.case("idle", make.plan(Idle, 4 * KIB, idle, 1), &[])
            .at_most(1)
            .to(ConnectionRss, samba, AtMost(0.05))
            .to(ConnectionPss, samba, AtMost(0.05)),
        make.case("mixed", make.mixed(), &[Contender::ForebayLimited])
            .to(BurstRatio, Peer::None, AtMost(2.0))
            .to(BurstP99, samba, AtMost(1.0 / 3.0)),
        make.case("connections", Plan { files: 64, file_bytes: 8 << 20, ..make.plan(Read, MIB, 64, 4) }, &[])
            .over(&[1, 2, 4, 8, 16, 32, 64])
            .to(GbPerSecond, Peer::Fewer, AtLeast(0.95)),
        make.case("safetensors", make.plan(Safetensors, 128 * KIB, 4, 4), &[FloorRead]).at_most(3),
        make.case("unet3d", make.plan(Unet3d, MIB, 2, 2), &[]).at_most(3),
        make.case("stat", make.plan(Stat, MIB, 4, 4), &[]).at_most(3),
        make.case("sessions", make.plan(Sessions, 4 * KIB, 4, 1), &[]).at_most(3),
    ]
}

struct Maker {
    effort: Effort,
}

impl Maker {
    fn plan(&self, workload: Workload, io_bytes: usize, connections: usize, depth: usize) -> Plan {
        Plan {
            workload,
            io_bytes,
            connections,
            channels: 1,
            depth,
            seconds: self.effort.seconds,
            operations: None,
            files: workload.default_files(connections),
            file_bytes: workload.default_file_bytes(),
            security: Security::Plain,
            mix: None,
        }
    }

    /// Three times as long as the others, because the burst takes a third of the time.
    fn mixed(&self) -> Plan {
        let seconds = self.effort.seconds * 3.0;
        let mix = Mix {
            burst_connections: 2,
            checkpoint_bytes: 64 << 20,
            write_bytes: BURST_WRITE_BYTES,
            cycle_seconds: seconds,
            churn_seconds: None,
            verify: false,
        };
        Plan { seconds, mix: Some(mix), ..self.plan(Workload::Mixed, 256 * KIB, 4, 1) }
    }

    /// Forebay, the Samba variants and some floors.
    fn case(&self, name: &'static str, plan: Plan, floors: &[Contender]) -> Case {
        let mut servers = vec![Contender::Forebay, Contender::Samba];
        if !self.effort.is_quick {
            servers.push(Contender::SambaUring);
        }
        servers.extend(floors);
        Case { name, plan, servers, runs: self.effort.runs, goals: Vec::new(), connections: Vec::new() }
    }
}

impl Case {
    fn to(mut self, figure: Figure, peer: Peer, bound: Bound) -> Self {
        self.goals.push(goal(figure, peer, bound));
        self
    }

    fn at_most(mut self, runs: u32) -> Self {
        self.runs = self.runs.min(runs);
        self
    }

    /// Forebay alone, with several numbers of connections.
    fn over(mut self, connections: &[usize]) -> Self {
        self.servers = vec![Contender::Forebay];
        self.connections = connections.into();
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_names_are_unique_and_servers_support_their_workloads() {
        for effort in [Effort::quick(), Effort { runs: 5, seconds: 1.5, is_quick: false }] {
            let cases = all(effort);
            let mut names: Vec<&str> = cases.iter().map(|case| case.name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), cases.len());
            for case in &cases {
                assert!(case.servers.iter().all(|who| who.serves(case.plan.workload)), "{}", case.name);
                assert!(!case.plan.workload.is_plain_io() || case.plan.blocks() > 0, "{}", case.name);
            }
        }
    }

    #[test]
    fn suite_measurement_time_is_below_ten_minutes() {
        let seconds: f64 = all(Effort { runs: 5, seconds: 1.5, is_quick: false })
            .iter()
            .map(|case| {
                let series = case.servers.len() * case.connections.len().max(1);
                series as f64 * f64::from(case.runs) * case.plan.seconds
            })
            .sum();
        assert!(seconds < 600.0, "{seconds}");
    }
}
