//! The instance's own addresses (docs/guides/nvmeof.md): on an interface only while the pools are ours and the server is
//! running.
//!
//! The kernel keeps each address for [`ADDRESS_STAY`], which is renewed every second. Addresses of a server that was killed
//! or stopped expire, so removing them needs no access to its node.

mod arp;
mod neighbour;
mod netlink;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tracing::{info, warn};

use self::arp::Arp;
use self::netlink::{Entry, Link, Tables};
use crate::config::{Config, InstanceAddress};
use crate::limits::{
    ADDRESS_ANNOUNCEMENTS, ADDRESS_KEEP_INTERVAL, ADDRESS_PROBE_PAUSE, ADDRESS_STAY, ADDRESS_WAIT_SPARE,
};

/// Interval between two checks whether the kernel has found a duplicate (IPv6).
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The hardware address of an interface on a link.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Hardware(Vec<u8>);

impl fmt::Display for Hardware {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits: Vec<String> = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        f.write_str(&digits.join(":"))
    }
}

impl fmt::Debug for Hardware {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Why an address of the instance is not available.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// There is no interface for it.
    #[error(
        "instance.addresses: no interface has an address in the network of {0}: give this machine one, or set \
         instance.interface"
    )]
    NoInterface(InstanceAddress),
    /// The named interface does not exist.
    #[error("instance.interface: there is no interface {0}")]
    NotThere(String),
    /// It is on this machine already, but not by this server.
    #[error(
        "instance.addresses: {address} is on {interface} already, and not by this server: take it off there, or out of the \
         configuration"
    )]
    Permanent {
        /// The address.
        address: InstanceAddress,
        /// The interface that has it.
        interface: String,
    },
    /// Another host answers for it.
    #[error("instance.addresses: {address} is used by {by}, still after {seconds} s: end whatever that is")]
    Taken {
        /// The address.
        address: InstanceAddress,
        /// The host that uses it.
        by: String,
        /// How long that was waited for.
        seconds: u64,
    },
    /// The operating system.
    #[error("instance.addresses: {what}: {error}{fix}")]
    Io {
        /// Doing what.
        what: &'static str,
        /// Why.
        error: io::Error,
        /// What to do, after a colon.
        fix: &'static str,
    },
}

fn io(what: &'static str) -> impl Fn(io::Error) -> AddressError {
    move |error| {
        let denied = error.kind() == io::ErrorKind::PermissionDenied;
        let fix = if denied { ": give the server CAP_NET_ADMIN and CAP_NET_RAW" } else { "" };
        AddressError::Io { what, error, fix }
    }
}

/// The instance's addresses, whether on this machine or not.
#[derive(Debug)]
pub struct Addresses {
    wanted: Vec<InstanceAddress>,
    interface: String,
    /// How long to wait for other hosts that have the addresses.
    wait: Duration,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    places: Vec<Place>,
    /// The keeper ends when this is dropped.
    keeper: Option<Sender<()>>,
    /// The last problem with keeping the addresses.
    problem: Option<String>,
}

/// An address and its interface.
#[derive(Debug)]
struct Place {
    address: InstanceAddress,
    link: Link,
    arp: Option<Arp>,
}

impl Place {
    fn announce(&self) -> io::Result<()> {
        match (self.address.ip(), &self.arp) {
            (IpAddr::V4(ip), Some(arp)) => arp.announce(ip),
            (IpAddr::V4(_), None) => Ok(()),
            (IpAddr::V6(ip), _) => neighbour::announce(&self.link, ip),
        }
    }

    /// Another host that claims the address.
    fn conflict(&self) -> io::Result<Option<Hardware>> {
        match (self.address.ip(), &self.arp) {
            (IpAddr::V4(ip), Some(arp)) => arp.conflict(ip),
            _ => Ok(None),
        }
    }
}

impl Addresses {
    fn new(wanted: Vec<InstanceAddress>, interface: String, wait: Duration) -> Self {
        Self { wanted, interface, wait, held: Mutex::default() }
    }

    /// The configured addresses; none is on an interface yet. Removes addresses that an earlier server left on this machine.
    ///
    /// # Errors
    /// If an address is already present permanently, which no server of ours configures.
    pub fn prepare(config: &Config) -> Result<Arc<Self>, AddressError> {
        let loss_times =
            config.pool.iter().filter_map(|pool| pool.nvmeof.as_ref()).map(|pool| pool.loss_time());
        // A server that was cut off keeps them until it stops, and those of a stopped server stay until the kernel removes
        // them.
        let wait = loss_times.max().unwrap_or_default() + ADDRESS_STAY + ADDRESS_WAIT_SPARE;
        let instance = &config.instance;
        let addresses = Self::new(instance.addresses.clone(), instance.interface.clone(), wait);
        addresses.clear()?;
        Ok(Arc::new(addresses))
    }

