//! A boost in force as people see it: what was lent to a pod, what it has now, when that ends, and what is in the way.
//!
//! Made of the pod, the boost and the time alone, so that every replica shows the same. What only a leader knows, such as a
//! resize that the API server refuses, shows as a boost that is overdue.

use std::collections::BTreeMap;

use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;

use super::{
    cpu::Cpu,
    end::{Due, EndSettings, EndedBy},
    policy::{BoostKind, Policy},
    quantity::MilliCpu,
    record::{Record, State},
    revert::{Decision, Leave, Pending, decide, due, outstanding},
};
use crate::api::{Container, ContainerStatus, CpuAmount, Pod};

/// A boost that was due so long ago and is not back is stuck: the leader tries again at least once a minute.
const PATIENCE: TimeDelta = TimeDelta::seconds(60);

/// How far a boost is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Phase {
    /// Not due.
    Active,
    /// Due, or resized back, and not finished.
    Reverting,
    /// The node does not do the resize, or it was due a minute ago.
    Stuck,
    /// Not due, and its boost object is gone or invalid: it ends by its record.
    Orphaned,
    /// Its record can't be read.
    Unreadable,
}

impl Phase {
    /// The word for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Active => "Active",
            Self::Reverting => "Reverting",
            Self::Stuck => "Stuck",
            Self::Orphaned => "Orphaned",
            Self::Unreadable => "Unreadable",
        }
    }

    fn of(decision: &Decision, has_boost: bool, is_overdue: bool) -> Self {
        match decision {
            Decision::Revert(_) | Decision::Watch(Pending::Kubelet) if is_overdue => Self::Stuck,
            Decision::Revert(_) | Decision::Finish(_) | Decision::Watch(Pending::Kubelet) => {
                Self::Reverting
            }
            Decision::Watch(_) => Self::Stuck,
            Decision::Leave(Leave::Unreadable(_)) => Self::Unreadable,
            Decision::Wait(_) | Decision::Raise(_) | Decision::Leave(_) if has_boost => {
                Self::Active
            }
            Decision::Wait(_) | Decision::Raise(_) | Decision::Leave(_) => Self::Orphaned,
        }
    }
}

/// A boost in force. Its JSON is the `status` of a `BoostedPod`, an interface: see `docs/see.md`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Boosted {
    /// The object that made it.
    pub boost: BoostName,
    /// How far it is.
    pub phase: Phase,
    /// The word for why it is not further.
    pub reason: &'static str,
    /// What the kubelet, or the reader of the record, says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// When it was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boosted_time: Option<DateTime<Utc>>,
    /// When it is due, as far as that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub due_time: Option<DateTime<Utc>>,
    /// What makes it due then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub due_by: Option<EndedBy>,
    /// Its end rule, in words.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub end: String,
    /// What the pod's requests have beyond their originals, or the node has not given back of it.
    pub lent: MilliCpu,
    /// Its boosted containers, in the pod's order.
    pub containers: Vec<ContainerBoost>,
}

/// A boost object, by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct BoostName {
    /// Its kind, as far as this version knows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<BoostKind>,
    /// Its name.
    pub name: String,
}

/// CPU of a boosted container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ContainerBoost {
    /// Its name.
    pub name: String,
    /// What it was created with; none where the record's entry can't be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub original: Option<Cpu>,
    /// What it asks for now.
    pub current: Cpu,
    /// What it runs with, as its kubelet says; none before it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actual: Option<Cpu>,
}

/// What all boosts in force that one object has made come to. Its JSON is the `status` of a summary.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Pods whose boost is in force.
    pub pods: usize,
    /// The same by phase, without those that are none.
    pub phases: BTreeMap<Phase, usize>,
    /// What all their requests have beyond their originals.
    pub lent: MilliCpu,
    /// When the oldest was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_time: Option<DateTime<Utc>>,
    /// When the next is due, or was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_due_time: Option<DateTime<Utc>>,
}

impl Summary {
    /// Counts one more.
    pub fn add(&mut self, boosted: &Boosted) {
        let earlier = |old: Option<DateTime<Utc>>, new| old.into_iter().chain(new).min();
        self.pods += 1;
        *self.phases.entry(boosted.phase).or_default() += 1;
        self.lent = MilliCpu::new(self.lent.milli().saturating_add(boosted.lent.milli()));
        self.oldest_time = earlier(self.oldest_time, boosted.boosted_time);
        self.next_due_time = earlier(self.next_due_time, boosted.due_time);
    }
}

