//! Our own server, running natively, with two volumes in its own folder.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use forebay_proto::admin::admin_client::AdminClient;
use forebay_proto::admin::{CreateVolumeRequest, Credentials, Quota};
use tonic::transport::Endpoint;

use super::kdc;
use super::target::{Server, Share, Target};
use crate::images::product;

/// How long the admin API may take to answer.
const ADMIN_DEADLINE: Duration = Duration::from_secs(20);

/// Starts `forebay-server` below `work` with a pool in the folder `pool`, and creates both volumes.
pub(super) fn start(work: &Path, pool: &Path, volume: Share, other: Share) -> Result<(Target, Server)> {
    let binary = product::binaries()?.join("forebay-server");
    if !binary.exists() {
        bail!("{} is not built; run:  cargo build -p forebay-server", binary.display());
    }
    let mut target = Target::local(volume, other);
    target.kerberos = Some(kdc::PRINCIPAL);
    let folder = work.join("forebay");
    let socket = folder.join("admin.sock");
    fs::create_dir_all(&folder)?;
    fs::create_dir_all(pool)?;
    let config = folder.join("server.toml");
    fs::write(
        &config,
        format!(
            "[server]\nlisten = [\"{}:{}\"]\nmin_dialect = \"2.0.2\"\nkeytab = {:?}\n[admin]\nsocket = {socket:?}\n[http]\nlisten = \"\"\n\
             [[pool]]\nname = \"foreign\"\npath = {pool:?}\nquota = \"none\"\n",
            target.host,
            target.port,
            kdc::keytab(work)
        ),
    )?;
    let log = folder.join("log");
    let output = File::create(&log)?;
    let child = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--"])
        .arg(&binary)
        .arg("run")
        .arg("--config")
        .arg(&config)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()
        .with_context(|| format!("start {}", binary.display()))?;
    let mut server = Server::new(child, &log);
    target.wait(&mut server)?;
    make_volumes(&socket, [&target.volume, &target.other]).with_context(|| server.log_tail())?;
    Ok((target, server))
}

fn make_volumes(socket: &Path, shares: [&Share; 2]) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display()))?.timeout(ADMIN_DEADLINE);
        // The SMB port may open a moment earlier than the admin socket.
        let deadline = Instant::now() + ADMIN_DEADLINE;
        let channel = loop {
            match endpoint.connect().await {
                Ok(channel) => break channel,
                Err(_) if Instant::now() < deadline => tokio::time::sleep(Duration::from_millis(20)).await,
                Err(error) => return Err(error).context("connect to the admin socket"),
            }
        };
        let mut admin = AdminClient::new(channel);
        for share in shares {
            let request = CreateVolumeRequest {
                volume_id: share.share.clone(),
                quota: Quota::None.into(),
                credentials: Some(Credentials {
                    username: share.user.clone(),
                    password: share.password.clone(),
                }),
                ..CreateVolumeRequest::default()
            };
            admin.create_volume(request).await.with_context(|| format!("make the volume {}", share.share))?;
        }
        Ok(())
    })
}
