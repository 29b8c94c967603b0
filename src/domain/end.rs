//! The end rule: when a boost is due.
//!
//! Times come from the API server and the kubelet (conditions, `startTime`), never from the moment at which this
//! process looked.

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::api::{ContainerCondition, Pod};

/// Longest fixed duration and delay in seconds: 30 days; what is longer is cut, the deadline would be.
pub const MONTH_SECONDS: u64 = 2_592_000;

/// When a boost ends; the earliest part counts. Records spell it like this.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndRule {
    /// Seconds from scheduling.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fixed_seconds: Option<u64>,
    /// A pod condition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub condition: Option<ConditionRule>,
    /// Each container's own status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container_condition: Option<ContainerCondition>,
}

/// A pod condition, and how long to wait after it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConditionRule {
    /// Type, such as `Ready`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Status, such as `True`.
    pub status: String,
    /// Seconds after the condition's last transition.
    pub delay_seconds: u64,
}

/// Why a boost ended; the words are in records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EndedBy {
    /// The pod's (or the container's) condition.
    Condition,
    /// The fixed duration.
    FixedDuration,
    /// The deadline, which every boost has.
    Deadline,
    /// It could not be scheduled with the boost.
    Unschedulable,
    /// The pod finished first.
    Terminated,
    /// Somebody asked for it.
    Manual,
    /// Somebody else changed the values: nothing of ours was left to revert.
    Superseded,
}

impl EndedBy {
    /// All of them, for metrics that exist from the start.
    pub const ALL: [Self; 7] = [
        Self::Condition,
        Self::FixedDuration,
        Self::Deadline,
        Self::Unschedulable,
        Self::Terminated,
        Self::Manual,
        Self::Superseded,
    ];

    /// The word for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Condition => "Condition",
            Self::FixedDuration => "FixedDuration",
            Self::Deadline => "Deadline",
            Self::Unschedulable => "Unschedulable",
            Self::Terminated => "Terminated",
            Self::Manual => "Manual",
            Self::Superseded => "Superseded",
        }
    }
}

/// What the flags say about ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndSettings {
    /// `--boost-deadline` in seconds.
    pub deadline_seconds: u64,
    /// `--unschedulable-after` in seconds.
    pub unschedulable_seconds: u64,
    /// `--boost-on-restart`: the claim outlives the boost, for the next restart of a container.
    pub boost_on_restart: bool,
}

impl Default for EndSettings {
    fn default() -> Self {
        Self {
            deadline_seconds: 3600,
            unschedulable_seconds: 30,
            boost_on_restart: false,
        }
    }
}

/// When a boost was due, or will be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Due {
    /// The instant.
    pub at: DateTime<Utc>,
    /// What makes it due.
    pub by: EndedBy,
}

impl EndRule {
    /// Whether nothing is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.fixed_seconds.is_none()
            && self.condition.is_none()
            && self.container_condition.is_none()
    }

    /// The deadline in seconds for a boost with this rule: the flag plus the delay, never shorter than the fixed
    /// duration, at most 30 days.
    #[must_use]
    pub fn deadline_seconds(&self, settings: EndSettings) -> u64 {
        let delay = self
            .condition
            .as_ref()
            .map_or(0, |condition| condition.delay_seconds);
        (settings.deadline_seconds + delay)
            .max(self.fixed_seconds.unwrap_or(0))
            .min(MONTH_SECONDS)
    }

    /// The earliest part of the rule that is known to come, for a pod whose clock began at `start`.
    ///
    /// A condition that does not hold has no instant; the deadline always has one.
    #[must_use]
    pub fn due(
        &self,
        pod: &Pod,
        start: DateTime<Utc>,
        deadline_seconds: u64,
        now: DateTime<Utc>,
    ) -> Due {
        let condition = self.condition.as_ref().and_then(|rule| {
            let since = rule.holds_since(pod, start)?;
            Some(rule.met_at(since, now))
        });
        self.earliest(condition, start, deadline_seconds)
    }

    /// The same for a boost that was made at `start` for containers of a pod that ran already. Nothing counts from before
    /// that, and a condition that holds from before a container started says nothing of it until it is ready.
    #[must_use]
    pub fn due_again<'a>(
        &self,
        pod: &Pod,
        mut containers: impl Iterator<Item = &'a str>,
        start: DateTime<Utc>,
        deadline_seconds: u64,
        now: DateTime<Utc>,
    ) -> Due {
        let condition = self.condition.as_ref().and_then(|rule| {
            let since = rule.holds_since(pod, start)?;
            containers
                .all(|name| is_up(pod, name, since))
                .then(|| rule.met_at(since.max(start), now))
        });
        self.earliest(condition, start, deadline_seconds)
    }

    fn earliest(
        &self,
        condition: Option<DateTime<Utc>>,
        start: DateTime<Utc>,
        deadline_seconds: u64,
    ) -> Due {
        let fixed = self
            .fixed_seconds
            .map(|seconds| start + seconds_delta(seconds));
        let deadline = start + seconds_delta(deadline_seconds.max(self.fixed_seconds.unwrap_or(0)));
        let mut due = Due {
            at: deadline,
            by: EndedBy::Deadline,
        };
        // On equal instants the more telling cause is named.
        for (at, by) in [
            (fixed, EndedBy::FixedDuration),
            (condition, EndedBy::Condition),
        ] {
            if let Some(at) = at.filter(|at| *at <= due.at) {
                due = Due { at, by };
            }
        }
        due
    }

    /// Whether a container has reached the status that ends its own boost.
    #[must_use]
    pub fn container_is_done(&self, pod: &Pod, container: &str) -> bool {
        let Some(condition) = self.container_condition else {
            return false;
        };
        pod.container_status(container)
            .is_some_and(|status| match condition {
                ContainerCondition::Started => status.started == Some(true),
                ContainerCondition::Ready => status.ready,
            })
    }

    /// In words, for people: `Ready + 30s or 60s`.
    #[must_use]
    pub fn describe(&self) -> String {
        let condition = self.condition.as_ref().map(|rule| {
            let name = if rule.status == "True" {
                rule.kind.clone()
            } else {
                format!("{}={}", rule.kind, rule.status)
            };
            if rule.delay_seconds == 0 {
                name
            } else {
                format!("{name} + {}s", rule.delay_seconds)
            }
        });
        let container = self.container_condition.map(|condition| match condition {
            ContainerCondition::Started => "container started".to_owned(),
            ContainerCondition::Ready => "container ready".to_owned(),
        });
        let fixed = self.fixed_seconds.map(|seconds| format!("{seconds}s"));
        condition
            .into_iter()
            .chain(container)
            .chain(fixed)
            .collect::<Vec<_>>()
            .join(" or ")
    }

    /// The record's `end` field.
    #[must_use]
    pub fn recorded(&self, deadline_seconds: u64) -> impl Serialize {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct End<'a> {
            #[serde(flatten)]
            rule: &'a EndRule,
            deadline_seconds: u64,
        }
        End {
            rule: self,
            deadline_seconds,
        }
    }

    /// Reads the record's `end` field, and its deadline. What can't be read, or is a newer version's, counts as absent:
    /// it never ends a boost early, the deadline does.
    #[must_use]
    pub fn from_json(value: &Value) -> (Self, Option<u64>) {
        let condition = value.get("condition").and_then(|condition| {
            Some(ConditionRule {
                kind: condition.get("type")?.as_str()?.to_owned(),
                status: condition.get("status")?.as_str()?.to_owned(),
                delay_seconds: condition.get("delaySeconds").map_or(Some(0), seconds)?,
            })
        });
        let rule = Self {
            fixed_seconds: value.get("fixedSeconds").and_then(seconds),
            condition,
            container_condition: value
                .get("containerCondition")
                .and_then(|condition| serde_json::from_value(condition.clone()).ok()),
        };
        (rule, value.get("deadlineSeconds").and_then(seconds))
    }
}

