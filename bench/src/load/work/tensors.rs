//! READs of tensors: sizes vary, and a few adjacent tensors are read in a row.

use anyhow::{Result, ensure};
use forebay_smb::ids::FileId;

use super::Random;
use crate::load::connection::{Answer, Connection};
use crate::load::plan::Plan;
use crate::load::pump::{Step, Work};
use crate::load::request::{Opening, Request};

/// Sizes and offsets are multiples of this.
const UNIT_BYTES: u64 = 4096;

/// Minimum and maximum number of READs in a row.
const ROW_MIN: u64 = 8;
const ROW_MAX: u64 = 32;

/// One connection's READs of all files.
pub(crate) struct Tensors {
    handles: Vec<FileId>,
    row: Row,
    /// For each slot: the requested number of bytes.
    slots: Vec<usize>,
}

impl Tensors {
    /// Opens the files.
    pub(crate) fn prepare(connection: &mut Connection, plan: &Plan, random: Random) -> Result<Self> {
        let mut handles = Vec::new();
        for number in 0..plan.files {
            handles.push(connection.create(&plan.file_name(number), number as u64, Opening::READ)?);
        }
        let row = Row {
            random,
            files: plan.files as u64,
            file_units: plan.file_bytes / UNIT_BYTES,
            tensor_units_max: (plan.io_bytes as u64 / UNIT_BYTES).max(1),
            file: 0,
            unit: 0,
            left: 0,
        };
        Ok(Self { handles, row, slots: vec![0; plan.depth] })
    }
}

/// The position of the next READ.
struct Row {
    random: Random,
    files: u64,
    file_units: u64,
    tensor_units_max: u64,
    file: u64,
    unit: u64,
    /// READs until the next jump.
    left: u64,
}

impl Row {
    /// File, offset, length.
    fn next(&mut self) -> (usize, u64, u64) {
        if self.left == 0 || self.unit >= self.file_units {
            self.file = self.random.below(self.files);
            self.unit = self.random.below(self.file_units);
            self.left = ROW_MIN + self.random.below(ROW_MAX - ROW_MIN + 1);
        }
        let units = (1 + self.random.below(self.tensor_units_max)).min(self.file_units - self.unit);
        let at = self.unit;
        self.unit += units;
        self.left -= 1;
        (self.file as usize, at * UNIT_BYTES, units * UNIT_BYTES)
    }
}

impl Work for Tensors {
    fn begin(&mut self, slot: usize, request: &mut Request) -> Result<bool> {
        let (file, offset, length) = self.row.next();
        self.slots[slot] = length as usize;
        request.set_read(self.handles[file], offset, u32::try_from(length)?);
        Ok(true)
    }

    fn answered(&mut self, slot: usize, answer: &Answer<'_>, _: &mut Request) -> Result<Step> {
        answer.check("READ")?;
        let wanted = self.slots[slot];
        ensure!(answer.read_bytes == wanted, "a READ of {wanted} B gave {}", answer.read_bytes);
        Ok(Step::Done(wanted as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_mostly_contiguous_and_within_the_files() {
        let mut row = Row {
            random: Random::new(1),
            files: 3,
            file_units: 1000,
            tensor_units_max: 32,
            file: 0,
            unit: 0,
            left: 0,
        };
        let (mut in_a_row, mut end) = (0, (0, 0));
        for _ in 0..10_000 {
            let (file, offset, length) = row.next();
            assert!(file < 3 && offset + length <= 1000 * UNIT_BYTES);
            assert!((UNIT_BYTES..=32 * UNIT_BYTES).contains(&length));
            in_a_row += u32::from((file, offset) == end);
            end = (file, offset + length);
        }
        assert!((8_000..9_900).contains(&in_a_row), "{in_a_row}");
    }
}
