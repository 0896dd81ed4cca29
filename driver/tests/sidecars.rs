//! The driver behind upstream's sidecars: a claim becomes a volume, grows, and is deleted. All with the chart's rights.
#![allow(clippy::unwrap_used)]

mod process;
mod town;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_api::names;
use forebay_e2e::cache::Cache;
use forebay_e2e::kubernetes::tools::{
    SANITY, SIDECARS, SNAPSHOT_DEFINITIONS, SNAPSHOT_KINDS, SNAPSHOTS, Tools,
};
use forebay_proto::admin::{ListSnapshotsRequest, ListVolumesRequest, Priority, Snapshot};
use forebay_testing::Xfs;
use process::{Process, connect};
use serde_json::{Value, json};
use town::{CLUSTER, Town, admin_kubeconfig, kubeconfig_of, kubectl, start_in_kubernetes};

/// With the controllers that bind claims and mark volumes as released.
const WITH_CONTROLLERS: bool = true;
/// The tests share an API server, and each provisioner would handle all claims.
static PROVISIONER: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
const ACCOUNT: &str = "forebay-csi-controller";

/// Waits for a field of an object.
async fn until(sidecars: &mut [Process], get: &[&str], holds: impl Fn(Option<&Value>) -> bool) -> Value {
    let started = Instant::now();
    loop {
        let found = kubectl().find(get).unwrap();
        if holds(found.as_ref()) {
            return found.unwrap_or_default();
        }
        for sidecar in &mut *sidecars {
            sidecar.assert_running();
        }
        let late = started.elapsed() > process::DEADLINE;
        assert!(!late, "{get:?}: {found:#?}\n{}", sidecars.iter().map(Process::log).collect::<String>());
        // A poll interval: kubectl is a process, and the machine has other work.
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

fn start(dir: &Path, program: PathBuf, namespace: &str, arguments: &[&str]) -> Process {
    let mut command = Command::new(&program);
    command.arg("--kubeconfig").arg(kubeconfig_of(namespace, ACCOUNT));
    command.arg(format!("--csi-address={}", dir.join("csi.sock").display()));
    command.arg("--leader-election").arg(format!("--leader-election-namespace={namespace}")).args(arguments);
    Process::start(&mut command, dir.join(program.file_name().unwrap()).with_extension("log"))
}

#[tokio::test]
async fn claim_is_provisioned_expanded_modified_and_deleted() {
    let _alone = PROVISIONER.lock().await;
    let mut town = Town::new(1).await;
    town::grant_rights(&town.namespace);
    let tools = Tools::prepare(&Cache::open().unwrap(), &[SIDECARS]).unwrap();
    let (provisioner, resizer) = (tools.path("csi-provisioner"), tools.path("csi-resizer"));
    let provisioning = ["--timeout=60s", "--extra-create-metadata"];
    let resizing = ["--resize-timeout=60s", "--handle-volume-inuse-error=false"];
    let mut sidecars = [
        start(town.dir.path(), provisioner, &town.namespace, &provisioning),
        start(town.dir.path(), resizer, &town.namespace, &resizing),
    ];

    // As the operator creates it.
    let class = json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": { "name": "forebay" },
        "provisioner": forebay_api::DRIVER,
        "allowVolumeExpansion": true,
        "parameters": {
            (names::PARAMETER_CLUSTER): CLUSTER,
            (names::PARAMETER_CLUSTER_NAMESPACE): town.namespace,
            "csi.storage.k8s.io/node-stage-secret-name": names::volume_secret("${pv.name}"),
            "csi.storage.k8s.io/node-stage-secret-namespace": town.namespace,
        },
    });
    kubectl().apply(&class.to_string()).unwrap();
    for (name, parameters) in [
        ("slow", json!({ "bytesPerSecond": "500Mi", "priority": "low" })),
        ("fast", json!({ "bytesPerSecond": "0" })),
    ] {
        let class = json!({
            "apiVersion": "storage.k8s.io/v1",
            "kind": "VolumeAttributesClass",
            "metadata": { "name": name },
            "driverName": forebay_api::DRIVER,
            "parameters": parameters,
        });
        kubectl().apply(&class.to_string()).unwrap();
    }
    let claim = |size: &str, attributes: &str| {
        json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": { "name": "data", "namespace": "default" },
            "spec": {
                "storageClassName": "forebay",
                "volumeAttributesClassName": attributes,
                "accessModes": ["ReadWriteMany"],
                "resources": { "requests": { "storage": size } },
            },
        })
        .to_string()
    };
    kubectl().apply(&claim("64Mi", "slow")).unwrap();
    let get_claim = ["persistentvolumeclaim", "data", "--namespace=default"];
    let bound =
        until(&mut sidecars, &get_claim, |c| c.is_some_and(|c| c["status"]["phase"] == "Bound")).await;
    let name = bound["spec"]["volumeName"].as_str().unwrap().to_owned();
    let volume = kubectl().get(&["persistentvolume", &name]).unwrap();
    let csi = &volume["spec"]["csi"];
    assert_eq!(csi["volumeHandle"], format!("c-0/{name}"));
    assert!(csi["volumeAttributes"].get("server").is_none(), "{csi}");
    assert!(volume["spec"].get("nodeAffinity").is_none_or(Value::is_null), "reached from everywhere");
    // The Secret that the kubelet will look for exists.
    let secret = csi["nodeStageSecretRef"]["name"].as_str().unwrap();
    assert_eq!(csi["nodeStageSecretRef"]["namespace"], town.namespace);
    assert_eq!(town.record(&name).await.unwrap().metadata.name.as_deref(), Some(secret));
    assert_eq!(town.volumes().await, [1]);

    assert_eq!(limits(&mut town).await, (500 << 20, Priority::Low), "from the beginning");

    kubectl().apply(&claim("128Mi", "slow")).unwrap();
    let grown = |c: Option<&Value>| c.is_some_and(|c| c["status"]["capacity"]["storage"] == "128Mi");
    until(&mut sidecars, &get_claim, grown).await;

    kubectl().apply(&claim("128Mi", "fast")).unwrap();
    let changed =
        |c: Option<&Value>| c.is_some_and(|c| c["status"]["currentVolumeAttributesClassName"] == "fast");
    until(&mut sidecars, &get_claim, changed).await;
    assert_eq!(limits(&mut town).await, (0, Priority::Low), "what the class does not name stays");

    kubectl()
        .run(&["delete", "persistentvolumeclaim", "data", "--namespace=default", "--wait=false"])
        .unwrap();
    until(&mut sidecars, &["persistentvolume", &name], |volume| volume.is_none()).await;
    assert_eq!((town.volumes().await, town.records().await), (vec![0], 0));
}

