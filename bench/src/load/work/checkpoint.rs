//! Save a checkpoint: write a new file, flush it, rename it over the previous one.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use forebay_smb::ids::FileId;
use forebay_smb::wire::write;

use crate::load::connection::{Answer, Connection, payload};
use crate::load::files::check_pieces;
use crate::load::plan::{Plan, pieces};
use crate::load::pump::{Step, Tally, Work, pump};
use crate::load::request::{Opening, Request};

/// One rank of a training job.
pub(crate) struct Rank {
    name: String,
    file_bytes: u64,
    payload: Arc<[u8]>,
}

impl Rank {
    pub(crate) fn new(plan: &Plan, index: usize) -> Self {
        Self::with_sizes(plan.file_name(index), plan.file_bytes, plan.io_bytes)
    }

    /// For a file of `file_bytes` that is written in pieces of `io_bytes`.
    pub(crate) fn with_sizes(name: String, file_bytes: u64, io_bytes: usize) -> Self {
        Self { name, file_bytes, payload: payload(io_bytes) }
    }

    /// Saves until the time is over, and at least once. An operation is a whole checkpoint.
    pub(crate) fn run(&self, connection: &mut Connection, depth: usize, until: Instant) -> Result<Tally> {
        let mut tally = Tally::default();
        loop {
            let began = Instant::now();
            let bytes = self.save(connection, depth, None)?;
            tally.record(began, bytes);
            if Instant::now() >= until {
                return Ok(tally);
            }
        }
    }

    /// Saves one checkpoint and returns its size. It is truncated if the time is over before.
    pub(crate) fn save(
        &self,
        connection: &mut Connection,
        depth: usize,
        until: Option<Instant>,
    ) -> Result<u64> {
        let file_id = connection.create(&format!("{}.new", self.name), 0, Opening::REPLACE)?;
        let pieces = pieces(self.file_bytes, self.payload.len()).collect::<Vec<_>>().into_iter();
        let written =
            pump(connection, &mut Writes { file_id, pieces, payload: &self.payload }, depth, until)?;
        let mut request = Request::default();
        request.set_flush(file_id);
        connection.call(&mut request)?.check("FLUSH")?;
        request.set_rename(file_id, &self.name);
        connection.call(&mut request)?.check("SET_INFO (rename)")?;
        connection.close(file_id)?;
        Ok(written.bytes)
    }

    /// Reads back the checkpoint, which has `bytes`, and compares it.
    pub(crate) fn check(&self, connection: &mut Connection, bytes: u64) -> Result<()> {
        let file_id = connection.create(&self.name, 0, Opening::READ)?;
        check_pieces(connection, file_id, pieces(bytes, self.payload.len()), &self.payload)
            .with_context(|| format!("check what {} holds", self.name))?;
        connection.close(file_id)
    }
}

/// The WRITEs of one file.
struct Writes<'a> {
    file_id: FileId,
    pieces: std::vec::IntoIter<(u64, usize)>,
    payload: &'a Arc<[u8]>,
}

impl Work for Writes<'_> {
    fn begin(&mut self, _: usize, request: &mut Request) -> Result<bool> {
        let Some((offset, count)) = self.pieces.next() else { return Ok(false) };
        if count == self.payload.len() {
            request.set_write(self.file_id, offset, self.payload);
        } else {
            request.set_write(self.file_id, offset, &self.payload[..count].into());
        }
        Ok(true)
    }

    fn answered(&mut self, _: usize, answer: &Answer<'_>, request: &mut Request) -> Result<Step> {
        answer.check("WRITE")?;
        let wanted = request.payload().map_or(0, |payload| payload.len());
        let got = write::Response::parse(answer.message)?.count as usize;
        ensure!(got == wanted, "a WRITE of {wanted} B moved {got} B");
        Ok(Step::Done(wanted as u64))
    }
}
