//! The pods with which a search begins, the boost that raised them, and the instants.

use std::{collections::BTreeMap, sync::Arc};

use chrono::{DateTime, TimeDelta, Utc};
use headstart::{
    api::{ContainerCondition, PodSpec, StartupCPUBoost},
    domain::{
        end::{ConditionRule, EndRule, EndSettings},
        policy::{BoostKind, Policy},
        quantity::MilliCpu,
        record::{Loan, LoanValue, NewRecord, Set},
        snapshot::BoostIndex,
    },
};
use serde_json::{Map, Value, json};

use crate::server::cpu;

/// The boost's name.
pub(crate) const BOOST: &str = "fast-start";
/// Where its pod and the boost are.
pub(crate) const NAMESPACE: &str = "ns";

/// The instants, in seconds: before anything is due but a condition, after the fixed duration of the edited rule (and
/// after the half minute of a pod that fits no node), and after every deadline.
const INSTANTS: [i64; 3] = [0, 40, 8000];
/// The last of them.
pub(crate) const LAST: u8 = 2;

/// The instant of that number.
pub(crate) fn at(instant: u8) -> DateTime<Utc> {
    let start = DateTime::from_timestamp(1_796_119_200, 0).expect("a valid instant");
    start + TimeDelta::seconds(INSTANTS[usize::from(instant)])
}

/// A container's request and limit in milli-CPU.
pub(crate) type Pair = [Option<u64>; 2];

/// The resource lists of a container, in the order of a [`Pair`].
pub(crate) const KINDS: [&str; 2] = ["requests", "limits"];

/// A container's values, asked for and boosted.
pub(crate) struct Container {
    pub(crate) name: &'static str,
    pub(crate) original: Pair,
    pub(crate) boosted: Pair,
}

/// A pod to begin with, and what may be done to it.
#[derive(Default)]
pub(crate) struct Scene {
    pub(crate) name: &'static str,
    pub(crate) containers: &'static [Container],
    /// The tenant's resizes: container, and the values that it sets.
    pub(crate) resizes: &'static [(usize, Pair)],
    /// Whether its memory alone would make it Guaranteed.
    pub(crate) equal_memory: bool,
    /// Whether its owner has a template.
    pub(crate) owned: bool,
    /// Whether its record is one of upstream's, which has the originals only, on a server that tracks no generations.
    pub(crate) upstream: bool,
    /// Whether it fits no node yet.
    pub(crate) pending: bool,
    /// Whether each container's boost ends on its own status.
    pub(crate) apart: bool,
    /// Whether admission has missed it, so that a leader raises it.
    pub(crate) missed: bool,
    /// Whether a container restarts, where that is boosted again.
    pub(crate) restarts: bool,
    /// Whether somebody raises its request above its original limit, which then comes down to the request.
    pub(crate) held_up: bool,
}

const ONE: &[Container] = &[Container {
    name: "app",
    original: [Some(100), Some(200)],
    boosted: [Some(300), Some(600)],
}];

