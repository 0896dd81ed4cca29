//! The engine has layers: a file imports only lower layers or its own folder, and no two files import each other except a
//! module and its children.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Files and folders of `src/engine`, from the lowest layer to the highest.
const LAYERS: &[&[&str]] = &[
    &["activity"],
    &[
        "access",
        "change_times",
        "channel_sequence",
        "config",
        "credits",
        "durable",
        "lost",
        "mail",
        "names",
        "pending_auth",
        "replay",
        "reports",
        "tally",
        "transforms",
    ],
    &["channels", "clients", "mailbox", "pipe"],
    &["file"],
    &["app_instances", "watches"],
    &["volume"],
    &["open"],
    &["creations", "kept_opens", "session"],
    &["lookup", "open_end"],
    &["server"],
    &["request"],
    &["commands"],
    &["connection"],
];

/// Modules by their path below the root, `engine::file::table` as `["file", "table"]`, with the modules that each imports.
type Modules = BTreeMap<Vec<String>, BTreeSet<Vec<String>>>;

/// The source without comments and without tests, which are at the end of a file.
fn code(source: &str) -> String {
    let source = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    source.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// The paths at the start of `text`, with `{}` expanded.
fn paths(text: &str, prefix: &[String], found: &mut Vec<Vec<String>>) {
    let text = text.trim_start();
    if let Some(group) = text.strip_prefix('{') {
        let (mut depth, mut start) = (0, 0);
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth > 0 => depth -= 1,
                ',' | '}' if depth == 0 => {
                    paths(&group[start..at], prefix, found);
                    start = at + 1;
                    if c == '}' {
                        return;
                    }
                }
                _ => {}
            }
        }
        return;
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    let mut path = prefix.to_vec();
    if !name.is_empty() {
        path.push(name.to_owned());
    }
    match rest.strip_prefix("::") {
        Some(rest) => paths(rest, &path, found),
        None => found.push(path),
    }
}

/// The paths below `root` that a module names in its crate.
fn named(code: &str, module: &[String], root: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let parent = &module[..module.len().saturating_sub(1)];
    let roots = [
        (format!("crate::{root}::"), &[][..]),
        ("super::".to_owned(), parent),
        ("self::".to_owned(), module),
    ];
    for (start, prefix) in roots {
        for (at, _) in code.match_indices(&start) {
            let before = code[..at].chars().next_back();
            if !before.is_some_and(|c| c.is_alphanumeric() || c == ':' || c == '_') {
                paths(&code[at + start.len()..], prefix, &mut found);
            }
        }
    }
    found
}

fn read(folder: &Path, prefix: &[String], sources: &mut BTreeMap<Vec<String>, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let module = [prefix, std::slice::from_ref(&name)].concat();
        if path.is_dir() {
            read(&path, &module, sources);
        } else if name == "mod" {
            sources.insert(prefix.to_vec(), fs::read_to_string(&path).unwrap());
        } else if !matches!(name.as_str(), "tests" | "models") {
            sources.insert(module, fs::read_to_string(&path).unwrap());
        }
    }
}

fn modules(sources: &BTreeMap<Vec<String>, String>, root: &str) -> Modules {
    let imports = |module: &Vec<String>, source: &String| {
        named(&code(source), module, root)
            .into_iter()
            .map(|mut path| {
                while !sources.contains_key(&path) && !path.is_empty() {
                    path.pop();
                }
                path
            })
            .filter(|path| path != module)
            .collect()
    };
    sources.iter().map(|(module, source)| (module.clone(), imports(module, source))).collect()
}

/// Violations of the layers: `LAYERS` names all files and folders, and imports only lead downwards.
fn out_of_layer(modules: &Modules, layers: &[&[&str]]) -> Vec<String> {
    let layer = |name: &str| layers.iter().position(|layer| layer.contains(&name));
    let mut wrong = Vec::new();
    for (module, imports) in modules {
        let Some(own) = module.first() else { continue };
        let Some(at) = layer(own) else {
            wrong.push(format!("{own} is in no layer"));
            continue;
        };
        for import in imports {
            let allowed =
                import.first().is_some_and(|other| other == own || layer(other).is_some_and(|l| l < at));
            if !allowed {
                wrong.push(format!("{} imports {}", module.join("::"), import.join("::")));
            }
        }
    }
    wrong
}

