//! Why the kernel did not connect, and what to do about it.

use crate::limits::TEXT_CHARS_MAX;
use crate::options::Transport;

/// Why a connect failed. The message says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// EALREADY.
    #[error("this path is connected already")]
    AlreadyConnected,
    /// ECONNREFUSED.
    #[error("nothing listens at the address: is the target up, and is this its port?")]
    NothingListens,
    /// EHOSTUNREACH, ENETUNREACH, EADDRNOTAVAIL, ENODEV.
    #[error(
        "the address cannot be reached from here: check routes, the storage network and the address to go out from"
    )]
    Unreachable,
    /// ETIMEDOUT.
    #[error("the target did not answer in time: check the network between us, firewalls and MTU")]
    TimedOut,
    /// ECONNRESET, EPIPE, ECONNABORTED.
    #[error(
        "the target closed the connection while we connected: its log says why (a port for TLS only does so to hosts without)"
    )]
    Closed,
    /// EINVAL: the kernel named an option that it does not know, or does not list an option that we passed.
    #[error("this kernel does not know the option {0}: leave it out, or use a newer kernel")]
    UnknownOption(String),
    /// The module of the transport is not loaded.
    #[error("the kernel has no {}: load it, or install it on the node", .0.module())]
    NoTransport(Transport),
    /// The kernel has our host identifier with another host NQN, or vice versa.
    #[error(
        "this node has connections with a host NQN and host identifier that contradict ours: disconnect them"
    )]
    IdentityTaken,
    /// The target has the subsystem but does not allow this host.
    #[error("the target does not allow this host: add its host NQN to the subsystem's allowed hosts")]
    HostNotAllowed,
    /// The target has no such subsystem at this port.
    #[error("the target has no subsystem of this name at this port: check the NQN and the target's ports")]
    NoSuchSubsystem,
    /// The target requires keys and we have none.
    #[error("the target asks for authentication: configure its DH-HMAC-CHAP key")]
    AuthenticationRequired,
    /// The keys do not match.
    #[error("authentication failed: the DH-HMAC-CHAP keys here and on the target differ")]
    AuthenticationFailed,
    /// ENOKEY, EKEYREVOKED or EKEYEXPIRED, with TLS.
    #[error("the key for TLS is not in the kernel's keyring any more: it was removed or revoked")]
    NoTlsKey,
    /// ESRCH, with TLS.
    #[error(
        "no program does the TLS handshake: run tlshd (ktls-utils) on this node, in the same network namespace as this process"
    )]
    NoTlshd,
    /// EACCES, EKEYREJECTED or ETIMEDOUT, with TLS.
    #[error(
        "the TLS handshake failed: the target's key for this host NQN and this subsystem NQN is another one or of the other \
         identity version, or there is none, no TLS at this port or no tlshd; tlshd's log on both ends says more"
    )]
    HandshakeFailed,
    /// EIO from the handshake.
    #[error(
        "tlshd could not use the key: it must be started after the module nvme-keyring is loaded (restart it), and its log says \
         more"
    )]
    KeyNotUsable,
    /// ETIMEDOUT before the handshake ended.
    #[error(
        "the TLS handshake was not finished in time: does tlshd answer, here and on the target? Its log says more"
    )]
    HandshakeTimedOut,
    /// All controllers of the target are in use, or it is shutting down.
    #[error("the target has no controller to give: it is busy, or as many hosts are connected as it takes")]
    Busy,
    /// EACCES, EPERM.
    #[error("this process may not connect: it needs CAP_SYS_ADMIN")]
    NotPermitted,
    /// ENOMEM.
    #[error("the kernel is out of memory")]
    OutOfMemory,
    /// EIO, and the kernel's log could not be read or contained no more details.
    #[error(
        "the target refused (EIO), and the kernel's log does not say why: wrong NQN, host not allowed, or keys that differ{0}"
    )]
    Rejected(Said),
    /// EINVAL, and the kernel's log could not be read or contained no more details.
    #[error(
        "the kernel does not take the request (EINVAL): an option or a combination of them that it does not know{0}"
    )]
    NotTaken(Said),
    /// Any other error.
    #[error("the kernel says: {0} (errno {1})")]
    Other(std::io::ErrorKind, i32),
}

/// The last message of the kernel, if any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said(pub Option<String>);

impl std::fmt::Display for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Some(line) => write!(f, " (it said: {line})"),
            None => Ok(()),
        }
    }
}

/// The facts about a failed connect.
pub(crate) struct Failure<'a> {
    pub(crate) errno: i32,
    /// The kernel's messages during the connect, possibly with messages about connects of other processes.
    pub(crate) log: &'a [String],
    pub(crate) transport: Transport,
    /// Whether TLS was requested.
    pub(crate) tls: bool,
    /// Options that this kernel does not list.
    pub(crate) unknown: &'a [&'static str],
}

