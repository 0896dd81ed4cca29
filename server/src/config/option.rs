//! How an option of the configuration is explained.

/// One option of the configuration.
#[derive(Debug)]
pub struct OptionHelp {
    /// Section, or "" where it stands above all.
    pub section: &'static str,
    /// Key.
    pub key: &'static str,
    /// The default, or an example where there is none, as TOML.
    pub value: &'static str,
    /// Whether the sample sets it (rather than showing its default in a comment).
    pub set: bool,
    /// What it does.
    pub help: &'static str,
}
