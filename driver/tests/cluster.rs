//! The driver in a Kubernetes cluster: its process with the chart's rights, a real API server, and real servers as instances.
#![allow(clippy::unwrap_used)]

mod process;
mod town;
mod volumes;

use std::collections::HashMap;
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_api::cluster::InstancePhase;
use forebay_api::names;
use forebay_proto::admin;
use forebay_proto::csi::identity_client::IdentityClient;
use forebay_proto::csi::node_client::NodeClient;
use forebay_proto::csi::{
    ControllerExpandVolumeRequest, ControllerGetVolumeRequest, CreateVolumeRequest, DeleteVolumeRequest,
    GetCapacityRequest, ListVolumesRequest, NodeStageVolumeRequest, ProbeRequest,
    ValidateVolumeCapabilitiesRequest, Volume,
};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use process::{Process, connect, driver_binary, eventually};
use serde_json::json;
use tonic::{Code, Status};
use town::{Authority, BACKEND, CLUSTER, Town, start_in_kubernetes};
use volumes::{MIB, capability, code, map, range};

/// Whether the API server runs with the controllers, which nothing here needs.
const WITH_CONTROLLERS: bool = false;
const PASSWORD: &str = "a-password-from-before-the-crash";

fn create(name: &str, required_bytes: i64) -> CreateVolumeRequest {
    CreateVolumeRequest {
        secrets: HashMap::new(),
        parameters: map(&[("cluster", CLUSTER), ("csi.storage.k8s.io/pv/name", name)]),
        ..volumes::create(name, required_bytes)
    }
}

impl Town {
    async fn create(&mut self, request: CreateVolumeRequest) -> Result<Volume, Status> {
        Ok(self.controller.create_volume(request).await?.into_inner().volume.unwrap())
    }

    async fn delete(&mut self, volume_id: &str) -> Code {
        let request = DeleteVolumeRequest { volume_id: volume_id.into(), ..Default::default() };
        code(self.controller.delete_volume(request).await)
    }

    async fn list(&mut self, max_entries: i32, token: &str) -> Result<(Vec<String>, String), Status> {
        let request = ListVolumesRequest { max_entries, starting_token: token.into() };
        let response = self.controller.list_volumes(request).await?.into_inner();
        let ids = response.entries.into_iter().map(|entry| entry.volume.unwrap().volume_id).collect();
        Ok((ids, response.next_token))
    }
}

#[tokio::test]
async fn create_volume_is_idempotent_with_per_volume_credentials() {
    let mut town = Town::new(1).await;
    let volume = town.create(create("pvc-1", 64 * MIB)).await.unwrap();
    assert_eq!((volume.volume_id.as_str(), volume.capacity_bytes), ("c-0/pvc-1", 64 * MIB));
    let context = map(&[
        ("cluster", CLUSTER),
        ("clusterNamespace", &town.namespace),
        ("instance", "c-0"),
        ("share", "pvc-1"),
        ("dialect", "3.1.1"),
        ("protection", "optional"),
        ("transport", "auto"),
    ]);
    assert_eq!(volume.volume_context, context);
    assert!(volume.accessible_topology.is_empty());
    assert_eq!(town.create(create("pvc-1", 64 * MIB)).await.unwrap(), volume, "a second time");

    let secret = town.record("pvc-1").await.unwrap();
    let labels = secret.metadata.labels.unwrap();
    assert_eq!(labels[names::LABEL_INSTANCE], "c-0");
    let data = secret.data.unwrap();
    assert_eq!(data["username"].0, b"pvc-1");
    let password = String::from_utf8(data["password"].0.clone()).unwrap();
    assert_eq!(password.len(), 64);
    let other = town.create(create("pvc-2", MIB)).await.unwrap();
    assert_ne!(town.record("pvc-2").await.unwrap().data.unwrap()["password"].0, password.as_bytes());

    // The server has exactly these credentials.
    let mut server = town.instances[0].admin().await;
    let stat = server.stat_volume(admin::StatVolumeRequest { volume_id: "pvc-1".into() }).await.unwrap();
    let there = stat.into_inner().volume.unwrap();
    let mut same = admin::CreateVolumeRequest {
        volume_id: "pvc-1".into(),
        pool: there.pool.clone(),
        capacity_bytes: 64 << 20,
        quota: there.quota,
        protection: there.protection,
        credentials: Some(admin::Credentials { username: "pvc-1".into(), password: password.clone() }),
        labels: there.labels.clone(),
        ..Default::default()
    };
    assert_eq!(code(server.create_volume(same.clone()).await), Code::Ok);
    same.credentials.as_mut().unwrap().password = PASSWORD.into();
    assert_eq!(code(server.create_volume(same).await), Code::AlreadyExists);

    for id in ["c-0/pvc-1", "c-0/pvc-1", "c-0/never-there", "c-7", "nonsense", "c-0/../pvc-2"] {
        assert_eq!(town.delete(id).await, Code::Ok, "{id}");
    }
    assert!(town.record("pvc-1").await.is_none());
    assert_eq!(town.volumes().await, [1]);
    assert_eq!(town.delete(&other.volume_id).await, Code::Ok);
    assert_eq!((town.volumes().await, town.records().await), (vec![0], 0));
    assert!(!town.drivers[0].log().contains(&password));
}

