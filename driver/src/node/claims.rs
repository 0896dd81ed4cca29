//! Controls which calls of the node can run at the same time.
//!
//! Staging and unstaging affect a volume, so they require exclusive access to it. Publishing and unpublishing affect one target
//! path: pods of one volume start and stop without waiting for each other. A publish also excludes concurrent staging and
//! unstaging of the volume; an unpublish does not, because it can hang if the server is gone.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::limits::IN_FLIGHT_MAX;

/// The claims on this node.
#[derive(Clone, Debug, Default)]
pub(super) struct Claims(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    volumes: HashMap<String, Users>,
    targets: HashSet<PathBuf>,
}

/// The calls that use a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Users {
    Alone,
    /// The number of calls that leave the volume staged.
    Together(usize),
}

/// How a publish uses its volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    /// Excludes other publishes of the volume.
    Alone,
    Together,
}

impl Claims {
    /// Claims the volume for a call that stages or unstages it.
    pub(super) fn volume(&self, volume_id: &str) -> Result<Claim, Error> {
        self.claim(Some((volume_id, Sharing::Alone)), None, volume_id)
    }

    /// Claims the volume and the target for a call that publishes the volume at `target`.
    pub(super) fn publish(&self, volume_id: &str, target: &Path, sharing: Sharing) -> Result<Claim, Error> {
        self.claim(Some((volume_id, sharing)), Some(target), volume_id)
    }

    /// Claims the target for a call that unpublishes the volume from `target`.
    pub(super) fn unpublish(&self, volume_id: &str, target: &Path) -> Result<Claim, Error> {
        self.claim(None, Some(target), volume_id)
    }

    fn claim(
        &self,
        volume: Option<(&str, Sharing)>,
        target: Option<&Path>,
        volume_id: &str,
    ) -> Result<Claim, Error> {
        let mut table = self.table();
        if target.is_some_and(|target| table.targets.contains(target)) {
            return Err(Error::InFlight(volume_id.to_owned()));
        }
        let users = match volume {
            None => None,
            Some((volume_id, sharing)) => match (table.volumes.get(volume_id), sharing) {
                (None, Sharing::Alone) => Some(Users::Alone),
                (None, Sharing::Together) => Some(Users::Together(1)),
                (Some(Users::Together(count)), Sharing::Together) => Some(Users::Together(count + 1)),
                (Some(_), _) => return Err(Error::InFlight(volume_id.to_owned())),
            },
        };
        if table.volumes.len().max(table.targets.len()) >= IN_FLIGHT_MAX {
            return Err(Error::TooManyInFlight);
        }
        if let (Some((volume_id, _)), Some(users)) = (volume, users) {
            table.volumes.insert(volume_id.to_owned(), users);
        }
        if let Some(target) = target {
            table.targets.insert(target.to_owned());
        }
        Ok(Claim {
            volume_id: volume.map(|(volume_id, _)| volume_id.to_owned()),
            target: target.map(Path::to_owned),
            of: self.clone(),
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // The table is consistent between any two statements, so a panic elsewhere cannot have corrupted it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The claim of a call, held until it is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    volume_id: Option<String>,
    target: Option<PathBuf>,
    of: Claims,
}

impl Claim {
    /// Shares the claim with a thread that may never end. The claim ends when both parts are dropped, or when it is taken back.
    pub(super) fn lend(self) -> (Lent, Permit) {
        let claim = Arc::new(Mutex::new(Some(self)));
        (Lent(Arc::clone(&claim)), Permit(claim))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut table = self.of.table();
        if let Some(target) = &self.target {
            table.targets.remove(target);
        }
        let Some(volume_id) = self.volume_id.take() else { return };
        if let Entry::Occupied(mut users) = table.volumes.entry(volume_id) {
            match users.get_mut() {
                Users::Together(count) if *count > 1 => *count -= 1,
                _ => drop(users.remove()),
            }
        }
    }
}

type Shared = Arc<Mutex<Option<Claim>>>;

/// The caller's part of a shared claim.
#[derive(Debug)]
pub(super) struct Lent(Shared);

impl Lent {
    /// Revokes the thread's permit, whatever the thread does.
    pub(super) fn take_back(self) -> Claim {
        let claim = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        claim.expect("only this takes it, and consumes itself")
    }
}

/// The thread's part of a shared claim.
#[derive(Debug)]
pub(super) struct Permit(Shared);

impl Permit {
    /// Whether the thread may continue. The thread checks before each step: after a call that hung, another call may have
    /// claimed the path.
    pub(super) fn holds(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_free<T>(result: Result<T, Error>) -> bool {
        match result {
            Ok(_) => true,
            Err(Error::InFlight(_)) => false,
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn claims_of_different_targets_do_not_conflict() {
        let claims = Claims::default();
        let (one, two) = (Path::new("/pods/1"), Path::new("/pods/2"));
        let first = claims.publish("v", one, Sharing::Together).expect("free");
        assert!(!is_free(claims.publish("v", one, Sharing::Together)), "one call for each target");
        assert!(!is_free(claims.unpublish("v", one)));
        let second = claims.publish("v", two, Sharing::Together).expect("another target");
        assert!(!is_free(claims.volume("v")), "a publish keeps it staged");
        drop(first);
        assert!(!is_free(claims.volume("v")));
        let going = claims.unpublish("v", one).expect("the publish has ended");
        drop(second);
        let staging = claims.volume("v").expect("an unpublish does not keep the volume staged");
        assert!(!is_free(claims.publish("v", two, Sharing::Together)));
        assert!(is_free(claims.publish("w", two, Sharing::Together)), "another volume");
        drop((going, staging));
        let writer = claims.publish("v", one, Sharing::Alone).expect("free");
        assert!(!is_free(claims.publish("v", two, Sharing::Alone)), "there is one writer");
        drop(writer);
        assert!(is_free(claims.volume("v")));
    }

    #[test]
    fn lent_claim_ends_with_its_thread_or_is_taken_back() {
        let claims = Claims::default();
        let (lent, permit) = claims.volume("v").expect("free").lend();
        drop(lent);
        assert!(!is_free(claims.volume("v")), "the thread still works");
        assert!(permit.holds());
        drop(permit);
        let (lent, permit) = claims.volume("v").expect("free").lend();
        let claim = lent.take_back();
        assert!(!permit.holds(), "a thread that hangs must stop when it wakes up");
        assert!(!is_free(claims.volume("v")));
        drop(claim);
        assert!(is_free(claims.volume("v")), "even if the thread still hangs");
    }

    #[test]
    fn number_of_claims_is_bounded() {
        let claims = Claims::default();
        let held: Vec<Claim> =
            (0..IN_FLIGHT_MAX).map(|n| claims.volume(&n.to_string()).expect("room")).collect();
        assert!(matches!(claims.volume("more"), Err(Error::TooManyInFlight)));
        drop(held);
        assert!(claims.volume("more").is_ok());
    }
}
