//! CREATE: dispositions, options, names, share modes, contexts.

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateAction, CreateDisposition, CreateOptions, ImpersonationLevel};
use forebay_smb::wire::create_context::RequestContext;
use forebay_smb::wire::{
    AccessMask, Command, Dialect, FileAttributes, FileTime, HeaderFlags, ShareAccess, close,
};

use crate::calls::{ALL, Lab, SHARE_ALL, close, compound, compound_with, directory, file, write, write_body};

#[test]
fn dispositions_open_create_and_overwrite() {
    use CreateDisposition as D;
    let mut lab = Lab::new();
    let mut c = lab.client();
    for (disposition, exists, expected) in [
        (D::SUPERSEDE, true, Ok(CreateAction::SUPERSEDED)),
        (D::SUPERSEDE, false, Ok(CreateAction::CREATED)),
        (D::OPEN, true, Ok(CreateAction::OPENED)),
        (D::OPEN, false, Err(NtStatus::OBJECT_NAME_NOT_FOUND)),
        (D::CREATE, true, Err(NtStatus::OBJECT_NAME_COLLISION)),
        (D::CREATE, false, Ok(CreateAction::CREATED)),
        (D::OPEN_IF, true, Ok(CreateAction::OPENED)),
        (D::OPEN_IF, false, Ok(CreateAction::CREATED)),
        (D::OVERWRITE, true, Ok(CreateAction::OVERWRITTEN)),
        (D::OVERWRITE, false, Err(NtStatus::OBJECT_NAME_NOT_FOUND)),
        (D::OVERWRITE_IF, true, Ok(CreateAction::OVERWRITTEN)),
        (D::OVERWRITE_IF, false, Ok(CreateAction::CREATED)),
        (D(6), true, Err(NtStatus::INVALID_PARAMETER)),
    ] {
        let name = format!("{}-{exists}", disposition.0);
        if exists {
            let id = file(&name).id(&mut c);
            write(&mut c, id, 0, b"before").unwrap();
            close(&mut c, id).unwrap();
        }
        let result = file(&name).disposition(disposition).send(&mut c);
        assert_eq!(result.as_ref().map(|o| o.action).map_err(|s| *s), expected, "{disposition:?} {exists}");
        let keeps = matches!(expected, Ok(CreateAction::OPENED) | Err(_)) && exists;
        let contents = lab.memory.contents(&name);
        assert_eq!(contents.as_deref() == Some(b"before"), keeps, "{disposition:?} {exists}");
        if let Ok(opened) = result {
            assert_eq!(opened.end_of_file, if keeps { 6 } else { 0 });
            close(&mut c, opened.id).unwrap();
        }
    }
}

#[test]
fn a_refused_overwrite_changes_nothing() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let first = file("f").share(ShareAccess::READ).id(&mut c);
    write(&mut c, first, 0, b"precious").unwrap();
    let refused = file("f").disposition(CreateDisposition::OVERWRITE_IF).send(&mut c);
    assert_eq!(refused, Err(NtStatus::SHARING_VIOLATION));
    assert_eq!(lab.memory.contents("f").as_deref(), Some(&b"precious"[..]));
    close(&mut c, first).unwrap();
    let readonly = file("f").disposition(CreateDisposition::OVERWRITE).attributes(FileAttributes::READONLY);
    let id = readonly.id(&mut c);
    write(&mut c, id, 0, b"kept").unwrap();
    close(&mut c, id).unwrap();
    assert_eq!(
        file("f").disposition(CreateDisposition::OVERWRITE).access(AccessMask::FILE_READ_DATA).send(&mut c),
        Err(NtStatus::ACCESS_DENIED)
    );
    assert_eq!(lab.memory.contents("f").as_deref(), Some(&b"kept"[..]));
}

