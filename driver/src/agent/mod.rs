//! The node agent: publishes the hardware of this node as its StorageNode and keeps it up to date.
//!
//! The agent reads the node every few seconds and writes the status only if it differs, so that a cluster of a thousand quiet
//! nodes causes almost no load on the API server. Everything is applied server-side with one field manager: fields that others
//! set (`spec.unschedulable`, labels) are never touched.

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

/// Field manager of the agent at the API server.
const FIELD_MANAGER: &str = "forebay-node-agent";

/// Interval between reads of the node.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);

/// Interval at which the object itself is applied again, so that it is recreated after it was deleted or its Node was replaced,
/// and its generation is followed.
const APPLY_INTERVAL: Duration = Duration::from_secs(120);

/// Reads one node and publishes it.
pub(crate) struct Agent {
    client: Client,
    node: String,
    host: Arc<Host>,
    root: Arc<Path>,
    /// The node's RDMA devices, as offered to the kubelet.
    offer: watch::Sender<Offer>,
    reading: InFlight,
}

/// The published state at the API server.
struct Published {
    status: StorageNodeStatus,
    generation: Option<i64>,
    applied: Instant,
}

impl Agent {
    /// Creates an agent for the host with its file trees below `root`.
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

    /// Publishes until `stop`. Failures are retried at the next read: a node serves its pods without its agent.
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
                    // Warns once per outage; later failures are logged at debug level.
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
        // Before the API server is called: the offer to the kubelet does not depend on it.
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
        // The API server stores whole seconds.
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

    /// Reads the node on a dedicated thread: if a driver hangs, reads of its files never return. The inner error is about the
    /// addresses: without them, every port would appear unusable.
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

    /// Creates the StorageNode if it is missing. The Node owns it, so it is deleted with the Node.
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
    // This agent is the authoritative source of these values.
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
