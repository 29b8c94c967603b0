//! The end of a boost, in process: the caches, the sweeper and its writes against an API server in memory, in virtual
//! time. What is proved here: which requests go out and when, what each failure leads to, and that every boost ends.
//! (Which decision is right for which pod is the domain's own tests' matter.)

mod common;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use chrono::{SecondsFormat, TimeDelta};
use common::*;
use headstart::domain::policy::BoostKind;
use serde_json::{Value, json};
use testbed::memory::{Fault, MemoryServer, Recorded, Resize};
use tokio::time::sleep;

/// The longest pause after a failure that may pass by itself, with the longest jitter and a look.
const LONGEST_BACKOFF: Duration = Duration::from_millis(45_100);
/// The same after one that somebody has to mend.
const SLOW_RETRY: Duration = Duration::from_millis(90_100);
const RESIZE: &str = "/pods/*/resize";
const FINISH: &str = "/pods/*";

/// The words for the two writes of a boost's end, as [`told`] has them.
const BOTH: [&str; 2] = ["PATCH resize 200", "PATCH finish 200"];

/// A leading replica and one boosted pod `p`, which is not Ready.
async fn one_pod(end: &Value) -> (MemoryServer, Replica, Term) {
    let server = server();
    server.create(boosted("p", end));
    let replica = Replica::start(&server, "a");
    let term = replica.lead();
    until("the claims have been listed", secs(1), || {
        replica.claims.synced()
    })
    .await;
    (server, replica, term)
}

/// The same with the boost `b` that the record names.
async fn one_pod_and_its_boost(duration: &Value, end: &Value) -> (MemoryServer, Replica, Term) {
    let (server, replica, term) = one_pod(end).await;
    server.create(boost("b", duration));
    (server, replica, term)
}

/// Asserts that the two writes came and nothing else, whenever one looks.
async fn assert_only_both(server: &MemoryServer) {
    sleep(secs(2 * 3600)).await;
    assert_eq!(told(server), BOTH);
}

/// The `endedBy` of the pod's record.
fn ended_by(server: &MemoryServer) -> String {
    let pod = stored(server, "p");
    let record: Value = serde_json::from_str(record_of(&pod)).expect("a record");
    record["endedBy"].as_str().unwrap_or_default().to_owned()
}

// === the two writes ===

#[tokio::test(start_paused = true)]
async fn a_ready_pod_takes_exactly_two_writes() {
    let (server, _replica, _term) = one_pod_and_its_boost(&until_ready(), &ready_end()).await;
    sleep_until_second(&server, 20.0).await;
    assert_eq!(told(&server), [""; 0], "nothing is due yet");

    let versions = Arc::new(Mutex::new(Vec::new()));
    for path in [RESIZE, FINISH] {
        let versions = Arc::clone(&versions);
        server.fault(Fault::on("PATCH", path).before(move |server| {
            let mut versions = versions.lock().expect("no test has panicked");
            versions.push(version(server, "p"));
        }));
    }
    let ready_at = make_ready(&server, "p");
    until_ended(&server, "p", secs(1)).await;
    assert_only_both(&server).await;

    let uid = stored(&server, "p")["metadata"]["uid"].clone();
    let versions = versions.lock().expect("no test has panicked");
    let record = ended(&record(&ready_end()), &ready_at, "Condition");
    let writes = pod_writes(&server);
    assert_eq!(
        writes[0].content_type.as_deref(),
        Some("application/strategic-merge-patch+json")
    );
    assert_eq!(
        writes[0].body,
        Some(json!({
            "metadata": {"uid": uid, "resourceVersion": versions[0]},
            "spec": {"containers": [{"name": "app", "resources": cpu("250m", "500m")}]},
        }))
    );
    assert_eq!(
        writes[1].content_type.as_deref(),
        Some("application/merge-patch+json")
    );
    assert_eq!(
        writes[1].body,
        Some(json!({"metadata": {
            "uid": uid, "resourceVersion": versions[1], "labels": {KEY: null}, "annotations": {KEY: record},
        }}))
    );
    assert!(
        writes[1].at >= writes[0].at + ACTUATION,
        "finished once the resize was done"
    );
    let pod = stored(&server, "p");
    assert_eq!(pod["metadata"]["labels"], json!({"app": "a"}));
    assert_eq!(record_of(&pod), record);
}

