//! Tables at the end of a run.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::progress::{say, seconds};

/// Number of lines of an error that are shown below the table.
const ERROR_LINES: usize = 60;

/// One row.
#[derive(Debug)]
pub struct Row {
    /// Step or scenario.
    pub name: String,
    /// A note, or the error.
    pub result: Result<String, String>,
    /// How long it took.
    pub took: Duration,
}

/// Rows in the order in which they were added.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Row>,
}

impl Table {
    /// Runs one step, prints its outcome and adds a row. Returns its note, or `None` if it failed.
    pub fn run(&mut self, name: &str, work: impl FnOnce() -> Result<String>) -> Option<String> {
        say(format!("{name} ..."));
        let started = Instant::now();
        let result = work().map_err(|error| format!("{error:#}"));
        let took = started.elapsed();
        match &result {
            Ok(note) if note.is_empty() => say(format!("{name}: ok ({})", seconds(took))),
            Ok(note) => say(format!("{name}: ok, {note} ({})", seconds(took))),
            Err(error) => say(format!("{name}: FAILED ({})\n{error}", seconds(took))),
        }
        let note = result.clone().ok();
        self.rows.push(Row { name: name.to_owned(), result, took });
        note
    }

    /// Number of rows that failed.
    pub fn failed(&self) -> usize {
        self.rows.iter().filter(|row| row.result.is_err()).count()
    }

    /// Number of rows that passed.
    pub fn passed(&self) -> usize {
        self.rows.len() - self.failed()
    }

    /// The table as text, followed by the full errors: a reader who sees only the end of the output sees the cause.
    pub fn render(&self) -> String {
        let width = self.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0).max(4);
        let mut out = format!("{:width$}  {:6}  {:>8}  note\n", "step", "result", "seconds");
        for row in &self.rows {
            let (result, note) = match &row.result {
                Ok(note) => ("ok", note.as_str()),
                Err(error) => ("FAILED", error.lines().next().unwrap_or("")),
            };
            let line = format!("{:width$}  {result:6}  {:>8.1}  {note}", row.name, row.took.as_secs_f64());
            out.push_str(line.trim_end());
            out.push('\n');
        }
        for row in &self.rows {
            if let Err(error) = &row.result {
                let lines: Vec<&str> = error.lines().collect();
                let (head, tail) = lines.split_at(lines.len().min(ERROR_LINES / 2));
                let left_out = tail.len().saturating_sub(ERROR_LINES / 2);
                out.push_str(&format!("\n{}:\n{}\n", row.name, head.join("\n")));
                if left_out > 0 {
                    out.push_str(&format!("... {left_out} lines, which stand above ...\n"));
                }
                if left_out < tail.len() {
                    out.push_str(&format!("{}\n", tail[left_out..].join("\n")));
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_counts_results_and_shortens_long_errors() {
        let mut table = Table::default();
        assert_eq!(table.run("größe", || Ok("3 files".into())).as_deref(), Some("3 files"));
        assert_eq!(table.run("a longer name", || anyhow::bail!("it broke\nwith details")), None);
        assert_eq!((table.passed(), table.failed()), (1, 1));
        let text = table.render();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("größe          ok  "), "{text}");
        assert!(lines[2].contains("FAILED") && lines[2].ends_with("it broke"), "{text}");
        assert_eq!(lines[3..], ["", "a longer name:", "it broke", "with details"]);

        let long: Vec<String> = (0..ERROR_LINES + 5).map(|number| format!("line {number}")).collect();
        let mut table = Table::default();
        assert_eq!(table.run("long", || anyhow::bail!("{}", long.join("\n"))), None);
        let text = table.render();
        assert_eq!(text.lines().count(), 2 + 2 + ERROR_LINES + 1, "{text}");
        assert!(text.contains("line 29\n... 5 lines, which stand above ...\nline 35\n"), "{text}");
        assert!(text.ends_with(&format!("line {}\n", ERROR_LINES + 4)), "{text}");
    }
}
