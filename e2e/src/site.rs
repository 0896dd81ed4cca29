//! A lab with a file server on its storage node, which the scenarios run against.

use std::cell::Cell;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::guest::calls::grpc::{AdminCall, AdminRequest, Answer, CsiCall, CsiRequest};
use crate::guest::calls::mounting::Mount;
use crate::guest::calls::space::Space;
use crate::lab::{Lab, Node};
use crate::progress::say;

/// Which server is on the storage node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Ours.
    Forebay,
    /// Debian's Samba, to show that a scenario is right where ours fails it.
    Samba,
}

/// The server's node.
pub const STORAGE: &str = "storage";
/// Mount point of its disk.
pub const POOL: &str = "/srv/pool";
/// A second, smaller pool on ext4, the other file system that we support quotas on. It is in a file on the first pool.
const POOL_EXT4: &str = "/srv/pool-ext4";
/// Path of our server's configuration on the storage node.
pub const SERVER_CONFIG: &str = "/etc/forebay/server.toml";
/// The server's admin socket.
pub const ADMIN_SOCKET: &str = "/run/forebay/admin.sock";
/// The driver's socket, on every node.
pub const CSI_SOCKET: &str = "/run/forebay/csi.sock";
/// Volumes that the Samba reference can have in one lab: its shares are configured in advance.
const SAMBA_VOLUMES: u32 = 64;

/// A lab, its server, and the volumes made so far.
#[derive(Debug)]
pub struct Site {
    lab: Lab,
    kind: Kind,
    made: Cell<u32>,
}

/// A volume and its credentials.
#[derive(Debug, Clone)]
pub struct Volume {
    /// Also the share's name.
    pub id: String,
    /// SMB user.
    pub username: String,
    /// Its password.
    pub password: String,
    /// Its folder on the storage node.
    pub folder: String,
}

impl Site {
    /// Formats the storage node's disk and starts the server. For our server, also starts the driver on every node.
    pub fn start(lab: Lab, kind: Kind) -> Result<Self> {
        let site = Self { lab, kind, made: Cell::new(0) };
        let storage = site.storage();
        storage
            .run(&format!("mkfs.xfs -q /dev/vdd && mkdir -p {POOL} && mount -o prjquota /dev/vdd {POOL}"))
            .context("prepare the pool")?;
        match kind {
            Kind::Samba => site.configure_samba()?,
            Kind::Forebay => {
                storage
                    .run(&format!(
                        "modprobe -a loop ext4; truncate -s 256M {POOL}/ext4.img
                         mkfs.ext4 -q -O quota,project -E quotatype=prjquota {POOL}/ext4.img
                         mkdir -p {POOL_EXT4} && mount -o loop,prjquota {POOL}/ext4.img {POOL_EXT4}"
                    ))
                    .context("prepare the pool on ext4")?;
                storage.put(SERVER_CONFIG, forebay_config(storage.address()).as_bytes(), 0o600)?;
            }
        }
        site.start_server()?;
        if kind == Kind::Forebay {
            site.start_drivers()?;
        }
        Ok(site)
    }

    /// The lab.
    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    /// A node.
    pub fn node(&self, name: &str) -> &Node {
        self.lab.node(name)
    }

    /// The server's node.
    pub fn storage(&self) -> &Node {
        self.lab.node(STORAGE)
    }