#[tokio::test(start_paused = true)]
async fn a_fixed_duration_and_the_deadline_end_at_their_instant() {
    for (end, due, by) in [
        (fixed_end(60), 60.0, "FixedDuration"),
        (ready_end(), 3600.0, "Deadline"),
    ] {
        let (server, _replica, _term) = one_pod(&end).await;
        sleep_until_second(&server, due - 0.1).await;
        assert_eq!(told(&server), [""; 0], "{by}: too early");
        sleep_until_second(&server, due + 0.1).await;
        assert_eq!(told(&server), ["PATCH resize 200"], "{by}: too late");
        until_ended(&server, "p", secs(1)).await;
        assert_eq!(ended_by(&server), by);
        assert_only_both(&server).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_deleted_boost_cuts_nothing_short_and_its_pods_end_by_their_records() {
    let (server, _replica, _term) = one_pod_and_its_boost(&until_ready(), &ready_end()).await;
    sleep_until_second(&server, 10.0).await;
    server.delete("startupcpuboosts", NS, "b");
    sleep_until_second(&server, 20.0).await;
    assert_eq!(told(&server), [""; 0]);
    make_ready(&server, "p");
    until_ended(&server, "p", secs(1)).await;
    assert_only_both(&server).await;
}

#[tokio::test(start_paused = true)]
async fn an_edited_boost_is_decided_anew_and_its_timer_set_again() {
    // From 60 s to this many, edited after that many: due then.
    for (edited, at, due) in [(600, 30.0, 600.0), (40, 30.0, 40.0), (30, 40.0, 40.0)] {
        let (server, _replica, _term) =
            one_pod_and_its_boost(&for_seconds(60), &fixed_end(60)).await;
        sleep_until_second(&server, at).await;
        server.update("startupcpuboosts", NS, "b", |boost| {
            boost["spec"]["durationPolicy"] = for_seconds(edited);
        });
        if due > at {
            sleep_until_second(&server, due - 0.1).await;
            assert_eq!(told(&server), [""; 0], "60 s to {edited} s: too early");
        }
        sleep_until_second(&server, due + 0.1).await;
        assert_eq!(
            told(&server),
            ["PATCH resize 200"],
            "60 s to {edited} s: too late"
        );
        until_ended(&server, "p", secs(1)).await;
        assert_eq!(ended_by(&server), "FixedDuration");
    }
}

#[tokio::test(start_paused = true)]
async fn values_that_somebody_else_set_stay_and_the_boost_ends_as_superseded() {
    let (server, _replica, _term) = one_pod(&fixed_end(60)).await;
    sleep_until_second(&server, 10.0).await;
    server.update("pods", NS, "p", |pod| {
        pod["spec"]["containers"][0]["resources"] = cpu("700m", "1400m");
        pod["status"]["observedGeneration"] = pod["metadata"]["generation"].clone();
    });
    sleep_until_second(&server, 59.9).await;
    assert_eq!(told(&server), [""; 0]);
    until("the claim is gone", secs(1), || {
        !is_claimed(&stored(&server, "p"))
    })
    .await;
    assert_eq!(ended_by(&server), "Superseded");
    sleep(secs(2 * 3600)).await;
    assert_eq!(told(&server), ["PATCH finish 200"], "never a resize");
    assert_eq!(*cpu_of(&stored(&server, "p")), cpu("700m", "1400m"));
}

/// A VPA, say, that wants the very values that we set.
#[tokio::test(start_paused = true)]
async fn values_that_are_put_back_each_time_make_no_race() {
    let (server, _replica, _term) = one_pod(&fixed_end(60)).await;
    server.fault(
        Fault::on("PATCH", "/pods/*/resize")
            .always()
            .after(|server| {
                server.update("pods", NS, "p", |pod| {
                    pod["spec"]["containers"][0]["resources"] = cpu("380m", "750m");
                });
            }),
    );
    sleep_until_second(&server, 60.0 + 600.0).await;
    let writes = server.writes().len();
    assert!((2..=20).contains(&writes), "{writes} writes in ten minutes");
    assert!(is_claimed(&stored(&server, "p")));
}

#[tokio::test(start_paused = true)]
async fn terminating_pods_are_left_alone() {
    let (server, replica, _term) = one_pod(&fixed_end(60)).await;
    sleep_until_second(&server, 10.0).await;
    server.terminate("pods", NS, "p");
    make_ready(&server, "p");
    sleep_until_second(&server, 2.0 * 3600.0).await;
    let pod = server.delete("pods", NS, "p").expect("it was there");
    let uid = pod["metadata"]["uid"].as_str().expect("a uid");
    until("the cache has forgotten it", secs(1), || {
        replica.claims.get(uid).is_none()
    })
    .await;
    assert_eq!(told(&server), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn records_that_cannot_be_read_are_never_written_over_and_hold_up_nobody() {
    let server = server();
    let mut overwritten = boosted("overwritten", &fixed_end(60));
    overwritten["metadata"]["annotations"][KEY] = "oops".into();
    let mut removed = boosted("removed", &fixed_end(60));
    removed["metadata"]["annotations"] = Value::Null;
    for pod in [overwritten, removed, boosted("p", &fixed_end(60))] {
        server.create(pod);
    }
    let before = ["overwritten", "removed"].map(|name| stored(&server, name));
    let replica = Replica::start(&server, "a");
    let _term = replica.lead();

    until_ended(&server, "p", secs(61)).await;
    assert_only_both(&server).await;
    assert_eq!(
        ["overwritten", "removed"].map(|name| stored(&server, name)),
        before
    );
}

// === conflicts, and pods that are gone ===

#[tokio::test(start_paused = true)]
async fn after_a_conflict_the_pod_is_read_and_decided_again() {
    let (server, _replica, _term) = one_pod(&ready_end()).await;
    // The watch lags, so that only a read can tell what has changed.
    server.fault(Fault::on("WATCH", "/pods").always().delay(secs(30)));
    server.close_watches();
    server.fault(Fault::on("PATCH", RESIZE).before(|server| {
        server.update("pods", NS, "p", |pod| {
            pod["metadata"]["annotations"]["note"] = "new".into();
        });
    }));
    sleep(secs(31)).await;
    make_ready(&server, "p");
    until_ended(&server, "p", secs(60)).await;

    assert_eq!(
        told(&server)[..3],
        ["PATCH resize 409", "GET 200", "PATCH resize 200"]
    );
    let [first, second] = [0, 1].map(|i| pod_writes(&server)[i].body.clone());
    assert_ne!(first, second, "never the same body unseen");
}

#[tokio::test(start_paused = true)]
async fn after_a_conflict_what_was_read_may_say_that_nothing_is_due() {
    let (server, _replica, _term) = one_pod(&ready_end()).await;
    server.fault(Fault::on("PATCH", RESIZE).before(|server| {
        server.update("pods", NS, "p", |pod| {
            set_condition(pod, "Ready", "False", "2026-12-01T10:00:10Z");
        });
    }));
    sleep_until_second(&server, 10.0).await;
    make_ready(&server, "p");
    sleep_until_second(&server, 3599.9).await;
    assert_eq!(told(&server), ["PATCH resize 409", "GET 200"]);
    until_ended(&server, "p", secs(1)).await;
    assert_eq!(ended_by(&server), "Deadline");
}

#[tokio::test(start_paused = true)]
async fn after_a_conflict_with_a_leader_that_has_finished_nothing_is_left_to_do() {
    let (server, _replica, _term) = one_pod(&ready_end()).await;
    server.fault(Fault::on("PATCH", FINISH).before(|server| {
        server.update("pods", NS, "p", |pod| {
            let record = ended(record_of(pod), SCHEDULED, "Condition");
            pod["metadata"]["annotations"][KEY] = record.into();
            pod["metadata"]["labels"] = json!({"app": "a"});
        });
    }));
    make_ready(&server, "p");
    sleep(secs(2 * 3600)).await;
    assert_eq!(
        told(&server),
        ["PATCH resize 200", "PATCH finish 409", "GET 200"]
    );
}

/// Puts another pod in the place of `p`, as a StatefulSet does.
fn replace(server: &MemoryServer) {
    server.delete("pods", NS, "p");
    server.create(boosted("p", &ready_end()));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_gone_is_forgotten_and_its_namesake_looked_at_for_itself() {
    let uid = r#"Pod "p" is invalid: metadata.uid: Invalid value: "u": field is immutable"#;
    for path in [RESIZE, FINISH] {
        for (code, reason, message) in [
            (404, "NotFound", r#"pods "p" not found"#),
            (410, "Gone", "gone"),
            (422, "Invalid", uid),
        ] {
            let (server, _replica, _term) = one_pod(&ready_end()).await;
            // The watch does not tell for a while, so that the answer alone says it.
            server.fault(Fault::on("WATCH", "/pods").delay(secs(620)));
            let fault = Fault::on("PATCH", path).reply(code, reason, message);
            server.fault(fault.before(|server| {
                server.close_watches();
                replace(server);
            }));
            make_ready(&server, "p");
            sleep(secs(600)).await;
            let refused: Vec<_> = told(&server);
            assert_eq!(
                refused.last().map(String::as_str),
                Some(&*format!(
                    "PATCH {} {code}",
                    if path == RESIZE { "resize" } else { "finish" }
                )),
                "forgotten"
            );

            server.clear_requests();
            sleep(secs(60)).await;
            assert_eq!(told(&server), [""; 0], "the new pod is not due");
            make_ready(&server, "p");
            until_ended(&server, "p", secs(1)).await;
            assert_only_both(&server).await;
            let uid = stored(&server, "p")["metadata"]["uid"].clone();
            for write in pod_writes(&server) {
                assert_eq!(write.body.expect("a body")["metadata"]["uid"], uid);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_namesake_met_by_a_conflict_is_not_written_to() {
    for path in [RESIZE, FINISH] {
        let (server, _replica, _term) = one_pod(&ready_end()).await;
        server.fault(Fault::on("PATCH", path).before(replace));
        make_ready(&server, "p");
        sleep(secs(600)).await;
        let told = told(&server);
        assert!(
            told[told.len() - 2].ends_with("409") && told[told.len() - 1] == "GET 200",
            "the server compares versions first: {told:?}"
        );
        assert!(is_claimed(&stored(&server, "p")), "the new pod is boosted");
    }
}

// === failures that pass ===

/// What meets a request, by name.
fn passing_faults(path: &str) -> Vec<(&'static str, Fault)> {
    let on = || Fault::on("PATCH", path);
    vec![
        ("500", on().reply(500, "InternalError", "etcd is away")),
        ("503", on().reply(503, "ServiceUnavailable", "away")),
        ("reset", on().reset()),
        ("hang", on().hang()),
        ("lost answer", on().lost_answer()),
        ("lost answer and a hang", on().hang().lost_answer()),
    ]
}

#[tokio::test(start_paused = true)]
async fn after_a_failure_that_may_pass_the_pod_is_read_before_it_is_written_to() {
    for path in [RESIZE, FINISH] {
        for (name, fault) in passing_faults(path) {
            let (server, _replica, _term) = one_pod(&ready_end()).await;
            server.fault(fault);
            make_ready(&server, "p");
            until_ended(&server, "p", secs(10)).await;
            sleep(secs(2 * 3600)).await;

            let told = told(&server);
            let effective = |write: &str| told.iter().filter(|told| *told == write).count();
            assert_eq!(BOTH.map(effective), [1, 1], "{name} on {path}: {told:?}");
            let writes = told.iter().filter(|told| told.starts_with("PATCH")).count();
            assert!(writes <= 3, "{name} on {path}: {told:?}");
            // The write after the failed one, if there is one, comes after a look.
            let failed = usize::from(path == FINISH);
            assert!(
                told[failed + 1..]
                    .first()
                    .is_none_or(|next| next == "GET 200"),
                "{name} on {path}: {told:?}"
            );
        }
    }
}

/// The pauses between these requests.
fn pauses(requests: &[Recorded]) -> Vec<Duration> {
    requests
        .windows(2)
        .map(|pair| pair[1].at.saturating_sub(pair[0].at))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_met_with_growing_pauses_and_then_the_boost_ends() {
    for (name, fault) in passing_faults(RESIZE) {
        if name.contains("lost") {
            continue;
        }
        let (server, _replica, _term) = one_pod(&ready_end()).await;
        let fault = server.fault(fault.always());
        make_ready(&server, "p");
        sleep(secs(300)).await;

        let pauses = pauses(&pod_writes(&server));
        assert!((8..=20).contains(&pauses.len()), "{name}: {pauses:?}");
        assert!(
            pauses[..7].is_sorted(),
            "{name}: doubling beats the jitter: {pauses:?}"
        );
        assert!(
            pauses[8..].iter().all(|pause| *pause >= secs(30)),
            "{name}: {pauses:?}"
        );
        assert!(is_claimed(&stored(&server, "p")), "{name}");

        server.lift(fault);
        until_ended(&server, "p", LONGEST_BACKOFF + secs(6)).await;
        assert_eq!(ended_by(&server), "Condition");
    }
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_kept_to() {
    for path in [RESIZE, FINISH] {
        let (server, _replica, _term) = one_pod(&ready_end()).await;
        server.fault(Fault::on("PATCH", path).retry_after(3));
        make_ready(&server, "p");
        until_ended(&server, "p", secs(6)).await;

        let about_pods = |request: &Recorded| request.path.contains("/pods/");
        let requests: Vec<_> = server.requests().into_iter().filter(about_pods).collect();
        let throttled = requests
            .iter()
            .position(|request| request.status == 429)
            .expect("one was throttled");
        let pause = pauses(&requests)[throttled];
        assert!(
            (secs(3)..secs(5)).contains(&pause),
            "{path}: next request after {pause:?}"
        );
    }
}

// === failures that somebody has to mend ===

#[tokio::test(start_paused = true)]
async fn a_refusal_is_tried_again_once_a_minute_until_its_cause_is_gone() {
    let cases = [
        (
            403,
            r#"pods "p" is forbidden: User "u" cannot patch resource "pods/resize" in API group """#,
            0,
        ),
        (
            403,
            r#"pods "p" is forbidden: maximum cpu usage per Container is 1, but limit is 2"#,
            0,
        ),
        (403, "admission webhook \"w\" denied the request: no", 0),
        (
            422,
            r#"Pod "p" is invalid: spec: Invalid value: "Burstable": Pod QOS Class may not change as a result of resizing"#,
            0,
        ),
        // A kubelet may not have reported resources yet, so a few tries come quickly.
        (
            422,
            r#"Pod "p" is invalid: spec: Forbidden: Pod running on node without support for resize"#,
            5,
        ),
    ];
    for (code, message, quick) in cases {
        let (server, _replica, _term) = one_pod(&ready_end()).await;
        let refusal = Fault::on("PATCH", RESIZE).always();
        let fault = server.fault(refusal.reply(code, "Refused", message));
        make_ready(&server, "p");
        sleep(secs(900)).await;

        let tries = pod_writes(&server);
        let pauses = pauses(&tries);
        assert!(
            pauses[..quick].iter().all(|pause| *pause < secs(10)),
            "{message}: {pauses:?}"
        );
        assert!(
            pauses[quick..].iter().all(|pause| *pause >= secs(60)),
            "{message}: {pauses:?}"
        );
        assert!(
            pauses.len() >= 8,
            "{message}: it is not given up: {pauses:?}"
        );
        let pod = stored(&server, "p");
        assert!(is_claimed(&pod) && record_of(&pod) == record(&ready_end()));

        server.lift(fault);
        until_ended(&server, "p", SLOW_RETRY + secs(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_resize_that_the_node_does_not_do_is_watched_and_not_called_done() {
    for reaction in [
        Resize::Deferred,
        Resize::Infeasible,
        Resize::Error("cgroup is read-only".to_owned()),
        Resize::Never,
    ] {
        let (server, _replica, _term) = one_pod(&ready_end()).await;
        set_kubelet(&server, reaction.clone());
        make_ready(&server, "p");
        sleep(secs(2 * 3600)).await;
        assert_eq!(told(&server), ["PATCH resize 200"], "{reaction:?}");
        assert!(is_claimed(&stored(&server, "p")));

        set_kubelet(&server, Resize::Actuate);
        until_ended(&server, "p", secs(1)).await;
        assert_only_both(&server).await;
    }
}

// === terms ===

#[tokio::test(start_paused = true)]
async fn after_a_crash_between_the_writes_the_next_leader_only_finishes() {
    let (server, replica, term) = one_pod(&ready_end()).await;
    let cut_off = server.fault(Fault::on("PATCH", FINISH).who("a").always().hang());
    make_ready(&server, "p");
    until("the finish is under way", secs(1), || {
        pod_writes(&server).len() == 2
    })
    .await;
    drop((replica, term));
    server.lift(cut_off);
    server.clear_requests();

    let replica = Replica::start(&server, "b");
    let _term = replica.lead();
    until_ended(&server, "p", secs(1)).await;
    sleep(secs(2 * 3600)).await;
    assert_eq!(told(&server), ["PATCH finish 200"]);
}

/// Many pods whose boosts of 60 s ended up to 900 s before the server's start, in no order of their names. Returns the
/// names, the most overdue first.
fn overdue(server: &MemoryServer, count: u32) -> Vec<String> {
    let mut pods = Vec::new();
    for i in 0..count {
        let overdue = i * 7919 % count * 3;
        let name = format!("p{i:03}");
        let scheduled = server.now() - TimeDelta::seconds(i64::from(overdue) + 60);
        let scheduled = scheduled.to_rfc3339_opts(SecondsFormat::Secs, true);
        let mut pod = boosted(&name, &fixed_end(60));
        set_condition(&mut pod, "PodScheduled", "True", &scheduled);
        server.create(pod);
        pods.push((std::cmp::Reverse(overdue), name));
    }
    pods.sort();
    pods.into_iter().map(|(_, name)| name).collect()
}

/// Makes every resize take this long, and counts how many are under way at once, now and at most.
fn slow_resizes(server: &MemoryServer, delay: Duration) -> Arc<[AtomicUsize; 2]> {
    let counts: Arc<[AtomicUsize; 2]> = Arc::default();
    let [arriving, answered] = [Arc::clone(&counts), Arc::clone(&counts)];
    let arrives = move |_: &Recorded| {
        let now = arriving[0].fetch_add(1, SeqCst) + 1;
        arriving[1].fetch_max(now, SeqCst);
        true
    };
    let fault = Fault::on("PATCH", RESIZE).always().delay(delay);
    server.fault(fault.when(arrives).after(move |_| {
        answered[0].fetch_sub(1, SeqCst);
    }));
    counts
}

#[tokio::test(start_paused = true)]
async fn a_term_begins_with_the_most_overdue_and_thirty_two_at_once() {
    let server = server();
    let names = overdue(&server, 300);
    let under_way = slow_resizes(&server, Duration::from_millis(100));
    let replica = Replica::start(&server, "a");
    let _term = replica.lead();
    until("all boosts have ended", secs(30), || {
        server.list("pods").iter().all(is_ended)
    })
    .await;

    let writes = pod_writes(&server);
    let resized: Vec<_> = writes
        .iter()
        .filter_map(write_of)
        .filter(|(write, _)| *write == "resize")
        .map(|(_, name)| name)
        .collect();
    assert_eq!(resized, names, "the most overdue first");
    assert_eq!(writes.len(), 600, "two writes a boost");
    let resizes_first = writes[..300]
        .iter()
        .all(|write| write_of(write).is_some_and(|(write, _)| write == "resize"));
    assert!(resizes_first, "marks wait while CPU is lent");
    assert_eq!(under_way[1].load(SeqCst), 32, "at most, and used");
}

#[tokio::test(start_paused = true)]
async fn a_term_that_ends_in_a_burst_writes_nothing_more() {
    let server = server();
    overdue(&server, 300);
    slow_resizes(&server, Duration::from_millis(100));
    let replica = Replica::start(&server, "a");
    let term = replica.lead();
    until("the burst is on", secs(5), || {
        pod_writes(&server).len() > 100
    })
    .await;
    let end = server.clock().elapsed();
    term.end().await;
    sleep(secs(600)).await;
    let writes = pod_writes(&server);
    let late: Vec<_> = writes.iter().filter(|write| write.at > end).collect();
    assert!(late.is_empty(), "{late:?}");
    assert!(
        writes.iter().all(|write| write.status == 200),
        "those under way were waited for"
    );

    // What is left is the next term's.
    let _term = replica.lead();
    until("all boosts have ended", secs(30), || {
        server.list("pods").iter().all(is_ended)
    })
    .await;
    assert_eq!(pod_writes(&server).len(), 600);
}

#[tokio::test(start_paused = true)]
async fn a_term_that_ends_between_the_writes_leaves_the_second_to_the_next() {
    // A pod without a node has no kubelet to wait for: there the second write follows at once.
    let server = server();
    let mut pending = boosted("p", &ready_end());
    pending["spec"]
        .as_object_mut()
        .expect("an object")
        .remove("nodeName");
    pending["status"] = json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False",
        "reason": "Unschedulable", "lastTransitionTime": SCHEDULED}]});
    server.create(pending);
    slow_resizes(&server, Duration::from_millis(100));
    let replica = Replica::start(&server, "a");
    let term = replica.lead();
    sleep_until_second(&server, 29.9).await;
    assert_eq!(told(&server), [""; 0], "it may still find a node");
    until("the resize is under way", secs(1), || {
        pod_writes(&server).len() == 1
    })
    .await;
    term.end().await;
    sleep(secs(600)).await;
    assert_eq!(told(&server), ["PATCH resize 200"]);

    let _term = replica.lead();
    until_ended(&server, "p", secs(1)).await;
    assert_eq!(ended_by(&server), "Unschedulable");
    assert_only_both(&server).await;
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_lags_behind_our_own_writes_makes_no_hot_loop() {
    let (server, _replica, _term) = one_pod(&fixed_end(60)).await;
    sleep_until_second(&server, 50.0).await;
    // From here on the cache learns nothing: watches are taken and stay silent.
    server.fault(Fault::on("WATCH", "/pods").always().hang());
    server.close_watches();
    sleep_until_second(&server, 75.0).await;
    assert!(
        is_ended(&stored(&server, "p")),
        "reading tells it all the same"
    );
    let requests = |server: &MemoryServer| {
        let told = told(server);
        let writes = told.iter().filter(|told| told.starts_with("PATCH"));
        assert_eq!(writes.count(), 2, "{told:?}");
        told.len()
    };
    assert!(requests(&server) <= 4, "{:?}", told(&server));
    sleep_until_second(&server, 660.0).await;
    let reads = requests(&server) - 2;
    assert!(
        reads <= 61,
        "a read every 10 s at most, not {reads} in 10 min"
    );
}

// === boosts that cannot be read ===

#[tokio::test(start_paused = true)]
async fn without_a_crd_the_records_decide_and_boosts_count_once_it_is_there() {
    let server = server();
    server.remove_kind("startupcpuboosts");
    server.create(boosted("p", &ready_end()));
    make_ready(&server, "p");
    let replica = Replica::start(&server, "a");
    let _term = replica.lead();
    until_ended(&server, "p", secs(1)).await;
    let known = || {
        let index = replica.boosts.index();
        index.is_some_and(|all| all.named(BoostKind::Namespaced, NS, "b").is_some())
    };
    assert!(replica.boosts.synced() && !known());

    sleep_until_second(&server, 120.0).await;
    server.add_kind("startupcpuboosts");
    server.create(boost("b", &until_ready()));
    until("the boost counts", secs(30), known).await;
    let asked = server.requests();
    let asked = asked
        .iter()
        .filter(|request| request.path.ends_with("/startupcpuboosts"));
    assert!((6..=20).contains(&asked.count()), "every 10 to 20 s");
}

#[tokio::test(start_paused = true)]
async fn a_term_waits_five_seconds_for_boosts_that_do_not_come() {
    let server = server();
    server.create(boosted("p", &ready_end()));
    make_ready(&server, "p");
    server.fault(Fault::on("LIST", "/startupcpuboosts").always().hang());
    let replica = Replica::start(&server, "a");
    let _term = replica.lead();
    sleep_until_second(&server, 4.9).await;
    assert_eq!(
        told(&server),
        [""; 0],
        "the boost's present rule may be another"
    );
    sleep_until_second(&server, 5.2).await;
    assert_eq!(told(&server), ["PATCH resize 200"]);
}

#[tokio::test(start_paused = true)]
async fn a_crd_that_is_removed_ends_no_boost_early_and_admits_none() {
    let (server, replica, _term) = one_pod_and_its_boost(&until_ready(), &ready_end()).await;
    let known = || {
        let index = replica.boosts.index();
        index.is_some_and(|all| all.named(BoostKind::Namespaced, NS, "b").is_some())
    };
    until("the boost is known", secs(1), known).await;
    sleep_until_second(&server, 10.0).await;
    server.remove_kind("startupcpuboosts");
    until("no new pod is boosted", secs(1), || !known()).await;
    assert!(replica.boosts.synced(), "none, which is not unknown");
    sleep_until_second(&server, 300.0).await;
    assert_eq!(told(&server), [""; 0]);
    make_ready(&server, "p");
    until_ended(&server, "p", secs(1)).await;

    server.add_kind("startupcpuboosts");
    server.create(boost("b", &until_ready()));
    until("the boost counts again", secs(30), known).await;
}
