//! The discovery log page (NVMe-oF 1.1 5.3): the subsystems that a host may connect, and their addresses.

use std::fs::File;
use std::io;
use std::path::Path;

use crate::fabrics::ConnectError;
use crate::ioctl::{self, Command, Queue};
use crate::limits::{DISCOVERY_READS_MAX, DISCOVERY_RECORDS_MAX, LOG_CHUNK_BYTES, TEXT_CHARS_MAX};

/// Get Log Page (NVMe Base 5.16), and the page identifier.
const OPCODE_GET_LOG_PAGE: u8 = 0x02;
const DISCOVERY_PAGE: u32 = 0x70;

/// Length of the page's header and of each of its records.
const RECORD_BYTES: usize = 1024;

/// The subject of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// Another discovery service.
    Referral,
    /// A subsystem.
    Subsystem,
    /// The discovery service itself.
    Itself,
    /// Any other.
    Other(u8),
}

/// One port of one subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its kind.
    pub kind: RecordKind,
    /// `tcp`, `rdma`, `fc`, `loop`, or the number.
    pub transport: String,
    /// Subsystem.
    pub nqn: String,
    /// Address.
    pub traddr: String,
    /// Port.
    pub trsvcid: String,
    /// The target's number for the port.
    pub port_id: u16,
    /// Whether the port requires TLS or another secure channel (`TREQ`); `None` if not specified.
    pub secure_channel: Option<bool>,
}

/// Why a log was not read.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// The discovery controller could not be connected.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A command failed.
    #[error("cannot read the discovery log: {0}")]
    Read(io::Error),
    /// A command was refused, with this NVMe status.
    #[error("the discovery controller refused to give its log, with status {0:#x}")]
    Status(u32),
    /// The log changed during each read.
    #[error("the discovery log keeps changing")]
    Restless,
    /// More records than are read.
    #[error("the discovery log has {0} records; at most {DISCOVERY_RECORDS_MAX} are read")]
    TooLong(u64),
    /// The format is unknown.
    #[error("the discovery log has format {0}, which is unknown")]
    Format(u16),
    /// The log was read, but the controller could not be disconnected.
    #[error("cannot disconnect the discovery controller: {0}")]
    Left(io::Error),
}

/// The header of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    generation: u64,
    records: u64,
    format: u16,
}

impl Header {
    fn parse(bytes: &[u8; RECORD_BYTES]) -> Self {
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Self { generation: number(0), records: number(8), format: u16::from_le_bytes([bytes[16], bytes[17]]) }
    }
}

/// Reads the log of the discovery controller with this device.
pub(crate) fn read(device: &Path) -> Result<Vec<Record>, DiscoveryError> {
    let file = File::open(device).map_err(DiscoveryError::Read)?;
    read_by(|offset, data| {
        let dwords = u32::try_from(data.len() / 4 - 1).expect("chunks are small");
        let command = Command {
            opcode: OPCODE_GET_LOG_PAGE,
            // NVMe Base 5.16: the number of dwords is split into two halves, as is the offset.
            cdw10: DISCOVERY_PAGE | dwords << 16,
            cdw11: dwords >> 16,
            cdw12: offset as u32,
            cdw13: (offset >> 32) as u32,
            ..Command::default()
        };
        match ioctl::passthrough(&file, Queue::Admin, command, data).map_err(DiscoveryError::Read)? {
            0 => Ok(()),
            status => Err(DiscoveryError::Status(status & 0x7ff)),
        }
    })
}

fn read_by(
    mut get: impl FnMut(u64, &mut [u8]) -> Result<(), DiscoveryError>,
) -> Result<Vec<Record>, DiscoveryError> {
    let mut before = header(&mut get)?;
    for _ in 0..DISCOVERY_READS_MAX {
        if before.format != 0 {
            return Err(DiscoveryError::Format(before.format));
        }
        if before.records > DISCOVERY_RECORDS_MAX {
            return Err(DiscoveryError::TooLong(before.records));
        }
        let mut data = vec![0; before.records as usize * RECORD_BYTES];
        let mut offset = RECORD_BYTES as u64;
        for chunk in data.chunks_mut(LOG_CHUNK_BYTES) {
            get(offset, chunk)?;
            offset += chunk.len() as u64;
        }
        let after = header(&mut get)?;
        if after == before {
            return Ok(data.as_chunks().0.iter().map(record).collect());
        }
        before = after;
    }
    Err(DiscoveryError::Restless)
}

