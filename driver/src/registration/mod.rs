//! Registration with the kubelet (pluginregistration v1), as a replacement for a sidecar.
//!
//! The kubelet watches a directory for sockets and asks the process that listens on each which plugin it is. It asks again
//! after a restart if the socket still exists. If the directory is emptied, the kubelet considers the driver gone, so this
//! module creates the socket again.

pub(crate) mod authority;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use forebay_proto::registration::registration_server::{Registration, RegistrationServer};
use forebay_proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use tokio::sync::watch;
use tokio::time::{interval, sleep};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use crate::identity::DRIVER_NAME;
use crate::limits::REFUSALS_MAX;
use crate::registration::authority::Localhost;
use crate::socket;

/// Plugin type in the kubelet's API.
const PLUGIN_TYPE: &str = "CSIPlugin";

/// Versions of CSI. The kubelet only evaluates the major version.
const CSI_VERSIONS: [&str; 1] = ["1.0.0"];

/// Interval of the check that the socket still exists.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// Delay before the driver retries after a refusal, multiplied by the number of refusals.
const REFUSED_DELAY: Duration = Duration::from_secs(1);

/// The last result that the kubelet reported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// No result yet.
    #[default]
    Waiting,
    /// The driver is registered.
    Registered,
    /// It is not registered, for this reason.
    Refused(String),
}

#[derive(Clone, Debug)]
struct Service {
    csi_socket: String,
    outcome: watch::Sender<Outcome>,
}

/// Keeps the driver registered until `stop`. The CSI socket must already be listening, because the kubelet calls it before it
/// reports a result. An error means that the driver cannot be registered and would never be called.
pub(crate) async fn run(
    registry: PathBuf,
    csi_socket: PathBuf,
    outcome: watch::Sender<Outcome>,
    mut stop: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    if !registry.is_dir() {
        bail!(
            "{} is not a directory: it belongs to the kubelet and must be mounted in this container (--plugins-registry)",
            registry.display()
        );
    }
    let mut refusals = 0;
    let csi_socket = csi_socket.to_str().context("the path of the CSI socket is not UTF-8")?.to_owned();
    let path = registry.join(format!("{DRIVER_NAME}-reg.sock"));
    loop {
        let served = tokio::select! {
            served = serve(&path, &csi_socket, &outcome) => served?,
            // An error means that the sender was dropped, which also ends the driver.
            // Dropping the future removes the socket; the kubelet then correctly considers the driver gone.
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
        };
        match served {
            Ended::Vanished => {
                warn!(path = %path.display(), "the registration socket has vanished; recreating it")
            }
            Ended::Refused { reason, after_success } => {
                refusals = if after_success { 1 } else { refusals + 1 };
                if refusals >= REFUSALS_MAX {
                    bail!("the kubelet refused to register the driver: {reason}");
                }
                // The kubelet does not retry a socket that it has refused, only a new one. It may only have been busy.
                warn!(reason, "the kubelet refused to register the driver, asking once more");
                tokio::select! {
                    () = sleep(REFUSED_DELAY * refusals) => {}
                    _ = stop.wait_for(|stop| *stop) => return Ok(()),
                }
            }
        }
        outcome.send_replace(Outcome::Waiting);
        wait_for(&registry, &mut stop).await;
    }
}

/// Why the serving of one socket ended.
enum Ended {
    /// Another process removed it.
    Vanished,
    /// The kubelet refused the driver, possibly after it had registered the driver before.
    Refused { reason: String, after_success: bool },
}

/// Serves one socket until it is no longer the one at `path`.
async fn serve(path: &Path, csi_socket: &str, outcome: &watch::Sender<Outcome>) -> anyhow::Result<Ended> {
    let (listener, own) = socket::listen_at(path).context("register with the kubelet")?;
    info!(path = %path.display(), csi_socket, "waiting for the kubelet to register the driver");
    let service = Service { csi_socket: csi_socket.to_owned(), outcome: outcome.clone() };
    let mut outcomes = outcome.subscribe();
    let serving = Server::builder()
        .add_service(RegistrationServer::new(service))
        .serve_with_incoming(UnixListenerStream::new(listener).map(|stream| stream.map(Localhost::new)));
    tokio::select! {
        served = serving => {
            served.context("serve the registration socket")?;
            bail!("the registration socket was closed");
        }
        () = own.vanished(WATCH_INTERVAL) => Ok(Ended::Vanished),
        ended = refused(&mut outcomes) => Ok(ended),
    }
}

