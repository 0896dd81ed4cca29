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
        help: "Name of this instance, 1 to 63 of a-z, 0-9 and '-', as reported by the admin API. An operator sets it; \"\": none.",
    },
    OptionHelp {
        section: "instance",
        key: "epoch",
        value: "0",
        set: false,
        help: "A number that grows whenever the instance is placed again, as reported by the admin API.",
    },
    OptionHelp {
        section: "instance",
        key: "cluster_uid",
        value: "\"\"",
        set: false,
        help: "Which cluster the instance is of, such as the UID of the namespace kube-system: part of its reservation's key, its host NQN and the record of its pools, so that an instance of the same name in another cluster is a stranger. Change it together with a higher epoch. An operator sets it; \"\": none.",
    },
    OptionHelp {
        section: "instance",
        key: "takeover_after_s",
        value: "0",
        set: false,
        help: "Seconds after which another node takes the instance over when this one is silent. Pools with a loss_time_s that is not less are refused. An operator sets it; 0: unknown.",
    },
    OptionHelp {
        section: "instance",
        key: "addresses",
        value: "[]",
        set: false,
        help: "Addresses of this instance, like \"192.168.77.200/24\": put on an interface when its pools are served, announced, and taken off at the end, so that they move with it. No others are announced to clients, unless `server.advertise` chooses. Needs CAP_NET_ADMIN and CAP_NET_RAW.",
    },
    OptionHelp {
        section: "instance",
        key: "interface",
        value: "\"\"",
        set: false,
        help: "Interface for the addresses, like \"eth1\". \"\": the one that has an address in their network.",
    },
    OptionHelp {
        section: "server",
        key: "listen",
        value: "[\"[::]:445\"]",
        set: false,
        help: "Addresses of the SMB transport, \"ip:port\" each.",
    },
    OptionHelp {
        section: "server",
        key: "advertise",
        value: "[]",
        set: false,
        help: "Addresses that clients should mount, as reported by the admin API: \"host:port\" or \"ip:port\"; \"10.1.0.0/16\" for this machine's addresses in that network, \"interface:eth1\" for those of an interface, each with the port it listens on. If a network or an interface is named, no other addresses are announced to clients for multichannel. Empty: those it listens on. `--advertise` and FOREBAY_ADVERTISE override it.",
    },
    OptionHelp {
        section: "server",
        key: "name",
        value: "\"FOREBAY\"",
        set: false,
        help: "Name sent to clients while they log in, 1 to 15 of A-Z, 0-9 and '-'.",
    },
    OptionHelp {
        section: "server",
        key: "min_dialect",
        value: "\"3.1.1\"",
        set: false,
        help: "Oldest dialect that clients may speak: \"2.0.2\", \"2.1\", \"3.0\", \"3.0.2\" or \"3.1.1\". In 3.1.1 a logon that was relayed from elsewhere is of no use. Below it, set `signing` or `encryption` to \"required\".",
    },
    OptionHelp {
        section: "server",
        key: "target_names",
        value: "[]",
        set: false,
        help: "Names and addresses by which clients mount from this server, like \"server.example\". A client that says which server it means (newer kernels, Windows and smbclient do) is refused where it means another. Empty: not looked at.",
    },
    OptionHelp {
        section: "server",
        key: "ntlm",
        value: "true",
        set: false,
        help: "Users may log on by NTLM, with their volume's password. false: by Kerberos only, which needs `keytab`. The CSI driver mounts by NTLM.",
    },
    OptionHelp {
        section: "server",
        key: "keytab",
        value: "\"\"",
        set: false,
        help: "File with the keys of this server's principal cifs/HOST, like \"/etc/forebay/krb5.keytab\": users may then log on by Kerberos. The user NAME of a volume is the principal NAME of the same realm. Only AES keys count. Not readable by everyone; read again when it changes. \"\": no Kerberos.",
    },
    OptionHelp {
        section: "server",
        key: "signing",
        value: "\"optional\"",
        set: false,
        help: "\"optional\": sessions are signed where the client asks for it. \"required\": every session is signed or sealed.",
    },
    OptionHelp {
        section: "server",
        key: "encryption",
        value: "\"offered\"",
        set: false,
        help: "\"off\": not offered. \"offered\": used where the client or the volume asks for it. \"required\": sessions that cannot seal are refused. Where integrity is wanted, sealing costs a tenth of signing.",
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
        help: "Oplocks, leases and durable handles are granted, so that clients cache; false: none are.",
    },
    OptionHelp {
        section: "server",
        key: "directory_leases",
        value: "true",
        set: false,
        help: "Directories are leased, too, where caching is on: clients cache names and attributes. A file with several names is looked at under the name that was used only: in other directories its size and times can be up to 30 s old.",
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
        help: "Threads for file-system calls that block, in each lane: look-ups, changes, contents.",
    },
    OptionHelp {
        section: "server",
        key: "io_engine",
        value: "\"auto\"",
        set: false,
        help: "\"io_uring\", \"readiness\" (epoll and threads), or \"auto\": io_uring where it is allowed.",
    },
    OptionHelp {
        section: "server",
        key: "rdma",
        value: "\"auto\"",
        set: false,
        help: "\"auto\": clients may come by RDMA (SMB Direct) to those addresses of `listen` that belong to an RDMA device, as long as its port is up; devices may come later. \"off\": TCP only.",
    },
    OptionHelp {
        section: "server",
        key: "rdma_port",
        value: "445",
        set: false,
        help: "Port of SMB Direct over InfiniBand and RoCE. Linux and Windows know no other than 445.",
    },
    OptionHelp {
        section: "server",
        key: "iwarp_port",
        value: "5445",
        set: false,
        help: "Port of SMB Direct over iWARP, which shares TCP's ports. Linux and Windows know no other than 5445.",
    },
    OptionHelp {
        section: "server",
        key: "direct_reads",
        value: "false",
        set: false,
        help: "READs over RDMA of 64 KiB and more: read what is not in the page cache past it (O_DIRECT), straight into the memory that the device sends from, where kernel (Linux 6.5) and file system can. That saves a copy, and keeps nothing for the next reader. Off until it has been measured on hardware: measure your own.",
    },
    OptionHelp {
        section: "server",
        key: "memory",
        value: "0",
        set: false,
        help: "Memory for payload: requests being received and served, data read and not yet sent, and what is kept for the next; \"4GiB\", at least 64MiB. Connections share it: where it is used up they wait, and none is ended or refused for it. One volume's clients have a quarter of it at most. 0: a quarter of the machine's memory, or of what the control group allows, from 64MiB to 16GiB. Beside it the server needs some 100 MiB, and up to 128 KiB for each connection.",
    },
    OptionHelp {
        section: "server",
        key: "stall_timeout_s",
        value: "120",
        set: false,
        help: "Seconds that a client has to take what is sent to it, and to send the rest of a request that it has begun; then its connection is ended. 1 to 3600.",
    },
    OptionHelp {
        section: "server",
        key: "drain_timeout_s",
        value: "30",
        set: false,
        help: "Seconds that requests in flight have to finish after SIGTERM. A second SIGTERM ends at once.",
    },
    OptionHelp {
        section: "admin",
        key: "socket",
        value: "\"/run/forebay/admin.sock\"",
        set: false,
        help: "Unix socket of the admin API (gRPC), mode 0600. A process that may open it may do everything.",
    },
    OptionHelp {
        section: "admin",
        key: "listen",
        value: "\"\"",
        set: false,
        help: "Address of the admin API over mutual TLS 1.3, \"ip:port\"; \"\": the socket alone. Needs certificate, key and client_ca.",
    },
    OptionHelp {
        section: "admin",
        key: "certificate",
        value: "\"\"",
        set: false,
        help: "PEM file with the server's certificate and what it was signed with. It, key and client_ca are looked at every few seconds: a change counts for the next connection, without a restart.",
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
        help: "PEM file with the authorities that sign clients' certificates.",
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
        help: "Name of the pool, 1 to 63 of a-z, 0-9 and '-'. A server has one pool or more; each is a [[pool]] section.",
    },
    OptionHelp {
        section: "[pool]",
        key: "path",
        value: "\"/var/lib/forebay\"",
        set: true,
        help: "Directory that holds the pool's volumes and their records. It must exist (or see create), and belongs to one server at a time.",
    },
    OptionHelp {
        section: "[pool]",
        key: "create",
        value: "false",
        set: false,
        help: "Make the directory, mode 0700, where it does not exist. The directory above it must.",
    },
    OptionHelp {
        section: "[pool]",
        key: "existing",
        value: "false",
        set: false,
        help: "The directory must hold a pool already. Where its disk is not mounted the server then does not start, instead of serving an empty pool.",
    },
    OptionHelp {
        section: "[pool]",
        key: "quota",
        value: "\"project\"",
        set: true,
        help: "\"project\": capacity is a hard limit by project quota (XFS or ext4 mounted with -o prjquota). \"none\": volumes without limit, which must be asked for.",
    },
    OptionHelp {
        section: "[pool]",
        key: "overcommit",
        value: "1.0",
        set: false,
        help: "The volumes' capacities together may be so many times the pool's size.",
    },
    OptionHelp {
        section: "[pool]",
        key: "write_through",
        value: "false",
        set: false,
        help: "Everything is on stable storage before it is answered, as on namespaces (pool.nvmeof.write_through). Without, a power cut can take what was answered and not flushed, and Linux's client may not notice: it opens a file again by a new handle, and a flush of that succeeds.",
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
