//! The cache outside the tree: folders named after the hash of their ingredients.
//!
//! `<root>/<kind>/<hash>` exists only if it is complete: an entry is built in a temporary folder next to it, which is then
//! renamed. A process that builds an entry holds its lock file, so two clones that need the same entry wait for each other
//! instead of building it twice. A process that uses an entry holds the lock shared, so pruning cannot remove it meanwhile.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

use crate::progress::say;

/// The ingredients of an entry, as text. Its hash is the entry's name.
#[derive(Debug, Clone, Default)]
pub struct Recipe(String);

impl Recipe {
    /// Adds an ingredient.
    pub fn with(mut self, name: &str, value: impl AsRef<str>) -> Self {
        let value = value.as_ref();
        // The length prevents two different lists of ingredients from producing the same text.
        self.0.push_str(&format!("== {name} {}\n{value}\n", value.len()));
        self
    }

    /// The entry's name: 20 hexadecimal digits of the SHA-256.
    pub fn key(&self) -> String {
        hex(&Sha256::digest(self.0.as_bytes()))[..20].to_owned()
    }
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A complete entry. Pruning cannot remove it while this value exists.
#[derive(Debug)]
pub struct Artefact {
    path: PathBuf,
    _lock: File,
}

impl Artefact {
    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The entry's hash.
    pub fn key(&self) -> &str {
        self.path.file_name().and_then(|name| name.to_str()).expect("entries are named by hexadecimal digits")
    }
}

/// One line of [`Cache::list`].
#[derive(Debug, Clone)]
pub struct Listed {
    /// `<kind>/<hash>`.
    pub name: String,
    /// Bytes on disk.
    pub bytes: u64,
    /// When it was made or last used.
    pub used: std::time::SystemTime,
}

/// The cache's folder.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
    /// Names of the entries that were requested, if this cache builds nothing.
    asked: Option<Arc<Mutex<BTreeSet<String>>>>,
}

impl Cache {
    /// `$FOREBAY_CACHE`, else `$XDG_CACHE_HOME/forebay`, else `~/.cache/forebay`.
    pub fn open() -> Result<Self> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = set("FOREBAY_CACHE")
            .or_else(|| set("XDG_CACHE_HOME").map(|path| path.join("forebay")))
            .or_else(|| set("HOME").map(|path| path.join(".cache/forebay")))
            .context("none of FOREBAY_CACHE, XDG_CACHE_HOME and HOME is set: no place for the cache")?;
        let root = std::path::absolute(root)?;
        Self::at(root)
    }

    /// A cache in this folder.
    pub fn at(root: PathBuf) -> Result<Self> {
        fs::create_dir_all(&root).with_context(|| format!("make the cache folder {}", root.display()))?;
        Ok(Self { root, asked: None })
    }

    /// Returns the same cache, but it builds nothing and records what is requested: [`Cache::get`] fails for an entry that
    /// does not exist.
    pub fn looking(&self) -> Self {
        Self { root: self.root.clone(), asked: Some(Arc::default()) }
    }

    /// Whether [`Cache::looking`] returned this cache.
    pub fn is_looking(&self) -> bool {
        self.asked.is_some()
    }

    /// Names of the entries that were requested since [`Cache::looking`].
    pub fn asked(&self) -> BTreeSet<String> {
        let asked =
            self.asked.as_ref().map(|asked| asked.lock().unwrap_or_else(PoisonError::into_inner).clone());
        asked.unwrap_or_default()
    }

    /// The cache's folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the entry of this recipe. If it does not exist yet, `make` builds it in the folder that it receives.
    pub fn get(
        &self,
        kind: &str,
        recipe: &Recipe,
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Artefact> {
        let key = recipe.key();
        let folder = self.root.join(kind);
        let path = folder.join(&key);
        let lock_path = folder.join(format!("{key}.lock"));
        if let Some(asked) = &self.asked {
            let name = format!("{kind}/{key}");
            asked.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone());
            if !path.is_dir() {
                bail!("{name} is not in the cache");
            }
        }
        if !path.is_dir() {
            fs::create_dir_all(&folder)?;
            let lock = open_lock(&lock_path)?;
            if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
                say(format!("{kind}: another run is making it, waiting"));
                flock(&lock, FlockOperation::LockExclusive)?;
            }
            if !path.is_dir() {
                self.make(kind, recipe, &folder, &path, make)?;
            }
        }
        let lock = open_lock(&lock_path)?;
        flock(&lock, FlockOperation::LockShared)?;
        if !path.is_dir() {
            bail!("{} was pruned while it was wanted; run again", path.display());
        }
        if !self.is_looking() {
            // Best effort: another user's cache may be read-only.
            let _ = File::options()
                .write(true)
                .open(&lock_path)
                .and_then(|f| f.set_modified(std::time::SystemTime::now()));
        }
        Ok(Artefact { path, _lock: lock })
    }

    fn make(
        &self,
        kind: &str,
        recipe: &Recipe,
        folder: &Path,
        path: &Path,
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<()> {
        let prefix = format!(".{}.", recipe.key());
        // This process holds the lock, so every folder with this prefix is left over from a run that was killed.
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(&prefix) {
                fs::remove_dir_all(entry.path())?;
            }
        }
        let work = tempfile::Builder::new().prefix(&prefix).tempdir_in(folder)?;
        make(work.path()).with_context(|| format!("make {kind}"))?;
        fs::write(work.path().join("recipe.txt"), &recipe.0)?;
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(work.path(), fs::Permissions::from_mode(0o755))?;
        fs::rename(work.keep(), path)?;
        Ok(())
    }

    /// If sudo created the cache, gives its folders and locks to the user who called sudo, so that later steps that need no
    /// root run without it. The contents of the entries keep their owners, which belong to the guests.
    pub fn hand_to_sudo_user(&self) -> Result<()> {
        let id = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
        let (Some(user), Some(group)) = (id("SUDO_UID"), id("SUDO_GID")) else { return Ok(()) };
        let give = |path: &Path| std::os::unix::fs::lchown(path, Some(user), Some(group));
        give(&self.root)?;
        for entry in fs::read_dir(&self.root)? {
            let path = entry?.path();
            give(&path)?;
            if path.is_dir() {
                for entry in fs::read_dir(&path)? {
                    give(&entry?.path())?;
                }
            }
        }
        Ok(())
    }

    /// All entries, the largest first.
    pub fn list(&self) -> Result<Vec<Listed>> {
        let mut out = Vec::new();
        for (name, path) in self.entries()? {
            let used = fs::metadata(path.with_extension("lock")).and_then(|meta| meta.modified());
            let used = used.or_else(|_| fs::metadata(&path).and_then(|meta| meta.modified()))?;
            out.push(Listed { name, bytes: tree_bytes(&path)?, used });
        }
        out.sort_by_key(|entry| std::cmp::Reverse(entry.bytes));
        Ok(out)
    }

    /// Removes the entries that `keep` refuses and that are not in use; returns their names.
    pub fn prune(&self, keep: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        let mut removed = Vec::new();
        for (name, path) in self.entries()? {
            if keep(&name) {
                continue;
            }
            let lock = open_lock(&path.with_extension("lock"))?;
            if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
                say(format!("{name} is in use, kept"));
                continue;
            }
            // Renamed first: a half-removed entry must never look complete.
            let doomed =
                path.with_file_name(format!(".{}.doomed", path.file_name().unwrap_or_default().display()));
            fs::rename(&path, &doomed)?;
            fs::remove_dir_all(&doomed)?;
            removed.push(name);
        }
        Ok(removed)
    }

    fn entries(&self) -> Result<Vec<(String, PathBuf)>> {
        let mut out = Vec::new();
        for kind in fs::read_dir(&self.root)? {
            let kind = kind?;
            if !kind.file_type()?.is_dir() {
                continue;
            }
            for entry in fs::read_dir(kind.path())? {
                let entry = entry?;
                let name = entry.file_name().to_string_lossy().into_owned();
                let is_key = name.len() == 20 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
                if is_key && entry.file_type()?.is_dir() {
                    out.push((format!("{}/{name}", kind.file_name().display()), entry.path()));
                }
            }
        }
        Ok(out)
    }
}

