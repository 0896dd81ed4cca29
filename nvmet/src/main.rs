//! The bundled NVMe-oF target.

fn main() -> std::process::ExitCode {
    forebay_target::cli::main()
}
