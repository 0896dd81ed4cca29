//! The daemon as its users see it: real processes, real sockets, both I/O engines.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use forebay_proto::admin as api;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::CreateDisposition;
use forebay_smb::wire::negotiate::Dialect;
use forebay_testing::{Need, skip};
use support::{Client, PASSWORD, Place, data, engines, request, until};
use tonic::Code;

const MIB: u64 = 1 << 20;

fn pattern(seed: u64, length: u64) -> Vec<u8> {
    (0..length).map(|i| ((i / 7).wrapping_mul(seed + 3) ^ (i >> 9)) as u8).collect()
}

fn write_and_read(client: &mut Client) {
    let file = client.open("data", CreateDisposition::OVERWRITE_IF).unwrap();
    // Pipelined, like real clients, with sizes on both sides of the transport's thresholds.
    let sizes = [MIB, 10, 4 * MIB, 65_536, 5000, MIB + 1, 20_000, 8 * MIB];
    let mut offset = 0;
    let mut pieces = Vec::new();
    for (seed, size) in (1..).zip(sizes) {
        let bytes = pattern(seed, size);
        client.send_write(file, offset, &bytes);
        pieces.push((offset, bytes));
        offset += size;
    }
    for _ in sizes {
        assert_eq!(client.answer().status(), NtStatus::SUCCESS);
    }
    assert_eq!(client.flush(file), NtStatus::SUCCESS);
    let mut expected = std::collections::HashMap::new();
    for (offset, bytes) in pieces {
        let id = client.send_read(file, offset, bytes.len() as u32);
        expected.insert(id, bytes);
    }
    for _ in sizes {
        let answer = client.answer();
        let bytes = expected.remove(&answer.header.message_id).expect("asked for once");
        assert!(data(&answer).unwrap() == bytes, "{} bytes differ", bytes.len());
    }
    assert_eq!(client.read(file, offset, 100), Err(NtStatus::END_OF_FILE));
    assert_eq!(client.read(file, offset - 5, 100).unwrap().len(), 5);
    assert_eq!(client.close(file), NtStatus::SUCCESS);
}

#[test]
fn files_are_written_and_read_with_and_without_encryption() {
    for engine in engines() {
        let place = Place::new(engine);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        for dialect in [Dialect::SMB2_1, Dialect::SMB3_1_1] {
            write_and_read(&mut daemon.mount("v", dialect));
        }
    }
}

#[test]
fn volume_and_flushed_data_survive_sigkill() {
    for engine in engines() {
        let place = Place::new(engine);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        let mut client = daemon.mount("v", Dialect::SMB2_1);
        let file = client.open("kept", CreateDisposition::CREATE).unwrap();
        let bytes = pattern(5, 3 * MIB);
        assert_eq!(client.write(file, 0, &bytes), NtStatus::SUCCESS);
        assert_eq!(client.flush(file), NtStatus::SUCCESS);
        // More writes are in flight when it dies.
        for i in 0..8 {
            client.send_write(file, (4 + i) * MIB, &bytes[..MIB as usize]);
        }
        daemon.kill();
        let mut daemon = place.start();
        assert_eq!(
            daemon.create_volume("v").unwrap().volume_id,
            "v",
            "the same request returns the existing volume"
        );
        let mut client = daemon.mount("v", Dialect::SMB2_1);
        let file = client.open("kept", CreateDisposition::OPEN).unwrap();
        assert!(client.read(file, 0, 3 * MIB as u32).unwrap() == bytes);
    }
}

#[test]
fn sigterm_completes_pending_requests_and_exits_with_0() {
    for engine in engines() {
        let place = Place::new(engine);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        let mut client = daemon.mount("v", Dialect::SMB2_1);
        let file = client.open("f", CreateDisposition::CREATE).unwrap();
        let bytes = pattern(2, MIB);
        assert_eq!(client.write(file, 0, &bytes), NtStatus::SUCCESS);
        client.send_read(file, 0, MIB as u32);
        // The first bytes of the answer have arrived, so the server accepted the request.
        let mut one = [0; 1];
        assert_eq!(support::peek(&client.stream, &mut one).unwrap(), 1);
        daemon.terminate();
        assert!(data(&client.answer()).unwrap() == bytes);
        assert!(client.frame().is_none(), "then the connection ends");
        assert_eq!(daemon.wait().code(), Some(0));
        assert!(TcpStream::connect(daemon.address()).is_err());
        assert!(!place.socket().exists());
    }
}

