//! File operations: contents on the engine, cached data immediately, everything else in lanes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use forebay_smb::engine::Disconnect;
use forebay_smb::fs::{FsOp, FsOpKind, FsReply, FsResult, OpId, Payload};
use forebay_smb::status::NtStatus;
use forebay_smb::time::Now;
use rustix::io::Errno;

use super::client::{Client, Link};
use super::{EventLoop, Note};
use crate::backend::directory::OpenFile;
use crate::backend::{self, directory, errno::status};
use crate::buffers::{FrameBuffer, ReadBuffer};
use crate::gate::Passage;
use crate::io::{Engine, Operation, PastCache, Purpose};
use crate::lanes::{Lane, Origin};
use crate::limits::DIRECT_READ_BYTES_MIN;
use crate::metrics::Metrics;
use crate::namespace;

impl<E: Engine> EventLoop<E> {
    /// Continues a WRITE after its data were fetched from the peer's memory: from here on it is like any other.
    pub(super) fn fetched(
        &mut self,
        now: Now,
        client: &mut Client,
        op: OpId,
        mut frame: FrameBuffer,
    ) -> Result<(), Disconnect> {
        let Some(kind) = client.fetching.remove(&op) else { return Ok(()) };
        let range = 0..frame.length();
        client.ops -= 1;
        client.write_bytes -= range.len() as u64;
        let FsOpKind::WriteRemote { handle, offset, proof, write_through, .. } = kind else { return Ok(()) };
        if let Some(Err(status)) = proof.map(|proof| proof.open(frame.bytes_mut())) {
            return self.answer(now, client, op, Err(status));
        }
        let kind = FsOpKind::Write { handle, offset, frame: Arc::new(frame), range, write_through };
        self.begin_admitted(now, client, FsOp { id: op, kind })
    }

    /// Starts a file system operation: file contents on the engine, everything else in a lane.
    pub(super) fn begin(&mut self, now: Now, client: &mut Client, op: FsOp) -> Result<(), Disconnect> {
        match self.within_limits(client, op) {
            Some(op) => self.begin_admitted(now, client, op),
            None => Ok(()),
        }
    }

    /// Like [`Self::begin`], for an operation that the limits of its volume already admitted.
    pub(super) fn begin_admitted(
        &mut self,
        now: Now,
        client: &mut Client,
        op: FsOp,
    ) -> Result<(), Disconnect> {
        match op.kind {
            FsOpKind::Read { .. } => match self.mapped(client, &op.kind) {
                Some(reply) => self.answer(now, client, op.id, Ok(reply))?,
                None => client.reads_waiting.push_back(op),
            },
            FsOpKind::Write { .. } | FsOpKind::WriteRemote { .. } => {
                client.write_bytes += written_bytes(&op.kind);
                client.writes_waiting.push_back(op);
            }
            // Too many descriptors wait to be closed: this CLOSE waits for its turn.
            FsOpKind::Close { .. } if self.shared.lanes.queues().closes_are_late() => {
                self.work(client, op);
            }
            // Operations that the kernel answers from memory need no other thread.
            kind => match backend::execute_cached(kind) {
                Ok(result) => self.answer(now, client, op.id, result)?,
                Err(kind) => self.work(client, FsOp { id: op.id, kind }),
            },
        }
        Ok(())
    }

