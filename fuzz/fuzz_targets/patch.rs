//! Pods with a structure, through a whole boost: admitted, admitted again, reverted, finished.
#![no_main]

use headstart::{
    api::{BOOST_KEY, Pod},
    domain::{
        admission::{Admission, Outcome, Settings},
        cpu::Cpu,
        patch,
        revert::Decision,
        snapshot::Snapshot,
    },
};
use headstart_fuzz::{admission, check, compile, look, now, settings, shapes, snapshot};
use libfuzzer_sys::{
    arbitrary::{self, Arbitrary},
    fuzz_target,
};
use serde_json::{Value, json};

use chrono::{DateTime, TimeDelta, Utc};

#[derive(Arbitrary, Debug)]
struct Case {
    pod: shapes::Pod,
    policies: Vec<shapes::ContainerPolicy>,
    remove_limits: bool,
}

fuzz_target!(|case: Case| {
    let Ok(policy) = compile("b", 0, shapes::boost(&case.policies)) else {
        return;
    };
    let (snapshot, settings) = (snapshot([policy]), settings(case.remove_limits));
    let before = case.pod.value();
    // Some amounts are no text: then it is no pod, and the webhook says so.
    let Ok(pod) = serde_json::from_value::<Pod>(before.clone()) else {
        return;
    };
    let (admission, after) = admit(&snapshot, settings, &before, now());
    lawful(&before, &after, &admission);
    let (_, again) = admit(&snapshot, settings, &after, now() + TimeDelta::seconds(60));
    assert_eq!(
        undated(&after),
        undated(&again),
        "a second pass changes the pod"
    );
    let originals: Vec<Cpu> = admission
        .containers
        .iter()
        .map(|decision| decision.from)
        .collect();
    // The API server refuses a pod with a request above its limit.
    let valid = check::is_valid(&pod) && originals.iter().all(|cpu| check::is_within_limit(*cpu));
    if admission.outcome == Outcome::Boosted && valid {
        assert!(carried(&pod) || originals == check::cpus(&pod));
        reverts(after, &originals);
    }
});

fn carried(pod: &Pod) -> bool {
    pod.record_text().is_some()
}

/// The decision, and the pod as the webhook's answer leaves it.
fn admit(
    snapshot: &Snapshot,
    settings: Settings,
    before: &Value,
    at: DateTime<Utc>,
) -> (Admission, Value) {
    let pod = check::read(before);
    let admission = admission(snapshot, settings, &pod, at);
    let mut after = before.clone();
    json_patch::patch(&mut after, &patch::admission(&pod, &admission)).expect("the patch applies");
    (admission, after)
}

fn lawful(before: &Value, after: &Value, admission: &Admission) {
    check::only_cpu_and_marks_differ(before, after);
    let (before, after) = (check::read(before), check::read(after));
    if !carried(&before) {
        check::nothing_is_lowered(&before, &after);
        check::class_is_kept(&before, &after);
    }
    if admission.outcome == Outcome::Boosted {
        assert_eq!(after.claim(), Some("b"));
        assert!(after.record_text().is_some());
        check::record_is_kept(&after);
    }
}

/// A pod without the time at which its record was made.
fn undated(pod: &Value) -> Value {
    let mut pod = pod.clone();
    let annotation = pod["metadata"]["annotations"].get_mut(BOOST_KEY);
    if let Some(annotation) = annotation
        && let Some(Ok(mut record)) = annotation.as_str().map(serde_json::from_str::<Value>)
        && record.is_object()
    {
        record["timestamp"] = Value::Null;
        *annotation = record.to_string().into();
    }
    pod
}

/// Once the pod is Ready it gets back what it asked for, and is finished.
fn reverts(mut pod: Value, originals: &[Cpu]) {
    pod["spec"]["nodeName"] = "n".into();
    pod["metadata"]["generation"] = 1.into();
    let since = now().to_rfc3339();
    pod["status"] = json!({"phase": "Running", "conditions": [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": since},
        {"type": "Ready", "status": "True", "lastTransitionTime": since},
    ]});
    let boosted = check::read(&pod);
    let Decision::Revert(revert) = look(&boosted, now()) else {
        panic!("it is not reverted when it is Ready");
    };
    check::revert_only_lowers(&boosted, &revert);
    let reverted = check::resized(&pod, &patch::resize(&boosted, &revert.containers));
    check::only_cpu_and_marks_differ(&pod, &reverted);
    let reverted = check::read(&reverted);
    assert_eq!(
        check::cpus(&reverted),
        originals,
        "a revert gives back something else"
    );
    check::class_is_kept(&boosted, &reverted);
    let Decision::Finish(_) = look(&reverted, now()) else {
        panic!("it is not finished once it is reverted");
    };
}
