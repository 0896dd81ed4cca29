//! `[pool.nvmeof]`: a pool on a namespace of a fabric (docs/guides/nvmeof.md).

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use forebay_nvmeof::{FabricPath, IdentityVersion, NamespaceId, Nqn, ReservationKey, Transport};
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use super::instance::InstanceSection;
use super::option::OptionHelp;
use crate::limits::CLUSTER_UID_BYTES_MAX;

/// The section's name in the file.
pub(super) const SECTION: &str = "pool.nvmeof";

const fn option(key: &'static str, value: &'static str, help: &'static str) -> OptionHelp {
    OptionHelp { section: SECTION, key, value, set: false, help }
}

/// The options of `[pool.nvmeof]`. The first three have no default.
pub(super) const OPTIONS: &[OptionHelp] = &[
    option(
        "nqn",
        "\"nqn.2026-01.io.example:pool\"",
        "NVMe Qualified Name of the target's subsystem. Required, as are instance.name and instance.epoch: they own the reservation.",
    ),
    option(
        "namespace",
        "\"uuid:8bd9bb5c-6ec9-4a0c-a0a6-2e7c0c6b4f11\"",
        "The namespace, \"uuid:...\" or \"nguid:...\", never a device name. Required.",
    ),
    option(
        "paths",
        "[\"tcp://192.168.77.1:4420\"]",
        "Paths to the subsystem, \"tcp://ADDRESS:PORT\" or \"rdma://ADDRESS:PORT\". Required. More than one path needs native NVMe multipath in the kernel.",
    ),
    option("node", "\"\"", "Name of this machine in its host NQN. \"\": its host name."),
    option(
        "machine_id",
        "\"\"",
        "Identity of this machine, independent of its name, such as its system UUID. It is part of the host NQN, so that a machine that takes the name of a lost one is another host. Set by an operator. \"\": none.",
    ),
    option(
        "adopt_key",
        "\"\"",
        "Key from the error of a refused start, 0x and 16 hexadecimal digits: the namespace is taken from that owner, an instance of the same name in another cluster. Use it only if nothing of that cluster runs any more. \"\": none.",
    ),
    option(
        "format",
        "false",
        "Create an XFS file system on the namespace if it is blank. A namespace that holds anything else is refused.",
    ),
    option(
        "write_through",
        "true",
        "Data, sizes and names are on the namespace before a WRITE or CREATE is answered, so that a failover loses nothing that was acknowledged. false: faster, but a failover loses what was not flushed, and Linux clients may not report it.",
    ),
    option(
        "dhchap_key",
        "\"\"",
        "File with this host's DH-HMAC-CHAP key (DHHC-1:...). \"\": no authentication.",
    ),
    option(
        "dhchap_controller_key",
        "\"\"",
        "File with the DH-HMAC-CHAP key of the target. \"\": the target is not authenticated.",
    ),
    option(
        "tls_key",
        "\"\"",
        "File with the pre-shared key for TLS 1.3 on NVMe/TCP (NVMeTLSkey-1:...). \"\": no TLS. The node needs tlshd.",
    ),
    option(
        "tls_identity",
        "1",
        "Version of the TLS identity for the target, 0 or 1; the target must use the same.",
    ),
    option("connect_time_s", "60", "Seconds to wait for the target and the namespace at start, 1 to 3600."),
    option(
        "keep_alive_s",
        "5",
        "Seconds between two keep-alives, 1 to 120. A target can take up to twice as long to cut off a host that hangs.",
    ),
    option(
        "loss_time_s",
        "15",
        "Seconds that the reservation may stay unconfirmed before the server stops, 5 to 600. It must be less than instance.takeover_after_s.",
    ),
];

/// Whether this line of the sample sets a key without a default, or is the section's header.
#[cfg(test)]
pub(super) fn is_required(line: &str) -> bool {
    ["[pool.nvmeof]", "nqn = ", "namespace = ", "paths = "].iter().any(|start| line.starts_with(start))
}

/// `[pool.nvmeof]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvmeofSection {
    /// Subsystem.
    #[serde(deserialize_with = "from_text")]
    pub nqn: Nqn,
    /// Namespace, `uuid:…` or `nguid:…`.
    #[serde(deserialize_with = "from_text")]
    pub namespace: NamespaceId,
    /// Paths, `tcp://ADDRESS:PORT` or `rdma://ADDRESS:PORT`.
    #[serde(deserialize_with = "from_texts")]
    pub paths: Vec<FabricPath>,
    /// Name of this machine, for its host NQN; empty to use its host name.
    #[serde(default)]
    pub node: String,
    /// Identity of this machine, independent of its name, for its host NQN; empty for none.
    #[serde(default)]
    pub machine_id: String,
    /// The key of a reservation or of a pool's record that is not an epoch of this instance and may be taken over
    /// nevertheless.
    #[serde(default)]
    pub adopt_key: String,
    /// Make a file system if the namespace is blank.
    #[serde(default)]
    pub format: bool,
    /// Every write is on stable storage before it is acknowledged.
    #[serde(default = "yes")]
    pub write_through: bool,
    /// File with the key that authenticates us; empty for none.
    #[serde(default)]
    pub dhchap_key: PathBuf,
    /// File with the key that authenticates the target; empty for none.
    #[serde(default)]
    pub dhchap_controller_key: PathBuf,
    /// File with the pre-shared key for TLS; empty for an unencrypted connection.
    #[serde(default)]
    pub tls_key: PathBuf,
    /// Version of the key's identity at the target, 0 or 1.
    #[serde(default = "one")]
    pub tls_identity: u8,
    /// How long to wait at start for the target and the namespace.
    #[serde(default = "connect_time_s")]
    pub connect_time_s: u32,
    /// Keep-alive time, after which either end considers a silent connection dead.
    #[serde(default = "keep_alive_s")]
    pub keep_alive_s: u32,
    /// How long the reservation may go unconfirmed before the server stops.
    #[serde(default = "loss_time_s")]
    pub loss_time_s: u32,
}

