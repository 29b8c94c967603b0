//! Marks that somebody takes away or destroys: the boost ends all the same wherever there is anything left to go by, and
//! where there is nothing, the pod is left alone and people are told.

mod common;

use common::*;
use serde_json::{Value, json};
use testbed::memory::{Fault, MemoryServer};
use tokio::time::sleep;

fn with_boost() -> MemoryServer {
    let server = server();
    server.create(boost("b", &until_ready()));
    server
}

/// A ReplicaSet whose template says `app 250m/500m`.
fn replica_set() -> Value {
    json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "web", "namespace": NS}, "spec": {
        "template": {"spec": {"containers": [{"name": "app", "image": "x", "resources": cpu("250m", "500m")}]}}}})
}

/// The boosted pod of [`boosted`], owned by the ReplicaSet.
fn owned(server: &MemoryServer, name: &str) -> Value {
    let owner = server.create(replica_set());
    let mut pod = boosted(name, &ready_end());
    pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web",
        "controller": true, "uid": owner["metadata"]["uid"]}]);
    pod
}

fn without_label(server: &MemoryServer, name: &str) {
    server.update("pods", NS, name, |pod| {
        let labels = pod["metadata"]["labels"].as_object_mut();
        labels.expect("labels").remove(KEY);
    });
}

fn with_annotation(server: &MemoryServer, name: &str, text: Option<&str>) {
    server.update("pods", NS, name, |pod| {
        let annotations = pod["metadata"]["annotations"].as_object_mut();
        let annotations = annotations.expect("annotations");
        match text {
            Some(text) => annotations.insert(KEY.to_owned(), text.into()),
            None => annotations.remove(KEY),
        };
    });
}

/// Reasons of the Events about a pod, sorted.
fn reasons(server: &MemoryServer, name: &str) -> Vec<String> {
    let events = server.list("events");
    let about = events
        .iter()
        .filter(|event| event["regarding"]["name"] == name);
    let mut reasons: Vec<_> = about
        .filter_map(|event| event["reason"].as_str().map(str::to_owned))
        .collect();
    reasons.sort();
    reasons
}

#[tokio::test(start_paused = true)]
async fn d27_a_boost_whose_label_is_removed_ends_when_it_is_due() {
    let server = with_boost();
    let replica = Replica::start(&server, "a");
    let _term = replica.lead();
    server.create(boosted("p", &ready_end()));
    sleep(secs(2)).await;
    without_label(&server, "p");
    sleep(secs(30)).await;
    assert!(!is_ended(&stored(&server, "p")), "it is not due");
    make_ready(&server, "p");
    until_ended(&server, "p", secs(6)).await;
    let writes: Vec<_> = told(&server)
        .into_iter()
        .filter(|request| request.starts_with("PATCH"))
        .collect();
    assert_eq!(writes, ["PATCH resize 200", "PATCH finish 200"]);
}