#[tokio::test]
async fn failed_requests_leave_no_volume_or_record() {
    let mut town = Town::new(1).await;
    type Change = fn(&mut CreateVolumeRequest);
    let cases: [(&str, Code, Change); 10] = [
        ("parameter cluster", Code::InvalidArgument, |r| r.parameters = HashMap::new()),
        ("rdma transfers a volume's data unencrypted", Code::InvalidArgument, |r| {
            r.parameters.extend(map(&[("transport", "rdma"), ("protection", "seal")]));
        }),
        ("no StorageCluster nowhere", Code::InvalidArgument, |r| {
            r.parameters.insert("cluster".into(), "nowhere".into());
        }),
        ("namespace", Code::InvalidArgument, |r| {
            r.parameters.insert("clusterNamespace".into(), "default".into());
        }),
        ("unknown parameter \"pool\"", Code::InvalidArgument, |r| {
            r.parameters.insert("pool".into(), BACKEND.into());
        }),
        ("no backend \"slow\"", Code::InvalidArgument, |r| {
            r.parameters.insert("backend".into(), "slow".into());
        }),
        ("no backend has quota hard", Code::InvalidArgument, |r| {
            r.parameters.insert("quota".into(), "hard".into());
        }),
        ("provisioner-secret", Code::InvalidArgument, |r| {
            r.secrets = map(&[("password", PASSWORD)]);
        }),
        ("would not find its Secret", Code::InvalidArgument, |r| {
            r.parameters.insert("csi.storage.k8s.io/pv/name".into(), "another".into());
        }),
        ("no instance has room for 1099511627776 MiB: c-0 has", Code::ResourceExhausted, |r| {
            r.capacity_range = range(1 << 60, 0);
        }),
    ];
    for (part, expected, change) in cases {
        let mut request = create("pvc-1", MIB);
        change(&mut request);
        let status = town.create(request).await.expect_err(part);
        assert_eq!(status.code(), expected, "{status}");
        assert!(status.message().contains(part), "{part}: {status}");
    }
    assert_eq!((town.volumes().await, town.records().await), (vec![0], 0));

    // A record is also removed if its instance lacks the room: another instance may have it.
    town.write_record("pvc-1", "c-0", PASSWORD).await;
    let status = town.create(create("pvc-1", 1 << 60)).await.expect_err("an exbibyte");
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert_eq!((town.volumes().await, town.records().await), (vec![0], 0));

    // The same applies while no instance is ready.
    town.statuses[0].phase = InstancePhase::NotReady;
    town.statuses[0].message = "its pod does not start: ImagePullBackOff".into();
    town.write_status().await;
    let status = town.create(create("pvc-1", MIB)).await.expect_err("not ready");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.message().contains("c-0 is not ready (NotReady: its pod does not start"), "{status}");
    assert_eq!(town.records().await, 0);
    town.statuses[0].phase = InstancePhase::Ready;
    town.write_status().await;
    town.create(create("pvc-1", MIB)).await.unwrap();
}

