//! Limits of volumes: operations that exceed them wait, do not disturb other volumes, and lose nothing.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::time::{Duration, Instant};

use forebay_proto::admin as api;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::Header;
use forebay_smb::wire::create::CreateDisposition;
use forebay_smb::wire::negotiate::Dialect;
use support::{Daemon, Place, data, engines, request, until};
use tonic::Code;

const MIB: u64 = 1 << 20;

fn set(daemon: &mut Daemon, qos: api::Qos) -> Result<api::Qos, tonic::Status> {
    let request = api::SetQosRequest { volume_id: "v".to_owned(), qos: Some(qos) };
    let response = daemon.admin(async |admin| admin.set_qos(request).await)?;
    Ok(response.into_inner().volume.unwrap().qos.unwrap())
}

fn operations(operations_per_second: u64) -> api::Qos {
    api::Qos { operations_per_second, ..api::Qos::default() }
}

fn connections(daemon: &mut Daemon) -> u32 {
    let info = daemon.admin(async |admin| admin.get_server_info(api::GetServerInfoRequest {}).await);
    info.unwrap().into_inner().connections
}

fn pattern(seed: u64) -> Vec<u8> {
    (0..MIB).map(|i| (i.wrapping_mul(seed + 3) >> 3) as u8).collect()
}

#[test]
fn volume_is_limited_to_its_bytes_per_second_without_data_loss() {
    const RATE: u64 = 4 * MIB;
    const PIECES: u64 = 12;
    for engine in engines() {
        let place = Place::new(engine);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        let limit =
            api::Qos { bytes_per_second: RATE, priority: api::Priority::Low.into(), ..api::Qos::default() };
        assert_eq!(set(&mut daemon, limit).unwrap(), limit);
        let mut client = daemon.mount("v", Dialect::SMB3_1_1);
        let file = client.open("f", CreateDisposition::CREATE).unwrap();
        let began = Instant::now();
        for i in 0..PIECES {
            client.send_write(file, i * MIB, &pattern(i));
        }
        for _ in 0..PIECES {
            assert_eq!(client.answer().status(), NtStatus::SUCCESS);
        }
        // The last one starts when the previous ones are paid for, minus the burst.
        let least = Duration::from_millis((PIECES - 1) * MIB * 1000 / RATE - 100);
        assert!(began.elapsed() >= least, "{:?}", began.elapsed());

        let unlimited = api::Qos { priority: api::Priority::High.into(), ..api::Qos::default() };
        assert_eq!(set(&mut daemon, unlimited).unwrap(), unlimited);
        for i in 0..PIECES {
            assert!(client.read(file, i * MIB, MIB as u32).unwrap() == pattern(i), "piece {i}");
        }
    }
}

#[test]
fn throttled_volume_delays_no_other_and_a_raised_limit_applies_at_once() {
    const READS: usize = 400;
    for engine in engines() {
        let place = Place::new(engine);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        daemon.create_volume("w").unwrap();
        let mut client = daemon.mount("v", Dialect::SMB2_1);
        let file = client.open("f", CreateDisposition::CREATE).unwrap();
        assert_eq!(client.write(file, 0, b"limited"), NtStatus::SUCCESS);
        set(&mut daemon, operations(10)).unwrap();
        for _ in 0..READS {
            client.send_read(file, 0, 7);
        }
        assert_eq!(data(&client.answer()).unwrap(), b"limited");
        // With the limit, they would take 40 s.
        let mut other = daemon.mount("w", Dialect::SMB2_1);
        let file = other.open("f", CreateDisposition::CREATE).unwrap();
        for i in 0..100 {
            assert_eq!(other.write(file, i, b"x"), NtStatus::SUCCESS);
        }
        let raised = Instant::now();
        set(&mut daemon, operations(0)).unwrap();
        for _ in 1..READS {
            assert_eq!(data(&client.answer()).unwrap(), b"limited");
        }
        assert!(raised.elapsed() < Duration::from_secs(20), "{:?}", raised.elapsed());
    }
}

#[test]
fn throttled_operations_end_with_their_connection_or_the_server() {
    const WRITES: u64 = 400;
    for engine in engines() {
        let place = Place::new(engine);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        let mut leaving = daemon.mount("v", Dialect::SMB2_1);
        let mut staying = daemon.mount("v", Dialect::SMB2_1);
        let file = leaving.open("gone", CreateDisposition::CREATE).unwrap();
        let kept = staying.open("kept", CreateDisposition::CREATE).unwrap();
        set(&mut daemon, operations(10)).unwrap();
        for i in 0..WRITES {
            leaving.send_write(file, i, b"x");
        }
        drop(leaving);
        until("the end of the connection", || (connections(&mut daemon) == 1).then_some(()));
        for i in 0..WRITES {
            staying.send_write(kept, i, b"y");
        }
        assert_eq!(staying.answer().status(), NtStatus::SUCCESS);
        // With the limit, this would take 40 s.
        let ends = Instant::now();
        daemon.terminate();
        let mut answered = 1;
        while let Some(frame) = staying.frame() {
            assert_eq!(Header::parse(&frame).unwrap().status, NtStatus::SUCCESS);
            answered += 1;
        }
        assert_eq!(daemon.wait().code(), Some(0));
        assert!(ends.elapsed() < Duration::from_secs(15), "{:?}", ends.elapsed());
        let written = |name: &str| std::fs::read(place.pool().join("volumes/v").join(name)).unwrap();
        assert_eq!(written("kept"), vec![b'y'; answered], "only acknowledged data is written");
        assert!(written("gone").iter().all(|byte| *byte == b'x'));
    }
}

