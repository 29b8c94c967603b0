//! What to do with a pod that carries a record: revert, finish, wait, watch or leave.
//!
//! Decided anew at every look, from the pod and the boost as they are then. Nothing is remembered between two looks, so
//! a crash between two writes, a second leader and a takeover are not special cases: the next look decides again.

use chrono::{DateTime, Utc};

use super::{
    cpu::Cpu,
    end::{self, Due, EndSettings, EndedBy},
    policy::Policy,
    qos::{QosClass, qos_class},
    quantity::MilliCpu,
    raise,
    record::{Loan, LoanValue, Record, Set, State},
};
use crate::api::Pod;

/// What to do now.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Resize these containers back.
    Revert(Revert),
    /// Mark the record and drop the claim.
    Finish(Finish),
    /// These containers have restarted since their boost ended: boost them [again](super::raise::again).
    Raise(Vec<String>),
    /// Nothing before this instant; `None`: nothing before the pod changes.
    Wait(Option<DateTime<Utc>>),
    /// The resize was accepted and is not done.
    Watch(Pending),
    /// Nothing, for this reason.
    Leave(Leave),
}

/// A resize that lowers CPU and changes nothing else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revert {
    /// The containers whose boost is due, and what they go back to.
    pub containers: Vec<ContainerRevert>,
    /// Since when, and why.
    pub due: Due,
}

/// One container's way back, or, in a [`Raise`](raise::Raise), up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerRevert {
    /// Its name.
    pub name: String,
    /// Whether it stands in `spec.initContainers`.
    pub init: bool,
    /// The values to write; `None` is not in the body.
    pub to: Cpu,
}

/// The last write of a boost.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// The record as it will stand, and why the boost ended; `None` where the record says so already and only the claim
    /// is left over.
    pub ended: Option<(Box<Record>, EndedBy)>,
    /// Whether the claim stays, for the next restart of a container.
    pub keeps_claim: bool,
}

impl Finish {
    /// Drops the claim of a pod whose record says already that its boost has ended.
    #[must_use]
    pub fn claim_only() -> Self {
        Self {
            ended: None,
            keeps_claim: false,
        }
    }
}

/// Why an accepted resize is not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pending {
    /// The kubelet has not got to it.
    Kubelet,
    /// The node has no room for it now.
    Deferred(String),
    /// The node will never do it.
    Infeasible(String),
    /// The kubelet tries and fails.
    Error(String),
}

/// Why a pod is left alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leave {
    /// It has neither claim nor active record.
    NotBoosted,
    /// Its boost has ended; it keeps its claim until a container restarts.
    Ended,
    /// It is being deleted.
    Terminating,
    /// Its record, or a container's entry in it, can't be read.
    Unreadable(String),
}

impl Decision {
    /// The word for why, about the pod that was decided on. `headstart explain` and the view say it.
    #[must_use]
    pub fn reason(&self, pod: &Pod) -> &'static str {
        match self {
            Self::Revert(_) => "Due",
            Self::Raise(_) => "Restarted",
            Self::Finish(finish) => match finish.ended.as_ref().map(|(_, by)| by) {
                None => "AlreadyReverted",
                Some(EndedBy::Terminated) => "Terminated",
                Some(EndedBy::Superseded) => "Superseded",
                Some(_) => "Returned",
            },
            Self::Wait(_) if pod.has_node() => "NotDue",
            Self::Wait(_) => "NotScheduled",
            Self::Watch(Pending::Kubelet) => "Resizing",
            Self::Watch(Pending::Deferred(_)) => "Deferred",
            Self::Watch(Pending::Infeasible(_)) => "Infeasible",
            Self::Watch(Pending::Error(_)) => "Error",
            Self::Leave(Leave::NotBoosted) => "NotBoosted",
            Self::Leave(Leave::Ended) => "Ended",
            Self::Leave(Leave::Terminating) => "Terminating",
            Self::Leave(Leave::Unreadable(_)) => "Unreadable",
        }
    }

    /// What the kubelet, or the reader of the record, says.
    #[must_use]
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::Watch(
                Pending::Deferred(text) | Pending::Infeasible(text) | Pending::Error(text),
            )
            | Self::Leave(Leave::Unreadable(text)) => Some(text),
            _ => None,
        }
    }
}