fn claim_of(name: &str, source: Option<(&str, &str)>) -> String {
    let mut claim = json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "storageClassName": "forebay-snapshots",
            "accessModes": ["ReadWriteMany"],
            "resources": { "requests": { "storage": "64Mi" } },
        },
    });
    if let Some((kind, name)) = source {
        let group = if kind == "VolumeSnapshot" { "snapshot.storage.k8s.io" } else { "" };
        claim["spec"]["dataSource"] = json!({ "apiGroup": group, "kind": kind, "name": name });
    }
    claim.to_string()
}

/// With upstream's snapshot controller and csi-snapshotter: of two instances, the one with the volume has the snapshot and the
/// volumes created from it.
#[tokio::test]
async fn snapshot_of_a_claim_is_restored_to_a_new_claim() {
    let Some(xfs) = Xfs::without_quota() else { return };
    let _alone = PROVISIONER.lock().await;
    let mut town = Town::with_pools(Some(&xfs.path()), 2).await;
    town::grant_rights(&town.namespace);
    let tools = Tools::prepare(&Cache::open().unwrap(), &[SIDECARS, SNAPSHOTS]).unwrap();
    let controller = tools.path("snapshot-controller");
    let definitions = fs::read_to_string(controller.with_file_name(SNAPSHOT_DEFINITIONS)).unwrap();
    kubectl().apply(&definitions).unwrap();
    let wait = ["wait", "--for=condition=Established", "--timeout=60s", "customresourcedefinition"];
    kubectl().run(&[&wait[..], &SNAPSHOT_KINDS].concat()).unwrap();
    let mut everywhere = Command::new(&controller);
    everywhere.arg("--kubeconfig").arg(admin_kubeconfig());
    everywhere.args(["--leader-election=false", "--http-endpoint="]);
    let (dir, namespace) = (town.dir.path(), &town.namespace);
    let with_metadata = ["--timeout=60s", "--extra-create-metadata"];
    let mut sidecars = [
        Process::start(&mut everywhere, dir.join("snapshot-controller.log")),
        start(dir, tools.path("csi-provisioner"), namespace, &with_metadata),
        start(dir, tools.path("csi-snapshotter"), namespace, &with_metadata),
    ];
    let class = json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": { "name": "forebay-snapshots" },
        "provisioner": forebay_api::DRIVER,
        "parameters": {
            (names::PARAMETER_CLUSTER): CLUSTER,
            (names::PARAMETER_CLUSTER_NAMESPACE): town.namespace,
        },
    });
    kubectl().apply(&class.to_string()).unwrap();
    for (group, kind) in [("snapshot", "VolumeSnapshotClass"), ("groupsnapshot", "VolumeGroupSnapshotClass")]
    {
        let class = json!({
            "apiVersion": format!("{group}.storage.k8s.io/v1"),
            "kind": kind,
            "metadata": { "name": "forebay" },
            "driver": forebay_api::DRIVER,
            "deletionPolicy": "Delete",
        });
        kubectl().apply(&class.to_string()).unwrap();
    }

    // One on each instance, so that it is no coincidence that the second instance has the volumes created from its volume.
    kubectl().apply(&claim_of("first", None)).unwrap();
    let first = bound(&mut sidecars, "first").await;
    kubectl().apply(&claim_of("second", None)).unwrap();
    let second = bound(&mut sidecars, "second").await;
    let ((instance, share), other) = (split(&second), split(&first));
    assert_ne!(instance, other.0, "the second goes where there is more room");
    let index = town.instances.iter().position(|i| i.name == instance).unwrap();
    let pool = town.instances[index].pool.clone();
    fs::write(pool.join("volumes").join(&share).join("model.bin"), "weights").unwrap();

    let snapshot = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshot",
        "metadata": { "name": "nightly", "namespace": "default" },
        "spec": {
            "volumeSnapshotClassName": "forebay",
            "source": { "persistentVolumeClaimName": "second" },
        },
    });
    kubectl().apply(&snapshot.to_string()).unwrap();
    let get = ["volumesnapshot", "nightly", "--namespace=default"];
    let ready = until(&mut sidecars, &get, |s| s.is_some_and(|s| s["status"]["readyToUse"] == true)).await;
    assert_eq!(ready["status"]["restoreSize"], "64Mi");
    let content = ready["status"]["boundVolumeSnapshotContentName"].as_str().unwrap();
    let content = kubectl().get(&["volumesnapshotcontent", content]).unwrap();
    let handle = content["status"]["snapshotHandle"].as_str().unwrap().to_owned();
    assert!(handle.starts_with(&format!("{instance}/snapshot-")), "{handle}");
    let kept = snapshots(&mut town, index).await;
    assert_eq!(kept.len(), 1);
    assert_eq!(kept[0].labels["csi.storage.k8s.io/volumesnapshot/name"], "nightly");

    // The claim is deleted and the snapshot stays; a claim is restored from it, and cloned from that.
    delete(&["persistentvolumeclaim", "second"]);
    until(&mut sidecars, &["persistentvolume", &share], |volume| volume.is_none()).await;
    kubectl().apply(&claim_of("restored", Some(("VolumeSnapshot", "nightly")))).unwrap();
    let restored = split(&bound(&mut sidecars, "restored").await);
    kubectl().apply(&claim_of("clone", Some(("PersistentVolumeClaim", "restored")))).unwrap();
    let clone = split(&bound(&mut sidecars, "clone").await);
    for (on, share) in [&restored, &clone] {
        assert_eq!(*on, instance);
        let file = pool.join("volumes").join(share).join("model.bin");
        assert_eq!(fs::read_to_string(file).unwrap(), "weights");
    }

    delete(&["volumesnapshot", "nightly"]);
    until(&mut sidecars, &get, |snapshot| snapshot.is_none()).await;
    check_group_snapshot(&mut sidecars, &["restored", "clone"]).await;
    for name in ["first", "restored", "clone"] {
        delete(&["persistentvolumeclaim", name]);
    }
    for share in [&other.1, &restored.1, &clone.1] {
        until(&mut sidecars, &["persistentvolume", share], |volume| volume.is_none()).await;
    }
    assert_eq!((town.volumes().await, town.records().await), (vec![0, 0], 0));
    until(&mut sidecars, &["volumesnapshotcontent"], |all| all.is_none_or(is_empty)).await;
    assert!(snapshots(&mut town, index).await.is_empty());
}

