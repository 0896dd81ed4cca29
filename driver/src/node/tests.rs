//! Tests the node's calls with real mounts: a tmpfs in place of the staged SMB mount, and a FUSE mount without a server in
//! place of an SMB mount with an unresponsive server. The SMB mount itself is tested in the lab (e2e).

mod fuse;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::mpsc::{Receiver, Sender};

use forebay_proto::csi::volume_capability::access_mode::Mode;
use forebay_proto::csi::volume_usage::Unit;
use forebay_proto::csi::{NodeGetVolumeHealthRequest, VolumeHealthErrorType};
use forebay_testing::{Need, skip};
use rustix::mount::MountAttrFlags;
use tempfile::TempDir;
use tonic::Code;

use super::claims::Sharing;
use super::unmount::{Directory, unmount_all};
use super::*;
use crate::capability::tests::mount_capability;
use crate::mount::{self, Setting, Step};
use crate::mountinfo::tests::disguise_as_smb;
use crate::transport::Choice;

const LONG: Duration = Duration::from_secs(60);

/// Mounting needs CAP_SYS_ADMIN.
fn may_mount() -> bool {
    match mount::is_available("tmpfs") {
        Ok(()) => true,
        Err(error) => {
            skip(Need::Mounts, error);
            false
        }
    }
}

/// A staging and a target path below a directory; its mounts are removed at the end.
struct Scene {
    dir: TempDir,
    node: NodeService,
}

impl Scene {
    fn new() -> Self {
        Self::with(Deadlines { mount: LONG, unmount: LONG, stats: LONG })
    }

    fn with(deadlines: Deadlines) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir(dir.path().join("staging")).expect("new");
        Self { dir, node: NodeService::new("node-1", deadlines, Path::new("/"), None) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").to_owned()
    }

    fn mount_tmpfs(&self, name: &str) {
        self.mount_tmpfs_of("a volume", name);
    }

    fn mount_tmpfs_of(&self, source: &str, name: &str) {
        fs::create_dir_all(self.path(name)).expect("a directory");
        let settings = [Setting::Value("size", "4m"), Setting::Value("source", source)];
        mount::mount("tmpfs", source, &settings, MountAttrFlags::empty(), &self.path(name)).expect("mounted");
    }

    /// A request with the target path that the kubelet uses for a second pod.
    fn second_pod(&self) -> NodePublishVolumeRequest {
        NodePublishVolumeRequest { target_path: self.text("pod2/mount"), ..self.publish_request(false) }
    }

    fn publish_request(&self, readonly: bool) -> NodePublishVolumeRequest {
        NodePublishVolumeRequest {
            volume_id: "v".into(),
            staging_target_path: self.text("staging"),
            target_path: self.text("pod/mount"),
            volume_capability: Some(mount_capability(Mode::MultiNodeMultiWriter, &[])),
            readonly,
            ..Default::default()
        }
    }

    async fn publish(&self, readonly: bool) -> Result<(), Code> {
        code(self.node.publish(self.publish_request(readonly)).await)
    }

    async fn unpublish(&self) -> Result<(), Code> {
        let target_path = self.text("pod/mount");
        code(self.node.unpublish(NodeUnpublishVolumeRequest { volume_id: "v".into(), target_path }).await)
    }

    async fn unstage(&self) -> Result<(), Code> {
        let staging_target_path = self.text("staging");
        code(self.node.unstage(NodeUnstageVolumeRequest { volume_id: "v".into(), staging_target_path }).await)
    }

    async fn stats(&self, name: &str) -> Result<NodeGetVolumeStatsResponse, Code> {
        self.stats_of("v", name).await
    }

    async fn stats_of(&self, id: &str, name: &str) -> Result<NodeGetVolumeStatsResponse, Code> {
        let request = NodeGetVolumeStatsRequest {
            volume_id: id.into(),
            volume_path: self.text(name),
            ..Default::default()
        };
        self.node.stats(request).await.map_err(|e| Status::from(e).code())
    }

    /// The reasons why the volume at this path is inaccessible.
    async fn health(&self, name: &str) -> Result<Vec<String>, Code> {
        let request = NodeGetVolumeHealthRequest {
            volume_id: "v".into(),
            volume_publish_path: self.text(name),
            ..Default::default()
        };
        let found = self.node.health(request).await.map_err(|e| Status::from(e).code())?;
        let health = found.volume_health.expect("required");
        assert_eq!(health.volume_id, "v");
        assert!(
            health.health_statuses.iter().all(|found| found.status() == VolumeHealthErrorType::Inaccessible)
        );
        Ok(health.health_statuses.into_iter().map(|found| found.reason).collect())
    }

