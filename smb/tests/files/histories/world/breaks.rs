//! Breaks that the server sends to clients.

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::Command;
use forebay_smb::wire::create::OplockLevel;
use forebay_smb::wire::create_context::LeaseState;
use forebay_smb::wire::oplock_break::{
    LeaseBreakAcknowledgment, LeaseBreakNotification, OplockBreak, Request,
};

use super::{FILES, World, of_level};
use crate::histories::model::{CacheId, FileOpen, H, NONE, R, RH, W};

impl World {
    pub(super) fn lease_broken(&mut self, host: usize, notification: &LeaseBreakNotification) {
        let id = CacheId::Lease { host, key: notification.lease_key[0] };
        let (from, to) = (notification.current_lease_state, notification.new_lease_state);
        self.note(format!("host {host}: {id:?} is broken, {from:?} to {to:?}"));
        let cache = self.files.iter_mut().find_map(|f| f.cache_mut(id)).expect("a lease that is held");
        assert_eq!(cache.state, from, "the state before the break");
        assert!(cache.breaking.is_none(), "one break at a time");
        assert!(from.contains(to) && from != to, "a break takes something away");
        assert_eq!(notification.flags.0 != 0, from.intersects(W | H), "ACK_REQUIRED");
        match &mut cache.epoch {
            Some(epoch) => {
                assert!(notification.new_epoch >= *epoch, "epochs do not go back");
                *epoch = notification.new_epoch;
            }
            None => assert_eq!(notification.new_epoch, 0),
        }
        if notification.flags.0 == 0 {
            cache.become_state(to);
        } else {
            (cache.breaking, cache.seen) = (Some(to), None);
        }
        if !to.contains(R) {
            assert!(cache.dirty.is_empty() || from.contains(W));
            cache.contents = None;
        }
    }

    pub(super) fn oplock_broken(&mut self, host: usize, notification: &OplockBreak) {
        let id = CacheId::Oplock(notification.file_id);
        let to = of_level(notification.oplock_level);
        self.note(format!("host {host}: {id:?} is broken to {to:?}"));
        let file = self.files.iter_mut().find(|f| f.cache(id).is_some()).expect("an oplock that is held");
        let cache = file.cache_mut(id).expect("it is held");
        assert_eq!(cache.host, host);
        assert!(cache.breaking.is_none(), "one break at a time");
        assert!(cache.state.contains(to) && cache.state != to, "a break takes something away");
        assert!(!to.contains(W), "{to:?}");
        if cache.state.contains(W) {
            (cache.breaking, cache.seen) = (Some(to), None);
            if !to.contains(R) {
                cache.contents = None;
            }
        } else {
            file.caches.retain(|c| c.id != id);
        }
    }

    pub(super) fn breaking(&self) -> Vec<(usize, CacheId)> {
        let of = |at: usize| {
            self.files[at].caches.iter().filter(|c| c.breaking.is_some()).map(move |c| (at, c.id))
        };
        (0..FILES).flat_map(of).collect()
    }

    pub(super) fn answer_a_break(&mut self) {
        if let Some((file, id)) = self.random.any(&self.breaking()) {
            self.answer_break(file, id);
        }
    }

    /// Does what a break asks for and acknowledges it.
    pub(super) fn answer_break(&mut self, file: usize, id: CacheId) {
        let cache = self.files[file].cache(id).expect("it is held");
        let (host, to) = (cache.host, cache.breaking.expect("a break"));
        let lower = match id {
            CacheId::Lease { .. } => self.random.pick(&[to, to, to, to & RH, to & R, NONE]),
            CacheId::Oplock(_) => self.random.pick(&[to, to, to, NONE]),
        };
        self.write_back(file, id);
        if !lower.contains(H) {
            let kept = |o: &&FileOpen| o.kept && o.cache == Some(id);
            let kept: Vec<FileId> = self.files[file].opens.iter().filter(kept).map(|o| o.id).collect();
            for open in kept {
                self.close_for_good(file, open);
                self.settle();
            }
        }
        let Some(cache) = self.files[file].cache_mut(id) else { return };
        if cache.breaking != Some(to) {
            return;
        }
        let status = self.acknowledge(host, id, lower);
        self.note(format!("host {host}: acknowledges {id:?} with {lower:?}: {status:?}"));
        self.count("breaks acknowledged");
        assert_eq!(status, NtStatus::SUCCESS);
        let file = &mut self.files[file];
        let cache = file.cache_mut(id).expect("it is held");
        cache.become_state(lower);
        if let (CacheId::Oplock(_), true) = (id, lower == NONE) {
            file.caches.retain(|c| c.id != id);
        }
    }

    pub(super) fn acknowledge(&mut self, host: usize, id: CacheId, state: LeaseState) -> NtStatus {
        let request = match id {
            CacheId::Lease { key, .. } => {
                Request::Lease(LeaseBreakAcknowledgment { lease_key: [key; 16], lease_state: state })
            }
            CacheId::Oplock(file_id) => {
                let oplock_level = if state.contains(R) { OplockLevel::II } else { OplockLevel::NONE };
                Request::Oplock(OplockBreak { oplock_level, file_id })
            }
        };
        let mut body = Vec::new();
        request.encode(&mut body);
        self.call(host, Command::OPLOCK_BREAK, &body).status()
    }
}
