//! Create a file and close it, open it for removal and close it.

use anyhow::Result;
use forebay_smb::wire::Command;

use crate::load::connection::Answer;
use crate::load::plan::{PREFIX, Plan};
use crate::load::pump::{Step, Work};
use crate::load::request::{Opening, Request};

/// One connection's files.
pub(crate) struct Creations {
    prefix: String,
    count: u64,
    /// For each slot: the file's name, and whether it is being removed.
    slots: Vec<(String, bool)>,
}

impl Creations {
    /// For connection number `index`; names differ between connections and runs.
    pub(crate) fn new(plan: &Plan, index: usize, round: u32) -> Self {
        Self {
            prefix: format!("{PREFIX}{round}-{index}-"),
            count: 0,
            slots: vec![(String::new(), false); plan.depth],
        }
    }
}

impl Work for Creations {
    fn begin(&mut self, slot: usize, request: &mut Request) -> Result<bool> {
        let name = format!("{}{}", self.prefix, self.count);
        self.count += 1;
        request.set_create(&name, Opening::NEW);
        self.slots[slot] = (name, false);
        Ok(true)
    }

    fn answered(&mut self, slot: usize, answer: &Answer<'_>, request: &mut Request) -> Result<Step> {
        let (name, is_removal) = &mut self.slots[slot];
        if answer.header.command == Command::CREATE {
            request.set_close(answer.opened(name)?);
            return Ok(Step::Next);
        }
        answer.check("CLOSE")?;
        if *is_removal {
            return Ok(Step::Done(0));
        }
        *is_removal = true;
        request.set_create(name, Opening::REMOVE);
        Ok(Step::Next)
    }
}
