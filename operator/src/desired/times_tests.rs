//! Times that depend on each other: a kubelet's renewal, the silence of a node, how long a server continues without its
//! target.

use super::moves_tests::{config, fabric_running, nvmeof, silence};
use super::*;

/// A server that is cut off from the target and from Kubernetes, but not from its clients, ends before another server
/// acknowledges writes. The kubelet's last sign of life can be one renewal older than the cut.
#[test]
fn isolated_server_exits_before_the_takeover() {
    for (after, loss) in [(5, 30), (20, 30), (25, 14), (25, 30), (30, 30), (40, 30), (600, 600)] {
        let mut backends = nvmeof(2);
        backends[0]["nvmeof"]["lossTimeoutSeconds"] = json!(loss);
        let spec = json!({ "backends": backends, "takeover": { "afterSeconds": after } });
        let (cluster, mut observed) = fabric_running(spec);
        let found = desired(&cluster, &settings(), &observed);
        let configured = &config(&found, "a-0-config-1")["pool"][0]["nvmeof"]["loss_time_s"];
        let configured = u64::try_from(configured.as_integer().expect("a number")).expect("of seconds");
        assert!(configured >= 5 && configured <= loss, "{after} {loss}: {configured}");
        // The shortest silence on which the operator acts.
        let acts = (1..=700).find(|seconds| {
            silence(&mut observed, "n1", *seconds);
            !desired(&cluster, &settings(), &observed).moves.is_empty()
        });
        assert!(
            configured + 10 <= acts.expect("it acts"),
            "{after} {loss}: ends after {configured}, taken over at {acts:?}"
        );
    }
}

/// The same with the defaults.
#[test]
fn default_loss_timeout_ends_one_lease_renewal_before_the_takeover() {
    let (cluster, observed) = fabric_running(json!({}));
    let found = desired(&cluster, &settings(), &observed);
    let configured = config(&found, "a-0-config-1")["pool"][0]["nvmeof"]["loss_time_s"].as_integer();
    assert!(
        configured.expect("a number") + 10 <= i64::from(cluster.spec.takeover.after_seconds),
        "{configured:?}"
    );
    assert_eq!(condition(&found, "Valid").status, "True", "{:?}", condition(&found, "Valid"));
}

/// A kubelet renews its Lease every 10 s: a silence of two renewals can be a single request that hung.
#[test]
fn one_missed_lease_renewal_does_not_move_an_instance() {
    let (cluster, mut observed) = fabric_running(json!({ "takeover": { "afterSeconds": 5 } }));
    silence(&mut observed, "n1", 21);
    assert!(desired(&cluster, &settings(), &observed).moves.is_empty());
}

/// The kubelet does not restart a server that waits for its target, because the server would never finish waiting.
#[test]
fn startup_probe_covers_the_configured_connect_timeouts() {
    let mut backends = nvmeof(2);
    backends[0]["nvmeof"]["connectTimeoutSeconds"] = json!(3600);
    let second = backends[0].clone();
    backends.as_array_mut().expect("a list").push(second);
    backends[1]["name"] = json!("second");
    let (cluster, observed) = fabric_running(json!({ "backends": backends }));
    let found = desired(&cluster, &settings(), &observed);
    let set = found.objects.iter().find(|o| o["kind"] == "StatefulSet").expect("one");
    let probe = &set["spec"]["template"]["spec"]["containers"][0]["startupProbe"];
    let patience = probe["periodSeconds"].as_u64().expect("a period")
        * probe["failureThreshold"].as_u64().expect("a count");
    assert!(patience >= 2 * 2 * 3600 + 300, "{patience} s for two pools that may wait an hour each, twice");
}
