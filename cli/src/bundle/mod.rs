//! `kubectl forebay bundle`: status, objects, metrics and logs in one archive for support, without secrets.

mod archive;
mod redact;

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::path::PathBuf;

use anyhow::Context;
use forebay_api::{DRIVER, GROUP, VERSION};
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams, LogParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tokio::time::timeout;

use self::archive::Archive;
use crate::limits::{BUNDLE_LIST_DEADLINE, BUNDLE_LOG_BYTES_MAX, BUNDLE_LOG_DEADLINE};
use crate::options::Bundle;
use crate::paint::Paint;
use crate::snapshot::{self, Snapshot, words};
use crate::{doctor, scrape, status};

/// A kind of object in the bundle; its file is named after the plural.
struct Kind {
    group: &'static str,
    version: &'static str,
    plural: &'static str,
    /// Whether only Forebay's namespace is read.
    of_namespace: bool,
    /// Label selector for the objects.
    selector: &'static str,
    /// Filter for the objects to keep.
    keep: fn(&Value) -> bool,
}

/// A kind that is read in Forebay's namespace.
const fn here(group: &'static str, version: &'static str, plural: &'static str) -> Kind {
    Kind { of_namespace: true, ..everywhere(group, version, plural) }
}

/// A kind that is cluster-scoped, or read in every namespace.
const fn everywhere(group: &'static str, version: &'static str, plural: &'static str) -> Kind {
    Kind { group, version, plural, of_namespace: false, selector: "", keep: |_| true }
}

fn is_ours(object: &Value) -> bool {
    [
        &object["spec"]["csi"]["driver"],
        &object["provisioner"],
        &object["driver"],
        &object["driverName"],
        &object["spec"]["driver"],
    ]
    .iter()
    .any(|driver| **driver == DRIVER)
}

/// Kinds that a cluster does not have are missing in the bundle, too.
const KINDS: [Kind; 26] = [
    here(GROUP, VERSION, "storageclusters"),
    everywhere(GROUP, VERSION, "storagenodes"),
    everywhere("", "v1", "nodes"),
    here("", "v1", "pods"),
    here("", "v1", "events"),
    here("", "v1", "services"),
    here("discovery.k8s.io", "v1", "endpointslices"),
    Kind { selector: "app.kubernetes.io/name=forebay", ..here("", "v1", "configmaps") },
    here("", "v1", "serviceaccounts"),
    here("", "v1", "resourcequotas"),
    here("coordination.k8s.io", "v1", "leases"),
    here("apps", "v1", "deployments"),
    here("apps", "v1", "daemonsets"),
    here("apps", "v1", "statefulsets"),
    here("batch", "v1", "cronjobs"),
    here("policy", "v1", "poddisruptionbudgets"),
    here("networking.k8s.io", "v1", "networkpolicies"),
    here("storage.k8s.io", "v1", "csistoragecapacities"),
    everywhere("storage.k8s.io", "v1", "csidrivers"),
    everywhere("storage.k8s.io", "v1", "csinodes"),
    Kind { keep: is_ours, ..everywhere("storage.k8s.io", "v1", "storageclasses") },
    Kind { keep: is_ours, ..everywhere("storage.k8s.io", "v1", "volumeattributesclasses") },
    Kind { keep: is_ours, ..everywhere("", "v1", "persistentvolumes") },
    Kind { keep: is_ours, ..everywhere("snapshot.storage.k8s.io", "v1", "volumesnapshotclasses") },
    Kind { keep: is_ours, ..everywhere("snapshot.storage.k8s.io", "v1", "volumesnapshotcontents") },
    everywhere("apiextensions.k8s.io", "v1", "customresourcedefinitions"),
];

/// Names of ports with metrics: Forebay's own, and those of the CSI sidecars.
const METRICS_PORTS: [&str; 4] = ["metrics", "provisioner", "resizer", "snapshotter"];

/// Claims in every namespace; those that belong to a Forebay volume are kept.
const CLAIMS: Kind = everywhere("", "v1", "persistentvolumeclaims");

/// Writes the bundle and returns a summary for the terminal.
pub(crate) fn run(options: &Bundle) -> anyhow::Result<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("start the runtime")?.block_on(write(options))
}

