//! Repairs a record that can't be read from the template of the pod's owner.
//!
//! We never touch templates, so they are an independent witness of what a pod asked for. Only lowering follows from one:
//! values that are above the template's count as lent, all others are left as they are.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};

use super::{
    cpu::Cpu,
    end::{EndRule, EndSettings},
    policy::{BoostKind, Policy},
    quantity::MilliCpu,
    record::{Loan, LoanValue, NewRecord, Record, Set},
};
use crate::api::{BOOST_KEY, Pod, PodSpec};

/// The pod with a record that can be read, in place of what it carries; to be decided about like any other. `None` where
/// the template says nothing about the containers in question.
///
/// The end rule is that of `policy`, the boost that the claim names; without one the deadline ends it.
#[must_use]
pub fn repair(
    pod: &Pod,
    template: &PodSpec,
    policy: Option<&Policy>,
    settings: EndSettings,
    now: DateTime<Utc>,
) -> Option<Pod> {
    let text = pod.record_text().unwrap_or_default();
    let text = match Record::read(text) {
        Ok(record) => {
            let bad = |name: &str| matches!(record.containers.get(name), Some(Err(_)));
            record.with(&loans(pod, template, bad)?).text()
        }
        Err(_) => whole(pod, &loans(pod, template, |_| true)?, policy, settings, now)?,
    };
    let mut repaired = pod.clone();
    let annotations = repaired.metadata.annotations.get_or_insert_default();
    annotations.insert(BOOST_KEY.to_owned(), text);
    Some(repaired)
}

fn whole(
    pod: &Pod,
    loans: &BTreeMap<&str, Loan>,
    policy: Option<&Policy>,
    settings: EndSettings,
    now: DateTime<Utc>,
) -> Option<String> {
    let none = EndRule::default();
    let end = policy.map_or(&none, |policy| &policy.end);
    let created = pod.metadata.creation_timestamp.as_ref();
    let created = created.and_then(|time| DateTime::from_timestamp(time.0.as_second(), 0));
    let record = NewRecord {
        timestamp: created.unwrap_or(now),
        containers: loans,
        clamped: &BTreeMap::new(),
        raise: None,
        boost: match policy {
            Some(policy) => (policy.kind, &policy.name),
            None => (BoostKind::Namespaced, pod.claim()?),
        },
        end,
        deadline_seconds: end.deadline_seconds(settings),
    };
    Some(record.text())
}

/// What the containers in question have above the template; where none has, what all of them have in common with it.
fn loans<'a>(
    pod: &'a Pod,
    template: &PodSpec,
    in_question: impl Fn(&str) -> bool,
) -> Option<BTreeMap<&'a str, Loan>> {
    let originals = template.containers.iter().chain(&template.init_containers);
    let originals: BTreeMap<&str, Cpu> = originals
        .map(|container| (container.name.as_str(), Cpu::of(container)))
        .collect();
    let known = pod.all_containers().filter(|it| in_question(&it.name));
    let known: Vec<(&str, Cpu, Cpu)> = known
        .filter_map(|container| {
            let original = *originals.get(container.name.as_str())?;
            Some((container.name.as_str(), original, Cpu::of(container)))
        })
        .collect();
    let all = known.iter().map(|(name, original, now)| {
        let loan = Loan {
            request: original.request.and_then(|cpu| request(cpu, now.request)),
            limit: original.limit.map(|cpu| limit(cpu, now.limit)),
        };
        (*name, loan)
    });
    let all: BTreeMap<&str, Loan> = all.filter(|(_, loan)| *loan != Loan::default()).collect();
    let is_lent = |loan: &Loan| {
        let values = [loan.request, loan.limit];
        let mut values = values.into_iter().flatten();
        values.any(|value| matches!(value.set, Set::To(_) | Set::Removed))
    };
    let lent: BTreeMap<_, _> = all
        .iter()
        .filter(|(_, loan)| is_lent(loan))
        .map(|(name, loan)| (*name, *loan))
        .collect();
    let found = if lent.is_empty() { all } else { lent };
    (!found.is_empty()).then_some(found)
}

fn request(original: MilliCpu, now: Option<MilliCpu>) -> Option<LoanValue> {
    let set = match now? {
        now if now > original => Set::To(now),
        _ => Set::Unrecorded,
    };
    Some(LoanValue { original, set })
}

