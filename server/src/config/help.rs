//! Descriptions of all options: the source of `--help`, the sample and the reference.

use std::fmt::Write as _;

use super::nvmeof;
use super::option::OptionHelp;

/// Every option except those of `[pool.nvmeof]`, which [`options`] adds.
pub const OPTIONS: &[OptionHelp] = &[
    OptionHelp {
        section: "instance",
        key: "name",
        value: "\"\"",
        set: false,
        help: "Name of this instance, 1 to 63 characters from a-z, 0-9 and '-', as reported by the admin API. Set by an operator. \"\": none.",
    },
    OptionHelp {
        section: "instance",
        key: "epoch",
        value: "0",
        set: false,
        help: "Number that increases each time the instance is placed again, as reported by the admin API.",
    },
    OptionHelp {
        section: "instance",
        key: "cluster_uid",
        value: "\"\"",
        set: false,
        help: "Identifier of the instance's cluster, such as the UID of the namespace kube-system. It is part of the key of the instance's reservation, of its host NQN and of the record of its pools, so that an instance of the same name in another cluster is not mistaken for this one. If you change it, increase the epoch, too. Set by an operator. \"\": none.",
    },
    OptionHelp {
        section: "instance",
        key: "takeover_after_s",
        value: "0",
        set: false,
        help: "Seconds of silence after which another node takes over this instance. The loss_time_s of every pool must be less. Set by an operator. 0: unknown.",
    },
    OptionHelp {
        section: "instance",
        key: "addresses",
        value: "[]",
        set: false,
        help: "Addresses of this instance, like \"192.168.77.200/24\". They are added to an interface and announced when the pools are served, and removed when the server stops, so that they move with the instance. No other addresses are announced to clients, unless `server.advertise` selects some. Needs CAP_NET_ADMIN and CAP_NET_RAW.",
    },
    OptionHelp {
        section: "instance",
        key: "interface",
        value: "\"\"",
        set: false,
        help: "Interface for the addresses, like \"eth1\". \"\": the interface that has an address in the same network.",
    },
    OptionHelp {
        section: "server",
        key: "listen",
        value: "[\"[::]:445\"]",
        set: false,
        help: "Addresses to listen on for SMB, each as \"ip:port\".",
    },
    OptionHelp {
        section: "server",
        key: "advertise",
        value: "[]",
        set: false,
        help: "Addresses that clients should mount, as reported by the admin API: \"host:port\" or \"ip:port\"; \"10.1.0.0/16\" for this machine's addresses in that network, or \"interface:eth1\" for the addresses of an interface, each with the port that the server listens on. If a network or an interface is given, no other addresses are announced to clients for multichannel. Empty: the addresses that the server listens on. `--advertise` and FOREBAY_ADVERTISE override it.",
    },
    OptionHelp {
        section: "server",
        key: "name",
        value: "\"FOREBAY\"",
        set: false,
        help: "Name sent to clients during logon, 1 to 15 characters from A-Z, 0-9 and '-'.",
    },
    OptionHelp {
        section: "server",
        key: "min_dialect",
        value: "\"3.1.1\"",
        set: false,
        help: "Oldest dialect that the server accepts: \"2.0.2\", \"2.1\", \"3.0\", \"3.0.2\" or \"3.1.1\". With 3.1.1, a relayed logon is useless to an attacker. With an older dialect, set `signing` or `encryption` to \"required\".",
    },
    OptionHelp {
        section: "server",
        key: "target_names",
        value: "[]",
        set: false,
        help: "Names and addresses under which clients mount from this server, like \"server.example\". Newer kernels, Windows and smbclient send the name of the server that they expect: a client that expects another server is refused. Empty: not checked.",
    },
    OptionHelp {
        section: "server",
        key: "ntlm",
        value: "true",
        set: false,
        help: "Users can log on with NTLM and their volume's password. false: only with Kerberos, which needs `keytab`. The CSI driver mounts with NTLM.",
    },
    OptionHelp {
        section: "server",
        key: "keytab",
        value: "\"\"",
        set: false,
        help: "File with the keys of this server's principal cifs/HOST, like \"/etc/forebay/krb5.keytab\": users can then log on with Kerberos. The user NAME of a volume is the principal NAME of the same realm. Only AES keys are used. The file must not be readable by everyone; it is read again when it changes. \"\": no Kerberos.",
    },
    OptionHelp {
        section: "server",
        key: "signing",
        value: "\"optional\"",
        set: false,
        help: "\"optional\": sessions are signed if the client requests it. \"required\": every session is signed or encrypted.",
    },
    OptionHelp {
        section: "server",
        key: "encryption",
        value: "\"offered\"",
        set: false,
        help: "\"off\": not offered. \"offered\": used if the client or the volume requires it. \"required\": sessions that cannot be encrypted are refused. If you need integrity, encryption costs a tenth of what signing costs.",
    },
    OptionHelp {
        section: "server",
        key: "max_io",
        value: "\"8MiB\"",
        set: false,
        help: "Largest READ and WRITE, 64KiB to 8MiB.",
    },
    OptionHelp {
        section: "server",
        key: "caching",
        value: "true",
        set: false,
        help: "Oplocks, leases and durable handles are granted, so that clients can cache. false: none are granted.",
    },
    OptionHelp {
        section: "server",
        key: "directory_leases",
        value: "true",
        set: false,
        help: "Leases are granted on directories, too, if caching is on: clients cache names and attributes. A change to a file with several names (hard links) breaks only the lease on the directory of the name that was used: in other directories, its size and times can be up to 30 s old.",
    },
    OptionHelp {
        section: "server",
        key: "event_loops",
        value: "0",
        set: false,
        help: "Threads that serve connections. 0: one per core.",
    },
    OptionHelp {
        section: "server",
        key: "workers",
        value: "16",
        set: false,
        help: "Threads for file-system calls that block, per lane: look-ups, changes, contents.",
    },
    OptionHelp {
        section: "server",
        key: "io_engine",
        value: "\"auto\"",
        set: false,
        help: "\"io_uring\", \"readiness\" (epoll and threads), or \"auto\": io_uring if it is permitted.",
    },
    OptionHelp {
        section: "server",
        key: "rdma",
        value: "\"auto\"",
        set: false,
        help: "\"auto\": clients can connect over RDMA (SMB Direct) to those addresses of `listen` that belong to an RDMA device, as long as its port is up; devices can be added later. \"off\": TCP only.",
    },
    OptionHelp {
        section: "server",
        key: "rdma_port",
        value: "445",
        set: false,
        help: "Port of SMB Direct over InfiniBand and RoCE. Linux and Windows support only 445.",
    },
    OptionHelp {
        section: "server",
        key: "iwarp_port",
        value: "5445",
        set: false,
        help: "Port of SMB Direct over iWARP, which shares TCP's ports. Linux and Windows support only 5445.",
    },
    OptionHelp {
        section: "server",
        key: "direct_reads",
        value: "false",
        set: false,
        help: "For READs over RDMA of 64 KiB and more: data that is not in the page cache is read with O_DIRECT, straight into the memory that the device sends from, if the kernel (Linux 6.5) and the file system support it. This saves a copy, but does not cache the data for the next reader. Off until it has been measured on hardware: measure on yours.",
    },
    OptionHelp {
        section: "server",
        key: "memory",
        value: "0",
        set: false,
        help: "Memory for payload: requests being received and served, data read and not yet sent, and buffers kept for the next requests; \"4GiB\", at least 64MiB. All connections share it: if it is used up, they wait, and none is closed or refused. The clients of one volume get at most a quarter of it. 0: a quarter of the machine's memory, or of what the control group allows, from 64MiB to 16GiB. In addition, the server needs about 100 MiB, and up to 128 KiB for each connection.",
    },
    OptionHelp {
        section: "server",
        key: "stall_timeout_s",
        value: "120",
        set: false,
        help: "Seconds within which a client must receive what is sent to it, and send the rest of a request that it has begun; after that, its connection is closed. 1 to 3600.",
    },
    OptionHelp {
        section: "server",
        key: "drain_timeout_s",
        value: "30",
        set: false,
        help: "Seconds for requests in flight to finish after SIGTERM. A second SIGTERM stops the server immediately.",
    },
    OptionHelp {
        section: "admin",
        key: "socket",
        value: "\"/run/forebay/admin.sock\"",
        set: false,
        help: "Unix socket of the admin API (gRPC), mode 0600. A process that can open it has full control of the server.",
    },
    OptionHelp {
        section: "admin",
        key: "listen",
        value: "\"\"",
        set: false,
        help: "Address of the admin API over mutual TLS 1.3, \"ip:port\". Needs certificate, key and client_ca. \"\": only the socket.",
    },
    OptionHelp {
        section: "admin",
        key: "certificate",
        value: "\"\"",
        set: false,
        help: "PEM file with the server's certificate and its chain. This file, key and client_ca are checked for changes every few seconds: a change applies to new connections, without a restart.",
    },
    OptionHelp {
        section: "admin",
        key: "key",
        value: "\"\"",
        set: false,
        help: "PEM file with the certificate's private key.",
    },
    OptionHelp {
        section: "admin",
        key: "client_ca",
        value: "\"\"",
        set: false,
        help: "PEM file with the certificate authorities that sign clients' certificates.",
    },
    OptionHelp {
        section: "admin",
        key: "allowed_clients",
        value: "[\"forebay-operator\", \"forebay-csi\"]",
        set: false,
        help: "Clients that may use the admin API over TLS: DNS or URI names of their certificates, or common names.",
    },
    OptionHelp {
        section: "http",
        key: "listen",
        value: "\"127.0.0.1:9445\"",
        set: false,
        help: "Address of /metrics (Prometheus), /healthz and /readyz. \"\": none.",
    },
    OptionHelp {
        section: "log",
        key: "level",
        value: "\"info\"",
        set: false,
        help: "\"error\", \"warn\", \"info\", \"debug\" or \"trace\", or directives as in \"info,forebay_server=debug\".",
    },
    OptionHelp {
        section: "log",
        key: "format",
        value: "\"text\"",
        set: false,
        help: "\"text\" or \"json\", one line per event, to standard error.",
    },
    OptionHelp {
        section: "[pool]",
        key: "name",
        value: "\"default\"",
        set: true,
        help: "Name of the pool, 1 to 63 characters from a-z, 0-9 and '-'. A server has one or more pools; each is a [[pool]] section.",
    },
    OptionHelp {
        section: "[pool]",
        key: "path",
        value: "\"/var/lib/forebay\"",
        set: true,
        help: "Directory that holds the pool's volumes and their records. It must exist (or see create). Only one server can use it at a time.",
    },
    OptionHelp {
        section: "[pool]",
        key: "create",
        value: "false",
        set: false,
        help: "Create the directory, mode 0700, if it does not exist. Its parent directory must exist.",
    },
    OptionHelp {
        section: "[pool]",
        key: "existing",
        value: "false",
        set: false,
        help: "The directory must already hold a pool. If its disk is not mounted, the server then does not start, instead of serving an empty pool.",
    },
    OptionHelp {
        section: "[pool]",
        key: "quota",
        value: "\"project\"",
        set: true,
        help: "\"project\": capacity is a hard limit by project quota (XFS or ext4 mounted with -o prjquota). \"none\": capacity is not enforced; this must be set explicitly.",
    },
    OptionHelp {
        section: "[pool]",
        key: "overcommit",
        value: "1.0",
        set: false,
        help: "The sum of the volumes' capacities can be up to this many times the pool's size.",
    },
    OptionHelp {
        section: "[pool]",
        key: "write_through",
        value: "false",
        set: false,
        help: "Every operation is on stable storage before it is answered, as on namespaces (pool.nvmeof.write_through). false: a power cut can lose what was answered and not flushed, and the Linux client may not notice: it opens the file again with a new handle, and a flush of that handle succeeds.",
    },
];

