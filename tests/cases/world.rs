//! What the cases start from and what must come of it, as plain objects: nothing here asks the code under test.

use std::collections::BTreeMap;

use anyhow::{Context, bail, ensure};
use chrono::{DateTime, Utc};
use serde_json::{Map, Value, json};

use crate::{
    data::{Admit, Apply, Cases, Id, Kind, Life, Look, NamedBoost, NodeNote, QuotaNote, Stored},
    notation::{self, Container, Until, merge, rfc3339, seconds, time},
};

/// Label and annotation key of our marks.
pub const KEY: &str = "autoscaling.x-k8s.io/startup-cpu-boost";
/// When pods are boosted.
pub const BOOSTED: &str = "09:59:58";
/// When pods are scheduled.
const SCHEDULED: &str = "10:00:00";

/// A boost object.
#[derive(Clone, Debug)]
pub struct Boost {
    /// Its kind.
    pub kind: Kind,
    /// Its namespace; empty for a boost of the cluster.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// When it was created.
    pub created: DateTime<Utc>,
    /// The object.
    pub object: Value,
    /// The field that makes it invalid.
    pub invalid: Option<String>,
}

impl Boost {
    fn read(note: &NamedBoost) -> anyhow::Result<Self> {
        let namespace = match note.kind {
            Kind::StartupCPUBoost => note.namespace.as_deref().unwrap_or("ns"),
            Kind::ClusterStartupCPUBoost => "",
        };
        let until = note.until.as_deref().unwrap_or("Ready");
        let created = time(note.created.as_deref().unwrap_or("09:00:00"))?;
        let mut object = notation::boost(&note.name, namespace, &note.boost, until)?;
        object["kind"] = json!(note.kind.as_str());
        if namespace.is_empty() {
            merge(&mut object, &json!({"metadata": {"namespace": null}}));
        }
        merge(&mut object, note.merge.as_ref().unwrap_or(&json!({})));
        Ok(Self {
            kind: note.kind,
            namespace: namespace.to_owned(),
            name: note.name.clone(),
            created,
            object,
            invalid: note.invalid.clone(),
        })
    }

    /// B1's boost with a change.
    pub fn applied(apply: &Apply) -> anyhow::Result<Self> {
        Self::applied_as(apply.kind, apply)
    }

    /// The same as a boost of this kind.
    pub fn applied_as(kind: Kind, apply: &Apply) -> anyhow::Result<Self> {
        let mut boost = Self::read(&NamedBoost {
            kind,
            ..b("+50".to_owned())
        })?;
        let object = &mut boost.object;
        let policy = &mut object["spec"]["resourcePolicy"]["containerPolicies"][0];
        merge(policy, apply.policy.as_ref().unwrap_or(&json!({})));
        if let Some(duration) = &apply.duration {
            object["spec"]["durationPolicy"] = duration.clone();
        }
        if let Some(selector) = &apply.selector {
            object["selector"] = selector.clone();
        }
        merge(object, apply.merge.as_ref().unwrap_or(&json!({})));
        Ok(boost)
    }

    /// The boosts that our definition finds, `b` first.
    pub fn stored(stored: &Stored) -> anyhow::Result<Vec<Self>> {
        let mut b = Self::applied(&stored.change)?;
        b.invalid = Some(stored.invalid.clone());
        let beside = stored.beside.iter().map(Self::read);
        std::iter::once(Ok(b)).chain(beside).collect()
    }

    /// The same once `b` has been corrected.
    pub fn corrected(stored: &Stored) -> anyhow::Result<Vec<Self>> {
        let mut boosts = Self::stored(stored)?;
        if let Some(change) = &stored.corrected {
            merge(&mut boosts[0].object, change);
            boosts[0].invalid = None;
        }
        Ok(boosts)
    }
}

fn b(boost: String) -> NamedBoost {
    NamedBoost {
        name: "b".to_owned(),
        boost,
        ..NamedBoost::default()
    }
}

