//! Calls through the driver's sockets, as Kubernetes makes them.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tonic::Code;

use super::{MIB, ONE, Scenario, TWO, ours};
use crate::guest::calls::data::{Shards, Sum, Sums};
use crate::guest::calls::grpc::{AdminRequest, Answer, CsiRequest};
use crate::lab::Node;
use crate::site::Site;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        ours("csi: life cycle of a volume on two nodes", life),
        ours("csi: invalid requests", bad_input),
        ours("csi: 20 password rotations of a volume in use", passwords),
    ]
}

/// The credentials in a Secret.
pub(crate) fn secrets() -> HashMap<String, String> {
    [("username", "csi-user"), ("password", "csi-password-1")]
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .into()
}

/// A CreateVolume request with this name and size.
pub(crate) fn create(name: &str, bytes: u64) -> CsiRequest {
    CsiRequest::CreateVolume {
        name: name.into(),
        bytes: bytes as i64,
        parameters: HashMap::new(),
        secrets: secrets(),
        block: false,
    }
}

/// A NodeStageVolume request for a volume, built from the CreateVolume response.
pub(crate) fn stage(volume: &Answer, staging: &str) -> CsiRequest {
    stage_with(volume, staging, &[])
}

/// Same, with mount options.
pub(super) fn stage_with(volume: &Answer, staging: &str, options: &[&str]) -> CsiRequest {
    CsiRequest::NodeStageVolume {
        id: volume.id.clone(),
        staging: staging.into(),
        context: volume.context.clone(),
        secrets: secrets(),
        mount_flags: options.iter().map(|option| (*option).to_owned()).collect(),
    }
}

/// A NodePublishVolume request for the volume.
pub(crate) fn publish(volume: &Answer, staging: &str, target: &str, readonly: bool) -> CsiRequest {
    CsiRequest::NodePublishVolume {
        id: volume.id.clone(),
        staging: staging.into(),
        target: target.into(),
        context: volume.context.clone(),
        secrets: HashMap::new(),
        readonly,
    }
}

/// Staging path of the kubelet.
const STAGING: &str = "/var/lib/kubelet/plugins/kubernetes.io/csi/csi.forebay.io/0/globalmount";
const POD: &str = "/var/lib/kubelet/pod-1/mount";
const READER: &str = "/var/lib/kubelet/pod-2/mount";

