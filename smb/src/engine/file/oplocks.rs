//! Oplocks and leases, by which clients cache a file ([MS-SMB2] 3.3.1.12, 3.3.5.9.8, 3.3.5.9.11; [MS-FSA] 2.1.5.18).
//!
//! Both are [`Holder`]s. An oplock belongs to one open and has three states (level II is R, exclusive RW, batch RWH). A
//! lease belongs to all opens that name its key. Where the specifications leave room, this follows the behavior that
//! smbtorture was written against.

use std::time::{Duration, Instant};

use crate::engine::clients::Clients;
use crate::engine::file::holder::{Holder, Kind, Leased, send};
use crate::engine::file::leases::{LeaseId, LeaseKey, LeaseTable};
use crate::engine::file::local_open::Registered;
use crate::engine::file::opener::{Cached, H, NONE, Opener, R, RH, RWH, RequestedCaching, W, is_stat_only};
use crate::engine::mail::{ConnectionId, Mail, Waiter};
use crate::ids::FileId;
use crate::limits;
use crate::status::NtStatus;
use crate::wire::create::OplockLevel;
use crate::wire::create_context::{LeaseFlags, LeaseState, LeaseV2};

/// Returns how long a channel has to answer before the next one is asked. Each channel gets its turn before the time is
/// over.
fn time_per_channel(clients: &dyn Clients, sessions: &[u64]) -> Duration {
    let channels: usize = sessions.iter().map(|session| clients.channels(*session).len()).sum();
    let turns = u32::try_from(channels).unwrap_or(u32::MAX).saturating_add(1);
    let turn = Duration::from_secs(limits::OPLOCK_BREAK_SECONDS_MAX) / turns;
    turn.min(Duration::from_secs(limits::OPLOCK_BREAK_RESEND_SECONDS))
}

/// Everything that clients may cache of one file.
#[derive(Default)]
pub(in crate::engine) struct Caching {
    holders: Vec<Holder>,
    waiters: Vec<Waiter>,
}

impl Caching {
    /// Whether a write would make a client drop data that it has read.
    pub(in crate::engine) fn is_breakable(&self) -> bool {
        self.holders.iter().any(|h| h.state.intersects(R) && !h.state.contains(W))
    }

    /// Whether a client may write later.
    pub(in crate::engine) fn is_write_cached(&self) -> bool {
        self.holders.iter().any(|h| h.state.contains(W))
    }

    /// Whether a break awaits acknowledgment.
    pub(in crate::engine) fn is_breaking(&self) -> bool {
        self.holders.iter().any(|h| h.breaking.is_some())
    }

    fn of(&self, open: FileId) -> Option<&Holder> {
        self.holders.iter().find(|h| h.opens.contains(&open))
    }

    pub(in crate::engine) fn cached(&self, open: FileId) -> Cached {
        self.of(open).map_or(Cached::NOTHING, Holder::cached)
    }

    pub(in crate::engine) fn keeps_handle(&self, open: FileId) -> bool {
        self.of(open).is_some_and(|h| h.state.contains(H) && h.breaking.is_none())
    }

    /// Whether an open may exist only for the cache.
    pub(in crate::engine) fn is_kept(&self, open: FileId) -> bool {
        self.of(open).is_some_and(|h| !h.kind.is_oplock() && h.state.contains(H))
    }

    /// Returns the disconnected opens that keep an opener out by what they may cache: no client is left to give that up.
    pub(in crate::engine) fn displaced(
        &self,
        opener: &Opener,
        violation: bool,
        opens: &[Registered],
    ) -> Vec<FileId> {
        let in_the_way = |h: &&Holder| h.is_disconnected(opens) && h.left_by(opener, violation).is_some();
        let ids: Vec<FileId> =
            self.holders.iter().filter(in_the_way).flat_map(|h| h.opens.iter().copied()).collect();
        opens.iter().filter(|o| ids.contains(&o.id) && o.open().is_some()).map(|o| o.id).collect()
    }