    /// Which server this is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    fn service(&self) -> &'static str {
        match self.kind {
            Kind::Forebay => "forebay-server",
            Kind::Samba => "smbd",
        }
    }

    /// Starts the server and waits until it accepts connections.
    pub fn start_server(&self) -> Result<()> {
        self.start_server_by(&[])
    }

    /// Same, but through a command that runs its arguments.
    pub fn start_server_by(&self, wrapper: &[&str]) -> Result<()> {
        let storage = self.storage();
        match self.kind {
            Kind::Forebay => {
                let server = ["forebay-server", "run", "--config", SERVER_CONFIG];
                storage.start_service("forebay-server", &[wrapper, &server].concat())
            }
            Kind::Samba => storage.start_service("smbd", &["smbd", "--foreground", "--no-process-group"]),
        }?;
        storage
            .wait_until("the server listens on port 445, or ends", Duration::from_secs(20), || {
                Ok(!storage.service_runs(self.service())?
                    || storage
                        .attempt(&["nc", "-z", storage.address(), "445"], &[], Duration::from_secs(5))?
                        .success())
            })
            .and_then(|()| {
                ensure!(storage.service_runs(self.service())?, "the server has ended");
                Ok(())
            })
            .with_context(|| {
                format!("log of {}:\n{}", self.service(), storage.service_log(self.service()))
            })?;
        if self.kind == Kind::Forebay {
            storage.wait_until("the server answers admin calls", Duration::from_secs(10), || {
                Ok(self.admin(AdminRequest::GetServerInfo)?.code == 0)
            })?;
        }
        Ok(())
    }

    /// Sends SIGTERM and waits until it has ended.
    pub fn end_server(&self) -> Result<()> {
        ensure!(self.storage().signal_service(self.service(), "TERM")?, "the server was not running");
        Ok(())
    }

    /// Sends SIGKILL.
    pub fn kill_server(&self) -> Result<()> {
        let storage = self.storage();
        match self.kind {
            Kind::Forebay => {
                ensure!(storage.signal_service("forebay-server", "KILL")?, "the server was not running")
            }
            // Samba has a process per client: kill all of them.
            Kind::Samba => {
                storage.run("pkill -KILL -x smbd; while pgrep -x smbd >/dev/null; do sleep 0.05; done")?;
            }
        }
        Ok(())
    }

    /// The end of the server's log, for a failed scenario.
    pub fn server_log(&self) -> String {
        self.storage().service_log(self.service())
    }

    fn start_drivers(&self) -> Result<()> {
        for node in self.lab.nodes() {
            let mode = if node.name() == STORAGE { "controller" } else { "node" };
            let endpoint = format!("unix://{CSI_SOCKET}");
            let admin = format!("unix://{ADMIN_SOCKET}");
            let mut argv = vec!["forebay-csi", "--mode", mode, "--endpoint", &endpoint];
            if mode == "controller" {
                argv.extend(["--admin-endpoint", &admin]);
            } else {
                argv.extend(["--node-id", node.name(), "--metrics-address", "127.0.0.1:9448"]);
            }
            node.run("mkdir -p /run/forebay")?;
            node.start_service("forebay-csi", &argv)?;
        }
        for node in self.lab.nodes() {
            node.wait_until("the driver is ready", Duration::from_secs(10), || {
                Ok(self.csi(node, CsiRequest::Probe)?.ok()?.bytes == 1)
            })
            .with_context(|| {
                format!("log of forebay-csi on {}:\n{}", node.name(), node.service_log("forebay-csi"))
            })?;
        }
        Ok(())
    }

    /// Calls the driver on this node.
    pub fn csi(&self, node: &Node, request: CsiRequest) -> Result<Answer> {
        // Staging mounts the volume: allow as much time as a mount.
        let deadline = Duration::from_secs(60);
        node.call_within("csi", &CsiCall { socket: CSI_SOCKET.into(), request }, deadline)
    }

    /// Calls the server.
    pub fn admin(&self, request: AdminRequest) -> Result<Answer> {
        self.storage().call("admin", &AdminCall { socket: ADMIN_SOCKET.into(), request })
    }

    /// Fails unless our server reports one session on this volume, with payload over this transport.
    pub fn must_go(&self, volume: &Volume, transport: &str) -> Result<()> {
        let found = self.admin(AdminRequest::ListTransports { id: volume.id.clone() })?.ok()?.names;
        ensure!(found == [transport], "the list of sessions says {found:?}, not {transport}");
        Ok(())
    }

    /// A new volume with its own credentials.
    pub fn volume(&self, bytes: u64) -> Result<Volume> {
        self.volume_in("default", bytes)
    }

    /// Same, in this pool of our server: `default` (XFS) or `ext4`.
    pub fn volume_in(&self, pool: &str, bytes: u64) -> Result<Volume> {
        self.make_volume(pool, bytes, "")
    }

    /// A new volume of our server, created from a snapshot.
    pub fn volume_of(&self, snapshot: &str, bytes: u64) -> Result<Volume> {
        self.make_volume("", bytes, snapshot)
    }

    fn make_volume(&self, pool: &str, bytes: u64, snapshot: &str) -> Result<Volume> {
        let number = self.made.get() + 1;
        self.made.set(number);
        let id = format!("volume-{number}");
        let volume = Volume {
            username: format!("user-{number}"),
            password: format!("secret-of-{number}!"),
            folder: format!("{POOL}/volumes/{id}"),
            id,
        };
        match self.kind {
            Kind::Forebay => {
                let request = AdminRequest::CreateVolume {
                    id: volume.id.clone(),
                    pool: pool.to_owned(),
                    bytes,
                    username: volume.username.clone(),
                    password: volume.password.clone(),
                    snapshot: snapshot.to_owned(),
                };
                self.admin(request)?.ok().context("create a volume")?;
            }
            Kind::Samba => {
                ensure!(number <= SAMBA_VOLUMES, "the Samba reference has {SAMBA_VOLUMES} volumes");
                self.storage().run(&format!(
                    "mkdir -p {folder} && xfs_quota -x -c 'project -s -p {folder} {number}' \
                     -c 'limit -p bhard={bytes} {number}' {POOL} >/dev/null
                     useradd -M -s /usr/sbin/nologin {user} && printf '%s\\n%s\\n' '{password}' '{password}' | \
                     smbpasswd -s -a {user} >/dev/null",
                    folder = volume.folder,
                    user = volume.username,
                    password = volume.password,
                ))?;
            }
        }
        Ok(volume)
    }

    /// Raises a volume's capacity.
    pub fn expand(&self, volume: &Volume, bytes: u64) -> Result<()> {
        match self.kind {
            Kind::Forebay => {
                self.admin(AdminRequest::ExpandVolume { id: volume.id.clone(), bytes })?.ok()?;
            }
            Kind::Samba => {
                let number = self.made.get();
                self.storage().run(&format!("xfs_quota -x -c 'limit -p bhard={bytes} {number}' {POOL}"))?;
            }
        }
        Ok(())
    }

    /// Removes a volume that no client has open.
    pub fn delete(&self, volume: &Volume) -> Result<()> {
        self.delete_with(volume, false)
    }

    /// Removes a volume even if it is open. After a connection loss, the server keeps durable handles for a minute.
    pub fn delete_by_force(&self, volume: &Volume) -> Result<()> {
        self.delete_with(volume, true)
    }

    fn delete_with(&self, volume: &Volume, force: bool) -> Result<()> {
        match self.kind {
            Kind::Forebay => {
                self.admin(AdminRequest::DeleteVolume { id: volume.id.clone(), force })?.ok()?;
            }
            Kind::Samba => {
                self.storage().run(&format!("rm -rf {}", volume.folder))?;
            }
        }
        Ok(())
    }

    /// Mounts a volume without the driver, with these options added to the usual ones.
    pub fn mount<'a>(
        &self,
        node: &'a Node,
        volume: &Volume,
        options: &[(&str, &str)],
    ) -> Result<Mounted<'a>> {
        // Two mounts of one volume on one node must not share a mount point.
        let number = self.made.get();
        let at = format!("/mnt/{}-{}-{}", volume.id, number, options.len());
        self.mount_at(node, volume, &at, options)
    }

    /// Same, at this mount point.
    pub fn mount_at<'a>(
        &self,
        node: &'a Node,
        volume: &Volume,
        at: &str,
        options: &[(&str, &str)],
    ) -> Result<Mounted<'a>> {
        let mut all = vec![("file_mode", "0777"), ("dir_mode", "0777"), ("noperm", ""), ("mfsymlinks", "")];
        all.extend(options);
        self.mount_with(node, volume, at, &all)
    }

    /// Restarts the server with this key in its section `[server]` and a value in TOML. Dropping the result restarts it
    /// without the key.
    pub fn switched(&self, key: &'static str, value: &str) -> Result<Switched<'_>> {
        self.storage().run(&format!("sed -i 's|^\\[server\\]$|&\\n{key} = {value}|' {SERVER_CONFIG}"))?;
        let switched = Switched { site: self, key };
        self.end_server()?;
        self.start_server()?;
        Ok(switched)
    }

    /// Mounts a volume on a node with the owner and mode of each file, which the node enforces.
    pub fn mount_posix<'a>(&self, node: &'a Node, volume: &Volume) -> Result<Mounted<'a>> {
        self.mount_posix_with(node, volume, &[])
    }

    /// Same, with these options added to the usual ones.
    pub fn mount_posix_with<'a>(
        &self,
        node: &'a Node,
        volume: &Volume,
        options: &[(&str, &str)],
    ) -> Result<Mounted<'a>> {
        // For an open with O_CREAT that finds or creates a file, Linux 7.2 takes owner and mode from the security descriptor.
        let mut all = vec![("posix", ""), ("idsfromsid", ""), ("modefromsid", ""), ("symlink", "native")];
        all.extend(options);
        self.mount_with(node, volume, &format!("/mnt/{}-posix", volume.id), &all)
    }

    fn mount_with<'a>(
        &self,
        node: &'a Node,
        volume: &Volume,
        at: &str,
        options: &[(&str, &str)],
    ) -> Result<Mounted<'a>> {
        let mut all = vec![
            ("username", volume.username.as_str()),
            // A separate session and connection: what one scenario negotiates must not affect another.
            ("nosharesock", ""),
            ("actimeo", "1"),
            ("hard", ""),
        ];
        if !volume.password.is_empty() {
            all.push(("password", &volume.password));
        }
        if !options.iter().any(|(name, _)| *name == "vers") {
            all.push(("vers", "3.1.1"));
        }
        all.extend(options);
        let options = all.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let server = self.storage().address().to_owned();
        node.call::<()>("mount", &Mount { server, share: volume.id.clone(), at: at.into(), options })?;
        Ok(Mounted { node, at: at.to_owned() })
    }

    fn configure_samba(&self) -> Result<()> {
        let mut config = "[global]\n server role = standalone server\n map to guest = never\n disable netbios = yes\n \
                          smb ports = 445\n \
                          idmap config * : range = 100000-199999\n load printers = no\n log level = 1\n log file = /var/log/smbd.log\n \
                          smb3 unix extensions = yes\n create mask = 07777\n directory mask = 07777\n"
            .to_owned();
        for number in 1..=SAMBA_VOLUMES {
            config.push_str(&format!(
                "[volume-{number}]\n path = {POOL}/volumes/volume-{number}\n valid users = user-{number}\n \
                 force user = root\n case sensitive = yes\n read only = no\n"
            ));
        }
        self.storage().put("/etc/samba/smb.conf", config.as_bytes(), 0o644)?;
        self.storage().run("mkdir -p /run/samba /var/lib/samba/private /var/cache/samba /var/log/samba")?;
        Ok(())
    }
}

