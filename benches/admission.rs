//! From a review's body to the answer's: what the webhook costs without TLS and HTTP.
//!
//! `cargo bench --bench admission`

mod common;

use std::hint::black_box;

use common::{admitter, answer};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use load::review;

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
