//! Runs the fabric's host library on this node, and writes raw blocks that identify their writer.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use forebay_nvmeof::{
    Acquired, Authentication, Check, ConnectError, DhChapKey, EnsureError, Epoch, FabricPath, Fabrics,
    HostIdentity, InstanceHash, Me, Namespace, NamespaceId, Reservations, Subsystem, Timing, Transport,
    Watch,
};
use serde::{Deserialize, Serialize};

/// Block size and alignment that `O_DIRECT` requires.
pub const BLOCK_BYTES: usize = 4096;

/// A namespace, as an instance on a node sees it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Seen {
    /// Instance.
    pub instance: String,
    /// Node.
    pub node: String,
    /// Number of the instance's start.
    pub epoch: u32,
    /// Subsystem.
    pub nqn: String,
    /// Namespace, as `uuid:…`.
    pub namespace: String,
    /// Transport, and address with port.
    pub paths: Vec<(String, String)>,
    /// DH-HMAC-CHAP key.
    pub key: Option<String>,
    /// Keep Alive Timeout in seconds.
    pub keep_alive_s: u32,
    /// Seconds until I/O fails on a lost path.
    pub fast_io_fail_s: u32,
}

/// The result of connecting.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Wanted controllers that exist, old and new.
    pub controllers: Vec<String>,
    /// Number of new ones.
    pub connected: usize,
    /// Number of unwanted controllers that were removed.
    pub disconnected: usize,
    /// Why paths could not be connected: the name of each reason.
    pub refusals: Vec<String>,
    /// The error as readable text.
    pub error: Option<String>,
}

/// The paths to the namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paths {
    /// Number of paths that accept I/O.
    pub up: usize,
    /// Number of all paths.
    pub all: usize,
    /// Whether the namespace has a device.
    pub present: bool,
}

/// Whether we hold the reservation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Whether we hold it.
    pub held: bool,
    /// The reason if not, as readable text.
    pub why: String,
}

/// Blocks of a namespace or a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Blocks {
    /// First, counted in blocks.
    pub first: u64,
    /// Number of blocks.
    pub count: u64,
    /// The writer's number.
    pub writer: u64,
}

/// The result of writing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Acknowledged blocks.
    pub written: u64,
    /// The error that ended it.
    pub errno: Option<i32>,
}

fn subsystem(seen: &Seen) -> Result<Subsystem> {
    let host = HostIdentity::of(&seen.instance, &seen.node)?;
    let mut wanted = Subsystem::new(seen.nqn.parse()?, host);
    let Seen { keep_alive_s, fast_io_fail_s, .. } = *seen;
    wanted.timing = Timing { keep_alive_s, fast_io_fail_s, ..Timing::default() };
    if let Some(key) = &seen.key {
        wanted.authentication = Some(Authentication { host: DhChapKey::parse(key)?, controller: None });
    }
    Ok(wanted)
}

fn paths(seen: &Seen) -> Result<Vec<FabricPath>> {
    let path = |(transport, target): &(String, String)| {
        let transport = match transport.as_str() {
            "tcp" => Transport::Tcp,
            "rdma" => Transport::Rdma,
            other => anyhow::bail!("no transport {other}"),
        };
        Ok(FabricPath::new(transport, target.parse()?))
    };
    seen.paths.iter().map(path).collect()
}

fn find(seen: &Seen) -> Result<(Fabrics, Namespace)> {
    let fabrics = Fabrics::default();
    let id: NamespaceId = seen.namespace.parse()?;
    let namespace = fabrics.sysfs().read().namespace(&seen.nqn.parse()?, &id)?.clone();
    Ok((fabrics, namespace))
}

fn me(seen: &Seen) -> Result<Me> {
    let epoch = Epoch::new(seen.epoch).context("epoch 0")?;
    let host = HostIdentity::of(&seen.instance, &seen.node)?;
    Ok(Me::new(InstanceHash::of(&seen.instance), epoch, host.id()))
}

/// The reason's name, without its details.
fn name(error: &ConnectError) -> String {
    let shown = match error {
        ConnectError::Refused { refusal, .. } => format!("{refusal:?}"),
        other => format!("{other:?}"),
    };
    shown.split(['(', ' ']).next().unwrap_or_default().to_owned()
}

/// The host NQN of an instance on a node.
pub fn host_nqn((instance, node): (String, String)) -> Result<String> {
    Ok(HostIdentity::of(&instance, &node)?.nqn().to_string())
}

/// Connects all paths.
pub fn connect(seen: Seen) -> Result<Outcome> {
    let outcome = match Fabrics::default().ensure_connected(&subsystem(&seen)?, &paths(&seen)?) {
        Ok(ensured) => Outcome {
            connected: ensured.connected.len(),
            disconnected: ensured.disconnected.len(),
            refusals: ensured.failed.iter().map(name).collect(),
            error: ensured.failed.first().map(ToString::to_string),
            controllers: ensured
                .kept
                .into_iter()
                .chain(ensured.connected.into_iter().map(|connected| connected.controller))
                .collect(),
        },
        Err(error) => Outcome {
            error: Some(error.to_string()),
            refusals: match &error {
                EnsureError::NoPath(failed) => failed.iter().map(name).collect(),
                EnsureError::NotPlanned(reason) => {
                    vec![format!("{reason:?}").split(['(', ' ']).next().unwrap_or_default().to_owned()]
                }
                EnsureError::Key(error) => vec![name(error)],
                EnsureError::InClear { .. } => vec!["InClear".into()],
            },
            ..Outcome::default()
        },
    };
    Ok(outcome)
}