#[test]
fn client_that_reads_no_responses_does_not_delay_others() {
    for engine in engines() {
        let place = Place::new(engine);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        let mut other = daemon.mount("v", Dialect::SMB2_1);
        let file = other.open("f", CreateDisposition::CREATE).unwrap();
        let bytes = pattern(3, 8 * MIB);
        assert_eq!(other.write(file, 0, &bytes), NtStatus::SUCCESS);
        // More clients than event loops, so that each loop has one.
        let mut greedy: Vec<Client> = (0..3).map(|_| daemon.mount("v", Dialect::SMB2_1)).collect();
        for client in &mut greedy {
            let file = client.open("f", CreateDisposition::OPEN).unwrap();
            for _ in 0..8 {
                client.send_read(file, 0, 8 << 20);
            }
        }
        assert!(other.read(file, 0, 8 << 20).unwrap() == bytes);
        // And they get all the data when they finally read it.
        for client in &mut greedy {
            for _ in 0..8 {
                assert!(data(&client.answer()).unwrap() == bytes);
            }
        }
    }
}

#[test]
fn malformed_input_ends_only_its_own_connection() {
    for engine in engines() {
        let place = Place::new(engine);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        let mut client = daemon.mount("v", Dialect::SMB3_1_1);
        let file = client.open("f", CreateDisposition::CREATE).unwrap();
        let smb1 = [b"\0\0\0\x24\xffSMBr".as_slice(), &[0; 31]].concat();
        let sealed = [b"\0\0\0\x60\xfdSMB".as_slice(), &[7; 92]].concat();
        let huge = b"\0\xff\xff\xff\xfeSMB".to_vec();
        for nonsense in [b"GET / HTTP/1.1\r\n\r\n".to_vec(), smb1, sealed, huge, vec![0; 4096]] {
            let mut stream = TcpStream::connect(daemon.address()).unwrap();
            stream.set_read_timeout(Some(support::DEADLINE)).unwrap();
            stream.write_all(&nonsense).unwrap();
            let mut rest = Vec::new();
            // The connection is closed or reset, not left open.
            match stream.read_to_end(&mut rest) {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
            }
        }
        assert_eq!(client.write(file, 0, b"still there"), NtStatus::SUCCESS);
        assert!(daemon.child.try_wait().unwrap().is_none());
    }
}

#[test]
fn unauthenticated_connections_do_not_exclude_clients() {
    for engine in engines() {
        let place = Place::new(engine);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        let mut client = daemon.mount("v", Dialect::SMB2_1);
        let files = rustix::process::Resource::Nofile;
        let limit = rustix::process::getrlimit(files);
        let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
        rustix::process::setrlimit(files, raised).unwrap();
        let flood = forebay_server::limits::CONNECTIONS_UNAUTHENTICATED_MAX + 100;
        let idle: Vec<TcpStream> =
            (0..flood).map(|_| TcpStream::connect(daemon.address()).unwrap()).collect();
        daemon.mount("v", Dialect::SMB2_1);
        client.open("f", CreateDisposition::CREATE).unwrap();
        // The server closed the oldest connection.
        idle[0].set_read_timeout(Some(support::DEADLINE)).unwrap();
        assert_eq!(support::peek(&idle[0], &mut [0]).unwrap(), 0);
    }
}

