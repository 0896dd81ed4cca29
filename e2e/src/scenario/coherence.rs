//! Two nodes on one volume: what one does, the other sees.

use std::time::Duration;

use anyhow::Result;

use super::{MIB, ONE, Scenario, TWO, scenario};
use crate::site::{Mounted, Site};

/// The attribute cache is kept for a second; the rest is patience.
const SEEN_WITHIN: Duration = Duration::from_secs(4);

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario("two nodes see each other's changes", changes),
        scenario("two nodes append by turns", turns),
    ]
}

/// An action on one node, and the command with the output that the other must then give.
const STEPS: &[(&str, &str, &str)] = &[
    ("mkdir d; printf one > d/f", "cat d/f", "one"),
    // Same size: only the content, or a time, tells.
    ("printf two > d/f", "cat d/f", "two"),
    ("printf ' and more' >> d/f", "cat d/f; stat -c ' %s' d/f", "two and more 12"),
    ("truncate -s 3 d/f", "stat -c %s d/f", "3"),
    ("mv d/f d/g", "ls d", "g"),
    ("mv d e", "ls; cat e/g", "e\ntwo"),
    ("printf x > e/h; mv e/h e/g", "cat e/g; ls e", "xg"),
    ("ln -s g e/link; cat e/link", "readlink e/link", "g"),
    ("rm e/g", "ls e", "link"),
    // By name, too: a node that has just seen `d` believes in it for as long as its attribute cache is kept.
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
