//! Mounts with the POSIX extensions of SMB 3.1.1: owners and modes of each file, links, special files, any name.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::csi::{create, publish, stage};
use super::{MIB, ONE, Scenario, TWO, ours};
use crate::guest::calls::grpc::CsiRequest;
use crate::guest::calls::posix::Outcome;
use crate::lab::Node;
use crate::site::{Mounted, Site};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        ours("posix mount: owners, modes, links and names on two nodes", kept),
        ours("posix mount: owners and times of links", attributes_of_links),
        ours("csi: posix mount: files of users on two nodes stay private", users),
        ours("posix mount: POSIX operations", ways),
        ours("access control lists are enforced on a mount without posix", lists),
    ]
}

/// Creates one of each kind.
const MAKE: &str = r#"
umask 022
printf 'one' > file; chmod 640 file; chown 1000:1001 file
mkdir -m 750 directory; chown 1000:1000 directory
printf 'sticky' > tool; chmod 4755 tool
mkdir -m 1777 scratch
ln file hard
ln -s file relative; ln -s /no/such/place absolute; ln -s directory to-directory; ln -s ../up/and/away dangling
mkfifo pipe
printf 'A' > Case; printf 'b' > case
for name in 'colon:' 'back\slash' 'star*' 'question?' 'quote"' 'less<more>' 'bar|' 'dot.' 'space '; do
    printf '%s' "$name" > "$name"
done
umask 077; printf 'private' > masked; mkdir masked-directory
chmod 600 case
"#;

/// Prints name, kind, mode, owner, link count, and the target of a link or the content of a file.
const SHOW: &str = r#"
export LC_ALL=C
for name in *; do
    printf '%s|' "$name"
    stat -c '%F|%a|%u:%g|%h' "$name" | tr '\n' '|'
    if [ -L "$name" ]; then readlink "$name"; elif [ -f "$name" ]; then cat "$name"; echo; else echo; fi
done
"#;

const EXPECTED: &str = r#"Case|regular file|644|0:0|1|A
absolute|symbolic link|777|0:0|1|/no/such/place
back\slash|regular file|644|0:0|1|back\slash
bar||regular file|644|0:0|1|bar|
case|regular file|600|0:0|1|b
colon:|regular file|644|0:0|1|colon:
dangling|symbolic link|777|0:0|1|../up/and/away
directory|directory|750|1000:1000|2|
dot.|regular file|644|0:0|1|dot.
file|regular file|640|1000:1001|2|one
hard|regular file|640|1000:1001|2|one
less<more>|regular file|644|0:0|1|less<more>
masked|regular file|600|0:0|1|private
masked-directory|directory|700|0:0|2|
pipe|fifo|644|0:0|1|
question?|regular file|644|0:0|1|question?
quote"|regular file|644|0:0|1|quote"
relative|symbolic link|777|0:0|1|file
scratch|directory|1777|0:0|2|
space |regular file|644|0:0|1|space 
star*|regular file|644|0:0|1|star*
to-directory|symbolic link|777|0:0|1|directory
tool|regular file|4755|0:0|1|sticky
"#;

fn both<'a>(site: &'a Site) -> Result<(crate::site::Volume, Mounted<'a>, Mounted<'a>)> {
    let volume = site.volume(64 * MIB)?;
    let here = site.mount_posix(site.node(ONE), &volume)?;
    let there = site.mount_posix(site.node(TWO), &volume)?;
    Ok((volume, here, there))
}

fn within(node: &Node, folder: &str, script: &str) -> Result<String> {
    node.run_within(&format!("cd {folder}\n{script}"), Duration::from_secs(60))
}

fn kept(site: &Site) -> Result<String> {
    let (volume, here, there) = both(site)?;
    within(here.node(), here.path(), MAKE)?;
    let shown = |at: &Mounted<'_>| within(at.node(), at.path(), SHOW);
    compare("where it was made", &shown(&here)?)?;
    compare("on the other node", &shown(&there)?)?;
    // Changes are visible within actimeo, and each node can change what the other created.
    within(there.node(), there.path(), "chmod 604 file; chown 5:6 masked; rm 'star*'; mv 'dot.' 'dot..'")?;
    let after = EXPECTED
        .replace("640|1000:1001", "604|1000:1001")
        .replace("600|0:0|1|private", "600|5:6|1|private")
        .replace("star*|regular file|644|0:0|1|star*\n", "")
        .replace("dot.|regular", "dot..|regular");
    here.node().run("sleep 2")?;
    let found = shown(&here)?;
    ensure!(found.trim() == after.trim(), "after changes on the other node:\n{found}\nexpected:\n{after}");
    here.unmount()?;
    there.unmount()?;
    // From the server, with nothing cached.
    let again = site.mount_posix(site.node(ONE), &volume)?;
    let found = shown(&again)?;
    ensure!(found.trim() == after.trim(), "mounted again:\n{found}\nexpected:\n{after}");
    again.unmount()?;
    site.delete(&volume)?;
    Ok(format!("{} entries", EXPECTED.lines().count()))
}

