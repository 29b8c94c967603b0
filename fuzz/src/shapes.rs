//! Inputs with a structure: pods as the API server sends them and as nobody should, forged records, boosts.

use headstart::api::BOOST_KEY;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use serde_json::{Map, Value, json};

/// Most containers in each list of a pod.
const MOST: usize = 48;

/// An amount as somebody may write it.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Quantity {
    /// Thousandths.
    Milli(u16),
    /// Whole units.
    Whole(u8),
    /// With a fraction.
    Fraction(u8, u16),
    /// With an exponent.
    Exponent(u8, i8),
    /// With a suffix.
    Suffix(u16, u8),
    /// A JSON number.
    Number(i16),
    /// A JSON number with a fraction.
    Float(i16, u8),
    /// A spelling that is rare or wrong.
    Odd(u8),
}

impl Quantity {
    fn value(self) -> Value {
        const SUFFIXES: [&str; 12] = [
            "n", "u", "m", "k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti", "Ei",
        ];
        const ODD: [&str; 16] = [
            "",
            "0",
            "-0",
            "-1",
            "+.5",
            "1.",
            "abc",
            "1 ",
            "1e400",
            "1e-400",
            "1M",
            "1000001",
            "3e35",
            "9223372036854775807",
            "00000000000000000000000000000000000000001",
            "null",
        ];
        match self {
            Self::Milli(milli) => format!("{milli}m").into(),
            Self::Whole(units) => units.to_string().into(),
            Self::Fraction(units, fraction) => format!("{units}.{fraction}").into(),
            Self::Exponent(units, exponent) => format!("{units}e{exponent}").into(),
            Self::Suffix(units, suffix) => format!("{units}{}", pick(&SUFFIXES, suffix)).into(),
            Self::Number(number) => number.into(),
            Self::Float(number, divisor) => (f64::from(number) / f64::from(divisor.max(1))).into(),
            Self::Odd(index) => pick(&ODD, index).into(),
        }
    }
}

fn pick<'a>(list: &[&'a str], index: u8) -> &'a str {
    list[usize::from(index) % list.len()]
}

/// A map of a pod that a client may leave out.
#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It is there.
    Present,
    /// It is not.
    Absent,
    /// It is null.
    Null,
}

impl Presence {
    /// Puts a map under its key, or not.
    fn put(self, parent: &mut Value, key: &str, map: Value) {
        match self {
            Self::Present => parent[key] = map,
            Self::Absent => {}
            Self::Null => parent[key] = Value::Null,
        }
    }
}

/// One map of amounts.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Amounts {
    presence: Presence,
    cpu: Option<Quantity>,
    memory: Option<Quantity>,
    other: bool,
}

impl Amounts {
    fn value(self) -> Value {
        let mut map = json!({});
        if let Some(cpu) = self.cpu {
            map["cpu"] = cpu.value();
        }
        if let Some(memory) = self.memory {
            map["memory"] = memory.value();
        }
        if self.other {
            map["vendor.example/gpu"] = "1".into();
        }
        map
    }
}

/// A container.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Container {
    resources: Presence,
    requests: Amounts,
    limits: Amounts,
    /// The limits are the requests.
    equal: bool,
    sidecar: bool,
    long_name: bool,
    claims: bool,
    restarts: Option<bool>,
}

impl Container {
    fn value(self, index: usize) -> Value {
        let padding = if self.long_name {
            "x".repeat(59)
        } else {
            String::new()
        };
        let mut container =
            json!({"name": format!("c{index}{padding}"), "future": {"kept": [1, null]}});
        let mut resources = json!({});
        self.requests
            .presence
            .put(&mut resources, "requests", self.requests.value());
        let limits = if self.equal {
            self.requests
        } else {
            self.limits
        };
        limits
            .presence
            .put(&mut resources, "limits", limits.value());
        if self.claims {
            resources["claims"] = json!([{"name": "gpu"}]);
        }
        self.resources.put(&mut container, "resources", resources);
        if self.sidecar {
            container["restartPolicy"] = "Always".into();
        }
        if let Some(restarts) = self.restarts {
            let policy = if restarts {
                "RestartContainer"
            } else {
                "NotRequired"
            };
            container["resizePolicy"] = json!([{"resourceName": "cpu", "restartPolicy": policy}]);
        }
        container
    }
}

/// What a forged record says that a value was set to.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Forged {
    /// What the pod has.
    Present,
    /// It was removed.
    Removed,
    /// Nothing.
    Absent,
    /// Something else.
    Other(Quantity),
}

/// A record that a pod comes with.
#[derive(Arbitrary, Clone, Debug)]
pub enum Record {
    /// Any text.
    Text(String),
    /// One that tells of the pod's containers.
    Forged {
        /// Its state; none, where it has none.
        state: Option<bool>,
        /// By container: the original request and limit, and what they were set to.
        entries: Vec<(Option<Quantity>, Forged, Option<Quantity>, Forged)>,
    },
}

