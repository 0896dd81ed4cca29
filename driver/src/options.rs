//! Options of a volume's SMB mount: defaults, requirements of the volume, and additions of the StorageClass.

use std::collections::BTreeMap;

use forebay_proto::admin::Protection;
use rustix::mount::MountAttrFlags;

use crate::error::Error;
use crate::limits::{MOUNT_FLAGS_BYTES_MAX, MOUNT_VALUE_BYTES_MAX};
use crate::mount::Setting;
use crate::snapshot_time;

/// The default dialect if neither the volume nor the StorageClass specifies one.
pub(crate) const DIALECT_DEFAULT: &str = "3.1.1";

/// Seconds of silence after which the client sends an ECHO to the server.
const ECHO_INTERVAL_S: &str = "10";

/// Accepted values of `vers`; SMB 1 and 2.0.2 are excluded.
const DIALECTS: [&str; 8] = ["2.1", "3", "3.0", "3.0.2", "3.02", "3.1.1", "3.11", "default"];

/// Flags that a StorageClass may add. All others are refused, so that a new meaning in a future kernel cannot slip through.
#[rustfmt::skip]
const FLAGS: &[&str] = &[
    "acl", "brl", "cifsacl", "compress", "dynperm", "forcegid", "forcemand", "forcemandatorylock", "forceuid",
    "fsc", "handlecache", "hard", "idsfromsid", "ignorecase", "linux", "locallease", "mapchars", "mapposix",
    "mfsymlinks", "modefromsid", "multichannel", "noacl", "noautotune", "noblocksend", "nobrl", "nocase",
    "nodelete", "nodfs", "nodynperm", "noforcegid", "noforceuid", "nohandlecache", "nohard", "nolease",
    "nolinux", "nomapchars", "nomapposix", "nomultichannel", "noperm", "nopersistenthandles", "noposix",
    "noposixpaths", "noresilienthandles", "noserverino", "nosharesock", "nosoft", "nosparse", "nostrictsync",
    "notcpnodelay", "nounix", "nouser_xattr", "perm", "persistenthandles", "posix", "posixpaths", "rdma",
    "resilienthandles", "rwpidforward", "seal", "serverino", "setuids", "sign", "soft", "strictsync",
    "tcpnodelay", "unix", "unicode", "user_xattr",
];

/// The flag that selects RDMA. The transport is decided at mount time.
const TRANSPORT: &str = "rdma";

/// Options with a numeric value.
#[rustfmt::skip]
const NUMBERS: &[&str] = &[
    "acdirmax", "acregmax", "actimeo", "bsize", "closetimeo", "dir_mode", "dirmode", "echo_interval", "esize",
    "file_mode", "gid", "handletimeout", "max_cached_dirs", "max_channels", "max_credits",
    "min_enc_offload", "rasize", "retrans", "rsize", "uid", "wsize",
];

/// Options with a fixed set of values.
#[rustfmt::skip]
const CHOICES: &[(&str, &[&str])] = &[
    ("cache", &["strict", "loose", "none", "ro", "singleclient"]),
    ("iocharset", &["utf8"]),
    ("reparse", &["default", "none", "nfs", "wsl"]),
    ("symlink", &["default", "none", "native", "unix", "mfsymlinks", "sfu", "nfs", "wsl"]),
    ("vers", &DIALECTS),
];

/// The option for a snapshot: shows the volume as it was at that time, read-only.
pub(crate) const SNAPSHOT: &str = "snapshot";

/// Options with an SELinux security context, which the kernel accepts for every file system (security/selinux/hooks.c).
const CONTEXTS: &[&str] = &["context", "defcontext", "fscontext", "rootcontext"];

/// Options for the client's identity or the server's address. The volume and its Secret determine both.
#[rustfmt::skip]
const IDENTITY: &[&str] = &[
    "addr", "backupgid", "backupuid", "cred", "credentials", "cruid", "dom", "domain", "domainauto", "guest",
    "ip", "multiuser", "netbiosname", "pass", "pass2", "password", "password2", "port", "prefixpath", "sec",
    "servern", "source", "srcaddr", "unc", "upcall_target", "user", "username", "ver", "witness",
];

/// Options that set the same value; the later one wins.
#[rustfmt::skip]
const SAME: &[(&str, &str)] = &[
    ("dirmode", "dir_mode"),
    ("esize", "min_enc_offload"),
    ("forcemand", "forcemandatorylock"),
    ("ignorecase", "nocase"),
    ("soft", "hard"),
    ("nosoft", "hard"),
    ("nohard", "hard"),
    ("linux", "posix"),
    ("unix", "posix"),
    ("noposix", "posix"),
    ("nolinux", "posix"),
    ("nounix", "posix"),
];