#[tokio::test]
async fn volumes_are_spread_and_found_on_every_instance() {
    let mut town = Town::new(2).await;
    for n in 1..=4 {
        let mut request = create(&format!("pvc-{n}"), MIB);
        request.parameters.insert("backend".into(), BACKEND.into());
        request.parameters.insert("clusterNamespace".into(), town.namespace.clone());
        town.create(request).await.unwrap();
    }
    assert_eq!(town.volumes().await, [2, 2]);

    let (all, token) = town.list(0, "").await.unwrap();
    assert_eq!((all.len(), token.as_str()), (4, ""));
    let (mut paged, mut token) = town.list(1, "").await.unwrap();
    while !token.is_empty() {
        let (page, next) = town.list(1, &token).await.unwrap();
        assert!(page.len() <= 1);
        paged.extend(page);
        token = next;
    }
    assert_eq!(paged, all, "one by one");
    for token in ["no such token", "after:pvc-1", "after:c-0", "pvc-1", "after:c-0/No Such"] {
        let status = town.list(0, token).await.expect_err("unknown");
        assert_eq!(status.code(), Code::Aborted, "{token}: {status}");
    }

    let get = |id: &str| ControllerGetVolumeRequest { volume_id: id.into() };
    let volume =
        town.controller.controller_get_volume(get(&all[3])).await.unwrap().into_inner().volume.unwrap();
    assert_eq!(volume.volume_id, all[3]);
    for id in ["c-0/none", "c-9/pvc-1", "d-0/pvc-1", "pvc-1"] {
        assert_eq!(code(town.controller.controller_get_volume(get(id)).await), Code::NotFound, "{id}");
    }
    let validate = |context: &HashMap<String, String>| ValidateVolumeCapabilitiesRequest {
        volume_id: volume.volume_id.clone(),
        volume_capabilities: vec![capability()],
        volume_context: context.clone(),
        parameters: map(&[("cluster", CLUSTER)]),
        ..Default::default()
    };
    let good = validate(&volume.volume_context);
    let response = town.controller.validate_volume_capabilities(good.clone()).await.unwrap().into_inner();
    assert!(response.confirmed.is_some(), "{}", response.message);
    let mut elsewhere = volume.volume_context.clone();
    elsewhere.insert("instance".into(), "c-7".into());
    let mut another = good.clone();
    another.parameters = map(&[("cluster", "another")]);
    for bad in [validate(&elsewhere), another] {
        let response = town.controller.validate_volume_capabilities(bad).await.unwrap().into_inner();
        assert!(response.confirmed.is_none() && !response.message.is_empty());
    }

    let expand = ControllerExpandVolumeRequest {
        volume_id: volume.volume_id.clone(),
        capacity_range: range(10 * MIB, 0),
        ..Default::default()
    };
    let expanded = town.controller.controller_expand_volume(expand).await.unwrap().into_inner();
    assert_eq!((expanded.capacity_bytes, expanded.node_expansion_required), (10 * MIB, false));

    let ask = |pairs: &[(&str, &str)]| GetCapacityRequest { parameters: map(pairs), ..Default::default() };
    let capacity = town.controller.get_capacity(ask(&[("cluster", CLUSTER)])).await.unwrap().into_inner();
    let largest = capacity.maximum_volume_size.unwrap();
    assert!(largest > 0 && capacity.available_capacity > largest, "{capacity:?}");
    let everywhere = town.controller.get_capacity(ask(&[])).await.unwrap().into_inner();
    assert!(everywhere.available_capacity > largest);
    for pair in [("cluster", "nowhere"), ("backend", "slow")] {
        assert_eq!(code(town.controller.get_capacity(ask(&[pair])).await), Code::InvalidArgument, "{pair:?}");
    }

    // A list without the volumes of an instance would imply that they are gone.
    town.instances[1].kill();
    let status = town.list(0, "").await.expect_err("an instance is down");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.message().contains("c-1"), "{status}");
    let capacity = town.controller.get_capacity(ask(&[("cluster", CLUSTER)])).await.unwrap().into_inner();
    assert_eq!(Some(capacity.available_capacity), capacity.maximum_volume_size, "of the other one");
    // The next volume is placed on an available instance.
    let volume = town.create(create("pvc-5", MIB)).await.unwrap();
    assert_eq!(volume.volume_id, "c-0/pvc-5");
}

