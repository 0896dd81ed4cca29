//! Turns a guest into a node: container runtime, kubelet, kube-proxy.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::control_plane::ControlPlane;
use super::oci::Tar;
use super::room;
use crate::images::node::PAUSE_IMAGE;
use crate::lab::Node;
use crate::progress::{say, seconds};

/// Address range of all pods.
pub const POD_CIDR: &str = "10.244.0.0/16";
/// Mount point of a storage node's pool.
pub const POOL: &str = "/var/lib/forebay";
/// Mount point of the node's disk.
const DISK: &str = "/k8s";
/// Deadline, as on hardware, for importing all images into an emulated node that shares two cores.
const IMPORT_DEADLINE: Duration = Duration::from_secs(60);

/// Properties that differ between nodes.
#[derive(Debug, Clone)]
pub struct Role {
    /// The last byte of its address, and the third byte of its pod network.
    pub number: u8,
    /// Give it an RDMA-capable NIC (soft-RoCE).
    pub rdma: bool,
    /// Give it an XFS with project quotas at [`POOL`].
    pub pool: bool,
    /// Number of image archives on further disks, from `/dev/vdf` on.
    pub archives: usize,
    /// Labels it registers with.
    pub labels: Vec<String>,
}

/// A node's pod network.
pub fn pod_network(number: u8) -> String {
    format!("10.244.{number}.0/24")
}