/// Checked options of the file system and of the mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MountOptions {
    /// Keyed by setting, so that an addition replaces a default.
    options: BTreeMap<String, MountOption>,
    pub(crate) attributes: MountAttrFlags,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct MountOption {
    word: String,
    value: Option<String>,
}

impl MountOptions {
    /// Builds the options of a volume with this dialect and protection, for pods of the group `group`, plus the capability's
    /// mount flags.
    pub(crate) fn build(
        dialect: &str,
        protection: Protection,
        group: Option<u32>,
        mount_flags: &[String],
    ) -> Result<Self, Error> {
        if !DIALECTS.contains(&dialect) {
            return Err(Error::invalid("volume_context.dialect", format!("{dialect:?} is not supported")));
        }
        let mut built = Self {
            options: BTreeMap::new(),
            // A pod that can write a volume must not be able to plant a setuid program or a device in it for the other pods'
            // nodes.
            attributes: MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV,
        };
        built.set("vers", Some(dialect));
        if wants_posix(mount_flags) {
            // Each file has its own owner and mode, which the node enforces. The client derives them from security descriptors
            // if it has no response with POSIX extensions at hand.
            built.set("idsfromsid", None);
            built.set("modefromsid", None);
            built.set("symlink", Some("native"));
        } else {
            // Pods run as any UID: the volume's credentials control access, modes are cosmetic.
            built.set("noperm", None);
            built.set("uid", Some("0"));
            built.set("gid", Some("0"));
            built.set("file_mode", Some("0777"));
            built.set("dir_mode", Some("0777"));
            built.set("mfsymlinks", None);
        }
        // Makes writes of other nodes visible: leases decide what may be cached, attributes are cached for at most a second.
        built.set("cache", Some("strict"));
        built.set("actimeo", Some("1"));
        // I/O waits for a server that restarts or fails over, instead of failing the job.
        built.set("hard", None);
        // After three of these intervals without a response, the client gives up the connection and looks up the server's
        // current address; the kernel's default interval is 60 s.
        built.set("echo_interval", Some(ECHO_INTERVAL_S));
        // Without it, a kernel that cannot load its default table silently falls back to Latin-1.
        built.set("iocharset", Some("utf8"));
        if let Some(group) = group {
            built.set("gid", Some(&group.to_string()));
            built.set("forcegid", None);
        }

        let bytes: usize = mount_flags.iter().map(String::len).sum();
        if bytes > MOUNT_FLAGS_BYTES_MAX {
            return Err(refused(format!("{bytes} bytes are more than {MOUNT_FLAGS_BYTES_MAX}")));
        }
        for word in mount_flags.iter().flat_map(|flag| words_of(flag)) {
            built.add(word)?;
        }
        // Set last, so that no option above removes the volume's protection.
        match protection {
            Protection::Unspecified | Protection::Optional => {}
            Protection::Sign => built.set("sign", None),
            Protection::Seal => built.set("seal", None),
        }
        if wants_posix(mount_flags) && !matches!(built.value("vers"), Some("3.1.1" | "3.11")) {
            return Err(refused("posix requires SMB 3.1.1".into()));
        }
        if built.options.contains_key("seal") && built.value("vers") == Some("2.1") {
            return Err(refused("seal requires SMB 3.0 or later, but vers is 2.1".into()));
        }
        Ok(built)
    }