    fn clear(&self) -> Result<(), AddressError> {
        if self.wanted.is_empty() {
            return Ok(());
        }
        let mut tables = Tables::open().map_err(io("asking for this machine's addresses"))?;
        let entries = tables.addresses().map_err(io("asking for this machine's addresses"))?;
        let ours = |entry: &&Entry| self.wanted.iter().any(|address| address.ip() == entry.address.ip());
        for entry in entries.iter().filter(ours) {
            if entry.seconds.is_none_or(|seconds| u64::from(seconds) > ADDRESS_STAY.as_secs()) {
                let links = tables.links().map_err(io("asking for this machine's interfaces"))?;
                let link = links.into_iter().find(|link| link.index == entry.index);
                let interface = link.map_or_else(|| entry.index.to_string(), |link| link.name);
                return Err(AddressError::Permanent { address: entry.address, interface });
            }
            warn!(address = %entry.address, "taking off an address that an earlier server has left here");
            tables.take_off(entry.index, entry.address).map_err(io("taking an address off"))?;
        }
        Ok(())
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the addresses to their interfaces, announces them, and keeps them there until [`Self::give_up`]. Waits while
    /// another host has one of them.
    ///
    /// # Errors
    /// Why an address is not available; then none is on this machine.
    pub fn take(self: &Arc<Self>) -> Result<(), AddressError> {
        if self.wanted.is_empty() {
            return Ok(());
        }
        let taken = self.take_all(Instant::now() + self.wait);
        if taken.is_err() {
            self.give_up();
        }
        taken
    }

    fn take_all(self: &Arc<Self>, until: Instant) -> Result<(), AddressError> {
        let started = Instant::now();
        let mut tables = Tables::open().map_err(io("asking for this machine's addresses"))?;
        let links = tables.links().map_err(io("asking for this machine's interfaces"))?;
        let entries = tables.addresses().map_err(io("asking for this machine's addresses"))?;
        for address in &self.wanted {
            let link = self.choose(*address, &links, &entries)?.clone();
            let arp = match address.ip() {
                IpAddr::V4(_) => Arp::open(&link).map_err(io("opening a packet socket"))?,
                IpAddr::V6(_) => None,
            };
            let place = Place { address: *address, link, arp };
            self.wait_for(&mut tables, &place, until)?;
            let put = |tables: &mut Tables| tables.put(place.link.index, place.address, ADDRESS_STAY);
            put(&mut tables).map_err(io("putting an address on an interface"))?;
            info!(
                %address, interface = place.link.name, milliseconds = started.elapsed().as_millis() as u64,
                "the address is ours"
            );
            if let Err(error) = place.announce() {
                warn!(%address, %error, "the address could not be announced");
            }
            self.held().places.push(place);
        }
        let (keeper, ends) = channel();
        self.held().keeper = Some(keeper);
        // Weak: the thread that drops the last strong reference gives up the addresses.
        let addresses: Weak<Self> = Arc::downgrade(self);
        let keep = move || {
            let started = Instant::now();
            let mut announcements = ADDRESS_ANNOUNCEMENTS.iter().copied().peekable();
            while ends.recv_timeout(ADDRESS_KEEP_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let announce = announcements.next_if(|after| started.elapsed() >= *after).is_some();
                let Some(addresses) = addresses.upgrade() else { break };
                addresses.keep(&mut tables, announce);
            }
        };
        std::thread::Builder::new().name("addresses".into()).spawn(keep).map_err(io("starting a thread"))?;
        Ok(())
    }

    fn choose<'a>(
        &self,
        address: InstanceAddress,
        links: &'a [Link],
        entries: &[Entry],
    ) -> Result<&'a Link, AddressError> {
        if !self.interface.is_empty() {
            let named = links.iter().find(|link| link.name == self.interface);
            return named.ok_or_else(|| AddressError::NotThere(self.interface.clone()));
        }
        // Each must be in the other's network; a leftover of the address itself does not count.
        let neighbours = |other: InstanceAddress| {
            other.ip() != address.ip()
                && address.has_in_network(other.ip())
                && other.has_in_network(address.ip())
        };
        let has_network =
            |link: &&Link| entries.iter().any(|e| e.index == link.index && neighbours(e.address));
        links.iter().find(has_network).ok_or(AddressError::NoInterface(address))
    }

    /// Waits until no host answers for the address.
    fn wait_for(&self, tables: &mut Tables, place: &Place, until: Instant) -> Result<(), AddressError> {
        let mut reported = false;
        while let Some(by) = self.user(tables, place)? {
            let (address, seconds) = (place.address, self.wait.as_secs());
            if Instant::now() >= until {
                return Err(AddressError::Taken { address, by, seconds });
            }
            if !std::mem::replace(&mut reported, true) {
                warn!(%address, by, seconds_max = seconds, "another machine answers for the address: waiting, it may be the previous server");
            }
            // Answers arrive immediately: without a pause there would be too many probes.
            std::thread::sleep(ADDRESS_PROBE_PAUSE);
        }
        Ok(())
    }

    /// The other host that has the address.
    fn user(&self, tables: &mut Tables, place: &Place) -> Result<Option<String>, AddressError> {
        match (place.address.ip(), &place.arp) {
            (IpAddr::V4(ip), Some(arp)) => {
                let found = arp.probe(ip).map_err(io("asking who has an address"))?;
                Ok(found.map(|hardware| hardware.to_string()))
            }
            (IpAddr::V4(_), None) => Ok(None),
            (IpAddr::V6(_), _) => self.user_by_the_kernel(tables, place),
        }
    }

    /// The kernel itself looks for duplicates of IPv6 addresses (RFC 4862 5.4), once they are on an interface. It removes an
    /// address with a duplicate, or leaves it unused.
    fn user_by_the_kernel(&self, tables: &mut Tables, place: &Place) -> Result<Option<String>, AddressError> {
        let index = place.link.index;
        tables.put(index, place.address, ADDRESS_STAY).map_err(io("putting an address on an interface"))?;
        let until = Instant::now() + ADDRESS_STAY;
        loop {
            let entries = tables.addresses().map_err(io("asking for this machine's addresses"))?;
            let found =
                entries.iter().find(|entry| entry.index == index && entry.address.ip() == place.address.ip());
            match found {
                Some(entry) if !entry.tentative && !entry.duplicate => return Ok(None),
                Some(entry) if !entry.duplicate && Instant::now() < until => std::thread::sleep(LOOK_AGAIN),
                _ => break,
            }
        }
        tables.take_off(index, place.address).map_err(io("taking an address off"))?;
        Ok(Some("another machine (duplicate address detection)".to_owned()))
    }

    /// Renews the addresses, and contradicts other hosts that claim them: this server holds the reservations.
    fn keep(&self, tables: &mut Tables, announce: bool) {
        // Held throughout, so that an address that is given up is not added again.
        let mut held = self.held();
        let mut problem = None;
        for place in &held.places {
            let address = place.address;
            if let Err(error) = tables.put(place.link.index, address, ADDRESS_STAY) {
                problem = Some(format!("{address} could not be kept on {}: {error}", place.link.name));
            }
            let conflict = place.conflict().unwrap_or_else(|error| {
                problem = Some(format!("{address} on {}: {error}", place.link.name));
                None
            });
            if let Some(by) = &conflict {
                warn!(%address, %by, "another machine claims the address: contradicting");
            }
            if announce || conflict.is_some() {
                let _ = place.announce();
            }
        }
        if let (Some(problem), None) = (&problem, &held.problem) {
            warn!("{problem}");
        }
        held.problem = problem;
    }

    /// Removes the addresses immediately; a repeated call is not an error.
    pub fn give_up(&self) {
        let (places, keeper) = {
            let mut held = self.held();
            (std::mem::take(&mut held.places), held.keeper.take())
        };
        drop(keeper);
        if places.is_empty() {
            return;
        }
        // A separate socket: the keeper may be waiting for an answer on the other one.
        let taken_off = Tables::open().and_then(|mut tables| {
            places.iter().try_for_each(|place| tables.take_off(place.link.index, place.address))
        });
        match taken_off {
            Ok(()) => info!(addresses = places.len(), "the addresses are taken off"),
            Err(error) => {
                warn!(%error, seconds = ADDRESS_STAY.as_secs(), "an address stays until its time is over")
            }
        }
    }

    /// The current problem with the addresses, if any.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.held().problem.clone()
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        self.give_up();
    }
}
