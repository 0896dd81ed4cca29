//! The StorageClasses of a cluster.

use forebay_api::cluster::{
    QuotaKind, ReclaimPolicy, StorageClassTemplate, StorageClusterSpec, Transport, VolumeProtection,
};
use forebay_api::{DRIVER, names};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::labels;
use crate::desired::{Desired, Target, View};

/// Whether a StorageClass was made for this cluster. A copy that a user has made of such a class has its labels, but another
/// name.
#[must_use]
pub fn is_ours(view: &View<'_>, class: &StorageClass) -> bool {
    let labels = class.labels();
    let is_copy = match class.annotations().get(names::ANNOTATION_CLASS) {
        Some(name) => *name != class.name_any(),
        // Earlier versions did not set it. A class that the cluster wants gets it.
        None => !view.cluster.spec.storage_classes.iter().any(|template| template.name == class.name_any()),
    };
    let is = |key: &str, value: &str| labels.get(key).is_some_and(|v| v == value);
    !is_copy
        && is(names::LABEL_MANAGED_BY, names::MANAGED_BY_OPERATOR)
        && is(names::LABEL_CLUSTER, &view.name)
        && is(names::LABEL_CLUSTER_NAMESPACE, &view.settings.namespace)
}

pub(super) fn storage_class(view: &View<'_>, template: &StorageClassTemplate, desired: &mut Desired) {
    let wanted = storage_class_object(view, template);
    if let Some(found) = view.observed.storage_classes.get(&template.name) {
        if !is_ours(view, found) {
            return;
        }
        // These fields are immutable, so the class is recreated.
        let found_now = json!({
            "parameters": found.parameters, "reclaimPolicy": found.reclaim_policy, "provisioner": found.provisioner,
            "mountOptions": found.mount_options.clone().unwrap_or_default(),
        });
        let differs = ["parameters", "reclaimPolicy", "provisioner", "mountOptions"]
            .iter()
            .any(|field| found_now[field] != wanted[field]);
        if differs {
            desired.remove.push(Target {
                kind: "StorageClass",
                name: template.name.clone(),
                uid: found.uid(),
            });
        }
    }
    desired.objects.push(wanted);
}

fn storage_class_object(view: &View<'_>, template: &StorageClassTemplate) -> Value {
    let namespace = &view.settings.namespace;
    let mut parameters = json!({
        (names::PARAMETER_CLUSTER): view.name,
        (names::PARAMETER_CLUSTER_NAMESPACE): namespace,
        "csi.storage.k8s.io/node-stage-secret-name": names::volume_secret("${pv.name}"),
        "csi.storage.k8s.io/node-stage-secret-namespace": namespace,
        // A further fsGroup on a node is mounted when its pod is published.
        "csi.storage.k8s.io/node-publish-secret-name": names::volume_secret("${pv.name}"),
        "csi.storage.k8s.io/node-publish-secret-namespace": namespace,
    });
    if let Some(backend) = &template.backend {
        parameters["backend"] = backend.clone().into();
    }
    let protection = template.protection.map(|p| match p {
        VolumeProtection::Optional => "optional",
        VolumeProtection::Sign => "sign",
        VolumeProtection::Seal => "seal",
    });
    if let Some(protection) = protection {
        parameters["protection"] = protection.into();
    }
    // The driver's own default is auto, which queries the instance, so only other settings are written.
    let transport = match view.cluster.spec.network.transport {
        Transport::Auto => None,
        Transport::RDMA => Some("rdma"),
        Transport::TCP => Some("tcp"),
    };
    if let Some(transport) = transport {
        parameters[names::PARAMETER_TRANSPORT] = transport.into();
    }
    if unlimited(&view.cluster.spec, template) {
        parameters["quota"] = "none".into();
    }
    for (key, value) in &template.parameters {
        parameters[key.as_str()] = value.clone().into();
    }
    let mut labels = labels(&view.name, None);
    labels[names::LABEL_CLUSTER_NAMESPACE] = namespace.clone().into();
    json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": template.name,
            "labels": labels,
            "annotations": {
                "storageclass.kubernetes.io/is-default-class": template.default.to_string(),
                (names::ANNOTATION_CLASS): template.name,
            },
        },
        "provisioner": DRIVER,
        "reclaimPolicy": match template.reclaim_policy {
            ReclaimPolicy::Delete => "Delete",
            ReclaimPolicy::Retain => "Retain",
        },
        "volumeBindingMode": "Immediate",
        "allowVolumeExpansion": true,
        "mountOptions": template.mount_options,
        "parameters": parameters,
    })
}

/// Whether volumes of a class can be unlimited because no pool that can hold them enforces a limit.
fn unlimited(spec: &StorageClusterSpec, template: &StorageClassTemplate) -> bool {
    let mut fitting =
        spec.backends.iter().filter(|b| template.backend.as_ref().is_none_or(|name| *name == b.name));
    fitting.all(|b| b.directory.as_ref().is_some_and(|d| d.quota == QuotaKind::None))
}
