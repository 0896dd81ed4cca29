//! The CustomResourceDefinitions: the chart's definitions match the types, and every field is documented.

use std::path::PathBuf;

use serde_json::Value;

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/forebay/crds"))
}

/// `FOREBAY_REGENERATE=1 cargo test -p forebay-operator --test definitions` regenerates the files.
#[test]
fn crds_of_the_chart_match_the_rust_types() {
    let regenerate = std::env::var_os("FOREBAY_REGENERATE").is_some();
    if regenerate {
        std::fs::create_dir_all(folder()).expect("the folder can be made");
    }
    let mut names = Vec::new();
    for crd in forebay_api::definitions() {
        let name = forebay_operator::crds::file_name(&crd);
        let path = folder().join(&name);
        let wanted = forebay_operator::crds::yaml(&crd).expect("YAML");
        if regenerate {
            std::fs::write(&path, &wanted).expect("the file can be written");
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(
            found,
            wanted,
            "{} has drifted: FOREBAY_REGENERATE=1 cargo test -p forebay-operator --test definitions",
            path.display()
        );
        names.push(name);
    }
    for entry in std::fs::read_dir(folder()).expect("the folder exists") {
        let name = entry.expect("readable").file_name().to_string_lossy().into_owned();
        assert!(names.contains(&name), "{name} in {} is made from no type", folder().display());
    }
}

fn undocumented(path: &str, schema: &Value, found: &mut Vec<String>) {
    for (name, property) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
        let path = format!("{path}.{name}");
        if property.get("description").and_then(Value::as_str).unwrap_or_default().trim().is_empty() {
            found.push(path.clone());
        }
        undocumented(&path, property, found);
    }
    for (key, mark) in [("items", "[]"), ("additionalProperties", "{}")] {
        if let Some(inner) = schema.get(key) {
            undocumented(&format!("{path}{mark}"), inner, found);
        }
    }
}

fn schemas() -> Vec<(String, Value)> {
    forebay_api::definitions()
        .into_iter()
        .flat_map(|crd| {
            let kind = crd.spec.names.kind.clone();
            crd.spec.versions.into_iter().map(move |version| {
                let schema = version.schema.and_then(|s| s.open_api_v3_schema).expect("a schema");
                (kind.clone(), serde_json::to_value(schema).expect("JSON"))
            })
        })
        .collect()
}

#[test]
fn every_field_is_documented() {
    let mut found = Vec::new();
    for (kind, schema) in schemas() {
        undocumented(&kind, &schema, &mut found);
    }
    assert!(found.is_empty(), "no description: {found:#?}");
}

#[test]
fn custom_resources_have_short_names_a_status_and_columns() {
    for crd in forebay_api::definitions() {
        let kind = &crd.spec.names.kind;
        assert!(!crd.spec.names.short_names.clone().unwrap_or_default().is_empty(), "{kind}");
        assert_eq!(crd.spec.names.categories.as_deref(), Some(&["forebay".to_owned()][..]), "{kind}");
        for version in &crd.spec.versions {
            assert!(version.subresources.as_ref().is_some_and(|s| s.status.is_some()), "{kind}");
            assert!(!version.additional_printer_columns.clone().unwrap_or_default().is_empty(), "{kind}");
        }
    }
}
