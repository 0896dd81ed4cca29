//! `forebay-server`.

fn main() -> std::process::ExitCode {
    forebay_server::cli::main().into()
}
