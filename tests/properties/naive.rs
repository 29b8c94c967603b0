//! What the API server's own plugins say of a pod, written down once more: plainly, from their sources, and without the
//! program's help. Amounts are in thousandths.

use std::collections::BTreeMap;

use headstart::domain::quantity::parse_milli;
use serde_json::{Map, Value, json};
use testbed::generate::{OVERHEAD, RUNTIME_CLASS};

/// An amount that may be text or a number.
pub(crate) fn amount(value: &Value) -> Option<u128> {
    match value {
        Value::String(text) => parse_milli(text).ok(),
        Value::Number(number) => parse_milli(&number.to_string()).ok(),
        _ => None,
    }
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// All containers, each with whether it ends before the next one starts.
fn containers(pod: &Value) -> impl Iterator<Item = (&Value, bool)> {
    let init = items(&pod["spec"]["initContainers"])
        .map(|container| (container, container["restartPolicy"] != "Always"));
    items(&pod["spec"]["containers"])
        .map(|container| (container, false))
        .chain(init)
}

fn of(container: &Value, kind: &str, resource: &str) -> Option<u128> {
    amount(&container["resources"][kind][resource])
}

// === the pod as the webhook gets it ===

/// What API defaults, the RuntimeClass plugin and LimitRanger make of a pod before webhooks are called.
pub(crate) fn received(pod: &Value, ranges: &[Value]) -> Value {
    let mut pod = pod.clone();
    each_resources(&mut pod, |resources| {
        // Written as null, a CPU amount is 0 to Go.
        for kind in ["requests", "limits"] {
            let amounts = resources[kind].as_object_mut().expect("just made");
            for amount in amounts.values_mut().filter(|amount| amount.is_null()) {
                *amount = "0".into();
            }
        }
        let limits = resources["limits"].clone();
        add(&mut resources["requests"], &limits);
    });
    if pod["spec"]["runtimeClassName"] == RUNTIME_CLASS {
        pod["spec"]["overhead"] = json!({"cpu": OVERHEAD});
    }
    defaulted(&pod, ranges)
}

/// An entry of a LimitRange as the API server stores it (`SetDefaults_LimitRange`).
pub(crate) fn stored(mut item: Value) -> Value {
    if item["type"] != "Container" {
        return item;
    }
    for (field, from) in [
        ("default", "max"),
        ("defaultRequest", "default"),
        ("defaultRequest", "min"),
    ] {
        let from = item[from].clone();
        if !item[field].is_object() {
            item[field] = json!({});
        }
        add(&mut item[field], &from);
    }
    item
}

/// With LimitRanger's defaults; it sets them before the webhooks and once more after them.
pub(crate) fn defaulted(pod: &Value, ranges: &[Value]) -> Value {
    let mut pod = pod.clone();
    for range in ranges.iter().filter(|range| range["type"] == "Container") {
        each_resources(&mut pod, |resources| {
            add(&mut resources["limits"], &range["default"]);
            add(&mut resources["requests"], &range["defaultRequest"]);
        });
    }
    pod
}

fn each_resources(pod: &mut Value, mut change: impl FnMut(&mut Map<String, Value>)) {
    for list in ["containers", "initContainers"] {
        for container in pod["spec"][list].as_array_mut().into_iter().flatten() {
            let resources = &mut container["resources"];
            if !resources.is_object() {
                *resources = json!({});
            }
            for kind in ["requests", "limits"] {
                if !resources[kind].is_object() {
                    resources[kind] = json!({});
                }
            }
            change(resources.as_object_mut().expect("just made"));
        }
    }
}

fn add(amounts: &mut Value, defaults: &Value) {
    let amounts = amounts.as_object_mut().expect("a map");
    for (key, value) in defaults.as_object().into_iter().flatten() {
        amounts.entry(key.clone()).or_insert_with(|| value.clone());
    }
}

// === validation ===

/// A request above its limit is refused (`ValidateContainerResourceRequirements`).
pub(crate) fn valid(pod: &Value) -> Result<(), String> {
    for (container, _) in containers(pod) {
        let (request, limit) = (
            of(container, "requests", "cpu"),
            of(container, "limits", "cpu"),
        );
        if limit.is_some_and(|limit| request.unwrap_or(0) > limit) {
            return Err(format!(
                "{} asks for more than its limit",
                container["name"]
            ));
        }
    }
    Ok(())
}

/// `PodValidateLimitFunc` of the LimitRanger plugin.
pub(crate) fn limit_ranger(pod: &Value, ranges: &[Value]) -> Result<(), String> {
    for range in ranges {
        let cpu = |bound: &str| amount(&range[bound]["cpu"]);
        let bounds = [cpu("min"), cpu("max"), cpu("maxLimitRequestRatio")];
        if range["type"] == "Pod" {
            within(bounds, total(pod, "requests"), total(pod, "limits"))
                .map_err(|problem| format!("Pod: {problem}"))?;
            continue;
        }
        for (container, _) in containers(pod) {
            let (request, limit) = (
                of(container, "requests", "cpu"),
                of(container, "limits", "cpu"),
            );
            within(bounds, request, limit)
                .map_err(|problem| format!("{}: {problem}", container["name"]))?;
        }
    }
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "the plugin computes so")]
fn within(
    [min, max, ratio]: [Option<u128>; 3],
    request: Option<u128>,
    limit: Option<u128>,
) -> Result<(), String> {
    if let Some(min) = min {
        let request = request.ok_or("min: no request is specified")?;
        if request < min || limit.is_some_and(|limit| limit < min) {
            return Err(format!("min is {min}"));
        }
    }
    if let Some(max) = max {
        let limit = limit.ok_or("max: no limit is specified")?;
        if limit > max || request.is_some_and(|request| request > max) {
            return Err(format!("max is {max}, but {request:?} and {limit}"));
        }
    }
    if let Some(ratio) = ratio {
        let request = request.filter(|request| *request > 0);
        let limit = limit.filter(|limit| *limit > 0);
        let request = request.ok_or("ratio: no request is specified or request is 0")?;
        let limit = limit.ok_or("ratio: no limit is specified or limit is 0")?;
        if limit as f64 / request as f64 * 1000.0 > ratio as f64 {
            return Err(format!("ratio is {ratio}, but {limit} / {request}"));
        }
    }
    Ok(())
}

