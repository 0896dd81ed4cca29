//! Opens that ended with their session and that clients have to open again.

use std::sync::Arc;

use forebay_smb::engine::{Predecessor, ServerConfig};
use forebay_smb::fs::FsHandle;
use forebay_smb::ids::FileId;
use forebay_smb::limits::LOST_OPENS_MAX;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::fscc::FileInformationClass;

use crate::calls::{Lab, NEWEST, file, query_file, success};
use crate::support::{Client, config, volume};

/// The previous start.
const EARLIER: u64 = 0x0bad_0000_0000;

fn lab() -> Lab {
    let predecessors = vec![Predecessor { instance: EARLIER, durable: true }];
    let lab = Lab::of(ServerConfig { predecessors, ..config() }, |_| {});
    lab.server.add_volume(volume("second", FsHandle(Arc::new(())))).unwrap();
    lab
}

fn ask(client: &mut Client, id: FileId) -> NtStatus {
    query_file(client, id, FileInformationClass::FILE_STANDARD_INFORMATION, 64).unwrap_err()
}

/// An id that an earlier start may have issued.
fn of_earlier_start(number: u64) -> FileId {
    FileId { persistent: EARLIER + number, volatile: number }
}

#[test]
fn forged_handles_do_not_evict_lost_opens_of_others() {
    let mut lab = lab();
    let mut a = lab.client();
    let id = file("f").id(&mut a);
    a.disconnect();
    let mut a = lab.client();
    assert_eq!(ask(&mut a, id), NtStatus::RETRY, "the client has to reopen it");
    // A client of another volume and one of the same volume name handles of an earlier start that no client ever had.
    let mut other = Client::new(&lab.server, 77, NEWEST);
    success(&other.negotiate().unwrap()).unwrap();
    success(&other.logon("second-user", "second-secret", 0).unwrap()).unwrap();
    success(&other.tree_connect("second").unwrap()).unwrap();
    let mut same = lab.client();
    for client in [&mut other, &mut same] {
        for number in 1..=LOST_OPENS_MAX as u64 + 1 {
            assert_eq!(ask(client, of_earlier_start(number)), NtStatus::RETRY);
        }
        assert_eq!(ask(&mut a, id), NtStatus::RETRY, "still known");
    }
}

#[test]
fn requests_on_one_volume_do_not_exhaust_retries_of_another() {
    let mut lab = lab();
    let mut a = lab.client();
    let id = file("f").id(&mut a);
    a.disconnect();
    let mut other = Client::new(&lab.server, 77, NEWEST);
    success(&other.negotiate().unwrap()).unwrap();
    success(&other.logon("second-user", "second-secret", 0).unwrap()).unwrap();
    success(&other.tree_connect("second").unwrap()).unwrap();
    for _ in 0..256 {
        assert_eq!(ask(&mut other, id), NtStatus::FILE_CLOSED, "not lost by this volume's clients");
    }
    let mut a = lab.client();
    assert_eq!(ask(&mut a, id), NtStatus::RETRY);
}
