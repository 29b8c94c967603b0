//! Odd pods and what surrounds them: everything that the API allows, and some that it doesn't, drawn from a seed.
//!
//! All decisions come out of [`Choices`]: from a seed for runs that are to be repeated, or from a list that a property
//! test generates and shrinks. Zero is always the simplest choice.

use serde_json::{Map, Value, json};

/// The key of the claim and of the record.
pub const KEY: &str = "autoscaling.x-k8s.io/startup-cpu-boost";
/// A taint that keeps ordinary pods from a node.
pub const TAINT: &str = "old";
/// A RuntimeClass whose pods have an overhead.
pub const RUNTIME_CLASS: &str = "sandboxed";
/// CPU of that overhead.
pub const OVERHEAD: &str = "250m";
/// A PriorityClass.
pub const PRIORITY_CLASS: &str = "high";

/// Where decisions come from.
#[derive(Clone, Debug)]
pub struct Choices(Source);

#[derive(Clone, Debug)]
enum Source {
    /// SplitMix64.
    Seed(u64),
    Script(std::vec::IntoIter<u32>),
}

impl Choices {
    /// The same seed makes the same choices.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self(Source::Seed(seed))
    }

    /// These choices, and when they are used up the simplest ones.
    #[must_use]
    pub fn scripted(script: Vec<u32>) -> Self {
        Self(Source::Script(script.into_iter()))
    }

    fn next(&mut self) -> u32 {
        match &mut self.0 {
            Source::Seed(state) => {
                *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut mixed = *state;
                mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                u32::try_from((mixed ^ (mixed >> 31)) >> 32).expect("the upper half")
            }
            Source::Script(script) => script.next().unwrap_or(0),
        }
    }

    /// A number below this one.
    pub fn below(&mut self, end: u32) -> u32 {
        self.next() % end
    }

    /// Yes, in so many of a hundred cases.
    pub fn percent(&mut self, percent: u32) -> bool {
        self.below(100) >= 100 - percent
    }

    /// One of these.
    pub fn one_of<T: Clone>(&mut self, of: &[T]) -> T {
        let index = usize::try_from(self.next()).expect("at least 32 bits") % of.len();
        of[index].clone()
    }
}

// === pods ===

/// A pod of this name. Most are such as the API server takes.
pub fn pod(choices: &mut Choices, name: &str) -> Value {
    let mut pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": spec(choices),
    });
    let labels = [
        json!({"app": "a"}),
        json!({"app": "a", "a/b_c": "d"}),
        json!({"a/b_c": "d"}),
    ];
    if let Some(labels) = map(choices, &labels) {
        pod["metadata"]["labels"] = labels;
    }
    if let Some(notes) = map(choices, &[json!({"note": "kept"}), json!({"a/b_c": "d"})]) {
        pod["metadata"]["annotations"] = notes;
    }
    if choices.percent(20) {
        forge(choices, &mut pod);
    }
    pod
}

/// A map, or what may stand in its place.
fn map(choices: &mut Choices, filled: &[Value]) -> Option<Value> {
    match choices.below(10) {
        0..=5 => Some(choices.one_of(filled)),
        6 | 7 => None,
        8 => Some(Value::Null),
        _ => Some(json!({})),
    }
}

fn spec(choices: &mut Choices) -> Value {
    let mut containers = vec![container(choices, "app", false)];
    for name in ["side", "web"] {
        if choices.percent(30) {
            containers.push(container(choices, name, false));
        }
    }
    let mut spec = json!({"containers": containers});
    let mut init = Vec::new();
    for name in ["first", "mesh"] {
        if choices.percent(35) {
            init.push(container(choices, name, true));
        }
    }
    if !init.is_empty() || choices.percent(20) {
        spec["initContainers"] = init.into();
    } else if choices.percent(5) {
        spec["initContainers"] = Value::Null;
    }
    placement(choices, &mut spec);
    rarities(choices, &mut spec);
    spec
}

