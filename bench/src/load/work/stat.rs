//! Open a file for its attributes, query them, close it.

use anyhow::{Result, ensure};
use forebay_smb::ids::FileId;
use forebay_smb::wire::{Command, query_info};

use super::Random;
use crate::load::connection::Answer;
use crate::load::plan::Plan;
use crate::load::pump::{Step, Work};
use crate::load::request::{Opening, Request};

/// Bytes of FileAllInformation before the name ([MS-FSCC] 2.4.2).
const ALL_INFORMATION_LEN: usize = 100;

/// One connection's queries.
pub(crate) struct Stats {
    plan: Plan,
    random: Random,
    /// For each slot: the open file.
    open: Vec<FileId>,
}

impl Stats {
    pub(crate) fn new(plan: &Plan, random: Random) -> Self {
        Self { plan: plan.clone(), random, open: vec![FileId::default(); plan.depth] }
    }
}

impl Work for Stats {
    fn begin(&mut self, _: usize, request: &mut Request) -> Result<bool> {
        let number = self.random.below(self.plan.files as u64) as usize;
        request.set_create(&self.plan.file_name(number), Opening::ATTRIBUTES);
        Ok(true)
    }

    fn answered(&mut self, slot: usize, answer: &Answer<'_>, request: &mut Request) -> Result<Step> {
        match answer.header.command {
            Command::CREATE => {
                self.open[slot] = answer.opened("a file")?;
                request.set_query_info(self.open[slot]);
            }
            Command::QUERY_INFO => {
                answer.check("QUERY_INFO")?;
                let got = query_info::Response::parse(answer.message)?.output_buffer.len();
                ensure!(got >= ALL_INFORMATION_LEN, "FileAllInformation has {got} B");
                request.set_close(self.open[slot]);
            }
            _ => {
                answer.check("CLOSE")?;
                return Ok(Step::Done(0));
            }
        }
        Ok(Step::Next)
    }
}
