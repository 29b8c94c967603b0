//! One term of leadership: which claim is looked at when, and how many writes go at once.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use chrono::{DateTime, Utc};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::Sweeper;
use crate::{
    api::Pod,
    claims::Uid,
    domain::{
        failure::Failure,
        revert::{Decision, Finish, Leave, Revert},
    },
};

/// So many pods are written to at once. A PATCH takes the API server 5 to 20 ms, so this bears some thousand a second.
const CONCURRENCY: usize = 16;
/// How often one step may look again at once, after conflicts.
const LOOKS: u32 = 3;
/// The wall clock may be set, so a far instant is approached in parts.
const LONGEST_SLEEP: Duration = Duration::from_secs(300);
/// Pauses before a container is resized once more grow from the first to the second.
const REPEAT_PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(60));
/// After a write the watch tells of it. Where it doesn't, the pod is read.
const ECHO_PATIENCE: Duration = Duration::from_secs(10);

/// What is remembered of a claim between two looks. Losing it costs a look, never a wrong write.
#[derive(Default)]
struct Claim {
    /// The next look that is due by itself.
    look: Option<Instant>,
    /// Where it stands among those to be acted on.
    queued: Option<DateTime<Utc>>,
    in_flight: bool,
    /// Failures in a row, and until when to leave it alone after the last.
    failures: u32,
    pause: Option<Instant>,
    /// Containers that were resized, how often one was again, and until when not to do that another time.
    resized: BTreeSet<String>,
    repeats: u32,
    next_resize: Option<Instant>,
    /// The newest version of the pod that was seen in an answer, and until when the watch may take to tell of it.
    newest: Option<(String, Instant)>,
    /// Whether the cache is not to be believed: the pod is read first.
    read: bool,
    /// What was last logged, so that it is said once.
    said: Option<Leave>,
}

impl Claim {
    /// Until when to wait for the watch, where the cache has not caught up with what an answer has told. After that the
    /// pod is read instead.
    fn waits_for_cache(&mut self, pod: &Pod, now: Instant) -> Option<Instant> {
        let (newest, until) = self.newest.take()?;
        if !is_older(pod.metadata.resource_version.as_deref(), &newest) {
            return None;
        }
        if until <= now {
            self.read = true;
            return None;
        }
        self.newest = Some((newest, until));
        Some(until)
    }

    /// A boost needs one resize of each container. More come where somebody puts the boosted values back each time, and
    /// that must not become a race.
    fn count_resize(&mut self, containers: Vec<String>) {
        let mut again = false;
        for container in containers {
            again |= !self.resized.insert(container);
        }
        if again {
            self.repeats += 1;
            let pause = REPEAT_PAUSE.0.saturating_mul(1 << self.repeats.min(16));
            self.next_resize = Some(Instant::now() + pause.min(REPEAT_PAUSE.1));
        }
    }
}

/// Whether a version of a pod came before another. Versions are numbers that grow (KEP-5504); where they are not, any
/// other version counts as older until the watch has told of this one.
fn is_older(version: Option<&str>, newest: &str) -> bool {
    match (
        version.and_then(|version| version.parse::<u64>().ok()),
        newest.parse::<u64>().ok(),
    ) {
        (Some(version), Some(newest)) => version < newest,
        _ => version != Some(newest),
    }
}

/// What came of acting on a claim.
enum Step {
    /// All there is to do for now.
    Done {
        /// The pod's version, where it is not the cached one.
        newest: Option<String>,
        /// The containers of a resize that was accepted.
        resized: Vec<String>,
    },
    Failed(Failure),
}

pub(super) struct Term {
    sweeper: Sweeper,
    claims: HashMap<Uid, Claim>,
    /// Looks that are due by themselves.
    looks: BTreeSet<(Instant, Uid)>,
    /// Claims to be acted on, the most overdue first.
    queue: BTreeSet<(DateTime<Utc>, Uid)>,
    in_flight: JoinSet<(Uid, Step)>,
}

impl Term {
    pub(super) fn new(sweeper: Sweeper) -> Self {
        Self {
            sweeper,
            claims: HashMap::new(),
            looks: BTreeSet::new(),
            queue: BTreeSet::new(),
            in_flight: JoinSet::new(),
        }
    }

