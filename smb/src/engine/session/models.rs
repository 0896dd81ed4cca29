//! Guarantees of a session while its channels use it concurrently.

use std::time::Instant;

use super::*;
use crate::crypto::{SessionKey, SigningAlgorithm};
use crate::engine::file::table::models::{PLAIN, World};
use crate::sync::model::{check, spawn};
use crate::wire::FileTime;

const FIRST: ConnectionId = ConnectionId(1);
const SECOND: ConnectionId = ConnectionId(2);

pub(in crate::engine) fn session(world: &World) -> Arc<Session> {
    Arc::new(Session::new(NewSession {
        id: 1,
        username: "model".to_owned(),
        volume_id: world.volume.id.clone(),
        dialect: Dialect::SMB3_1_1,
        client_guid: [0; 16],
        cipher: None,
        signing: SigningKey::new(SigningAlgorithm::HmacSha256, &SessionKey::new(&[0; 16])),
        sealing: None,
        established: Now { instant: Instant::now(), wall: FileTime(0) },
        expires: None,
        signing_required: false,
        encrypt: false,
        connection: FIRST,
        link: ChannelLink::default(),
        counted: world.volume.used.sessions.take(1).expect("the first"),
    }))
}

#[test]
fn channel_joining_during_logoff_is_refused_or_ended_with_the_session() {
    check(|| {
        let world = World::new();
        let session = session(&world);
        world.server.sessions().insert(session.id, Arc::clone(&session));
        let binder = spawn({
            let world = world.clone();
            move || {
                let found = world.server.sessions().get(&1).cloned();
                found.ok_or(NtStatus::USER_SESSION_DELETED)?.join(SECOND, ChannelLink::default()).map(drop)
            }
        });
        // Like LOGOFF.
        world.server.sessions().remove(&1);
        let channels = session.end();
        let joined = binder.join().expect("asked");
        match joined {
            Ok(()) => assert_eq!(channels, [FIRST, SECOND], "it ends with the session"),
            Err(status) => assert_eq!((status, channels), (NtStatus::USER_SESSION_DELETED, vec![FIRST])),
        }
        assert!(session.connections().is_empty());
    });
}

#[test]
fn open_added_during_session_end_is_refused_or_closed_with_it() {
    check(|| {
        let world = World::new();
        let session = session(&world);
        let tree = session.connect(Share::Volume(Arc::clone(&world.volume)), 0, false).expect("the first");
        assert_eq!(tree.id, 1, "the tree id of the models' opens");
        session.join(SECOND, ChannelLink::default()).expect("a second channel");
        let open = world.open(&PLAIN).expect("opened");
        let adder = spawn({
            let (session, open) = (Arc::clone(&session), Arc::clone(&open));
            move || session.add_open(open)
        });
        let other = spawn({
            let session = Arc::clone(&session);
            move || session.leave(SECOND)
        });
        let left = session.leave(FIRST);
        let added = adder.join().expect("asked");
        let others = other.join().expect("left");
        let given_out = left.opens.len() + others.opens.len();
        assert_eq!(given_out, usize::from(added.is_ok()), "exactly once if added");
        assert!(left.last != others.last, "exactly one was the last");
    });
}
