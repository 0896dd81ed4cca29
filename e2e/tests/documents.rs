//! The documents: every link that stays within the tree leads somewhere.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("e2e/ lies in the tree").to_owned()
}

fn documents() -> Vec<PathBuf> {
    let root = root();
    ["", "docs", "docs/adr", "bench"]
        .iter()
        .filter_map(|folder| fs::read_dir(root.join(folder)).ok())
        .flatten()
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|suffix| suffix == "md"))
        .collect()
}

/// Text between `](` and `)`, outside of code blocks.
fn links(text: &str) -> Vec<String> {
    let mut code = false;
    let mut found = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            code = !code;
        }
        if code {
            continue;
        }
        found.extend(line.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.to_owned())));
    }
    found
}

/// Anchors of headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    text.lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| {
            let words = line.trim_start_matches('#').trim().to_lowercase();
            words.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_')).collect::<String>()
        })
        .map(|words| words.replace(' ', "-"))
        .collect()
}

#[test]
fn every_link_within_the_tree_leads_somewhere() {
    let mut dead = Vec::new();
    let mut seen = 0;
    for document in documents() {
        let text = fs::read_to_string(&document).expect("a document");
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            seen += 1;
            let (path, anchor) =
                link.split_once('#').map_or((link.as_str(), None), |(path, anchor)| (path, Some(anchor)));
            let target = if path.is_empty() {
                document.clone()
            } else {
                document.parent().expect("a folder").join(path)
            };
            let lives = target.exists()
                && anchor.is_none_or(|anchor| {
                    fs::read_to_string(&target).is_ok_and(|text| anchors(&text).contains(anchor))
                });
            if !lives {
                dead.push(format!("{}: {link}", document.display()));
            }
        }
    }
    assert!(dead.is_empty(), "{}", dead.join("\n"));
    assert!(seen > 20, "only {seen} links were found");
}

/// Rust sources below `folder`, relative to the tree's root.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, found);
        } else if path.extension().is_some_and(|suffix| suffix == "rs") {
            found.push(path.strip_prefix(root()).expect("below the root").to_owned());
        }
    }
}

#[test]
fn architecture_lists_every_file_that_may_hold_unsafe_code() {
    let mut all = Vec::new();
    sources(&root(), &mut all);
    // Not the text of this very test.
    let attribute = ["allow(", "unsafe_code"].concat();
    let allowed: BTreeSet<String> = all
        .iter()
        .filter(|path| fs::read_to_string(root().join(path)).expect("a source").contains(&attribute))
        .map(|path| path.display().to_string())
        .collect();
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("the document");
    let (_, table) = text.split_once("| `unsafe` in | for |").expect("the table");
    let listed: BTreeSet<String> = table
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .flat_map(|line| line.split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect();
    assert_eq!(allowed, listed);
    assert!(allowed.len() > 5, "{allowed:?}");
}
