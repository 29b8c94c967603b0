//! What happens to a new pod: which boost is for it, and what each container gets.
//!
//! Pure and total: the same snapshot gives the same answer on every replica, and no pod makes it fail.

use std::{collections::BTreeMap, sync::Arc};

use chrono::{DateTime, Utc};

use super::{
    clamp::{Ceilings, Clamp},
    cpu::Cpu,
    end::EndSettings,
    limit_range::LimitRanges,
    policy::{Policy, Target},
    qos::{QosClass, qos_class},
    quantity::MilliCpu,
    quota::Quota,
    raise::Raise,
    reason::Reason,
    record::{Cause, Loan, LoanValue, MAX_BYTES, NewRecord, Record, Set, State},
    revert::ContainerRevert,
    snapshot::Snapshot,
};
use crate::api::{Container, ControlledValues, Pod};

/// Annotation of pods that the kubelet mirrors from its own files.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// Containers that a pod may have, init ones included. A record of more could not be read again (8 KiB), and deciding
/// about each in the light of all the others would take long.
const MAX_CONTAINERS: usize = 200;

/// What the flags say about admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// `REMOVE_LIMITS`: remove the CPU limit of a boosted container instead of raising it.
    pub remove_limits: bool,
    /// `--max-boosted-cpu`: of each value of a container.
    pub max_boosted_cpu: Option<MilliCpu>,
    /// `--ignore-quota`: boost also where a ResourceQuota has no room; the API server then refuses the pod.
    pub ignore_quota: bool,
    /// `--allow-old-kubelets`: boost also pods that could land where they can't be resized back.
    pub allow_old_kubelets: bool,
    /// `--skip-guaranteed`: leave Guaranteed pods alone; under a static CPU manager they can't be resized.
    pub skip_guaranteed: bool,
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
    /// The record's text, where the pod is boosted.
    pub record: Option<String>,
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
    /// Why it is not boosted, where it isn't.
    pub reason: Option<Reason>,
    /// Why it gets less than its policy says, where it does.
    pub clamped: Option<Clamp>,
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
    let plan = Plan {
        pod,
        policy: boost.as_deref(),
        bounds: Bounds::new(snapshot, settings, namespace, pod),
        only: None,
    };
    let present: Vec<Cpu> = pod.all_containers().map(Cpu::of).collect();
    let base = trusted_originals(&plan, &present).unwrap_or(present);
    let unboosted = |outcome, containers| Admission {
        boost: boost.clone(),
        outcome,
        containers,
        record: None,
    };
    let Some(policy) = &boost else {
        return unboosted(Outcome::NoBoost, unchanged(pod, &base, None));
    };
    let skip = |reason| {
        unboosted(
            Outcome::Skipped(reason),
            unchanged(pod, &base, Some(reason)),
        )
    };
    if let Some(reason) = skip_whole(snapshot, settings, namespace, pod, &base) {
        return skip(reason);
    }
    let containers = plan.decide(&base);
    if containers.iter().all(|decision| !decision.is_boosted()) {
        return unboosted(Outcome::Skipped(pod_reason(&containers)), containers);
    }
    if !settings.ignore_quota && !has_room(snapshot.quotas(namespace), pod, &base, &containers) {
        return skip(Reason::Quota);
    }
    let record = record(policy, settings, &containers, now, None);
    if record.len() > MAX_BYTES {
        return skip(Reason::Clamped);
    }
    Admission {
        boost: Some(Arc::clone(policy)),
        outcome: Outcome::Boosted,
        containers,
        record: Some(record),
    }
}

/// Boosts some containers of a pod that runs, from the values that they have now. No limit is removed: a resize can't.
pub(super) fn raise(
    snapshot: &Snapshot,
    settings: Settings,
    pod: &Pod,
    policy: &Policy,
    cause: Cause,
    only: &[String],
    now: DateTime<Utc>,
) -> Result<Raise, Reason> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let settings = Settings {
        remove_limits: false,
        ..settings
    };
    let base: Vec<Cpu> = pod.all_containers().map(Cpu::of).collect();
    if let Some(reason) = skip_whole(snapshot, settings, namespace, pod, &base) {
        return Err(reason);
    }
    let plan = Plan {
        pod,
        policy: Some(policy),
        bounds: Bounds::new(snapshot, settings, namespace, pod),
        only: Some(only),
    };
    let containers = plan.decide(&base);
    let regular = pod.spec.containers.len();
    let raised: Vec<_> = containers
        .iter()
        .enumerate()
        .filter(|(_, decision)| decision.is_boosted())
        .map(|(index, decision)| ContainerRevert {
            name: decision.name.clone(),
            init: index >= regular,
            to: Cpu {
                request: decision
                    .to
                    .request
                    .filter(|_| decision.to.request != decision.from.request),
                limit: decision
                    .to
                    .limit
                    .filter(|_| decision.to.limit != decision.from.limit),
            },
        })
        .collect();
    if raised.is_empty() {
        return Err(pod_reason(&containers));
    }
    let restarts = pod.restarts().collect();
    let record = record(policy, settings, &containers, now, Some((cause, &restarts)));
    if record.len() > MAX_BYTES {
        return Err(Reason::Clamped);
    }
    Ok(Raise {
        cause,
        containers: raised,
        boost: policy.name.clone(),
        record,
    })
}

