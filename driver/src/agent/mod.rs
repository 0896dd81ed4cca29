//! The node agent: publishes what this node has as its StorageNode, and keeps that true.
//!
//! The node is looked at every few seconds, and the status is written when it differs, so that a cluster of a thousand
//! quiet nodes costs the API server next to nothing. Everything is applied on the server's side under one field manager:
//! what others set (`spec.unschedulable`, labels) is never touched.

pub(crate) mod status;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_api::node::StorageNodeStatus;
use forebay_api::{GROUP, StorageNode, VERSION, names};
use forebay_inventory::{Addresses, Host};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tracing::{debug, info, warn};

use crate::agent::status::{Findings, Unknown};
use crate::deadline::run_until;
use crate::device_plugin::Offer;
use crate::error::Error;
use crate::in_flight::InFlight;
use crate::limits::{INVENTORY_DEADLINE, KUBERNETES_DEADLINE};

/// Under this name the agent's fields are known to the API server.
const FIELD_MANAGER: &str = "forebay-node-agent";

/// How often the node is looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);

/// How often the object itself is applied again, so that it comes back when it is deleted or its Node is another
/// one, and follows its generation.
const APPLY_INTERVAL: Duration = Duration::from_secs(120);

/// Looks at one node and publishes it.
pub(crate) struct Agent {
    client: Client,
    node: String,
    host: Arc<Host>,
    root: Arc<Path>,
    /// What is reported to the kubelet about the node's RDMA devices.
    offer: watch::Sender<Offer>,
    reading: InFlight,
}

/// What the API server has.
struct Published {
    status: StorageNodeStatus,
    generation: Option<i64>,
    applied: Instant,
}

impl Agent {
    /// For the host with its trees below `root`.
    pub(crate) fn new(client: Client, node: &str, root: &Path, offer: watch::Sender<Offer>) -> Self {
        Self {
            client,
            node: node.to_owned(),
            host: Arc::new(Host::at(root)),
            root: root.into(),
            offer,
            reading: InFlight::default(),
        }
    }

    /// Publishes until `stop`. What fails is tried again at the next look: a node serves its pods without its agent.
    pub(crate) async fn run(self, mut stop: watch::Receiver<bool>) {
        let mut ticks = interval(LOOK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut published = None;
        let mut failing = false;
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
            match self.look(&mut published).await {
                Ok(()) => {
                    if failing {
                        info!(node = self.node, "the StorageNode is published again");
                    }
                    failing = false;
                }
                Err(error) => {
                    // A warning once per outage; later failures are for debugging.
                    let error = format!("{error:#}");
                    if failing {
                        debug!(node = self.node, error, "cannot publish the StorageNode");
                    } else {
                        warn!(node = self.node, error, "cannot publish the StorageNode, trying again");
                    }
                    failing = true;
                    published = None;
                }
            }
        }
    }

    async fn look(&self, published: &mut Option<Published>) -> anyhow::Result<()> {
        // Before the API server is asked: what the kubelet may give out does not depend on it.
        let found = self.findings().await;
        if let Ok(Ok((_, offer))) = &found {
            self.offer.send_if_modified(|known| {
                let differs = known != offer;
                known.clone_from(offer);
                differs
            });
        }
        let current = match published.take() {
            Some(published) if published.applied.elapsed() < APPLY_INTERVAL => published,
            _ => timeout(KUBERNETES_DEADLINE, self.apply()).await??,
        };
        let now = Time(k8s_openapi::jiff::Timestamp::now());
        // The API server keeps whole seconds.
        let now = Time(k8s_openapi::jiff::Timestamp::from_second(now.0.as_second()).unwrap_or(now.0));
        let status = match found {
            Ok(Ok((findings, _))) => status::status(&findings, &current.status, current.generation, &now),
            Ok(Err(error)) => {
                let unknown = Unknown::Addresses(error.to_string());
                status::unknown(&unknown, &current.status, current.generation, &now)
            }
            Err(Error::Deadline { .. } | Error::InFlight(_)) => {
                let unknown = Unknown::Hangs { seconds: INVENTORY_DEADLINE.as_secs() };
                status::unknown(&unknown, &current.status, current.generation, &now)
            }
            Err(error) => return Err(error.into()),
        };
        if status != current.status {
            timeout(KUBERNETES_DEADLINE, self.apply_status(&status)).await??;
            info!(
                node = self.node,
                rdma = status.summary.rdma,
                nvme = status.summary.nvme,
                "published the node"
            );
        } else {
            debug!(node = self.node, "looked at the node, nothing has changed");
        }
        *published = Some(Published { status, ..current });
        Ok(())
    }

    /// Looks at the node on a thread of its own: a driver that hangs lets no read of its files end. The inner error is
    /// that of the addresses: without them every port would look unusable.
    async fn findings(&self) -> Result<std::io::Result<(Findings, Offer)>, Error> {
        let claim = self.reading.claim(&self.node)?;
        let host = Arc::clone(&self.host);
        let root = Arc::clone(&self.root);
        run_until("inventory", INVENTORY_DEADLINE, move || {
            let _claim = claim;
            let findings = Findings {
                addresses: addresses()?,
                inventory: host.read(),
                architecture: rustix::system::uname().machine().to_string_lossy().into_owned(),
            };
            let offer = Offer::read(&root, findings.has_usable_port());
            Ok((findings, offer))
        })
        .await
    }

    /// Makes the StorageNode where it is missing. The Node owns it, so that it goes when the Node goes.
    async fn apply(&self) -> kube::Result<Published> {
        let node = Api::<Node>::all(self.client.clone()).get(&self.node).await?;
        let object = json!({
            "apiVersion": format!("{GROUP}/{VERSION}"),
            "kind": "StorageNode",
            "metadata": {
                "name": self.node,
                "labels": { names::LABEL_MANAGED_BY: names::MANAGED_BY_DRIVER },
                "ownerReferences": [{
                    "apiVersion": "v1",
                    "kind": "Node",
                    "name": self.node,
                    "uid": node.uid().unwrap_or_default(),
                }],
            },
            "spec": {},
        });
        let applied = self.api().patch(&self.node, &parameters(), &Patch::Apply(object)).await?;
        Ok(Published {
            generation: applied.metadata.generation,
            status: applied.status.unwrap_or_default(),
            applied: Instant::now(),
        })
    }

    async fn apply_status(&self, status: &StorageNodeStatus) -> kube::Result<()> {
        let object = json!({
            "apiVersion": format!("{GROUP}/{VERSION}"),
            "kind": "StorageNode",
            "metadata": { "name": self.node },
            "status": status,
        });
        self.api().patch_status(&self.node, &parameters(), &Patch::Apply(object)).await?;
        Ok(())
    }

    fn api(&self) -> Api<StorageNode> {
        Api::all(self.client.clone())
    }
}

fn parameters() -> PatchParams {
    // What is measured here is the best source.
    PatchParams::apply(FIELD_MANAGER).force()
}

/// The addresses of this network namespace, which must be the host's.
pub(crate) fn addresses() -> std::io::Result<Addresses> {
    let mut addresses = Addresses::new();
    for interface in if_addrs::get_if_addrs()? {
        let ip = interface.ip();
        addresses.entry(interface.name).or_default().push(ip);
    }
    Ok(addresses)
}