    fn is_mounted(&self, name: &str) -> bool {
        let path = resolve(&self.path(name)).expect("readable");
        path.is_some_and(|path| mounts().expect("readable").at(&path).is_some())
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for name in ["pod/mount", "pod2/mount", "staging.gid-2000", "staging"] {
            unmount(&self.path(name), mount::detach).expect("it can be detached");
        }
    }
}

/// Unmounts under a separate claim.
fn unmount(path: &Path, how: fn(&Path) -> Result<(), mount::MountError>) -> Result<(), Error> {
    let (_lent, permit) = Claims::default().volume("v").expect("free").lend();
    unmount_all(path, &permit, how)
}

fn code<T>(result: Result<T, Error>) -> Result<(), Code> {
    result.map(drop).map_err(|e| Status::from(e).code())
}

#[tokio::test]
async fn staged_volume_is_published_unpublished_and_unstaged() {
    if !may_mount() {
        return;
    }
    let scene = Scene::new();
    assert_eq!(scene.publish(false).await, Err(Code::FailedPrecondition), "not staged yet");
    scene.mount_tmpfs("staging");
    assert_eq!(scene.publish(false).await, Ok(()));
    assert_eq!(scene.publish(false).await, Ok(()), "a second time");
    assert_eq!(scene.publish(true).await, Err(Code::AlreadyExists), "with another readonly");
    fs::write(scene.path("pod/mount/file"), "data").expect("writable");
    assert_eq!(fs::read(scene.path("staging/file")).expect("the same file system"), b"data");

    assert_eq!(scene.unpublish().await, Ok(()));
    assert!(!scene.path("pod/mount").exists() && scene.path("pod").exists());
    assert_eq!(scene.unpublish().await, Ok(()), "a second time");
    assert!(scene.is_mounted("staging"));

    assert_eq!(scene.unstage().await, Ok(()));
    assert!(!scene.is_mounted("staging") && scene.path("staging").exists());
    assert_eq!(scene.unstage().await, Ok(()), "a second time");
}

#[tokio::test]
async fn a_read_only_volume_cannot_be_written() {
    if !may_mount() {
        return;
    }
    let scene = Scene::new();
    scene.mount_tmpfs("staging");
    assert_eq!(scene.publish(true).await, Ok(()));
    assert_eq!(scene.publish(true).await, Ok(()), "a second time");
    assert_eq!(scene.publish(false).await, Err(Code::AlreadyExists));
    let error = fs::write(scene.path("pod/mount/file"), "data").expect_err("read-only");
    assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem);
    fs::write(scene.path("staging/file"), "data").expect("only the target is read-only");

    // A read-only access mode has the same effect.
    let mut request = scene.publish_request(false);
    request.volume_capability = Some(mount_capability(Mode::MultiNodeReaderOnly, &[]));
    assert_eq!(code(scene.node.publish(request).await), Ok(()));
}

#[tokio::test]
async fn foreign_mounts_and_files_at_the_target_are_left_alone() {
    if !may_mount() {
        return;
    }
    let scene = Scene::new();
    scene.mount_tmpfs("staging");
    scene.mount_tmpfs("pod/mount");
    assert_eq!(scene.publish(false).await, Err(Code::AlreadyExists));
    // A target that was never mounted and is not empty is not cleared.
    unmount(&scene.path("pod/mount"), mount::unmount).expect("mounted");
    fs::write(scene.path("pod/mount/precious"), "data").expect("writable");
    assert_eq!(scene.unpublish().await, Err(Code::Internal));
    assert_eq!(fs::read(scene.path("pod/mount/precious")).expect("kept"), b"data");
}