/// Whether a list has no items.
fn is_empty(list: &Value) -> bool {
    list["items"].as_array().is_none_or(Vec::is_empty)
}

/// Snapshots of these claims as a group: both are ready, and both are deleted with it.
async fn check_group_snapshot(sidecars: &mut [Process], claims: &[&str]) {
    for claim in claims {
        kubectl()
            .run(&["label", "persistentvolumeclaim", claim, "--namespace=default", "job=training"])
            .unwrap();
    }
    let group = json!({
        "apiVersion": "groupsnapshot.storage.k8s.io/v1",
        "kind": "VolumeGroupSnapshot",
        "metadata": { "name": "together", "namespace": "default" },
        "spec": {
            "volumeGroupSnapshotClassName": "forebay",
            "source": { "selector": { "matchLabels": { "job": "training" } } },
        },
    });
    kubectl().apply(&group.to_string()).unwrap();
    let get = ["volumegroupsnapshot", "together", "--namespace=default"];
    until(sidecars, &get, |group| group.is_some_and(|group| group["status"]["readyToUse"] == true)).await;
    let members = ["volumesnapshot", "--namespace=default"];
    let are_ready = |all: &Value| {
        let members = all["items"].as_array().unwrap();
        members.len() == claims.len() && members.iter().all(|member| member["status"]["readyToUse"] == true)
    };
    let ready = until(sidecars, &members, |all| all.is_some_and(are_ready)).await;
    let taken = |index: usize| ready["items"][index]["status"]["creationTime"].as_str().unwrap();
    assert_eq!(taken(0), taken(1));
    delete(&["volumegroupsnapshot", "together"]);
    until(sidecars, &get, |group| group.is_none()).await;
    until(sidecars, &members, |all| all.is_none_or(is_empty)).await;
}