/// The boosts that there are when a pod is created.
pub fn boosts(admit: &Admit) -> anyhow::Result<Vec<Boost>> {
    if !admit.boosts.is_empty() {
        return admit.boosts.iter().map(Boost::read).collect();
    }
    let Some(note) = admit.boost.clone() else {
        return Ok(Vec::new());
    };
    let mut boost = Boost::read(&NamedBoost {
        until: admit.until.clone(),
        merge: admit.boost_merge.clone(),
        ..b(note)
    })?;
    if let Some(object) = &admit.boost_object {
        ensure!(
            boost.object == *object,
            "the short and the long form of the boost differ:\n{}\n{object}",
            boost.object
        );
        boost.object = object.clone();
    }
    Ok(vec![boost])
}

/// The pod as it is sent to admission.
pub fn sent(cases: &Cases, admit: &Admit) -> anyhow::Result<Value> {
    let short = admit.pod.as_deref().map(notation::pod).transpose()?;
    let mut pod = match (&admit.object, &short, admit.as_answered) {
        (Some(object), short, None) => {
            ensure!(
                short.as_ref().is_none_or(|short| short == object),
                "the short and the long form of the pod differ"
            );
            object.clone()
        }
        (None, Some(short), None) => short.clone(),
        (None, None, Some(id)) => {
            let admit = first_admit(cases, id)?;
            answered(cases, admit, &boosts(admit)?, time(BOOSTED)?)?
        }
        _ => bail!("which pod is it?"),
    };
    merge(&mut pod, admit.merge.as_ref().unwrap_or(&json!({})));
    for (map, mark) in [("labels", &admit.label), ("annotations", &admit.annotation)] {
        if let Some(mark) = mark {
            merge(&mut pod, &json!({"metadata": {map: {KEY: mark}}}));
        }
    }
    Ok(pod)
}

/// The pod as its manifest has it.
pub fn written(cases: &Cases, admit: &Admit) -> anyhow::Result<Value> {
    let manifest = admit.manifest.clone();
    let written = Admit {
        pod: manifest.or_else(|| admit.pod.clone()),
        ..admit.clone()
    };
    sent(cases, &written)
}

/// The nodes that there are.
pub fn nodes(admit: &Admit) -> Vec<Value> {
    let only = [NodeNote {
        cpu: "64".to_owned(),
        kubelet: None,
        labels: BTreeMap::new(),
        taints: Vec::new(),
    }];
    let nodes = admit.nodes.as_deref().unwrap_or(&only).iter().enumerate();
    let node = |(index, node): (usize, &NodeNote)| {
        let kubelet = node.kubelet.as_deref().unwrap_or("v1.36.3");
        json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": format!("n{index}"), "labels": node.labels},
            "spec": {"taints": node.taints},
            "status": {
                "allocatable": {"cpu": node.cpu},
                "nodeInfo": {"kubeletVersion": kubelet, "operatingSystem": "linux"},
            },
        })
    };
    nodes.map(node).collect()
}

/// The namespace's LimitRanges.
pub fn limit_ranges(admit: &Admit) -> Vec<Value> {
    let range = limit_range("bounds", &admit.limit_ranges);
    let some = !admit.limit_ranges.is_empty();
    some.then_some(range).into_iter().collect()
}

/// A LimitRange with these entries.
pub fn limit_range(name: &str, entries: &[Value]) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"limits": entries},
    })
}

/// The namespace's ResourceQuotas.
pub fn quotas(notes: &[QuotaNote]) -> Vec<Value> {
    let quota = |quota: &QuotaNote| {
        json!({
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": quota.name, "namespace": "ns"},
            "spec": {"hard": quota.hard},
            "status": {"hard": quota.hard, "used": quota.used},
        })
    };
    notes.iter().map(quota).collect()
}

/// The first pod of another case.
pub fn first_admit(cases: &Cases, id: Id) -> anyhow::Result<&Admit> {
    cases
        .get(id)?
        .admit
        .first()
        .with_context(|| format!("{id} creates no pod"))
}

