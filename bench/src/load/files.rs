//! The measured files. The client itself creates and checks them outside of the timed part, so that every server has real
//! data.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::{Command, read};

use super::connection::{Answer, Connection, payload};
use super::content;
use super::plan::{DIRECTORY, Plan, Workload, checkpoint_name};
use super::pump::{Step, Work, pump};
use super::request::{Opening, Request};
use super::target::Target;

/// Requests in flight while files are created.
const DEPTH: usize = 8;

/// Creates all files that the workload needs, and checks their content.
pub(crate) fn make(target: &Target, plan: &Plan) -> Result<()> {
    let mut connection = target.connect(plan)?;
    match plan.workload {
        Workload::Create | Workload::Checkpoint => {}
        Workload::List => {
            let directory = connection.create(DIRECTORY, 0, Opening::MAKE_DIRECTORY)?;
            connection.close(directory)?;
            open_all(&mut connection, plan, Opening::WRITE)?;
        }
        _ => {
            for number in 0..plan.files {
                let file_id = connection.create(&plan.file_name(number), number as u64, Opening::REPLACE)?;
                let pieces: Vec<_> = plan.pieces().collect();
                let mut work = Fill { file: number as u64, file_id, pieces: pieces.into_iter() };
                pump(&mut connection, &mut work, DEPTH, None).context("fill the files")?;
                connection.close(file_id)?;
            }
            check_with(&mut connection, plan)?;
        }
    }
    Ok(())
}

/// Checks the content of the files after the runs.
pub(crate) fn check(target: &Target, plan: &Plan) -> Result<()> {
    check_with(&mut target.connect(plan)?, plan)
}

fn check_with(connection: &mut Connection, plan: &Plan) -> Result<()> {
    // Blocks that the load has written contain its payload.
    let written = plan.workload.writes().then(|| payload(plan.io_bytes));
    for number in 0..plan.files {
        let name = plan.file_name(number);
        let file_id = connection.create(&name, number as u64, Opening::READ)?;
        let pieces: Vec<_> = plan.pieces().collect();
        let mut work = Check {
            file: number as u64,
            file_id,
            pieces: pieces.into_iter(),
            slots: vec![(0, 0); DEPTH],
            written: written.clone(),
        };
        pump(connection, &mut work, DEPTH, None).with_context(|| format!("check what {name} holds"))?;
        connection.close(file_id)?;
    }
    Ok(())
}

/// Reads the pieces of a file, each of which contains the beginning of `payload`.
pub(crate) fn check_pieces(
    connection: &mut Connection,
    file_id: FileId,
    pieces: impl Iterator<Item = (u64, usize)>,
    payload: &Arc<[u8]>,
) -> Result<()> {
    let mut work = Check {
        file: NO_FILE,
        file_id,
        pieces: pieces.collect::<Vec<_>>().into_iter(),
        slots: vec![(0, 0); DEPTH],
        written: Some(Arc::clone(payload)),
    };
    pump(connection, &mut work, DEPTH, None).map(drop)
}

/// The number of a file that contains only payload.
const NO_FILE: u64 = 0xff_fffe;

/// Removes all files from a server that is not ours.
pub(crate) fn remove(target: &Target, plan: &Plan) -> Result<()> {
    let mut connection = target.connect(plan)?;
    open_all(&mut connection, plan, Opening::REMOVE)?;
    if plan.workload == Workload::Mixed {
        for number in plan.connections..plan.all_connections() {
            let file_id = connection.create(&checkpoint_name(number), 0, Opening::REMOVE)?;
            connection.close(file_id)?;
        }
    }
    if plan.workload == Workload::List {
        let mut how = Opening::REMOVE;
        how.options |= Opening::DIRECTORY.options;
        let directory = connection.create(DIRECTORY, 0, how)?;
        connection.close(directory)?;
    }
    Ok(())
}

fn open_all(connection: &mut Connection, plan: &Plan, how: Opening) -> Result<()> {
    let mut work = OpenAll { plan, next: 0, how };
    pump(connection, &mut work, DEPTH, None).map(drop)
}

/// Opens and closes each file.
struct OpenAll<'a> {
    plan: &'a Plan,
    next: usize,
    how: Opening,
}

impl Work for OpenAll<'_> {
    fn begin(&mut self, _: usize, request: &mut Request) -> Result<bool> {
        if self.next == self.plan.files {
            return Ok(false);
        }
        request.set_create(&self.plan.file_name(self.next), self.how);
        self.next += 1;
        Ok(true)
    }

    fn answered(&mut self, _: usize, answer: &Answer<'_>, request: &mut Request) -> Result<Step> {
        if answer.header.command == Command::CREATE {
            request.set_close(answer.opened("a file")?);
            return Ok(Step::Next);
        }
        answer.check("CLOSE")?;
        Ok(Step::Done(0))
    }
}

/// Writes a file.
struct Fill {
    file: u64,
    file_id: FileId,
    pieces: std::vec::IntoIter<(u64, usize)>,
}

impl Work for Fill {
    fn begin(&mut self, _: usize, request: &mut Request) -> Result<bool> {
        let Some((offset, count)) = self.pieces.next() else { return Ok(false) };
        request.set_write(self.file_id, offset, &content::bytes(self.file, offset, count).into());
        Ok(true)
    }

    fn answered(&mut self, _: usize, answer: &Answer<'_>, _: &mut Request) -> Result<Step> {
        answer.check("WRITE")?;
        Ok(Step::Done(0))
    }
}

/// Reads a file and compares its content.
struct Check {
    file: u64,
    file_id: FileId,
    pieces: std::vec::IntoIter<(u64, usize)>,
    /// For each slot: the requested piece.
    slots: Vec<(u64, usize)>,
    written: Option<Arc<[u8]>>,
}

impl Work for Check {
    fn begin(&mut self, slot: usize, request: &mut Request) -> Result<bool> {
        let Some((offset, count)) = self.pieces.next() else { return Ok(false) };
        self.slots[slot] = (offset, count);
        request.set_read(self.file_id, offset, u32::try_from(count)?);
        Ok(true)
    }

    fn answered(&mut self, slot: usize, answer: &Answer<'_>, _: &mut Request) -> Result<Step> {
        let (offset, count) = self.slots[slot];
        let status = answer.header.status;
        ensure!(status == NtStatus::SUCCESS, "a READ of {count} B at {offset} was answered with {status:?}");
        let data = read::Response::parse(answer.message)?.data(answer.message)?;
        let is_payload = self.written.as_ref().is_some_and(|payload| payload[..count] == *data);
        ensure!(
            is_payload || data == content::bytes(self.file, offset, count),
            "the {} B at {offset} are not those that were written",
            data.len()
        );
        Ok(Step::Done(0))
    }

    fn keeps_payload(&self) -> bool {
        true
    }
}
