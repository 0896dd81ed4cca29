//! `forebay-bench instructions`: counts the instructions of the protocol core with callgrind and compares them with recorded
//! counts.

mod callgrind;
mod codec;
mod engine;
mod table;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};

use callgrind::Counts;
use table::{
    COMPILER, Cost, TOLERANCE_OTHER_COMPILER_PERCENT, TOLERANCE_PERCENT, Table, Verdict, change_percent,
};

/// Operations in the two runs of each workload: the difference of their counts excludes the setup.
const FEW: u64 = 500;
const MANY: u64 = 2500;

#[derive(Args)]
pub(crate) struct InstructionsArguments {
    /// The recorded counts.
    #[arg(long, value_name = "FILE", default_value = "bench/instructions.json")]
    table: PathBuf,
    /// Write the counts to --table instead of comparing them.
    #[arg(long, conflicts_with = "only")]
    record: bool,
    /// Count only these operations.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME")]
    only: Vec<Operation>,
    /// Keep the profiles in this folder, for callgrind_annotate: <NAME>.few and <NAME>.many.
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
}

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Operation {
    /// READ and its answer, each encoded and parsed.
    CodecRead,
    /// WRITE and its answer, each encoded and parsed.
    CodecWrite,
    /// CREATE with four contexts, QUERY_INFO and CLOSE in one frame, and the answers.
    CodecCreateCompound,
    /// QUERY_DIRECTORY and its answer with 32 entries.
    CodecQueryDirectory,
    /// A READ of 64 KiB through a connection of the protocol core.
    EngineRead,
    /// A WRITE of 4 KiB through a connection of the protocol core.
    EngineWrite,
    /// CREATE, QUERY_INFO and CLOSE through a connection of the protocol core.
    EngineOpenStatClose,
}