#[tokio::test]
async fn create_volume_resumes_after_a_controller_crash() {
    let mut town = Town::new(2).await;
    town.write_record("pvc-1", "c-1", PASSWORD).await;
    town.instances[1].kill();
    for _ in 0..2 {
        let status = town.create(create("pvc-1", MIB)).await.expect_err("the instance is down");
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        assert!(status.message().contains("c-1"), "{status}");
    }
    assert_eq!(town.instances[0].volumes().await, Vec::<String>::new(), "never elsewhere");

    town.instances[1].start().await;
    let request = create("pvc-1", MIB);
    let mut controller = town.controller.clone();
    let volume = eventually(&mut town.drivers[0], || {
        let (request, mut controller) = (request.clone(), controller.clone());
        async move { controller.create_volume(request).await }
    })
    .await
    .into_inner()
    .volume
    .unwrap();
    assert_eq!(volume.volume_id, "c-1/pvc-1");
    assert_eq!(town.volumes().await, [0, 1]);

    // The record determines the password, regardless of restarts.
    let mut again = town.another_controller().await;
    assert_eq!(again.create_volume(request).await.unwrap().into_inner().volume.unwrap(), volume);

    // A request with other parameters is not for the same volume.
    let status = controller.create_volume(create("pvc-1", 5 * MIB)).await.expect_err("larger");
    assert_eq!(status.code(), Code::AlreadyExists, "{status}");
    assert!(status.message().contains("capacity"), "{status}");
    town.create_cluster("d").await;
    let mut elsewhere = create("pvc-1", MIB);
    elsewhere.parameters.insert("cluster".into(), "d".into());
    let status = controller.create_volume(elsewhere).await.expect_err("another cluster");
    assert_eq!(status.code(), Code::AlreadyExists, "{status}");
    assert!(status.message().contains("cluster"), "{status}");
    assert_eq!(town.volumes().await, [0, 1]);
    assert!(town.drivers.iter().all(|driver| !driver.log().contains(PASSWORD)));
}

#[tokio::test]
async fn two_controllers_create_one_volume_per_name() {
    let mut town = Town::new(2).await;
    let other = town.another_controller().await;
    for n in 0..5 {
        let name = format!("pvc-{n}");
        let calls = [town.controller.clone(), other.clone()].map(|mut controller| {
            let request = create(&name, MIB);
            tokio::spawn(async move {
                let started = Instant::now();
                loop {
                    match controller.create_volume(request.clone()).await {
                        Ok(response) => return response.into_inner().volume.unwrap().volume_id,
                        Err(status) if status.code() == Code::Aborted => {
                            assert!(started.elapsed() < process::DEADLINE, "{status}");
                        }
                        Err(status) => panic!("{status}"),
                    }
                }
            })
        });
        let [first, second] = calls;
        assert_eq!(first.await.unwrap(), second.await.unwrap());
        let volumes: usize = town.volumes().await.iter().sum();
        assert_eq!((volumes, town.records().await), (n + 1, n + 1));
    }
}

#[tokio::test]
async fn concurrent_claims_are_spread_over_the_instances() {
    const CLAIMS: usize = 60;
    let mut town = Town::new(2).await;
    let calls = (0..CLAIMS).map(|n| {
        let mut controller = town.controller.clone();
        tokio::spawn(async move { code(controller.create_volume(create(&format!("pvc-{n}"), MIB)).await) })
    });
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(call.await.unwrap(), Code::Ok);
    }
    let volumes = town.volumes().await;
    assert_eq!((volumes.iter().sum::<usize>(), town.records().await), (CLAIMS, CLAIMS));
    assert!(volumes.iter().all(|&count| count >= CLAIMS / 3), "{volumes:?}");
}

