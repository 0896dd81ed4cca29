//! Execution of request chains, step by step: each chain runs until it waits for a backend or for another request.

use std::sync::Arc;

use super::Connection;
use crate::engine::commands;
use crate::engine::reports::{Disconnect, Event};
use crate::engine::request::chain::{Chain, ERROR_BODY, Waiting};
use crate::engine::request::core::OpOwner;
use crate::engine::request::step::{Ctx, Reply, Request, Resumption, Step, Wake};
use crate::engine::session::Share;
use crate::engine::tally::Taken;
use crate::fs::{FsOpKind, FsResult, OpId};
use crate::limits;
use crate::status::NtStatus;
use crate::time::Now;
use crate::wire::{Command, Header, HeaderFlags};

/// A request that waits for another one: the state that CANCEL and the limits need.
pub(super) struct Parked {
    pub(super) chain: u64,
    pub(super) message_id: u64,
    /// The session of the request.
    pub(super) session_id: u64,
    /// Whether the request was sealed.
    pub(super) sealed: bool,
    /// Bytes of its frame.
    bytes: u64,
    /// Its share of the volume's limits on waiting requests and on their bytes.
    _counted: Option<[Taken; 2]>,
}

/// Whether a chain continues after a step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// The chain continues with its next request.
    GoesOn,
    /// The chain waits until its current request resumes.
    Waits,
}

impl Connection {
    /// Takes a backend's result.
    ///
    /// # Errors
    /// [`Disconnect`] if a later request of the compound violates the protocol.
    pub fn complete(&mut self, now: Now, id: OpId, result: FsResult) -> Result<(), Disconnect> {
        let Some(OpOwner::Chain(chain_id)) = self.core.ops.remove(&id) else { return Ok(()) };
        let Some(mut chain) = self.chains.remove(&chain_id) else { return Ok(()) };
        let Some(Waiting { request, resumption }) = chain.waiting.take() else { return Ok(()) };
        let step = self.step(now, request, |ctx| resumption.complete(ctx, result));
        self.take_step(now, chain_id, chain, step)?;
        self.notify_own();
        Ok(())
    }

    /// Resumes a parked request.
    pub(super) fn wake(&mut self, now: Now, token: u64, reason: Wake) -> Result<(), Disconnect> {
        let Some(parked) = self.parked.remove(&token) else { return Ok(()) };
        self.parked_bytes -= parked.bytes;
        let Some(mut chain) = self.chains.remove(&parked.chain) else { return Ok(()) };
        let Some(Waiting { request, resumption }) = chain.waiting.take() else { return Ok(()) };
        let step = self.step(now, request, |ctx| resumption.wake(ctx, reason));
        self.take_step(now, parked.chain, chain, step)
    }

    /// Runs a chain until it waits or ends.
    pub(super) fn advance(&mut self, now: Now, id: u64, mut chain: Chain) -> Result<(), Disconnect> {
        while let Some((header, range)) = chain.requests.get(chain.next).cloned() {
            chain.next += 1;
            let mut request = Request {
                header,
                frame: Arc::clone(&chain.frame),
                range,
                session: None,
                tree: None,
                related_file: chain.related.file,
                related: header.flags.contains(HeaderFlags::RELATED_OPERATIONS),
                wake_token: 0,
                sealed: chain.sealed_for.is_some(),
                began: now,
                signing: None,
                by_rdma: false,
                invalidate: None,
                counted: None,
            };
            let (request, step) = match self.admit(now.instant, &mut chain, &mut request) {
                Err(step) => (request, step),
                Ok(()) => self.step(now, request, commands::dispatch),
            };
            if self.settle(id, &mut chain, request, step)? == Outcome::Waits {
                self.chains.insert(id, chain);
                return Ok(());
            }
        }
        self.pinned_bytes -= chain.pinned_bytes;
        self.push(chain.responses, chain.sealed_for);
        Ok(())
    }