    /// Breaks what conflicts with an opener ([MS-FSA] 2.1.4.12). True if the opener must wait for that. On a `directory`,
    /// no client has anything to write back first.
    pub(in crate::engine) fn contend(
        &mut self,
        opener: &Opener,
        violation: bool,
        directory: bool,
        opens: &[Registered],
        clients: &dyn Clients,
    ) -> bool {
        let takes = opener.takes(violation);
        let mut waits = false;
        for holder in &mut self.holders {
            let was_breaking = holder.breaking.is_some();
            let Some(rest) = holder.left_by(opener, violation) else {
                waits |=
                    was_breaking && !directory && !holder.kind.is_oplock() && !holder.is_spared_by(opener);
                continue;
            };
            holder.break_to(rest, opens, clients);
            waits |= holder.breaking.is_some()
                && (holder.state.intersects(takes) || was_breaking && !opener.first);
        }
        self.forget_empty_oplocks();
        waits
    }

    /// Returns what an opener that conflicts with no other may cache.
    pub(in crate::engine) fn grantable(
        &self,
        opener: &Opener,
        directory: bool,
        opens: &[Registered],
        locked: bool,
    ) -> LeaseState {
        let is_lease = matches!(opener.ask, RequestedCaching::Lease { .. });
        // Clients do not write data to directories.
        let mut granted = opener.ask.state() & if directory { RH } else { RWH };
        // An opener that only accesses the attributes of an existing file gets no oplock.
        if !is_lease && opener.existed && is_stat_only(opener.access) {
            return NONE;
        }
        // [MS-SMB2] 3.3.5.9.8, [MS-FSA] 2.1.5.18: combinations that exist.
        if !granted.contains(R) {
            return NONE;
        }
        // Locked data must be read from the server, which has the locks.
        if locked && !opener.overwrites {
            return NONE;
        }
        let own = opener.ask.lease_id();
        // [MS-FSA] 2.1.5.18.2: no grant beside a client that may write later. An opener that only accesses attributes has
        // not broken that.
        if self.holders.iter().any(|h| h.state.contains(W) && (own.is_none() || h.kind.lease_id() != own)) {
            return NONE;
        }
        let others = |o: &&Registered| {
            let holder = self.of(o.id);
            let same = own.is_some() && holder.and_then(|h| h.kind.lease_id()) == own;
            !same && (holder.is_some() || !is_stat_only(o.access))
        };
        if opens.iter().any(|o| others(&o)) {
            granted.remove(W);
        }
        if is_lease {
            if self.holders.iter().any(|h| h.kind.is_oplock()) {
                granted.remove(H);
            }
        } else {
            if self.holders.iter().any(|h| h.state.contains(H)) {
                return NONE;
            }
            if granted == RH {
                granted = R;
            }
        }
        granted
    }

    /// Records what an open was granted. An existing lease can only be upgraded ([MS-SMB2] 3.3.5.9.8).
    pub(in crate::engine) fn grant(&mut self, open: FileId, ask: &RequestedCaching, granted: LeaseState) {
        let RequestedCaching::Lease { client, lease } = ask else {
            if granted != NONE {
                let holder = Holder { kind: Kind::Oplock, state: granted, breaking: None, opens: vec![open] };
                self.holders.push(holder);
            }
            return;
        };
        let id = LeaseId { client: *client, key: lease.lease_key };
        if let Some(held) = self.holders.iter_mut().find(|h| h.kind.lease_id() == Some(id)) {
            held.opens.push(open);
            let upgrade = lease.lease_state.contains(held.state)
                && granted == lease.lease_state
                && granted != held.state
                && held.breaking.is_none();
            if upgrade {
                held.state = granted;
                if let Kind::Lease(Leased { v2: Some(v2), .. }) = &mut held.kind {
                    v2.epoch = v2.epoch.wrapping_add(1);
                }
            }
            return;
        }
        let flags = match lease.v2 {
            Some(_) => lease.lease_flags & LeaseFlags::PARENT_LEASE_KEY_SET,
            None => LeaseFlags::empty(),
        };
        let v2 = lease.v2.map(|v2| LeaseV2 {
            parent_lease_key: if flags.is_empty() { [0; 16] } else { v2.parent_lease_key },
            epoch: v2.epoch.wrapping_add(u16::from(granted != NONE)),
        });
        let kind = Kind::Lease(Leased { id, v2, flags });
        self.holders.push(Holder { kind, state: granted, breaking: None, opens: vec![open] });
    }