    /// Adds one mount flag of the capability. Errors contain only names: a value can be anything.
    fn add(&mut self, text: &str) -> Result<(), Error> {
        let (word, value) = match text.split_once('=') {
            Some((word, value)) => (word, Some(value)),
            None => (text, None),
        };
        if IDENTITY.contains(&word) {
            return Err(refused(format!("{word} is set only by the volume and its Secret")));
        }
        if let Some(change) = attribute(word).filter(|_| value.is_none()) {
            match change {
                Attribute::Set(flag) => self.attributes |= flag,
                Attribute::Clear(flag) => self.attributes &= !flag,
                Attribute::Access(flag) => {
                    let access = MountAttrFlags::MOUNT_ATTR__ATIME;
                    self.attributes = (self.attributes & !access) | flag;
                }
            }
            return Ok(());
        }
        match value {
            None if FLAGS.contains(&word) => {}
            None => return Err(unknown(word, "or needs a value")),
            Some(value) if NUMBERS.contains(&word) => {
                if value.is_empty() || value.len() > MOUNT_VALUE_BYTES_MAX || number(value).is_none() {
                    return Err(refused(format!("{word} requires a number")));
                }
            }
            Some(value) if word == SNAPSHOT => {
                let time = snapshot_time::parse(value).ok_or_else(|| {
                    refused(format!("{word} requires a time such as @GMT-2026.11.25-10.00.00"))
                })?;
                self.set(word, Some(&time.to_string()));
                self.attributes |= MountAttrFlags::MOUNT_ATTR_RDONLY;
                return Ok(());
            }
            Some(value) if CONTEXTS.contains(&word) => {
                let value = value.strip_prefix('"').and_then(|v| v.strip_suffix('"')).unwrap_or(value);
                if !is_security_context(value) {
                    return Err(refused(format!("{word} requires a security context")));
                }
                self.set(word, Some(value));
                return Ok(());
            }
            Some(value) => match CHOICES.iter().find(|(name, _)| *name == word) {
                Some((_, choices)) if choices.contains(&value) => {}
                Some((_, choices)) => {
                    return Err(refused(format!("{word} must be one of {}", choices.join(", "))));
                }
                None => return Err(unknown(word, "or takes no value")),
            },
        }
        self.set(word, value);
        Ok(())
    }

    fn set(&mut self, word: &str, value: Option<&str>) {
        let same = SAME.iter().find(|(other, _)| *other == word).map(|(_, name)| *name);
        let name = same.unwrap_or_else(|| match word.strip_prefix("no") {
            // `perm` and `noperm` are one setting.
            Some(positive) if FLAGS.contains(&positive) => positive,
            _ => word,
        });
        let option = MountOption { word: word.to_owned(), value: value.map(str::to_owned) };
        self.options.insert(name.to_owned(), option);
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.options.get(name)?.value.as_deref()
    }

    /// The group of all files.
    pub(crate) fn gid(&self) -> u32 {
        self.value("gid").and_then(number).unwrap_or_default()
    }

    /// Whether I/O waits for an unreachable server.
    pub(crate) fn is_hard(&self) -> bool {
        self.options.get("hard").is_some_and(|option| matches!(&*option.word, "hard" | "nosoft"))
    }

    pub(crate) fn is_sealed(&self) -> bool {
        self.options.contains_key("seal")
    }

    /// Whether this flag is set.
    pub(crate) fn has(&self, word: &str) -> bool {
        self.options.contains_key(word)
    }

    /// The settings for fsconfig, in a stable order; without the transport.
    pub(crate) fn settings(&self) -> impl Iterator<Item = Setting<'_>> {
        let options = self.options.values().filter(|o| o.word != TRANSPORT);
        options.map(|o| match &o.value {
            Some(value) => Setting::Value(&o.word, value),
            None => Setting::Flag(&o.word),
        })
    }
}

/// Whether the flags request the POSIX extensions of SMB 3.1.1; the last flag counts.
fn wants_posix(mount_flags: &[String]) -> bool {
    let words = mount_flags.iter().flat_map(|flag| words_of(flag));
    let last = words.filter(|word| *word == "posix" || SAME.contains(&(word, "posix"))).last();
    last.is_some_and(|word| !word.starts_with("no"))
}

/// The effect of mount(8) options that belong to the mount, not to the file system.
enum Attribute {
    Set(MountAttrFlags),
    Clear(MountAttrFlags),
    Access(MountAttrFlags),
}

fn attribute(word: &str) -> Option<Attribute> {
    Some(match word {
        "ro" => Attribute::Set(MountAttrFlags::MOUNT_ATTR_RDONLY),
        "rw" => Attribute::Clear(MountAttrFlags::MOUNT_ATTR_RDONLY),
        "nosuid" => Attribute::Set(MountAttrFlags::MOUNT_ATTR_NOSUID),
        "suid" => Attribute::Clear(MountAttrFlags::MOUNT_ATTR_NOSUID),
        "nodev" => Attribute::Set(MountAttrFlags::MOUNT_ATTR_NODEV),
        "dev" => Attribute::Clear(MountAttrFlags::MOUNT_ATTR_NODEV),
        "noexec" => Attribute::Set(MountAttrFlags::MOUNT_ATTR_NOEXEC),
        "exec" => Attribute::Clear(MountAttrFlags::MOUNT_ATTR_NOEXEC),
        "nodiratime" => Attribute::Set(MountAttrFlags::MOUNT_ATTR_NODIRATIME),
        "diratime" => Attribute::Clear(MountAttrFlags::MOUNT_ATTR_NODIRATIME),
        "relatime" => Attribute::Access(MountAttrFlags::MOUNT_ATTR_RELATIME),
        "noatime" => Attribute::Access(MountAttrFlags::MOUNT_ATTR_NOATIME),
        "strictatime" => Attribute::Access(MountAttrFlags::MOUNT_ATTR_STRICTATIME),
        // Options for mount(8) and systemd; no effect here.
        "_netdev" | "defaults" => Attribute::Set(MountAttrFlags::empty()),
        _ => return None,
    })
}

