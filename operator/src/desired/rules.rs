//! Contradictions that the schema and its CEL rules cannot express; they are reported in the condition `Valid`.

use std::collections::{BTreeMap, BTreeSet};

use forebay_api::cluster::StorageClassTemplate;
use forebay_api::names;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::View;
use super::objects::is_ours;

/// A problem with a cluster's spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The reason in CamelCase.
    pub reason: &'static str,
    /// What is wrong, and how to fix it.
    pub message: String,
    /// Whether nothing is changed until it is fixed. Otherwise everything else is done.
    pub fatal: bool,
}

/// Maximum length of a parameter's value in a StorageClass, in bytes.
const PARAMETER_MAX: usize = 4096;
/// Names of parameters that the operator sets.
const OWN_PARAMETERS: [&str; 4] =
    [names::PARAMETER_CLUSTER, names::PARAMETER_CLUSTER_NAMESPACE, "backend", "protection"];

/// Returns everything that is wrong with the spec.
#[must_use]
pub fn problems(view: &View<'_>) -> Vec<Problem> {
    let mut found = Vec::new();
    let spec = &view.cluster.spec;
    let mut fatal = |reason, message| found.push(Problem { reason, message, fatal: true });
    if let Some(image) = &spec.image
        && let Err(why) = image_reference(image)
    {
        fatal("InvalidImage", format!("spec.image {image:?}: {why}"));
    }
    for (n, secret) in spec.image_pull_secrets.iter().enumerate() {
        if !is_subdomain(&secret.name) {
            fatal(
                "InvalidImagePullSecret",
                format!("spec.imagePullSecrets[{n}].name {:?} is not a valid Secret name", secret.name),
            );
        }
    }
    for (key, value) in &spec.placement.node_selector {
        if !is_label_key(key) || !is_label_value(value) {
            fatal(
                "InvalidNodeSelector",
                format!("spec.placement.nodeSelector: {key:?}={value:?} is not a valid label"),
            );
        }
    }
    for (n, t) in spec.placement.tolerations.iter().enumerate() {
        if let Err(why) = toleration(t) {
            fatal("InvalidToleration", format!("spec.placement.tolerations[{n}]: {why}"));
        }
    }
    if let Some(spread) = &spec.placement.spread
        && !is_label_key(&spread.topology_key)
    {
        fatal(
            "InvalidTopologyKey",
            format!("spec.placement.spread.topologyKey {:?} is not a valid label key", spread.topology_key),
        );
    }
    if let Err(why) = directories(view) {
        fatal("OverlappingBackends", why);
    }
    if let Some(resources) = &spec.limits.resources
        && let Err(why) = quantities(resources)
    {
        fatal("InvalidResources", format!("spec.limits.resources: {why}"));
    }
    for class in &spec.storage_classes {
        if let Err(why) = storage_class(view, class) {
            fatal("InvalidStorageClass", format!("spec.storageClasses {:?}: {why}", class.name));
        }
    }
    if let Some(message) = times(view) {
        found.push(Problem { reason: "TimesAdjusted", message, fatal: false });
    }
    for class in &spec.storage_classes {
        if let Some(other) = view.observed.storage_classes.get(&class.name)
            && !is_ours(view, other)
        {
            found.push(Problem {
                reason: "StorageClassConflict",
                message: format!(
                    "StorageClass {} exists but was not created for this cluster, so the operator does not change it: delete it, or choose another name in spec.storageClasses",
                    class.name
                ),
                fatal: false,
            });
        }
    }
    found
}

/// Objects of earlier versions may have timeouts that lose data; these are not used.
fn times(view: &View<'_>) -> Option<String> {
    let takeover = &view.cluster.spec.takeover;
    if !view.movable() || !takeover.enabled {
        return None;
    }
    let mut adjusted = Vec::new();
    let after = takeover.after().as_secs();
    if after != u64::from(takeover.after_seconds) {
        adjusted.push(format!("takeover.afterSeconds {} is treated as {after}", takeover.after_seconds));
    }
    for backend in &view.cluster.spec.backends {
        let nvmeof = backend.nvmeof.as_ref().map(|b| b.loss_timeout_seconds);
        let Some(loss) = nvmeof.or(backend.target.as_ref().map(|b| b.loss_timeout_seconds)) else { continue };
        let used = takeover.loss_seconds(loss);
        if used != loss {
            adjusted
                .push(format!("lossTimeoutSeconds {loss} of backend {} is treated as {used}", backend.name));
        }
    }
    (!adjusted.is_empty()).then(|| {
        format!(
            "{}: an isolated server must stop before another one serves; set afterSeconds to at least 25, and \
             lossTimeoutSeconds to at most afterSeconds - 10",
            adjusted.join("; ")
        )
    })
}

