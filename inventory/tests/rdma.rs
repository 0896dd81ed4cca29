//! RDMA devices as the drivers show them.
#![allow(clippy::unwrap_used)]

mod tree;

use std::net::IpAddr;

use forebay_inventory::{Addresses, Assessment, Inventory, LinkLayer, RdmaDevice, Transport, assess};
use tree::read;

const CONNECTX_ROCE: &str = include_str!("trees/connectx-roce.tree");
const CONNECTX_INFINIBAND: &str = include_str!("trees/connectx-infiniband.tree");
const CONNECTX3: &str = include_str!("trees/connectx3-two-ports.tree");
const BROADCOM: &str = include_str!("trees/broadcom.tree");
const INTEL: &str = include_str!("trees/intel.tree");
const RXE: &str = include_str!("trees/rxe.tree");
const RXE_CAPTURED: &str = include_str!("trees/rxe-captured.tree");
const SIW: &str = include_str!("trees/siw.tree");
const STACKED: &str = include_str!("trees/stacked.tree");
const SIW_CAPTURED: &str = include_str!("trees/siw-captured.tree");

fn addresses(of: &[(&str, &str)]) -> Addresses {
    let mut addresses = Addresses::new();
    for (netdev, address) in of {
        addresses.entry((*netdev).into()).or_default().push(address.parse().unwrap());
    }
    addresses
}

fn device<'a>(inventory: &'a Inventory, name: &str) -> &'a RdmaDevice {
    inventory.rdma.iter().find(|d| d.name == name).unwrap()
}

fn assessed(inventory: &Inventory, name: &str, port: usize, addresses: &Addresses) -> Assessment {
    let device = device(inventory, name);
    assess(device, &device.ports[port], &inventory.netdevs, addresses)
}

/// Name, driver, board, firmware, transport, software, NUMA.
type Row<'a> = (&'a str, &'a str, &'a str, &'a str, Transport, bool, Option<u32>);

fn rows(inventory: &Inventory) -> Vec<Row<'_>> {
    let text =
        |t: &'_ Option<String>| -> &'static str { Box::leak(t.clone().unwrap_or_default().into_boxed_str()) };
    inventory
        .rdma
        .iter()
        .map(|d| {
            (
                d.name.as_str(),
                text(&d.driver),
                text(&d.board),
                text(&d.firmware),
                d.transport,
                d.software,
                d.numa_node,
            )
        })
        .collect()
}

