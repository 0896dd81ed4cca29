use serde_json::json;

use super::*;
use crate::fixture::{self, healthy, object};

fn view(snapshot: &Snapshot) -> View {
    View::new(snapshot, fixture::now()).expect("a view")
}

fn plain(snapshot: &Snapshot) -> String {
    render(&view(snapshot), false, Paint::new(false))
}

const HEALTHY: &str = "\
STORAGECLUSTER   READY   INSTANCES   TRANSPORT   VOLUMES   CAPACITY          AGE
main             True    2/2         RDMA, TCP   14        3Ti free of 4Ti   3d

INSTANCE   PHASE   NODE        ADDRESS        TRANSPORT   VOLUMES   SESSIONS   FREE    SIZE
main-0     Ready   storage-1   10.0.0.0:445   RDMA, TCP   7         4          1.5Ti   2Ti
main-1     Ready   storage-2   10.0.0.1:445   RDMA, TCP   7         4          1.5Ti   2Ti

NODE        READY   DRIVER       RDMA            NVME   SMB-DIRECT
storage-1   True    registered   1/1 RoCE 200G   4      Yes
storage-2   True    registered   1/1 RoCE 200G   4      Yes

VOLUME   CLAIM             INSTANCE   CAPACITY   PHASE   STORAGECLASS
pvc-1    training/data-1   main-0     500Gi      Bound   forebay
pvc-2    training/data-2   main-1     500Gi      Bound   forebay
";

#[test]
fn a_healthy_cluster_is_shown_in_four_tables() {
    assert_eq!(plain(&healthy()), HEALTHY);
    assert!(view(&healthy()).is_ready());
}

