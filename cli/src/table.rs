//! Tables with aligned columns.

use crate::paint::{Paint, Tone};

/// One cell.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    pub(crate) fn toned(text: impl Into<String>, tone: Tone) -> Self {
        Self { text: text.into(), tone }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self { text: text.into(), tone: Tone::Plain }
    }
}

/// A table in which each column is as wide as its widest cell.
pub(crate) struct Table {
    heads: Vec<&'static str>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    pub(crate) fn new(heads: &[&'static str]) -> Self {
        Self { heads: heads.to_vec(), rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    /// Formats the table as lines, each with a line feed.
    pub(crate) fn render(&self, paint: Paint) -> String {
        let heads = self.heads.iter().map(|h| Cell::toned(*h, Tone::Strong)).collect();
        let rows: Vec<&Vec<Cell>> = std::iter::once(&heads).chain(&self.rows).collect();
        let width = |column: usize| {
            rows.iter()
                .filter_map(|row| row.get(column))
                .map(|c| shown(&c.text).chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.heads.len()).map(width).collect();
        let mut text = String::new();
        for row in rows {
            let mut line = String::new();
            // The gap is only written before a cell, so that no line ends in a space.
            let mut gap = 0;
            for (cell, width) in row.iter().zip(&widths) {
                let shown = shown(&cell.text);
                line.push_str(&" ".repeat(gap));
                line.push_str(&paint.text(cell.tone, shown));
                gap = width - shown.chars().count() + 3;
            }
            text.push_str(&line);
            text.push('\n');
        }
        text
    }
}

/// Replaces an empty cell by a dash, so that every line has as many words as columns.
fn shown(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_regardless_of_colour_codes() {
        let mut table = Table::new(&["NAME", "READY"]);
        table.row(vec!["a".into(), Cell::toned("True", Tone::Good)]);
        table.row(vec!["größer".into(), "".into()]);
        assert_eq!(table.render(Paint::new(false)), "NAME     READY\na        True\ngrößer   -\n");
        let painted = table.render(Paint::new(true));
        assert!(painted.contains("\na        \x1b[32mTrue\x1b[0m\n"), "{painted:?}");
    }
}
