//! `forebay-target`: the bundled NVMe-oF target. It configures the kernel's nvmet to offer drives, partitions and files
//! according to a configuration file, maintains this state, and removes what it has created (docs/guides/target.md).
//!
//! `config` is the required state, [`observed`] the kernel's state, [`source`] the state of the drives, [`plan`] the pure
//! comparison of these, [`step`] the changes, and [`round`] one full pass. [`owner`] determines which target owns an object.

mod cli;
mod config;
mod content;
mod daemon;
mod http;
mod limits;
mod machine;
mod observed;
mod owner;
mod plan;
mod round;
mod source;
mod step;

fn main() -> std::process::ExitCode {
    cli::main()
}
