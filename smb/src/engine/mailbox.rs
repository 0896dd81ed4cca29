//! Mail between connections until the transport takes it.

use std::sync::atomic::Ordering;

use crate::engine::mail::{BreakNotice, ConnectionId, Mail};
use crate::sync::{AtomicBool, Mutex, MutexGuard};

/// Mail in order of posting.
#[derive(Default)]
pub(crate) struct Mailbox {
    mail: Mutex<Vec<(ConnectionId, Mail)>>,
    /// Set under the lock whenever there is mail.
    has_mail: AtomicBool,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Vec<(ConnectionId, Mail)>> {
        self.mail.lock().expect("no panic under this lock")
    }

    /// Whether there is mail. One Acquire load, which pairs with the Release store in [`Self::post`].
    pub(crate) fn has_mail(&self) -> bool {
        self.has_mail.load(Ordering::Acquire)
    }

    pub(crate) fn post(&self, to: ConnectionId, what: Mail) {
        let mut mail = self.lock();
        mail.push((to, what));
        self.has_mail.store(true, Ordering::Release);
    }

    /// Takes all mail.
    pub(crate) fn take(&self) -> Vec<(ConnectionId, Mail)> {
        if !self.has_mail() {
            return Vec::new();
        }
        let mut mail = self.lock();
        self.has_mail.store(false, Ordering::Release);
        std::mem::take(&mut *mail)
    }

    /// Takes the notifications for the client of one connection.
    pub(crate) fn take_breaks(&self, of: ConnectionId) -> Vec<BreakNotice> {
        if !self.has_mail() {
            return Vec::new();
        }
        let mut mail = self.lock();
        let (own, others) = std::mem::take(&mut *mail)
            .into_iter()
            .partition::<Vec<_>, _>(|(to, what)| *to == of && matches!(what, Mail::Break(_)));
        *mail = others;
        own.into_iter()
            .filter_map(|(_, what)| match what {
                Mail::Break(notice) => Some(notice),
                _ => None,
            })
            .collect()
    }
}

#[cfg(test)]
mod models {
    use std::sync::Arc;

    use super::*;
    use crate::sync::model::{check, spawn};

    #[test]
    fn mail_is_delivered_exactly_once() {
        check(|| {
            let mailbox = Arc::new(Mailbox::default());
            let post = |token| {
                let mailbox = Arc::clone(&mailbox);
                spawn(move || mailbox.post(ConnectionId(1), Mail::Wake(token)))
            };
            let posters = [post(1), post(2)];
            let mut taken = mailbox.take();
            assert!(mailbox.take_breaks(ConnectionId(1)).is_empty());
            for poster in posters {
                poster.join().expect("posted");
            }
            // Each posting thread has its event loop check for mail afterwards.
            taken.extend(mailbox.take());
            let mut tokens: Vec<u64> = taken
                .iter()
                .map(|(_, mail)| match mail {
                    Mail::Wake(token) => *token,
                    other => panic!("{other:?}"),
                })
                .collect();
            tokens.sort_unstable();
            assert_eq!(tokens, [1, 2]);
            assert!(!mailbox.has_mail());
        });
    }
}