/// Whether the text can be an image reference: `[host[:port]/]path[:tag][@digest]`.
fn image_reference(image: &str) -> Result<(), &'static str> {
    let (rest, digest) = image.split_once('@').map_or((image, None), |(r, d)| (r, Some(d)));
    if let Some(digest) = digest {
        let hex = digest.strip_prefix("sha256:").or_else(|| digest.strip_prefix("sha512:"));
        if !hex.is_some_and(|h| (h.len() == 64 || h.len() == 128) && h.bytes().all(|b| b.is_ascii_hexdigit()))
        {
            return Err("the digest after @ is not sha256:<64 hexadecimal digits>");
        }
    }
    let slash = rest.rfind('/').map_or(0, |s| s + 1);
    let (path, tag) = match rest[slash..].rfind(':') {
        Some(colon) => (&rest[..slash + colon], Some(&rest[slash + colon + 1..])),
        None => (rest, None),
    };
    if let Some(tag) = tag {
        let valid = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
        if tag.is_empty() || tag.len() > 128 || !tag.bytes().all(valid) || tag.starts_with(['.', '-']) {
            return Err("the tag after : is not 1 to 128 letters, digits, '_', '.' and '-'");
        }
    }
    let mut parts = path.split('/');
    let host = path
        .contains('/')
        .then(|| parts.clone().next())
        .flatten()
        .filter(|h| h.contains(['.', ':']) || *h == "localhost");
    if let Some(host) = host {
        parts.next();
        let valid = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b':' | b'[' | b']');
        if !host.bytes().all(valid) {
            return Err("the registry's name is not valid");
        }
    }
    let valid = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'_' | b'.' | b'-');
    let good = |p: &str| {
        !p.is_empty()
            && p.bytes().all(valid)
            && p.starts_with(|c: char| c.is_ascii_alphanumeric())
            && p.ends_with(|c: char| c.is_ascii_alphanumeric())
    };
    if !parts.all(good) {
        return Err("it is not an image: [registry/]path[:tag][@digest], with the path in lower case");
    }
    Ok(())
}

fn is_subdomain(name: &str) -> bool {
    let valid = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-');
    let edge = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    !name.is_empty()
        && name.len() <= 253
        && name.bytes().all(valid)
        && name.split('.').all(|part| part.starts_with(edge) && part.ends_with(edge))
}

fn is_label_value(value: &str) -> bool {
    let valid = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    let edge = |c: char| c.is_ascii_alphanumeric();
    value.is_empty()
        || value.len() <= 63 && value.bytes().all(valid) && value.starts_with(edge) && value.ends_with(edge)
}

fn is_label_key(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(p, n)| (Some(p), n));
    prefix.is_none_or(is_subdomain) && !name.is_empty() && is_label_value(name)
}

fn toleration(t: &k8s_openapi::api::core::v1::Toleration) -> Result<(), String> {
    let operator = t.operator.as_deref().unwrap_or("Equal");
    let key = t.key.as_deref().unwrap_or_default();
    let value = t.value.as_deref().unwrap_or_default();
    if !matches!(operator, "" | "Equal" | "Exists") {
        return Err(format!("operator {operator:?} is neither Equal nor Exists"));
    }
    if !matches!(
        t.effect.as_deref().unwrap_or_default(),
        "" | "NoSchedule" | "PreferNoSchedule" | "NoExecute"
    ) {
        return Err(format!("effect {:?} is not NoSchedule, PreferNoSchedule or NoExecute", t.effect));
    }
    if key.is_empty() && operator != "Exists" {
        return Err("without a key the operator must be Exists".to_owned());
    }
    if !key.is_empty() && !is_label_key(key) {
        return Err(format!("key {key:?} is not a valid taint key"));
    }
    if operator == "Exists" && !value.is_empty() {
        return Err("operator Exists takes no value".to_owned());
    }
    if !is_label_value(value) {
        return Err(format!("value {value:?} is not a valid taint value"));
    }
    if t.toleration_seconds.is_some() && t.effect.as_deref() != Some("NoExecute") {
        return Err("tolerationSeconds needs effect NoExecute".to_owned());
    }
    Ok(())
}

/// Two pools nested in one another would count the same space twice.
fn directories(view: &View<'_>) -> Result<(), String> {
    let paths: Vec<(&str, &str)> = view
        .cluster
        .spec
        .backends
        .iter()
        .filter_map(|b| Some((b.name.as_str(), b.directory.as_ref()?.path.as_str())))
        .collect();
    for (n, (one, a)) in paths.iter().enumerate() {
        for (other, b) in &paths[n + 1..] {
            let below =
                |outer: &str, inner: &str| inner.strip_prefix(outer).is_some_and(|r| r.starts_with('/'));
            if a == b || below(a, b) || below(b, a) {
                return Err(format!(
                    "backends {one} ({a}) and {other} ({b}) overlap: recreate the StorageCluster, and give each its own directory"
                ));
            }
        }
    }
    Ok(())
}

