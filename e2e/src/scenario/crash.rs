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

/// Kills in one run. A single one could succeed by chance.
const ROUNDS: usize = 3;
/// Files synced between two kills.
const FILES_PER_ROUND: usize = 12;
/// Writes that may fail per kill: the one in flight, and those that are attempted while no server listens. The client waits
/// for the server and retries without intervention.
const REFUSED_PER_KILL: usize = 4;
const SEED: u64 = 77;

fn synced(lines: &[String]) -> Vec<u64> {
    lines.iter().filter_map(|line| line.strip_prefix("synced ")?.parse().ok()).collect()
}

/// Returns how many writes failed. Fails if an outage does not explain that many.
pub(super) fn refused(lines: &[String], limit: usize) -> Result<usize> {
    let refused: Vec<&str> =
        lines.iter().map(String::as_str).filter(|line| line.starts_with("failed")).collect();
    ensure!(
        refused.len() <= limit,
        "{} writes failed, more than {limit}: {}",
        refused.len(),
        refused.join("; ")
    );
    Ok(refused.len())
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
    // The client receives no notification: it has to find the server again without intervention, and did so in each round.
    let before = synced(writer.lines()).len();
    reach(&mut writer, "the client reconnects by itself and writes on", before + FILES_PER_ROUND)?;
    let lines = writer.finish(Duration::from_secs(60))?;
    let numbers = synced(&lines);
    let failed = refused(&lines, ROUNDS * REFUSED_PER_KILL)?;

    // Checked on the server's own disk, byte for byte, before the client could repair anything by reading or writing.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_writes_are_accepted_up_to_a_limit() {
        let lines = |count: usize| -> Vec<String> {
            (0..count).map(|number| format!("failed {number} open")).chain(["synced 9".to_owned()]).collect()
        };
        assert_eq!(refused(&lines(3), 3).expect("so many"), 3);
        let error = refused(&lines(4), 3).expect_err("too many").to_string();
        assert!(error.starts_with("4 writes failed, more than 3: failed 0 open"), "{error}");
    }
}
