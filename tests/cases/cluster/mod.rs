//! The layer of a real API server: the binary itself, two replicas of it, with the account, the rights and the policies
//! of the manifests; scheduler and kubelet are stand-ins.
//!
//! Each part of a case has a namespace of its own, which stands for the data's `ns`, so that cases run side by side on
//! one cluster for each set of flags. The data's times are a story's: only their order counts here, and a look whose
//! answer is that nothing is written is over when something that began after it has ended. What has been written, and
//! what admission was asked and answered, is read from the API server's audit log.

mod admit;
mod apply;
mod audit;
mod bed;
mod compare;
mod interloper;
mod life;
mod rough;
mod stored;
mod storm;

use std::{cell::Cell, collections::BTreeMap};

use anyhow::{Context, ensure};
use libtest_mimic::Trial;

use crate::{
    data::{Case, Cases, Id, Kind, Layer},
    report, world,
};

use bed::Bed;

/// One test for each case.
pub fn trials(cases: &'static Cases) -> Vec<Trial> {
    cases
        .iter()
        .filter(|(_, case)| case.runs_in(Layer::Cluster))
        .map(|(id, case)| {
            report::trial(Layer::Cluster, id, move || {
                bed::run(Box::pin(run(cases, id, case)))
            })
        })
        .collect()
}

/// Executes all parts of a case that a real API server can tell about.
async fn run(cases: &Cases, id: Id, case: &Case) -> anyhow::Result<()> {
    let parts = Cell::new(0);
    let place = || {
        parts.set(parts.get() + 1);
        match parts.get() {
            1 => format!("c-{}", id.to_string().to_lowercase()),
            part => format!("c-{}-{part}", id.to_string().to_lowercase()),
        }
    };
    let about = |what: &str, about: Option<&String>| {
        about.map_or(what.to_owned(), |about| format!("{what} ({about})"))
    };
    for admit in case.admit.iter() {
        let (flags, boosts) = (
            flags(admit.remove_limits, &admit.flags),
            world::boosts(admit)?,
        );
        if let Some(free) = &admit.free {
            let bed = Bed::own(&flags).await?;
            let done = admit::check_crowded(bed, cases, &place(), admit, &boosts, free).await;
            bed.blame(done, || about("admit", admit.about.as_ref()))?;
            bed.retire()?;
            continue;
        }
        let bed = Bed::with(&flags).await?;
        let done = admit::check(bed, cases, &place(), admit, &boosts).await;
        bed.blame(done, || about("admit", admit.about.as_ref()))?;
    }
    for apply in case.apply.iter() {
        let bed = Bed::with(&[]).await?;
        let done = apply::check(bed, cases, &place(), apply).await;
        bed.blame(done, || about("apply", apply.about.as_ref()))?;
    }
    for (id, apply) in case.cluster_refusals(cases)? {
        let bed = Bed::with(&[]).await?;
        let kind = Kind::ClusterStartupCPUBoost;
        let done = apply::check_refused(bed, &place(), apply, kind).await;
        bed.blame(done, || {
            about(&format!("apply, {id}"), apply.about.as_ref())
        })?;
    }
    for (index, stored) in case.stored.iter().enumerate() {
        let bed = Bed::upgraded(cases).await?;
        parts.set(parts.get() + 1);
        let done = stored::check(bed, cases, &stored::place(id, index), stored).await;
        bed.blame(done, || about("stored", stored.about.as_ref()))?;
    }
    if let Some(storm) = &case.storm {
        let bed = Bed::own(&[]).await?;
        let done = storm::check(bed, cases, id, &place(), storm).await;
        bed.blame(done, || "storm".to_owned())?;
        bed.retire()?;
    }
    for life in case.end.iter() {
        let admit = world::admitted(cases, id, life)?;
        if life::is_rough(life) {
            let rough = Bed::rough().await?;
            let done = life::check(rough.bed, cases, id, &place(), life).await;
            rough
                .bed
                .blame(done, || about("end", life.about.as_ref()))?;
            rough.give_back();
            continue;
        }
        let bed = Bed::with(&flags(admit.remove_limits, &admit.flags)).await?;
        let done = life::check(bed, cases, id, &place(), life).await;
        bed.blame(done, || about("end", life.about.as_ref()))?;
    }
    ensure!(
        parts.get() > 0,
        "nothing of this case is about an API server"
    );
    Ok(())
}

/// What the operator is started with.
fn flags(remove_limits: Option<bool>, flags: &BTreeMap<String, String>) -> Vec<String> {
    let remove_limits = remove_limits
        .unwrap_or(false)
        .then(|| "--remove-limits=true".to_owned());
    let flags = flags
        .iter()
        .map(|(flag, value)| format!("--{flag}={value}"));
    remove_limits.into_iter().chain(flags).collect()
}

impl Bed {
    /// Says what failed, and where a replica has ended, that.
    fn blame(
        &self,
        result: anyhow::Result<()>,
        what: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        let result = result.with_context(what);
        if result.is_err() {
            for replica in self.replicas() {
                if let Err(ended) = replica.operator.process().check() {
                    return result.context(format!("{ended:#}"));
                }
            }
        }
        result
    }
}
