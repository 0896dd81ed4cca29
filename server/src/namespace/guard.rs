//! Watches a namespace that is in use, and ends the server if it is no longer ours.
//!
//! There are two threads. One looks, and may block as long as a target does not answer. The other checks that the last good
//! look is not too long ago.

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

/// The objects to watch.
pub(crate) struct Watched {
    pub(crate) pool: String,
    pub(crate) device: Arc<NamespaceDevice>,
    pub(crate) me: Me,
    pub(crate) sysfs: Sysfs,
    pub(crate) nqn: Nqn,
    pub(crate) namespace: NamespaceId,
    /// Receives the results.
    pub(crate) state: Arc<State>,
    /// Given up when the namespace is lost.
    pub(crate) addresses: Arc<Addresses>,
    /// Directory on the file system, which is shut down first.
    pub(crate) directory: File,
    /// The file system, which grows with its namespace.
    pub(crate) growing: Growing,
}

/// Both threads. They end when this is dropped.
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
        // All guards end together.
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

/// A copy, to look at without holding the lock: a target that does not answer must not block an event loop that only checks
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

/// Time until which earlier looks vouch for data that was made durable, in milliseconds of [`milliseconds`]. A look that
/// found a reservation ours proves that no connection was lost and re-established since, for as long as the kernel waits
/// before it reconnects. The earliest time of all namespaces; `u64::MAX` if there are none.
static VOUCHED_UNTIL: AtomicU64 = AtomicU64::new(u64::MAX);

/// Milliseconds since the first call.
fn milliseconds(at: Instant) -> u64 {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    at.saturating_duration_since(*FIRST.get_or_init(Instant::now)).as_millis() as u64
}

/// Call this after a reservation was confirmed, or after the namespaces in use changed.
fn note_confirmed() {
    let earliest = doubted().iter().map(|doubted| doubted.state.confirmed()).min();
    let until = earliest.map_or(u64::MAX, |confirmed| milliseconds(confirmed + VOUCHED_TIME));
    VOUCHED_UNTIL.store(until, Ordering::Release);
}

/// Call this when an operation has failed, before its client receives the error. If the cause is a lost namespace, the
/// server ends without reporting the error: on a hard mount, the next server then repeats the operation, instead of failing
/// the program.
pub(crate) fn doubt(errno: rustix::io::Errno) {
    use rustix::io::Errno;
    // The errors of block devices: failed, refused by a reservation, and no path.
    if !matches!(errno, Errno::IO | Errno::BADE | Errno::NOLINK) {
        return;
    }
    for doubted in doubted() {
        doubted.look();
    }
}

/// Whether [`vouch`] must check an operation that began at `begun` and has just ended. Takes no lock.
pub(crate) fn wants_vouching(begun: Instant) -> bool {
    needs_look(begun, Instant::now(), VOUCHED_UNTIL.load(Ordering::Acquire))
}

/// Whether an operation that began and ended at these times must wait for a look: it took long enough for a connection to be
/// lost and re-established, or the last look is so old that this may have happened before it began.
fn needs_look(begun: Instant, ended: Instant, vouched_until: u64) -> bool {
    if vouched_until == u64::MAX {
        return false;
    }
    ended.saturating_duration_since(begun) >= RECONNECT_TIME_MIN || milliseconds(ended) > vouched_until
}

/// Call this when an operation that began at `begun` is done, before its client learns that it is on stable storage. Returns
/// when that is certain.
///
/// If the connection to a target was lost in the meantime, the kernel has resent unanswered commands, perhaps the flush,
/// possibly to a target that restarted and lost the content of a volatile cache. Such a target has lost the reservation:
/// then the server ends without answering its clients, and unanswered requests are repeated.
pub(crate) fn vouch(begun: Instant) {
    while wants_vouching(begun) && !doubted().iter().all(|doubted| doubted.is_held()) {
        // The target did not answer. If that continues, the server ends.
        std::thread::sleep(NAMESPACE_GUARD_INTERVAL);
    }
}

impl Doubted {
    /// False if the target could not be queried.
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

/// Waits for `interval`; returns whether to continue.
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
                // The first look reports that the namespace is present.
                if matches!(change, Change::Size { .. } | Change::Namespace { present: true }) {
                    self.growing.start(&self.state);
                }
            }
            self.state.set_paths_up(self.watch.paths().0);
            self.state.set_ana_states(self.watch.ana_states());
            if self.ending.file_system_has_ended() {
                self.ending.end(&Fence::FileSystem);
            }
            // Taken before the query: the answer may be as old as that.
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

/// Everything that is ended if the namespace is no longer ours.
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

    /// Shuts down the file system, gives up the addresses, and ends the server, immediately and without consulting any other
    /// part of the server. Unanswered requests were not done; acknowledged data that clients did not flush may be lost, as
    /// in a power loss.
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

/// Runs `what` on a separate thread; its result is sent to the receiver.
fn aside<T: Send + 'static>(what: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (done, is_done) = channel();
    // If no thread can be started, there is no result.
    let _ = std::thread::Builder::new().spawn(move || {
        let _ = done.send(what());
    });
    is_done
}

/// Shuts down a file system that an earlier server left mounted, without writing anything.
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
    fn operation_ending_after_a_possible_reconnect_needs_a_check() {
        milliseconds(Instant::now());
        let looked = Instant::now();
        let until = milliseconds(looked + VOUCHED_TIME);
        let short = Duration::from_millis(10);
        let ended =
            |after: Duration, took: Duration| needs_look(looked + after - took, looked + after, until);
        assert!(!ended(Duration::from_secs(1), short), "the next look is due");
        // Begun after the reconnect and before the next look: as short as any other.
        let again = Duration::from_secs(forebay_nvmeof::Timing::default().reconnect_delay_s.into());
        assert!(VOUCHED_TIME < again && NAMESPACE_LOOK_INTERVAL < VOUCHED_TIME);
        assert!(ended(again + short, short));
        assert!(ended(Duration::from_secs(1), RECONNECT_TIME_MIN), "it may have been sent again");
        assert!(!needs_look(looked, looked + again * 9, u64::MAX), "no pool is on a namespace");
    }
}
