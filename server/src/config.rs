//! The configuration file: TOML, read and checked.

mod bytes;
mod dialect;
mod help;
mod instance;
mod nvmeof;
mod option;
mod sections;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::Path;

use serde::Deserialize;

use crate::advertise::Advertised;
use crate::limits::{EVENT_LOOPS_MAX, MEMORY_BYTES_MIN, STALL_SECONDS_MAX, WORKERS_MAX};
pub use crate::rdma::listener::Ports;
pub use bytes::Bytes;
pub use dialect::MinDialect;
pub use help::{OPTIONS, help, options, sample};
pub use instance::{InstanceAddress, InstanceSection};
pub use nvmeof::NvmeofSection;
pub use option::OptionHelp;
pub use sections::{
    ADMIN_CLIENTS, ADMIN_SOCKET, AdminSection, Encryption, HttpSection, IoEngine, LogFormat, LogSection,
    PoolQuota, PoolSection, Rdma, ServerSection, Signing,
};

/// Where the daemon looks for its configuration by default.
pub const DEFAULT_PATH: &str = "/etc/forebay/server.toml";

/// An error in a configuration: one line with its position and the fix.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(
        "{path}: {error}: give the configuration with --config, or make one with `forebay-server sample-config > {path}`"
    )]
    Read {
        /// Of the file.
        path: String,
        /// Why.
        error: std::io::Error,
    },
    /// It is not TOML, or has an unknown option or an option of the wrong type.
    #[error("{path}:{line}: {message}")]
    Syntax {
        /// Of the file.
        path: String,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// An option's value is invalid.
    #[error("{path}:{line}: {option}: {message}")]
    Value {
        /// Of the file.
        path: String,
        /// Line, from 1.
        line: usize,
        /// `section.key`.
        option: String,
        /// What is wrong and how to fix it.
        message: String,
    },
}

/// The whole configuration, checked.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// `[instance]`
    pub instance: InstanceSection,
    /// `[server]`
    pub server: ServerSection,
    /// `[admin]`
    pub admin: AdminSection,
    /// `[http]`
    pub http: HttpSection,
    /// `[log]`
    pub log: LogSection,
    /// `[[pool]]`
    pub pool: Vec<PoolSection>,
}

