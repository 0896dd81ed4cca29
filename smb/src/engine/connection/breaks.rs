//! OPLOCK_BREAK notifications ([MS-SMB2] 3.3.4.6, 3.3.4.7).

use std::sync::atomic::Ordering;

use smallvec::smallvec;

use super::Connection;
use crate::engine::file::holder::send;
use crate::engine::mail::BreakNotice;
use crate::engine::request::chain::Response;
use crate::engine::request::step::Reply;
use crate::engine::volume::Protection;
use crate::wire::header::UNSOLICITED_MESSAGE_ID;
use crate::wire::{Command, Header, HeaderFlags};

impl Connection {
    /// Sends the breaks that a request has caused for its own client, before a later request is answered.
    pub(super) fn notify_own(&mut self) {
        for notice in self.server.take_breaks(self.core.id) {
            self.notify(notice);
        }
    }

    /// Sends an unsolicited OPLOCK_BREAK ([MS-SMB2] 3.3.4.6, 3.3.4.7).
    pub(super) fn notify(&mut self, mut notice: BreakNotice) {
        let channel = self.core.channels.get(&notice.session_id);
        let Some(channel) = channel.filter(|_| !self.core.closed && !self.core.leaving) else {
            // The channel was lost while the notice was in transit.
            send(&self.server, &notice.sessions, &mut notice.tried, notice.notification);
            return;
        };
        let session = &channel.session;
        let volume = self.server.volume(&session.volume_id);
        let sealed = session.encrypt.load(Ordering::Relaxed)
            || volume.is_some_and(|v| v.protection == Protection::Seal);
        let header = Header {
            credit_charge: 0,
            credits: 0,
            flags: HeaderFlags::SERVER_TO_REDIR,
            ..Header::request(Command::OPLOCK_BREAK, UNSOLICITED_MESSAGE_ID)
        };
        let mut body = Vec::with_capacity(44);
        notice.notification.encode(&mut body);
        let channels = session.connections().len();
        self.push(smallvec![Response::reply(header, Reply::ok(body))], sealed.then_some(notice.session_id));
        if let Some(transmit) = self.transmit.back_mut() {
            transmit.break_channels = channels;
        }
    }
}
