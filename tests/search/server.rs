//! The API server and the kubelet: what becomes of a stored pod.

use std::rc::Rc;

use headstart::{
    api::{BOOST_KEY, Pod},
    domain::quantity::MilliCpu,
};
use serde_json::{Value, json};

use crate::{
    leader::{Purpose, Write},
    scene::{BOOST, KINDS, NAMESPACE, Scene, at},
};

/// A pod as it is stored, and what only the search knows of it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Stored {
    pub(crate) uid: u8,
    pub(crate) version: u16,
    generation: u16,
    created: u8,
    pub(crate) claim: Option<Rc<str>>,
    pub(crate) record: Option<Rc<str>>,
    /// Request and limit of each container, in milli-CPU.
    pub(crate) values: Vec<Option<u64>>,
    /// Whether a resize has set anything but CPU.
    pub(crate) surplus: bool,
    /// When it got a node.
    scheduled: Option<u8>,
    /// When each container became ready.
    ready: Vec<Option<u8>>,
    /// When the first container restarted.
    restarted: Option<u8>,
    /// The generation that the kubelet has seen, and the requests that it has set aside.
    observed: u16,
    allocated: Vec<Option<u64>>,
    pub(crate) kubelet: Kubelet,
    pub(crate) ghost: Ghost,
}

/// What happened to a pod, as far as invariants ask. The numbers are sets of values, a bit for each.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Ghost {
    /// Values that the tenant set last, to something that is not ours.
    pub(crate) theirs: u8,
    /// Values that an accepted resize of ours has named since the tenant last changed them.
    pub(crate) written: u8,
    /// Values that we have lowered and the kubelet has not.
    pub(crate) undone: u8,
    pub(crate) record: RecordBy,
    /// Whether the boosted values were ever in the pod, since the record was made.
    pub(crate) raised: bool,
    /// How often it was raised.
    pub(crate) raises: u8,
}

/// What the kubelet makes of the pod's latest resize.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kubelet {
    /// It is done, or there was none.
    Idle,
    /// It has not seen it.
    Behind,
    /// There is no room for it now.
    Deferred(Seen),
    /// It will never do it.
    Infeasible(Seen),
}

/// Whether that is about the latest resize, or about the one before, and the kubelet has not seen the latest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Seen {
    Yes,
    No,
}

/// Who wrote the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum RecordBy {
    /// Nobody but us.
    Us,
    /// The tenant has removed or ruined it.
    Nobody,
    /// The tenant has put something else in its place.
    Tenant,
}

/// Why a write was not accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// 409.
    Conflict,
    /// 422 on `metadata.uid`.
    OtherUid,
    /// 422 on what it says.
    Invalid(&'static str),
}

impl Stored {
    /// A pod as it is created, with the values that it asks for or has been given.
    pub(crate) fn new(scene: &Scene, uid: u8, now: u8) -> Self {
        let boosted = !scene.missed;
        let values: Vec<_> = if boosted {
            scene.boosted().collect()
        } else {
            scene.originals().collect()
        };
        let mut pod = Self {
            uid,
            version: 1,
            generation: 1,
            created: now,
            claim: boosted.then(|| BOOST.into()),
            record: boosted.then(|| scene.record(now).into()),
            surplus: false,
            scheduled: None,
            ready: vec![None; scene.containers.len()],
            restarted: None,
            observed: 0,
            allocated: Vec::new(),
            values,
            kubelet: Kubelet::Idle,
            ghost: Ghost {
                theirs: 0,
                written: 0,
                undone: 0,
                record: RecordBy::Us,
                raised: boosted,
                raises: 0,
            },
        };
        if !scene.pending {
            pod.schedule(now);
        }
        pod
    }

