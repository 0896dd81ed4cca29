//! scripts/prepare.sh: an entry of the cache is rebuilt when its inputs have changed, and removed only when it is not in use.
//! Fakes replace cargo, the compiler and the image's script.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// Writes a program of every name, each from one source, and reports it as cargo does.
const CARGO: &str = r#"#!/bin/sh
echo cargo >>calls
mkdir -p target/release
here=$(pwd | sed 's/ /\\ /g')
for name in one forebay-bench forebay-guest forebay-lab; do
    echo "$name" >"target/release/$name"
    chmod +x "target/release/$name"
    echo "$here/target/release/$name: $here/member/src/main.rs ${ALSO:-}" >"target/release/$name.d"
    echo '{"reason":"compiler-artifact","executable":"'"$PWD/target/release/$name"'","fresh":false}'
done
"#;

struct Tree(TempDir);

impl Tree {
    fn new() -> Self {
        let tree = Self(tempfile::Builder::new().prefix("with space ").tempdir().expect("a folder"));
        let ours = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("e2e/ lies in the tree");
        for (path, content) in [
            ("Cargo.toml", "[workspace]\nmembers = [\"member\"]\n"),
            ("Cargo.lock", ""),
            ("member/src/main.rs", ""),
            ("member/README.md", ""),
            ("manifests/examples/claim.yaml", ""),
            ("image/binaries", "# Programs.\none\n"),
            ("image/packages", ""),
            ("image/base.sh", ""),
            ("scripts/oci.sh", ""),
            ("scripts/image.sh", "#!/bin/sh\necho image >>calls\necho \"$@\" >\"$1\"\n"),
            ("bin/cargo", CARGO),
            ("bin/rustc", "#!/bin/sh\necho rustc 1.0.0\n"),
            ("calls", ""),
        ] {
            tree.write(path, content);
        }
        let script = fs::read_to_string(ours.join("scripts/prepare.sh")).expect("the script");
        tree.write("scripts/prepare.sh", &script);
        tree
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn write(&self, path: &str, content: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(&path, content).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
    }

    fn run(&self, script: &str, variables: &[(&str, &str)]) -> Output {
        Command::new("bash")
            .args(["-euo", "pipefail", "-c", &format!("source scripts/prepare.sh; {script}")])
            .current_dir(self.0.path())
            .env_clear()
            .env("PATH", format!("{}:/usr/bin:/bin", self.path("bin").display()))
            .env("HOME", self.path("home"))
            .env("FOREBAY_CACHE", self.path("cache"))
            .envs(variables.iter().copied())
            .output()
            .expect("bash")
    }

    /// Returns its last output, and how often each program was called.
    fn good(&self, script: &str, variables: &[(&str, &str)]) -> (PathBuf, usize, usize) {
        let output = self.run(script, variables);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let said = String::from_utf8(output.stdout).expect("text");
        let calls = fs::read_to_string(self.path("calls")).expect("calls");
        let count = |name: &str| calls.lines().filter(|line| *line == name).count();
        (PathBuf::from(said.lines().last().expect("a path")), count("cargo"), count("image"))
    }

    fn binaries(&self, variables: &[(&str, &str)]) -> (PathBuf, usize) {
        let (folder, built, _) = self.good("prepare_binaries; echo \"$BINARIES\"", variables);
        for name in ["one", "forebay-bench", "forebay-guest", "forebay-lab"] {
            assert!(folder.join(name).is_file(), "{name}");
        }
        (folder, built)
    }

    fn image(&self, arguments: &str, variables: &[(&str, &str)]) -> (PathBuf, usize) {
        let (image, _, made) = self.good(&format!("prepare_image {arguments}; echo \"$IMAGE\""), variables);
        assert!(image.is_file());
        (image, made)
    }
}

fn age(path: &Path, days: u32) {
    let done = Command::new("touch").arg("-d").arg(format!("{days} days ago")).arg(path).status();
    assert!(done.expect("touch").success());
}

#[test]
fn binaries_are_rebuilt_when_their_inputs_change() {
    let tree = Tree::new();
    let (first, built) = tree.binaries(&[]);
    assert_eq!(built, 1);
    // These have no effect.
    tree.write("member/README.md", "text");
    assert_eq!(tree.binaries(&[("CARGO_BUILD_JOBS", "1"), ("CARGO_TARGET_DIR", "x")]), (first.clone(), 1));

    let mut expected = 1;
    for variable in [
        ("RUSTFLAGS", "-Ctarget-cpu=native"),
        ("CARGO_PROFILE_RELEASE_LTO", "fat"),
        ("CARGO_BUILD_RUSTFLAGS", "-g"),
        ("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER", "mold"),
    ] {
        expected += 1;
        let (folder, built) = tree.binaries(&[variable]);
        assert_eq!(built, expected, "{variable:?}");
        assert_ne!(folder, first);
        assert_eq!(tree.binaries(&[variable]), (folder, expected), "{variable:?}");
    }
    for file in [
        "member/src/main.rs",
        "manifests/examples/claim.yaml",
        ".cargo/config.toml",
        "home/.cargo/config.toml",
        "Cargo.lock",
    ] {
        expected += 1;
        tree.write(file, "changed");
        assert_eq!(tree.binaries(&[]).1, expected, "{file}");
        assert_eq!(tree.binaries(&[]).1, expected, "{file}");
    }
}

#[test]
fn source_outside_the_cache_key_is_an_error() {
    let tree = Tree::new();
    let outside =
        tree.path("member/src/../../charts/values.yaml").to_str().expect("UTF-8").replace(' ', "\\ ");
    let output = tree.run("prepare_binaries", &[("ALSO", &outside)]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(said.contains("made of charts/values.yaml"), "{said}");
}

#[test]
fn partially_removed_entry_is_rebuilt() {
    let tree = Tree::new();
    let (folder, _) = tree.binaries(&[]);
    fs::remove_file(folder.join("forebay-lab")).expect("removed");
    assert_eq!(tree.binaries(&[]), (folder.clone(), 2));
    fs::remove_file(folder.join("one")).expect("removed");
    assert_eq!(tree.binaries(&[]), (folder, 3));
}

#[test]
fn only_entries_unused_for_a_day_are_removed() {
    let tree = Tree::new();
    for (name, days) in [("a", 0), ("b", 2), ("c", 3), ("d", 4), ("e", 5), ("f", 0), ("g", 0)] {
        tree.write(&format!("cache/binaries/{name}/forebay-lab"), "");
        age(&tree.path(&format!("cache/binaries/{name}")), days);
    }
    for (name, days) in [("h.1.tmp", 0), ("i.1.tmp", 6)] {
        tree.write(&format!("cache/binaries/{name}/one"), "");
        age(&tree.path(&format!("cache/binaries/{name}")), days);
    }
    let (own, _) = tree.binaries(&[]);
    let entries = fs::read_dir(tree.path("cache/binaries")).expect("entries");
    let mut left: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    left.retain(|path| *path != own && path.is_dir());
    let mut left: Vec<_> =
        left.iter().map(|p| p.file_name().expect("a name").to_str().expect("text")).collect();
    left.sort_unstable();
    assert_eq!(left, ["a", "f", "g", "h.1.tmp"]);
}

#[test]
fn image_is_rebuilt_when_its_inputs_change() {
    let tree = Tree::new();
    let (first, made) = tree.image("", &[]);
    assert_eq!(made, 1);
    assert_eq!(tree.image("", &[]), (first.clone(), 1));
    let (next, made) = tree.image("0.2.0", &[]);
    assert_eq!(made, 2);
    assert_ne!(next, first);

    let mut expected = 2;
    for file in ["image/packages", "image/base.sh", "scripts/oci.sh", "member/src/main.rs"] {
        expected += 1;
        tree.write(file, "# changed");
        assert_eq!(tree.image("", &[]).1, expected, "{file}");
        assert_eq!(tree.image("", &[]).1, expected, "{file}");
    }
    // Newer packages, for this version and, on the same base, for another.
    assert_eq!(tree.image("", &[("FOREBAY_IMAGE_REFRESH", "1")]).1, 7);
    let twice = "0.2.0; prepare_image";
    let (image, made) = tree.image(twice, &[("FOREBAY_IMAGE_REFRESH", "1")]);
    assert_eq!(made, 8, "the base would have been made twice");
    age(&image, 1);
    tree.write("cache/image-base/0123/base.tar", "");
    assert_eq!(tree.image("", &[]).1, 9);
}
