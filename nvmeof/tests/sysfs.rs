//! Tests parsing of sysfs, the watch for changes, and the plan of connections.
#![allow(clippy::unwrap_used)]

mod tree;

use forebay_nvmeof::{
    AnaState, Change, ControllerState, EnsureError, FindError, HostIdentity, KeySerial, NamespaceId,
    NotPlanned, Sysfs, Tls, TlsPsk, Transport, Watch, plan,
};
use forebay_nvmeof::{FabricPath, Fabrics, Subsystem};
use tree::{LOCAL, NO_MULTIPATH, TWO_PATHS, Tree, nqn, wanted};

fn by_uuid() -> NamespaceId {
    "uuid:8bd9bb5c-6ec9-4a0c-a0a6-2e7c0c6b4f11".parse().unwrap()
}

fn by_nguid() -> NamespaceId {
    "nguid:0b5d0e3a7f404c1f9d2e6a1c52b8e701".parse().unwrap()
}

/// The two paths of the tree.
fn paths() -> [FabricPath; 2] {
    let first = FabricPath::new(Transport::Tcp, "192.168.77.1:4420".parse().unwrap());
    let second = FabricPath::new(Transport::Tcp, "[fd00:0::1]:4420".parse().unwrap());
    [first, FabricPath { host_address: Some("fd00::2".parse().unwrap()), ..second }]
}

#[test]
fn namespace_is_found_by_uuid_and_nguid() {
    let found = Tree::of(&[LOCAL, TWO_PATHS]).read();
    assert_eq!(found.multipath, Some(true));
    for id in [by_uuid(), by_nguid()] {
        let namespace = found.namespace(&nqn(), &id).unwrap();
        assert_eq!((namespace.name.as_str(), namespace.device, namespace.nsid), ("nvme3n1", (259, 5), 1));
        assert_eq!(
            (namespace.size_bytes, namespace.block_bytes, namespace.read_only),
            (1 << 30, 4096, false)
        );
    }
    let other = "uuid:c7a3f1de-02b4-4f86-8e51-9d04b7aa6c22".parse().unwrap();
    assert!(found.namespace(&nqn(), &other).unwrap().read_only);
    let subsystem = found.subsystem(&nqn()).unwrap();
    assert_eq!(subsystem.controllers.len(), 2);
    assert_eq!(subsystem.controllers[1].paths[0].ana_state, AnaState::NonOptimized);
    assert!(subsystem.controllers[0].goes(&paths()[0]) && subsystem.controllers[1].goes(&paths()[1]));
    assert!(!subsystem.controllers[1].goes(&paths()[0]));
}

#[test]
fn missing_namespace_error_lists_the_existing_ones() {
    let found = Tree::of(&[LOCAL, TWO_PATHS]).read();
    let other = "nqn.2026-01.io.example:other".parse().unwrap();
    assert_eq!(found.namespace(&other, &by_uuid()), Err(FindError::NoSubsystem(other)));
    let missing = "uuid:8bd9bb5c-6ec9-4a0c-a0a6-2e7c0c6b4f99".parse().unwrap();
    let error = found.namespace(&nqn(), &missing).unwrap_err().to_string();
    assert!(
        error.contains("namespace 1 with UUID 8bd9bb5c") && error.contains("namespace 2 with"),
        "{error}"
    );
    // A namespace of a local drive is not one of this subsystem, although the identifier matches.
    let drive = "uuid:36344830-5231-2345-0025-384e00000001".parse().unwrap();
    assert!(
        matches!(found.namespace(&nqn(), &drive), Err(FindError::Copied { name, .. }) if name == "nvme7n1")
    );
}

#[test]
fn duplicate_namespace_identifier_is_ambiguous() {
    let tree = Tree::of(&[LOCAL, TWO_PATHS]);
    tree.unpack("sys/devices/virtual/nvme-subsystem/nvme-subsys7/nvme7n2/uuid\t8bd9bb5c-6ec9-4a0c-a0a6-2e7c0c6b4f11\n");
    let error = tree.read().namespace(&nqn(), &by_uuid()).unwrap_err();
    assert!(matches!(&error, FindError::Ambiguous { names, .. } if names == "nvme3n1, nvme7n2"), "{error}");
    // The same applies to two paths that the kernel does not combine into one device.
    let found = Tree::of(&[NO_MULTIPATH]).read();
    assert!(matches!(found.namespace(&nqn(), &by_uuid()), Err(FindError::Ambiguous { .. })));
}

