//! Our own server in the comparison.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use forebay_e2e::host;

use crate::place::{Place, SHARE, Server, USER, free_port};

/// The server next to this binary, or in `$FOREBAY_BINARIES`.
pub(crate) fn default_binary() -> PathBuf {
    forebay_e2e::images::product::binaries().unwrap_or_default().join("forebay-server")
}

/// The volume for bursts, which is also the name of its user.
pub(crate) const BURST_SHARE: &str = "checkpoints";

/// A running server.
pub(crate) struct Started {
    pub(crate) server: Server,
    pub(crate) port: u16,
    binary: PathBuf,
    socket: PathBuf,
    password: PathBuf,
}

/// Starts it with one volume.
pub(crate) fn start(place: &Place, name: &'static str, binary: &Path, option: &str) -> Result<Started> {
    if !binary.exists() {
        bail!("{} is not built; run:  cargo build --release -p forebay-server", binary.display());
    }
    let home = place.path().join(name);
    let pool = home.join("pool");
    fs::create_dir_all(&pool)?;
    let port = free_port()?;
    let socket = home.join("admin.sock");
    let configuration = home.join("server.toml");
    fs::write(
        &configuration,
        format!(
            "[server]\nlisten = [\"127.0.0.1:{port}\"]\n{option}\n[admin]\nsocket = {socket:?}\n[http]\nlisten = \"\"\n\
             [log]\nlevel = \"warn\"\n[[pool]]\nname = \"bench\"\npath = {pool:?}\nquota = \"none\"\n"
        ),
    )?;
    let mut command = Command::new(binary);
    command.args(["run", "--config"]).arg(&configuration);
    let mut server = Server::start(place, name, &command, false)?;
    server.wait_for_port(port)?;
    server.wait_until(|| UnixStream::connect(&socket).is_ok())?;
    let password = place.write_secret(&format!("{name}/password"), &format!("{}\n", place.password()))?;
    let started = Started { server, port, binary: binary.to_owned(), socket, password };
    started.add_volume(SHARE, USER)?;
    Ok(started)
}

impl Started {
    fn add_volume(&self, share: &str, user: &str) -> Result<()> {
        let mut create = self.volume(&["create", share, "--size", "1GiB", "--quota", "none"]);
        create.args(["--username", user, "--password-file"]).arg(&self.password);
        host::run(&mut create).with_context(|| format!("make a volume; it said:\n{}", self.server.said()))?;
        Ok(())
    }

    /// Creates [`BURST_SHARE`], a volume of low priority that may write 512 MiB per second.
    pub(crate) fn add_limited_volume(&self) -> Result<()> {
        self.add_volume(BURST_SHARE, BURST_SHARE)?;
        let limit = ["set-qos", BURST_SHARE, "--bytes-per-second", "512MiB", "--priority", "low"];
        host::run(&mut self.volume(&limit)).context("limit a volume")?;
        Ok(())
    }

    /// A `forebay-server volume …` command.
    fn volume(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg("volume").args(arguments).arg("--socket").arg(&self.socket);
        command
    }
}
