//! Laws that several targets hold the operator to. Each panics where its law is broken.

use std::collections::BTreeMap;

use headstart::{
    api::{Amounts, BOOST_KEY, Container, Pod},
    domain::{
        cpu::Cpu,
        patch,
        qos::QosClass,
        quantity::MilliCpu,
        record::{MAX_BYTES, Record},
        revert::Revert,
    },
};
use serde_json::{Map, Value};

use crate::reference::Amount;

const LISTS: [&str; 2] = ["containers", "initContainers"];
const KINDS: [&str; 2] = ["requests", "limits"];

/// Reads a pod.
///
/// # Panics
/// When it is none.
#[must_use]
pub fn read(pod: &Value) -> Pod {
    serde_json::from_value(pod.clone()).expect("it is a pod")
}

/// The CPU values of all containers.
#[must_use]
pub fn cpus(pod: &Pod) -> Vec<Cpu> {
    pod.all_containers().map(Cpu::of).collect()
}

/// Two pods differ in nothing but CPU values and our two marks. A map that holds nothing else may come and go, be null
/// or be empty.
pub fn only_cpu_and_marks_differ(before: &Value, after: &Value) {
    assert_eq!(
        bare(before),
        bare(after),
        "more than CPU and marks was touched"
    );
}

/// A pod without what a boost may touch.
fn bare(pod: &Value) -> Value {
    let mut pod = pod.clone();
    for map in ["labels", "annotations"] {
        drop_key(&mut pod["metadata"], map, BOOST_KEY);
    }
    for list in LISTS {
        for container in pod["spec"][list].as_array_mut().into_iter().flatten() {
            for kind in KINDS {
                drop_key(&mut container["resources"], kind, "cpu");
            }
            drop_empty(container, "resources");
        }
    }
    pod
}

fn drop_key(parent: &mut Value, map: &str, key: &str) {
    if let Some(map) = parent.get_mut(map).and_then(Value::as_object_mut) {
        map.remove(key);
    }
    drop_empty(parent, map);
}

fn drop_empty(parent: &mut Value, map: &str) {
    let is_empty = |value: &Value| value.is_null() || value.as_object().is_some_and(Map::is_empty);
    if let Some(parent) = parent.as_object_mut()
        && parent.get(map).is_some_and(is_empty)
    {
        parent.remove(map);
    }
}

/// No value is lowered, none comes, and no request goes; an absent limit is more than any.
pub fn nothing_is_lowered(before: &Pod, after: &Pod) {
    for (old, new) in cpus(before).into_iter().zip(cpus(after)) {
        assert_eq!(
            old.request.is_some(),
            new.request.is_some(),
            "a request came or went"
        );
        assert!(
            new.request >= old.request,
            "a request was lowered: {old:?} to {new:?}"
        );
        let lowered = new
            .limit
            .is_some_and(|new| old.limit.is_none_or(|old| new < old));
        assert!(!lowered, "a limit was lowered or added: {old:?} to {new:?}");
    }
}

/// The `QoS` class stays, where every amount can be read.
pub fn class_is_kept(before: &Pod, after: &Pod) {
    if let Some(class) = class(before) {
        assert_eq!(Some(class), self::class(after), "the class has changed");
    }
}

/// `GetPodQOS`, or `None` where an amount is none that the API server would store.
#[must_use]
pub fn class(pod: &Pod) -> Option<QosClass> {
    let mut sums = [[0u128; 2]; 2];
    let mut complete = true;
    for container in pod.all_containers() {
        let resources = &container.resources;
        for (kind, amounts) in [&resources.requests, &resources.limits]
            .into_iter()
            .enumerate()
        {
            let amounts = read_amounts(amounts.as_ref())?;
            complete &= kind == 0 || amounts.iter().all(|amount| *amount > 0);
            for (sum, amount) in sums[kind].iter_mut().zip(amounts) {
                *sum += amount;
            }
        }
    }
    Some(match sums {
        [[0, 0], [0, 0]] => QosClass::BestEffort,
        [requests, limits] if complete && requests == limits => QosClass::Guaranteed,
        _ => QosClass::Burstable,
    })
}

