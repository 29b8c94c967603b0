//! What happens to a new pod: which boost is for it, and what each container gets.
//!
//! Pure and total: the same snapshot gives the same answer on every replica, and no pod makes it fail.

use std::{collections::BTreeMap, sync::Arc};

use chrono::{DateTime, Utc};

use super::{
    cpu::Cpu,
    end::EndSettings,
    policy::{ContainerPolicy, Policy, Target},
    qos::{QosClass, qos_class},
    quantity::MilliCpu,
    reason::Reason,
    record::{Loan, LoanValue, NewRecord, Record, Set, State},
    snapshot::Snapshot,
};
use crate::api::{Container, ControlledValues, Pod};

/// Annotation of pods that the kubelet mirrors from its own files.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// What the flags say about admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// `REMOVE_LIMITS`: remove the CPU limit of a boosted container instead of raising it.
    pub remove_limits: bool,
    /// When boosts end.
    pub end: EndSettings,
}

/// The decision about a pod.
#[derive(Clone, Debug)]
pub struct Admission {
    /// The boost that is for the pod, if any is.
    pub boost: Option<Arc<Policy>>,
    /// What comes of it.
    pub outcome: Outcome,
    /// Each container, in the pod's order: regular ones, then init ones.
    pub containers: Vec<ContainerDecision>,
    /// The record, where the pod is boosted.
    pub record: Option<Record>,
}

/// What comes of a review.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// At least one container gets more CPU.
    Boosted,
    /// A boost matches, and changes nothing.
    Skipped(Reason),
    /// No boost matches.
    NoBoost,
    /// A pod that must not be touched at all: a mirror of a static pod.
    Untouchable,
}

/// The decision about one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerDecision {
    /// Its name.
    pub name: String,
    /// What it asked for: the base of the boost.
    pub from: Cpu,
    /// What it gets.
    pub to: Cpu,
    /// Why it gets no more, where it doesn't.
    pub reason: Option<Reason>,
}

/// Decides about a new pod of `namespace`.
///
/// The namespace is the request's: in a pod that is being created, `metadata.namespace` may be empty.
#[must_use]
pub fn admit(
    snapshot: &Snapshot,
    settings: Settings,
    namespace: &str,
    pod: &Pod,
    now: DateTime<Utc>,
) -> Admission {
    if is_mirror(pod) {
        return Admission {
            boost: None,
            outcome: Outcome::Untouchable,
            containers: Vec::new(),
            record: None,
        };
    }
    let boost = snapshot
        .select(namespace, pod.metadata.labels.as_ref())
        .filter(|_| !is_windows(pod))
        .cloned();
    let present: Vec<Cpu> = pod.all_containers().map(Cpu::of).collect();
    let base = trusted_originals(pod, boost.as_deref(), settings, &present).unwrap_or(present);
    let Some(policy) = boost else {
        let containers = unchanged(pod, &base, None);
        return Admission {
            boost: None,
            outcome: Outcome::NoBoost,
            containers,
            record: None,
        };
    };
    if let Some(reason) = skip_whole(pod) {
        let containers = unchanged(pod, &base, Some(reason));
        return Admission {
            boost: Some(policy),
            outcome: Outcome::Skipped(reason),
            containers,
            record: None,
        };
    }
    let containers = plan(pod, &policy, settings, &base);
    let loans: BTreeMap<String, Loan> = containers
        .iter()
        .filter(|decision| decision.from != decision.to)
        .map(|decision| (decision.name.clone(), decision.loan()))
        .collect();
    if loans.is_empty() {
        let outcome = Outcome::Skipped(pod_reason(&containers));
        return Admission {
            boost: Some(policy),
            outcome,
            containers,
            record: None,
        };
    }
    let about = NewRecord {
        timestamp: now,
        boost: &policy.name,
        end: &policy.end,
        deadline_seconds: policy.end.deadline_seconds(settings.end),
    };
    let record = Record::new(about, &loans);
    Admission {
        boost: Some(policy),
        outcome: Outcome::Boosted,
        containers,
        record: Some(record),
    }
}

fn is_mirror(pod: &Pod) -> bool {
    pod.metadata
        .annotations
        .as_ref()
        .is_some_and(|annotations| annotations.contains_key(MIRROR))
}

