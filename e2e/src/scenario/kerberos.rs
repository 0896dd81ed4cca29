//! Mounts with tickets of a real KDC (`sec=krb5`): the kernel requests one from cifs.upcall whenever it needs a session.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{MIB, ONE, Scenario, ours};
use crate::lab::Node;
use crate::site::{Site, Volume};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        ours("kerberos: mounted with tickets, plain, signed and sealed", mounted),
        ours("kerberos: a mount outlives its tickets, NTLM is off", outlives),
    ]
}

/// The server's name in the realm of `foreign/kdc.sh`.
const SERVER: &str = "server.forebay.test";
/// Folder of the realm on the storage node.
const FOLDER: &str = "/run/kdc";
/// Mount point.
const AT: &str = "/mnt/kerberos";

/// The KDC on the storage node, and a client that is configured for it. Dropping this ends it.
struct Realm<'a> {
    site: &'a Site,
    client: &'a Node,
}

impl<'a> Realm<'a> {
    /// Starts the KDC with this volume's user.
    fn start(site: &'a Site, volume: &Volume) -> Result<Self> {
        let (storage, client) = (site.storage(), site.node(ONE));
        storage.put("/run/kdc.sh", include_str!("../../foreign/kdc.sh").as_bytes(), 0o600)?;
        storage.run(&format!("rm -rf {FOLDER}"))?;
        let users = format!("{} {}\n", volume.username, volume.password);
        let setup = ["sh", "-eu", "/run/kdc.sh", FOLDER, storage.address()];
        let made = storage.attempt(&setup, users.as_bytes(), Duration::from_secs(60))?;
        ensure!(made.success(), "kdc.sh: {}", made.complaint());
        let realm = Self { site, client };
        storage.start_service(
            "krb5kdc",
            &["env", &format!("KRB5_KDC_PROFILE={FOLDER}/kdc.conf"), "krb5kdc", "-n"],
        )?;
        client.put("/etc/krb5.conf", &storage.get(&format!("{FOLDER}/krb5.conf"))?, 0o644)?;
        let hosts = storage.get(&format!("{FOLDER}/hosts"))?;
        client.put("/run/kdc.hosts", &hosts, 0o644)?;
        client.run("cat /run/kdc.hosts >> /etc/hosts")?;
        storage.wait_until("the KDC listens", Duration::from_secs(10), || {
            let command = ["nc", "-z", storage.address(), "88"];
            Ok(storage.attempt(&command, &[], Duration::from_secs(5))?.success())
        })?;
        Ok(realm)
    }

    /// Gets a ticket that is valid for this many seconds, for root, which mounts.
    fn ticket(&self, volume: &Volume, seconds: u32) -> Result<()> {
        let password = format!("{}\n", volume.password);
        let life = format!("{seconds}s");
        let kinit = ["kinit", "-l", &life, &volume.username];
        let done = self.client.attempt(&kinit, password.as_bytes(), Duration::from_secs(20))?;
        ensure!(done.success(), "kinit: {}", done.complaint());
        Ok(())
    }

    /// Mounts the volume under the server's name.
    fn mount(&self, volume: &Volume, options: &str) -> Result<()> {
        let address = self.site.storage().address();
        let user = &volume.username;
        let always = "vers=3.1.1,nosharesock,hard,actimeo=1,cruid=0";
        let script = format!(
            "mkdir -p {AT}; mount -t cifs //{SERVER}/{} {AT} -o ip={address},username={user},{always},{options}",
            volume.id
        );
        self.client.run_within(&script, Duration::from_secs(60)).map(drop).with_context(|| {
            let kernel = self.client.run("dmesg | tail -n 15").unwrap_or_default();
            format!("{options}; {kernel}; the server's log ends with: {}", self.site.server_log())
        })
    }

    fn unmount(&self) -> Result<()> {
        self.client.run(&format!("umount {AT}")).map(drop)
    }
}

