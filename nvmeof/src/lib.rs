//! The host side of NVMe over Fabrics, without external programs: the kernel's `/dev/nvme-fabrics`, sysfs and ioctls, over TCP
//! and RDMA.
//!
//! * [`Fabrics`] connects, disconnects, and brings the connections to a required state ([`Fabrics::ensure_connected`]).
//! * [`Sysfs`] lists what is connected, by NQN and UUID or NGUID; [`Watch`] reports changes.
//! * [`Tls`] connects over TLS: the key is added to the kernel's keyring, and `tlshd` does the handshake.
//! * [`Fabrics::discover`] reads a discovery controller's log.
//! * [`acquire`] and related functions hold a namespace against all other hosts, with persistent reservations.
//!
//! All calls block, some until a target responds: call them on a dedicated thread. Input from a target, the kernel or sysfs is
//! bounded ([`limits`]) and never assumed to be well formed.
//!
//! # Example
//!
//! The reservation key shows which host, in which epoch, holds a namespace:
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
