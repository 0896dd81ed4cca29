//! kill -9 of the server under write load.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::{MIB, ONE, Scenario, scenario};
use crate::guest::GUEST_BINARY;
use crate::guest::calls::grpc::AdminRequest;
use crate::guest::calls::writer::Records;
use crate::site::{Kind, Site};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![scenario("kill -9 of the server under write load", killed)]
}

/// Kills in one run: one could be lucky.
const ROUNDS: usize = 3;
/// Files synced between two kills.
const FILES_PER_ROUND: usize = 12;
const SEED: u64 = 77;

fn synced(lines: &[String]) -> Vec<u64> {
    lines.iter().filter_map(|line| line.strip_prefix("synced ")?.parse().ok()).collect()
}

fn killed(site: &Site) -> Result<String> {
    let volume = site.volume(512 * MIB)?;
    let mounted = site.mount(site.node(ONE), &volume, &[])?;
    let seed = SEED.to_string();
    let mut writer = site.node(ONE).spawn(&[GUEST_BINARY, "record-writes", mounted.path(), &seed])?;
    let reach = |writer: &mut crate::lab::Process, what: &str, count: usize| {
        writer.wait_for(what, Duration::from_secs(60), move |lines| synced(lines).len() >= count)
    };
    for round in 0..ROUNDS {
        reach(&mut writer, "files are synced", (round + 1) * FILES_PER_ROUND)?;
        site.kill_server()?;
        site.start_server()?;
    }
    // Nobody told the client: it has to find the server again by itself, and did so in each round.
    let before = synced(writer.lines()).len();
    reach(&mut writer, "the client reconnects by itself and writes on", before + FILES_PER_ROUND)?;
    let lines = writer.finish(Duration::from_secs(60))?;
    let numbers = synced(&lines);
    let failed = lines.iter().filter(|line| line.starts_with("failed")).count();

    // On the server's own disk, byte for byte, before the client could repair anything by reading or writing.
    let records = |folder: &str| Records { folder: folder.into(), seed: SEED, numbers: numbers.clone() };
    let bytes: u64 = site.storage().call("verify-records", &records(&volume.folder))?;
    mounted.unmount()?;
    let again = site.mount(site.node(ONE), &volume, &[])?;
    let read: u64 = site.node(ONE).call("verify-records", &records(again.path()))?;
    ensure!(read == bytes, "{read} bytes through the mount, {bytes} on the server");
    again.unmount()?;
    if site.kind() == Kind::Forebay {
        let stat = site.admin(AdminRequest::StatVolume { id: volume.id.clone() })?.ok()?;
        ensure!(stat.bytes as u64 == 512 * MIB, "the volume's record says {} bytes", stat.bytes);
    }
    site.delete(&volume)?;
    Ok(format!(
        "{ROUNDS} kills, {} files ({} MiB) synced and intact, {failed} writes refused",
        numbers.len(),
        bytes >> 20
    ))
}
