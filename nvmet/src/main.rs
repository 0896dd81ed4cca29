//! `forebay-target`: the bundled NVMe-oF target. It makes the kernel's nvmet offer drives, partitions and files as a
//! configuration says, keeps it so, and takes away what it made (docs/guides/target.md).
//!
//! `config` is what is wanted, [`observed`] what the kernel has, [`source`] what the drives are like, [`plan`] the pure
//! comparison of these, [`step`] what changes something, and [`round`] all of it once. [`owner`] says what belongs to which
//! target.

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
