//! The configuration file of an instance's server.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use forebay_api::cluster::{Backend, BackendKind, QuotaKind, Sealing, Signing, Transport};
use forebay_api::names;
use serde::Serialize;

use super::{View, fabric};

/// Directory of the server's certificates.
pub const CERTIFICATES: &str = "/etc/forebay/tls";
/// Directory of the server's configuration.
pub const CONFIGURATION: &str = "/etc/forebay/config";
/// Directory in which the keys of NVMe-oF backends are mounted, one folder each.
pub const KEYS: &str = "/etc/forebay/nvmeof";
/// Directory in which their TLS keys are mounted, one folder each.
pub const KEYS_TLS: &str = "/etc/forebay/nvmeof-tls";
/// Directory in which the backends' directories are mounted.
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
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_uid: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    takeover_after_s: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    addresses: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    interface: Option<String>,
}

#[derive(Serialize)]
struct Server {
    listen: Vec<String>,
    advertise: Vec<String>,
    signing: &'static str,
    encryption: &'static str,
    /// If this is missing, the server accepts clients over RDMA on every device that it finds.
    #[serde(skip_serializing_if = "Option::is_none")]
    rdma: Option<&'static str>,
    rdma_port: u16,
    iwarp_port: u16,
    drain_timeout_s: u32,
    /// Settings that equal the default are omitted, so that an upgrade of the operator does not restart the server for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    caching: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    directory_leases: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    direct_reads: Option<bool>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    nvmeof: Option<Nvmeof>,
}

#[derive(Serialize)]
struct Nvmeof {
    nqn: String,
    namespace: String,
    paths: Vec<String>,
    /// Not the machine's host name: the target allows the host NQN that is derived from the node's name.
    node: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    machine_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    adopt_key: Option<String>,
    format: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    write_through: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dhchap_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dhchap_controller_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_identity: Option<u8>,
    connect_time_s: u32,
    keep_alive_s: u32,
    loss_time_s: u32,
}

fn nvmeof(view: &View<'_>, instance: &str, backend: &Backend) -> Option<Nvmeof> {
    let found = fabric::of(view, instance, backend).ok()?;
    let key = |name: &str| format!("{KEYS}/{}/{name}", backend.name);
    let owner = view.observed.record.owners.get(instance);
    let mutual = found.keys.as_ref().is_some_and(|(_, mutual)| *mutual);
    Some(Nvmeof {
        nqn: found.nqn,
        namespace: found.namespace,
        paths: found.paths,
        node: view.seats.get(instance)?.node.clone(),
        machine_id: owner.map(|owner| owner.machine_id.clone()).filter(|id| !id.is_empty()),
        adopt_key: view.observed.record.adopted.get(&(instance.to_owned(), backend.name.clone())).cloned(),
        format: found.format,
        write_through: (!found.write_through).then_some(false),
        dhchap_key: found.keys.map(|_| key("host")),
        dhchap_controller_key: mutual.then(|| key("controller")),
        tls_key: found.tls_identity.map(|_| format!("{KEYS_TLS}/{}/psk", backend.name)),
        tls_identity: found.tls_identity,
        connect_time_s: found.connect_time_s,
        keep_alive_s: found.keep_alive_s,
        loss_time_s: found.loss_time_s,
    })
}

/// Returns the file for an instance on a node with this address. `made` lists the pools that already exist.
#[must_use]
pub fn file(view: &View<'_>, instance: &str, address: IpAddr, made: &BTreeSet<String>) -> String {
    let spec = &view.cluster.spec;
    let ports = &spec.network.ports;
    let own = fabric::own_address(view, instance);
    let owner = view.observed.record.owners.get(instance);
    // All addresses are of the same family: on a node with IPv6 disabled, listening on `[::]` would fail.
    let four = address.is_ipv4() && own.is_none_or(|own| own.is_ipv4());
    let any = |port: u16| if four { format!("0.0.0.0:{port}") } else { format!("[::]:{port}") };
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
                nvmeof: None,
            }),
            BackendKind::NVMeoF | BackendKind::Target => Some(Pool {
                name: backend.name.clone(),
                path: format!("{POOLS}/{}/{instance}", backend.name),
                create: true,
                existing: made.contains(&backend.name),
                quota: "project",
                overcommit: f64::from(backend.overcommit_percent()) / 100.0,
                nvmeof: Some(nvmeof(view, instance, backend)?),
            }),
        })
        .collect();
    let file = File {
        instance: Instance {
            name: instance.to_owned(),
            epoch: view.epoch(instance),
            cluster_uid: owner.map(|owner| owner.cluster_uid.clone()),
            takeover_after_s: (view.movable() && spec.takeover.enabled)
                .then(|| spec.takeover.after().as_secs()),
            addresses: fabric::own_network(view, instance).into_iter().collect(),
            interface: view.cluster.spec.network.interface.clone(),
        },
        server: Server {
            listen: vec![any(ports.smb)],
            advertise: vec![std::net::SocketAddr::new(own.unwrap_or(address), ports.smb).to_string()],
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
            caching: (!spec.io.caching).then_some(false),
            directory_leases: (!spec.io.directory_leases).then_some(false),
            direct_reads: spec.io.direct_reads.then_some(true),
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
