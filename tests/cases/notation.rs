//! The short notation of the cases, read into the objects that it stands for.
//!
//! | short | means |
//! |---|---|
//! | `app 250m/500m` | container `app`, CPU request 250m, CPU limit 500m; `-` is absent, and so is a limit that is left out |
//! | `380m/750m` | the same of container `app` |
//! | `app 1/1 mem=` | its memory request and limit are 1Gi each |
//! | `init(init) 1/2` · `side(sidecar) 1/2` | an init container · one with restartPolicy Always |
//! | `app 2/4, side 1/2` | both |
//! | `+50` · `fix 2/4` · `fix 2` | percentageIncrease 50 · fixedResources requests 2, limits 4 · requests only; for container `app` |
//! | `side +50` · `/a.*/ +50` | for container `side` · for those that the regular expression fits |
//! | `+50 RequestsOnly` · `+50 sidecars` | with `controlledValues` · with `includeSidecars` |
//! | `app +50; side +100` | two policies |
//! | `Ready` · `Synced=False` · `Ready+30s` | podCondition Ready/True · Synced/False · Ready with delaySeconds 30 |
//! | `60s` · `2min` · `container Started` | fixedDuration of 60 Seconds · of 2 Minutes · containerCondition |
//! | `Ready, 60s` | both |

use std::collections::BTreeMap;

use anyhow::{Context, bail, ensure};
use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use serde_json::{Map, Value, json};

/// A container as the notation has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Its name.
    pub name: String,
    /// Where it stands.
    pub role: Role,
    /// CPU request.
    pub request: Option<String>,
    /// CPU limit; empty where a record says that it was removed.
    pub limit: Option<String>,
    /// Whether it has 1Gi of memory as request and limit.
    pub memory: bool,
}

/// Where a container stands in its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// In `containers`.
    Regular,
    /// In `initContainers`.
    Init,
    /// In `initContainers`, with restartPolicy Always.
    Sidecar,
}

impl Role {
    /// The list that it stands in.
    pub const fn list(self) -> &'static str {
        match self {
            Self::Regular => "containers",
            Self::Init | Self::Sidecar => "initContainers",
        }
    }
}

/// Reads containers.
pub fn containers(text: &str) -> anyhow::Result<Vec<Container>> {
    text.split(',')
        .map(|one| container(one.trim()).with_context(|| format!("{one:?} is no container")))
        .collect()
}

fn container(text: &str) -> anyhow::Result<Container> {
    let mut words: Vec<&str> = text.split_whitespace().collect();
    let memory = words.last() == Some(&"mem=");
    if memory {
        words.pop();
    }
    let (name, values) = match words[..] {
        [values] => ("app", values),
        [name, values] => (name, values),
        _ => bail!("expected `name request/limit`"),
    };
    let (name, role) = match name.split_once('(') {
        None => (name, Role::Regular),
        Some((name, "init)")) => (name, Role::Init),
        Some((name, "sidecar)")) => (name, Role::Sidecar),
        Some((_, role)) => bail!("unknown role {role:?}"),
    };
    let (request, limit) = values.split_once('/').unwrap_or((values, "-"));
    let value = |text: &str| match text {
        "-" => None,
        "\"\"" => Some(String::new()),
        text => Some(text.to_owned()),
    };
    Ok(Container {
        name: name.to_owned(),
        role,
        request: value(request),
        limit: value(limit),
        memory,
    })
}

/// The pod that is created: `p` in `ns`, labelled `app: a`.
pub fn pod(text: &str) -> anyhow::Result<Value> {
    let mut lists: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
    for container in containers(text)? {
        let mut resources = Map::new();
        for (kind, cpu) in [
            ("requests", &container.request),
            ("limits", &container.limit),
        ] {
            let mut amounts = Map::new();
            if let Some(cpu) = cpu {
                amounts.insert("cpu".into(), json!(cpu));
            }
            if container.memory {
                amounts.insert("memory".into(), json!("1Gi"));
            }
            if !amounts.is_empty() {
                resources.insert(kind.into(), amounts.into());
            }
        }
        let mut object = json!({"name": container.name, "image": "x"});
        if container.role == Role::Sidecar {
            object["restartPolicy"] = json!("Always");
        }
        if !resources.is_empty() {
            object["resources"] = resources.into();
        }
        lists.entry(container.role.list()).or_default().push(object);
    }
    Ok(json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "ns", "labels": {"app": "a"}},
        "spec": lists,
    }))
}

/// A boost with these container policies, which selects `app: a`.
pub fn boost(name: &str, namespace: &str, policies: &str, until: &str) -> anyhow::Result<Value> {
    let policies = policies
        .split(';')
        .map(|one| policy(one.trim()).with_context(|| format!("{one:?} is no policy")))
        .collect::<anyhow::Result<Vec<_>>>()?;
    Ok(json!({
        "apiVersion": "autoscaling.x-k8s.io/v1alpha1",
        "kind": "StartupCPUBoost",
        "metadata": {"name": name, "namespace": namespace},
        "selector": {"matchLabels": {"app": "a"}},
        "spec": {
            "resourcePolicy": {"containerPolicies": policies},
            "durationPolicy": Until::read(until)?.duration_policy(),
        },
    }))
}

