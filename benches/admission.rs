//! From a review's body to the answer's: what the webhook costs without TLS and HTTP.
//!
//! `cargo bench --bench admission`

use std::{hint::black_box, sync::Arc};

use arc_swap::ArcSwapOption;
use chrono::{DateTime, TimeDelta};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
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
use load::review;
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
fn admitter(namespaces: usize, boosts: usize) -> Admitter {
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
fn answer(admitter: &Admitter, body: &[u8]) -> Vec<u8> {
    let answer = admitter.answer(body).expect("it is a review");
    assert!(answer.windows(7).any(|window| window == b"\"patch\""));
    answer
}

fn sizes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("review");
    let admitter = admitter(200, 5);
    for kilobytes in [10, 36] {
        let body = review::body(kilobytes * 1000, "team-7", "app-4");
        answer(&admitter, &body);
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(
            BenchmarkId::from_parameter(format!("{kilobytes} kB")),
            |bencher| {
                bencher.iter(|| admitter.answer(black_box(&body)));
            },
        );
    }
}

/// The boost that matches is the last that is looked at.
fn boosts_in_a_namespace(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("boosts in the namespace");
    for boosts in [1, 10, 100, 1000] {
        let admitter = admitter(1, boosts);
        let body = review::body(10_000, "team-0", &format!("app-{}", boosts - 1));
        answer(&admitter, &body);
        group.bench_function(BenchmarkId::from_parameter(boosts), |bencher| {
            bencher.iter(|| admitter.answer(black_box(&body)));
        });
    }
}

fn namespaces(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("namespaces of one boost");
    for namespaces in [1, 10, 100, 1000] {
        let admitter = admitter(namespaces, 1);
        let body = review::body(10_000, &format!("team-{}", namespaces - 1), "app-0");
        answer(&admitter, &body);
        group.bench_function(BenchmarkId::from_parameter(namespaces), |bencher| {
            bencher.iter(|| admitter.answer(black_box(&body)));
        });
    }
}

criterion_group!(benches, sizes, boosts_in_a_namespace, namespaces);
criterion_main!(benches);
