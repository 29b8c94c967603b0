//! One term of leadership: which claim is looked at when, and how many writes go at once.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use chrono::{DateTime, Utc};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{
    Sweeper,
    dry_run::{Told, tell},
    step::{Step, Task, step},
};
use crate::{
    api::{Pod, PodSpec},
    claims::{Uid, uid},
    domain::{
        failure::Failure,
        revert::{Decision, Leave, Pending},
    },
};

/// So many pods are written to at once: at the begin of a term, and at most. A PATCH takes a quiet API server 5 to 20 ms and a
/// busy one 200 ms; a storm of 40 pods/s asks for 80 writes a second, which 16 at once then no longer bear.
const CONCURRENCY: usize = 32;
/// The wall clock may be set, so a far instant is approached in parts.
const LONGEST_SLEEP: Duration = Duration::from_secs(300);
/// Pauses before a container is resized once more grow from the first to the second.
const REPEAT_PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(60));
/// After a write the watch tells of it. Where it doesn't, the pod is read.
const ECHO_PATIENCE: Duration = Duration::from_secs(10);
/// Pods without a claim are not watched; so often they are read.
const STRAY_PAUSE: Duration = Duration::from_secs(5);
/// So often an owner is asked again for its template, and a record that can't be read is looked at again.
const UNREADABLE_PAUSE: Duration = Duration::from_secs(60);
/// So many failures in a row of a kind that should pass by itself are worth an Event.
const LASTING: u32 = 5;

/// What is remembered of a claim between two looks. Losing it costs a look, never a wrong write.
#[derive(Default)]
struct Claim {
    /// The pod as last seen: what is left when it goes.
    pod: Arc<Pod>,
    /// When it was read, where it has lost its label and is tracked all the same.
    stray: Option<Instant>,
    /// The next look that is due by itself.
    look: Option<Instant>,
    /// Where it stands among those to be acted on.
    queued: Option<DateTime<Utc>>,
    /// What will be done then.
    task: Option<Task>,
    in_flight: bool,
    /// Whether its boost was finished here, so that the loss of its label means nothing else.
    finished: bool,
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
    /// Its owner's template, where its record can't be read; and when it was last asked for.
    template: Option<Arc<PodSpec>>,
    asked: Option<Instant>,
    /// What was last said of what keeps it from ending, so that it is said once.
    said: Option<&'static str>,
    /// What a dry run has told of it.
    told: Told,
}

