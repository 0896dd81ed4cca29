//! Reports the effects of a configuration on this machine, without starting anything.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use rustix::thread::{CapabilitySet, capabilities};

use crate::advertise::{self, Advertised};
use crate::backend::directory::quota;
use crate::config::{Config, IoEngine, PoolQuota, PoolSection};
use crate::daemon::Exit;
use crate::interfaces;
use crate::io::uring;
use crate::keytab::KeytabFile;
use crate::pool::Pool;
use crate::tls::Certificates;

/// The findings, and the exit status of a start that one of them prevents.
pub struct Report {
    /// For people, one line for each finding.
    pub text: String,
    /// [`Exit::Done`] if nothing prevents a start.
    pub exit: Exit,
}

impl Report {
    fn line(&mut self, what: &str, text: impl std::fmt::Display) {
        let _ = writeln!(self.text, "{what:<12}{text}");
    }

    /// Reports a problem that prevents a start.
    fn fatal(&mut self, what: &str, exit: Exit, text: impl std::fmt::Display) {
        self.line(what, format_args!("ERROR: {text}"));
        if self.exit == Exit::Done {
            self.exit = exit;
        }
    }
}

/// Checks everything that `config` names.
#[must_use]
pub fn report(config: &Config) -> Report {
    let mut report = Report { text: String::new(), exit: Exit::Done };
    if !config.instance.name.is_empty() {
        report.line("instance", format_args!("{}, epoch {}", config.instance.name, config.instance.epoch));
    }
    for address in &config.server.listen {
        listening(&mut report, "SMB", *address);
    }
    advertised(&mut report, config);
    engine(&mut report, config.server.io_engine);
    if !config.server.keytab.as_os_str().is_empty() {
        match KeytabFile::load(&config.server.keytab) {
            Ok(keytab) => report.line("Kerberos", keytab.principals().join(", ")),
            Err(error) => report.fatal("Kerberos", Exit::Config, error),
        }
    }
    report.line("admin", config.admin.socket.display());
    if let Ok(address) = config.admin.listen.parse() {
        listening(&mut report, "admin TLS", address);
        match Certificates::load(&config.admin) {
            Ok(certificates) => {
                let about = certificates.about();
                let clients = config.admin.allowed_clients.join(", ");
                report.line("", format_args!("certificate of {}, clients {clients}", about.names.join(", ")));
                if let Some(problem) = certificates.problem() {
                    report.line("", format_args!("warning: {problem}"));
                }
            }
            Err(error) => report.fatal("", Exit::Config, error),
        }
    }
    if let Ok(address) = config.http.listen.parse() {
        listening(&mut report, "HTTP", address);
    }
    for section in &config.pool {
        pool(&mut report, section);
    }
    privileges(&mut report, config);
    report
}

/// A running server has the address already: that is not an error in the configuration.
fn listening(report: &mut Report, what: &str, address: SocketAddr) {
    match std::net::TcpListener::bind(address) {
        Ok(_) => report.line(what, format_args!("{address}, free")),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            report.line(what, format_args!("{address}, currently in use"));
        }
        Err(error) => report.fatal(what, Exit::Listen, format_args!("{address}: {error}")),
    }
}

fn advertised(report: &mut Report, config: &Config) {
    for address in &config.instance.addresses {
        let held = interfaces::locals().iter().any(|local| local.address == address.ip());
        let now = if held { "currently on an interface" } else { "currently on no interface" };
        report.line("address", format_args!("{address}, {now}: assigned when the pools are served"));
    }
    let chooses = config.server.advertise.iter().any(Advertised::chooses);
    let locals = if chooses { interfaces::locals() } else { Vec::new() };
    let (found, empty) = advertise::resolve(&config.server.advertise, &locals, &config.server.listen);
    report.line("advertised", found.join(" "));
    for entry in empty {
        report.line("", format_args!("warning: {entry} currently matches no address of this machine that the server listens on and that other machines can reach"));
    }
}

