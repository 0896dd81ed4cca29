//! `kubectl forebay`.

fn main() {}