impl Record {
    fn text(&self, containers: &[Value]) -> String {
        let (state, entries) = match self {
            Self::Text(text) => return text.clone(),
            Self::Forged { state, entries } => (state, entries),
        };
        let mut record = json!({});
        if let Some(active) = state {
            record["state"] = if *active { "Active" } else { "Reverted" }.into();
        }
        for (container, (request, request_set, limit, limit_set)) in containers.iter().zip(entries)
        {
            let name = container["name"].as_str().expect("a name");
            for (kind, suffix, original, set) in [
                ("requests", "CPURequests", request, request_set),
                ("limits", "CPULimits", limit, limit_set),
            ] {
                let Some(original) = original else { continue };
                record[format!("init{suffix}")][name] = original.value();
                let set = match set {
                    Forged::Absent => continue,
                    Forged::Present => container["resources"][kind]["cpu"].clone(),
                    Forged::Removed => "".into(),
                    Forged::Other(quantity) => quantity.value(),
                };
                record[format!("boosted{suffix}")][name] = set;
            }
        }
        record.to_string()
    }
}

/// A pod.
#[derive(Arbitrary, Clone, Debug)]
pub struct Pod {
    containers: Vec<Container>,
    init: Vec<Container>,
    labels: Presence,
    annotations: Presence,
    claim: bool,
    record: Option<Record>,
    /// What forbids a boost.
    special: u8,
}

impl Pod {
    /// The pod as JSON.
    #[must_use]
    pub fn value(&self) -> Value {
        let regular = self.containers.iter().take(MOST);
        let init = self.init.iter().take(MOST);
        let all: Vec<Value> = regular
            .clone()
            .chain(init)
            .enumerate()
            .map(|(index, container)| container.value(index))
            .collect();
        let (containers, init) = all.split_at(regular.len());
        let mut pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "p", "uid": "u", "resourceVersion": "1", "future": null},
            "spec": {"containers": containers, "initContainers": init, "future": [{}]},
        });
        self.put_marks(&mut pod, &all);
        match self.special {
            1 => pod["spec"]["os"] = json!({"name": "windows"}),
            2 => pod["spec"]["resources"] = json!({"limits": {"cpu": "1"}}),
            3 => pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"}),
            _ => {}
        }
        pod
    }

    fn put_marks(&self, pod: &mut Value, all: &[Value]) {
        let mut labels = Map::from_iter([("a/b~c".to_owned(), json!("d"))]);
        if self.claim {
            labels.insert(BOOST_KEY.to_owned(), json!("b"));
        }
        self.labels
            .put(&mut pod["metadata"], "labels", labels.into());
        let mut annotations = Map::from_iter([("~1/".to_owned(), json!("d"))]);
        if let Some(record) = &self.record {
            annotations.insert(BOOST_KEY.to_owned(), record.text(all).into());
        }
        self.annotations
            .put(&mut pod["metadata"], "annotations", annotations.into());
    }
}

/// A policy for containers.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct ContainerPolicy {
    target: Target,
    controlled: u8,
    sidecars: bool,
    /// Fits every other container only.
    odd: bool,
}

/// What a policy raises values to.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Target {
    /// By so much.
    Percent(u16),
    /// By very much.
    Most,
    /// To these.
    Fixed(Quantity, Option<Quantity>),
}

impl ContainerPolicy {
    /// The policy as JSON.
    fn value(self) -> Value {
        let controlled = ["RequestsAndLimits", "RequestsOnly", "LimitsOnly"];
        let name = if self.odd { "^c[0-9]*[13579](x|$)" } else { "" };
        let matcher = json!({"type": "RegexName", "value": name, "includeSidecars": self.sidecars});
        let mut policy = json!({
            "matchContainers": matcher,
            "controlledValues": pick(&controlled, self.controlled),
        });
        let percent = |value: i64| json!({"value": value});
        match self.target {
            Target::Percent(value) => policy["percentageIncrease"] = percent(value.into()),
            Target::Most => policy["percentageIncrease"] = percent(i64::MAX),
            Target::Fixed(requests, limits) => {
                policy["fixedResources"] = json!({"requests": text(requests.value())});
                if let Some(limits) = limits {
                    policy["fixedResources"]["limits"] = text(limits.value());
                }
            }
        }
        policy
    }
}

/// A boost may have no numbers with a fraction.
fn text(value: Value) -> Value {
    if value.is_f64() {
        value.to_string().into()
    } else {
        value
    }
}

/// A boost for all pods, until they are Ready.
#[must_use]
pub fn boost(policies: &[ContainerPolicy]) -> Value {
    let policies: Vec<Value> = policies
        .iter()
        .take(3)
        .map(|policy| policy.value())
        .collect();
    json!({
        "metadata": {"name": "b", "namespace": crate::NAMESPACE},
        "spec": {
            "resourcePolicy": {"containerPolicies": policies},
            "durationPolicy": {"podCondition": {"type": "Ready", "status": "True"}},
        },
    })
}