/// An absent limit is more than any limit.
fn limit(original: MilliCpu, now: Option<MilliCpu>) -> LoanValue {
    let set = match now {
        None => Set::Removed,
        Some(now) if now > original => Set::To(now),
        Some(_) => Set::Unrecorded,
    };
    LoanValue { original, set }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::domain::{
        end::EndedBy,
        revert::{Decision, decide},
    };

    fn spec(containers: &Value) -> PodSpec {
        serde_json::from_value(json!({"containers": containers})).expect("a spec")
    }

    fn cpu(name: &str, request: &str, limit: Option<&str>) -> Value {
        let limits = limit.map(|limit| json!({"cpu": limit}));
        json!({"name": name, "resources": {"requests": {"cpu": request}, "limits": limits}})
    }

    fn pod(record: &str, containers: &Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns", "creationTimestamp": "2026-12-01T09:00:00Z",
                "labels": {BOOST_KEY: "b"}, "annotations": {BOOST_KEY: record}},
            "spec": {"containers": containers, "nodeName": "n"},
            "status": {"observedGeneration": 1, "conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-12-01T09:00:00Z"}]},
        }))
        .expect("a pod")
    }

    /// An hour and a half after scheduling: the deadline has passed.
    fn now() -> DateTime<Utc> {
        "2026-12-01T10:30:00Z".parse().expect("a time")
    }

    fn decided(pod: &Pod, template: &Value) -> Option<Decision> {
        let settings = EndSettings::default();
        let repaired = repair(pod, &spec(template), None, settings, now())?;
        Some(decide(&repaired, None, settings, now()))
    }

    #[test]
    fn an_unreadable_record_is_reverted_to_the_template() {
        let boosted = json!([cpu("app", "380m", Some("750m")), cpu("side", "1", None)]);
        let template = json!([cpu("app", "250m", Some("500m")), cpu("side", "1", None)]);
        for record in ["oops", "[]", "{\"initCPURequests\": 1}"] {
            let Some(Decision::Revert(revert)) = decided(&pod(record, &boosted), &template) else {
                panic!("no revert of {record}");
            };
            assert_eq!(revert.due.by, EndedBy::Deadline);
            let [only] = &revert.containers[..] else {
                panic!("{revert:?}");
            };
            assert_eq!((&*only.name, only.to.request), ("app", "250m".parse().ok()));
            assert_eq!(only.to.limit, "500m".parse().ok());
        }
        // Afterwards it is finished, with a record that can be read.
        let Some(Decision::Finish(finish)) = decided(&pod("oops", &template), &template) else {
            panic!("no finish");
        };
        let (record, _) = finish.ended.expect("it ends now");
        assert!(Record::read(&record.text()).is_ok());
    }

    #[test]
    fn nothing_is_raised_and_nothing_is_made_up() {
        let below = json!([cpu("app", "100m", Some("200m"))]);
        let template = json!([cpu("app", "250m", Some("500m"))]);
        let decision = decided(&pod("oops", &below), &template);
        assert!(
            !matches!(decision, Some(Decision::Revert(_))),
            "{decision:?}"
        );
        let without = json!([{"name": "app"}]);
        assert_eq!(
            decided(&pod("oops", &json!([cpu("app", "1", None)])), &without),
            None
        );
        let renamed = json!([cpu("other", "1m", None)]);
        assert_eq!(
            decided(&pod("oops", &json!([cpu("app", "1", None)])), &renamed),
            None
        );
    }

    #[test]
    fn a_bad_entry_is_repaired_and_the_others_stay() {
        let record = json!({"state": "Active", "timestamp": "2026-12-01T09:00:00Z",
            "initCPURequests": {"app": "x", "side": "100m"}, "boostedCPURequests": {"side": "200m"}, "seal": "kept"});
        let boosted = json!([cpu("app", "380m", None), cpu("side", "200m", None)]);
        let template = json!([cpu("app", "250m", None), cpu("side", "150m", None)]);
        let pod = pod(&record.to_string(), &boosted);
        let repaired = repair(&pod, &spec(&template), None, EndSettings::default(), now());
        let repaired = repaired.expect("repaired");
        let text: Value =
            serde_json::from_str(repaired.record_text().expect("a record")).expect("JSON");
        assert_eq!(
            text["initCPURequests"],
            json!({"app": "250m", "side": "100m"})
        );
        assert_eq!(
            text["boostedCPURequests"],
            json!({"app": "380m", "side": "200m"})
        );
        assert_eq!(text["seal"], "kept");
    }
}
