//! A request while it is worked on: what it may use, its steps, and the compound that it is part of.

pub(super) mod chain;
pub(super) mod channel;
pub(super) mod core;
pub(super) mod step;