/// Whether it is a pod of a kind that is never boosted.
pub(super) fn is_untouchable(pod: &Pod) -> bool {
    is_mirror(pod) || is_windows(pod)
}

fn is_mirror(pod: &Pod) -> bool {
    pod.metadata
        .annotations
        .as_ref()
        .is_some_and(|annotations| annotations.contains_key(MIRROR))
}

/// Windows pods can't be resized (`ValidatePodResize`). Some say it by their nodeSelector alone.
fn is_windows(pod: &Pod) -> bool {
    let selected = pod.spec.node_selector.get("kubernetes.io/os");
    pod.spec.os.as_ref().is_some_and(|os| os.name == "windows")
        || selected.is_some_and(|os| os == "windows")
}

/// Why no container of a pod may be boosted, whatever the policy says.
fn skip_whole(
    snapshot: &Snapshot,
    settings: Settings,
    namespace: &str,
    pod: &Pod,
    base: &[Cpu],
) -> Option<Reason> {
    let pod_level = pod.spec.resources.as_ref();
    let pod_level = pod_level
        .is_some_and(|resources| resources.requests.is_some() || resources.limits.is_some());
    // Of one container they forbid the resize of all: the API server compares the pods without them.
    let claims = || {
        let mut containers = pod.all_containers();
        containers.any(|container| !container.resources.claims.is_empty())
    };
    let guaranteed = || qos_class(pod, |index| base[index]) == QosClass::Guaranteed;
    if snapshot.is_disabled(namespace) {
        Some(Reason::Disabled)
    } else if pod_level {
        Some(Reason::PodLevelResources)
    } else if claims() {
        Some(Reason::ResourceClaims)
    } else if !settings.allow_old_kubelets && snapshot.nodes.too_old_for(pod).is_some() {
        Some(Reason::OldKubelet)
    } else if settings.skip_guaranteed && guaranteed() {
        Some(Reason::Guaranteed)
    } else if base.len() > MAX_CONTAINERS
        || !is_admissible(snapshot.limit_ranges(namespace), pod, base)
    {
        Some(Reason::Clamped)
    } else {
        None
    }
}

/// Whether the API server would take a pod with these values. A pod that it refuses as it is must not get in by a boost:
/// nobody wrote what it would run with, and taking the boost back would be refused.
fn is_admissible(ranges: LimitRanges, pod: &Pod, values: &[Cpu]) -> bool {
    let is_valid = |cpu: &Cpu| cpu.limit.is_none_or(|limit| cpu.request <= Some(limit));
    values.iter().all(is_valid) && ranges.admit(pod, values)
}

fn unchanged(pod: &Pod, base: &[Cpu], reason: Option<Reason>) -> Vec<ContainerDecision> {
    let decide = |(container, cpu): (&Container, &Cpu)| ContainerDecision {
        name: container.name.clone(),
        from: *cpu,
        to: *cpu,
        reason,
        clamped: None,
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

fn has_room(quotas: &[Quota], pod: &Pod, base: &[Cpu], containers: &[ContainerDecision]) -> bool {
    if quotas.is_empty() {
        return true;
    }
    let class = qos_class(pod, |index| base[index]);
    let to: Vec<Cpu> = containers.iter().map(|decision| decision.to).collect();
    let mut quotas = quotas.iter();
    quotas.all(|quota| quota.has_room(pod, class, base, &to))
}

fn record(
    policy: &Policy,
    settings: Settings,
    containers: &[ContainerDecision],
    now: DateTime<Utc>,
    raise: Option<(Cause, &BTreeMap<&str, i32>)>,
) -> String {
    let boosted = || containers.iter().filter(|decision| decision.is_boosted());
    let loans = boosted().map(|decision| (decision.name.as_str(), decision.loan()));
    let clamped =
        boosted().filter_map(|decision| Some((decision.name.as_str(), decision.clamped?)));
    let record = NewRecord {
        timestamp: now,
        containers: &loans.collect(),
        clamped: &clamped.collect(),
        raise,
        boost: (policy.kind, &policy.name),
        end: &policy.end,
        deadline_seconds: policy.end.deadline_seconds(settings.end),
    };
    record.text()
}

/// What bounds a pod's boost beside the boost itself.
struct Bounds<'a> {
    ceilings: Ceilings<'a>,
    remove_limits: bool,
}

impl<'a> Bounds<'a> {
    fn new(snapshot: &'a Snapshot, settings: Settings, namespace: &str, pod: &'a Pod) -> Self {
        let ranges = snapshot.limit_ranges(namespace);
        let quotas = snapshot.quotas(namespace);
        // LimitRanger runs once more after the webhooks and would put a removed limit back, or refuse the pod.
        let wants_limits = ranges.wants_limits || quotas.iter().any(Quota::wants_limits);
        Self {
            ceilings: Ceilings {
                pod,
                ranges,
                flag: settings.max_boosted_cpu,
                node: snapshot.nodes.largest,
            },
            remove_limits: settings.remove_limits && !wants_limits,
        }
    }
}

/// Everything that decides about a pod's containers.
struct Plan<'a> {
    pod: &'a Pod,
    policy: Option<&'a Policy>,
    bounds: Bounds<'a>,
    /// The containers that are meant, where not all are.
    only: Option<&'a [String]>,
}