    /// Runs one step of a request.
    fn step(
        &mut self,
        now: Now,
        request: Request,
        run: impl FnOnce(&mut Ctx<'_>) -> Step,
    ) -> (Request, Step) {
        let mut ctx = Ctx { core: &mut self.core, server: &self.server, now, request };
        let step = run(&mut ctx);
        (ctx.request, step)
    }

    /// Records a step of a request that has waited, and advances its chain if possible.
    fn take_step(
        &mut self,
        now: Now,
        id: u64,
        mut chain: Chain,
        (request, step): (Request, Step),
    ) -> Result<(), Disconnect> {
        match self.settle(id, &mut chain, request, step)? {
            Outcome::GoesOn => self.advance(now, id, chain),
            Outcome::Waits => {
                self.chains.insert(id, chain);
                Ok(())
            }
        }
    }

    /// Records a step.
    fn settle(
        &mut self,
        id: u64,
        chain: &mut Chain,
        mut request: Request,
        step: Step,
    ) -> Result<Outcome, Disconnect> {
        match step {
            Step::Fs(kind, then) => Ok(self.submit(id, chain, request, kind, Resumption::Completed(then))),
            Step::Transfer(kind, transfer) => {
                Ok(self.submit(id, chain, request, kind, Resumption::Transferred(transfer)))
            }
            Step::Submit(kind, machine) => {
                Ok(self.submit(id, chain, request, kind, Resumption::Machine(machine)))
            }
            Step::Park(resume) => self.park(id, chain, request, Resumption::Woken(resume)),
            Step::Wait(machine) => self.park(id, chain, request, Resumption::Machine(machine)),
            Step::Disconnect(why) => Err(Disconnect(why)),
            Step::Leave(why) => {
                if !std::mem::replace(&mut self.core.leaving, true) {
                    self.core.events.push_back(Event::Leaving { why });
                }
                // Neither this request nor the rest of its compound is answered.
                chain.next = chain.requests.len();
                chain.responses.clear();
                Ok(Outcome::GoesOn)
            }
            Step::Reply(reply) => {
                self.answer(chain, &mut request, reply);
                Ok(Outcome::GoesOn)
            }
            Step::Fail(status) => {
                let reply = Reply { status, ..Reply::ok(ERROR_BODY.to_vec()) };
                self.answer(chain, &mut request, reply);
                Ok(Outcome::GoesOn)
            }
        }
    }

    /// Submits an operation to a backend; the request waits for its result.
    fn submit(
        &mut self,
        id: u64,
        chain: &mut Chain,
        request: Request,
        kind: FsOpKind,
        resumption: Resumption,
    ) -> Outcome {
        chain.waiting = Some(Waiting { request, resumption });
        self.core.submit(kind, OpOwner::Chain(id));
        Outcome::Waits
    }

    /// Parks a request until another one wakes it, if the limits allow it.
    fn park(
        &mut self,
        id: u64,
        chain: &mut Chain,
        request: Request,
        resumption: Resumption,
    ) -> Result<Outcome, Disconnect> {
        let bytes = chain.frame.held_bytes() as u64;
        let counted = match self.may_wait(chain, &request, bytes) {
            Ok(counted) => counted,
            Err(status) => {
                // Let the handler undo what it registered, then fail with the reason.
                let now = request.began;
                let (request, _) = self.step(now, request, |ctx| resumption.wake(ctx, Wake::Cancelled));
                return self.settle(id, chain, request, Step::Fail(status));
            }
        };
        let token = request.wake_token;
        // As on Windows, a SET_INFO that waits for a break gets no interim response: that would split a compound.
        if chain.async_id.is_none() && request.header.command != Command::SET_INFO {
            chain.async_id = Some(token);
            self.interim(chain, &request, token);
        }
        let Header { message_id, session_id, .. } = request.header;
        let sealed = request.sealed;
        let parked = Parked { chain: id, message_id, session_id, sealed, bytes, _counted: counted };
        self.parked.insert(token, parked);
        self.parked_bytes += bytes;
        chain.waiting = Some(Waiting { request, resumption });
        Ok(Outcome::Waits)
    }

    /// Checks whether a request with a frame of `bytes` may wait. Returns its share of the volume's limits on waiting
    /// requests.
    fn may_wait(&self, chain: &Chain, request: &Request, bytes: u64) -> Result<Option<[Taken; 2]>, NtStatus> {
        // [MS-SMB2] 3.3.5.2.7: in the middle of a compound, only requests that wait for a break may wait.
        if chain.next != chain.requests.len()
            && !matches!(request.header.command, Command::CREATE | Command::SET_INFO)
        {
            return Err(NtStatus::INTERNAL_ERROR);
        }
        // No further request arrives.
        if self.core.closed {
            return Ok(None);
        }
        let no_room = NtStatus::INSUFFICIENT_RESOURCES;
        if self.parked.len() >= limits::ASYNC_PER_CONNECTION_MAX
            || self.parked_bytes + bytes > limits::PARKED_BYTES_PER_CONNECTION_MAX
        {
            return Err(no_room);
        }
        let Some(Share::Volume(volume)) = request.tree.as_ref().map(|tree| &tree.share) else {
            return Ok(None);
        };
        let used = &volume.used;
        let counted = [used.waiting.take(1).ok_or(no_room)?, used.parked_bytes.take(bytes).ok_or(no_room)?];
        Ok(Some(counted))
    }
}
