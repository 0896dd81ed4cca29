//! QUERY_DIRECTORY.

use forebay_smb::status::NtStatus;
use forebay_smb::wire::AccessMask;
use forebay_smb::wire::query_directory::Flags;

use crate::calls::{Lab, close, directory, file, list};
use crate::support::Client;

const NONE: Flags = Flags::empty();

fn populate(c: &mut Client, count: usize) -> Vec<String> {
    let d = directory("d").id(c);
    close(c, d).unwrap();
    (0..count)
        .map(|i| {
            let name = format!("file-{i:04}.dat");
            let f = file(&format!("d\\{name}")).id(c);
            close(c, f).unwrap();
            name
        })
        .collect()
}

#[test]
fn a_listing_is_complete_for_any_buffer_size() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let mut expected = vec![".".to_owned(), "..".to_owned()];
    expected.extend(populate(&mut c, 700));
    for room in [150, 1000, 65536] {
        let d = directory("d").id(&mut c);
        let mut seen = Vec::new();
        loop {
            match list(&mut c, d, "*", NONE, room) {
                Ok(names) => seen.extend(names),
                Err(status) => {
                    assert_eq!(status, NtStatus::NO_MORE_FILES);
                    break;
                }
            }
        }
        assert_eq!(seen, expected, "{room}");
        assert_eq!(list(&mut c, d, "*", NONE, room), Err(NtStatus::NO_MORE_FILES), "the scan stays there");
        assert_eq!(list(&mut c, d, "*", Flags::RESTART_SCANS, 65536).unwrap()[..3], expected[..3]);
        close(&mut c, d).unwrap();
    }
}

#[test]
fn query_directory_flags_control_the_scan() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    populate(&mut c, 3);
    let d = directory("d").id(&mut c);
    let single = Flags::RETURN_SINGLE_ENTRY;
    assert_eq!(list(&mut c, d, "*", single, 65536).unwrap(), ["."]);
    assert_eq!(list(&mut c, d, "*", single, 65536).unwrap(), [".."]);
    assert_eq!(list(&mut c, d, "ignored", single, 65536).unwrap(), ["file-0000.dat"]);
    assert_eq!(list(&mut c, d, "*", NONE, 65536).unwrap(), ["file-0001.dat", "file-0002.dat"]);
    assert_eq!(list(&mut c, d, "*2*", Flags::REOPEN, 65536).unwrap(), ["file-0002.dat"]);
    assert_eq!(list(&mut c, d, "*1.dat", Flags::RESTART_SCANS | single, 65536).unwrap(), ["file-0001.dat"]);
}

#[test]
fn a_pattern_without_wildcards_is_a_lookup() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    populate(&mut c, 10);
    let d = directory("d").id(&mut c);
    lab.memory.take_log();
    assert_eq!(list(&mut c, d, "file-0007.dat", NONE, 4096).unwrap(), ["file-0007.dat"]);
    assert_eq!(list(&mut c, d, "file-0007.dat", NONE, 4096), Err(NtStatus::NO_MORE_FILES));
    assert_eq!(lab.memory.take_log(), ["lookup"]);
    assert_eq!(list(&mut c, d, "FILE-0007.DAT", Flags::REOPEN, 4096), Err(NtStatus::NO_SUCH_FILE));
    assert_eq!(list(&mut c, d, "*.txt", Flags::REOPEN, 4096), Err(NtStatus::NO_SUCH_FILE));
    assert_eq!(list(&mut c, d, ".", Flags::REOPEN, 4096).unwrap(), ["."]);
}

#[test]
fn invalid_queries_are_refused() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    populate(&mut c, 1);
    let d = directory("d").id(&mut c);
    assert_eq!(list(&mut c, d, "", NONE, 4096), Err(NtStatus::OBJECT_NAME_INVALID));
    assert_eq!(list(&mut c, d, r"a\b", NONE, 4096), Err(NtStatus::OBJECT_NAME_INVALID));
    assert_eq!(list(&mut c, d, "*", NONE, 103), Err(NtStatus::INFO_LENGTH_MISMATCH));
    assert_eq!(list(&mut c, d, "f*", NONE, 105), Err(NtStatus::INFO_LENGTH_MISMATCH));
    assert_eq!(list(&mut c, d, "f*", NONE, 4096).unwrap().len(), 1, "and no entry is skipped");
    let f = file("f").id(&mut c);
    assert_eq!(list(&mut c, f, "*", NONE, 4096), Err(NtStatus::INVALID_PARAMETER));
    let blind = directory("d").access(AccessMask::FILE_READ_ATTRIBUTES).id(&mut c);
    assert_eq!(list(&mut c, blind, "*", NONE, 4096), Err(NtStatus::ACCESS_DENIED));
}

#[test]
fn files_deleted_during_a_scan_are_not_listed() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let names = populate(&mut c, 20);
    let d = directory("d").id(&mut c);
    assert_eq!(list(&mut c, d, "*", Flags::RETURN_SINGLE_ENTRY, 256).unwrap(), ["."]);
    for name in names {
        let f = file(&format!("d\\{name}")).id(&mut c);
        crate::calls::delete_pending(&mut c, f, true).unwrap();
        close(&mut c, f).unwrap();
    }
    assert_eq!(list(&mut c, d, "*", NONE, 4096).unwrap(), [".."]);
    assert_eq!(list(&mut c, d, "*", NONE, 4096), Err(NtStatus::NO_MORE_FILES));
}