    /// Starts a WRITE. Returns it if there is no memory for it.
    pub(super) fn write(&mut self, client: &mut Client, op: FsOp) -> Result<Option<FsOp>, Disconnect> {
        match op.kind {
            FsOpKind::Write { handle, offset, frame, range, write_through } => {
                let file = match directory::file(&handle) {
                    Ok(file) if directory::data::writes_directly(&file, offset, range.len()) => file,
                    _ => {
                        client.write_bytes -= range.len() as u64;
                        let kind = FsOpKind::Write { handle, offset, frame, range, write_through };
                        self.work(client, FsOp { id: op.id, kind });
                        return Ok(None);
                    }
                };
                let durable = write_through || file.write_through();
                let Ok(change) = Passage::begin(file) else {
                    client.write_bytes -= range.len() as u64;
                    let kind = FsOpKind::Write { handle, offset, frame, range, write_through };
                    self.hold(client, FsOp { id: op.id, kind });
                    return Ok(None);
                };
                client.ops += 1;
                self.turn.count(client.priority, range.len());
                let operation = Operation::Write { change, frame, range, offset, written: 0, durable };
                self.engine.submit(client.token(Purpose::File(op.id, Instant::now())), operation);
            }
            FsOpKind::WriteRemote { ref source, length, .. } => {
                let Link::SmbDirect(link) = &mut client.link else {
                    return Err(Disconnect("a peer's memory where there is no RDMA"));
                };
                let Some(buffer) = client.memory.take(length as usize) else { return Ok(Some(op)) };
                link.fetch(op.id, source, length, buffer)?;
                client.ops += 1;
                client.fetching.insert(op.id, op.kind);
            }
            _ => return Err(Disconnect("only writes wait")),
        }
        Ok(None)
    }

    /// Answers a READ if the kernel can copy its data from the page cache while it sends them.
    pub(super) fn mapped(&self, client: &Client, kind: &FsOpKind) -> Option<FsReply> {
        let FsOpKind::Read { handle, offset, length, plain: true } = kind else { return None };
        let Link::Tcp(_) = client.link else { return None };
        let read = directory::file(handle).ok()?.mapped_read(*offset, *length)?;
        self.shared.metrics.file_read(read.length(), 0);
        Some(FsReply::Read(Box::new(read)))
    }

    /// Starts a READ. Returns it if there is no memory for it.
    pub(super) fn read(&mut self, client: &mut Client, op: FsOp) -> Result<Option<FsOp>, Disconnect> {
        let FsOpKind::Read { handle, offset, length, plain } = op.kind else {
            return Err(Disconnect("only reads wait"));
        };
        let file = match directory::file(&handle) {
            Ok(file) if directory::data::reads_directly(&file, offset, length) => file,
            _ => {
                let kind = FsOpKind::Read { handle, offset, length, plain };
                self.work(client, FsOp { id: op.id, kind });
                return Ok(None);
            }
        };
        let length = length as usize;
        let direct = self.shared.direct_reads
            && length >= DIRECT_READ_BYTES_MIN
            && matches!(client.link, Link::SmbDirect(_));
        if direct && !file.direct_is_prepared() {
            let kind = FsOpKind::Read { handle, offset, length: length as u32, plain };
            self.prepare_direct(client, file, FsOp { id: op.id, kind });
            return Ok(None);
        }
        let Some(buffer) = client.memory.take(length) else {
            let kind = FsOpKind::Read { handle, offset, length: length as u32, plain };
            return Ok(Some(FsOp { id: op.id, kind }));
        };
        self.turn.count(client.priority, length);
        client.ops += 1;
        client.read_bytes += length as u64;
        let asked = direct.then(|| file.direct_length(offset, length, buffer.capacity())).flatten();
        let past_cache = PastCache { asked: asked.unwrap_or(0), came: 0 };
        let operation = Operation::Read { file, buffer, offset, length, filled: 0, past_cache };
        self.engine.submit(client.token(Purpose::File(op.id, Instant::now())), operation);
        Ok(None)
    }

    /// Determines in a lane how reads of a file can bypass the page cache; the READ that needs it is returned afterwards.
    pub(super) fn prepare_direct(&self, client: &mut Client, file: Arc<OpenFile>, op: FsOp) {
        client.ops += 1;
        client.lanes.begun(Lane::Data);
        let (id, inbox) = (client.id, self.inbox.clone());
        self.shared.lanes.queues().submit(Lane::Data, Origin::Connection(id.0), move || {
            file.prepare_direct();
            inbox.post(Note::Prepared(id, op));
        });
    }