async fn refused(outcomes: &mut watch::Receiver<Outcome>) -> Ended {
    let mut after_success = false;
    loop {
        match &*outcomes.borrow_and_update() {
            Outcome::Refused(reason) => return Ended::Refused { reason: reason.clone(), after_success },
            Outcome::Registered => after_success = true,
            Outcome::Waiting => {}
        }
        if outcomes.changed().await.is_err() {
            // The sender lives as long as the server, which then ends this wait.
            std::future::pending::<()>().await;
        }
    }
}

/// Waits until the kubelet's directory exists again; the kubelet creates it on startup.
async fn wait_for(registry: &Path, stop: &mut watch::Receiver<bool>) {
    let mut ticks = interval(WATCH_INTERVAL);
    while !registry.is_dir() {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

#[tonic::async_trait]
impl Registration for Service {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: PLUGIN_TYPE.into(),
            name: DRIVER_NAME.into(),
            endpoint: self.csi_socket.clone(),
            supported_versions: CSI_VERSIONS.map(str::to_owned).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        let outcome = if status.plugin_registered {
            info!("the kubelet has registered the driver");
            Outcome::Registered
        } else {
            Outcome::Refused(status.error)
        };
        self.outcome.send_replace(outcome);
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Instant;

    use forebay_proto::registration::registration_client::RegistrationClient;
    use tempfile::TempDir;
    use tokio::task::JoinHandle;
    use tonic::transport::{Channel, Endpoint};

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(60);

    /// A driver to be registered; the test acts as the kubelet.
    struct Driver {
        dir: TempDir,
        outcome: watch::Receiver<Outcome>,
        stop: watch::Sender<bool>,
        running: JoinHandle<anyhow::Result<()>>,
    }

    impl Driver {
        fn start() -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            let (outcome, outcomes) = watch::channel(Outcome::default());
            let (stop, stopping) = watch::channel(false);
            let registry = dir.path().to_owned();
            let csi = PathBuf::from("/var/lib/kubelet/plugins/csi.forebay.io/csi.sock");
            let running = tokio::spawn(run(registry, csi, outcome, stopping));
            Self { dir, outcome: outcomes, stop, running }
        }

        fn socket(&self) -> PathBuf {
            self.dir.path().join("csi.forebay.io-reg.sock")
        }

        async fn connect(&self) -> RegistrationClient<Channel> {
            let endpoint =
                Endpoint::from_shared(format!("unix://{}", self.socket().display())).expect("an endpoint");
            let started = Instant::now();
            loop {
                match endpoint.connect().await {
                    Ok(channel) => return RegistrationClient::new(channel),
                    Err(error) => assert!(started.elapsed() < DEADLINE, "{error}"),
                }
                tokio::task::yield_now().await;
            }
        }

        async fn until(&mut self, wanted: Outcome) {
            let waiting = self.outcome.wait_for(|outcome| *outcome == wanted);
            tokio::time::timeout(DEADLINE, waiting).await.expect("in time").expect("it runs");
        }

        async fn end(self) -> anyhow::Result<()> {
            tokio::time::timeout(DEADLINE, self.running).await.expect("in time").expect("no panic")
        }
    }

    async fn registered(client: &mut RegistrationClient<Channel>) {
        let status = RegistrationStatus { plugin_registered: true, error: String::new() };
        client.notify_registration_status(status).await.expect("taken");
    }

    #[tokio::test]
    async fn driver_registers_with_the_kubelet() {
        let mut driver = Driver::start();
        let mut kubelet = driver.connect().await;
        let info = kubelet.get_info(InfoRequest {}).await.expect("an answer").into_inner();
        assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", "csi.forebay.io"));
        assert_eq!(info.endpoint, "/var/lib/kubelet/plugins/csi.forebay.io/csi.sock");
        assert_eq!(info.supported_versions, ["1.0.0"]);
        registered(&mut kubelet).await;
        driver.until(Outcome::Registered).await;

        // A restarted kubelet asks again.
        let mut again = driver.connect().await;
        again.get_info(InfoRequest {}).await.expect("an answer again");

        driver.stop.send_replace(true);
        let socket = driver.socket();
        driver.end().await.expect("ends well");
        assert!(!socket.exists());
    }

    /// The kubelet's plugin watcher, byte by byte: the authority is the socket's path, referenced by its index in the second
    /// call.
    #[tokio::test]
    async fn requests_with_the_socket_path_as_authority_are_answered() {
        use authority::tests::{authority, call, frame};
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        let driver = Driver::start();
        driver.connect().await;
        let mut stream = tokio::net::UnixStream::connect(driver.socket()).await.expect("it listens");
        let path = "/pluginregistration.Registration/GetInfo";
        let shown = driver.socket().display().to_string().replace('/', "%2F");
        let mut sent = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &frame(4, 0, 0, &[])].concat();
        // RFC 7541 2.3.3: the dynamic table begins at 62, with the newest entry first; three entries follow the authority.
        for (stream, authority) in [(1, authority(&shown)), (3, vec![0x80 | 65])] {
            sent.extend(frame(1, 4, stream, &call(path, &authority)));
            sent.extend(frame(0, 1, stream, &[0; 5]));
        }
        stream.write_all(&sent).await.expect("taken");
        let mut answer = Vec::new();
        let plugin = b"CSIPlugin";
        let read = async {
            while answer.windows(plugin.len()).filter(|w| w == plugin).count() < 2 {
                assert!(
                    stream.read_buf(&mut answer).await.expect("answers") > 0,
                    "{}",
                    answer.escape_ascii()
                );
            }
        };
        tokio::time::timeout(DEADLINE, read).await.unwrap_or_else(|_| panic!("{}", answer.escape_ascii()));
    }

    #[tokio::test]
    async fn removed_socket_is_recreated() {
        let mut driver = Driver::start();
        registered(&mut driver.connect().await).await;
        driver.until(Outcome::Registered).await;
        fs::remove_file(driver.socket()).expect("there");
        driver.until(Outcome::Waiting).await;
        registered(&mut driver.connect().await).await;
        driver.until(Outcome::Registered).await;

        // Removes the whole directory, as when a node's kubelet is reinstalled.
        fs::remove_dir_all(driver.dir.path()).expect("there");
        driver.until(Outcome::Waiting).await;
        fs::create_dir(driver.dir.path()).expect("free");
        registered(&mut driver.connect().await).await;
        driver.until(Outcome::Registered).await;
    }

    async fn refuse(driver: &Driver) {
        let status = RegistrationStatus { plugin_registered: false, error: "name taken".into() };
        // The driver may end before the response is sent.
        let _ = driver.connect().await.notify_registration_status(status).await;
    }

    #[tokio::test]
    async fn repeated_refusals_stop_the_driver_with_the_kubelets_error() {
        let mut driver = Driver::start();
        for _ in 1..REFUSALS_MAX {
            refuse(&driver).await;
            driver.until(Outcome::Waiting).await;
        }
        refuse(&driver).await;
        let error = driver.end().await.expect_err("an end").to_string();
        assert_eq!(error, "the kubelet refused to register the driver: name taken");
    }

    #[tokio::test]
    async fn driver_recovers_from_temporary_refusals() {
        let mut driver = Driver::start();
        for _ in 0..REFUSALS_MAX {
            refuse(&driver).await;
            driver.until(Outcome::Waiting).await;
            registered(&mut driver.connect().await).await;
            driver.until(Outcome::Registered).await;
        }
        driver.stop.send_replace(true);
        driver.end().await.expect("ends well");
    }

    #[tokio::test]
    async fn missing_plugin_registry_directory_is_an_error() {
        let (outcome, _) = watch::channel(Outcome::default());
        let (_stop, stopping) = watch::channel(false);
        let error =
            run("/nonexistent".into(), "/csi.sock".into(), outcome, stopping).await.expect_err("no folder");
        assert!(error.to_string().contains("--plugins-registry"), "{error}");
    }
}
