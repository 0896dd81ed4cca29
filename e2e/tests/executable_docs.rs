//! Commands and manifests in the documents: programs, commands, options, files, chart values and fields must exist.
//!
//! Options are compared with docs/reference/cli.md, which tests of the programs compare with their real parsers.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// `check` is an alias that the help does not list.
const ALIASES: &[(&str, &str)] = &[("forebay-server check", "forebay-server check-config")];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("e2e/ lies in the tree").to_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The README and the pages that users follow.
fn pages() -> Vec<(String, String)> {
    let mut pages = vec!["README.md".to_owned()];
    for folder in ["docs/get-started", "docs/guides", "docs/reference"] {
        for entry in fs::read_dir(root().join(folder)).expect("a folder") {
            let name = entry.expect("an entry").file_name().into_string().expect("UTF-8");
            pages.push(format!("{folder}/{name}"));
        }
    }
    pages.into_iter().map(|page| (read(&page), page)).map(|(text, page)| (page, text)).collect()
}

/// Fenced blocks of a language.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    text.split(fence.as_str()).skip(1).filter_map(|rest| rest.split("```").next()).collect()
}

/// The simple commands of a script, as unquoted words. Operators, redirections and substitutions end a command.
fn commands(script: &str) -> Vec<Vec<String>> {
    let mut all = Vec::new();
    let mut words: Vec<String> = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let script = script.replace("\\\n", " ");
    let mut rest = script.chars().peekable();
    while let Some(c) = rest.next() {
        match (quote, c) {
            (Some(end), _) if c == end => quote = None,
            (Some('"'), '$') if rest.peek() == Some(&'(') => {
                rest.next();
                word = None;
                quote = None;
                all.push(std::mem::take(&mut words));
            }
            (Some(_), _) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => while rest.next_if(|next| *next != '\n').is_some() {},
            (None, ' ' | '\n' | '|' | '&' | ';' | '(' | ')' | '<' | '>') => {
                words.extend(word.take());
                if c != ' ' {
                    all.push(std::mem::take(&mut words));
                }
            }
            (None, _) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    all.push(words);
    all.retain(|words| !words.is_empty());
    all
}

/// The help of each command by its name, such as `forebay-server volume create`.
fn command_lines() -> BTreeMap<String, String> {
    let text = read("docs/reference/cli.md");
    let sections = text.split("\n### ").skip(1).filter_map(|section| section.split_once("\n\n```text\n"));
    sections
        .map(|(name, rest)| (name.to_owned(), rest.split("\n```").next().unwrap_or_default().to_owned()))
        .collect()
}

/// Whether `help` has the option, as a word.
fn has_option(help: &str, option: &str) -> bool {
    help.split(|c: char| c != '-' && !c.is_ascii_alphanumeric()).any(|word| word == option)
}

/// The error in a call of one of our programs, if any.
fn complain(program: &str, arguments: &[String], known: &BTreeMap<String, String>) -> Option<String> {
    let mut name = program.to_owned();
    let mut rest = arguments;
    while let [first, further @ ..] = rest {
        let longer = format!("{name} {first}");
        let longer = ALIASES
            .iter()
            .find(|(alias, _)| *alias == longer)
            .map_or(longer, |(_, meant)| (*meant).to_owned());
        if !known.contains_key(&longer) {
            break;
        }
        (name, rest) = (longer, further);
    }
    let help = known.get(&name)?;
    let is_trivial = |word: &String| word == "completions" || word == "help";
    if let Some(word) = rest.first().filter(|word| !word.starts_with('-') && !is_trivial(word))
        && help.contains("<COMMAND>")
    {
        return Some(format!("{name} has no command {word}"));
    }
    let options = rest.iter().filter(|word| word.starts_with('-') && word.len() > 1);
    let mut wrong =
        options.map(|word| word.split('=').next().unwrap_or(word)).filter(|option| !has_option(help, option));
    wrong.next().map(|option| format!("{name} has no option {option}"))
}

/// Whether `path` is a chart value `a.b.c`, with `\.` and `[0]` as in helm.
fn is_value(values: &Value, path: &str) -> bool {
    let mut at = values;
    for name in path.split('.') {
        let (name, is_list) = name.split_once('[').map_or((name, false), |(name, _)| (name, true));
        let Some(below) = at.get(name) else { return false };
        if is_list {
            return below.is_array();
        }
        at = below;
    }
    true
}

#[test]
fn commands_in_documents_use_existing_options_files_and_values() {
    let known = command_lines();
    assert!(known.len() > 20, "{:?}", known.keys());
    let values: Value = serde_saphyr::from_str(&read("charts/forebay/values.yaml")).expect("YAML");
    let mut wrong = Vec::new();
    let mut seen = 0;
    for (page, text) in pages() {
        for words in blocks(&text, "sh").iter().flat_map(|block| commands(block)) {
            let is_assignment = |word: &&String| {
                word.split_once('=')
                    .is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
            };
            let words: Vec<String> = words.iter().skip_while(is_assignment).cloned().collect();
            let Some((program, arguments)) = words.split_first() else { continue };
            let mut complaints = Vec::new();
            match program.rsplit('/').next().unwrap_or_default() {
                "kubectl" if arguments.first().is_some_and(|word| word == "forebay") => {
                    complaints.extend(complain("kubectl forebay", &arguments[1..], &known));
                }
                name if name.starts_with("forebay-") => complaints.extend(complain(name, arguments, &known)),
                "quickstart" | "test" if program.starts_with("./") => {
                    let script = read(program);
                    let options = arguments.iter().filter(|word| word.starts_with("--"));
                    complaints.extend(
                        options.filter(|o| !has_option(&script, o)).map(|o| format!("{program} has no {o}")),
                    );
                }
                "helm" => {
                    let settings =
                        arguments.iter().zip(arguments.iter().skip(1)).filter(|(flag, _)| *flag == "--set");
                    for (_, setting) in settings {
                        let path = setting.split('=').next().unwrap_or_default();
                        if !is_value(&values, path) {
                            complaints.push(format!("the chart has no value {path}"));
                        }
                    }
                }
                "kubectl" => {}
                _ if !program.starts_with("scripts/") => continue,
                _ => {}
            }
            let files = arguments.iter().chain([program]).filter(|word| {
                ["charts/", "manifests/", "scripts/", "docs/"].iter().any(|folder| word.starts_with(folder))
            });
            complaints.extend(
                files.filter(|file| !root().join(file).exists()).map(|file| format!("{file} does not exist")),
            );
            seen += 1;
            wrong.extend(
                complaints.into_iter().map(|complaint| format!("{page}: {}: {complaint}", words.join(" "))),
            );
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 50, "only {seen} commands were found");
}

/// The OpenAPI schema of a custom resource.
fn schema(plural: &str) -> Value {
    let definition: Value =
        serde_saphyr::from_str(&read(&format!("charts/forebay/crds/{plural}.yaml"))).expect("YAML");
    definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}

/// Finds the parts of `value` that the schema does not allow; a patch can be incomplete.
fn mistakes(schema: &Value, value: &Value, at: &str, is_patch: bool, found: &mut Vec<String>) {
    if let Some(values) = schema["enum"].as_array()
        && !values.contains(value)
    {
        found.push(format!("{at}: {value} is none of {values:?}"));
    }
    match (schema["type"].as_str(), value) {
        (Some("object"), Value::Object(map)) => {
            for (name, inner) in map {
                let path = format!("{at}.{name}");
                match schema["properties"].get(name).or_else(|| schema.get("additionalProperties")) {
                    Some(schema) => mistakes(schema, inner, &path, is_patch, found),
                    // Fields of the API server itself.
                    None if at.is_empty() && ["apiVersion", "kind", "metadata"].contains(&name.as_str()) => {}
                    None if schema["x-kubernetes-preserve-unknown-fields"] == true => {}
                    None if at == ".metadata" => {}
                    None => found.push(format!("{path} does not exist")),
                }
            }
            let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let missing = required.filter(|name| !is_patch && !map.contains_key(*name));
            found.extend(missing.map(|name| format!("{at}.{name} is missing")));
        }
        (Some("array"), Value::Array(items)) => {
            for (index, item) in items.iter().enumerate() {
                mistakes(&schema["items"], item, &format!("{at}[{index}]"), is_patch, found);
            }
        }
        (Some("string"), Value::String(_))
        | (Some("boolean"), Value::Bool(_))
        | (Some("number"), Value::Number(_)) => {}
        (Some("integer"), Value::Number(number)) if number.is_i64() || number.is_u64() => {}
        // Integer or string, and fields that a patch removes.
        (None, _) => {}
        (Some(_), Value::Null) if is_patch => {}
        (Some(expected), other) => found.push(format!("{at}: {other} is no {expected}")),
    }
}

#[test]
fn storage_clusters_in_documents_and_examples_match_the_crd() {
    let schema = schema("storageclusters");
    let mut texts: Vec<(String, String)> = pages()
        .into_iter()
        .flat_map(|(page, text)| {
            let found: Vec<String> = blocks(&text, "yaml").into_iter().map(str::to_owned).collect();
            found.into_iter().map(move |block| (page.clone(), block))
        })
        .filter(|(_, block)| block.contains("\nkind: StorageCluster\n"))
        .collect();
    for entry in fs::read_dir(root().join("manifests/examples")).expect("examples") {
        let path = entry.expect("an entry").path();
        texts.push((path.display().to_string(), fs::read_to_string(&path).expect("an example")));
    }
    let mut seen = 0;
    let mut found = Vec::new();
    for (place, text) in texts {
        let documents: Vec<Value> =
            serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{place}: {error}"));
        for document in documents.iter().filter(|document| document["kind"] == "StorageCluster") {
            let mut wrong = Vec::new();
            mistakes(&schema, document, "", false, &mut wrong);
            found.extend(wrong.into_iter().map(|wrong| format!("{place}: {wrong}")));
            seen += 1;
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
    assert!(seen > 6, "only {seen} StorageClusters");
}

#[test]
fn patches_in_documents_match_the_crds() {
    let mut found = Vec::new();
    let mut seen = 0;
    for (page, text) in pages() {
        for words in blocks(&text, "sh").iter().flat_map(|block| commands(block)) {
            let plural = ["storagecluster", "storagenode"]
                .into_iter()
                .find(|kind| words.iter().any(|word| word == kind));
            let (Some(kind), Some(at)) = (plural, words.iter().position(|word| word == "-p")) else {
                continue;
            };
            let patch: Value = serde_json::from_str(&words[at + 1])
                .unwrap_or_else(|error| panic!("{page}: {words:?}: {error}"));
            let mut wrong = Vec::new();
            mistakes(&schema(&format!("{kind}s")), &patch, "", true, &mut wrong);
            found.extend(wrong.into_iter().map(|wrong| format!("{page}: {}: {wrong}", words.join(" "))));
            seen += 1;
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
    assert!(seen >= 2, "only {seen} patches");
}

#[test]
fn mistakes_in_commands_and_resources_are_found() {
    let words =
        commands("A=1 forebay-server volume create x --sise 1 # why\nkubectl get pvc 'a b' | wc -l\n");
    assert_eq!(
        words,
        [
            vec!["A=1", "forebay-server", "volume", "create", "x", "--sise", "1"],
            vec!["kubectl", "get", "pvc", "a b"],
            vec!["wc", "-l"]
        ]
    );
    let known = command_lines();
    assert_eq!(
        complain("forebay-server", &words[0][2..], &known).as_deref(),
        Some("forebay-server volume create has no option --sise")
    );
    let unknown = ["frobnicate".to_owned()];
    assert_eq!(
        complain("kubectl forebay", &unknown, &known).as_deref(),
        Some("kubectl forebay has no command frobnicate")
    );
    let cluster = serde_json::json!({"kind": "StorageCluster", "spec": {"instances": "three", "colour": 1}});
    let mut wrong = Vec::new();
    mistakes(&schema("storageclusters"), &cluster, "", false, &mut wrong);
    assert!(
        wrong.iter().any(|wrong| wrong.contains(".spec.instances: \"three\" is no integer")),
        "{wrong:?}"
    );
    assert!(wrong.iter().any(|wrong| wrong == ".spec.colour does not exist"), "{wrong:?}");
}
