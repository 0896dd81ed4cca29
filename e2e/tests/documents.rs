//! The documents: every link within the tree has a target.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("e2e/ lies in the tree").to_owned()
}

/// Every Markdown file of the tree, relative to its root.
fn documents() -> Vec<PathBuf> {
    let mut found = Vec::new();
    files(&root(), "md", &mut found);
    found
}

/// Finds files below `folder` that end in `.suffix`, relative to the tree's root.
fn files(folder: &Path, suffix: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && !["target", "shared", "corpus"].contains(&name) && !name.starts_with('.') {
            files(&path, suffix, found);
        } else if path.extension().is_some_and(|found| found == suffix) {
            found.push(path.strip_prefix(root()).expect("below the root").to_owned());
        }
    }
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
fn relative_links_in_documents_resolve() {
    let mut dead = Vec::new();
    let mut seen = 0;
    for document in documents() {
        let document = root().join(document);
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

/// Paths of pages that messages, comments and manifests mention in plain text.
fn pages_named_in(text: &str) -> BTreeSet<&str> {
    text.match_indices("docs/")
        .filter_map(|(at, _)| {
            let rest = &text[at..];
            let end =
                rest.find(|c: char| !c.is_ascii_alphanumeric() && !"/-._".contains(c)).unwrap_or(rest.len());
            let path = &rest[..end];
            path.find(".md").map(|suffix| &path[..suffix + 3])
        })
        .collect()
}

#[test]
fn every_page_named_in_a_message_comment_or_manifest_exists() {
    let mut all = Vec::new();
    for suffix in ["rs", "yaml", "txt", "md", "sh", "toml"] {
        files(&root(), suffix, &mut all);
    }
    let mut missing = Vec::new();
    let mut seen = 0;
    for path in all {
        let Ok(text) = fs::read_to_string(root().join(&path)) else { continue };
        for page in pages_named_in(&text) {
            seen += 1;
            if !root().join(page).is_file() {
                missing.push(format!("{}: {page}", path.display()));
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    assert!(seen > 20, "only {seen} pages were named");
}

#[test]
fn architecture_lists_every_file_that_may_hold_unsafe_code() {
    let mut all = Vec::new();
    files(&root(), "rs", &mut all);
    // Split, so that this test's own text does not match.
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
