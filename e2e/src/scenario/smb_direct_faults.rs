//! SMB Direct with our own client: the server serves it, and its faults affect only itself.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use forebay_smbdirect::limits::{CREDIT_TIMEOUT, NEGOTIATION_TIMEOUT_PASSIVE};

use super::smb_direct::{Fabric, IWARP, Link, RDMA, ROCE, is_over_smb_direct, metric, no_queue_pair_is_left};
use super::{MIB, ONE, Place, Scenario, TWO, ours};
use crate::guest::GUEST_BINARY;
use crate::guest::calls::direct::{Ended, Fault, KILLED_FILE, KILLED_FILE_BYTES, Misdeed, Verified, Verify};
use crate::guest::direct::client::Target;
use crate::lab::{Node, Process};
use crate::progress::say;
use crate::site::{Mounted, Site, Volume};

pub(super) fn scenarios() -> Vec<Scenario> {
    let on_fabric = |scenario: Scenario| Scenario { place: Place::SmbDirect, ..scenario };
    vec![
        on_fabric(ours("SMB Direct with our own client, over soft-RoCE", |site| {
            verified(site, &ROCE, CLEAR)
        })),
        on_fabric(ours("SMB Direct with our own client, over software iWARP", |site| {
            verified(site, &IWARP, CLEAR)
        })),
        on_fabric(ours("SMB Direct with our own client, sealed", |site| verified(site, &ROCE, SEALED))),
        on_fabric(ours("SMB Direct with a misbehaving client", faults)),
    ]
}

fn target(site: &Site, volume: &Volume, link: &Link) -> Result<Target> {
    Ok(Target {
        server: format!("{}:{}", site.storage().address(), link.port()).parse()?,
        share: volume.id.clone(),
        username: volume.username.clone(),
        password: volume.password.clone(),
    })
}

/// The verifying calls, and the number of tokens that each makes the server invalidate if the device supports it.
const CLEAR: (&str, u32) = ("smb-direct-verify", 2);
const SEALED: (&str, u32) = ("smb-direct-verify-sealed", 1);

fn verified(site: &Site, link: &Link, (function, tokens): (&str, u32)) -> Result<String> {
    let (server, client) = (site.storage(), site.node(ONE));
    let _fabric = Fabric::add(site, link, &[client])?;
    let volume = site.volume(64 * MIB)?;
    let target = target(site, &volume, link)?;
    let mut all = 0;
    for (name, bytes) in [("small", 20_011), ("large", 700_001)] {
        let verify = Verify { target: target.clone(), name: name.to_owned(), bytes, seed: 3 };
        let Verified { bytes, invalidated } = client.call(function, &verify).context(name)?;
        // Of the software devices, only soft-RoCE supports tokens that a peer can invalidate.
        ensure!(invalidated == if link.is_iwarp() { 0 } else { tokens }, "{invalidated} tokens invalidated");
        all += bytes;
    }
    no_queue_pair_is_left(&[client, server])?;
    site.delete(&volume)?;
    Ok(format!("{} KiB by RDMA", all >> 10))
}

/// What the server must log for a fault, and how soon it must have ended the connection.
struct Case {
    fault: Fault,
    says: &'static str,
    within: Duration,
}

/// For faults that the server or its device detects immediately, on a busy emulated node.
const AT_ONCE: Duration = Duration::from_secs(10);
/// `STALL_TIME_DEFAULT_MAX` of the server.
const SEND_STALL_TIME: Duration = Duration::from_secs(120);

const fn case(fault: Fault, says: &'static str) -> Case {
    Case { fault, says, within: AT_ONCE }
}

const fn late(fault: Fault, says: &'static str, limit: Duration) -> Case {
    Case { fault, says, within: limit.saturating_add(AT_ONCE) }
}

const TOKEN: &str = "the peer's memory may not be reached by the token it gave";

