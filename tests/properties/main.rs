//! Laws of the domain: for any pod, any boosts, and anything that bounds them.
//!
//! [`naive`] says what the API server's own plugins would say, so that no law is judged by the code that it is about.

mod naive;
mod scene;

use std::collections::BTreeMap;

use chrono::TimeDelta;
use headstart::{
    api::{BOOST_KEY, Pod},
    domain::{
        admission::{Outcome, Settings, admit},
        cpu::Cpu,
        end::EndSettings,
        patch, raise,
        reason::Reason,
        record::{BoostRef, MAX_BYTES, Record, Set},
        revert::{Decision, decide},
    },
};
use proptest::prelude::*;
use scene::{NS, Scene, now, read, scene};
use serde_json::{Value, json};
use testbed::generate::Choices;

/// The key as a JSON Pointer has it.
const ESCAPED: &str = "autoscaling.x-k8s.io~1startup-cpu-boost";

fn cpus(pod: &Value) -> Vec<Cpu> {
    let pod: Pod = read(pod);
    pod.all_containers().map(Cpu::of).collect()
}

/// What is left of a pod without CPU values and marks.
fn rest(pod: &Value) -> Value {
    let mut pod = pod.clone();
    for map in ["labels", "annotations"] {
        without(&mut pod["metadata"], map, BOOST_KEY);
    }
    for list in ["containers", "initContainers"] {
        for container in pod["spec"][list].as_array_mut().into_iter().flatten() {
            let resources = &mut container["resources"];
            without(resources, "requests", "cpu");
            without(resources, "limits", "cpu");
            if *resources == json!({}) {
                *resources = Value::Null;
            }
        }
    }
    pod
}

/// Removes a key from a map, and the map where it is empty then, null or missing.
fn without(of: &mut Value, map: &str, key: &str) {
    let Some(of) = of.as_object_mut() else { return };
    if let Some(Value::Object(entries)) = of.get_mut(map) {
        entries.shift_remove(key);
        if !entries.is_empty() {
            return;
        }
    }
    of.shift_remove(map);
}

/// Whether an operation is one of those that a patch may have.
fn is_allowed(operation: &Value) -> bool {
    let path = operation["path"].as_str().expect("it has a path");
    let tokens: Vec<&str> = path.split('/').skip(1).collect();
    match tokens[..] {
        ["metadata", "labels" | "annotations", key] => key == ESCAPED,
        ["metadata", "labels" | "annotations"] => is_whole(operation, BOOST_KEY),
        [
            "spec",
            "containers" | "initContainers",
            _,
            "resources",
            "requests" | "limits",
            key,
        ] => key == "cpu",
        [
            "spec",
            "containers" | "initContainers",
            _,
            "resources",
            "requests" | "limits",
        ] => is_whole(operation, "cpu"),
        _ => false,
    }
}

/// Whether it adds a map with this key alone.
fn is_whole(operation: &Value, key: &str) -> bool {
    let value = operation["value"].as_object();
    operation["op"] == "add"
        && value.is_some_and(|map| map.len() == 1 && map.get(key).is_some_and(Value::is_string))
}

/// The reverted pod, by the sweeper's own decision and body.
fn reverted(boosted: &Value, settings: Settings) -> Result<Value, TestCaseError> {
    let typed = running(boosted);
    // The deadline is not above this.
    let due = now() + TimeDelta::days(1);
    let Decision::Revert(revert) = decide(&typed, None, settings.end, due) else {
        return Err(TestCaseError::fail("it is not reverted when it is due"));
    };
    Ok(merged(boosted, &patch::resize(&typed, &revert.containers)))
}

/// The pod after a resize with this body.
fn merged(pod: &Value, body: &Value) -> Value {
    let mut after = pod.clone();
    for list in ["containers", "initContainers"] {
        for entry in body["spec"][list].as_array().into_iter().flatten() {
            let containers = after["spec"][list].as_array_mut().expect("a list");
            let mut containers = containers.iter_mut();
            let container = containers.find(|container| container["name"] == entry["name"]);
            json_patch::merge(container.expect("one of the pod's"), entry);
        }
    }
    after
}

