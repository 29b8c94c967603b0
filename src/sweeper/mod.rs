//! The sweeper: ends boosts. Only the leader runs it, for one term at a time.
//!
//! It looks at each claim when the pod changes and when its boost is due, asks [`decide`] what to do, and does it. Orphans
//! of an earlier leader are not a special case: a term begins by looking at every claim, the most overdue first.

mod tally;
mod term;
mod write;

use std::{sync::Arc, time::Duration};

use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use self::term::Term;
pub use self::{tally::Tally, write::Writer};
use crate::{
    api::Pod,
    boosts::Boosts,
    claims::Claims,
    clock::Clock,
    domain::{
        end::EndSettings,
        revert::{Decision, decide},
    },
    metrics::RevertMetrics,
};

/// How long a term waits for the boosts before it decides by the records alone.
const BOOSTS_PATIENCE: Duration = Duration::from_secs(5);

/// Everything that a term needs.
#[derive(Clone)]
pub struct Sweeper {
    /// Writes to pods.
    pub writer: Writer,
    /// The claims.
    pub claims: Arc<Claims>,
    /// The boosts.
    pub boosts: Arc<Boosts>,
    /// What the flags say.
    pub settings: EndSettings,
    /// The wall clock, against which the API server's timestamps are read.
    pub clock: Clock,
    /// Counts boosted containers.
    pub tally: Arc<Tally>,
    /// Counts reverts.
    pub metrics: RevertMetrics,
}

impl Sweeper {
    /// Leads until the term ends. Writes that are under way then end first; each has a deadline.
    pub async fn lead(self, term: CancellationToken) {
        let caches = async {
            let _ = timeout(BOOSTS_PATIENCE, synced(|| self.boosts.synced())).await;
            synced(|| self.claims.synced()).await;
        };
        tokio::select! {
            () = term.cancelled() => return,
            () = caches => {}
        }
        self.claims.follow();
        let (claims, tally) = (Arc::clone(&self.claims), Arc::clone(&self.tally));
        Term::new(self).run(&term).await;
        claims.unfollow();
        tally.clear();
    }

    /// What to do with a pod now.
    fn decide(&self, pod: &Pod) -> Decision {
        let index = self.boosts.index();
        let policy = index.as_ref().and_then(|index| index.of_pod(pod));
        decide(
            pod,
            policy.map(Arc::as_ref),
            self.settings,
            self.clock.now(),
        )
    }
}

/// Polls a flag that is set once.
async fn synced(is: impl Fn() -> bool) {
    while !is() {
        sleep(Duration::from_millis(20)).await;
    }
}
