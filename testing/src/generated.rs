//! Parts of documents that tests generate from the code, which is the source of the facts.
//!
//! A part is the text between the lines `<!-- generated: NAME -->` and `<!-- end: NAME -->`. A test compares it with the
//! text that the code generates; if [`REGENERATE`] is set, it writes the part instead.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// If this environment variable is set, parts are written instead of compared.
pub const REGENERATE: &str = "FOREBAY_REGENERATE";

/// Commands that every program has and that need no reference.
const TRIVIAL: [&str; 2] = ["help", "completions"];

/// Returns the root of the source tree.
#[must_use]
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("testing/ lies in the tree").to_owned()
}

/// Compares the part `name` of `document` (a path below the tree's root) with `text`, or writes it.
///
/// # Panics
/// If the document does not contain the part, or the part has a different text. The message names `package`, which
/// regenerates it.
pub fn part(document: &str, name: &str, text: &str, package: &str) {
    let path = root().join(document);
    let whole = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{document}: {error}"));
    let (begin, end) = (format!("<!-- generated: {name} -->\n"), format!("<!-- end: {name} -->"));
    let missing = || format!("{document} needs the lines {begin}{end}");
    let (before, rest) = whole.split_once(&begin).unwrap_or_else(|| panic!("{}", missing()));
    let (found, after) = rest.split_once(&end).unwrap_or_else(|| panic!("{}", missing()));
    let expected = format!("\n{}\n\n", text.trim());
    if std::env::var_os(REGENERATE).is_some() {
        if found != expected {
            // Another test may be reading the document at the same time.
            let new = path.with_extension("md.new");
            std::fs::write(&new, format!("{before}{begin}{expected}{end}{after}"))
                .and_then(|()| std::fs::rename(&new, &path))
                .unwrap_or_else(|error| panic!("{document}: {error}"));
        }
        return;
    }
    let differs = found.lines().zip(expected.lines()).find(|(found, expected)| found != expected);
    assert!(
        found == expected,
        "the part {name} of {document} is out of date ({differs:?}): {REGENERATE}=1 cargo test -p {package}"
    );
}

/// Returns the help of a program and of all its commands as Markdown. Of the program's own help, the text from `until` on is
/// omitted.
///
/// # Panics
/// If the program does not run.
#[must_use]
pub fn help(binary: &str, name: &str, until: Option<&str>) -> String {
    let mut text = String::new();
    describe(binary, &[name], until, &mut text);
    text
}

fn describe(binary: &str, path: &[&str], until: Option<&str>, text: &mut String) {
    let mut command = Command::new(binary);
    // The help includes the values of environment variables.
    command.env_clear().env("COLUMNS", "100").args(&path[1..]).arg("--help");
    let output = command.output().unwrap_or_else(|error| panic!("{binary}: {error}"));
    assert!(output.status.success(), "{path:?}: {}", String::from_utf8_lossy(&output.stderr));
    let shown = String::from_utf8(output.stdout).expect("UTF-8");
    let shown = until.and_then(|until| shown.split_once(until)).map_or(shown.as_str(), |(before, _)| before);
    let lines: Vec<&str> = shown.trim().lines().map(str::trim_end).collect();
    let _ = write!(text, "### {}\n\n```text\n{}\n```\n\n", path.join(" "), lines.join("\n"));
    for command in commands(shown) {
        describe(binary, &[path, &[command]].concat(), None, text);
    }
}

/// Returns the names below `Commands:`.
fn commands(help: &str) -> Vec<&str> {
    let names = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names = names.take_while(|line| !line.is_empty() && line.starts_with(' '));
    names
        .filter_map(|line| line.strip_prefix("  ").filter(|rest| !rest.starts_with(' '))?.split(' ').next())
        .filter(|name| !TRIVIAL.contains(name))
        .collect()
}

/// Escapes text for a table cell: `|` and, outside of code, `<`.
#[must_use]
pub fn cell(text: &str) -> String {
    let parts = text.replace('|', "\\|");
    let parts = parts.split('`').enumerate();
    let escaped = parts.map(|(n, part)| if n % 2 == 0 { part.replace('<', "&lt;") } else { part.to_owned() });
    escaped.collect::<Vec<_>>().join("`")
}

/// Converts metrics in the OpenMetrics text format to a table.
#[must_use]
pub fn metrics(text: &str) -> String {
    struct Family<'a> {
        name: &'a str,
        help: &'a str,
        kind: &'a str,
        labels: Vec<&'a str>,
    }
    let mut families: Vec<Family<'_>> = Vec::new();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            families.push(Family { name, help: help.trim_end_matches('.'), kind: "", labels: Vec::new() });
        }
        let Some(family) = families.last_mut() else { continue };
        if let Some((_, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            family.kind = kind;
        }
        if let Some((_, rest)) = line.split_once('{').filter(|_| !line.starts_with('#')) {
            let names = rest.split("=\"").filter_map(|before| before.rsplit(['"', ',', '{']).next());
            for name in names.filter(|name| *name != "le" && !name.contains(['}', ' '])) {
                if !family.labels.contains(&name) {
                    family.labels.push(name);
                }
            }
        }
    }
    let mut table = String::from("| metric | type | labels | meaning |\n|---|---|---|---|\n");
    for Family { name, help, kind, labels } in families {
        let total = if kind == "counter" { "_total" } else { "" };
        let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
        let _ = writeln!(table, "| `{name}{total}` | {kind} | {} | {} |", labels.join(", "), cell(help));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_become_a_table_with_their_labels() {
        let text = "# HELP a_size_bytes Size.\n# TYPE a_size_bytes gauge\n# UNIT a_size_bytes bytes\na_size_bytes{pool=\"p,q\"} 1.0\n\
                    # HELP b Requests.\n# TYPE b counter\nb_total{command=\"read\",status=\"x y\"} 1\n\
                    # HELP c Time.\n# TYPE c histogram\nc_bucket{le=\"+Inf\",command=\"read\"} 1\n# EOF\n";
        assert_eq!(
            metrics(text),
            "| metric | type | labels | meaning |\n|---|---|---|---|\n\
             | `a_size_bytes` | gauge | `pool` | Size |\n\
             | `b_total` | counter | `command`, `status` | Requests |\n\
             | `c` | histogram | `command` | Time |\n"
        );
    }

    #[test]
    fn table_cells_escape_markdown_syntax() {
        assert_eq!(cell("a|b <c> `<d>` <e>"), "a\\|b &lt;c> `<d>` &lt;e>");
    }

    #[test]
    fn subcommands_are_parsed_from_help_text() {
        let help = "About.\n\nUsage: x <COMMAND>\n\nCommands:\n  run          Run\n                 further\n  volume       Volumes\n  completions  C\n  \
                    help         H\n\nOptions:\n  -h\n";
        assert_eq!(commands(help), ["run", "volume"]);
    }
}