#[test]
fn oversized_or_unenforceable_capacity_is_refused() {
    let place = Place::new("auto");
    let text = std::fs::read_to_string(place.config()).unwrap();
    std::fs::write(place.config(), text.replace("quota = \"none\"", "quota = \"project\"")).unwrap();
    let mut daemon = place.start();
    let mut huge = request("huge");
    huge.capacity_bytes = 1 << 60;
    let status = daemon.create(huge).unwrap_err();
    assert!(status.code() == Code::ResourceExhausted && status.message().contains("room"), "{status}");
    // Test machines have no project quota on their temporary directories; the lab's guests have it.
    match daemon.create_volume("v") {
        Ok(volume) => assert_eq!(volume.capacity_bytes, 1 << 30),
        Err(status) => {
            assert_eq!(status.code(), Code::FailedPrecondition);
            assert!(
                status.message().contains("-o prjquota") && status.message().contains("quota = \"none\"")
            );
        }
    }
}

#[test]
fn full_disk_is_reported_and_loses_no_data() {
    let place = Place::new("auto");
    let tiny = place.scratch.path().join("tiny");
    std::fs::create_dir(&tiny).unwrap();
    let options = Some(c"size=4m");
    if let Err(errno) =
        rustix::mount::mount(c"tmpfs", &tiny, c"tmpfs", rustix::mount::MountFlags::empty(), options)
    {
        return skip(Need::Mounts, errno);
    }
    struct Unmount(std::path::PathBuf);
    impl Drop for Unmount {
        fn drop(&mut self) {
            let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
        }
    }
    let _unmount = Unmount(tiny.clone());
    place.configure("127.0.0.1:0", &tiny);
    let mut daemon = place.start();
    daemon.create_volume("one").unwrap();
    let mut client = daemon.mount("one", Dialect::SMB3_1_1);
    let file = client.open("kept", CreateDisposition::CREATE).unwrap();
    let kept = pattern(1, MIB);
    assert_eq!(client.write(file, 0, &kept), NtStatus::SUCCESS);
    let big = client.open("big", CreateDisposition::CREATE).unwrap();
    let full = (0..64).map(|i| client.write(big, i * MIB / 8, &pattern(2, MIB / 8))).find(|s| s.is_error());
    assert_eq!(full, Some(NtStatus::DISK_FULL));
    // Page by page, until no space is left.
    assert!((0..1024).any(|i| client.write(big, 8 * MIB + i * 4096, &[7; 4096]) == NtStatus::DISK_FULL));

    let status = daemon.create_volume("two").unwrap_err();
    assert!(status.message().to_lowercase().contains("space"), "{status}");
    assert_eq!(client.read(file, 0, MIB as u32).unwrap(), kept);

    // The record of the existing volume is complete, and after a restart on the full disk the server serves it.
    daemon.kill();
    let mut daemon = place.start();
    let mut client = daemon.mount("one", Dialect::SMB3_1_1);
    let file = client.open("kept", CreateDisposition::OPEN).unwrap();
    assert_eq!(client.read(file, 0, MIB as u32).unwrap(), kept);
    std::fs::remove_file(tiny.join("volumes/one/big")).unwrap();
    daemon.create_volume("two").unwrap();
}

