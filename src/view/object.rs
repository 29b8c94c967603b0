//! The objects, as JSON and as rows.

use std::{collections::BTreeMap, fmt::Write as _};

use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;

use super::resource::{API_VERSION, Resource};
use crate::{
    api::{BOOST_KEY, Pod},
    claims::Place,
    domain::{
        boosted::{Boosted, ContainerBoost, Phase, Summary},
        cpu::Cpu,
    },
};

/// An object of the view: read only, so it has a `status` and nothing else.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Object<S> {
    kind: &'static str,
    api_version: &'static str,
    /// Its name and what goes with it.
    pub metadata: Metadata,
    /// What is seen.
    pub status: S,
}

/// `metadata` of an object.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// Its name.
    pub name: String,
    /// Its namespace; empty is the cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// The pod's.
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<String>,
    /// The pod's: which version of it was seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    resource_version: Option<String>,
    /// The pod's.
    #[serde(skip_serializing_if = "Option::is_none")]
    creation_timestamp: Option<k8s_openapi::apimachinery::pkg::apis::meta::v1::Time>,
    /// The claim.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<&'static str, String>,
    /// Which replica answers, and from how fresh a cache.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) annotations: BTreeMap<&'static str, String>,
}

/// A list of them.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectList<S> {
    kind: String,
    api_version: &'static str,
    metadata: ListMeta,
    items: Vec<Object<S>>,
}

/// `metadata` of a list.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListMeta {
    /// The newest version that was seen.
    pub(super) resource_version: String,
    /// Where the next page begins, if there is one.
    #[serde(rename = "continue", skip_serializing_if = "Option::is_none")]
    pub(super) token: Option<String>,
    /// Which replica answers, and from how fresh a cache.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) annotations: BTreeMap<&'static str, String>,
}

impl<S> ObjectList<S> {
    pub(super) fn new(resource: Resource, metadata: ListMeta, items: Vec<Object<S>>) -> Self {
        Self {
            kind: format!("{}List", resource.kind()),
            api_version: API_VERSION,
            metadata,
            items,
        }
    }
}

impl ObjectList<Boosted> {
    /// Pods whose boosts are in force, from no view.
    #[must_use]
    pub fn boosted_pods(items: Vec<Object<Boosted>>) -> Self {
        Self::new(Resource::BoostedPods, ListMeta::default(), items)
    }
}

/// Something that is shown in a table too.
pub trait Row {
    /// The columns after the name; those for `-o wide` have `true`.
    const COLUMNS: &'static [(&'static str, &'static str, bool)];

    /// What they say at an instant.
    fn cells(&self, now: DateTime<Utc>) -> Vec<String>;
}

impl Object<Boosted> {
    /// A pod whose boost is in force.
    #[must_use]
    pub fn boosted_pod(pod: &Pod, status: Boosted) -> Self {
        let meta = &pod.metadata;
        let claim = pod.claim().map(|claim| (BOOST_KEY, claim.to_owned()));
        Self {
            kind: Resource::BoostedPods.kind(),
            api_version: API_VERSION,
            metadata: Metadata {
                name: meta.name.clone().unwrap_or_default(),
                namespace: meta.namespace.clone().unwrap_or_default(),
                uid: meta.uid.clone(),
                resource_version: meta.resource_version.clone(),
                creation_timestamp: meta.creation_timestamp.clone(),
                labels: claim.into_iter().collect(),
                annotations: BTreeMap::new(),
            },
            status,
        }
    }
}

impl Object<Summary> {
    pub(super) fn summary(resource: Resource, place: Place, status: Summary) -> Self {
        Self {
            kind: resource.kind(),
            api_version: API_VERSION,
            metadata: Metadata {
                name: place.name,
                namespace: place.namespace,
                ..Metadata::default()
            },
            status,
        }
    }
}

impl Row for Boosted {
    const COLUMNS: &'static [(&'static str, &'static str, bool)] = &[
        ("Boost", "The object that made the boost", false),
        (
            "Phase",
            "Active, Reverting, Stuck, Orphaned or Unreadable",
            false,
        ),
        (
            "Lent",
            "What the pod's CPU requests have beyond their originals, or its node has not given back",
            false,
        ),
        (
            "Due",
            "When the CPU is taken back, as far as that is known",
            false,
        ),
        ("Age", "Since when the boost is in force", false),
        ("By", "What ends it then", true),
        ("Reason", "Why it is not further", true),
        (
            "CPU",
            "Request/limit of each container: original, now, and what it runs with where that differs",
            true,
        ),
    ];

    fn cells(&self, now: DateTime<Utc>) -> Vec<String> {
        let age = self.boosted_time.map(|at| span(now - at));
        let by = self.due_by.map(|by| by.as_str().to_owned());
        let containers = self.containers.iter().map(spell);
        vec![
            self.boost.name.clone(),
            self.phase.as_str().to_owned(),
            self.lent.to_string(),
            due(self.due_time, now),
            unknown(age),
            unknown(by),
            self.reason.to_owned(),
            unknown(Some(containers.collect::<Vec<_>>().join(", "))),
        ]
    }
}

