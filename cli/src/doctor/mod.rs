//! `doctor`: reports what keeps Forebay from working, with the evidence and the fix.

mod cluster;
mod node;

use clap::ValueEnum;
use serde::Serialize;

use crate::paint::{Paint, Tone};
use crate::snapshot::Snapshot;

/// How findings are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// Severity of a finding, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Severity {
    /// Everything is right.
    Ok,
    /// Worth knowing, but possibly intended.
    Note,
    /// It works, but less well than it could.
    Warning,
    /// Something does not work.
    Error,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Finding {
    /// The subject: `cluster`, `storagecluster main`, `node worker-1`.
    pub(crate) subject: String,
    pub(crate) severity: Severity,
    /// The result in a sentence.
    pub(crate) summary: String,
    /// The evidence; empty if the summary suffices.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) evidence: String,
    /// The fix; empty if none is needed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) fix: String,
}

/// Findings about one subject.
struct Report {
    subject: String,
    findings: Vec<Finding>,
}

impl Report {
    fn about(subject: impl Into<String>) -> Self {
        Self { subject: subject.into(), findings: Vec::new() }
    }

    fn ok(&mut self, summary: impl Into<String>) {
        self.add(Severity::Ok, summary, "", "");
    }

    fn note(&mut self, summary: impl Into<String>, evidence: impl Into<String>, fix: impl Into<String>) {
        self.add(Severity::Note, summary, evidence, fix);
    }

    fn warning(&mut self, summary: impl Into<String>, evidence: impl Into<String>, fix: impl Into<String>) {
        self.add(Severity::Warning, summary, evidence, fix);
    }

    fn error(&mut self, summary: impl Into<String>, evidence: impl Into<String>, fix: impl Into<String>) {
        self.add(Severity::Error, summary, evidence, fix);
    }

    fn add(
        &mut self,
        severity: Severity,
        summary: impl Into<String>,
        evidence: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.findings.push(Finding {
            subject: self.subject.clone(),
            severity,
            summary: summary.into(),
            evidence: evidence.into(),
            fix: fix.into(),
        });
    }

    /// Reports objects that could not be read.
    fn unread(&mut self, what: &str, error: &str) {
        self.warning(
            format!("{what} could not be read"),
            error,
            "ask an administrator for permission to list them",
        );
    }
}

/// Runs all checks.
pub(crate) fn examine(snapshot: &Snapshot) -> Vec<Finding> {
    let mut findings = cluster::examine(snapshot);
    findings.extend(node::examine(snapshot));
    findings
}

pub(crate) fn has_errors(findings: &[Finding]) -> bool {
    findings.iter().any(|f| f.severity == Severity::Error)
}

/// Formats the findings by subject, with a line that counts them. Findings that are right are included only with `all`.
pub(crate) fn render(findings: &[Finding], all: bool, paint: Paint) -> String {
    let mut text = String::new();
    let mut subject = None;
    for finding in findings.iter().filter(|f| all || f.severity != Severity::Ok) {
        if subject != Some(&finding.subject) {
            if subject.is_some() {
                text.push('\n');
            }
            text.push_str(&paint.text(Tone::Strong, &finding.subject));
            text.push('\n');
            subject = Some(&finding.subject);
        }
        let (label, tone) = match finding.severity {
            Severity::Ok => ("ok     ", Tone::Good),
            Severity::Note => ("note   ", Tone::Faint),
            Severity::Warning => ("warning", Tone::Doubtful),
            Severity::Error => ("error  ", Tone::Bad),
        };
        text.push_str(&format!("  {}  {}\n", paint.text(tone, label), finding.summary));
        for (label, lines) in [("seen", &finding.evidence), ("fix", &finding.fix)] {
            for (number, line) in lines.lines().enumerate() {
                let label = if number == 0 { label } else { "" };
                text.push_str(&format!(
                    "           {}  {line}\n",
                    paint.text(Tone::Faint, &format!("{label:4}"))
                ));
            }
        }
    }
    if !text.is_empty() {
        text.push('\n');
    }
    let count = |severity| findings.iter().filter(|f| f.severity == severity).count();
    let several = |number: usize, what: &str| match number {
        1 => format!("1 {what}"),
        _ => format!("{number} {what}s"),
    };
    let errors = count(Severity::Error);
    let warnings = count(Severity::Warning);
    let verdict = format!(
        "{}, {}, {}; {} passed",
        several(errors, "error"),
        several(warnings, "warning"),
        several(count(Severity::Note), "note"),
        match count(Severity::Ok) {
            1 => "1 check".to_owned(),
            number => format!("{number} checks"),
        },
    );
    let tone = match (errors, warnings) {
        (0, 0) => Tone::Good,
        (0, _) => Tone::Doubtful,
        _ => Tone::Bad,
    };
    text.push_str(&paint.text(tone, &verdict));
    text.push('\n');
    text
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
