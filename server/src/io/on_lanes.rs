//! Operations that an engine runs in the lanes: file operations that it cannot execute without blocking its thread.

use std::io::{IoSlice, IoSliceMut};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::{Errno, ReadWriteFlags};

use super::{Completion, Operation, Token, Waker, next_read};
use crate::lanes::{Lane, Origin, Queues};

/// The operations of one engine in the lanes.
pub(super) struct OnLanes {
    queues: Queues,
    waker: Waker,
    finished: Arc<Mutex<Vec<Completion>>>,
    /// Started and not taken yet.
    begun: usize,
}

impl OnLanes {
    pub(super) fn new(queues: Queues, waker: Waker) -> Self {
        Self { queues, waker, finished: Arc::default(), begun: 0 }
    }

    /// Executes a file operation in a lane and wakes the engine when it is done.
    pub(super) fn begin(&mut self, token: Token, mut operation: Operation) {
        self.begun += 1;
        let (finished, waker) = (Arc::clone(&self.finished), self.waker.clone());
        let lane = if operation.is_durable() { Lane::Sync } else { Lane::Data };
        self.queues.submit(lane, Origin::Connection(token.connection), move || {
            let result = run(&mut operation, ReadWriteFlags::empty()).unwrap_or(Err(Errno::AGAIN));
            let completion = Completion { token, operation, result };
            finished.lock().unwrap_or_else(PoisonError::into_inner).push(completion);
            waker.wake();
        });
    }

    /// Appends the completed operations.
    pub(super) fn take(&mut self, done: &mut Vec<Completion>) {
        if self.begun > 0 {
            let mut finished = self.finished.lock().unwrap_or_else(PoisonError::into_inner);
            self.begun -= finished.len();
            done.append(&mut finished);
        }
    }
}

/// Executes a file operation; `None` if it would have to wait and must not.
pub(super) fn run(operation: &mut Operation, flags: ReadWriteFlags) -> Option<Result<(), Errno>> {
    loop {
        let moved = match operation {
            Operation::Read { file, buffer, offset, length, filled, past_cache } => {
                #[cfg(test)]
                super::tests::count_read();
                let (descriptor, end) = next_read(file, *length, *past_cache);
                let slice = buffer.bytes_mut(filled.cast_signed()..end.cast_signed());
                let slices = &mut [IoSliceMut::new(slice)];
                rustix::io::preadv2(descriptor, slices, *offset + *filled as u64, flags)
            }
            Operation::Write { change, frame, range, offset, written, durable } => {
                let bytes =
                    frame.bytes().get(range.clone()).and_then(|b| b.get(*written..)).unwrap_or_default();
                let flags = if *durable { flags | ReadWriteFlags::DSYNC } else { flags };
                let file = &**change.through();
                rustix::io::pwritev2(file, &[IoSlice::new(bytes)], *offset + *written as u64, flags)
            }
            Operation::Receive { .. } | Operation::Send { .. } | Operation::Readable { .. } => {
                unreachable!("sockets are not for lanes")
            }
        };
        match moved {
            Err(Errno::INTR) => {}
            Err(errno) if operation.turns_back(errno) => {}
            Err(Errno::AGAIN | Errno::OPNOTSUPP) if flags.contains(ReadWriteFlags::NOWAIT) => return None,
            Ok(n) if !operation.advance(n) => {}
            Ok(_) => return Some(Ok(())),
            Err(errno) => return Some(Err(errno)),
        }
    }
}
