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
        on_fabric("pool on a namespace: created, served, released and reopened, over TCP", |lab| {
            served(lab, "tcp")
        }),
        on_fabric("pool on a namespace: created, served, released and reopened, over RDMA", |lab| {
            served(lab, "rdma")
        }),
        on_fabric("pool on a namespace: over TLS 1.3, and refusals", tls::encrypted),
        on_fabric("pool on a namespace: refusals write nothing", refusals),
        on_fabric("pool on a namespace: takeover after node loss", killed),
        on_fabric("pool on a namespace: takeover of a full pool after node loss", full::full),
        on_fabric("pool on a namespace: torn records of starts and epoch", records::torn),
        on_fabric("pool on a namespace: an isolated server stops, another takes over", cut_off),
        on_fabric("pool on a namespace: target outage beyond the loss timeout", away),
    ]
}
