//! Keeps `src/gen` equal to what `proto/*.proto` generates.
//!
//! `FOREBAY_REGENERATE=1 cargo test -p forebay-proto` rewrites it; without the variable a difference fails.
#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

/// The names of fields with values that never reach a Debug output: `csi_secret` fields of csi.proto are all called
/// `secrets`, and `Credentials.password` is the admin API's only secret.
const SECRET_FIELDS: [&str; 2] = ["secrets", "password"];

#[test]
fn generated_code_is_up_to_date() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let protos = root.join("proto");
    let files = ["csi.proto", "admin.proto", "pluginregistration.proto", "deviceplugin.proto"];
    let files = files.map(|file| protos.join(file));
    let descriptors = protox::compile(files, [&protos]).unwrap();

    let fresh = tempfile::tempdir().unwrap();
    let mut secret_messages = Vec::new();
    let packages = ["csi.v1", "forebay.admin.v1", "pluginregistration", "v1beta1"];
    let mut redacted = packages.map(|p| (p, String::new()));
    for file in &descriptors.file {
        for (package, debug_impls) in &mut redacted {
            if file.package() != *package {
                continue;
            }
            for message in &file.message_type {
                let fields: Vec<&str> = message.field.iter().map(|f| f.name()).collect();
                if fields.iter().any(|f| SECRET_FIELDS.contains(f)) {
                    secret_messages.push(format!(".{package}.{}", message.name()));
                    debug_impl(debug_impls, message.name(), &fields);
                }
            }
        }
    }
    tonic_prost_build::configure()
        .out_dir(fresh.path())
        .emit_rerun_if_changed(false)
        .skip_debug(&secret_messages)
        .compile_fds(descriptors)
        .unwrap();
    for (package, debug_impls) in &redacted {
        let path = fresh.path().join(format!("{package}.rs"));
        let generated = fs::read_to_string(&path).unwrap();
        fs::write(&path, generated + debug_impls).unwrap();
    }

    // Every field that the specification marks as secret is one that SECRET_FIELDS names.
    let csi = fs::read_to_string(protos.join("csi.proto")).unwrap();
    let marked = csi.matches("(csi_secret) = true").count();
    let covered = secret_messages.iter().filter(|m| m.starts_with(".csi.v1.")).count();
    assert_eq!(marked, covered, "csi_secret fields against messages with a redacting Debug");

    let committed = root.join("src/gen");
    for (package, _) in &redacted {
        let name = format!("{package}.rs");
        let new = fs::read_to_string(fresh.path().join(&name)).unwrap();
        if env::var_os("FOREBAY_REGENERATE").is_some() {
            fs::create_dir_all(&committed).unwrap();
            fs::write(committed.join(&name), &new).unwrap();
        }
        let old = fs::read_to_string(committed.join(&name)).unwrap_or_default();
        assert!(
            old == new,
            "src/gen/{name} differs from the .proto files: FOREBAY_REGENERATE=1 cargo test -p forebay-proto"
        );
    }
}

fn debug_impl(out: &mut String, message: &str, fields: &[&str]) {
    writeln!(out, "impl ::core::fmt::Debug for {message} {{").unwrap();
    writeln!(out, "    fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {{").unwrap();
    writeln!(out, "        f.debug_struct({message:?})").unwrap();
    for field in fields {
        if SECRET_FIELDS.contains(field) {
            writeln!(out, "            .field({field:?}, &crate::Redacted)").unwrap();
        } else {
            writeln!(out, "            .field({field:?}, &self.{field})").unwrap();
        }
    }
    writeln!(out, "            .finish()\n    }}\n}}").unwrap();
}