#[test]
fn wide_output_adds_columns_and_all_namespaces_prefixes_names() {
    let snapshot = Snapshot { namespace: None, ..healthy() };
    let text = render(&view(&snapshot), true, Paint::new(false));
    for part in [
        "forebay-system/main ",
        "forebay-system/main-0 ",
        "AllInstancesReady   docker.io/forebay/forebay:0.1.0\n",
        "EPOCH   VERSION\n",
        "6.8.0-90-generic",
        "STORAGECLASS   AGE\n",
        "forebay        60m\n",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[test]
fn colour_is_optional_and_does_not_change_the_text() {
    assert!(!plain(&healthy()).contains('\x1b'));
    let painted = render(&view(&healthy()), false, Paint::new(true));
    let mut stripped = painted.clone();
    for code in ["\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m"] {
        stripped = stripped.replace(code, "");
    }
    assert_eq!(stripped, HEALTHY);
    assert!(painted.contains("\x1b[32mTrue\x1b[0m"));
}

#[test]
fn unready_objects_are_listed_and_make_the_status_not_ready() {
    let mut cluster = fixture::cluster();
    cluster["status"]["conditions"][0]["status"] = json!("False");
    cluster["status"]["conditions"][0]["reason"] = json!("InstancesNotReady");
    cluster["status"]["conditions"][0]["message"] = json!("1 of 2 instances serve");
    cluster["status"]["instances"][1]["phase"] = json!("NotReady");
    cluster["status"]["instances"][1]["message"] = json!("its admin API does not answer");
    let mut storage_node = fixture::storage_node("storage-2");
    storage_node["status"]["conditions"][0]["status"] = json!("False");
    storage_node["status"]["conditions"][0]["reason"] = json!("PartlyUnreadable");
    storage_node["status"]["conditions"][0]["message"] = json!("sys/x: permission denied");
    let snapshot = Snapshot {
        clusters: Ok(vec![object(cluster)]),
        storage_nodes: Ok(vec![object(fixture::storage_node("storage-1")), object(storage_node)]),
        csi_nodes: Ok(vec![object(json!({"metadata": {"name": "storage-1"}, "spec": {"drivers": []}}))]),
        volumes: Ok(vec![object(fixture::volume(1, "main-0", "Failed"))]),
        ..healthy()
    };
    let text = plain(&snapshot);
    let (_, tail) = text.split_once("Not ready\n").expect("a list");
    assert_eq!(
        tail,
        "  storagecluster main: InstancesNotReady: 1 of 2 instances serve\n\
         \x20 instance main-1: NotReady: its admin API does not answer\n\
         \x20 node storage-1: its kubelet has not registered the driver: pods with volumes cannot run there\n\
         \x20 node storage-2: PartlyUnreadable: sys/x: permission denied\n\
         \x20 volume pvc-1: it could not be reclaimed\n\
         Run `kubectl forebay doctor` for details.\n"
    );
    assert!(!view(&snapshot).is_ready());
}

#[test]
fn spec_that_is_not_yet_reconciled_is_not_ready() {
    let mut cluster = fixture::cluster();
    cluster["metadata"]["generation"] = json!(4);
    let snapshot = Snapshot { clusters: Ok(vec![object(cluster.clone())]), ..healthy() };
    assert!(plain(&snapshot).contains("its spec has changed and the operator has not acted on it yet"));
    cluster["status"] = json!(null);
    let snapshot = Snapshot { clusters: Ok(vec![object(cluster)]), ..healthy() };
    assert!(plain(&snapshot).contains("the operator has not reconciled it yet"), "{}", plain(&snapshot));
    assert!(!view(&snapshot).is_ready());
}

#[test]
fn status_without_a_storage_cluster_is_not_ready() {
    let text = plain(&fixture::fresh());
    assert!(text.contains("storagecluster: there is none in namespace forebay-system: apply one"), "{text}");
    assert!(!view(&fixture::fresh()).is_ready());
    let none = Snapshot { served: Ok(None), clusters: Err("404".into()), ..healthy() };
    let error = View::new(&none, fixture::now()).expect_err("not installed").to_string();
    assert!(error.contains("not installed here"), "{error}");
    let refused = Snapshot { clusters: Err("forbidden".into()), ..healthy() };
    let error = View::new(&refused, fixture::now()).expect_err("refused").to_string();
    assert_eq!(error, "read StorageClusters: forbidden");
}

#[test]
fn unreadable_resources_are_omitted_and_reported() {
    let snapshot = Snapshot { volumes: Err("no list".into()), csi_nodes: Err("no list".into()), ..healthy() };
    let text = plain(&snapshot);
    assert!(text.ends_with("Not read\n  PersistentVolumes: no list\n  CSINodes: no list\n"), "{text}");
    assert!(text.contains("storage-1   True    -        1/1 RoCE 200G"), "{text}");
    assert!(view(&snapshot).is_ready(), "missing rights are not a problem of the cluster");
}

#[test]
fn plain_table_summarises_volumes_beyond_the_limit() {
    let volume = |n| object(fixture::volume(n, "main-0", if n < 24 { "Bound" } else { "Released" }));
    let snapshot = Snapshot { volumes: Ok((0..25).map(volume).collect()), ..healthy() };
    let text = plain(&snapshot);
    assert!(text.ends_with("\nand 5 more (4 Bound, 1 Released); -o wide shows all\n"), "{text}");
    assert_eq!(render(&view(&snapshot), true, Paint::new(false)).matches("training/data-").count(), 25);
}

#[test]
fn json_output_has_all_sections() {
    let value = serde_json::to_value(view(&healthy())).expect("JSON");
    assert_eq!(value["ready"], json!(true));
    assert_eq!(value["clusters"][0]["name"], json!("main"));
    assert_eq!(value["instances"][1]["freeBytes"], json!(3_i64 << 39));
    assert_eq!(value["nodes"][0]["registered"], json!(true));
    assert_eq!(value["volumes"][0]["instance"], json!("main-0"));
    assert_eq!(value["notReady"], json!([]));
}

#[test]
fn instance_of_a_volume_is_derived_from_its_handle() {
    let mut volume = fixture::volume(1, "main-1", "Bound");
    volume["spec"]["csi"]["volumeAttributes"] = json!({});
    let snapshot = Snapshot { volumes: Ok(vec![object(volume)]), ..healthy() };
    assert!(plain(&snapshot).contains("pvc-1    training/data-1   main-1 "));
}

#[test]
fn nvme_of_pools_have_a_separate_table() {
    let mut cluster = fixture::cluster();
    cluster["status"]["instances"][0]["epoch"] = json!(2);
    cluster["status"]["instances"][0]["takeover"] =
        json!({"reason": "NodeLost", "from": "storage-3", "to": "storage-1", "epoch": 2});
    cluster["status"]["instances"][0]["pools"] = json!([{
        "name": "fast", "kind": "NVMeoF", "capacityBytes": 2_i64 << 40, "freeBytes": 1_i64 << 40,
        "nqn": "nqn.2026-01.io.example:a", "namespace": "uuid:u", "pathsUp": 1, "paths": 2, "anaState": "optimized",
        "reservation": "main-0, epoch 2, on storage-1", "health": "1 of 2 paths take I/O",
    }]);
    cluster["status"]["instances"][1]["pools"] = json!([{ "name": "fast", "kind": "Directory" }]);
    let snapshot = Snapshot { clusters: Ok(vec![object(cluster)]), ..healthy() };
    let text = plain(&snapshot);
    for part in [
        "POOL   INSTANCE   PATHS   ANA         RESERVATION                     EPOCH   CAME                      FREE   SIZE",
        "fast   main-0     1/2     optimized   main-0, epoch 2, on storage-1   2       NodeLost from storage-3   1Ti    2Ti",
        "pool fast of main-0: 1 of 2 paths take I/O",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    assert!(!view(&snapshot).is_ready());
}