/// Windows pods can't be resized (`ValidatePodResize`).
fn is_windows(pod: &Pod) -> bool {
    pod.spec.os.as_ref().is_some_and(|os| os.name == "windows")
}

/// Why no container of a pod may be boosted, whatever the policy says.
fn skip_whole(pod: &Pod) -> Option<Reason> {
    let pod_level = pod.spec.resources.as_ref();
    let set = pod_level
        .is_some_and(|resources| resources.requests.is_some() || resources.limits.is_some());
    set.then_some(Reason::PodLevelResources)
}

fn unchanged(pod: &Pod, base: &[Cpu], reason: Option<Reason>) -> Vec<ContainerDecision> {
    let decide = |(container, cpu): (&Container, &Cpu)| ContainerDecision {
        name: container.name.clone(),
        from: *cpu,
        to: *cpu,
        reason,
    };
    pod.all_containers().zip(base).map(decide).collect()
}

/// The one reason that is counted for a pod of which nothing is boosted: the first container that a policy fits has
/// more to say than those that none fits.
fn pod_reason(containers: &[ContainerDecision]) -> Reason {
    let reasons = || containers.iter().filter_map(|decision| decision.reason);
    reasons()
        .find(|reason| *reason != Reason::NoContainer)
        .unwrap_or(Reason::NoContainer)
}

/// What each container gets, decided in the pod's order; each decision keeps the `QoS` class that the pod has.
fn plan(pod: &Pod, policy: &Policy, settings: Settings, base: &[Cpu]) -> Vec<ContainerDecision> {
    let class = qos_class(pod, |index| base[index]);
    let remove_limits = settings.remove_limits && class != QosClass::Guaranteed;
    let mut planned = base.to_vec();
    let regular = pod.spec.containers.len();
    let decide = |(index, container): (usize, &Container)| {
        let from = base[index];
        let is_init = index >= regular;
        let decided = fitting(policy, container, is_init).and_then(|policy| {
            let mut keeps_class = |cpu: Cpu| {
                planned[index] = cpu;
                qos_class(pod, |index| planned[index]) == class
            };
            let to = raise(policy, container, from, remove_limits, &mut keeps_class);
            planned[index] = to.unwrap_or(from);
            to
        });
        ContainerDecision {
            name: container.name.clone(),
            from,
            to: decided.unwrap_or(from),
            reason: decided.err(),
        }
    };
    pod.all_containers().enumerate().map(decide).collect()
}

/// The policy for a container, if one fits and nothing about the container forbids a boost.
fn fitting<'a>(
    policy: &'a Policy,
    container: &Container,
    is_init: bool,
) -> Result<&'a ContainerPolicy, Reason> {
    if is_init && !container.is_sidecar() {
        return Err(Reason::NoContainer);
    }
    policy
        .for_container(&container.name, is_init)
        .ok_or(Reason::NoContainer)
}

/// A container's new values.
fn raise(
    policy: &ContainerPolicy,
    container: &Container,
    from: Cpu,
    remove_limits: bool,
    keeps_class: &mut impl FnMut(Cpu) -> bool,
) -> Result<Cpu, Reason> {
    if from.is_empty() {
        return Err(Reason::NoCPU);
    }
    let restarts = |policy: &crate::api::ResizePolicy| {
        policy.resource_name == "cpu" && policy.restart_policy == "RestartContainer"
    };
    if container.resize_policy.iter().any(restarts) {
        return Err(Reason::RestartContainer);
    }
    if !container.resources.claims.is_empty() {
        return Err(Reason::ResourceClaims);
    }
    let wanted = Cpu {
        request: from
            .request
            .map(|request| target(policy.target, request, true)),
        limit: from.limit.map(|limit| target(policy.target, limit, false)),
    };
    let candidates = match policy.controlled {
        ControlledValues::RequestsAndLimits => {
            let limit = wanted
                .limit
                .max(wanted.request.filter(|_| wanted.limit.is_some()));
            let raised = Cpu { limit, ..wanted };
            let without_limit = Cpu {
                limit: None,
                ..wanted
            };
            if remove_limits && raised != from && from.limit.is_some() {
                vec![without_limit, raised]
            } else {
                vec![raised]
            }
        }
        ControlledValues::RequestsOnly => {
            // At the limit, or 1m under it where reaching it would change the class.
            let below = |less: u64| {
                let limit = from
                    .limit
                    .map(|limit| MilliCpu::new(limit.milli().saturating_sub(less)));
                let request = wanted
                    .request
                    .map(|request| limit.map_or(request, |limit| request.min(limit)));
                Cpu {
                    request: request.max(from.request),
                    limit: from.limit,
                }
            };
            vec![below(0), below(1)]
        }
        ControlledValues::LimitsOnly => vec![Cpu {
            request: from.request,
            limit: wanted.limit,
        }],
    };
    if candidates.first().is_none_or(|cpu| *cpu == from) {
        return Err(Reason::NotHigher);
    }
    candidates
        .into_iter()
        .find(|cpu| *cpu != from && keeps_class(*cpu))
        .ok_or(Reason::QoSChange)
}