#[test]
fn devices_of_every_vendor_are_described() {
    use Transport::{InfiniBand, Iwarp, Other};
    let cases: [(&str, &[Row<'_>]); 8] = [
        (
            CONNECTX_ROCE,
            &[
                ("mlx5_0", "mlx5_core", "MT_0000000838", "28.39.2048", InfiniBand, false, Some(1)),
                ("mlx5_1", "mlx5_core", "MT_0000000838", "28.39.2048", InfiniBand, false, Some(1)),
            ],
        ),
        (
            CONNECTX_INFINIBAND,
            &[
                ("ibp24s0", "mlx5_core", "MT_0000000223", "20.37.1014", InfiniBand, false, Some(0)),
                ("ibp25s0", "mlx5_core", "MT_0000000223", "20.37.1014", InfiniBand, false, Some(0)),
                ("ibp202s0", "mlx5_core", "MT_0000000223", "20.37.1014", InfiniBand, false, Some(1)),
            ],
        ),
        (CONNECTX3, &[("mlx4_0", "mlx4_core", "MT_1090120019", "2.42.5000", InfiniBand, false, None)]),
        (
            BROADCOM,
            &[(
                "bnxt_re0",
                "bnxt_re",
                "Broadcom NetXtreme-C/E RoCE Driver HCA",
                "229.0.136.0",
                InfiniBand,
                false,
                Some(2),
            )],
        ),
        (
            INTEL,
            &[
                ("iwp61s0f1", "irdma", "", "0.2", Iwarp, false, Some(0)),
                ("rocep177s0f0", "irdma", "", "1.71", InfiniBand, false, Some(0)),
            ],
        ),
        (RXE, &[("rxe0", "rdma_rxe", "", "", InfiniBand, true, None)]),
        (SIW, &[("siw0", "siw", "", "", Iwarp, true, None), ("siw1", "siw", "", "", Iwarp, true, None)]),
        (
            STACKED,
            &[
                ("mlx5_2", "mlx5_core", "MT_0000000359", "22.36.1010", InfiniBand, false, Some(0)),
                ("mlx5_10", "mlx5_core", "MT_0000000359", "22.36.1010", InfiniBand, false, Some(0)),
                ("mlx5_bond_0", "mlx5_core", "MT_0000000359", "22.36.1010", InfiniBand, false, Some(0)),
                ("rdmap100s0", "efa", "", "", Other, false, Some(0)),
            ],
        ),
    ];
    for (tree, expected) in cases {
        let inventory = read(&[tree]);
        assert_eq!(rows(&inventory), expected);
        assert_eq!(inventory.oddities, []);
    }
}

#[test]
fn ports_are_described() {
    let of = |tree: &str| -> Vec<(String, u32, LinkLayer, String, String, u32, String)> {
        let port = |d: &RdmaDevice| -> Vec<_> {
            let row = |p: &forebay_inventory::RdmaPort| {
                let netdevs = p.netdevs.join(",");
                let (state, physical) = (p.state.clone(), p.physical_state.clone());
                (d.name.clone(), p.number, p.link_layer, state, physical, p.rate_mbps, netdevs)
            };
            d.ports.iter().map(row).collect()
        };
        read(&[tree]).rdma.iter().flat_map(port).collect()
    };
    let row = |name: &str, number, layer, state: &str, physical: &str, mbps, netdevs: &str| {
        (name.to_owned(), number, layer, state.to_owned(), physical.to_owned(), mbps, netdevs.to_owned())
    };
    use LinkLayer::{Ethernet, InfiniBand, Unknown};
    assert_eq!(
        of(CONNECTX_ROCE),
        [
            row("mlx5_0", 1, Ethernet, "ACTIVE", "LinkUp", 400_000, "enp129s0f0np0,storage.40"),
            row("mlx5_1", 1, Ethernet, "DOWN", "Disabled", 40_000, "enp129s0f1np1"),
        ]
    );
    assert_eq!(
        of(CONNECTX_INFINIBAND),
        [
            row("ibp24s0", 1, InfiniBand, "ACTIVE", "LinkUp", 200_000, "ibp24s0,ibp24s0.8001"),
            row("ibp25s0", 1, InfiniBand, "INIT", "LinkUp", 200_000, ""),
            row("ibp202s0", 1, InfiniBand, "DOWN", "Polling", 10_000, "ibp202s0"),
        ]
    );
    assert_eq!(
        of(CONNECTX3),
        [
            row("mlx4_0", 1, InfiniBand, "ACTIVE", "LinkUp", 56_000, "ib0"),
            row("mlx4_0", 2, Ethernet, "ACTIVE", "LinkUp", 40_000, "ens4d1"),
        ]
    );
    assert_eq!(of(BROADCOM), [row("bnxt_re0", 1, Ethernet, "ACTIVE", "LinkUp", 200_000, "ens3f0np0")]);
    assert_eq!(
        of(INTEL),
        [
            row("iwp61s0f1", 1, Ethernet, "ACTIVE", "LinkUp", 10_000, "eno2"),
            row("rocep177s0f0", 1, Ethernet, "ACTIVE", "LinkUp", 100_000, "ens801f0"),
        ]
    );
    assert_eq!(of(RXE), [row("rxe0", 1, Ethernet, "ACTIVE", "LinkUp", 2_500, "eth1")]);
    assert_eq!(
        of(SIW),
        [
            row("siw0", 1, Ethernet, "ACTIVE", "LinkUp", 2_500, "eth2"),
            row("siw1", 1, Ethernet, "DOWN", "Disabled", 2_500, "eth3"),
        ]
    );
    assert_eq!(
        of(STACKED),
        [
            row("mlx5_2", 1, Ethernet, "ACTIVE", "LinkUp", 100_000, "net1"),
            row("mlx5_10", 1, Ethernet, "ACTIVE", "LinkUp", 100_000, ""),
            row("mlx5_bond_0", 1, Ethernet, "ACTIVE", "LinkUp", 100_000, "ens1f0np0,bond0"),
            row("rdmap100s0", 1, Unknown, "ACTIVE", "LinkUp", 100_000, ""),
        ]
    );
}

#[test]
fn port_is_usable_with_an_active_link_and_network_device() {
    let roce = read(&[CONNECTX_ROCE]);
    let own = addresses(&[
        ("enp129s0f0np0", "10.1.0.3"),
        ("enp129s0f0np0", "fe80::1"),
        ("enp129s0f0np0", "fd00::3"),
    ]);
    let found = assessed(&roce, "mlx5_0", 0, &own);
    assert_eq!((found.netdev.as_deref(), found.mtu, found.unusable), (Some("enp129s0f0np0"), 4200, None));
    assert_eq!(found.addresses, ["10.1.0.3", "fd00::3"].map(|a| a.parse::<IpAddr>().unwrap()));

    // If only the VLAN has an address, connections use it.
    let found = assessed(&roce, "mlx5_0", 0, &addresses(&[("storage.40", "10.40.0.3")]));
    assert_eq!((found.netdev.as_deref(), found.unusable), (Some("storage.40"), None));

    let bond = assessed(&read(&[STACKED]), "mlx5_bond_0", 0, &addresses(&[("bond0", "10.2.0.1")]));
    assert_eq!((bond.netdev.as_deref(), bond.unusable), (Some("bond0"), None));

    let iwarp = assessed(&read(&[SIW]), "siw0", 0, &addresses(&[("eth2", "192.0.2.1")]));
    assert_eq!((iwarp.netdev.as_deref(), iwarp.unusable), (Some("eth2"), None));
}

#[test]
fn unusable_port_has_a_reason() {
    let all = addresses(&[("ibp202s0", "10.3.0.1"), ("enp129s0f1np1", "10.1.1.3"), ("eth1", "169.254.7.7")]);
    for (tree, name, reason, part) in [
        (CONNECTX_ROCE, "mlx5_0", "NoAddress", "enp129s0f0np0 has no IP address"),
        (CONNECTX_ROCE, "mlx5_1", "PortNotActive", "DOWN (Disabled)"),
        (CONNECTX_INFINIBAND, "ibp25s0", "PortNotActive", "INIT (LinkUp): check cable, switch port and"),
        (CONNECTX_INFINIBAND, "ibp202s0", "PortNotActive", "DOWN (Polling)"),
        (STACKED, "mlx5_2", "NetworkDeviceElsewhere", "net1 is in another network namespace"),
        (STACKED, "mlx5_10", "NoNetworkDevice", "load ib_ipoib"),
        (STACKED, "rdmap100s0", "UnsupportedTransport", "neither InfiniBand, RoCE nor iWARP"),
        (RXE, "rxe0", "NoAddress", "eth1"),
    ] {
        let unusable = assessed(&read(&[tree]), name, 0, &all).unusable.unwrap();
        assert_eq!(unusable.reason(), reason, "{name}");
        assert!(unusable.to_string().contains(part), "{unusable}");
    }
    // The port can be active although its network device is set down, as with rxe on some kernels.
    let down = RXE.replace("operstate\tup", "operstate\tdown").replace("carrier\t1", "carrier\t");
    let unusable =
        assessed(&read(&[&down]), "rxe0", 0, &addresses(&[("eth1", "10.0.0.1")])).unusable.unwrap();
    assert_eq!(unusable.to_string(), "its network device eth1 is down");
}

#[test]
fn soft_roce_devices_captured_from_a_kernel_are_read() {
    let inventory = read(&[RXE_CAPTURED]);
    let rxe = |name| (name, "rdma_rxe", "", "", Transport::InfiniBand, true, None);
    assert_eq!(rows(&inventory), [rxe("rxe0"), rxe("rxe1"), rxe("rxe2")]);
    let own = addresses(&[("eth0", "192.168.77.1"), ("rdma0", "192.168.78.1"), ("rdma1", "192.168.79.1")]);
    let usable = |name| assessed(&inventory, name, 0, &own);
    assert_eq!((usable("rxe0").netdev.as_deref(), usable("rxe0").mtu), (Some("eth0"), 9000));
    assert_eq!(usable("rxe0").unusable, None);
    // A dummy device has no carrier: its state is unknown, and the link is up.
    assert_eq!((usable("rxe1").netdev.as_deref(), usable("rxe1").unusable), (Some("rdma0"), None));
    assert_eq!(usable("rxe2").unusable.unwrap().reason(), "PortNotActive");
    assert_eq!(device(&inventory, "rxe0").ports[0].rate_mbps, 2_500);
}

#[test]
fn empty_host_has_an_empty_inventory() {
    let inventory = read(&[]);
    assert_eq!(inventory, Inventory::default());
    // The root need not exist either.
    assert_eq!(forebay_inventory::Host::at("/nonexistent").read(), Inventory::default());
}

#[test]
fn devices_of_several_vendors_are_listed_in_order() {
    let inventory = read(&[CONNECTX_ROCE, BROADCOM, INTEL, RXE, SIW]);
    let names: Vec<&str> = inventory.rdma.iter().map(|d| d.name.as_str()).collect();
    assert_eq!(names, ["bnxt_re0", "iwp61s0f1", "mlx5_0", "mlx5_1", "rocep177s0f0", "rxe0", "siw0", "siw1"]);
    for device in &inventory.rdma {
        assert!(!device.ports[0].netdevs.is_empty(), "{}", device.name);
    }
}

#[test]
fn software_iwarp_devices_captured_from_a_kernel_are_read() {
    let inventory = read(&[SIW_CAPTURED]);
    let siw = |name| (name, "siw", "", "", Transport::Iwarp, true, None);
    assert_eq!(rows(&inventory), [siw("siw0"), siw("siw1"), siw("siw2"), siw("siw3")]);
    assert_eq!(inventory.oddities, []);
    let netdevs: Vec<_> = inventory.rdma.iter().map(|d| d.ports[0].netdevs.join(",")).collect();
    // Derived from the GIDs' network devices: the GUIDs of the first and the last are the same.
    assert_eq!(netdevs, ["eth0", "rdma0", "rdma1", "rdma2"]);
    let own = addresses(&[
        ("eth0", "192.168.77.1"),
        ("rdma0", "192.168.78.1"),
        ("rdma1", "192.168.79.1"),
        ("rdma2", "192.168.80.1"),
    ]);
    let usable = |name| assessed(&inventory, name, 0, &own);
    for (name, netdev, mtu) in [("siw0", "eth0", 9000), ("siw1", "rdma0", 1500), ("siw3", "rdma2", 1500)] {
        let found = usable(name);
        assert_eq!((found.netdev.as_deref(), found.mtu, found.unusable), (Some(netdev), mtu, None), "{name}");
    }
    assert_eq!(usable("siw2").unusable.unwrap().reason(), "PortNotActive");
    let port = &device(&inventory, "siw0").ports[0];
    assert_eq!((port.link_layer, port.rate_mbps), (LinkLayer::Ethernet, 2_500));
}
