//! The words that the style guide in CONTRIBUTING.md excludes stay out of documents, messages, comments and names of tests.

use std::fs;
use std::path::{Path, PathBuf};

const WORDS: [&str; 13] = [
    "whose",
    "told",
    "nobody",
    "somebody",
    "anybody",
    "everybody",
    "whoever",
    "whom",
    "anew",
    "mend",
    "mends",
    "mended",
    "mending",
];

/// Not checked: foreign and generated files, and the files that list the words.
const EXEMPT: [&str; 6] = [
    "CONTRIBUTING.md",
    "Cargo.lock",
    "LICENSE",
    "e2e/tests/words.rs",
    "fuzz/corpus/",
    "proto/proto/csi.proto",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("e2e/ lies in the tree")
}

/// Finds files below `folder`, relative to the tree's root.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let entry = entry.expect("an entry");
        let name = entry.file_name();
        let kind = entry.file_type().expect("a type");
        if kind.is_dir() && name != "target" && name != ".git" {
            files(&entry.path(), found);
        } else if kind.is_file() {
            found.push(entry.path().strip_prefix(root()).expect("below the root").to_owned());
        }
    }
}

/// Words in lower case. Names in snake case and camel case are split; names of constants are skipped.
fn words(line: &str) -> Vec<String> {
    let mut found = Vec::new();
    for token in line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
        if token.contains('_') && !token.contains(|c: char| c.is_ascii_lowercase()) {
            continue;
        }
        let mut word = String::new();
        let mut lower_before = false;
        for c in token.chars() {
            if !c.is_ascii_alphabetic() || (c.is_ascii_uppercase() && lower_before) {
                found.push(std::mem::take(&mut word));
            }
            if c.is_ascii_alphabetic() {
                word.push(c.to_ascii_lowercase());
            }
            lower_before = c.is_ascii_lowercase();
        }
        found.push(word);
    }
    found.retain(|word| !word.is_empty());
    found
}

/// The first excluded word or phrase of a line.
fn oddity(line: &str) -> Option<String> {
    // Whole tokens are compared: "kubelet in" and `let in_flight` are allowed.
    let tokens: Vec<&str> = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
    if tokens.windows(2).any(|two| two == ["let", "in"]) {
        return Some("let in".to_owned());
    }
    let words = words(line);
    for (at, word) in words.iter().enumerate() {
        let next: Vec<&str> = words[at + 1..].iter().take(4).map(String::as_str).collect();
        let admits = match word.as_str() {
            "lets" | "letting" => next.contains(&"in"),
            "let" => matches!(next[..], ["it" | "him" | "her" | "them" | "us", "in", ..]),
            _ => false,
        };
        let ends = matches!(word.as_str(), "end" | "ends" | "ended" | "ending");
        if WORDS.contains(&word.as_str()) || admits || ends && next.first() == Some(&"itself") {
            return Some([&[word.as_str()], &next[..]].concat().join(" "));
        }
    }
    None
}

#[test]
fn excluded_words_are_found_in_text_and_in_names() {
    for line in [
        "/// A pool whose server is gone.",
        "fn a_watcher_is_told() {",
        "struct BootedAnew;",
        "\"Nobody's: {told:?}\"",
        "the server ends itself soon",
        "/// Whoever closes last removes it.",
        "a target that lets this host in",
        "to let in; to let them in",
    ] {
        assert!(oddity(line).is_some(), "{line}");
    }
    for line in [
        "amend, recommend",
        "a kubelet in a pod: let in_flight = found;",
        "LIST_PAGE_TOLD",
        "for a in b { let it = a; }",
    ] {
        assert_eq!(oddity(line), None, "{line}");
    }
}

#[test]
fn tree_contains_no_excluded_words() {
    let mut all = Vec::new();
    files(root(), &mut all);
    let mut found = Vec::new();
    let mut checked = 0;
    for path in all {
        let name = path.to_str().expect("a name in UTF-8");
        if EXEMPT.iter().any(|exempt| name.starts_with(exempt)) {
            continue;
        }
        // Captured bytes are not text.
        let Ok(text) = fs::read_to_string(root().join(&path)) else { continue };
        checked += 1;
        for (number, line) in text.lines().enumerate() {
            if let Some(words) = oddity(line) {
                found.push(format!("{name}:{}: {words}", number + 1));
            }
        }
    }
    assert!(found.is_empty(), "the style guide in CONTRIBUTING.md excludes:\n{}", found.join("\n"));
    assert!(checked > 600, "only {checked} files were checked");
}