#[test]
fn without_native_multipath_a_single_path_device_is_found() {
    let tree = Tree::of(&[NO_MULTIPATH]);
    tree.remove("nvme-subsys0", "nvme1");
    let found = tree.read();
    assert_eq!(found.multipath, Some(false));
    assert_eq!(found.namespace(&nqn(), &by_uuid()).unwrap().name, "nvme0n1");
    assert!(found.subsystem(&nqn()).unwrap().takes_io(1));
}

#[test]
fn sysfs_without_nvme_has_no_subsystems() {
    let found = Sysfs::at("/nonexistent").read();
    assert_eq!(found, forebay_nvmeof::Found::default());
    assert_eq!(found.namespace(&nqn(), &by_uuid()), Err(FindError::NoSubsystem(nqn())));
}

#[test]
fn malformed_sysfs_attributes_do_not_affect_other_entries() {
    let tree = Tree::of(&[TWO_PATHS]);
    tree.set("nvme3/address", "");
    tree.set("nvme4/state", "on holiday");
    tree.unpack("sys/devices/virtual/nvme-subsystem/nvme-subsys3/nvme3n9/dev\tmany:few\n");
    tree.unpack("sys/class/nvme-subsystem/nvme-subsys9\n");
    let found = tree.read();
    let [first, second] = found.subsystem(&nqn()).unwrap().controllers.as_slice() else { panic!("two") };
    assert_eq!(first.address.traddr, None);
    assert_eq!(second.state, ControllerState::Other("on holiday".into()));
    assert_eq!(found.namespace(&nqn(), &by_uuid()).unwrap().name, "nvme3n1");
}

#[test]
fn watch_reports_each_change_once_and_the_loss_of_the_last_path() {
    let tree = Tree::of(&[TWO_PATHS]);
    let mut watch = Watch::new(tree.sysfs(), nqn(), by_uuid());
    let first = watch.poll();
    assert_eq!(first.iter().filter(|c| matches!(c, Change::Appeared { .. })).count(), 2, "{first:?}");
    assert!(first.contains(&Change::Namespace { present: true }));
    assert_eq!(first.last(), Some(&Change::Usable { usable: true }));
    assert_eq!((watch.poll(), watch.usable(), watch.paths()), (vec![], true, (2, 2)));

    tree.set("nvme3/state", "connecting");
    let lost = Change::State {
        controller: "nvme3".into(),
        from: ControllerState::Live,
        to: ControllerState::Connecting,
    };
    assert_eq!((watch.poll(), watch.usable(), watch.paths()), (vec![lost], true, (1, 2)));

    tree.set("nvme4/nvme3c4n1/ana_state", "inaccessible");
    let ana = Change::Ana {
        controller: "nvme4".into(),
        from: Some(AnaState::NonOptimized),
        to: Some(AnaState::Inaccessible),
    };
    assert_eq!((watch.poll(), watch.paths()), (vec![ana, Change::Usable { usable: false }], (0, 2)));

    tree.set("nvme3/state", "live");
    tree.remove("nvme-subsys3", "nvme4");
    tree.unpack("sys/devices/virtual/nvme-subsystem/nvme-subsys3/nvme3n1/size\t4194304\n");
    let changes = watch.poll();
    assert_eq!(changes[0], Change::Gone { controller: "nvme4".into() });
    assert!(changes.contains(&Change::Size { from: 1 << 30, to: 2 << 30 }), "{changes:?}");
    assert!(changes.contains(&Change::Usable { usable: true }), "{changes:?}");

    tree.remove("nvme-subsys3", "nvme3");
    let changes = watch.poll();
    assert!(changes.contains(&Change::Namespace { present: false }), "{changes:?}");
    assert_eq!((watch.usable(), watch.paths()), (false, (0, 0)));
}