/// Opens a lock file, read-only if it belongs to another user: flock accepts that.
fn open_lock(path: &Path) -> Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .or_else(|_| File::open(path))
        .with_context(|| format!("open {}", path.display()))
}

fn tree_bytes(path: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let mut total = 0;
    let mut todo = vec![path.to_owned()];
    while let Some(folder) = todo.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let meta = entry.metadata()?;
            total += meta.blocks() * 512;
            if meta.is_dir() {
                todo.push(entry.path());
            }
        }
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn cache() -> (tempfile::TempDir, Cache) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cache = Cache::at(folder.path().join("c")).expect("a cache in it");
        (folder, cache)
    }

    #[test]
    fn cache_key_depends_on_every_ingredient_and_its_boundaries() {
        let a = Recipe::default().with("packages", "a b").with("script", "c");
        assert_eq!(a.key(), Recipe::default().with("packages", "a b").with("script", "c").key());
        assert_ne!(a.key(), Recipe::default().with("packages", "a").with("script", "b c").key());
        assert_ne!(a.key(), Recipe::default().with("script", "c").with("packages", "a b").key());
        assert_ne!(a.key(), Recipe::default().with("packages", "a b\n== script 1\nc").key());
        assert_eq!(a.key().len(), 20);
    }

    #[test]
    fn concurrent_requests_build_an_entry_once() {
        let (_folder, cache) = cache();
        let made = AtomicUsize::new(0);
        let recipe = Recipe::default().with("x", "1");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let entry = cache.get("kind", &recipe, |into| {
                        made.fetch_add(1, Ordering::SeqCst);
                        fs::write(into.join("f"), "content").map_err(Into::into)
                    });
                    let entry = entry.expect("the entry is built");
                    assert_eq!(fs::read_to_string(entry.file("f")).expect("its file"), "content");
                });
            }
        });
        assert_eq!(made.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn failed_build_leaves_no_entry_and_can_be_repeated() {
        let (_folder, cache) = cache();
        let recipe = Recipe::default().with("x", "1");
        let failed = cache.get("kind", &recipe, |into| {
            fs::write(into.join("half"), "")?;
            bail!("the mirror is away")
        });
        assert!(format!("{:#}", failed.expect_err("it fails")).contains("the mirror is away"));
        assert!(cache.list().expect("a list").is_empty());
        let entry = cache.get("kind", &recipe, |into| fs::write(into.join("f"), "").map_err(Into::into));
        assert!(!entry.expect("it is made").file("half").exists());
    }

    #[test]
    fn prune_keeps_entries_in_use() {
        let (_folder, cache) = cache();
        let make = |text: &str| cache.get("kind", &Recipe::default().with("x", text), |_| Ok(()));
        let held = make("held").expect("made");
        drop(make("idle").expect("made"));
        // A program that another test starts at this moment holds copies of our locks until exec.
        let prune_one = || {
            let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
            while cache.prune(|_| false).expect("pruned").is_empty() {
                assert!(std::time::Instant::now() < until, "an unused entry is kept");
            }
        };
        prune_one();
        assert!(held.path().is_dir());
        drop(held);
        prune_one();
        assert!(cache.list().expect("a list").is_empty());
    }
}