async fn write(options: &Bundle) -> anyhow::Result<String> {
    let now = Timestamp::now();
    let (client, namespace) = snapshot::connect(&options.connection).await?;
    let namespace = namespace.context("-A is not supported: a bundle covers one namespace")?;
    let snapshot = Snapshot::take(&options.connection).await?;
    let name = format!("forebay-bundle-{}", now.strftime("%Y%m%dT%H%M%SZ"));
    let path = options.file.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.tar.gz")));
    let time = u64::try_from(now.as_second()).unwrap_or_default();
    let archive = Archive::create(&path, &name, time)?;
    let mut writer =
        Writer { client, namespace, archive, missing: Vec::new(), shows: io::stderr().is_terminal() };
    let written = writer.everything(&snapshot, options, now).await;
    let Writer { archive, missing, .. } = writer;
    let finished = written.and_then(|()| archive.finish());
    let files = finished.inspect_err(|_| {
        // Half an archive is useless.
        let _ = std::fs::remove_file(&path);
    })?;
    let mut text = format!("{}: {files} files. Secrets were not read. ", path.display());
    let _ =
        writeln!(text, "It contains names of nodes and claims, and addresses: review it before you send it.");
    if !missing.is_empty() {
        let _ = writeln!(
            text,
            "{} items could not be read; README.txt in the archive lists them.",
            missing.len()
        );
    }
    Ok(text)
}

/// A bundle in progress.
struct Writer {
    client: Client,
    namespace: String,
    archive: Archive,
    /// What could not be read, and why.
    missing: Vec<String>,
    /// Whether to show progress, which requires a terminal.
    shows: bool,
}

impl Writer {
    async fn everything(
        &mut self,
        snapshot: &Snapshot,
        options: &Bundle,
        now: Timestamp,
    ) -> anyhow::Result<()> {
        self.overview(snapshot, now)?;
        for kind in &KINDS {
            self.objects(kind, kind.keep).await?;
        }
        self.objects(&CLAIMS, |claim| {
            let volumes = snapshot.volumes.as_deref().unwrap_or_default();
            let named = claim["spec"]["volumeName"].as_str().unwrap_or_default();
            let ours = |class: &&str| {
                let classes = snapshot.storage_classes.as_deref().unwrap_or_default();
                classes.iter().any(|c| c.metadata.name.as_deref() == Some(*class))
            };
            volumes.iter().any(|volume| volume.metadata.name.as_deref() == Some(named))
                || claim["spec"]["storageClassName"].as_str().as_ref().is_some_and(ours)
        })
        .await?;
        self.secrets().await?;
        let pods = snapshot.pods.as_deref().unwrap_or_default();
        for (number, pod) in pods.iter().enumerate() {
            self.show(&format!("pod {} of {}: {}", number + 1, pods.len(), pod.name_any()));
            self.metrics(pod).await?;
            self.logs(pod, options).await?;
        }
        self.show("");
        self.read_me(now)
    }

    fn show(&self, what: &str) {
        if self.shows {
            let mut error = io::stderr().lock();
            // Clears the line first.
            let _ = write!(error, "\r\x1b[K{what}");
            let _ = error.flush();
        }
    }

    fn overview(&mut self, snapshot: &Snapshot, now: Timestamp) -> anyhow::Result<()> {
        match status::View::new(snapshot, now) {
            Ok(view) => {
                self.archive.add("status.txt", status::render(&view, true, Paint::new(false)).as_bytes())?;
                self.archive.add("status.json", pretty(&serde_json::to_value(&view)?).as_bytes())?;
            }
            Err(error) => self.missing.push(format!("status: {error:#}")),
        }
        let findings = doctor::examine(snapshot);
        self.archive.add("doctor.txt", doctor::render(&findings, true, Paint::new(false)).as_bytes())?;
        self.archive.add("doctor.json", pretty(&serde_json::to_value(&findings)?).as_bytes())
    }

