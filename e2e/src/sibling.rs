//! Binaries of other packages for the tests of one package: cargo builds only the package's own.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// The server's binary, found as by [`binaries`].
///
/// # Errors
/// It does not build.
pub fn server_binary(own: &Path) -> Result<PathBuf> {
    Ok(binaries(own, &["forebay-server"])?.join("forebay-server"))
}

/// Returns the folder with these binaries: `$FOREBAY_BINARIES` if `./test` has built them before or the tests run on another
/// machine than the one that built them; otherwise the folder of the test's own binary (`CARGO_BIN_EXE_…`), into which they
/// are built with the same profile. They are built in one run so that they share dependencies.
///
/// # Errors
/// They do not build, or are not there.
pub fn binaries(own: &Path, names: &[&str]) -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("FOREBAY_BINARIES") {
        return prepared(folder.into(), names);
    }
    let (target, profile) = place(own)?;
    let mut build = Command::new(std::env::var_os("CARGO").context("run this by cargo")?);
    build.args(["build", "--quiet", "--profile", profile, "--target-dir"]).arg(target).args(LIKE_THE_TESTS);
    for name in names {
        build.args(["--bin", name]);
    }
    build.current_dir(env!("CARGO_MANIFEST_DIR"));
    ensure!(build.status().context("run cargo")?.success(), "{} do not build", names.join(", "));
    Ok(own.parent().unwrap_or(target).to_owned())
}

/// Makes cargo resolve features as `cargo test --workspace` does, so that it reuses what that command has built: the features
/// that all packages require, including those for their tests (one test is named for that).
const LIKE_THE_TESTS: [&str; 3] = ["--workspace", "--test", "arrows"];

/// Builds nothing if the caller already has: cargo inside a test would build everything a second time and use up the test's
/// time.
fn prepared(folder: PathBuf, names: &[&str]) -> Result<PathBuf> {
    let absent: Vec<&str> = names.iter().copied().filter(|name| !folder.join(name).is_file()).collect();
    ensure!(
        absent.is_empty(),
        "FOREBAY_BINARIES={} has no {}: build them there, or unset the variable",
        folder.display(),
        absent.join(", ")
    );
    Ok(folder)
}

/// Target folder and profile of a binary: `<target>/debug/<binary>` belongs to the profile `dev`.
fn place(own: &Path) -> Result<(&Path, &str)> {
    let folder = own.parent().context("a binary lies in a folder")?;
    let target = folder.parent().context("a profile's folder lies in the target folder")?;
    let profile =
        folder.file_name().and_then(|name| name.to_str()).context("a profile's folder has a name")?;
    Ok((target, if profile == "debug" { "dev" } else { profile }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_and_target_directory_are_derived_from_the_test_path() {
        let place = |own| place(Path::new(own)).expect("a place");
        assert_eq!(place("/tree/target/debug/program"), (Path::new("/tree/target"), "dev"));
        assert_eq!(place("/elsewhere/release/program"), (Path::new("/elsewhere"), "release"));
        assert_eq!(place("/elsewhere/checked/program"), (Path::new("/elsewhere"), "checked"));
    }

    #[test]
    fn prepared_binaries_are_used_without_a_build() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("one"), "").expect("written");
        assert_eq!(prepared(folder.path().into(), &["one"]).expect("it is there"), folder.path());
        let error = prepared(folder.path().into(), &["one", "two"]).expect_err("two is missing").to_string();
        assert!(error.contains("has no two: build"), "{error}");
    }
}