/// The pod after the right answer, given at `at`.
pub fn answered(
    cases: &Cases,
    admit: &Admit,
    boosts: &[Boost],
    at: DateTime<Utc>,
) -> anyhow::Result<Value> {
    let mut pod = sent(cases, admit)?;
    match admit.answer.as_str() {
        "untouched" => {}
        "unmarked" => {
            for map in ["labels", "annotations"] {
                if pod["metadata"].get(map).is_some() {
                    merge(&mut pod, &json!({"metadata": {map: {KEY: null}}}));
                }
            }
        }
        values => {
            let record = record(admit, boosts, &pod, at)?.to_string();
            for container in notation::containers(values)? {
                set_cpu(&mut pod, &container)?;
            }
            let by = admit.by.as_deref().unwrap_or("b");
            let marks = json!({"labels": {KEY: by}, "annotations": {KEY: record}});
            merge(&mut pod, &json!({"metadata": marks}));
        }
    }
    Ok(pod)
}

/// The record that the right answer writes.
fn record(
    admit: &Admit,
    boosts: &[Boost],
    pod: &Value,
    at: DateTime<Utc>,
) -> anyhow::Result<Value> {
    let answer = notation::containers(&admit.answer)?;
    let given = |text: &Option<String>| text.as_deref().map(notation::containers).transpose();
    let present = |container: &Container| -> anyhow::Result<Container> {
        let found = find(pod, &container.name)?;
        Ok(Container {
            request: cpu(found, "requests"),
            limit: cpu(found, "limits"),
            ..container.clone()
        })
    };
    let originals = match given(&admit.init)? {
        Some(originals) => originals,
        None => answer.iter().map(present).collect::<anyhow::Result<_>>()?,
    };
    let set = match given(&admit.set)? {
        Some(set) => set,
        None => answer
            .iter()
            .map(|container| {
                let was = present(container)?;
                let changed = |was: &Option<String>, is: &Option<String>| match is {
                    is if is == was => None,
                    None => Some(String::new()),
                    is => is.clone(),
                };
                Ok(Container {
                    request: changed(&was.request, &container.request),
                    limit: changed(&was.limit, &container.limit),
                    ..was
                })
            })
            .collect::<anyhow::Result<_>>()?,
    };
    let map = |containers: &[Container], value: fn(&Container) -> &Option<String>| {
        let map: Map<String, Value> = containers
            .iter()
            .filter_map(|container| {
                let value = value(container).as_ref()?;
                Some((container.name.clone(), json!(value)))
            })
            .collect();
        map
    };
    let by = admit.by.as_deref().unwrap_or("b");
    let winner = boosts
        .iter()
        .find(|boost| boost.name == by)
        .with_context(|| format!("there is no boost {by}"))?;
    let until = Until::of(&winner.object["spec"]["durationPolicy"])?;
    let mut record = Map::new();
    record.insert("state".into(), json!("Active"));
    record.insert("timestamp".into(), json!(rfc3339(at)));
    for (field, map) in [
        (
            "initCPURequests",
            map(&originals, |container| &container.request),
        ),
        (
            "initCPULimits",
            map(&originals, |container| &container.limit),
        ),
        (
            "boostedCPURequests",
            map(&set, |container| &container.request),
        ),
        ("boostedCPULimits", map(&set, |container| &container.limit)),
    ] {
        if !map.is_empty() {
            record.insert(field.into(), map.into());
        }
    }
    if !admit.clamped.is_empty() {
        record.insert("clamped".into(), json!(admit.clamped));
    }
    record.insert("boost".into(), json!(by));
    if winner.kind != Kind::StartupCPUBoost {
        record.insert("boostKind".into(), json!(winner.kind.as_str()));
    }
    let deadline = admit
        .flags
        .get("boost-deadline")
        .map_or(Ok(3600), |text| seconds(text))?;
    record.insert("end".into(), until.recorded(deadline));
    Ok(record.into())
}

