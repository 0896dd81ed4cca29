//! The instances' last reports: queried at intervals, kept for a while, and passed on if they change.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use forebay_api::StorageCluster;
use futures::StreamExt as _;
use kube::runtime::reflector::ObjectRef;
use tokio::sync::mpsc;

use crate::admin::{Admin, AdminError, Identity};
use crate::desired::{Report, ServerReport};
use crate::limits::{POLL_INTERVAL, POLLS_AT_ONCE_MAX, REPORT_AGE_MAX};

/// An instance to be queried.
#[derive(Clone, Debug)]
pub struct Visit {
    /// UID of its pod: another pod's reports do not apply to this one.
    pub pod_uid: String,
    /// Its admin API.
    pub endpoint: SocketAddr,
    /// The server name in its certificate.
    pub server_name: String,
    /// The operator's certificate and trusted authorities.
    pub identity: Identity,
    /// Percentage of each pool's size that can be provisioned, by the pool's name.
    pub overcommit: BTreeMap<String, u32>,
}

impl Visit {
    /// Queries the instance.
    ///
    /// # Errors
    ///
    /// If the instance does not respond in time.
    pub async fn ask(&self) -> Result<ServerReport, AdminError> {
        let mut admin = Admin::connect(self.endpoint, &self.server_name, &self.identity).await?;
        admin.report(|pool| self.overcommit.get(pool).copied().unwrap_or(100)).await
    }
}

#[derive(Debug)]
struct Entry {
    visit: Visit,
    answered: Option<(ServerReport, Instant)>,
    failed: Option<String>,
    reported: Option<Report>,
}

impl Entry {
    fn report(&self) -> Option<Report> {
        let fresh = self.answered.as_ref().filter(|(_, at)| at.elapsed() < REPORT_AGE_MAX);
        match (fresh, &self.failed) {
            (Some((report, _)), _) => Some(Report::Answered(Box::new(report.clone()))),
            (None, Some(why)) => Some(Report::Silent(why.clone())),
            (None, None) => None,
        }
    }
}

type Key = (ObjectRef<StorageCluster>, String);

/// The reports of all instances.
#[derive(Clone, Debug, Default)]
pub struct Reports {
    entries: Arc<Mutex<HashMap<Key, Entry>>>,
}

impl Reports {
    fn entries(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the instances of a cluster that are queried, and returns their reports. Instances without a report are queried
    /// now, concurrently.
    pub async fn of(
        &self,
        cluster: &ObjectRef<StorageCluster>,
        visits: BTreeMap<String, Visit>,
    ) -> BTreeMap<String, Report> {
        let mut unasked = Vec::new();
        {
            let mut entries = self.entries();
            entries.retain(|(c, instance), entry| {
                c != cluster || visits.get(instance).is_some_and(|v| v.pod_uid == entry.visit.pod_uid)
            });
            for (instance, visit) in visits {
                let key = (cluster.clone(), instance);
                let entry = entries.entry(key.clone()).or_insert_with(|| Entry {
                    visit: visit.clone(),
                    answered: None,
                    failed: None,
                    reported: None,
                });
                entry.visit = visit;
                if entry.report().is_none() {
                    unasked.push((key, entry.visit.clone()));
                }
            }
        }
        self.ask(unasked).await;
        let mut entries = self.entries();
        let mine = entries.iter_mut().filter(|((c, _), _)| c == cluster);
        mine.filter_map(|((_, instance), entry)| {
            entry.reported = entry.report();
            Some((instance.clone(), entry.reported.clone()?))
        })
        .collect()
    }

    /// Drops a cluster.
    pub fn forget(&self, cluster: &ObjectRef<StorageCluster>) {
        self.entries().retain(|(c, _), _| c != cluster);
    }

    async fn ask(&self, visits: Vec<(Key, Visit)>) {
        futures::stream::iter(visits)
            .for_each_concurrent(POLLS_AT_ONCE_MAX, |(key, visit)| async move {
                let answer = visit.ask().await;
                let mut entries = self.entries();
                let Some(entry) = entries.get_mut(&key).filter(|e| e.visit.pod_uid == visit.pod_uid) else {
                    return;
                };
                match answer {
                    Ok(report) => {
                        entry.answered = Some((report, Instant::now()));
                        entry.failed = None;
                    }
                    Err(error) => {
                        tracing::debug!(instance = key.1, %error, "the admin API does not answer");
                        entry.failed = Some(error.to_string());
                    }
                }
            })
            .await;
    }

    /// Queries every instance at intervals, indefinitely, and sends to `changed` when a report has changed.
    pub async fn poll(self, changed: mpsc::Sender<()>) {
        let mut interval = tokio::time::interval(POLL_INTERVAL);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            let visits: Vec<_> = self.entries().iter().map(|(k, e)| (k.clone(), e.visit.clone())).collect();
            self.ask(visits).await;
            let news = self.entries().values().any(|e| e.report() != e.reported);
            if news && changed.send(()).await.is_err() {
                return;
            }
        }
    }
}
