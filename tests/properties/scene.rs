//! A pod, everything that bounds its boost, and what the program answers.

use std::{collections::HashMap, fmt, sync::Arc};

use chrono::{DateTime, Utc};
use headstart::{
    api::{ClusterStartupCPUBoost, LimitRangeItem, Node, Pod, ResourceQuota, StartupCPUBoost},
    domain::{
        admission::{Admission, Outcome, Settings, admit},
        cpu::Cpu,
        limit_range::LimitRanges,
        nodes::{NodeFacts, Nodes},
        patch,
        policy::Policy,
        quantity::MilliCpu,
        quota::Quota,
        snapshot::{BoostIndex, DISABLED, Snapshot},
    },
};
use proptest::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use testbed::generate::{self, Choices};

use crate::naive;

/// Where all pods are created.
pub(crate) const NS: &str = "ns";

pub(crate) fn now() -> DateTime<Utc> {
    DateTime::from_timestamp(1_796_119_200, 0).expect("a valid instant")
}

/// One case.
#[derive(Clone)]
pub(crate) struct Scene {
    /// As its owner wrote it.
    pub(crate) pod: Value,
    pub(crate) ranges: Vec<Value>,
    pub(crate) quotas: Vec<Value>,
    pub(crate) nodes: Vec<Value>,
    pub(crate) settings: Settings,
    boosts: Vec<Boost>,
    disabled: bool,
}

/// A boost as it was written and as it was compiled.
type Boost = (Value, Arc<Policy>);

/// In few lines.
impl fmt::Debug for Scene {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}, disabled: {}", self.settings, self.disabled)?;
        let one = |value: &Value| vec![value.clone()];
        let boosts = self.boosts.iter().map(|(boost, _)| boost.clone()).collect();
        for (name, values) in [
            ("pod", one(&self.pod)),
            ("boosts", boosts),
            ("ranges", self.ranges.clone()),
            ("quotas", self.quotas.clone()),
            ("nodes", self.nodes.clone()),
        ] {
            writeln!(f, "{name}: {}", Value::from(values))?;
        }
        Ok(())
    }
}

/// Any of them. Few choices that matter are more than 400.
pub(crate) fn scene() -> impl Strategy<Value = Scene> {
    prop::collection::vec(any::<u32>(), 400)
        .prop_map(|script| Scene::new(&mut Choices::scripted(script)))
}

/// Reads what the generator made.
pub(crate) fn read<T: DeserializeOwned>(value: &Value) -> T {
    T::deserialize(value).expect("the generator makes what can be read")
}

impl Scene {
    pub(crate) fn new(choices: &mut Choices) -> Self {
        let pod = generate::pod(choices, "p");
        let mut boosts = vec![namespaced(choices, "b")];
        if choices.percent(30) {
            boosts.push(cluster(choices, "wide"));
        }
        let some = |choices: &mut Choices, percent| u32::from(choices.percent(percent));
        let quotas = some(choices, 30) + some(choices, 30);
        let quotas = (0..quotas).map(|_| generate::quota(choices, false));
        let quotas = quotas.collect();
        let ranges = some(choices, 50) + some(choices, 20);
        let ranges = (0..ranges).flat_map(|_| generate::limit_range_items(choices));
        let ranges = ranges.map(naive::stored).collect();
        let nodes = choices.below(4);
        let nodes = (0..nodes).map(|_| generate::node(choices, "n")).collect();
        Self {
            pod,
            ranges,
            quotas,
            nodes,
            boosts,
            disabled: choices.percent(3),
            settings: settings(choices),
        }
    }

