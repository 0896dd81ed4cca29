//! I/O on an io_uring.
//!
//! All memory that the kernel accesses while an operation is in flight (buffers, message header, vectors) is owned by the
//! operation's slot, which does not move and is freed only after the completion.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue};
use rustix::io::{Errno, ReadWriteFlags};

use super::on_lanes::{OnLanes, run};
use super::{Completion, Engine, Operation, Token, Waker, next_read};
use crate::lanes::Queues;
use crate::limits::RING_ENTRIES;

/// user_data of the waker's poll; slots count from 0.
const WAKER: u64 = u64::MAX;

/// The reason why io_uring is not available.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// A security policy, most often the default seccomp profile of a container runtime.
    #[error(
        "io_uring_setup is forbidden (EPERM): allow it in the seccomp profile or by kernel.io_uring_disabled=0"
    )]
    Forbidden,
    /// No such system call.
    #[error("the kernel has no io_uring (ENOSYS): use Linux 5.15 or newer")]
    Missing,
    /// One of the operations is missing.
    #[error("the kernel's io_uring lacks {0}: use Linux 5.15 or newer")]
    Lacking(&'static str),
    /// Anything else.
    #[error("io_uring_setup: {0}")]
    Other(#[from] std::io::Error),
}

fn build(entries: u32) -> Result<IoUring, Unavailable> {
    let tuned = IoUring::builder()
        .setup_cqsize(entries * 4)
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_submit_all()
        .build(entries);
    let plain = |_| IoUring::builder().setup_cqsize(entries * 4).build(entries);
    tuned.or_else(plain).map_err(|error| match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => Unavailable::Forbidden,
        Some(libc::ENOSYS) => Unavailable::Missing,
        _ => Unavailable::Other(error),
    })
}

/// Checks that io_uring is available with all required features.
///
/// # Errors
/// The reason why it is not available.
pub fn probe() -> Result<(), Unavailable> {
    let ring = build(RING_ENTRIES)?;
    if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
        return Err(Unavailable::Lacking("timed waits"));
    }
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [
        ("receive", opcode::Recv::CODE),
        ("sendmsg", opcode::SendMsg::CODE),
        ("read", opcode::Read::CODE),
        ("write", opcode::Write::CODE),
        ("poll", opcode::PollAdd::CODE),
    ];
    match needed.iter().find(|(_, code)| !probe.is_supported(*code)) {
        Some((name, _)) => Err(Unavailable::Lacking(name)),
        None => Ok(()),
    }
}

/// A slot for an operation in flight and the memory that its submission points to. It is reused after the completion.
struct Slot {
    /// `None`: the slot is free.
    in_flight: Option<(Token, Operation)>,
    vectors: Vec<libc::iovec>,
    header: libc::msghdr,
}

impl Slot {
    fn new() -> Box<Self> {
        // SAFETY: msghdr is plain numbers and pointers, for which all zeros is a valid value.
        let header = unsafe { std::mem::zeroed() };
        Box::new(Self { in_flight: None, vectors: Vec::new(), header })
    }
}

/// The engine of one event loop. It must be created, used and dropped on the loop's thread.
pub struct Uring {
    ring: IoUring,
    waker: Waker,
    /// For operations that wait for stable storage: on XFS the kernel would wait at submission, on this thread; on other file
    /// systems, on threads of the ring that other writes need.
    lanes: OnLanes,
    /// Completed at submission.
    ready: Vec<Completion>,
    /// Completions that were removed from the ring to make space: user data and result.
    set_aside: VecDeque<(u64, i32)>,
    /// Boxed because the kernel holds their addresses.
    #[allow(clippy::vec_box, reason = "they must not move when the list grows")]
    slots: Vec<Box<Slot>>,
    free: Vec<usize>,
}

impl fmt::Debug for Uring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Uring({} in flight)", self.slots.len() - self.free.len())
    }
}

impl Uring {
    /// Creates an engine that `waker` wakes and that runs writes to stable storage on the threads of these queues.
    ///
    /// # Errors
    /// The reason why io_uring is not available.
    pub fn new(waker: Waker, queues: Queues) -> Result<Self, Unavailable> {
        Self::with_entries(RING_ENTRIES, waker, queues)
    }

    pub(super) fn with_entries(entries: u32, waker: Waker, queues: Queues) -> Result<Self, Unavailable> {
        let mut engine = Self {
            ring: build(entries)?,
            lanes: OnLanes::new(queues, waker.clone()),
            waker,
            ready: Vec::new(),
            set_aside: VecDeque::new(),
            slots: Vec::new(),
            free: Vec::new(),
        };
        engine.watch_waker();
        Ok(engine)
    }

    fn watch_waker(&mut self) {
        let entry =
            opcode::PollAdd::new(Fd(self.waker.0.as_raw_fd()), libc::POLLIN as u32).build().user_data(WAKER);
        // SAFETY: a poll points to no memory, and the waker keeps its descriptor open as long as the ring lives.
        unsafe { self.push(&entry) };
    }

