//! Headstart.
fn main() {}