fn policy(text: &str) -> anyhow::Result<Value> {
    let mut words = text.split_whitespace().peekable();
    let name = words
        .next_if(|word| !word.starts_with('+') && *word != "fix")
        .unwrap_or("app");
    let regex = name
        .strip_prefix('/')
        .and_then(|name| name.strip_suffix('/'));
    let mut policy = json!({"matchContainers": match regex {
        Some(regex) => json!({"type": "RegexName", "value": regex}),
        None => json!({"type": "ExactName", "value": name}),
    }});
    match words.next().context("expected `+50` or `fix 2/4`")? {
        "fix" => {
            let values = words.next().context("expected values after fix")?;
            let mut fixed = Map::new();
            let (request, limit) = values.split_once('/').unwrap_or((values, "-"));
            fixed.insert("requests".into(), json!(request));
            if limit != "-" {
                fixed.insert("limits".into(), json!(limit));
            }
            policy["fixedResources"] = fixed.into();
        }
        percent => {
            let percent: i64 = percent.strip_prefix('+').context("expected +")?.parse()?;
            policy["percentageIncrease"] = json!({"value": percent});
        }
    }
    for word in words {
        match word {
            "sidecars" => policy["matchContainers"]["includeSidecars"] = json!(true),
            "RequestsAndLimits" | "RequestsOnly" | "LimitsOnly" => {
                policy["controlledValues"] = json!(word);
            }
            _ => bail!("unknown word {word:?}"),
        }
    }
    Ok(policy)
}

/// When a boost ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Until {
    fixed: Option<(&'static str, u64)>,
    condition: Option<(String, String, Option<u64>)>,
    container: Option<String>,
}

impl Until {
    /// Reads `Ready, 60s`.
    pub fn read(text: &str) -> anyhow::Result<Self> {
        let mut until = Self::default();
        for part in text.split(',').map(str::trim) {
            if let Some(condition) = part.strip_prefix("container ") {
                until.container = Some(condition.to_owned());
            } else if part.starts_with(|c: char| c.is_ascii_digit()) {
                until.fixed = Some(match part.strip_suffix("min") {
                    Some(minutes) => ("Minutes", minutes.parse()?),
                    None => ("Seconds", seconds(part)?),
                });
            } else {
                ensure!(!part.is_empty(), "an end is missing in {text:?}");
                let (condition, delay) = match part.split_once('+') {
                    Some((condition, delay)) => (condition, Some(seconds(delay)?)),
                    None => (part, None),
                };
                let (kind, status) = condition.split_once('=').unwrap_or((condition, "True"));
                until.condition = Some((kind.to_owned(), status.to_owned(), delay));
            }
        }
        Ok(until)
    }

    /// Reads a boost's `durationPolicy`.
    pub fn of(policy: &Value) -> anyhow::Result<Self> {
        let text = |value: &Value| {
            let text = value.as_str().context("expected a text")?;
            anyhow::Ok(text.to_owned())
        };
        let mut until = Self::default();
        if let Some(fixed) = policy.get("fixedDuration") {
            let unit = if fixed["unit"] == "Minutes" {
                "Minutes"
            } else {
                "Seconds"
            };
            let value = fixed["value"].as_u64().context("expected a number")?;
            until.fixed = Some((unit, value));
        }
        if let Some(condition) = policy.get("podCondition") {
            let delay = condition.get("delaySeconds").and_then(Value::as_u64);
            until.condition = Some((
                text(&condition["type"])?,
                text(&condition["status"])?,
                delay,
            ));
        }
        until.container = policy.get("containerCondition").map(text).transpose()?;
        Ok(until)
    }

    /// The boost's `durationPolicy`.
    pub fn duration_policy(&self) -> Value {
        let mut policy = Map::new();
        if let Some((unit, value)) = self.fixed {
            policy.insert(
                "fixedDuration".into(),
                json!({"unit": unit, "value": value}),
            );
        }
        if let Some((kind, status, delay)) = &self.condition {
            let mut condition = json!({"type": kind, "status": status});
            if let Some(delay) = delay {
                condition["delaySeconds"] = json!(delay);
            }
            policy.insert("podCondition".into(), condition);
        }
        if let Some(container) = &self.container {
            policy.insert("containerCondition".into(), json!(container));
        }
        policy.into()
    }

