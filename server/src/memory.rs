//! The server's memory for payload: its size, the connections that hold it, and those that wait for it.
//!
//! The process has one budget. A connection has an account within the share of its user. Each volume has its own
//! credentials, so the clients of one volume cannot take everything. If no memory is left, a connection waits in a line and
//! receives nothing more until then; its peer finds its window closed. Memory needed to answer a request is never waited
//! for: connections that wait for memory hold none that others cannot get back.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use forebay_rdma::{Account, Budget, Group, Place, Wake};
use forebay_smb::engine::Disconnect;
use tracing::warn;

use crate::buffers::{Buffer, BufferPool, Charge, Shortage};
use crate::limits::{
    CONNECTION_MEMORY_BYTES_MAX, COUNTED_ANSWER_BYTES_MIN, MEMORY_BYTES_MIN, MEMORY_DEFAULT_BYTES_MAX,
    MEMORY_DEFAULT_SHARE, TENANT_MEMORY_BYTES_MIN, TENANT_MEMORY_SHARE,
};

/// Lines that a connection may switch to in one attempt.
const CHANGES_MAX: usize = 3;

/// The process's memory for payload, and the shares of its users.
#[derive(Debug)]
pub struct Memory {
    budget: Budget,
    tenant_bytes_max: usize,
    tenants: Mutex<HashMap<String, Group>>,
    /// The share of the connections that have no known user yet.
    strangers: Group,
}

impl Memory {
    /// A memory of `bytes_max` bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        let tenant_bytes_max = (bytes_max / TENANT_MEMORY_SHARE).max(TENANT_MEMORY_BYTES_MIN);
        Self {
            budget: Budget::new(bytes_max),
            tenant_bytes_max,
            tenants: Mutex::default(),
            strangers: Group::new(tenant_bytes_max),
        }
    }

    /// The budget that pools draw from.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// The account of a new connection.
    pub(crate) fn stranger(&self) -> Account {
        self.account(self.strangers.clone())
    }

    /// The account of a connection with a known user.
    pub(crate) fn of_user(&self, username: &str) -> Account {
        // Names are compared case-insensitively.
        let username = username.to_lowercase();
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(group) = tenants.get(&username) {
            return self.account(group.clone());
        }
        tenants.retain(|_, group| !group.is_unused());
        let group = Group::new(self.tenant_bytes_max);
        tenants.insert(username, group.clone());
        self.account(group)
    }

    fn account(&self, group: Group) -> Account {
        Account::new(group, CONNECTION_MEMORY_BYTES_MAX.min(self.tenant_bytes_max))
    }
}

/// Bytes for payload: the configured size, or a share of the memory that is available to the process.
#[must_use]
pub fn bytes_max(configured: u64) -> usize {
    let bytes = if configured > 0 { configured } else { default_bytes(available()) };
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn default_bytes(available: u64) -> u64 {
    (available / MEMORY_DEFAULT_SHARE).clamp(MEMORY_BYTES_MIN, MEMORY_DEFAULT_BYTES_MAX)
}

/// The machine's memory, or the smallest limit of a control group above the process.
fn available() -> u64 {
    let machine = rustix::system::sysinfo();
    let machine = (machine.totalram as u64).saturating_mul(machine.mem_unit.into());
    let group = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = group.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    machine.min(allowed(Path::new("/sys/fs/cgroup"), group))
}

/// The smallest `memory.max` from `root` down to `group`.
fn allowed(root: &Path, group: &str) -> u64 {
    let group = root.join(group);
    let above = group.ancestors().take_while(|path| path.starts_with(root));
    let limits = above.filter_map(|path| std::fs::read_to_string(path.join("memory.max")).ok());
    limits.filter_map(|text| text.trim().parse().ok()).min().unwrap_or(u64::MAX)
}

/// One connection's access to buffers.
#[derive(Debug)]
pub(crate) struct Allowance {
    buffers: BufferPool,
    account: Account,
    waiting: Waiting,
}

struct Waiting {
    place: Option<Place>,
    wake: Wake,
    /// A request could not be satisfied.
    short: bool,
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Waiting({:?}, short: {})", self.place, self.short)
    }
}

