//! FileStreamInformation ([MS-FSCC] 2.4.49, [MS-FSA] 2.1.5.12.29).

use std::sync::Arc;

use crate::engine::commands::info::{answer, encoded};
use crate::engine::open::Open;
use crate::engine::request::step::Step;
use crate::fs::{FsOpKind, FsReply, Stat, StreamEntry};
use crate::status::NtStatus;
use crate::wire::fscc::name_info::FileStreamInformation;

/// Size of the structure in C layout; buffer lengths are checked against it.
const FIXED_LEN: usize = 32;

/// Returns all streams of the file, for an open of the file or of one of its streams.
pub(super) fn query(open: Arc<Open>, limit: u32) -> Step {
    let file = open.file_handle.as_ref().unwrap_or(&open.handle).clone();
    Step::Fs(
        FsOpKind::Stat { handle: file.clone() },
        Box::new(move |_, result| match result {
            Ok(FsReply::Stat(stat)) if !open.volume.extended_attributes => reply(&stat, Vec::new(), limit),
            Ok(FsReply::Stat(stat)) => Step::Fs(
                FsOpKind::Streams { handle: file },
                Box::new(move |_, result| match result {
                    Ok(FsReply::Streams(named)) => reply(&stat, named, limit),
                    Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
                    Err(status) => Step::Fail(status),
                }),
            ),
            Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
            Err(status) => Step::Fail(status),
        }),
    )
}

fn reply(stat: &Stat, named: Vec<StreamEntry>, limit: u32) -> Step {
    // A directory has no data stream.
    let own = (!stat.directory).then(|| FileStreamInformation {
        stream_size: stat.end_of_file,
        stream_allocation_size: stat.allocation_size,
        stream_name: "::$DATA".to_owned(),
    });
    let named = named.into_iter().map(|entry| FileStreamInformation {
        stream_size: entry.size,
        stream_allocation_size: entry.allocation_size,
        stream_name: format!(":{}:$DATA", entry.name.as_str()),
    });
    let streams: Vec<_> = own.into_iter().chain(named).collect();
    answer(encoded(|out| FileStreamInformation::encode_list(&streams, out)), FIXED_LEN, limit)
}
