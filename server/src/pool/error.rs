//! Errors of a pool.

use std::path::PathBuf;

use crate::volume::RecordError;

/// Why a pool, or an operation on it, failed.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// Its directory does not exist.
    #[error(
        "pool {pool}: {path} does not exist: make the directory (or mount what belongs there), or change pool.path"
    )]
    Missing {
        /// Name.
        pool: String,
        /// Directory.
        path: PathBuf,
    },
    /// Its directory should hold a pool and does not.
    #[error(
        "pool {pool}: {path} holds no pool: is its disk mounted? (to begin an empty one there, set pool.existing = false)"
    )]
    NoPool {
        /// Name.
        pool: String,
        /// Directory.
        path: PathBuf,
    },
    /// Another server uses it.
    #[error(
        "pool {pool}: another forebay-server uses {path}: stop it, or give this one a directory of its own"
    )]
    Locked {
        /// Name.
        pool: String,
        /// Directory.
        path: PathBuf,
    },
    /// The file system returned an error.
    #[error("pool {pool}: {what}: {error}")]
    Io {
        /// Name.
        pool: String,
        /// The operation.
        what: String,
        /// Why.
        error: std::io::Error,
    },
    /// An error of a record.
    #[error("pool {pool}: {error}")]
    Record {
        /// Name.
        pool: String,
        /// Which and why.
        error: RecordError,
    },
    /// Capacities must be hard, but the file system cannot limit them.
    #[error(
        "pool {pool}: the file system of {path} enforces no project quota: mount it with -o prjquota (XFS, or ext4 with \
         the feature project), or set quota = \"none\" for the pool and ask for volumes without quota"
    )]
    NoQuota {
        /// Name.
        pool: String,
        /// Directory.
        path: PathBuf,
    },
    /// An owner was requested for a volume's root, but the server cannot change owners.
    #[error(
        "pool {pool}: the server cannot change the owner of files: run it with CAP_CHOWN, or request no owner for the root"
    )]
    NoChown {
        /// Name.
        pool: String,
    },
    /// Data exists at the path of a new volume.
    #[error("pool {pool}: {path} holds data without a record: move it away or restore the record")]
    Orphan {
        /// Name.
        pool: String,
        /// Directory.
        path: PathBuf,
    },
}
