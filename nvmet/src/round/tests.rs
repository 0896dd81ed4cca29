//! Tests rounds on a simulated kernel.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::fake::Fake;
use super::*;
use crate::owner::Owner;
use crate::plan::Port;

const NQN: &str = "nqn.2026-01.io.forebay:a";
const OTHER: &str = "nqn.2026-01.io.forebay:b";
const HOSTS: [&str; 3] = ["nqn.host-1", "nqn.host-2", "nqn.host-3"];
const MIB: u64 = 1 << 20;

/// A machine with its own files.
struct Machine {
    kernel: Fake,
    files: tempfile::TempDir,
    surveyor: Surveyor,
}

/// The contents of a configuration.
#[derive(Clone)]
struct Says {
    name: &'static str,
    service: u16,
    subsystems: Vec<Subsystem>,
    /// Not every file system that tests run on supports the attribute.
    volatile_cache: bool,
}

/// NQN, hosts, and files with their sizes in MiB.
type Subsystem = (&'static str, Vec<&'static str>, Vec<(&'static str, u64)>);

/// Two subsystems with a host in common.
fn two() -> Says {
    let subsystems = vec![
        (NQN, HOSTS[..2].into(), vec![("one", 1), ("two", 2)]),
        (OTHER, HOSTS[1..].into(), vec![("three", 1)]),
    ];
    Says { name: "default", service: 4420, subsystems, volatile_cache: true }
}

fn one() -> Says {
    Says { subsystems: vec![(NQN, HOSTS[..2].into(), vec![("one", 1)])], ..two() }
}

impl Machine {
    fn new() -> Self {
        let files = tempfile::tempdir().expect("a folder");
        Self { kernel: Fake::new(), files, surveyor: Surveyor::default() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.files.path().canonicalize().expect("the folder exists").join(name)
    }

    fn config(&self, says: &Says) -> Config {
        let mut text = format!(
            "[target]\nname = {:?}\n[[port]]\ntransport = \"tcp\"\naddress = \"192.168.77.1\"\nservice = {}\n",
            says.name, says.service
        );
        for (nqn, hosts, files) in &says.subsystems {
            text += &format!("[[subsystem]]\nnqn = {nqn:?}\nhosts = {hosts:?}\n");
            for (id, (name, mib)) in (1..).zip(files) {
                let letters: u64 =
                    name.bytes().fold(0, |sum, byte| (sum << 8 | u64::from(byte)) & 0xffff_ffff_ffff);
                let path = self.path(name);
                text += &format!(
                    "[[subsystem.namespace]]\nid = {id}\nuuid = \"8bd9bb5c-6ec9-4a0c-a0a6-{letters:012x}\"\n\
                     file = {path:?}\nsize = \"{mib}MiB\"\nallow_volatile_cache = {}\n",
                    says.volatile_cache
                );
            }
        }
        Config::parse(&text).expect("a configuration")
    }

    fn wanted(&self, config: &Config) -> Wanted {
        let address = Ok("192.168.77.1".parse().expect("an address"));
        Wanted::of(config, vec![Port { config: config.ports[0].clone(), address }])
    }

    /// Runs a round like a process that has just started.
    fn round(&mut self, says: &Says) -> Report {
        self.surveyor = Surveyor::default();
        self.next_round(says)
    }

    fn next_round(&mut self, says: &Says) -> Report {
        let config = self.config(says);
        let wanted = self.wanted(&config);
        let root = self.kernel.root();
        self.kernel.taken.clear();
        round(&root, &config, &wanted, &mut self.surveyor, &mut self.kernel).expect("a round")
    }

    /// Runs a round that reports no problem.
    fn good(&mut self, says: &Says) {
        let report = self.round(says);
        assert_eq!(report.problems, [], "{:?}", self.kernel.tree());
        assert!(report.ports.iter().all(|port| port.up), "{report:?}");
        assert!(report.namespaces.iter().all(|namespace| namespace.up && namespace.bytes > 0), "{report:?}");
    }

    fn remove(&mut self, says: &Says) -> Report {
        let config = self.config(says);
        let root = self.kernel.root();
        self.kernel.taken.clear();
        let mut surveyor = Surveyor::default();
        round(&root, &config, &Wanted::nothing(&config), &mut surveyor, &mut self.kernel).expect("a round")
    }

    fn problem(&mut self, says: &Says, expected: &str) {
        let report = self.round(says);
        let problems: Vec<String> =
            report.problems.iter().map(|problem| format!("{}: {}", problem.subject, problem.why)).collect();
        assert!(problems.iter().any(|problem| problem.contains(expected)), "{expected:?}: {problems:?}");
    }

    /// Steps that remaining hosts would notice.
    fn cuts(&self) -> Vec<&Step> {
        let is_cut = |step: &&Step| match step {
            Step::Unlink(at) => at.starts_with("ports/"),
            Step::Set(at, value) => at.ends_with("/enable") && value == "0",
            Step::Remove(at) => !at.contains("/referrals/"),
            _ => false,
        };
        self.kernel.taken.iter().filter(is_cut).collect()
    }
}

fn empty() -> BTreeMap<String, String> {
    Fake::new().tree()
}

/// Identifies ports by their properties instead of their numbers.
fn without_numbers(tree: BTreeMap<String, String>) -> Vec<(String, String)> {
    let plain = |name: String| {
        let parts: Vec<&str> = name.split('/').collect();
        match parts[..] {
            ["ports", _, ..] => format!("ports/{}", parts[2..].join("/")),
            _ => name,
        }
    };
    tree.into_iter().map(|(name, value)| (plain(name), value)).collect()
}

#[test]
fn round_creates_the_configured_target_and_is_idempotent() {
    let mut machine = Machine::new();
    machine.good(&two());
    let tree = machine.kernel.tree();
    let at = format!("subsystems/{NQN}/namespaces/2");
    for (name, value) in [
        ("enable", "1"),
        ("resv_enable", "1"),
        ("device_path", &machine.path("two").display().to_string()),
        ("device_uuid", "8bd9bb5c-6ec9-4a0c-a0a6-00000074776f"),
    ] {
        assert_eq!(tree[&format!("{at}/{name}")], value, "{name}");
    }
    assert_eq!(
        tree[&format!("subsystems/{NQN}/allowed_hosts/{}", HOSTS[1])],
        format!("-> hosts/{}", HOSTS[1])
    );
    assert_eq!(fs::metadata(machine.path("two")).expect("created").len(), 2 * MIB);
    machine.next_round(&two());
    assert_eq!(machine.kernel.taken, []);
    // A restarted process does not know which sizes have been reported to hosts.
    machine.good(&two());
    let is_size = |step: &Step| matches!(step, Step::Set(at, _) if at.ends_with("/revalidate_size"));
    assert!(machine.kernel.taken.len() == 3 && machine.kernel.taken.iter().all(is_size));
    assert_eq!(machine.kernel.tree().len(), tree.len());
}

#[test]
fn next_start_completes_a_round_interrupted_after_any_step() {
    let mut machine = Machine::new();
    machine.good(&two());
    let steps = machine.kernel.taken.len();
    assert!(steps > 30, "{steps}");
    let expected = without_numbers(machine.kernel.tree());
    for crash in 0..=steps {
        let mut crashed = Machine::new();
        crashed.kernel.left = Some(crash);
        crashed.round(&two());
        crashed.kernel.left = None;
        crashed.good(&two());
        let found: Vec<_> = without_numbers(crashed.kernel.tree())
            .into_iter()
            .map(|(name, value)| {
                let files = crashed.files.path().display().to_string();
                (name, value.replace(&files, &machine.files.path().display().to_string()))
            })
            .collect();
        let reported = |tree: &[(String, String)]| {
            tree.iter().filter(|(name, _)| !name.ends_with("/revalidate_size")).cloned().collect::<Vec<_>>()
        };
        assert_eq!(reported(&found), reported(&expected), "after {crash} steps");
    }
}

#[test]
fn removal_is_complete_after_a_crash_at_any_step() {
    let mut machine = Machine::new();
    machine.good(&two());
    let steps = machine.kernel.taken.len();
    for crash in 0..=steps {
        let mut crashed = Machine::new();
        crashed.kernel.left = Some(crash);
        crashed.round(&two());
        crashed.kernel.left = None;
        assert_eq!(crashed.remove(&two()).problems, []);
        assert_eq!(crashed.kernel.tree(), empty(), "creation interrupted after {crash} steps");
    }
    machine.remove(&two());
    let steps = machine.kernel.taken.len();
    assert!(steps > 20, "{steps}");
    for crash in 0..=steps {
        let mut crashed = Machine::new();
        crashed.good(&two());
        crashed.kernel.left = Some(crash);
        crashed.remove(&two());
        crashed.kernel.left = None;
        assert_eq!(crashed.remove(&two()).problems, []);
        assert_eq!(crashed.kernel.tree(), empty(), "removal interrupted after {crash} steps");
        assert_eq!(fs::metadata(crashed.path("two")).expect("files stay").len(), 2 * MIB);
    }
}

#[test]
fn next_start_completes_a_change_interrupted_after_any_step() {
    let mut machine = Machine::new();
    machine.good(&one());
    let expected = machine.kernel.tree().len();
    let changed = || {
        let mut machine = Machine::new();
        machine.good(&two());
        machine.kernel.taken.clear();
        machine
    };
    let mut machine = changed();
    machine.good(&one());
    for crash in 0..=machine.kernel.taken.len() {
        let mut crashed = changed();
        crashed.kernel.left = Some(crash);
        crashed.round(&one());
        crashed.kernel.left = None;
        crashed.good(&one());
        let mut tree = crashed.kernel.tree();
        // A crash between disallowing a host and removing it: no subsystem allows it.
        let left = tree.remove(&format!("hosts/{}", HOSTS[2])).is_some();
        tree.remove(&format!("hosts/{}/dhchap_key", HOSTS[2]));
        assert_eq!(tree.len(), expected, "after {crash} steps ({left}): {tree:?}");
    }
}

#[test]
fn objects_of_other_programs_are_not_modified() {
    let mut machine = Machine::new();
    let foreign = machine.path("foreign");
    File::create(&foreign).expect("a file").set_len(MIB).expect("room");
    let set = |at: &str, value: &str| Step::Set(at.into(), value.into());
    let link = |to: &str, at: &str| Step::Link { to: to.into(), at: at.into() };
    machine.kernel.take_as_other_program(&[
        Step::Make("subsystems/theirs".into()),
        Step::Make("subsystems/theirs/namespaces/1".into()),
        set("subsystems/theirs/namespaces/1/device_path", foreign.to_str().expect("text")),
        set("subsystems/theirs/namespaces/1/resv_enable", "1"),
        set("subsystems/theirs/namespaces/1/enable", "1"),
        // One of our hosts, and one with a key.
        Step::Make(format!("hosts/{}", HOSTS[0])),
        link(&format!("hosts/{}", HOSTS[0]), &format!("subsystems/theirs/allowed_hosts/{}", HOSTS[0])),
        Step::Make(format!("hosts/{}", HOSTS[1])),
        set(&format!("hosts/{}/dhchap_key", HOSTS[1]), "DHHC-1:"),
        Step::Make("ports/1".into()),
        set("ports/1/addr_trtype", "tcp"),
        set("ports/1/addr_adrfam", "ipv4"),
        set("ports/1/addr_traddr", "192.168.77.1"),
        set("ports/1/addr_trsvcid", "4421"),
        link("subsystems/theirs", "ports/1/subsystems/theirs"),
        Step::Make("ports/2".into()),
        Step::Make("subsystems/theirs-too".into()),
    ]);
    let before = machine.kernel.tree();
    machine.good(&two());
    machine.good(&one());
    let with_foreign = Says { subsystems: vec![(NQN, vec![], vec![("one", 1), ("foreign", 1)])], ..one() };
    machine.problem(&with_foreign, "foreign: namespace 1 of theirs lies on it");
    // On the same address and port as the other target.
    machine.problem(
        &Says { service: 4421, ..one() },
        "port 1 of the kernel's target, which is not this target's",
    );
    machine.remove(&two());
    assert_eq!(machine.kernel.tree(), before);
}

#[test]
fn conflicts_with_another_target_are_reported_and_left_unchanged() {
    let mut machine = Machine::new();
    machine.good(&Says { name: "first", ..one() });
    let before = machine.kernel.tree();
    // Another target on the same machine, with the same names.
    machine.problem(&one(), &format!("subsystem {NQN}: the kernel's target has one of this name"));
    machine.remove(&one());
    assert_eq!(machine.kernel.tree(), before);
    // With distinct names, neither target reports a problem.
    let second =
        Says { service: 4421, subsystems: vec![(OTHER, vec![HOSTS[0]], vec![("three", 1)])], ..one() };
    machine.good(&second);
    machine.good(&Says { name: "first", ..one() });
    machine.remove(&second);
    let reported = |tree: BTreeMap<String, String>| {
        tree.into_iter().filter(|(n, _)| !n.ends_with("size")).collect::<Vec<_>>()
    };
    assert_eq!(reported(machine.kernel.tree()), reported(before));

    // Objects that others have put into our port remain, and the port with them.
    let ours = Owner::of("first").ports().next().expect("a port");
    machine.kernel.take_as_other_program(&[
        Step::Make("subsystems/theirs".into()),
        Step::Link { to: "subsystems/theirs".into(), at: format!("ports/{ours}/subsystems/theirs") },
    ]);
    let report = machine.remove(&Says { name: "first", ..one() });
    assert!(report.problems[0].why.contains("carries theirs"), "{report:?}");
    assert!(machine.kernel.tree().contains_key(&format!("ports/{ours}/subsystems/theirs")));
}

#[test]
fn adding_and_removing_hosts_and_namespaces_does_not_disrupt_others() {
    let mut machine = Machine::new();
    let says = |hosts: &[&'static str], files: &[(&'static str, u64)]| Says {
        subsystems: vec![(NQN, hosts.into(), files.into())],
        ..one()
    };
    machine.good(&says(&HOSTS[..1], &[("one", 1)]));
    machine.good(&says(&HOSTS[..2], &[("one", 1), ("two", 1)]));
    assert_eq!(machine.cuts(), [] as [&Step; 0]);
    machine.good(&says(&HOSTS[1..2], &[("one", 1), ("two", 1)]));
    assert_eq!(machine.cuts(), [] as [&Step; 0]);
    assert!(!machine.kernel.tree().contains_key(&format!("hosts/{}", HOSTS[0])));
    machine.good(&says(&HOSTS[1..2], &[("one", 1)]));
    let at = format!("subsystems/{NQN}/namespaces/2");
    assert_eq!(machine.cuts(), [&Step::Set(format!("{at}/enable"), "0".into()), &Step::Remove(at)]);
    machine.good(&two());
    assert_eq!(machine.cuts(), [] as [&Step; 0]);
}

#[test]
fn backing_file_grows_but_never_shrinks_and_hosts_are_notified_once() {
    let mut machine = Machine::new();
    machine.good(&one());
    let larger = Says { subsystems: vec![(NQN, HOSTS[..2].into(), vec![("one", 4)])], ..one() };
    machine.next_round(&larger);
    let at = format!("subsystems/{NQN}/namespaces/1/revalidate_size");
    let path = machine.path("one");
    assert_eq!(
        machine.kernel.taken,
        [Step::GrowFile { path: path.clone(), bytes: 4 * MIB }, Step::Set(at.clone(), "1".into())]
    );
    assert_eq!(fs::metadata(&path).expect("a file").len(), 4 * MIB);
    machine.next_round(&larger);
    assert_eq!(machine.kernel.taken, []);
    // The file never shrinks; a size that has grown by other means, such as a partition's, is reported.
    machine.next_round(&one());
    assert_eq!(machine.kernel.taken, []);
    File::options().write(true).open(&path).expect("open").set_len(5 * MIB).expect("room");
    machine.next_round(&one());
    assert_eq!(machine.kernel.taken, [Step::Set(at, "1".into())]);
}

#[test]
fn write_through_is_set_before_enabling_and_on_enabled_namespaces() {
    let strict = Says { volatile_cache: false, ..one() };
    let mut machine = Machine::new();
    machine.good(&one());
    let step = Step::WriteThrough(machine.path("one"));
    let report = machine.next_round(&strict);
    if report.problems.is_empty() {
        assert_eq!(machine.kernel.taken, std::slice::from_ref(&step));
        machine.next_round(&strict);
        assert_eq!(machine.kernel.taken, []);
        let mut machine = Machine::new();
        machine.good(&strict);
        let taken = &machine.kernel.taken;
        let enable = Step::Set(format!("subsystems/{NQN}/namespaces/1/enable"), "1".into());
        let at = |step: &Step| taken.iter().position(|taken| taken == step);
        let through = at(&Step::WriteThrough(machine.path("one")));
        assert!(through.is_some() && through < at(&enable), "{taken:?}");
    } else {
        // On a file system without the attribute, the host that uses the namespace keeps it, and no other host gets it.
        assert!(report.problems[0].why.contains("cannot make every write durable"), "{report:?}");
        assert!(report.namespaces[0].up);
        let report = Machine::new().round(&strict);
        assert!(!report.problems.is_empty() && !report.namespaces[0].up, "{report:?}");
    }
}

#[test]
fn file_with_foreign_data_is_refused_and_not_modified() {
    let mut machine = Machine::new();
    let path = machine.path("one");
    let file = File::create(&path).expect("a file");
    file.set_len(8 * MIB).expect("room");
    file.write_all_at(b"LUKS\xba\xbe", 0).expect("written");
    let before = fs::metadata(&path).expect("a file").modified().expect("a time");
    machine.problem(&one(), "it holds an encrypted volume (LUKS)");
    let larger = Says { subsystems: vec![(NQN, vec![], vec![("one", 16)])], ..one() };
    machine.problem(&larger, "it holds an encrypted volume (LUKS)");
    assert_eq!(fs::metadata(&path).expect("a file").modified().expect("a time"), before);
    assert!(!machine.kernel.tree().keys().any(|name| name.contains("namespaces/1")));
    // The other namespaces are still offered.
    let report =
        machine.round(&Says { subsystems: vec![(NQN, vec![], vec![("one", 1), ("two", 1)])], ..one() });
    assert_eq!(report.namespaces.iter().map(|namespace| namespace.up).collect::<Vec<_>>(), [false, true]);
}

#[test]
fn uuid_and_backing_file_of_an_enabled_namespace_do_not_change() {
    let mut machine = Machine::new();
    machine.good(&one());
    let before = machine.kernel.tree();
    // The UUIDs are derived from the file names.
    let renamed = Says { subsystems: vec![(NQN, HOSTS[..2].into(), vec![("two", 1)])], ..one() };
    machine.problem(&renamed, "it is offered under another UUID");
    let mut config = machine.config(&one());
    config.subsystems[0].namespaces[0].source =
        crate::config::Source::File { path: machine.path("other"), bytes: MIB };
    File::create(machine.path("other")).expect("a file").set_len(MIB).expect("room");
    let wanted = machine.wanted(&config);
    let on_other = |machine: &mut Machine| {
        let mut surveyor = Surveyor::default();
        round(&machine.kernel.root(), &config, &wanted, &mut surveyor, &mut machine.kernel).expect("a round")
    };
    let report = on_other(&mut machine);
    assert!(report.problems[0].why.contains("take it out of the configuration first"), "{report:?}");
    assert_eq!(machine.kernel.tree(), before);
    // Unless its backing device has been removed from the machine, such as a drive that is reattached under another name.
    fs::remove_file(machine.path("one")).expect("removed");
    let report = on_other(&mut machine);
    assert!(report.problems.is_empty() && report.namespaces[0].up, "{report:?}");
}

#[test]
fn removed_backing_file_is_reported_and_its_namespace_kept() {
    let mut machine = Machine::new();
    machine.good(&one());
    fs::remove_file(machine.path("one")).expect("removed");
    machine.problem(&one(), "its file has gone");
    let report = machine.round(&one());
    assert!(!report.namespaces[0].up);
    assert_eq!(machine.kernel.taken, []);
    assert!(!machine.path("one").exists(), "a new file would be a different device");
}

#[test]
fn port_is_retried_until_its_address_is_available() {
    let mut machine = Machine::new();
    machine.kernel.addresses.clear();
    machine.problem(&one(), "this machine has no such address yet");
    let report = machine.round(&one());
    assert!(!report.ports[0].up && report.namespaces[0].up);
    machine.kernel.addresses.insert("192.168.77.1".into());
    machine.good(&one());
}

#[test]
fn port_changes_its_service_id_and_is_kept_without_an_address() {
    let mut machine = Machine::new();
    machine.good(&one());
    let moved = Says { service: 4421, ..one() };
    machine.good(&moved);
    let services: Vec<String> =
        machine.kernel.tree().into_iter().filter(|(n, _)| n.ends_with("trsvcid")).map(|(_, v)| v).collect();
    assert_eq!(services, ["4421"]);
    let config = machine.config(&moved);
    let address = Err("interface eth1 has no address".to_owned());
    let wanted = Wanted::of(&config, vec![Port { config: config.ports[0].clone(), address }]);
    machine.kernel.taken.clear();
    let report = round(&machine.kernel.root(), &config, &wanted, &mut machine.surveyor, &mut machine.kernel)
        .expect("a round");
    assert_eq!(report.problems[0].why, "interface eth1 has no address");
    assert_eq!(machine.kernel.taken, []);
}

#[test]
fn lock_blocks_until_the_holder_releases_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let held = lock(folder.path()).expect("the lock is free");
    let waits = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| lock(folder.path()).map(drop));
        assert!(!waiter.is_finished());
        drop(held);
        waiter.join().expect("no panic")
    });
    waits.expect("the lock is released");
    let absent: &Path = Path::new("/nonexistent/nvmet");
    assert!(lock(absent).is_err());
}