#[test]
fn volume_credentials_grant_access_only_to_their_volume() {
    let place = Place::new("auto");
    let mut daemon = place.start();
    daemon.create_volume("one").unwrap();
    daemon.create_volume("two").unwrap();
    let mut client = daemon.client(Dialect::SMB2_1);
    assert_eq!(client.log_on("one-user", "wrong password"), NtStatus::LOGON_FAILURE);
    assert_eq!(daemon.client(Dialect::SMB2_1).log_on("stranger", PASSWORD), NtStatus::LOGON_FAILURE);
    let mut client = daemon.client(Dialect::SMB2_1);
    assert_eq!(client.log_on("one-user", PASSWORD), NtStatus::SUCCESS);
    assert_eq!(client.tree_connect("two"), NtStatus::ACCESS_DENIED);
    assert_eq!(client.tree_connect("one"), NtStatus::SUCCESS);

    // Rotation: both passwords are valid until the old ones are dropped, and active sessions continue.
    let file = client.open("f", CreateDisposition::CREATE).unwrap();
    let set = |password: &str, keep_previous| api::SetCredentialsRequest {
        volume_id: "one".to_owned(),
        credentials: Some(api::Credentials {
            username: "one-user".to_owned(),
            password: password.to_owned(),
        }),
        keep_previous,
    };
    let log_on =
        |daemon: &support::Daemon, password| daemon.client(Dialect::SMB2_1).log_on("one-user", password);
    daemon.admin(async |a| a.set_credentials(set("another password", true)).await).unwrap();
    assert_eq!(log_on(&daemon, PASSWORD), NtStatus::SUCCESS);
    assert_eq!(log_on(&daemon, "another password"), NtStatus::SUCCESS);
    daemon.admin(async |a| a.set_credentials(set("another password", false)).await).unwrap();
    assert_eq!(log_on(&daemon, PASSWORD), NtStatus::LOGON_FAILURE);
    assert_eq!(log_on(&daemon, "another password"), NtStatus::SUCCESS);
    assert_eq!(client.write(file, 0, b"x"), NtStatus::SUCCESS);

    let secrets = [PASSWORD, "another password", "wrong password"];
    let log = std::fs::read_to_string(place.log()).unwrap();
    assert!(log.contains("one-user") && secrets.iter().all(|secret| !log.contains(secret)), "{log}");
}

#[test]
fn root_of_a_volume_gets_the_requested_owner_and_mode() {
    let place = Place::new("auto");
    let mut daemon = place.start();
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let root = api::Root { uid: Some(uid), gid: Some(gid), mode: Some(0o1750) };
    let wish = api::CreateVolumeRequest { root: Some(root), ..request("v") };
    assert_eq!(daemon.create(wish.clone()).unwrap().root, Some(root));
    let stat = || std::fs::metadata(place.pool().join("volumes/v")).unwrap();
    assert_eq!((stat().uid(), stat().gid(), stat().mode() & 0o7777), (uid, gid, 0o1750));
    // The same parameters are remembered, also by the next start, and set only once.
    std::fs::set_permissions(place.pool().join("volumes/v"), std::fs::Permissions::from_mode(0o700)).unwrap();
    daemon.kill();
    let mut daemon = place.start();
    assert_eq!(daemon.create(wish.clone()).unwrap().root, Some(root));
    assert_eq!(stat().mode() & 0o7777, 0o700);
    let other = api::Root { mode: Some(0o700), ..root };
    let refused = daemon.create(api::CreateVolumeRequest { root: Some(other), ..wish }).unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists);
    // Another owner needs a privilege.
    let other = api::CreateVolumeRequest {
        root: Some(api::Root { uid: Some(uid + 1), ..Default::default() }),
        ..request("w")
    };
    match daemon.create(other) {
        Ok(_) => assert_eq!(std::fs::metadata(place.pool().join("volumes/w")).unwrap().uid(), uid + 1),
        Err(refused) => {
            assert_eq!(refused.code(), Code::FailedPrecondition);
            assert!(refused.message().contains("CAP_CHOWN"), "{refused}");
            assert!(!place.pool().join("volumes/w").exists());
        }
    }
}