/// Faults that the server ends at once.
const PROMPT: &[Case] = &[
    case(Fault::GarbageFirst, "incompatible peer: it speaks versions 0xa5a5 to 0xa5a5"),
    case(Fault::GarbageShort, "malformed message: "),
    case(Fault::GarbageLater, "malformed message: "),
    case(Fault::GarbageWithin, "reason=\"malformed "),
    case(Fault::NoReceives, "the peer had no receive for a message"),
    case(Fault::OversizedFragment, "an upper-layer message of 2097160 bytes where"),
    case(Fault::LongerThanNegotiated, "a message of 1274 bytes where 1200 were negotiated"),
    case(Fault::LongerThanReceives, "the peer's message is longer than there is place for"),
    case(Fault::PayloadOutside, "malformed message: "),
    case(Fault::MadeUpTokenToRead, TOKEN),
    case(Fault::MadeUpTokenToWrite, TOKEN),
    case(Fault::StaleTokenToRead, TOKEN),
    case(Fault::StaleTokenToWrite, TOKEN),
    case(Fault::ShortTokenToRead, TOKEN),
    case(Fault::ShortTokenToWrite, TOKEN),
    case(Fault::Killed, "session closed"),
];

/// Faults that the server ends after seconds, by the same timeout: not in parallel to each other.
const LATE: &[Case] = &[
    late(Fault::Silent, "timed out: the negotiation", NEGOTIATION_TIMEOUT_PASSIVE),
    late(Fault::HalfOpen, "timed out: the negotiation", NEGOTIATION_TIMEOUT_PASSIVE),
];

/// Faults that the server ends after minutes: committed in parallel to all others.
const SLOW: &[Case] = &[
    late(Fault::NoCredits, "timed out: a send credit", CREDIT_TIMEOUT),
    late(Fault::NoReceivesForEver, "the peer takes no data", SEND_STALL_TIME),
];

/// The server's log from this point on.
struct Log<'a> {
    server: &'a Node,
    lines: usize,
}

impl<'a> Log<'a> {
    fn from_now(server: &'a Node) -> Result<Self> {
        Ok(Self { server, lines: server.run("wc -l < /var/log/forebay-server.log")?.trim().parse()? })
    }

    fn says(&self, text: &str) -> Result<bool> {
        let said = self.server.run(&format!("tail -n +{} /var/log/forebay-server.log", self.lines + 1))?;
        Ok(said.lines().any(|line| line.contains(text)))
    }

    fn must_say(&self, text: &str) -> Result<()> {
        self.server
            .wait_until(&format!("the server says: {text}"), Duration::from_secs(5), || self.says(text))
    }
}

/// Commits a fault and compares its consequences with the table.
fn commit(server: &Node, client: &Node, target: &Target, case: &Case) -> Result<()> {
    let Case { fault, says, within } = *case;
    let log = Log::from_now(server)?;
    let misdeed = Misdeed { target: target.clone(), fault, patience: within };
    let began = Instant::now();
    match fault {
        Fault::Killed => {
            let arguments = serde_json::to_vec(&misdeed)?;
            let output = client.attempt(&[GUEST_BINARY, "call", "smb-direct-fault"], &arguments, within)?;
            ensure!(output.exit.signal == Some(9), "it was not killed: {}", output.complaint());
            let killed = Instant::now();
            log.must_say(says)?;
            ensure!(killed.elapsed() < within, "the server noticed only after {:?}", killed.elapsed());
        }
        Fault::HalfOpen => {
            // The client stays idle for as long as the server is allowed to take.
            client.call_within::<Ended>("smb-direct-fault", &misdeed, within)?;
            ensure!(log.says(says)?, "the server has not ended it within {within:?}");
        }
        _ => {
            let Ended { reason, after } = client.call_within("smb-direct-fault", &misdeed, within * 2)?;
            ensure!(after <= within, "ended only after {after:?}: {reason}");
            log.must_say(says)?;
        }
    }
    say(format!("{fault:?}: ended, {:.1} s in all", began.elapsed().as_secs_f32()));
    Ok(())
}

