//! Headstart.
