//! Removes everything that must never be part of a bundle.

use serde_json::Value;

/// Replaces a removed value.
const REDACTED: &str = "REDACTED";

/// Parts of names that indicate a secret.
const SECRET_WORDS: [&str; 5] = ["password", "passwd", "secret", "token", "credential"];

fn sounds_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET_WORDS.iter().any(|word| name.contains(word))
}

/// Removes from a Kubernetes object everything that may contain secrets or is useless: the last-applied configuration (which
/// repeats the object as it was written), the field managers, and the values of variables with telling names. Secrets are
/// not read at all.
pub(super) fn object(object: &mut Value) {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("managedFields");
        if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
            annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
            for (name, value) in annotations {
                if sounds_secret(name) {
                    *value = REDACTED.into();
                }
            }
        }
    }
    variables(object);
}

/// Redacts `env` of containers, at any depth.
fn variables(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let is_secret = fields.get("name").and_then(Value::as_str).is_some_and(sounds_secret);
            if is_secret && fields.len() == 2 && fields.contains_key("value") {
                fields.insert("value".to_owned(), REDACTED.into());
            }
            fields.values_mut().for_each(variables);
        }
        Value::Array(items) => items.iter_mut().for_each(variables),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_are_redacted_and_other_fields_are_kept() {
        let mut pod = json!({
            "kind": "Pod",
            "metadata": {"name": "p", "managedFields": [{"manager": "x"}], "annotations": {
                "kubectl.kubernetes.io/last-applied-configuration": "{\"password\":\"hunter2\"}",
                "example.com/api-token": "hunter2", "example.com/note": "kept"}},
            "spec": {"containers": [{"name": "secret-agent", "image": "i", "env": [
                {"name": "DB_PASSWORD", "value": "hunter2"},
                {"name": "FROM", "valueFrom": {"secretKeyRef": {"name": "s", "key": "password"}}},
                {"name": "LEVEL", "value": "info"}]}]},
        });
        object(&mut pod);
        let text = pod.to_string();
        assert!(!text.contains("hunter2") && !text.contains("managedFields"), "{text}");
        assert_eq!(pod["metadata"]["annotations"]["example.com/note"], "kept");
        let env = &pod["spec"]["containers"][0]["env"];
        assert_eq!((&env[0]["value"], &env[2]["value"]), (&json!(REDACTED), &json!("info")));
        assert_eq!(env[1]["valueFrom"]["secretKeyRef"]["key"], "password");
    }
}