/// Decides about a pod, with the boost that its record names where that exists.
#[must_use]
pub fn decide(
    pod: &Pod,
    policy: Option<&Policy>,
    settings: EndSettings,
    now: DateTime<Utc>,
) -> Decision {
    decide_when(pod, policy, settings, now, None)
}

/// Decides about a pod whose boost somebody wants to end now, whatever its rule says.
#[must_use]
pub fn decide_now(
    pod: &Pod,
    policy: Option<&Policy>,
    settings: EndSettings,
    now: DateTime<Utc>,
) -> Decision {
    let due = Due {
        at: now,
        by: EndedBy::Manual,
    };
    decide_when(pod, policy, settings, now, Some(due))
}

fn decide_when(
    pod: &Pod,
    policy: Option<&Policy>,
    settings: EndSettings,
    now: DateTime<Utc>,
    forced: Option<Due>,
) -> Decision {
    if pod.metadata.deletion_timestamp.is_some() {
        return Decision::Leave(Leave::Terminating);
    }
    let Some(text) = pod.record_text() else {
        return Decision::Leave(match pod.claim() {
            Some(_) => Leave::Unreadable("the annotation is missing".to_owned()),
            None => Leave::NotBoosted,
        });
    };
    let record = match Record::read(text) {
        Ok(record) => record,
        Err(error) => return Decision::Leave(Leave::Unreadable(error.to_string())),
    };
    match (record.state, pod.claim()) {
        (State::Reverted, Some(_)) => {
            let policy = policy.filter(|_| forced.is_none());
            let keeps_claim = forced.is_none() && raise::is_wanted(&record, policy, settings);
            return decide_ended(pod, &record, policy, settings, now, keeps_claim);
        }
        (State::Reverted, None) => return Decision::Leave(Leave::NotBoosted),
        (State::Active, _) => {}
    }
    if pod.is_over() {
        return finish(record.ended(EndedBy::Terminated, now), EndedBy::Terminated);
    }
    decide_active(pod, &record, policy, settings, now, forced)
}

/// A boost that has ended, of a pod that has its claim still: it keeps that for restarts, or loses it.
fn decide_ended(
    pod: &Pod,
    record: &Record,
    policy: Option<&Policy>,
    settings: EndSettings,
    now: DateTime<Utc>,
    keeps_claim: bool,
) -> Decision {
    if !keeps_claim {
        return Decision::Finish(Finish::claim_only());
    }
    let restarted = |policy| raise::restarted(pod, record, policy, settings, now);
    match policy.map(restarted).unwrap_or_default() {
        none if none.is_empty() => Decision::Leave(Leave::Ended),
        restarted => Decision::Raise(restarted),
    }
}