impl Operation {
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// The program to count: performs an operation `count` times.
pub(crate) fn work(operation: Operation, count: u64) -> Result<()> {
    match operation {
        Operation::CodecRead => codec::read(count),
        Operation::CodecWrite => codec::write(count),
        Operation::CodecCreateCompound => codec::create_compound(count),
        Operation::CodecQueryDirectory => codec::query_directory(count),
        Operation::EngineRead => engine::read(count),
        Operation::EngineWrite => engine::write(count),
        Operation::EngineOpenStatClose => engine::open_stat_close(count),
    }
}

/// Counts the instructions, and records or compares them.
pub(crate) fn run(arguments: &InstructionsArguments) -> Result<ExitCode> {
    ensure!(
        !cfg!(debug_assertions),
        "this is no release build, and its counts mean nothing; run: cargo build --release --workspace --bins"
    );
    // Read the table before counting: an unreadable table should fail immediately.
    let recorded = if arguments.record { None } else { Some(Table::read(&arguments.table)?) };
    let scratch = tempfile::tempdir()?;
    let folder = arguments.keep.as_deref().unwrap_or(scratch.path());
    std::fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    let program = std::env::current_exe()?.canonicalize()?;
    let chosen = match &arguments.only[..] {
        [] => Operation::value_variants(),
        only => only,
    };
    let mut costs = BTreeMap::new();
    for &operation in chosen {
        let cost = count(&program, operation, folder).with_context(|| operation.name())?;
        costs.insert(operation.name(), cost);
    }
    let Some(recorded) = recorded else {
        let table = Table { compiler: COMPILER.to_owned(), operations: costs };
        table.write(&arguments.table)?;
        println!("recorded in {}", arguments.table.display());
        return Ok(ExitCode::SUCCESS);
    };
    let gone = recorded.operations.keys().filter(|name| Operation::from_str(name, false).is_err());
    let gone: Vec<&String> = gone.collect();
    let (text, good) = compare(&recorded, &costs);
    print!("{text}");
    if good && gone.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    for name in gone {
        eprintln!("{name} is in the table and no operation");
    }
    eprint!("{}", advice(&arguments.table));
    Ok(ExitCode::FAILURE)
}

/// The cost of one operation.
fn count(program: &Path, operation: Operation, folder: &Path) -> Result<Cost> {
    let name = operation.name();
    let run = |count: u64, suffix: &str| {
        let out = folder.join(format!("{name}.{suffix}"));
        callgrind::run(program, &["counted-work", &name, &count.to_string()], &out)
    };
    let (few, many) = (run(FEW, "few")?, run(MANY, "many")?);
    per_operation(few, many)
}

fn per_operation(few: Counts, many: Counts) -> Result<Cost> {
    let of = |few: u64, many: u64| -> Result<f64> {
        let difference = many.checked_sub(few).context("more operations took less")?;
        // The table has one decimal.
        Ok((difference as f64 / (MANY - FEW) as f64 * 10.0).round() / 10.0)
    };
    Ok(Cost { instructions: of(few.instructions, many.instructions)?, calls: of(few.calls, many.calls)? })
}

/// A table of all counts, and whether they match the recorded ones.
fn compare(recorded: &Table, costs: &BTreeMap<String, Cost>) -> (String, bool) {
    let mut text = String::new();
    if !recorded.is_of_this_compiler() {
        let _ = writeln!(
            text,
            "The counts were recorded with {}; this program was built with {COMPILER}. Only a rise of more than \
             {TOLERANCE_OTHER_COMPILER_PERCENT} % fails. Record new counts in a commit of their own.",
            recorded.compiler
        );
    }
    let _ = writeln!(
        text,
        "{:<24}{:>14}{:>10}{:>9}{:>8}{:>10}",
        "operation", "instructions", "recorded", "change", "calls", "recorded"
    );
    let mut good = true;
    for (name, now) in costs {
        let verdict = recorded.judge(name, *now);
        let (then, change) = match recorded.operations.get(name) {
            Some(then) => (*then, format!("{:+.1} %", change_percent(*then, *now))),
            None => (Cost { instructions: 0.0, calls: 0.0 }, String::new()),
        };
        let remark = match verdict {
            Verdict::Same => "",
            Verdict::Worse => "  WORSE",
            Verdict::Better => "  BETTER: record it",
            Verdict::New => "  NEW: record it",
        };
        good &= verdict == Verdict::Same;
        let _ = writeln!(
            text,
            "{name:<24}{:>14.1}{:>10.1}{change:>9}{:>8.1}{:>10.1}{remark}",
            now.instructions, then.instructions, now.calls, then.calls
        );
    }
    (text, good)
}

fn advice(table: &Path) -> String {
    format!(
        "Counts differ from those in {} (by more than {TOLERANCE_PERCENT} %, or a call into a library).\n\
         To see where instructions go:   forebay-bench instructions --only NAME --keep profiles\n\
         \x20                              callgrind_annotate --inclusive=yes profiles/NAME.many\n\
         To compare with another commit: build it, keep its profiles, and compare both outputs of callgrind_annotate.\n\
         To accept the new counts:       forebay-bench instructions --record, and commit the file with the reason.\n",
        table.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_completes() {
        for &operation in Operation::value_variants() {
            work(operation, 20).unwrap_or_else(|error| panic!("{}: {error:#}", operation.name()));
        }
    }

    #[test]
    fn the_checked_in_table_has_every_operation() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("instructions.json");
        let table = Table::read(&path).expect("the table");
        let names: Vec<String> = table.operations.into_keys().collect();
        let mut known: Vec<String> = Operation::value_variants().iter().map(|it| it.name()).collect();
        known.sort();
        assert_eq!(names, known);
    }

    #[test]
    fn setup_cost_cancels_out_between_the_two_runs() {
        let few = Counts { instructions: 1_000_000 + 300 * FEW, calls: 5000 + 4 * FEW };
        let many = Counts { instructions: 1_000_000 + 300 * MANY, calls: 5000 + 4 * MANY };
        assert_eq!(per_operation(few, many).ok(), Some(Cost { instructions: 300.0, calls: 4.0 }));
        assert!(per_operation(many, few).is_err());
    }

    #[test]
    fn comparison_marks_regressed_operations() {
        let cost = |instructions| Cost { instructions, calls: 3.0 };
        let operations = |a, b| [("a".to_owned(), cost(a)), ("b".to_owned(), cost(b))].into();
        let table = Table { compiler: COMPILER.to_owned(), operations: operations(100.0, 100.0) };
        let (text, good) = compare(&table, &operations(100.0, 105.0));
        assert!(!good && text.contains("+5.0 %") && text.matches("WORSE").count() == 1, "{text}");
        assert!(compare(&table, &operations(100.0, 100.5)).1);
    }
}
