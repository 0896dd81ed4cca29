//! Watches a namespace that is in use, and ends the server where it is no longer ours.
//!
//! Two threads: one looks, which may take as long as a target does not answer; the other sees to it that the last look
//! that found everything right is not too long ago.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_nvmeof::{
    Change, Check, Me, NamespaceDevice, NamespaceId, Nqn, Sysfs, Watch, check, shut_down_file_system,
};
use tracing::{debug, error, info, warn};

use super::growth::Growing;
use super::mounted::has_ended;
use super::state::{Fence, State};
use crate::address::Addresses;
use crate::daemon::Exit;
use crate::limits::{
    FENCE_TIME_MAX, NAMESPACE_GUARD_INTERVAL, NAMESPACE_LOOK_INTERVAL, RECONNECT_TIME_MIN, VOUCHED_TIME,
};

/// What is watched.
pub(crate) struct Watched {
    pub(crate) pool: String,
    pub(crate) device: Arc<NamespaceDevice>,
    pub(crate) me: Me,
    pub(crate) sysfs: Sysfs,
    pub(crate) nqn: Nqn,
    pub(crate) namespace: NamespaceId,
    /// What is seen goes here.
    pub(crate) state: Arc<State>,
    /// Given up at the end.
    pub(crate) addresses: Arc<Addresses>,
    /// Directory on the file system that is ended first.
    pub(crate) directory: File,
    /// The file system, as what grows with its namespace.
    pub(crate) growing: Growing,
}

/// Both threads; dropped, they end.
#[derive(Debug)]
pub(crate) struct Guard {
    senders: [Sender<()>; 2],
    threads: [JoinHandle<()>; 2],
}

impl Guard {
    /// Starts watching.
    pub(crate) fn start(watched: Watched) -> std::io::Result<Self> {
        let Watched { pool, device, me, sysfs, nqn, namespace, state, addresses, directory, growing } =
            watched;
        let watch = Watch::new(sysfs.clone(), nqn.clone(), namespace);
        let ending = Ending { pool, directory: Arc::new(directory), addresses };
        let (looking, looks_end) = channel();
        let (guarding, guards_end) = channel();
        let (doubting, watching) = (Arc::clone(&state), Arc::clone(&device));
        let doubted =
            Doubted { ending: ending.clone(), device: watching, me, sysfs, nqn, namespace, state: doubting };
        DOUBTED.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(doubted));
        note_confirmed();
        let looks = Looks { ending: ending.clone(), device, me, watch, state: Arc::clone(&state), growing };
        let thread = |name: &str| std::thread::Builder::new().name(name.into());
        let looking_thread = thread("namespace").spawn(move || looks.run(&looks_end))?;
        let guarding_thread = thread("namespace-guard").spawn(move || {
            while pause(&guards_end, NAMESPACE_GUARD_INTERVAL) {
                if let Some(fence) = state.overdue(Instant::now()) {
                    ending.end(&fence);
                }
            }
        })?;
        Ok(Self { senders: [looking, guarding], threads: [looking_thread, guarding_thread] })
    }

    /// Stops watching, and waits until nothing is held any more.
    pub(crate) fn stop(self) {
        // All end together.
        DOUBTED.lock().unwrap_or_else(PoisonError::into_inner).clear();
        note_confirmed();
        drop(self.senders);
        for thread in self.threads {
            let _ = thread.join();
        }
    }
}

/// The namespaces in use.
static DOUBTED: Mutex<Vec<Arc<Doubted>>> = Mutex::new(Vec::new());