fn decide_active(
    pod: &Pod,
    record: &Record,
    policy: Option<&Policy>,
    settings: EndSettings,
    now: DateTime<Utc>,
    forced: Option<Due>,
) -> Decision {
    let rule = policy.map_or(&record.end, |policy| &policy.end);
    let due = forced
        .or_else(|| given_up(pod, record, now))
        .or_else(|| due(pod, record, policy, settings, now));
    let is_due = due.filter(|due| due.at <= now);

    let loans = Loans::of(pod, record);
    let container_due = |name: &str| is_due.is_some() || rule.container_is_done(pod, name);
    let containers: Vec<_> = loans
        .outstanding
        .iter()
        .filter(|container| container_due(&container.name))
        .cloned()
        .collect();
    if !containers.is_empty() {
        let due = is_due.unwrap_or(Due {
            at: now,
            by: EndedBy::Condition,
        });
        return Decision::Revert(Revert { containers, due });
    }
    if !loans.outstanding.is_empty() {
        return Decision::Wait(due.map(|due| due.at));
    }
    if let Some(problem) = loans.unreadable {
        return Decision::Leave(Leave::Unreadable(problem));
    }
    let end = |by| {
        let ended = record.ended(by, now);
        // By hand, it ends for good.
        if forced.is_none() && raise::is_wanted(record, policy, settings) {
            finish_for_now(pod, ended, by)
        } else {
            finish(ended, by)
        }
    };
    if !loans.any_returned {
        // Somebody else has changed every value of ours. Until the boost is due they may change them back.
        return match is_due {
            Some(_) => end(EndedBy::Superseded),
            None => Decision::Wait(due.map(|due| due.at)),
        };
    }
    if let Some(pending) = pending(pod, record) {
        // Of a raise that was given up, the kubelet has refused the raise and not yet seen the way back.
        let refused = record.cause().is_some() && !has_seen(pod);
        return Decision::Watch(if refused { Pending::Kubelet } else { pending });
    }
    if let Some(until) = record.raise_begins_until().filter(|until| now < *until) {
        return Decision::Wait(Some(until));
    }
    let all_done = || {
        record
            .containers
            .keys()
            .all(|name| rule.container_is_done(pod, name))
    };
    let by = match is_due {
        Some(due) => due.by,
        None if all_done() => EndedBy::Condition,
        // The smaller pod was scheduled at once, and its rule begins only now.
        None if end::was_unschedulable(pod, record.timestamp, settings) => EndedBy::Unschedulable,
        None => record.announced().unwrap_or(match record.cause() {
            None => EndedBy::Superseded,
            // It was refused, or never came.
            Some(_) => EndedBy::Unschedulable,
        }),
    };
    end(by)
}

/// When a boost is due, as far as it is known now. A pod that waits for a node, and could get one, has no such instant.
#[must_use]
pub fn due(
    pod: &Pod,
    record: &Record,
    policy: Option<&Policy>,
    settings: EndSettings,
    now: DateTime<Utc>,
) -> Option<Due> {
    // The boost's present rule counts; its deletion does not cut short the pods that are starting already.
    let rule = policy.map_or(&record.end, |policy| &policy.end);
    let deadline_seconds = record
        .deadline_seconds
        .unwrap_or_else(|| rule.deadline_seconds(settings));
    let Some(start) = end::start(pod, record.timestamp) else {
        return end::unschedulable(pod, settings);
    };
    if record.cause().is_none() {
        return Some(rule.due(pod, start, deadline_seconds, now));
    }
    let start = record.timestamp.map_or(start, |raised| start.max(raised));
    let containers = record.containers.keys().map(String::as_str);
    Some(rule.due_again(pod, containers, start, deadline_seconds, now))
}

/// The containers of a pod that still have what was lent to them, with what they go back to.
#[must_use]
pub fn outstanding(pod: &Pod, record: &Record) -> Vec<ContainerRevert> {
    Loans::of(pod, record).outstanding
}

/// A raise for which the node has no room is over at once: what it asks for would be granted when nobody needs it any more, or
/// never, and until then it keeps the scheduler from the room.
fn given_up(pod: &Pod, record: &Record, now: DateTime<Utc>) -> Option<Due> {
    record.cause()?;
    match pending(pod, record)? {
        Pending::Deferred(_) | Pending::Infeasible(_) => Some(Due {
            at: now,
            by: EndedBy::Unschedulable,
        }),
        Pending::Kubelet | Pending::Error(_) => None,
    }
}

fn finish(ended: Record, by: EndedBy) -> Decision {
    Decision::Finish(Finish {
        ended: Some((Box::new(ended), by)),
        keeps_claim: false,
    })
}

/// Keeps the claim, and counts restarts from now on.
fn finish_for_now(pod: &Pod, ended: Record, by: EndedBy) -> Decision {
    match ended.counting(pod.restarts()) {
        Some(counting) => Decision::Finish(Finish {
            ended: Some((Box::new(counting), by)),
            keeps_claim: true,
        }),
        None => finish(ended, by),
    }
}