/// A cycle of imports between the modules of one folder. Each module stands for everything below it.
fn import_cycle(modules: &Modules) -> Option<Vec<String>> {
    let folders: BTreeSet<&[String]> = modules.keys().filter_map(|m| Some(m.split_last()?.1)).collect();
    for folder in folders {
        let child = |module: &Vec<String>| module.strip_prefix(folder).and_then(|rest| rest.first().cloned());
        let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (module, imports) in modules {
            let Some(from) = child(module) else { continue };
            let to = imports.iter().filter_map(child).filter(|to| *to != from);
            graph.entry(from.clone()).or_default().extend(to);
        }
        // Removes modules that import no remaining module, until none is left to remove.
        loop {
            let left: BTreeSet<String> = graph.keys().cloned().collect();
            graph.retain(|_, imports| imports.iter().any(|import| left.contains(import)));
            if graph.is_empty() {
                break;
            }
            if graph.len() == left.len() {
                return Some(left.into_iter().collect());
            }
        }
    }
    None
}

fn sources() -> BTreeMap<Vec<String>, String> {
    let mut sources = BTreeMap::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/engine"), &[], &mut sources);
    sources
}

#[test]
fn engine_modules_import_only_lower_layers() {
    let modules = modules(&sources(), "engine");
    assert!(modules.len() > 60, "the files were found");
    let wrong = out_of_layer(&modules, LAYERS);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let known: BTreeSet<&str> = modules.keys().filter_map(|m| m.first()).map(String::as_str).collect();
    for name in LAYERS.iter().copied().flatten() {
        assert!(known.contains(name), "{name} does not exist");
    }
}

#[test]
fn engine_modules_have_no_import_cycles() {
    let modules = modules(&sources(), "engine");
    assert_eq!(import_cycle(&modules), None, "a cycle of imports");
}

#[test]
fn modules_below_the_engine_do_not_import_it() {
    let mut sources = BTreeMap::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &[], &mut sources);
    for (module, source) in sources.iter().filter(|(module, _)| module[0] != "engine" && module[0] != "lib") {
        assert!(!code(source).contains("engine::"), "{} names the engine", module.join("::"));
    }
}

#[test]
fn the_checks_detect_upward_imports_and_cycles() {
    let files = [
        ("low", "use crate::engine::high::Thing; // crate::engine::comment"),
        (
            "high",
            "use crate::engine::{low, folder::{a::A, b}};\n#[cfg(test)]\nmod tests { use crate::engine::none; }",
        ),
        ("folder", "mod a;\nmod b;"),
        ("folder a", "use super::b::B;"),
        ("folder b", "fn f(a: &crate::engine::folder::a::A) {}"),
    ];
    let sources = files.map(|(module, source)| {
        (module.split(' ').map(str::to_owned).collect::<Vec<_>>(), source.to_owned())
    });
    let modules = modules(&BTreeMap::from(sources), "engine");
    let imports =
        |name: &str| modules[&vec![name.to_owned()]].iter().map(|m| m.join("::")).collect::<Vec<_>>();
    assert_eq!(imports("high"), ["folder::a", "folder::b", "low"]);
    assert_eq!(out_of_layer(&modules, &[&["low", "folder"], &["high"]]), ["low imports high"]);
    assert_eq!(out_of_layer(&modules, &[&["low", "high"]])[0], "folder is in no layer");
    assert_eq!(import_cycle(&modules).unwrap(), ["high", "low"]);
    let folder: Modules = modules.into_iter().filter(|(module, _)| module[0] == "folder").collect();
    assert_eq!(import_cycle(&folder).unwrap(), ["a", "b"]);
}
