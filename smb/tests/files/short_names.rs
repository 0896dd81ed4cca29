//! 8.3 names.

use forebay_smb::short_name;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateAction, CreateDisposition};
use forebay_smb::wire::create_context::RequestContext;
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::query_directory::Flags;

use crate::calls::{Lab, close, directory, file, list, list_class, query_file, write};
use crate::support::Client;

const CLASS: FileInformationClass = FileInformationClass::FILE_BOTH_DIRECTORY_INFORMATION;
const LONG: &str = "a long name.text";

/// A directory with a file in it.
fn populated(c: &mut Client) {
    let d = directory("a long directory").id(c);
    close(c, d).unwrap();
    let f = file(&format!("a long directory\\{LONG}")).id(c);
    write(c, f, 0, b"content").unwrap();
    close(c, f).unwrap();
}

fn short(path: &[&str]) -> String {
    path.iter().map(|name| short_name::of(name)).collect::<Vec<_>>().join("\\")
}

fn alternate(c: &mut Client, name: &str) -> Result<String, NtStatus> {
    let id = file(name).disposition(CreateDisposition::OPEN).id(c);
    let found = query_file(c, id, FileInformationClass::FILE_ALTERNATE_NAME_INFORMATION, 200);
    close(c, id).unwrap();
    let units: Vec<u16> = found?[4..].as_chunks().0.iter().map(|unit| u16::from_le_bytes(*unit)).collect();
    Ok(String::from_utf16(&units).unwrap())
}

#[test]
fn a_file_is_opened_by_its_short_name() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    populated(&mut c);
    let path = short(&["a long directory", LONG]);
    assert_eq!(alternate(&mut c, &format!("a long directory\\{LONG}")).unwrap(), short(&[LONG]));
    let opened = file(&path).disposition(CreateDisposition::OPEN).send(&mut c).unwrap();
    assert_eq!(opened.end_of_file, 7);
    // The open reports the file's long name from now on.
    let name = query_file(&mut c, opened.id, FileInformationClass::FILE_NORMALIZED_NAME_INFORMATION, 200);
    let long: Vec<u8> =
        format!("a long directory\\{LONG}").encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert_eq!(name.unwrap()[4..], long);
    close(&mut c, opened.id).unwrap();
    // Nor does it create another file.
    let found = file(&path).send(&mut c).unwrap();
    assert_eq!(found.action, CreateAction::OPENED);
    close(&mut c, found.id).unwrap();
    let made = file(&path).disposition(CreateDisposition::CREATE).send(&mut c);
    assert_eq!(made.err(), Some(NtStatus::OBJECT_NAME_COLLISION));
    // A name that is short is its own short name.
    let f = file("notes.txt").id(&mut c);
    close(&mut c, f).unwrap();
    assert_eq!(alternate(&mut c, "notes.txt").unwrap(), "notes.txt");
    let missing = file("AAAAAA~1").disposition(CreateDisposition::OPEN).send(&mut c);
    assert_eq!(missing.err(), Some(NtStatus::OBJECT_NAME_NOT_FOUND));
}

#[test]
fn listings_contain_short_names_and_match_them() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    populated(&mut c);
    let f = file("a long directory\\notes.txt").id(&mut c);
    close(&mut c, f).unwrap();
    let d = directory("a long directory").id(&mut c);
    let entries = list_class(&mut c, d, CLASS, "*", Flags::empty(), 65536).unwrap();
    let names: Vec<(&str, &str)> = entries.iter().map(|e| (&*e.name, &*e.short_name)).collect();
    assert_eq!(names, [(".", ""), ("..", ""), (LONG, &*short(&[LONG])), ("notes.txt", "")]);
    let by_short = list(&mut c, d, &short(&[LONG]), Flags::RESTART_SCANS, 65536);
    assert_eq!(by_short.unwrap(), [LONG]);
    let unknown = list(&mut c, d, "AAAAAA~1", Flags::RESTART_SCANS, 65536);
    assert_eq!(unknown, Err(NtStatus::NO_SUCH_FILE));
}

#[test]
fn posix_clients_have_no_short_names() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    populated(&mut c);
    let mut posix = lab.posix();
    let made = file(&short(&["a long directory"]))
        .context(RequestContext::Posix { mode: 0o644 })
        .send(&mut posix)
        .unwrap();
    assert_eq!(made.action, CreateAction::CREATED);
}