/// A mounted volume; unmounted when dropped.
#[derive(Debug)]
pub struct Mounted<'a> {
    node: &'a Node,
    at: String,
}

impl Mounted<'_> {
    /// Its mount point.
    pub fn path(&self) -> &str {
        &self.at
    }

    /// A path in it.
    pub fn join(&self, below: &str) -> String {
        format!("{}/{below}", self.at)
    }

    /// Its node.
    pub fn node(&self) -> &Node {
        self.node
    }

    /// The values that `df` reports.
    pub fn space(&self) -> Result<Space> {
        self.node.call("space", &self.at)
    }

    /// Unmounts it. Fails if the unmount fails.
    pub fn unmount(self) -> Result<()> {
        let result = self.node.call::<()>("unmount", &self.at);
        std::mem::forget(self);
        result
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        // After a failure, unmount lazily so that the next scenario starts from an unmounted node.
        let _ = self.node.attempt(&["umount", "-l", &self.at], &[], Duration::from_secs(10));
    }
}

fn forebay_config(address: &str) -> String {
    // Overcommitted: a failed scenario leaves its volume behind.
    format!(
        "[server]\nlisten = [\"0.0.0.0:445\"]\nadvertise = [\"{address}:445\"]\nmin_dialect = \"2.1\"\n\
         [admin]\nsocket = \"{ADMIN_SOCKET}\"\n\
         [[pool]]\nname = \"default\"\npath = \"{POOL}\"\nquota = \"project\"\novercommit = 4.0\n\
         [[pool]]\nname = \"ext4\"\npath = \"{POOL_EXT4}\"\nquota = \"project\"\novercommit = 4.0\n"
    )
}

/// Our server with a setting that it does not have otherwise.
#[derive(Debug)]
pub struct Switched<'a> {
    site: &'a Site,
    key: &'static str,
}

impl Switched<'_> {
    fn off(&self) -> Result<()> {
        self.site.storage().run(&format!("sed -i '/^{}/d' {SERVER_CONFIG}", self.key))?;
        self.site.end_server()?;
        self.site.start_server()
    }
}

impl Drop for Switched<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.off() {
            say(format!("the server does not start again as it was: {error:#}"));
        }
    }
}

/// Fails unless the products of this kind are built.
pub fn check_built(kind: Kind) -> Result<()> {
    if kind == Kind::Forebay {
        for name in ["forebay-server", "forebay-csi"] {
            if !crate::images::product::has(name) {
                bail!("{name} is not built beside forebay-lab; run:  cargo build --release");
            }
        }
    }
    Ok(())
}
