//! Clients that may cache something of a file, and the breaks that request them to give it up ([MS-SMB2] 3.3.4.6, 3.3.4.7).

use std::time::{Duration, Instant};

use crate::engine::clients::Clients;
use crate::engine::file::leases::LeaseId;
use crate::engine::file::local_open::Registered;
use crate::engine::file::opener::{Cached, NONE, Opener, R, RW, RWH, is_lease_stat_only, is_stat_only};
use crate::engine::mail::{BreakNotice, ConnectionId, Mail};
use crate::ids::FileId;
use crate::limits;
use crate::wire::create::OplockLevel;
use crate::wire::create_context::{Lease, LeaseFlags, LeaseState, LeaseV2};
use crate::wire::oplock_break::{LeaseBreakFlags, LeaseBreakNotification, Notification, OplockBreak};
use crate::wire::{AccessMask, ShareAccess};

pub(in crate::engine) struct Holder {
    pub(in crate::engine) kind: Kind,
    /// What may be cached. During a break, the state from before the break.
    pub(in crate::engine) state: LeaseState,
    pub(in crate::engine) breaking: Option<Breaking>,
    pub(in crate::engine) opens: Vec<FileId>,
}

pub(in crate::engine) enum Kind {
    Oplock,
    Lease(Leased),
}

pub(in crate::engine) struct Leased {
    pub(in crate::engine) id: LeaseId,
    /// Set for a lease of version 2.
    pub(in crate::engine) v2: Option<LeaseV2>,
    pub(in crate::engine) flags: LeaseFlags,
}

/// A break that must be acknowledged ([MS-SMB2] 3.3.4.6, 3.3.4.7).
pub(in crate::engine) struct Breaking {
    /// The state that the client was asked to go down to. It may go lower.
    pub(in crate::engine) requested: LeaseState,
    /// The state that the client must reach in the end.
    pub(in crate::engine) required: LeaseState,
    pub(in crate::engine) notification: Notification,
    /// Channels on which the notification was sent.
    pub(in crate::engine) tried: Vec<ConnectionId>,
    /// When the clock first saw the break.
    pub(in crate::engine) since: Option<Instant>,
    /// Start of the time that the channel asked last has to answer.
    pub(in crate::engine) sent: Option<Instant>,
    /// When the clock last saw a channel being asked.
    pub(in crate::engine) asked: Option<Instant>,
    /// Number of channels to ask because channels that had been asked before were lost.
    pub(in crate::engine) resends_due: usize,
}

impl Breaking {
    fn new(
        requested: LeaseState,
        required: LeaseState,
        notification: Notification,
        tried: Vec<ConnectionId>,
    ) -> Self {
        let (since, sent, asked) = (None, None, None);
        Self { requested, required, notification, tried, since, sent, asked, resends_due: 0 }
    }

    /// Asks on one more channel if it is time to: the last one has had its time, or one that was asked before is lost.
    /// Never asks on two channels at a time, so that a client receives the notifications in order.
    pub(in crate::engine) fn ask_again(
        &mut self,
        now: Instant,
        time_per_channel: Duration,
        sessions: &[u64],
        clients: &dyn Clients,
    ) {
        let sent = *self.sent.get_or_insert(now);
        let asked = *self.asked.get_or_insert(now);
        let due = now.saturating_duration_since(sent) >= time_per_channel;
        let pace = Duration::from_millis(limits::OPLOCK_BREAK_PACE_MS);
        if !due && self.resends_due == 0 || now.saturating_duration_since(asked) < pace {
            return;
        }
        if due {
            // Not `now`: delays of ticks must not add up.
            self.sent = Some(sent + time_per_channel);
        } else {
            self.resends_due -= 1;
        }
        self.asked = Some(now);
        send(clients, sessions, &mut self.tried, self.notification);
    }

    /// [MS-SMB2] 3.3.4.6, 3.3.4.7: a notification that was sent on a lost channel is sent on another one. This also applies
    /// if other channels were asked since: a client that is silent on all its channels is detected in time.
    pub(in crate::engine) fn channel_lost(
        &mut self,
        connection: ConnectionId,
        sessions: &[u64],
        clients: &dyn Clients,
    ) {
        if self.tried.last() == Some(&connection) {
            send(clients, sessions, &mut self.tried, self.notification);
            (self.sent, self.asked) = (None, None);
        } else if self.tried.contains(&connection) {
            self.resends_due += 1;
        }
    }
}

impl Kind {
    pub(in crate::engine) fn lease_id(&self) -> Option<LeaseId> {
        match self {
            Self::Oplock => None,
            Self::Lease(leased) => Some(leased.id),
        }
    }

    pub(in crate::engine) fn is_oplock(&self) -> bool {
        matches!(self, Self::Oplock)
    }
}

impl Holder {
    /// Whether an opener never breaks this holder, regardless of its state.
    pub(in crate::engine) fn is_spared_by(&self, opener: &Opener) -> bool {
        let id = self.kind.lease_id();
        id.is_some() && (id == opener.ask.lease_id() || is_lease_stat_only(opener.access))
            || is_stat_only(opener.access)
    }

    /// Returns the state that an opener leaves to this holder, if it takes something from it.
    pub(in crate::engine) fn left_by(&self, opener: &Opener, violation: bool) -> Option<LeaseState> {
        if self.is_spared_by(opener) {
            return None;
        }
        let mut rest = self.state.without(opener.takes(violation));
        if opener.overwrites && !violation {
            rest = NONE;
        }
        if self.state == rest {
            return None;
        }
        // An oplock can be broken to no other states.
        Some(if self.kind.is_oplock() { rest & R } else { rest })
    }

