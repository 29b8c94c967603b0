//! Every decision that Headstart takes, as pure functions: values in, values out.
//!
//! Nothing here may know a Kubernetes client, an async runtime, a socket, a clock or a random number; time comes in as
//! a value. (`tests/purity.rs` holds the module to it.) The adapters around it carry out what is decided here and decide
//! nothing.
//!
//! ```text
//! StartupCPUBoost ── policy::compile ──► Policy ─┐
//!                                                ├─ snapshot::Snapshot
//! pod (CREATE) ── admission::admit(snapshot) ────┘──► patch::admission   → the webhook's answer
//!
//! pod with a record ── revert::decide(policy?, now) ─► Revert / Finish   → patch::resize, patch::finish
//!                                                    ├► Wait(until) …    → look again
//!                                                    └► Raise ── raise::again(snapshot) ─► patch::claim, patch::resize
//! pod that admission missed ── raise::missed(snapshot) ──────────────────► the same
//! ```
//!
//! The words: a *boost* is CPU lent to a starting pod; its *record* is the annotation that says what was lent and until
//! when, its *claim* the label that says that a boost is in force; an *end rule* tells when it is due; *revert* resizes
//! back; *finish* marks the record and drops the claim; a *raise* boosts a pod that runs already.

pub mod admission;
pub mod boosted;
pub mod clamp;
pub mod cpu;
pub mod end;
pub mod failure;
pub mod limit_range;
pub mod nodes;
pub mod patch;
pub mod policy;
pub mod qos;
pub mod quantity;
pub mod quota;
pub mod raise;
pub mod reason;
pub mod record;
pub mod revert;
pub mod snapshot;
pub mod totals;
pub mod witness;