fn container(choices: &mut Choices, name: &str, init: bool) -> Value {
    let mut container = json!({"name": name, "image": "x"});
    match choices.below(20) {
        0..=16 => container["resources"] = resources(choices),
        17 => {}
        18 => container["resources"] = Value::Null,
        _ => container["resources"] = json!({}),
    }
    match choices.below(20) {
        0..=16 => {}
        17 => {
            container["resizePolicy"] =
                json!([{"resourceName": "cpu", "restartPolicy": "NotRequired"}]);
        }
        18 => {
            container["resizePolicy"] =
                json!([{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]);
        }
        _ => container["resizePolicy"] = Value::Null,
    }
    if init && choices.percent(60) {
        container["restartPolicy"] = "Always".into();
    }
    container
}

fn resources(choices: &mut Choices) -> Value {
    let (mut requests, mut limits) = (Map::new(), Map::new());
    let request = choices.percent(80).then(|| amount(choices));
    let limit = match choices.below(10) {
        0..=2 => None,
        3 | 4 => request,
        5..=8 => Some(request.unwrap_or(100) + amount(choices)),
        // Perhaps below the request.
        _ => Some(amount(choices) + 1000),
    };
    for (amounts, cpu) in [(&mut requests, request), (&mut limits, limit)] {
        if let Some(milli) = cpu {
            amounts.insert("cpu".into(), written(choices, milli));
        }
    }
    if choices.percent(12) {
        let odd = choices.one_of(&["1500u", "1Ki", "0", "+.5", "1e0", "2.50", "100m", "1001u"]);
        let amounts = choices.one_of(&[true, false]);
        let amounts = if amounts { &mut requests } else { &mut limits };
        amounts.insert("cpu".into(), odd.into());
    } else if choices.percent(1) {
        requests.insert("cpu".into(), Value::Null);
    }
    memory(choices, &mut requests, &mut limits);
    let mut resources = Map::new();
    for (name, amounts) in [("requests", requests), ("limits", limits)] {
        let written = match (amounts.is_empty(), choices.below(4)) {
            (false, _) | (true, 0) => Some(amounts.into()),
            (true, 1) => Some(Value::Null),
            (true, _) => None,
        };
        resources.extend(written.map(|amounts| (name.to_owned(), amounts)));
    }
    resources.into()
}

fn memory(
    choices: &mut Choices,
    requests: &mut Map<String, Value>,
    limits: &mut Map<String, Value>,
) {
    match choices.below(10) {
        0..=3 => {}
        4 | 5 => drop(requests.insert("memory".into(), "64Mi".into())),
        6 => drop(limits.insert("memory".into(), "1Gi".into())),
        _ => {
            requests.insert("memory".into(), "1Gi".into());
            limits.insert("memory".into(), "1024Mi".into());
        }
    }
}

/// Milli-CPU as people ask for.
fn amount(choices: &mut Choices) -> u32 {
    match choices.below(4) {
        0 => 100,
        1 => 10 * (1 + choices.below(100)),
        2 => 1 + choices.below(2000),
        _ => 500 * (1 + choices.below(4)),
    }
}

/// One of the ways to write an amount.
fn written(choices: &mut Choices, milli: u32) -> Value {
    match choices.below(8) {
        4 => json!(f64::from(milli) / 1000.0),
        5 if milli.is_multiple_of(1000) => json!(milli / 1000),
        5 => format!("{:.3}", f64::from(milli) / 1000.0).into(),
        6 => format!("{}u", u64::from(milli) * 1000).into(),
        7 => format!("{milli}e-3").into(),
        _ => format!("{milli}m").into(),
    }
}

/// Where it may run.
fn placement(choices: &mut Choices, spec: &mut Value) {
    match choices.below(20) {
        0..=15 => {}
        16 => spec["tolerations"] = json!([{"operator": "Exists"}]),
        17 => {
            spec["tolerations"] = json!([{"key": TAINT, "operator": "Equal", "value": "yes", "effect": "NoSchedule"}]);
        }
        18 => {
            spec["tolerations"] =
                json!([{"key": TAINT, "value": "no"}, {"key": "other", "operator": "Exists"}]);
        }
        _ => {
            spec["tolerations"] = json!([{"operator": "Exists"}]);
            spec["nodeSelector"] = json!({"pool": choices.one_of(&["new", "old"])});
        }
    }
    if choices.percent(5) {
        spec["activeDeadlineSeconds"] = 600.into();
    }
    if choices.percent(5) {
        spec["priorityClassName"] = PRIORITY_CLASS.into();
    }
    if choices.percent(8) {
        spec["runtimeClassName"] = RUNTIME_CLASS.into();
    }
}

/// What no boost may touch.
fn rarities(choices: &mut Choices, spec: &mut Value) {
    match choices.below(40) {
        37 => {
            spec["resourceClaims"] = json!([{"name": "gpu", "resourceClaimName": "gpu"}]);
            let containers = spec["containers"].as_array_mut().expect("a list");
            let last = containers.last_mut().expect("there is one at least");
            if !last["resources"].is_object() {
                last["resources"] = json!({});
            }
            last["resources"]["claims"] = json!([{"name": "gpu"}]);
        }
        38 => spec["resources"] = json!({"requests": {"cpu": "32"}, "limits": {"cpu": "48"}}),
        39 => spec["os"] = json!({"name": "windows"}),
        _ => {}
    }
}

// === records that nobody asked for ===

/// Puts marks on a pod that say anything but the truth: copied, forged, ended or not to be read.
fn forge(choices: &mut Choices, pod: &mut Value) {
    let record = match choices.below(10) {
        0..=5 => forged(choices, pod),
        6 => json!({"state": "Reverted", "initCPURequests": {"app": "1m"}}).to_string(),
        7 => choices.one_of(&["{", "[]", "", "null"]).to_owned(),
        8 => json!({"initCPULimits": ["app"]}).to_string(),
        _ => json!({"initCPURequests": {"app": "x".repeat(9 << 10)}}).to_string(),
    };
    if choices.percent(90) {
        annotate(pod, "annotations", record);
    }
    if choices.percent(70) {
        annotate(pod, "labels", choices.one_of(&["mine", "b", "wide"]).into());
    }
}

fn annotate(pod: &mut Value, map: &str, value: String) {
    let map = &mut pod["metadata"][map];
    if !map.is_object() {
        *map = json!({});
    }
    map[KEY] = value.into();
}

/// A record in the right form. Half of the values are such as the pod has.
fn forged(choices: &mut Choices, pod: &Value) -> String {
    let mut record = json!({"state": "Active", "timestamp": "2026-12-01T10:00:00Z"});
    let with_set = choices.percent(70);
    let containers = ["containers", "initContainers"].map(|list| pod["spec"][list].as_array());
    for container in containers.into_iter().flatten().flatten() {
        let name = container["name"].as_str().expect("it has a name");
        for (kind, original, set) in [
            ("requests", "initCPURequests", "boostedCPURequests"),
            ("limits", "initCPULimits", "boostedCPULimits"),
        ] {
            if choices.percent(30) {
                continue;
            }
            let present = match &container["resources"][kind]["cpu"] {
                Value::Null => String::new(),
                Value::String(text) => text.clone(),
                number => number.to_string(),
            };
            let low = choices
                .one_of(&["10m", "1m", "50m", "0", "100m"])
                .to_owned();
            let (low, high) = if choices.percent(15) {
                (
                    format!("{}m", amount(choices)),
                    format!("{}m", amount(choices)),
                )
            } else {
                (low, present)
            };
            record[original][name] = low.into();
            if with_set {
                record[set][name] = high.into();
            }
        }
    }
    if choices.percent(50) {
        record["boost"] = "mine".into();
        record["end"] = json!({"fixedSeconds": 60, "deadlineSeconds": 3600});
    }
    record.to_string()
}

// === boosts ===

/// A boost's `selector` and `spec`, such as its definition accepts.
pub fn boost(choices: &mut Choices) -> Value {
    let mut entries = vec![container_policy(choices)];
    if choices.percent(40) {
        entries.push(container_policy(choices));
    }
    let end = match choices.below(3) {
        0 => json!({"fixedDuration": {"unit": "Seconds", "value": 60}}),
        1 => json!({"podCondition": {"type": "Ready", "status": "True"}}),
        _ => json!({
            "podCondition": {"type": "Ready", "status": "True", "delaySeconds": 5},
            "containerCondition": "Started",
            "fixedDuration": {"unit": "Minutes", "value": 5},
        }),
    };
    let mut boost =
        json!({"spec": {"resourcePolicy": {"containerPolicies": entries}, "durationPolicy": end}});
    if choices.percent(35) {
        boost["selector"] = json!({"matchLabels": {"app": "a"}});
    }
    boost
}

fn container_policy(choices: &mut Choices) -> Value {
    let mut entry = match choices.below(10) {
        0..=3 => json!({"percentageIncrease": {"value": 20 + choices.below(400)}}),
        4 => json!({"percentageIncrease": {"value": choices.one_of(&[10_000, i64::MAX])}}),
        5 => {
            json!({"fixedResources": {"requests": "0", "limits": format!("{}m", 1 + choices.below(8000))}})
        }
        6 => json!({"fixedResources": {"requests": 1 + choices.below(4)}}),
        _ => {
            let request = 1 + choices.below(6000);
            let limit = request + choices.below(3) * 1000;
            json!({"fixedResources": {"requests": format!("{request}m"), "limits": format!("{limit}m")}})
        }
    };
    match choices.below(5) {
        0..=2 => {}
        3 => entry["controlledValues"] = "RequestsOnly".into(),
        _ => entry["controlledValues"] = "LimitsOnly".into(),
    }
    let name = choices.one_of(&[".*", "^app$", "side|mesh", "e"]);
    entry["matchContainers"] =
        json!({"type": "RegexName", "value": name, "includeSidecars": choices.percent(60)});
    entry
}

// === what bounds them ===

/// Entries of a LimitRange, such as the API server accepts in one object.
pub fn limit_range_items(choices: &mut Choices) -> Vec<Value> {
    let mut items = vec![container_item(choices)];
    if choices.percent(40) {
        items.push(pod_item(choices));
    }
    items
}

fn container_item(choices: &mut Choices) -> Value {
    let mut item = json!({"type": "Container"});
    let max = choices.percent(50);
    if max {
        item["max"] = json!({"cpu": choices.one_of(&["8", "4", "2500m"])});
    }
    let min = choices.percent(15);
    if min {
        item["min"] = json!({"cpu": choices.one_of(&["10m", "50m", "100m"])});
    }
    // The API server wants a ratio that the bounds can reach.
    if !(max && min) && choices.percent(20) {
        item["maxLimitRequestRatio"] =
            json!({"cpu": choices.one_of(&["10", "4", "2", "1500m", "1"])});
        item["default"] = json!({"cpu": "200m"});
        item["defaultRequest"] = json!({"cpu": "200m"});
    } else if choices.percent(30) {
        item["default"] = json!({"cpu": choices.one_of(&["2", "1", "500m"])});
    }
    if item["defaultRequest"].is_null() && choices.percent(20) {
        item["defaultRequest"] = json!({"cpu": choices.one_of(&["100m", "250m", "500m"])});
    }
    if choices.percent(10) {
        item["default"]["memory"] = "1Gi".into();
    }
    item
}

fn pod_item(choices: &mut Choices) -> Value {
    let mut item = json!({"type": "Pod"});
    let max = choices.percent(70);
    if max {
        item["max"] = json!({"cpu": choices.one_of(&["32", "16", "8"])});
    }
    if choices.percent(30) {
        item["maxLimitRequestRatio"] = json!({"cpu": choices.one_of(&["20", "10", "3"])});
    } else if choices.percent(20) {
        item["min"] = json!({"cpu": "100m"});
    }
    item
}

/// A ResourceQuota's `spec` and `status`. An ample one has room for anything.
pub fn quota(choices: &mut Choices, ample: bool) -> Value {
    let keys = choices.one_of(&[
        &["requests.cpu"][..],
        &["cpu"],
        &["requests.cpu", "limits.cpu"],
    ]);
    let (mut hard, mut used) = (json!({}), json!({}));
    for key in keys {
        let (of, room) = (choices.below(4), 1000 * (2 + choices.below(8)));
        let room = if ample { 900_000_000 } else { room };
        hard[*key] = format!("{}m", of * 1000 + room).into();
        used[*key] = of.into();
    }
    let mut spec = json!({"hard": hard});
    match choices.below(12) {
        0..=7 => {}
        8 => spec["scopes"] = json!(["NotBestEffort"]),
        9 => spec["scopes"] = json!(["Terminating"]),
        10 => spec["scopes"] = json!(["NotTerminating"]),
        _ => {
            let operator = choices.one_of(&["In", "Exists", "DoesNotExist", "NotIn"]);
            let mut requirement = json!({"scopeName": "PriorityClass", "operator": operator});
            if operator.ends_with("In") {
                requirement["values"] = json!([PRIORITY_CLASS]);
            }
            spec["scopeSelector"] = json!({"matchExpressions": [requirement]});
        }
    }
    json!({"spec": spec, "status": {"hard": hard, "used": used}})
}

/// A node.
pub fn node(choices: &mut Choices, name: &str) -> Value {
    let version = choices.one_of(&["v1.36.3", "v1.33.0", "v1.32.9-gke.1"]);
    let is_old = version.starts_with("v1.32");
    let mut node = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"pool": if is_old { "old" } else { "new" }}},
        "spec": {},
        "status": {
            "allocatable": {"cpu": choices.one_of(&["64", "3920m", "8", "16"])},
            "nodeInfo": {"kubeletVersion": version, "operatingSystem": "linux"},
        },
    });
    if is_old && choices.percent(80) {
        node["spec"]["taints"] = json!([{"key": TAINT, "value": "yes", "effect": "NoSchedule"}]);
    }
    if choices.percent(10) {
        node["spec"]["unschedulable"] = true.into();
    }
    if choices.percent(10) {
        node["status"]["nodeInfo"]["operatingSystem"] = "windows".into();
        node["metadata"]["labels"]["kubernetes.io/os"] = "windows".into();
    }
    node
}
