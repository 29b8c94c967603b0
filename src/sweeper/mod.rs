//! The sweeper: ends boosts, and makes those of pods that run already. Only the leader runs it, for one term at a time.
//!
//! It looks at each claim when the pod changes and when its boost is due, asks [`decide`] what to do, and does it. Orphans
//! of an earlier leader are not a special case: a term begins by looking at every claim, the most overdue first.

mod dry_run;
mod events;
mod missed;
mod raise;
mod scan;
mod step;
mod tally;
mod term;
pub(crate) mod write;

use std::{future::pending, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use self::term::Term;
pub use self::{events::Events, missed::Missed, tally::Tally, write::Writer};
use crate::{
    api::{Pod, PodSpec},
    boosts::Boosts,
    claims::Claims,
    clock::Clock,
    domain::{
        admission::Settings,
        raise::{self as raises, Raise},
        reason::Reason,
        revert::{Decision, Leave, decide},
        witness,
    },
    metrics::RevertMetrics,
    snapshots::Snapshots,
};

/// How long a term waits for the boosts and the LimitRanges before it decides by the records alone.
const CACHES_PATIENCE: Duration = Duration::from_secs(5);

/// Everything that a term needs.
#[derive(Clone)]
pub struct Sweeper {
    /// Writes to pods.
    pub writer: Writer,
    /// The claims.
    pub claims: Arc<Claims>,
    /// The boosts.
    pub boosts: Arc<Boosts>,
    /// The LimitRanges.
    pub snapshots: Arc<Snapshots>,
    /// What the flags say.
    pub settings: Settings,
    /// Finds pods that admission has missed, where they are boosted (`--boost-missed-pods`).
    pub missed: Option<Missed>,
    /// The wall clock, against which the API server's timestamps are read.
    pub clock: Clock,
    /// Counts boosted containers.
    pub tally: Arc<Tally>,
    /// Tells people.
    pub events: Arc<Events>,
    /// Counts reverts.
    pub metrics: RevertMetrics,
    /// `--dry-run`: what would be written to pods is told, and not written.
    pub dry_run: bool,
}

impl Sweeper {
    /// Leads until the term ends. Writes that are under way then end first; each has a deadline.
    pub async fn lead(mut self, term: CancellationToken) {
        if self.dry_run {
            // What a dry run has left unboosted at admission, where it has told of it, would look as if it had been missed.
            self.missed = None;
        }
        let caches = async {
            let known = || match self.missed {
                None => self.boosts.synced() && self.snapshots.limit_ranges("").is_some(),
                Some(_) => self.snapshots.missing().is_empty(),
            };
            let _ = timeout(CACHES_PATIENCE, synced(known)).await;
            synced(|| self.claims.synced()).await;
        };
        tokio::select! {
            () = term.cancelled() => return,
            () = caches => {}
        }
        self.claims.follow();
        let (claims, tally) = (Arc::clone(&self.claims), Arc::clone(&self.tally));
        let (found, lost) = mpsc::channel(scan::QUEUE);
        let (missing, late) = mpsc::unbounded_channel();
        let (finder, missed) = (self.clone(), self.missed.clone());
        // On the heap: hardly anybody has it, and it is large.
        let finding = Box::pin(async {
            match &missed {
                Some(missed) => missed::watch(&finder, missed, &missing).await,
                None => pending().await,
            }
        });
        let work = Term::new(self).run(lost, late, &term);
        tokio::select! {
            () = work => {}
            // These never end before the term.
            () = scan::scan(&finder, &found) => {}
            () = finding => {}
        }
        claims.unfollow();
        tally.clear();
    }

    /// What to do with a pod now. A record that can't be read is repaired from the template, where that is known.
    fn decide(&self, pod: &Pod, template: Option<&PodSpec>) -> Decision {
        let index = self.boosts.index();
        let policy = index.as_ref().and_then(|index| index.of_pod(pod));
        let policy = policy.map(Arc::as_ref);
        let now = self.clock.now();
        let settings = self.settings.end;
        let decision = decide(pod, policy, settings, now);
        match (&decision, template) {
            (Decision::Leave(Leave::Unreadable(_)), Some(template)) => {
                let repaired = witness::repair(pod, template, policy, settings, now);
                repaired.map_or(decision, |pod| decide(&pod, policy, settings, now))
            }
            _ => decision,
        }
    }

    /// The boost of containers that have restarted; `None` until all is known that bounds it. The pod is as it was read: the
    /// claims' cache has no labels.
    fn again(&self, pod: &Pod, restarted: &[String]) -> Option<Result<Raise, Reason>> {
        let snapshot = self.snapshots.reader().load_full()?;
        Some(raises::again(
            &snapshot,
            self.settings,
            pod,
            restarted,
            self.clock.now(),
        ))
    }

    /// The boost of a pod that admission has missed, where it has and that is asked for.
    fn missed(&self, pod: &Pod) -> Option<Raise> {
        let own = &self.missed.as_ref()?.namespace;
        let snapshot = self.snapshots.reader().load_full()?;
        raises::missed(&snapshot, self.settings, pod, own, self.clock.now())
    }

    /// Whether a resize of the pod has to be tried first. Where the LimitRanges are not known, it has.
    fn defaults_might_be_added(&self, pod: &Pod) -> bool {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let ranges = self.snapshots.limit_ranges(namespace);
        ranges.is_none_or(|ranges| ranges.might_add_to(pod))
    }
}

/// Polls for something that comes once.
async fn synced(is: impl Fn() -> bool) {
    while !is() {
        sleep(Duration::from_millis(20)).await;
    }
}
