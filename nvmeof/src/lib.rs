//! NVMe over Fabrics from the side of the host, without other programs: the kernel's `/dev/nvme-fabrics`, sysfs and
//! ioctls, over TCP and RDMA.
//!
//! * [`Fabrics`] connects, disconnects and makes it so ([`Fabrics::ensure_connected`]).
//! * [`Sysfs`] says what is there, by NQN and UUID or NGUID; [`Watch`] says what has changed since.
//! * [`Tls`] has it done over TLS: the key goes into the kernel's keyring, the handshake is `tlshd`'s.
//! * [`Fabrics::discover`] reads a discovery controller's log.
//! * [`acquire`] and its neighbours hold a namespace against all other hosts, by persistent reservations.
//!
//! All calls block, some as long as a target takes to answer: they belong on a thread of their own. What a target, the
//! kernel or sysfs says is bounded ([`limits`]) and never trusted to be well formed.
//!
//! # Example
//!
//! Which host, and which epoch of it, holds a namespace is in the reservation key:
//!
//! ```
//! use forebay_nvmeof::{Epoch, HostIdentity, InstanceHash, ReservationKey, Sysfs};
//!
//! let host = HostIdentity::of("main-0", "node-1")?;
//! assert!(host.nqn().as_str().starts_with("nqn.2014-08.org.nvmexpress:uuid:"));
//!
//! let instance = InstanceHash::of("main-0");
//! let key = ReservationKey::new(instance, Epoch::new(3).expect("not 0"));
//! assert_eq!(key.epoch_of(instance), Epoch::new(3));
//! assert_eq!(key.epoch_of(InstanceHash::of("main-1")), None);
//!
//! // A machine without NVMe has no subsystems; that is no error.
//! let found = Sysfs::at("/nonexistent").read();
//! assert!(found.subsystem(host.nqn()).is_none());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod acquire;
mod attributes;
mod base64;
mod device;
mod discovery;
mod fabrics;
mod host;
mod ioctl;
mod kernel_log;
mod key;
mod keyctl;
mod keyring;
mod limits;
mod nqn;
mod options;
mod plan;
mod refusal;
mod report;
mod secret;
mod sysfs;
mod tls;
mod watch;

pub use acquire::{Acquired, Check, Loss, Me, NotAcquired, acquire, announce, check, release, settle};
pub use device::{NamespaceDevice, OpenError, ReservationCapabilities, ReservationError, Reservations};
pub use discovery::{DiscoveryError, Record, RecordKind};
pub use fabrics::{ConnectError, Connected, EnsureError, Ensured, Fabrics, Reply};
pub use host::{HostId, HostIdentity};
pub use ioctl::shut_down_file_system;
pub use key::{Epoch, InstanceHash, ReservationKey};
pub use keyring::{KeySerial, KeyringError};
pub use nqn::{DISCOVERY_NQN, InvalidName, Nqn};
pub use options::{Authentication, FabricPath, Interface, Subsystem, Timing, Transport};
pub use plan::{NotPlanned, Plan, plan};
pub use refusal::Refusal;
pub use report::{Registrant, Report, ReservationType};
pub use secret::{DhChapKey, InvalidKey, TlsPsk};
pub use sysfs::{
    AnaState, Controller, ControllerAddress, ControllerState, ControllerTls, FindError, Found,
    FoundSubsystem, Namespace, NamespaceId, NamespacePath, Sysfs,
};
pub use tls::{IdentityVersion, Tls, TooLong};
pub use watch::{Change, Watch};
