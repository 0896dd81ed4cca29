//! Descriptions of the configuration's options.

/// One option of the configuration.
#[derive(Debug)]
pub struct OptionHelp {
    /// Section; "" for an option outside of all sections.
    pub section: &'static str,
    /// Key.
    pub key: &'static str,
    /// The default as TOML, or an example if there is no default.
    pub value: &'static str,
    /// Whether the sample sets it (rather than showing its default in a comment).
    pub set: bool,
    /// What it does.
    pub help: &'static str,
}