fn quantities(resources: &k8s_openapi::api::core::v1::ResourceRequirements) -> Result<(), String> {
    if resources.claims.as_ref().is_some_and(|c| !c.is_empty()) {
        return Err("claims are not supported: the servers' pods have no resourceClaims".to_owned());
    }
    let none = BTreeMap::new();
    let requests = resources.requests.as_ref().unwrap_or(&none);
    let limits = resources.limits.as_ref().unwrap_or(&none);
    for (key, quantity) in requests.iter().chain(limits) {
        let value =
            amount(quantity).ok_or_else(|| format!("{key} is {:?}, which is not a quantity", quantity.0))?;
        if value < 0.0 {
            return Err(format!("{key} is negative"));
        }
        let known =
            matches!(key.as_str(), "cpu" | "memory" | "ephemeral-storage") || key.starts_with("hugepages-");
        if !(known || key.contains('/') && is_label_key(key)) {
            return Err(format!("{key:?} is not a resource"));
        }
    }
    for (key, limit) in limits {
        if let Some(request) = requests.get(key)
            && amount(request) > amount(limit)
        {
            return Err(format!("the request for {key}, {}, exceeds its limit, {}", request.0, limit.0));
        }
    }
    // A server with less memory ends before it has served any client.
    if let Some(memory) = limits.get("memory")
        && amount(memory).is_some_and(|m| m < 64.0 * 1024.0 * 1024.0)
    {
        return Err(format!("a memory limit of {} is too low: at least 64Mi is needed", memory.0));
    }
    Ok(())
}

/// Returns the numeric value of a quantity.
#[must_use]
pub fn amount(quantity: &Quantity) -> Option<f64> {
    const UNITS: [(&str, f64); 15] = [
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("Pi", 1_125_899_906_842_624.0),
        ("Ei", 1_152_921_504_606_846_976.0),
        ("n", 1e-9),
        ("u", 1e-6),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("P", 1e15),
        ("E", 1e18),
    ];
    let text = quantity.0.as_str();
    let unit = UNITS.iter().find_map(|(suffix, factor)| text.strip_suffix(suffix).map(|n| (n, *factor)));
    let (number, factor) = unit.unwrap_or((text, 1.0));
    let valid = |b: u8| b.is_ascii_digit() || matches!(b, b'.' | b'+' | b'-' | b'e' | b'E');
    if !number.bytes().all(valid) {
        return None;
    }
    number.parse::<f64>().ok().filter(|n| n.is_finite()).map(|n| n * factor)
}

fn storage_class(view: &View<'_>, class: &StorageClassTemplate) -> Result<(), String> {
    if !is_subdomain(&class.name) {
        return Err("it is not a valid StorageClass name".to_owned());
    }
    let spec = &view.cluster.spec;
    if let Some(backend) = &class.backend
        && !spec.backends.iter().any(|b| b.name == *backend)
    {
        let known: BTreeSet<&str> = spec.backends.iter().map(|b| b.name.as_str()).collect();
        return Err(format!("backend {backend:?} is not in spec.backends: {known:?}"));
    }
    for (key, value) in &class.parameters {
        if OWN_PARAMETERS.contains(&key.as_str()) || key.starts_with("csi.storage.k8s.io/") {
            return Err(format!("parameter {key:?} is set by the operator: remove it from parameters"));
        }
        if key.is_empty() || value.len() > PARAMETER_MAX {
            return Err(format!("parameter {key:?} is empty or too long"));
        }
    }
    for option in &class.mount_options {
        let name = option.split('=').next().unwrap_or_default();
        if matches!(name, "password" | "password2" | "pass" | "username" | "user" | "credentials" | "cred") {
            return Err(format!(
                "mount option {name} is not allowed: every volume has its own credentials, in a Secret"
            ));
        }
        if option.is_empty() || option.contains([',', ' ', '\n', '\0']) {
            return Err(format!("mount option {option:?} is not a single option"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_references_are_validated() {
        for good in [
            "forebay",
            "forebay:0.1.0",
            "docker.io/forebay/forebay:0.1.0",
            "localhost:5000/a/b:tag",
            "registry.example.com/a__b/c-d@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        ] {
            assert_eq!(image_reference(good), Ok(()), "{good}");
        }
        for bad in [
            "",
            "UPPER/case",
            "a b",
            "a:",
            "a:.x",
            "a//b",
            "/a",
            "a/",
            "x@sha256:12",
            "a;rm -rf /",
            "$(id)",
            "a:b:c/d e",
        ] {
            assert!(image_reference(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn quantities_are_parsed() {
        let of = |text: &str| amount(&Quantity(text.to_owned()));
        assert_eq!(of("1"), Some(1.0));
        assert_eq!(of("500m"), Some(0.5));
        assert_eq!(of("1Gi"), Some(1_073_741_824.0));
        assert_eq!(of("1e3"), Some(1000.0));
        for bad in ["", "1Q", "Gi", "one", "1 Gi", "inf", "NaN", "0x10"] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }

    #[test]
    fn label_keys_are_validated() {
        for good in ["a", "topology.kubernetes.io/zone", "A_b.c"] {
            assert!(is_label_key(good), "{good}");
        }
        for bad in ["", "/", "a/", "/a", "a/b/c", "-a", "a b", "é"] {
            assert!(!is_label_key(bad), "{bad}");
        }
    }
}
