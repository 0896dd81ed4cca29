//! Samba's own server in the nodes' root file system: a reference for the runner and its checks.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result};

use super::target::{Server, Share, Target, private};
use crate::cache::Cache;
use crate::native;

const START: &str = r#"
while read -r user password; do
    useradd -M "$user"
    printf '%s\n%s\n' "$password" "$password" | smbpasswd -c /scratch/samba/smb.conf -s -a "$user"
done < /scratch/samba/users
exec smbd --foreground --no-process-group -s /scratch/samba/smb.conf
"#;

/// Starts smbd with two shares below `work`.
pub(super) fn start(cache: &Cache, work: &Path, volume: Share, other: Share) -> Result<(Target, Server)> {
    let target = Target::local(volume, other);
    let folder = work.join("samba");
    for name in ["lock", "state", "cache", "private", "ncalrpc", "pid", "volume", "other"] {
        fs::create_dir_all(folder.join(name))?;
    }
    let mut config = format!(
        "[global]\nserver role = standalone server\nworkgroup = FOREBAY\nsmb ports = {port}\ninterfaces = lo\n\
         bind interfaces only = yes\nlock directory = /scratch/samba/lock\nstate directory = /scratch/samba/state\n\
         cache directory = /scratch/samba/cache\nprivate dir = /scratch/samba/private\nncalrpc dir = /scratch/samba/ncalrpc\n\
         pid directory = /scratch/samba/pid\nlog file = /scratch/samba/log\nmap to guest = never\nrestrict anonymous = 2\n\
         server min protocol = SMB2_02\ndisable spoolss = yes\nload printers = no\nsmb3 unix extensions = no\n\
         ea support = yes\nstore dos attributes = yes\nvfs objects = streams_xattr\n",
        port = target.port
    );
    let mut users = String::new();
    for (share, name) in [(&target.volume, "volume"), (&target.other, "other")] {
        let path = folder.join(name);
        fs::set_permissions(&path, Permissions::from_mode(0o777))?;
        let (share_name, user) = (&share.share, &share.user);
        config.push_str(&format!(
            "[{share_name}]\npath = /scratch/samba/{name}\nread only = no\nvalid users = {user}\n"
        ));
        users.push_str(&format!("{user} {}\n", share.password));
    }
    fs::write(folder.join("smb.conf"), config)?;
    private(&folder.join("users"), &users)?;
    let log = folder.join("output");
    let output = File::create(&log)?;
    let child = native::command(cache, work, &["sh".into(), "-euc".into(), START.into()])?
        // When it ends it kills its whole process group, so this process must be in another one.
        .process_group(0)
        // smbd ends when its standard input is closed, and therefore with this process, regardless of how that ends.
        .stdin(Stdio::piped())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()
        .context("start unshare")?;
    let mut server = Server::new(child, &log);
    target.wait(&mut server)?;
    Ok((target, server))
}