impl Boosted {
    /// The boost of a pod that has a claim, at an instant, with the boost object that its record names where that exists.
    #[must_use]
    pub fn of(
        pod: &Pod,
        policy: Option<&Policy>,
        settings: EndSettings,
        now: DateTime<Utc>,
    ) -> Self {
        let decision = decide(pod, policy, settings, now);
        let record = pod.record_text().and_then(|text| Record::read(text).ok());
        let in_force = record
            .as_ref()
            .filter(|record| record.state == State::Active);
        let due = in_force.and_then(|record| due(pod, record, policy, settings, now));
        let is_overdue = due.is_some_and(|due| due.at + PATIENCE < now);
        let containers = record.as_ref().map(|record| containers(pod, record));
        let containers = containers.unwrap_or_default();
        let mut boosted = Self {
            boost: name(pod, record.as_ref(), policy),
            phase: Phase::of(&decision, policy.is_some(), is_overdue),
            reason: decision.reason(pod),
            message: decision.detail().map(str::to_owned),
            boosted_time: record.as_ref().and_then(|record| record.timestamp),
            due_time: due.map(|due: Due| due.at),
            due_by: due.map(|due| due.by),
            end: policy
                .map(|policy| &policy.end)
                .or(record.as_ref().map(|record| &record.end))
                .map(super::end::EndRule::describe)
                .unwrap_or_default(),
            lent: in_force.map_or(MilliCpu::default(), |record| lent(pod, record, &containers)),
            containers,
        };
        if boosted.phase == Phase::Stuck && boosted.message.is_none() {
            boosted.reason = "Overdue";
        }
        if let Some(problem) = record.as_ref().and_then(|record| spoiled(pod, record)) {
            // The others are reverted when they are due; this one needs a person, and the sooner the better.
            (boosted.phase, boosted.reason) = (Phase::Unreadable, "Unreadable");
            boosted.message = Some(problem);
        }
        boosted
    }
}

/// Whatever its record says, or else its claim.
fn name(pod: &Pod, record: Option<&Record>, policy: Option<&Policy>) -> BoostName {
    if let Some(boost) = record.and_then(|record| record.boost.as_ref()) {
        return BoostName {
            kind: boost.kind,
            name: boost.name.clone(),
        };
    }
    BoostName {
        kind: Some(policy.map_or(BoostKind::Namespaced, |policy| policy.kind)),
        name: pod.claim().unwrap_or_default().to_owned(),
    }
}

fn lent(pod: &Pod, record: &Record, containers: &[ContainerBoost]) -> MilliCpu {
    let more = |now: Option<MilliCpu>, than: Option<MilliCpu>| {
        let values = now.zip(than);
        values.map_or(0, |(now, than)| now.milli().saturating_sub(than.milli()))
    };
    let lent = outstanding(pod, record).into_iter().map(|revert| {
        let now = pod
            .container(&revert.name)
            .and_then(|container| Cpu::of(container).request);
        more(now, revert.to.request)
    });
    // Resized back, and still running with it.
    let kept = containers.iter().map(|container| {
        let actual = container.actual.and_then(|actual| actual.request);
        more(actual, container.current.request)
    });
    MilliCpu::new(lent.chain(kept).sum())
}

/// The first container of the pod whose entry in the record can't be read.
fn spoiled(pod: &Pod, record: &Record) -> Option<String> {
    let mut entries = record.containers.iter();
    entries.find_map(|(name, entry)| {
        let bad = entry.as_ref().err()?;
        pod.container(name)
            .map(|_| format!("container {name}: {bad}"))
    })
}

fn containers(pod: &Pod, record: &Record) -> Vec<ContainerBoost> {
    let boosted = pod.all_containers().filter_map(|container| {
        let entry = record.containers.get(&container.name)?;
        Some(container_boost(pod, container, entry.as_ref().ok()))
    });
    boosted.collect()
}

fn container_boost(
    pod: &Pod,
    container: &Container,
    loan: Option<&super::record::Loan>,
) -> ContainerBoost {
    ContainerBoost {
        name: container.name.clone(),
        original: loan.map(|loan| Cpu {
            request: loan.request.map(|value| value.original),
            limit: loan.limit.map(|value| value.original),
        }),
        current: Cpu::of(container),
        actual: pod.container_status(&container.name).and_then(actual),
    }
}

