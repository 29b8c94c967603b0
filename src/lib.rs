//! Headstart gives Kubernetes pods more CPU while they start, and takes it back in place when they have started.
//!
//! Data flows one way. On every replica:
//!
//! ```text
//! StartupCPUBoost ─ watch ─► boosts ──────────────────────────────┐
//! Namespace, LimitRange, ResourceQuota, Node ─► surroundings ─► snapshots ─► Snapshot ─┐
//! review ─ server ─► admission ─ domain::admission ◄───────────────────────────────────┘
//!                                     └─► JSON Patch: CPU, claim, record
//! ```
//!
//! and on the replica that holds the [`lease`]:
//!
//! ```text
//! pods with a claim ─ watch ─► claims ─► sweeper ─ domain::revert ─► resize, then finish
//! boosts ─► status
//! ```
//!
//! Where it is switched on, every replica also shows the boosts in force: claims and boosts ─► [`view`].
//!
//! [`domain`] decides; the modules around it carry out and decide nothing. The state of a boost is in its pod alone, so
//! nothing is handed over between leaders, and any of them may die at any moment.

pub mod admission;
pub mod api;
pub mod app;
pub mod boosts;
pub mod certs;
pub mod check;
pub mod claims;
pub mod cli;
pub mod clock;
pub mod config;
pub mod contact;
pub mod domain;
pub mod error;
pub mod explain;
pub mod kubeconfig;
pub mod lease;
pub mod list;
pub mod metrics;
pub mod probes;
pub mod revert;
pub mod server;
pub mod snapshots;
pub mod status;
pub mod surroundings;
pub mod sweeper;
pub mod telemetry;
pub mod upstream;
pub mod view;
pub mod watch;
