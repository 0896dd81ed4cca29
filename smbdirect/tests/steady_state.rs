//! In steady state nothing is allocated: a device completes, posts and completes, and the connection only counts.

#![allow(unsafe_code, reason = "a global allocator is unsafe to implement")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Instant;

use forebay_smbdirect::{BufferId, Config, Connection, MessageId, Received, Segment};

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged; counting neither allocates nor panics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` above, which is the system's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Moves messages from one side to the other through an existing buffer. Returns the number of delivered messages.
fn carry(from: &mut Connection, to: &mut Connection, wire: &mut [u8], now: Instant) -> usize {
    let mut messages = 0;
    while let Some(transmit) = from.poll_transmit(now) {
        let header = transmit.header();
        let length = transmit.total_bytes() as usize;
        wire[..header.len()].copy_from_slice(header);
        let mut free = 1;
        match to.handle_receive(now, BufferId(1), &wire[..length], None).expect("the connection continues") {
            Received::Held => free = 0,
            Received::Message(message) => {
                free = message.segments.len() as u16;
                messages += 1;
            }
            Received::Free | Received::Negotiated(_) => {}
        }
        to.receives_posted(free);
        from.handle_sent(1).expect("the connection continues");
    }
    messages
}

#[test]
fn nothing_is_allocated_in_steady_state() {
    let now = Instant::now();
    let mut client = Connection::new(Config::active(), now).expect("valid");
    let mut server = Connection::new(Config::passive(), now).expect("valid");
    let mut wire = vec![0; 8192];
    for side in [&mut client, &mut server] {
        side.receives_posted(Config::active().receive_buffers());
        side.handle_established();
    }
    carry(&mut client, &mut server, &mut wire, now);
    carry(&mut server, &mut client, &mut wire, now);
    let request = [Segment { buffer: BufferId(1), start: 0, length: 200 }];
    let answer = [
        Segment { buffer: BufferId(2), start: 0, length: 80 },
        Segment { buffer: BufferId(3), start: 0, length: 20_000 },
    ];
    let mut round = |count: u64| {
        let mut delivered = 0;
        for id in 0..count {
            client.send(MessageId(id), &request, None).expect("queued");
            client.send(MessageId(id), &request, None).expect("queued");
            delivered += carry(&mut client, &mut server, &mut wire, now);
            server.send(MessageId(id), &answer, None).expect("queued");
            delivered += carry(&mut server, &mut client, &mut wire, now);
            delivered += carry(&mut client, &mut server, &mut wire, now);
        }
        delivered
    };
    // The first rounds let every list grow to its final size.
    assert_eq!(round(10), 30);
    let before = ALLOCATIONS.get();
    let delivered = round(1000);
    assert_eq!(ALLOCATIONS.get() - before, 0, "allocations in 1000 rounds");
    assert_eq!(delivered, 3000);
}
