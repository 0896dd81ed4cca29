//! Requests on named pipes, which exist to list shares ([MS-SMB2] 3.3.5.9, 3.3.5.12, 3.3.5.13, 3.3.5.15.4).

use std::sync::Arc;

use super::info;
use super::ioctl::{self as controls, ioctl_reply};
use crate::engine::pipe::Pipe;
use crate::engine::request::step::{Ctx, Reply, Step};
use crate::engine::session::Share;
use crate::ids::FileId;
use crate::rpc::{Exposed, Interface, Message, Share as ExposedShare, ShareKind};
use crate::status::NtStatus;
use crate::wire::create::{CreateAction, OplockLevel, ResponseFlags};
use crate::wire::fscc::FileInformationClass;
use crate::wire::fscc::file_info::FileStandardInformation;
use crate::wire::fscc::fsctl::FsctlCode;
use crate::wire::query_info::InfoType;
use crate::wire::read::Channel;
use crate::wire::{Command, FileAttributes, FileTime, close, create, ioctl, query_info, read, write};

/// The allocation size that is reported for a pipe, as on Windows.
const ALLOCATION_SIZE: u64 = 4096;

/// Whether the request is on the share of named pipes.
pub(super) fn is_addressed(ctx: &Ctx<'_>) -> bool {
    ctx.request.tree.as_ref().is_some_and(|tree| matches!(tree.share, Share::Ipc))
}

/// Handles a request on that share that names a pipe; `None` for requests that work the same on all shares.
pub(super) fn handle(ctx: &mut Ctx<'_>) -> Option<Step> {
    let result = match ctx.request.header.command {
        Command::CREATE => open(ctx),
        Command::CLOSE => close(ctx),
        Command::READ => read(ctx),
        Command::WRITE => write(ctx),
        Command::QUERY_INFO => query_info(ctx),
        Command::IOCTL => transceive(ctx),
        _ => return None,
    };
    Some(result.unwrap_or_else(|step| step))
}

fn open(ctx: &mut Ctx<'_>) -> Result<Step, Step> {
    let request = create::Request::parse(ctx.request.message())?;
    let interface = Interface::of_pipe(&request.name).ok_or(NtStatus::OBJECT_NAME_NOT_FOUND)?;
    let session = ctx.session();
    let volume = ctx.server.volume(&session.volume_id).ok_or(NtStatus::OBJECT_NAME_NOT_FOUND)?;
    let counted = volume.used.pipes.take(1).ok_or(NtStatus::INSUFFICIENT_RESOURCES)?;
    let pipe = Pipe::new(ctx.server.file_ids.next(), ctx.tree().id, interface, counted);
    let id = pipe.id;
    session.add_pipe(Arc::new(pipe))?;
    ctx.request.related_file = Some(id);
    let response = create::Response {
        oplock_level: OplockLevel::NONE,
        flags: ResponseFlags::empty(),
        create_action: CreateAction::OPENED,
        creation_time: FileTime(0),
        last_access_time: FileTime(0),
        last_write_time: FileTime(0),
        change_time: FileTime(0),
        allocation_size: ALLOCATION_SIZE,
        end_of_file: 0,
        file_attributes: FileAttributes::NORMAL,
        file_id: id,
        contexts: Vec::new(),
    };
    Ok(reply(|body| response.encode(body)))
}

fn close(ctx: &mut Ctx<'_>) -> Result<Step, Step> {
    let request = close::Request::parse(ctx.request.message())?;
    let pipe = find(ctx, request.file_id)?;
    ctx.session().remove_pipe(pipe.id);
    Ok(reply(|body| close::Response::default().encode(body)))
}

/// A READ does not wait: the result of a call is available when its WRITE is answered.
fn read(ctx: &mut Ctx<'_>) -> Result<Step, Step> {
    let request = read::Request::parse(ctx.request.message())?;
    let (length, remote) = (request.length, request.channel != Channel::NONE && ctx.core.is_smb3());
    if length > ctx.core.io_bytes_max() || remote {
        return Err(NtStatus::INVALID_PARAMETER.into());
    }
    let pipe = find(ctx, request.file_id)?;
    let message = pipe.association().read(length as usize).ok_or(NtStatus::PIPE_EMPTY)?;
    let status = status(&message);
    let mut body = Vec::with_capacity(read::RESPONSE_FIXED_LEN + message.bytes.len());
    read::Response::inline(message.bytes.len() as u32).encode(&mut body);
    body.extend_from_slice(&message.bytes);
    Ok(Step::Reply(Reply { status, ..Reply::ok(body) }))
}