#[tokio::test]
async fn stale_records_are_replaced_and_orphaned_volumes_are_kept() {
    let mut town = Town::new(1).await;
    let volume = town.create(create("pvc-1", MIB)).await.unwrap();
    // An instance that was removed held nothing; the driver places its record again.
    town.write_record("pvc-2", "c-5", PASSWORD).await;
    let status = town.create(create("pvc-2", MIB)).await.expect_err("removed");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert_eq!(town.create(create("pvc-2", MIB)).await.unwrap().volume_id, "c-0/pvc-2");
    town.write_record("pvc-3", "c-5", PASSWORD).await;
    assert_eq!(town.delete("c-5/pvc-3").await, Code::Ok);
    assert!(town.record("pvc-3").await.is_none());
    // The driver does not touch a Secret that another program manages.
    town.write_record("pvc-4", "c-0", PASSWORD).await;
    let patch = Patch::Merge(json!({ "metadata": { "labels": { names::LABEL_MANAGED_BY: "another" } } }));
    town.secrets().patch("forebay-pvc-4", &PatchParams::default(), &patch).await.unwrap();
    let status = town.create(create("pvc-4", MIB)).await.expect_err("foreign");
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert_eq!(town.delete("c-0/pvc-4").await, Code::FailedPrecondition);
    assert!(town.record("pvc-4").await.is_some());

    town.clusters().delete(CLUSTER, &DeleteParams::default()).await.unwrap();
    let delete = DeleteVolumeRequest { volume_id: volume.volume_id.clone(), ..Default::default() };
    let status = town.controller.delete_volume(delete).await.expect_err("the cluster is deleted");
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert!(status.message().contains("forebay-pvc-1"), "{status}");
    assert!(status.message().contains(names::FINALIZER_VOLUME), "{status}");
    town.secrets().delete("forebay-pvc-1", &DeleteParams::default()).await.unwrap();
    let given_up = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    town.secrets().patch("forebay-pvc-1", &PatchParams::default(), &given_up).await.unwrap();
    assert_eq!(town.delete(&volume.volume_id).await, Code::Ok, "its record is removed");
}

#[tokio::test]
async fn a_secret_lives_as_long_as_its_volume() {
    let mut town = Town::new(1).await;
    let volume = town.create(create("pvc-1", MIB)).await.unwrap();
    let before = town.record("pvc-1").await.unwrap();
    // A user deletes the Secret: it stays, with its data.
    town.secrets().delete("forebay-pvc-1", &DeleteParams::default()).await.unwrap();
    let marked = town.record("pvc-1").await.expect("the volume is there");
    assert!(marked.metadata.deletion_timestamp.is_some());
    assert_eq!(marked.data, before.data);
    assert_eq!(town.create(create("pvc-1", MIB)).await.unwrap(), volume, "it is the same volume");
    assert_eq!(town.delete(&volume.volume_id).await, Code::Ok);
    assert!(town.record("pvc-1").await.is_none());

    // Its data is unusable, but the volume can still be deleted.
    let volume = town.create(create("pvc-2", MIB)).await.unwrap();
    let spoiled = Patch::Merge(json!({ "data": { "password": null } }));
    town.secrets().patch("forebay-pvc-2", &PatchParams::default(), &spoiled).await.unwrap();
    let status = town.create(create("pvc-2", MIB)).await.expect_err("no password");
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert_eq!(town.delete(&volume.volume_id).await, Code::Ok);
    assert_eq!((town.volumes().await, town.records().await), (vec![0], 0));
}

