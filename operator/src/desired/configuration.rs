//! The configuration file of an instance's server.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use forebay_api::cluster::{BackendKind, QuotaKind, Sealing, Signing, Transport};
use forebay_api::names;
use serde::Serialize;

use super::View;

/// Where the server finds its certificates.
pub const CERTIFICATES: &str = "/etc/forebay/tls";
/// Where the server finds its configuration.
pub const CONFIGURATION: &str = "/etc/forebay/config";
/// Where the backends' directories are mounted.
pub const POOLS: &str = "/var/lib/forebay/pools";

#[derive(Serialize)]
struct File {
    instance: Instance,
    server: Server,
    admin: Admin,
    http: Http,
    log: Log,
    pool: Vec<Pool>,
}

#[derive(Serialize)]
struct Instance {
    name: String,
    epoch: u64,
}

#[derive(Serialize)]
struct Server {
    listen: Vec<String>,
    advertise: Vec<String>,
    signing: &'static str,
    encryption: &'static str,
    /// Without it the server takes clients over RDMA wherever it finds a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    rdma: Option<&'static str>,
    rdma_port: u16,
    iwarp_port: u16,
    drain_timeout_s: u32,
    #[serde(flatten)]
    limits: BTreeMap<&'static str, toml::Value>,
}

#[derive(Serialize)]
struct Admin {
    listen: String,
    certificate: String,
    key: String,
    client_ca: String,
    allowed_clients: [&'static str; 2],
}

#[derive(Serialize)]
struct Http {
    listen: String,
}

#[derive(Serialize)]
struct Log {
    format: &'static str,
}

#[derive(Serialize)]
struct Pool {
    name: String,
    path: String,
    create: bool,
    existing: bool,
    quota: &'static str,
    overcommit: f64,
}

/// The file for an instance that is reached at `address` and has these pools already.
#[must_use]
pub fn file(view: &View<'_>, instance: &str, address: IpAddr, made: &BTreeSet<String>) -> String {
    let spec = &view.cluster.spec;
    let ports = &spec.network.ports;
    // All addresses of the one family: where IPv6 is switched off, `[::]` could not be listened on.
    let any = |port: u16| if address.is_ipv4() { format!("0.0.0.0:{port}") } else { format!("[::]:{port}") };
    let mut limits = BTreeMap::new();
    for (key, value) in [("event_loops", spec.limits.event_loops), ("workers", spec.limits.workers)] {
        if let Some(value) = value {
            limits.insert(key, toml::Value::Integer(value.into()));
        }
    }
    if let Some(kib) = spec.limits.max_io_kib {
        limits.insert("max_io", toml::Value::String(format!("{kib}KiB")));
    }
    let pool = spec
        .backends
        .iter()
        .filter_map(|backend| match backend.kind {
            BackendKind::Directory => backend.directory.as_ref().map(|directory| Pool {
                name: backend.name.clone(),
                path: format!("{POOLS}/{}/{instance}", backend.name),
                create: true,
                existing: made.contains(&backend.name),
                quota: match directory.quota {
                    QuotaKind::Project => "project",
                    QuotaKind::None => "none",
                },
                overcommit: f64::from(directory.overcommit_percent) / 100.0,
            }),
        })
        .collect();
    let file = File {
        instance: Instance {
            name: instance.to_owned(),
            epoch: view.before(instance).map_or(1, |b| b.epoch.max(1)),
        },
        server: Server {
            listen: vec![any(ports.smb)],
            advertise: vec![std::net::SocketAddr::new(address, ports.smb).to_string()],
            signing: match spec.security.signing {
                Signing::Optional => "optional",
                Signing::Required => "required",
            },
            encryption: match spec.security.sealing {
                Sealing::Disabled => "off",
                Sealing::Offered => "offered",
                Sealing::Required => "required",
            },
            rdma: (spec.network.transport == Transport::TCP).then_some("off"),
            rdma_port: ports.smb,
            iwarp_port: ports.smb_direct,
            drain_timeout_s: spec.upgrade.drain_timeout_seconds,
            limits,
        },
        admin: Admin {
            listen: any(ports.admin),
            certificate: format!("{CERTIFICATES}/{}", names::tls::CERTIFICATE),
            key: format!("{CERTIFICATES}/{}", names::tls::KEY),
            client_ca: format!("{CERTIFICATES}/{}", names::tls::AUTHORITY),
            allowed_clients: [names::CLIENT_OPERATOR, names::CLIENT_DRIVER],
        },
        http: Http { listen: any(ports.metrics) },
        log: Log { format: "json" },
        pool,
    };
    toml::to_string(&file).expect("strings, numbers and lists are TOML")
}