#[test]
fn plan_keeps_live_and_reconnecting_controllers() {
    let found = Tree::of(&[TWO_PATHS]).read();
    let planned = plan(&wanted(), None, &paths(), &found).unwrap();
    assert_eq!((planned.keep.len(), planned.connect.len(), planned.disconnect.len()), (2, 0, 0));
    // A lost path that the kernel is reconnecting counts as present.
    let tree = Tree::of(&[TWO_PATHS]);
    tree.set("nvme3/state", "connecting");
    assert_eq!(plan(&wanted(), None, &paths(), &tree.read()).unwrap(), planned);
    // A path that is being deleted does not.
    tree.set("nvme3/state", "deleting (no IO)");
    let planned = plan(&wanted(), None, &paths(), &tree.read()).unwrap();
    assert_eq!((planned.keep, planned.connect), (vec!["nvme4".to_owned()], vec![paths()[0].clone()]));
    assert!(planned.disconnect.is_empty());
}

#[test]
fn plan_connects_missing_paths_and_disconnects_unwanted_ones() {
    let found = Tree::of(&[TWO_PATHS]).read();
    let rdma = FabricPath::new(Transport::Rdma, "192.168.77.1:4420".parse().unwrap());
    let twice = [paths()[0].clone(), rdma.clone(), paths()[0].clone()];
    let planned = plan(&wanted(), None, &twice, &found).unwrap();
    assert_eq!(planned.keep, ["nvme3"]);
    assert_eq!(planned.connect, [rdma]);
    assert_eq!(planned.disconnect, ["nvme4"]);
    // A different port or local address is a different path.
    let port = FabricPath::new(Transport::Tcp, "192.168.77.1:4421".parse().unwrap());
    let from = FabricPath { host_address: None, ..paths()[1].clone() };
    assert_eq!(plan(&wanted(), None, &[port, from], &found).unwrap().connect.len(), 2);
}

#[test]
fn plan_refuses_invalid_paths_foreign_hosts_and_missing_multipath() {
    let refused = |wanted: &Subsystem, paths: &[FabricPath], trees: &[&str]| {
        plan(wanted, None, paths, &Tree::of(trees).read()).unwrap_err()
    };
    assert!(matches!(refused(&wanted(), &[], &[TWO_PATHS]), NotPlanned::NoPath(_)));
    assert_eq!(refused(&wanted(), &paths(), &[NO_MULTIPATH]), NotPlanned::MultipathOff);
    let elsewhere = Subsystem::new(nqn(), HostIdentity::of("fast-0", "node-b").unwrap());
    let error = refused(&elsewhere, &paths(), &[TWO_PATHS]);
    assert!(matches!(&error, NotPlanned::OtherHost { controller, .. } if controller == "nvme3"), "{error}");
    let many: Vec<FabricPath> =
        (1..=40).map(|port| FabricPath::new(Transport::Tcp, ([10, 0, 0, 1], port).into())).collect();
    assert_eq!(refused(&wanted(), &many, &[TWO_PATHS]), NotPlanned::TooManyPaths(40));
}

#[test]
fn plan_replaces_connections_with_a_different_tls_configuration() {
    let key = KeySerial(0x1234_5678);
    let of = |tree: &Tree| plan(&wanted(), Some(key), &paths(), &tree.read()).unwrap();
    let tree = Tree::of(&[TWO_PATHS]);
    let planned = of(&tree);
    assert_eq!(
        (planned.keep.len(), planned.connect.len(), planned.replace.as_slice()),
        (0, 0, paths().as_slice())
    );
    assert_eq!(planned.disconnect, ["nvme3", "nvme4"]);
    // One controller uses this key, the other a different key.
    for (controller, has) in [("nvme3", "12345678"), ("nvme4", "00000009")] {
        tree.unpack(&format!("sys/devices/virtual/nvme-fabrics/ctl/{controller}/tls_key\t\n"));
        tree.unpack(&format!(
            "sys/devices/virtual/nvme-fabrics/ctl/{controller}/tls_configured_key\t{has}\n"
        ));
    }
    let planned = of(&tree);
    assert_eq!(
        (planned.keep.as_slice(), planned.replace.as_slice()),
        (["nvme3".to_owned()].as_slice(), &paths()[1..])
    );
    assert_eq!(planned.disconnect, ["nvme4"]);
    // TLS that is not requested is replaced as well.
    assert_eq!(plan(&wanted(), None, &paths(), &tree.read()).unwrap().replace, paths());
}