#[test]
fn share_modes_hold_across_clients_until_close() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let id = file("f").access(AccessMask::FILE_READ_DATA).share(ShareAccess::READ).id(&mut a);
    let reader = file("f").access(AccessMask::FILE_READ_DATA).share(SHARE_ALL);
    let writer = file("f").access(AccessMask::FILE_WRITE_DATA).share(SHARE_ALL);
    let stat = file("f").access(AccessMask::FILE_READ_ATTRIBUTES).share(ShareAccess::empty());
    reader.touch(&mut b);
    stat.touch(&mut b);
    assert_eq!(writer.send(&mut b), Err(NtStatus::SHARING_VIOLATION));
    close(&mut a, id).unwrap();
    writer.id(&mut b);
    // A lost connection releases everything.
    assert_eq!(reader.clone().share(ShareAccess::READ).send(&mut a), Err(NtStatus::SHARING_VIOLATION));
    b.connection.close(b.now);
    b.run().unwrap();
    assert!(reader.share(ShareAccess::READ).send(&mut a).is_ok());
}

#[test]
fn files_and_directories_are_distinguished() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let d = directory("d").id(&mut c);
    close(&mut c, d).unwrap();
    let f = file("f").id(&mut c);
    close(&mut c, f).unwrap();
    assert_eq!(file("d").send(&mut c), Err(NtStatus::FILE_IS_A_DIRECTORY));
    assert_eq!(directory("f").send(&mut c), Err(NtStatus::NOT_A_DIRECTORY));
    assert_eq!(
        directory("f").disposition(CreateDisposition::CREATE).send(&mut c),
        Err(NtStatus::OBJECT_NAME_COLLISION)
    );
    assert_eq!(
        directory("d").disposition(CreateDisposition::OVERWRITE).send(&mut c),
        Err(NtStatus::INVALID_PARAMETER)
    );
    let any = file("d").options(CreateOptions::empty());
    assert!(any.send(&mut c).unwrap().attributes.contains(FileAttributes::DIRECTORY));
    assert_eq!(any.disposition(CreateDisposition::OVERWRITE).send(&mut c), Err(NtStatus::INVALID_PARAMETER));
    // The share's root has the empty name.
    let root = directory("").disposition(CreateDisposition::OPEN);
    assert!(root.send(&mut c).is_ok());
    assert_eq!(
        root.disposition(CreateDisposition::CREATE).send(&mut c),
        Err(NtStatus::OBJECT_NAME_COLLISION)
    );
    assert_eq!(file("").send(&mut c), Err(NtStatus::FILE_IS_A_DIRECTORY));
    assert_eq!(
        directory("").option(CreateOptions::DELETE_ON_CLOSE).send(&mut c),
        Err(NtStatus::CANNOT_DELETE)
    );
}

#[test]
fn invalid_names_are_refused() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    for (name, status) in [
        (r"\f", NtStatus::INVALID_PARAMETER),
        (r"..\..", NtStatus::OBJECT_PATH_SYNTAX_BAD),
        (":stream", NtStatus::OBJECT_NAME_INVALID),
        ("f:stream:$INDEX", NtStatus::OBJECT_NAME_INVALID),
        ("f*", NtStatus::OBJECT_NAME_INVALID),
        (r"no\f", NtStatus::OBJECT_PATH_NOT_FOUND),
    ] {
        assert_eq!(file(name).send(&mut c), Err(status), "{name}");
    }
    let id = file("f::$DATA").id(&mut c);
    write(&mut c, id, 0, b"x").unwrap();
    assert_eq!(lab.memory.contents("f").as_deref(), Some(&b"x"[..]));
    // An unpaired surrogate is not a valid name, but the message is well-formed.
    let mut body = file("g").body();
    let at = body.len() - 2;
    body[at..].copy_from_slice(&0xd800_u16.to_le_bytes());
    assert_eq!(c.call(Command::CREATE, &body).unwrap().status(), NtStatus::OBJECT_NAME_INVALID);
}

