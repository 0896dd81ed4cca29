//! Tests on real interfaces, in a separate network namespace: the kernel's tables, and a pair of interfaces connected to
//! each other.

use std::process::Command;
use std::time::{Duration, Instant};

use forebay_testing::{Need, skip};

use super::*;

const OURS: &str = "192.0.2.200/24";
const OURS_6: &str = "fd00:2::200/64";
const PATIENCE: Duration = Duration::from_secs(30);

/// Marks this process as the one in a separate network namespace.
const INSIDE: &str = "FOREBAY_TEST_NETWORK";

/// Runs the tests of `inside` in a network namespace, because they change interfaces and need root there.
#[test]
fn instance_addresses_in_a_network_namespace() {
    if std::env::var_os(INSIDE).is_some() {
        for (name, part) in inside::ALL {
            println!("{name}");
            part();
        }
        println!("{} parts passed", inside::ALL.len());
        return;
    }
    let tests = std::env::current_exe().expect("this program");
    let this = ["address::tests::instance_addresses_in_a_network_namespace", "--exact", "--nocapture"];
    let options = if rustix::process::geteuid().is_root() { "-n" } else { "-rn" };
    let output = Command::new("unshare")
        .args([options, "--"])
        .arg(tests)
        .args(this)
        .env(INSIDE, "1")
        .output()
        .expect("unshare(1)");
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if said.contains("unshare failed") {
        return skip(Need::Networks, said);
    }
    let passed = format!("{} parts passed", inside::ALL.len());
    assert!(output.status.success() && said.contains(&passed), "{said}");
}

mod inside {
    use super::*;

    /// The tests, run one after the other.
    pub(super) const ALL: &[(&str, fn())] = &[
        (
            "addresses_are_assigned_on_their_network_announced_and_removed",
            addresses_are_assigned_on_their_network_announced_and_removed,
        ),
        (
            "taken_address_is_waited_for_and_its_owner_is_reported",
            taken_address_is_waited_for_and_its_owner_is_reported,
        ),
        (
            "addresses_left_by_a_killed_server_are_removed_or_expire",
            addresses_left_by_a_killed_server_are_removed_or_expire,
        ),
        ("later_claims_of_an_address_are_contradicted", later_claims_of_an_address_are_contradicted),
        ("address_without_a_matching_interface_is_refused", address_without_a_matching_interface_is_refused),
    ];

