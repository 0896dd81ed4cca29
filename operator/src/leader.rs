//! Leader election: one operator works, the others wait. Uses a Lease of coordination.k8s.io.
//!
//! Another replica's Lease is judged by the time since it was last *seen* to change, never by the time stored in it, so
//! clock differences do no harm.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::{Client, ResourceExt as _};
use rustix::time::{ClockId, clock_gettime};
use tokio::time::timeout;

use crate::leases::Leases;

/// Name of the Lease.
pub const LEASE: &str = "forebay-operator";

/// Timing of the leader election.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long a Lease remains valid without renewal.
    pub duration: Duration,
    /// A leader that has failed to renew for this long stops.
    pub renew_deadline: Duration,
    /// Interval between attempts.
    pub retry: Duration,
}

impl Timing {
    /// Returns the timing for a Lease with this duration. A leader stops well before the Lease expires, so that two never
    /// work at the same time.
    #[must_use]
    pub fn new(duration: Duration) -> Self {
        Self { duration, renew_deadline: duration * 2 / 3, retry: duration / 15 }
    }
}

/// Reports to writers whether another replica can hold the Lease by now. A process that was frozen, or a machine that was
/// suspended, resumes in the middle of its work, before [`Candidate::hold`] has noticed.
#[derive(Clone, Debug)]
pub struct Tenure {
    /// Start of the last successful renewal, in nanoseconds of [`since_boot`].
    renewed: Arc<AtomicU64>,
    duration: Duration,
}

impl Tenure {
    /// Starts a tenure that lasts for `duration` unless it is renewed.
    #[must_use]
    pub fn new(duration: Duration) -> Self {
        let renewed = Arc::default();
        let tenure = Self { renewed, duration };
        tenure.renew(since_boot());
        tenure
    }

    fn renew(&self, asked: Duration) {
        self.renewed.store(u64::try_from(asked.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Whether no other replica can hold the Lease by now. A request that is sent right after this check can still arrive
    /// later.
    #[must_use]
    pub fn lasts(&self) -> bool {
        let renewed = Duration::from_nanos(self.renewed.load(Ordering::Relaxed));
        lasts(renewed, since_boot(), self.duration)
    }
}

/// Whether a Lease with this renewal time and duration is still held now.
fn lasts(renewed: Duration, now: Duration, duration: Duration) -> bool {
    now.saturating_sub(renewed) < duration
}

/// Time since boot, including time in suspend, which [`Instant`] excludes.
fn since_boot() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    let seconds = Duration::from_secs(u64::try_from(now.tv_sec).unwrap_or_default());
    seconds + Duration::from_nanos(u64::try_from(now.tv_nsec).unwrap_or_default())
}

/// A replica in the leader election.
#[derive(Clone, Debug)]
pub struct Candidate {
    api: Api<Lease>,
    identity: String,
    timing: Timing,
    tenure: Tenure,
    /// Notified of failed renewals, because those of kubelets may fail, too.
    leases: Option<Leases>,
}

/// The observed version of a Lease, and when it was first seen.
type Seen = Option<(String, Instant)>;

impl Candidate {
    /// Creates a candidate with an identity that no other candidate has.
    #[must_use]
    pub fn new(client: Client, namespace: &str, identity: String, timing: Timing) -> Self {
        let tenure = Tenure::new(timing.duration);
        Self { api: Api::namespaced(client, namespace), identity, timing, tenure, leases: None }
    }

    /// Returns for how long the Lease is certainly held. Only meaningful after the Lease was acquired.
    #[must_use]
    pub fn tenure(&self) -> Tenure {
        self.tenure.clone()
    }

    /// Sets the receiver of failed renewals.
    #[must_use]
    pub fn telling(self, leases: Leases) -> Self {
        Self { leases: Some(leases), ..self }
    }

    fn failed(&self) {
        if let Some(leases) = &self.leases {
            leases.api_server_failed();
        }
    }

    /// Waits until the Lease is held, and returns since when. The time is taken before the request, because the response may
    /// be late.
    pub async fn acquire(&self) -> Instant {
        let mut seen: Seen = None;
        loop {
            let (asked, asked_at) = (Instant::now(), since_boot());
            match timeout(self.timing.renew_deadline, self.try_acquire(&mut seen)).await {
                Ok(Ok(true)) => {
                    self.tenure.renew(asked_at);
                    return asked;
                }
                Ok(Ok(false)) => {}
                Ok(Err(error)) => tracing::warn!(%error, "the Lease cannot be read or taken"),
                Err(_) => tracing::warn!("the API server does not answer"),
            }
            tokio::time::sleep(self.timing.retry).await;
        }
    }

    /// Renews the Lease, held since `since`, for as long as possible; returns when it is lost.
    pub async fn hold(&self, since: Instant) {
        let mut renewed = since;
        loop {
            let left = self.timing.renew_deadline.saturating_sub(renewed.elapsed());
            tokio::time::sleep(self.timing.retry.min(left)).await;
            // A request that hangs leaves time for another attempt, on another connection.
            let left = self
                .timing
                .renew_deadline
                .saturating_sub(renewed.elapsed())
                .min(self.timing.renew_deadline / 2);
            // Taken before the request, because the response may be late.
            let (asked, asked_at) = (Instant::now(), since_boot());
            match timeout(left, self.renew()).await {
                Ok(Ok(true)) => {
                    renewed = asked;
                    self.tenure.renew(asked_at);
                }
                Ok(Ok(false)) => {
                    tracing::error!("another process holds the Lease");
                    return;
                }
                Ok(Err(error)) => {
                    tracing::warn!(%error, "the Lease cannot be renewed");
                    // A conflict says nothing about the API server: another client wrote to the Lease at the same moment.
                    if !matches!(&error, kube::Error::Api(status) if status.code == 409) {
                        self.failed();
                    }
                }
                Err(_) => {
                    tracing::warn!("the API server is slow to renew the Lease");
                    self.failed();
                }
            }
            if renewed.elapsed() >= self.timing.renew_deadline {
                tracing::error!("the Lease could not be renewed in time");
                return;
            }
        }
    }

    /// Releases the Lease, so that another replica need not wait for it to expire.
    pub async fn release(&self) {
        let given = async {
            let mut lease = self.api.get(LEASE).await?;
            if lease.spec.as_ref().and_then(|s| s.holder_identity.as_ref()) != Some(&self.identity) {
                return Ok(());
            }
            if let Some(spec) = lease.spec.as_mut() {
                spec.holder_identity = None;
                spec.renew_time = Some(MicroTime(Timestamp::now()));
            }
            self.api.replace(LEASE, &PostParams::default(), &lease).await.map(|_| ())
        };
        match timeout(self.timing.retry * 2, given).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "the Lease cannot be released"),
            Err(_) => tracing::warn!("the Lease cannot be released in time"),
        }
    }