#[tokio::test]
async fn password_is_rotated_and_a_lost_secret_is_recreated() {
    let mut town = Town::new(1).await;
    let volume = town.create(create("pvc-1", MIB)).await.unwrap();
    let passwords = |secret: k8s_openapi::api::core::v1::Secret| {
        let data = secret.data.unwrap();
        ["password", "password2", "password-next"]
            .map(|key| data.get(key).map(|value| String::from_utf8(value.0.clone()).unwrap()))
    };
    let rotate = |town: &Town, what: &[&str]| {
        let mut command = Command::new(driver_binary());
        command.arg("rotate-credentials").args(what).args(["--namespace", &town.namespace]);
        command.env("KUBECONFIG", town::kubeconfig_of(&town.namespace, "forebay-csi-controller"));
        let output = command.output().unwrap();
        (
            output.status.success(),
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
        )
    };
    let [first, ..] = passwords(town.record("pvc-1").await.unwrap());

    let (done, said) = rotate(&town, &[&volume.volume_id]);
    assert!(done, "{said}");
    let [second, previous, next] = passwords(town.record("pvc-1").await.unwrap());
    assert_ne!(second, first);
    assert_eq!((&previous, &next), (&first, &None));
    for password in [&first, &second].into_iter().flatten() {
        assert!(!said.contains(password.as_str()));
    }
    // The server uses it as the volume's password, so the same request finds the same volume.
    assert_eq!(town.create(create("pvc-1", MIB)).await.unwrap(), volume);

    // A crash after the server received the password: the Secret still has a password that the server accepts, and the next run
    // uses the intended next one.
    let cut_off = Patch::Merge(json!({ "stringData": { "password-next": PASSWORD } }));
    town.secrets().patch("forebay-pvc-1", &PatchParams::default(), &cut_off).await.unwrap();
    let (done, said) = rotate(&town, &[&volume.volume_id]);
    assert!(done && !said.contains(PASSWORD), "{said}");
    let [third, previous, next] = passwords(town.record("pvc-1").await.unwrap());
    assert_eq!((third.as_deref(), previous, next), (Some(PASSWORD), second, None));

    // All volumes with a PersistentVolume, and then only those of a certain age.
    town::grant_rights(&town.namespace);
    let persistent = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": format!("pv-{}", town.namespace)},
        "spec": {"capacity": {"storage": "1Mi"}, "accessModes": ["ReadWriteMany"], "csi": {"driver": "csi.forebay.io",
            "volumeHandle": volume.volume_id, "volumeAttributes": {"clusterNamespace": town.namespace}}}});
    let all = |town: &Town, further: &[&str]| rotate(town, &[&["--all"], further].concat());
    let (done, said) = all(&town, &[]);
    assert!(done && said.contains("0 volumes: 0 have a new password"), "{said}");
    town.apply_persistent_volume(persistent).await;
    let (done, said) = all(&town, &["--older-than", "1h"]);
    assert!(
        done && said.contains("1 volumes: 0 have a new password, 1 have a recent one, 0 failed"),
        "{said}"
    );
    let old = Patch::Merge(
        json!({ "metadata": { "annotations": { "storage.forebay.io/password-since": "2026-01-01T00:00:00Z" } } }),
    );
    town.secrets().patch("forebay-pvc-1", &PatchParams::default(), &old).await.unwrap();
    let (done, said) = all(&town, &["--older-than", "1h"]);
    assert!(done && said.contains("1 volumes: 1 have a new password"), "{said}");
    let (done, said) = all(&town, &["--older-than", "1h"]);
    assert!(done && said.contains("1 have a recent one"), "{said}");
    let [fourth, previous, _] = passwords(town.record("pvc-1").await.unwrap());
    assert_eq!((fourth == third, previous), (false, third));

    // The Secret is lost, including its finalizer.
    let forced = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    town.secrets().patch("forebay-pvc-1", &PatchParams::default(), &forced).await.unwrap();
    town.secrets().delete("forebay-pvc-1", &DeleteParams::default()).await.unwrap();
    let (done, said) = rotate(&town, &[&volume.volume_id]);
    assert!(done && said.contains("has been recreated"), "{said}");
    assert_eq!(town.create(create("pvc-1", MIB)).await.unwrap(), volume);
    for id in ["pvc-1", "c-0/none", "c-7/pvc-1", "d-0/pvc-1"] {
        let (done, said) = rotate(&town, &[id]);
        assert!(!done, "{id}: {said}");
    }
    assert_eq!(town.delete(&volume.volume_id).await, Code::Ok);
}

