//! Open a directory, query its entries until there are no more, close it.

use anyhow::{Result, ensure};
use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::{Command, query_directory};

use crate::load::connection::Answer;
use crate::load::plan::{DIRECTORY, Plan};
use crate::load::pump::{Step, Work};
use crate::load::request::{Opening, Request};

/// One connection's listings.
pub(crate) struct Listings {
    files: u64,
    /// For each slot: the directory, and the number of entries so far.
    slots: Vec<(FileId, u64)>,
}

impl Listings {
    pub(crate) fn new(plan: &Plan) -> Self {
        Self { files: plan.files as u64, slots: vec![(FileId::default(), 0); plan.depth] }
    }
}

impl Work for Listings {
    fn begin(&mut self, _: usize, request: &mut Request) -> Result<bool> {
        request.set_create(DIRECTORY, Opening::DIRECTORY);
        Ok(true)
    }

    fn answered(&mut self, slot: usize, answer: &Answer<'_>, request: &mut Request) -> Result<Step> {
        let (directory, entries) = &mut self.slots[slot];
        match answer.header.command {
            Command::CREATE => (*directory, *entries) = (answer.opened(DIRECTORY)?, 0),
            Command::QUERY_DIRECTORY if answer.header.status == NtStatus::NO_MORE_FILES => {
                // Some servers return `.` and `..`, others do not.
                ensure!(
                    (self.files..=self.files + 2).contains(entries),
                    "a listing has {entries} entries instead of {}",
                    self.files
                );
                request.set_close(*directory);
                return Ok(Step::Next);
            }
            Command::QUERY_DIRECTORY => {
                answer.check("QUERY_DIRECTORY")?;
                *entries += count(query_directory::Response::parse(answer.message)?.output_buffer);
            }
            _ => {
                answer.check("CLOSE")?;
                return Ok(Step::Done(0));
            }
        }
        request.set_query_directory(*directory);
        Ok(Step::Next)
    }
}

/// Counts the entries of one response: each contains the offset of the next one ([MS-FSCC] 2.4.21).
fn count(mut entries: &[u8]) -> u64 {
    let mut count = 0;
    while let Some(next) = entries.first_chunk::<4>() {
        count += 1;
        match u32::from_le_bytes(*next) as usize {
            0 => break,
            next => entries = entries.get(next..).unwrap_or_default(),
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_smb::wire::fscc::FileInformationClass;
    use forebay_smb::wire::fscc::directory::{DirEncoder, DirEntry};

    #[test]
    fn directory_entries_encoded_by_the_codec_are_counted() {
        for wanted in [0, 1, 5] {
            let mut out = Vec::new();
            let class = FileInformationClass::FILE_ID_FULL_DIRECTORY_INFORMATION;
            let mut encoder = DirEncoder::new(class, &mut out, 10_000).expect("a class of entries");
            for number in 0..wanted {
                let entry = DirEntry { name: format!("file {number}").into(), ..DirEntry::default() };
                assert!(encoder.push(&entry));
            }
            assert_eq!(count(&out), wanted);
        }
    }
}
