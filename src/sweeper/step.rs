//! Acting on one claim: what is written, in which order, and what came of it.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::{
    Sweeper,
    raise::{Raised, carry_out},
    write::Checked,
};
use crate::{
    api::{Pod, PodSpec},
    domain::{
        failure::Failure,
        raise,
        record::Cause,
        revert::{Decision, Finish, Leave, Revert},
    },
};

/// How often one step may look again at once, after conflicts.
const LOOKS: u32 = 3;

/// What to do with a claim.
#[derive(Clone, Debug)]
pub(super) enum Task {
    /// Decide and write; where the cache is not to be believed, read first.
    Act { read: bool },
    /// Its label has gone, or was never seen: read whether its boost is in force all the same, or admission has missed it.
    Check,
}

/// What came of it.
pub(super) enum Step {
    /// All there is to do for now.
    Done {
        /// The pod, where it is newer than the cached one.
        fresh: Option<Arc<Pod>>,
        /// The containers of a resize that was accepted.
        resized: Vec<String>,
        /// Whether the boost was finished.
        finished: bool,
        /// The template of its owner, where its record can't be read.
        template: Option<Arc<PodSpec>>,
    },
    /// A write or a read failed.
    Failed(Failure),
    /// A pod without a claim whose boost is in force.
    Stray(Arc<Pod>),
    /// Nothing is in force.
    NotBoosted,
}

/// What a step has found out so far.
struct Progress<'a> {
    sweeper: &'a Sweeper,
    cached: &'a Pod,
    template: Option<Arc<PodSpec>>,
    fresh: Option<Pod>,
    resized: Vec<String>,
    finished: bool,
}

/// Carries a task out.
pub(super) async fn step(
    sweeper: &Sweeper,
    pod: &Pod,
    template: Option<Arc<PodSpec>>,
    task: Task,
    term: &CancellationToken,
) -> Step {
    match task {
        Task::Check => check(sweeper, pod).await,
        Task::Act { read } => {
            let progress = Progress {
                sweeper,
                cached: pod,
                template,
                fresh: None,
                resized: Vec::new(),
                finished: false,
            };
            progress.act(read, term).await
        }
    }
}

async fn check(sweeper: &Sweeper, pod: &Pod) -> Step {
    match sweeper.writer.read(pod).await {
        Err(failure) => Step::Failed(failure),
        Ok(pod) => match sweeper.decide(&pod, None) {
            Decision::Leave(Leave::NotBoosted) => late(sweeper, pod).await,
            Decision::Leave(Leave::Terminating) => Step::NotBoosted,
            // Without claim and record there is nothing to go by.
            Decision::Leave(Leave::Unreadable(_)) if pod.claim().is_none() => Step::NotBoosted,
            _ => Step::Stray(Arc::new(pod)),
        },
    }
}

/// Boosts a pod without marks, where admission has missed it. What is refused is not tried again.
async fn late(sweeper: &Sweeper, pod: Pod) -> Step {
    let Some(raise) = sweeper.missed(&pod) else {
        return Step::NotBoosted;
    };
    match carry_out(sweeper, &pod, &raise).await {
        Ok(Raised::Claimed(pod)) => Step::Stray(Arc::from(pod)),
        Ok(Raised::Refused(why)) => {
            let events = &sweeper.events;
            events.not_raised(&pod, raise.cause, why.as_str(), why.text());
            Step::NotBoosted
        }
        Err(failure) => Step::Failed(failure),
    }
}

