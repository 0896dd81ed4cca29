//! Horizontal bars as SVG. Colours are classes of a style sheet that follows the reader's preference for light or dark.

use std::fmt::Write;

/// A picture.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Chart {
    pub(crate) title: String,
    /// Lines below the title.
    pub(crate) notes: Vec<String>,
    pub(crate) sections: Vec<Section>,
}

/// Bars that share a scale.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Section {
    pub(crate) heading: String,
    /// The value of the longest bar or range.
    pub(crate) largest: f64,
    /// A value marked by a line.
    pub(crate) unity: Option<f64>,
    pub(crate) rows: Vec<Row>,
}

/// A bar.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    /// Text in front of it.
    pub(crate) name: String,
    /// Its server, which determines its colour.
    pub(crate) server: String,
    pub(crate) value: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
    /// Text behind it.
    pub(crate) label: String,
}

const WIDTH: f64 = 880.0;
const MARGIN: f64 = 20.0;
/// Where bars begin, and the length of the longest.
const BARS_X: f64 = 140.0;
const BARS_WIDTH: f64 = 380.0;
const ROW_HEIGHT: f64 = 20.0;
const BAR_HEIGHT: f64 = 13.0;
const HEADING_HEIGHT: f64 = 26.0;
const GAP: f64 = 14.0;