impl Config {
    /// The addresses that are announced to clients for mounting: the configured ones, and the addresses of the instance if
    /// those select none of this machine's, since the node's addresses do not move with the instance.
    #[must_use]
    pub fn advertised(&self) -> Vec<Advertised> {
        let mut entries = self.server.advertise.clone();
        if !entries.iter().any(Advertised::chooses) {
            let own = self.instance.addresses.iter().map(|address| Advertised::address(address.ip()));
            entries.extend(own);
        }
        entries
    }

    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let shown = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::Read { path: shown.clone(), error })?;
        Self::parse(&shown, &text)
    }

    /// Checks `text`, the contents of the file called `path`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(path: &str, text: &str) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text).map_err(|error| ConfigError::Syntax {
            path: path.to_owned(),
            line: error.span().map_or(1, |span| line_at(text, span.start)),
            message: error.message().replace('\n', " "),
        })?;
        config.check().map_err(|(section, nth, key, message)| ConfigError::Value {
            path: path.to_owned(),
            line: line_of(text, section, nth, key),
            option: format!("{}.{key}", section.trim_matches(['[', ']'])),
            message,
        })?;
        Ok(config)
    }

    fn check(&self) -> Result<(), (&'static str, usize, &'static str, String)> {
        let server = |key, message: &str| Err(("server", 0, key, message.to_owned()));
        let s = &self.server;
        if s.listen.is_empty() {
            return server("listen", "no address: set at least one, like \"[::]:445\"");
        }
        let named = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '-';
        if s.name.is_empty() || s.name.len() > 15 || !s.name.chars().all(named) {
            return server("name", "must be 1 to 15 characters from A-Z, 0-9 and '-'");
        }
        if !s.ntlm && s.keytab.as_os_str().is_empty() {
            return server("ntlm", "no user could log on: set server.keytab, or keep NTLM on");
        }
        if !s.keytab.as_os_str().is_empty() && !s.keytab.is_absolute() {
            return server("keytab", "must be an absolute path");
        }
        if !(64 << 10..=u64::from(forebay_smb::limits::IO_BYTES_MAX)).contains(&s.max_io.0) {
            return server("max_io", "must be from 64KiB to 8MiB");
        }
        if s.event_loops > EVENT_LOOPS_MAX {
            return server(
                "event_loops",
                &format!("must be at most {EVENT_LOOPS_MAX}; 0 means one per core"),
            );
        }
        if !(1..=WORKERS_MAX).contains(&s.workers) {
            return server("workers", &format!("must be from 1 to {WORKERS_MAX}"));
        }
        if s.memory.0 != 0 && s.memory.0 < MEMORY_BYTES_MIN {
            return server("memory", "must be at least 64MiB; 0 means a quarter of the machine's memory");
        }
        if !(1..=STALL_SECONDS_MAX).contains(&s.stall_timeout_s) {
            return server("stall_timeout_s", &format!("must be from 1 to {STALL_SECONDS_MAX}"));
        }
        self.check_admin()?;
        self.instance.check().map_err(|(key, message)| ("instance", 0, key, message))?;
        for address in &self.instance.addresses {
            if s.listen.iter().any(|listen| listen.ip() == address.ip()) {
                let ip = address.ip();
                return server(
                    "listen",
                    &format!("{ip} is assigned only while the pools are served: listen on \"[::]:445\""),
                );
            }
        }
        if !self.http.listen.is_empty() && self.http.listen.parse::<SocketAddr>().is_err() {
            return Err(("http", 0, "listen", "must be \"ip:port\", or \"\" for none".to_owned()));
        }
        if tracing_subscriber::EnvFilter::try_new(&self.log.level).is_err() {
            return Err(("log", 0, "level", "must be error, warn, info, debug or trace".to_owned()));
        }
        if self.pool.is_empty() {
            return Err((
                "[pool]",
                0,
                "path",
                "no pool: add a [[pool]] section with name and path".to_owned(),
            ));
        }
        let mut names = HashSet::new();
        let mut paths = HashSet::new();
        for (nth, pool) in self.pool.iter().enumerate() {
            let bad = |key, message: &str| Err(("[pool]", nth, key, message.to_owned()));
            if !is_label(&pool.name) {
                return bad(
                    "name",
                    "must be 1 to 63 characters from a-z, 0-9 and '-', and begin and end with a letter or digit",
                );
            }
            if !names.insert(&pool.name) {
                return bad("name", "another pool has this name: use a different one");
            }
            if !pool.path.is_absolute() {
                return bad("path", "must be an absolute path");
            }
            if !paths.insert(&pool.path) {
                return bad("path", "another pool has this directory: use a different one");
            }
            if !(pool.overcommit.is_finite() && (0.0..=1000.0).contains(&pool.overcommit)) {
                return bad("overcommit", "must be a number from 0 to 1000");
            }
            if let Some(nvmeof) = &pool.nvmeof {
                if pool.write_through {
                    return bad(
                        "write_through",
                        "is for pools in directories: set pool.nvmeof.write_through instead",
                    );
                }
                let before = self.pool[..nth].iter().filter(|pool| pool.nvmeof.is_some()).count();
                let wrong = nvmeof.check(&self.instance);
                wrong.map_err(|(key, message)| ("pool.nvmeof", before, key, message))?;
            }
        }
        Ok(())
    }

    fn check_admin(&self) -> Result<(), (&'static str, usize, &'static str, String)> {
        let wrong = |key, message: &str| Err(("admin", 0, key, message.to_owned()));
        let a = &self.admin;
        if !a.socket.is_absolute() {
            return wrong("socket", "must be an absolute path");
        }
        if a.listen.is_empty() {
            return Ok(());
        }
        if a.listen.parse::<SocketAddr>().is_err() {
            return wrong("listen", "must be \"ip:port\", or \"\" for none");
        }
        // A client that reaches the admin API can delete every volume: over a network it is reachable only with TLS.
        for (key, path) in [("certificate", &a.certificate), ("key", &a.key), ("client_ca", &a.client_ca)] {
            if path.as_os_str().is_empty() {
                return wrong(
                    key,
                    "admin.listen is served over mutual TLS only: set the PEM file, or remove admin.listen",
                );
            }
            if !path.is_absolute() {
                return wrong(key, "must be an absolute path");
            }
        }
        if a.allowed_clients.is_empty() || a.allowed_clients.iter().any(String::is_empty) {
            return wrong("allowed_clients", "must name at least one client, and no name may be empty");
        }
        Ok(())
    }
}