fn write(ctx: &mut Ctx<'_>) -> Result<Step, Step> {
    let frame = Arc::clone(&ctx.request.frame);
    let message = frame.bytes().get(ctx.request.range.clone()).unwrap_or_default();
    let request = write::Request::parse(message)?;
    if request.channel != Channel::NONE && ctx.core.is_smb3() {
        return Err(NtStatus::INVALID_PARAMETER.into());
    }
    let data = request.data(message)?;
    let pipe = find(ctx, request.file_id)?;
    put(ctx, &pipe, data)?;
    Ok(reply(|body| write::Response { count: data.len() as u32, remaining: 0 }.encode(body)))
}

/// FSCTL_PIPE_TRANSCEIVE ([MS-SMB2] 3.3.5.15.4): a WRITE and a READ in one. Other control codes are not specific to pipes.
fn transceive(ctx: &mut Ctx<'_>) -> Result<Step, Step> {
    let frame = Arc::clone(&ctx.request.frame);
    let message = frame.bytes().get(ctx.request.range.clone()).unwrap_or_default();
    let request = ioctl::Request::parse(message)?;
    if request.ctl_code != FsctlCode::PIPE_TRANSCEIVE || !request.flags.contains(ioctl::Flags::IS_FSCTL) {
        return Ok(controls::handle(ctx));
    }
    let pipe = find(ctx, request.file_id)?;
    if pipe.association().is_readable() {
        return Err(NtStatus::PIPE_BUSY.into());
    }
    put(ctx, &pipe, request.input)?;
    let message = pipe.association().read(request.max_output_response as usize);
    let message = message.unwrap_or(Message { bytes: Vec::new(), more: false });
    let reply = ioctl_reply(request.ctl_code, pipe.id, &message.bytes);
    Ok(Step::Reply(Reply { status: status(&message), ..reply }))
}

/// Clients use this to check whether it is a pipe.
fn query_info(ctx: &mut Ctx<'_>) -> Result<Step, Step> {
    let request = query_info::Request::parse(ctx.request.message())?;
    let (info_type, class) = (request.info_type, FileInformationClass(request.file_info_class));
    let limit = request.output_buffer_length;
    find(ctx, request.file_id)?;
    if (info_type, class) != (InfoType::FILE, FileInformationClass::FILE_STANDARD_INFORMATION) {
        return Err(NtStatus::INVALID_INFO_CLASS.into());
    }
    let standard = FileStandardInformation {
        allocation_size: ALLOCATION_SIZE,
        end_of_file: 0,
        number_of_links: 1,
        // [MS-FSCC] 2.4.47: it is removed when it is closed.
        delete_pending: true,
        directory: false,
    };
    Ok(info::answer(info::encoded(|out| standard.encode(out)), FileStandardInformation::LEN, limit))
}

/// The pipe that a request names, resolved like [`Ctx::open`].
fn find(ctx: &mut Ctx<'_>, id: FileId) -> Result<Arc<Pipe>, NtStatus> {
    let id = ctx.named(id)?;
    let tree_id = ctx.tree().id;
    let pipe = ctx.session().pipe(id);
    pipe.filter(|pipe| pipe.tree_id == tree_id).ok_or(NtStatus::FILE_CLOSED)
}

/// Takes the data that a client writes. A pipe that is used for anything but calls is closed.
fn put(ctx: &Ctx<'_>, pipe: &Pipe, data: &[u8]) -> Result<(), NtStatus> {
    let session = ctx.session();
    let share = |name: &str, kind, remark: &str| ExposedShare {
        name: name.to_owned(),
        kind,
        remark: remark.to_owned(),
    };
    let exposed = Exposed {
        server_name: ctx.server.config.server_name.to_uppercase(),
        // As for TREE_CONNECT, other shares are inaccessible.
        shares: vec![
            share(&session.volume_id, ShareKind::Disk, ""),
            share("IPC$", ShareKind::Pipes, "Named pipes"),
        ],
    };
    pipe.association().write(data, &exposed).map_err(|_| {
        session.remove_pipe(pipe.id);
        NtStatus::PIPE_DISCONNECTED
    })
}

fn status(message: &Message) -> NtStatus {
    if message.more { NtStatus::BUFFER_OVERFLOW } else { NtStatus::SUCCESS }
}

fn reply(encode: impl FnOnce(&mut Vec<u8>)) -> Step {
    Step::Reply(Reply::ok(info::encoded(encode)))
}