fn life(site: &Site) -> Result<String> {
    let controller = site.storage();
    let nodes = [site.node(ONE), site.node(TWO)];
    let volume = site.csi(controller, create("life", 64 * MIB))?.ok()?;
    let again = site.csi(controller, create("life", 64 * MIB))?.ok()?;
    ensure!(
        again.id == volume.id && again.bytes == volume.bytes,
        "CreateVolume is not idempotent: {again:?}"
    );
    let listed = site.csi(controller, CsiRequest::ListVolumes)?.ok()?.names;
    ensure!(listed.contains(&volume.id), "ListVolumes gives {listed:?}");

    for node in nodes {
        // The kubelet creates the parents.
        node.run(&format!("mkdir -p {STAGING} {POD} {READER} && rmdir {POD} {READER}"))?;
        // Every call twice: each must be idempotent.
        for _ in 0..2 {
            site.csi(node, stage_with(&volume, STAGING, &["multichannel", "max_channels=2"]))?.ok()?;
            site.csi(node, publish(&volume, STAGING, POD, false))?.ok()?;
            site.csi(node, publish(&volume, STAGING, READER, true))?.ok()?;
        }
    }
    let folder = POD.into();
    let sums: Vec<Sum> = nodes[0]
        .call("write-shards", &Shards { folder, prefix: "rank".into(), count: 2, bytes: 4 * MIB, seed: 1 })?;
    let _: u64 = nodes[1].call("verify-sums", &Sums { folder: READER.into(), sums })?;
    let refused =
        nodes[1].attempt(&["touch", &format!("{READER}/x")], &[], crate::limits::COMMAND_DEADLINE)?;
    ensure!(!refused.success(), "a read-only publication can be written");
    no_password(&nodes, &secrets()["password"])?;

    nodes[0].wait_until("two channels are reported", Duration::from_secs(20), || {
        Ok(mounted(nodes[0], &volume)? == 2)
    })?;
    let stats = |node: &Node| -> Result<Answer> {
        site.csi(node, CsiRequest::NodeGetVolumeStats { id: volume.id.clone(), path: POD.into() })?.ok()
    };
    let found = stats(nodes[1])?;
    ensure!(found.bytes as u64 == 64 * MIB && found.used_bytes as u64 >= 8 * MIB, "stats say {found:?}");
    let bytes = 128 * MIB as i64;
    let expanded =
        site.csi(controller, CsiRequest::ControllerExpandVolume { id: volume.id.clone(), bytes })?.ok()?;
    ensure!(expanded.bytes == bytes, "expanded to {}", expanded.bytes);
    nodes[1].wait_until("the stats show the expansion", Duration::from_secs(5), || {
        Ok(stats(nodes[1])?.bytes == bytes)
    })?;

    for node in nodes {
        for _ in 0..2 {
            for target in [POD, READER] {
                let target = target.to_owned();
                site.csi(node, CsiRequest::NodeUnpublishVolume { id: volume.id.clone(), target })?.ok()?;
            }
            let staging = STAGING.to_owned();
            site.csi(node, CsiRequest::NodeUnstageVolume { id: volume.id.clone(), staging })?.ok()?;
        }
        let left = node.run("grep -c /var/lib/kubelet /proc/mounts || true")?;
        ensure!(left == "0", "{left} mounts are left on {}", node.name());
    }
    for _ in 0..2 {
        site.csi(controller, CsiRequest::DeleteVolume { id: volume.id.clone() })?.ok()?;
    }
    let listed = site.csi(controller, CsiRequest::ListVolumes)?.ok()?.names;
    ensure!(!listed.contains(&volume.id), "a deleted volume is listed");
    let left = metrics(nodes[0])?;
    ensure!(!left.contains("forebay_csi_mount_info{"), "the driver still has a mount: {left}");
    let staged = "forebay_csi_calls_total{rpc=\"NodeStageVolume\",code=\"Ok\"} ";
    let count = left.lines().find_map(|line| line.strip_prefix(staged)?.parse::<u32>().ok());
    ensure!(count.is_some_and(|count| count >= 2), "{count:?} calls of NodeStageVolume are counted");
    Ok(String::new())
}

/// The metrics of a node's driver.
fn metrics(node: &Node) -> Result<String> {
    node.run("printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' | nc -w 5 127.0.0.1 9448")
}

/// Checks that the node's driver reports the volume as mounted over TCP. Returns the number of channels.
fn mounted(node: &Node, volume: &Answer) -> Result<u32> {
    let text = metrics(node)?;
    let mounts: Vec<&str> = text.lines().filter(|line| line.starts_with("forebay_csi_mount_info{")).collect();
    let (id, transport) = (format!("volume=\"{}\"", volume.id), "transport=\"tcp\"} 1");
    ensure!(matches!(mounts[..], [mount] if mount.contains(&id) && mount.ends_with(transport)), "{mounts:?}");
    let channels = format!("forebay_csi_mount_channels{{volume=\"{}\"}} ", volume.id);
    let channels = text.lines().find_map(|line| line.strip_prefix(&channels)?.parse().ok());
    channels.with_context(|| {
        let shown = node.run("cat /proc/fs/cifs/DebugData").unwrap_or_default();
        format!("the channels of {} are not reported; the kernel shows\n{shown}", volume.id)
    })
}

const ROTATIONS: usize = 20;

/// Writes, renames and reads back files. While `/run/pause` exists, no operation is in flight, and `/run/paused` confirms
/// that.
const USE: &str = r#"
cd "$1"; number=0
while [ ! -e /run/enough ]; do
    if [ -e /run/pause ]; then : > /run/paused; sleep 0.1; continue; fi
    rm -f /run/paused
    number=$((number + 1))
    { echo $number > next && mv next last && [ "$(cat last)" = $number ]; } || echo "$number: failed" >> /run/failed
    dd if=/dev/zero of=data bs=64k count=4 conv=fsync,notrunc status=none || echo "$number: dd failed" >> /run/failed