#[tokio::test]
async fn orphaned_record_does_not_block_instance_or_cluster_removal() {
    let mut town = Town::new(2).await;
    let volume = town.create(create("pvc-1", MIB)).await.unwrap();
    // An instance that is being removed: the operator waits for every record on it.
    town.write_record("pvc-2", "c-1", PASSWORD).await;
    town.statuses[1].phase = InstancePhase::Removing;
    town.write_status().await;
    let status = town.create(create("pvc-2", MIB)).await.expect_err("it is being removed");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(town.record("pvc-2").await.is_none());
    assert_eq!(town.create(create("pvc-2", MIB)).await.unwrap().volume_id, "c-0/pvc-2");
    // An instance that is to be removed, but the operator has not reported that yet.
    town.statuses[1].phase = InstancePhase::Ready;
    town.write_status().await;
    town.write_record("pvc-3", "c-1", PASSWORD).await;
    let fewer = Patch::Merge(json!({ "spec": { "instances": 1 } }));
    town.clusters().patch(CLUSTER, &PatchParams::default(), &fewer).await.unwrap();
    assert_eq!(code(town.controller.create_volume(create("pvc-3", MIB)).await), Code::Unavailable);
    assert!(town.record("pvc-3").await.is_none());
    // An instance that is only starting keeps its record.
    town.write_record("pvc-3", "c-0", PASSWORD).await;
    town.statuses[0].phase = InstancePhase::Starting;
    town.write_status().await;
    assert_eq!(code(town.controller.create_volume(create("pvc-3", MIB)).await), Code::Unavailable);
    assert!(town.record("pvc-3").await.is_some());

    // A cluster that is being deleted, while its finalizer remains.
    let held = Patch::Merge(json!({ "metadata": { "finalizers": ["example.com/held"] } }));
    town.clusters().patch(CLUSTER, &PatchParams::default(), &held).await.unwrap();
    town.clusters().delete(CLUSTER, &DeleteParams::default()).await.unwrap();
    let status = town.create(create("pvc-3", MIB)).await.expect_err("it is being deleted");
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert!(town.record("pvc-3").await.is_none());
    assert_eq!(town.create(create("pvc-1", MIB)).await.unwrap(), volume, "existing volumes are kept");
    assert_eq!((town.volumes().await.iter().sum::<usize>(), town.records().await), (2, 2));
}

#[tokio::test]
async fn volumes_created_during_an_instance_removal_have_counted_records() {
    const CLAIMS: usize = 40;
    let mut town = Town::new(2).await;
    let calls = (0..CLAIMS).map(|n| {
        let mut controller = town.controller.clone();
        tokio::spawn(async move { controller.create_volume(create(&format!("pvc-{n}"), MIB)).await })
    });
    let calls: Vec<_> = calls.collect();
    // In the middle of the calls, in the operator's order: it reports first, then it counts.
    let started = Instant::now();
    while town.records().await < 2 {
        assert!(started.elapsed() < process::DEADLINE);
    }
    town.statuses[1].phase = InstancePhase::Removing;
    town.write_status().await;
    let on_it = ListParams::default().labels(&format!("{}=c-1", names::LABEL_INSTANCE));
    let counted = town.secrets().list(&on_it).await.unwrap();
    let counted: Vec<String> =
        counted.items.into_iter().filter_map(|s| s.metadata.labels?.remove(names::LABEL_VOLUME)).collect();
    for call in calls {
        if let Err(status) = call.await.unwrap() {
            assert_eq!(status.code(), Code::Unavailable, "{status}");
        }
    }
    let made = town.instances[1].volumes().await;
    assert!(made.iter().all(|share| counted.contains(share)), "created {made:?}, counted {counted:?}");
    // Every volume that was refused can be created now.
    for n in 0..CLAIMS {
        town.create(create(&format!("pvc-{n}"), MIB)).await.unwrap();
    }
    assert_eq!((town.volumes().await.iter().sum::<usize>(), town.records().await), (CLAIMS, CLAIMS));
    assert_eq!(town.instances[1].volumes().await, made);
}

#[tokio::test]
async fn renewed_certificate_is_used_without_a_restart() {
    let mut town = Town::new(1).await;
    let good = town.authority.issue(names::CLIENT_DRIVER);
    let stranger = Authority::new();
    let unknown = stranger.issue(names::CLIENT_DRIVER);
    let misnamed = town.authority.issue("another");
    let (pem, other) = (town.authority.pem.clone(), stranger.pem.clone());
    town.create(create("pvc-1", MIB)).await.unwrap();
    for (what, certificate, authority) in [
        ("signed by an unknown authority", &unknown, &pem),
        ("of another name", &misnamed, &pem),
        ("and the server is not known", &good, &other),
    ] {
        // A new driver, because an open channel would continue.
        town.write_certificate(certificate, authority).await;
        let mut controller = town.another_controller().await;
        let status = controller.create_volume(create("pvc-1", MIB)).await.expect_err(what);
        assert_eq!(status.code(), Code::Unavailable, "{what}: {status}");
        assert!(status.message().contains("c-0"), "{what}: {status}");
        // Both authorities, as while one replaces the other.
        town.write_certificate(&good, &format!("{other}{pem}")).await;
        let repaired = controller.create_volume(create("pvc-1", MIB)).await;
        assert_eq!(code(repaired), Code::Ok, "{what}, then a valid one");
    }
    // Without any certificate.
    town.secrets().delete(&names::driver_secret(CLUSTER), &DeleteParams::default()).await.unwrap();
    let mut controller = town.another_controller().await;
    let status = controller.create_volume(create("pvc-1", MIB)).await.expect_err("none");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.message().contains("c-csi-tls"), "{status}");
}

