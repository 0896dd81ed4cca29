//! Open a file, read it completely, close it: as training reads samples.

use anyhow::{Result, ensure};
use forebay_smb::ids::FileId;
use forebay_smb::wire::Command;

use super::Random;
use crate::load::connection::Answer;
use crate::load::plan::Plan;
use crate::load::pump::{Step, Work};
use crate::load::request::{Opening, Request};

/// One connection's files.
pub(crate) struct Files {
    plan: Plan,
    random: Random,
    /// For each slot: the open file, and how many bytes of it were read.
    open: Vec<(FileId, u64)>,
}

impl Files {
    pub(crate) fn new(plan: &Plan, random: Random) -> Self {
        Self { plan: plan.clone(), random, open: vec![(FileId::default(), 0); plan.depth] }
    }

    fn length(&self, done: u64) -> u64 {
        (self.plan.io_bytes as u64).min(self.plan.file_bytes - done)
    }
}

impl Work for Files {
    fn begin(&mut self, _: usize, request: &mut Request) -> Result<bool> {
        let number = self.random.below(self.plan.files as u64) as usize;
        request.set_create(&self.plan.file_name(number), Opening::READ);
        Ok(true)
    }

    fn answered(&mut self, slot: usize, answer: &Answer<'_>, request: &mut Request) -> Result<Step> {
        let size = self.plan.file_bytes;
        match answer.header.command {
            Command::CREATE => self.open[slot] = (answer.opened("a file")?, 0),
            Command::READ => {
                answer.check("READ")?;
                let (_, done) = self.open[slot];
                let wanted = self.length(done);
                ensure!(
                    answer.read_bytes as u64 == wanted,
                    "a READ of {wanted} B gave {}",
                    answer.read_bytes
                );
                self.open[slot].1 += wanted;
            }
            _ => {
                answer.check("CLOSE")?;
                return Ok(Step::Done(size));
            }
        }
        let (file_id, done) = self.open[slot];
        if done < size {
            request.set_read(file_id, done, u32::try_from(self.length(done))?);
        } else {
            request.set_close(file_id);
        }
        Ok(Step::Next)
    }
}