    pub(super) async fn run(mut self, term: &CancellationToken) {
        let mut boosts = self.sweeper.boosts.specs();
        let found = self.sweeper.claims.take_changes();
        found.iter().for_each(|uid| self.look(uid));
        self.sweeper.tally.settle();
        self.act(term);
        loop {
            let next_look = self.looks.first().map(|(at, _)| *at);
            let claims = Arc::clone(&self.sweeper.claims);
            tokio::select! {
                biased;
                () = term.cancelled() => break,
                Some(done) = self.in_flight.join_next() => {
                    let (uid, step) = done.expect("a step neither panics nor is aborted");
                    self.stepped(&uid, step);
                }
                changed = claims.changes() => changed.iter().for_each(|uid| self.look(uid)),
                Ok(()) = boosts.changed() => self.look_at_all(),
                () = sleep_until(next_look.unwrap_or_else(Instant::now)), if next_look.is_some() => self.look_at_due(),
            }
            self.act(term);
        }
        while self.in_flight.join_next().await.is_some() {}
    }

    /// A boost's rule may have changed under any claim of its namespace.
    fn look_at_all(&mut self) {
        let uids: Vec<Uid> = self.claims.keys().cloned().collect();
        for uid in &uids {
            self.look(uid);
        }
    }

    fn look_at_due(&mut self) {
        let now = Instant::now();
        while let Some((at, uid)) = self.looks.first().cloned() {
            if at > now {
                break;
            }
            self.look(&uid);
        }
    }

    /// Looks at a claim, and queues it or sets its next look.
    fn look(&mut self, uid: &Uid) {
        let Some(pod) = self.sweeper.claims.get(uid) else {
            return self.forget(uid);
        };
        self.sweeper.tally.add(uid, &pod);
        let claim = self.claims.entry(uid.clone()).or_default();
        unset(&mut self.looks, uid, &mut claim.look);
        unset(&mut self.queue, uid, &mut claim.queued);
        if claim.in_flight {
            return;
        }
        let now = Instant::now();
        if let Some(until) = claim.pause.filter(|until| *until > now) {
            return set(&mut self.looks, uid, &mut claim.look, until);
        }
        if let Some(until) = claim.waits_for_cache(&pod, now) {
            return set(&mut self.looks, uid, &mut claim.look, until);
        }
        let (mut act, mut next) = (None, None);
        match self.sweeper.decide(&pod) {
            Decision::Revert(revert) => match claim.next_resize.filter(|at| *at > now) {
                Some(at) => next = Some(at),
                None => act = Some(revert.due.at),
            },
            Decision::Finish(finish) => {
                act = Some(finish.due.unwrap_or_else(|| self.sweeper.clock.now()));
            }
            Decision::Wait(until) => {
                let wall = self.sweeper.clock.now();
                let wait = |until: DateTime<Utc>| {
                    (until - wall)
                        .to_std()
                        .unwrap_or_default()
                        .min(LONGEST_SLEEP)
                };
                next = until.map(|until| now + wait(until));
            }
            Decision::Watch(_) => {}
            Decision::Leave(leave) => say(&pod, claim, leave),
        }
        if let Some(due) = act {
            set(&mut self.queue, uid, &mut claim.queued, due);
        }
        if let Some(at) = next {
            set(&mut self.looks, uid, &mut claim.look, at);
        }
    }

    fn forget(&mut self, uid: &Uid) {
        self.sweeper.tally.remove(uid);
        if let Some(mut claim) = self.claims.remove(uid) {
            unset(&mut self.looks, uid, &mut claim.look);
            unset(&mut self.queue, uid, &mut claim.queued);
        }
    }

    /// Starts as many steps as may go at once.
    fn act(&mut self, term: &CancellationToken) {
        while self.in_flight.len() < CONCURRENCY {
            let Some((_, uid)) = self.queue.first().cloned() else {
                return;
            };
            let claim = self.claims.entry(uid.clone()).or_default();
            unset(&mut self.queue, &uid, &mut claim.queued);
            let Some(pod) = self.sweeper.claims.get(&uid) else {
                self.forget(&uid);
                continue;
            };
            claim.in_flight = true;
            let (sweeper, term) = (self.sweeper.clone(), term.clone());
            let read = std::mem::take(&mut claim.read);
            self.in_flight.spawn(async move {
                let step = step(&sweeper, &pod, read, &term).await;
                (uid, step)
            });
        }
    }

