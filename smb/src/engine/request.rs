//! A request in progress: the state it may access, its steps, and the compound it belongs to.

pub(super) mod chain;
pub(super) mod channel;
pub(super) mod core;
pub(super) mod step;