/// Whether `text` is 1..=63 of `[a-z0-9-]`, beginning and ending with a letter or digit.
#[must_use]
pub fn is_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=crate::limits::VOLUME_ID_CHARS_MAX).contains(&text.len())
        && text.chars().all(inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn line_at(text: &str, position: usize) -> usize {
    1 + text.get(..position).unwrap_or(text).matches('\n').count()
}

/// The line of `key` in the `nth` section called `section`; without such a key, the line of the section; otherwise 1.
fn line_of(text: &str, section: &str, nth: usize, key: &str) -> usize {
    let header = format!("[{section}]");
    let mut seen = 0;
    let mut section_line = None;
    for (line, content) in (1..).zip(text.lines()) {
        let content = content.trim_start();
        if content.starts_with('[') {
            if section_line.is_some() {
                break;
            }
            if content.trim_end().starts_with(&header) {
                if seen == nth {
                    section_line = Some(line);
                }
                seen += 1;
            }
        } else if section_line.is_some()
            && content.strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with('='))
        {
            return line;
        }
    }
    section_line.unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Config::parse("server.toml", text).expect_err("it is wrong").to_string()
    }

    #[test]
    fn sample_configuration_equals_the_defaults() {
        let config = Config::parse("sample", &sample()).expect("the sample is right");
        assert_eq!(config.pool[0].path, Path::new("/var/lib/forebay"));
        assert_eq!(config.pool[0].quota, PoolQuota::Project);
        // Commented-out values are the defaults: uncommented, they must give the same result.
        let all: String = sample()
            .lines()
            .take_while(|line| *line != "# [pool.nvmeof]")
            .map(|line| match line.strip_prefix("# ") {
                Some(option) if OPTIONS.iter().any(|o| option.starts_with(&format!("{} = ", o.key))) => {
                    option
                }
                _ => line,
            })
            .fold(String::new(), |text, line| text + line + "\n");
        let explicit = Config::parse("sample", &all).expect("the defaults are right");
        assert_eq!(format!("{explicit:?}"), format!("{config:?}"));
        assert!(options().all(|o| help().contains(o.key) && o.help.len() > 10));
    }

    /// The keys that the parser accepts in a section, taken from its error about an unknown key.
    fn accepted_keys(section: &str) -> std::collections::BTreeSet<String> {
        let text = match section {
            "" => "no_such_key = 1\n".to_owned(),
            "pool" => "[[pool]]\nno_such_key = 1\n".to_owned(),
            "pool.nvmeof" => "[[pool]]\n[pool.nvmeof]\nno_such_key = 1\n".to_owned(),
            section => format!("[{section}]\nno_such_key = 1\n"),
        };
        let message = error(&text);
        let (_, expected) = message.split_once("expected ").expect("the error lists the keys");
        expected.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    #[test]
    fn every_accepted_key_is_documented() {
        let mut sections = accepted_keys("");
        assert!(sections.contains("pool") && sections.contains("server"), "{sections:?}");
        sections.insert("pool.nvmeof".to_owned());
        for section in sections {
            let explained: std::collections::BTreeSet<String> = options()
                .filter(|option| option.section.trim_matches(['[', ']']) == section)
                .map(|option| option.key.to_owned())
                .collect();
            let mut accepted = accepted_keys(&section);
            // It is a separate section.
            accepted.remove("nvmeof");
            assert_eq!(explained, accepted, "[{section}]");
        }
    }

    #[test]
    fn sample_nvmeof_section_equals_the_defaults() {
        let text: String = sample()
            .lines()
            .skip_while(|line| *line != "# [pool.nvmeof]")
            .filter_map(|line| {
                let line = line.strip_prefix("# ")?;
                let option = nvmeof::OPTIONS.iter().any(|o| line.starts_with(&format!("{} = ", o.key)));
                (option || line == "[pool.nvmeof]").then(|| format!("{line}\n"))
            })
            .collect();
        let head = "[instance]\nname = \"a\"\nepoch = 1\n[[pool]]\nname = \"p\"\npath = \"/p\"\n".to_owned();
        let least: String =
            text.lines().filter(|line| nvmeof::is_required(line)).fold(String::new(), |t, l| t + l + "\n");
        let explicit = Config::parse("sample", &(head.clone() + &text)).expect("the sample is right");
        let least = Config::parse("sample", &(head + &least)).expect("the required keys are enough");
        assert_eq!(format!("{explicit:?}"), format!("{least:?}"));
    }

    #[test]
    fn errors_name_the_file_line_option_and_fix() {
        let pool = "[[pool]]\nname = \"p\"\npath = \"/p\"\n";
        assert_eq!(
            error(&format!("{pool}\n[server]\nworkerz = 3\n")).split(", expected").next(),
            Some("server.toml:6: unknown field `workerz`")
        );
        assert!(error(&format!("{pool}[server]\nlisten = 5\n")).starts_with("server.toml:5: "));
        assert!(error("[server\n").starts_with("server.toml:1: "));
        assert_eq!(
            error(&format!("{pool}\n[server]\nname = \"x\"\nworkers = 0\n")),
            "server.toml:6: server.name: must be 1 to 15 characters from A-Z, 0-9 and '-'"
        );
        assert_eq!(
            error(&format!("{pool}[[pool]]\nname = \"q\"\npath = \"relative\"\n")),
            "server.toml:6: pool.path: must be an absolute path"
        );
        assert!(error(&format!("{pool}{pool}")).contains("server.toml:5: pool.name: another pool"));
        assert!(error("").contains("no pool: add a [[pool]] section"));
        assert!(error(&format!("{pool}overcommit = -1\n")).contains("server.toml:4: pool.overcommit"));
        assert!(error(&format!("{pool}quota = \"soft\"\n")).contains("server.toml:4: "));
        let missing = Config::read(Path::new("/nowhere/server.toml")).expect_err("not there").to_string();
        assert!(missing.contains("/nowhere/server.toml") && missing.contains("sample-config"), "{missing}");
    }

    #[test]
    fn admin_listen_address_requires_mutual_tls() {
        let pool = "[[pool]]\nname = \"p\"\npath = \"/p\"\n";
        let admin = |lines: &str| error(&format!("{pool}[admin]\nlisten = \"0.0.0.0:9444\"\n{lines}"));
        assert!(admin("").contains("admin.certificate: admin.listen is served over mutual TLS only"));
        let two = "certificate = \"/c\"\nkey = \"/k\"\n";
        assert!(admin(two).contains("admin.client_ca: "));
        assert!(admin(&format!("{two}client_ca = \"ca\"\n")).contains("must be an absolute path"));
        let nothing = format!("{two}client_ca = \"/ca\"\nallowed_clients = []\n");
        assert!(admin(&nothing).contains("server.toml:9: admin.allowed_clients"), "{}", admin(&nothing));
        let right = format!("{pool}[admin]\nlisten = \"0.0.0.0:9444\"\n{two}client_ca = \"/ca\"\n");
        let config = Config::parse("server.toml", &right).expect("all is named");
        assert_eq!(config.admin.allowed_clients, ADMIN_CLIENTS);
    }

    #[test]
    fn sizes_are_parsed_with_binary_units() {
        assert_eq!("8MiB".parse(), Ok(Bytes(8 << 20)));
        assert_eq!("10 Gi".parse(), Ok(Bytes(10 << 30)));
        assert_eq!("512".parse(), Ok(Bytes(512)));
        for bad in ["", "MiB", "1.5GiB", "8 MB", "99999999999TiB"] {
            assert!(bad.parse::<Bytes>().is_err(), "{bad}");
        }
    }
}
