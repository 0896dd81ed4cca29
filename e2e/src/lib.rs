//! The lab: QEMU guests as nodes, images cached by their ingredients, and scenarios on real components.
//!
//! Two binaries share this crate. `forebay-lab` runs on the developer's machine: it builds the images, boots the guests and
//! drives the scenarios. `forebay-guest` runs inside a guest as its init, its agent and the body of the tests. They exchange
//! frames ([`wire`]) over a virtio serial port, so no network port of the host is used.

pub mod cache;
pub mod channel;
pub mod disk;
pub mod foreign;
pub mod guest;
pub mod host;
pub mod images;
pub mod kubernetes;
pub mod lab;
pub mod limits;
pub mod machine;
pub mod native;
pub mod programs;
pub mod progress;
pub mod report;
pub mod rundir;
pub mod sanity;
pub mod scenario;
pub mod sibling;
pub mod site;
pub mod story;
pub mod supervise;
pub mod switch;
pub mod terminal;
pub mod tsc;
pub mod wait;
pub mod wire;
