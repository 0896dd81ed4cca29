//! Compares the API server's objects with the objects to be applied.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::Value;

use crate::desired::rules;

/// Whether `found` contains everything in `wanted`; it can contain more. Lists must have the same length: the API server
/// adds fields to their items, but no items.
pub(super) fn holds(found: &Value, wanted: &Value) -> bool {
    match (found, wanted) {
        (Value::Object(found), Value::Object(wanted)) => {
            wanted.iter().all(|(key, wanted)| match found.get(key) {
                Some(found) if matches!(key.as_str(), "limits" | "requests") => same_amounts(found, wanted),
                Some(found) => holds(found, wanted),
                None => is_nothing(wanted),
            })
        }
        (Value::Array(found), Value::Array(wanted)) => {
            found.len() == wanted.len() && found.iter().zip(wanted).all(|(f, w)| holds(f, w))
        }
        _ => found == wanted,
    }
}

/// As [`holds`], for quantities: the API server writes 1024Mi as 1Gi and 0.5 as 500m.
fn same_amounts(found: &Value, wanted: &Value) -> bool {
    let (Value::Object(found), Value::Object(wanted)) = (found, wanted) else { return holds(found, wanted) };
    let amount = |value: &Value| rules::amount(&Quantity(value.as_str()?.to_owned()));
    found.len() == wanted.len()
        && wanted.iter().all(|(key, wanted)| {
            found.get(key).is_some_and(|found| match (amount(found), amount(wanted)) {
                (Some(a), Some(b)) => (a - b).abs() <= a.abs().max(b.abs()) * 1e-12,
                _ => found == wanted,
            })
        })
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.values().all(is_nothing),
        Value::String(text) => text.is_empty(),
        Value::Bool(flag) => !flag,
        Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_added_by_the_api_server_are_no_difference() {
        let wanted = json!({ "a": [{ "b": 1 }], "none": [], "off": false });
        assert!(holds(&json!({ "a": [{ "b": 1, "added": true }], "c": 2 }), &wanted));
        assert!(!holds(&json!({ "a": [{ "b": 2 }] }), &wanted));
        assert!(!holds(&json!({ "a": [{ "b": 1 }, { "b": 1 }] }), &wanted));
        assert!(!holds(&json!({}), &wanted));
    }

    #[test]
    fn equal_quantities_in_other_notations_are_no_difference() {
        let of =
            |memory: &str, cpu: &str| json!({ "resources": { "limits": { "memory": memory, "cpu": cpu } } });
        assert!(holds(&of("1Gi", "500m"), &of("1024Mi", "0.5")));
        assert!(holds(&of("1536Mi", "700m"), &of("1.5Gi", "0.7")));
        assert!(!holds(&of("1Gi", "500m"), &of("1025Mi", "0.5")));
        assert!(!holds(&of("1Gi", "500m"), &json!({ "resources": { "limits": { "memory": "1Gi" } } })));
        assert!(!holds(&json!({ "resources": {} }), &of("1Gi", "1")));
    }
}
