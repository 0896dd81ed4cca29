//! The end of an open, by CLOSE or with its tree connect, its session or its connection ([MS-FSA] 2.1.5.5).

use crate::engine::clients::Clients;
use crate::engine::creations::Creations;
use crate::engine::file::leases::LeaseKey;
use crate::engine::file::local_open::LocalOpen;
use crate::engine::file::state::Leaver;
use crate::engine::file::table::LinkFate;
use crate::engine::open::Open;
use crate::engine::watches::name_of;
use crate::fs::FsOpKind;
use crate::wire::create::CreateOptions;
use crate::wire::fscc::notify::NotifyAction;

/// Removes an open from its file and ends its watch. The caller must have won [`Open::begin_close`] and removed the open
/// from its session.
pub(crate) fn begin(open: &Open, creations: &Creations, clients: &dyn Clients) -> LinkFate {
    creations.used(open);
    open.flushed(clients);
    let leaver = Leaver {
        id: open.id,
        deletes: CreateOptions(open.options).contains(CreateOptions::DELETE_ON_CLOSE),
        parent_lease_key: open.parent_lease_key(),
        leases: &open.volume.leases,
        handle: &open.handle,
        file_handle: open.file_handle.as_ref(),
    };
    let ended = open.volume.files().leave(&open.volume.files, &open.file, &leaver, clients);
    end_watches(open, &ended, clients);
    ended
}

/// Like [`begin`], for an open that its owner lost. Returns the backend operation for it.
pub(crate) fn end(open: &Open, creations: &Creations, clients: &dyn Clients) -> FsOpKind {
    let ended = begin(open, creations, clients);
    if let LinkFate::Unlinked { parent, stream, .. } = ended {
        removed(open, parent, stream, clients);
        if !stream {
            // The name is not removed yet.
            let path = open.state().path.clone();
            open.volume.watches.leased.leaves(&open.file, &path, clients);
        }
    }
    close(open, ended, false)
}

pub(crate) fn close(open: &Open, ended: LinkFate, stat: bool) -> FsOpKind {
    match ended {
        LinkFate::Unlinked { handle, unlink, .. } => FsOpKind::Close { handle, unlink: Some(unlink), stat },
        LinkFate::Stays | LinkFate::DeletePending => {
            FsOpKind::Close { handle: open.handle.clone(), unlink: None, stat }
        }
    }
}

/// [MS-FSA] 2.1.5.5: ends the watches on a directory that end with this open, those of other opens included.
fn end_watches(open: &Open, ended: &LinkFate, clients: &dyn Clients) {
    if !open.directory {
        return;
    }
    open.volume.watches.closed(open.id, clients);
    if matches!(ended, LinkFate::DeletePending) {
        let path = open.state().path.clone();
        open.volume.watches.deleted(&path, clients);
    }
}

/// Reports that a name, or only the `stream`, was removed by an open that named `parent` as the lease on its directory.
pub(crate) fn removed(open: &Open, parent: Option<LeaseKey>, stream: bool, clients: &dyn Clients) {
    if stream {
        return open.volume.watches.stream_changed(NotifyAction::REMOVED_STREAM, open, clients);
    }
    let filter = name_of(open.directory);
    open.volume.watches.changed_by(parent, NotifyAction::REMOVED, filter, open, clients);
}