impl Allowance {
    /// An allowance of an account, from a pool. `wake` is called when its turn comes.
    pub(crate) fn new(buffers: BufferPool, account: Account, wake: Wake) -> Self {
        Self { buffers, account, waiting: Waiting { place: None, wake, short: false } }
    }

    /// The pool.
    pub(crate) fn buffers(&self) -> &BufferPool {
        &self.buffers
    }

    /// Charges everything that is taken from now on to another account.
    pub(crate) fn change(&mut self, account: Account) {
        self.waiting.place = None;
        self.account = account;
    }

    /// Call this before the first request.
    pub(crate) fn begin(&mut self) {
        self.waiting.short = false;
    }

    /// Call this after the last request: a connection that needs nothing keeps no place in a line.
    pub(crate) fn settle(&mut self) {
        if !self.waiting.short {
            self.waiting.place = None;
        }
    }

    /// Whether a request since [`Allowance::begin`] could not be satisfied.
    pub(crate) fn is_short(&self) -> bool {
        self.waiting.short
    }

    /// Whether another attempt is worthwhile.
    pub(crate) fn is_its_turn(&self) -> bool {
        self.waiting.place.as_ref().is_some_and(Place::is_first)
    }

    /// A buffer of at least `length` data bytes. `None`: the connection must wait, and is woken.
    pub(crate) fn take(&mut self, length: usize) -> Option<Buffer> {
        for _ in 0..CHANGES_MAX {
            if let Some(place) = self.waiting.place.as_ref().filter(|place| place.is_first()) {
                place.try_again();
            }
            let short = match self.buffers.take_for(length, &self.account, self.waiting.place.as_ref()) {
                Ok(buffer) => {
                    self.waiting.place = None;
                    return Some(buffer);
                }
                Err(short) => short,
            };
            self.waiting.short = true;
            let line = match short.shortage {
                Shortage::Budget => self.buffers.budget().line(),
                Shortage::Group => self.account.group().line(),
                // Its own buffers are returned first, or the kernel has no memory at all: it tries again soon.
                Shortage::Account | Shortage::Never => {
                    self.waiting.place = None;
                    return None;
                }
            };
            if self.waiting.place.as_ref().is_some_and(|place| line.is_of(place)) {
                return None;
            }
            // Try once more: memory that was returned before it joined the line woke no waiter.
            self.waiting.place = Some(line.join(Arc::clone(&self.waiting.wake)));
        }
        None
    }

    /// Whether the connection may begin anything more. If not, it is woken when it may, or when one of its own buffers is
    /// returned.
    pub(crate) fn has_room(&mut self) -> bool {
        if self.account.is_full() {
            self.waiting.short = true;
            return false;
        }
        let group = self.account.group();
        if !(self.account.is_beyond_reserve() && group.is_full()) {
            return true;
        }
        self.waiting.short = true;
        if !self.waiting.place.as_ref().is_some_and(|place| group.line().is_of(place)) {
            self.waiting.place = Some(group.line().join(Arc::clone(&self.waiting.wake)));
        }
        if let Some(place) = self.waiting.place.as_ref().filter(|place| place.is_first()) {
            place.try_again();
        }
        // Memory may have been returned before this one joined the line.
        !group.is_full()
    }

    /// A buffer that is needed to complete something already begun: it is taken without waiting.
    ///
    /// # Errors
    /// The kernel provides no memory.
    pub(crate) fn owed(&self, length: usize) -> Result<Buffer, Disconnect> {
        self.buffers.take_owed(length, &self.account).map_err(|error| {
            warn!(%error, "a connection is ended for want of memory");
            Disconnect("the kernel gives no memory")
        })
    }

    /// Counts an answer that is in no buffer, if it is long.
    pub(crate) fn charge(&self, bytes: usize) -> Option<Charge> {
        (bytes >= COUNTED_ANSWER_BYTES_MIN).then(|| self.buffers.charge(bytes, &self.account))
    }
}