/// All of them.
pub(crate) const SCENES: &[Scene] = &[
    Scene {
        name: "a burstable pod with an owner",
        containers: ONE,
        resizes: &[
            (0, [Some(50), None]),
            (0, [Some(150), None]),
            (0, [Some(50), Some(150)]),
            (0, [None, Some(700)]),
            (0, [Some(300), Some(600)]),
        ],
        owned: true,
        ..NONE
    },
    Scene {
        name: "a guaranteed pod",
        containers: &[Container {
            name: "app",
            original: [Some(100), Some(100)],
            boosted: [Some(300), Some(300)],
        }],
        resizes: &[
            (0, [Some(50), Some(50)]),
            (0, [Some(400), Some(400)]),
            (0, [Some(300), Some(300)]),
        ],
        equal_memory: true,
        ..NONE
    },
    Scene {
        name: "two containers that end apart",
        containers: &[
            Container {
                name: "app",
                original: [Some(100), None],
                boosted: [Some(300), None],
            },
            Container {
                name: "side",
                original: [Some(10), None],
                boosted: [Some(20), None],
            },
        ],
        resizes: &[
            (0, [Some(50), None]),
            (0, [Some(300), None]),
            (1, [Some(15), None]),
        ],
        apart: true,
        ..NONE
    },
    Scene {
        name: "a pod whose limit was removed",
        containers: &[Container {
            name: "app",
            original: [Some(100), Some(200)],
            boosted: [Some(300), None],
        }],
        resizes: &[
            (0, [Some(50), None]),
            (0, [Some(150), None]),
            (0, [None, Some(500)]),
        ],
        ..NONE
    },
    Scene {
        name: "a pod with upstream's record on an older server",
        containers: &[Container {
            name: "app",
            original: [Some(100), None],
            boosted: [Some(300), None],
        }],
        resizes: &[
            (0, [Some(50), None]),
            (0, [Some(250), None]),
            (0, [Some(300), None]),
        ],
        upstream: true,
        ..NONE
    },
    Scene {
        name: "a pod that fits no node",
        containers: ONE,
        resizes: &[(0, [Some(50), None]), (0, [Some(150), None])],
        pending: true,
        ..NONE
    },
    Scene {
        name: "a pod that admission has missed",
        containers: ONE,
        resizes: &[
            (0, [Some(50), None]),
            (0, [Some(150), None]),
            (0, [Some(300), Some(600)]),
        ],
        missed: true,
        ..NONE
    },
    Scene {
        name: "a pod of which a container restarts",
        containers: ONE,
        restarts: true,
        ..NONE
    },
    Scene {
        name: "a pod that its memory would make guaranteed",
        containers: ONE,
        resizes: RAISED,
        equal_memory: true,
        held_up: true,
        ..NONE
    },
    Scene {
        name: "a burstable pod whose request is raised above its limit",
        containers: ONE,
        resizes: RAISED,
        held_up: true,
        ..NONE
    },
];

/// Above the original limit, and not what the boost has set.
const RAISED: &[(usize, Pair)] = &[(0, [Some(250), None])];

const NONE: Scene = Scene {
    name: "",
    containers: &[],
    resizes: &[],
    equal_memory: false,
    owned: false,
    upstream: false,
    pending: false,
    apart: false,
    missed: false,
    restarts: false,
    held_up: false,
};