    /// Executes an operation in its lane, once there is room for it.
    pub(super) fn work(&self, client: &mut Client, op: FsOp) {
        client.lanes.queue(backend::lane(&op.kind), op);
    }

    pub(super) fn run_in(&self, client: &mut Client, lane: Lane, op: FsOp) {
        client.ops += 1;
        let (id, inbox) = (client.id, self.inbox.clone());
        let origin = match lane {
            // Queued behind the descriptors that were dropped before.
            Lane::Close => Origin::Server,
            Lane::LookUp | Lane::Change | Lane::Data | Lane::Sync | Lane::Vouch => Origin::Connection(id.0),
        };
        let buffers = client.memory.buffers().clone();
        let queues = self.shared.lanes.queues().clone();
        self.shared.lanes.queues().submit(lane, origin, move || {
            let _change = match backend::gate(&op.kind).cloned().map(Passage::begin).transpose() {
                Ok(change) => change,
                Err(_) => return inbox.post(Note::Held(id, lane, op)),
            };
            let begun = Instant::now();
            let execute = AssertUnwindSafe(|| backend::execute(op.kind, &buffers));
            // The request is always answered: a client that waits forever is worse than an error.
            let result = catch_unwind(execute).unwrap_or(Err(NtStatus::INTERNAL_ERROR));
            let answer = Note::Answered(id, lane, op.id, result);
            if lane.promises() && namespace::wants_vouching(begun) {
                // This can take as long as the target does not answer, and other jobs need this thread.
                queues.submit(Lane::Vouch, origin, move || {
                    namespace::vouch(begun);
                    inbox.post(answer);
                });
            } else {
                inbox.post(answer);
            }
        });
    }

    /// Answers once it is certain that the target did not lose the durable data in the meantime.
    pub(super) fn vouch(&self, client: &mut Client, op: OpId, begun: Instant, result: FsResult) {
        client.ops += 1;
        client.lanes.begun(Lane::Vouch);
        let (id, inbox) = (client.id, self.inbox.clone());
        self.shared.lanes.queues().submit(Lane::Vouch, Origin::Connection(id.0), move || {
            namespace::vouch(begun);
            inbox.post(Note::Answered(id, Lane::Vouch, op, result));
        });
    }
}

/// Bytes that a WRITE writes.
pub(super) fn written_bytes(kind: &FsOpKind) -> u64 {
    match kind {
        FsOpKind::Write { range, .. } => range.len() as u64,
        FsOpKind::WriteRemote { length, .. } => u64::from(*length),
        _ => 0,
    }
}

/// Converts a completed engine operation to its answer.
pub(super) fn file_result(
    client: &mut Client,
    metrics: &Metrics,
    operation: Operation,
    result: Result<(), Errno>,
) -> FsResult {
    match operation {
        Operation::Read { buffer, length, filled, past_cache, .. } => {
            client.read_bytes -= length as u64;
            result.map_err(status)?;
            metrics.file_read(filled, past_cache.came);
            if matches!(client.link, Link::SmbDirect(_)) {
                metrics.rdma_page_cache_bytes.inc_by(filled.saturating_sub(past_cache.came) as u64);
            }
            if filled == 0 && length > 0 {
                return Err(NtStatus::END_OF_FILE);
            }
            Ok(FsReply::Read(Box::new(ReadBuffer::new(buffer, filled))))
        }
        Operation::Write { range, written, .. } => {
            client.write_bytes -= range.len() as u64;
            result.map_err(status)?;
            if matches!(client.link, Link::SmbDirect(_)) {
                metrics.rdma_page_cache_bytes.inc_by(written as u64);
            }
            // The kernel writes less than requested only if there is no space.
            if written < range.len() {
                Err(NtStatus::DISK_FULL)
            } else {
                Ok(FsReply::Written(written as u32))
            }
        }
        Operation::Receive { .. } | Operation::Send { .. } | Operation::Readable { .. } => {
            Err(NtStatus::INTERNAL_ERROR)
        }
    }
}
