//! Structured logs on standard error.

use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, LogSection};

/// Starts logging as configured; the environment variable `FOREBAY_LOG` overrides the level.
pub fn start(config: &LogSection) {
    let filter = std::env::var("FOREBAY_LOG")
        .ok()
        .and_then(|level| EnvFilter::try_new(level).ok())
        .unwrap_or_else(|| EnvFilter::new(&config.level));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // It fails only if a logger was set before; that logger is then used.
    let _ = match config.format {
        LogFormat::Text => lines.with_ansi(false).try_init(),
        LogFormat::Json => lines.json().flatten_event(true).try_init(),
    };
}
