//! `kubectl forebay who`: the pods that use a claim, and the sessions and open files on its server.

use anyhow::{Context, bail};
use forebay_api::DRIVER;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, Volume};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use serde::Serialize;
use tokio::time::timeout;

use crate::limits::READ_DEADLINE;
use crate::options::{Format, Who};
use crate::paint::{Paint, Tone};
use crate::quantity::age;
use crate::scrape;
use crate::snapshot::{self, list};
use crate::table::{Cell, Table};

/// The data to show.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct View {
    namespace: String,
    claim: String,
    persistent_volume: String,
    instance: String,
    /// The server's counts; absent if it could not be queried.
    #[serde(skip_serializing_if = "Option::is_none")]
    clients: Option<Clients>,
    pods: Vec<User>,
    /// What could not be read.
    unread: Vec<String>,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Clients {
    sessions: u64,
    open_files: u64,
}

/// A pod that uses the claim.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct User {
    pod: String,
    /// The object that owns it, such as `Job/training`.
    owner: String,
    node: String,
    state: String,
    read_only: bool,
    age: String,
}

/// Finds the pods that use a claim.
pub(crate) fn run(options: &Who, paint: Paint) -> anyhow::Result<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let view = runtime.block_on(async {
        let seconds = READ_DEADLINE.as_secs();
        let found = timeout(READ_DEADLINE, look(options)).await;
        found.with_context(|| format!("the API server does not answer in {seconds} s"))?
    })?;
    Ok(match options.output {
        Format::Json => crate::json(&view)?,
        Format::Table => render(&view, false, paint),
        Format::Wide => render(&view, true, paint),
    })
}

async fn look(options: &Who) -> anyhow::Result<View> {
    let Some((namespace, claim)) =
        options.claim.split_once('/').filter(|(n, c)| !n.is_empty() && !c.is_empty())
    else {
        bail!("name the claim as NAMESPACE/CLAIM, such as team/data")
    };
    let (client, forebay) = snapshot::connect(&options.connection).await?;
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
    let found = claims.get_opt(claim).await.context("read the claim")?;
    let found = found.with_context(|| format!("there is no claim {claim} in namespace {namespace}"))?;
    let Some(name) = found.spec.and_then(|spec| spec.volume_name).filter(|name| !name.is_empty()) else {
        bail!(
            "claim {namespace}/{claim} has no volume yet; `kubectl -n {namespace} describe pvc {claim}` says why"
        )
    };
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let mut unread = Vec::new();
    let volume = match volumes.get_opt(&name).await {
        Ok(volume) => volume,
        Err(error) => {
            unread.push(format!("PersistentVolume {name}: {}", snapshot::words(&error)));
            None
        }
    };
    let csi = volume.and_then(|volume| volume.spec?.csi);
    if let Some(csi) = &csi
        && csi.driver != DRIVER
    {
        bail!("claim {namespace}/{claim} has a volume of {}, not of Forebay", csi.driver);
    }
    // `<instance>/<volume>`.
    let (instance, id) = csi
        .as_ref()
        .and_then(|csi| csi.volume_handle.rsplit_once('/'))
        .map(|(instance, id)| (instance.to_owned(), id.to_owned()))
        .unwrap_or_default();
    let pods = list(Api::<Pod>::namespaced(client.clone(), namespace), &ListParams::default()).await;
    let pods =
        pods.map_err(|why| anyhow::anyhow!("pods of namespace {namespace} cannot be listed: {why}"))?;
    let clients = match snapshot::pods(&client, forebay.as_deref()).await {
        Err(why) => {
            unread.push(format!("pods of Forebay: {why}"));
            None
        }
        Ok(servers) => {
            let mine: Vec<Pod> = servers.into_iter().filter(|pod| serves(pod, &instance)).collect();
            let (scrapes, mut failed) = scrape::servers(&client, &mine).await;
            unread.append(&mut failed);
            let mut volumes = scrapes.iter().filter_map(|scrape| scrape.volumes.get(&id));
            volumes.next().map(|counts| Clients {
                sessions: counts.sessions as u64,
                open_files: counts.open_files as u64,
            })
        }
    };
    Ok(View {
        pods: users(&pods, claim, Timestamp::now()),
        namespace: namespace.to_owned(),
        claim: claim.to_owned(),
        persistent_volume: name,
        instance,
        clients,
        unread,
    })
}

/// Whether it is the pod of the instance's server.
pub(crate) fn serves(pod: &Pod, instance: &str) -> bool {
    pod.labels().get(forebay_api::names::LABEL_INSTANCE).is_some_and(|of| of == instance)
}