#[cfg(test)]
impl Allowance {
    /// The allowance of a single connection with its own pool.
    pub(crate) fn alone() -> Self {
        let account = Account::new(Group::new(usize::MAX / 2), usize::MAX / 2);
        Self::new(BufferPool::default(), account, Arc::new(|| ()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn allowance(memory: &Memory, user: &str) -> Allowance {
        let pool = BufferPool::of(memory.budget(), None);
        Allowance::new(pool, memory.of_user(user), Arc::new(|| ()))
    }

    fn fill(allowance: &mut Allowance) -> Vec<Buffer> {
        std::iter::from_fn(|| allowance.take(4 * MIB)).collect()
    }

    #[test]
    fn connections_of_one_user_leave_most_memory_to_other_users() {
        let memory = Memory::new(256 * MIB);
        let mut greedy: Vec<Allowance> = (0..10).map(|_| allowance(&memory, "greedy")).collect();
        let held: Vec<Buffer> = greedy.iter_mut().flat_map(fill).collect();
        assert!(memory.budget().bytes() <= 64 * MIB, "{:?}", memory.budget());
        assert!(greedy.iter().all(Allowance::is_short));
        let mut modest = allowance(&memory, "modest");
        assert!(allowance(&memory, "GREEDY").take(4 * MIB).is_none(), "the same user");
        assert!(modest.take(8 * MIB).is_some() && !modest.is_short());
        drop(held);
        assert!(greedy.iter().any(Allowance::is_its_turn));
    }

    #[test]
    fn connections_that_need_no_memory_do_not_block_the_queue() {
        let memory = Memory::new(64 * MIB);
        let [mut a, mut b, mut c] = ["a", "b", "c"].map(|user| allowance(&memory, user));
        let held = (fill(&mut a), fill(&mut b));
        a.begin();
        a.settle();
        b.begin();
        b.settle();
        c.begin();
        assert!(c.take(8 * MIB).is_none() && c.is_short());
        c.settle();
        drop(held);
        assert!(c.is_its_turn());
        let mut d = allowance(&memory, "d");
        assert!(d.take(8 * MIB).is_none(), "queued behind the other user");
        c.begin();
        c.settle();
        assert!(d.is_its_turn() && d.take(8 * MIB).is_some());
    }

    #[test]
    fn connection_over_its_memory_share_has_no_room() {
        let memory = Memory::new(256 * MIB);
        let mut one = allowance(&memory, "a");
        assert!(one.has_room());
        let charges: Vec<Charge> = (0..8).filter_map(|_| one.charge(8 * MIB)).collect();
        assert!(!one.has_room() && one.is_short());
        let mut other = allowance(&memory, "a");
        assert!(other.has_room(), "every connection has its reserve");
        let answer = other.owed(MIB).expect("it is owed");
        assert!(!other.has_room(), "the share of the user is used up");
        drop(charges);
        assert!(other.is_its_turn() && other.has_room() && one.has_room());
        drop(answer);
        assert!(one.charge(COUNTED_ANSWER_BYTES_MIN - 1).is_none());
        assert!(one.charge(16 << 10).is_some(), "a listing, as clients ask for it");
    }

    #[test]
    fn payload_budget_is_a_quarter_of_the_process_memory_limit() {
        assert_eq!(default_bytes(16 << 30), 4 << 30);
        assert_eq!(default_bytes(100 << 20), MEMORY_BYTES_MIN);
        assert_eq!(default_bytes(1 << 40), MEMORY_DEFAULT_BYTES_MAX);
        assert_eq!(bytes_max(100 << 20), 100 << 20);
        assert!(bytes_max(0) >= MEMORY_BYTES_MIN as usize);
        let root = tempfile::TempDir::new().expect("a directory");
        std::fs::create_dir_all(root.path().join("pods/this")).expect("made");
        assert_eq!(allowed(root.path(), "pods/this"), u64::MAX);
        std::fs::write(root.path().join("pods/this/memory.max"), "max\n").expect("written");
        std::fs::write(root.path().join("pods/memory.max"), "1073741824\n").expect("written");
        assert_eq!(allowed(root.path(), "pods/this"), 1 << 30);
        std::fs::write(root.path().join("memory.max"), "4096\n").expect("written");
        assert_eq!(allowed(root.path(), "pods/this"), 4096);
    }
}