impl Failure<'_> {
    pub(crate) fn refusal(&self) -> Refusal {
        if let Some(refusal) = self.handshake() {
            return refusal;
        }
        match self.errno {
            libc::EALREADY => Refusal::AlreadyConnected,
            libc::ECONNREFUSED if !self.says("uthentication") => Refusal::NothingListens,
            libc::EHOSTUNREACH | libc::ENETUNREACH | libc::EADDRNOTAVAIL | libc::ENODEV => {
                Refusal::Unreachable
            }
            libc::ETIMEDOUT => Refusal::TimedOut,
            libc::ECONNRESET | libc::EPIPE | libc::ECONNABORTED => Refusal::Closed,
            libc::EKEYREJECTED => Refusal::AuthenticationFailed,
            // A missing PSK and, since Linux 6.10, also a missing key of DH-HMAC-CHAP.
            libc::ENOKEY if self.tls && !self.says("authentication setup") => Refusal::NoTlsKey,
            libc::ENOKEY => Refusal::AuthenticationRequired,
            libc::EACCES | libc::EPERM => Refusal::NotPermitted,
            libc::ENOMEM => Refusal::OutOfMemory,
            libc::EINVAL => self.invalid(),
            // A command's status becomes EIO; older kernels return ECONNREFUSED for a failed authentication.
            libc::EIO | libc::ECONNREFUSED | libc::EOPNOTSUPP => self.rejected(),
            errno => Refusal::Other(std::io::Error::from_raw_os_error(errno).kind(), errno),
        }
    }

    /// A failure of tlshd or of the kernel's TLS handshake.
    fn handshake(&self) -> Option<Refusal> {
        // From nvme_tcp_start_tls: the result of tlshd, or that it did not finish. If the log cannot be read, only errors with
        // no other meaning count.
        let (ended, hung) = (self.says("TLS handshake complete"), self.says("TLS handshake failed"));
        match self.errno {
            _ if !self.tls => None,
            libc::ESRCH => Some(Refusal::NoTlshd),
            libc::EACCES => Some(Refusal::HandshakeFailed),
            // The other end closed the connection in the middle: it has no such key.
            libc::EKEYREJECTED | libc::ETIMEDOUT if ended => Some(Refusal::HandshakeFailed),
            libc::EIO if ended => Some(Refusal::KeyNotUsable),
            libc::ETIMEDOUT if hung => Some(Refusal::HandshakeTimedOut),
            libc::EKEYREVOKED | libc::EKEYEXPIRED => Some(Refusal::NoTlsKey),
            _ => None,
        }
    }

    fn invalid(&self) -> Refusal {
        if let Some(option) = self.unknown.first() {
            return Refusal::UnknownOption((*option).into());
        }
        if let Some(line) = self.line("unknown parameter or missing value") {
            // The kernel quotes the option with its value, which may be a secret.
            let name =
                line.split('\'').nth(1).and_then(|quoted| quoted.split('=').next()).unwrap_or_default();
            return Refusal::UnknownOption(name.chars().take(TEXT_CHARS_MAX).collect());
        }
        if self.says("no handler found for transport") {
            return Refusal::NoTransport(self.transport);
        }
        if self.says("but different host") {
            return Refusal::IdentityTaken;
        }
        Refusal::NotTaken(self.said())
    }

    fn rejected(&self) -> Refusal {
        let reasons: [(&str, Refusal); 8] = [
            // From nvmf_log_connect_error, one for each status of a Connect command (NVMe-oF 1.1 3.3).
            ("is not allowed, hostnqn", Refusal::HostNotAllowed),
            ("Connect Invalid Data Parameter, subsysnqn", Refusal::NoSuchSubsystem),
            ("Connect Invalid Data Parameter, hostnqn", Refusal::HostNotAllowed),
            ("controller is busy", Refusal::Busy),
            ("authentication failed", Refusal::AuthenticationFailed),
            ("authentication required", Refusal::AuthenticationRequired),
            ("authentication setup failed", Refusal::AuthenticationRequired),
            ("no key", Refusal::AuthenticationRequired),
        ];
        let found = reasons.into_iter().find(|(text, _)| self.says(text)).map(|(_, reason)| reason);
        found.unwrap_or_else(|| Refusal::Rejected(self.said()))
    }

    fn line(&self, text: &str) -> Option<&str> {
        self.log.iter().rev().map(String::as_str).find(|line| line.contains(text))
    }

    fn says(&self, text: &str) -> bool {
        self.line(text).is_some()
    }

    /// The last line that cannot contain a secret.
    fn said(&self) -> Said {
        let harmless = |line: &&String| !line.contains("DHHC-1") && !line.contains("secret");
        Said(self.log.iter().rev().find(harmless).cloned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(errno: i32, log: &[&str]) -> Refusal {
        let log: Vec<String> = log.iter().map(|line| (*line).to_owned()).collect();
        Failure { errno, log: &log, transport: Transport::Rdma, tls: true, unknown: &[] }.refusal()
    }

    #[test]
    fn errno_determines_the_refusal_without_a_kernel_log() {
        for (errno, expected) in [
            (libc::EALREADY, Refusal::AlreadyConnected),
            (libc::ECONNREFUSED, Refusal::NothingListens),
            (libc::EHOSTUNREACH, Refusal::Unreachable),
            (libc::ENETUNREACH, Refusal::Unreachable),
            (libc::ETIMEDOUT, Refusal::TimedOut),
            (libc::ECONNRESET, Refusal::Closed),
            (libc::EKEYREJECTED, Refusal::AuthenticationFailed),
            (libc::ENOKEY, Refusal::NoTlsKey),
            (libc::EPERM, Refusal::NotPermitted),
            (libc::ENOMEM, Refusal::OutOfMemory),
            (libc::EIO, Refusal::Rejected(Said(None))),
            (libc::EINVAL, Refusal::NotTaken(Said(None))),
        ] {
            assert_eq!(refusal(errno, &[]), expected);
        }
        assert!(matches!(refusal(libc::ENOSPC, &[]), Refusal::Other(_, libc::ENOSPC)));
    }

    #[test]
    fn tls_handshake_failures_are_distinguished_by_errno_and_log() {
        let failed = "nvme nvme0: queue 0: TLS handshake complete, error -";
        for (errno, expected) in [
            (libc::ESRCH, Refusal::NoTlshd),
            (libc::EACCES, Refusal::HandshakeFailed),
            (libc::EKEYREJECTED, Refusal::HandshakeFailed),
            (libc::EIO, Refusal::KeyNotUsable),
            (libc::ETIMEDOUT, Refusal::HandshakeFailed),
            (libc::EKEYREVOKED, Refusal::NoTlsKey),
        ] {
            assert_eq!(refusal(errno, &[&format!("{failed}{errno}")]), expected);
        }
        let hung = "nvme nvme0: queue 0: TLS handshake failed, error -110";
        assert_eq!(refusal(libc::ETIMEDOUT, &[hung]), Refusal::HandshakeTimedOut);
        assert_eq!(
            refusal(libc::ETIMEDOUT, &["nvme nvme0: failed to connect socket: -110"]),
            Refusal::TimedOut
        );
        let plain =
            Failure { errno: libc::EACCES, log: &[], transport: Transport::Tcp, tls: false, unknown: &[] };
        assert_eq!(plain.refusal(), Refusal::NotPermitted);
        assert_eq!(
            Failure { errno: libc::ESRCH, ..plain }.refusal(),
            Refusal::Other(std::io::Error::from_raw_os_error(libc::ESRCH).kind(), libc::ESRCH)
        );
    }

    #[test]
    fn target_status_is_determined_from_the_kernel_log() {
        let nqn = "nqn.2026-01.io.example:pool";
        for (said, expected) in [
            (format!("Connect for subsystem {nqn} is not allowed, hostnqn: nqn.x"), Refusal::HostNotAllowed),
            (format!("Connect Invalid Data Parameter, subsysnqn \"{nqn}\""), Refusal::NoSuchSubsystem),
            ("Connect command failed: controller is busy or not available".into(), Refusal::Busy),
            ("qid 0: authentication failed".into(), Refusal::AuthenticationFailed),
            ("Connect command failed: authentication required".into(), Refusal::AuthenticationRequired),
        ] {
            let log =
                [format!("nvme nvme0: {said}"), "nvme nvme0: failed to connect queue: 0 ret=16772".into()];
            assert_eq!(refusal(libc::EIO, &[&log[0], &log[1]]), expected, "{said}");
        }
        let refused = refusal(libc::ENOKEY, &["nvme nvme0: qid 0: authentication setup failed"]);
        assert_eq!(refused, Refusal::AuthenticationRequired);
        let refused = refusal(libc::ECONNREFUSED, &["nvme nvme0: qid 0: authentication failed"]);
        assert_eq!(refused, Refusal::AuthenticationFailed);
    }

    #[test]
    fn einval_is_explained_by_the_kernel_log_or_an_unknown_option() {
        let option = "nvme_fabrics: unknown parameter or missing value 'tls_key=3' in ctrl creation request";
        assert_eq!(refusal(libc::EINVAL, &[option]), Refusal::UnknownOption("tls_key".into()));
        let transport = "nvme_fabrics: no handler found for transport rdma.";
        assert_eq!(refusal(libc::EINVAL, &[transport]), Refusal::NoTransport(Transport::Rdma));
        let identity = "nvme_fabrics: found same hostid 3217c216 but different hostnqn nqn.x";
        assert_eq!(refusal(libc::EINVAL, &[identity]), Refusal::IdentityTaken);
        let old = Failure {
            errno: libc::EINVAL,
            log: &[],
            transport: Transport::Tcp,
            tls: true,
            unknown: &["tls"],
        };
        assert_eq!(old.refusal(), Refusal::UnknownOption("tls".into()));
    }

    #[test]
    fn secrets_in_the_kernel_log_do_not_appear_in_errors() {
        let quoted = [
            "nvme_fabrics: Invalid DH-CHAP secret DHHC-1:00:c2VjcmV0:",
            "nvme_fabrics: unknown parameter or missing value 'dhchap_secret=DHHC-1:00:c2VjcmV0:' in ctrl creation request",
        ];
        for line in quoted {
            for errno in [libc::EIO, libc::EINVAL] {
                let shown = format!("{0} {0:?}", refusal(errno, &[line]));
                assert!(!shown.contains("c2VjcmV0"), "{shown}");
            }
        }
    }
}