/// What became of what was lent.
struct Loans {
    /// Still lent: containers with what they go back to.
    outstanding: Vec<ContainerRevert>,
    /// Whether any value is back at its original.
    any_returned: bool,
    /// The first entry that can't be read.
    unreadable: Option<String>,
}

/// What became of one value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Nothing was lent, or the pod doesn't have it.
    NotLent,
    /// It still has what we set; the value to go back to.
    Lent(MilliCpu),
    /// It is at its original.
    Returned,
    /// Somebody set it to something else, which stands.
    Foreign,
}

impl Loans {
    fn of(pod: &Pod, record: &Record) -> Self {
        let mut loans = Self {
            outstanding: Vec::new(),
            any_returned: false,
            unreadable: None,
        };
        let regular = pod.spec.containers.len();
        for (index, container) in pod.all_containers().enumerate() {
            match record.containers.get(&container.name) {
                None => {}
                Some(Err(bad)) => {
                    loans
                        .unreadable
                        .get_or_insert_with(|| format!("container {}: {bad}", container.name));
                }
                Some(Ok(loan)) => {
                    let (to, returned) = way_back(loan, Cpu::of(container));
                    loans.any_returned |= returned;
                    if to != Cpu::default() {
                        let name = container.name.clone();
                        loans.outstanding.push(ContainerRevert {
                            name,
                            init: index >= regular,
                            to,
                        });
                    }
                }
            }
        }
        loans.keep_class(pod);
        loans
    }

    /// A limit that stops at a request which somebody has raised must not make the pod Guaranteed: the API server would
    /// refuse that resize for ever (`ValidatePodResize`). It then stops 1m above.
    fn keep_class(&mut self, pod: &Pod) {
        let now = |name: &str| pod.container(name).map(Cpu::of).unwrap_or_default();
        let stops_at = |revert: &ContainerRevert| {
            revert.to.request.is_none() && revert.to.limit == now(&revert.name).request
        };
        if !self.outstanding.iter().any(stops_at) || self.class_after(pod) == class_of(pod) {
            return;
        }
        for revert in self
            .outstanding
            .iter_mut()
            .filter(|revert| stops_at(revert))
        {
            let above = revert.to.limit.map(one_more);
            let limit = now(&revert.name).limit;
            revert.to.limit = above.filter(|to| limit.is_none_or(|limit| *to < limit));
        }
        self.outstanding
            .retain(|revert| revert.to != Cpu::default());
    }

    /// The class of the pod when all that is outstanding is back.
    fn class_after(&self, pod: &Pod) -> QosClass {
        let containers: Vec<_> = pod.all_containers().collect();
        qos_class(pod, |index| {
            let now = Cpu::of(containers[index]);
            let mut reverts = self.outstanding.iter();
            let revert = reverts.find(|revert| revert.name == containers[index].name);
            let to = revert.map_or(Cpu::default(), |revert| revert.to);
            Cpu {
                request: to.request.or(now.request),
                limit: to.limit.or(now.limit),
            }
        })
    }
}

fn class_of(pod: &Pod) -> QosClass {
    let containers: Vec<_> = pod.all_containers().collect();
    qos_class(pod, |index| Cpu::of(containers[index]))
}

fn one_more(cpu: MilliCpu) -> MilliCpu {
    MilliCpu::new(cpu.milli().saturating_add(1))
}

/// What one container goes back to, and whether any of its values is back already.
fn way_back(loan: &Loan, now: Cpu) -> (Cpu, bool) {
    let request = loan
        .request
        .map_or(Fate::NotLent, |value| request_fate(value, now.request));
    let lent = |fate| {
        if let Fate::Lent(to) = fate {
            Some(to)
        } else {
            None
        }
    };
    let request_to = lent(request);
    let request_then = request_to.or(now.request).unwrap_or_default();
    let limit = loan.limit.map_or(Fate::NotLent, |value| {
        limit_fate(value, now.limit, request_then)
    });
    // A limit is not lowered under a request that somebody raised.
    let limit_to = lent(limit)
        .map(|to| to.max(request_then))
        .filter(|to| now.limit.is_none_or(|limit| *to < limit));
    let returned = request == Fate::Returned || limit == Fate::Returned;
    (
        Cpu {
            request: request_to,
            limit: limit_to,
        },
        returned,
    )
}