#[tokio::test]
async fn single_writer_volume_is_published_at_one_target_only() {
    if !may_mount() {
        return;
    }
    let scene = Scene::new();
    scene.mount_tmpfs("staging");
    let mut request = scene.publish_request(false);
    request.volume_capability = Some(mount_capability(Mode::SingleNodeSingleWriter, &[]));
    assert_eq!(code(scene.node.publish(request.clone()).await), Ok(()));
    assert_eq!(code(scene.node.publish(request.clone()).await), Ok(()), "a second time");
    request.target_path = scene.text("pod2/mount");
    assert_eq!(code(scene.node.publish(request.clone()).await), Err(Code::FailedPrecondition));
    assert!(!scene.is_mounted("pod2/mount"));
    assert_eq!(scene.unpublish().await, Ok(()));
    assert_eq!(code(scene.node.publish(request).await), Ok(()), "no longer published");
}

#[tokio::test]
async fn unpublish_fails_while_the_volume_is_in_use() {
    if !may_mount() {
        return;
    }
    let scene = Scene::new();
    scene.mount_tmpfs("staging");
    assert_eq!(scene.publish(false).await, Ok(()));
    let open = File::create(scene.path("pod/mount/file")).expect("writable");
    assert_eq!(scene.unpublish().await, Err(Code::FailedPrecondition));
    assert!(scene.is_mounted("pod/mount"));
    drop(open);
    assert_eq!(scene.unpublish().await, Ok(()));
}

#[tokio::test]
async fn stage_unstage_and_publish_are_aborted_while_a_call_runs() {
    let scene = Scene::new();
    let claim = scene.node.claims.volume("v").expect("free");
    assert_eq!(scene.publish(false).await, Err(Code::Aborted));
    assert_eq!(scene.unstage().await, Err(Code::Aborted));
    assert_eq!(code(scene.node.stage(stage_request(&scene)).await), Err(Code::Aborted));
    assert_eq!(scene.unpublish().await, Ok(()), "a pod can be removed meanwhile");
    drop(claim);
    assert_eq!(scene.unstage().await, Ok(()));
}

#[tokio::test]
async fn pods_of_a_volume_are_published_independently() {
    if !may_mount() {
        return;
    }
    let scene = Scene::new();
    scene.mount_tmpfs("staging");
    // A call for the first pod is in progress, for example an unmount that hangs.
    let claim = scene.node.claims.unpublish("v", &scene.path("pod/mount")).expect("free");
    assert_eq!(scene.publish(false).await, Err(Code::Aborted), "one call at a time for a target");
    assert_eq!(code(scene.node.publish(scene.second_pod()).await), Ok(()));
    drop(claim);
    let claim = scene.node.claims.publish("v", &scene.path("pod/mount"), Sharing::Together).expect("free");
    assert_eq!(code(scene.node.publish(scene.second_pod()).await), Ok(()), "a second time");
    assert_eq!(scene.unstage().await, Err(Code::Aborted), "not while it is published");
    drop(claim);
}

#[tokio::test]
async fn stats_and_health_are_read_from_the_mounted_volume() {
    let scene = Scene::new();
    assert_eq!(scene.stats("staging").await, Err(Code::NotFound), "nothing is mounted");
    assert_eq!(scene.stats("nowhere/at/all").await, Err(Code::NotFound));
    assert_eq!(scene.health("staging").await, Err(Code::NotFound));
    if !may_mount() {
        return;
    }
    scene.mount_tmpfs("staging");
    fs::write(scene.path("staging/file"), vec![7; 1 << 20]).expect("writable");
    let stats = scene.stats("staging").await.expect("it answers");
    assert!(!stats.volume_condition.expect("offered").abnormal);
    let bytes = stats.usage.iter().find(|u| u.unit() == Unit::Bytes).expect("known");
    assert_eq!((bytes.total, bytes.used, bytes.available), (4 << 20, 1 << 20, 3 << 20));
    let inodes = stats.usage.iter().find(|u| u.unit() == Unit::Inodes).expect("known");
    assert_eq!((inodes.used, inodes.total), (2, inodes.available + 2));
    assert_eq!(scene.health("staging").await, Ok(Vec::new()));
    // Both paths are optional.
    let request = |volume_id: &str, staging: &str| NodeGetVolumeHealthRequest {
        volume_id: volume_id.into(),
        staging_target_path: staging.into(),
        ..Default::default()
    };
    for path in ["", &scene.text("staging")] {
        scene.node.health(request("v", path)).await.expect("it answers");
    }
    for (id, path) in [("", ""), ("v", "relative")] {
        let status = Status::from(scene.node.health(request(id, path)).await.expect_err("bad"));
        assert_eq!(status.code(), Code::InvalidArgument, "{id:?} {path:?}");
    }
}