    fn spec(&self, transitions: i32) -> LeaseSpec {
        let now = Some(MicroTime(Timestamp::now()));
        LeaseSpec {
            acquire_time: now.clone(),
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(
                i32::try_from(self.timing.duration.as_secs().max(1)).unwrap_or(i32::MAX),
            ),
            lease_transitions: Some(transitions),
            renew_time: now,
            ..LeaseSpec::default()
        }
    }

    async fn try_acquire(&self, seen: &mut Seen) -> Result<bool, kube::Error> {
        let Some(mut lease) = self.api.get_opt(LEASE).await? else {
            let metadata = ObjectMeta { name: Some(LEASE.to_owned()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.spec(0)) };
            return won(self.api.create(&PostParams::default(), &lease).await);
        };
        let version = lease.resource_version().unwrap_or_default();
        if seen.as_ref().is_none_or(|(v, _)| *v != version) {
            *seen = Some((version, Instant::now()));
        }
        let holder = lease.spec.as_ref().and_then(|s| s.holder_identity.clone()).unwrap_or_default();
        let quiet = seen.as_ref().map(|(_, since)| since.elapsed()).unwrap_or_default();
        let theirs = lease.spec.as_ref().and_then(|s| s.lease_duration_seconds).unwrap_or_default();
        let patience =
            Duration::from_secs(u64::try_from(theirs).unwrap_or_default()).max(self.timing.duration);
        if !holder.is_empty() && holder != self.identity && quiet < patience {
            return Ok(false);
        }
        let transitions = lease.spec.as_ref().and_then(|s| s.lease_transitions).unwrap_or_default();
        lease.spec = Some(self.spec(transitions.saturating_add(1)));
        // Because of the resource version, one of two replicas that try at the same time fails.
        won(self.api.replace(LEASE, &PostParams::default(), &lease).await)
    }

    async fn renew(&self) -> Result<bool, kube::Error> {
        let Some(mut lease) = self.api.get_opt(LEASE).await? else { return Ok(false) };
        let Some(spec) = lease.spec.as_mut() else { return Ok(false) };
        if spec.holder_identity.as_ref() != Some(&self.identity) {
            return Ok(false);
        }
        spec.renew_time = Some(MicroTime(Timestamp::now()));
        // A conflict here may be caused by another client's annotation: the next attempt checks which replica holds the
        // Lease.
        self.api.replace(LEASE, &PostParams::default(), &lease).await.map(|_| true)
    }
}

/// A conflict means that another replica won; it is not an error.
fn won(result: Result<Lease, kube::Error>) -> Result<bool, kube::Error> {
    match result {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenure_ends_when_its_lease_expires() {
        let s = Duration::from_secs;
        assert!(lasts(s(100), s(100), s(15)));
        assert!(lasts(s(100), s(114), s(15)));
        assert!(!lasts(s(100), s(115), s(15)), "another candidate may hold it");
        assert!(!lasts(s(100), s(5000), s(15)));
        assert!(lasts(s(101), s(100), s(15)), "renewed while the question was asked");
    }

    #[test]
    fn renewal_extends_every_clone_of_a_tenure() {
        // Shorter than the uptime of any machine that runs this test.
        let tenure = Tenure::new(Duration::from_millis(1));
        let copy = tenure.clone();
        tenure.renew(Duration::ZERO);
        assert!(!copy.lasts(), "it was renewed last when the machine was started");
        tenure.renew(since_boot() + Duration::from_secs(3600));
        assert!(copy.lasts());
    }
}