/// Instance and share of a volume's handle.
fn split(handle: &str) -> (String, String) {
    let (instance, share) = handle.split_once('/').unwrap();
    (instance.to_owned(), share.to_owned())
}

/// Waits until the claim is bound. Returns the handle of its volume.
async fn bound(sidecars: &mut [Process], claim: &str) -> String {
    let get = ["persistentvolumeclaim", claim, "--namespace=default"];
    let bound = until(sidecars, &get, |c| c.is_some_and(|c| c["status"]["phase"] == "Bound")).await;
    let volume = kubectl().get(&["persistentvolume", bound["spec"]["volumeName"].as_str().unwrap()]).unwrap();
    volume["spec"]["csi"]["volumeHandle"].as_str().unwrap().to_owned()
}

fn delete(what: &[&str]) {
    kubectl().run(&[&["delete"], what, &["--namespace=default", "--wait=false"]].concat()).unwrap();
}

async fn snapshots(town: &mut Town, instance: usize) -> Vec<Snapshot> {
    let mut admin = town.instances[instance].admin().await;
    admin.list_snapshots(ListSnapshotsRequest::default()).await.unwrap().into_inner().snapshots
}

/// Bytes per second and priority of the only volume.
async fn limits(town: &mut Town) -> (u64, Priority) {
    let mut admin = town.instances[0].admin().await;
    let volumes = admin.list_volumes(ListVolumesRequest::default()).await.unwrap().into_inner().volumes;
    let qos = volumes[0].qos.unwrap();
    (qos.bytes_per_second, qos.priority())
}

/// The specs of the controller and of identity. The node's specs need the kernel's SMB client and run in the lab.
#[tokio::test]
async fn csi_sanity_passes_for_the_controller() {
    let Some(xfs) = Xfs::without_quota() else { return };
    let mut town = Town::with_pools(Some(&xfs.path()), 2).await;
    let tools = Tools::prepare(&Cache::open().unwrap(), &[SANITY]).unwrap();
    let parameters = town.dir.path().join("parameters.yaml");
    fs::write(&parameters, format!("{}: {CLUSTER}\n", names::PARAMETER_CLUSTER)).unwrap();
    let attributes = town.dir.path().join("attributes.yaml");
    fs::write(&attributes, "bytesPerSecond: 500Mi\npriority: low\n").unwrap();
    let mut command = Command::new(tools.path("csi-sanity"));
    // The clean-up after each spec calls a node.
    let folder = |name: &str| {
        let folder = town.dir.path().join(name);
        fs::create_dir(&folder).unwrap();
        folder.to_str().unwrap().to_owned()
    };
    let (registry, host) = (folder("registry"), folder("host"));
    let arguments = ["--node-id", "node-1", "--plugins-registry", &registry, "--host-root", &host];
    let mut node = start_in_kubernetes(town.dir.path(), &town.namespace, "node.sock", "node", &arguments);
    connect(&mut node, &town.dir.path().join("node.sock")).await;
    command.arg(format!("--csi.endpoint={}", town.dir.path().join("node.sock").display()));
    command.arg(format!("--csi.controllerendpoint={}", town.dir.path().join("csi.sock").display()));
    command.arg(format!("--csi.testvolumeparameters={}", parameters.display()));
    command.arg(format!("--csi.testvolumemutableparameters={}", attributes.display()));
    // Its default of 10 GiB exceeds the room of some machines.
    command.args(["--csi.testvolumesize=104857600", "--csi.testvolumeexpandsize=209715200"]);
    command
        .arg("--ginkgo.focus=Controller Service|ModifyVolume|ListSnapshots|Identity Service")
        .arg("--ginkgo.no-color");
    // Probe of a node without the SMB client is FAILED_PRECONDITION, which csi-sanity does not expect. The lab's nodes have one.
    command.arg("--ginkgo.skip=Identity Service Probe");
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", town.drivers[0].log());
    // A focus that matches nothing also succeeds.
    let passed = text.split(" Passed").next().and_then(|text| text.rsplit(' ').next()?.parse::<u32>().ok());
    assert!(passed.is_some_and(|passed| passed >= 28), "{text}");
    assert_eq!((town.volumes().await, town.records().await), (vec![0, 0], 0));
}
