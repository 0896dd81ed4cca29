//! A pool on a namespace of a fabric: connected, taken, mounted, watched (docs/guides/nvmeof.md). [`attach`] has the order.

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

/// A pool's namespace, ours and mounted.
#[derive(Debug)]
pub struct Attached {
    pool: String,
    path: PathBuf,
    guard: Guard,
    state: Arc<State>,
}

/// Attaches the namespaces of all pools that have one. The addresses are given up where one is lost.
///
/// # Errors
/// The first one's that cannot be; those before it are given back.
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
    /// How it is, now and later.
    #[must_use]
    pub fn state(&self) -> Arc<State> {
        Arc::clone(&self.state)
    }

    /// Unmounts the pool, for an orderly end. Where something still uses the file system, it stays, and the next server of
    /// this instance on this machine goes on with it.
    ///
    /// The reservation stays in any case. Where a server was killed, its machine's kernel still has the file system as it was
    /// then, and tries again and again to write what it has of it: that must be refused when no server serves, too. A later
    /// epoch takes it, wherever.
    pub fn detach(self) {
        self.guard.stop();
        unmount(&self.pool, &self.path);
    }
}

/// Whether nothing is mounted there any more.
fn unmount(pool: &str, path: &Path) -> bool {
    // What has served it lets go of it, but the kernel may take a moment to close all files.
    if mounted_device(path).is_some()
        && let Err(error) = unmount_patiently(path)
    {
        warn!(pool, %error, "the pool stays mounted");
        return false;
    }
    true
}