    fn ip(arguments: &str) {
        let output = Command::new("ip").args(arguments.split(' ')).output().expect("ip(8)");
        assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// A pair of interfaces: `here0` with an address, and `there0`.
    struct Wire;

    impl Wire {
        fn new() -> Self {
            ip("link add here0 type veth peer name there0");
            for arguments in [
                "address add 192.0.2.1/24 dev here0",
                "address add fd00:2::1/64 dev here0 nodad",
                "link set here0 up",
                "link set there0 up",
            ] {
                ip(arguments);
            }
            Self
        }
    }

    impl Drop for Wire {
        fn drop(&mut self) {
            ip("link del here0");
        }
    }

    fn addresses(texts: &[&str], wait: Duration) -> Arc<Addresses> {
        let wanted = texts.iter().map(|text| text.parse().expect("an address")).collect();
        Arc::new(Addresses::new(wanted, String::new(), wait))
    }

    fn link(name: &str) -> Link {
        let links = Tables::open().and_then(|mut tables| tables.links()).expect("links");
        links.into_iter().find(|link| link.name == name).expect("it is there")
    }

    fn found(text: &str) -> Vec<Entry> {
        let address: InstanceAddress = text.parse().expect("an address");
        let mut all = Tables::open().and_then(|mut tables| tables.addresses()).expect("addresses");
        all.retain(|entry| entry.address == address);
        all
    }

    fn until(what: &str, mut look: impl FnMut() -> bool) {
        let began = Instant::now();
        while !look() {
            assert!(began.elapsed() < PATIENCE, "{what} did not come in time");
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }

    fn addresses_are_assigned_on_their_network_announced_and_removed() {
        let _wire = Wire::new();
        let other = Arp::open(&link("there0")).expect("a socket").expect("Ethernet");
        let ours = addresses(&[OURS, OURS_6], PATIENCE);
        ours.take().expect("they are free");
        for text in [OURS, OURS_6] {
            let entries = found(text);
            assert_eq!(entries.len(), 1, "{text}");
            assert_eq!(entries[0].index, link("here0").index);
            assert!(entries[0].seconds.is_some_and(|seconds| u64::from(seconds) <= ADDRESS_STAY.as_secs()));
        }
        let heard = other.conflict("192.0.2.200".parse().expect("an address")).expect("packets");
        assert_eq!(heard, Some(Hardware(link("here0").hardware)), "the other end receives the announcement");
        // An address that is removed by hand is added again, as long as the server is running.
        ip(&format!("address del {OURS} dev here0"));
        until("the address", || found(OURS).len() == 1);
        assert_eq!(ours.problem(), None);
        ours.give_up();
        ours.give_up();
        assert!(found(OURS).is_empty() && found(OURS_6).is_empty());
    }

    fn taken_address_is_waited_for_and_its_owner_is_reported() {
        let _wire = Wire::new();
        for (text, theirs) in [(OURS, "192.0.2.200/32"), (OURS_6, "fd00:2::200/128")] {
            ip(&format!("address add {theirs} dev there0"));
            until("the other's address", || found(theirs).iter().all(|entry| !entry.tentative));
            let Err(AddressError::Taken { by, .. }) = addresses(&[text], Duration::ZERO).take() else {
                panic!("{text} is taken")
            };
            let hardware = Hardware(link("there0").hardware).to_string();
            assert!(by == hardware || text == OURS_6, "{by}, and not {hardware}");
            assert!(found(text).is_empty(), "a refused address is not left behind");
            let ours = addresses(&[text], PATIENCE);
            std::thread::scope(|scope| {
                let taking = scope.spawn(|| ours.take());
                std::thread::park_timeout(Duration::from_millis(500));
                assert!(!taking.is_finished());
                ip(&format!("address del {theirs} dev there0"));
                taking.join().expect("no panic").expect("it is free now");
            });
            assert_eq!(found(text).len(), 1);
        }
    }

    fn addresses_left_by_a_killed_server_are_removed_or_expire() {
        let _wire = Wire::new();
        let index = link("here0").index;
        let mut tables = Tables::open().expect("a socket");
        for text in [OURS, OURS_6] {
            let address: InstanceAddress = text.parse().expect("an address");
            tables.put(index, address, ADDRESS_STAY).expect("put");
            addresses(&[text], PATIENCE).clear().expect("it is a server's");
            assert!(found(text).is_empty(), "{text}");
            tables.put(index, address, Duration::from_secs(1)).expect("put");
            until("the end of its lifetime", || found(text).is_empty());
        }
        // A permanent address, which no server adds, is left unchanged.
        ip(&format!("address add {OURS} dev here0"));
        let error = addresses(&[OURS], PATIENCE).clear().expect_err("it is not ours").to_string();
        assert!(error.contains(&format!("{OURS} is on here0 already")), "{error}");
        assert_eq!(found(OURS).len(), 1);
    }

    fn later_claims_of_an_address_are_contradicted() {
        let _wire = Wire::new();
        let ours = addresses(&[OURS], PATIENCE);
        ours.take().expect("it is free");
        let other = Arp::open(&link("there0")).expect("a socket").expect("Ethernet");
        let address = "192.0.2.200".parse().expect("an address");
        // After the announcements that are sent anyway.
        let mut claimed = 0;
        until("a contradiction of every claim", || {
            other.announce(address).expect("sent");
            claimed += 1;
            let again = Instant::now() + 2 * ADDRESS_KEEP_INTERVAL;
            until("an answer", || {
                Instant::now() > again || other.conflict(address).expect("packets").is_some()
            });
            claimed > ADDRESS_ANNOUNCEMENTS.len() + 3 && Instant::now() < again
        });
    }

    fn address_without_a_matching_interface_is_refused() {
        let _wire = Wire::new();
        let nowhere = addresses(&["198.51.100.7/24"], PATIENCE).take();
        assert!(matches!(nowhere, Err(AddressError::NoInterface(_))), "{nowhere:?}");
        let wanted = vec!["198.51.100.7/24".parse().expect("an address")];
        let at = |interface: &str| Arc::new(Addresses::new(wanted.clone(), interface.to_owned(), PATIENCE));
        assert!(matches!(at("eth9").take(), Err(AddressError::NotThere(_))));
        let named = at("there0");
        named.take().expect("it is there");
        assert_eq!(found("198.51.100.7/24")[0].index, link("there0").index);
        drop(named);
        until("its removal", || found("198.51.100.7/24").is_empty());
    }
}
