//! Boosts of pods that run already, in process: after a restart, and late where admission has missed a pod. What is proved
//! here: the order of the writes, that a crash at any of them leaves nothing boosted and nothing half done, and that a
//! restart is boosted once. (When a restart counts is for the cases of group G.)

mod common;

use std::time::Duration;

use common::*;
use headstart::api::BoostStatus;
use serde_json::{Value, json};
use testbed::memory::{Fault, MemoryServer, Recorded, Resize};
use tokio::time::sleep;

const RESIZE: &str = "/pods/*/resize";
/// The path of the writes of claim and record.
const MARKS: &str = "/pods/*";
/// How long after its record a raise may come.
const BEGINS: Duration = Duration::from_secs(30);

/// The pod `p` whose boost by `b` has ended, a minute after the server's start.
async fn rested(server: &MemoryServer) {
    server.create(boost("b", &until_ready()));
    server.create(boosted("p", &ready_end()));
    let first = raising(server, "first");
    let term = first.lead();
    sleep_until_second(server, 20.0).await;
    make_ready(server, "p");
    until("the first boost has ended", secs(2), || {
        is_resting(&stored(server, "p"))
    })
    .await;
    term.end().await;
    drop(first);
    sleep_until_second(server, 60.0).await;
    server.clear_requests();
}