    /// The record's `end`, with the deadline that the flag gives.
    pub fn recorded(&self, deadline: u64) -> Value {
        let mut end = Map::new();
        let fixed = self
            .fixed
            .map(|(unit, value)| if unit == "Minutes" { value * 60 } else { value });
        if let Some(fixed) = fixed {
            end.insert("fixedSeconds".into(), json!(fixed));
        }
        let mut delayed = deadline;
        if let Some((kind, status, delay)) = &self.condition {
            let delay = delay.unwrap_or(0);
            delayed += delay;
            end.insert(
                "condition".into(),
                json!({"type": kind, "status": status, "delaySeconds": delay}),
            );
        }
        if let Some(container) = &self.container {
            end.insert("containerCondition".into(), json!(container));
        }
        end.insert(
            "deadlineSeconds".into(),
            json!(delayed.max(fixed.unwrap_or(0))),
        );
        end.into()
    }
}

/// Reads `30s`, `2m` or `1h` into seconds.
pub fn seconds(text: &str) -> anyhow::Result<u64> {
    let units = [('s', 1), ('m', 60), ('h', 3600)];
    let (number, unit) = units
        .iter()
        .find_map(|(letter, unit)| Some((text.strip_suffix(*letter)?, unit)))
        .with_context(|| format!("{text:?} is no duration"))?;
    Ok(number.parse::<u64>()? * unit)
}

/// Reads a time of 2026-12-01, `10:00:20`.
pub fn time(text: &str) -> anyhow::Result<DateTime<Utc>> {
    format!("2026-12-01T{text}Z")
        .parse()
        .with_context(|| format!("{text:?} is no time of day"))
}

/// A time as Kubernetes writes it.
pub fn rfc3339(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// One second.
pub const SECOND: TimeDelta = TimeDelta::seconds(1);

/// Merges `change` into `object`: null removes a key, and lists of things with a `name` or a `type` are merged by it,
/// where `$patch: delete` removes one.
///
/// That is what a strategic merge does with all the lists that the cases speak of.
pub fn merge(object: &mut Value, change: &Value) {
    match (object, change) {
        (Value::Object(object), Value::Object(change)) => {
            for (key, change) in change {
                if change.is_null() {
                    object.shift_remove(key);
                } else {
                    merge(object.entry(key).or_insert(Value::Null), change);
                }
            }
        }
        (Value::Array(list), Value::Array(changes))
            if !changes.is_empty() && changes.iter().all(|change| key_of(change).is_some()) =>
        {
            for change in changes {
                let key = key_of(change);
                if change["$patch"] == "delete" {
                    list.retain(|entry| key_of(entry) != key);
                } else if let Some(entry) = list.iter_mut().find(|entry| key_of(entry) == key) {
                    merge(entry, change);
                } else {
                    list.push(without_nulls(change));
                }
            }
        }
        (object, change) => *object = without_nulls(change),
    }
}

fn key_of(entry: &Value) -> Option<&str> {
    entry
        .get("name")
        .or_else(|| entry.get("type"))
        .and_then(Value::as_str)
}

fn without_nulls(value: &Value) -> Value {
    if value.is_object() {
        let mut object = json!({});
        merge(&mut object, value);
        object
    } else {
        value.clone()
    }
}

/// What is to be done about a pod with a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Then {
    /// Nothing is written, for whatever reason.
    NoWrite,
    /// Nothing before the pod changes or that time comes; where the case names none, any time or none.
    Wait(Option<DateTime<Utc>>),
    /// A resize of exactly these values.
    Resize(Vec<Container>),
    /// The record is ended, by this where the case says, and the claim dropped.
    Finish(Option<String>),
    /// The claim is dropped; the record says already that the boost has ended.
    DropClaim,
    /// The first write of a raise: the claim, and an Active record of these values.
    Claim(String),
    /// The record remembers restarts, and nothing else is written.
    GiveUp,
    /// The resize is watched: nothing is written.
    Watch(Option<String>),
    /// The pod is left alone, for this reason where the case says.
    Leave(Option<String>),
    /// The pod is forgotten: it is gone.
    Forget,
}

impl Then {
    /// Reads a decision; `or` separates those that are right alike.
    pub fn read(text: &str) -> anyhow::Result<Vec<Self>> {
        text.split(" or ").map(Self::read_one).collect()
    }

    fn read_one(text: &str) -> anyhow::Result<Self> {
        let (word, rest) = text.split_once([' ', '(']).unwrap_or((text, ""));
        let argument = rest.strip_suffix(')').filter(|rest| !rest.is_empty());
        let argument = argument.map(str::to_owned);
        Ok(match (word, rest) {
            ("no", "write") => Self::NoWrite,
            ("wait", "") => Self::Wait(None),
            ("wait", rest) => {
                let until = rest.strip_prefix("until ").context("expected until")?;
                Self::Wait(Some(time(until)?))
            }
            ("resize", rest) => Self::Resize(containers(rest)?),
            ("finish", _) => Self::Finish(argument),
            ("drop", "claim") => Self::DropClaim,
            ("claim", rest) => Self::Claim(rest.to_owned()),
            ("give", "up") => Self::GiveUp,
            ("watch", _) => Self::Watch(argument),
            ("leave", _) => Self::Leave(argument),
            ("forget", "") => Self::Forget,
            _ => bail!("{text:?} is no decision"),
        })
    }
}
