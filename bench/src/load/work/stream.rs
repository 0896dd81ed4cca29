//! READs or WRITEs of open files, in sequential or random order.

use std::sync::Arc;

use anyhow::{Result, ensure};
use forebay_smb::ids::FileId;
use forebay_smb::wire::write;

use super::Random;
use crate::load::connection::{Answer, Connection, payload};
use crate::load::plan::{Plan, Workload};
use crate::load::pump::{Step, Work};
use crate::load::request::{Opening, Request};

/// One connection's requests.
pub(crate) struct Stream {
    plan: Plan,
    handles: Vec<FileId>,
    /// The payload of WRITEs.
    payload: Option<Arc<[u8]>>,
    order: Order,
}

/// Selects the next block of this connection's files.
enum Order {
    Sequential { next: u64 },
    Random(Random),
}

impl Stream {
    /// Opens the files of this connection: its share of them for sequential order, all of them for random order.
    pub(crate) fn prepare(
        connection: &mut Connection,
        plan: &Plan,
        index: usize,
        random: Random,
    ) -> Result<Self> {
        let is_random = matches!(plan.workload, Workload::RandRead | Workload::RandWrite);
        let (how, payload) = if plan.workload.writes() {
            (Opening::WRITE, Some(payload(plan.io_bytes)))
        } else {
            (Opening::READ, None)
        };
        let numbers =
            if is_random { (0..plan.files).collect() } else { own(plan.files, plan.connections, index) };
        let mut handles = Vec::new();
        for number in numbers {
            handles.push(connection.create(&plan.file_name(number), number as u64, how)?);
        }
        let order = if is_random { Order::Random(random) } else { Order::Sequential { next: 0 } };
        Ok(Self { plan: plan.clone(), handles, payload, order })
    }

    fn next(&mut self) -> (FileId, u64) {
        let blocks = self.handles.len() as u64 * self.plan.blocks();
        let block = match &mut self.order {
            Order::Sequential { next } => {
                let block = *next;
                *next = (block + 1) % blocks;
                block
            }
            Order::Random(random) => random.below(blocks),
        };
        let (file, offset) = self.plan.place(block);
        (self.handles[file], offset)
    }
}

/// The files of one connection: every n-th, with n the number of connections, or a shared one if there are too few.
fn own(files: usize, connections: usize, index: usize) -> Vec<usize> {
    if index >= files {
        return vec![index % files];
    }
    (index..files).step_by(connections).collect()
}

impl Work for Stream {
    fn begin(&mut self, _: usize, request: &mut Request) -> Result<bool> {
        let (file_id, offset) = self.next();
        match &self.payload {
            Some(payload) => request.set_write(file_id, offset, payload),
            None => request.set_read(file_id, offset, u32::try_from(self.plan.io_bytes)?),
        }
        Ok(true)
    }

    fn answered(&mut self, _: usize, answer: &Answer<'_>, _: &mut Request) -> Result<Step> {
        let wanted = self.plan.io_bytes;
        let (what, got) = if self.payload.is_some() {
            answer.check("WRITE")?;
            ("WRITE", write::Response::parse(answer.message)?.count as usize)
        } else {
            answer.check("READ")?;
            ("READ", answer.read_bytes)
        };
        ensure!(got == wanted, "a {what} of {wanted} B moved {got} B");
        Ok(Step::Done(wanted as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_share_a_file_only_if_there_are_too_few() {
        assert_eq!((own(5, 2, 0), own(5, 2, 1)), (vec![0, 2, 4], vec![1, 3]));
        assert_eq!((own(2, 3, 1), own(2, 3, 2)), (vec![1], vec![0]));
    }
}
