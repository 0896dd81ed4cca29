//! Derives Events from changes of the status.

use forebay_api::cluster::{InstancePhase, StorageClusterStatus};
use forebay_api::fabric::TakeoverStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::runtime::events::{Event, EventType};

use crate::limits::{EVENT_NOTE_MAX, EVENTS_PER_RECONCILE_MAX};

/// An Event about a cluster or one of its instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Whether an administrator must look into it.
    pub warning: bool,
    /// The reason in CamelCase.
    pub reason: &'static str,
    /// The note, a sentence.
    pub note: String,
    /// The instance, if it is about one.
    pub instance: Option<String>,
}

impl Notice {
    /// Converts the notice to an Event of the Events API.
    #[must_use]
    pub fn event(&self, namespace: &str) -> Event {
        let mut note = self.note.clone();
        if note.len() > EVENT_NOTE_MAX {
            let end = (0..=EVENT_NOTE_MAX).rev().find(|n| note.is_char_boundary(*n)).unwrap_or_default();
            note.truncate(end);
        }
        Event {
            type_: if self.warning { EventType::Warning } else { EventType::Normal },
            reason: self.reason.to_owned(),
            note: Some(note),
            action: "Reconcile".to_owned(),
            secondary: self.instance.as_ref().map(|name| k8s_openapi::api::core::v1::ObjectReference {
                api_version: Some("apps/v1".to_owned()),
                kind: Some("StatefulSet".to_owned()),
                name: Some(name.clone()),
                namespace: Some(namespace.to_owned()),
                ..Default::default()
            }),
        }
    }
}