#[tokio::test]
async fn calls_fail_quickly_without_the_api_server() {
    let dir = tempfile::tempdir().unwrap();
    // Nothing listens there.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let kubeconfig = dir.path().join("kubeconfig");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{ "name": "x", "cluster": { "server": format!("http://127.0.0.1:{port}") } }],
        "users": [{ "name": "x", "user": {} }],
        "contexts": [{ "name": "x", "context": { "cluster": "x", "user": "x" } }],
    });
    std::fs::write(&kubeconfig, config.to_string()).unwrap();
    let mut command = Command::new(driver_binary());
    command
        .args(["--mode", "controller", "--kubernetes", "--namespace", "ns"])
        .env("KUBECONFIG", &kubeconfig);
    command.arg("--endpoint").arg(format!("unix://{}", dir.path().join("csi.sock").display()));
    let mut driver = Process::start(&mut command, dir.path().join("log"));
    let channel = connect(&mut driver, &dir.path().join("csi.sock")).await;
    let mut controller = forebay_proto::csi::controller_client::ControllerClient::new(channel.clone());
    let started = Instant::now();
    let status = controller.create_volume(create("pvc-1", MIB)).await.expect_err("no API server");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.message().contains("Kubernetes API"), "{status}");
    let probe = IdentityClient::new(channel).probe(ProbeRequest {}).await.unwrap().into_inner();
    assert_eq!(probe.ready, Some(false));
    assert!(started.elapsed() < Duration::from_secs(30));
}

#[tokio::test]
async fn node_looks_up_the_address_of_the_instance() {
    let mut town = Town::new(1).await;
    let volume = town.create(create("pvc-1", MIB)).await.unwrap();
    let folder = |name: &str| {
        let folder = town.dir.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        folder.to_str().unwrap().to_owned()
    };
    let (registry, host) = (folder("registry"), folder("host"));
    let arguments = ["--node-id", "node-1", "--plugins-registry", &registry, "--host-root", &host];
    let mut node = start_in_kubernetes(town.dir.path(), &town.namespace, "node.sock", "node", &arguments);
    let mut client = NodeClient::new(connect(&mut node, &town.dir.path().join("node.sock")).await);
    let mut stage = NodeStageVolumeRequest {
        volume_id: volume.volume_id.clone(),
        staging_target_path: town.dir.path().join("staging").to_str().unwrap().into(),
        volume_capability: Some(capability()),
        secrets: map(&[("username", "pvc-1"), ("password", PASSWORD)]),
        volume_context: volume.volume_context.clone(),
        ..Default::default()
    };
    let address = std::mem::take(&mut town.statuses[0].address);
    town.statuses[0].message = "it starts".into();
    town.write_status().await;
    let status = client.node_stage_volume(stage.clone()).await.expect_err("no address");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.message().contains("instance c-0 has no address yet"), "{status}");

    // Nothing listens there, so that the call ends in the same way with and without the kernel's SMB client.
    town.statuses[0].address = address;
    town.statuses[0].port = 1;
    town.write_status().await;
    let status = client.node_stage_volume(stage.clone()).await.expect_err("nothing listens");
    assert!(!status.message().contains("no address"), "{status}");
    assert!(status.message().contains("//127.0.0.1"), "{status}");

    stage.volume_context.insert("clusterNamespace".into(), "default".into());
    let status = client.node_stage_volume(stage.clone()).await.expect_err("not here");
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    stage.secrets.clear();
    assert_eq!(code(client.node_stage_volume(stage).await), Code::InvalidArgument, "no credentials");
    assert!(!node.log().contains(PASSWORD));
}