fn engine(report: &mut Report, wanted: IoEngine) {
    match (wanted, uring::probe()) {
        (IoEngine::Readiness, _) => report.line("I/O engine", "readiness, as configured"),
        (_, Ok(())) => report.line("I/O engine", "io_uring"),
        (IoEngine::Auto, Err(reason)) => report.line("I/O engine", format_args!("readiness: {reason}")),
        (IoEngine::IoUring, Err(reason)) => report.fatal("I/O engine", Exit::Engine, reason),
    }
}

fn pool(report: &mut Report, section: &PoolSection) {
    let (what, path) = (format!("pool {}", section.name), section.path.display());
    if let Some(nvmeof) = &section.nvmeof {
        // Further checks would have to connect and reserve the namespace.
        return report.line(&what, format_args!("{path}, {} of {}", nvmeof.namespace, nvmeof.nqn));
    }
    let directory = match std::fs::File::open(&section.path) {
        Ok(directory) => directory,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && section.create => {
            match section.path.parent().map(std::fs::File::open) {
                Some(Ok(above)) => {
                    report.line(&what, format_args!("{path} will be created"));
                    above
                }
                _ => {
                    return report.fatal(
                        &what,
                        Exit::Pool,
                        format_args!("the parent directory of {path} does not exist"),
                    );
                }
            }
        }
        Err(error) => return report.fatal(&what, Exit::Pool, format_args!("{path}: {error}")),
    };
    if let Err(error) = Pool::expected(section) {
        return report.fatal(&what, Exit::Pool, error);
    }
    let volumes = std::fs::read_dir(section.path.join(".forebay/volumes")).map_or(0, |entries| {
        entries.flatten().filter(|entry| entry.path().extension() == Some("json".as_ref())).count()
    });
    let space = rustix::fs::fstatvfs(&directory).map_or_else(
        |error| error.to_string(),
        |space| {
            let mebibytes = |blocks: u64| (blocks * space.f_frsize) >> 20;
            format!("{} of {} MiB free", mebibytes(space.f_bavail), mebibytes(space.f_blocks))
        },
    );
    report.line(&what, format_args!("{path}, {volumes} volumes, {space}"));
    match (section.quota, quota::enforced(directory.as_fd())) {
        (PoolQuota::Project, true) => report.line("", "project quota is enforced"),
        (PoolQuota::Project, false) => report.line(
            "",
            "warning: the file system does not enforce project quotas, so volumes will be refused: mount it with -o prjquota, \
             or set quota = \"none\" for the pool",
        ),
        (PoolQuota::None, _) => report.line("", "capacity of volumes is not enforced"),
    }
}

fn privileges(report: &mut Report, config: &Config) {
    let held = capabilities(None).map(|sets| sets.effective).unwrap_or(CapabilitySet::empty());
    let low_port = config.server.listen.iter().any(|address| (1..1024).contains(&address.port()));
    let quotas = config.pool.iter().any(|pool| pool.quota == PoolQuota::Project);
    let wanted = [
        (low_port, CapabilitySet::NET_BIND_SERVICE, "CAP_NET_BIND_SERVICE, for ports below 1024"),
        (quotas, CapabilitySet::SYS_ADMIN, "CAP_SYS_ADMIN, for project quotas"),
        (true, CapabilitySet::CHOWN, "CAP_CHOWN, for the owners of files on POSIX mounts"),
        (true, CapabilitySet::FSETID, "CAP_FSETID, for set-gid bits on POSIX mounts"),
        (true, CapabilitySet::DAC_OVERRIDE, "CAP_DAC_OVERRIDE, for files of other users"),
        (true, CapabilitySet::FOWNER, "CAP_FOWNER, for times and modes of other users' files"),
    ];
    let missing: Vec<&str> = wanted
        .iter()
        .filter(|(is_wanted, capability, _)| *is_wanted && !held.contains(*capability))
        .map(|(_, _, what)| *what)
        .collect();
    if missing.is_empty() {
        report.line("privileges", "all that the server uses");
    }
    for what in missing {
        report.line("privileges", format_args!("warning: missing {what}"));
    }
}
