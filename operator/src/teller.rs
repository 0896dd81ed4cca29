//! Writes Events so that each has the correct note: kube's recorder counts Events of the same reason and object as one
//! series, with the first note for all of them.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Recorder, Reporter};

use crate::events::Notice;

/// Identifies a series: the cluster, the reason, the instance.
type Key = (String, &'static str, Option<String>);

/// Writes Events.
pub struct Teller {
    client: Client,
    reporter: Reporter,
    /// The last note of each series, and the recorder that counts it. A different note starts a new series.
    series: Mutex<HashMap<Key, (String, Recorder)>>,
}

impl std::fmt::Debug for Teller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Teller").finish_non_exhaustive()
    }
}

impl Teller {
    /// Creates a writer without any series.
    #[must_use]
    pub fn new(client: Client, reporter: Reporter) -> Self {
        Self { client, reporter, series: Mutex::default() }
    }

    fn recorder(&self, cluster: &str, notice: &Notice) -> Recorder {
        let key = (cluster.to_owned(), notice.reason, notice.instance.clone());
        let mut series = self.series.lock().unwrap_or_else(PoisonError::into_inner);
        match series.get(&key) {
            Some((note, recorder)) if *note == notice.note => recorder.clone(),
            _ => {
                let recorder = Recorder::new(self.client.clone(), self.reporter.clone());
                series.insert(key, (notice.note.clone(), recorder.clone()));
                recorder
            }
        }
    }

    /// Writes an Event about a cluster. A lost Event is harmless, because the status contains the same information.
    pub async fn tell(&self, namespace: &str, cluster: &ObjectReference, notice: &Notice) {
        let recorder = self.recorder(cluster.name.as_deref().unwrap_or_default(), notice);
        if let Err(error) = recorder.publish(&notice.event(namespace), cluster).await {
            tracing::debug!(%error, "an Event could not be written");
        }
    }

    /// Drops the series of a deleted cluster.
    pub fn forget(&self, cluster: &str) {
        self.series.lock().unwrap_or_else(PoisonError::into_inner).retain(|(of, ..), _| of != cluster);
    }
}
