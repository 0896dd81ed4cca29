//! The node's calls with real mounts: a tmpfs stands where the SMB mount would be staged, and a FUSE mount
//! that nobody serves for a server that went silent. The SMB mount itself is tested in the lab (e2e).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

use forebay_proto::csi::volume_capability::access_mode::Mode;
use forebay_proto::csi::volume_usage::Unit;
use rustix::mount::MountAttrFlags;
use tempfile::TempDir;
use tonic::Code;

use super::*;
use crate::capability::tests::mount_capability;
use crate::mount::{Setting, Step};

const LONG: Duration = Duration::from_secs(60);

/// Mounting wants CAP_SYS_ADMIN; says so where it is not there.
fn may_mount() -> bool {
    match mount::is_available("tmpfs") {
        Ok(()) => true,
        Err(error) => {
            eprintln!("skipped, mounts are not possible here: {error}");
            false
        }
    }
}

/// A staging and a target path below a directory that is cleared of mounts at the end.
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
        fs::create_dir_all(self.path(name)).expect("a directory");
        let settings = [Setting::Value("size", "4m"), Setting::Value("source", "a volume")];
        mount::mount("tmpfs", "a volume", &settings, MountAttrFlags::empty(), &self.path(name))
            .expect("mounted");
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
        let request = NodeGetVolumeStatsRequest {
            volume_id: "v".into(),
            volume_path: self.text(name),
            ..Default::default()
        };
        self.node.stats(request).await.map_err(|e| Status::from(e).code())
    }

    fn is_mounted(&self, name: &str) -> bool {
        let path = resolve(&self.path(name)).expect("readable");
        path.is_some_and(|path| mounts().expect("readable").at(&path).is_some())
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for name in ["pod/mount", "pod2/mount", "staging"] {
            let _ = unmount_all(&self.path(name), mount::detach);
        }
    }
}

fn code<T>(result: Result<T, Error>) -> Result<(), Code> {
    result.map(drop).map_err(|e| Status::from(e).code())
}

#[tokio::test]
async fn a_staged_volume_is_published_and_taken_away_again() {
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

    // An access mode of readers means the same.
    let mut request = scene.publish_request(false);
    request.volume_capability = Some(mount_capability(Mode::MultiNodeReaderOnly, &[]));
    assert_eq!(code(scene.node.publish(request).await), Ok(()));
}

#[tokio::test]
async fn what_is_not_the_volume_is_left_alone() {
    if !may_mount() {
        return;
    }
    let scene = Scene::new();
    scene.mount_tmpfs("staging");
    scene.mount_tmpfs("pod/mount");
    assert_eq!(scene.publish(false).await, Err(Code::AlreadyExists));
    // A target that was never mounted and holds something is not cleared.
    unmount_all(&scene.path("pod/mount"), mount::unmount).expect("mounted");
    fs::write(scene.path("pod/mount/precious"), "data").expect("writable");
    assert_eq!(scene.unpublish().await, Err(Code::Internal));
    assert_eq!(fs::read(scene.path("pod/mount/precious")).expect("kept"), b"data");
}

#[tokio::test]
async fn a_single_writers_volume_is_published_once() {
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
    assert_eq!(code(scene.node.publish(request).await), Ok(()), "now it may");
}

#[tokio::test]
async fn a_volume_in_use_is_not_torn_away() {
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
async fn one_call_at_a_time_changes_a_volumes_mounts() {
    let scene = Scene::new();
    let claim = scene.node.in_flight.claim("v").expect("free");
    assert_eq!(scene.publish(false).await, Err(Code::Aborted));
    assert_eq!(scene.unpublish().await, Err(Code::Aborted));
    assert_eq!(scene.unstage().await, Err(Code::Aborted));
    drop(claim);
    assert_eq!(scene.unstage().await, Ok(()));
}

#[tokio::test]
async fn stats_are_those_of_the_volume() {
    let scene = Scene::new();
    assert_eq!(scene.stats("staging").await, Err(Code::NotFound), "nothing is mounted");
    assert_eq!(scene.stats("nowhere/at/all").await, Err(Code::NotFound));
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
}

#[tokio::test]
async fn a_silent_volume_is_abnormal_and_can_be_taken_away() {
    if !may_mount() {
        return;
    }
    let Ok(device) = OpenOptions::new().read(true).write(true).open("/dev/fuse") else {
        eprintln!("skipped: there is no /dev/fuse here");
        return;
    };
    let stats = Duration::from_millis(50);
    let scene = Scene::with(Deadlines { mount: LONG, unmount: LONG, stats });
    let fd = device.as_raw_fd().to_string();
    let settings = [
        Setting::Value("fd", &fd),
        Setting::Value("rootmode", "40000"),
        Setting::Value("user_id", "0"),
        Setting::Value("group_id", "0"),
    ];
    mount::mount("fuse", "silent", &settings, MountAttrFlags::empty(), &scene.path("staging"))
        .expect("mounted");
    assert_eq!(scene.publish(false).await, Ok(()), "nothing asks the volume here");

    let first = scene.stats("pod/mount").await.expect("answered in its place");
    assert!(first.volume_condition.expect("offered").abnormal && first.usage.is_empty());
    let second = scene.stats("pod/mount").await.expect("answered in its place");
    let condition = second.volume_condition.expect("offered");
    assert!(condition.abnormal && condition.message.contains("previous call"), "{condition:?}");

    // The thread in statfs keeps the mount busy; the pod can go all the same.
    assert_eq!(scene.unpublish().await, Ok(()));
    assert!(!scene.is_mounted("pod/mount") && !scene.path("pod/mount").exists());
    assert_eq!(scene.unstage().await, Ok(()));
    assert!(scene.node.measuring.is_claimed("v"), "the thread still hangs");
    // The file system dies, so the thread ends.
    drop(device);
    let deadline = std::time::Instant::now() + LONG;
    while scene.node.measuring.is_claimed("v") {
        assert!(std::time::Instant::now() < deadline, "the thread never ended");
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
        // Discard, RFC 863: nobody listens there.
        volume_context: map(&[("server", "127.0.0.1:9"), ("share", "v")]),
        ..Default::default()
    }
}

#[tokio::test]
async fn staging_without_a_server_fails_and_leaves_nothing() {
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
async fn bad_arguments_are_refused_before_anything_is_touched() {
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
fn the_kernels_words_about_a_refused_option_are_in_the_error() {
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
    // fsconfig(2) takes 255 bytes and no more.
    let long = "x".repeat(255);
    assert_eq!(mount(&[Setting::Value("source", &long)]).step, Step::Attach);
    let long = "x".repeat(256);
    assert_eq!(mount(&[Setting::Secret("source", &long)]).step, Step::Option("source".into()));
}