    /// # Safety
    /// All memory that the entry points to must stay valid and unmoved until its completion.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: as the caller promises.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            // Full. A submission empties it, except after EBUSY: then completions must be removed from the ring first.
            if let Err(error) = self.ring.submit() {
                tracing::debug!(%error, "io_uring submission");
                let completed = self.ring.completion();
                self.set_aside.extend(completed.map(|entry| (entry.user_data(), entry.result())));
            }
        }
    }

    /// Submits the rest of the operation in slot `index`.
    fn start(&mut self, index: usize) {
        let Slot { in_flight, vectors, header } = &mut *self.slots[index];
        let (_, operation) = in_flight.as_mut().expect("an operation is in flight in its slot");
        let entry = match operation {
            Operation::Receive { socket, buffer, start, filled, least, most } => {
                let range = *start + filled.cast_signed()..*start + most.cast_signed();
                let bytes = buffer.bytes_mut(range);
                let flags = if least == most { libc::MSG_WAITALL } else { 0 };
                opcode::Recv::new(Fd(socket.as_raw_fd()), bytes.as_mut_ptr(), bytes.len() as u32)
                    .flags(flags)
                    .build()
            }
            Operation::Send { socket, message } => {
                vectors.clear();
                vectors.extend(message.rest().map(|part| libc::iovec {
                    // The kernel only reads from it.
                    iov_base: part.as_ptr().cast_mut().cast(),
                    iov_len: part.len(),
                }));
                header.msg_iov = vectors.as_mut_ptr();
                header.msg_iovlen = vectors.len();
                let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL).cast_unsigned();
                opcode::SendMsg::new(Fd(socket.as_raw_fd()), &raw const *header).flags(flags).build()
            }
            Operation::Read { file, buffer, offset, length, filled, past_cache } => {
                #[cfg(test)]
                super::tests::count_read();
                let (descriptor, end) = next_read(file, *length, *past_cache);
                let bytes = buffer.bytes_mut(filled.cast_signed()..end.cast_signed());
                let fd = Fd(descriptor.as_raw_fd());
                let at = *offset + *filled as u64;
                opcode::Read::new(fd, bytes.as_mut_ptr(), bytes.len() as u32).offset(at).build()
            }
            Operation::Write { change, frame, range, offset, written, durable } => {
                debug_assert!(!*durable, "the lanes do that");
                let bytes =
                    frame.bytes().get(range.clone()).and_then(|b| b.get(*written..)).unwrap_or_default();
                let fd = Fd(change.through().as_fd().as_raw_fd());
                let at = *offset + *written as u64;
                opcode::Write::new(fd, bytes.as_ptr(), bytes.len() as u32).offset(at).build()
            }
            Operation::Readable { descriptor } => {
                opcode::PollAdd::new(Fd(descriptor.as_raw_fd()), libc::POLLIN as u32).build()
            }
        };
        let entry = entry.user_data(index as u64);
        // SAFETY: buffers, frame, message, vectors and header belong to the slot. It is a Box that is not freed before the completion,
        // and the operation is not moved out of it (`finish`, and `drop`, which leaks what is in flight). Descriptors are kept open by
        // the Arcs in it. Parts and frames are heap memory that does not move with the operation.
        unsafe { self.push(&entry) };
    }

    fn finish(&mut self, index: usize, result: Result<(), Errno>) -> Completion {
        let in_flight = self.slots[index].in_flight.take();
        let (token, operation) = in_flight.expect("a completion belongs to an operation in flight");
        self.free.push(index);
        Completion { token, operation, result }
    }

    fn next_completion(&mut self) -> Option<(u64, i32)> {
        self.set_aside
            .pop_front()
            .or_else(|| self.ring.completion().next().map(|entry| (entry.user_data(), entry.result())))
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        loop {
            let Some((of, result)) = self.next_completion() else { return };
            if of == WAKER {
                self.waker.clear();
                self.watch_waker();
                continue;
            }
            let index = of as usize;
            let (_, operation) =
                self.slots[index].in_flight.as_mut().expect("a completion belongs to an operation in flight");
            let result = match result {
                moved @ 0.. if operation.advance(moved.cast_unsigned() as usize) => Ok(()),
                0.. => {
                    self.start(index);
                    continue;
                }
                error => match Errno::from_raw_os_error(-error) {
                    errno if operation.turns_back(errno) => {
                        self.start(index);
                        continue;
                    }
                    Errno::INTR | Errno::AGAIN => {
                        self.start(index);
                        continue;
                    }
                    errno => Err(errno),
                },
            };
            let completion = self.finish(index, result);
            done.push(completion);
        }
    }
}

impl Engine for Uring {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn adopt(&mut self, socket: &Arc<OwnedFd>) -> Result<(), Errno> {
        // On a nonblocking socket the ring would answer EAGAIN instead of waiting.
        rustix::io::ioctl_fionbio(&**socket, false)
    }

    fn forget(&mut self, _socket: &Arc<OwnedFd>) {}

    fn submit(&mut self, token: Token, mut operation: Operation) {
        if operation.is_durable() {
            return self.lanes.begin(token, operation);
        }
        // The ring would use another thread, because tmpfs does not support non-blocking operations.
        if operation.is_in_memory()
            && let Some(result) = run(&mut operation, ReadWriteFlags::empty())
        {
            return self.ready.push(Completion { token, operation, result });
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::new());
            self.slots.len() - 1
        });
        self.slots[index].in_flight = Some((token, operation));
        self.start(index);
    }

    fn wait(&mut self, time_max: Duration, done: &mut Vec<Completion>) -> Result<(), Errno> {
        let timeout = Timespec::from(time_max);
        let arguments = SubmitArgs::new().timespec(&timeout);
        let wanted = usize::from(self.set_aside.is_empty() && self.ready.is_empty());
        match self.ring.submitter().submit_with_args(wanted, &arguments) {
            Ok(_) => {}
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => {}
                Some(errno) => return Err(Errno::from_raw_os_error(errno)),
                None => return Err(Errno::IO),
            },
        }
        done.append(&mut self.ready);
        self.reap(done);
        self.lanes.take(done);
        Ok(())
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The kernel may still write to operations in flight: leak them. After an orderly shutdown, none are left.
        for slot in self.slots.drain(..).filter(|slot| slot.in_flight.is_some()) {
            std::mem::forget(slot);
        }
    }
}
