//! Any text, as the annotation of a pod: read or refused, and whatever it says, it only lowers.
#![no_main]

use chrono::TimeDelta;
use headstart::{
    api::{BOOST_KEY, Pod},
    domain::{
        end::EndedBy,
        patch,
        record::{Loan, LoanValue, MAX_BYTES, Record, Set, State},
        revert::{Decision, Finish},
    },
};
use headstart_fuzz::{check, look, now};
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, json};

fuzz_target!(|text: &str| {
    for values in [
        Values::AsSet,
        Values::Original,
        Values::Other,
        Values::Absent,
    ] {
        look_at(text, values);
    }
    if let Ok(record) = Record::read(text) {
        reads_again(&record);
        keeps_fields(&record);
    }
});

/// What the containers of a pod have, compared with what its record says of them.
#[derive(Clone, Copy)]
enum Values {
    AsSet,
    Original,
    Other,
    Absent,
}

fn reads_again(record: &Record) {
    let text = record.text();
    if text.len() > MAX_BYTES {
        return; // numbers and escapes may be longer in print
    }
    let again = Record::read(&text).expect("it reads again");
    assert_eq!(&again, record);
}

/// An ended record has all that it had, but for the state.
fn keeps_fields(record: &Record) {
    let ended = record.ended(EndedBy::Condition, now());
    assert_eq!(ended.state, State::Reverted);
    let (mut before, mut after) = (fields(record), fields(&ended));
    assert_eq!(after["state"], "Reverted");
    assert_eq!(after["endedBy"], "Condition");
    for field in ["state", "endedTimestamp", "endedBy"] {
        before.remove(field);
        after.remove(field);
    }
    assert_eq!(before, after);
}

fn fields(record: &Record) -> Map<String, Value> {
    serde_json::from_str(&record.text()).expect("a record is an object")
}

/// Looks at a pod with that record, while it waits for a node, when it is Ready, and much later.
fn look_at(text: &str, values: Values) {
    let waiting = pod(text, values);
    let mut ready = waiting.clone();
    ready["spec"]["nodeName"] = "n".into();
    let mut scheduled = ready.clone();
    scheduled["status"] = json!({
        "phase": "Running",
        "startTime": now().to_rfc3339(),
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": now().to_rfc3339()},
            {"type": "Ready", "status": "True", "lastTransitionTime": now().to_rfc3339()},
        ],
    });
    for value in [waiting, ready, scheduled] {
        let pod = check::read(&value);
        for seconds in [0, 3600, 40 * 86_400] {
            judge(&pod, &look(&pod, now() + TimeDelta::seconds(seconds)));
        }
    }
}

fn judge(pod: &Pod, decision: &Decision) {
    match decision {
        Decision::Revert(revert) => check::revert_only_lowers(pod, revert),
        Decision::Finish(finish) => marks_only(pod, finish),
        Decision::Raise(_) | Decision::Wait(_) | Decision::Watch(_) | Decision::Leave(_) => {}
    }
}

/// The finish touches our label and our annotation.
fn marks_only(pod: &Pod, finish: &Finish) {
    let mut body = patch::finish(pod, finish);
    let labels = json!({BOOST_KEY: null});
    assert_eq!(body["metadata"]["labels"], labels);
    let metadata = body["metadata"].as_object_mut().expect("an object");
    for precondition in ["uid", "resourceVersion", "labels"] {
        assert!(metadata.remove(precondition).is_some(), "no {precondition}");
    }
    for (key, value) in metadata.iter() {
        assert_eq!(key, "annotations");
        let keys: Vec<_> = value.as_object().expect("a map").keys().collect();
        assert_eq!(keys, [BOOST_KEY]);
    }
    assert_eq!(body.as_object().map(Map::len), Some(1));
}

/// A pod with the containers that a record names (but for every third), and one that it doesn't.
fn pod(text: &str, values: Values) -> Value {
    let loans = Record::read(text)
        .map(|record| record.containers)
        .unwrap_or_default();
    let named = loans
        .into_iter()
        .enumerate()
        .filter(|(index, _)| index % 3 != 2);
    let (mut containers, mut init) = (vec![json!({"name": "bystander/"})], Vec::new());
    for (index, (name, loan)) in named {
        let container =
            json!({"name": name, "resources": resources(loan.unwrap_or_default(), values)});
        if index % 3 == 1 {
            init.push(container)
        } else {
            containers.push(container)
        }
    }
    json!({
        "metadata": {
            "uid": "u",
            "resourceVersion": "1",
            "labels": {BOOST_KEY: "b"},
            "annotations": {BOOST_KEY: text},
        },
        "spec": {"containers": containers, "initContainers": init},
    })
}

fn resources(loan: Loan, values: Values) -> Value {
    let cpu = |value: Option<LoanValue>| match (values, value) {
        (Values::Absent, _) | (_, None) => json!({}),
        (Values::Original, Some(value)) => json!({"cpu": value.original.to_string()}),
        (Values::Other, Some(_)) => json!({"cpu": "1234567m"}),
        (Values::AsSet, Some(value)) => match value.set {
            Set::To(cpu) => json!({"cpu": cpu.to_string()}),
            Set::Removed => json!({}),
            Set::Untouched | Set::Unrecorded => json!({"cpu": value.original.to_string()}),
        },
    };
    json!({"requests": cpu(loan.request), "limits": cpu(loan.limit)})
}