const STYLE: &str = "\
text { font: 12px system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-size: 16px; font-weight: 600 }
.heading { font-weight: 600 }
.note { fill: #59636e }
.page { fill: #ffffff; stroke: #d1d9e0 }
.axis { stroke: #818b98 }
.unity { stroke: #cf222e; stroke-dasharray: 4 3 }
.range { stroke: #1f2328 }
.forebay { fill: #0969da } .other { fill: #54aeff }
.samba { fill: #bc4c00 } .samba-sendfile { fill: #d4772b } .samba-uring { fill: #e9a15b }
.floor { fill: #8c959f }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc }
.note { fill: #9198a1 }
.page { fill: #0d1117; stroke: #3d444d }
.unity { stroke: #ff7b72 }
.range { stroke: #f0f6fc }
.forebay { fill: #4493f8 } .other { fill: #1f6feb }
.samba { fill: #db6d28 } .samba-sendfile { fill: #bd561d } .samba-uring { fill: #f0883e }
.floor { fill: #6e7681 }
}
";

/// The class of a server's bars.
fn class(server: &str) -> &str {
    match server {
        "forebay" | "samba" | "samba-sendfile" | "samba-uring" => server,
        floor if floor.starts_with("floor") => "floor",
        _ => "other",
    }
}

impl Chart {
    /// The whole document.
    pub(crate) fn svg(&self) -> String {
        let mut body = String::new();
        let mut y = MARGIN + 16.0;
        text(&mut body, "title", MARGIN, y, &self.title);
        for note in &self.notes {
            y += 18.0;
            text(&mut body, "note", MARGIN, y, note);
        }
        for section in &self.sections {
            y += GAP;
            section.draw(&mut body, y);
            y += section.height();
        }
        let height = y + MARGIN;
        let title = escaped(&self.title);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
             height=\"{height}\" role=\"img\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n\
             <rect class=\"page\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"6\"/>\n{body}</svg>\n",
            WIDTH - 1.0,
            height - 1.0
        )
    }
}

impl Section {
    fn height(&self) -> f64 {
        HEADING_HEIGHT + ROW_HEIGHT * self.rows.len() as f64
    }

    fn draw(&self, out: &mut String, top: f64) {
        text(out, "heading", MARGIN, top + 16.0, &self.heading);
        // If all values are zero, bars have no length.
        let unit = if self.largest > 0.0 { BARS_WIDTH / self.largest } else { 0.0 };
        let place = |value: f64| BARS_X + (value * unit).clamp(0.0, BARS_WIDTH);
        for (number, row) in self.rows.iter().enumerate() {
            let y = top + HEADING_HEIGHT + ROW_HEIGHT * number as f64;
            let (middle, baseline) = (y + BAR_HEIGHT / 2.0, y + BAR_HEIGHT - 2.0);
            let (end, low, high) = (place(row.value), place(row.low), place(row.high));
            text(out, "note", MARGIN, baseline, &row.name);
            let _ = writeln!(
                out,
                "<rect class=\"{}\" x=\"{BARS_X}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{BAR_HEIGHT}\">\
                 <title>{}: {}</title></rect>",
                class(&row.server),
                end - BARS_X,
                escaped(&row.name),
                escaped(&row.label)
            );
            if high - low >= 1.0 {
                line(out, "range", (low, middle), (high, middle));
                line(out, "range", (low, middle - 3.0), (low, middle + 3.0));
                line(out, "range", (high, middle - 3.0), (high, middle + 3.0));
            }
            text(out, "label", end.max(high) + 8.0, baseline, &row.label);
        }
        let (from, to) = (top + HEADING_HEIGHT - 3.0, top + self.height() - 3.0);
        line(out, "axis", (BARS_X, from), (BARS_X, to));
        if let Some(unity) = self.unity {
            line(out, "unity", (place(unity), from), (place(unity), to));
        }
    }
}

fn text(out: &mut String, class: &str, x: f64, y: f64, text: &str) {
    let _ = writeln!(out, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escaped(text));
}

fn line(out: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    let _ = writeln!(
        out,
        "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
        from.0, from.1, to.0, to.1
    );
}

/// Escapes text for an XML document.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            control if control.is_control() => out.push(' '),
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An element: its name and attributes, in document order.
    pub(crate) type Element = (String, Vec<(String, String)>);

    /// Parses a document as strictly as this module needs: every element ends, attributes are quoted and unique, no stray `<`
    /// or `&`. Panics if it is not well-formed.
    pub(crate) fn elements(document: &str) -> Vec<Element> {
        let (mut found, mut open, mut rest) = (Vec::new(), Vec::new(), document.trim_end());
        while !rest.is_empty() {
            let at = rest.find('<').expect("text after the last element");
            assert!(!open.is_empty() || at == 0, "text outside of the root");
            assert_entities(&rest[..at]);
            let end = rest.find('>').expect("a tag that does not end");
            let tag = &rest[at + 1..end];
            rest = &rest[end + 1..];
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name), "an end without its beginning");
                assert!(!open.is_empty() || rest.is_empty(), "something after the root");
                continue;
            }
            let (tag, is_empty) = tag.strip_suffix('/').map_or((tag, false), |tag| (tag, true));
            let (name, attributes) = tag.split_once(' ').unwrap_or((tag, ""));
            assert!(name.chars().all(|letter| letter.is_ascii_alphanumeric()), "{name:?}");
            found.push((name.to_owned(), attributes_of(attributes)));
            if !is_empty {
                open.push(name.to_owned());
            }
        }
        assert!(open.is_empty(), "{open:?} do not end");
        found
    }

    fn attributes_of(mut text: &str) -> Vec<(String, String)> {
        let mut found: Vec<(String, String)> = Vec::new();
        while !text.is_empty() {
            let (name, rest) = text.split_once("=\"").expect("an attribute with a quoted value");
            let (value, rest) = rest.split_once('"').expect("the end of a value");
            let name = name.trim_start();
            assert!(name.chars().all(|letter| letter.is_ascii_alphanumeric()), "{name:?}");
            assert!(found.iter().all(|(other, _)| other != name), "{name} twice");
            assert_entities(value);
            found.push((name.to_owned(), value.to_owned()));
            text = rest;
        }
        found
    }

    fn assert_entities(text: &str) {
        for piece in text.split('&').skip(1) {
            let known = ["amp;", "lt;", "gt;", "quot;"];
            assert!(known.iter().any(|entity| piece.starts_with(entity)), "a stray & in {text:?}");
        }
    }

    /// Class and width of each bar.
    pub(crate) fn bars(document: &str) -> Vec<(String, f64)> {
        let get = |attributes: &[(String, String)], name: &str| {
            attributes.iter().find(|(its, _)| its == name).map(|(_, value)| value.clone())
        };
        elements(document)
            .into_iter()
            .filter(|(name, _)| name == "rect")
            .map(|(_, attributes)| {
                let width = get(&attributes, "width").expect("a width");
                (get(&attributes, "class").expect("a class"), width.parse().expect("a number"))
            })
            .filter(|(class, _)| class != "page")
            .collect()
    }

    fn row(server: &str, value: f64) -> Row {
        let (name, label) = (format!("<{server}> & \"co\""), format!("{value}\n"));
        Row { name, server: server.to_owned(), value, low: value / 2.0, high: value, label }
    }

    #[test]
    fn chart_is_well_formed_and_bar_widths_are_proportional_to_values() {
        let rows = vec![row("forebay", 4.0), row("samba", 1.0), row("floor-read", 2.0), row("x", 0.0)];
        let section = Section { heading: "a < b".into(), largest: 4.0, unity: Some(1.0), rows };
        let empty =
            Section { heading: "nothing".into(), largest: 0.0, unity: None, rows: vec![row("samba", 0.0)] };
        let chart =
            Chart { title: "R & D".into(), notes: vec!["1 > 0".into()], sections: vec![section, empty] };
        let expected =
            [("forebay", 380.0), ("samba", 95.0), ("floor", 190.0), ("other", 0.0), ("samba", 0.0)];
        assert_eq!(bars(&chart.svg()), expected.map(|(class, width)| (class.to_owned(), width)));
    }

    #[test]
    #[should_panic(expected = "an end without its beginning")]
    fn elements_parser_rejects_overlapping_elements() {
        elements("<svg><g></svg></g>");
    }
}
