//! The reference in docs/reference: the command line as in the code.

use forebay_testing::generated;

#[test]
fn the_command_line_is_in_the_reference() {
    let text = generated::help(env!("CARGO_BIN_EXE_kubectl-forebay"), "kubectl forebay", None);
    generated::part("docs/reference/cli.md", "kubectl-forebay", &text, "kubectl-forebay --test reference");
}