/// Commits one fault after the other. The error names all that did not end as expected.
fn all<'a>(
    server: &Node,
    client: &Node,
    target: &Target,
    cases: impl Iterator<Item = &'a Case>,
    after: impl Fn(&Case) -> Result<()>,
) -> Result<()> {
    let failed: Vec<String> = cases
        .filter_map(|case| {
            let error = commit(server, client, target, case).and_then(|()| after(case)).err()?;
            Some(format!("{:?}: {error:#}", case.fault))
        })
        .collect();
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

/// A load that writes and verifies endlessly, through the kernel's client.
struct Bystander<'a> {
    mounted: Mounted<'a>,
    fio: Process,
    lost: Lost,
}

/// How often a client had to reconnect, and how often because its device gave up the connection: nothing that it sent was
/// acknowledged for about 4 s. The peer's kernel sends acknowledgments, independently of the server; on a busy machine an
/// emulated node occasionally stalls for that long.
#[derive(Clone, Copy)]
struct Lost {
    sessions: u64,
    by_device: u64,
}

impl Lost {
    fn so_far(client: &Node) -> Result<Self> {
        let stats = client.run("grep reconnects /proc/fs/cifs/Stats")?;
        let sessions = stats.split_whitespace().next().unwrap_or_default().parse().context(stats.clone())?;
        let given_up = client.run("cat /sys/class/infiniband/rxe0/ports/1/hw_counters/retry_exceeded_err")?;
        Ok(Self { sessions, by_device: given_up.trim().parse()? })
    }
}

/// The result of a bystander.
struct Stood {
    /// Number of complete passes of writing and verifying.
    passes: usize,
    /// How often its client reconnected: at most as often as its own device gave up the connection.
    reconnects: u64,
}

/// What both ends report about the client's connection, and the retry counters of their devices.
fn ends(site: &Site, client: &Node) -> Result<String> {
    let server = site.storage();
    let retries = "cd /sys/class/infiniband/rxe0/ports/1/hw_counters; grep . *retry* *rnr* *seq*";
    let log = format!("grep -F '{}' /var/log/forebay-server.log | tail -n 12", client.address());
    Ok(format!(
        "{} says: {}\n{}\n{} says: {}\n{}",
        client.name(),
        client.run("dmesg | grep -iE 'cifs|smb|rxe' | tail -n 12")?,
        client.run(retries)?,
        server.name(),
        server.run(&log)?,
        server.run(retries)?
    ))
}

impl<'a> Bystander<'a> {
    fn start(site: &'a Site, client: &'a Node, volume: &Volume) -> Result<Self> {
        let mounted = site.mount(client, volume, RDMA)?;
        is_over_smb_direct(site, client, &ROCE)?;
        let folder = mounted.path();
        let script = format!(
            "cd /tmp; rm -f enough; n=0
             until [ -e enough ]; do
                 fio --name=bystander --directory={folder} --size=2m --rw=randwrite --bs=64k --iodepth=4 --ioengine=libaio \
                     --direct=1 --verify=crc32c --do_verify=1 --verify_fatal=1 --output=/tmp/fio.out \
                     || {{ cat /tmp/fio.out >&2; exit 1; }}
                 n=$((n + 1)); echo pass $n
             done"
        );
        let mut fio = client.spawn(&["sh", "-c", &script])?;
        fio.wait_for("a first pass", Duration::from_secs(20), |lines| !lines.is_empty())?;
        Ok(Self { lost: Lost::so_far(client)?, mounted, fio })
    }

    /// Fails if the load ever failed, or if the server made it lose its connection.
    fn finish(self, site: &Site, client: &Node) -> Result<Stood> {
        client.run("touch /tmp/enough")?;
        let passes = self.fio.finish(Duration::from_secs(30)).context("the bystander")?.len();
        let now = Lost::so_far(client)?;
        let (lost, given_up) = (now.sessions - self.lost.sessions, now.by_device - self.lost.by_device);
        ensure!(
            lost <= given_up,
            "the bystander had to connect again: {lost} times\n{}",
            ends(site, client)?
        );
        if lost > 0 {
            say(format!("the bystander connected again {lost} times:\n{}", ends(site, client)?));
        }
        is_over_smb_direct(site, client, &ROCE)?;
        self.mounted.unmount()?;
        Ok(Stood { passes, reconnects: lost })
    }
}

