//! Instances with pools on fabrics: their recorded nodes, when these change, and which pods have to be deleted for that.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;

use forebay_api::names;

use super::objects::{ANNOTATION_EPOCH, revision};
use super::record::{Move, Moved, Owner};
use super::rollout::template_is_known;
use super::status::{Said, pod_ready_since};
use super::{Desired, PodDeletion, Report, View, fabric, soon, target};
use crate::limits::LEASE_QUIET;
use crate::placement::{self, Reason, Seat, Verdict};
use crate::takeover::{Decision, Kubelet, PodSign, Rule, Signs, Why, decide, is_lost};

/// Returns the signs by which an instance on its recorded node is judged.
fn signs(view: &View<'_>, instance: &str, seat: &Seat) -> Signs {
    let node = find(view, &seat.node);
    let pod = view.observed.pods.get(instance);
    // A pod of an earlier epoch is ending, and says nothing about the current epoch.
    let present = pod.filter(|pod| !is_stale(view, instance, pod));
    Signs {
        now: view.observed.now,
        kubelet: Kubelet::of(node),
        silent: view.observed.silences.get(&seat.node).copied(),
        pod: PodSign::of(present),
        answers: matches!(view.observed.reports.get(instance), Some(Report::Answered(_))),
        cordoned: Signs::cordoned(node),
        asked: present.is_some_and(|pod| asked(pod).is_some()),
        moved: view.observed.record.moved.get(instance).map(|m| m.decided),
        promising: view.observed.pools.contains_key(instance) && targets_are_ready(view, instance),
        no_room: view.verdicts.iter().any(|v| v.node == seat.node && v.reason == Reason::Unschedulable),
        paused: view.pause().is_some(),
    }
}

/// Whether the bundled target exports all of the instance's namespaces. True if there are none.
fn targets_are_ready(view: &View<'_>, instance: &str) -> bool {
    let mut places = view.observed.record.places.iter().filter(|((of, _), _)| of == instance);
    places.all(|(_, place)| {
        let pod = format!("{}-0", target::name(&view.name, &place.node));
        view.observed.target_pods.iter().any(|p| p.name_any() == pod && pod_ready_since(p).is_some())
    })
}

fn find<'v>(view: &'v View<'_>, name: &str) -> Option<&'v Node> {
    view.observed.nodes.iter().map(AsRef::as_ref).find(|n| n.metadata.name.as_deref() == Some(name))
}

fn asked(pod: &Pod) -> Option<&str> {
    pod.annotations().get(names::ANNOTATION_MOVE).map(String::as_str)
}

fn rule(view: &View<'_>) -> Rule {
    let takeover = &view.cluster.spec.takeover;
    Rule { enabled: takeover.enabled, after: takeover.after() }
}

/// Whether a pod's epoch differs from the instance's.
#[must_use]
pub fn is_stale(view: &View<'_>, instance: &str, pod: &Pod) -> bool {
    view.movable() && pod.annotations().get(ANNOTATION_EPOCH) != Some(&view.epoch(instance).to_string())
}

/// Returns the nodes to which an instance can move: not its previous node, nor one that has missed a renewal, nor one that
/// has another instance. A spare in the same rack may have died with the node, and Kubernetes reports it as ready for
/// another half minute.
fn candidates(view: &View<'_>, from: Option<&str>, wanted: Option<&str>) -> Vec<Verdict> {
    let quiet = |node: &str| view.observed.silences.get(node).is_some_and(|silent| *silent >= LEASE_QUIET);
    let named = |v: &Verdict| wanted.is_none_or(|w| w == v.node);
    let verdicts =
        view.verdicts.iter().filter(|v| Some(v.node.as_str()) != from && !quiet(&v.node) && named(v));
    verdicts.cloned().collect()
}

fn choose(
    view: &View<'_>,
    instance: &str,
    seats: &BTreeMap<String, Seat>,
    candidates: &[Verdict],
) -> Option<String> {
    let mut others = seats.clone();
    others.remove(instance);
    let mut all: Vec<String> = others.keys().cloned().collect();
    all.push(instance.to_owned());
    let given = placement::assign(&view.cluster.spec, &all, &others, candidates);
    given.get(instance).map(|seat| seat.node.clone())
}