/// The container of that name.
pub fn find<'a>(pod: &'a Value, name: &str) -> anyhow::Result<&'a Value> {
    ["containers", "initContainers"]
        .iter()
        .filter_map(|list| pod["spec"].get(*list)?.as_array())
        .flatten()
        .find(|container| container["name"] == name)
        .with_context(|| format!("the pod has no container {name}"))
}

/// A container's CPU value.
pub fn cpu(container: &Value, kind: &str) -> Option<String> {
    let cpu = container.get("resources")?.get(kind)?.get("cpu")?;
    Some(cpu.as_str().map_or_else(|| cpu.to_string(), str::to_owned))
}

/// Gives a container exactly these CPU values.
fn set_cpu(pod: &mut Value, to: &Container) -> anyhow::Result<()> {
    let list = ["containers", "initContainers"]
        .into_iter()
        .find(|list| {
            pod["spec"][*list]
                .as_array()
                .is_some_and(|list| list.iter().any(|container| container["name"] == to.name))
        })
        .with_context(|| format!("the pod has no container {}", to.name))?;
    let mut resources = json!({});
    for (kind, value) in [("requests", &to.request), ("limits", &to.limit)] {
        let had = cpu(find(pod, &to.name)?, kind);
        if value.is_some() || had.is_some() {
            resources[kind] = json!({"cpu": value});
        }
    }
    let change = json!({"spec": {list: [{"name": to.name, "resources": resources}]}});
    merge(pod, &change);
    Ok(())
}

/// A boosted pod and the boosts around it, as they are at one look.
#[derive(Clone, Debug)]
pub struct World {
    /// The pod.
    pub pod: Value,
    /// The boosts.
    pub boosts: Vec<Boost>,
    /// The time.
    pub now: DateTime<Utc>,
    /// The boosts as they were at first.
    first: Vec<Boost>,
    /// The record that can be made again from what the owner's template says.
    repairable: Option<Value>,
    /// How the pod was created.
    admit: Admit,
    /// Whether `--boost-on-restart` is set.
    on_restart: bool,
    /// The boost that a write of ours would be about.
    policies: String,
    versions: u32,
}

impl World {
    /// The pod as it is when its life begins: boosted, scheduled, running, not Ready.
    pub fn begin(cases: &Cases, id: Id, life: &Life) -> anyhow::Result<Self> {
        let admit = admitted(cases, id, life)?;
        let boosts = boosts(&admit)?;
        let at = time(life.boosted.as_deref().unwrap_or(BOOSTED))?;
        let mut pod = match &life.annotation {
            None => answered(cases, &admit, &boosts, at)?,
            Some(annotation) => {
                let mut pod = sent(cases, &admit)?;
                let marks = json!({"labels": {KEY: "b"}, "annotations": {KEY: annotation}});
                merge(&mut pod, &json!({"metadata": marks}));
                pod
            }
        };
        if let Some(change) = &life.record {
            let change = changed_record(&pod, change)?;
            merge(&mut pod, &change);
        }
        merge(
            &mut pod,
            &json!({"metadata": {
                "uid": "U",
                "resourceVersion": "V1",
                "generation": 1,
                "creationTimestamp": rfc3339(at),
            }}),
        );
        let repairable = match &life.template {
            None => None,
            Some(template) => Some(repaired(&pod, template)?),
        };
        let mut world = Self {
            pod,
            repairable,
            first: boosts.clone(),
            boosts,
            now: at,
            on_restart: life
                .flags
                .get("boost-on-restart")
                .is_some_and(|flag| flag == "true"),
            policies: admit.boost.clone().unwrap_or_default(),
            admit,
            versions: 1,
        };
        world.schedule(SCHEDULED)?;
        Ok(world)
    }

