//! Modules of the running kernel: which are loaded, built in or loadable, and their dependencies.

use crate::kernel::Presence;
use crate::tree::Tree;

/// The available information about modules.
pub(crate) struct Modules {
    /// /proc/modules.
    loaded: Option<String>,
    /// modules.builtin of the release.
    built_in: Option<String>,
    /// modules.dep of the release.
    dependencies: Option<String>,
}

impl Modules {
    pub(crate) fn read(tree: &Tree<'_>, release: Option<&str>) -> Self {
        let of_release = |file: &str| {
            let release = release.filter(|r| !r.contains('/'))?;
            ["lib/modules", "usr/lib/modules"]
                .iter()
                .find_map(|d| tree.list(&format!("{d}/{release}/{file}")))
        };
        Self {
            loaded: tree.list("proc/modules"),
            built_in: of_release("modules.builtin"),
            dependencies: of_release("modules.dep"),
        }
    }

    /// Whether a module is loaded, built in or loadable.
    pub(crate) fn presence(&self, name: &str) -> Presence {
        if self.is_loaded(name) || self.is_built_in(name) || self.dependencies(name).is_some() {
            Presence::Yes
        } else if self.dependencies.is_some() && self.built_in.is_some() {
            Presence::No
        } else {
            Presence::Unknown
        }
    }

    pub(crate) fn is_loaded(&self, name: &str) -> bool {
        self.loaded().any(|mut fields| fields.next() == Some(name))
    }

    /// Whether the loaded module `user` uses the loaded module `used`.
    pub(crate) fn is_used_by(&self, used: &str, user: &str) -> bool {
        // proc(5): name, size, references, users with commas, state, address.
        self.loaded().any(|mut fields| {
            fields.next() == Some(used)
                && fields.nth(2).is_some_and(|users| users.split(',').any(|u| u == user))
        })
    }

    fn loaded(&self) -> impl Iterator<Item = std::str::SplitWhitespace<'_>> {
        self.loaded.as_deref().unwrap_or_default().lines().map(str::split_whitespace)
    }

    pub(crate) fn is_built_in(&self, name: &str) -> bool {
        self.built_in.as_deref().unwrap_or_default().lines().any(|path| is_module(path, name))
    }

    /// Returns the direct and indirect dependencies of a loadable module; `None` if it cannot be loaded.
    pub(crate) fn dependencies(&self, name: &str) -> Option<Vec<String>> {
        let lines = self.dependencies.as_deref()?.lines();
        let mut entries = lines.filter_map(|line| line.split_once(':'));
        let (_, needed) = entries.find(|(path, _)| is_module(path, name))?;
        Some(needed.split_whitespace().map(module_name).collect())
    }
}

fn is_module(path: &str, name: &str) -> bool {
    // Cheaper than comparing the name, for thousands of lines.
    path.contains(".ko") && module_name(path) == name
}

/// Returns a module's name: `kernel/fs/smb/client/cifs.ko.zst` is `cifs`; a dash in the file name is an underscore in the
/// module name.
fn module_name(path: &str) -> String {
    let file = path.trim().rsplit('/').next().unwrap_or_default();
    file.split('.').next().unwrap_or_default().replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "kernel/fs/smb/client/cifs.ko.zst: kernel/fs/smb/common/cifs_md4.ko.zst \
        kernel/drivers/infiniband/core/rdma_cm.ko.zst\n\
        kernel/drivers/nvme/host/nvme-tcp.ko: kernel/drivers/nvme/host/nvme-core.ko\nkernel/a.ko:\n";

    fn modules(loaded: Option<&str>, built_in: Option<&str>, dependencies: Option<&str>) -> Modules {
        let own = |text: Option<&str>| text.map(str::to_owned);
        Modules { loaded: own(loaded), built_in: own(built_in), dependencies: own(dependencies) }
    }

    #[test]
    fn module_is_present_if_loaded_built_in_or_loadable() {
        let all = modules(Some("cifs 1 0 - Live 0x0\n"), Some("kernel/x.ko\n"), Some(DEP));
        for (name, presence) in [
            ("cifs", Presence::Yes),
            ("x", Presence::Yes),
            ("nvme_tcp", Presence::Yes),
            ("a", Presence::Yes),
            ("nvme_rdma", Presence::No),
        ] {
            assert_eq!(all.presence(name), presence, "{name}");
        }
        assert_eq!(modules(Some(""), None, None).presence("cifs"), Presence::Unknown);
        assert_eq!(modules(None, None, Some(DEP)).presence("x"), Presence::Unknown);
    }

    #[test]
    fn module_dependencies_and_users_are_reported() {
        let all =
            modules(Some("rdma_cm 4096 2 cifs,rpcrdma, Live 0x0\ncifs 1 0 - Live 0x0\n"), None, Some(DEP));
        assert!(all.is_used_by("rdma_cm", "cifs") && !all.is_used_by("rdma_cm", "nfs"));
        assert!(!all.is_used_by("cifs", "-x"));
        assert_eq!(all.dependencies("cifs"), Some(vec!["cifs_md4".into(), "rdma_cm".into()]));
        assert_eq!(all.dependencies("a"), Some(vec![]));
        assert_eq!(all.dependencies("b"), None);
    }
}