/// What a container may get, best first; all of it is still to be clamped.
struct Wish {
    candidates: Vec<Cpu>,
    /// Whether 1m under the limit will do, where reaching it would change the class.
    may_stop_short: bool,
}

impl Plan<'_> {
    /// What each container gets, decided in the pod's order, which decides who gets the room that is left in a total.
    /// Each decision keeps the `QoS` class that the pod has.
    fn decide(&self, base: &[Cpu]) -> Vec<ContainerDecision> {
        let class = qos_class(self.pod, |index| base[index]);
        let mut planned = base.to_vec();
        let decide = |(index, container): (usize, &Container)| {
            let from = base[index];
            let wish = self.wish(index, container, from, class);
            let decided = wish.and_then(|wish| self.choose(&wish, index, class, &mut planned));
            let (to, clamped) = decided.unwrap_or((from, None));
            planned[index] = to;
            ContainerDecision {
                name: container.name.clone(),
                from,
                to,
                reason: decided.err(),
                clamped,
            }
        };
        self.pod.all_containers().enumerate().map(decide).collect()
    }

    /// What the policy wants for a container, if one fits and nothing about the container forbids a boost.
    fn wish(
        &self,
        index: usize,
        container: &Container,
        from: Cpu,
        class: QosClass,
    ) -> Result<Wish, Reason> {
        let is_init = index >= self.pod.spec.containers.len();
        let is_meant = self.only.is_none_or(|only| only.contains(&container.name));
        if is_init && !container.is_sidecar() || !is_meant {
            return Err(Reason::NoContainer);
        }
        let policy = self
            .policy
            .and_then(|policy| policy.for_container(&container.name, is_init))
            .ok_or(Reason::NoContainer)?;
        if from.is_empty() {
            return Err(Reason::NoCPU);
        }
        let restarts = |policy: &crate::api::ResizePolicy| {
            policy.resource_name == "cpu" && policy.restart_policy == "RestartContainer"
        };
        if container.resize_policy.iter().any(restarts) {
            return Err(Reason::RestartContainer);
        }
        let remove_limits = self.bounds.remove_limits && class != QosClass::Guaranteed;
        let candidates = candidates(policy.controlled, policy.target, from, remove_limits);
        if candidates.first().is_none_or(|cpu| *cpu == from) {
            return Err(Reason::NotHigher);
        }
        Ok(Wish {
            candidates,
            may_stop_short: policy.controlled == ControlledValues::RequestsOnly,
        })
    }

    /// The first candidate that is still a raise when it is clamped, and keeps the class.
    fn choose(
        &self,
        wish: &Wish,
        index: usize,
        class: QosClass,
        planned: &mut [Cpu],
    ) -> Result<(Cpu, Option<Clamp>), Reason> {
        let from = planned[index];
        let mut reason = Reason::Clamped;
        for candidate in &wish.candidates {
            let (mut to, clamped) = self.bounds.ceilings.clamp(index, from, *candidate, planned);
            if class == QosClass::Guaranteed && candidate.request == candidate.limit {
                to.limit = to.request;
            }
            let short = Cpu {
                request: to
                    .request
                    .map(|cpu| MilliCpu::new(cpu.milli().saturating_sub(1))),
                ..to
            };
            let stops_short = to.request == to.limit
                && (wish.may_stop_short || clamped.is_some())
                && short.request >= from.request;
            let mut keeps_class = |cpu: &Cpu| {
                let before = std::mem::replace(&mut planned[index], *cpu);
                let keeps = qos_class(self.pod, |index| planned[index]) == class;
                planned[index] = before;
                keeps
            };
            let found = [Some(to), Some(short).filter(|_| stops_short)]
                .into_iter()
                .flatten()
                .filter(|cpu| *cpu != from)
                .inspect(|_| reason = Reason::QoSChange)
                .find(|cpu| keeps_class(cpu));
            if let Some(to) = found {
                return Ok((to, clamped));
            }
        }
        Err(reason)
    }
}

