//! PodDisruptionBudgets: one of a cluster's servers can be evicted at a time, and one of its targets. With a single budget
//! for all clusters, a dead server of one cluster would block the drain of every healthy server of the others.

use forebay_api::names;
use serde_json::{Value, json};

use super::objects::labels;
use super::{Desired, Target, View, target};

fn budget(view: &View<'_>, component: &str) -> Value {
    let mut labels = labels(&view.name, None);
    labels["app.kubernetes.io/component"] = component.into();
    json!({
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": { "name": name(view, component), "namespace": view.settings.namespace, "labels": labels },
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": { "matchLabels": {
                (names::LABEL_CLUSTER): view.name,
                "app.kubernetes.io/component": component,
            } },
        },
    })
}

fn name(view: &View<'_>, component: &str) -> String {
    format!("{}-{component}s", view.name)
}

/// Adds a cluster's budgets, and removes those that are no longer needed.
pub fn objects(view: &View<'_>, desired: &mut Desired) {
    let mut wanted = Vec::new();
    if view.settings.disruption_budgets {
        wanted.push("server");
        // A target keeps serving its namespaces without its pod, but a node that is drained is often switched off next.
        wanted.extend((!target::nodes(view).is_empty()).then_some(names::COMPONENT_TARGET));
    }
    desired.objects.extend(wanted.iter().map(|component| budget(view, component)));
    let wanted: Vec<String> = wanted.iter().map(|component| name(view, component)).collect();
    let gone = view.observed.budgets.iter().filter(|name| !wanted.contains(name));
    desired.remove.extend(gone.map(|name| removal(name)));
}

/// Removes all budgets of the cluster.
pub fn tear_down(view: &View<'_>, desired: &mut Desired) {
    desired.remove.extend(view.observed.budgets.iter().map(|name| removal(name)));
}

fn removal(name: &str) -> Target {
    Target { kind: "PodDisruptionBudget", name: name.to_owned(), uid: None }
}
