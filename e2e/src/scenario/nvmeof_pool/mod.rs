//! A pool on a namespace of a fabric: created, served, refused, and taken over by another host.

mod full;
mod records;
mod refused;
mod served;
pub(super) mod server;
mod takeover;
mod tls;

use super::{Scenario, on_fabric};
use refused::refusals;
use served::served;
use takeover::{away, cut_off, killed};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        on_fabric("pool on a namespace: made, served, left and taken again, over TCP", |lab| {
            served(lab, "tcp")
        }),
        on_fabric("pool on a namespace: made, served, left and taken again, over RDMA", |lab| {
            served(lab, "rdma")
        }),
        on_fabric("pool on a namespace: over TLS 1.3, and what is refused", tls::encrypted),
        on_fabric("pool on a namespace: what is refused, and nothing written", refusals),
        on_fabric("pool on a namespace: its server's node dies, another takes it over", killed),
        on_fabric("pool on a namespace: full when its server's node dies, another takes it over", full::full),
        on_fabric("pool on a namespace: its records of starts and epoch are torn", records::torn),
        on_fabric("pool on a namespace: its server is cut off, stops, another has it", cut_off),
        on_fabric("pool on a namespace: the target is away too long, and comes back", away),
    ]
}
