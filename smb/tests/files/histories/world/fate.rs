//! Events that happen to clients.

use std::time::Duration;

use forebay_smb::ids::FileId;
use forebay_smb::limits::OPLOCK_BREAK_SECONDS_MAX;
use forebay_smb::status::NtStatus;

use super::{Host, World};
use crate::histories::model::{CacheId, NONE};

impl World {
    /// Advances time. A client that has not answered a break in time loses what it held.
    pub(super) fn pass(&mut self, time: Duration) {
        self.note(format!("{time:?} pass"));
        // The server's clock ticks before and after.
        for time in [Duration::ZERO, time] {
            self.now += time;
            self.lab.server.tick(self.now);
            for (file, id) in self.breaking() {
                let now = self.now;
                let cache = self.files[file].cache_mut(id).expect("it is held");
                let since = *cache.seen.get_or_insert(now);
                if now - since >= Duration::from_secs(OPLOCK_BREAK_SECONDS_MAX) {
                    self.expire(file, id);
                }
            }
            self.settle();
        }
    }

    pub(super) fn expire(&mut self, file_at: usize, id: CacheId) {
        self.note(format!("{id:?} expires"));
        self.count("breaks without an answer");
        let file = &mut self.files[file_at];
        let stored = self.lab.memory.contents(&file.name).expect("it is open");
        let cache = file.cache_mut(id).expect("it is held");
        let host = cache.host;
        let lost = !std::mem::take(&mut cache.dirty).is_empty();
        cache.become_state(NONE);
        if lost {
            file.contents = stored;
        }
        let late = match id {
            CacheId::Lease { .. } => NtStatus::UNSUCCESSFUL,
            CacheId::Oplock(_) => NtStatus::INVALID_OPLOCK_PROTOCOL,
        };
        if late == NtStatus::INVALID_OPLOCK_PROTOCOL {
            file.caches.retain(|c| c.id != id);
        }
        assert_eq!(self.acknowledge(host, id, NONE), late, "too late");
    }

    /// A client loses its connection and all its state, and reconnects immediately.
    pub(super) fn lose(&mut self, host: usize) {
        self.note(format!("host {host}: is gone"));
        self.hosts[host].client.disconnect();
        for file in &mut self.files {
            if file.caches.iter().any(|c| c.host == host && !c.dirty.is_empty()) {
                file.contents = self.lab.memory.contents(&file.name).unwrap_or_default();
            }
            let own: Vec<FileId> = file.opens.iter().filter(|o| o.host == host).map(|o| o.id).collect();
            for open in own {
                file.closed(open);
            }
        }
        let client = self.lab.client_of(host as u8 + 1);
        self.hosts[host] = Host { client, pending: Vec::new(), inbox: Vec::new() };
    }
}
