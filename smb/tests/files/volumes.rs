//! Removing a volume while clients use it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_smb::engine::InUse;
use forebay_smb::status::NtStatus;

use crate::calls::{Lab, close, file, read, write};

/// When refusals still disturbed clients, two thirds of their requests failed.
const READS: u32 = 4_000;

#[test]
fn a_refused_volume_removal_disturbs_no_client() {
    let mut lab = Lab::new();
    let mut client = lab.client();
    let f = file("f").id(&mut client);
    write(&mut client, f, 0, b"x").unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let remover = std::thread::spawn({
        let (server, over) = (Arc::clone(&lab.server), Arc::clone(&over));
        move || {
            let mut refused = 0_u64;
            while !over.load(Ordering::Relaxed) {
                assert_eq!(server.remove_volume("vol", false), Err(InUse { open_files: 1 }));
                refused += 1;
            }
            refused
        }
    });
    let failed = (0..READS).filter(|_| read(&mut client, f, 0, 1).is_err()).count();
    over.store(true, Ordering::Relaxed);
    assert!(remover.join().unwrap() > 0);
    assert_eq!(failed, 0, "of {READS}");
    close(&mut client, f).unwrap();
    lab.server.remove_volume("vol", false).unwrap();
    assert_eq!(file("f").send(&mut client), Err(NtStatus::USER_SESSION_DELETED));
}
