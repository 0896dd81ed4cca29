//! Completion of `kubectl forebay`: kubectl runs `kubectl_complete-forebay` from the PATH with the words so far, the last of
//! which is to be completed. It reads one candidate per line from the output, and a directive for the shell.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::Path;

use clap::{Arg, Command};

/// The name by which kubectl runs the program, through a link.
const NAME: &str = "kubectl_complete-forebay";

/// Directive: complete with the candidates only.
const NO_FILES: u8 = 4;
/// Directive: complete with file names.
const FILES: u8 = 0;

/// Whether kubectl started this process for completion.
pub(crate) fn is_wanted(program: Option<&OsStr>) -> bool {
    program.and_then(|program| Path::new(program).file_name()).is_some_and(|name| name == NAME)
}

/// Returns the output for kubectl.
pub(crate) fn answer(root: Command, words: &[String]) -> String {
    let mut root = root;
    root.build();
    let (last, before) = words.split_last().map_or(("", &[][..]), |(last, before)| (last.as_str(), before));
    let mut command = &root;
    // The option with the last word as its value.
    let mut option: Option<&Arg> = None;
    for word in before {
        option = match option {
            Some(_) => None,
            None => takes_value(command, word),
        };
        if let Some(inner) = command.get_subcommands().find(|c| c.get_name() == word) {
            command = inner;
        }
    }
    let (candidates, directive) = if let Some(option) = option {
        values(option)
    } else if last.starts_with('-') {
        (options(command), NO_FILES)
    } else if command.has_subcommands() {
        let inner = command.get_subcommands().filter(|c| !c.is_hide_set());
        (inner.map(|c| (c.get_name().to_owned(), help(c.get_about()))).collect(), NO_FILES)
    } else {
        command.get_positionals().next().map_or((Vec::new(), NO_FILES), values)
    };
    let mut text = String::new();
    for (candidate, help) in candidates.iter().filter(|(candidate, _)| candidate.starts_with(last)) {
        let _ = writeln!(text, "{candidate}\t{help}");
    }
    let _ = writeln!(text, ":{directive}");
    text
}

/// Returns the option that a word names, if the option's value follows.
fn takes_value<'a>(command: &'a Command, word: &str) -> Option<&'a Arg> {
    let is_it = |arg: &&Arg| match word.strip_prefix("--") {
        Some(long) => arg.get_long() == Some(long),
        None => word
            .strip_prefix('-')
            .is_some_and(|short| arg.get_short().map(String::from).as_deref() == Some(short)),
    };
    command.get_arguments().find(is_it).filter(|arg| arg.get_action().takes_values())
}

fn options(command: &Command) -> Vec<(String, String)> {
    let named = command.get_arguments().filter(|arg| !arg.is_hide_set());
    named.filter_map(|arg| Some((format!("--{}", arg.get_long()?), help(arg.get_help())))).collect()
}

/// Returns the possible values of an argument, and the directive for file names.
fn values(arg: &Arg) -> (Vec<(String, String)>, u8) {
    let possible = arg.get_possible_values();
    let values = possible.iter().map(|value| (value.get_name().to_owned(), help(value.get_help()))).collect();
    let is_file = arg.get_value_names().is_some_and(|names| names.iter().any(|name| name == "FILE"));
    (values, if is_file { FILES } else { NO_FILES })
}

/// Returns the first line of a help text.
fn help(text: Option<&clap::builder::StyledStr>) -> String {
    text.map(ToString::to_string).unwrap_or_default().lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::options::Cli;

    fn complete(words: &[&str]) -> (Vec<String>, String) {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let text = answer(Cli::command(), &words);
        let mut lines: Vec<String> =
            text.lines().map(|line| line.split('\t').next().unwrap_or_default().to_owned()).collect();
        let directive = lines.pop().expect("a directive");
        (lines, directive)
    }

    #[test]
    fn commands_options_and_values_are_completed() {
        assert_eq!(complete(&["sta"]), (vec!["status".to_owned()], ":4".to_owned()));
        let (commands, _) = complete(&[""]);
        assert!(
            commands.contains(&"bundle".to_owned()) && commands.contains(&"doctor".to_owned()),
            "{commands:?}"
        );
        let (options, _) = complete(&["status", "--name"]);
        assert_eq!(options, ["--namespace"]);
        assert_eq!(complete(&["status", "-o", "w"]).0, ["wide"]);
        assert_eq!(complete(&["top", "--sort", ""]).0, ["throughput", "operations", "latency", "waited"]);
        assert_eq!(complete(&["--color", "al"]).0, ["always"]);
        assert_eq!(complete(&["completions", "z"]).0, ["zsh"]);
        assert_eq!(complete(&["bundle", "--file", ""]), (Vec::new(), ":0".to_owned()), "names of files");
        assert_eq!(complete(&["status", "-n", "x", "--al"]).0, ["--all-namespaces"]);
        assert_eq!(complete(&["nonsense", "--zz"]).0, Vec::<String>::new());
        assert!(!complete(&[]).0.is_empty());
    }

    #[test]
    fn completion_mode_is_selected_by_the_program_name() {
        assert!(is_wanted(Some(OsStr::new("/usr/local/bin/kubectl_complete-forebay"))));
        assert!(!is_wanted(Some(OsStr::new("/usr/local/bin/kubectl-forebay"))));
        assert!(!is_wanted(None));
    }
}