fn compare(place: &str, found: &str) -> Result<()> {
    let differing: Vec<String> = found
        .lines()
        .zip(EXPECTED.lines())
        .filter(|(found, expected)| found != expected)
        .map(|(found, expected)| format!("{found} (expected {expected})"))
        .collect();
    ensure!(found.trim() == EXPECTED.trim(), "{place}:\n{}\nall of it:\n{found}", differing.join("\n"));
    Ok(())
}

/// Changes the attributes of links themselves. The target keeps its own.
const OF_LINKS: &str = r#"
umask 022
printf one > file; touch -d '2001-02-03 04:05:06 UTC' file
ln -s file link; ln -s /no/such/place dangling
for link in link dangling; do
    chown -h 1000:1001 $link
    touch -h -d '2020-02-03 04:05:06.123456700 UTC' $link
done
"#;

const SHOW_LINKS: &str = r#"
export LC_ALL=C TZ=UTC
stat -c '%n|%F|%a|%u:%g|%y' dangling file link
readlink dangling link
"#;

const LINKS_EXPECTED: &str = "\
dangling|symbolic link|777|1000:1001|2020-02-03 04:05:06.123456700 +0000
file|regular file|644|0:0|2001-02-03 04:05:06.000000000 +0000
link|symbolic link|777|1000:1001|2020-02-03 04:05:06.123456700 +0000
/no/such/place
file
";

fn attributes_of_links(site: &Site) -> Result<String> {
    let (volume, here, there) = both(site)?;
    within(here.node(), here.path(), OF_LINKS)?;
    here.node().run("sleep 2")?;
    for at in [&here, &there] {
        let found = within(at.node(), at.path(), SHOW_LINKS)?;
        ensure!(found.trim() == LINKS_EXPECTED.trim(), "found:\n{found}\nexpected:\n{LINKS_EXPECTED}");
    }
    here.unmount()?;
    there.unmount()?;
    site.delete(&volume)?;
    Ok("chown -h and touch -h on two nodes".into())
}

/// Read-only for everyone, in this directory and in files created in it. A separate list for the directory itself permits
/// adding files.
const READ_ONLY: &str = "ACL:S-1-1-0:0/0x0/0x001a00a9";
const PASSED_ON: &str = "ACL:S-1-1-0:0/0x9/0x001a00a9,ACL:S-1-1-0:0/0x0/0x001f01ff";

/// Another client sets ACLs, as a Windows client does. The server enforces them, except for a POSIX mount, where the kernel
/// enforces modes.
fn lists(site: &Site) -> Result<String> {
    let volume = site.volume(64 * MIB)?;
    let here = site.mount(site.node(ONE), &volume, &[])?;
    let there = site.mount_posix(site.node(TWO), &volume)?;
    within(here.node(), here.path(), "printf one > file; mkdir directory; printf kept > directory/old")?;
    let set = |path: &str, list: &str| {
        let (server, id, user) = (site.storage().address(), &volume.id, &volume.username);
        let script = format!(
            "umask 077; printf 'username=%s\npassword=%s\n' {user} '{}' > /tmp/login\n\
             smbcacls //{server}/{id} {path} --numeric -A /tmp/login --set 'REVISION:1,{list}'\nrm /tmp/login",
            volume.password
        );
        here.node().run_within(&script, Duration::from_secs(60))
    };
    set("file", READ_ONLY)?;
    set("directory", PASSED_ON)?;
    // The client keeps handles for a moment. They, and attributes that were read, may be older than the change.
    here.node().run("sleep 3")?;
    let denied = "printf two > file && exit 9\nprintf two > directory/new; sleep 3; printf two > directory/new && exit 9\n\
                  cat file directory/old; printf two >> directory/old";
    let found = within(here.node(), here.path(), &format!("({denied}) 2>&1"))?;
    ensure!(found.matches("Permission denied").count() == 2, "not as the lists say: {found}");
    ensure!(found.ends_with("onekept"), "what may be read: {found}");
    within(there.node(), there.path(), "printf three > file; printf four > directory/new")?;
    set("file", "ACL:S-1-1-0:0/0x0/0x001f01ff")?;
    here.node().run("sleep 3")?;
    let found =
        within(here.node(), here.path(), "printf more >> file; cat file directory/new directory/old")?;
    ensure!(found == "threemorefourkepttwo", "{found}");
    here.unmount()?;
    there.unmount()?;
    site.delete(&volume)?;
    Ok("writes refused, inherited lists, allowed again".into())
}