/// Every option of every section, in the order of the sample.
pub fn options() -> impl Iterator<Item = &'static OptionHelp> {
    OPTIONS.iter().chain(nvmeof::OPTIONS)
}

/// A configuration with a description of every option; it can be used unchanged if its pool's directory exists.
#[must_use]
pub fn sample() -> String {
    let mut text = String::from(
        "# Configuration of forebay-server. Options that are commented out show their defaults.\n\
         # Check changes with `forebay-server check-config`.\n",
    );
    let mut section = "";
    for option in options() {
        if option.section != section {
            section = option.section;
            if section == nvmeof::SECTION {
                text.push_str("\n# Only for a pool on an NVMe-oF namespace (docs/guides/nvmeof.md); the section follows its [[pool]].\n");
                let _ = writeln!(text, "# [{section}]");
            } else {
                let _ = write!(text, "\n[{section}]\n");
            }
        } else {
            text.push('\n');
        }
        for line in wrap(option.help, 110) {
            let _ = writeln!(text, "# {line}");
        }
        let comment = if option.set { "" } else { "# " };
        let _ = writeln!(text, "{comment}{} = {}", option.key, option.value);
    }
    text
}

/// The options for `--help`.
#[must_use]
pub fn help() -> String {
    let mut text = String::from("Options of the configuration file (TOML):\n");
    for option in options() {
        let _ = write!(
            text,
            "\n  {}.{} = {}\n",
            option.section.trim_matches(['[', ']']),
            option.key,
            option.value
        );
        for line in wrap(option.help, 90) {
            let _ = writeln!(text, "      {line}");
        }
    }
    text
}

fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("there is always a line");
        if !last.is_empty() && last.len() + 1 + word.len() > width {
            lines.push(word.to_owned());
        } else {
            if !last.is_empty() {
                last.push(' ');
            }
            last.push_str(word);
        }
    }
    lines
}