    /// Handles a change of the contents by `open`: data that other clients have read becomes invalid. No request waits for
    /// these breaks. A level II oplock of the open itself is broken, too, unless it was granted for the change (`fresh`).
    pub(in crate::engine) fn data_changes(
        &mut self,
        open: FileId,
        fresh: bool,
        opens: &[Registered],
        clients: &dyn Clients,
    ) {
        let own = self.of(open);
        // A holder that may write later is the only one.
        if own.is_some_and(|h| h.state.contains(W)) {
            return;
        }
        let own = own.and_then(|h| h.kind.lease_id());
        for holder in &mut self.holders {
            let is_own =
                own.is_some() && holder.kind.lease_id() == own || fresh && holder.opens.contains(&open);
            if !is_own && holder.state.intersects(R) {
                holder.break_to(NONE, opens, clients);
            }
        }
        self.forget_empty_oplocks();
    }

    /// Handles a change of the entries of the directory by an open that names `parent` as its client's lease on it
    /// ([MS-FSA] 2.1.4.12, 2.1.4.12.2). Other leases lose READ caching, and HANDLE caching, which requires READ caching. No
    /// request waits for that.
    pub(in crate::engine) fn entries_change(
        &mut self,
        parent: Option<LeaseKey>,
        opens: &[Registered],
        clients: &dyn Clients,
    ) {
        for holder in &mut self.holders {
            let key = holder.kind.lease_id().map(|id| id.key);
            if parent.is_none() || key != parent {
                holder.break_to(NONE, opens, clients);
            }
        }
    }

    /// Handles a change or removal of the name: other clients must close handles that they keep only for the cache. True if
    /// a client has to.
    pub(in crate::engine) fn break_handles(
        &mut self,
        except: Option<FileId>,
        opens: &[Registered],
        clients: &dyn Clients,
    ) -> bool {
        let own = except.and_then(|open| self.of(open)).and_then(|h| h.kind.lease_id());
        let mut waits = false;
        for holder in &mut self.holders {
            let is_own = own.is_some() && holder.kind.lease_id() == own
                || except.is_some_and(|open| holder.kind.is_oplock() && holder.opens.contains(&open));
            // A rename does not break a batch oplock: without HANDLE caching, its only state is level II.
            if is_own || holder.kind.is_oplock() || !holder.state.contains(H) {
                continue;
            }
            let rest = holder.state.without(H);
            holder.break_to(rest, opens, clients);
            waits |= holder.breaking.is_some();
        }
        waits
    }

    pub(in crate::engine) fn wait(&mut self, waiter: Waiter) {
        if !self.waiters.contains(&waiter) {
            self.waiters.push(waiter);
        }
    }

    pub(in crate::engine) fn stop_waiting(&mut self, token: u64) {
        self.waiters.retain(|w| w.token != token);
    }

    /// Wakes requests after a change that they may wait for.
    pub(in crate::engine) fn wake(&mut self, clients: &dyn Clients) {
        for waiter in self.waiters.drain(..) {
            clients.post(waiter.connection, Mail::Wake(waiter.token));
        }
    }

    /// Handles the end of an open. With its last open, a holder loses what it held.
    pub(in crate::engine) fn closed(&mut self, open: FileId, leases: &LeaseTable, clients: &dyn Clients) {
        for holder in &mut self.holders {
            holder.opens.retain(|o| *o != open);
        }
        self.holders.retain(|h| {
            if let (true, Some(id)) = (h.opens.is_empty(), h.kind.lease_id()) {
                leases.release(id);
            }
            !h.opens.is_empty()
        });
        self.wake(clients);
    }