    /// Makes the changes that precede a look.
    pub fn change(&mut self, look: &Look) -> anyhow::Result<()> {
        if let Some(at) = &look.at {
            self.now = time(at)?;
        }
        if let Some(scheduled) = &look.scheduled {
            self.schedule(scheduled)?;
        }
        if let Some(since) = &look.ready {
            let since = rfc3339(time(since)?);
            let condition =
                |kind| json!({"type": kind, "status": "True", "lastTransitionTime": since});
            let statuses = self.statuses(|_| json!({"ready": true, "started": true}));
            merge(
                &mut self.pod,
                &json!({"status": {"conditions": [condition("ContainersReady"), condition("Ready")]}}),
            );
            merge(&mut self.pod, &statuses);
        }
        if let Some(restarted) = &look.restarted {
            self.restart(restarted)?;
        }
        if let Some(phase) = &look.phase {
            merge(&mut self.pod, &json!({"status": {"phase": phase}}));
        }
        for (map, mark) in [("labels", &look.label), ("annotations", &look.annotation)] {
            if let Some(mark) = mark {
                let mark = Some(mark).filter(|mark| *mark != "removed");
                merge(&mut self.pod, &json!({"metadata": {map: {KEY: mark}}}));
            }
        }
        if let Some(change) = &look.record {
            let change = changed_record(&self.pod, change)?;
            merge(&mut self.pod, &change);
        }
        if let Some(values) = &look.somebody {
            for container in notation::containers(values)? {
                set_cpu(&mut self.pod, &container)?;
            }
            self.resized();
        }
        if let Some(change) = &look.merge {
            merge(&mut self.pod, change);
        }
        if let Some(change) = &look.boost {
            self.change_boost(change)?;
        }
        if let Some(boost) = &look.new_boost {
            self.boosts.push(Boost::read(boost)?);
        }
        for write in look.meanwhile.iter() {
            for then in notation::Then::read(write)? {
                match then {
                    notation::Then::Resize(containers) => {
                        let body = self.resize_body(&containers);
                        self.resize(&body);
                    }
                    notation::Then::Finish(Some(by)) => {
                        let body = self.finish_body(&by)?;
                        self.finish(&body);
                    }
                    _ => bail!("{write:?} is no write"),
                }
            }
        }
        Ok(())
    }

    fn schedule(&mut self, scheduled: &str) -> anyhow::Result<()> {
        let pending = |conditions: Value| json!({"phase": "Pending", "conditions": conditions});
        let scheduled_condition = |status: &str, reason: Option<&str>, since: &str| {
            let mut condition = json!({"type": "PodScheduled", "status": status});
            condition["lastTransitionTime"] = json!(rfc3339(time(since)?));
            if let Some(reason) = reason {
                condition["reason"] = json!(reason);
            }
            anyhow::Ok(condition)
        };
        merge(&mut self.pod, &json!({"status": null}));
        match scheduled.split_once(' ') {
            Some(("not", "yet")) => {
                let status = pending(json!([]));
                merge(
                    &mut self.pod,
                    &json!({"spec": {"nodeName": null}, "status": status}),
                );
            }
            Some((why, since)) => {
                let reason = match why {
                    "unschedulable" => "Unschedulable",
                    "gated" => "SchedulingGated",
                    _ => bail!("{scheduled:?} is no state of scheduling"),
                };
                let condition = scheduled_condition("False", Some(reason), since)?;
                let status = pending(json!([condition]));
                merge(
                    &mut self.pod,
                    &json!({"spec": {"nodeName": null}, "status": status}),
                );
            }
            None => {
                let at = time(scheduled)?;
                let since = rfc3339(at + notation::SECOND);
                let condition = |kind: &str, status: &str| json!({"type": kind, "status": status, "lastTransitionTime": since});
                let generation = self.pod["metadata"]["generation"].clone();
                let status = json!({
                    "phase": "Running",
                    "startTime": since,
                    "observedGeneration": generation,
                    "conditions": [
                        scheduled_condition("True", None, scheduled)?,
                        condition("Initialized", "True"),
                        condition("ContainersReady", "False"),
                        condition("Ready", "False"),
                    ],
                });
                merge(
                    &mut self.pod,
                    &json!({"spec": {"nodeName": "n"}, "status": status}),
                );
                let statuses = self.statuses(|container| {
                    json!({
                        "ready": false,
                        "started": false,
                        "restartCount": 0,
                        "state": {"running": {"startedAt": since}},
                        "allocatedResources": {"cpu": cpu(container, "requests")},
                    })
                });
                merge(&mut self.pod, &statuses);
            }
        }
        Ok(())
    }