fn header(
    get: &mut impl FnMut(u64, &mut [u8]) -> Result<(), DiscoveryError>,
) -> Result<Header, DiscoveryError> {
    let mut bytes = [0; RECORD_BYTES];
    get(0, &mut bytes)?;
    Ok(Header::parse(&bytes))
}

fn record(bytes: &[u8; RECORD_BYTES]) -> Record {
    let transport = match bytes[0] {
        1 => "rdma".into(),
        2 => "fc".into(),
        3 => "tcp".into(),
        254 => "loop".into(),
        other => other.to_string(),
    };
    let kind = match bytes[2] {
        1 => RecordKind::Referral,
        2 => RecordKind::Subsystem,
        3 => RecordKind::Itself,
        other => RecordKind::Other(other),
    };
    Record {
        kind,
        transport,
        secure_channel: match bytes[3] & 3 {
            1 => Some(true),
            2 => Some(false),
            _ => None,
        },
        port_id: u16::from_le_bytes([bytes[4], bytes[5]]),
        trsvcid: text(&bytes[32..64]),
        nqn: text(&bytes[256..512]),
        traddr: text(&bytes[512..768]),
    }
}

/// A field that is padded with zeros, or with spaces by older targets.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    let text = String::from_utf8_lossy(&bytes[..end]);
    text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).take(TEXT_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(generation: u64, records: &[(u8, u8, &str, &str, &str)]) -> Vec<u8> {
        let mut page = vec![0; RECORD_BYTES];
        page[..8].copy_from_slice(&generation.to_le_bytes());
        page[8..16].copy_from_slice(&(records.len() as u64).to_le_bytes());
        for (transport, kind, nqn, traddr, trsvcid) in records {
            let mut record = [0; RECORD_BYTES];
            (record[0], record[2], record[3], record[4]) = (*transport, *kind, 1, 7);
            record[32..64].fill(b' ');
            for (at, text) in [(32, trsvcid), (256, nqn), (512, traddr)] {
                record[at..at + text.len()].copy_from_slice(text.as_bytes());
            }
            page.extend(record);
        }
        page
    }

    fn read_page(mut pages: impl FnMut(usize) -> Vec<u8>) -> Result<Vec<Record>, DiscoveryError> {
        let mut commands = 0;
        read_by(|offset, data| {
            assert!(data.len() <= LOG_CHUNK_BYTES && data.len().is_multiple_of(4));
            let page = pages(commands);
            commands += 1;
            // A target returns zeros beyond the end.
            let offset = usize::try_from(offset).expect("small");
            let from = page.get(offset..).unwrap_or_default();
            let count = from.len().min(data.len());
            data.fill(0);
            data[..count].copy_from_slice(&from[..count]);
            Ok(())
        })
    }

    const POOL: (u8, u8, &str, &str, &str) = (3, 2, "nqn.2026-01.io.example:pool", "192.168.77.1", "4420");

    #[test]
    fn discovery_records_are_read_in_chunks_and_returned_in_order() {
        let other = (1, 3, crate::DISCOVERY_NQN, "fd00::1", "4421");
        let all: Vec<_> = std::iter::repeat_n(POOL, 9).chain([other]).collect();
        let page = page(4, &all);
        let records = read_page(|_| page.clone()).expect("a log");
        assert_eq!(records.len(), 10);
        assert_eq!(
            records[0],
            Record {
                kind: RecordKind::Subsystem,
                transport: "tcp".into(),
                nqn: "nqn.2026-01.io.example:pool".into(),
                traddr: "192.168.77.1".into(),
                trsvcid: "4420".into(),
                port_id: 7,
                secure_channel: Some(true),
            }
        );
        assert_eq!((records[9].kind, records[9].transport.as_str()), (RecordKind::Itself, "rdma"));
    }

    #[test]
    fn discovery_log_is_reread_if_its_generation_changes() {
        let (old, new) = (page(1, &[POOL]), page(2, &[POOL, POOL]));
        let records = read_page(|command| if command < 2 { old.clone() } else { new.clone() });
        assert_eq!(records.expect("a log").len(), 2);
        let restless = read_page(|command| page(command as u64, &[POOL]));
        assert!(matches!(restless, Err(DiscoveryError::Restless)), "{restless:?}");
    }

    #[test]
    fn discovery_log_with_bad_length_or_format_is_rejected() {
        let mut long = page(1, &[]);
        long[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(read_page(|_| long.clone()), Err(DiscoveryError::TooLong(u64::MAX))));
        let mut format = page(1, &[]);
        format[16] = 9;
        assert!(matches!(read_page(|_| format.clone()), Err(DiscoveryError::Format(9))));
        assert_eq!(read_page(|_| page(1, &[])).expect("a log"), []);
    }
}