#[test]
fn admin_api_returns_the_expected_status_codes() {
    let place = Place::new("auto");
    let mut daemon = place.start();
    let mut code = |change: &dyn Fn(&mut api::CreateVolumeRequest)| {
        let mut wish = request("v");
        change(&mut wish);
        daemon.create(wish).map(|_| ()).map_err(|status| (status.code(), status.message().to_owned()))
    };
    assert_eq!(code(&|_| {}), Ok(()));
    assert_eq!(code(&|_| {}), Ok(()), "idempotent");
    let exists = code(&|w| w.capacity_bytes += 1).unwrap_err();
    assert!(exists.0 == Code::AlreadyExists && exists.1.contains("capacity_bytes"), "{exists:?}");
    type Change = &'static dyn Fn(&mut api::CreateVolumeRequest);
    let wrong: [(Code, &str, Change); 15] = [
        (Code::AlreadyExists, "credentials", &|w| {
            w.credentials.as_mut().unwrap().password = "12345678".to_owned()
        }),
        (Code::InvalidArgument, "volume_id", &|w| w.volume_id = "x".repeat(200)),
        (Code::InvalidArgument, "volume_id", &|w| w.volume_id = "../etc".to_owned()),
        (Code::InvalidArgument, "volume_id", &|w| w.volume_id = String::new()),
        (Code::InvalidArgument, "capacity_bytes", &|w| (w.volume_id, w.capacity_bytes) = ("w".to_owned(), 0)),
        (Code::InvalidArgument, "no pool", &|w| {
            *w = api::CreateVolumeRequest { pool: "q".to_owned(), ..request("w") }
        }),
        (Code::InvalidArgument, "credentials", &|w| (w.volume_id, w.credentials) = ("w".to_owned(), None)),
        (Code::InvalidArgument, "another volume", &|w| w.volume_id = "w".to_owned()),
        (Code::InvalidArgument, "password", &|w| {
            w.credentials.as_mut().unwrap().password = "short".to_owned()
        }),
        (Code::InvalidArgument, "username", &|w| w.credentials.as_mut().unwrap().username = "a b".to_owned()),
        (Code::InvalidArgument, "protection", &|w| w.protection = 77),
        (Code::FailedPrecondition, "quota", &|w| {
            *w = request("w");
            w.quota = api::Quota::Hard.into();
        }),
        (Code::InvalidArgument, "root", &|w| {
            *w = request("w");
            w.root = Some(api::Root { mode: Some(0o10000), ..Default::default() });
        }),
        (Code::InvalidArgument, "root", &|w| {
            *w = request("w");
            w.root = Some(api::Root { gid: Some(u32::MAX), ..Default::default() });
        }),
        (Code::AlreadyExists, "root", &|w| w.root = Some(api::Root::default())),
    ];
    for (expected, about, change) in wrong {
        let (code, message) = code(change).unwrap_err();
        assert!(code == expected && message.contains(about), "{expected:?} {about}: {code:?} {message}");
        assert!(!message.contains(PASSWORD) && !message.contains("short"), "{message}");
    }

    for id in ["a", "z"] {
        daemon.create_volume(id).unwrap();
    }
    let list = |page_size, page_token: &str| api::ListVolumesRequest {
        page_size,
        page_token: page_token.to_owned(),
    };
    let first = daemon.admin(async |a| a.list_volumes(list(2, "")).await).unwrap().into_inner();
    let ids = |volumes: &[api::Volume]| volumes.iter().map(|v| v.volume_id.clone()).collect::<Vec<_>>();
    assert_eq!(ids(&first.volumes), ["a", "v"]);
    let second =
        daemon.admin(async |a| a.list_volumes(list(2, &first.next_page_token)).await).unwrap().into_inner();
    assert_eq!((ids(&second.volumes), second.next_page_token.as_str()), (vec!["z".to_owned()], ""));
    let status = daemon.admin(async |a| a.list_volumes(list(2, "No Such Token")).await).unwrap_err();
    assert_eq!(status.code(), Code::Aborted);

    let stat = |id: &str| api::StatVolumeRequest { volume_id: id.to_owned() };
    assert_eq!(daemon.admin(async |a| a.stat_volume(stat("no")).await).unwrap_err().code(), Code::NotFound);
    let expand =
        |id: &str, capacity_bytes| api::ExpandVolumeRequest { volume_id: id.to_owned(), capacity_bytes };
    assert_eq!(
        daemon.admin(async |a| a.expand_volume(expand("no", 1)).await).unwrap_err().code(),
        Code::NotFound
    );
    assert!(daemon.admin(async |a| a.expand_volume(expand("a", 4 << 30)).await).is_ok());
    let pools =
        daemon.admin(async |a| a.list_pools(api::ListPoolsRequest {}).await).unwrap().into_inner().pools;
    assert!(pools.len() == 1 && pools[0].quota == "none" && pools[0].total_bytes > 0);
}