    /// A container dies, and runs again at once.
    fn restart(&mut self, restarted: &str) -> anyhow::Result<()> {
        let (name, seen) = restarted
            .split_once(' ')
            .map_or((restarted, true), |(name, rest)| (name, rest != "unseen"));
        let since = rfc3339(self.now);
        let lists = ["containerStatuses", "initContainerStatuses"];
        let statuses = lists
            .iter()
            .filter_map(|list| self.pod["status"][*list].as_array());
        let mut statuses = statuses.flatten();
        let status = statuses.find(|status| status["name"] == name);
        let count = status.context("it has no status")?["restartCount"].as_i64();
        let mut change = self.statuses(|_| json!({}));
        for list in lists {
            for status in change["status"][list].as_array_mut().into_iter().flatten() {
                if status["name"] == name {
                    *status = json!({
                        "name": name,
                        "ready": false,
                        "started": false,
                        "restartCount": count.unwrap_or(0) + 1,
                        "state": {"running": {"startedAt": since}},
                    });
                }
            }
        }
        merge(&mut self.pod, &change);
        let conditions = self.pod["status"]["conditions"]
            .as_array()
            .into_iter()
            .flatten();
        let was_ready = |kind| {
            conditions
                .clone()
                .any(|it| it["type"] == kind && it["status"] == "True")
        };
        let lost = ["ContainersReady", "Ready"]
            .into_iter()
            .filter(|kind| seen && was_ready(*kind));
        let lost =
            lost.map(|kind| json!({"type": kind, "status": "False", "lastTransitionTime": since}));
        let lost: Vec<Value> = lost.collect();
        if !lost.is_empty() {
            merge(&mut self.pod, &json!({"status": {"conditions": lost}}));
        }
        Ok(())
    }

    /// How often containers have restarted, where they have.
    fn restarts(&self) -> Value {
        let lists = ["containerStatuses", "initContainerStatuses"];
        let statuses = lists
            .iter()
            .filter_map(|list| self.pod["status"][*list].as_array());
        let restarted = statuses
            .flatten()
            .filter(|status| status["restartCount"] != 0);
        let restarted = restarted.filter_map(|status| {
            Some((
                status["name"].as_str()?.to_owned(),
                status["restartCount"].clone(),
            ))
        });
        restarted.collect::<Map<_, _>>().into()
    }

    /// Whether the claim outlives the boost.
    fn keeps_claim(&self) -> bool {
        let b = self.boosts.iter().find(|boost| boost.name == "b");
        self.on_restart || b.is_some_and(|b| b.object["spec"]["boostOnRestart"] == true)
    }

    /// A change of every container's status.
    fn statuses(&self, status: impl Fn(&Value) -> Value) -> Value {
        let list = |list: &str| {
            let containers = self.pod["spec"][list].as_array().into_iter().flatten();
            containers
                .map(|container| {
                    let mut entry = json!({"name": container["name"]});
                    merge(&mut entry, &status(container));
                    entry
                })
                .collect::<Vec<_>>()
        };
        json!({"status": {
            "containerStatuses": list("containers"),
            "initContainerStatuses": list("initContainers"),
        }})
    }

    fn change_boost(&mut self, change: &str) -> anyhow::Result<()> {
        match change {
            "deleted" => self.boosts.retain(|boost| boost.name != "b"),
            "definition deleted" => self.boosts.clear(),
            "definition installed" => self.boosts.clone_from(&self.first),
            _ => return self.change_b(change),
        }
        Ok(())
    }

