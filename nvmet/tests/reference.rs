//! The reference in docs/reference: configuration and command line as in the code.

use std::process::Command;

use forebay_testing::generated;

const BINARY: &str = env!("CARGO_BIN_EXE_forebay-target");
const PACKAGE: &str = "forebay-target --test reference";

#[test]
fn the_command_line_is_in_the_reference() {
    let text = generated::help(BINARY, "forebay-target", None);
    generated::part("docs/reference/cli.md", "forebay-target", &text, PACKAGE);
}

#[test]
fn the_configuration_is_in_the_reference() {
    let output = Command::new(BINARY).arg("sample-config").output().expect("it runs");
    let sample = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(sample.contains("[[subsystem.namespace]]"), "{sample}");
    let text = format!("```toml\n{}\n```", sample.trim());
    generated::part("docs/reference/configuration.md", "forebay-target", &text, PACKAGE);
}
