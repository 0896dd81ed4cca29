//! Extended attributes: FileFullEaInformation ([MS-FSA] 2.1.5.15.5).

use std::sync::Arc;

use super::{done, needs};
use crate::engine::commands::eas;
use crate::engine::open::Open;
use crate::engine::request::step::Step;
use crate::fs::FsOpKind;
use crate::status::NtStatus;
use crate::wire::AccessMask;
use crate::wire::change_notify::CompletionFilter;

/// The changes that are reported to watchers.
const CHANGED: CompletionFilter = CompletionFilter::EA.union(CompletionFilter::ATTRIBUTES);

/// Sets, replaces or removes attributes.
pub(super) fn set(open: &Arc<Open>, list: &[u8]) -> Result<Step, NtStatus> {
    needs(open, AccessMask::FILE_WRITE_EA)?;
    if !open.volume.extended_attributes {
        return Err(NtStatus::EAS_NOT_SUPPORTED);
    }
    let eas = eas::to_set(list)?;
    if eas.is_empty() {
        return Ok(done());
    }
    let open = Arc::clone(open);
    Ok(Step::Fs(
        FsOpKind::SetEas { handle: open.handle.clone(), eas },
        Box::new(move |ctx, result| match result {
            Ok(_) => {
                open.volume.watches.modified(CHANGED, &open, ctx.server);
                done()
            }
            Err(status) => Step::Fail(status),
        }),
    ))
}
