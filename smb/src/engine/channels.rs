//! Session.ChannelList ([MS-SMB2] 3.3.1.8, 3.3.1.14): the connections that carry one session.

use crate::engine::mail::ConnectionId;
use crate::engine::transforms::Transforms;
use crate::limits;
use crate::status::NtStatus;

/// The part of a sealing nonce that distinguishes one channel's nonces from another's.
pub(crate) type NoncePart = [u8; 3];

/// Nonce part of the channel that a session is established on.
pub(crate) const FIRST_NONCE_PART: NoncePart = [0; 3];

/// Number of distinct values of a [`NoncePart`].
const NONCE_PARTS: u32 = 1 << 24;

/// Properties of the connection of a channel, for lists of channels.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChannelLink {
    /// The transport's name for the peer.
    pub(crate) address: String,
    pub(crate) over_rdma: bool,
    pub(crate) transforms: Transforms,
}

impl ChannelLink {
    /// Returns one word for how the channel carries payload, given whether the messages of the session are sealed or
    /// signed.
    pub(crate) fn transport(&self, sealed: bool, signed: bool) -> &'static str {
        match (self.over_rdma, sealed, signed) {
            (false, true, _) => "tcp-sealed",
            (false, false, true) => "tcp-signed",
            (false, false, false) => "tcp",
            (true, true, _) if self.transforms.encryption => "rdma-sealed",
            (true, false, true) if self.transforms.signing => "rdma-signed",
            // Only the messages are protected, so the payload is sent in them.
            (true, true, _) => "rdma-inline-sealed",
            (true, false, true) => "rdma-inline-signed",
            (true, false, false) => "rdma",
        }
    }
}

struct Member {
    connection: ConnectionId,
    link: ChannelLink,
}

/// The channels of a session, oldest first.
pub(crate) struct ChannelList {
    members: Vec<Member>,
    /// The next channel's number. A number is never reused, even after its channel has ended, because its nonces were used.
    next: u32,
    /// The connection on which the session is being reauthenticated.
    reauthenticating: Option<ConnectionId>,
}

impl ChannelList {
    /// Creates a list with the channel that the session is established on. Its nonce part is [`FIRST_NONCE_PART`].
    pub(crate) fn new(connection: ConnectionId, link: ChannelLink) -> Self {
        Self { members: vec![Member { connection, link }], next: 1, reauthenticating: None }
    }

    /// Adds a channel and returns its nonce part.
    ///
    /// # Errors
    /// `STATUS_REQUEST_NOT_ACCEPTED` if the connection is a channel already or the session is being reauthenticated,
    /// `STATUS_INSUFFICIENT_RESOURCES` beyond the limit and if all nonce parts have been issued.
    pub(crate) fn join(
        &mut self,
        connection: ConnectionId,
        link: ChannelLink,
    ) -> Result<NoncePart, NtStatus> {
        self.may_join(connection)?;
        let [a, b, c, _] = self.next.to_le_bytes();
        self.next += 1;
        self.members.push(Member { connection, link });
        Ok([a, b, c])
    }

    /// Returns the error that [`Self::join`] would return, without joining.
    pub(crate) fn may_join(&self, connection: ConnectionId) -> Result<(), NtStatus> {
        if self.members.iter().any(|m| m.connection == connection) || self.reauthenticating.is_some() {
            return Err(NtStatus::REQUEST_NOT_ACCEPTED);
        }
        if self.members.len() >= limits::CHANNELS_PER_SESSION_MAX || self.next >= NONCE_PARTS {
            return Err(NtStatus::INSUFFICIENT_RESOURCES);
        }
        Ok(())
    }

    /// Removes a channel. True if none is left.
    pub(crate) fn leave(&mut self, connection: ConnectionId) -> bool {
        self.members.retain(|m| m.connection != connection);
        self.reauthenticated(connection);
        self.members.is_empty()
    }

    /// Sets Session.State to InProgress.
    pub(crate) fn reauthenticate(&mut self, connection: ConnectionId) {
        self.reauthenticating = Some(connection);
    }