impl Row for Summary {
    const COLUMNS: &'static [(&'static str, &'static str, bool)] = &[
        ("Pods", "Pods whose boost is in force", false),
        ("Stuck", "Those that something keeps from ending", false),
        (
            "Lent",
            "What all their CPU requests have beyond their originals",
            false,
        ),
        ("Oldest", "Since when the oldest is in force", false),
        (
            "Next due",
            "When the next ends, as far as that is known",
            false,
        ),
        ("Phases", "Pods by phase", true),
    ];

    fn cells(&self, now: DateTime<Utc>) -> Vec<String> {
        let of = |phase| self.phases.get(&phase).copied().unwrap_or(0);
        let oldest = self.oldest_time.map(|at| span(now - at));
        let phases = self.phases.iter();
        let phases = phases.map(|(phase, pods)| format!("{} {pods}", phase.as_str()));
        vec![
            self.pods.to_string(),
            (of(Phase::Stuck) + of(Phase::Unreadable)).to_string(),
            self.lent.to_string(),
            unknown(oldest),
            due(self.next_due_time, now),
            unknown(Some(phases.collect::<Vec<_>>().join(", "))),
        ]
    }
}

/// `app 250m/1 -> 750m/3`, and what it runs with where the kubelet has not done that.
fn spell(container: &ContainerBoost) -> String {
    let cpu = |cpu: Option<Cpu>| cpu.map_or("?".to_owned(), |cpu| cpu.to_string());
    let ContainerBoost {
        name,
        original,
        current,
        actual,
    } = container;
    let mut text = format!("{name} {} -> {}", cpu(*original), cpu(Some(*current)));
    if actual.is_some_and(|actual| actual != *current) {
        write!(text, " (runs with {})", cpu(*actual)).expect("writing to a string does not fail");
    }
    text
}

fn due(at: Option<DateTime<Utc>>, now: DateTime<Utc>) -> String {
    match at {
        Some(at) if at > now => format!("in {}", span(at - now)),
        Some(at) => format!("{} ago", span(now - at)),
        None => unknown(None),
    }
}

fn unknown(text: Option<String>) -> String {
    let text = text.filter(|text| !text.is_empty());
    text.unwrap_or_else(|| "<none>".to_owned())
}

/// A span of time as kubectl shows ages: two units at most.
fn span(time: TimeDelta) -> String {
    let seconds = time.num_seconds().max(0);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    let with = |many: i64, unit: &str, few: i64, part: &str| match few {
        0 => format!("{many}{unit}"),
        few => format!("{many}{unit}{few}{part}"),
    };
    match seconds {
        0..120 => format!("{seconds}s"),
        120..600 => with(minutes, "m", seconds % 60, "s"),
        600..10_800 => format!("{minutes}m"),
        10_800..28_800 => with(hours, "h", minutes % 60, "m"),
        28_800..172_800 => format!("{hours}h"),
        172_800..691_200 => with(days, "d", hours % 24, "h"),
        _ => format!("{days}d"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::quantity::MilliCpu;

    #[test]
    fn spans_are_spelled_as_kubectl_spells_ages() {
        for (seconds, text) in [
            (-5, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (599, "9m59s"),
            (600, "10m"),
            (10_799, "179m"),
            (10_800, "3h"),
            (10_860, "3h1m"),
            (28_800, "8h"),
            (172_800, "2d"),
            (176_400, "2d1h"),
            (691_200, "8d"),
        ] {
            assert_eq!(span(TimeDelta::seconds(seconds)), text, "{seconds}");
        }
    }

    #[test]
    fn a_container_shows_what_it_runs_with_where_that_differs() {
        let cpu = |request: u64, limit: u64| Cpu {
            request: Some(MilliCpu::new(request)),
            limit: (limit > 0).then(|| MilliCpu::new(limit)),
        };
        let mut container = ContainerBoost {
            name: "app".to_owned(),
            original: Some(cpu(250, 0)),
            current: cpu(250, 0),
            actual: Some(cpu(750, 3000)),
        };
        assert_eq!(spell(&container), "app 250m/- -> 250m/- (runs with 750m/3)");
        (container.original, container.actual) = (None, None);
        assert_eq!(spell(&container), "app ? -> 250m/-");
    }
}