    /// Starts or deepens a break. The caller holds the file's lock.
    pub(in crate::engine) fn break_to(
        &mut self,
        to: LeaseState,
        opens: &[Registered],
        clients: &dyn Clients,
    ) {
        let to = to & self.state;
        if let Some(breaking) = &mut self.breaking {
            // The client is notified again after it has acknowledged the earlier break.
            if !self.kind.is_oplock() {
                breaking.required = breaking.required & to;
            }
            return;
        }
        if self.state == to {
            return;
        }
        let from = self.state;
        if let Kind::Lease(Leased { v2: Some(v2), .. }) = &mut self.kind {
            v2.epoch = v2.epoch.wrapping_add(1);
        }
        if from == R {
            // The client has nothing to give back first, so no acknowledgment is required.
            self.state = NONE;
            let notification = self.notification(from, to, false);
            let (sessions, mut tried) = (self.sessions(opens, clients), Vec::new());
            send(clients, &sessions, &mut tried, notification);
            return;
        }
        self.begin(from, to, to, opens, clients);
    }

    pub(in crate::engine) fn begin(
        &mut self,
        from: LeaseState,
        requested: LeaseState,
        required: LeaseState,
        opens: &[Registered],
        clients: &dyn Clients,
    ) {
        let notification = self.notification(from, requested, true);
        let mut tried = Vec::new();
        let sent = send(clients, &self.sessions(opens, clients), &mut tried, notification);
        if sent || !self.is_disconnected(opens) {
            // Not sent: the last channel was just lost, and its opens are about to be kept or closed. As with a break that
            // was sent before, they are closed ([MS-SMB2] 3.3.7.1 keeps none with the OplockState Breaking), which ends the
            // wait.
            self.breaking = Some(Breaking::new(requested, required, notification, tried));
        } else {
            // No client is left that could be asked, or that would continue to use it.
            self.state = required;
        }
    }

    pub(in crate::engine) fn notification(
        &self,
        from: LeaseState,
        to: LeaseState,
        acknowledged: bool,
    ) -> Notification {
        match &self.kind {
            Kind::Oplock => Notification::Oplock(OplockBreak {
                oplock_level: if to.contains(R) { OplockLevel::II } else { OplockLevel::NONE },
                file_id: self.opens.first().copied().unwrap_or(FileId { persistent: 0, volatile: 0 }),
            }),
            Kind::Lease(leased) => Notification::Lease(LeaseBreakNotification {
                new_epoch: leased.v2.map_or(0, |v2| v2.epoch),
                flags: if acknowledged { LeaseBreakFlags::ACK_REQUIRED } else { LeaseBreakFlags::empty() },
                lease_key: leased.id.key,
                current_lease_state: from,
                new_lease_state: to,
                break_reason: 0,
                access_mask_hint: AccessMask::empty(),
                share_mask_hint: ShareAccess::empty(),
            }),
        }
    }

    /// Returns the sessions with channels that can carry a break: the session of an oplock's open, or all sessions of a
    /// lease's client.
    pub(in crate::engine) fn sessions(&self, opens: &[Registered], clients: &dyn Clients) -> Vec<u64> {
        let mine = || opens.iter().filter(|o| self.opens.contains(&o.id));
        match self.kind.lease_id() {
            None => mine().filter_map(Registered::session).collect(),
            Some(id) => {
                let Some(open) = mine().filter(|o| !o.is_disconnected()).find_map(Registered::open) else {
                    return Vec::new();
                };
                clients.sessions_of_client(id.client, open.volume_id())
            }
        }
    }

    pub(in crate::engine) fn cached(&self) -> Cached {
        match &self.kind {
            Kind::Oplock => Cached { level: level(self.state), lease: None },
            Kind::Lease(leased) => {
                let mut lease_flags = leased.flags;
                if self.breaking.is_some() {
                    lease_flags.insert(LeaseFlags::BREAK_IN_PROGRESS);
                }
                let lease =
                    Lease { lease_key: leased.id.key, lease_state: self.state, lease_flags, v2: leased.v2 };
                Cached { level: OplockLevel::LEASE, lease: Some(lease) }
            }
        }
    }

    /// Whether no client is left that a break could be sent to.
    pub(in crate::engine) fn is_disconnected(&self, opens: &[Registered]) -> bool {
        opens.iter().filter(|o| self.opens.contains(&o.id)).all(Registered::is_disconnected)
    }
}

fn level(state: LeaseState) -> OplockLevel {
    if state.contains(RWH) {
        OplockLevel::BATCH
    } else if state.contains(RW) {
        OplockLevel::EXCLUSIVE
    } else if state.contains(R) {
        OplockLevel::II
    } else {
        OplockLevel::NONE
    }
}

/// Sends a notification on the first channel of these sessions that was not tried yet. False if there is none.
pub(in crate::engine) fn send(
    clients: &dyn Clients,
    sessions: &[u64],
    tried: &mut Vec<ConnectionId>,
    notification: Notification,
) -> bool {
    for &session_id in sessions {
        let Some(connection) = clients.channels(session_id).into_iter().find(|c| !tried.contains(c)) else {
            continue;
        };
        tried.push(connection);
        let notice =
            BreakNotice { session_id, sessions: sessions.to_vec(), tried: tried.clone(), notification };
        clients.post(connection, Mail::Break(notice));
        return true;
    }
    false
}