    /// [MS-SMB2] 3.3.5.22.1. Returns the new level of the oplock.
    pub(in crate::engine) fn acknowledge_oplock(
        &mut self,
        open: FileId,
        level: OplockLevel,
        clients: &dyn Clients,
    ) -> Result<OplockLevel, NtStatus> {
        let holder = self.holders.iter_mut().find(|h| h.kind.is_oplock() && h.opens.contains(&open));
        let breaking = holder.and_then(|h| h.breaking.take().map(|b| (h, b)));
        let Some((holder, breaking)) = breaking else {
            return Err(match level {
                OplockLevel::LEASE => NtStatus::INVALID_PARAMETER,
                _ => NtStatus::INVALID_OPLOCK_PROTOCOL,
            });
        };
        let (state, answer) = match level {
            OplockLevel::II if breaking.requested.contains(R) => (R, Ok(OplockLevel::II)),
            OplockLevel::II | OplockLevel::NONE => (NONE, Ok(OplockLevel::NONE)),
            OplockLevel::LEASE => (NONE, Err(NtStatus::INVALID_PARAMETER)),
            _ => (NONE, Err(NtStatus::INVALID_OPLOCK_PROTOCOL)),
        };
        holder.state = state;
        self.forget_empty_oplocks();
        self.wake(clients);
        answer
    }

    /// [MS-SMB2] 3.3.5.22.2. If the client must give up more by now than it was asked to, it is asked for the rest in
    /// steps, as on Windows.
    ///
    /// # Errors
    /// `STATUS_OBJECT_NAME_NOT_FOUND` if the file has no such lease, `STATUS_UNSUCCESSFUL` if it is not being broken,
    /// `STATUS_REQUEST_NOT_ACCEPTED` for more than the client was asked to keep.
    pub(in crate::engine) fn acknowledge_lease(
        &mut self,
        id: LeaseId,
        state: LeaseState,
        opens: &[Registered],
        clients: &dyn Clients,
    ) -> Result<(), NtStatus> {
        let held = self.holders.iter_mut().find(|h| h.kind.lease_id() == Some(id));
        let holder = held.ok_or(NtStatus::OBJECT_NAME_NOT_FOUND)?;
        let breaking = holder.breaking.as_ref().ok_or(NtStatus::UNSUCCESSFUL)?;
        if !breaking.requested.contains(state) {
            return Err(NtStatus::REQUEST_NOT_ACCEPTED);
        }
        let required = breaking.required;
        holder.breaking = None;
        holder.state = state;
        if !required.contains(state) {
            if state.intersects(W | H) {
                holder.begin(state, required | R, required, opens, clients);
            } else {
                holder.state = NONE;
                let notification = holder.notification(state, required, false);
                send(clients, &holder.sessions(opens, clients), &mut Vec::new(), notification);
            }
        }
        self.wake(clients);
        Ok(())
    }

    /// Handles the passing of time. If no answer has arrived on the channel that was asked, the client is asked on another
    /// one. A client that does not answer at all loses what it held. True while a break waits.
    pub(in crate::engine) fn tick(
        &mut self,
        now: Instant,
        opens: &[Registered],
        clients: &dyn Clients,
    ) -> bool {
        let mut expired = false;
        for holder in &mut self.holders {
            let sessions = holder.sessions(opens, clients);
            let Some(breaking) = &mut holder.breaking else { continue };
            let since = *breaking.since.get_or_insert(now);
            if now.saturating_duration_since(since) >= Duration::from_secs(limits::OPLOCK_BREAK_SECONDS_MAX) {
                holder.breaking = None;
                holder.state = NONE;
                expired = true;
            } else {
                breaking.ask_again(now, time_per_channel(clients, &sessions), &sessions, clients);
            }
        }
        if expired {
            self.forget_empty_oplocks();
            self.wake(clients);
        }
        self.is_breaking()
    }

    /// Handles the loss of a connection on which a break may have been sent.
    pub(in crate::engine) fn channel_lost(
        &mut self,
        connection: ConnectionId,
        opens: &[Registered],
        clients: &dyn Clients,
    ) {
        for holder in &mut self.holders {
            let sessions = holder.sessions(opens, clients);
            if let Some(breaking) = &mut holder.breaking {
                breaking.channel_lost(connection, &sessions, clients);
            }
        }
    }

    /// Removes oplocks without any state. A lease without any state still exists.
    fn forget_empty_oplocks(&mut self) {
        self.holders.retain(|h| !(h.kind.is_oplock() && h.state == NONE));
    }
}