#[test]
fn sessions_and_open_files_are_listed_and_block_volume_deletion() {
    let place = Place::new("auto");
    let mut daemon = place.start();
    daemon.create_volume("v").unwrap();
    let mut client = daemon.mount("v", Dialect::SMB3_1_1);
    client.open("f", CreateDisposition::CREATE).unwrap();
    let sessions = |daemon: &mut support::Daemon| {
        daemon
            .admin(async |a| a.list_sessions(api::ListSessionsRequest {}).await)
            .unwrap()
            .into_inner()
            .sessions
    };
    let found = sessions(&mut daemon);
    assert_eq!(found.len(), 1);
    assert_eq!(
        (found[0].username.as_str(), found[0].dialect.as_str(), found[0].open_files),
        ("v-user", "3.1.1", 1)
    );
    assert_eq!(found[0].volume_ids, ["v"]);
    let files = api::ListOpenFilesRequest { volume_id: "v".to_owned() };
    let files = daemon.admin(async |a| a.list_open_files(files).await).unwrap().into_inner().open_files;
    assert_eq!((files.len(), files[0].path.as_str()), (1, "f"));
    let volume = daemon.create_volume("v").unwrap();
    assert_eq!((volume.sessions, volume.open_files), (1, 1));

    let delete = |force| api::DeleteVolumeRequest { volume_id: "v".to_owned(), force };
    let status = daemon.admin(async |a| a.delete_volume(delete(false)).await).unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    let close = api::CloseSessionRequest { session_id: found[0].session_id };
    daemon.admin(async |a| a.close_session(close).await).unwrap();
    assert!(client.frame().is_none(), "its connection ends");
    until("the session's end", || sessions(&mut daemon).is_empty().then_some(()));

    let mut client = daemon.mount("v", Dialect::SMB2_1);
    client.open("g", CreateDisposition::CREATE).unwrap();
    daemon.admin(async |a| a.delete_volume(delete(true)).await).unwrap();
    assert!(client.frame().is_none(), "so does that of a volume that is deleted by force");
    daemon.admin(async |a| a.delete_volume(delete(false)).await).expect("deleted already");
    until("the data's end", || {
        let empty = |path: &str| std::fs::read_dir(place.pool().join(path)).unwrap().next().is_none();
        (empty("volumes") && empty(".forebay/trash") && empty(".forebay/volumes")).then_some(())
    });
}

#[test]
fn startup_errors_are_one_line_with_an_exit_code() {
    let place = Place::new("auto");
    let line = |expected: i32, words: &[&str]| {
        let (code, text) = place.fails();
        let last = text.lines().last().unwrap_or_default();
        assert!(code == expected && words.iter().all(|word| last.contains(word)), "{code}: {text}");
    };
    let nowhere = place.scratch.path().join("nowhere");
    place.configure("127.0.0.1:0", &nowhere);
    line(4, &["nowhere does not exist", "make the directory"]);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    place.configure(&address, &place.pool());
    line(5, &["server.listen", &address, "stop the server that has this port"]);
    std::fs::write(place.config(), "[server]\nlisten = 3\n").unwrap();
    line(3, &["server.toml:2: "]);
    std::fs::write(place.config(), "[[pool]]\nname = \"p\"\npath = \"p\"\n").unwrap();
    line(3, &["server.toml:3: pool.path: must be an absolute path"]);
    std::fs::remove_file(place.config()).unwrap();
    line(3, &["server.toml", "sample-config"]);

    place.configure("127.0.0.1:0", &place.pool());
    let _daemon = place.start();
    line(4, &["another forebay-server uses"]);
    let other = Place::new("auto");
    let text = std::fs::read_to_string(other.config()).unwrap();
    let text = text.replace(&other.socket().display().to_string(), &place.socket().display().to_string());
    std::fs::write(other.config(), text).unwrap();
    let (code, text) = other.fails();
    assert!(code == 5 && text.contains("another server listens there"), "{code}: {text}");
}