fn yes() -> bool {
    true
}

fn one() -> u8 {
    1
}

fn connect_time_s() -> u32 {
    60
}

fn keep_alive_s() -> u32 {
    forebay_nvmeof::Timing::default().keep_alive_s
}

fn loss_time_s() -> u32 {
    15
}

impl NvmeofSection {
    /// [`Self::loss_time_s`].
    #[must_use]
    pub fn loss_time(&self) -> Duration {
        Duration::from_secs(self.loss_time_s.into())
    }

    /// [`Self::connect_time_s`].
    #[must_use]
    pub fn connect_time(&self) -> Duration {
        Duration::from_secs(self.connect_time_s.into())
    }

    /// Time after which the target has cut off a silent host and all I/O of that host has ended: NVMe permits a target to
    /// take up to twice the keep-alive time. Nothing reports that it has ended.
    #[must_use]
    pub fn cut_off_time(&self) -> Duration {
        Duration::from_secs(2 * u64::from(self.keep_alive_s) + 1)
    }

    /// [`Self::adopt_key`], if it is set.
    #[must_use]
    pub fn adopts(&self) -> Option<ReservationKey> {
        ReservationKey::parse(&self.adopt_key)
    }

    /// [`Self::tls_identity`], if it is valid.
    #[must_use]
    pub fn identity_version(&self) -> Option<IdentityVersion> {
        match self.tls_identity {
            0 => Some(IdentityVersion::Zero),
            1 => Some(IdentityVersion::One),
            _ => None,
        }
    }

    pub(super) fn check(&self, instance: &InstanceSection) -> Result<(), (&'static str, String)> {
        let wrong = |key, message: &str| Err((key, message.to_owned()));
        // These two determine which instance may take over the namespace.
        if instance.name.is_empty() {
            return wrong("nqn", "a pool on a namespace needs instance.name, which owns its reservation");
        }
        if u32::try_from(instance.epoch).map_or(true, |epoch| epoch == 0) {
            return wrong("nqn", "a pool on a namespace needs instance.epoch, from 1 to 4294967295");
        }
        if self.paths.is_empty() {
            return wrong("paths", "no path: set at least one, like \"tcp://192.168.1.1:4420\"");
        }
        for (key, path) in [
            ("dhchap_key", &self.dhchap_key),
            ("dhchap_controller_key", &self.dhchap_controller_key),
            ("tls_key", &self.tls_key),
        ] {
            if !path.as_os_str().is_empty() && !path.is_absolute() {
                return wrong(key, "must be an absolute path");
            }
        }
        if self.dhchap_key.as_os_str().is_empty() && !self.dhchap_controller_key.as_os_str().is_empty() {
            return wrong("dhchap_controller_key", "needs dhchap_key");
        }
        let clear = self.paths.iter().find(|path| path.transport != Transport::Tcp);
        if let Some(path) = clear.filter(|_| !self.tls_key.as_os_str().is_empty()) {
            let what = format!("TLS is for NVMe/TCP only, and I/O over {path} would be unencrypted");
            return Err(("tls_key", format!("{what}: remove that path or the key")));
        }
        if self.identity_version().is_none() {
            return wrong("tls_identity", "must be 0 or 1");
        }
        if !(1..=3600).contains(&self.connect_time_s) {
            return wrong("connect_time_s", "must be from 1 to 3600");
        }
        if !(1..=120).contains(&self.keep_alive_s) {
            return wrong("keep_alive_s", "must be from 1 to 120");
        }
        if !(5..=600).contains(&self.loss_time_s) {
            return wrong("loss_time_s", "must be from 5 to 600");
        }
        // A server that is cut off from its target but not from its clients answers reads for that long: this must not
        // overlap with the next server.
        let after = instance.takeover_after_s;
        if after > 0 && self.loss_time_s >= after {
            let message = format!("must be less than instance.takeover_after_s, which is {after}");
            return Err(("loss_time_s", message));
        }
        if self.machine_id.len() > CLUSTER_UID_BYTES_MAX || self.machine_id.chars().any(char::is_control) {
            return wrong("machine_id", "must be at most 253 bytes without control characters");
        }
        if !self.adopt_key.is_empty() && self.adopts().is_none() {
            return wrong(
                "adopt_key",
                "must be a key as reported by a refused start: 0x and 16 hexadecimal digits",
            );
        }
        Ok(())
    }
}

