//! smbtorture, one process per test: a test that hangs or crashes does not affect the others.

use std::time::Duration;

use anyhow::{Result, bail};

use super::known::Outcome;
use super::room::{Done, Room};
use super::target::Target;

/// The suites to run, as prefixes of test names. A name that ends in a dot selects all tests with that prefix. Not included
/// (docs/internals/foreign.md): suites that need a server configured by Samba's selftest, and benchmarks.
const SUITES: &[&str] = &[
    "smb2.connect",
    "smb2.tcon",
    "smb2.read.",
    "smb2.rw.",
    "smb2.create.",
    "smb2.getinfo.",
    "smb2.setinfo",
    "smb2.dir.",
    "smb2.lock.",
    "smb2.compound.",
    "smb2.compound_find.",
    "smb2.credits.",
    "smb2.mkdir",
    "smb2.rename.",
    "smb2.oplock.",
    "smb2.lease.",
    "smb2.dirlease.",
    "smb2.multichannel.",
    "smb2.replay.",
    "smb2.durable-open.",
    "smb2.durable-v2-open.",
    "smb2.delete-on-close-perms.",
    "smb2.notify.",
    "smb2.notify-inotify.",
    "smb2.ioctl.",
    "smb2.streams.",
    "smb2.ioctl-on-stream",
    "smb2.durable-v2-delay.",
    "smb2.durable-open-disconnect.",
    "smb2.check-sharemode",
    "smb2.maxfid",
    "smb2.async_dosmode",
    "smb2.compound_async.",
    "smb2.sharemode.",
    "smb2.deny.",
    "smb2.maximum_allowed.",
    "smb2.session-id",
    "smb2.secleak",
    "smb2.timestamps.",
    "smb2.timestamp_resolution.",
    "smb2.dosmode",
    "smb2.fileid.",
    "smb2.charset.",
    "smb2.openattr",
    "smb2.winattr",
    "smb2.sdread",
    "smb2.acls-with-sysacl.",
    "smb2.acls-ignore-sysacl.",
    "smb2.stream-inherit-perms",
    "smb2.scan.",
    "smb2.name-mangling.",
    "smb2.session.",
    "smb2.acls_non_canonical.",
];

/// Benchmarks: they run until they are stopped.
const BENCHES: &[&str] = &["smb2.create.bench-path-contention-shared", "smb2.rename.rename_dir_bench"];

/// Tests that check in which order messages on two connections are read. They expect two breaks before the interim response
/// to another client, which no server can guarantee.
const RACES: &[&str] = &["smb2.lease.two-leases"];

/// Tests in which Kerberos tickets expire, as a prefix of their names. They wait for the expiry.
const KERBEROS: &str = "smb2.session.expire";

/// Time limit of one test.
const LIMIT: Duration = Duration::from_secs(60);

/// Tests that legitimately take longer: they create thousands of files, or sleep.
const SLOW: &[(&str, Duration)] = &[
    ("smb2.dir.large-files", Duration::from_secs(240)),
    ("smb2.dir.1kfiles_rename", Duration::from_secs(180)),
    ("smb2.lease.oplock", Duration::from_secs(180)),
    // Their server tries 32 channels, one after the other.
    ("smb2.multichannel.oplocks.test3_specification", Duration::from_secs(150)),
    ("smb2.multichannel.leases.test4", Duration::from_secs(150)),
    // It opens 65,536 files: 29 s on an idle core.
    ("smb2.maxfid", Duration::from_secs(180)),
    // It performs twelve operations under 32 filters each, and waits for every notification.
    ("smb2.notify.mask", Duration::from_secs(240)),
    // It waits for breaks that never arrive.
    ("smb2.durable-v2-open.purge-disconnected-rh-with-write", Duration::from_secs(120)),
];

/// Whether a test takes long and mostly waits.
pub(super) fn is_slow(test: &str) -> bool {
    test.starts_with("smb2.multichannel.")
        || test.starts_with(KERBEROS)
        || SLOW.iter().any(|(name, _)| *name == test)
}

/// All tests of the chosen suites that this smbtorture has.
pub(super) fn tests(room: &mut Room) -> Result<Vec<String>> {
    let list = room.run(&["smbtorture", "--list"], LIMIT)?;
    if list.status != 0 {
        bail!("smbtorture --list ended with {}:\n{}", list.status, list.output);
    }
    let tests = chosen(&list.output);
    if tests.is_empty() {
        bail!("smbtorture --list names none of the chosen suites");
    }
    Ok(tests)
}

fn chosen(list: &str) -> Vec<String> {
    let mut tests = Vec::new();
    for line in list.lines() {
        // A suite's test is listed with its name doubled: smb2.read.eof.eof
        let name = match line.rsplit_once('.') {
            Some((suite, test)) if suite.ends_with(&format!(".{test}")) => suite,
            _ => line,
        };
        let wanted = SUITES.iter().any(|suite| match suite.ends_with('.') {
            true => name.starts_with(suite),
            // "smb2.winattr" also selects winattr2; "smb2.mkdir" selects only itself.
            false => {
                name.strip_prefix(suite).is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()))
            }
        });
        let left_out = BENCHES.contains(&name) || RACES.contains(&name);
        if wanted && !left_out && !tests.iter().any(|test| test == name) {
            tests.push(name.to_owned());
        }
    }
    tests
}

