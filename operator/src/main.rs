//! The operator of Forebay.

fn main() {}
