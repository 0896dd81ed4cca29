//! What can go wrong in a call, and which gRPC code the CSI specification wants for it.

use tonic::{Code, Status};

use crate::mount::MountError;

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
        "secrets hold no password: name a Secret with the key password (and username, or the volume's id is the \
         user) in csi.storage.k8s.io/provisioner-secret-name (CreateVolume) and \
         csi.storage.k8s.io/node-stage-secret-name (NodeStageVolume)"
    )]
    MissingSecret,
    #[error("volume capability: {0}")]
    Capability(String),
    #[error("capacity range: {0}")]
    Capacity(String),
    #[error("volume {volume_id} exists already with another {what}")]
    VolumeExists { volume_id: String, what: &'static str },
    #[error("volume {0} does not exist")]
    NoVolume(String),
    #[error("starting_token is none that this driver gave out: start again without one")]
    UnknownToken,
    #[error("a call for volume {0} is still under way")]
    InFlight(String),
    #[error("too many calls under way")]
    TooManyInFlight,
    #[error("{what} did not end within {seconds} s and goes on")]
    Deadline { what: &'static str, seconds: u64 },
    #[error("the thread for {0} could not be started or ended early")]
    Thread(&'static str),
    #[error("volume {volume_id} is not staged at {path}")]
    NotStaged { volume_id: String, path: String },
    #[error("nothing is mounted at {0}")]
    NotMounted(String),
    #[error("{path} is taken: {found}")]
    PathTaken { path: String, found: String },
    #[error("{path} is in use")]
    Busy { path: String },
    #[error("the volume has a single writer and is published at {path}")]
    PublishedElsewhere { path: String },
    #[error("{0}")]
    Mount(#[from] MountError),
    #[error("{what} {path}: {source}")]
    Io { what: &'static str, path: String, source: std::io::Error },
    #[error("server: {}", .0.message())]
    Admin(Status),
    #[error("the server tells no address that a node could mount; set its advertised addresses")]
    NoAddress,
    #[error("{0} is not offered")]
    NotOffered(&'static str),
}

impl Error {
    pub(crate) fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { field, reason: reason.into() }
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
            Self::NoVolume(_) | Self::NotMounted(_) => Code::NotFound,
            // CSI "Error Scheme": an operation is pending for the volume; ListVolumes: the token is invalid.
            Self::InFlight(_) | Self::UnknownToken => Code::Aborted,
            Self::TooManyInFlight => Code::ResourceExhausted,
            Self::Deadline { .. } => Code::DeadlineExceeded,
            Self::Thread(_) | Self::Io { .. } => Code::Internal,
            Self::NotStaged { .. }
            | Self::Busy { .. }
            | Self::PublishedElsewhere { .. }
            | Self::NoAddress => Code::FailedPrecondition,
            Self::Mount(e) => e.code(),
            Self::Admin(status) => match status.code() {
                code @ (Code::InvalidArgument
                | Code::NotFound
                | Code::AlreadyExists
                | Code::ResourceExhausted
                | Code::FailedPrecondition
                | Code::OutOfRange
                | Code::Aborted
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

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        Self::new(error.code(), error.to_string())
    }
}
