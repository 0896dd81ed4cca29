//! Renames while others open files in the way ([MS-FSA] 2.1.5.15.11): a directory with open files in it is not renamed, even if
//! a file is just being opened.

use forebay_smb::fs::FsOp;
use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateDisposition, CreateOptions};
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::name_info::FileRenameInformation;
use forebay_smb::wire::query_info::InfoType;
use forebay_smb::wire::{Command, close, create, set_info};

use crate::calls::{Lab, Open, close, directory, file, rename};
use crate::support::{Answer, Client};

fn existing(name: &str) -> Open<'_> {
    file(name).disposition(CreateDisposition::OPEN)
}

fn rename_body(file_id: FileId, to: &str) -> Vec<u8> {
    let mut buffer = Vec::new();
    FileRenameInformation { replace_if_exists: false, root_directory: 0, file_name: to.to_owned() }
        .encode(&mut buffer);
    let mut body = Vec::new();
    set_info::Request {
        info_type: InfoType::FILE,
        file_info_class: FileInformationClass::FILE_RENAME_INFORMATION.0,
        additional_information: 0,
        file_id,
        buffer: &buffer,
    }
    .encode(&mut body);
    body
}

/// Starts a rename and returns its first operation, which a slow backend has not carried out yet.
fn begin_rename(client: &mut Client, id: FileId, to: &str) -> FsOp {
    let body = rename_body(id, to);
    client.begin(Command::SET_INFO, &body)
}

fn waits(client: &mut Client, command: Command, body: &[u8]) {
    let answer = client.ask(command, body);
    // A SET_INFO has no interim response.
    let expected = (command != Command::SET_INFO).then_some(NtStatus::PENDING);
    assert_eq!(answer.map(|answer| answer.status()), expected);
}

fn answer(client: &mut Client) -> Answer {
    client.answers.pop_front().expect("an answer")
}

/// Two clients, a directory `d` that the first has open, and the file `d/f`.
fn scene(lab: &mut Lab) -> (Client, Client, FileId) {
    let (mut one, two) = (lab.client(), lab.client());
    let d = directory("d").id(&mut one);
    file(r"d\f").touch(&mut one);
    (one, two, d)
}

#[test]
fn an_open_waits_while_its_directory_is_being_renamed() {
    let mut lab = Lab::new();
    let (mut one, mut two, d) = scene(&mut lab);
    let op = begin_rename(&mut one, d, "e");
    waits(&mut two, Command::CREATE, &existing(r"d\f").body());
    waits(&mut two, Command::CREATE, &file(r"d\new").body());
    existing(r"d2").disposition(CreateDisposition::CREATE).touch(&mut two);
    one.finish(op);
    assert_eq!(answer(&mut one).status(), NtStatus::SUCCESS);
    lab.deliver(&mut [&mut one, &mut two]);
    assert_eq!(answer(&mut two).status(), NtStatus::OBJECT_PATH_NOT_FOUND);
    assert_eq!(answer(&mut two).status(), NtStatus::OBJECT_PATH_NOT_FOUND);
    assert_eq!((lab.memory.contents("e/f").is_some(), lab.memory.contents("e/new")), (true, None));
    existing(r"e\f").touch(&mut two);
    close(&mut one, d).unwrap();
}

#[test]
fn an_open_that_waited_for_a_failed_rename_uses_the_old_path() {
    let mut lab = Lab::new();
    let (mut one, mut two, d) = scene(&mut lab);
    let op = begin_rename(&mut one, d, r"nowhere\e");
    waits(&mut two, Command::CREATE, &existing(r"d\f").body());
    one.finish(op);
    assert_eq!(answer(&mut one).status(), NtStatus::OBJECT_PATH_NOT_FOUND);
    lab.deliver(&mut [&mut one, &mut two]);
    let opened = answer(&mut two);
    assert_eq!(opened.status(), NtStatus::SUCCESS);
    let id = create::Response::parse(&opened.message).unwrap().file_id;
    close(&mut two, id).unwrap();
}

