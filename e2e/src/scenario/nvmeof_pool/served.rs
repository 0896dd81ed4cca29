//! A pool that is created, served, left and taken again.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::server::*;
use crate::guest::calls::data::{Shards, Sum, Sums};
use crate::guest::calls::space::Space;
use crate::lab::Lab;
use crate::scenario::MIB;
use crate::scenario::nvmeof::{CLIENT, FILE, FIRST, NQN, SECOND};
use crate::site::POOL;

pub(in crate::scenario) fn served(lab: &Lab, transport: &'static str) -> Result<String> {
    let fabric = offered(lab, transport)?;
    let client = fabric.node(CLIENT);
    let id = format!("served-{transport}");
    let settings = |epoch| Settings { transport, ..Settings::epoch(epoch) };
    let server = Server::start(&fabric, FIRST, Settings { format: true, ..settings(1) })?;
    server.holds_the_reservation()?;
    server.volume(&id)?;
    let mounted = server.mount(&id)?;
    let space: Space = client.call("space", &mounted.at)?;
    ensure!(space.total_bytes == VOLUME_BYTES, "df shows {} bytes", space.total_bytes);
    let fio = |at: &str| {
        let script = format!(
            "cd /tmp; fio --name=v --directory={at} --size=24m --rw=randwrite --bs=64k --iodepth=8 --ioengine=libaio \
             --direct=1 --verify=crc32c --verify_fatal=1 --do_verify=1 --output=/tmp/fio.out || {{ cat /tmp/fio.out >&2; exit 1; }}"
        );
        client.run_within(&script, Duration::from_secs(60)).with_context(|| format!("fio at {at}"))
    };
    fio(&mounted.at)?;
    let shards = Shards {
        folder: mounted.at.as_str().into(),
        prefix: "s".into(),
        count: 3,
        bytes: 2 * MIB,
        seed: SEED,
    };
    let sums: Vec<Sum> = client.call_within("write-shards", &shards, Duration::from_secs(60))?;
    let verify = |at: &str| -> Result<u64> {
        client.run("sync; echo 3 > /proc/sys/vm/drop_caches")?;
        client.call_within(
            "verify-sums",
            &Sums { folder: at.into(), sums: sums.clone() },
            Duration::from_secs(60),
        )
    };
    verify(&mounted.at)?;
    if transport == "rdma" {
        // RDMA on both legs: from the client to the server, and from the server to the target.
        let by_rdma = server.mount_by_rdma(&id)?;
        fio(&by_rdma.at)?;
        verify(&by_rdma.at)?;
        by_rdma.unmount()?;
    }

    // A graceful end unmounts the pool and keeps the reservation: another instance's kernel may still have pending writes.
    mounted.unmount()?;
    server.stop()?;
    let left = server.node.run(&format!("grep -c ' {POOL} ' /proc/mounts || true"))?;
    ensure!(left == "0", "the pool stays mounted: {}", server.log()?);
    server.holds_the_reservation()?;
    drop(server);

    // The same pool, without format; and once more after kill -9, which leaves mount and reservation behind.
    let server = Server::start(&fabric, FIRST, settings(1))?;
    server.holds_the_reservation()?;
    let mounted = server.mount(&id)?;
    verify(&mounted.at).context("after a restart")?;
    server.kill()?;
    server.holds_the_reservation().context("after kill -9")?;
    std::mem::forget(server);
    let server = Server::start(&fabric, FIRST, settings(1))?;
    server.holds_the_reservation()?;
    verify(&mounted.at).context("after kill -9, by the same mount")?;
    mounted.unmount()?;
    server.stop()?;
    drop(server);

    // On the other host with a later epoch; then the earlier one steps back, although no host holds the reservation.
    let server = Server::start(&fabric, SECOND, Settings { dead_path: true, ..settings(2) })?;
    let mounted = server.mount(&id)?;
    verify(&mounted.at).context("on the other host")?;
    let get = |path: &str| {
        server.node.run(&format!("printf 'GET {path} HTTP/1.0\\r\\n\\r\\n' | nc -w 5 127.0.0.1 9445"))
    };
    server.node.wait_until("health tells of the path that is missing", Duration::from_secs(10), || {
        Ok(get("/readyz")?.contains("pool default: 1 of 2 paths to its namespace take I/O"))
    })?;
    let metrics = get("/metrics")?;
    for (name, value) in [("paths", 2), ("paths_up", 1)] {
        let line = format!("forebay_namespace_{name}{{pool=\"default\"}} {value}");
        ensure!(metrics.contains(&line), "no {line} in {metrics}");
    }
    let grown = grows(&server)?;
    mounted.unmount()?;
    server.stop()?;
    drop(server);
    ended_with(&fabric, FIRST, settings(1), "epoch 2 of this instance has the namespace")?;
    let by = if transport == "rdma" { "by SMB over TCP and by SMB Direct" } else { "by SMB over TCP" };
    Ok(format!("{by}; grown from {} to {} MiB while serving", grown.0 / MIB, grown.1 / MIB))
}

/// The target grows the namespace, and the pool follows automatically. Returns its size before and after.
pub(in crate::scenario) fn grows(server: &Server<'_>) -> Result<(u64, u64)> {
    let size = || -> Result<u64> {
        let space: Space = server.node.call("space", &POOL)?;
        Ok(space.total_bytes)
    };
    let before = size()?;
    let (namespace, bytes) = ("/sys/kernel/config/nvmet/subsystems", FILE_BYTES + FILE_BYTES / 4);
    server.fabric.target().run(&format!(
        "truncate -s {bytes} {FILE}; echo 1 > {namespace}/{NQN}/namespaces/1/revalidate_size"
    ))?;
    server.node.wait_until("the pool has grown", Duration::from_secs(20), || {
        Ok(size()? >= before + FILE_BYTES / 5)
    })?;
    Ok((before, size()?))
}
