//! Two nodes on one volume: each sees the other's changes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{MIB, ONE, Scenario, TWO, ours, scenario};
use crate::site::{Mounted, POOL, Site};

/// One second for the attribute cache; the rest is margin.
const SEEN_WITHIN: Duration = Duration::from_secs(4);

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario("two nodes see each other's changes", changes),
        scenario("two nodes append in turn", turns),
        ours("directory leases: the size of a file that another node writes is current", grows),
        Scenario {
            on_trial: true,
            ..scenario("python imports 111 modules, closed files stay open for 30 s", |site| {
                let (first, second) = imports(site, &[("closetimeo", "30")])?;
                ensure!(second * 10 < first, "the first process made {first} requests, the second {second}");
                Ok(format!("{first} requests, then {second}"))
            })
        },
        Scenario { on_trial: true, ..scenario("python imports 111 modules", imports_as_mounted) },
        Scenario {
            on_trial: true,
            ..ours("python imports 111 modules, without directory leases", |site| {
                let _switched = site.switched("directory_leases", "false")?;
                let (first, second) = imports(site, &[])?;
                ensure!(
                    second * 10 > first * 9,
                    "{first} requests, then {second}: something else than leases saves them"
                );
                Ok(format!("{first} requests, then {second}"))
            })
        },
        ours("directory leases: 10,000 names are listed again from the cache", listed_again),
    ]
}

/// An action on one node, and a command that must then print this output on the other.
const STEPS: &[(&str, &str, &str)] = &[
    ("mkdir d; printf one > d/f", "cat d/f", "one"),
    // Same size: only the content or a timestamp differs.
    ("printf two > d/f", "cat d/f", "two"),
    ("printf ' and more' >> d/f", "cat d/f; stat -c ' %s' d/f", "two and more 12"),
    ("truncate -s 3 d/f", "stat -c %s d/f", "3"),
    ("mv d/f d/g", "ls d", "g"),
    ("mv d e", "ls; cat e/g", "e\ntwo"),
    ("printf x > e/h; mv e/h e/g", "cat e/g; ls e", "xg"),
    ("ln -s g e/link; cat e/link", "readlink e/link", "g"),
    ("rm e/g", "ls e", "link"),
    // By name as well: a node that has just looked up `d` assumes that it exists until its attribute cache expires.
    ("rm -r e", "ls -d d e 2>/dev/null || ls", ""),
];

fn changes(site: &Site) -> Result<String> {
    let volume = site.volume(64 * MIB)?;
    let one = site.mount(site.node(ONE), &volume, &[])?;
    let two = site.mount(site.node(TWO), &volume, &[])?;
    for (writer, reader) in [(&one, &two), (&two, &one)] {
        for (action, question, answer) in STEPS {
            writer.node().run(&format!("cd {} && {action}", writer.path()))?;
            sees(reader, action, question, answer)?;
        }
    }
    one.unmount()?;
    two.unmount()?;
    site.delete(&volume)?;
    Ok(format!("{} changes each way", STEPS.len()))
}

fn sees(reader: &Mounted<'_>, action: &str, question: &str, answer: &str) -> Result<()> {
    let script = format!("cd {} && {{ {question}; }}", reader.path());
    let mut last = String::new();
    let what = format!("{} sees: {action}", reader.node().name());
    let seen = reader.node().wait_until(&what, SEEN_WITHIN, || {
        last = reader.node().run(&script)?;
        Ok(last == *answer)
    });
    seen.map_err(|error| error.context(format!("{question} gives {last:?} instead of {answer:?}")))
}

fn turns(site: &Site) -> Result<String> {
    const LINES: usize = 20;
    let volume = site.volume(64 * MIB)?;
    let one = site.mount(site.node(ONE), &volume, &[])?;
    let two = site.mount(site.node(TWO), &volume, &[])?;
    for line in 0..LINES {
        let mounted = if line % 2 == 0 { &one } else { &two };
        mounted.node().run(&format!("echo line {line} >> {}", mounted.join("log")))?;
    }
    let expected: Vec<String> = (0..LINES).map(|line| format!("line {line}")).collect();
    for mounted in [&one, &two] {
        sees(mounted, "all lines", "cat log", &expected.join("\n"))?;
    }
    one.unmount()?;
    two.unmount()?;
    site.delete(&volume)?;
    Ok(String::new())
}

/// Requests that a second listing may send: to look up the directory and to query its attributes, twice.
const LOOK_UPS_MAX: u64 = 6;