impl Drop for Realm<'_> {
    fn drop(&mut self) {
        let _ = self.client.run(&format!("umount -l {AT} 2>/dev/null; kdestroy -q; rm -f /etc/krb5.conf"));
        for node in [self.client, self.site.storage()] {
            let _ = node.run("sed -i '/forebay\\.test$/d' /etc/hosts");
        }
        let _ = self.site.storage().signal_service("krb5kdc", "KILL");
        let _ = self.site.storage().run(&format!("rm -rf {FOLDER} /run/kdc.sh /etc/krb5.conf"));
    }
}

fn keytab() -> String {
    format!("\"{FOLDER}/server.keytab\"")
}

fn mounted(site: &Site) -> Result<String> {
    let volume = site.volume(64 * MIB)?;
    let realm = Realm::start(site, &volume)?;
    let keytab = site.switched("keytab", &keytab())?;
    let refused = realm.mount(&volume, "sec=krb5").err().context("mounted without a ticket")?;
    ensure!(format!("{refused:#}").contains("Required key not available"), "{refused:#}");
    realm.ticket(&volume, 3600)?;
    for options in ["sec=krb5", "sec=krb5i", "sec=krb5,seal", "sec=krb5,multichannel,max_channels=3"] {
        realm.mount(&volume, options)?;
        realm
            .client
            .run(&format!(
                "cd {AT}; head -c 3000000 /dev/urandom > /tmp/data; cp /tmp/data file; sync file; \
                 echo 3 > /proc/sys/vm/drop_caches; cmp /tmp/data file; rm file"
            ))
            .with_context(|| options.to_owned())?;
        realm.unmount()?;
    }
    // NTLM still works.
    site.mount(realm.client, &volume, &[])?.unmount()?;
    drop((keytab, realm));
    site.delete(&volume)?;
    Ok(String::new())
}

/// Lifetime of each ticket.
const LIFE_SECONDS: u32 = 12;

/// Writes and reads back files for this many seconds and returns how many there were. New tickets are available before the
/// old ones expire, as with sssd or a cron job.
fn outlives(site: &Site) -> Result<String> {
    let volume = site.volume(64 * MIB)?;
    let realm = Realm::start(site, &volume)?;
    let keytab = site.switched("keytab", &keytab())?;
    let ntlm = site.switched("ntlm", "false")?;
    let refused = site.mount(realm.client, &volume, &[]).err().context("mounted by NTLM")?;
    // The kernel's error for a list of mechanisms without NTLM.
    ensure!(
        format!("{refused:#}").contains("Unable to select appropriate authentication method"),
        "{refused:#}"
    );
    let sessions = || -> Result<u32> {
        let count = "grep -c 'session established' /var/log/forebay-server.log || true";
        Ok(site.storage().run(count)?.parse()?)
    };
    let before = sessions()?;
    realm.ticket(&volume, LIFE_SECONDS)?;
    realm.mount(&volume, "sec=krb5")?;
    let mut write = realm.client.spawn(&[
        "sh",
        "-euc",
        "cd $1; n=0; exec 9> held; while [ ! -e /run/stop ]; do n=$((n+1)); head -c 100000 /dev/urandom > /tmp/data; \
         cp /tmp/data file-$((n % 8)); sync file-$((n % 8)); echo 3 > /proc/sys/vm/drop_caches; cmp /tmp/data file-$((n % 8)); \
         echo $n >&9; sync held; sleep 0.2; done; rm /run/stop; tail -n 1 held; wc -l < held",
        "write",
        AT,
    ])?;
    for _ in 0..5 {
        realm.client.run(&format!("sleep {}", LIFE_SECONDS / 2))?;
        realm.ticket(&volume, LIFE_SECONDS)?;
    }
    realm.client.run("touch /run/stop")?;
    write.wait_for_exit(Duration::from_secs(60))?;
    let lines = write.finish(Duration::from_secs(10))?;
    let [last, count] = lines.as_slice() else { anyhow::bail!("the writer says {lines:?}") };
    ensure!(last == count, "a line of {last} is lost: {count}");
    let sessions = sessions()? - before;
    ensure!(sessions >= 3, "{sessions} sessions: none has expired");
    realm.unmount()?;
    drop((ntlm, keytab, realm));
    // The server keeps handles of expired sessions for their client for a while.
    site.delete_by_force(&volume)?;
    Ok(format!("{count} files in {sessions} sessions"))
}
