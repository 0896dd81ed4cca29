//! The seeds of the fuzz targets: every sample is a file, and no file remains of a removed sample.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::{env, fs};

use crate::hostile::TARGETS;
use crate::samples;

/// The prefix of seeds that the samples generate. Findings of a fuzzer keep their own names.
const PREFIX: &str = "sample-";

/// The directory of the corpora.
pub(crate) fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus")
}

/// Every seed: target, file name, bytes.
pub(crate) fn seeds() -> Vec<(String, String, Vec<u8>)> {
    let mut seeds = Vec::new();
    // Targets of other crates have corpora beside these.
    for (name, _) in TARGETS {
        for seed in fs::read_dir(directory().join(name)).expect("a directory for each target") {
            let seed = seed.expect("a readable directory").path();
            let file = seed.file_name().expect("a name").to_string_lossy().into_owned();
            seeds.push(((*name).to_owned(), file, fs::read(&seed).expect("a readable seed")));
        }
    }
    seeds.sort();
    seeds
}

/// `FOREBAY_UPDATE_CORPUS=1 cargo test -p forebay-smb --test codec corpora` writes the seeds again.
#[test]
fn corpora_hold_every_sample() {
    let samples: BTreeSet<_> = samples::all()
        .into_iter()
        .map(|sample| (sample.target.to_owned(), format!("{PREFIX}{}", sample.name), sample.bytes))
        .collect();
    if env::var_os("FOREBAY_UPDATE_CORPUS").is_some() {
        for (target, name, bytes) in &samples {
            let target = directory().join(target);
            fs::create_dir_all(&target).expect("the source tree is writable");
            fs::write(target.join(name), bytes).expect("the source tree is writable");
        }
    }
    let committed: BTreeSet<_> =
        seeds().into_iter().filter(|(_, name, _)| name.starts_with(PREFIX)).collect();
    let missing: Vec<_> = samples.difference(&committed).map(|(target, name, _)| (target, name)).collect();
    let stale: Vec<_> = committed.difference(&samples).map(|(target, name, _)| (target, name)).collect();
    assert!(missing.is_empty(), "not committed or out of date: {missing:?}");
    assert!(stale.is_empty(), "no sample makes these: {stale:?}");
}
