//! Opens that ended without a CLOSE, with their sessions or with an earlier start of the server. A client that reconnects
//! marks its handles as to be opened again, but a request that was under way to the connection already carries the handle
//! of before: cifs.ko looks at the mark first and waits for the connection then. Answered with STATUS_FILE_CLOSED, its
//! program would see EBADF. It asks again, and by a new handle, where the connection ends before the answer.

use std::collections::{HashMap, VecDeque};

use crate::ids::FileId;
use crate::limits::{LOST_OPENS_MAX, RETURNS_PER_OPEN_MAX};

#[derive(Default)]
pub(super) struct Lost {
    /// How often the connection was ended for it.
    returns: HashMap<FileId, u8>,
    /// The oldest first.
    order: VecDeque<FileId>,
}

impl Lost {
    pub(super) fn note(&mut self, id: FileId) {
        if self.returns.insert(id, 0).is_none() {
            self.order.push_back(id);
        }
        if self.order.len() > LOST_OPENS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.returns.remove(&oldest);
        }
    }

    /// Whether to end the connection that asks by this handle; `known` where an earlier start gave it out. A client that
    /// never opens anew gets its answer in the end.
    pub(super) fn is_worth_a_return(&mut self, id: FileId, known: bool) -> bool {
        if known && !self.returns.contains_key(&id) {
            self.note(id);
        }
        let Some(returns) = self.returns.get_mut(&id) else { return false };
        *returns = returns.saturating_add(1);
        *returns <= RETURNS_PER_OPEN_MAX
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
        assert!(!lost.is_worth_a_return(id(3), false), "never lost");
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let mut lost = Lost::default();
        for number in 0..=LOST_OPENS_MAX as u64 {
            lost.note(id(number));
        }
        assert_eq!((lost.order.len(), lost.returns.len()), (LOST_OPENS_MAX, LOST_OPENS_MAX));
        assert!(!lost.is_worth_a_return(id(0), false) && lost.is_worth_a_return(id(1), false));
    }
}
