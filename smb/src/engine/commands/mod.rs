//! One file per command ([MS-SMB2] 3.3.5).

mod change_notify;
pub(crate) mod close;
pub(crate) mod create;
mod eas;
mod echo;
mod flush;
mod handles;
mod info;
mod ioctl;
mod lock;
mod logoff;
pub(crate) mod negotiate;
mod oplock_break;
mod pipe;
mod posix;
mod query_directory;
mod query_info;
mod read;
mod remote;
mod security;
pub(crate) mod session_setup;
mod set_info;
mod transform;
mod tree_connect;
mod tree_disconnect;
mod write;

use crate::engine::request::step::{Ctx, Step};
use crate::limits;
use crate::status::NtStatus;
use crate::wire::Command;

/// Dispatches an admitted request to its handler.
pub(crate) fn dispatch(ctx: &mut Ctx<'_>) -> Step {
    if pipe::is_addressed(ctx)
        && let Some(step) = pipe::handle(ctx)
    {
        return step;
    }
    match ctx.request.header.command {
        Command::NEGOTIATE => negotiate::handle(ctx),
        Command::SESSION_SETUP => session_setup::handle(ctx),
        Command::LOGOFF => logoff::handle(ctx),
        Command::TREE_CONNECT => tree_connect::handle(ctx),
        Command::TREE_DISCONNECT => tree_disconnect::handle(ctx),
        Command::CREATE => create::handle(ctx),
        Command::CLOSE => close::handle(ctx),
        Command::FLUSH => flush::handle(ctx),
        Command::READ => read::handle(ctx),
        Command::WRITE => write::handle(ctx),
        Command::LOCK => lock::handle(ctx),
        Command::IOCTL => ioctl::handle(ctx),
        Command::ECHO => echo::handle(ctx),
        Command::QUERY_DIRECTORY => query_directory::handle(ctx),
        Command::CHANGE_NOTIFY => change_notify::handle(ctx),
        Command::QUERY_INFO => query_info::handle(ctx),
        Command::SET_INFO => set_info::handle(ctx),
        Command::OPLOCK_BREAK => oplock_break::handle(ctx),
        // [MS-SMB2] 3.3.5.2.6
        _ => Step::Fail(NtStatus::INVALID_PARAMETER),
    }
}

/// The maximum number of bytes in a request's answer, as far as the client chooses the length.
pub(crate) fn answer_bytes(command: Command, message: &[u8]) -> u32 {
    let asked = |at: usize| u32_at(message, at).unwrap_or(0).min(limits::IO_BYTES_MAX);
    match command {
        Command::READ => asked(4),
        Command::QUERY_DIRECTORY => asked(28),
        Command::QUERY_INFO => asked(4).min(limits::INFO_ANSWER_BYTES_MAX),
        Command::IOCTL => asked(44).min(limits::INFO_ANSWER_BYTES_MAX),
        _ => 0,
    }
}

/// The `u32` at an offset in a message's body.
fn u32_at(message: &[u8], at: usize) -> Option<u32> {
    message.get(64 + at..64 + at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes)
}

/// The bytes that a request's CreditCharge must cover ([MS-SMB2] 3.3.5.2.5): the larger of what it sends and what it
/// requests. `None` for commands without payload and for bodies that are too short.
pub(crate) fn payload_bytes(command: Command, message: &[u8]) -> Option<u32> {
    let u32_at = |at: usize| u32_at(message, at);
    match command {
        // By RDMA, Length of a WRITE is 0 and RemainingBytes counts ([MS-SMB2] 3.2.4.7).
        Command::WRITE => match u32_at(32)? {
            0 => u32_at(4),
            _ => Some(u32_at(4)?.max(u32_at(36)?)),
        },
        Command::READ | Command::SET_INFO => u32_at(4),
        Command::QUERY_INFO => Some(u32_at(4)?.max(u32_at(12)?)),
        Command::QUERY_DIRECTORY => u32_at(28),
        Command::CHANGE_NOTIFY => u32_at(4),
        Command::IOCTL => {
            let sent = u32_at(28)?.saturating_add(u32_at(40)?);
            let asked = u32_at(32)?.saturating_add(u32_at(44)?);
            Some(sent.max(asked))
        }
        _ => None,
    }
}
