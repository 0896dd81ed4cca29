//! Whether this machine has RDMA: the server works either way, and reports which.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::net::TcpListener;

use forebay_inventory::{Host, Transport};
use forebay_proto::admin as api;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::CreateDisposition;
use forebay_smb::wire::negotiate::Dialect;
use support::{Daemon, Place, until};

/// The available RDMA: devices with a port that is up, or the reason why there are none.
fn here() -> Result<String, String> {
    if let Err(error) = forebay_rdma::EventChannel::new() {
        return Err(error.to_string());
    }
    let locals = forebay_server::interfaces::locals();
    let devices: Vec<String> = Host::at("/")
        .read()
        .rdma
        .into_iter()
        .filter(|device| device.transport != Transport::Other)
        .filter(|device| {
            let up = device.ports.iter().filter(|port| port.state == "ACTIVE");
            let mut netdevs = up.flat_map(|port| &port.netdevs);
            netdevs.any(|netdev| locals.iter().any(|l| l.interface == *netdev && l.address.is_ipv4()))
        })
        .map(|device| device.name)
        .collect();
    match devices.is_empty() {
        true => Err("no device is up".into()),
        false => Ok(devices.join(", ")),
    }
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port()
}

fn transports(daemon: &mut Daemon) -> Vec<String> {
    daemon
        .admin(async |admin| admin.get_server_info(api::GetServerInfoRequest {}).await)
        .unwrap()
        .into_inner()
        .transports
}

#[test]
fn server_reports_rdma_if_present_and_always_serves_tcp() {
    let place = Place::new("auto");
    place.configure("0.0.0.0:0", &place.pool());
    let text = std::fs::read_to_string(place.config()).unwrap();
    let ports =
        format!("rdma = \"auto\"\nrdma_port = {}\niwarp_port = {}\n[admin]", free_port(), free_port());
    std::fs::write(place.config(), text.replace("[admin]", &ports)).unwrap();
    let mut daemon = place.start();
    let log = || std::fs::read_to_string(place.log()).unwrap();
    let here = here();
    match &here {
        Ok(_) => {
            until("a listener over RDMA", || {
                transports(&mut daemon).contains(&"rdma".to_owned()).then_some(())
            });
            assert!(log().contains("taking connections over RDMA"), "{}", log());
        }
        Err(_) => {
            until("the log entry about RDMA", || log().contains("no RDMA here").then_some(()));
            assert_eq!(transports(&mut daemon), ["tcp"]);
        }
    }

    // It always serves over TCP.
    daemon.create_volume("v").unwrap();
    let mut client = daemon.mount("v", Dialect::SMB3_1_1);
    let file = client.open("f", CreateDisposition::CREATE).unwrap();
    let payload = vec![7; 1 << 20];
    assert_eq!(client.write(file, 0, &payload), NtStatus::SUCCESS);
    assert_eq!(client.read(file, 0, 1 << 20).unwrap(), payload);
    let sessions =
        daemon.admin(async |admin| admin.list_sessions(api::ListSessionsRequest {}).await).unwrap();
    assert_eq!(sessions.into_inner().sessions[0].transport, "tcp");
    let metrics = place.metrics();
    for line in [
        "forebay_read_bytes_total{path=\"rdma-direct\"} 0",
        "forebay_read_bytes_total{path=\"copied\"} 1048576",
        "forebay_written_bytes_total{path=\"rdma-direct\"} 0",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line} is not in\n{metrics}");
    }
    match here {
        Ok(devices) => {
            println!("RDMA on this host: {devices}. The server takes connections over it and over TCP.")
        }
        Err(reason) => {
            println!("RDMA on this host: none ({reason}). The server says so and serves over TCP.")
        }
    }
}
