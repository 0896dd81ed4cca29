//! Connects a pool's namespace, and repeats queries that its target did not answer.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_nvmeof::{
    Authentication, DhChapKey, EnsureError, Fabrics, FindError, HostIdentity, InvalidKey, Namespace,
    NotAcquired, ReservationError, Subsystem, Tls, TlsPsk,
};
use tracing::warn;

use super::reason::Reason;
use crate::config::{InstanceSection, NvmeofSection};
use crate::limits::KEY_FILE_BYTES_MAX;

/// Interval between two looks for a namespace that has not appeared yet.
pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Time after which a rescan is requested for a namespace that a connected target does not show.
const RESCAN_AFTER: Duration = Duration::from_secs(3);

fn node(section: &NvmeofSection) -> String {
    match section.node.as_str() {
        "" => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        node => node.to_owned(),
    }
}

/// The same subsystem, connected as the host that this instance was before it had its cluster and machine id; `None` if that
/// is the same host.
pub(super) fn former(
    instance: &InstanceSection,
    section: &NvmeofSection,
    now: &HostIdentity,
) -> Result<Option<Subsystem>, Reason> {
    let host = HostIdentity::of(&instance.name, &node(section))?;
    Ok((host != *now).then(|| Subsystem::new(section.nqn.clone(), host)))
}

/// The subsystem to connect, and the host to connect it as.
pub(super) fn subsystem(instance: &InstanceSection, section: &NvmeofSection) -> Result<Subsystem, Reason> {
    let node = node(section);
    let host = HostIdentity::of_machine(&instance.cluster_uid, &section.machine_id, &instance.name, &node)?;
    let mut wanted = Subsystem::new(section.nqn.clone(), host);
    wanted.timing.keep_alive_s = section.keep_alive_s;
    if let Some(host) = key(&section.dhchap_key, DhChapKey::parse)? {
        let controller = key(&section.dhchap_controller_key, DhChapKey::parse)?;
        wanted.authentication = Some(Authentication { host, controller });
    }
    if let Some(psk) = key(&section.tls_key, TlsPsk::parse)? {
        let identity = section.identity_version().expect("the configuration was checked");
        wanted.tls = Some(Tls { psk, identity });
    }
    Ok(wanted)
}

/// The key in a file; `None` if no file is named.
fn key<T>(path: &Path, parse: impl Fn(&str) -> Result<T, InvalidKey>) -> Result<Option<T>, Reason> {
    if path.as_os_str().is_empty() {
        return Ok(None);
    }
    let read = || -> io::Result<zeroize::Zeroizing<String>> {
        let mut text = zeroize::Zeroizing::new(String::with_capacity(KEY_FILE_BYTES_MAX as usize));
        File::open(path)?.take(KEY_FILE_BYTES_MAX).read_to_string(&mut text)?;
        Ok(text)
    };
    let text = read().map_err(|error| Reason::KeyFile { path: path.to_owned(), error })?;
    parse(text.trim()).map(Some).map_err(|error| Reason::Key { path: path.to_owned(), error })
}

/// Connects until a path takes I/O or the time is over. The target may start after us.
pub(super) fn connected(
    fabrics: &Fabrics,
    wanted: &Subsystem,
    section: &NvmeofSection,
) -> Result<Namespace, Reason> {
    let until = Instant::now() + section.connect_time();
    loop {
        let found = match fabrics.ensure_connected(wanted, &section.paths) {
            Ok(ensured) => {
                for error in &ensured.failed {
                    warn!(%error, "a path to a namespace is missing");
                }
                wait_for(fabrics, section, until)
            }
            // Waiting does not help.
            Err(error @ (EnsureError::NotPlanned(_) | EnsureError::Key(_))) => return Err(error.into()),
            Err(error) => Err(error.into()),
        };
        match found {
            Ok(namespace) => return Ok(namespace),
            Err(reason) if Instant::now() >= until => return Err(reason),
            Err(_) => std::thread::sleep(LOOK_AGAIN),
        }
    }
}

/// Waits for the namespace: the kernel lists it a moment after it has connected.
fn wait_for(fabrics: &Fabrics, section: &NvmeofSection, until: Instant) -> Result<Namespace, Reason> {
    let mut rescan = Instant::now() + RESCAN_AFTER;
    loop {
        let found = fabrics.sysfs().read();
        let reason = match found.namespace(&section.nqn, &section.namespace) {
            Ok(namespace) => {
                let takes_io = found.subsystem(&section.nqn).is_some_and(|s| s.takes_io(namespace.nsid));
                if takes_io {
                    return Ok(namespace.clone());
                }
                Reason::NoPath
            }
            Err(error) => error.into(),
        };
        let now = Instant::now();
        if now >= until {
            return Err(reason);
        }
        if now >= rescan && matches!(reason, Reason::Find(FindError::NoNamespace { .. })) {
            rescan = now + RESCAN_AFTER;
            for controller in found.subsystem(&section.nqn).into_iter().flat_map(|s| &s.controllers) {
                if let Err(error) = fabrics.rescan(&controller.name) {
                    warn!(controller = controller.name, %error, "the kernel does not look for namespaces again");
                }
            }
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Queries the target again if it did not answer, as soon as there is a path. It may have executed the first request, which
/// the next answer shows.
pub(super) fn patiently<T>(
    fabrics: &Fabrics,
    section: &NvmeofSection,
    until: Instant,
    ask: impl Fn() -> Result<T, Reason>,
) -> Result<T, Reason> {
    loop {
        let reason = match ask() {
            Err(
                reason @ (Reason::Reservation(ReservationError::NoPath)
                | Reason::NotAcquired(NotAcquired::Reservation(ReservationError::NoPath))),
            ) => reason,
            answer => return answer,
        };
        if Instant::now() >= until {
            return Err(reason);
        }
        warn!(%reason, "the reservation is asked about again when there is a path");
        std::thread::sleep(LOOK_AGAIN);
        wait_for(fabrics, section, until)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_key_is_reported_by_its_path_without_its_contents() {
        let file = tempfile::NamedTempFile::new().expect("tmp");
        std::fs::write(file.path(), "DHHC-1:00:c2VjcmV0:\n").expect("written");
        let reported = [
            key(file.path(), DhChapKey::parse).expect_err("it is none"),
            key(file.path(), TlsPsk::parse).expect_err("it is none"),
        ];
        for error in reported.map(|error| error.to_string()) {
            let named = error.contains(&file.path().display().to_string());
            assert!(named && !error.contains("c2VjcmV0"), "{error}");
        }
        assert!(matches!(key(Path::new("/nonexistent/key"), TlsPsk::parse), Err(Reason::KeyFile { .. })));
        assert!(matches!(key(Path::new(""), DhChapKey::parse), Ok(None)));
    }
}
