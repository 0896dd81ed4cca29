//! Opens that ended without a CLOSE, with their sessions or with an earlier start of the server. A client that reconnects
//! marks its handles as to be opened again, but a request that was under way to the connection already carries the handle
//! of before: cifs.ko looks at the mark first and waits for the connection then. Answered with STATUS_FILE_CLOSED, its
//! program would see EBADF. It reads or writes again, by a new handle, where the connection ends before the answer, and
//! asks for attributes again, by a handle that is open, where it is told to.

use std::collections::{HashMap, VecDeque};

use crate::ids::FileId;
use crate::limits::{LOST_OPENS_MAX, RETRIES_PER_OPEN_MAX, RETURNS_PER_OPEN_MAX};

#[derive(Default)]
pub(super) struct Lost {
    opens: HashMap<FileId, Patience>,
    /// The oldest first.
    order: VecDeque<FileId>,
}

/// What was done already for an open: a client that never opens anew gets its answer in the end.
#[derive(Default)]
struct Patience {
    returns: u8,
    retries: u8,
}

impl Lost {
    pub(super) fn note(&mut self, id: FileId) {
        if self.opens.insert(id, Patience::default()).is_none() {
            self.order.push_back(id);
        }
        if self.order.len() > LOST_OPENS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.opens.remove(&oldest);
        }
    }

    /// Whether to end the connection that reads or writes by this handle; `known` where an earlier start gave it out.
    pub(super) fn is_worth_a_return(&mut self, id: FileId, known: bool) -> bool {
        let Some(patience) = self.patience(id, known) else { return false };
        patience.returns = patience.returns.saturating_add(1);
        patience.returns <= RETURNS_PER_OPEN_MAX
    }

    /// Whether to have the client ask again that asks about this handle.
    pub(super) fn is_worth_a_retry(&mut self, id: FileId, known: bool) -> bool {
        let Some(patience) = self.patience(id, known) else { return false };
        patience.retries = patience.retries.saturating_add(1);
        patience.retries <= RETRIES_PER_OPEN_MAX
    }

    fn patience(&mut self, id: FileId, known: bool) -> Option<&mut Patience> {
        if known && !self.opens.contains_key(&id) {
            self.note(id);
        }
        self.opens.get_mut(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> FileId {
        FileId { persistent: number, volatile: number }
    }

    #[test]
    fn a_handle_is_worth_few_returns() {
        let mut lost = Lost::default();
        lost.note(id(1));
        for _ in 0..RETURNS_PER_OPEN_MAX {
            assert!(lost.is_worth_a_return(id(1), false) && lost.is_worth_a_return(id(2), true));
        }
        assert!(!lost.is_worth_a_return(id(1), false) && !lost.is_worth_a_return(id(2), true));
        assert!(lost.is_worth_a_retry(id(1), false));
        assert!(!lost.is_worth_a_return(id(3), false) && !lost.is_worth_a_retry(id(3), false), "never lost");
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let mut lost = Lost::default();
        for number in 0..=LOST_OPENS_MAX as u64 {
            lost.note(id(number));
        }
        assert_eq!((lost.order.len(), lost.opens.len()), (LOST_OPENS_MAX, LOST_OPENS_MAX));
        assert!(!lost.is_worth_a_return(id(0), false) && lost.is_worth_a_return(id(1), false));
    }
}