    async fn objects(&mut self, kind: &Kind, keep: impl Fn(&Value) -> bool) -> anyhow::Result<()> {
        let Kind { group, version, plural, .. } = kind;
        self.show(plural);
        // Requests use the plural; the kind's own name is not needed.
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, ""), plural);
        let client = self.client.clone();
        let api: Api<DynamicObject> = match kind.of_namespace {
            true => Api::namespaced_with(client, &self.namespace, &resource),
            false => Api::all_with(client, &resource),
        };
        let parameters = ListParams::default().labels(kind.selector);
        let listed = timeout(BUNDLE_LIST_DEADLINE, snapshot::list(api, &parameters)).await;
        match listed.unwrap_or_else(|_| Err("no answer from the API server".to_owned())) {
            Ok(found) => {
                let mut items = found.iter().map(serde_json::to_value).collect::<Result<Vec<Value>, _>>()?;
                items.retain(keep);
                items.iter_mut().for_each(redact::object);
                let text = pretty(&json!({ "kind": "List", "apiVersion": "v1", "items": items }));
                self.archive.add(&format!("objects/{plural}.json"), text.as_bytes())
            }
            Err(why) => {
                self.missing.push(format!("{plural}: {why}"));
                Ok(())
            }
        }
    }

    /// Lists the Secrets without their contents, which are not even requested.
    async fn secrets(&mut self) -> anyhow::Result<()> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let listed = timeout(BUNDLE_LIST_DEADLINE, api.list_metadata(&ListParams::default())).await;
        match listed.map(|result| result.map_err(|error| words(&error))) {
            Ok(Ok(list)) => {
                let secrets: Vec<Value> = list
                    .items
                    .iter()
                    .map(|secret| {
                        json!({ "name": secret.name_any(), "labels": secret.labels(),
                        "creationTimestamp": secret.creation_timestamp(), "finalizers": secret.finalizers() })
                    })
                    .collect();
                self.archive.add("objects/secret-names.json", pretty(&json!(secrets)).as_bytes())
            }
            Ok(Err(why)) => {
                self.missing.push(format!("names of Secrets: {why}"));
                Ok(())
            }
            Err(_) => {
                self.missing.push("names of Secrets: no answer from the API server".to_owned());
                Ok(())
            }
        }
    }

    async fn metrics(&mut self, pod: &Pod) -> anyhow::Result<()> {
        for port in scrape::ports(pod, &METRICS_PORTS) {
            let name = format!("metrics/{}-{port}.txt", pod.name_any());
            match timeout(BUNDLE_LOG_DEADLINE, scrape::metrics(&self.client, pod, port)).await {
                Ok(Ok(text)) => self.archive.add(&name, text.as_bytes())?,
                Ok(Err(why)) => self.missing.push(format!("{name}: {why}")),
                Err(_) => self.missing.push(format!("{name}: no answer")),
            }
        }
        Ok(())
    }

    /// Adds the logs of each container, including those of its previous run if it was restarted.
    async fn logs(&mut self, pod: &Pod, options: &Bundle) -> anyhow::Result<()> {
        let namespace = pod.namespace().unwrap_or_default();
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        for (container, restarted) in containers(pod) {
            for previous in [false, true] {
                if previous && !restarted {
                    continue;
                }
                let parameters = LogParams {
                    container: Some(container.clone()),
                    previous,
                    timestamps: true,
                    tail_lines: Some(options.log_lines),
                    limit_bytes: Some(BUNDLE_LOG_BYTES_MAX),
                    ..LogParams::default()
                };
                let end = if previous { ".previous" } else { "" };
                let name = format!("logs/{}/{container}{end}.log", pod.name_any());
                match timeout(BUNDLE_LOG_DEADLINE, api.logs(&pod.name_any(), &parameters)).await {
                    Ok(Ok(text)) => self.archive.add(&name, text.as_bytes())?,
                    Ok(Err(error)) => self.missing.push(format!("{name}: {}", words(&error))),
                    Err(_) => self.missing.push(format!("{name}: no answer")),
                }
            }
        }
        Ok(())
    }

    fn read_me(&mut self, now: Timestamp) -> anyhow::Result<()> {
        let mut text = format!(
            "Support bundle of Forebay, namespace {}, {now}, by kubectl-forebay {}.\n\n\
             status.txt, doctor.txt  output of `kubectl forebay status -o wide` and `doctor --all`\n\
             objects/                objects of Kubernetes, without secrets and managed fields\n\
             metrics/                metrics of each pod\n\
             logs/                   logs of each container; .previous is from before its last restart\n",
            self.namespace,
            env!("CARGO_PKG_VERSION"),
        );
        if !self.missing.is_empty() {
            let _ = write!(text, "\nCould not be read:\n");
            for missing in &self.missing {
                let _ = writeln!(text, "- {missing}");
            }
        }
        self.archive.add("README.txt", text.as_bytes())
    }
}

/// Returns the containers of a pod, and whether each was restarted.
fn containers(pod: &Pod) -> Vec<(String, bool)> {
    let status = pod.status.as_ref();
    let statuses = status.iter().flat_map(|s| s.container_statuses.iter().chain(&s.init_container_statuses));
    let restarted: Vec<&str> =
        statuses.flatten().filter(|s| s.restart_count > 0).map(|s| s.name.as_str()).collect();
    let spec = pod.spec.iter();
    spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
        .map(|container| (container.name.clone(), restarted.contains(&container.name.as_str())))
        .collect()
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}