    /// The pod as a program reads it.
    pub(crate) fn read(&self, scene: &Scene) -> Pod {
        let marks = |mark: &Option<Rc<str>>| mark.as_deref().map(|text| json!({BOOST_KEY: text}));
        let mut conditions = vec![match self.scheduled {
            Some(when) => condition("PodScheduled", "True", "", when),
            None => condition("PodScheduled", "False", "Unschedulable", self.created),
        }];
        if let Some(when) = self.all_ready() {
            conditions.push(condition("Ready", "True", "", when));
        } else if let Some(when) = self.restarted {
            conditions.push(condition("Ready", "False", "", when));
        }
        if let Some(reason) = self.kubelet.reason() {
            conditions.push(condition("PodResizePending", "True", reason, self.created));
        }
        let statuses = scene
            .containers
            .iter()
            .zip(&self.ready)
            .zip(&self.allocated);
        let statuses = statuses.map(|((container, ready), allocated)| {
            let allocated = json!({"cpu": allocated.map(cpu)});
            let mut status =
                json!({"name": container.name, "ready": ready.is_some(), "allocatedResources": allocated});
            if let Some(when) = self.restarted {
                status["restartCount"] = json!(1);
                status["state"] = json!({"running": {"startedAt": at(when)}});
            }
            status
        });
        let observed = self
            .scheduled
            .filter(|_| !scene.upstream)
            .map(|_| self.observed);
        let pod = json!({
            "metadata": {
                "name": "p", "namespace": NAMESPACE, "uid": self.uid.to_string(),
                "resourceVersion": self.version.to_string(), "generation": self.generation,
                "creationTimestamp": at(self.created),
                "labels": marks(&self.claim), "annotations": marks(&self.record),
            },
            "spec": {"nodeName": self.scheduled.map(|_| "n"), "containers": scene.spec(&self.values)},
            "status": {"conditions": conditions, "containerStatuses": statuses.collect::<Vec<_>>(),
                "observedGeneration": observed},
        });
        serde_json::from_value(pod).expect("a pod")
    }

    fn all_ready(&self) -> Option<u8> {
        let ready = self.ready.iter().copied().collect::<Option<Vec<u8>>>();
        ready?.into_iter().max()
    }

    pub(crate) fn has_node(&self) -> bool {
        self.scheduled.is_some()
    }

    /// Whether it is Guaranteed. With the memory that all have, it is Burstable otherwise.
    pub(crate) fn is_guaranteed(&self, scene: &Scene) -> bool {
        scene.equal_memory
            && self
                .values
                .chunks(2)
                .all(|pair| pair[1].is_some() && pair[0] == pair[1])
    }

