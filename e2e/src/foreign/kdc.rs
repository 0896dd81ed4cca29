//! A lane's own KDC (MIT's, from Debian's krb5-kdc), so that users of our server can log on with Kerberos.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::room::Room;
use super::target::{Principal, Share, private};
use crate::cache::Cache;
use crate::{native, rundir};

/// Our server's principal in the realm of `foreign/kdc.sh`.
pub(super) const PRINCIPAL: Principal = Principal { name: "server.forebay.test", realm: "FOREBAY.TEST" };

/// Time limit for creating the realm.
const LIMIT: Duration = Duration::from_secs(60);

/// The server's keytab in a lane's folder.
pub(super) fn keytab(work: &Path) -> PathBuf {
    work.join("kdc/server.keytab")
}

/// The KDC. Stopped when dropped.
#[derive(Debug)]
pub(super) struct Kdc(Child);

impl Kdc {
    /// Creates the realm with these users, and starts the KDC in this thread's network namespace.
    pub(super) fn start(cache: &Cache, room: &mut Room, work: &Path, users: [&Share; 2]) -> Result<Self> {
        let users: String =
            users.iter().map(|share| format!("{} {}\n", share.user, share.password)).collect();
        private(&work.join("users"), &users)?;
        private(&work.join("kdc.sh"), include_str!("../../foreign/kdc.sh"))?;
        let run = "exec sh -eu /scratch/kdc.sh /scratch/kdc 127.0.0.1 < /scratch/users";
        let done = room.run(&["sh", "-euc", run], LIMIT)?;
        if done.status != 0 {
            bail!("kdc.sh ended with {}:\n{}", done.status, done.output);
        }
        let run = "KRB5_CONFIG=/scratch/kdc/krb5.conf KRB5_KDC_PROFILE=/scratch/kdc/kdc.conf exec krb5kdc -n";
        let child = native::plain_command(cache, work, &["sh".into(), "-c".into(), run.into()])?
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("start unshare")?;
        rundir::guard_process(child.id());
        Ok(Self(child))
    }
}

impl Drop for Kdc {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        rundir::release_process(self.0.id());
    }
}