#[test]
fn invalid_create_parameters_are_refused() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = || file("f");
    assert_eq!(f().option(CreateOptions(0x1000_0000)).send(&mut c), Err(NtStatus::INVALID_PARAMETER));
    assert_eq!(f().option(CreateOptions::OPEN_BY_FILE_ID).send(&mut c), Err(NtStatus::NOT_SUPPORTED));
    assert_eq!(f().option(CreateOptions::DIRECTORY_FILE).send(&mut c), Err(NtStatus::INVALID_PARAMETER));
    assert_eq!(f().attributes(FileAttributes(0x40)).send(&mut c), Err(NtStatus::INVALID_PARAMETER));
    assert_eq!(f().share(ShareAccess(8)).send(&mut c), Err(NtStatus::INVALID_PARAMETER));
    assert_eq!(f().access(AccessMask::empty()).send(&mut c), Err(NtStatus::ACCESS_DENIED));
    assert_eq!(f().access(AccessMask(0x0800_0000)).send(&mut c), Err(NtStatus::ACCESS_DENIED));
    let doc = f().option(CreateOptions::DELETE_ON_CLOSE);
    assert_eq!(doc.clone().access(AccessMask::FILE_READ_DATA).send(&mut c), Err(NtStatus::ACCESS_DENIED));
    assert_eq!(doc.attributes(FileAttributes::READONLY).send(&mut c), Err(NtStatus::CANNOT_DELETE));
    let mut bad = f();
    bad.impersonation = ImpersonationLevel(0x1234_5678);
    assert_eq!(bad.send(&mut c), Err(NtStatus::BAD_IMPERSONATION_LEVEL));
    let temporary = directory("d").attributes(FileAttributes::TEMPORARY);
    assert_eq!(temporary.send(&mut c), Err(NtStatus::INVALID_PARAMETER));
    assert_eq!(lab.memory.contents("f"), None, "no file was created");
}

#[test]
fn contexts_are_answered_honoured_or_ignored() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = || file("f").disposition(CreateDisposition::OVERWRITE_IF);
    let opened = f()
        .context(RequestContext::QueryMaximalAccess(None))
        .context(RequestContext::QueryOnDiskId)
        .context(RequestContext::AllocationSize(1 << 20))
        .context(RequestContext::DurableHandleRequest)
        .context(RequestContext::Unknown { name: b"FooO", data: b"" })
        .send(&mut c)
        .unwrap();
    assert_eq!(opened.maximal_access, Some(ALL));
    assert!(opened.disk_id.is_some());
    assert_eq!(opened.allocation_size, 1 << 20);
    close(&mut c, opened.id).unwrap();
    let again = f().context(RequestContext::AllocationSize(1 << 20)).send(&mut c).unwrap();
    assert_eq!(again.allocation_size, 1 << 20, "reserved again for an overwritten file");
    close(&mut c, again.id).unwrap();
    let refused = |c: &mut _, context| f().context(context).send(c).err();
    assert_eq!(
        refused(&mut c, RequestContext::TimewarpToken(FileTime(10000))),
        Some(NtStatus::OBJECT_NAME_NOT_FOUND)
    );
    let short = RequestContext::Unknown { name: b"x", data: b"" };
    assert_eq!(refused(&mut c, short), Some(NtStatus::INVALID_PARAMETER));
}

#[test]
fn a_read_only_volume_refuses_changes() {
    let mut lab = Lab::with(|v| v.read_only = true);
    let mut c = lab.client();
    let open = directory("").disposition(CreateDisposition::OPEN).access(AccessMask::MAXIMUM_ALLOWED);
    assert!(open.send(&mut c).is_ok());
    assert_eq!(open.access(AccessMask::DELETE).send(&mut c), Err(NtStatus::ACCESS_DENIED));
    let make = file("f").access(AccessMask::FILE_READ_DATA);
    assert_eq!(make.send(&mut c), Err(NtStatus::MEDIA_WRITE_PROTECTED));
    assert_eq!(
        make.disposition(CreateDisposition::CREATE).send(&mut c),
        Err(NtStatus::MEDIA_WRITE_PROTECTED)
    );
    assert_eq!(lab.memory.contents("f"), None);
}

#[test]
fn a_create_that_fails_after_a_tree_disconnect_leaves_no_file() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    // The tree is disconnected while the backend works on the request.
    let header = c.header(Command::CREATE, 1);
    let message = c.message(header, &file("f").body());
    c.connection.handle(c.now, std::sync::Arc::new(crate::support::Bytes(message)), None).unwrap();
    let op = c.connection.poll_fs().unwrap();
    let header = c.header(Command::TREE_DISCONNECT, 1);
    let message = c.message(header, &[4, 0, 0, 0]);
    c.connection.handle(c.now, std::sync::Arc::new(crate::support::Bytes(message)), None).unwrap();
    let result = (c.backend)(op.kind);
    c.connection.complete(c.now, op.id, result).unwrap();
    c.run().unwrap();
    let statuses: Vec<NtStatus> = c.answers.drain(..).map(|a| a.status()).collect();
    assert_eq!(statuses, [NtStatus::SUCCESS, NtStatus::NETWORK_NAME_DELETED]);
    assert_eq!(lab.memory.contents("f"), None);
}

