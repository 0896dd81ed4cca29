//! A pool's records of its servers (`.forebay/starts`, `.forebay/epoch`), torn while no server runs.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::server::*;
use crate::guest::calls::data::{Shards, Sum, Sums};
use crate::lab::{Lab, Node};
use crate::scenario::MIB;
use crate::scenario::nvmeof::{CLIENT, FIRST, UUID};
use crate::site::POOL;

/// A file of two slots, as described in docs/reference/server.md: the newest intact slot counts.
#[derive(Clone, Copy)]
pub(in crate::scenario) struct Record {
    name: &'static str,
    slot_bytes: usize,
}

pub(in crate::scenario) const STARTS: Record = Record { name: "starts", slot_bytes: 4096 };
pub(in crate::scenario) const EPOCH: Record = Record { name: "epoch", slot_bytes: 2048 };

/// Magic, sequence, length and checksum.
const HEADER_BYTES: usize = 8 + 8 + 4 + 16;

/// One slot, intact or not.
struct Slot {
    at: usize,
    sequence: u64,
    /// Bytes of header and text.
    bytes: usize,
    text: String,
}

impl Record {
    fn path(self, pool: &str) -> String {
        format!("{pool}/.forebay/{}", self.name)
    }

    /// Both slots, the newest first.
    fn slots(self, node: &Node, pool: &str) -> Result<[Slot; 2]> {
        let text = node.run(&format!("od -An -v -tx1 {}", self.path(pool)))?;
        let bytes: Vec<u8> =
            text.split_whitespace().map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<_, _>>()?;
        ensure!(bytes.len() == 2 * self.slot_bytes, "{} has {} bytes", self.name, bytes.len());
        let slot = |at: usize| -> Result<Slot> {
            let (header, rest) = bytes[at..at + self.slot_bytes].split_at(HEADER_BYTES);
            let sequence = u64::from_le_bytes(header[8..16].try_into()?);
            let length = u32::from_le_bytes(header[16..20].try_into()?) as usize;
            let text = rest.get(..length).with_context(|| format!("{} has no slot at {at}", self.name))?;
            let text = String::from_utf8_lossy(text).into_owned();
            Ok(Slot { at, sequence, bytes: HEADER_BYTES + length, text })
        };
        let [first, second] = [slot(0)?, slot(self.slot_bytes)?];
        Ok(if first.sequence >= second.sequence { [first, second] } else { [second, first] })
    }

    /// The record of the pool that is mounted at `pool`.
    pub(in crate::scenario) fn text(self, node: &Node, pool: &str) -> Result<String> {
        let [newest, _] = self.slots(node, pool)?;
        Ok(newest.text)
    }

    /// Leaves half of a slot's record, as after an interrupted write.
    fn tear(self, node: &Node, pool: &str, slot: &Slot) -> Result<()> {
        let whole = slot.bytes / 2;
        node.run(&format!(
            "head -c {} /dev/zero | tr '\\0' '\\377' | \
             dd of={} bs={} seek={} oflag=seek_bytes iflag=fullblock conv=notrunc,fsync status=none",
            self.slot_bytes - whole,
            self.path(pool),
            self.slot_bytes,
            slot.at + whole,
        ))
        .map(drop)
    }

    /// Tears the newest slot. Returns the text of the older one.
    fn tear_newest(self, node: &Node, pool: &str) -> Result<String> {
        let [newest, older] = self.slots(node, pool)?;
        self.tear(node, pool, &newest)?;
        Ok(older.text)
    }
}

/// The pool's file system, mounted manually while no server runs. Unmounted when dropped.
struct ByHand<'a> {
    node: &'a Node,
}

/// The manual mount point.
const AT: &str = "/mnt/by-hand";

