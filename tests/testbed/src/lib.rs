//! Test beds for Headstart: a real Kubernetes control plane on loopback, with stand-ins for what it lacks.
//!
//! [`control_plane`] starts etcd and kube-apiserver; [`node`] plays scheduler and kubelet; [`operator`] runs the program under
//! test against them, and [`balancer`] stands before its webhooks as a Service would; [`link`] and [`proxy`] trouble its way to the
//! API server. Everything ends with the test's process, even when that is killed ([`process`]).

pub mod balancer;
pub mod binaries;
pub mod cluster;
pub mod control_plane;
pub mod docs;
pub mod generate;
pub mod kustomize;
pub mod link;
pub mod lives;
pub mod memory;
pub mod node;
pub mod operator;
pub mod pki;
pub mod process;
pub mod proxy;
pub mod release;
mod request;
pub mod rest;
pub mod view;
pub mod wait;

pub use balancer::{Backend, Balancer};
pub use cluster::Cluster;
pub use control_plane::{ControlPlane, Options};
pub use link::{Link, Wire};
pub use node::{Behaviour, NodeStandIn, Resize};
pub use operator::{Operator, OperatorOptions, install};
pub use process::{Signal, Supervised};
pub use proxy::Proxy;
pub use rest::{Answer, Rest};
pub use wait::eventually;