#[test]
fn a_compound_creates_writes_and_closes_a_file() {
    let mut lab = Lab::new();
    for dialect in [Dialect::SMB2_0_2, Dialect::SMB3_1_1] {
        let mut c = lab.dialect(dialect);
        let mut close_it = Vec::new();
        close::Request { flags: close::Flags::empty(), file_id: FileId::RELATED }.encode(&mut close_it);
        let write_it = write_body(FileId::RELATED, 0, b"in one go");
        let answers = compound(
            &mut c,
            &[
                (Command::CREATE, file("f").body()),
                (Command::WRITE, write_it),
                (Command::CLOSE, close_it.clone()),
            ],
        );
        let statuses: Vec<NtStatus> = answers.iter().map(|a| a.status()).collect();
        assert_eq!(statuses, [NtStatus::SUCCESS; 3], "{dialect:?}");
        assert_eq!(lab.memory.contents("f").as_deref(), Some(&b"in one go"[..]));
        // If the file does not exist, the requests that depend on it fail with the same status.
        let missing = file("g").disposition(CreateDisposition::OPEN).body();
        let answers = compound(&mut c, &[(Command::CREATE, missing), (Command::CLOSE, close_it)]);
        let statuses: Vec<NtStatus> = answers.iter().map(|a| a.status()).collect();
        assert_eq!(statuses, [NtStatus::OBJECT_NAME_NOT_FOUND; 2], "{dialect:?}");
    }
}

/// [MS-SMB2] 3.3.5.2.7.2: the FileId is that of the previous request, regardless of the FileId in the request.
#[test]
fn a_related_request_uses_the_file_of_the_previous_request() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let other = file("other").id(&mut c);
    for named in [other, FileId { persistent: u64::MAX, volatile: 0 }] {
        let mut close_it = Vec::new();
        close::Request { flags: close::Flags::empty(), file_id: named }.encode(&mut close_it);
        let answers = compound(
            &mut c,
            &[
                (Command::CREATE, file("f").body()),
                (Command::WRITE, write_body(named, 0, b"in f")),
                (Command::CLOSE, close_it),
            ],
        );
        let statuses: Vec<NtStatus> = answers.iter().map(|a| a.status()).collect();
        assert_eq!(statuses, [NtStatus::SUCCESS; 3], "{named:?}");
        assert_eq!(lab.memory.contents("f").as_deref(), Some(&b"in f"[..]));
        assert_eq!(lab.memory.contents("other").as_deref(), Some(&b""[..]));
    }
    close(&mut c, other).unwrap();
}

#[test]
fn related_requests_require_a_valid_previous_request() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let id = file("f").id(&mut c);
    let mut close_it = Vec::new();
    close::Request { flags: close::Flags::empty(), file_id: id }.encode(&mut close_it);
    let two = [(Command::CLOSE, close_it.clone()), (Command::CLOSE, close_it.clone())];
    let statuses =
        |answers: Vec<crate::support::Answer>| answers.iter().map(|a| a.status()).collect::<Vec<_>>();
    let all_related = compound_with(&mut c, &two, |_, h| h.flags.insert(HeaderFlags::RELATED_OPERATIONS));
    assert_eq!(statuses(all_related), [NtStatus::INVALID_PARAMETER; 2]);
    let no_session = compound_with(&mut c, &two, |index, header| {
        if index == 0 {
            header.session_id = u64::MAX;
        } else {
            header.flags.insert(HeaderFlags::RELATED_OPERATIONS);
        }
    });
    assert_eq!(statuses(no_session), [NtStatus::USER_SESSION_DELETED, NtStatus::INVALID_PARAMETER]);
    assert!(close(&mut c, id).is_ok(), "nothing was closed");
}