done
echo $number > /run/used
"#;

/// Each password replaces the one before the last. The kubelet publishes the volume again with the Secret's content, the
/// client reconnects, and the mount keeps working. From the second rotation on, the password differs from the one that it was
/// mounted with.
fn passwords(site: &Site) -> Result<String> {
    let node = site.node(ONE);
    let volume = site.csi(site.storage(), create("passwords", 64 * MIB))?.ok()?;
    node.run(&format!("mkdir -p {STAGING} {POD} && rmdir {POD}; rm -f /run/enough /run/used /run/pause /run/paused /run/failed"))?;
    site.csi(node, stage(&volume, STAGING))?.ok()?;
    let password = |number: usize| format!("csi-password-{}", number + 1);
    let publish = |number: usize| {
        let mut request = publish(&volume, STAGING, POD, false);
        if let CsiRequest::NodePublishVolume { secrets: given, .. } = &mut request {
            *given = secrets();
            given.insert("password".into(), password(number));
            if let Some(before) = number.checked_sub(1) {
                given.insert("password2".into(), password(before));
            }
        }
        site.csi(node, request)?.ok().map(drop)
    };
    publish(0)?;
    let options = |node: &Node| node.run(&format!("grep ' {POD} ' /proc/mounts"));
    let as_mounted = options(node)?;
    node.start_service("password-user", &["sh", "-c", USE, "use", POD])?;
    let server = site.storage().address();
    for number in 1..=ROTATIONS {
        let (id, username) = (share(&volume)?, secrets()["username"].clone());
        site.admin(AdminRequest::SetCredentials { id, username, password: password(number) })?.ok()?;
        publish(number)?;
        node.run(": > /run/pause")?;
        node.wait_until("the files rest", Duration::from_secs(30), || {
            Ok(node.attempt(&["test", "-e", "/run/paused"], &[], Duration::from_secs(5))?.success())
        })?;
        let cut = node.run(&format!("ss -KtnHO state established dst {server}:445; rm /run/pause"))?;
        ensure!(!cut.is_empty(), "there is no connection to cut");
        node.wait_until("the files are used again", Duration::from_secs(60), || {
            Ok(!node.attempt(&["test", "-e", "/run/paused"], &[], Duration::from_secs(5))?.success())
        })?;
    }
    node.run(": > /run/enough")?;
    node.wait_until("the use of the files ends", Duration::from_secs(60), || {
        Ok(node.attempt(&["test", "-s", "/run/used"], &[], Duration::from_secs(5))?.success())
    })?;
    let used = node.run("cat /run/used")?;
    let failed = node.run("cat /run/failed 2>/dev/null || true")?;
    ensure!(failed.is_empty(), "of {used} turns these failed: {failed}");
    let now = options(node)?;
    ensure!(now == as_mounted, "the mount has other options now: {now:?} instead of {as_mounted:?}");
    no_password(&[node], &password(ROTATIONS))?;

    // On a node that has not mounted the volume: mounts share sessions.
    let other = site.node(TWO);
    other.run(&format!("mkdir -p {STAGING}"))?;
    for (number, is_good) in [(ROTATIONS - 2, false), (ROTATIONS - 1, true), (ROTATIONS, true)] {
        let mut request = stage(&volume, STAGING);
        if let CsiRequest::NodeStageVolume { secrets, .. } = &mut request {
            secrets.insert("password".into(), password(number));
        }
        let answer = site.csi(other, request)?;
        ensure!((answer.code == 0) == is_good, "password {number} of {ROTATIONS}: {answer:?}");
        let (id, staging) = (volume.id.clone(), STAGING.to_owned());
        site.csi(other, CsiRequest::NodeUnstageVolume { id, staging })?.ok()?;
    }
    let id = || volume.id.clone();
    site.csi(node, CsiRequest::NodeUnpublishVolume { id: id(), target: POD.into() })?.ok()?;
    site.csi(node, CsiRequest::NodeUnstageVolume { id: id(), staging: STAGING.into() })?.ok()?;
    site.csi(site.storage(), CsiRequest::DeleteVolume { id: id() })?.ok()?;
    Ok(format!("{used} turns without an error"))
}

