//! The CustomResourceDefinitions as files.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

/// File name of a definition in the chart.
#[must_use]
pub fn file_name(crd: &CustomResourceDefinition) -> String {
    format!("{}.yaml", crd.spec.names.plural)
}

/// A definition as YAML.
///
/// # Errors
///
/// If the definition cannot be written as YAML. No definition that is generated from types causes this.
pub fn yaml(crd: &CustomResourceDefinition) -> anyhow::Result<String> {
    // Converts by way of JSON, which sorts the keys and omits empty fields of the Rust type.
    let mut value = serde_json::to_value(crd)?;
    sort(&mut value);
    Ok(format!(
        "# Generated from api/ by `forebay-operator crds`. Do not edit.\n{}",
        serde_saphyr::to_string(&value)?
    ))
}

/// All definitions as one stream of YAML documents.
///
/// # Errors
///
/// As [`yaml`].
pub fn stream() -> anyhow::Result<String> {
    let documents: Vec<String> =
        forebay_api::definitions().iter().map(yaml).collect::<anyhow::Result<_>>()?;
    Ok(documents.join("---\n"))
}

fn sort(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(map) => {
            let mut entries: Vec<_> = std::mem::take(map).into_iter().collect();
            entries.sort_by(|a, b| a.0.cmp(&b.0));
            for (key, mut inner) in entries {
                sort(&mut inner);
                map.insert(key, inner);
            }
            without_unsigned_format(map);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(sort),
        _ => {}
    }
}

/// The API server does not support unsigned formats and warns at every apply. Bounds express the same: every stored value
/// can be read.
fn without_unsigned_format(schema: &mut serde_json::Map<String, serde_json::Value>) {
    let most = match schema.get("format").and_then(serde_json::Value::as_str) {
        Some("uint16") => Some(u64::from(u16::MAX)),
        Some("uint32") => Some(u64::from(u32::MAX)),
        Some("uint64") => None,
        _ => return,
    };
    schema.insert("format".to_owned(), "int64".into());
    if let Some(most) = most {
        schema.entry("maximum").or_insert_with(|| most.into());
    }
}
