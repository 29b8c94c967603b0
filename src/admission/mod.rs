//! The mutating webhook: every replica answers, from its own cache.
//!
//! Nothing on this path may wait: no I/O, no lock and no await stand between a body and its answer. And no answer may
//! refuse a pod: what can't be read is answered with HTTP 400, which `failurePolicy: Ignore` passes over, and everything
//! else with `allowed: true`.

mod http;
mod json;
mod review;

use std::{sync::Arc, time::Instant};

use arc_swap::ArcSwapOption;

pub use http::{refusals, routes};
pub use review::BadReview;

use crate::{
    api::Pod,
    clock::Clock,
    domain::{
        admission::{Admission, Outcome, Settings, admit},
        patch,
        snapshot::Snapshot,
    },
    metrics::AdmissionMetrics,
};

/// Answers admission reviews.
#[derive(Clone, Debug)]
pub struct Admitter {
    /// Empty until the boosts have been read for the first time.
    pub snapshot: Arc<ArcSwapOption<Snapshot>>,
    /// What the flags say.
    pub settings: Settings,
    /// Dates the records.
    pub clock: Clock,
    /// Counts outcomes.
    pub metrics: AdmissionMetrics,
    /// `--dry-run`: pods are left as they are, and what they would get is told. (Not the API server's dry run, which shows
    /// what would be, and stores nothing.)
    pub dry_run: bool,
}

impl Admitter {
    /// The answer to a review's body.
    ///
    /// # Errors
    /// When the body is no review of a pod that can be read.
    pub fn answer(&self, body: &[u8]) -> Result<Vec<u8>, BadReview> {
        let began = Instant::now();
        let answered = self.decide(body);
        match &answered {
            Ok((Some(Outcome::Boosted), _)) if self.dry_run => {
                self.metrics.would_boost(began.elapsed());
            }
            Ok((outcome, _)) => self.metrics.answered(*outcome, began.elapsed()),
            Err(_) => self.metrics.unreadable(),
        }
        answered.map(|(_, answer)| answer)
    }

    /// The answer, and what to count: nothing for a dry run and for what is no new pod.
    fn decide(&self, body: &[u8]) -> Result<(Option<Outcome>, Vec<u8>), BadReview> {
        let asked = review::read(body)?;
        let Some(pod) = asked.new_pod else {
            return Ok((None, review::unchanged(&asked.uid)));
        };
        let counted = |outcome| Some(outcome).filter(|_| !asked.is_dry_run);
        let Some(snapshot) = self.snapshot.load_full() else {
            let reason = crate::domain::reason::Reason::Unsynced;
            return Ok((
                counted(Outcome::Skipped(reason)),
                review::skipped(&asked.uid, None, reason),
            ));
        };
        let admission = admit(
            &snapshot,
            self.settings,
            &asked.namespace,
            &pod,
            self.clock.now(),
        );
        let span = tracing::debug_span!(
            "review",
            uid = %asked.uid,
            namespace = %asked.namespace,
            pod = name(&pod),
        );
        span.in_scope(|| log(&admission));
        if self.dry_run && !asked.is_dry_run {
            tell(&asked.namespace, &pod, &admission);
            return Ok((
                Some(admission.outcome),
                review::told(&asked.uid, &admission),
            ));
        }
        if !asked.is_dry_run {
            let clamps = admission.containers.iter();
            clamps
                .filter_map(|decision| decision.clamped)
                .for_each(|by| self.metrics.clamped(by));
        }
        let patch = patch::admission(&pod, &admission);
        Ok((
            counted(admission.outcome),
            review::patched(&asked.uid, &admission, &patch),
        ))
    }
}

/// What is known of a new pod's name.
fn name(pod: &Pod) -> &str {
    let name = pod.metadata.name.as_deref();
    name.or(pod.metadata.generate_name.as_deref())
        .unwrap_or_default()
}

fn log(admission: &Admission) {
    let boost = boost(admission);
    match admission.outcome {
        Outcome::Boosted => tracing::debug!(boost, "boosted"),
        Outcome::Skipped(reason) => tracing::debug!(boost, %reason, "not boosted"),
        Outcome::NoBoost | Outcome::Untouchable => tracing::trace!("no boost"),
    }
}

/// Says what a pod would get that a dry run leaves as it is.
fn tell(namespace: &str, pod: &Pod, admission: &Admission) {
    if let Some(containers) = review::changes(admission) {
        let (name, boost) = (name(pod), boost(admission));
        tracing::info!(
            namespace,
            name,
            boost,
            containers,
            "dry run: the pod would be boosted"
        );
    }
}

fn boost(admission: &Admission) -> &str {
    let boost = admission.boost.as_ref();
    boost.map_or("", |boost| boost.name.as_str())
}