/// The server's RDMA resources and descriptors with no connection left, and its memory regions.
fn resources(server: &Node, clients: &[&Node]) -> Result<(Vec<usize>, usize)> {
    no_queue_pair_is_left(&[&[server], clients].concat())?;
    let count = |kind: &str| -> Result<usize> {
        Ok(server.run(&format!("rdma resource show {kind} | wc -l"))?.parse()?)
    };
    let mut found = ["qp", "cq", "pd", "cm_id"].map(count).into_iter().collect::<Result<Vec<_>>>()?;
    found.push(server.run("ls /proc/$(pidof forebay-server)/fd | wc -l")?.parse()?);
    Ok((found, count("mr")?))
}

/// Waits until the server is back at its earlier resources: it keeps open handles of a lost connection for a minute. Returns
/// the number of remaining regions.
fn nothing_left(server: &Node, clients: &[&Node], before: &[usize]) -> Result<usize> {
    let (mut after, mut regions) = resources(server, clients)?;
    server
        .wait_until("the server has what it had before", Duration::from_secs(75), || {
            (after, regions) = resources(server, clients)?;
            Ok(after == before)
        })
        .with_context(|| {
            let files = server.run("ls -l /proc/$(pidof forebay-server)/fd").unwrap_or_default();
            format!(
                "queue pairs, completion queues, domains, identifiers, descriptors: {before:?}, then {after:?}\n{files}"
            )
        })?;
    Ok(regions)
}

fn faults(site: &Site) -> Result<String> {
    let (server, one, two) = (site.storage(), site.node(ONE), site.node(TWO));
    let _fabric = Fabric::add(site, &ROCE, &[one, two])?;
    let volume = site.volume(256 * MIB)?;
    let target = target(site, &volume, &ROCE)?;
    // Resources that belong to the device and not to a connection exist after a few mounts.
    for _ in 0..3 {
        site.mount(two, &volume, RDMA)?.unmount()?;
    }
    let (before, _) = resources(server, &[one, two])?;

    let bystander = Bystander::start(site, two, &volume)?;
    std::thread::scope(|scope| {
        let slow: Vec<_> =
            SLOW.iter().map(|case| (case, scope.spawn(|| commit(server, one, &target, case)))).collect();
        all(server, one, &target, PROMPT.iter().chain(LATE), |case| {
            if case.fault == Fault::Killed {
                let size: u64 =
                    server.run(&format!("stat -c %s {}/{KILLED_FILE}", volume.folder))?.trim().parse()?;
                ensure!(size < KILLED_FILE_BYTES, "it was killed too late: all of it is written");
            }
            Ok(())
        })?;
        slow.into_iter().try_for_each(|(case, thread)| {
            thread.join().expect("no panic").with_context(|| format!("{:?}", case.fault))
        })
    })?;
    let first = bystander.finish(site, two)?;
    let regions = nothing_left(server, &[one, two], &before)?;

    // The regions now belong to pooled buffers, up to the maximum that was ever in use: the same faults must not add more.
    // Those without a negotiated connection have no regions.
    let bystander = Bystander::start(site, two, &volume)?;
    all(server, one, &target, PROMPT.iter(), |_| Ok(()))?;
    let second = bystander.finish(site, two)?;
    let now = nothing_left(server, &[one, two], &before)?;
    ensure!(
        now < regions + PROMPT.len() / 2,
        "{regions} regions after the first faults, {now} after the second"
    );
    server.wait_until("no buffer is in use", Duration::from_secs(5), || {
        Ok(metric(site, "forebay_buffer_bytes")? == 0)
    })?;
    site.delete(&volume)?;
    let again = match first.reconnects + second.reconnects {
        0 => String::new(),
        times => format!(", and its device gave the connection up {times} times"),
    };
    let passes = first.passes + second.passes;
    Ok(format!(
        "{} faults, {passes} passes of a bystander{again}",
        2 * PROMPT.len() + LATE.len() + SLOW.len()
    ))
}
