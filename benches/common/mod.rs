//! A replica without a cluster: what answers reviews, with boosts made up.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use chrono::{DateTime, TimeDelta};
use headstart::{
    admission::Admitter,
    api::StartupCPUBoost,
    clock::Clock,
    domain::{
        admission::Settings,
        policy::Policy,
        snapshot::{BoostIndex, Snapshot},
    },
    metrics::Metrics,
};
use serde_json::json;

/// The boost of that number; it is for the pods with the label `app: app-NUMBER`.
fn boost(number: usize) -> Policy {
    let object = json!({
        "metadata": {"name": format!("boost-{number}"), "namespace": "ns"},
        "selector": {"matchLabels": {"app": format!("app-{number}")}},
        "spec": {
            "resourcePolicy": {"containerPolicies": [{
                "matchContainers": {"type": "ExactName", "value": format!("app-{number}")},
                "percentageIncrease": {"value": 100},
            }]},
            "durationPolicy": {"podCondition": {"type": "Ready", "status": "True"}},
        },
    });
    let object: StartupCPUBoost = serde_json::from_value(object).expect("a boost");
    let created = DateTime::default() + TimeDelta::seconds(i64::try_from(number).expect("small"));
    Policy::compile(&format!("boost-{number}"), created, &object).expect("it compiles")
}

/// A replica that knows so many boosts in each of so many namespaces.
pub(crate) fn admitter(namespaces: usize, boosts: usize) -> Admitter {
    let index = (0..namespaces).flat_map(|namespace| {
        (0..boosts).map(move |number| (format!("team-{namespace}"), Arc::new(boost(number))))
    });
    let snapshot = Snapshot {
        boosts: Arc::new(BoostIndex::new(index)),
        ..Snapshot::default()
    };
    Admitter {
        snapshot: Arc::new(ArcSwapOption::from_pointee(snapshot)),
        settings: Settings::default(),
        clock: Clock::system(),
        metrics: Metrics::default().admission.clone(),
        dry_run: false,
    }
}

/// The answer must be a patch, or nothing worth measuring is measured.
pub(crate) fn answer(admitter: &Admitter, body: &[u8]) -> Vec<u8> {
    let answer = admitter.answer(body).expect("it is a review");
    assert!(answer.windows(7).any(|window| window == b"\"patch\""));
    answer
}
