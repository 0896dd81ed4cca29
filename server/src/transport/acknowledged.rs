//! Detects a peer that no longer acknowledges what TCP sends: a peer that acknowledges can be arbitrarily slow; one that does
//! not is considered gone, regardless of what its sessions hold.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::limits::{
    BREAK_UNACKNOWLEDGED_TIME_MAX, SOLE_BREAK_UNACKNOWLEDGED_TIME_MAX, UNACKNOWLEDGED_TIME_MAX,
};

/// TCP's state of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outstanding {
    /// Segments that were sent but not acknowledged. None while the peer's window is closed, if it answers probes.
    pub(crate) segments: u32,
    /// Time since the last acknowledgment of anything.
    pub(crate) quiet: Duration,
}

/// Queries the kernel.
///
/// # Errors
/// Errors from getsockopt(2).
pub(crate) fn outstanding(socket: impl AsFd) -> Result<Outstanding, Errno> {
    // SAFETY: a tcp_info consists of integers, for which zero is a valid value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of_val(&info) as libc::socklen_t;
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `length` bytes to `info`; both live for the call, and the descriptor is borrowed open.
    let result = unsafe {
        libc::getsockopt(
            descriptor,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
    }
    Ok(Outstanding {
        segments: info.tcpi_unacked,
        quiet: Duration::from_millis(info.tcpi_last_ack_recv.into()),
    })
}

/// Acknowledgment state of one connection.
#[derive(Debug, Default)]
pub(crate) struct Unacknowledged {
    /// Something was sent since everything was last acknowledged.
    sent: bool,
    /// How long a break among the sent data, which others may wait for, can be outstanding.
    break_time_max: Option<Duration>,
    /// Since when every check has found something outstanding.
    since: Option<Instant>,
}

impl Unacknowledged {
    /// Records data passed to TCP: a break for a client with `break_channels` channels, or other data if 0.
    pub(crate) fn sending(&mut self, break_channels: usize) {
        self.sent = true;
        let time_max = match break_channels {
            0 => return,
            1 => SOLE_BREAK_UNACKNOWLEDGED_TIME_MAX,
            _ => BREAK_UNACKNOWLEDGED_TIME_MAX,
        };
        self.break_time_max = Some(self.break_time_max.map_or(time_max, |before| before.min(time_max)));
    }

    /// Whether [`Self::is_gone`] needs to be called.
    pub(crate) fn is_watched(&self) -> bool {
        self.sent
    }

    /// Whether the peer has been silent for too long. `queued`: more data are queued that TCP has not received yet. To be called
    /// about once a second.
    pub(crate) fn is_gone(&mut self, now: Instant, outstanding: Outstanding, queued: bool) -> bool {
        if outstanding.segments == 0 {
            self.since = None;
            if !queued {
                *self = Self::default();
            }
            return false;
        }
        let since = *self.since.get_or_insert(now);
        // Any acknowledgment counts; the time before the first check is not held against the peer.
        let silent = outstanding.quiet.min(now.saturating_duration_since(since));
        silent >= self.break_time_max.unwrap_or(UNACKNOWLEDGED_TIME_MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Number of checks, a second apart, until the peer counts as gone; 1000 if it never does.
    fn looks(break_channels: usize, mut outstanding: impl FnMut(u32) -> Outstanding) -> u32 {
        let mut watched = Unacknowledged::default();
        watched.sending(break_channels);
        let began = Instant::now();
        (0..1000)
            .find(|look| watched.is_gone(began + SECOND * *look, outstanding(*look), false))
            .unwrap_or(1000)
    }

    #[test]
    fn unacknowledging_peer_times_out_sooner_if_others_wait() {
        // An old acknowledgment is not held against the peer.
        let silent = |look| Outstanding { segments: 1, quiet: SECOND * (500 + look) };
        assert_eq!(looks(2, silent), BREAK_UNACKNOWLEDGED_TIME_MAX.as_secs() as u32);
        assert_eq!(looks(1, silent), SOLE_BREAK_UNACKNOWLEDGED_TIME_MAX.as_secs() as u32);
        assert_eq!(looks(0, silent), UNACKNOWLEDGED_TIME_MAX.as_secs() as u32);
    }

    #[test]
    fn slow_peer_that_acknowledges_data_does_not_time_out() {
        let most = BREAK_UNACKNOWLEDGED_TIME_MAX.as_secs() as u32 - 1;
        let slow = |look| Outstanding { segments: 40, quiet: SECOND * (look % (most + 1)) };
        assert_eq!(looks(2, slow), 1000);
        let stalled = |_| Outstanding { segments: 0, quiet: SECOND * 60 };
        assert_eq!(looks(2, stalled), 1000);
    }

    #[test]
    fn acknowledged_break_restores_the_normal_timeout() {
        let mut watched = Unacknowledged::default();
        let now = Instant::now();
        watched.sending(2);
        assert!(!watched.is_gone(now, Outstanding { segments: 0, quiet: SECOND }, true));
        assert!(watched.is_watched() && watched.break_time_max.is_some(), "it may be what is queued");
        assert!(!watched.is_gone(now, Outstanding { segments: 0, quiet: SECOND }, false));
        assert!(!watched.is_watched());
        watched.sending(0);
        for look in 0..20 {
            assert!(!watched.is_gone(
                now + SECOND * look,
                Outstanding { segments: 1, quiet: SECOND * 50 },
                false
            ));
        }
    }

    #[test]
    fn peer_that_does_not_read_still_acknowledges_data() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut ours = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        let (_theirs, _) = listener.accept().expect("a connection");
        ours.set_nonblocking(true).expect("a socket");
        while ours.write(&[1; 65_536]).is_ok() {}
        // The window is closed now or will be soon.
        let deadline = Instant::now() + Duration::from_secs(20);
        while outstanding(&ours).expect("a TCP socket").segments > 0 {
            assert!(Instant::now() < deadline, "the kernel acknowledges for a process that does not read");
            std::thread::yield_now();
        }
        assert!(outstanding(std::fs::File::open("/dev/null").expect("there")).is_err());
    }
}