#[tokio::test]
async fn stats_are_returned_only_for_the_id_of_the_mounted_share() {
    if !may_mount() {
        return;
    }
    let scene = Scene::new();
    let source = "//192.0.2.1/pvc-measured";
    disguise_as_smb(source, "rw,rdma,gid=0,addr=192.0.2.1");
    scene.mount_tmpfs_of(source, "staging");
    for id in ["c-0/pvc-measured", "pvc-measured"] {
        let stats = scene.stats_of(id, "staging").await.expect("it is this volume");
        assert_eq!(stats.usage.iter().find(|u| u.unit() == Unit::Bytes).expect("known").total, 4 << 20);
        let condition = stats.volume_condition.expect("offered");
        assert!(!condition.abnormal && condition.message.ends_with("over RDMA"), "{condition:?}");
    }
    for id in ["c-0/pvc-other", "pvc-other", "c-0/measured"] {
        assert_eq!(scene.stats_of(id, "staging").await, Err(Code::NotFound), "{id}");
    }
    // The name that an administrator chose for a volume that was set up manually does not imply a share.
    assert!(scene.stats_of("The archive", "staging").await.is_ok());
}

#[tokio::test]
async fn unresponsive_volume_is_abnormal_and_can_be_unpublished() {
    if !may_mount() {
        return;
    }
    let stats = Duration::from_millis(50);
    let scene = Scene::with(Deadlines { mount: LONG, unmount: LONG, stats });
    let Some(device) = fuse::mount("silent", &scene.path("staging")) else { return };
    assert_eq!(scene.publish(false).await, Ok(()), "publish does not access the volume");

    for _ in 0..2 {
        let stats = scene.stats("pod/mount").await.expect("the driver answers");
        let condition = stats.volume_condition.expect("offered");
        assert!(condition.abnormal && stats.usage.is_empty(), "{condition:?}");
        assert!(condition.message.contains("has not answered"), "{condition:?}");
        assert_eq!(scene.health("pod/mount").await, Ok(vec!["NoAnswer".to_owned()]));
    }
    assert_eq!(scene.node.measuring.threads(), 1, "the second call waited for the first one's");
    // Another path of the same volume is measured separately.
    scene.mount_tmpfs("pod2/mount");
    let other = scene.stats("pod2/mount").await.expect("it answers").volume_condition.expect("offered");
    assert!(!other.abnormal, "{other:?}");

    // The thread in statfs keeps the mount busy; the pod can still terminate.
    assert_eq!(scene.unpublish().await, Ok(()));
    assert!(!scene.is_mounted("pod/mount") && !scene.path("pod/mount").exists());
    // A new mount at the path is a different one, although the old mount's thread still hangs.
    scene.mount_tmpfs("pod/mount");
    let new = scene.stats("pod/mount").await.expect("it answers").volume_condition.expect("offered");
    assert!(!new.abnormal, "{new:?}");
    assert_eq!(scene.unstage().await, Ok(()));
    assert_eq!(scene.node.measuring.threads(), 1, "the thread still hangs");
    // The file system ends, so the thread ends.
    drop(device);
    let deadline = std::time::Instant::now() + LONG;
    while scene.node.measuring.threads() > 0 {
        assert!(std::time::Instant::now() < deadline, "the thread never ended");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unpublish_during_a_measurement_keeps_a_volume_in_use() {
    if !may_mount() {
        return;
    }
    let scene = Scene::new();
    let Some(slow) = fuse::Slow::mount("slow", &scene.path("staging")) else { return };
    assert_eq!(scene.publish(false).await, Ok(()));
    // Like a process of a pod that uses the mount.
    let user = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(scene.path("pod/mount"))
        .expect("a directory");

    let scene = Arc::new(scene);
    let measure = |scene: &Arc<Scene>| {
        let scene = Arc::clone(scene);
        tokio::spawn(async move { scene.stats("pod/mount").await })
    };
    let first = measure(&scene);
    let asked = tokio::task::spawn_blocking(move || {
        slow.asked.recv_timeout(LONG).expect("it is asked");
        slow
    });
    let slow = asked.await.expect("no panic");
    // Runs during a measurement that will get a response.
    let second = measure(&scene);
    let unpublish = {
        let scene = Arc::clone(&scene);
        tokio::spawn(async move { scene.unpublish().await })
    };
    while !scene.node.measuring.is_held(&scene.path("pod/mount")) {
        assert!(!unpublish.is_finished());
        tokio::task::yield_now().await;
    }
    assert_eq!(scene.stats("pod/mount").await, Err(Code::Aborted), "no further measurement");
    // One response per measurement: the second runs its own statfs if it began after the first had finished.
    for _ in 0..2 {
        slow.answer.send(()).expect("served");
    }
    assert_eq!(unpublish.await.expect("no panic"), Err(Code::FailedPrecondition), "it is in use");
    assert!(scene.is_mounted("pod/mount"));
    for stats in [first, second] {
        // The second may have arrived after the unpublish.
        match stats.await.expect("no panic") {
            Ok(stats) => {
                assert!(!stats.volume_condition.expect("offered").abnormal);
                assert_eq!(stats.usage[0].total, 100 * 4096);
            }
            Err(code) => assert_eq!(code, Code::Aborted),
        }
    }
    drop(user);
    assert_eq!(scene.unpublish().await, Ok(()));
}

/// The umount(2) calls for unreachable servers wait on these, keyed by path; the mount has already left the table.
static GONE_SERVERS: Mutex<Vec<(PathBuf, Receiver<()>)>> = Mutex::const_new(Vec::new());

fn detach_and_await_release(path: &Path) -> Result<(), mount::MountError> {
    mount::detach(path)?;
    let mut servers = GONE_SERVERS.blocking_lock();
    let at = servers.iter().position(|(of, _)| of == path).expect("one call");
    let (_, hang) = servers.remove(at);
    drop(servers);
    let _ = hang.recv();
    Ok(())
}

/// An unmount of the path hangs until the returned sender sends or is dropped.
async fn make_unmount_hang(path: &Path) -> Sender<()> {
    let path = resolve(path).expect("readable").expect("there");
    let (release, hang) = std::sync::mpsc::channel();
    GONE_SERVERS.lock().await.push((path, hang));
    release
}

#[tokio::test]
async fn hanging_unmount_releases_its_claim_after_the_caller_cancels() {
    if !may_mount() {
        return;
    }
    let scene = Scene::with(Deadlines { mount: LONG, unmount: Duration::from_secs(2), stats: LONG });
    scene.mount_tmpfs("staging");
    let release = make_unmount_hang(&scene.path("staging")).await;
    let claim = scene.node.claims.volume("v").expect("free");
    let (node, path) = (scene.node.clone(), scene.path("staging"));
    let calling = tokio::spawn(async move {
        node.unmount_by(detach_and_await_release, "v", path, Directory::Keep, claim).await.map(drop)
    });
    let deadline = std::time::Instant::now() + LONG;
    while scene.is_mounted("staging") {
        assert!(std::time::Instant::now() < deadline && !calling.is_finished());
        tokio::task::yield_now().await;
    }
    calling.abort();
    assert!(calling.await.expect_err("it hangs").is_cancelled());
    while let Err(error) = scene.node.claims.volume("v") {
        assert!(std::time::Instant::now() < deadline, "{error}");
        tokio::task::yield_now().await;
    }
    assert_eq!(scene.unstage().await, Ok(()), "a second time");
    release.send(()).expect("it still hangs");
}

#[tokio::test]
async fn volume_can_be_staged_again_while_an_unmount_hangs() {
    if !may_mount() {
        return;
    }
    let scene = Scene::with(Deadlines { mount: LONG, unmount: Duration::from_millis(50), stats: LONG });
    scene.mount_tmpfs("staging");
    let release = make_unmount_hang(&scene.path("staging")).await;
    let claim = scene.node.claims.volume("v").expect("free");
    let unmounting =
        scene.node.unmount_by(detach_and_await_release, "v", scene.path("staging"), Directory::Keep, claim);
    // The thread still hangs; the volume is unstaged and its claim is released.
    drop(unmounting.await.expect("detached"));
    assert_eq!(scene.unstage().await, Ok(()), "a second time");
    let claim = scene.node.claims.volume("v").expect("it can be staged again");
    scene.mount_tmpfs("staging");
    drop(claim);
    // The thread wakes up, and must not unmount what is staged now.
    let threads = || {
        fs::read_dir("/proc/self/task").expect("readable").filter_map(|task| {
            let name = fs::read_to_string(task.ok()?.path().join("comm")).ok()?;
            (name.trim() == "unmount").then_some(())
        })
    };
    assert!(threads().count() > 0, "it hangs");
    release.send(()).expect("it waits");
    let deadline = std::time::Instant::now() + LONG;
    while threads().count() > 0 {
        assert!(std::time::Instant::now() < deadline, "the thread never ended");
        tokio::task::yield_now().await;
    }
    assert!(scene.is_mounted("staging"));
}

#[tokio::test]
async fn unresponsive_mount_of_a_moved_server_is_replaced() {
    if !may_mount() {
        return;
    }
    let stats = Duration::from_millis(50);
    let scene = Scene::with(Deadlines { mount: LONG, unmount: LONG, stats });
    let mut request = stage_request(&scene);
    let restage = |scene: &Scene, request: NodeStageVolumeRequest| {
        let node = scene.node.clone();
        async move { code(node.stage(request).await) }
    };
    let tried =
        if mount::is_available("cifs").is_ok() { Code::Unavailable } else { Code::FailedPrecondition };

    // Unresponsive, and mounted from an address that the server no longer has: it is removed and mounted again.
    disguise_as_smb("//127.0.0.1/v-dead", "rw,hard,gid=0,addr=192.0.2.9");
    request.volume_context.insert("share".into(), "v-dead".into());
    let Some(_device) = fuse::mount("//127.0.0.1/v-dead", &scene.path("staging")) else { return };
    assert_eq!(restage(&scene, request.clone()).await, Err(tried), "nothing listens at the new address");
    assert!(!scene.is_mounted("staging"));

    // Unresponsive at its server's current address: the server is unreachable and will return.
    disguise_as_smb("//127.0.0.1/v-away", "rw,hard,gid=0,addr=127.0.0.1");
    request.volume_context.insert("share".into(), "v-away".into());
    let Some(_device) = fuse::mount("//127.0.0.1/v-away", &scene.path("staging")) else { return };
    assert_eq!(restage(&scene, request.clone()).await, Ok(()));
    assert_eq!(scene.publish(false).await, Ok(()), "I/O waits for it");
    unmount(&scene.path("pod/mount"), mount::detach).expect("mounted");
    unmount(&scene.path("staging"), mount::detach).expect("mounted");

    // At another address, but it responds.
    disguise_as_smb("//127.0.0.1/v-moved", "rw,hard,gid=0,addr=192.0.2.9");
    request.volume_context.insert("share".into(), "v-moved".into());
    scene.mount_tmpfs_of("//127.0.0.1/v-moved", "staging");
    assert_eq!(restage(&scene, request.clone()).await, Ok(()));
    assert!(scene.is_mounted("staging"));
    unmount(&scene.path("staging"), mount::unmount).expect("mounted");

    // A publish detects this, too. Without the volume's Secret it can only remove the mount.
    request.volume_context.insert("share".into(), "v-dead".into());
    let Some(_device) = fuse::mount("//127.0.0.1/v-dead", &scene.path("staging")) else { return };
    let publish = NodePublishVolumeRequest {
        volume_context: request.volume_context.clone(),
        ..scene.publish_request(false)
    };
    let refused = scene.node.publish(publish.clone()).await;
    let status = Status::from(refused.expect_err("its server is elsewhere"));
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("is no longer at 192.0.2.9"), "{status}");
    assert!(!scene.is_mounted("staging") && !scene.is_mounted("pod/mount"));
    assert_eq!(code(scene.node.publish(publish.clone()).await), Err(Code::FailedPrecondition), "not staged");

    // With the Secret, the same call mounts again: the kubelet does not stage while another pod uses the volume.
    let with_secret = NodePublishVolumeRequest { secrets: request.secrets.clone(), ..publish };
    let Some(_device) = fuse::mount("//127.0.0.1/v-dead", &scene.path("staging")) else { return };
    for what in ["in the place of a dead mount", "where nothing is mounted"] {
        let refused = scene.node.publish(with_secret.clone()).await;
        let status = Status::from(refused.expect_err("nothing listens at the new address"));
        assert_eq!(status.code(), tried, "{what}: {status}");
        for other in ["is not staged", "is no longer at", "12345678"] {
            assert!(!status.message().contains(other), "{what}: {status}");
        }
        assert!(!scene.is_mounted("staging") && !scene.is_mounted("pod/mount"), "{what}");
    }
}

#[tokio::test]
async fn pods_with_different_groups_use_separate_mounts() {
    if !may_mount() {
        return;
    }
    let scene = Scene::new();
    let of_group = |group: &str, mut capability: forebay_proto::csi::VolumeCapability| {
        use forebay_proto::csi::volume_capability::AccessType;
        if let Some(AccessType::Mount(mount)) = &mut capability.access_type {
            mount.volume_mount_group = group.into();
        }
        Some(capability)
    };
    let mode = mount_capability(Mode::MultiNodeMultiWriter, &[]);
    let publish = |group: &str, target: &str| NodePublishVolumeRequest {
        target_path: scene.text(target),
        volume_capability: of_group(group, mode.clone()),
        ..scene.publish_request(false)
    };
    disguise_as_smb("//127.0.0.1/v-group", "rw,username=u,hard,gid=1000,addr=127.0.0.1");
    disguise_as_smb("//127.0.0.1/v-group#2000", "rw,username=u,hard,gid=2000,addr=127.0.0.1");
    scene.mount_tmpfs_of("//127.0.0.1/v-group", "staging");

    // The second pod's group differs from the mount's group: staging creates another mount, or returns an error.
    let mut stage = stage_request(&scene);
    stage.volume_context.insert("share".into(), "v-group".into());
    stage.volume_capability = of_group("1000", mode.clone());
    assert_eq!(code(scene.node.stage(stage.clone()).await), Ok(()), "staged already");
    stage.volume_capability = of_group("2000", mode.clone());
    let tried =
        if mount::is_available("cifs").is_ok() { Code::Unavailable } else { Code::FailedPrecondition };
    assert_eq!(code(scene.node.stage(stage).await), Err(tried), "nothing listens there");
    assert_eq!(code(scene.node.publish(publish("1000", "pod/mount")).await), Ok(()));
    let refused = scene.node.publish(publish("2000", "pod2/mount")).await;
    let status = Status::from(refused.expect_err("never with another pod's group"));
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(status.message().contains("csi.storage.k8s.io/node-publish-secret-name"), "{status}");

    // With its Secret, publishing creates that mount itself.
    let mut with_secret = publish("2000", "pod2/mount");
    with_secret.secrets = stage_request(&scene).secrets;
    with_secret.volume_context = stage_request(&scene).volume_context;
    with_secret.volume_context.insert("share".into(), "v-group".into());
    let status = Status::from(scene.node.publish(with_secret).await.expect_err("nothing listens there"));
    assert_eq!(status.code(), tried, "{status}");
    assert!(!status.message().contains("node-publish-secret"), "{status}");

    // As staging would have mounted it.
    scene.mount_tmpfs_of("//127.0.0.1/v-group#2000", "staging.gid-2000");
    fs::write(scene.path("staging.gid-2000/of-2000"), "").expect("writable");
    assert_eq!(code(scene.node.publish(publish("2000", "pod2/mount")).await), Ok(()));
    assert!(scene.path("pod2/mount/of-2000").exists() && !scene.path("pod/mount/of-2000").exists());
    let mut single = publish("1000", "pod3/mount");
    single.volume_capability = of_group("1000", mount_capability(Mode::SingleNodeSingleWriter, &[]));
    assert_eq!(code(scene.node.publish(single).await), Err(Code::FailedPrecondition), "published elsewhere");

    for target in ["pod/mount", "pod2/mount"] {
        let target_path = scene.text(target);
        let request = NodeUnpublishVolumeRequest { volume_id: "v".into(), target_path };
        assert_eq!(code(scene.node.unpublish(request).await), Ok(()));
    }
    assert_eq!(scene.unstage().await, Ok(()));
    assert!(!scene.is_mounted("staging") && scene.path("staging").exists());
    assert!(!scene.path("staging.gid-2000").exists(), "the driver created it");
}

#[tokio::test]
async fn tcp_fallback_is_reported_after_a_mount_beyond_its_deadline() {
    let scene = Scene::with(Deadlines { mount: Duration::from_millis(50), unmount: LONG, stats: LONG });
    let (release, hang) = std::sync::mpsc::channel::<()>();
    let claim = scene.node.claims.volume("v").expect("free");
    let mounting = scene.node.mount_and_tell("v", claim, move || {
        hang.recv().expect("released");
        Ok((Choice::short_of("the node has no RDMA device".into()), false))
    });
    assert!(matches!(mounting.await, Err(Error::Deadline { .. })));
    assert_eq!(scene.node.reported.of("v"), None, "it is not mounted yet");
    assert_eq!(scene.unstage().await, Err(Code::Aborted));
    release.send(()).expect("the thread waits");
    let deadline = std::time::Instant::now() + LONG;
    while scene.node.reported.of("v").is_none() {
        assert!(std::time::Instant::now() < deadline, "it is never reported");
        tokio::task::yield_now().await;
    }
}

fn stage_request(scene: &Scene) -> NodeStageVolumeRequest {
    let map =
        |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    NodeStageVolumeRequest {
        volume_id: "v".into(),
        staging_target_path: scene.text("staging"),
        volume_capability: Some(mount_capability(Mode::MultiNodeMultiWriter, &[])),
        secrets: map(&[("username", "u"), ("password", "12345678")]),
        // Port of the discard service, RFC 863: nothing listens there.
        volume_context: map(&[("server", "127.0.0.1:9"), ("share", "v")]),
        ..Default::default()
    }
}

#[tokio::test]
async fn staging_without_a_server_fails_and_leaves_no_mount() {
    if !may_mount() {
        return;
    }
    let scene = Scene::new();
    let error = scene.node.stage(stage_request(&scene)).await.expect_err("no server");
    let status = Status::from(error);
    let expected =
        if mount::is_available("cifs").is_ok() { Code::Unavailable } else { Code::FailedPrecondition };
    assert_eq!(status.code(), expected, "{status}");
    assert!(!status.message().contains("12345678"), "{status}");
    assert!(!scene.is_mounted("staging"));
    scene.mount_tmpfs("staging");
    let status = Status::from(scene.node.stage(stage_request(&scene)).await.expect_err("taken"));
    assert_eq!(status.code(), Code::AlreadyExists, "{status}");
}

#[tokio::test]
async fn invalid_stage_arguments_are_refused() {
    let scene = Scene::new();
    type Change = fn(&mut NodeStageVolumeRequest);
    let changes: [(&str, Change); 10] = [
        ("volume_id", |r| r.volume_id.clear()),
        ("volume_id", |r| r.volume_id = "x".repeat(129)),
        ("staging_target_path", |r| r.staging_target_path.clear()),
        ("staging_target_path", |r| r.staging_target_path = "relative".into()),
        ("staging_target_path", |r| r.staging_target_path = "/a/../b".into()),
        ("volume_capability", |r| r.volume_capability = None),
        ("node-stage-secret-name", |r| r.secrets.clear()),
        ("volume_context.server", |r| r.volume_context.clear()),
        ("volume_context.dialect", |r| {
            r.volume_context.insert("dialect".into(), "1.0".into());
        }),
        ("mount_flags", |r| {
            r.volume_capability = Some(mount_capability(Mode::MultiNodeMultiWriter, &["password=x"]));
        }),
    ];
    for (part, change) in changes {
        let mut request = stage_request(&scene);
        change(&mut request);
        let status = Status::from(scene.node.stage(request).await.expect_err(part));
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(status.message().contains(part), "{part}: {status}");
    }
}

#[test]
fn kernel_message_about_a_refused_option_is_in_the_error() {
    if !may_mount() {
        return;
    }
    let target = Path::new("/nowhere");
    let mount = |settings: &[Setting<'_>]| {
        mount::mount("tmpfs", "a volume", settings, MountAttrFlags::empty(), target).expect_err("refused")
    };
    let error = mount(&[Setting::Value("frobnicate", "1")]);
    assert_eq!(
        (error.step.clone(), error.code()),
        (Step::Option("frobnicate".into()), Code::InvalidArgument)
    );
    assert!(error.to_string().contains("frobnicate'"), "the kernel's message: {error}");
    // fsconfig(2) accepts at most 255 bytes.
    let long = "x".repeat(255);
    assert_eq!(mount(&[Setting::Value("source", &long)]).step, Step::Attach);
    let long = "x".repeat(256);
    assert_eq!(mount(&[Setting::Secret("source", &long)]).step, Step::Option("source".into()));
}