    /// What the program knows of it.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let items: Vec<LimitRangeItem> = self.ranges.iter().map(read).collect();
        let quotas: Vec<Quota> = self.quotas.iter().map(quota).collect();
        let nodes: Vec<NodeFacts> = self.nodes.iter().map(facts).collect();
        let labels = self
            .disabled
            .then(|| (DISABLED.0.to_owned(), DISABLED.1.to_owned()));
        let labels = Arc::new(labels.into_iter().collect());
        Snapshot {
            namespaces: Arc::new(HashMap::from([(NS.into(), labels)])),
            limit_ranges: Arc::new(HashMap::from([(NS.into(), LimitRanges::new(&items))])),
            quotas: Arc::new(HashMap::from([(NS.into(), Arc::new(quotas))])),
            nodes: Arc::new(Nodes::new(&nodes)),
            ..self.unbounded()
        }
    }

    /// The boosts alone.
    pub(crate) fn unbounded(&self) -> Snapshot {
        let boosts = self.boosts.iter();
        let boosts = boosts.map(|(_, policy)| (NS.to_owned(), Arc::clone(policy)));
        Snapshot {
            boosts: Arc::new(BoostIndex::new(boosts)),
            ..Snapshot::default()
        }
    }

    /// The answer about the pod as the API server would send it.
    pub(crate) fn answer(&self) -> Result<Answer, TestCaseError> {
        self.answer_about(naive::received(&self.pod, &self.ranges))
    }

    /// The answer about a pod in these surroundings.
    pub(crate) fn answer_about(&self, sent: Value) -> Result<Answer, TestCaseError> {
        let typed: Pod = read(&sent);
        let admission = admit(&self.snapshot(), self.settings, NS, &typed, now());
        let patch = patch::admission(&typed, &admission);
        let mut after = sent.clone();
        let applied = json_patch::patch(&mut after, &patch);
        let patch = serde_json::to_value(&patch).expect("a patch is JSON");
        prop_assert!(
            applied.is_ok(),
            "{patch} does not apply to {sent}: {applied:?}"
        );
        Ok(Answer {
            sent,
            admission,
            patch,
            after,
        })
    }
}

/// What was answered.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The pod that was asked about.
    pub(crate) sent: Value,
    pub(crate) admission: Admission,
    pub(crate) patch: Value,
    /// The pod as the patch leaves it.
    pub(crate) after: Value,
}

impl Answer {
    pub(crate) fn is_boosted(&self) -> bool {
        self.admission.outcome == Outcome::Boosted
    }

    /// The pod with the values that count as its owner's: those that it has, or the originals of a record that is
    /// believed.
    pub(crate) fn original(&self) -> Value {
        let mut pod = self.sent.clone();
        let regular = pod["spec"]["containers"].as_array().map_or(0, Vec::len);
        for (index, decision) in self.admission.containers.iter().enumerate() {
            let container = if index < regular {
                &mut pod["spec"]["containers"][index]
            } else {
                &mut pod["spec"]["initContainers"][index - regular]
            };
            set(container, decision.from);
        }
        pod
    }
}

fn set(container: &mut Value, cpu: Cpu) {
    for (kind, value) in [("requests", cpu.request), ("limits", cpu.limit)] {
        let amounts = container["resources"][kind].as_object_mut();
        match (amounts, value) {
            (Some(amounts), Some(value)) => {
                amounts.insert("cpu".into(), value.to_string().into());
            }
            (Some(amounts), None) => {
                amounts.shift_remove("cpu");
            }
            (None, Some(value)) => container["resources"][kind] = json!({"cpu": value.to_string()}),
            (None, None) => {}
        }
    }
}

fn settings(choices: &mut Choices) -> Settings {
    Settings {
        remove_limits: choices.percent(40),
        max_boosted_cpu: choices
            .percent(20)
            .then(|| MilliCpu::new(choices.one_of(&[100, 1500, 3000]))),
        allow_old_kubelets: choices.percent(20),
        skip_guaranteed: choices.percent(10),
        ignore_quota: choices.percent(10),
        ..Settings::default()
    }
}

fn namespaced(choices: &mut Choices, name: &str) -> Boost {
    let mut boost = generate::boost(choices);
    boost["metadata"] = json!({"name": name, "namespace": NS});
    let policy = Policy::compile(name, now(), &read::<StartupCPUBoost>(&boost));
    (boost, Arc::new(policy.expect("it compiles")))
}

fn cluster(choices: &mut Choices, name: &str) -> Boost {
    let mut boost = generate::boost(choices);
    boost["metadata"] = json!({"name": name});
    let policy = Policy::compile(name, now(), &read::<ClusterStartupCPUBoost>(&boost));
    (boost, Arc::new(policy.expect("it compiles")))
}

fn quota(value: &Value) -> Quota {
    let mut object = value.clone();
    object["metadata"] = json!({"name": "q"});
    Quota::new(&read::<ResourceQuota>(&object))
}

fn facts(value: &Value) -> NodeFacts {
    NodeFacts::new(&read::<Node>(value))
}
