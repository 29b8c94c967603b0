//! Laws of the domain, for any pod and any policy.

use std::{collections::BTreeSet, sync::Arc};

use chrono::{DateTime, TimeDelta, Utc};
use headstart::{
    api::{BOOST_KEY, Pod, StartupCPUBoost},
    domain::{
        admission::{Outcome, Settings, admit},
        cpu::Cpu,
        end::EndSettings,
        patch,
        policy::Policy,
        qos::qos_class,
        quantity::MilliCpu,
        record::Record,
        revert::{Decision, decide},
        snapshot::{BoostIndex, Snapshot},
    },
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn now() -> DateTime<Utc> {
    DateTime::from_timestamp(1_796_119_200, 0).expect("a valid instant")
}

/// A quantity as people write it, and sometimes as nobody should.
fn quantity() -> impl Strategy<Value = Option<String>> {
    prop_oneof![
        2 => Just(None),
        4 => (1u32..8_000).prop_map(|milli| Some(format!("{milli}m"))),
        2 => (0u32..64).prop_map(|cores| Some(cores.to_string())),
        1 => prop::sample::select(vec!["0.1", "1e0", "1500u", "1Ki", "0", "+.5", "2.50"])
            .prop_map(|text| Some(text.to_owned())),
    ]
}

fn container(name: &'static str, init: bool) -> impl Strategy<Value = Value> {
    let memory = prop_oneof![Just(None), Just(Some("1Gi")), Just(Some("512Mi"))];
    let restarts = prop::bool::weighted(0.1);
    let sidecar = prop::bool::weighted(if init { 0.6 } else { 0.0 });
    (
        quantity(),
        quantity(),
        any::<bool>(),
        memory.clone(),
        memory,
        restarts,
        sidecar,
    )
        .prop_map(
            move |(request, limit, equal, memory_request, memory_limit, restarts, sidecar)| {
                let limit = if equal { request.clone() } else { limit };
                // The API server refuses a request above its limit before anything else matters.
                let limit =
                    limit.filter(|limit| milli(limit) >= request.as_deref().map_or(0, milli));
                let amounts = |cpu: Option<String>, memory: Option<&str>| {
                    let mut amounts = json!({});
                    if let Some(cpu) = cpu {
                        amounts["cpu"] = cpu.into();
                    }
                    if let Some(memory) = memory {
                        amounts["memory"] = memory.into();
                    }
                    amounts
                };
                let mut container =
                    json!({"name": name, "image": "x", "futureField": {"kept": [1, null]}});
                container["resources"] = json!({
                    "requests": amounts(request, memory_request),
                    "limits": amounts(limit, memory_limit),
                });
                if restarts {
                    container["resizePolicy"] =
                        json!([{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]);
                }
                if sidecar {
                    container["restartPolicy"] = "Always".into();
                }
                container
            },
        )
}

fn pod() -> impl Strategy<Value = Value> {
    let map = prop_oneof![
        Just(None),
        Just(Some(Value::Null)),
        Just(Some(json!({}))),
        Just(Some(json!({"a/b~c": "d"}))),
    ];
    let containers = (
        container("app", false),
        prop::option::of(container("side", false)),
    );
    let init = (
        prop::option::of(container("first", true)),
        prop::option::of(container("mesh", true)),
    );
    (containers, init, map.clone(), map).prop_map(
        |((app, side), (first, mesh), labels, annotations)| {
            let containers: Vec<Value> = std::iter::once(app).chain(side).collect();
            let init: Vec<Value> = first.into_iter().chain(mesh).collect();
            let mut pod = json!({
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "p", "namespace": "ns", "uid": "u", "resourceVersion": "1"},
                "spec": {
                    "containers": containers,
                    "initContainers": init,
                    "nodeName": "n",
                },
            });
            if let Some(labels) = labels {
                pod["metadata"]["labels"] = labels;
            }
            if let Some(annotations) = annotations {
                pod["metadata"]["annotations"] = annotations;
            }
            pod
        },
    )
}

fn policy() -> impl Strategy<Value = Arc<Policy>> {
    let percent = prop_oneof![1i64..2_000, Just(i64::MAX)];
    let target = prop_oneof![
        percent.prop_map(|percent| json!({"percentageIncrease": {"value": percent}})),
        (0u32..6_000, 0u32..6_000).prop_filter_map("something must be raised", |(request, more)| {
            let limits = if more % 3 == 0 { 0 } else { request + more };
            (request + limits > 0).then(|| {
                json!({"fixedResources": {"requests": format!("{request}m"), "limits": format!("{limits}m")}})
            })
        }),
    ];
    let controlled = prop_oneof![
        Just("RequestsAndLimits"),
        Just("RequestsOnly"),
        Just("LimitsOnly")
    ];
    let matcher = prop_oneof![Just(".*"), Just("^app$"), Just("side|mesh")];
    let entry = (target, controlled, matcher, any::<bool>()).prop_map(
        |(target, controlled, matcher, sidecars)| {
            let mut entry = target;
            entry["controlledValues"] = controlled.into();
            entry["matchContainers"] =
                json!({"type": "RegexName", "value": matcher, "includeSidecars": sidecars});
            entry
        },
    );
    prop::collection::vec(entry, 1..3).prop_map(|entries| {
        let boost: StartupCPUBoost = serde_json::from_value(json!({
            "metadata": {"name": "b", "namespace": "ns"},
            "spec": {
                "resourcePolicy": {"containerPolicies": entries},
                "durationPolicy": {"fixedDuration": {"unit": "Seconds", "value": 60}},
            },
        }))
        .expect("a boost of ours");
        Arc::new(Policy::compile("b", now(), &boost).expect("it compiles"))
    })
}

fn settings() -> impl Strategy<Value = Settings> {
    any::<bool>().prop_map(|remove_limits| Settings {
        remove_limits,
        ..Settings::default()
    })
}

fn milli(text: &str) -> u64 {
    text.parse::<MilliCpu>().map_or(0, MilliCpu::milli)
}

fn read(pod: &Value) -> Pod {
    serde_json::from_value(pod.clone()).expect("a pod of ours")
}

fn snapshot(policy: &Arc<Policy>) -> Snapshot {
    let policies = [("ns".to_owned(), Arc::clone(policy))];
    Snapshot {
        boosts: Arc::new(BoostIndex::new(policies)),
        ..Snapshot::default()
    }
}

fn cpus(pod: &Pod) -> Vec<Cpu> {
    pod.all_containers().map(Cpu::of).collect()
}

/// The pod as the webhook's answer leaves it.
fn boosted(pod: &Value, policy: &Arc<Policy>, settings: Settings) -> (Value, Outcome) {
    let typed = read(pod);
    let admission = admit(&snapshot(policy), settings, "ns", &typed, now());
    let mut after = pod.clone();
    json_patch::patch(&mut after, &patch::admission(&typed, &admission))
        .expect("the patch applies");
    (after, admission.outcome)
}

/// The paths at which two values differ.
fn differences(before: &Value, after: &Value, path: &str, found: &mut BTreeSet<String>) {
    match (before, after) {
        (Value::Object(a), Value::Object(b)) => {
            for key in a.keys().chain(b.keys()) {
                let (a, b) = (
                    a.get(key).unwrap_or(&Value::Null),
                    b.get(key).unwrap_or(&Value::Null),
                );
                differences(a, b, &format!("{path}/{key}"), found);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (index, (a, b)) in a.iter().zip(b).enumerate() {
                differences(a, b, &format!("{path}/{index}"), found);
            }
        }
        (before, after) if before != after => {
            found.insert(path.to_owned());
        }
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 250, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_answer_touches_cpu_and_marks_only(pod in pod(), policy in policy(), settings in settings()) {
        let (after, outcome) = boosted(&pod, &policy, settings);
        let mut changed = BTreeSet::new();
        differences(&pod, &after, "", &mut changed);
        prop_assert_eq!(changed.is_empty(), outcome != Outcome::Boosted, "{:?}", changed);
        for path in changed {
            let is_cpu = path.starts_with("/spec/") && path.ends_with("/cpu");
            let is_mark = path.starts_with("/metadata/labels") || path.starts_with("/metadata/annotations");
            prop_assert!(is_cpu || is_mark, "{} was changed", path);
            prop_assert!(!path.contains("a/b~c"), "a foreign label was changed");
        }
    }

    #[test]
    fn nothing_is_lowered_and_the_class_stays(pod in pod(), policy in policy(), settings in settings()) {
        let (after, _) = boosted(&pod, &policy, settings);
        let (before, after) = (read(&pod), read(&after));
        for (old, new) in cpus(&before).iter().zip(cpus(&after)) {
            prop_assert!(new.request >= old.request, "a request was lowered: {:?} to {:?}", old, new);
            prop_assert_eq!(new.request.is_some(), old.request.is_some(), "a request came or went");
            match (old.limit, new.limit) {
                (Some(old), Some(new)) => prop_assert!(new >= old, "a limit was lowered"),
                (None, Some(_)) => prop_assert!(false, "a limit was added"),
                _ => {}
            }
            if let (Some(request), Some(limit)) = (new.request, new.limit) {
                prop_assert!(request <= limit, "a request is above its limit: {:?}", new);
            }
        }
        let class = |pod: &Pod| qos_class(pod, |index| cpus(pod)[index]);
        prop_assert_eq!(class(&before), class(&after));
    }

    #[test]
    fn a_second_pass_changes_nothing(pod in pod(), policy in policy(), settings in settings()) {
        let (once, _) = boosted(&pod, &policy, settings);
        let (twice, _) = boosted(&once, &policy, settings);
        prop_assert_eq!(once, twice);
    }

    #[test]
    fn a_boost_and_its_revert_are_the_identity(pod in pod(), policy in policy(), settings in settings()) {
        let (after, outcome) = boosted(&pod, &policy, settings);
        if outcome != Outcome::Boosted {
            return Ok(());
        }
        let mut typed = read(&after);
        typed.metadata.generation = Some(1);
        typed.status.start_time = Some(now());
        let early = decide(&typed, None, settings.end, now() + TimeDelta::seconds(59));
        prop_assert_eq!(early, Decision::Wait(Some(now() + TimeDelta::seconds(60))));

        let due = now() + TimeDelta::seconds(60);
        let Decision::Revert(revert) = decide(&typed, None, settings.end, due) else {
            return Err(TestCaseError::fail("it is not reverted when it is due"));
        };
        let mut reverted = after.clone();
        let body = patch::resize(&typed, &revert);
        for list in ["containers", "initContainers"] {
            for entry in body["spec"][list].as_array().into_iter().flatten() {
                let containers = reverted["spec"][list].as_array_mut().expect("a list");
                let container = containers.iter_mut().find(|container| container["name"] == entry["name"]);
                json_patch::merge(container.expect("one of the pod's"), entry);
            }
        }
        let (original, back) = (read(&pod), read(&reverted));
        prop_assert_eq!(cpus(&original), cpus(&back));
        let Decision::Finish(finish) = decide(&back, None, settings.end, due) else {
            return Err(TestCaseError::fail("it is not finished once it is reverted"));
        };
        let body = patch::finish(&back, &finish);
        prop_assert_eq!(&body["metadata"]["labels"][BOOST_KEY], &Value::Null);
    }

    #[test]
    fn a_record_is_read_as_it_was_written(pod in pod(), policy in policy(), settings in settings()) {
        let admission = admit(&snapshot(&policy), settings, "ns", &read(&pod), now());
        if let Some(record) = admission.record {
            let text = record.text();
            prop_assert_eq!(Record::read(&text), Ok(record));
        }
    }

    #[test]
    fn any_annotation_is_read_or_refused(text in "\\PC{0,200}") {
        let _ = Record::read(&text);
    }

    #[test]
    fn any_record_only_lowers(
        pod in pod(),
        state in prop_oneof![Just("Active"), Just("Reverted"), Just("?")],
        originals in prop::collection::btree_map(prop_oneof![Just("app"), Just("side"), Just("mesh"), Just("ghost")], quantity(), 0..4),
        set in prop::collection::btree_map(prop_oneof![Just("app"), Just("side")], quantity(), 0..3),
        after_seconds in 0i64..10_000,
    ) {
        let map = |values: std::collections::BTreeMap<&str, Option<String>>| {
            values.into_iter().map(|(name, value)| (name.to_owned(), json!(value.unwrap_or_default()))).collect::<serde_json::Map<_, _>>()
        };
        let record = json!({"state": state, "initCPURequests": map(originals.clone()), "initCPULimits": map(originals), "boostedCPURequests": map(set.clone()), "boostedCPULimits": map(set)});
        let mut pod = pod;
        pod["metadata"]["annotations"] = json!({BOOST_KEY: record.to_string()});
        pod["metadata"]["labels"] = json!({BOOST_KEY: "b"});
        let mut typed = read(&pod);
        typed.status.start_time = Some(now());
        if let Decision::Revert(revert) = decide(&typed, None, EndSettings::default(), now() + TimeDelta::seconds(after_seconds)) {
            for container in revert.containers {
                let old = Cpu::of(typed.container(&container.name).expect("one of the pod's"));
                if let Some(to) = container.to.request {
                    prop_assert!(old.request.is_some_and(|old| to < old), "{:?} to {:?}", old, container.to);
                }
                if let Some(to) = container.to.limit {
                    prop_assert!(old.limit.is_none_or(|old| to < old), "{:?} to {:?}", old, container.to);
                    let request = container.to.request.or(old.request).unwrap_or_default();
                    prop_assert!(to >= request, "a limit under its request: {:?}", container.to);
                }
            }
        }
    }
}