impl Claim {
    /// Until when to wait for the watch, where the cache has not caught up with what an answer has told. After that the
    /// pod is read instead.
    fn waits_for_cache(&mut self, now: Instant) -> Option<Instant> {
        let (newest, until) = self.newest.take()?;
        if !is_older(self.pod.metadata.resource_version.as_deref(), &newest) {
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

/// What a look at a claim leads to.
enum Next {
    /// Something to do, due since then.
    Act(DateTime<Utc>, Task),
    /// Another look then.
    Look(Instant),
    /// Nothing before it changes.
    Idle,
    /// It is of no concern any more.
    Forget,
}

pub(super) struct Term {
    sweeper: Sweeper,
    claims: HashMap<Uid, Claim>,
    /// Looks that are due by themselves.
    looks: BTreeSet<(Instant, Uid)>,
    /// Claims to be acted on: reverts by when they were due, the most overdue first; finishes by when their CPU was back.
    queue: BTreeSet<(DateTime<Utc>, Uid)>,
    in_flight: JoinSet<(Uid, Step)>,
    /// How many may be in flight: fewer while the API server asks for it.
    at_once: usize,
}

impl Term {
    pub(super) fn new(sweeper: Sweeper) -> Self {
        Self {
            sweeper,
            claims: HashMap::new(),
            looks: BTreeSet::new(),
            queue: BTreeSet::new(),
            in_flight: JoinSet::new(),
            at_once: CONCURRENCY,
        }
    }

    /// Works until the term ends. `found` are pods that have lost their label while nobody watched, `late` those that admission
    /// has missed.
    pub(super) async fn run(
        mut self,
        mut found: mpsc::Receiver<Arc<Pod>>,
        mut late: mpsc::UnboundedReceiver<Arc<Pod>>,
        term: &CancellationToken,
    ) {
        let mut boosts = self.sweeper.boosts.specs();
        let claims = self.sweeper.claims.take_changes();
        for uid in &claims {
            self.look(uid);
        }
        self.sweeper.tally.settle();
        if self.sweeper.dry_run && !claims.is_empty() {
            tracing::warn!(
                pods = claims.len(),
                "dry run: pods are boosted, and stay so until a replica leads that runs without --dry-run"
            );
        }
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
                Some(pod) = found.recv() => self.found(pod),
                Some(pod) = late.recv() => self.found(pod),
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

    /// A pod without a claim that may be boosted all the same, or should be.
    fn found(&mut self, pod: Arc<Pod>) {
        let uid = uid(&pod);
        if self.claims.contains_key(&uid) {
            return;
        }
        let claim = self.claims.entry(uid.clone()).or_default();
        claim.pod = pod;
        let now = self.sweeper.clock.now();
        claim.task = Some(Task::Check);
        set(&mut self.queue, &uid, &mut claim.queued, now);
    }

    /// Looks at a claim, and queues it or sets its next look.
    fn look(&mut self, uid: &Uid) {
        let cached = self.sweeper.claims.get(uid);
        if let Some(pod) = &cached {
            self.sweeper.tally.add(uid, pod);
        } else if !self.claims.contains_key(uid) {
            return;
        }
        let claim = self.claims.entry(uid.clone()).or_default();
        unset(&mut self.looks, uid, &mut claim.look);
        unset(&mut self.queue, uid, &mut claim.queued);
        let has_claim = cached.is_some();
        if let Some(pod) = cached {
            (claim.pod, claim.stray) = (pod, None);
        }
        if claim.in_flight {
            return;
        }
        match next(&self.sweeper, claim, has_claim) {
            Next::Act(due, task) => {
                claim.task = Some(task);
                set(&mut self.queue, uid, &mut claim.queued, due);
            }
            Next::Look(at) => set(&mut self.looks, uid, &mut claim.look, at),
            Next::Idle => {}
            Next::Forget => self.forget(uid),
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
        while self.in_flight.len() < self.at_once {
            let Some((_, uid)) = self.queue.first().cloned() else {
                return;
            };
            let claim = self.claims.entry(uid.clone()).or_default();
            unset(&mut self.queue, &uid, &mut claim.queued);
            let Some(task) = claim.task.take() else {
                continue;
            };
            claim.in_flight = true;
            let (pod, template) = (Arc::clone(&claim.pod), claim.template.clone());
            let (sweeper, term) = (self.sweeper.clone(), term.clone());
            self.in_flight.spawn(async move {
                let step = step(&sweeper, &pod, template, task, &term).await;
                (uid, step)
            });
        }
    }

    fn stepped(&mut self, uid: &Uid, step: Step) {
        let Some(claim) = self.claims.get_mut(uid) else {
            return;
        };
        claim.in_flight = false;
        match step {
            Step::Done {
                fresh,
                resized,
                finished,
                template,
            } => {
                self.at_once = (self.at_once + 1).min(CONCURRENCY);
                claim.failures = 0;
                claim.finished |= finished;
                if !resized.is_empty() {
                    claim.said = None;
                    self.sweeper.tally.trouble(uid, None);
                }
                claim.template = template;
                claim.count_resize(resized);
                if let (Some(pod), true) = (&fresh, claim.stray.is_some()) {
                    (claim.pod, claim.stray) = (Arc::clone(pod), Some(Instant::now()));
                } else {
                    let version = fresh.and_then(|pod| pod.metadata.resource_version.clone());
                    claim.newest = version.map(|version| (version, Instant::now() + ECHO_PATIENCE));
                }
            }
            Step::Stray(pod) => {
                self.sweeper.tally.add(uid, &pod);
                (claim.pod, claim.stray) = (pod, Some(Instant::now()));
                (claim.failures, claim.read) = (0, false);
            }
            Step::NotBoosted | Step::Failed(Failure::Gone) => return self.forget(uid),
            Step::Failed(failure) => self.failed(uid, &failure),
        }
        self.look(uid);
    }

    fn failed(&mut self, uid: &Uid, failure: &Failure) {
        let Some(claim) = self.claims.get_mut(uid) else {
            return;
        };
        if let Failure::Throttled(_) = failure {
            self.at_once = (self.at_once / 2).max(1);
        }
        claim.failures += 1;
        let pause = failure
            .pause(claim.failures, fastrand::f64())
            .unwrap_or_default();
        tracing::warn!(
            %uid,
            ?failure,
            ?pause,
            "a pod could not be written to; trying again"
        );
        claim.pause = Some(Instant::now() + pause);
        // Nobody knows whether the write happened.
        claim.read = true;
        // Where there is no boost, nothing keeps one from ending.
        let decision = self.sweeper.decide(&claim.pod, claim.template.as_deref());
        let is_raise = matches!(
            decision,
            Decision::Raise(_) | Decision::Leave(Leave::NotBoosted)
        );
        if !is_raise && (!failure.may_pass() || claim.failures >= LASTING) {
            say(&self.sweeper, claim, failure.as_str(), failure.text());
        }
    }
}

/// What to do about a claim now, or when to look again.
fn next(sweeper: &Sweeper, claim: &mut Claim, has_claim: bool) -> Next {
    let now = Instant::now();
    let wall = sweeper.clock.now();
    if let Some(until) = claim.pause.filter(|until| *until > now) {
        return Next::Look(until);
    }
    if !has_claim {
        match claim.stray {
            // The label goes with a finish, with the pod, or because somebody takes it away.
            None if claim.finished || is_over(&claim.pod) => return Next::Forget,
            None => return Next::Act(wall, Task::Check),
            Some(read) if read + STRAY_PAUSE <= now => {
                return Next::Act(wall, Task::Check);
            }
            Some(_) => {}
        }
    }
    if let Some(until) = claim.waits_for_cache(now) {
        return Next::Look(until);
    }
    let act = |claim: &mut Claim, due| {
        let read = std::mem::take(&mut claim.read);
        Next::Act(due, Task::Act { read })
    };
    let next = match sweeper.decide(&claim.pod, claim.template.as_deref()) {
        decision @ (Decision::Revert(_) | Decision::Finish(_) | Decision::Raise(_))
            if sweeper.dry_run =>
        {
            tell(sweeper, &claim.pod, &mut claim.told, &decision);
            Next::Idle
        }
        Decision::Revert(revert) => match claim.next_resize.filter(|at| *at > now) {
            Some(at) => Next::Look(at),
            None => act(claim, revert.due.at),
        },
        // Behind all that were due before: their CPU is still lent, here only the marks are left.
        Decision::Finish(_) => act(claim, wall),
        Decision::Raise(_) => {
            rest(sweeper, claim);
            act(claim, wall)
        }
        Decision::Wait(until) => {
            let wait = |until: DateTime<Utc>| (until - wall).to_std().unwrap_or_default();
            until.map_or(Next::Idle, |until| {
                Next::Look(now + wait(until).min(LONGEST_SLEEP))
            })
        }
        Decision::Watch(pending) => {
            if let Some((reason, text)) = trouble(&pending) {
                say(sweeper, claim, reason, text);
            }
            Next::Idle
        }
        Decision::Leave(Leave::Unreadable(problem)) => unreadable(sweeper, claim, &problem, now),
        Decision::Leave(Leave::Ended) => {
            rest(sweeper, claim);
            Next::Idle
        }
        Decision::Leave(Leave::NotBoosted) if !has_claim => Next::Forget,
        Decision::Leave(Leave::NotBoosted | Leave::Terminating) => Next::Idle,
    };
    // Nothing tells of a pod without a claim.
    match (next, claim.stray) {
        (Next::Idle, Some(read)) => Next::Look(read + STRAY_PAUSE),
        (Next::Look(at), Some(read)) => Next::Look(at.min(read + STRAY_PAUSE)),
        (next, _) => next,
    }
}

/// A boost has ended and the claim stays: what was remembered of it means nothing for the next.
fn rest(sweeper: &Sweeper, claim: &mut Claim) {
    sweeper.tally.remove(&uid(&claim.pod));
    (claim.resized, claim.repeats) = (BTreeSet::new(), 0);
    (claim.next_resize, claim.said) = (None, None);
}

/// A pod whose label goes with it.
fn is_over(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// Asks the owner for its template, now and then; says that the record can't be read where that is of no use.
fn unreadable(sweeper: &Sweeper, claim: &mut Claim, problem: &str, now: Instant) -> Next {
    let again = claim.asked.map(|asked| asked + UNREADABLE_PAUSE);
    if let Some(again) = again.filter(|again| *again > now) {
        say(sweeper, claim, "Unreadable", problem);
        return Next::Look(again);
    }
    claim.asked = Some(now);
    let read = std::mem::take(&mut claim.read);
    Next::Act(sweeper.clock.now(), Task::Act { read })
}

/// What keeps a resize that was accepted from being done, where that is worth a word.
fn trouble(pending: &Pending) -> Option<(&'static str, &str)> {
    match pending {
        Pending::Kubelet => None,
        Pending::Deferred(text) => Some(("Deferred", text)),
        Pending::Infeasible(text) => Some(("Infeasible", text)),
        Pending::Error(text) => Some(("Error", text)),
    }
}

/// Says once what keeps a boost from ending: in the log, in an Event and in the boost's status.
fn say(sweeper: &Sweeper, claim: &mut Claim, reason: &'static str, text: &str) {
    if claim.said == Some(reason) {
        return;
    }
    claim.said = Some(reason);
    let meta = &claim.pod.metadata;
    let (namespace, name) = (meta.namespace.as_deref(), meta.name.as_deref());
    tracing::warn!(namespace, name, reason, text, "a boost can't be taken back");
    sweeper.metrics.stuck(reason);
    if !sweeper.dry_run {
        sweeper.events.failed(&claim.pod, reason, text);
    }
    sweeper
        .tally
        .trouble(&uid(&claim.pod), Some((reason, text)));
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
