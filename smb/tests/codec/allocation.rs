//! Counts the allocations of the current thread.

#![allow(unsafe_code, reason = "a global allocator is unsafe to implement")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn grow(bytes: usize) {
    // Neither cell has a destructor, so both outlive every allocation of their thread.
    let live = LIVE.get().wrapping_add(bytes);
    LIVE.set(live);
    if live <= isize::MAX as usize {
        PEAK.set(PEAK.get().max(live));
    }
}

fn shrink(bytes: usize) {
    LIVE.set(LIVE.get().wrapping_sub(bytes));
}

// SAFETY: every call goes to the system's allocator unchanged; counting neither allocates nor panics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        shrink(layout.size());
        // SAFETY: `pointer` came from `alloc` above, which is the system's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// The maximum number of bytes that `work` held at one time, in addition to those allocated before.
pub(crate) fn peak_of(work: impl FnOnce()) -> usize {
    LIVE.set(0);
    PEAK.set(0);
    work();
    PEAK.get()
}

#[test]
fn the_peak_is_the_largest_live_allocation() {
    let peak = peak_of(|| {
        let first = vec![0_u8; 1000];
        drop(first);
        let second = vec![0_u8; 3000];
        drop(second);
    });
    assert_eq!(peak, 3000);
}