    fn change_b(&mut self, change: &str) -> anyhow::Result<()> {
        let boost = self
            .boosts
            .iter_mut()
            .find(|boost| boost.name == "b")
            .context("there is no b")?;
        match change.split_once(' ') {
            Some(("until", until)) => {
                let changed = NamedBoost {
                    until: Some(until.to_owned()),
                    ..b(self.policies.clone())
                };
                *boost = Boost::read(&changed)?;
            }
            Some(("selects", label)) => {
                let (key, value) = label.split_once('=').context("expected key=value")?;
                boost.object["selector"] = json!({"matchLabels": {key: value}});
            }
            _ => bail!("{change:?} is no change of a boost"),
        }
        Ok(())
    }

    fn preconditions(&self) -> Value {
        let metadata = &self.pod["metadata"];
        json!({"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]})
    }

    /// The body of the resize that sets exactly these values.
    pub fn resize_body(&self, containers: &[Container]) -> Value {
        let mut spec = json!({});
        for container in containers {
            let mut resources = json!({});
            for (kind, value) in [
                ("requests", &container.request),
                ("limits", &container.limit),
            ] {
                if let Some(value) = value {
                    resources[kind] = json!({"cpu": value});
                }
            }
            let entry = json!({"name": container.name, "resources": resources});
            match &mut spec[container.role.list()] {
                Value::Array(list) => list.push(entry),
                list => *list = json!([entry]),
            }
        }
        json!({"metadata": self.preconditions(), "spec": spec})
    }

    /// The body of the finish: the record ended by this, all else in it as it was.
    pub fn finish_body(&self, by: &str) -> anyhow::Result<Value> {
        let text = record_text(&self.pod).unwrap_or_default();
        let read = serde_json::from_str(text).ok();
        let mut record: Value = read
            .or_else(|| self.repairable.clone())
            .context("there is no record to finish")?;
        record["state"] = json!("Reverted");
        record["endedTimestamp"] = json!(rfc3339(self.now));
        record["endedBy"] = json!(by);
        let mut body = self.drop_claim_body();
        if self.keeps_claim() && by != "Terminated" {
            record["restarts"] = self.restarts();
            body = json!({"metadata": self.preconditions()});
        }
        body["metadata"]["annotations"] = json!({KEY: record.to_string()});
        Ok(body)
    }

    /// The body of the first write of a raise to these values.
    pub fn claim_body(&self, values: &str) -> anyhow::Result<Value> {
        let admit = Admit {
            answer: values.to_owned(),
            init: None,
            set: None,
            ..self.admit.clone()
        };
        let mut record = record(&admit, &self.boosts, &self.pod, self.now)?;
        record["cause"] = json!("Restart");
        record["restarts"] = self.restarts();
        let mut metadata = self.preconditions();
        metadata["labels"] = json!({KEY: "b"});
        metadata["annotations"] = json!({KEY: record.to_string()});
        Ok(json!({"metadata": metadata}))
    }

    /// The body that remembers restarts for which there is no boost.
    pub fn give_up_body(&self) -> anyhow::Result<Value> {
        let text = record_text(&self.pod).context("there is no record")?;
        let mut record: Value = serde_json::from_str(text)?;
        record["restarts"] = self.restarts();
        let mut metadata = self.preconditions();
        metadata["annotations"] = json!({KEY: record.to_string()});
        Ok(json!({"metadata": metadata}))
    }

    /// The body that only drops the claim.
    pub fn drop_claim_body(&self) -> Value {
        let mut metadata = self.preconditions();
        metadata["labels"] = json!({KEY: null});
        json!({"metadata": metadata})
    }

    /// Writes a resize, which the kubelet then does.
    pub fn resize(&mut self, body: &Value) {
        merge(&mut self.pod, body);
        self.resized();
        self.written();
    }

    /// Writes a finish.
    pub fn finish(&mut self, body: &Value) {
        merge(&mut self.pod, body);
        self.written();
    }

    /// The pod is in another version than it was.
    pub fn written(&mut self) {
        self.versions += 1;
        self.pod["metadata"]["resourceVersion"] = json!(format!("V{}", self.versions));
    }

    /// The kubelet has done what is in `spec`.
    fn resized(&mut self) {
        let generation = self.pod["metadata"]["generation"]
            .as_i64()
            .unwrap_or_default()
            + 1;
        self.pod["metadata"]["generation"] = json!(generation);
        if self.pod["spec"].get("nodeName").is_some() {
            self.pod["status"]["observedGeneration"] = json!(generation);
            let allocated = self.statuses(
                |container| json!({"allocatedResources": {"cpu": cpu(container, "requests")}}),
            );
            merge(&mut self.pod, &allocated);
        }
    }
}

/// A ReplicaSet whose template has these containers.
pub fn owner(template: &str) -> anyhow::Result<Value> {
    let labels = json!({"app": "a"});
    let mut template = notation::pod(template)?;
    template["metadata"] = json!({"labels": labels});
    Ok(json!({
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": "owner", "namespace": "ns"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": template["metadata"], "spec": template["spec"]},
        },
    }))
}