fn running(pod: &Value) -> Pod {
    let mut pod: Pod = read(pod);
    pod.metadata.generation = Some(1);
    pod.spec.node_name = Some("n".to_owned());
    pod.status.start_time = Some(now());
    pod
}

/// What validation and LimitRanger say of a pod.
fn judge(scene: &Scene, pod: &Value) -> Result<(), String> {
    naive::valid(pod)?;
    naive::limit_ranger(pod, &scene.ranges)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, max_shrink_iters: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// As it was written, nulls and missing maps and all.
    #[test]
    fn the_patch_applies_to_what_was_sent_and_touches_cpu_and_marks_alone(scene in scene()) {
        let answer = scene.answer_about(scene.pod.clone())?;
        for operation in answer.patch.as_array().expect("a list") {
            prop_assert!(is_allowed(operation), "{} is not ours to do", operation);
        }
        prop_assert_eq!(rest(&answer.sent), rest(&answer.after));
        if !answer.is_boosted() {
            let after: Pod = read(&answer.after);
            prop_assert_eq!((after.claim(), after.record_text()), (None, None));
        }
    }

    #[test]
    fn nothing_is_lowered_and_the_class_stays(scene in scene()) {
        let answer = scene.answer()?;
        let original = answer.original();
        for (old, new) in cpus(&original).iter().zip(cpus(&answer.after)) {
            prop_assert!(new.request >= old.request, "a request was lowered: {:?} to {:?}", old, new);
            prop_assert_eq!(new.request.is_some(), old.request.is_some(), "a request came");
            match (old.limit, new.limit) {
                (Some(old), Some(new)) => prop_assert!(new >= old, "a limit was lowered"),
                (None, Some(_)) => prop_assert!(false, "a limit was added"),
                _ => {}
            }
        }
        prop_assert_eq!(naive::class(&original), naive::class(&answer.after));
        if naive::valid(&original).is_ok() {
            prop_assert_eq!(naive::valid(&answer.after), Ok(()));
        }
    }

    /// An answer changes nothing unless it boosts, or puts back what a boost has left on the manifest.
    #[test]
    fn a_pod_without_marks_is_boosted_or_left_alone(scene in scene()) {
        let answer = scene.answer()?;
        let sent: Pod = read(&answer.sent);
        if (sent.claim(), sent.record_text()) == (None, None) {
            prop_assert_eq!(cpus(&answer.original()), cpus(&answer.sent));
            prop_assert_eq!(answer.is_boosted(), answer.patch != json!([]));
        }
    }

    /// Lying can only lower the liar's own pod.
    #[test]
    fn no_record_raises_what_counts_as_the_original(scene in scene()) {
        let answer = scene.answer()?;
        for (sent, original) in cpus(&answer.sent).iter().zip(cpus(&answer.original())) {
            prop_assert!(original.request <= sent.request, "{:?} above {:?}", original, sent);
            prop_assert!(sent.limit.is_none_or(|sent| original.limit.is_some_and(|limit| limit <= sent)));
        }
    }

    #[test]
    fn a_second_pass_changes_nothing(scene in scene()) {
        let once = scene.answer()?.after;
        let twice = scene.answer_about(once.clone())?;
        prop_assert_eq!(once, twice.after);
    }

    #[test]
    fn a_boost_and_its_revert_are_the_identity(scene in scene()) {
        let answer = scene.answer()?;
        // Nobody creates a pod that asks for more than its limit.
        if !answer.is_boosted() || naive::valid(&answer.original()).is_err() {
            return Ok(());
        }
        let back = reverted(&answer.after, scene.settings)?;
        prop_assert_eq!(cpus(&answer.original()), cpus(&back));
        prop_assert_eq!(rest(&answer.sent), rest(&back));
        let due = now() + TimeDelta::days(1);
        let Decision::Finish(finish) = decide(&running(&back), None, scene.settings.end, due) else {
            return Err(TestCaseError::fail("it is not finished once it is reverted"));
        };
        let body = patch::finish(&running(&back), &finish);
        prop_assert_eq!(&body["metadata"]["labels"][BOOST_KEY], &Value::Null);
    }

    /// After a restart, or late: of a pod that runs.
    #[test]
    fn a_raise_and_its_revert_are_the_identity(scene in scene()) {
        let mut sent = scene.pod.clone();
        // Null, and missing maps, are for reviews: what the API server has stored has none.
        sent["metadata"] = json!({"namespace": NS, "name": "p", "labels": scene.pod["metadata"]["labels"],
            "creationTimestamp": now().to_rfc3339()});
        if naive::valid(&sent).is_err() {
            return Ok(());
        }
        let pod = running(&sent);
        let Some(raise) = raise::missed(&scene.snapshot(), scene.settings, &pod, "own", now()) else {
            return Ok(());
        };
        let raised = merged(&sent, &patch::resize(&pod, &raise.containers));
        for (old, new) in cpus(&sent).iter().zip(cpus(&raised)) {
            prop_assert!(new.request >= old.request && new.limit >= old.limit, "{:?} to {:?}", old, new);
            prop_assert_eq!((new.request.is_some(), new.limit.is_some()), (old.request.is_some(), old.limit.is_some()));
        }
        prop_assert_eq!(naive::class(&sent), naive::class(&raised));
        prop_assert_eq!(naive::valid(&raised), Ok(()));
        let mut claimed = raised.clone();
        json_patch::merge(&mut claimed["metadata"], &patch::claim(&pod, &raise)["metadata"]);
        let back = reverted(&claimed, scene.settings)?;
        prop_assert_eq!(cpus(&sent), cpus(&back));
        prop_assert_eq!(rest(&sent), rest(&back));
    }

    #[test]
    fn a_record_is_read_as_it_was_written(scene in scene()) {
        let answer = scene.answer()?;
        prop_assert_eq!(answer.admission.record.is_some(), answer.is_boosted());
        let Some(text) = answer.admission.record else {
            return Ok(());
        };
        prop_assert!(text.len() <= MAX_BYTES);
        let record = Record::read(&text)?;
        prop_assert_eq!(record.text(), text);
        prop_assert_eq!(record.timestamp, Some(now()));
        let policy = answer.admission.boost.expect("a boosted pod has one");
        prop_assert_eq!(&record.end, &policy.end);
        prop_assert_eq!(record.deadline_seconds, Some(policy.end.deadline_seconds(scene.settings.end)));
        prop_assert_eq!(record.boost, Some(BoostRef { kind: Some(policy.kind), name: policy.name.clone() }));
        let boosted = answer.admission.containers.iter().filter(|it| it.from != it.to);
        let boosted: BTreeMap<_, _> = boosted.map(|it| (it.name.as_str(), it)).collect();
        prop_assert!(record.containers.keys().eq(boosted.keys()));
        for (name, loan) in &record.containers {
            let (loan, decision) = (loan.as_ref()?, boosted[name.as_str()]);
            let values = [(loan.request, decision.from.request, decision.to.request), (loan.limit, decision.from.limit, decision.to.limit)];
            for (value, from, to) in values {
                prop_assert_eq!(value.map(|value| value.original), from);
                let set = to.map_or(Set::Removed, |to| if Some(to) == from { Set::Untouched } else { Set::To(to) });
                prop_assert!(from.is_none() || value.map(|value| value.set) == Some(set));
            }
        }
    }

    // === what bounds a boost ===

    /// LimitRanger sets its defaults once more, and judges, after the webhooks.
    #[test]
    fn limit_ranges_take_the_boosted_pod_if_they_take_the_original(scene in scene()) {
        let answer = scene.answer()?;
        let original = answer.original();
        if judge(&scene, &original).is_ok() {
            let judged = naive::defaulted(&answer.after, &scene.ranges);
            prop_assert_eq!(cpus(&judged), cpus(&answer.after), "LimitRanger changes what was answered");
            prop_assert_eq!(naive::limit_ranger(&judged, &scene.ranges), Ok(()));
        }
    }

    /// They judge every resize too: a boost must not let in what can't go back.
    #[test]
    fn limit_ranges_take_the_original_of_a_pod_that_they_take_boosted(scene in scene()) {
        let answer = scene.answer()?;
        let original = answer.original();
        if answer.is_boosted() && naive::valid(&original).is_ok() && judge(&scene, &answer.after).is_ok() {
            prop_assert_eq!(judge(&scene, &original), Ok(()));
        }
    }

    #[test]
    fn a_pod_that_asks_for_more_than_its_limit_is_not_put_right(scene in scene()) {
        let answer = scene.answer()?;
        if naive::valid(&answer.original()).is_err() {
            prop_assert!(naive::valid(&answer.after).is_err());
        }
    }

    /// Whatever is on the manifest, a pod that would have been taken without us is taken.
    #[test]
    fn no_record_makes_an_answer_refuse_its_pod(scene in scene()) {
        let answer = scene.answer()?;
        if judge(&scene, &answer.sent).is_ok() {
            prop_assert_eq!(judge(&scene, &answer.after), Ok(()));
        }
    }

    #[test]
    fn a_node_takes_the_boosted_pod_if_one_takes_the_original(scene in scene()) {
        let answer = scene.answer()?;
        let asked = |pod: &Value| naive::total(pod, "requests").unwrap_or(0) + naive::overhead(pod);
        if let Some(largest) = naive::largest_node(&scene.nodes)
            && asked(&answer.original()) <= largest
        {
            prop_assert!(asked(&answer.after) <= largest, "{} of {}", asked(&answer.after), largest);
        }
    }

    #[test]
    fn no_boost_lands_where_it_could_not_be_taken_back(scene in scene()) {
        let answer = scene.answer()?;
        if naive::may_land_on_old(&answer.sent, &scene.nodes) && !scene.settings.allow_old_kubelets {
            prop_assert!(!answer.is_boosted());
        } else {
            prop_assert_ne!(answer.admission.outcome, Outcome::Skipped(Reason::OldKubelet));
        }
    }

    #[test]
    fn quotas_take_the_boosted_pod_if_they_take_the_original(scene in scene()) {
        let answer = scene.answer()?;
        if scene.settings.ignore_quota {
            return Ok(());
        }
        let original = answer.original();
        for quota in scene.quotas.iter().filter(|quota| naive::counts(quota, &original)) {
            prop_assert!(naive::counts(quota, &answer.after), "it is counted no longer");
            if naive::quota_admits(quota, &original).is_ok() {
                prop_assert_eq!(naive::quota_admits(quota, &answer.after), Ok(()));
            }
        }
    }

    #[test]
    fn who_is_clamped_got_less(scene in scene()) {
        let answer = scene.answer()?;
        let free = Settings { max_boosted_cpu: None, ..scene.settings };
        let free = admit(&scene.unbounded(), free, NS, &read(&answer.sent), now());
        let infinite = |limit: Option<_>| (limit.is_none(), limit);
        for (got, wanted) in answer.admission.containers.iter().zip(&free.containers) {
            if got.clamped.is_none() || got.from != wanted.from {
                continue;
            }
            let less = got.to.request < wanted.to.request || infinite(got.to.limit) < infinite(wanted.to.limit);
            prop_assert!(less || wanted.reason == Some(Reason::QoSChange), "{:?} of {:?}", got, wanted);
        }
        let clamped = answer.admission.record.unwrap_or_default();
        let clamped: Value = serde_json::from_str(&clamped).unwrap_or_default();
        for name in clamped["clamped"].as_object().into_iter().flat_map(|map| map.keys()) {
            let mut decisions = answer.admission.containers.iter();
            prop_assert!(decisions.any(|decision| decision.name == *name && decision.clamped.is_some()));
        }
    }

    // === records ===

    #[test]
    fn any_annotation_is_read_or_refused(text in "\\PC{0,200}") {
        let _ = Record::read(&text);
    }

    #[test]
    fn any_record_only_lowers(scene in scene(), after_seconds in 0i64..10_000) {
        let typed = running(&scene.pod);
        let decision = decide(&typed, None, EndSettings::default(), now() + TimeDelta::seconds(after_seconds));
        if let Decision::Revert(revert) = decision {
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

/// The generator reaches what the laws are about.
#[test]
fn every_outcome_occurs() {
    let mut seen = BTreeMap::<String, u32>::new();
    let mut clamped = 0;
    for seed in 0..5_000 {
        let answer = Scene::new(&mut Choices::seeded(seed))
            .answer()
            .expect("it is answered");
        *seen
            .entry(format!("{:?}", answer.admission.outcome))
            .or_default() += 1;
        let mut decisions = answer.admission.containers.iter();
        clamped += u32::from(decisions.any(|decision| decision.clamped.is_some()));
    }
    println!("{seen:?}, clamped {clamped}");
    let missing = Reason::ALL
        .iter()
        .filter(|reason| **reason != Reason::Unsynced);
    let missing = missing.map(|reason| format!("{:?}", Outcome::Skipped(*reason)));
    let missing: Vec<_> = missing
        .filter(|outcome| !seen.contains_key(outcome))
        .collect();
    assert!(missing.is_empty(), "{missing:?} never occur");
    assert!(seen["Boosted"] > 1_000 && clamped > 200);
}

// === pods that nobody should write ===

/// A boost for every container, and what bounds it.
fn large_scene(pod: Value) -> Scene {
    let mut scene = Scene::new(&mut Choices::scripted(Vec::new()));
    scene.pod = pod;
    scene.ranges = vec![naive::stored(
        json!({"type": "Container", "max": {"cpu": "150m"}, "maxLimitRequestRatio": {"cpu": "2"}}),
    )];
    scene
}

fn many(count: usize, name: impl Fn(usize) -> String) -> Value {
    let containers = (0..count).map(|index| {
        json!({"name": name(index), "image": "x", "resources": {"requests": {"cpu": "100m"}, "limits": {"cpu": "100m"}}})
    });
    let containers: Vec<Value> = containers.collect();
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": containers}})
}

#[test]
fn a_pod_of_five_thousand_containers_is_decided() {
    let answer = large_scene(many(5_000, |index| format!("c{index}")))
        .answer()
        .expect("it is answered");
    assert_eq!(answer.admission.outcome, Outcome::Skipped(Reason::Clamped));
    assert_eq!(answer.patch, json!([]));
}

/// As large as a pod that is boosted may be.
#[test]
fn a_pod_of_two_hundred_containers_is_boosted_or_its_record_is_too_long() {
    let short = large_scene(many(60, |index| format!("c{index}")))
        .answer()
        .expect("it is answered");
    assert!(short.is_boosted(), "{:?}", short.admission.outcome);
    let long = large_scene(many(200, |index| format!("c{index}-{}", "x".repeat(58))))
        .answer()
        .expect("it is answered");
    assert_eq!(long.admission.outcome, Outcome::Skipped(Reason::Clamped));
}

#[test]
fn very_long_names_are_decided() {
    let answer = large_scene(many(2, |index| format!("{index}{}", "x".repeat(1 << 20))))
        .answer()
        .expect("it is answered");
    assert_eq!(answer.admission.outcome, Outcome::Skipped(Reason::Clamped));
}

#[test]
fn a_forged_record_for_five_thousand_containers_is_decided() {
    let mut pod = many(5_000, |index| format!("c{index}"));
    let names = (0..150).map(|index| (format!("c{index}"), json!("50m")));
    let originals: serde_json::Map<_, _> = names.collect();
    let record = json!({"initCPURequests": originals}).to_string();
    pod["metadata"]["annotations"] = json!({BOOST_KEY: record});
    let answer = large_scene(pod).answer().expect("it is answered");
    assert!(!answer.is_boosted());
    assert_eq!(answer.after["metadata"]["annotations"], json!({}));
}
