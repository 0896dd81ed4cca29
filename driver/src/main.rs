//! Forebay.
fn main() {}
