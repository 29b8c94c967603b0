//! Headstart gives Kubernetes pods more CPU while they start, and takes it back in place when they have started.

pub mod admission;
pub mod api;
pub mod app;
pub mod boosts;
pub mod certs;
pub mod claims;
pub mod cli;
pub mod clock;
pub mod config;
pub mod domain;
pub mod error;
pub mod lease;
pub mod metrics;
pub mod probes;
pub mod server;
pub mod status;
pub mod sweeper;
pub mod telemetry;
pub mod watch;