#[test]
fn metrics_identify_a_busy_volume() {
    for engine in engines() {
        let place = Place::new(engine);
        let mut daemon = place.start();
        let labels = [("name", "data"), ("namespace", "team")]
            .map(|(key, value)| (format!("csi.storage.k8s.io/pvc/{key}"), value.to_owned()));
        daemon.create(api::CreateVolumeRequest { labels: labels.into(), ..request("v") }).unwrap();
        daemon.create_volume("w").unwrap();
        let mut client = daemon.mount("v", Dialect::SMB2_1);
        let _other = daemon.mount("w", Dialect::SMB2_1);
        let file = client.open("f", CreateDisposition::CREATE).unwrap();
        for i in 0..3 {
            assert_eq!(client.write(file, i * 1000, &[1; 1000]), NtStatus::SUCCESS);
        }
        assert_eq!(client.read(file, 0, 8192).unwrap().len(), 3000);
        assert_eq!(client.read(file, 9000, 10), Err(NtStatus::END_OF_FILE));
        assert_eq!(client.flush(file), NtStatus::SUCCESS);
        set(&mut daemon, operations(10)).unwrap();
        for _ in 0..20 {
            client.send_read(file, 0, 7);
        }
        // A server without processor time could process them only after the limit is removed.
        let throttled = "forebay_volume_throttled_operations_total{volume=\"v\"} ";
        let is_throttled = |text: &str| {
            text.lines().find_map(|line| line.strip_prefix(throttled)).is_some_and(|count| count != "0")
        };
        let began = Instant::now();
        while !is_throttled(&place.metrics()) {
            assert!(began.elapsed() < Duration::from_secs(20), "nothing was throttled");
            std::thread::sleep(Duration::from_millis(10));
        }
        set(&mut daemon, operations(0)).unwrap();
        for _ in 0..20 {
            assert_eq!(data(&client.answer()).unwrap().len(), 7);
        }
        let text = place.metrics();
        let value = |name: &str, labels: &str| {
            let start = format!("forebay_volume_{name}{{{labels}}} ");
            let found = text.lines().find_map(|line| line.strip_prefix(&start));
            found.unwrap_or_else(|| panic!("{start}is not in\n{text}")).parse::<f64>().unwrap()
        };
        let of = |volume: &str, kind: &str| format!("volume=\"{volume}\",kind=\"{kind}\"");
        let info = |id: &str, namespace: &str, name: &str| {
            format!(
                "volume=\"{id}\",pool=\"p\",claim_namespace=\"{namespace}\",claim=\"{name}\",persistentvolume=\"\""
            )
        };
        assert_eq!(value("info", &info("v", "team", "data")), 1.0);
        assert_eq!(value("info", &info("w", "", "")), 1.0);
        for (name, busy, idle) in [
            ("capacity_bytes", f64::from(1 << 30), f64::from(1 << 30)),
            ("sessions", 1.0, 1.0),
            ("open_files", 1.0, 0.0),
            ("written_bytes_total", 3000.0, 0.0),
            ("read_bytes_total", 3140.0, 0.0),
        ] {
            assert_eq!(value(name, "volume=\"v\""), busy, "{name}");
            assert_eq!(value(name, "volume=\"w\""), idle, "{name}");
        }
        for (kind, busy) in [("read", 22.0), ("write", 3.0), ("flush", 1.0), ("metadata", 1.0)] {
            assert_eq!(value("operations_total", &of("v", kind)), busy, "{kind}");
            assert_eq!(value("operations_total", &of("w", kind)), 0.0, "{kind}");
        }
        for kind in ["read", "write", "flush", "metadata"] {
            assert!(value("operation_seconds_total", &of("v", kind)) > 0.0, "{kind}");
        }
        assert!(value("throttled_operations_total", "volume=\"v\"") > 0.0);
        assert_eq!(value("throttled_operations_total", "volume=\"w\""), 0.0);
        // A removed volume has no metrics.
        let request = api::DeleteVolumeRequest { volume_id: "w".to_owned(), force: true };
        daemon.admin(async |admin| admin.delete_volume(request).await).unwrap();
        assert!(!place.metrics().contains("volume=\"w\""));
    }
}

#[test]
fn qos_limits_survive_a_restart_and_invalid_ones_are_refused() {
    let place = Place::new("auto");
    let mut daemon = place.start();
    assert_eq!(set(&mut daemon, operations(100)).unwrap_err().code(), Code::NotFound);
    daemon.create_volume("v").unwrap();
    let wanted = api::Qos {
        bytes_per_second: 100 * MIB,
        operations_per_second: 500,
        priority: api::Priority::Low.into(),
    };
    assert_eq!(set(&mut daemon, wanted).unwrap(), wanted);
    for wrong in
        [operations(9), api::Qos { bytes_per_second: MIB - 1, ..wanted }, api::Qos { priority: 9, ..wanted }]
    {
        assert_eq!(set(&mut daemon, wrong).unwrap_err().code(), Code::InvalidArgument, "{wrong:?}");
    }
    let none = api::SetQosRequest { volume_id: "v".to_owned(), qos: None };
    let refused = daemon.admin(async |admin| admin.set_qos(none).await).unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    daemon.kill();
    let mut daemon = place.start();
    let request = api::StatVolumeRequest { volume_id: "v".to_owned() };
    let response = daemon.admin(async |admin| admin.stat_volume(request).await).unwrap();
    assert_eq!(response.into_inner().volume.unwrap().qos, Some(wanted));
}