/// Parses a decimal number, or octal with a leading 0, as the kernel does.
fn number(text: &str) -> Option<u32> {
    if text.starts_with('+') || text.starts_with("0+") {
        return None;
    }
    match text.strip_prefix('0') {
        Some("") => Some(0),
        Some(octal) => u32::from_str_radix(octal, 8).ok(),
        None => text.parse().ok(),
    }
}

/// Whether this is an SELinux security context: user, role, type and level, the level with comma-separated categories.
fn is_security_context(text: &str) -> bool {
    let usable = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-' | b':' | b',');
    !text.is_empty() && text.len() <= MOUNT_VALUE_BYTES_MAX && text.bytes().all(usable)
}

/// Splits a flag at commas, except inside quotation marks, as in the kubelet's `context="…:c1,c2"`.
fn words_of(flag: &str) -> impl Iterator<Item = &str> {
    let mut is_quoted = false;
    flag.split(move |c: char| {
        is_quoted ^= c == '"';
        c == ',' && !is_quoted
    })
    .map(str::trim)
    .filter(|word| !word.is_empty())
}

fn refused(reason: String) -> Error {
    Error::Invalid { field: "mount_flags", reason }
}

fn unknown(word: &str, or: &str) -> Error {
    refused(format!("option {word} is unknown {or}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(flags: &[&str]) -> Result<MountOptions, Error> {
        let flags: Vec<String> = flags.iter().map(|f| (*f).to_owned()).collect();
        MountOptions::build(DIALECT_DEFAULT, Protection::Optional, None, &flags)
    }

    fn words(options: &MountOptions) -> Vec<String> {
        options
            .settings()
            .map(|s| match s {
                Setting::Flag(word) => word.to_owned(),
                Setting::Value(word, value) | Setting::Secret(word, value) => format!("{word}={value}"),
            })
            .collect()
    }

    #[test]
    fn posix_mounts_use_the_owners_and_modes_of_files() {
        let posix = words(&build(&["posix"]).expect("possible"));
        for word in ["posix", "idsfromsid", "modefromsid", "symlink=native", "vers=3.1.1", "hard"] {
            assert!(posix.iter().any(|found| found == word), "{word}: {posix:?}");
        }
        for word in ["noperm", "mfsymlinks", "uid=0", "gid=0", "file_mode=0777", "dir_mode=0777"] {
            assert!(!posix.iter().any(|found| found == word), "{word}: {posix:?}");
        }
        let undone = words(&build(&["posix,noposix"]).expect("possible"));
        assert!(
            undone.contains(&"noperm".to_owned()) && undone.contains(&"noposix".to_owned()),
            "{undone:?}"
        );
        assert!(build(&["linux"]).expect("possible").has("idsfromsid"), "another word for it");
        let error = build(&["posix", "vers=3.0"]).expect_err("refused").to_string();
        assert!(error.contains("SMB 3.1.1"), "{error}");
        let grouped =
            MountOptions::build(DIALECT_DEFAULT, Protection::Optional, Some(2000), &["posix".to_owned()]);
        assert_eq!(grouped.expect("possible").gid(), 2000);
    }

    #[test]
    fn defaults_grant_access_to_any_pod_and_cache_attributes_for_1s() {
        assert_eq!(
            words(&build(&[]).expect("defaults")),
            [
                "actimeo=1",
                "cache=strict",
                "dir_mode=0777",
                "echo_interval=10",
                "file_mode=0777",
                "gid=0",
                "hard",
                "iocharset=utf8",
                "mfsymlinks",
                "noperm",
                "uid=0",
                "vers=3.1.1"
            ]
        );
    }

    #[test]
    fn snapshot_option_mounts_that_time_read_only() {
        let options = build(&["snapshot=@GMT-2025.11.25-16.12.09"]).expect("usable");
        assert!(words(&options).iter().any(|word| word == "snapshot=134085607290000000"), "{options:?}");
        assert!(options.attributes.contains(MountAttrFlags::MOUNT_ATTR_RDONLY));
        for bad in ["snapshot", "snapshot=", "snapshot=now"] {
            assert!(build(&[bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn mount_flags_override_defaults() {
        let options =
            build(&["soft,vers=3.0", "perm", "dirmode=0700", "uid=1000", "multichannel", "ro", "noatime"])
                .expect("usable");
        let words = words(&options);
        for word in ["soft", "vers=3.0", "perm", "dirmode=0700", "uid=1000", "multichannel"] {
            assert!(words.iter().any(|w| w == word), "{word} in {words:?}");
        }
        for word in ["hard", "vers=3.1.1", "noperm", "dir_mode=0777", "uid=0"] {
            assert!(!words.iter().any(|w| w == word), "{word} in {words:?}");
        }
        assert!(options.attributes.contains(MountAttrFlags::MOUNT_ATTR_RDONLY));
        assert!(options.attributes.contains(MountAttrFlags::MOUNT_ATTR_NOATIME));
        assert!(options.attributes.contains(MountAttrFlags::MOUNT_ATTR_NOSUID));
    }

    #[test]
    fn protection_and_group_become_mount_options() {
        let built = |protection, flags: &[&str]| {
            let flags: Vec<String> = flags.iter().map(|f| (*f).to_owned()).collect();
            MountOptions::build("3.1.1", protection, Some(2000), &flags)
        };
        let options = built(Protection::Seal, &[]).expect("usable");
        assert!(options.is_sealed());
        assert!(words(&options).contains(&"gid=2000".to_owned()));
        assert!(words(&built(Protection::Sign, &[]).expect("usable")).contains(&"sign".to_owned()));
        assert!(built(Protection::Seal, &["vers=2.1"]).is_err());
        assert!(built(Protection::Sign, &["vers=2.1"]).is_ok());
    }

    #[test]
    fn selinux_context_with_commas_is_a_single_option() {
        let label = "system_u:object_r:container_file_t:s0:c1,c2";
        let quoted = format!("context=\"{label}\"");
        let given = words(&build(&[&format!("{quoted},soft"), "fscontext=a:b:c"]).expect("usable"));
        for word in [&*format!("context={label}"), "fscontext=a:b:c", "soft"] {
            assert!(given.iter().any(|w| w == word), "{word} in {given:?}");
        }
        for flag in
            ["context", "context=", "context=\"\"", "context=\"a b\"", "context=\"a:b", "context=a:b,c2"]
        {
            assert!(build(&[flag]).is_err(), "{flag}");
        }
    }

    #[test]
    fn octal_gid_is_parsed_as_the_kernel_does() {
        let gid = |flags: &[&str]| build(flags).expect("usable").gid();
        assert_eq!((gid(&[]), gid(&["gid=1000"]), gid(&["gid=010"])), (0, 1000, 8));
    }

    #[test]
    fn identity_and_unknown_options_are_refused_without_leaking_values() {
        for word in IDENTITY.iter().copied().chain(["sloppy", "vers", "frobnicate", "x-systemd.automount"]) {
            let flag = format!("{word}=hunter2");
            let error = build(&[&flag]).expect_err(&flag);
            let message = error.to_string();
            assert!(message.contains(word) && !message.contains("hunter2"), "{message}");
            assert_eq!(tonic::Status::from(error).code(), tonic::Code::InvalidArgument);
        }
        for flag in [
            "guest",
            "rsize",
            "rsize=",
            "rsize=1M",
            "rsize=+1",
            "uid=-1",
            "file_mode=0999",
            "hard=1",
            "vers=1.0",
            "vers=2.0",
            "cache=maybe",
            "noro",
            "ro=1",
        ] {
            assert!(build(&[flag]).is_err(), "{flag}");
        }
        assert!(build(&[&"x".repeat(5000)]).is_err());
    }

    #[test]
    fn every_option_is_in_the_reference() {
        use std::fmt::Write as _;
        let quoted =
            |words: &[&str]| words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
        let mut text = String::from("| accepted | options |\n|---|---|\n");
        let _ = writeln!(text, "| without a value | {} |", quoted(FLAGS));
        let _ = writeln!(text, "| with a number | {} |", quoted(NUMBERS));
        for (word, choices) in CHOICES {
            let _ = writeln!(text, "| `{word}=` | {} |", quoted(choices));
        }
        let _ = writeln!(text, "| with the time of a snapshot | {} |", quoted(&[SNAPSHOT]));
        let _ = writeln!(text, "| with an SELinux context | {} |", quoted(CONTEXTS));
        let _ =
            writeln!(text, "\nRefused, because they set the identity or the server: {}.", quoted(IDENTITY));
        let page = "docs/reference/storageclass.md";
        forebay_testing::generated::part(page, "mount-options", &text, "forebay-csi in_the_reference");
    }
}