const STAGING: &str = "/var/lib/kubelet/posix/staging";
const POD: &str = "/var/lib/kubelet/posix/pod";

/// Runs a script as a user without rights.
fn as_user(uid: u32, script: &str) -> String {
    format!("setpriv --reuid={uid} --regid={uid} --clear-groups --bounding-set=-all sh -euc '{script}'\n")
}

/// Mounted by the driver, as with a StorageClass that has `posix` in its mount options.
fn users(site: &Site) -> Result<String> {
    let volume = site.csi(site.storage(), create("posix-users", 64 * MIB))?.ok()?;
    let nodes = [site.node(ONE), site.node(TWO)];
    for node in nodes {
        node.run(&format!("mkdir -p {STAGING} {POD} && rmdir {POD}"))?;
        let mut staged = stage(&volume, STAGING);
        if let CsiRequest::NodeStageVolume { mount_flags, .. } = &mut staged {
            mount_flags.push("posix".into());
        }
        site.csi(node, staged)?.ok()?;
        site.csi(node, publish(&volume, STAGING, POD, false))?.ok()?;
    }
    let [here, there] = nodes;
    within(here, POD, "mkdir -m 1777 shared; mkdir -m 755 home; chown 1000:1000 home")?;
    let write =
        as_user(1000, "umask 077; echo alice > shared/alice; echo home > home/file; chmod 644 home/file");
    within(here, POD, &write)?;
    there.run("sleep 2")?;
    within(there, POD, &as_user(2000, "umask 077; echo bob > shared/bob"))?;
    here.run("sleep 2")?;
    for node in nodes {
        let owners = within(node, POD, "stat -c '%n %u:%g %a' shared/alice shared/bob home/file")?;
        ensure!(
            owners.trim() == "shared/alice 1000:1000 600\nshared/bob 2000:2000 600\nhome/file 1000:1000 644",
            "owners: {owners}"
        );
        // The client opens a file that it has no dentry for before it checks its user's permissions. The first pass only takes
        // the mark of recent use from dentries.
        let forget = || node.run("for pass in 1 2 3; do echo 2 > /proc/sys/vm/drop_caches; done");
        for (uid, own, others) in [(1000, "alice", "bob"), (2000, "bob", "alice")] {
            forget()?;
            within(node, POD, &as_user(uid, &format!(": >> shared/{own}")))?;
            let read = within(node, POD, &as_user(uid, &format!("cat shared/{own} home/file")))?;
            ensure!(read.trim() == format!("{own}\nhome"), "{uid} reads {read:?}");
            for refused in [
                format!("echo x >> shared/{others}"),
                format!("cat shared/{others}"),
                format!("echo x > shared/{others}"),
                format!("chmod 666 shared/{others}"),
                format!("rm -f shared/{others}"),
            ] {
                forget()?;
                let script = format!("if {refused} 2> /dev/null; then exit 7; fi");
                within(node, POD, &as_user(uid, &script))
                    .map_err(|error| error.context(format!("{uid} may not: {refused}")))?;
                let kept = within(node, POD, "stat -c %s shared/alice shared/bob")?;
                ensure!(kept.trim() == "6\n4", "refused to {uid}: {refused}; then the sizes are {kept:?}");
            }
        }
    }
    let left = within(there, POD, "cat shared/alice shared/bob")?;
    ensure!(left.trim() == "alice\nbob", "the files hold {left:?}");
    for node in nodes {
        site.csi(node, CsiRequest::NodeUnpublishVolume { id: volume.id.clone(), target: POD.into() })?
            .ok()?;
        site.csi(node, CsiRequest::NodeUnstageVolume { id: volume.id.clone(), staging: STAGING.into() })?
            .ok()?;
    }
    site.csi(site.storage(), CsiRequest::DeleteVolume { id: volume.id.clone() })?.ok()?;
    Ok("two users, two nodes".into())
}

fn ways(site: &Site) -> Result<String> {
    let volume = site.volume(512 * MIB)?;
    let mounted = site.mount_posix(site.node(ONE), &volume)?;
    let outcomes: Vec<Outcome> =
        mounted.node().call_within("posix", &mounted.path(), Duration::from_secs(120))?;
    let failed: Vec<String> =
        outcomes.iter().filter_map(|(name, why)| why.as_ref().map(|why| format!("{name}: {why}"))).collect();
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    mounted.unmount()?;
    site.delete(&volume)?;
    Ok(format!("{} cases", outcomes.len()))
}