/// Returns the identity that an instance presents to its target from its next epoch on. An instance that is identified by
/// names alone stays so if it uses an array, because the array's administrator has allowed that host. The bundled target
/// allows both.
fn owner(view: &View<'_>, instance: &str, node: &str) -> Option<Owner> {
    let fabrics = || view.cluster.spec.backends.iter().filter(|b| b.is_on_fabric());
    let fresh = view.known_epoch(instance) == 0;
    let known = view.observed.record.owners.contains_key(instance);
    let bundled = fabrics().all(|b| b.target.is_some());
    let cluster_uid = view.settings.cluster_uid.clone();
    if cluster_uid.is_empty() || !(fresh || known || bundled) {
        return None;
    }
    Some(Owner { cluster_uid, machine_id: target::machine_id(view, node) })
}

/// Finds the places to be recorded and the pods to be deleted.
pub fn plan(view: &View<'_>, desired: &mut Desired, said: &mut Said) {
    if !view.movable() {
        return record_places(view, desired);
    }
    let mut seats = view.seats.clone();
    for instance in &view.instances {
        let missing = fabric::missing(view, instance);
        if !missing.is_empty() {
            said.homeless.insert(instance.clone(), missing.join("; "));
            continue;
        }
        let (places, unrecorded) = places(view, instance);
        match view.seats.get(instance) {
            // The instance is being removed, and its record has been removed already.
            None if view.leaving.contains(instance) => {}
            None => {
                // Its last node, if that is known: then the record was lost, and the epoch is not the first.
                let known = view.last_node(instance);
                let found = candidates(view, None, None);
                let back = known.filter(|k| found.iter().any(|v| v.node == *k && v.fits()));
                let free = |node: &String| !seats.values().any(|s| s.node == *node);
                let Some(node) = back.filter(free).or_else(|| choose(view, instance, &seats, &found)) else {
                    said.homeless.insert(instance.clone(), explain(&seats, &found));
                    continue;
                };
                let before = view.known_epoch(instance);
                seats.insert(instance.clone(), Seat { node: node.clone(), bound: true });
                desired.moves.push(Move {
                    owner: owner(view, instance, &node),
                    instance: instance.clone(),
                    node,
                    // It is not certain which node had the last epoch, so a new one begins.
                    epoch: before + 1,
                    places,
                    moved: None,
                });
            }
            Some(seat) => {
                if let Some(step) = next(view, instance, seat, &places, &mut seats, desired, said) {
                    desired.moves.push(step);
                } else if unrecorded {
                    let (node, epoch) = (seat.node.clone(), view.epoch(instance));
                    let instance = instance.clone();
                    desired.moves.push(Move { instance, node, epoch, places, moved: None, owner: None });
                } else {
                    end_stale(view, instance, desired);
                }
            }
        }
    }
    if !desired.moves.is_empty() || !desired.end.is_empty() {
        soon(desired);
    }
}

/// Returns an instance's locations on the bundled target, and whether some of them are not recorded.
fn places(view: &View<'_>, instance: &str) -> (BTreeMap<String, fabric::Place>, bool) {
    let backends = view.cluster.spec.backends.iter();
    let places: BTreeMap<_, _> =
        backends.filter_map(|b| Some((b.name.clone(), fabric::place(view, instance, &b.name)?))).collect();
    let recorded =
        |backend: &String| view.observed.record.places.get(&(instance.to_owned(), backend.clone()));
    let unrecorded = places.iter().any(|(backend, place)| recorded(backend) != Some(place));
    (places, unrecorded)
}

/// Instances that cannot move because they use a directory can still have namespaces of the bundled target.
fn record_places(view: &View<'_>, desired: &mut Desired) {
    for instance in &view.instances {
        let (places, unrecorded) = places(view, instance);
        if unrecorded {
            let (instance, node) = (instance.clone(), String::new());
            desired.moves.push(Move { instance, node, epoch: 0, places, moved: None, owner: None });
        }
    }
}