#[test]
fn a_directory_rename_waits_for_the_result_of_an_open_below_it() {
    let mut lab = Lab::new();
    let (mut one, mut two, d) = scene(&mut lab);
    let op = two.begin(Command::CREATE, &existing(r"d\f").body());
    waits(&mut one, Command::SET_INFO, &rename_body(d, "e"));
    two.finish(op);
    let opened = answer(&mut two);
    assert_eq!(opened.status(), NtStatus::SUCCESS);
    lab.deliver(&mut [&mut one, &mut two]);
    assert_eq!(answer(&mut one).status(), NtStatus::ACCESS_DENIED, "the file is now open");
    assert!(lab.memory.contents("d/f").is_some());

    let id = create::Response::parse(&opened.message).unwrap().file_id;
    close(&mut two, id).unwrap();
    let op = two.begin(Command::CREATE, &existing(r"d\none").body());
    waits(&mut one, Command::SET_INFO, &rename_body(d, "e"));
    two.finish(op);
    assert_eq!(answer(&mut two).status(), NtStatus::OBJECT_NAME_NOT_FOUND);
    lab.deliver(&mut [&mut one, &mut two]);
    assert_eq!(answer(&mut one).status(), NtStatus::SUCCESS, "nothing was opened");
    assert!(lab.memory.contents("e/f").is_some());
}

#[test]
fn renames_with_overlapping_paths_are_serialized() {
    let mut lab = Lab::new();
    let (mut one, mut two, d) = scene(&mut lab);
    let g = file("g").id(&mut two);
    let op = begin_rename(&mut one, d, "e");
    waits(&mut two, Command::SET_INFO, &rename_body(g, r"d\g"));
    one.finish(op);
    assert_eq!(answer(&mut one).status(), NtStatus::SUCCESS);
    lab.deliver(&mut [&mut one, &mut two]);
    assert_eq!(answer(&mut two).status(), NtStatus::OBJECT_PATH_NOT_FOUND);
    assert!(lab.memory.contents("g").is_some());
}

#[test]
fn renames_of_one_file_by_two_opens_are_serialized() {
    let mut lab = Lab::new();
    let (mut one, mut two) = (lab.client(), lab.client());
    let (first, second) = (file("f").id(&mut one), file("f").id(&mut two));
    let op = begin_rename(&mut one, first, "g");
    waits(&mut two, Command::SET_INFO, &rename_body(second, "h"));
    one.finish(op);
    assert_eq!(answer(&mut one).status(), NtStatus::SUCCESS);
    lab.deliver(&mut [&mut one, &mut two]);
    assert_eq!(answer(&mut two).status(), NtStatus::SUCCESS);
    assert_eq!((lab.memory.contents("g"), lab.memory.contents("h").is_some()), (None, true));
    let paths: Vec<String> = lab.server.open_infos(None).into_iter().map(|open| open.path).collect();
    assert_eq!(paths, ["h", "h"]);
}

#[test]
fn losing_a_client_that_waits_for_a_rename_blocks_nothing() {
    let mut lab = Lab::new();
    let (mut one, mut two, d) = scene(&mut lab);
    let op = begin_rename(&mut one, d, "e");
    waits(&mut two, Command::CREATE, &existing(r"d\f").body());
    two.disconnect();
    one.finish(op);
    assert_eq!(answer(&mut one).status(), NtStatus::SUCCESS);
    let op = {
        let mut third = lab.client();
        third.begin(Command::CREATE, &existing(r"e\f").body())
    };
    // That connection ended together with its CREATE: nothing blocks the directory's rename.
    drop(op);
    assert_eq!(rename(&mut one, d, "d", false), Ok(()));
}

#[test]
fn a_stream_that_is_closed_during_its_rename_does_not_block_its_file() {
    let mut lab = Lab::new();
    let (mut one, mut two) = (lab.client(), lab.client());
    let s = file("f:s").option(CreateOptions::DELETE_ON_CLOSE).id(&mut one);
    let renaming = begin_rename(&mut one, s, ":t");
    let mut body = Vec::new();
    close::Request { flags: close::Flags::empty(), file_id: s }.encode(&mut body);
    let removing = one.begin(Command::CLOSE, &body);
    one.finish(renaming);
    one.finish(removing);
    existing("f").touch(&mut two);
    let f = existing("f").id(&mut two);
    rename(&mut two, f, "g", false).unwrap();
}
