//! A real server with one volume of a claim, and a client that uses it.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_e2e::kubernetes::kubectl::output_of;
use forebay_e2e::kubernetes::service::Service;
use forebay_e2e::sibling;
use forebay_proto::admin as api;
use forebay_proto::admin::admin_client::AdminClient;

const DEADLINE: Duration = Duration::from_secs(120);
const PASSWORD: &str = "a password of tests";

/// The volume, which is created for claim `team/data`.
pub(crate) const VOLUME: &str = "pvc-1";

pub(crate) struct Server {
    /// The folder with the programs.
    pub(crate) programs: PathBuf,
    /// The address of its metrics.
    pub(crate) http: SocketAddr,
    smb: SocketAddr,
    folder: tempfile::TempDir,
    _service: Service,
}

impl Server {
    /// Starts it with its metrics at this address.
    pub(crate) fn start(at: IpAddr) -> Self {
        let programs = sibling::binaries(
            Path::new(env!("CARGO_BIN_EXE_forebay-lab")),
            &["forebay-server", "forebay-bench", "kubectl-forebay"],
        );
        let programs = programs.expect("programs");
        let folder = tempfile::tempdir().expect("a folder");
        let (smb, http) = (free_port(), SocketAddr::new(at, free_port().port()));
        let (configuration, pool) = (folder.path().join("server.toml"), folder.path().join("pool"));
        let socket = folder.path().join("admin.sock");
        fs::create_dir(&pool).expect("a pool");
        let text = format!(
            "[server]\nlisten = [\"{smb}\"]\n[admin]\nsocket = {socket:?}\n[http]\nlisten = \"{http}\"\n\
             [[pool]]\nname = \"default\"\npath = {pool:?}\nquota = \"none\"\n"
        );
        fs::write(&configuration, text).expect("written");
        let mut command = Command::new(programs.join("forebay-server"));
        command.args(["run", "--config"]).arg(&configuration);
        let service = Service::start("forebay-server", &command, folder.path()).expect("a server");
        until("the admin socket", || UnixStream::connect(&socket).ok());
        make_volume(&socket);
        fs::write(folder.path().join("password"), PASSWORD).expect("written");
        Self { programs, http, smb, folder, _service: service }
    }

    /// A folder with the same lifetime as the server.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A client that reads, writes, flushes and renames for this many seconds.
    pub(crate) fn load(&self, seconds: u32) -> Command {
        let mut bench = Command::new(self.programs.join("forebay-bench"));
        let arguments = format!(
            "load --workload mixed --connections 1 --burst 1 --depth 1 --runs 1 --time {seconds} --files 1 --file-size 16M \
             --checkpoint-size 4M --share {VOLUME} --user {VOLUME} --against {} --password-file",
            self.smb
        );
        bench.args(arguments.split(' ')).arg(self.folder().join("password"));
        bench
    }

    /// Runs [`Self::load`] and waits for its end.
    pub(crate) fn be_used(&self, seconds: u32) {
        output_of(self.load(seconds), b"").expect("load");
    }
}

fn make_volume(socket: &Path) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let uri = format!("unix://{}", socket.display());
    let labels = [("name", "data"), ("namespace", "team")]
        .map(|(key, value)| (format!("csi.storage.k8s.io/pvc/{key}"), value.to_owned()));
    let request = api::CreateVolumeRequest {
        volume_id: VOLUME.to_owned(),
        capacity_bytes: 1 << 30,
        credentials: Some(api::Credentials { username: VOLUME.to_owned(), password: PASSWORD.to_owned() }),
        labels: labels.into(),
        ..api::CreateVolumeRequest::default()
    };
    runtime.block_on(async {
        let endpoint = tonic::transport::Endpoint::from_shared(uri).expect("an address");
        let channel = endpoint.connect().await.expect("the admin socket");
        AdminClient::new(channel).create_volume(request).await.expect("a volume");
    });
}

pub(crate) fn free_port() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.local_addr().expect("its address")
}

pub(crate) fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(done) = attempt() {
            return done;
        }
        assert!(Instant::now() < end, "{what} takes too long");
        std::thread::sleep(Duration::from_millis(100));
    }
}