/// Configures the node and starts all components; returns before it is Ready. Call it again after a reboot: the content of
/// the node's disk is kept.
pub fn start(node: &Node, plane: &ControlPlane, role: &Role, peers: &[(u8, String)]) -> Result<()> {
    let started = Instant::now();
    configure(node, plane, role)?;
    node.run_within(&prepare_script(role, peers), Duration::from_secs(60)).context("prepare the node")?;
    let path = format!("PATH={DISK}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    let service = |name: &str, argv: &[&str]| node.start_service(name, &[&["env", &path], argv].concat());
    service("containerd", &["containerd", "-c", "/etc/containerd.toml"])?;
    node.wait_until("containerd answers", Duration::from_secs(20), || {
        Ok(node.attempt(&["/k8s/bin/ctr", "version"], &[], Duration::from_secs(10))?.success())
    })
    .with_context(|| format!("log of containerd:\n{}", node.service_log("containerd")))?;
    node.run_within(&import_script(role.archives), IMPORT_DEADLINE).context("import the images")?;
    say(format!("{}: containerd and its images are ready after {}", node.name(), seconds(started.elapsed())));
    let labels = role.labels.join(",");
    let name = node.name();
    let mut kubelet = vec![
        "kubelet".to_owned(),
        "--config=/etc/kubernetes/kubelet.json".into(),
        "--kubeconfig=/etc/kubernetes/kubelet.kubeconfig".into(),
        format!("--hostname-override={name}"),
        format!("--node-ip={}", node.address()),
        "--root-dir=/var/lib/kubelet".into(),
    ];
    if !labels.is_empty() {
        kubelet.push(format!("--node-labels={labels}"));
    }
    let kubelet: Vec<&str> = kubelet.iter().map(String::as_str).collect();
    service("kubelet", &kubelet)?;
    service(
        "kube-proxy",
        &[
            "kube-proxy",
            "--kubeconfig=/etc/kubernetes/proxy.kubeconfig",
            &format!("--hostname-override={name}"),
            "--proxy-mode=iptables",
            &format!("--cluster-cidr={POD_CIDR}"),
            // Keep the guest's own defaults.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ],
    )
}

fn configure(node: &Node, plane: &ControlPlane, role: &Role) -> Result<()> {
    let at = format!("{}:{}", room::ADDRESS, plane.port());
    let pki = plane.pki();
    let names = [node.address().to_owned(), node.name().to_owned()];
    let user = format!("system:node:{}", node.name());
    let identity = pki.issue(&user, Some("system:nodes"), &names)?;
    let proxy = pki.issue("system:kube-proxy", None, &[])?;
    let kubelet = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address(),
        "authentication": {
            "x509": {"clientCAFile": "/etc/kubernetes/ca.crt"},
            "webhook": {"enabled": true},
            "anonymous": {"enabled": false},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": "/etc/kubernetes/node.crt",
        "tlsPrivateKeyFile": "/etc/kubernetes/node.key",
        "cgroupDriver": "cgroupfs",
        "failSwapOn": false,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        // Disk and memory are small, and reserved for the tests.
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%", "nodefs.inodesFree": "1%"},
        // Images are imported, not pulled: a garbage-collected image cannot be restored.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "enforceNodeAllocatable": ["pods"],
        "serializeImagePulls": false,
        "runtimeRequestTimeout": "5m",
        "syncFrequency": "10s",
    });
    let cni = json!({
        "cniVersion": "1.0.0",
        "name": "lab",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": true,
                "ipMasq": false,
                "hairpinMode": true,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": pod_network(role.number)}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                    // Like the pods, it does not survive a reboot.
                    "dataDir": "/run/cni",
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    });
    let mut files = Tar::default();
    for (path, content) in [
        ("etc/kubernetes/ca.crt", pki.authority()),
        ("etc/kubernetes/node.crt", identity.certificate.clone()),
        ("etc/kubernetes/node.key", identity.key.clone()),
        ("etc/kubernetes/kubelet.kubeconfig", plane.kubeconfig_text(&at, &identity)),
        ("etc/kubernetes/proxy.kubeconfig", plane.kubeconfig_text(&at, &proxy)),
        ("etc/kubernetes/kubelet.json", kubelet.to_string()),
        ("etc/cni/net.d/10-lab.conflist", cni.to_string()),
        ("etc/containerd.toml", containerd_config()),
    ] {
        files.add(path, 0o600, content.as_bytes());
    }
    // In one step: starting a program in an emulated guest is slow.
    let output =
        node.attempt(&["tar", "-x", "-C", "/", "-f", "-"], &files.finish(), Duration::from_secs(20))?;
    ensure!(output.success(), "configure {}: {}", node.name(), output.complaint());
    Ok(())
}

fn containerd_config() -> String {
    // The disabled plugins would only log errors: they need features that these nodes do not have.
    format!(
        r#"version = 3
disabled_plugins = [
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.erofs", "io.containerd.differ.v1.erofs",
  "io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing",
]
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{PAUSE_IMAGE}"
[plugins.'io.containerd.cri.v1.runtime']
  disable_apparmor = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "/etc/cni/net.d"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
"#
    )
}

/// Container writes go to the scratch disk, because the root is already an overlay. Pools are on an XFS with project quotas,
/// in a sparse file on that disk, larger than it: claims of some tests need the size, not the space.
fn prepare_script(role: &Role, peers: &[(u8, String)]) -> String {
    let gateway: Ipv4Addr = room::ADDRESS;
    let pool = role.pool;
    let mut script = format!(
        r#"
mkdir -p {DISK} /scratch
mountpoint -q {DISK} || mount -t erofs -o ro /dev/vde {DISK}
if ! mountpoint -q /scratch; then
    modprobe -a ext4 loop xfs
    mount -t ext4 -o noatime /dev/vdd /scratch 2>/dev/null || {{ mkfs.ext4 -q /dev/vdd; mount -t ext4 -o noatime /dev/vdd /scratch; }}
    for folder in /var/lib/containerd /var/lib/kubelet /var/log/pods; do
        mkdir -p /scratch$folder $folder
        mount --bind /scratch$folder $folder
    done
    if {pool}; then
        mkdir -p {POOL}
        [ -e /scratch/pool.xfs ] || {{ truncate -s 16G /scratch/pool.xfs; mkfs.xfs -q /scratch/pool.xfs; }}
        mount -t xfs -o loop,prjquota,noatime /scratch/pool.xfs {POOL}
    fi
    mount --make-rshared /
fi
modprobe -a overlay br_netfilter bridge veth nf_conntrack nft_chain_nat
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables
ip route replace default via {gateway}
"#
    );
    for (number, address) in peers.iter().filter(|(number, _)| *number != role.number) {
        script.push_str(&format!("ip route replace {} via {address}\n", pod_network(*number)));
    }
    if role.rdma {
        script.push_str(
            "modprobe -a rdma_rxe rdma_ucm ib_uverbs\n\
             netdev=$(ip -o link show | sed -n 's/^[0-9]*: \\(e[^:@]*\\)[:@].*/\\1/p' | head -n 1)\n\
             [ -e /sys/class/infiniband/rxe0 ] || rdma link add rxe0 type rxe netdev $netdev\n",
        );
    }
    script
}

fn import_script(archives: usize) -> String {
    // Written with sync, to survive a power cut right afterwards. The marker lists the imported images.
    let mut script = format!(
        "marker=/scratch/imported; touch $marker\n\
         for image in {DISK}/images/*.tar; do\n\
         grep -qx \"$image\" $marker || {{ {DISK}/bin/ctr -n k8s.io images import \"$image\" >/dev/null; echo \"$image\" >> $marker; }}\n\
         done\n"
    );
    for disk in ('f'..='z').take(archives) {
        script.push_str(&format!(
            "grep -qx vd{disk} $marker || {{ {DISK}/bin/ctr -n k8s.io images import /dev/vd{disk} >/dev/null; echo vd{disk} >> $marker; }}\n"
        ));
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_routes_to_its_peers_and_not_to_itself() {
        let role = Role { number: 2, rdma: false, pool: false, archives: 1, labels: Vec::new() };
        let peers = [(1, "192.168.77.1".to_owned()), (2, "192.168.77.2".to_owned())];
        let script = prepare_script(&role, &peers);
        assert!(script.contains("10.244.1.0/24 via 192.168.77.1"));
        assert!(!script.contains("10.244.2.0/24") && !script.contains("rxe"));
        assert!(import_script(2).contains("/dev/vdg") && !import_script(1).contains("/dev/vdg"));
    }
}