/// The share, which identifies the volume in the admin API.
fn share(volume: &Answer) -> Result<String> {
    volume.context.get("share").cloned().context("the volume's context names its share")
}

/// Checks that the password is not in any place that other processes can read.
fn no_password(nodes: &[&Node], password: &str) -> Result<()> {
    for node in nodes {
        // grep reads the pattern from a file; otherwise it would find its own command line.
        node.put("/tmp/pattern", password.as_bytes(), 0o600)?;
        let found = node.run(
            "grep -lF -f /tmp/pattern /proc/mounts /var/log/*.log /proc/[0-9]*/cmdline /proc/[0-9]*/environ \
             2>/dev/null || true; rm /tmp/pattern",
        )?;
        ensure!(found.is_empty(), "the password can be read in: {found}");
    }
    Ok(())
}

fn bad_input(site: &Site) -> Result<String> {
    let controller = site.storage();
    let with = |change: fn(&mut HashMap<String, String>, &mut HashMap<String, String>, &mut bool)| {
        let mut request = create("bad", MIB);
        if let CsiRequest::CreateVolume { parameters, secrets, block, .. } = &mut request {
            change(parameters, secrets, block);
        }
        request
    };
    let staged = |context: HashMap<String, String>, staging: &str| CsiRequest::NodeStageVolume {
        id: "none".into(),
        staging: staging.into(),
        context,
        secrets: secrets(),
        mount_flags: Vec::new(),
    };
    let node = site.node(ONE);
    let cases: Vec<(&str, &Node, CsiRequest, Code, &str)> = vec![
        (
            "an unknown parameter",
            controller,
            with(|parameters, _, _| drop(parameters.insert("compresion".into(), "yes".into()))),
            Code::InvalidArgument,
            "compresion",
        ),
        (
            "a name of 200 characters",
            controller,
            create(&"n".repeat(200), MIB),
            Code::InvalidArgument,
            "name",
        ),
        ("no name", controller, create("", MIB), Code::InvalidArgument, "name"),
        ("no secrets", controller, with(|_, secrets, _| secrets.clear()), Code::InvalidArgument, "secret"),
        ("a block volume", controller, with(|_, _, block| *block = true), Code::InvalidArgument, "block"),
        ("more than there is", controller, create("huge", 1 << 50), Code::ResourceExhausted, ""),
        (
            "an expansion of a volume that is not there",
            controller,
            CsiRequest::ControllerExpandVolume { id: "none".into(), bytes: 1 << 30 },
            Code::NotFound,
            "none",
        ),
        ("staging without a path", node, staged(HashMap::new(), ""), Code::InvalidArgument, "staging"),
        (
            "staging without a context",
            node,
            staged(HashMap::new(), "/var/lib/kubelet/x"),
            Code::InvalidArgument,
            "",
        ),
        (
            "stats of a path that is not there",
            node,
            CsiRequest::NodeGetVolumeStats { id: "none".into(), path: "/no/such/path".into() },
            Code::NotFound,
            "",
        ),
    ];
    let count = cases.len();
    let mut wrong = Vec::new();
    for (what, node, request, code, word) in cases {
        let answer = site.csi(node, request)?;
        let got = Code::from_i32(answer.code);
        if got != code || !answer.message.contains(word) {
            wrong.push(format!("{what}: {got:?} instead of {code:?}: {}", answer.message));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    let first = site.csi(controller, create("twice", 16 * MIB))?.ok()?;
    let second = site.csi(controller, create("twice", 32 * MIB))?;
    ensure!(second.code == Code::AlreadyExists as i32, "another size under the same name: {second:?}");
    site.csi(controller, CsiRequest::DeleteVolume { id: first.id })?.ok()?;
    Ok(format!("{} cases", count + 1))
}