fn actual(status: &ContainerStatus) -> Option<Cpu> {
    let resources = status.resources.as_ref()?;
    let read = |amount: &Option<CpuAmount>| amount.as_ref()?.cpu.as_deref()?.parse().ok();
    Some(Cpu {
        request: read(&resources.requests),
        limit: read(&resources.limits),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const RECORD: &str = r#"{"state":"Active","timestamp":"2026-12-01T10:00:00Z","initCPURequests":{"app":"250m"},"initCPULimits":{"app":"1"},"boostedCPURequests":{"app":"750m"},"boostedCPULimits":{"app":"3"},"boost":"b","end":{"fixedSeconds":60,"condition":{"type":"Ready","status":"True","delaySeconds":0},"deadlineSeconds":3600}}"#;

    /// Boosted and scheduled at 10:00:00.
    fn pod(record: &str, request: &str, more: &Value) -> Pod {
        let mut conditions = vec![json!({
            "type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-12-01T10:00:00Z",
        })];
        conditions.extend(more.as_array().cloned().unwrap_or_default());
        let resources = json!({"requests": {"cpu": request}, "limits": {"cpu": "3"}});
        let pod = json!({
            "metadata": {
                "name": "p", "namespace": "n", "uid": "u", "generation": 2,
                "labels": {crate::api::BOOST_KEY: "b"}, "annotations": {crate::api::BOOST_KEY: record},
            },
            "spec": {"nodeName": "node", "containers": [{"name": "app", "resources": resources}]},
            "status": {"observedGeneration": 2, "conditions": conditions, "containerStatuses": [
                {"name": "app", "resources": {"requests": {"cpu": "750m"}, "limits": {"cpu": "3"}}},
            ]},
        });
        serde_json::from_value(pod).expect("a pod")
    }

    fn at(second: u32) -> DateTime<Utc> {
        let (minute, second) = (second / 60, second % 60);
        format!("2026-12-01T10:{minute:02}:{second:02}Z")
            .parse()
            .expect("an instant")
    }

    fn seen(pod: &Pod, now: u32) -> Boosted {
        Boosted::of(pod, None, EndSettings::default(), at(now))
    }

    #[test]
    fn a_boost_is_orphaned_due_and_then_stuck_where_nobody_takes_it_back() {
        let pod = pod(RECORD, "750m", &json!([]));
        let phases = [59, 60, 120, 121].map(|now| {
            let seen = seen(&pod, now);
            (seen.phase, seen.reason)
        });
        let expected = [
            (Phase::Orphaned, "NotDue"),
            (Phase::Reverting, "Due"),
            (Phase::Reverting, "Due"),
            (Phase::Stuck, "Overdue"),
        ];
        assert_eq!(phases, expected);
    }

    #[test]
    fn what_is_lent_and_what_it_runs_with_are_told() {
        let told = serde_json::to_value(seen(&pod(RECORD, "750m", &json!([])), 10));
        let expected = json!({
            "boost": {"kind": "StartupCPUBoost", "name": "b"},
            "phase": "Orphaned", "reason": "NotDue",
            "boostedTime": "2026-12-01T10:00:00Z", "dueTime": "2026-12-01T10:01:00Z", "dueBy": "FixedDuration",
            "end": "Ready or 60s", "lent": "500m",
            "containers": [{
                "name": "app", "original": {"request": "250m", "limit": "1"},
                "current": {"request": "750m", "limit": "3"}, "actual": {"request": "750m", "limit": "3"},
            }],
        });
        assert_eq!(told.expect("JSON"), expected);
    }

    #[test]
    fn a_node_that_does_not_resize_is_quoted() {
        let refused = json!([{"type": "PodResizePending", "status": "True", "reason": "Infeasible", "message": "no"}]);
        let mut pod = pod(RECORD, "250m", &refused);
        // Back, as far as the API server goes.
        if let Some(limits) = &mut pod.spec.containers[0].resources.limits {
            limits.cpu = Some("1".to_owned());
        }
        let seen = seen(&pod, 61);
        assert_eq!((seen.phase, seen.reason), (Phase::Stuck, "Infeasible"));
        assert_eq!(seen.message.as_deref(), Some("no"));
        assert_eq!(seen.lent, MilliCpu::new(500), "it still runs with it");
    }

    #[test]
    fn one_entry_that_can_not_be_read_is_enough() {
        let bad = RECORD.replace(r#""app":"250m""#, r#""app":"x""#);
        for record in ["{", &bad] {
            let seen = seen(&pod(record, "750m", &json!([])), 10);
            assert_eq!(
                (seen.phase, seen.reason),
                (Phase::Unreadable, "Unreadable"),
                "{record}"
            );
            assert!(seen.message.is_some(), "{record}");
            assert_eq!(seen.boost.name, "b");
        }
    }

    #[test]
    fn a_summary_has_the_oldest_and_the_next() {
        let mut summary = Summary::default();
        let later = RECORD.replace("10:00:00Z", "10:00:30Z");
        for record in [&later, RECORD, "{"] {
            summary.add(&seen(&pod(record, "750m", &json!([])), 10));
        }
        let expected = json!({
            "pods": 3, "phases": {"Orphaned": 2, "Unreadable": 1}, "lent": "1",
            "oldestTime": "2026-12-01T10:00:00Z", "nextDueTime": "2026-12-01T10:01:00Z",
        });
        assert_eq!(serde_json::to_value(summary).expect("JSON"), expected);
    }
}