fn next(
    view: &View<'_>,
    instance: &str,
    seat: &Seat,
    places: &BTreeMap<String, fabric::Place>,
    seats: &mut BTreeMap<String, Seat>,
    desired: &mut Desired,
    said: &mut Said,
) -> Option<Move> {
    let signs = signs(view, instance, seat);
    let (why, since) = match decide(&signs, rule(view)) {
        Decision::Stay => return None,
        Decision::Wait(wait) => {
            desired.again = desired.again.min(wait.max(Duration::from_secs(1)));
            return None;
        }
        Decision::Paused(why) => {
            let pause = "takeovers are paused: see the condition TakeoverPaused";
            said.notes.insert(instance.to_owned(), format!("{}; {pause}", reason(why, seat)));
            soon(desired);
            return None;
        }
        Decision::Move { why, since } => (why, since),
    };
    // Planned moves are made one after another, while the other instances serve.
    if why.is_planned() {
        let others = view.instances.iter().filter(|i| *i != instance);
        let busy = others.clone().find(|i| {
            let pod = view.observed.pods.get(*i);
            PodSign::of(pod) != PodSign::Ready || pod.is_some_and(|pod| is_stale(view, i, pod))
        });
        if let Some(busy) = busy.or_else(|| desired.moves.first().map(|m| &m.instance)) {
            said.notes
                .insert(instance.to_owned(), format!("it moves to another node once {busy} serves again"));
            soon(desired);
            return None;
        }
    }
    let wanted = view.observed.pods.get(instance).and_then(asked).filter(|_| why == Why::Asked);
    let wanted = wanted.filter(|w| find(view, w).is_some());
    let found = candidates(view, Some(&seat.node), wanted);
    // Nodes that are known to be alive are preferred. Any other node must prove that it is alive before anything is
    // recorded.
    let known: Vec<Verdict> =
        found.iter().filter(|v| view.observed.silences.contains_key(&v.node)).cloned().collect();
    let chosen = choose(view, instance, seats, &known).or_else(|| choose(view, instance, seats, &found));
    let Some(node) = chosen else {
        let why = reason(why, seat);
        said.notes.insert(instance.to_owned(), format!("{why}, and {}", explain(seats, &found)));
        return None;
    };
    seats.insert(instance.to_owned(), Seat { node: node.clone(), bound: true });
    Some(Move {
        owner: owner(view, instance, &node),
        instance: instance.to_owned(),
        node,
        epoch: view.epoch(instance) + 1,
        places: places.clone(),
        moved: Some(Moved {
            why: why.as_str().to_owned(),
            from: seat.node.clone(),
            since,
            decided: view.observed.now,
        }),
    })
}

fn reason(why: Why, seat: &Seat) -> String {
    match why {
        Why::NodeCordoned => format!("its node {} is cordoned", seat.node),
        Why::Asked => "a move to another node was requested".to_owned(),
        Why::NodeLost | Why::NodeGone => format!("its node {} does not respond", seat.node),
        Why::ServerDown => format!("its server does not become ready on {}", seat.node),
    }
}

fn explain(seats: &BTreeMap<String, Seat>, candidates: &[Verdict]) -> String {
    format!("no node fits: {}", placement::explain(candidates, seats))
}

/// Ends the pod of an earlier epoch: deletes it, or force-deletes it if no kubelet is there that can end it. The new pod's
/// reservation fences off anything that the old one still runs. Does so only once the new pod would have the new epoch.
fn end_stale(view: &View<'_>, instance: &str, desired: &mut Desired) {
    let Some(pod) = view.observed.pods.get(instance).filter(|pod| is_stale(view, instance, pod)) else {
        return;
    };
    let known = revision(view, instance)
        .is_some_and(|wanted| template_is_known(view.observed.stateful_sets.get(instance), &wanted));
    let ending = pod.metadata.deletion_timestamp.is_some();
    let node = pod.spec.as_ref().and_then(|s| s.node_name.clone()).unwrap_or_default();
    let found = find(view, &node);
    let silent = view.observed.silences.get(&node).copied();
    let signs = Signs {
        now: view.observed.now,
        kubelet: Kubelet::of(found),
        silent,
        pod: PodSign::None,
        answers: false,
        cordoned: false,
        asked: false,
        moved: None,
        promising: false,
        no_room: false,
        paused: false,
    };
    // A pod that was not bound to a node runs nowhere.
    // If the node has not been observed since the move, the recorded reason for the move applies.
    let found_lost = view.observed.record.moved.get(instance).is_some_and(|moved| {
        moved.from == node && [Why::NodeLost, Why::NodeGone].iter().any(|why| why.as_str() == moved.why)
    });
    // While takeovers pause, a silent node is most likely alive: its pod is deleted, but not force-deleted, unless the
    // instance left that node because it was lost.
    let believed = view.pause().is_none() || found_lost || signs.kubelet == Kubelet::OutOfService;
    let lost =
        node.is_empty() || believed && is_lost(&signs, rule(view).after) || silent.is_none() && found_lost;
    if !known || ending && !lost {
        soon(desired);
        return;
    }
    let epoch = view.epoch(instance);
    desired.end.push(PodDeletion {
        name: pod.name_any(),
        instance: instance.to_owned(),
        uid: pod.uid().unwrap_or_default(),
        why: if lost {
            format!("{instance} continues in epoch {epoch}; node {node} cannot terminate its pod")
        } else {
            format!("{instance} continues in epoch {epoch} on another node")
        },
        force: lost,
    });
}
