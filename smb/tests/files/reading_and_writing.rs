//! READ, WRITE, FLUSH.

use forebay_smb::status::NtStatus;
use forebay_smb::wire::{AccessMask, Command};

use crate::calls::{Lab, close, directory, file, flush, read, read_min, write, write_body};

#[test]
fn written_data_is_read_by_other_clients() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    let large: Vec<u8> = (0..1_000_000_u32).map(|i| ((i * 7) >> 3) as u8).collect();
    assert_eq!(write(&mut a, fa, 5, &large), Ok(1_000_000));
    assert_eq!(flush(&mut a, fa), Ok(()));
    assert!(read(&mut b, fb, 5, 1_048_576).unwrap() == large);
    assert_eq!(read(&mut b, fb, 0, 6).unwrap(), [0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_read_at_the_end_of_a_file_answers_end_of_file() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    assert_eq!(read(&mut c, f, 0, 5), Err(NtStatus::END_OF_FILE));
    write(&mut c, f, 0, &[1; 100]).unwrap();
    assert_eq!(read(&mut c, f, 99, 2).unwrap().len(), 1);
    assert_eq!(read(&mut c, f, 100, 10), Err(NtStatus::END_OF_FILE));
    assert_eq!(read(&mut c, f, 100, 0).unwrap().len(), 0);
    assert_eq!(read_min(&mut c, f, 100, 0, 1), Err(NtStatus::END_OF_FILE));
    assert_eq!(read_min(&mut c, f, 99, 2, 2), Err(NtStatus::END_OF_FILE));
    assert_eq!(read_min(&mut c, f, 0, 10, 10).unwrap().len(), 10);
}

#[test]
fn offsets_beyond_the_signed_64_bit_range_are_refused() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    let end = i64::MAX as u64;
    assert_eq!(read(&mut c, f, end - 1, 1), Err(NtStatus::END_OF_FILE));
    assert_eq!(read(&mut c, f, end, 0).unwrap().len(), 0);
    assert_eq!(write(&mut c, f, end, b""), Ok(0));
    for offset in [end + 1, u64::MAX, u64::MAX - 1] {
        assert_eq!(read(&mut c, f, offset, 0), Err(NtStatus::INVALID_PARAMETER), "{offset:#x}");
        assert_eq!(write(&mut c, f, offset, b""), Err(NtStatus::INVALID_PARAMETER), "{offset:#x}");
    }
    assert_eq!(read(&mut c, f, end, 1), Err(NtStatus::INVALID_PARAMETER));
    assert_eq!(write(&mut c, f, end, b"x"), Err(NtStatus::INVALID_PARAMETER));
    assert!(!lab.memory.take_log().contains(&"write"));
}

#[test]
fn access_rights_are_checked() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let made = file("f").id(&mut c);
    write(&mut c, made, 0, b"x").unwrap();
    close(&mut c, made).unwrap();
    let mut with = |access| {
        let f = file("f").access(access).id(&mut c);
        (read(&mut c, f, 0, 1).err(), write(&mut c, f, 0, b"x").err(), flush(&mut c, f).err())
    };
    let denied = Some(NtStatus::ACCESS_DENIED);
    assert_eq!(with(AccessMask::FILE_READ_DATA), (None, denied, denied));
    assert_eq!(with(AccessMask::FILE_EXECUTE), (None, denied, denied));
    assert_eq!(with(AccessMask::FILE_WRITE_DATA), (denied, None, None));
    assert_eq!(with(AccessMask::FILE_APPEND_DATA), (denied, None, None));
    assert_eq!(with(AccessMask::FILE_READ_ATTRIBUTES), (denied, denied, denied));
}

#[test]
fn directories_have_no_data() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let d = directory("d").id(&mut c);
    assert_eq!(read(&mut c, d, 0, 10), Err(NtStatus::INVALID_DEVICE_REQUEST));
    assert_eq!(write(&mut c, d, 0, b"x"), Err(NtStatus::INVALID_DEVICE_REQUEST));
}

#[test]
fn a_write_with_a_truncated_payload_is_refused() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    let body = write_body(f, 0, b"twenty bytes of data");
    for cut in [1, 19, 20] {
        let status = c.call(Command::WRITE, &body[..body.len() - cut]).unwrap().status();
        assert_eq!(status, NtStatus::INVALID_PARAMETER, "{cut}");
    }
    assert_eq!(lab.memory.contents("f").as_deref(), Some(&b""[..]));
}

#[test]
fn positions_follow_reads_and_writes() {
    use forebay_smb::wire::fscc::FileInformationClass;
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    let position = |c: &mut _| {
        let bytes =
            crate::calls::query_file(c, f, FileInformationClass::FILE_POSITION_INFORMATION, 8).unwrap();
        u64::from_le_bytes(bytes.try_into().unwrap())
    };
    write(&mut c, f, 0, &[0; 50]).unwrap();
    assert_eq!(position(&mut c), 50);
    read(&mut c, f, 10, 5).unwrap();
    assert_eq!(position(&mut c), 15);
}
