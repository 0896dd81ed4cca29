//! The recorded counts, and the comparison of new ones with them.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Compiler and platform of this program.
pub(super) const COMPILER: &str = env!("FOREBAY_BENCH_COMPILER");

/// Maximum deviation of an instruction count from the recorded one, in percent.
pub(super) const TOLERANCE_PERCENT: f64 = 1.0;
/// Maximum rise if another compiler built the program, in percent. A fall is then no failure.
pub(super) const TOLERANCE_OTHER_COMPILER_PERCENT: f64 = 10.0;
/// Maximum deviation of the number of calls: one more or less per operation is a change.
const TOLERANCE_CALLS: f64 = 0.5;

/// The cost of one operation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Cost {
    /// Instructions of the program.
    pub(super) instructions: f64,
    /// Calls into libraries.
    pub(super) calls: f64,
}

/// The content of bench/instructions.json.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Table {
    /// The compiler of the counted program.
    pub(super) compiler: String,
    /// Costs by the name of the operation.
    pub(super) operations: BTreeMap<String, Cost>,
}

/// Result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// As recorded.
    Same,
    /// The operation has become more expensive.
    Worse,
    /// It has become cheaper: the table must be updated.
    Better,
    /// It is not in the table.
    New,
}

impl Table {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("read the recorded counts in {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("read {}", path.display()))
    }

    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
    }

    /// Whether the compiler of this program also built the counted one.
    pub(super) fn is_of_this_compiler(&self) -> bool {
        self.compiler == COMPILER
    }

    /// Compares the current cost of one operation.
    pub(super) fn judge(&self, name: &str, now: Cost) -> Verdict {
        let Some(then) = self.operations.get(name) else { return Verdict::New };
        let change = change_percent(*then, now);
        let (rise, fall) = if self.is_of_this_compiler() {
            (TOLERANCE_PERCENT, TOLERANCE_PERCENT)
        } else {
            (TOLERANCE_OTHER_COMPILER_PERCENT, f64::INFINITY)
        };
        // Another compiler may also inline a copy, or emit a call for one.
        let calls_tolerance = if self.is_of_this_compiler() { TOLERANCE_CALLS } else { f64::INFINITY };
        let calls = now.calls - then.calls;
        if change > rise || calls > calls_tolerance {
            Verdict::Worse
        } else if change < -fall || calls < -calls_tolerance {
            Verdict::Better
        } else {
            Verdict::Same
        }
    }
}

/// The deviation of the instructions.
pub(super) fn change_percent(then: Cost, now: Cost) -> f64 {
    (now.instructions / then.instructions - 1.0) * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(compiler: &str) -> Table {
        let cost = Cost { instructions: 1000.0, calls: 20.0 };
        Table { compiler: compiler.to_owned(), operations: [("a".to_owned(), cost)].into() }
    }

    #[test]
    fn verdict_changes_beyond_the_tolerance_or_by_a_single_call() {
        let table = table(COMPILER);
        let judge = |instructions, calls| table.judge("a", Cost { instructions, calls });
        assert_eq!(judge(1008.0, 20.2), Verdict::Same);
        assert_eq!(judge(992.0, 19.8), Verdict::Same);
        assert_eq!(judge(1012.0, 20.0), Verdict::Worse);
        assert_eq!(judge(1000.0, 21.0), Verdict::Worse);
        assert_eq!(judge(988.0, 20.0), Verdict::Better);
        assert_eq!(judge(1000.0, 19.0), Verdict::Better);
        // An improvement in one count does not compensate a regression in the other.
        assert_eq!(judge(500.0, 21.0), Verdict::Worse);
        assert_eq!(table.judge("b", Cost { instructions: 1.0, calls: 0.0 }), Verdict::New);
    }

    #[test]
    fn with_another_compiler_only_a_large_increase_is_worse() {
        let table = table("another");
        let judge = |instructions, calls| table.judge("a", Cost { instructions, calls });
        assert_eq!(judge(1050.0, 22.0), Verdict::Same);
        assert_eq!(judge(700.0, 10.0), Verdict::Same);
        assert_eq!(judge(1150.0, 20.0), Verdict::Worse);
    }
}
