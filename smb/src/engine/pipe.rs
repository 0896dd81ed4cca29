//! A named pipe that a client has open ([MS-SMB2] 3.3.1.10, of a share of type SMB2_SHARE_TYPE_PIPE).

use crate::engine::tally::Taken;
use crate::ids::FileId;
use crate::rpc::{Association, Interface};
use crate::sync::{Mutex, MutexGuard};

/// An open named pipe. It ends with its tree connect or its session.
pub(crate) struct Pipe {
    pub(crate) id: FileId,
    pub(crate) tree_id: u32,
    association: Mutex<Association>,
    /// Its share of the limit for pipes of the user's volume.
    _counted: Taken,
}

impl Pipe {
    pub(crate) fn new(id: FileId, tree_id: u32, interface: Interface, counted: Taken) -> Self {
        Self { id, tree_id, association: Mutex::new(Association::new(interface)), _counted: counted }
    }

    pub(crate) fn association(&self) -> MutexGuard<'_, Association> {
        self.association.lock().expect("no panic under this lock")
    }
}