/// What a pod asks for at most at any time, overhead apart; nothing where no container has the value.
pub(crate) fn total(pod: &Value, kind: &str) -> Option<u128> {
    let cpu = |container: &Value| of(container, kind, "cpu").unwrap_or(0);
    containers(pod).find_map(|(container, _)| of(container, kind, "cpu"))?;
    let init: Vec<_> = containers(pod)
        .skip(items(&pod["spec"]["containers"]).count())
        .collect();
    let sidecars = |before: usize| -> u128 {
        let started = init[..before].iter().filter(|(_, ends)| !ends);
        started.map(|(container, _)| cpu(container)).sum()
    };
    let starting = init.iter().enumerate().filter(|(_, (_, ends))| *ends);
    let starting = starting.map(|(index, (container, _))| sidecars(index) + cpu(container));
    let running = items(&pod["spec"]["containers"]).map(cpu).sum::<u128>() + sidecars(init.len());
    starting.chain([running]).max()
}

pub(crate) fn overhead(pod: &Value) -> u128 {
    amount(&pod["spec"]["overhead"]["cpu"]).unwrap_or(0)
}

// === classes and quotas ===

/// `ComputePodQOS`.
pub(crate) fn class(pod: &Value) -> &'static str {
    let (mut requests, mut limits) = (BTreeMap::new(), BTreeMap::new());
    let mut guaranteed = true;
    for (container, _) in containers(pod) {
        let mut limited = 0;
        for resource in ["cpu", "memory"] {
            for (kind, sums) in [("requests", &mut requests), ("limits", &mut limits)] {
                let amount = of(container, kind, resource).filter(|amount| *amount > 0);
                if let Some(amount) = amount {
                    *sums.entry(resource).or_insert(0) += amount;
                    limited += usize::from(kind == "limits");
                }
            }
        }
        guaranteed &= limited == 2;
    }
    match requests.is_empty() && limits.is_empty() {
        true => "BestEffort",
        false if guaranteed && requests == limits => "Guaranteed",
        false => "Burstable",
    }
}

