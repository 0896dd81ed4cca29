//! NVMe drives and kernel facts.
#![allow(clippy::unwrap_used)]

mod tree;

use forebay_inventory::{Kernel, Presence};
use tree::read;

#[test]
fn nvme_drives_are_found_and_marked_if_in_use() {
    let inventory = read(&[include_str!("trees/nvme.tree")]);
    let rows: Vec<_> = inventory
        .nvme
        .iter()
        .map(|d| (d.name.as_str(), d.model.as_str(), d.serial.as_str(), d.size_bytes, d.numa_node, d.in_use))
        .collect();
    assert_eq!(
        rows,
        [
            ("nvme0n1", "SAMSUNG MZQL23T8HCLS-00A07", "S64HNE0R123456", 3_840_755_982_336, Some(0), false),
            ("nvme1n1", "INTEL SSDPE2KX040T8", "PHLJ1234567890AB", 512_110_190_592, None, true),
            ("nvme2n1", "KIOXIA KCM6XRUL3T84", "X1Y0A0B0T1C8", 3_840_755_982_336, Some(1), false),
            ("nvme4n1", "Micron_7450_MTFDKCC3T2TFS", "22460", 3_200_631_791_616, Some(0), true),
            ("nvme5n1", "Micron_7450_MTFDKCC3T2TFS", "22461", 3_200_631_791_616, Some(0), true),
            ("nvme6n1", "Micron_7450_MTFDKCC3T2TFS", "22462", 3_200_631_791_616, Some(0), true),
        ]
    );
    assert_eq!(inventory.nvme[2].wwid.as_deref(), Some("eui.8ce38ee2070a0b01"));
    assert_eq!(inventory.oddities, []);
}

/// A Debian guest: everything as modules, SMB Direct built into cifs or not.
fn debian(cifs_needs: &str) -> String {
    format!(
        "proc/sys/kernel/osrelease\t7.2.1-amd64\n\
         proc/sys/kernel/arch\tx86_64\n\
         proc/sys/kernel/io_uring_disabled\t0\n\
         proc/filesystems\tnodev\\tsysfs\\n\\text4\\n\n\
         proc/modules\text4 1142784 1 - Live 0x0000000000000000\\n\n\
         etc/os-release\tNAME=\"Debian GNU/Linux\"\\nPRETTY_NAME=\"Debian GNU/Linux 13 (trixie)\"\\n\n\
         lib/modules/7.2.1-amd64/modules.builtin\tkernel/fs/netfs/netfs.ko\\n\n\
         lib/modules/7.2.1-amd64/modules.dep\tkernel/fs/smb/client/cifs.ko.xz: {cifs_needs}\\n\
         kernel/drivers/nvme/host/nvme-tcp.ko.xz: kernel/drivers/nvme/host/nvme-fabrics.ko.xz\\n\
         kernel/drivers/infiniband/core/rdma_cm.ko.xz:\\n\n"
    )
}

const NLS: &str = "kernel/fs/smb/common/cifs_md4.ko.xz";

#[test]
fn kernel_facts_are_reported() {
    let inventory = read(&[&debian(NLS)]);
    assert_eq!(
        inventory.kernel,
        Kernel {
            release: Some("7.2.1-amd64".into()),
            architecture: Some("x86_64".into()),
            operating_system: Some("Debian GNU/Linux 13 (trixie)".into()),
            cifs: Presence::Yes,
            cifs_smb_direct: Presence::No,
            nvme_tcp: Presence::Yes,
            nvme_rdma: Presence::No,
            nvmet: Presence::No,
            io_uring: Presence::Yes,
        }
    );
    assert_eq!(inventory.oddities, []);
}