/// Returns the pods in the claim's namespace that use it as a volume and may have mounted it.
fn users(pods: &[Pod], claim: &str, now: Timestamp) -> Vec<User> {
    let mut users: Vec<User> = pods
        .iter()
        .filter_map(|pod| {
            let spec = pod.spec.as_ref()?;
            let volume = spec.volumes.iter().flatten().find(|volume| names(volume, pod, claim))?;
            let status = pod.status.as_ref();
            let phase = status.and_then(|status| status.phase.clone()).unwrap_or_default();
            if matches!(phase.as_str(), "Succeeded" | "Failed") {
                return None;
            }
            let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
            let mut mounts = containers
                .flat_map(|container| container.volume_mounts.iter().flatten())
                .filter(|mount| mount.name == volume.name);
            let read_only =
                volume.persistent_volume_claim.as_ref().is_some_and(|c| c.read_only == Some(true))
                    || mounts.all(|mount| mount.read_only == Some(true));
            let owner = pod.owner_references().first();
            Some(User {
                pod: pod.name_any(),
                owner: owner.map(|owner| format!("{}/{}", owner.kind, owner.name)).unwrap_or_default(),
                node: spec.node_name.clone().unwrap_or_default(),
                state: if pod.metadata.deletion_timestamp.is_some() {
                    "Terminating".to_owned()
                } else {
                    phase
                },
                read_only,
                age: age(pod.metadata.creation_timestamp.as_ref(), now),
            })
        })
        .collect();
    users.sort_by(|a, b| (&a.node, &a.pod).cmp(&(&b.node, &b.pod)));
    users
}

fn names(volume: &Volume, pod: &Pod, claim: &str) -> bool {
    match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(source), _) => source.claim_name == claim,
        // The claim of a generic ephemeral volume is named after both.
        (None, Some(_)) => claim == format!("{}-{}", pod.name_any(), volume.name),
        (None, None) => false,
    }
}

fn render(view: &View, wide: bool, paint: Paint) -> String {
    let View { namespace, claim, persistent_volume, instance, .. } = view;
    let mut text = format!("{namespace}/{claim}: volume {persistent_volume}");
    if !instance.is_empty() {
        text.push_str(&format!(" of instance {instance}"));
    }
    if let Some(Clients { sessions, open_files }) = &view.clients {
        text.push_str(&format!("; {sessions} SMB sessions, {open_files} open files"));
    }
    text.push_str("\n\n");
    if view.pods.is_empty() {
        text.push_str("No pod uses it.\n");
    } else {
        let heads = ["POD", "OWNER", "NODE", "STATE", "ACCESS"];
        let mut table = Table::new(&if wide { [&heads[..], &["AGE"]].concat() } else { heads.to_vec() });
        for user in &view.pods {
            let tone = if user.state == "Running" { Tone::Good } else { Tone::Doubtful };
            let mut cells: Vec<Cell> = vec![
                user.pod.as_str().into(),
                user.owner.as_str().into(),
                user.node.as_str().into(),
                Cell::toned(user.state.as_str(), tone),
                if user.read_only { "read-only" } else { "read-write" }.into(),
            ];
            if wide {
                cells.push(user.age.as_str().into());
            }
            table.row(cells);
        }
        text.push_str(&table.render(paint));
    }
    if !view.unread.is_empty() {
        text.push_str(&format!("\n{}\n", paint.text(Tone::Doubtful, "Not read")));
        view.unread.iter().for_each(|line| text.push_str(&format!("  {line}\n")));
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture::{now, object};

    fn pod(name: &str, node: &str, phase: &str, volume: Value, read_only: bool) -> Pod {
        object(json!({
            "metadata": {"name": name, "namespace": "team", "creationTimestamp": "2026-11-21T15:00:00Z",
                "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "training", "uid": "1"}]},
            "spec": {"nodeName": node, "volumes": [volume, {"name": "scratch", "emptyDir": {}}],
                "containers": [{"name": "main", "volumeMounts": [{"name": "data", "mountPath": "/d", "readOnly": read_only},
                    {"name": "scratch", "mountPath": "/s"}]}]},
            "status": {"phase": phase},
        }))
    }

    #[test]
    fn only_unfinished_pods_of_the_claim_are_listed() {
        let of = |claim: &str| json!({"name": "data", "persistentVolumeClaim": {"claimName": claim}});
        let pods = [
            pod("b", "worker-2", "Running", of("data"), false),
            pod("a", "worker-1", "Pending", of("data"), true),
            pod("other", "worker-1", "Running", of("another"), false),
            pod("done", "worker-1", "Succeeded", of("data"), false),
            pod("eph", "worker-1", "Running", json!({"name": "data", "ephemeral": {}}), false),
        ];
        let found = users(&pods, "data", now());
        let short: Vec<_> =
            found.iter().map(|user| (user.pod.as_str(), user.read_only, user.state.as_str())).collect();
        assert_eq!(short, [("a", true, "Pending"), ("b", false, "Running")]);
        assert_eq!((found[0].owner.as_str(), found[0].age.as_str()), ("Job/training", "60m"));
        let ephemeral: Vec<String> =
            users(&pods, "eph-data", now()).into_iter().map(|user| user.pod).collect();
        assert_eq!(ephemeral, ["eph"]);

        let view = View {
            namespace: "team".to_owned(),
            claim: "data".to_owned(),
            persistent_volume: "pvc-1".to_owned(),
            instance: "main-0".to_owned(),
            clients: Some(Clients { sessions: 2, open_files: 17 }),
            pods: found,
            unread: Vec::new(),
        };
        let expected = "\
team/data: volume pvc-1 of instance main-0; 2 SMB sessions, 17 open files

POD   OWNER          NODE       STATE     ACCESS
a     Job/training   worker-1   Pending   read-only
b     Job/training   worker-2   Running   read-write
";
        assert_eq!(render(&view, false, Paint::new(false)), expected);
        let empty = View { pods: Vec::new(), clients: None, ..view };
        assert!(render(&empty, true, Paint::new(false)).ends_with("\n\nNo pod uses it.\n"));
    }
}
