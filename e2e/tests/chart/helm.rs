//! helm on the chart of this tree.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use anyhow::{Context, Result};
use forebay_e2e::cache::Cache;
use forebay_e2e::kubernetes::kubectl::output_of;
use forebay_e2e::kubernetes::tools::{self, Tools};
use serde_json::Value;

/// The release's namespace if it does not matter.
pub(crate) const NAMESPACE: &str = "forebay-system";

static HELM: LazyLock<Tools> = LazyLock::new(|| {
    let cache = Cache::open().expect("the cache can be opened");
    Tools::prepare(&cache, &[tools::CLIENT]).expect("helm can be built")
});

/// The tree's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("e2e/ lies in the tree").to_owned()
}

/// The path of a file of these tests.
pub(crate) fn file(name: &str) -> PathBuf {
    root().join("e2e/tests/chart").join(name)
}

/// Runs helm. Returns its standard output or its error message.
pub(crate) fn run(arguments: &[&str]) -> Result<String> {
    run_at(None, arguments)
}

/// Like [`run`], but against a cluster.
pub(crate) fn run_at(kubeconfig: Option<&Path>, arguments: &[&str]) -> Result<String> {
    let mut helm = Command::new(HELM.path("helm"));
    // The user's own plugins, repositories and clusters are not used.
    let nowhere = Path::new(env!("CARGO_TARGET_TMPDIR")).join("helm");
    for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        helm.env(variable, &nowhere);
    }
    helm.env("KUBECONFIG", kubeconfig.unwrap_or(Path::new("/nonexistent")));
    helm.current_dir(root()).args(arguments);
    output_of(helm, b"").with_context(|| format!("helm {}", arguments.join(" ")))
}

/// The rendered chart, hooks included.
pub(crate) fn template(arguments: &[&str]) -> Result<String> {
    run(&[&["template", "forebay", "charts/forebay", "--namespace", NAMESPACE], arguments].concat())
}

/// The rendered chart with the values of a file of these tests.
pub(crate) fn template_with(values: &str) -> String {
    let path = file(&format!("values/{values}.yaml"));
    template(&["--values", path.to_str().expect("paths are UTF-8")]).expect("the chart renders")
}

/// The objects in YAML.
pub(crate) fn objects(yaml: &str) -> Vec<Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(yaml).expect("YAML");
    documents.into_iter().filter(|object| !object.is_null()).collect()
}

/// `Kind/name` or `Kind/namespace/name`.
pub(crate) fn identity(object: &Value) -> String {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
    let parts = [text("/kind"), text("/metadata/namespace"), text("/metadata/name")];
    parts.into_iter().flatten().collect::<Vec<_>>().join("/")
}