impl<'a> ByHand<'a> {
    /// Mounts it on a host that has the reservation.
    fn mount(node: &'a Node) -> Result<Self> {
        node.run(&format!(
            "for d in /sys/block/nvme*; do
                 if [ \"$(cat $d/uuid 2> /dev/null)\" = {UUID} ] && [ -b /dev/${{d##*/}} ]; then found=/dev/${{d##*/}}; fi
             done
             mkdir -p {AT}; mount -t xfs $found {AT}"
        ))
        .context("mount the pool by hand")?;
        Ok(Self { node })
    }

    fn unmount(self) -> Result<()> {
        self.node.run(&format!("umount {AT}"))?;
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for ByHand<'_> {
    fn drop(&mut self) {
        let _ = self.node.run(&format!("umount {AT} || umount -l {AT}"));
    }
}

/// The numbers of the starts in a list, and whether the server relies on what they acknowledged.
fn starts(text: &str) -> Vec<(&str, bool)> {
    let asking = text.starts_with("asking\n");
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.map(|(number, of)| (number, of == "+" && !asking)).collect()
}

/// Checks that after its starts were torn, a server lists those of the older slot, and itself.
fn knows(server: &Server<'_>, older: &str) -> Result<()> {
    let now = STARTS.text(server.node, POOL)?;
    let (now, older) = (starts(&now), starts(older));
    ensure!(
        now.len() == older.len() + 1 && now[..older.len()] == older,
        "after the older slot said {older:?} the list is {now:?}"
    );
    Ok(())
}

pub(in crate::scenario) fn torn(lab: &Lab) -> Result<String> {
    let fabric = offered(lab, "tcp")?;
    let (host, client) = (fabric.node(FIRST), fabric.node(CLIENT));
    let id = "torn";
    let server = Server::start(&fabric, FIRST, Settings { format: true, ..Settings::epoch(1) })?;
    server.volume(id)?;
    let mounted = server.mount(id)?;
    let shards =
        Shards { folder: mounted.at.as_str().into(), prefix: "s".into(), count: 2, bytes: MIB, seed: SEED };
    let sums: Vec<Sum> = client.call_within("write-shards", &shards, Duration::from_secs(60))?;
    mounted.unmount()?;
    server.stop()?;
    drop(server);
    // Checks that it serves and that all data is intact.
    let serves = |epoch: u32| -> Result<Server<'_>> {
        let server = Server::start(&fabric, FIRST, Settings::epoch(epoch))?;
        server.holds_the_reservation()?;
        let recorded = EPOCH.text(host, POOL)?;
        ensure!(
            recorded.contains(&format!("epoch {epoch}\n")),
            "epoch {epoch} is not recorded: {recorded:?}"
        );
        let mounted = server.mount(id)?;
        client.run("echo 3 > /proc/sys/vm/drop_caches")?;
        let sums = Sums { folder: mounted.at.as_str().into(), sums: sums.clone() };
        let _: u64 = client.call_within("verify-sums", &sums, Duration::from_secs(60))?;
        mounted.unmount()?;
        Ok(server)
    };

    // The starts, after a graceful end: the newest slot is from the end, the older one from the start.
    let server = serves(2)?;
    server.stop()?;
    drop(server);
    let by_hand = ByHand::mount(host)?;
    let older = STARTS.tear_newest(host, AT)?;
    by_hand.unmount()?;
    ensure!(starts(&older).len() == 2, "{older:?}");
    let server = serves(2)?;
    knows(&server, &older)?;

    // After kill -9: the newest slot is from the start, the older one from a server that was querying the kernel and has
    // unknown predecessors.
    server.kill()?;
    drop(server);
    let by_hand = ByHand::mount(host)?;
    let older = STARTS.tear_newest(host, AT)?;
    by_hand.unmount()?;
    let relied_on: Vec<_> = starts(&older).into_iter().filter(|(_, relied_on)| *relied_on).collect();
    ensure!(older.starts_with("asking\n") && relied_on.is_empty(), "{older:?}");
    let server = serves(2)?;
    knows(&server, &older)?;
    server.stop()?;
    drop(server);

    // The epoch: the older slot has the previous epoch.
    let by_hand = ByHand::mount(host)?;
    let older = EPOCH.tear_newest(host, AT)?;
    by_hand.unmount()?;
    ensure!(older.contains("epoch 1\n"), "{older:?}");
    // The record would admit it, but the reservation does not.
    ended_with(&fabric, FIRST, Settings::epoch(1), "epoch 2 of this instance has the namespace")?;
    let server = serves(2)?;
    server.stop()?;
    drop(server);

    // Both slots: the epoch is unknown, so no server serves until a person has repaired the record.
    let by_hand = ByHand::mount(host)?;
    host.run(&format!("cp {} /tmp/epoch", EPOCH.path(AT)))?;
    for slot in EPOCH.slots(host, AT)? {
        EPOCH.tear(host, AT, &slot)?;
    }
    by_hand.unmount()?;
    for epoch in [2, 3] {
        ended_with(&fabric, FIRST, Settings::epoch(epoch), "the record of the pool's epoch is damaged")?;
    }
    let by_hand = ByHand::mount(host)?;
    host.run(&format!("cp /tmp/epoch {}; sync {0}", EPOCH.path(AT)))?;
    by_hand.unmount()?;
    let server = serves(3)?;
    server.stop()?;
    Ok("served from the older slots; refused where no slot of the epoch is whole".into())
}

#[cfg(test)]
mod tests {
    use super::starts;

    #[test]
    fn no_peer_counts_as_reliable_while_a_server_queries_the_kernel() {
        assert_eq!(starts("01 +\n02 -\n"), [("01", true), ("02", false)]);
        assert_eq!(starts("asking\n01 +\n02 -\n"), [("01", false), ("02", false)]);
    }
}
