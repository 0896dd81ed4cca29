//! A graceful shutdown of the server under load, as in an upgrade; connections lost under the same load; and the privileges
//! that the server needs.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::given_up::{self, GivenUp};
use super::{MIB, ONE, Scenario, TWO, client_kernel, ours};
use crate::guest::GUEST_BINARY;
use crate::guest::calls::data::{Shards, Sum, Sums};
use crate::guest::calls::grpc::AdminRequest;
use crate::guest::calls::writer::Records;
use crate::site::Site;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        ours("server restart by SIGTERM under a writer and readers: no error", restarted),
        ours("connections cut under a syncing writer and readers: no error", cut),
        ours(
            "the server runs with the privileges documented in docs/reference/server.md, and with no fewer",
            privileged,
        ),
    ]
}

/// Restarts or cuts in one run. A single one could succeed by chance.
const ROUNDS: usize = 6;
/// Files synced between two restarts or cuts.
const FILES_PER_ROUND: usize = 8;
const SEED: u64 = 91;
/// Shards that the readers verify repeatedly.
const SHARDS: u32 = 4;
/// A single reader rarely has a request in flight that another reader's reconnect makes stale.
const READERS: usize = 4;
/// Milliseconds between two files of the writer. Without a pause it takes most of a slow server from the readers, and fills the
/// volume before they are done.
const PAUSE: &str = "200";

fn count(lines: &[String], word: &str) -> usize {
    lines.iter().filter(|line| line.starts_with(word)).count()
}

fn restarted(site: &Site) -> Result<String> {
    let done = disturbed(site, ROUNDS, &|| {
        site.end_server()?;
        site.start_server()
    })?;
    Ok(format!("{ROUNDS} restarts, {done}"))
}

/// Both clients lose their connections at the same time, in the middle of their I/O. The server keeps running and preserves
/// their open handles ([MS-SMB2] 3.3.7.1).
fn cut(site: &Site) -> Result<String> {
    let server = site.storage().address();
    let lost = std::cell::Cell::new(0);
    let done = disturbed(site, ROUNDS, &|| {
        for node in [ONE, TWO] {
            let said = site.node(node).run(&format!("ss -KtnHO state established dst {server}:445"))?;
            ensure!(!said.is_empty(), "{node} has no connection to cut");
            lost.set(lost.get() + said.lines().count());
        }
        Ok(())
    })?;
    Ok(format!("{} connections cut, {done}", lost.get()))
}

/// A writer that syncs on one node and readers on the other run through repeated `disturb` without any error, except for up to
/// `given_up` on each node that the client's kernel itself causes.
pub(super) fn disturbed(site: &Site, given_up: usize, disturb: &dyn Fn() -> Result<()>) -> Result<String> {
    let volume = site.volume(512 * MIB)?;
    // Without a cache: every read is sent to the server.
    let reading = site.mount(site.node(TWO), &volume, &[("cache", "none")])?;
    let writing = site.mount(site.node(ONE), &volume, &[])?;
    let shards = Shards {
        folder: writing.join("data").into(),
        prefix: "shard".into(),
        count: SHARDS,
        bytes: 2 * MIB,
        seed: SEED,
    };
    let sums: Vec<Sum> = site.node(ONE).call_within("write-shards", &shards, Duration::from_secs(60))?;
    let sums = Sums { folder: reading.join("data").into(), sums };
    let sums = serde_json::to_string(&sums)?;

    for node in [ONE, TWO] {
        given_up::watch(site.node(node))?;
    }
    let seed = SEED.to_string();
    let mut writer = site.node(ONE).spawn(&[GUEST_BINARY, "record-writes", writing.path(), &seed, PAUSE])?;
    let mut readers = (0..READERS)
        .map(|_| site.node(TWO).spawn(&[GUEST_BINARY, "verify-repeatedly", &sums]))
        .collect::<Result<Vec<_>>>()?;
    let reach = |writer: &mut crate::lab::Process, what: &str, word: &'static str, least: usize| {
        writer.wait_for(what, Duration::from_secs(90), move |lines| count(lines, word) >= least)
    };
    for round in 1..=ROUNDS {
        reach(&mut writer, "files are synced", "synced", round * FILES_PER_ROUND)?;
        for reader in &mut readers {
            reach(reader, "the data set is verified", "verified", round)
                .with_context(|| client_kernel::state(site.node(TWO)))?;
        }
        disturb().with_context(|| format!("round {round}"))?;
    }
    let written = count(writer.lines(), "synced");
    reach(&mut writer, "the writer goes on", "synced", written + FILES_PER_ROUND)?;
    for reader in &mut readers {
        let read = count(reader.lines(), "verified");
        reach(reader, "a reader goes on", "verified", read + 1)?;
    }
    let lines = writer.finish(Duration::from_secs(60))?;
    let errors: Vec<&String> = lines.iter().filter(|line| !line.starts_with("synced")).collect();
    let mut by_kernel = GivenUp::by(site.node(ONE))?.explains(&errors, given_up)?;
    let mut passes = 0;
    let mut errors = Vec::new();
    for reader in readers {
        let seen = reader.finish(Duration::from_secs(60))?;
        passes += count(&seen, "verified");
        errors.extend(seen.into_iter().filter(|line| !line.starts_with("verified")));
    }
    by_kernel += GivenUp::by(site.node(TWO))?.explains(&errors.iter().collect::<Vec<_>>(), given_up)?;

    let numbers: Vec<u64> =
        lines.iter().filter_map(|line| line.strip_prefix("synced ")?.parse().ok()).collect();
    let records = Records { folder: volume.folder.as_str().into(), seed: SEED, numbers: numbers.clone() };
    // The slower the machine, the more files the writer has written in the meantime.
    let deadline = Duration::from_secs(30 + numbers.len() as u64 / 4);
    let bytes: u64 = site.storage().call_within("verify-records", &records, deadline)?;
    writing.unmount()?;
    reading.unmount()?;
    site.delete_by_force(&volume)?;
    let errors = match by_kernel {
        0 => "without an error".to_owned(),
        count => format!("with no error but {count} of the client's own"),
    };
    let (files, mib) = (numbers.len(), bytes >> 20);
    Ok(format!("{files} files ({mib} MiB) written and {passes} passes of reading {errors}"))
}