/// Whether a quota counts a pod.
pub(crate) fn counts(quota: &Value, pod: &Value) -> bool {
    let terminating = pod["spec"]["activeDeadlineSeconds"].is_number();
    let priority = pod["spec"]["priorityClassName"].as_str();
    items(&quota["spec"]["scopes"]).all(|scope| match scope.as_str() {
        Some("Terminating") => terminating,
        Some("NotTerminating") => !terminating,
        Some("NotBestEffort") => class(pod) != "BestEffort",
        other => panic!("the generator makes no scope {other:?}"),
    }) && items(&quota["spec"]["scopeSelector"]["matchExpressions"]).all(|requirement| {
        let listed = items(&requirement["values"]).any(|value| value.as_str() == priority);
        match requirement["operator"].as_str() {
            Some("In") => listed,
            Some("NotIn") => !listed,
            Some("Exists") => priority.is_some(),
            _ => priority.is_none(),
        }
    })
}

/// Whether a quota that counts a pod takes it.
pub(crate) fn quota_admits(quota: &Value, pod: &Value) -> Result<(), String> {
    for (key, hard) in quota["status"]["hard"].as_object().into_iter().flatten() {
        let kind = if key == "limits.cpu" {
            "limits"
        } else {
            "requests"
        };
        let missing = containers(pod).find(|(container, _)| of(container, kind, "cpu").is_none());
        if let Some((container, _)) = missing {
            return Err(format!("must specify {key} for {}", container["name"]));
        }
        let used = amount(&quota["status"]["used"][key]).unwrap_or(0);
        let asked = total(pod, kind).unwrap_or(0) + overhead(pod);
        if used + asked > amount(hard).expect("an amount") {
            return Err(format!("{key}: {used} + {asked} exceed {hard}"));
        }
    }
    Ok(())
}

// === nodes ===

/// The most that a Linux node has.
pub(crate) fn largest_node(nodes: &[Value]) -> Option<u128> {
    let linux = nodes.iter().filter(|node| !is_windows(node));
    linux
        .filter_map(|node| amount(&node["status"]["allocatable"]["cpu"]))
        .max()
}

fn is_windows(node: &Value) -> bool {
    node["status"]["nodeInfo"]["operatingSystem"] == "windows"
}

/// Whether a pod could land on a node whose kubelet is older than 1.33.
pub(crate) fn may_land_on_old(pod: &Value, nodes: &[Value]) -> bool {
    nodes.iter().any(|node| {
        let version = node["status"]["nodeInfo"]["kubeletVersion"].as_str();
        let is_old = version.is_some_and(|version| version.starts_with("v1.32"));
        let pool = &pod["spec"]["nodeSelector"]["pool"];
        is_old
            && !is_windows(node)
            && node["spec"]["unschedulable"] != true
            && (pool.is_null() || *pool == node["metadata"]["labels"]["pool"])
            && items(&node["spec"]["taints"]).all(|taint| tolerated(pod, taint))
    })
}

fn tolerated(pod: &Value, taint: &Value) -> bool {
    items(&pod["spec"]["tolerations"]).any(|toleration| {
        let exists = toleration["operator"] == "Exists";
        let key = (exists && toleration["key"].is_null()) || toleration["key"] == taint["key"];
        let effect = toleration["effect"].is_null() || toleration["effect"] == taint["effect"];
        key && effect && (exists || toleration["value"] == taint["value"])
    })
}