    /// Sets Session.State back to Valid.
    pub(crate) fn reauthenticated(&mut self, connection: ConnectionId) {
        if self.reauthenticating == Some(connection) {
            self.reauthenticating = None;
        }
    }

    pub(crate) fn connections(&self) -> Vec<ConnectionId> {
        self.members.iter().map(|m| m.connection).collect()
    }

    pub(crate) fn links(&self) -> Vec<ChannelLink> {
        self.members.iter().map(|m| m.link.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::crypto::NonceSequence;

    fn list() -> ChannelList {
        ChannelList::new(ConnectionId(0), ChannelLink::default())
    }

    #[test]
    fn channels_per_session_are_limited() {
        let mut list = list();
        for i in 1..limits::CHANNELS_PER_SESSION_MAX as u64 {
            list.join(ConnectionId(i), ChannelLink::default()).expect("below the limit");
        }
        let one_more = ConnectionId(1 << 20);
        assert_eq!(list.join(one_more, ChannelLink::default()), Err(NtStatus::INSUFFICIENT_RESOURCES));
        list.leave(ConnectionId(3));
        list.join(one_more, ChannelLink::default()).expect("a channel has left");
    }

    #[test]
    fn a_connection_joins_once_and_never_during_reauthentication() {
        let mut list = list();
        assert_eq!(list.join(ConnectionId(0), ChannelLink::default()), Err(NtStatus::REQUEST_NOT_ACCEPTED));
        list.reauthenticate(ConnectionId(0));
        assert_eq!(list.join(ConnectionId(1), ChannelLink::default()), Err(NtStatus::REQUEST_NOT_ACCEPTED));
        list.reauthenticated(ConnectionId(1));
        assert_eq!(list.may_join(ConnectionId(1)), Err(NtStatus::REQUEST_NOT_ACCEPTED));
        list.reauthenticated(ConnectionId(0));
        list.join(ConnectionId(1), ChannelLink::default()).expect("authenticated again");
    }

    #[test]
    fn a_session_without_unused_nonce_parts_refuses_new_channels() {
        let mut list = list();
        list.next = NONCE_PARTS - 1;
        assert_eq!(list.join(ConnectionId(1), ChannelLink::default()), Ok([0xff; 3]));
        list.leave(ConnectionId(1));
        assert_eq!(list.join(ConnectionId(1), ChannelLink::default()), Err(NtStatus::INSUFFICIENT_RESOURCES));
    }

    #[derive(Clone, Debug)]
    enum Act {
        Join(u64, u64),
        Leave(u64),
        Send(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            // Colliding counters: only the nonce parts distinguish channels that start at the same counter.
            (1..40_u64, 0..4_u64).prop_map(|(id, start)| Act::Join(id, start)),
            (0..40_u64).prop_map(Act::Leave),
            (0..64_usize).prop_map(Act::Send),
        ]
    }

    proptest! {
        #[test]
        fn nonces_of_one_session_never_repeat(acts in prop::collection::vec(act(), 1..300)) {
            let mut list = list();
            let mut open = vec![(ConnectionId(0), NonceSequence::new(FIRST_NONCE_PART, 0))];
            let mut seen = HashSet::new();
            for act in acts {
                match act {
                    Act::Join(id, start) => {
                        if let Ok(part) = list.join(ConnectionId(id), ChannelLink::default()) {
                            open.push((ConnectionId(id), NonceSequence::new(part, start)));
                        }
                    }
                    Act::Leave(id) => {
                        list.leave(ConnectionId(id));
                        open.retain(|(c, _)| *c != ConnectionId(id));
                    }
                    Act::Send(which) => {
                        let Some(at) = which.checked_rem(open.len()) else { continue };
                        let nonce = open[at].1.next_nonce().expect("far from the end");
                        prop_assert!(seen.insert(format!("{nonce:?}")), "{nonce:?} twice");
                    }
                }
            }
        }
    }
}
