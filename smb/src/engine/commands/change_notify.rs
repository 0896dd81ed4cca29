//! CHANGE_NOTIFY ([MS-SMB2] 3.3.5.19): not offered; the answer is the one for a file system without it.

use crate::engine::step::{Ctx, Step};
use crate::status::NtStatus;

pub(crate) fn handle(_: &mut Ctx<'_>) -> Step {
    Step::Fail(NtStatus::NOT_SUPPORTED)
}