#[tokio::test(start_paused = true)]
async fn d27_a_label_that_was_lost_while_nobody_watched_is_found_by_the_scan() {
    let server = with_boost();
    for index in 0..3 {
        server.create(pod(&format!("plain-{index}")));
    }
    server.create(boosted("p", &ready_end()));
    make_ready(&server, "p");
    without_label(&server, "p");
    let replica = Replica::start(&server, "a");
    let _term = replica.lead();
    until_ended(&server, "p", secs(70)).await;
    assert_eq!(pod_writes(&server).len(), 2);
    // Nothing more, and no other pod is read.
    server.clear_requests();
    sleep(secs(600)).await;
    assert_eq!(told(&server), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn d26_without_both_marks_a_pod_is_forgotten() {
    let server = with_boost();
    let replica = Replica::start(&server, "a");
    let _term = replica.lead();
    server.create(boosted("p", &ready_end()));
    sleep(secs(2)).await;
    server.update("pods", NS, "p", |pod| {
        pod["metadata"]["labels"] = json!({"app": "a"});
        pod["metadata"]["annotations"] = json!({});
    });
    make_ready(&server, "p");
    sleep(secs(600)).await;
    assert!(pod_writes(&server).is_empty());
}

#[tokio::test(start_paused = true)]
async fn d28_and_d29_a_lost_record_is_repaired_from_the_owners_template() {
    for annotation in [None, Some("oops")] {
        let server = with_boost();
        let replica = Replica::start(&server, "a");
        let _term = replica.lead();
        let pod = owned(&server, "p");
        server.create(pod);
        with_annotation(&server, "p", annotation);
        sleep(secs(10)).await;
        assert!(pod_writes(&server).is_empty(), "it is not due");
        make_ready(&server, "p");
        until_ended(&server, "p", secs(2)).await;
        let pod = stored(&server, "p");
        let record: Value = serde_json::from_str(record_of(&pod)).expect("a record");
        assert_eq!(record["endedBy"], "Condition");
        assert_eq!(record["initCPURequests"], json!({"app": "250m"}));
        assert_eq!(record["boost"], "b");
        assert_eq!(pod_writes(&server).len(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn d30_a_bare_pod_with_an_unreadable_record_is_left_and_reported() {
    let server = with_boost();
    let replica = Replica::start(&server, "a");
    let _term = replica.lead_and_report();
    server.create(boosted("p", &ready_end()));
    with_annotation(&server, "p", Some("oops"));
    make_ready(&server, "p");
    sleep(secs(600)).await;
    assert!(pod_writes(&server).is_empty());
    assert_eq!(record_of(&stored(&server, "p")), "oops");
    assert!(is_claimed(&stored(&server, "p")));
    assert_eq!(reasons(&server, "p"), ["Unreadable"]);
    let line = r#"headstart_boosts_stuck_total{reason="Unreadable"} 1"#;
    let metrics = replica.metrics.text();
    assert!(metrics.contains(line), "{metrics}");
    let boost = server.get("startupcpuboosts", NS, "b").expect("the boost");
    let conditions = boost["status"]["conditions"].as_array().expect("a list");
    let stuck = conditions.iter().find(|it| it["type"] == "Stuck");
    assert_eq!(stuck.expect("a condition")["reason"], "Unreadable");
}

fn limit_range() -> Value {
    json!({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "later", "namespace": NS},
        "spec": {"limits": [{"type": "Container", "default": {"cpu": "1", "memory": "128Mi"}}]}})
}

#[tokio::test(start_paused = true)]
async fn e31_and_e32_a_resize_that_would_bring_defaults_is_not_sent() {
    let server = with_boost();
    let replica = Replica::start(&server, "a");
    let _term = replica.lead();
    let mut pod = boosted("p", &ready_end());
    let side =
        json!({"name": "side", "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}}});
    pod["spec"]["containers"]
        .as_array_mut()
        .expect("a list")
        .push(side);
    server.create(pod);
    server.create(limit_range());
    sleep(secs(1)).await;
    make_ready(&server, "p");
    sleep(secs(300)).await;
    let effective = |server: &MemoryServer| {
        let mut writes = pod_writes(server);
        writes.retain(|request| !request.is_dry_run());
        writes.len()
    };
    assert_eq!(effective(&server), 0);
    assert!(is_claimed(&stored(&server, "p")));
    assert_eq!(reasons(&server, "p"), ["LimitRangeDefaults"]);
    let tries = pod_writes(&server).len();
    assert!((3..=6).contains(&tries), "{tries} tries in five minutes");

    server.delete("limitranges", NS, "later");
    until("it is reverted", secs(95), || {
        !is_claimed(&stored(&server, "p"))
    })
    .await;
    let pod = stored(&server, "p");
    assert_eq!(
        pod["spec"]["containers"][0]["resources"],
        cpu("250m", "500m")
    );
    assert_eq!(
        pod["spec"]["containers"][1]["resources"]["limits"],
        Value::Null
    );
    assert_eq!(effective(&server), 2);
}

#[tokio::test(start_paused = true)]
async fn defaults_that_change_nothing_do_not_hold_up_a_revert() {
    let server = with_boost();
    let mut range = limit_range();
    range["spec"]["limits"][0]["default"] = json!({"cpu": "1"});
    server.create(range);
    let replica = Replica::start(&server, "a");
    let _term = replica.lead();
    sleep(secs(1)).await;
    server.create(boosted("p", &ready_end()));
    make_ready(&server, "p");
    until_ended(&server, "p", secs(1)).await;
    // The pod has what the default would give: nothing had to be tried first.
    assert_eq!(pod_writes(&server).len(), 2);
}

#[tokio::test(start_paused = true)]
async fn e10_a_missing_right_is_told_once_and_tried_slowly() {
    let server = with_boost();
    let forbidden = server.fault(Fault::on("PATCH", "/pods/*/resize").always().reply(
        403,
        "Forbidden",
        r#"pods "p" is forbidden: User "u" cannot patch resource "pods/resize" in API group """#,
    ));
    let first = Replica::start(&server, "a");
    let term = first.lead_and_report();
    server.create(boosted("p", &ready_end()));
    make_ready(&server, "p");
    sleep(secs(200)).await;
    assert_eq!(reasons(&server, "p"), ["MissingRight"]);
    let tries = pod_writes(&server).len();
    assert!((2..=4).contains(&tries), "{tries} tries in 200 s");
    term.end().await;

    // The next leader says nothing that was said.
    let second = Replica::start(&server, "b");
    let term = second.lead_and_report();
    sleep(secs(30)).await;
    assert_eq!(reasons(&server, "p"), ["MissingRight"]);
    let stuck = |server: &MemoryServer| {
        let boost = server.get("startupcpuboosts", NS, "b").expect("the boost");
        let conditions = boost["status"]["conditions"].as_array().cloned();
        let mut conditions = conditions.unwrap_or_default().into_iter();
        conditions.find(|it| it["type"] == "Stuck")
    };
    assert_eq!(stuck(&server).expect("a condition")["status"], "True");
    server.lift(forbidden);
    until_ended(&server, "p", secs(95)).await;
    sleep(secs(5)).await;
    assert_eq!(stuck(&server).expect("a condition")["status"], "False");
    assert_eq!(reasons(&server, "p"), ["BoostEnded", "MissingRight"]);
    term.end().await;
}
