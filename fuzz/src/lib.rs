//! What the fuzz targets share.
//!
//! This file alone calls what takes the operator's settings and what it knows of the cluster: when
//! `headstart::domain` changes what it takes, it is the only one to adapt.

#![forbid(unsafe_code)]

pub mod check;
pub mod reference;
pub mod shapes;

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use chrono::{DateTime, TimeDelta, Utc};
use headstart::{
    admission::Admitter,
    api::{Pod, StartupCPUBoost},
    clock::Clock,
    domain::{
        admission::{Admission, Settings, admit},
        policy::{Policy, PolicyError},
        revert::{Decision, decide},
        snapshot::{BoostIndex, Snapshot},
    },
    metrics::Metrics,
};
use serde_json::{Value, json};

/// The namespace of all pods and boosts.
pub const NAMESPACE: &str = "ns";

/// When everything happens.
#[must_use]
pub fn now() -> DateTime<Utc> {
    DateTime::from_timestamp(1_796_119_200, 0).expect("a valid instant")
}

/// What the flags say.
#[must_use]
pub fn settings(remove_limits: bool) -> Settings {
    Settings {
        remove_limits,
        ..Settings::default()
    }
}

/// Compiles a boost that is written as JSON; the `age`th oldest of all.
///
/// # Errors
/// When the boost can't be applied.
///
/// # Panics
/// When it is no boost at all.
pub fn compile(name: &str, age: i64, boost: Value) -> Result<Policy, PolicyError> {
    let boost: StartupCPUBoost = serde_json::from_value(boost).expect("a boost of ours");
    let created = now() - TimeDelta::days(365) + TimeDelta::seconds(age);
    Policy::compile(name, created, &boost)
}

/// What admission knows of a cluster with these boosts.
pub fn snapshot(policies: impl IntoIterator<Item = Policy>) -> Snapshot {
    let ours = |policy| (NAMESPACE.to_owned(), Arc::new(policy));
    Snapshot {
        boosts: Arc::new(BoostIndex::new(policies.into_iter().map(ours))),
        ..Snapshot::default()
    }
}

/// Decides about a new pod.
#[must_use]
pub fn admission(
    snapshot: &Snapshot,
    settings: Settings,
    pod: &Pod,
    now: DateTime<Utc>,
) -> Admission {
    admit(snapshot, settings, NAMESPACE, pod, now)
}

/// Decides about a pod that runs, without the boost that its record names.
#[must_use]
pub fn look(pod: &Pod, now: DateTime<Utc>) -> Decision {
    decide(pod, None, settings(false).end, now)
}

/// The webhook, without a server; `None` before it has read the boosts.
#[must_use]
pub fn admitter(snapshot: Option<Snapshot>, settings: Settings) -> Admitter {
    Admitter {
        snapshot: Arc::new(ArcSwapOption::from_pointee(snapshot)),
        settings,
        clock: Clock::new(now),
        metrics: Metrics::default().admission,
        dry_run: false,
    }
}

/// A boost for each way to raise CPU, chosen by the pod's label `boost`; all other pods get the last one.
///
/// # Panics
/// Never: they compile.
#[must_use]
pub fn boosts() -> Vec<Policy> {
    let of = |kind: &str, raise: Value, more: Value| {
        let mut policy = json!({"matchContainers": {"type": "RegexName", "value": ".*"}});
        json_patch::merge(&mut policy, &raise);
        json_patch::merge(&mut policy, &more);
        let selector = (!kind.is_empty()).then(|| json!({"matchLabels": {"boost": kind}}));
        json!({
            "metadata": {"name": format!("boost-{kind}"), "namespace": NAMESPACE},
            "selector": selector,
            "spec": {
                "resourcePolicy": {"containerPolicies": [policy]},
                "durationPolicy": {"podCondition": {"type": "Ready", "status": "True"}},
            },
        })
    };
    let percent = json!({"percentageIncrease": {"value": 50}});
    let fixed = json!({"fixedResources": {"requests": "2", "limits": "4500m"}});
    let sidecars = json!({"matchContainers": {"includeSidecars": true}});
    let all = [
        of("percent", percent.clone(), json!({})),
        of("fixed", fixed.clone(), json!({})),
        of(
            "requests",
            fixed.clone(),
            json!({"controlledValues": "RequestsOnly"}),
        ),
        of(
            "limits",
            percent.clone(),
            json!({"controlledValues": "LimitsOnly"}),
        ),
        of("sidecars", fixed, sidecars.clone()),
        of("", percent, sidecars),
    ];
    let compiled = all.into_iter().zip(0..).map(|(boost, age)| {
        let name = boost["metadata"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        compile(&name, age, boost).expect("it compiles")
    });
    compiled.collect()
}
