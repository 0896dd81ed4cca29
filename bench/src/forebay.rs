//! Our own server in the comparison.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use forebay_e2e::host;

use crate::place::{Place, SHARE, Server, USER, free_port};

/// Beside this binary, or in `$FOREBAY_BINARIES`.
pub(crate) fn default_binary() -> PathBuf {
    forebay_e2e::images::product::binaries().unwrap_or_default().join("forebay-server")
}

/// Starts it with one volume; the port is in the result.
pub(crate) fn start(place: &Place, name: &'static str, binary: &Path, option: &str) -> Result<(Server, u16)> {
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
    let mut create = Command::new(binary);
    create.args(["volume", "create", SHARE, "--size", "1GiB", "--quota", "none", "--username", USER]);
    create.arg("--password-file").arg(password).arg("--socket").arg(socket);
    host::run(&mut create).with_context(|| format!("make a volume; {name} said:\n{}", server.said()))?;
    Ok((server, port))
}