impl Progress<'_> {
    /// Does what there is to do with a pod, until a write needs an answer from the kubelet.
    async fn act(mut self, mut read: bool, term: &CancellationToken) -> Step {
        for _ in 0..LOOKS {
            if read {
                match self.sweeper.writer.read(self.cached).await {
                    Ok(pod) => self.fresh = Some(pod),
                    Err(failure) => return Step::Failed(failure),
                }
            }
            let pod = self.fresh.as_ref().unwrap_or(self.cached);
            let written = match self.sweeper.decide(pod, self.template.as_deref()) {
                // The next leader decides for itself.
                _ if term.is_cancelled() => return self.done(),
                // The next look tells of it.
                Decision::Revert(_) | Decision::Finish(_) | Decision::Raise(_)
                    if self.sweeper.dry_run =>
                {
                    return self.done();
                }
                Decision::Revert(revert) if self.resized.is_empty() => self.resize(&revert).await,
                Decision::Finish(finish) => self.finish(&finish).await,
                // The cache does not have all that a raise goes by.
                Decision::Raise(_) if self.fresh.is_none() => {
                    read = true;
                    continue;
                }
                Decision::Raise(restarted) => self.raise(&restarted).await,
                Decision::Leave(Leave::Unreadable(_)) if self.template.is_none() => {
                    match self.sweeper.writer.template(pod).await {
                        Ok(Some(template)) => self.template = Some(Arc::new(template)),
                        Ok(None) => return self.done(),
                        Err(failure) => return Step::Failed(failure),
                    }
                    read = false;
                    continue;
                }
                // Somebody else has finished it.
                Decision::Leave(Leave::NotBoosted) => {
                    self.finished = true;
                    return self.done();
                }
                Decision::Revert(_)
                | Decision::Wait(_)
                | Decision::Watch(_)
                | Decision::Leave(_) => return self.done(),
            };
            match written {
                // Where there is no kubelet to wait for, the next look finishes.
                Ok(written) => {
                    self.fresh = Some(written);
                    read = false;
                }
                Err(Failure::Conflict) => read = true,
                Err(failure) => return Step::Failed(failure),
            }
        }
        if read || self.fresh.is_none() {
            return Step::Failed(Failure::Conflict);
        }
        self.done()
    }

    fn done(self) -> Step {
        let cached = &self.cached.metadata.resource_version;
        let newer = self
            .fresh
            .filter(|pod| pod.metadata.resource_version != *cached);
        Step::Done {
            fresh: newer.map(Arc::new),
            resized: self.resized,
            finished: self.finished,
            template: self.template,
        }
    }

    async fn resize(&mut self, revert: &Revert) -> Result<Pod, Failure> {
        let sweeper = self.sweeper;
        let pod = self.fresh.as_ref().unwrap_or(self.cached);
        let rehearsed = if sweeper.defaults_might_be_added(pod) {
            sweeper.writer.rehearse(pod, &revert.containers).await
        } else {
            Ok(Checked)
        };
        let written = match rehearsed {
            Ok(Checked) => sweeper.writer.resize(pod, &revert.containers).await,
            Err(failure) => Err(failure),
        };
        let now = sweeper.clock.now();
        sweeper
            .metrics
            .reverted(revert, now, written.as_ref().err());
        if written.is_ok() {
            let containers = revert.containers.iter();
            self.resized = containers.map(|container| container.name.clone()).collect();
        }
        written
    }

    async fn finish(&mut self, finish: &Finish) -> Result<Pod, Failure> {
        let sweeper = self.sweeper;
        let pod = self.fresh.as_ref().unwrap_or(self.cached);
        let written = sweeper.writer.finish(pod, finish).await;
        sweeper.metrics.finished(finish, written.as_ref().err());
        if written.is_ok() {
            self.finished = !finish.keeps_claim;
            sweeper.events.ended(pod, finish);
            let meta = &pod.metadata;
            let (namespace, name) = (meta.namespace.as_deref(), meta.name.as_deref());
            let by = finish.ended.as_ref().map(|(_, by)| by.as_str());
            tracing::info!(namespace, name, by, "a boost has ended");
        }
        written
    }

    /// Boosts containers that have restarted.
    async fn raise(&mut self, restarted: &[String]) -> Result<Pod, Failure> {
        let sweeper = self.sweeper;
        let pod = self.fresh.as_ref().unwrap_or(self.cached);
        let raise = match sweeper.again(pod, restarted) {
            Some(Ok(raise)) => raise,
            Some(Err(reason)) => {
                sweeper.metrics.raised(Cause::Restart, reason.as_str());
                return self.give_up(reason.as_str(), reason.sentence()).await;
            }
            None => {
                let unread = "what bounds a boost has not been read yet";
                return Err(Failure::Transient(unread.to_owned()));
            }
        };
        match carry_out(sweeper, pod, &raise).await? {
            Raised::Claimed(pod) => Ok(*pod),
            Raised::Refused(why) => self.give_up(why.as_str(), why.text()).await,
        }
    }

    /// Remembers in the record that these restarts were not worth a boost, so that the next look does not try again.
    async fn give_up(&self, reason: &str, text: &str) -> Result<Pod, Failure> {
        let sweeper = self.sweeper;
        let pod = self.fresh.as_ref().unwrap_or(self.cached);
        let written = match raise::given_up(pod) {
            Some(record) => sweeper.writer.record(pod, &record).await,
            // Without a claim there is nothing to remember.
            None => sweeper.writer.finish(pod, &Finish::claim_only()).await,
        };
        if written.is_ok() {
            sweeper.events.not_raised(pod, Cause::Restart, reason, text);
        }
        written
    }
}