/// What makes a pod the ReplicaSet's.
pub fn owned_by(owner: &Value) -> Value {
    json!({"metadata": {"ownerReferences": [{
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": true,
    }]}})
}

/// The record that a boosted pod must get again, where it is lost: as it was, except for what was set, which nothing but
/// the record can tell. The template says the originals, the boost all else, and the pod was boosted when it was created.
fn repaired(pod: &Value, template: &str) -> anyhow::Result<Value> {
    let mut record: Value = serde_json::from_str(record_text(pod).context("there is no record")?)?;
    merge(
        &mut record,
        &json!({"boostedCPURequests": null, "boostedCPULimits": null}),
    );
    for container in notation::containers(template)? {
        let originals = [
            ("initCPURequests", &container.request),
            ("initCPULimits", &container.limit),
        ];
        for (map, original) in originals {
            let recorded = record.get(map).and_then(|map| map.get(&container.name));
            ensure!(
                recorded.and_then(Value::as_str) == original.as_deref(),
                "the template's {} has other values than the pod was created with",
                container.name
            );
        }
    }
    Ok(record)
}

/// The change of a pod that changes its record so.
pub fn changed_record(pod: &Value, change: &Value) -> anyhow::Result<Value> {
    let text = record_text(pod).context("there is no record to change")?;
    let mut record: Value = serde_json::from_str(text)?;
    merge(&mut record, change);
    Ok(json!({"metadata": {"annotations": {KEY: record.to_string()}}}))
}

/// The annotation with the record.
pub fn record_text(pod: &Value) -> Option<&str> {
    pod["metadata"].get("annotations")?.get(KEY)?.as_str()
}

/// The creation of the pod that lives this life.
pub fn admitted(cases: &Cases, id: Id, life: &Life) -> anyhow::Result<Admit> {
    let own = cases.get(id)?.admit.first();
    let mut admit = match (life.of, own) {
        (Some(of), _) => first_admit(cases, of)?.clone(),
        (None, Some(own)) => own.clone(),
        (None, None) => Admit {
            pod: Some("app 250m/500m".to_owned()),
            boost: Some("+50".to_owned()),
            answer: "380m/750m".to_owned(),
            ..Admit::default()
        },
    };
    for (to, from) in [
        (&mut admit.pod, &life.pod),
        (&mut admit.boost, &life.boost),
        (&mut admit.until, &life.until),
    ] {
        if from.is_some() {
            to.clone_from(from);
        }
    }
    if let Some(answer) = &life.answer {
        admit.answer.clone_from(answer);
    }
    admit.remove_limits = life.remove_limits.or(admit.remove_limits);
    admit.flags.extend(life.flags.clone());
    Ok(admit)
}