/// The node holds a lease on the directory until the other one changes something in it.
fn listed_again(site: &Site) -> Result<String> {
    let volume = site.volume(64 * MIB)?;
    let made = format!("{POOL}/volumes/{}/d", volume.id);
    site.storage()
        .run_within(&format!("mkdir {made}; cd {made}; seq -f f%05g 10000 | xargs touch"), LIST_WITHIN)?;
    let one = site.mount(site.node(ONE), &volume, &[])?;
    let two = site.mount(site.node(TWO), &volume, &[])?;
    let list = || -> Result<(String, u64)> {
        let before = requests(&one)?;
        // Names and attributes. Not ls -l: it also queries the extended attributes of each file, which the client does not
        // cache.
        let show = format!("find {} -type f -printf '%s %m %T@ %f\\n' | sort -k 4", one.join("d"));
        let listing = one.node().run_within(&show, LIST_WITHIN)?;
        Ok((listing, requests(&one)? - before))
    };
    let (first, first_requests) = list()?;
    ensure!(first.lines().count() == 10_000, "{} entries", first.lines().count());
    let (second, second_requests) = list()?;
    ensure!(first == second, "the listings differ");
    ensure!(
        second_requests <= LOOK_UPS_MAX,
        "listing again made {second_requests} requests, the first time {first_requests}"
    );
    two.node().run(&format!("printf x > {}; rm {}", two.join("d/g"), two.join("d/f00001")))?;
    let (third, third_requests) = list()?;
    ensure!(
        third.lines().count() == 10_000 && third.ends_with(" g") && !third.contains(" f00001"),
        "the other node's changes are missing: {}",
        third.lines().last().unwrap_or_default()
    );
    ensure!(third_requests > LOOK_UPS_MAX, "after the other node's changes: {third_requests} requests");
    one.unmount()?;
    two.unmount()?;
    site.delete(&volume)?;
    Ok(format!("{first_requests} requests, then {second_requests}; after a change {third_requests}"))
}

/// The server waits for 6 s for the writer to flush or close the file. The client's own limit is 30 s.
const GROWN_WITHIN: Duration = Duration::from_secs(20);

/// The writer keeps its file open: only its WRITEs show that the file has grown.
fn grows(site: &Site) -> Result<String> {
    let volume = site.volume(64 * MIB)?;
    let one = site.mount(site.node(ONE), &volume, &[])?;
    let two = site.mount(site.node(TWO), &volume, &[])?;
    one.node().run(&format!("cd {} && mkdir d && printf 0 > d/log", one.path()))?;
    // With direct I/O, each byte is an immediate WRITE, and nothing is flushed.
    one.node().run(&format!(
        "mkfifo /run/bytes; setsid dd if=/run/bytes of={} bs=1 oflag=append,direct conv=notrunc > /dev/null 2>&1 &\n\
         sleep 3600 > /run/bytes 2> /dev/null < /dev/null & echo $! > /run/bytes.pid",
        one.join("d/log")
    ))?;
    for size in 2..=3 {
        // Not ls -l: it queries extended attributes, which makes the writer lose its write caching.
        let list = format!("ls {} > /dev/null; stat -c %s {}", two.join("d"), two.join("d/log"));
        let listed = two.node().run(&list)?;
        ensure!(listed == (size - 1).to_string(), "{listed} bytes before there were {size}");
        one.node().run("printf x > /run/bytes")?;
        let began = Instant::now();
        sees(&two, "a write", "stat -c %s d/log", &size.to_string())?;
        ensure!(began.elapsed() < GROWN_WITHIN, "the new size was seen after {:.0?} only", began.elapsed());
    }
    one.node().run("kill $(cat /run/bytes.pid); rm /run/bytes /run/bytes.pid")?;
    one.unmount()?;
    two.unmount()?;
    site.delete(&volume)?;
    Ok(String::new())
}

/// Packages as pip installs them: one directory each, with compiled modules.
const MAKE_PACKAGES: &str = r"import compileall, os
names = []
for package in range(10):
    os.mkdir(f'p{package}')
    for module in ['__init__'] + [f'm{number}' for number in range(10)]:
        with open(f'p{package}/{module}.py', 'w') as file: file.write(f'value = {package}\n' * 100)
        names.append(f'p{package}' if module == '__init__' else f'p{package}.{module}')
with open('everything.py', 'w') as file: file.write('import ' + ', '.join(names))
assert compileall.compile_dir('.', quiet=1)";

/// Cost of the import phase of a training job on a node with these mount options: requests of a first process, and of a
/// second one.
fn imports(site: &Site, options: &[(&str, &str)]) -> Result<(u64, u64)> {
    let volume = site.volume(64 * MIB)?;
    let one = site.mount(site.node(ONE), &volume, &[])?;
    one.node().run_within(
        &format!("cd {} && python3 -c \"$(cat <<'END'\n{MAKE_PACKAGES}\nEND\n)\"", one.path()),
        LIST_WITHIN,
    )?;
    one.unmount()?;
    let two = site.mount(site.node(TWO), &volume, options)?;
    let import = || -> Result<u64> {
        let before = requests(&two)?;
        let script = format!("PYTHONPATH={} python3 -B -c 'import everything'", two.path());
        two.node().run_within(&script, LIST_WITHIN)?;
        Ok(requests(&two)? - before)
    };
    let (first, second) = (import()?, import()?);
    two.unmount()?;
    site.delete(&volume)?;
    Ok((first, second))
}

fn imports_as_mounted(site: &Site) -> Result<String> {
    let (first, second) = imports(site, &[])?;
    ensure!(second * 10 < first * 9, "the first process made {first} requests, the second {second}");
    Ok(format!("{first} requests, then {second}"))
}

const LIST_WITHIN: Duration = Duration::from_secs(60);

/// Number of requests of a mount: the client's own counter for its share.
fn requests(at: &Mounted<'_>) -> Result<u64> {
    let account = at.node().run("cat /proc/fs/cifs/Stats")?;
    let share = at.node().run(&format!("findmnt -n -o SOURCE {}", at.path()))?.replace('/', "\\");
    let (_, own) = account.split_once(&share).with_context(|| format!("no {share} in:\n{account}"))?;
    let count = own.split_once("SMBs: ").and_then(|(_, rest)| rest.split_whitespace().next());
    count.and_then(|count| count.parse().ok()).with_context(|| format!("no count in:\n{own}"))
}