/// Disconnects. Returns the number of removed controllers.
pub fn disconnect(seen: Seen) -> Result<usize> {
    Ok(Fabrics::default().ensure_disconnected(&subsystem(&seen)?)?.len())
}

/// The entries that the discovery controller at the first path lists: transport, NQN, address and port.
pub fn discover(seen: Seen) -> Result<Vec<(String, String, String)>> {
    let first = paths(&seen)?.into_iter().next().context("no path")?;
    let records = Fabrics::default().discover(&subsystem(&seen)?, &first)?;
    Ok(records
        .into_iter()
        .map(|record| (record.transport, record.nqn, format!("{}:{}", record.traddr, record.trsvcid)))
        .collect())
}

/// The state of the paths.
pub fn watch(seen: Seen) -> Result<Paths> {
    let fabrics = Fabrics::default();
    let mut watch = Watch::new(fabrics.sysfs().clone(), seen.nqn.parse()?, seen.namespace.parse()?);
    watch.poll();
    let (up, all) = watch.paths();
    Ok(Paths { up, all, present: find(&seen).is_ok() })
}

/// Acquires the reservation. Returns the reason's name if that failed.
pub fn acquire(seen: Seen) -> Result<Option<String>> {
    let (fabrics, namespace) = find(&seen)?;
    let device = fabrics.open(&namespace)?;
    match forebay_nvmeof::acquire(&device, &me(&seen)?) {
        Ok(Acquired::Settled { .. }) => Ok(None),
        Ok(pending) => Ok(Some(format!("{pending:?}"))),
        Err(error) => Ok(Some(format!("{error:?}: {error}"))),
    }
}

/// Whether we hold the reservation.
pub fn check(seen: Seen) -> Result<Held> {
    let (fabrics, namespace) = find(&seen)?;
    let device = fabrics.open(&namespace)?;
    Ok(match forebay_nvmeof::check(&device, &me(&seen)?)? {
        Check::Held => Held { held: true, why: String::new() },
        Check::Lost(loss) => Held { held: false, why: format!("{loss:?}: {loss}") },
    })
}

/// Releases the reservation. Returns how many hosts are registered afterwards.
pub fn release(seen: Seen) -> Result<usize> {
    let (fabrics, namespace) = find(&seen)?;
    let device = fabrics.open(&namespace)?;
    forebay_nvmeof::release(&device, &me(&seen)?)?;
    Ok(device.report()?.registrants.len())
}

/// A buffer with the alignment that `O_DIRECT` requires.
struct Aligned(Vec<u8>);

impl Aligned {
    fn new() -> Self {
        Self(vec![0; 2 * BLOCK_BYTES])
    }

    fn block(&mut self) -> &mut [u8] {
        let from = self.0.as_ptr().align_offset(BLOCK_BYTES);
        &mut self.0[from..from + BLOCK_BYTES]
    }
}

/// Writes blocks to the namespace, each after the previous one was acknowledged, until one fails.
pub fn write(arguments: (Seen, Blocks)) -> Result<Written> {
    let (seen, blocks) = arguments;
    let (_, namespace) = find(&seen)?;
    let device = PathBuf::from("/dev").join(&namespace.name);
    let opened = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&device);
    let file = opened.with_context(|| device.display().to_string())?;
    let mut buffer = Aligned::new();
    for index in 0..blocks.count {
        let number = blocks.first + index;
        fill(buffer.block(), blocks.writer, number);
        if let Err(error) = file.write_all_at(buffer.block(), number * BLOCK_BYTES as u64) {
            let errno =
                error.raw_os_error().ok_or_else(|| anyhow!("a write without an error number: {error}"))?;
            return Ok(Written { written: index, errno: Some(errno) });
        }
    }
    Ok(Written { written: blocks.count, errno: None })
}

/// The writer of each of these blocks in a file on the target; 0 for none.
pub fn writers(arguments: (PathBuf, Blocks)) -> Result<Vec<u64>> {
    let (path, blocks) = arguments;
    let file = File::open(&path).with_context(|| path.display().to_string())?;
    let mut block = vec![0; BLOCK_BYTES];
    let mut expected = vec![0; BLOCK_BYTES];
    (blocks.first..blocks.first + blocks.count)
        .map(|number| {
            file.read_exact_at(&mut block, number * BLOCK_BYTES as u64)?;
            let writer = u64::from_le_bytes(std::array::from_fn(|i| block[i]));
            match writer {
                0 => expected.fill(0),
                _ => fill(&mut expected, writer, number),
            }
            anyhow::ensure!(block == expected, "block {number} is not one writer's whole block");
            Ok(writer)
        })
        .collect()
}

fn fill(block: &mut [u8], writer: u64, number: u64) {
    for (index, word) in block.chunks_exact_mut(8).enumerate() {
        let value = if index % 2 == 0 { writer } else { number };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_identify_their_writer_and_torn_blocks_are_detected() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let mut buffer = Aligned::new();
        assert_eq!(buffer.block().as_ptr().align_offset(BLOCK_BYTES), 0);
        file.as_file().set_len(3 * BLOCK_BYTES as u64).expect("room");
        for (number, writer) in [(0, 7), (2, 9)] {
            fill(buffer.block(), writer, number);
            file.as_file().write_all_at(buffer.block(), number * BLOCK_BYTES as u64).expect("a write");
        }
        let all = || writers((file.path().to_owned(), Blocks { first: 0, count: 3, writer: 0 }));
        assert_eq!(all().expect("whole blocks"), [7, 0, 9]);
        file.as_file().write_all_at(&[1], BLOCK_BYTES as u64 - 1).expect("a write");
        assert!(all().is_err());
    }
}