fn request_fate(value: LoanValue, now: Option<MilliCpu>) -> Fate {
    match (value.set, now) {
        (Set::Untouched, _) | (_, None) => Fate::NotLent,
        (_, Some(now)) if now == value.original => Fate::Returned,
        (Set::To(set), Some(now)) if now == set && value.original < now => {
            Fate::Lent(value.original)
        }
        (Set::Unrecorded, Some(now)) if value.original < now => Fate::Lent(value.original),
        _ => Fate::Foreign,
    }
}

/// An absent limit is more than any limit. One that has come down as far as the request lets it is back.
fn limit_fate(value: LoanValue, now: Option<MilliCpu>, request: MilliCpu) -> Fate {
    let is_floor = |now| now == request || now == one_more(request);
    match (value.set, now) {
        (Set::To(_) | Set::Removed | Set::Unrecorded, Some(now))
            if value.original < request && is_floor(now) =>
        {
            Fate::Returned
        }
        (Set::Removed | Set::Unrecorded, None) => Fate::Lent(value.original),
        (Set::Removed, Some(now)) if now != value.original => Fate::Foreign,
        (Set::To(_), None) => Fate::Foreign,
        _ => request_fate(value, now),
    }
}

/// Why the last resize is not done, or `None` when it is.
///
/// Done: no resize condition is left and the kubelet has observed the generation. Where observing is not tracked:
/// what is allocated has come down to what is asked for. A pod without a node is done when the API server says so.
fn pending(pod: &Pod, record: &Record) -> Option<Pending> {
    if !pod.has_node() {
        return None;
    }
    let resize = |kind| {
        pod.condition(kind)
            .filter(|condition| condition.status == "True")
    };
    if let Some(condition) = resize("PodResizePending") {
        let message = condition.message.clone().unwrap_or_default();
        return Some(match condition.reason.as_deref() {
            Some("Infeasible") => Pending::Infeasible(message),
            _ => Pending::Deferred(message),
        });
    }
    if let Some(condition) = resize("PodResizeInProgress") {
        let message = condition.message.clone().unwrap_or_default();
        return Some(match condition.reason.as_deref() {
            Some("Error") => Pending::Error(message),
            _ => Pending::Kubelet,
        });
    }
    let done = match (pod.status.observed_generation, pod.metadata.generation) {
        // Generations begin at 1: this spec was never changed, so there is nothing to act on.
        (None, Some(1)) => true,
        (Some(observed), generation) => generation.is_none_or(|generation| observed >= generation),
        (None, _) => record
            .containers
            .keys()
            .all(|name| allocation_is_down(pod, name)),
    };
    (!done).then_some(Pending::Kubelet)
}

/// Whether the kubelet has seen the latest resize, where that is tracked.
fn has_seen(pod: &Pod) -> bool {
    let observed = pod.status.observed_generation;
    observed.is_none_or(|observed| Some(observed) >= pod.metadata.generation)
}

fn allocation_is_down(pod: &Pod, name: &str) -> bool {
    let allocated = pod.container_status(name).and_then(|status| {
        status
            .allocated_resources
            .as_ref()?
            .cpu
            .as_deref()?
            .parse::<MilliCpu>()
            .ok()
    });
    let asked = pod
        .container(name)
        .and_then(|container| Cpu::of(container).request);
    // A kubelet that reports no allocation does not resize, and the API server refuses to for it.
    allocated.is_none_or(|allocated| asked.is_none_or(|asked| allocated <= asked))
}
