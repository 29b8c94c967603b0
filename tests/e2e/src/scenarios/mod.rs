//! What is done with the cluster, in this order. Each scenario leaves Headstart installed and Ready with three replicas.

mod cases;
mod felt;
mod install;
mod moves;
mod raises;
mod rights;
mod start;
mod switching;
mod tenant;
mod view;

use std::time::Instant;

use anyhow::{Result, bail};
use futures::future::LocalBoxFuture;

use crate::cluster::Cluster;

/// A scenario says what it saw, a line each.
type Scenario = for<'a> fn(&'a mut Cluster) -> LocalBoxFuture<'a, Result<Vec<String>>>;

/// Runs only where it is named: it measures, and writes into documents.
const FELT: &str = "felt";

/// Whether it is.
pub(crate) fn felt_is_named(names: &[String]) -> bool {
    names.iter().any(|name| name == FELT)
}

/// All of them. `rights` looks back at the run so far; what comes after it brings rights of its own, or takes everything away.
const SCENARIOS: &[(&str, Scenario)] = &[
    ("install", |cluster| Box::pin(install::install(cluster))),
    ("start", |cluster| Box::pin(start::start(cluster))),
    ("cases", |cluster| Box::pin(cases::cases(cluster))),
    ("tenant", |cluster| Box::pin(tenant::tenant(cluster))),
    ("restarts", |cluster| Box::pin(moves::restarts(cluster))),
    ("drain", |cluster| Box::pin(moves::drain(cluster))),
    ("upgrade", |cluster| Box::pin(install::upgrade(cluster))),
    ("switching", |cluster| {
        Box::pin(switching::switching(cluster))
    }),
    ("raises", |cluster| Box::pin(raises::raises(cluster))),
    ("rights", |cluster| Box::pin(rights::rights(cluster))),
    ("view", |cluster| Box::pin(view::view(cluster))),
    (FELT, |cluster| Box::pin(felt::felt(cluster))),
    ("uninstall", |cluster| Box::pin(install::uninstall(cluster))),
];

/// Runs those that are named, or all but [`FELT`]. Installing is always among them.
///
/// # Errors
/// If a name is unknown, or at the first scenario that fails.
pub(crate) async fn run(cluster: &mut Cluster, names: &[String]) -> Result<()> {
    let known = SCENARIOS.iter().map(|(name, _)| *name);
    if let Some(name) = names
        .iter()
        .find(|name| !known.clone().any(|known| known == *name))
    {
        bail!(
            "there is no scenario {name}; there are {}",
            known.collect::<Vec<_>>().join(", ")
        );
    }
    let wanted = |name: &str| {
        names.is_empty() && name != FELT
            || name == "install"
            || names.iter().any(|wanted| wanted == name)
    };
    for (name, scenario) in SCENARIOS.iter().filter(|(name, _)| wanted(name)) {
        let began = Instant::now();
        println!("\n{name}");
        match scenario(cluster).await {
            Ok(seen) => {
                for line in seen {
                    println!("  {line}");
                }
                println!("  ok, {} s", began.elapsed().as_secs());
            }
            Err(error) => {
                println!("  FAILED after {} s", began.elapsed().as_secs());
                return Err(error.context(format!("the scenario {name}")));
            }
        }
    }
    Ok(())
}