/// The capabilities that docs/reference/server.md lists.
const CAPABILITIES: [&str; 4] = ["sys_admin", "dac_override", "fowner", "net_bind_service"];

fn with_capabilities(names: &[&str]) -> String {
    let set: String = names.iter().map(|name| format!(",+{name}")).collect();
    format!("-all{set}")
}

/// Starts the server with these capabilities and no others.
fn limit(site: &Site, names: &[&str]) -> Result<()> {
    let bounding = with_capabilities(names);
    let inheritable = "-all";
    site.start_server_by(&[
        "setpriv",
        "--no-new-privs",
        "--inh-caps",
        inheritable,
        "--bounding-set",
        &bounding,
    ])
}

fn privileged(site: &Site) -> Result<String> {
    site.end_server()?;
    let result = privileges(site);
    // In every case: later scenarios need the server in its original state.
    if site.storage().service_runs("forebay-server")? {
        site.end_server()?;
    }
    site.start_server()?;
    result
}

fn privileges(site: &Site) -> Result<String> {
    limit(site, &CAPABILITIES)?;
    let held = site.storage().run("grep CapEff /proc/$(cat /run/forebay-server.pid)/status | cut -f 2")?;
    ensure!(u64::from_str_radix(&held, 16)?.count_ones() == 4, "it holds {held}");
    let mut volumes = Vec::new();
    for pool in ["default", "ext4"] {
        let volume = site.volume_in(pool, 64 * MIB)?;
        site.expand(&volume, 96 * MIB)?;
        volumes.push(volume);
    }
    let volume = &volumes[0];
    let mounted = site.mount(site.node(ONE), volume, &[])?;
    ensure!(mounted.space()?.total_bytes == 96 * MIB, "df shows {} bytes", mounted.space()?.total_bytes);
    // A file that another user owns and that no client has created.
    site.storage()
        .run(&format!("cd {} && echo theirs > f && chown 1234:1234 f && chmod 600 f", volume.folder))?;
    let of = mounted.join("f");
    site.node(ONE).run(&format!("grep -q theirs {of} && touch -d 2020-01-02 {of} && rm {of}"))?;
    mounted.unmount()?;

    // With one capability less, the operation that needs it fails.
    site.end_server()?;
    limit(site, &["dac_override", "fowner", "net_bind_service"])?;
    let made = site.admin(AdminRequest::ExpandVolume { id: volume.id.clone(), bytes: 128 * MIB })?;
    ensure!(made.code != 0, "capacity is set without CAP_SYS_ADMIN");
    site.end_server()?;
    ensure!(
        limit(site, &["sys_admin", "dac_override", "fowner"]).is_err(),
        "port 445 is taken without CAP_NET_BIND_SERVICE"
    );
    limit(site, &CAPABILITIES)?;
    for volume in &volumes {
        site.delete(volume)?;
    }
    Ok("4 capabilities, no new privileges; quotas on XFS and ext4".into())
}
