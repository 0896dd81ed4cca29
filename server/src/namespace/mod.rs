//! A pool on a namespace of a fabric: connected, reserved, mounted and watched (docs/guides/nvmeof.md). [`attach`] defines
//! the order.

mod attach;
mod connect;
mod content;
mod filesystem;
mod growth;
mod guard;
mod mounted;
mod reason;
mod record;
mod state;
mod world;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::warn;

use self::attach::Attach;
use self::guard::Guard;
pub(crate) use self::guard::{doubt, vouch, wants_vouching};
use self::mounted::{mounted_device, unmount_patiently};
pub use self::reason::NamespaceError;
pub use self::state::State;
use self::world::Linux;
use crate::address::Addresses;
use crate::config::Config;

/// A pool's namespace that is reserved for us and mounted.
#[derive(Debug)]
pub struct Attached {
    pool: String,
    path: PathBuf,
    guard: Guard,
    state: Arc<State>,
}

/// Attaches the namespaces of all pools that have one. The addresses are given up if a namespace is lost.
///
/// # Errors
/// The error of the first namespace that cannot be attached; those before it are detached.
pub fn attach_all(config: &Config, addresses: &Arc<Addresses>) -> Result<Vec<Attached>, NamespaceError> {
    let mut all = Vec::new();
    for pool in &config.pool {
        let Some(section) = &pool.nvmeof else { continue };
        let attached = Linux::new(&config.instance, pool, section, addresses).and_then(|mut world| {
            Attach::run(&world.claim(), &mut world)?;
            Ok(world.attached())
        });
        match attached {
            Ok(attached) => all.push(attached),
            Err(reason) => {
                all.into_iter().for_each(Attached::detach);
                return Err(NamespaceError { pool: pool.name.clone(), reason });
            }
        }
    }
    Ok(all)
}

impl Attached {
    /// The state of the namespace, updated while it is attached.
    #[must_use]
    pub fn state(&self) -> Arc<State> {
        Arc::clone(&self.state)
    }

    /// Unmounts the pool, for an orderly shutdown. If something still uses the file system, it stays mounted, and the next
    /// server of this instance on this machine continues with it.
    ///
    /// The reservation stays in any case. If a server was killed, the kernel of its machine still has the old state of the
    /// file system in memory and keeps retrying to write it. The target must refuse these writes even when no server is
    /// running. A later epoch takes the reservation on any host.
    pub fn detach(self) {
        self.guard.stop();
        unmount(&self.pool, &self.path);
    }
}

/// Unmounts; returns whether nothing is mounted there any more.
fn unmount(pool: &str, path: &Path) -> bool {
    // All users in this process have released the file system, but the kernel may take a moment to close all files.
    if mounted_device(path).is_some()
        && let Err(error) = unmount_patiently(path)
    {
        warn!(pool, %error, "the pool stays mounted");
        return false;
    }
    true
}