impl ConditionRule {
    /// When the condition came to hold, if it does. An absent condition has no status.
    fn holds_since(&self, pod: &Pod, start: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let condition = pod
            .condition(&self.kind)
            .filter(|condition| condition.status == self.status)?;
        Some(condition.last_transition_time.unwrap_or(start))
    }

    /// When that ends the boost: after the delay. Without one, it holds now whatever the kubelet's clock and ours say.
    fn met_at(&self, since: DateTime<Utc>, now: DateTime<Utc>) -> DateTime<Utc> {
        match self.delay_seconds {
            0 => since.min(now),
            delay => since + seconds_delta(delay),
        }
    }
}

/// Whether a condition that has held since then says something of a container's present run. (The clocks that are compared
/// are both the kubelet's.)
fn is_up(pod: &Pod, container: &str, since: DateTime<Utc>) -> bool {
    pod.container_status(container).is_none_or(|status| {
        let began = status.began();
        status.ready || began.is_some_and(|began| began <= since)
    })
}

/// From when on durations count: `PodScheduled`; where it is missing although the pod has a node, the kubelet's
/// `startTime`, else when the boost was made. A pod without a node has no start.
#[must_use]
pub fn start(pod: &Pod, recorded: Option<DateTime<Utc>>) -> Option<DateTime<Utc>> {
    let scheduled = pod
        .condition("PodScheduled")
        .filter(|condition| condition.status == "True");
    if scheduled.is_none() && !pod.has_node() {
        return None;
    }
    scheduled
        .and_then(|condition| condition.last_transition_time)
        .or(pod.status.start_time)
        .or(recorded)
        // A record without a timestamp is somebody's work; the boost has to end all the same.
        .or_else(|| {
            let created = pod.metadata.creation_timestamp.as_ref()?;
            DateTime::from_timestamp(created.0.as_second(), 0)
        })
}

/// When a pod that fits no node gets its original size back, so that it does not wait longer than it would have
/// without a boost.
#[must_use]
pub fn unschedulable(pod: &Pod, settings: EndSettings) -> Option<Due> {
    let condition = pod.condition("PodScheduled").filter(|_| !pod.has_node())?;
    if condition.status != "False" || condition.reason.as_deref() != Some("Unschedulable") {
        return None;
    }
    let at = condition.last_transition_time? + seconds_delta(settings.unschedulable_seconds);
    Some(Due {
        at,
        by: EndedBy::Unschedulable,
    })
}

/// Whether a boosted pod waited for a node so long that its boost was due by [`unschedulable`]. The pod says so no longer
/// once it has a node.
#[must_use]
pub fn was_unschedulable(pod: &Pod, boosted: Option<DateTime<Utc>>, settings: EndSettings) -> bool {
    let scheduled = pod
        .condition("PodScheduled")
        .filter(|condition| condition.status == "True")
        .and_then(|condition| condition.last_transition_time);
    let waited = scheduled
        .zip(boosted)
        .map(|(scheduled, boosted)| scheduled - boosted);
    waited.is_some_and(|waited| waited >= seconds_delta(settings.unschedulable_seconds))
}

/// Seconds from 0 to 30 days; anything else reads as absent.
fn seconds(value: &Value) -> Option<u64> {
    value.as_u64().filter(|seconds| *seconds <= MONTH_SECONDS)
}

fn seconds_delta(seconds: u64) -> TimeDelta {
    // A month of seconds at most, by construction: always representable.
    TimeDelta::seconds(i64::try_from(seconds).unwrap_or(i64::MAX / 1000))
}
