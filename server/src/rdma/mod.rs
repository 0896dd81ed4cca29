//! RDMA: listeners, and the RDMA state of an event loop.

pub mod later;
pub mod listener;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use forebay_rdma::{Budget, CmEvent, CmKey, DeviceKey, Endpoint, EventChannel, Incoming, Notifier};
use tracing::info;

use crate::buffers::BufferPool;
use crate::limits::{RDMA_CLOSING_MAX, TRIM_BYTES_MAX};
use crate::transport::smb_direct::{SmbDirect, settings};

/// An event of an event loop's connection.
pub(crate) enum Event {
    /// It is established.
    Established,
    /// It has completions.
    Ready,
    /// It has ended.
    Ended(&'static str),
}

/// An event loop's RDMA state: delivers events and completions of its connections.
pub(crate) struct Rdma {
    channel: Arc<EventChannel>,
    events: Arc<OwnedFd>,
    devices: HashMap<DeviceKey, OnDevice>,
    /// Connections, by their key in events.
    connections: HashMap<CmKey, u64>,
    closing: Closing<Endpoint>,
    budget: Budget,
    /// The index of the event loop.
    index: usize,
}

/// A thread that drops endpoints: the kernel can take seconds to release a queue pair that a peer has left in disorder, and the
/// other connections of an event loop must not wait for that.
struct Closing<T> {
    dropped: Sender<T>,
    count: Arc<AtomicUsize>,
}

impl<T: Send + 'static> Closing<T> {
    fn new() -> std::io::Result<Self> {
        let (dropped, given) = channel::<T>();
        let count = Arc::new(AtomicUsize::new(0));
        let left = Arc::clone(&count);
        std::thread::Builder::new().name("rdma-close".to_owned()).spawn(move || {
            for thing in given {
                drop(thing);
                left.fetch_sub(1, Ordering::Relaxed);
            }
        })?;
        Ok(Self { dropped, count })
    }

    fn drop(&self, thing: T) {
        self.count.fetch_add(1, Ordering::Relaxed);
        // The thread exits after the sender is dropped. If it were gone, the value would be dropped here.
        let _ = self.dropped.send(thing);
    }

    fn is_full(&self) -> bool {
        self.count.load(Ordering::Relaxed) >= RDMA_CLOSING_MAX
    }
}

struct OnDevice {
    notifier: Arc<Notifier>,
    completions: Arc<OwnedFd>,
    buffers: BufferPool,
}

impl Rdma {
    /// Creates the state of event loop `index`, with buffers that are charged to a budget.
    pub(crate) fn new(budget: Budget, index: usize) -> Result<Self, String> {
        let channel = EventChannel::new().map_err(|error| error.to_string())?;
        let closing = Closing::new().map_err(|error| error.to_string())?;
        Ok(Self {
            events: channel.descriptor(),
            channel: Arc::new(channel),
            devices: HashMap::new(),
            connections: HashMap::new(),
            closing,
            budget,
            index,
        })
    }

    /// The descriptor to wait for from the start.
    pub(crate) fn events(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.events)
    }

    /// Whether to continue to wait for this descriptor.
    pub(crate) fn waits_for(&self, descriptor: &Arc<OwnedFd>) -> bool {
        Arc::ptr_eq(descriptor, &self.events)
            || self.devices.values().any(|device| Arc::ptr_eq(descriptor, &device.completions))
    }

    /// Accepts a peer as connection `id`. Also returns the pool of its buffers, and a further descriptor to wait for.
    pub(crate) fn accept(
        &mut self,
        id: u64,
        incoming: Incoming,
        peer: SocketAddr,
        stall_time_max: Duration,
    ) -> Result<(SmbDirect, BufferPool, Option<Arc<OwnedFd>>), String> {
        if self.closing.is_full() {
            return Err("too many connections are still being closed".to_owned());
        }
        let device = incoming.device().map_err(|errno| errno.to_string())?;
        let mut watch = None;
        if !self.devices.contains_key(&device.key()) {
            let notifier = Notifier::of_loop(&device, self.index).map_err(|errno| errno.to_string())?;
            let completions = notifier.descriptor();
            watch = Some(Arc::clone(&completions));
            let buffers = BufferPool::of(&self.budget, Some(Arc::clone(&device)));
            let on_device = OnDevice { notifier: Arc::new(notifier), completions, buffers };
            self.devices.insert(device.key(), on_device);
        }
        let on_device = &self.devices[&device.key()];
        let (config, sizes) = settings(&device, stall_time_max);
        let endpoint = Endpoint::new(incoming, &self.channel, &on_device.notifier, id, sizes)
            .map_err(|errno| format!("{}: {errno}", device.name()))?;
        let key = endpoint.key();
        let link = SmbDirect::accept(endpoint, config, peer, Instant::now())?;
        let buffers = on_device.buffers.clone();
        self.connections.insert(key, id);
        Ok((link, buffers, watch))
    }

    /// Closes a connection.
    pub(crate) fn close(&mut self, endpoint: Endpoint) {
        self.connections.remove(&endpoint.key());
        self.closing.drop(endpoint);
    }

    /// Takes the events since the last call, by connection.
    pub(crate) fn take(&mut self) -> Vec<(u64, Event)> {
        let mut found = Vec::new();
        while let Some(event) = self.channel.next() {
            let (key, event) = match event {
                CmEvent::Established(key) => (key, Event::Established),
                CmEvent::Ended(key, reason) => (key, Event::Ended(reason)),
                CmEvent::DeviceRemoved(key) => (key, Event::Ended("the RDMA device was removed")),
                // Connection requests go to listeners, which have another channel; no connection is started from here.
                CmEvent::Connect(_) | CmEvent::Resolved(_) => continue,
            };
            found.extend(self.connections.get(&key).map(|id| (*id, event)));
        }
        let mut ready = Vec::new();
        self.devices.retain(|_, device| match device.notifier.take(&mut ready) {
            Ok(()) => true,
            Err(errno) => {
                info!(device = ?device.notifier, %errno, "the RDMA device is gone");
                false
            }
        });
        found.extend(ready.into_iter().map(|id| (id, Event::Ready)));
        found
    }

    /// Returns memory to the kernel that was not needed since the last call.
    pub(crate) fn trim(&self) {
        for device in self.devices.values() {
            device.buffers.trim(TRIM_BYTES_MAX);
        }
    }

    /// Bytes of buffers in use.
    pub(crate) fn buffer_bytes(&self) -> usize {
        self.devices.values().map(|device| device.buffers.bytes_in_use()).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, sync_channel};

    use super::*;

    /// Waits in its drop until it is signalled.
    struct Slow(Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv_timeout(Duration::from_secs(60));
        }
    }

    #[test]
    fn slow_closes_are_counted_and_do_not_block_the_caller() {
        let closing = Closing::new().expect("a thread");
        let (reported, wait) = sync_channel(RDMA_CLOSING_MAX);
        closing.drop(Slow(wait));
        for _ in 1..RDMA_CLOSING_MAX {
            assert!(!closing.is_full());
            let (reported, wait) = sync_channel(1);
            drop(reported);
            closing.drop(Slow(wait));
        }
        assert!(closing.is_full());
        reported.send(()).expect("it waits");
        let until = Instant::now() + Duration::from_secs(60);
        while closing.is_full() {
            assert!(Instant::now() < until, "nothing is closed");
            std::thread::yield_now();
        }
    }
}
