//! Invalid values are refused with the name of the field, before anything reaches a cluster.

use crate::helm::template;

/// `--set` argument → the expected text of the refusal.
const BAD: &[(&str, &str)] = &[
    ("nonsense=1", "additional properties 'nonsense' not allowed"),
    ("image.tga=latest", "at '/image': additional properties 'tga' not allowed"),
    ("csi.snapshotter.enabled=true", "at '/csi': additional properties 'snapshotter' not allowed"),
    (
        "image.repository=docker.io/forebay/forebay@",
        "at '/image/repository': 'docker.io/forebay/forebay@' does not match",
    ),
    ("image.tag=not a tag", "at '/image/tag': 'not a tag' does not match pattern"),
    ("image.digest=sha256:abc", "at '/image/digest': 'sha256:abc' does not match pattern"),
    (
        "image.pullPolicy=Sometimes",
        "at '/image/pullPolicy': value must be one of 'Always', 'IfNotPresent', 'Never'",
    ),
    ("imagePullSecrets[0]=registry", "at '/imagePullSecrets/0': got string, want object"),
    ("operator.replicas=0", "at '/operator/replicas': minimum: got 0, want 1"),
    ("operator.replicas=two", "at '/operator/replicas': got string, want integer"),
    ("operator.metricsPort=70000", "at '/operator/metricsPort': maximum"),
    ("operator.priorityClassName=High_Prio", "at '/operator/priorityClassName': 'High_Prio' does not match"),
    ("operator.tolerations[0].effect=Never", "at '/operator/tolerations/0/effect': value must be one of"),
    (
        "operator.resources.limits.memory=lots",
        "at '/operator/resources/limits/memory': 'lots' does not match",
    ),
    ("kubeletDir=var/lib/kubelet", "at '/kubeletDir': 'var/lib/kubelet' does not match"),
    ("kubeletDir=/var/lib/kubelet/", "at '/kubeletDir': '/var/lib/kubelet/' does not match"),
    ("listenAddress=localhost", "at '/listenAddress': 'localhost' does not match"),
    ("log.format=xml", "at '/log/format': value must be one of 'text', 'json'"),
    ("csi.rotation.olderThan=30", "at '/csi/rotation/olderThan'"),
    ("csi.controller.replicas=9", "at '/csi/controller/replicas': maximum: got 9, want 5"),
    (
        "csi.controller.provisioner.timeout=2",
        "at '/csi/controller/provisioner/timeout': got number, want string",
    ),
    (
        "csi.controller.resizer.featureGates.A=on",
        "at '/csi/controller/resizer/featureGates/A': got string, want boolean",
    ),
    ("csi.node.maxUnavailable=150%", "at '/csi/node/maxUnavailable': '150%' does not match"),
    // The kubelet gives up after 120 seconds.
    ("csi.node.mountDeadlineSeconds=300", "at '/csi/node/mountDeadlineSeconds': maximum: got 300, want 119"),
    ("server.seccompProfile=perhaps", "at '/server/seccompProfile': got string, want boolean"),
    ("networkPolicy.metricsFrom=all", "at '/networkPolicy/metricsFrom': got string, want array"),
    (
        "networkPolicy.egress.adminPorts[0]=0",
        "at '/networkPolicy/egress/adminPorts/0': minimum: got 0, want 1",
    ),
    (
        "monitoring.prometheusRule.poolFreePercent=0",
        "at '/monitoring/prometheusRule/poolFreePercent': minimum",
    ),
];

#[test]
fn invalid_values_are_refused_with_the_name_of_the_field() {
    for (value, says) in BAD {
        let refusal = match template(&["--set", value]) {
            Ok(_) => panic!("{value} was taken"),
            Err(error) => format!("{error:#}"),
        };
        assert!(refusal.contains(says), "{value}: {refusal}");
    }
}