/// What a policy makes of a container's values, best first.
fn candidates(
    controlled: ControlledValues,
    to: Target,
    from: Cpu,
    remove_limits: bool,
) -> Vec<Cpu> {
    let wanted = Cpu {
        request: from.request.map(|request| target(to, request, true)),
        limit: from.limit.map(|limit| target(to, limit, false)),
    };
    match controlled {
        ControlledValues::RequestsAndLimits => {
            let limit = wanted
                .limit
                .max(wanted.request.filter(|_| wanted.limit.is_some()));
            let raised = Cpu { limit, ..wanted };
            let without_limit = Cpu {
                limit: None,
                ..wanted
            };
            // Without a request nothing of the container's CPU would be left, and no second look could tell that it was ours.
            let asks = from.request.is_some_and(|request| !request.is_zero());
            if remove_limits && asks && from.limit.is_some() && raised != from {
                vec![without_limit, raised]
            } else {
                vec![raised]
            }
        }
        ControlledValues::RequestsOnly => {
            let capped = from.limit.map_or(wanted.request, |limit| {
                wanted.request.map(|request| request.min(limit))
            });
            vec![Cpu {
                request: capped.max(from.request),
                limit: from.limit,
            }]
        }
        ControlledValues::LimitsOnly => vec![Cpu {
            request: from.request,
            limit: wanted.limit,
        }],
    }
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
/// above what was set is believed, nor any that the API server would refuse: lying can only lower the liar's own pod.
fn trusted_originals(plan: &Plan<'_>, present: &[Cpu]) -> Option<Vec<Cpu>> {
    let pod = plan.pod;
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
        // Where there is no CPU at all nothing was removed: we don't boost such containers.
        if cpu.is_empty() && loan.limit.is_some() {
            return None;
        }
        *cpu = Cpu {
            request: trust(loan.request, cpu.request)?,
            limit: trust(loan.limit, cpu.limit)?,
        };
    }
    // Or what is admitted without us would be refused for what we put back.
    if !is_admissible(plan.bounds.ceilings.ranges, pod, &base) {
        return None;
    }
    if unrecorded {
        // Upstream's records have no set values: believed where our plan of the originals gives what is there.
        if plan.policy.is_none() || base.len() > MAX_CONTAINERS {
            return None;
        }
        let planned = plan.decide(&base);
        let agrees = planned
            .iter()
            .zip(present)
            .all(|(decision, present)| decision.to == *present);
        return agrees.then_some(base);
    }
    recorded.then_some(base)
}

impl ContainerDecision {
    /// Whether it gets more than it asked for.
    #[must_use]
    pub fn is_boosted(&self) -> bool {
        self.from != self.to
    }

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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::domain::patch;

    /// Found by the fuzz target `patch` and by `a_second_pass_changes_nothing`. (The API server itself sets such a request before it asks us.)
    #[test]
    fn the_limit_of_a_container_without_a_request_is_raised_and_not_removed() {
        let (controlled, to) = (ControlledValues::default(), Target::Percentage(100));
        for request in [None, Some(MilliCpu::new(0))] {
            let limit = |milli| Cpu {
                request,
                limit: Some(MilliCpu::new(milli)),
            };
            let candidates = candidates(controlled, to, limit(500), true);
            assert_eq!(candidates, [limit(1000)]);
        }
    }

    /// Found by the fuzz target `review`: a forged record said that a limit had been removed from a container that has no
    /// `resources` at all, and the patch that put it back did not apply, which refuses the pod.
    #[test]
    fn a_record_of_a_container_without_cpu_is_not_believed() {
        let key = crate::api::BOOST_KEY;
        let record = r#"{"initCPULimits":{"app":"1"},"boostedCPULimits":{"app":""}}"#;
        let object = json!({
            "metadata": {"labels": {key: "x"}, "annotations": {key: record}},
            "spec": {"containers": [{"name": "app"}]},
        });
        let pod: Pod = serde_json::from_value(object.clone()).expect("a pod");
        let now = DateTime::default();
        let admission = admit(&Snapshot::default(), Settings::default(), "ns", &pod, now);
        let mut patched = object;
        let patch = patch::admission(&pod, &admission);
        json_patch::patch(&mut patched, &patch).expect("it applies");
        assert_eq!(patched["spec"]["containers"], json!([{"name": "app"}]));
        assert_eq!(
            patched["metadata"],
            json!({"labels": {}, "annotations": {}})
        );
    }
}