/// Runs one test.
pub(super) fn run(room: &mut Room, target: &Target, test: &str) -> Result<(Outcome, String)> {
    let limit = SLOW.iter().find(|(name, _)| *name == test).map_or(LIMIT, |(_, limit)| *limit);
    let kerberos = target.kerberos.as_ref().filter(|_| test.starts_with(KERBEROS));
    let host = kerberos.map_or(target.host.as_str(), |its| its.name);
    let share = format!("//{host}/{}", target.volume.share);
    let port = target.port.to_string();
    let seed = format!("--seed={}", seed(test));
    let mut argv = vec![
        "smbtorture",
        "--format=subunit",
        &seed,
        // It blocks connections with its own rules, in the lane's own network.
        "--option=torture:use_iptables=yes",
        // The largest negotiated transaction size; the suite's default is from Windows versions before 7.
        "--option=torture:cn_max_buffer_size=8388608",
        "-p",
        &port,
        &share,
        "-A",
        "/scratch/volume.auth",
    ];
    let realm = kerberos.map(|its| format!("--realm={}", its.realm));
    if let Some(realm) = &realm {
        argv.extend(["--use-kerberos=required", realm]);
    }
    argv.push(test);
    let done = room.run(&argv, limit)?;
    let outcome = outcome(&done, limit);
    if outcome != Outcome::Pass {
        // Rules that it left behind must not block a later test's port.
        room.run(&["iptables", "-F"], LIMIT)?;
    }
    Ok((outcome, done.output))
}

/// A separate random seed for each test, the same in every run. Without a seed, smbtorture uses the second in which it
/// starts, so tests that start in the same second choose the same file names.
fn seed(test: &str) -> u32 {
    test.bytes().fold(7, |seed, byte| (seed * 31 + u32::from(byte)) % 1_000_003)
}

fn outcome(done: &Done, limit: Duration) -> Outcome {
    if done.timed_out() {
        return Outcome::Fail(format!("not done after {} s", limit.as_secs()));
    }
    let mut passed = false;
    let mut lines = done.output.lines();
    while let Some(line) = lines.next() {
        let Some((kind, rest)) = line.split_once(": ") else { continue };
        match kind {
            "success" => passed = true,
            "failure" | "error" | "skip" => {
                // "failure: name [", the reason, "]"
                let mut reason = Vec::new();
                if rest.ends_with('[') {
                    reason.extend(lines.by_ref().take_while(|line| *line != "]"));
                }
                let reason = reason.join(" ");
                return if kind == "skip" { Outcome::Skip(reason) } else { Outcome::Fail(reason) };
            }
            _ => {}
        }
    }
    match (passed, done.status) {
        (true, 0) => Outcome::Pass,
        (_, status) => {
            let said = done.output.lines().rev().find(|line| !line.is_empty()).unwrap_or_default();
            Outcome::Fail(format!("ended with status {status} and no result: {said}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smbtorture_suites_are_selected_by_name() {
        let list = "smb2.connect\nsmb2.connectx\nsmb2.read.eof.eof\nsmb2.readx.a.a\nsmb2.session.reauth1.reauth1\n\
                    smb2.session-id\nsmb2.sessions\nsmb2.winattr2\nsmb2.winattrx\n\
                    smb2.delete-on-close-perms.CREATE Existing.CREATE Existing\nsmb2.mkdir.mkdir\nsmb2.read.eof.eof\n\
                    smb2.rename.rename_dir_bench.rename_dir_bench\n";
        assert_eq!(
            chosen(list),
            [
                "smb2.connect",
                "smb2.read.eof",
                "smb2.session.reauth1",
                "smb2.session-id",
                "smb2.winattr2",
                "smb2.delete-on-close-perms.CREATE Existing",
                "smb2.mkdir",
            ]
        );
    }

    #[test]
    fn outcomes_are_parsed_from_smbtorture_output() {
        let of = |status, output: &str| outcome(&Done { status, output: output.to_owned() }, LIMIT);
        assert_eq!(of(0, "test: eof\ntime: 1\nsuccess: eof\n"), Outcome::Pass);
        assert_eq!(
            of(1, "test: eof\nfailure: eof [\n(a.c:1) x\ny\n]\n"),
            Outcome::Fail("(a.c:1) x y".into())
        );
        assert_eq!(of(0, "skip: eof [\nno leases\n]\n"), Outcome::Skip("no leases".into()));
        assert_eq!(of(124, "success: eof\n"), Outcome::Fail("not done after 60 s".into()));
        assert!(matches!(of(139, "test: eof\n"), Outcome::Fail(reason) if reason.contains("139")));
        assert!(matches!(of(1, "success: eof\n"), Outcome::Fail(_)), "crashed after its success");
        assert!(matches!(of(0, ""), Outcome::Fail(_)), "ran nothing");
    }
}
