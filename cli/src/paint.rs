//! Colours on a terminal.

/// Adds colours, or does not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paint(bool);

/// The meaning of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Tone {
    #[default]
    Plain,
    /// A heading.
    Strong,
    /// Everything is in order.
    Good,
    /// It may be intended.
    Doubtful,
    /// It is not in order.
    Bad,
    /// It is less important.
    Faint,
}

impl Paint {
    pub(crate) fn new(on: bool) -> Self {
        Self(on)
    }

    pub(crate) fn text(self, tone: Tone, text: &str) -> String {
        // ECMA-48 8.3.117, select graphic rendition.
        let code = match tone {
            _ if !self.0 || text.is_empty() => return text.to_owned(),
            Tone::Plain => return text.to_owned(),
            Tone::Strong => "1",
            Tone::Good => "32",
            Tone::Doubtful => "33",
            Tone::Bad => "31",
            Tone::Faint => "2",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}