#[test]
fn tls_request_fails_instead_of_using_an_unencrypted_path() {
    let psk = TlsPsk::parse("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:").unwrap();
    let wanted = Subsystem { tls: Some(Tls { psk, identity: Default::default() }), ..wanted() };
    let rdma = FabricPath::new(Transport::Rdma, "192.168.77.1:4420".parse().unwrap());
    let tree = Tree::of(&[TWO_PATHS]);
    let fabrics = Fabrics::at(tree.path("dev"), tree.sysfs()).with_proc(tree.path("proc"));
    let mixed = fabrics.ensure_connected(&wanted, &[paths()[0].clone(), rdma.clone()]).unwrap_err();
    assert!(matches!(mixed, EnsureError::NotPlanned(NotPlanned::InClear(path)) if *path == rdma));
    assert!(fabrics.connect(&wanted, &rdma).unwrap_err().to_string().contains("has none"));
    // Existing connections do not count as the requested ones, and remain untouched.
    let error = fabrics.ensure_connected(&wanted, &paths()).unwrap_err();
    assert!(matches!(error, EnsureError::Key(_)), "{error}");
    assert_eq!(tree.attribute("nvme3/delete_controller"), "");
}

#[test]
fn ensure_connected_updates_the_timeouts_of_existing_controllers() {
    let tree = Tree::of(&[TWO_PATHS]);
    let fabrics = Fabrics::at(tree.path("dev"), tree.sysfs());
    let ensured = fabrics.ensure_connected(&wanted(), &paths()).unwrap();
    assert_eq!(ensured.kept, ["nvme3", "nvme4"]);
    assert!(ensured.failed.is_empty() && ensured.odd.is_empty(), "{ensured:?}");
    for controller in ["nvme3", "nvme4"] {
        let set = ["reconnect_delay", "ctrl_loss_tmo", "fast_io_fail_tmo"]
            .map(|attribute| tree.attribute(&format!("{controller}/{attribute}")));
        assert_eq!(set, ["2", "-1", "10"]);
    }
}

#[test]
fn unwanted_path_is_disconnected_only_if_a_wanted_path_is_live() {
    let tree = Tree::of(&[TWO_PATHS]);
    let fabrics = Fabrics::at(tree.path("dev"), tree.sysfs());
    tree.set("nvme3/state", "connecting");
    let ensured = fabrics.ensure_connected(&wanted(), &paths()[..1]).unwrap();
    assert_eq!((ensured.spared.as_slice(), ensured.disconnected.len()), (["nvme4".to_owned()].as_slice(), 0));
    tree.set("nvme3/state", "live");
    let ensured = fabrics.ensure_connected(&wanted(), &paths()[..1]).unwrap();
    assert_eq!((ensured.spared.len(), ensured.disconnected.as_slice()), (0, ["nvme4".to_owned()].as_slice()));
    assert_eq!(
        (tree.attribute("nvme4/delete_controller"), tree.attribute("nvme3/delete_controller")),
        ("1".into(), String::new())
    );
}

#[test]
fn missing_nvme_fabrics_device_error_names_the_module() {
    let tree = Tree::of(&["sys/class/nvme\n"]);
    let fabrics = Fabrics::at(tree.path("dev"), tree.sysfs());
    let error = fabrics.ensure_connected(&wanted(), &paths()).unwrap_err().to_string();
    assert!(error.contains("load nvme-fabrics") && error.contains("dev/nvme-fabrics"), "{error}");
    assert_eq!(fabrics.ensure_disconnected(&wanted()).unwrap(), Vec::<String>::new());
    assert!(fabrics.known_options().is_empty());
    // Disconnecting a controller that no longer exists succeeds.
    fabrics.disconnect("nvme9").unwrap();
}