/// To be looked at without the lock: a target that does not answer must not hold up an event loop that wants to know only
/// whether there are any.
fn doubted() -> Vec<Arc<Doubted>> {
    DOUBTED.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// A namespace with I/O that may fail because it is not ours any more, or out of reach.
struct Doubted {
    ending: Ending,
    device: Arc<NamespaceDevice>,
    me: Me,
    sysfs: Sysfs,
    nqn: Nqn,
    namespace: NamespaceId,
    state: Arc<State>,
}

/// Until when what was made durable is vouched for by the looks that there were, in milliseconds of [`milliseconds`]: one
/// that found a reservation ours proves that no connection was lost and made again since, for as long as the kernel waits
/// before it connects again. Of all namespaces the earliest; `u64::MAX` where there are none.
static VOUCHED_UNTIL: AtomicU64 = AtomicU64::new(u64::MAX);

/// Since the first call.
fn milliseconds(at: Instant) -> u64 {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    at.saturating_duration_since(*FIRST.get_or_init(Instant::now)).as_millis() as u64
}

/// After a reservation was confirmed, or the namespaces in use have changed.
fn note_confirmed() {
    let earliest = doubted().iter().map(|doubted| doubted.state.confirmed()).min();
    let until = earliest.map_or(u64::MAX, |confirmed| milliseconds(confirmed + VOUCHED_TIME));
    VOUCHED_UNTIL.store(until, Ordering::Release);
}

/// An operation has failed, and its client is about to learn it. Where that is because a namespace is lost, the server ends
/// without telling it: on a hard mount, the operation is then done again by the next server, instead of failing the program.
pub(crate) fn doubt(errno: rustix::io::Errno) {
    use rustix::io::Errno;
    // As block devices have it: failed, refused by a reservation, and nowhere to go.
    if !matches!(errno, Errno::IO | Errno::BADE | Errno::NOLINK) {
        return;
    }
    for doubted in doubted() {
        doubted.look();
    }
}

/// Whether [`vouch`] has something to do for an operation that was begun then and has just ended. Costs no lock.
pub(crate) fn wants_vouching(begun: Instant) -> bool {
    needs_look(begun, Instant::now(), VOUCHED_UNTIL.load(Ordering::Acquire))
}

/// Whether what was begun and ended then must wait for a look: it took as long as a connection that is lost and made again, or
/// the last look is so long ago that one may have been before it began.
fn needs_look(begun: Instant, ended: Instant, vouched_until: u64) -> bool {
    if vouched_until == u64::MAX {
        return false;
    }
    ended.saturating_duration_since(begun) >= RECONNECT_TIME_MIN || milliseconds(ended) > vouched_until
}

/// What was begun then is done, and a client is about to learn that it is on stable storage. Returns when that can be said.
///
/// Where the connection to a target was lost meanwhile, the kernel has sent again what was unanswered, the flush perhaps, and
/// to a target that was restarted and has lost what it had in a volatile cache. Such a target has forgotten the
/// reservation: then the server ends without answering its clients, and what was not answered is done again.
pub(crate) fn vouch(begun: Instant) {
    while wants_vouching(begun) && !doubted().iter().all(|doubted| doubted.is_held()) {
        // Not answered. The server ends where that goes on.
        std::thread::sleep(NAMESPACE_GUARD_INTERVAL);
    }
}

impl Doubted {
    /// False where it could not be asked.
    fn is_held(&self) -> bool {
        let asked = Instant::now();
        match check(&*self.device, &self.me) {
            Ok(Check::Held) => {
                self.state.confirm(asked);
                note_confirmed();
                true
            }
            Ok(Check::Lost(loss)) => self.ending.end(&Fence::Lost(loss)),
            Err(_) => false,
        }
    }

    fn look(&self) {
        if self.ending.file_system_has_ended() {
            self.ending.end(&Fence::FileSystem);
        }
        let found = self.sysfs.read();
        let namespace = found.namespace(&self.nqn, &self.namespace);
        let reached = namespace
            .is_ok_and(|namespace| found.subsystem(&self.nqn).is_some_and(|s| s.takes_io(namespace.nsid)));
        if !reached {
            self.ending.end(&Fence::OutOfReach);
        }
        if let Ok(Check::Lost(loss)) = check(&*self.device, &self.me) {
            self.ending.end(&Fence::Lost(loss));
        }
    }
}

/// Waits; whether to go on.
fn pause(ends: &Receiver<()>, interval: Duration) -> bool {
    ends.recv_timeout(interval) == Err(RecvTimeoutError::Timeout)
}

struct Looks {
    ending: Ending,
    device: Arc<NamespaceDevice>,
    me: Me,
    watch: Watch,
    state: Arc<State>,
    growing: Growing,
}

impl Looks {
    fn run(mut self, ends: &Receiver<()>) {
        while pause(ends, NAMESPACE_LOOK_INTERVAL) {
            for change in self.watch.poll() {
                info!(pool = self.ending.pool, ?change, "namespace");
                // The first look tells that it is there.
                if matches!(change, Change::Size { .. } | Change::Namespace { present: true }) {
                    self.growing.start(&self.state);
                }
            }
            self.state.set_paths_up(self.watch.paths().0);
            self.state.set_ana_states(self.watch.ana_states());
            if self.ending.file_system_has_ended() {
                self.ending.end(&Fence::FileSystem);
            }
            // From before the question: an answer may be as old as that.
            let asked = Instant::now();
            match check(&*self.device, &self.me) {
                Ok(Check::Held) => {
                    self.state.confirm(asked);
                    note_confirmed();
                }
                Ok(Check::Lost(loss)) => self.ending.end(&Fence::Lost(loss)),
                Err(error) => {
                    debug!(pool = self.ending.pool, %error, "the reservation could not be looked at");
                    self.state.not_confirmed(error.to_string());
                }
            }
        }
    }
}

/// What is ended where the namespace is no longer ours.
#[derive(Clone)]
struct Ending {
    pool: String,
    directory: Arc<File>,
    addresses: Arc<Addresses>,
}

impl Ending {
    fn file_system_has_ended(&self) -> bool {
        self.directory.metadata().is_err_and(|error| error.raw_os_error() == Some(libc::EIO))
    }

    /// Ends the file system, gives up the addresses, and ends the server, at once and without consulting any other part of the
    /// server. What was not answered was not done; what clients were answered and did not flush may be lost, as by a loss of
    /// power.
    fn end(&self, fence: &Fence) -> ! {
        let pool = &self.pool;
        error!(pool, reason = %fence, "ending at once, before anything else is answered");
        let until = Instant::now() + FENCE_TIME_MAX;
        // Each may hang, and neither waits for the other.
        let (directory, addresses) = (Arc::clone(&self.directory), Arc::clone(&self.addresses));
        let file_system = aside(move || shut_down_file_system(&directory));
        let no_address = aside(move || addresses.give_up());
        let wait = || until.saturating_duration_since(Instant::now());
        if !matches!(file_system.recv_timeout(wait()), Ok(Ok(()))) {
            warn!(pool, "the file system could not be ended; its target refuses what it still writes");
        }
        if no_address.recv_timeout(wait()).is_err() {
            warn!(pool, "the addresses go when the kernel hears no more of them");
        }
        std::process::exit(Exit::Fenced as i32)
    }
}

/// Does it in a thread of its own; what comes of it.
fn aside<T: Send + 'static>(what: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (done, is_done) = channel();
    // Without a thread there is no answer.
    let _ = std::thread::Builder::new().spawn(move || {
        let _ = done.send(what());
    });
    is_done
}

/// Ends a file system that an earlier server has left mounted, without writing anything.
pub(crate) fn end_file_system(at: &Path) -> std::io::Result<()> {
    if has_ended(at) {
        return Ok(());
    }
    shut_down_file_system(&File::open(at)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_after_a_connection_may_have_come_again_waits_for_a_look() {
        milliseconds(Instant::now());
        let looked = Instant::now();
        let until = milliseconds(looked + VOUCHED_TIME);
        let short = Duration::from_millis(10);
        let ended =
            |after: Duration, took: Duration| needs_look(looked + after - took, looked + after, until);
        assert!(!ended(Duration::from_secs(1), short), "the next look is due");
        // Begun after the connection was made again, and before the next look: as short as any other.
        let again = Duration::from_secs(forebay_nvmeof::Timing::default().reconnect_delay_s.into());
        assert!(VOUCHED_TIME < again && NAMESPACE_LOOK_INTERVAL < VOUCHED_TIME);
        assert!(ended(again + short, short));
        assert!(ended(Duration::from_secs(1), RECONNECT_TIME_MIN), "it may have been sent again");
        assert!(!needs_look(looked, looked + again * 9, u64::MAX), "no pool is on a namespace");
    }
}
