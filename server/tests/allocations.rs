//! Allocations of an event loop for each READ and WRITE after a warm-up. The figures are limits that may only decrease: the
//! goal is zero.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(unsafe_code, reason = "a global allocator is unsafe to implement")]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_server::eventloop::EventLoop;
use forebay_server::io::readiness::Readiness;
use forebay_server::io::uring::Uring;
use forebay_server::io::{Completion, Engine, Operation, Token};
use forebay_server::limits::STALL_TIME_DEFAULT_MAX;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::CreateDisposition;
use rustix::io::Errno;
use support::in_process::{InProcess, Setup};
use support::{Client, data};

const MIB: usize = 1 << 20;
/// Requests before the counted ones, and counted requests.
const WARM_UP: u64 = 200;
const COUNTED: u64 = 1000;

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged; counting neither allocates nor panics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // The cell has no destructor, so it outlives every allocation of its thread.
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` above, which is the system's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// An engine that reports its thread's allocations whenever the loop waits.
struct Watched<E> {
    engine: E,
    allocations: Arc<AtomicU64>,
}

impl<E: Engine> Engine for Watched<E> {
    fn name(&self) -> &'static str {
        self.engine.name()
    }

    fn adopt(&mut self, socket: &Arc<OwnedFd>) -> Result<(), Errno> {
        self.engine.adopt(socket)
    }

    fn forget(&mut self, socket: &Arc<OwnedFd>) {
        self.engine.forget(socket);
    }

    fn submit(&mut self, token: Token, operation: Operation) {
        self.engine.submit(token, operation);
    }

    fn wait(&mut self, time_max: Duration, done: &mut Vec<Completion>) -> Result<(), Errno> {
        self.allocations.store(ALLOCATIONS.get(), Ordering::SeqCst);
        self.engine.wait(time_max, done)
    }
}

fn serve(root: &Path, allocations: &Arc<AtomicU64>) -> InProcess {
    let volumes = ["v".to_owned()];
    let setup = Setup {
        root,
        volumes: &volumes,
        event_loops: 1,
        memory: 256 * MIB,
        stall_time_max: STALL_TIME_DEFAULT_MAX,
    };
    let of_loop = Arc::clone(allocations);
    setup.start(move |waker, shared, index| {
        let allocations = Arc::clone(&of_loop);
        if let Ok(engine) = Uring::new(waker.clone(), shared.lanes.queues().clone()) {
            return EventLoop::new(Watched { engine, allocations }, shared, index).run();
        }
        let engine = Readiness::new(waker, shared.lanes.queues().clone())?;
        EventLoop::new(Watched { engine, allocations }, shared, index).run()
    })
}

/// Allocations of the loop for each request, rounded to hundredths.
fn per_request(allocations: &AtomicU64, client: &mut Client, request: impl Fn(&mut Client)) -> f64 {
    let run = |client: &mut Client, requests| (0..requests).for_each(|_| request(client));
    run(client, WARM_UP);
    let before = allocations.load(Ordering::SeqCst);
    run(client, COUNTED);
    let counted = allocations.load(Ordering::SeqCst) - before;
    (counted as f64 / COUNTED as f64 * 100.0).round() / 100.0
}

#[test]
fn requests_stay_within_their_allocation_limits() {
    // In memory, if possible: operations that wait for a disk allocate in other threads.
    let shm = Path::new("/dev/shm");
    let folder = if shm.is_dir() { shm } else { Path::new("/tmp") };
    let scratch = tempfile::tempdir_in(folder).unwrap();
    let allocations = Arc::new(AtomicU64::new(0));
    let server = serve(scratch.path(), &allocations);
    std::fs::write(scratch.path().join("v/f"), vec![7; 8 * MIB]).unwrap();
    let mut client = server.mount("v");
    let file = client.open("f", CreateDisposition::OPEN).unwrap();
    for (what, length, limit) in
        [("a READ of 4 KiB", 4096, 3.5), ("a READ of 1 MiB from the mapping", MIB, 3.5)]
    {
        let found = per_request(&allocations, &mut client, |client| {
            client.send_read(file, 0, length as u32);
            assert_eq!(data(&client.answer()).unwrap().len(), length);
        });
        println!("{what}: {found} allocations");
        assert!(found <= limit, "{what}: {found} allocations, at most {limit} so far");
    }
    for (what, length, limit) in [("a WRITE of 4 KiB", 4096, 2.5), ("a WRITE of 1 MiB", MIB, 2.5)] {
        let bytes = vec![1; length];
        let found = per_request(&allocations, &mut client, |client| {
            assert_eq!(client.write(file, 0, &bytes), NtStatus::SUCCESS);
        });
        println!("{what}: {found} allocations");
        assert!(found <= limit, "{what}: {found} allocations, at most {limit} so far");
    }
    server.end();
}
