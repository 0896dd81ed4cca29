//! One run of this program under callgrind, and its counts.

use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// The cost of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Instructions of the program itself. Libraries are excluded: the C library selects code according to the processor.
    pub(super) instructions: u64,
    /// Calls from the program into libraries: allocations, and copies and comparisons that are not inlined.
    pub(super) calls: u64,
}

/// Runs `program` with `arguments`, and leaves the profile in `out`.
pub(super) fn run(program: &Path, arguments: &[&str], out: &Path) -> Result<Counts> {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--quiet", "--compress-strings=no", "--compress-pos=no"]);
    command.arg(format!("--callgrind-out-file={}", out.display()));
    command.arg(program).args(arguments);
    let output = match command.output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("valgrind is missing; run: sudo apt-get install -y --no-install-recommends valgrind")
        }
        output => output.context("start valgrind")?,
    };
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "valgrind ended with {}:\n{}", output.status, said.trim_end());
    let text = std::fs::read_to_string(out).with_context(|| format!("read {}", out.display()))?;
    parse(&text, &program.to_string_lossy())
}

/// Parses a profile without compressed names ("Callgrind Format Specification" in valgrind's manual).
fn parse(text: &str, program: &str) -> Result<Counts> {
    let mut counts = Counts::default();
    let mut is_own = false;
    // Whether the current call enters another object.
    let mut leaves = false;
    let mut is_cost_of_call = false;
    let mut has_totals = false;
    for line in text.lines() {
        if let Some(object) = line.strip_prefix("ob=") {
            is_own = object == program;
        } else if let Some(object) = line.strip_prefix("cob=") {
            leaves = object != program;
        } else if let Some(call) = line.strip_prefix("calls=") {
            let count = call.split_ascii_whitespace().next().and_then(|count| count.parse::<u64>().ok());
            if is_own && leaves {
                counts.calls += count.with_context(|| format!("callgrind wrote {line:?}"))?;
            }
            // The next call stays in its own object unless it states otherwise.
            leaves = false;
            is_cost_of_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit()) {
            if !std::mem::take(&mut is_cost_of_call) && is_own {
                let cost = line.split_ascii_whitespace().nth(1).and_then(|cost| cost.parse::<u64>().ok());
                counts.instructions += cost.with_context(|| format!("callgrind wrote {line:?}"))?;
            }
        } else {
            has_totals |= line.starts_with("totals:");
        }
    }
    ensure!(has_totals, "the profile has no end");
    ensure!(counts.instructions > 0, "the profile has nothing of {program}");
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: &str = "# callgrind format\nversion: 1\npositions: line\nevents: Ir\nsummary: 1330\n\n\
        ob=/bin/program\nfl=a.rs\nfn=outer\n10 5\ncfn=inner\ncalls=3 20\n11 900\n\
        cob=/lib/libc.so.6\ncfi=malloc.c\ncfn=malloc\ncalls=7 1\n12 400\n14 2\nfi=b.rs\n15 3\n\n\
        fn=inner\n20 900\n\nob=/lib/libc.so.6\nfn=malloc\n1 380\ncob=/bin/program\ncfn=hook\ncalls=9 1\n1 20\n\n\
        totals: 1330\n";

    #[test]
    fn only_instructions_and_outgoing_calls_of_the_program_are_counted() {
        assert_eq!(parse(PROFILE, "/bin/program").ok(), Some(Counts { instructions: 910, calls: 7 }));
    }

    #[test]
    fn truncated_profile_or_profile_of_another_program_is_rejected() {
        let cut = &PROFILE[..PROFILE.len() - 20];
        assert!(parse(cut, "/bin/program").is_err());
        assert!(parse(PROFILE, "/bin/other").is_err());
    }
}