/// CPU and memory in thousandths.
fn read_amounts(amounts: Option<&Amounts>) -> Option<[u128; 2]> {
    let read = |text: Option<&String>, most: u128| {
        let amount = text.map_or(Some(0), |text| Amount::read(text)?.milli().ok())?;
        (amount <= most).then_some(amount)
    };
    let cpu = amounts.and_then(|amounts| amounts.cpu.as_ref());
    let memory = amounts.and_then(|amounts| amounts.memory.as_ref());
    // Kubernetes caps what is above 2^63 - 1.
    Some([
        read(cpu, MilliCpu::MAX.milli().into())?,
        read(memory, u128::from(u64::MAX >> 1) * 1000)?,
    ])
}

/// Whether the API server could take the amounts: all can be read, and no request is above its limit.
#[must_use]
pub fn is_valid(pod: &Pod) -> bool {
    let valid = |container: &Container| {
        let cpu = Cpu::of(container);
        let read = container.cpu_request().is_some() == cpu.request.is_some()
            && container.cpu_limit().is_some() == cpu.limit.is_some();
        read && is_within_limit(cpu)
    };
    pod.all_containers().all(valid) && class(pod).is_some()
}

/// Whether a request is not above its limit.
#[must_use]
pub fn is_within_limit(cpu: Cpu) -> bool {
    cpu.limit
        .is_none_or(|limit| cpu.request.unwrap_or_default() <= limit)
}

/// A record that a pod carries reads back, and fits.
pub fn record_is_kept(pod: &Pod) {
    let Some(text) = pod.record_text() else {
        return;
    };
    assert!(
        text.len() <= MAX_BYTES,
        "the record has {} bytes",
        text.len()
    );
    let record = Record::read(text).expect("the record can be read");
    assert_eq!(
        record.text(),
        text,
        "the record is printed otherwise than it was read"
    );
}

/// A revert names containers of the pod and lowers their values; its body holds CPU values and preconditions only.
pub fn revert_only_lowers(pod: &Pod, revert: &Revert) {
    assert!(!revert.containers.is_empty(), "a revert of nothing");
    let regular = pod.spec.containers.len();
    for back in &revert.containers {
        let fits = |(index, container): &(usize, &Container)| {
            container.name == back.name && (*index >= regular) == back.init
        };
        let found = pod
            .all_containers()
            .enumerate()
            .filter(fits)
            .map(|(_, container)| container);
        let now = found.map(Cpu::of).find(|now| is_lower(back.to, *now));
        assert!(now.is_some(), "{back:?} lowers no container of the pod");
    }
    let body = patch::resize(pod, &revert.containers);
    assert_eq!(keys(&body), ["metadata", "spec"]);
    assert_eq!(keys(&body["metadata"]), ["uid", "resourceVersion"]);
    for entry in body_entries(&body) {
        assert_eq!(keys(entry), ["name", "resources"]);
        for (kind, amounts) in entry["resources"].as_object().into_iter().flatten() {
            assert!(KINDS.contains(&kind.as_str()), "{kind} in a resize");
            assert_eq!(keys(amounts), ["cpu"]);
        }
    }
}

fn is_lower(to: Cpu, now: Cpu) -> bool {
    let request = to
        .request
        .is_none_or(|to| now.request.is_some_and(|now| to < now));
    let limit = to
        .limit
        .is_none_or(|to| now.limit.is_none_or(|now| to < now));
    to != Cpu::default() && request && limit
}

fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .into_iter()
        .flatten()
        .map(|(key, _)| key.as_str())
        .collect()
}

fn body_entries(body: &Value) -> impl Iterator<Item = &Value> {
    let spec = body["spec"].as_object().into_iter().flatten();
    spec.flat_map(|(list, entries)| {
        assert!(LISTS.contains(&list.as_str()), "{list} in a resize");
        entries.as_array().into_iter().flatten()
    })
}

/// The pod as the API server leaves it after a resize: merged by container name.
///
/// # Panics
/// When the resize names a container that the pod doesn't have.
#[must_use]
pub fn resized(pod: &Value, body: &Value) -> Value {
    let mut pod = pod.clone();
    for list in LISTS {
        let mut entries: BTreeMap<&str, &Value> = BTreeMap::new();
        for entry in body["spec"][list].as_array().into_iter().flatten() {
            entries.insert(entry["name"].as_str().expect("a name"), entry);
        }
        for container in pod["spec"][list].as_array_mut().into_iter().flatten() {
            let name = container["name"].as_str().expect("a name").to_owned();
            if let Some(entry) = entries.remove(name.as_str()) {
                json_patch::merge(container, entry);
            }
        }
        assert!(entries.is_empty(), "{entries:?} are not in the pod");
    }
    pod
}
