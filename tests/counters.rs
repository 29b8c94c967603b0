//! Boosted containers, counted: in the boost's status, which outlives leaders, and in upstream's two metrics.

mod common;

use std::time::Duration;

use common::*;
use serde_json::{Value, json};
use testbed::memory::MemoryServer;
use tokio::time::sleep;

/// A status is written at most every 2 s, and what changes meanwhile is in the next.
const REPORTED: Duration = Duration::from_secs(5);

fn counts(server: &MemoryServer) -> Value {
    let boost = server.get("startupcpuboosts", NS, "b").expect("the boost");
    let status = &boost["status"];
    json!([
        status["activeContainerBoosts"],
        status["totalContainerBoosts"]
    ])
}

async fn until_counts(server: &MemoryServer, active: u32, total: u32) {
    let what = format!("{active} active, {total} in all");
    until(&what, REPORTED, || counts(server) == json!([active, total])).await;
}

fn with_boost() -> MemoryServer {
    let server = server();
    server.create(boost("b", &until_ready()));
    server
}

#[tokio::test(start_paused = true)]
async fn the_status_and_the_metrics_count_boosted_containers() {
    let server = with_boost();
    let replica = Replica::start(&server, "a");
    let term = replica.lead_and_report();
    until_counts(&server, 0, 0).await;
    server.create(boosted("p", &ready_end()));
    until_counts(&server, 1, 1).await;
    let metrics = replica.metrics.text();
    for line in [
        r#"boost_configurations{namespace="ns"} 1"#,
        r#"boost_containers_active{namespace="ns",boost="b"} 1"#,
        r#"boost_containers_total{namespace="ns",boost="b"} 1"#,
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }

    make_ready(&server, "p");
    until_counts(&server, 0, 1).await;
    let metrics = replica.metrics.text();
    let line = r#"boost_containers_active{namespace="ns",boost="b"} 0"#;
    assert!(metrics.contains(line), "{metrics}");

    server.delete("startupcpuboosts", NS, "b");
    until("its series go away", REPORTED, || {
        !replica.metrics.text().contains(r#"boost="b""#)
    })
    .await;
    term.end().await;
}

#[tokio::test(start_paused = true)]
async fn totals_go_on_under_another_leader() {
    let server = with_boost();
    let (first, second) = (Replica::start(&server, "a"), Replica::start(&server, "b"));
    let term = first.lead_and_report();
    server.create(boosted("p", &ready_end()));
    server.create(boosted("q", &ready_end()));
    until_counts(&server, 2, 2).await;
    make_ready(&server, "p");
    // The end of a term reports what has ended since the last time.
    until_ended(&server, "p", REPORTED).await;
    term.end().await;
    assert!(!first.metrics.text().contains(r#"boost="b""#));

    let term = second.lead_and_report();
    until_counts(&server, 1, 2).await;
    server.create(boosted("r", &ready_end()));
    until_counts(&server, 2, 3).await;
    term.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_ends_while_nobody_leads_is_counted_once() {
    let server = with_boost();
    let replica = Replica::start(&server, "a");
    let term = replica.lead_and_report();
    server.create(boosted("p", &ready_end()));
    until_counts(&server, 1, 1).await;
    drop(term);
    drop(replica);
    make_ready(&server, "p");
    sleep(Duration::from_secs(300)).await;

    let replica = Replica::start(&server, "b");
    let term = replica.lead_and_report();
    until_ended(&server, "p", REPORTED).await;
    until_counts(&server, 0, 1).await;
    // A pod that goes while it is boosted has been boosted all the same.
    server.create(boosted("q", &ready_end()));
    until_counts(&server, 1, 2).await;
    server.delete("pods", NS, "q");
    until_counts(&server, 0, 2).await;
    term.end().await;
}