fn is_boosted(pod: &Value) -> bool {
    *cpu_of(pod) == cpu("380m", "750m")
        && is_claimed(pod)
        && record_of(pod).contains(r#""state":"Active""#)
}

/// The requests about the pod in words, tries apart: `try 200`, `PATCH finish 200`.
fn in_words(server: &MemoryServer) -> Vec<String> {
    let words = |request: &Recorded| {
        let (write, _) = write_of(request)?;
        let write = if request.is_dry_run() { "try" } else { write };
        Some(format!("{write} {}", request.status))
    };
    server.requests().iter().filter_map(words).collect()
}

/// `headstart_raises_total` of this cause and result.
fn raises(replica: &Replica, cause: &str, result: &str) -> u64 {
    let series = format!(r#"headstart_raises_total{{cause="{cause}",result="{result}"}}"#);
    counted(&replica.metrics.text(), &series)
}

/// The reasons of the Events about the pod `p`, in the order of their times.
fn reasons(server: &MemoryServer) -> Vec<String> {
    let mut events = server.list("events");
    events.sort_by_key(|event| event["eventTime"].to_string());
    let reasons = events.iter().filter_map(|event| event["reason"].as_str());
    reasons.map(str::to_owned).collect()
}

async fn until_boosted(server: &MemoryServer, deadline: Duration) {
    until("it is boosted", deadline, || {
        is_boosted(&stored(server, "p"))
    })
    .await;
}

async fn until_resting(server: &MemoryServer, deadline: Duration) {
    until("its boost has ended", deadline, || {
        is_resting(&stored(server, "p"))
    })
    .await;
}

// === after a restart ===

#[tokio::test(start_paused = true)]
async fn a_restart_is_boosted_by_another_leader_in_three_steps() {
    let server = server();
    rested(&server).await;
    // While nobody leads.
    restart(&server);
    let replica = raising(&server, "second");
    let _term = replica.lead();
    until_boosted(&server, secs(2)).await;
    sleep(secs(60)).await;
    assert_eq!(in_words(&server), ["try 200", "finish 200", "resize 200"]);
    assert_eq!(raises(&replica, "Restart", "Ok"), 1);

    make_ready(&server, "p");
    until_resting(&server, secs(2)).await;
    sleep(secs(7200)).await;
    assert_eq!(in_words(&server)[3..], ["resize 200", "finish 200"]);
    assert_eq!(
        reasons(&server),
        ["BoostEnded", "Boosted", "BoostEnded"],
        "and no more"
    );
}

/// Many restarts of one pod in one term: what was remembered of a boost must not slow the next.
#[tokio::test(start_paused = true)]
async fn restarts_are_boosted_again_and_again() {
    let server = server();
    rested(&server).await;
    let replica = raising(&server, "second");
    let _term = replica.lead();
    for _ in 0..20 {
        sleep(secs(60)).await;
        restart(&server);
        until_boosted(&server, secs(1)).await;
        sleep(secs(40)).await;
        make_ready(&server, "p");
        until_resting(&server, secs(1)).await;
    }
    assert_eq!(raises(&replica, "Restart", "Ok"), 20);
    let key = (NS.to_owned(), "b".to_owned());
    let counted = replica.tally.of(&key, &BoostStatus::default());
    assert_eq!(counted, Some((0, 20)));
}

/// The process dies before a write, or after it and before its answer: each of them in turn.
#[tokio::test(start_paused = true)]
async fn a_crash_at_any_write_leaves_nothing_boosted() {
    for (path, dry_run) in [(RESIZE, true), (MARKS, false), (RESIZE, false)] {
        for lands in [false, true] {
            let server = server();
            rested(&server).await;
            let fault = Fault::on("PATCH", path).hang();
            let fault = if lands { fault.lost_answer() } else { fault };
            server.fault(fault.when(move |request| request.is_dry_run() == dry_run));
            let crashing = raising(&server, "crashing");
            let term = crashing.lead();
            restart(&server);
            sleep(secs(1)).await;
            drop((term, crashing));
            server.clear_faults();

            let replica = raising(&server, "next");
            let _term = replica.lead();
            let what = format!("{path} dry run {dry_run}, lands {lands}");
            let was_claimed = path == MARKS && lands || path == RESIZE && !dry_run;
            if was_claimed {
                sleep(secs(10)).await;
                assert!(!is_resting(&stored(&server, "p")), "{what}: too early");
            } else {
                // Nothing had been written: the next leader does it all.
                until_boosted(&server, secs(2)).await;
                sleep(BEGINS).await;
                make_ready(&server, "p");
            }
            if path == RESIZE && !dry_run && lands {
                assert!(is_boosted(&stored(&server, "p")), "{what}");
                sleep(BEGINS).await;
                make_ready(&server, "p");
            }
            until_resting(&server, BEGINS + secs(3)).await;
            // Whatever became of it, this restart is not boosted another time.
            let before = in_words(&server).len();
            sleep(secs(7200)).await;
            assert_eq!(in_words(&server).len(), before, "{what}");
        }
    }
}

/// The kubelet writes the status of a pod that is starting again and again.
#[tokio::test(start_paused = true)]
async fn a_status_in_between_does_not_cost_the_boost() {
    let server = server();
    rested(&server).await;
    let fault = Fault::on("PATCH", RESIZE).when(|request| !request.is_dry_run());
    server.fault(fault.times(3).before(|server| {
        server.update("pods", NS, "p", |pod| {
            let seen = pod["status"]["seen"].as_u64().unwrap_or(0);
            pod["status"]["seen"] = json!(seen + 1);
        });
    }));
    let replica = raising(&server, "second");
    let _term = replica.lead();
    restart(&server);
    until_boosted(&server, secs(2)).await;
    let conflicts = ["resize 409", "resize 409", "resize 409", "resize 200"];
    assert_eq!(in_words(&server)[2..], conflicts);
}

/// Somebody else sets values between the record and the resize: theirs stand.
#[tokio::test(start_paused = true)]
async fn a_change_in_between_costs_the_boost() {
    let server = server();
    rested(&server).await;
    let fault = Fault::on("PATCH", RESIZE).when(|request| !request.is_dry_run());
    server.fault(fault.before(|server| {
        server.update("pods", NS, "p", |pod| {
            pod["spec"]["containers"][0]["resources"] = cpu("100m", "200m");
        });
    }));
    let replica = raising(&server, "second");
    let _term = replica.lead();
    restart(&server);
    sleep(secs(4000)).await;
    let pod = stored(&server, "p");
    assert_eq!(*cpu_of(&pod), cpu("100m", "200m"));
    assert!(record_of(&pod).contains(r#""state":"Reverted""#), "{pod}");
    assert_eq!(raises(&replica, "Restart", "Conflict"), 1);
}

#[tokio::test(start_paused = true)]
async fn what_only_the_resize_is_refused_is_given_up_too() {
    let server = server();
    rested(&server).await;
    let fault = Fault::on("PATCH", RESIZE).when(|request| !request.is_dry_run());
    server.fault(fault.reply(403, "Forbidden", "exceeded quota: q"));
    let replica = raising(&server, "second");
    let _term = replica.lead();
    restart(&server);
    sleep(secs(10)).await;
    until_resting(&server, BEGINS).await;
    sleep(secs(7200)).await;
    let words = ["try 200", "finish 200", "resize 403", "finish 200"];
    assert_eq!(in_words(&server), words);
    assert!(reasons(&server).contains(&"Refused".to_owned()));
}

/// What the kubelet says of the raise is no trouble in taking it back.
#[tokio::test(start_paused = true)]
async fn a_node_without_room_gets_it_back_at_once() {
    for resize in [Resize::Deferred, Resize::Infeasible] {
        let server = server();
        rested(&server).await;
        set_kubelet(&server, resize);
        let replica = raising(&server, "second");
        let _term = replica.lead();
        restart(&server);
        until("it was tried", secs(2), || {
            in_words(&server).contains(&"resize 200".to_owned())
        })
        .await;
        let lowered = || *cpu_of(&stored(&server, "p")) == cpu("250m", "500m");
        until("it is lowered", secs(1), lowered).await;
        // There is room for what it had.
        set_kubelet(&server, Resize::Actuate);
        until_resting(&server, BEGINS + secs(1)).await;
        assert!(record_of(&stored(&server, "p")).contains(r#""endedBy":"Unschedulable""#));
        sleep(secs(7200)).await;
        assert_eq!(raises(&replica, "Restart", "Ok"), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn two_leaders_boost_a_restart_once() {
    let server = server();
    rested(&server).await;
    let replicas = ["a", "b"].map(|name| raising(&server, name));
    let _terms = replicas.each_ref().map(Replica::lead);
    sleep(secs(1)).await;
    restart(&server);
    until_boosted(&server, secs(2)).await;
    sleep(secs(60)).await;
    let raised = in_words(&server);
    let raised = raised.iter().filter(|word| *word == "resize 200").count();
    assert_eq!(raised, 1, "{:?}", in_words(&server));
    make_ready(&server, "p");
    until_resting(&server, secs(5)).await;
    sleep(secs(7200)).await;
    assert!(is_resting(&stored(&server, "p")));
}

#[tokio::test(start_paused = true)]
async fn without_the_flag_claims_go_and_nothing_is_raised() {
    let server = server();
    rested(&server).await;
    let replica = Replica::start(&server, "plain");
    let _term = replica.lead();
    until_ended(&server, "p", secs(2)).await;
    restart(&server);
    sleep(secs(7200)).await;
    assert_eq!(in_words(&server), ["finish 200"]);
}

/// That is no trouble with taking anything back.
#[tokio::test(start_paused = true)]
async fn what_fails_for_a_while_is_tried_again_and_nobody_is_told() {
    let server = server();
    rested(&server).await;
    let fault = Fault::on("PATCH", RESIZE).when(Recorded::is_dry_run);
    server.fault(fault.times(8).reply(500, "InternalError", "out of order"));
    let replica = raising(&server, "second");
    let _term = replica.lead();
    restart(&server);
    until_boosted(&server, secs(120)).await;
    assert_eq!(raises(&replica, "Restart", "Ok"), 1);
    sleep(secs(10)).await;
    assert_eq!(reasons(&server), ["BoostEnded", "Boosted"]);
}

// === missed by admission ===

/// A pod as it is when nobody answered for it: on a node, and not started.
fn missed(server: &MemoryServer, namespace: &str) {
    let mut pod = boosted("p", &ready_end());
    pod["metadata"]["namespace"] = namespace.into();
    pod["metadata"]["labels"] = json!({"app": "a"});
    pod["metadata"]["annotations"] = json!({});
    pod["spec"]["containers"][0]["resources"] = cpu("250m", "500m");
    pod["status"]["containerStatuses"] = json!([]);
    pod["status"]["phase"] = "Pending".into();
    set_condition(
        &mut pod,
        "PodScheduled",
        "True",
        &server.clock().timestamp(),
    );
    server.create(pod);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_admission_missed_is_boosted_late() {
    let server = server();
    server.create(boost("b", &until_ready()));
    let replica = raising(&server, "a");
    let _term = replica.lead();
    sleep(secs(10)).await;
    missed(&server, NS);
    until_boosted(&server, secs(2)).await;
    assert!(record_of(&stored(&server, "p")).contains(r#""cause":"Late""#));
    assert_eq!(in_words(&server), ["try 200", "finish 200", "resize 200"]);
    sleep(BEGINS).await;
    make_ready(&server, "p");
    until_resting(&server, secs(2)).await;
    assert_eq!(raises(&replica, "Late", "Ok"), 1);
    assert_eq!(raises(&replica, "Restart", "Ok"), 0);
}

/// Those that run already when a leader comes are found by one list.
#[tokio::test(start_paused = true)]
async fn a_new_leader_finds_those_that_run_already() {
    let server = server();
    server.create(boost("b", &until_ready()));
    sleep(secs(10)).await;
    missed(&server, NS);
    server.update("pods", NS, "p", |pod| {
        pod["status"]["phase"] = "Running".into();
    });
    let replica = raising(&server, "a");
    let _term = replica.lead();
    until_boosted(&server, secs(2)).await;
}

#[tokio::test(start_paused = true)]
async fn what_nobody_missed_is_left_alone() {
    let server = server();
    // Nobody is asked for these, and the boost came later than the last.
    missed(&server, "kube-system");
    missed(&server, "ns-own");
    missed(&server, NS);
    sleep(secs(5)).await;
    for namespace in ["kube-system", "ns-own", NS] {
        let mut boost = boost("b", &until_ready());
        boost["metadata"]["namespace"] = namespace.into();
        server.create(boost);
    }
    let replica = raising(&server, "a");
    let _term = replica.lead();
    sleep(secs(7200)).await;
    assert_eq!(in_words(&server), [""; 0]);
}

/// One try, and it runs on with what it has.
#[tokio::test(start_paused = true)]
async fn a_late_boost_for_which_there_is_no_room_is_tried_once() {
    let server = server();
    server.create(boost("b", &until_ready()));
    let replica = raising(&server, "a");
    let _term = replica.lead();
    let refusal = "node didn't have enough allocatable resources: cpu";
    let fault = Fault::on("PATCH", RESIZE).always();
    server.fault(fault.reply(403, "Forbidden", refusal));
    sleep(secs(10)).await;
    missed(&server, NS);
    sleep(secs(10)).await;
    // It goes on starting.
    server.update("pods", NS, "p", |pod| {
        pod["status"]["podIP"] = "10.0.0.1".into();
    });
    sleep(secs(7200)).await;
    assert_eq!(in_words(&server), ["try 403"]);
    assert_eq!(raises(&replica, "Late", "Refused"), 1);
    assert_eq!(reasons(&server), ["Refused"]);
}