#[test]
fn smb_direct_support_is_reported_only_with_evidence() {
    let with = |extra: &str| read(&[&debian(NLS), extra]).kernel.cifs_smb_direct;
    let needing = |needs: &str| read(&[&debian(needs)]).kernel.cifs_smb_direct;
    use Presence::{No, Unknown, Yes};

    // The module on disk.
    assert_eq!(
        needing("kernel/drivers/infiniband/core/rdma_cm.ko.xz kernel/fs/smb/common/cifs_md4.ko.xz"),
        Yes
    );
    assert_eq!(needing("kernel/fs/smb/common/smbdirect/smbdirect.ko.xz"), Yes);
    // The loaded module takes precedence over the one on disk.
    assert_eq!(with("proc/fs/cifs/DebugData\tx\nproc/fs/cifs/smbd_max_send_size\t1364\n"), Yes);
    assert_eq!(with("proc/fs/cifs/DebugData\tx\nproc/fs/cifs/LookupCacheEnabled\t1\n"), No);
    let base = debian(NLS);
    let loaded = |modules: &str| {
        let line = base.lines().find(|l| l.starts_with("proc/modules")).unwrap();
        read(&[&base.replace(line, &format!("proc/modules\t{modules}"))]).kernel.cifs_smb_direct
    };
    assert_eq!(loaded("rdma_cm 1 1 cifs, Live 0x0\\ncifs 1 2 - Live 0x0"), Yes);
    assert_eq!(loaded("smbdirect 1 1 cifs, Live 0x0\\ncifs 1 2 - Live 0x0"), Yes);
    assert_eq!(loaded("rdma_cm 1 1 nvme_rdma, Live 0x0\\ncifs 1 2 - Live 0x0"), No);

    // cifs is built in: only the configuration shows whether SMB Direct is supported.
    let built_in = "proc/sys/kernel/osrelease\t6.12\nlib/modules/6.12/modules.dep\tkernel/a.ko:\n\
        lib/modules/6.12/modules.builtin\tkernel/fs/smb/client/cifs.ko\n";
    let config = |text: &str| read(&[built_in, &format!("boot/config-6.12\t{text}")]).kernel;
    assert_eq!(read(&[built_in]).kernel.cifs, Yes);
    assert_eq!(read(&[built_in]).kernel.cifs_smb_direct, Unknown);
    assert_eq!(config("CONFIG_MMU=y\\nCONFIG_CIFS_SMB_DIRECT=y").cifs_smb_direct, Yes);
    assert_eq!(config("CONFIG_MMU=y\\n# CONFIG_CIFS_SMB_DIRECT is not set").cifs_smb_direct, No);
    assert_eq!(config("").cifs_smb_direct, Unknown);

    // No evidence.
    assert_eq!(read(&["proc/sys/kernel/osrelease\t6.12\n"]).kernel.cifs, Unknown);
    assert_eq!(read(&["proc/sys/kernel/osrelease\t6.12\n"]).kernel.cifs_smb_direct, Unknown);
    assert_eq!(read(&["proc/filesystems\tnodev\\tcifs\\n"]).kernel.cifs, Yes);
}

#[test]
fn io_uring_support_follows_sysctl_and_kernel_config() {
    let of = |tree: &str| read(&["proc/sys/kernel/osrelease\t6.1\n", tree]).kernel.io_uring;
    assert_eq!(of("proc/sys/kernel/io_uring_disabled\t0\n"), Presence::Yes);
    assert_eq!(of("proc/sys/kernel/io_uring_disabled\t1\n"), Presence::No);
    assert_eq!(of("proc/sys/kernel/io_uring_disabled\t2\n"), Presence::No);
    assert_eq!(of("boot/config-6.1\tCONFIG_MMU=y\\nCONFIG_IO_URING=y\n"), Presence::Yes);
    assert_eq!(of("boot/config-6.1\tCONFIG_MMU=y\n"), Presence::No);
    assert_eq!(of(""), Presence::Unknown);
}

#[test]
fn test_host_can_be_read() {
    let inventory = forebay_inventory::Host::at("/").read();
    assert!(inventory.kernel.release.is_some());
    assert!(inventory.netdevs.iter().any(|n| n.name == "lo" && n.mtu > 0), "{:?}", inventory.netdevs);
}
