//! Errors of CSI calls, and the gRPC codes that the CSI specification requires for them.

use std::fmt::Write;
use std::sync::Arc;

use tonic::{Code, Status};

use crate::mount::MountError;
use crate::placement::Refusal;

/// Why a CSI call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{0} is required")]
    Missing(&'static str),
    #[error("{field}: {reason}")]
    Invalid { field: &'static str, reason: String },
    #[error("unknown parameter {key:?}; known are {known}")]
    UnknownParameter { key: String, known: &'static str },
    #[error(
        "secrets contain no password: name a Secret with the key password (and username, which defaults to the volume's id) \
         in csi.storage.k8s.io/provisioner-secret-name (CreateVolume) and \
         csi.storage.k8s.io/node-stage-secret-name (NodeStageVolume)"
    )]
    MissingSecret,
    #[error("volume capability: {0}")]
    Capability(String),
    #[error("capacity range: {0}")]
    Capacity(String),
    #[error("volume {volume_id} already exists with a different {what}")]
    VolumeExists { volume_id: String, what: &'static str },
    #[error("volume {0} does not exist")]
    NoVolume(String),
    #[error("snapshot {0} does not exist")]
    NoSnapshot(String),
    #[error("group of snapshots {0} does not exist")]
    NoSnapshotGroup(String),
    #[error("starting_token was not issued by this driver: start again without one")]
    UnknownToken,
    #[error("a call for volume {0} is still in progress")]
    InFlight(String),
    #[error("too many calls in progress")]
    TooManyInFlight,
    #[error("{what} did not complete within {seconds} s and is still running")]
    Deadline { what: &'static str, seconds: u64 },
    #[error("the thread for {0} could not be started, or ended early")]
    Thread(&'static str),
    #[error("volume {volume_id} is not staged at {path}")]
    NotStaged { volume_id: String, path: String },
    #[error(
        "volume {volume_id} is staged for another group, and the call has no Secret to mount it for group {gid} at {path}: \
         name the volume's Secret in csi.storage.k8s.io/node-publish-secret-name of the StorageClass (nodePublishSecretRef \
         of the PersistentVolume), or give all pods that use the volume on one node the same fsGroup"
    )]
    GroupNotStaged { volume_id: String, gid: u32, path: String },
    #[error("nothing is mounted at {0}")]
    NotMounted(String),
    #[error("{path} is taken: {found}")]
    PathTaken { path: String, found: String },
    #[error("{path} is in use")]
    Busy { path: String },
    #[error("the volume allows a single writer and is already published at {path}")]
    PublishedElsewhere { path: String },
    #[error("{0}")]
    Mount(#[from] MountError),
    #[error("{what} {path}: {source}")]
    Io { what: &'static str, path: String, source: std::io::Error },
    #[error("{who}: {}", describe_status(.status))]
    Admin { who: Arc<str>, status: Box<Status> },
    #[error("{what}: {}", describe_kubernetes(.source))]
    Kubernetes { what: &'static str, source: Box<kube::Error> },
    /// The request is valid; it can succeed later.
    #[error("{0}")]
    NotNow(String),
    /// It cannot succeed until an administrator or another program changes something.
    #[error("{0}")]
    Refused(String),
    #[error("StorageCluster {cluster}: {refusal}")]
    Placement { cluster: String, refusal: Refusal },
    #[error("a concurrent call for volume {0} was faster; retry")]
    Overtaken(String),
    #[error("the system provides no random bytes")]
    NoRandomness,
    #[error("the server advertises no address that a node can mount; set its advertised addresses")]
    NoAddress,
    #[error("{0} is not supported")]
    NotOffered(&'static str),
}

impl Error {
    pub(crate) fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { field, reason: reason.into() }
    }

    /// Whether a retry fails again unless the state changes.
    pub(crate) fn is_final(&self) -> bool {
        matches!(
            self.code(),
            Code::InvalidArgument | Code::ResourceExhausted | Code::FailedPrecondition | Code::OutOfRange
        )
    }

    /// Whether the server that has the volume does not answer, or is not ready.
    pub(crate) fn server_is_silent(&self) -> bool {
        match self {
            Self::Admin { .. } => matches!(self.code(), Code::Unavailable | Code::DeadlineExceeded),
            Self::Placement { refusal, .. } => matches!(refusal, Refusal::NotReady { .. }),
            _ => false,
        }
    }

    fn code(&self) -> Code {
        match self {
            Self::Missing(_)
            | Self::Invalid { .. }
            | Self::UnknownParameter { .. }
            | Self::MissingSecret
            | Self::Capability(_) => Code::InvalidArgument,
            Self::Capacity(_) => Code::OutOfRange,
            Self::VolumeExists { .. } | Self::PathTaken { .. } => Code::AlreadyExists,
            Self::NoVolume(_) | Self::NoSnapshot(_) | Self::NoSnapshotGroup(_) | Self::NotMounted(_) => {
                Code::NotFound
            }
            // CSI "Error Scheme": an operation is pending for the volume; ListVolumes: the token is invalid.
            Self::InFlight(_) | Self::UnknownToken | Self::Overtaken(_) => Code::Aborted,
            // gRPC status codes: transient, the caller tries again later. RESOURCE_EXHAUSTED would tell csi-provisioner that
            // the storage is full, and CreateVolume to give up the volume's placement.
            Self::TooManyInFlight => Code::Unavailable,
            Self::Deadline { .. } => Code::DeadlineExceeded,
            Self::Thread(_) | Self::Io { .. } | Self::NoRandomness => Code::Internal,
            Self::NotStaged { .. }
            | Self::GroupNotStaged { .. }
            | Self::Busy { .. }
            | Self::PublishedElsewhere { .. }
            | Self::NoAddress
            | Self::Refused(_) => Code::FailedPrecondition,
            Self::Mount(e) => e.code(),
            Self::NotNow(_) => Code::Unavailable,
            Self::Kubernetes { source, .. } => match &**source {
                // Another client changed the object.
                kube::Error::Api(status) if status.is_conflict() => Code::Aborted,
                // Too many requests, or a timeout.
                kube::Error::Api(status) if matches!(status.code, 408 | 429 | 500..) => Code::Unavailable,
                // A missing permission, or an object that the API rejects.
                kube::Error::Api(_) => Code::Internal,
                _ => Code::Unavailable,
            },
            Self::Placement { refusal, .. } => match refusal {
                Refusal::NoInstance | Refusal::NotReady { .. } => Code::Unavailable,
                Refusal::Full { .. } => Code::ResourceExhausted,
                Refusal::NoBackend { .. } | Refusal::NoQuota(_) => Code::InvalidArgument,
            },
            Self::Admin { status, .. } => match status.code() {
                code @ (Code::InvalidArgument
                | Code::NotFound
                | Code::AlreadyExists
                | Code::ResourceExhausted
                | Code::FailedPrecondition
                | Code::OutOfRange
                | Code::Aborted
                | Code::Unimplemented
                | Code::Unavailable
                | Code::DeadlineExceeded) => code,
                // tonic's own timeout.
                Code::Cancelled => Code::DeadlineExceeded,
                _ => Code::Internal,
            },
            Self::NotOffered(_) => Code::Unimplemented,
        }
    }
}

/// The message with its causes: "transport error" alone does not mention an expired certificate.
pub(crate) fn describe_status(status: &Status) -> String {
    let mut text = status.message().to_owned();
    if let Some(source) = std::error::Error::source(status) {
        let _ = write!(text, ": {}", with_sources(source));
    }
    text
}

/// The API server's own message; `Display` prints everything twice.
fn describe_kubernetes(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => format!("the Kubernetes API says {}: {}", status.code, status.message),
        other => format!("the call to the Kubernetes API failed: {}", with_sources(other)),
    }
}

/// An error with its causes, except causes that the preceding text already contains.
pub(crate) fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let cause = source.to_string();
        if !text.contains(&cause) {
            let _ = write!(text, ": {cause}");
        }
        next = source.source();
    }
    text
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        Self::new(error.code(), error.to_string())
    }
}
