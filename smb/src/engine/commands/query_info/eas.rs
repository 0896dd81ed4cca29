//! Extended attributes and their size ([MS-FSA] 2.1.5.12.10, 2.1.5.12.12).

use std::sync::Arc;

use crate::engine::commands::eas;
use crate::engine::open::Open;
use crate::engine::request::step::{Ctx, Reply, Step};
use crate::fs::{Ea, FsOpKind, FsReply};
use crate::limits::INFO_ANSWER_BYTES_MAX;
use crate::status::NtStatus;
use crate::wire::AccessMask;
use crate::wire::fscc::ea::{EaFlags, FullEa};
use crate::wire::fscc::file_info::FileEaInformation;
use crate::wire::query_info::{Flags, Request, Response};

/// Bytes of a FILE_FULL_EA_INFORMATION before its name.
const ENTRY_BYTES: usize = 8;

/// The attributes that a query requests.
enum Wanted {
    /// The attributes with these names. As on Windows, an attribute that the file does not have is returned with an empty
    /// value.
    Named(Vec<Vec<u8>>),
    /// All attributes from this index on, counted from 1.
    From(u32),
    /// All from the first.
    All,
    /// All attributes that previous queries have not returned.
    Rest,
}

/// FileFullEaInformation.
pub(super) fn query(ctx: &Ctx<'_>, open: Arc<Open>, limit: u32) -> Step {
    if !AccessMask(open.access).contains(AccessMask::FILE_READ_EA) {
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    if !open.volume.extended_attributes {
        return Step::Fail(NtStatus::EAS_NOT_SUPPORTED);
    }
    let request = match Request::parse(ctx.request.message()) {
        Ok(r) => r,
        Err(e) => return e.into(),
    };
    let wanted = match wanted(&request) {
        Ok(wanted) => wanted,
        Err(status) => return Step::Fail(status),
    };
    let single = request.flags.contains(Flags::RETURN_SINGLE_ENTRY);
    Step::Fs(
        FsOpKind::GetEas { handle: open.handle.clone() },
        Box::new(move |_, result| match result {
            Ok(FsReply::Eas(eas)) => {
                select(&open, &wanted, single, &eas, limit.min(INFO_ANSWER_BYTES_MAX) as usize)
                    .unwrap_or_else(Step::Fail)
            }
            Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
            Err(status) => Step::Fail(status),
        }),
    )
}

/// [MS-SMB2] 2.2.37: names take precedence over an index, and an index over the position of the scan.
fn wanted(request: &Request<'_>) -> Result<Wanted, NtStatus> {
    let names = eas::to_get(request.input_buffer)?;
    Ok(if !names.is_empty() {
        Wanted::Named(names)
    } else if request.flags.contains(Flags::INDEX_SPECIFIED) {
        Wanted::From(request.additional_information)
    } else if request.flags.contains(Flags::RESTART_SCAN) {
        Wanted::All
    } else {
        Wanted::Rest
    })
}

fn entry<'a>(name: &'a [u8], value: &'a [u8]) -> FullEa<'a> {
    FullEa { flags: EaFlags::empty(), name, value }
}

fn select(open: &Open, wanted: &Wanted, single: bool, eas: &[Ea], room: usize) -> Result<Step, NtStatus> {
    if eas.is_empty() {
        return Err(NtStatus::NO_EAS_ON_FILE);
    }
    let mut state = open.state();
    let start = match wanted {
        Wanted::Named(names) => {
            let value_of =
                |name: &[u8]| eas.iter().find(|ea| ea.name == name).map_or(&[][..], |ea| &ea.value);
            let list: Vec<_> = names.iter().map(|name| entry(name, value_of(name))).collect();
            return complete_entries(&list, single, room).map(|(_, step)| step);
        }
        Wanted::From(index) => (*index as usize).checked_sub(1).ok_or(NtStatus::NONEXISTENT_EA_ENTRY)?,
        Wanted::All => 0,
        Wanted::Rest => state.next_ea,
    };
    let list: Vec<_> = eas.iter().skip(start).map(|ea| entry(&ea.name, &ea.value)).collect();
    if list.is_empty() {
        let is_end = start == eas.len() || matches!(wanted, Wanted::Rest);
        return Err(if is_end { NtStatus::NO_MORE_EAS } else { NtStatus::NONEXISTENT_EA_ENTRY });
    }
    let (count, step) = complete_entries(&list, single, room)?;
    // A single answer with all attributes is not a scan: the Linux client queries again with the same handle, without
    // RESTART_SCAN.
    let at_once = start == 0 && count == eas.len() && !single;
    state.next_ea = if at_once { 0 } else { start + count };
    Ok(step)
}

/// The answer with the entries that fit, at least one, and their number.
fn complete_entries(list: &[FullEa<'_>], single: bool, room: usize) -> Result<(usize, Step), NtStatus> {
    let list = if single { &list[..list.len().min(1)] } else { list };
    let mut end = 0_usize;
    let fits = |entry: &&FullEa<'_>| {
        // The name ends with a zero byte; each further entry is aligned.
        end = end.next_multiple_of(4) + ENTRY_BYTES + entry.name.len() + 1 + entry.value.len();
        end <= room
    };
    let count = list.iter().take_while(fits).count();
    if count == 0 {
        return Err(NtStatus::BUFFER_TOO_SMALL);
    }
    let status = if count < list.len() { NtStatus::BUFFER_OVERFLOW } else { NtStatus::SUCCESS };
    let mut output = Vec::new();
    FullEa::encode_list(&list[..count], &mut output);
    let mut body = Vec::with_capacity(8 + output.len());
    Response { output_buffer: &output }.encode(&mut body);
    Ok((count, Step::Reply(Reply { status, ..Reply::ok(body) })))
}

/// Continues with FileEaInformation.
pub(super) fn size(
    open: Arc<Open>,
    next: impl FnOnce(Arc<Open>, FileEaInformation) -> Step + Send + 'static,
) -> Step {
    if !open.volume.extended_attributes {
        return next(open, FileEaInformation::default());
    }
    Step::Fs(
        FsOpKind::EaSize { handle: open.handle.clone() },
        Box::new(move |_, result| match result {
            // [MS-FSA] 2.1.5.12.10: the header of a list is included.
            Ok(FsReply::EaSize(bytes)) => {
                next(open, FileEaInformation { ea_size: if bytes == 0 { 0 } else { bytes + 4 } })
            }
            Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
            Err(status) => Step::Fail(status),
        }),
    )
}
