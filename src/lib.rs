//! Headstart gives Kubernetes pods more CPU while they start, and takes it back in place when they have started.

pub mod api;
pub mod domain;
