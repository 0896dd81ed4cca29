//! The code that runs inside a guest: init, agent, and the bodies of the tests.

pub mod agent;
pub mod calls;
pub mod direct;
pub mod init;

/// Name of the virtio serial port between host and agent.
pub const PORT: &str = "org.forebay.agent";
/// Mount point of the product's disk.
pub const PRODUCT: &str = "/opt/forebay";
/// The agent's own binary.
pub const GUEST_BINARY: &str = "/opt/forebay/bin/forebay-guest";
