//! Records how volumes were mounted, for calls that report their condition and for the pods that use them.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::time::timeout;
use tracing::{info, warn};

use crate::identity::DRIVER_NAME;
use crate::limits::{KUBERNETES_DEADLINE, MOUNT_NOTES_MAX};
use crate::transport::{Choice, Over};

/// Longest note that the API server accepts.
const NOTE_BYTES_MAX: usize = 1024;

/// Records that are kept until the volume is unmounted or the driver ends.
#[derive(Clone)]
pub(super) struct Reported {
    by_volume: Arc<Mutex<HashMap<String, Note>>>,
    /// Set in Kubernetes.
    recorder: Option<Recorder>,
}

/// Details of a volume's mount that the mount table does not show.
#[derive(Clone, Debug)]
struct Note {
    /// Set if the transport needs an explanation.
    choice: Option<Choice>,
    is_signed: bool,
}

impl fmt::Debug for Reported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reported").field("by_volume", &self.by_volume).finish_non_exhaustive()
    }
}

impl Reported {
    pub(super) fn new(node_id: &str, client: Option<Client>) -> Self {
        let reporter = Reporter { controller: DRIVER_NAME.to_owned(), instance: Some(node_id.to_owned()) };
        Self { by_volume: Arc::default(), recorder: client.map(|client| Recorder::new(client, reporter)) }
    }

    fn by_volume(&self) -> MutexGuard<'_, HashMap<String, Note>> {
        // Each change is a single call on the map.
        self.by_volume.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn mounted(&self, volume_id: &str, choice: Choice, is_signed: bool) {
        info!(volume_id, over = ?choice.over, why = choice.why, "mounted the volume");
        let note = Note { choice: choice.why.is_some().then_some(choice), is_signed };
        let mut by_volume = self.by_volume();
        if by_volume.len() < MOUNT_NOTES_MAX || by_volume.contains_key(volume_id) {
            by_volume.insert(volume_id.to_owned(), note);
        }
    }

    pub(super) fn unmounted(&self, volume_id: &str) {
        self.by_volume().remove(volume_id);
    }

    /// The recorded transport choice of a volume's mount, if it needs an explanation.
    pub(super) fn of(&self, volume_id: &str) -> Option<Choice> {
        self.by_volume().get(volume_id)?.choice.clone()
    }

    /// Whether the volume was mounted with `sign`, if this process mounted it.
    pub(super) fn is_signed(&self, volume_id: &str) -> Option<bool> {
        self.by_volume().get(volume_id).map(|note| note.is_signed)
    }

    /// Reports to a pod that its volume uses less than it could. Does not block the pod.
    pub(super) fn published(&self, volume_id: &str, pod: ObjectReference) {
        let Some(event) = self.of(volume_id).and_then(|choice| event(volume_id, &choice)) else { return };
        let Some(recorder) = self.recorder.clone() else { return };
        let volume_id = volume_id.to_owned();
        tokio::spawn(async move {
            let error = match timeout(KUBERNETES_DEADLINE, recorder.publish(&event, &pod)).await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "the Kubernetes API does not answer".to_owned(),
            };
            warn!(volume_id, error, "cannot write an Event about the mount");
        });
    }
}

/// The Event for a mount that uses less than both ends together could support.
fn event(volume_id: &str, choice: &Choice) -> Option<Event> {
    let why = choice.why.as_ref().filter(|_| choice.is_less && choice.over == Over::Tcp)?;
    let mut note = format!("volume {volume_id} is mounted over TCP, although its server accepts RDMA: {why}");
    while note.len() > NOTE_BYTES_MAX {
        note.pop();
    }
    Some(Event {
        type_: EventType::Normal,
        reason: "MountedOverTcp".to_owned(),
        note: Some(note),
        action: "Mount".to_owned(),
        secondary: None,
    })
}

/// The pod that a volume is published for, as passed by the kubelet (CSIDriver.spec.podInfoOnMount).
pub(super) fn pod_of(context: &HashMap<String, String>) -> Option<ObjectReference> {
    let get = |key: &str| context.get(&format!("csi.storage.k8s.io/pod.{key}")).cloned();
    Some(ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(get("name")?),
        namespace: Some(get("namespace")?),
        uid: Some(get("uid")?),
        ..ObjectReference::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_is_created_only_if_tcp_is_used_despite_server_rdma() {
        let less = Choice::short_of("the node has no RDMA device".to_owned());
        let reported = event("c-0/pvc-1", &less).expect("it is less");
        assert_eq!(reported.reason, "MountedOverTcp");
        let note = reported.note.expect("a note");
        assert!(note.contains("c-0/pvc-1") && note.ends_with("the node has no RDMA device"), "{note}");
        assert!(event("v", &Choice::tcp()).is_none());
        assert!(event("v", &Choice { is_less: false, ..less }).is_none(), "the server has no RDMA either");
        let long = event("v", &Choice::short_of("ä".repeat(4000))).expect("an Event").note.expect("a note");
        assert!(long.len() <= NOTE_BYTES_MAX);
    }

    #[test]
    fn report_is_replaced_on_remount_and_cleared_on_unmount() {
        let reported = Reported::new("n", None);
        reported.mounted("v", Choice::short_of("why".to_owned()), false);
        assert_eq!(reported.of("v").and_then(|c| c.why).as_deref(), Some("why"));
        // Mounted again, now over RDMA.
        reported.mounted("v", Choice { over: Over::RdmaOrTcp, why: None, is_less: false }, true);
        assert_eq!((reported.of("v"), reported.is_signed("v")), (None, Some(true)));
        reported.mounted("v", Choice::short_of("why".to_owned()), false);
        reported.unmounted("v");
        assert_eq!((reported.of("v"), reported.is_signed("v")), (None, None));
    }

    #[test]
    fn pod_is_read_from_the_volume_context() {
        let context = ["name", "namespace", "uid"]
            .map(|key| (format!("csi.storage.k8s.io/pod.{key}"), format!("the {key}")));
        let pod = pod_of(&HashMap::from(context.clone())).expect("a pod");
        assert_eq!((pod.name.as_deref(), pod.uid.as_deref()), (Some("the name"), Some("the uid")));
        assert_eq!(pod_of(&HashMap::from([context[0].clone()])), None);
    }
}