    fn stepped(&mut self, uid: &Uid, step: Step) {
        let claim = self.claims.entry(uid.clone()).or_default();
        claim.in_flight = false;
        match step {
            Step::Done { newest, resized } => {
                claim.failures = 0;
                claim.newest = newest.map(|version| (version, Instant::now() + ECHO_PATIENCE));
                claim.count_resize(resized);
            }
            Step::Failed(Failure::Gone) => return self.forget(uid),
            Step::Failed(failure) => {
                claim.failures += 1;
                let pause = failure
                    .pause(claim.failures, fastrand::f64())
                    .unwrap_or_default();
                tracing::warn!(
                    uid,
                    ?failure,
                    ?pause,
                    "a pod could not be written to; trying again"
                );
                claim.pause = Some(Instant::now() + pause);
                // Nobody knows whether the write happened.
                claim.read = true;
            }
        }
        self.look(uid);
    }
}

/// Does what there is to do with a pod, until a write needs an answer from the kubelet.
async fn step(sweeper: &Sweeper, cached: &Pod, mut read: bool, term: &CancellationToken) -> Step {
    let mut fresh: Option<Pod> = None;
    let mut resized = Vec::new();
    for _ in 0..LOOKS {
        if read {
            match sweeper.writer.read(cached).await {
                Ok(pod) => fresh = Some(pod),
                Err(failure) => return Step::Failed(failure),
            }
        }
        let pod = fresh.as_ref().unwrap_or(cached);
        let decision = sweeper.decide(pod);
        let written = match decision {
            // The next leader decides for itself.
            _ if term.is_cancelled() => return done(cached, pod, resized),
            Decision::Revert(revert) if resized.is_empty() => {
                let written = resize(sweeper, pod, &revert).await;
                if written.is_ok() {
                    resized = revert
                        .containers
                        .into_iter()
                        .map(|container| container.name)
                        .collect();
                }
                written
            }
            Decision::Finish(finish) => self::finish(sweeper, pod, &finish).await,
            Decision::Revert(_) | Decision::Wait(_) | Decision::Watch(_) | Decision::Leave(_) => {
                return done(cached, pod, resized);
            }
        };
        match written {
            // Where there is no kubelet to wait for, the next look finishes.
            Ok(written) => {
                fresh = Some(written);
                read = false;
            }
            Err(Failure::Conflict) => read = true,
            Err(failure) => return Step::Failed(failure),
        }
    }
    match fresh {
        Some(pod) if !read => done(cached, &pod, resized),
        _ => Step::Failed(Failure::Conflict),
    }
}

fn done(cached: &Pod, pod: &Pod, resized: Vec<String>) -> Step {
    let version = pod.metadata.resource_version.clone();
    let newest =
        version.filter(|version| cached.metadata.resource_version.as_ref() != Some(version));
    Step::Done { newest, resized }
}

async fn resize(sweeper: &Sweeper, pod: &Pod, revert: &Revert) -> Result<Pod, Failure> {
    let written = sweeper.writer.resize(pod, revert).await;
    sweeper
        .metrics
        .reverted(revert, sweeper.clock.now(), written.as_ref().err());
    written
}

async fn finish(sweeper: &Sweeper, pod: &Pod, finish: &Finish) -> Result<Pod, Failure> {
    let written = sweeper.writer.finish(pod, finish).await;
    sweeper.metrics.finished(finish, written.as_ref().err());
    if written.is_ok() {
        let (namespace, name) = (
            pod.metadata.namespace.as_deref(),
            pod.metadata.name.as_deref(),
        );
        let by = finish.ended.as_ref().map(|(_, by)| by.as_str());
        tracing::info!(namespace, name, by, "a boost has ended");
    }
    written
}

/// Says once why a pod is left alone.
fn say(pod: &Pod, claim: &mut Claim, leave: Leave) {
    if claim.said.as_ref() == Some(&leave) {
        return;
    }
    if let Leave::Unreadable(problem) = &leave {
        let (namespace, name) = (
            pod.metadata.namespace.as_deref(),
            pod.metadata.name.as_deref(),
        );
        tracing::warn!(
            namespace,
            name,
            problem,
            "a record can't be read; the pod is left as it is"
        );
    }
    claim.said = Some(leave);
}

/// Puts a claim in an ordered set, and remembers where.
fn set<T: Copy + Ord>(order: &mut BTreeSet<(T, Uid)>, uid: &Uid, place: &mut Option<T>, at: T) {
    order.insert((at, uid.clone()));
    *place = Some(at);
}

/// Takes it out again.
fn unset<T: Copy + Ord>(order: &mut BTreeSet<(T, Uid)>, uid: &Uid, place: &mut Option<T>) {
    if let Some(at) = place.take() {
        order.remove(&(at, uid.clone()));
    }
}