/// Returns the changes that are relevant to an administrator.
#[must_use]
pub fn notices(before: &StorageClusterStatus, after: &StorageClusterStatus) -> Vec<Notice> {
    let mut found = Vec::new();
    let mut notice = |warning, reason, note: String, instance: Option<&str>| {
        found.push(Notice { warning, reason, note, instance: instance.map(str::to_owned) });
    };
    for instance in &after.instances {
        let was = before.instances.iter().find(|i| i.name == instance.name);
        let name = Some(instance.name.as_str());
        let moved = instance.takeover.as_ref().filter(|t| t.serving.is_some());
        let reported = was.and_then(|w| w.takeover.as_ref()).filter(|t| t.serving.is_some());
        if let Some(moved) = moved.filter(|m| reported.is_none_or(|t| t.epoch != m.epoch)) {
            notice(false, "TakenOver", times(&instance.name, moved), name);
        }
        if !instance.node.is_empty() && was.is_none_or(|w| w.node != instance.node) {
            notice(
                false,
                "InstancePlaced",
                format!("{} is placed on node {}", instance.name, instance.node),
                name,
            );
        }
        if was.is_some_and(|w| w.phase == instance.phase) {
            continue;
        }
        match instance.phase {
            InstancePhase::Ready => {
                notice(
                    false,
                    "InstanceReady",
                    format!("{} serves at {}", instance.name, instance.address),
                    name,
                );
            }
            InstancePhase::NotReady => {
                notice(true, "InstanceNotReady", format!("{}: {}", instance.name, instance.message), name);
            }
            InstancePhase::Draining => {
                notice(false, "InstanceDraining", format!("{}: {}", instance.name, instance.message), name);
            }
            InstancePhase::Pending | InstancePhase::Starting | InstancePhase::Removing => {}
        }
    }
    for instance in before.instances.iter().filter(|b| !after.instances.iter().any(|a| a.name == b.name)) {
        notice(false, "InstanceRemoved", format!("{} has been removed", instance.name), Some(&instance.name));
    }
    for condition in &after.conditions {
        let was = before.conditions.iter().find(|c| c.type_ == condition.type_);
        if was.is_some_and(|w| w.status == condition.status && w.reason == condition.reason) {
            continue;
        }
        let reported: Option<(bool, &'static str)> =
            match (condition.type_.as_str(), condition.status.as_str()) {
                ("Valid", "False") => Some((true, "SpecInvalid")),
                // An instance that can move has no place for a moment at first.
                ("InstancesPlaced", "False")
                    if condition.message.ends_with("its place is being recorded") =>
                {
                    None
                }
                ("InstancesPlaced", "False") => Some((true, "NoNodeFits")),
                ("TakeoverReady", "False") => Some((true, "NoTakeover")),
                ("TakeoverPaused", "True") => Some((true, "TakeoverPaused")),
                ("TakeoverPaused", "False") if was.is_some_and(|w| w.status == "True") => {
                    Some((false, "TakeoverResumed"))
                }
                ("CertificatesReady", "False") if was.is_some() => Some((true, "CertificatesNotReady")),
                ("Deletable", "False") => Some((true, "DeletionWaits")),
                ("Progressing", "True") if condition.reason == "RollingOut" => Some((false, "RollingOut")),
                ("Progressing", "True") if condition.reason == "ScaleDownRefused" => {
                    Some((true, "ScaleDownRefused"))
                }
                ("Progressing", "True") if condition.reason == "ApplyFailed" => Some((true, "ApplyFailed")),
                ("Ready", "True") if was.is_some_and(|w| w.status == "False") => Some((false, "Ready")),
                _ => None,
            };
        if let Some((warning, reason)) = reported {
            let note = if condition.message.is_empty() {
                if condition.type_ == "TakeoverPaused" {
                    "takeovers resume: the nodes renew their Leases".to_owned()
                } else {
                    "all instances serve".to_owned()
                }
            } else {
                condition.message.clone()
            };
            notice(warning, reason, note, None);
        }
    }
    found.truncate(EVENTS_PER_RECONCILE_MAX);
    found
}

/// Describes a takeover with the duration of each part.
fn times(instance: &str, moved: &TakeoverStatus) -> String {
    let between = |from: &Option<Time>, to: &Option<Time>| match (from, to) {
        (Some(from), Some(to)) => format!("{} s", to.0.duration_since(from.0).as_secs().max(0)),
        _ => "?".to_owned(),
    };
    format!(
        "{instance} serves on {} in epoch {}, moved from {} ({}): detected after {}, placed {} later, \
         serving {} later",
        moved.to,
        moved.epoch,
        moved.from,
        moved.reason,
        between(&moved.since, &moved.decided),
        between(&moved.decided, &moved.placed),
        between(&moved.placed, &moved.serving),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_api::cluster::InstanceStatus;

    fn status(phase: InstancePhase) -> StorageClusterStatus {
        let instance = InstanceStatus {
            name: "a-0".to_owned(),
            node: "n".to_owned(),
            phase,
            ..InstanceStatus::default()
        };
        StorageClusterStatus { instances: vec![instance], ..StorageClusterStatus::default() }
    }

    fn reasons(before: &StorageClusterStatus, after: &StorageClusterStatus) -> Vec<&'static str> {
        notices(before, after).into_iter().map(|n| n.reason).collect()
    }

    #[test]
    fn events_are_emitted_only_for_status_changes() {
        let none = StorageClusterStatus::default();
        assert_eq!(reasons(&none, &status(InstancePhase::Ready)), ["InstancePlaced", "InstanceReady"]);
        assert_eq!(
            reasons(&status(InstancePhase::Ready), &status(InstancePhase::NotReady)),
            ["InstanceNotReady"]
        );
        assert_eq!(reasons(&status(InstancePhase::Ready), &none), ["InstanceRemoved"]);
        assert!(reasons(&status(InstancePhase::Ready), &status(InstancePhase::Ready)).is_empty());
    }

    #[test]
    fn event_notes_are_truncated_at_character_boundaries() {
        let notice = Notice { warning: true, reason: "X", note: "ü".repeat(EVENT_NOTE_MAX), instance: None };
        assert!(notice.event("ns").note.expect("a note").len() <= EVENT_NOTE_MAX);
    }
}