/// What a policy makes of one value: never less than it was; zero stays zero.
fn target(target: Target, from: MilliCpu, is_request: bool) -> MilliCpu {
    if from.is_zero() {
        return from;
    }
    let to = match target {
        Target::Percentage(percent) => Some(from.increased_by(percent)),
        Target::Fixed { request, limit } => {
            if is_request {
                request
            } else {
                limit
            }
        }
    };
    to.map_or(from, |to| to.max(from))
}

/// What the pod asked for, by a record that it already carries, if that record is to be believed.
///
/// It is where it is Active and the pod has the values that it says were set: this is a second call in one admission, or
/// a manifest copied from a boosted pod. Its originals are then the base, so a second pass changes nothing. No original
/// above what was set is believed: lying can only lower the liar's own pod.
fn trusted_originals(
    pod: &Pod,
    policy: Option<&Policy>,
    settings: Settings,
    present: &[Cpu],
) -> Option<Vec<Cpu>> {
    let record = Record::read(pod.record_text()?)
        .ok()
        .filter(|record| record.state == State::Active)?;
    let mut base = present.to_vec();
    let (mut recorded, mut unrecorded) = (false, false);
    for (container, cpu) in pod.all_containers().zip(&mut base) {
        let Some(loan) = record.containers.get(&container.name) else {
            continue;
        };
        let loan = loan.as_ref().ok()?;
        let mut trust = |value: Option<LoanValue>, present: Option<MilliCpu>| match value {
            Some(LoanValue {
                set: Set::Untouched,
                ..
            })
            | None => Some(present),
            Some(LoanValue {
                original,
                set: Set::To(set),
            }) => {
                recorded = true;
                (present == Some(set) && original <= set).then_some(Some(original))
            }
            Some(LoanValue {
                original,
                set: Set::Removed,
            }) => {
                recorded = true;
                present.is_none().then_some(Some(original))
            }
            Some(LoanValue {
                original,
                set: Set::Unrecorded,
            }) => {
                unrecorded = true;
                present
                    .is_none_or(|present| original <= present)
                    .then_some(Some(original))
            }
        };
        *cpu = Cpu {
            request: trust(loan.request, cpu.request)?,
            limit: trust(loan.limit, cpu.limit)?,
        };
    }
    if unrecorded {
        // Upstream's records have no set values: believed where our plan of the originals gives what is there.
        let planned = plan(pod, policy?, settings, &base);
        let agrees = planned
            .iter()
            .zip(present)
            .all(|(decision, present)| decision.to == *present);
        return agrees.then_some(base);
    }
    recorded.then_some(base)
}

impl ContainerDecision {
    /// The record's entry for it.
    fn loan(&self) -> Loan {
        let value = |from: Option<MilliCpu>, to: Option<MilliCpu>| {
            let set = match to {
                Some(to) if Some(to) == from => Set::Untouched,
                Some(to) => Set::To(to),
                None => Set::Removed,
            };
            from.map(|original| LoanValue { original, set })
        };
        Loan {
            request: value(self.from.request, self.to.request),
            limit: value(self.from.limit, self.to.limit),
        }
    }
}