impl Scene {
    /// The values as asked for, in the order of a pod's values.
    pub(crate) fn originals(&self) -> impl Iterator<Item = Option<u64>> + '_ {
        self.containers.iter().flat_map(|it| it.original)
    }

    /// The values as boosted.
    pub(crate) fn boosted(&self) -> impl Iterator<Item = Option<u64>> + '_ {
        self.containers.iter().flat_map(|it| it.boosted)
    }

    /// Whether a value that somebody sets counts as theirs. What equals ours can't be told from ours, and where what we
    /// set is not recorded, nothing above the original can.
    pub(crate) fn is_theirs(&self, index: usize, value: Option<u64>) -> bool {
        let original = self.originals().nth(index).flatten();
        if self.upstream {
            value.is_some_and(|value| original.is_some_and(|original| value <= original))
        } else {
            value != self.boosted().nth(index).flatten()
        }
    }

    /// The end rule in the record.
    fn rule(&self) -> EndRule {
        let ready = ConditionRule {
            kind: "Ready".to_owned(),
            status: "True".to_owned(),
            delay_seconds: 0,
        };
        EndRule {
            fixed_seconds: None,
            condition: (!self.apart).then_some(ready),
            container_condition: self.apart.then_some(ContainerCondition::Ready),
        }
    }

    /// The record of a boost made now.
    pub(crate) fn record(&self, now: u8) -> String {
        if self.upstream {
            let values = self.containers.iter().map(|it| {
                let request = it.original[0].map(cpu);
                (it.name.to_owned(), json!(request))
            });
            let requests: Map<String, Value> = values.collect();
            return json!({"timestamp": at(now), "initCPURequests": requests}).to_string();
        }
        let value = |original: Option<u64>, boosted: Option<u64>| {
            let original = MilliCpu::new(original?);
            let set = match boosted.map(MilliCpu::new) {
                Some(boosted) if boosted == original => Set::Untouched,
                Some(boosted) => Set::To(boosted),
                None => Set::Removed,
            };
            Some(LoanValue { original, set })
        };
        let loan = |it: &Container| Loan {
            request: value(it.original[0], it.boosted[0]),
            limit: value(it.original[1], it.boosted[1]),
        };
        let loans: BTreeMap<&str, Loan> = self
            .containers
            .iter()
            .map(|it| (it.name, loan(it)))
            .collect();
        let rule = self.rule();
        let record = NewRecord {
            timestamp: at(now),
            containers: &loans,
            clamped: &BTreeMap::new(),
            raise: None,
            boost: (BoostKind::Namespaced, BOOST),
            end: &rule,
            deadline_seconds: rule.deadline_seconds(EndSettings::default()),
        };
        let record = record.text();
        if !self.missed {
            return record;
        }
        let mut record: Value = serde_json::from_str(&record).expect("JSON");
        record["cause"] = "Late".into();
        record.to_string()
    }

    /// The containers of a spec with these values.
    pub(crate) fn spec(&self, values: &[Option<u64>]) -> Value {
        let memory = if self.equal_memory { "64Mi" } else { "32Mi" };
        let containers = self.containers.iter().zip(values.chunks(2));
        let containers = containers.map(|(container, pair)| {
            let mut resources =
                json!({"requests": {"memory": memory}, "limits": {"memory": "64Mi"}});
            for (kind, value) in KINDS.iter().zip(pair) {
                if let Some(milli) = value {
                    resources[kind]["cpu"] = cpu(*milli).into();
                }
            }
            json!({"name": container.name, "resources": resources})
        });
        containers.collect()
    }

    /// The template of its owner, where it has one.
    pub(crate) fn template(&self) -> Option<PodSpec> {
        let originals: Vec<_> = self.originals().collect();
        let spec = json!({"containers": self.spec(&originals)});
        self.owned
            .then(|| serde_json::from_value(spec).expect("a spec"))
    }
}

/// The `resources` of a body that sets these values.
pub(crate) fn resources(values: Pair) -> Value {
    let mut resources = Map::new();
    for (kind, value) in KINDS.iter().zip(values) {
        if let Some(milli) = value {
            resources.insert((*kind).to_owned(), json!({"cpu": cpu(milli)}));
        }
    }
    resources.into()
}

/// The boost object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Boost {
    /// As it was when the pod was boosted.
    Unchanged,
    /// Its rule is a fixed duration now.
    Edited,
    /// Gone.
    Deleted,
}

impl Boost {
    /// What a leader knows of it.
    pub(crate) fn index(self, scene: &Scene) -> BoostIndex {
        let duration = match self {
            Self::Unchanged if scene.apart => json!({"containerCondition": "Ready"}),
            Self::Unchanged => json!({"podCondition": {"type": "Ready", "status": "True"}}),
            Self::Edited => json!({"fixedDuration": {"unit": "Seconds", "value": 30}}),
            Self::Deleted => return BoostIndex::new([]),
        };
        let containers = json!([{"matchContainers": {"type": "RegexName", "value": "."}, "percentageIncrease": {"value": 200}}]);
        let object: StartupCPUBoost = serde_json::from_value(json!({
            "apiVersion": "autoscaling.x-k8s.io/v1alpha1",
            "kind": "StartupCPUBoost",
            "metadata": {"name": BOOST, "namespace": NAMESPACE},
            "selector": {},
            "spec": {"resourcePolicy": {"containerPolicies": containers}, "durationPolicy": duration},
        }))
        .expect("a boost");
        let policy = Policy::compile(BOOST, at(0), &object).expect("it compiles");
        BoostIndex::new([(NAMESPACE.to_owned(), Arc::new(policy))])
    }
}