    /// The next version of it, where anything has changed.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Self)) -> Option<Self> {
        let mut after = self.clone();
        change(&mut after);
        if after == *self {
            return None;
        }
        after.version += 1;
        Some(after)
    }

    /// A resize by anybody, with the rules of the API server. Metadata in it is dropped.
    pub(crate) fn resize(&self, scene: &Scene, body: &Value) -> Result<Self, Refusal> {
        let mut after = self.clone();
        for patch in body["spec"]["containers"].as_array().into_iter().flatten() {
            let mut containers = scene.containers.iter();
            let Some(container) = containers.position(|it| patch["name"] == it.name) else {
                return Err(Refusal::Invalid("a container is added"));
            };
            for (kind, name) in KINDS.iter().enumerate() {
                for (key, value) in patch["resources"][name].as_object().into_iter().flatten() {
                    let milli = value.as_str().and_then(|text| text.parse().ok());
                    match (key.as_str(), milli.map(MilliCpu::milli)) {
                        ("cpu", Some(milli)) => after.values[2 * container + kind] = Some(milli),
                        ("cpu", None) => return Err(Refusal::Invalid("a value is removed")),
                        _ => after.surplus = true,
                    }
                }
            }
        }
        let above = |pair: &[Option<u64>]| pair[1].is_some_and(|limit| pair[0] > Some(limit));
        if after.values.chunks(2).any(above) {
            return Err(Refusal::Invalid("a request is above its limit"));
        }
        if after.is_guaranteed(scene) != self.is_guaranteed(scene) {
            return Err(Refusal::Invalid("the QoS class changes"));
        }
        if after == *self {
            return Ok(after);
        }
        after.version += 1;
        after.generation += 1;
        if after.has_node() {
            // The conditions that tell of an earlier resize stay until the kubelet has seen this one.
            after.kubelet = match self.kubelet {
                Kubelet::Deferred(_) => Kubelet::Deferred(Seen::No),
                Kubelet::Infeasible(_) => Kubelet::Infeasible(Seen::No),
                Kubelet::Idle | Kubelet::Behind => Kubelet::Behind,
            };
        }
        Ok(after)
    }

    /// Whether a write can be accepted now or later, by this pod or by another of its name. Versions only grow.
    pub(crate) fn may_accept(&self, write: &Write) -> bool {
        let metadata = &write.body["metadata"];
        let named = |key: &str| metadata.get(key).and_then(Value::as_str);
        match (named("uid"), named("resourceVersion")) {
            (Some(uid), Some(version)) => {
                uid.parse() == Ok(self.uid) && version.parse() == Ok(self.version)
            }
            _ => true,
        }
    }

    /// A write of a leader. What it changes is not judged here.
    pub(crate) fn accept(&self, scene: &Scene, write: &Write) -> Result<Self, Refusal> {
        let metadata = &write.body["metadata"];
        let differs = |key: &str, is: String| metadata.get(key).is_some_and(|named| *named != is);
        if differs("uid", self.uid.to_string()) {
            return Err(Refusal::OtherUid);
        }
        if differs("resourceVersion", self.version.to_string()) {
            return Err(Refusal::Conflict);
        }
        let mut after = if write.purpose.is_resize() {
            self.resize(scene, &write.body)?
        } else {
            let mark = |map: &str| {
                metadata[map]
                    .get(BOOST_KEY)
                    .map(|to| to.as_str().map(Rc::from))
            };
            let changed = self.change(|pod| {
                if let Some(to) = mark("labels") {
                    pod.claim = to;
                }
                if let Some(to) = mark("annotations") {
                    pod.record = to;
                }
            });
            changed.unwrap_or_else(|| self.clone())
        };
        let named = write.values(scene);
        match write.purpose {
            Purpose::Revert => {
                after.ghost.written |= named;
                if after.kubelet.has_work() {
                    after.ghost.undone |= named & !after.set_aside();
                }
            }
            Purpose::Raise => {
                after.ghost.raised = true;
                after.ghost.raises += 1;
                after.ghost.theirs &= !named;
                after.ghost.written &= !named;
            }
            Purpose::Claim => after.ghost.raised = false,
            Purpose::Finish => {}
        }
        Ok(after)
    }

    /// The requests that the kubelet has never raised, or has lowered already.
    fn set_aside(&self) -> u8 {
        let requests = self
            .values
            .iter()
            .step_by(2)
            .zip(&self.allocated)
            .enumerate();
        let done = requests.filter(|(_, (asked, allocated))| asked == allocated);
        done.map(|(container, _)| 1 << (2 * container)).sum()
    }

    /// A node is found, and its kubelet runs what is asked for.
    pub(crate) fn schedule(&mut self, now: u8) {
        self.scheduled = Some(now);
        self.actuate();
    }

    /// A container is ready; the pod is when all are.
    pub(crate) fn becomes_ready(&mut self, container: usize, now: u8) {
        self.ready[container].get_or_insert(now);
    }

    /// Whether its container may restart: once, when it has been ready.
    pub(crate) fn may_restart(&self) -> bool {
        self.restarted.is_none() && self.all_ready().is_some()
    }

    /// A container dies and runs again.
    pub(crate) fn restart(&mut self, now: u8) {
        self.restarted = Some(now);
        self.ready.fill(None);
    }

    /// The kubelet does what is asked for.
    pub(crate) fn actuate(&mut self) {
        self.allocated = self.values.iter().copied().step_by(2).collect();
        self.ghost.undone = 0;
        self.sees(Kubelet::Idle);
    }

    /// The kubelet has seen what is asked for, and this is what it makes of it.
    pub(crate) fn sees(&mut self, kubelet: Kubelet) {
        self.observed = self.generation;
        self.kubelet = kubelet;
    }
}

impl Kubelet {
    /// Whether it has yet to see, or to do, what is asked of it.
    pub(crate) fn has_work(self) -> bool {
        !matches!(self, Self::Idle | Self::Infeasible(Seen::Yes))
    }

    /// Whether it has not seen the latest.
    pub(crate) fn is_behind(self) -> bool {
        matches!(
            self,
            Self::Behind | Self::Deferred(Seen::No) | Self::Infeasible(Seen::No)
        )
    }

    /// What its condition says.
    fn reason(self) -> Option<&'static str> {
        match self {
            Self::Idle | Self::Behind => None,
            Self::Deferred(_) => Some("Deferred"),
            Self::Infeasible(_) => Some("Infeasible"),
        }
    }
}

fn condition(kind: &str, status: &str, reason: &str, when: u8) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "lastTransitionTime": at(when)})
}

/// A CPU amount as the API server stores it.
pub(crate) fn cpu(milli: u64) -> String {
    MilliCpu::new(milli).to_string()
}
