//! `kubectl forebay pause` and `resume`: whether the operator works on a StorageCluster.

use anyhow::{Context, bail};
use forebay_api::StorageCluster;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use tokio::time::timeout;

use crate::limits::CHANGE_DEADLINE;
use crate::options::OneCluster;
use crate::snapshot::{self, words};

/// Field manager of the change.
const FIELD_MANAGER: &str = "kubectl-forebay";

/// Sets `spec.paused`, and returns what has changed, for the terminal.
pub(crate) fn run(options: &OneCluster, paused: bool) -> anyhow::Result<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let change = async { timeout(CHANGE_DEADLINE, set(options, paused)).await };
    runtime.context("start the runtime")?.block_on(change).context("the API server does not answer")?
}

async fn set(options: &OneCluster, paused: bool) -> anyhow::Result<String> {
    let name = &options.cluster;
    let (client, namespace) = snapshot::connect(&options.connection).await?;
    let namespace = namespace.context("-A is not supported: name one StorageCluster and its namespace")?;
    let api: Api<StorageCluster> = Api::namespaced(client, &namespace);
    let found = api.get_opt(name).await.map_err(|error| anyhow::anyhow!(words(&error)))?;
    let Some(cluster) = found else { bail!("there is no StorageCluster {name} in namespace {namespace}") };
    if cluster.spec.paused == paused {
        return Ok(format!("{name}: already {}\n", if paused { "paused" } else { "not paused" }));
    }
    let patch = json!({ "spec": { "paused": paused } });
    let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    let patched = api.patch(name, &parameters, &Patch::Merge(patch)).await;
    patched.map_err(|error| anyhow::anyhow!(words(&error))).with_context(|| format!("change {name}"))?;
    Ok(if paused {
        format!(
            "{name}: paused. Servers continue and volumes stay usable. The operator changes nothing: no failover, no rollout, no \
             renewal of certificates, until `kubectl forebay resume {name}`.\n"
        )
    } else {
        format!("{name}: resumed. The operator reconciles it again.\n")
    })
}