fn from_text<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(deserializer: D) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

fn from_texts<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let texts = Vec::<String>::deserialize(deserializer)?;
    texts.iter().map(|text| text.parse().map_err(D::Error::custom)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    const INSTANCE: &str = "[instance]\nname = \"fast-0\"\nepoch = 3\n";
    const POOL: &str = "[[pool]]\nname = \"p\"\npath = \"/p\"\n";
    const NVMEOF: &str = "[pool.nvmeof]\n\
         nqn = \"nqn.2026-01.io.example:pool\"\n\
         namespace = \"uuid:8bd9bb5c-6ec9-4a0c-a0a6-2e7c0c6b4f11\"\n\
         paths = [\"tcp://192.168.77.1:4420\"]\n";

    fn error(text: &str) -> String {
        Config::parse("server.toml", text).expect_err("it is wrong").to_string()
    }

    #[test]
    fn nvmeof_section_has_defaults_and_parses_its_paths() {
        let config = Config::parse("server.toml", &format!("{INSTANCE}{POOL}{NVMEOF}")).expect("right");
        let section = config.pool[0].nvmeof.as_ref().expect("it is there");
        assert!(!section.format && section.write_through);
        assert_eq!((section.connect_time_s, section.keep_alive_s, section.loss_time_s), (60, 5, 15));
        assert_eq!(section.paths[0].to_string(), "tcp://192.168.77.1:4420");
    }

    #[test]
    fn invalid_nvmeof_settings_are_reported_with_their_line() {
        let with = |lines: &str| error(&format!("{INSTANCE}{POOL}{NVMEOF}{lines}"));
        assert!(error(&format!("{POOL}{NVMEOF}")).starts_with("server.toml:5: pool.nvmeof.nqn: "));
        let no_epoch = INSTANCE.replace("epoch = 3\n", "");
        assert!(error(&format!("{no_epoch}{POOL}{NVMEOF}")).contains("needs instance.epoch"));
        assert!(with("loss_time_s = 1\n").starts_with("server.toml:11: pool.nvmeof.loss_time_s: "));
        assert!(with("adopt_key = \"7\"\n").contains("pool.nvmeof.adopt_key: must be a key"));
        let taken_over = INSTANCE.replace("epoch = 3\n", "epoch = 3\ntakeover_after_s = 20\n");
        let late = |seconds: u32| format!("{taken_over}{POOL}{NVMEOF}loss_time_s = {seconds}\n");
        assert!(
            error(&late(20))
                .contains("loss_time_s: must be less than instance.takeover_after_s, which is 20")
        );
        assert!(Config::parse("server.toml", &late(19)).is_ok());
        assert!(with("connect_time_s = 0\n").contains("pool.nvmeof.connect_time_s"));
        assert!(with("keep_alive_s = 0\n").contains("pool.nvmeof.keep_alive_s"));
        assert!(with("dhchap_key = \"key\"\n").contains("pool.nvmeof.dhchap_key: must be an absolute path"));
        assert!(with("dhchap_controller_key = \"/key\"\n").contains("needs dhchap_key"));
        assert!(with("tls_key = \"key\"\n").contains("pool.nvmeof.tls_key: must be an absolute path"));
        assert!(with("tls_identity = 2\n").contains("pool.nvmeof.tls_identity: must be 0 or 1"));
        assert!(with("formatt = true\n").starts_with("server.toml:11: "));
        let device = NVMEOF.replace("uuid:8bd9bb5c-6ec9-4a0c-a0a6-2e7c0c6b4f11", "/dev/nvme0n1");
        assert!(error(&format!("{INSTANCE}{POOL}{device}")).contains("is not a namespace"));
        let path = NVMEOF.replace("tcp://192.168.77.1:4420", "192.168.77.1");
        assert!(error(&format!("{INSTANCE}{POOL}{path}")).contains("is not a path"));
        // I/O over RDMA would be unencrypted, even if other paths have TLS.
        for paths in ["rdma://192.168.77.1:4420", "tcp://192.168.77.1:4420\", \"rdma://192.168.77.1:4421"] {
            let rdma = NVMEOF.replace("tcp://192.168.77.1:4420", paths);
            let reported = error(&format!("{INSTANCE}{POOL}{rdma}tls_key = \"/key\"\n"));
            assert!(
                reported.starts_with("server.toml:11: pool.nvmeof.tls_key: TLS is for NVMe/TCP only"),
                "{reported}"
            );
            assert!(reported.contains("rdma://"), "{reported}");
            Config::parse("server.toml", &format!("{INSTANCE}{POOL}{rdma}"))
                .expect("without TLS it is right");
        }
        // Only the second pool's section is wrong.
        let second = POOL.replace("\"p\"", "\"q\"").replace("\"/p\"", "\"/q\"");
        let text = format!("{INSTANCE}{POOL}{NVMEOF}{second}{NVMEOF}loss_time_s = 1\n");
        assert!(error(&text).starts_with("server.toml:18: "), "{}", error(&text));
    }
}
