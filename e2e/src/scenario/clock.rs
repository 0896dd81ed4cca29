//! The clock of the server's machine steps by an hour and back, repeatedly. This must not affect any timeout of the server.
//!
//! Conversation tests cover lease breaks under such steps (`smb/tests/files/caching.rs`). Two nodes cannot show them: after a
//! break, Linux's client (7.2) keeps caching later writes of an open handle, with Samba as well.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::drain::disturbed;
use super::{Scenario, ours};
use crate::lab::Process;
use crate::site::Site;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![ours("the clock steps by an hour and back under a writer and readers: no error", load)]
}

/// Longer than any time for which the server waits for a client.
const STEP: &str = "1 hour";

/// Steps the clock until standard input ends. The steps sum up to zero.
const STEPPING: &str = "exec 3<&0; cat <&3 > /dev/null & input=$!; steps=0
    while kill -0 $input 2> /dev/null; do
        date -s \"+$1\" > /dev/null; sleep 0.2; date -s \"-$1\" > /dev/null; sleep 0.2
        steps=$((steps + 2))
    done
    echo $steps steps";

struct Stepping(Process);

impl Stepping {
    fn start(site: &Site) -> Result<Self> {
        Ok(Self(site.storage().spawn(&["sh", "-c", STEPPING, "stepping", STEP])?))
    }

    /// Ends the stepping. Returns how often the clock has stepped.
    fn end(self) -> Result<String> {
        let lines = self.0.finish(Duration::from_secs(20))?;
        let steps: u32 = lines.last().and_then(|line| line.strip_suffix(" steps")?.parse().ok()).unwrap_or(0);
        ensure!(steps > 0, "the clock has not stepped");
        Ok(format!("{steps} steps"))
    }
}

fn load(site: &Site) -> Result<String> {
    let stepping = Stepping::start(site)?;
    let done = disturbed(site, 0, &|| Ok(()))?;
    Ok(format!("{}, {done}", stepping.end()?))
}
