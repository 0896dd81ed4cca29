//! I/O without io_uring: epoll for sockets, the lanes for files.

use std::collections::HashMap;
use std::fmt;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::{Errno, ReadWriteFlags};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};

use super::on_lanes::{OnLanes, run};
use super::{Completion, Engine, Operation, PastCache, Token, Waker};
use crate::lanes::Queues;

/// epoll data of the waker; descriptors are never negative.
const WAKER: u64 = u64::MAX;
const EVENTS: usize = 256;

/// The engine of one event loop.
pub struct Readiness {
    epoll: OwnedFd,
    waker: Waker,
    lanes: OnLanes,
    /// By descriptor: the operations that wait until it is readable, and until it is writable.
    sockets: HashMap<RawFd, Waiting>,
    /// By descriptor: one-shot waits until it is readable.
    watched: HashMap<RawFd, (Token, Operation)>,
    /// Completed without waiting.
    ready: Vec<Completion>,
    events: Vec<epoll::Event>,
}

impl fmt::Debug for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Readiness({} sockets)", self.sockets.len())
    }
}

#[derive(Debug, Default)]
struct Waiting {
    receive: Option<(Token, Operation)>,
    send: Option<(Token, Operation)>,
}

impl Readiness {
    /// Creates an engine that `waker` wakes and that runs blocking operations on the threads of these queues.
    ///
    /// # Errors
    /// Errors from epoll.
    pub fn new(waker: Waker, queues: Queues) -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &*waker.0, epoll::EventData::new_u64(WAKER), epoll::EventFlags::IN)?;
        Ok(Self {
            epoll,
            lanes: OnLanes::new(queues, waker.clone()),
            waker,
            sockets: HashMap::new(),
            watched: HashMap::new(),
            ready: Vec::new(),
            events: Vec::with_capacity(EVENTS),
        })
    }

    /// Tries an operation on a socket; returns it if it has to wait.
    fn attempt(&mut self, token: Token, mut operation: Operation) -> Option<(Token, Operation)> {
        loop {
            let moved = match &mut operation {
                Operation::Receive { socket, buffer, start, filled, most, .. } => {
                    let range = *start + filled.cast_signed()..*start + most.cast_signed();
                    rustix::net::recv(&**socket, buffer.bytes_mut(range), RecvFlags::empty()).map(|(_, n)| n)
                }
                Operation::Send { socket, message } => {
                    let parts: Vec<IoSlice<'_>> = message.rest().collect();
                    let mut control = SendAncillaryBuffer::default();
                    rustix::net::sendmsg(&**socket, &parts, &mut control, SendFlags::NOSIGNAL)
                }
                _ => unreachable!("only operations of sockets are attempted"),
            };
            let result = match moved {
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Some((token, operation)),
                Err(errno) if operation.turns_back(errno) => continue,
                Ok(n) if !operation.advance(n) => continue,
                Ok(_) => Ok(()),
                Err(errno) => Err(errno),
            };
            self.ready.push(Completion { token, operation, result });
            return None;
        }
    }

    fn retry(&mut self, fd: RawFd, flags: epoll::EventFlags) {
        use epoll::EventFlags as F;
        if let Some((token, operation)) = self.watched.remove(&fd) {
            if let Operation::Readable { descriptor } = &operation {
                let _ = epoll::delete(&self.epoll, &**descriptor);
            }
            self.ready.push(Completion { token, operation, result: Ok(()) });
            return;
        }
        let Some(waiting) = self.sockets.get_mut(&fd) else { return };
        let failed = flags.intersects(F::ERR | F::HUP);
        let receive =
            (failed || flags.intersects(F::IN | F::RDHUP)).then(|| waiting.receive.take()).flatten();
        let send = (failed || flags.contains(F::OUT)).then(|| waiting.send.take()).flatten();
        for (token, operation) in receive.into_iter().chain(send) {
            if let Some(again) = self.attempt(token, operation) {
                self.park(again);
            }
        }
    }

    fn park(&mut self, (token, operation): (Token, Operation)) {
        let (socket, receive) = match &operation {
            Operation::Receive { socket, .. } => (socket, true),
            Operation::Send { socket, .. } => (socket, false),
            _ => unreachable!("only operations of sockets wait"),
        };
        let waiting = self.sockets.entry(socket.as_raw_fd()).or_default();
        let place = if receive { &mut waiting.receive } else { &mut waiting.send };
        debug_assert!(place.is_none(), "one receive and one send at a time");
        *place = Some((token, operation));
    }
}

impl Engine for Readiness {
    fn name(&self) -> &'static str {
        "readiness"
    }

    fn adopt(&mut self, socket: &Arc<OwnedFd>) -> Result<(), Errno> {
        rustix::io::ioctl_fionbio(&**socket, true)?;
        // Edge-triggered: an operation is tried first and waits only after EAGAIN, so no edge is missed.
        let flags =
            epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let fd = socket.as_raw_fd();
        epoll::add(&self.epoll, &**socket, epoll::EventData::new_u64(fd.cast_unsigned().into()), flags)?;
        self.sockets.insert(fd, Waiting::default());
        Ok(())
    }

    fn forget(&mut self, socket: &Arc<OwnedFd>) {
        // It fails only for a socket that was never adopted.
        let _ = epoll::delete(&self.epoll, &**socket);
        self.sockets.remove(&socket.as_raw_fd());
    }

    fn submit(&mut self, token: Token, operation: Operation) {
        match operation {
            Operation::Receive { .. } | Operation::Send { .. } => {
                if let Some(again) = self.attempt(token, operation) {
                    self.park(again);
                }
            }
            Operation::Readable { ref descriptor } => {
                let fd = descriptor.as_raw_fd();
                let data = epoll::EventData::new_u64(fd.cast_unsigned().into());
                match epoll::add(&self.epoll, &**descriptor, data, epoll::EventFlags::IN) {
                    Ok(()) => drop(self.watched.insert(fd, (token, operation))),
                    Err(errno) => self.ready.push(Completion { token, operation, result: Err(errno) }),
                }
            }
            mut file_operation => {
                // Data in the page cache need no thread.
                let at_once = match file_operation {
                    _ if file_operation.is_in_memory() && !file_operation.is_durable() => {
                        Some(ReadWriteFlags::empty())
                    }
                    Operation::Read { past_cache: PastCache { asked: 0, .. }, .. } => {
                        Some(ReadWriteFlags::NOWAIT)
                    }
                    _ => None,
                };
                if let Some(flags) = at_once
                    && let Some(result) = run(&mut file_operation, flags)
                {
                    self.ready.push(Completion { token, operation: file_operation, result });
                    return;
                }
                self.lanes.begin(token, file_operation);
            }
        }
    }

    fn wait(&mut self, time_max: Duration, done: &mut Vec<Completion>) -> Result<(), Errno> {
        let time_max = if self.ready.is_empty() { time_max } else { Duration::ZERO };
        let timeout = rustix::event::Timespec::try_from(time_max).map_err(|_| Errno::INVAL)?;
        self.events.clear();
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        let events = std::mem::take(&mut self.events);
        for event in &events {
            match event.data.u64() {
                WAKER => self.waker.clear(),
                fd => self.retry(fd as RawFd, event.flags),
            }
        }
        self.events = events;
        done.append(&mut self.ready);
        self.lanes.take(done);
        Ok(())
    }
}
