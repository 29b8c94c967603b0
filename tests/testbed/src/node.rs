//! A stand-in for scheduler and kubelet: pods get a node, run, become Ready, are resized and go away, as told.
//!
//! It is one reconciler: `Pods::reconcile` looks at one pod, takes the next step it is due for with one write, and the write's own
//! watch event brings it back. Every status write carries uid and resourceVersion, so that a stale look writes nothing.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use chrono::{SecondsFormat, Utc};
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _, channel::mpsc, stream};
use k8s_openapi::{
    api::core::v1::{
        Binding, Container, ContainerStatus, Node, ObjectReference, Pod, PodCondition,
        ResourceRequirements,
    },
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::Status},
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ObjectMeta, Patch, PatchParams, PostParams, Preconditions},
    runtime::{
        WatchStreamExt as _,
        controller::{self, Action, applier},
        reflector::{self, ObjectRef, Store},
        watcher,
    },
};
use serde_json::{Value, json};
use tokio_util::task::AbortOnDropHandle;

use crate::wait::Steady;

/// The node that [`NodeStandIn::start`] makes and schedules to. Those of [`NodeStandIn::beside`] begin like it.
pub const NODE: &str = "stand-in";
/// Taint of the nodes that stand beside real ones, and a label of theirs by which a pod can ask for them.
pub const STAND_IN: &str = "testbed/stand-in";
/// Pods handled at once; the API server is the slower one.
const WORKERS: u16 = 64;
/// How soon a failed write, or a pod that fits nowhere, is looked at again.
const AGAIN: Duration = Duration::from_millis(50);

/// How pods fare. Annotations of a pod override it for that pod: `testbed/run-after`, `testbed/ready-after`,
/// `testbed/actuate-after`, `testbed/terminate-after` (`500ms`, `2s`, `never`), `testbed/resize` (`actuate`, `deferred`,
/// `infeasible`, `error`, `ignore`) and `testbed/schedule` (`never`, `unschedulable`).
#[derive(Clone, Debug)]
pub struct Behaviour {
    /// From bound to Running; `None` never.
    pub run_after: Option<Duration>,
    /// From Running, also after a restart, to Ready; `None` never.
    pub ready_after: Option<Duration>,
    /// From a changed spec to the report about it; `None` never.
    pub actuate_after: Option<Duration>,
    /// From the deletion to the end; `None` never.
    pub terminate_after: Option<Duration>,
    /// What becomes of a resize.
    pub resize: Resize,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            run_after: Some(Duration::ZERO),
            ready_after: Some(Duration::ZERO),
            actuate_after: Some(Duration::from_millis(50)),
            terminate_after: Some(Duration::ZERO),
            resize: Resize::Actuate,
        }
    }
}

/// What the kubelet makes of a resize.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resize {
    /// Done as asked.
    Actuate,
    /// `PodResizePending`, reason `Deferred`: does not fit now.
    Deferred,
    /// `PodResizePending`, reason `Infeasible`: will never fit.
    Infeasible,
    /// `PodResizeInProgress`, reason `Error`: allocated, but the runtime fails.
    Error {
        /// The condition's message.
        message: String,
    },
    /// Never reported, not even that the spec was seen.
    Ignore,
}

/// The running stand-in; dropping it stops it and leaves node and pods as they are.
pub struct NodeStandIn {
    pods: Arc<Pods>,
    store: Store<Pod>,
    wake: mpsc::UnboundedSender<ObjectRef<Pod>>,
    _task: AbortOnDropHandle<()>,
}

impl NodeStandIn {
    /// Makes the node and starts to look after all pods that are on it or on none. The client must be allowed everything.
    ///
    /// # Errors
    /// If the node can't be made.
    pub async fn start(client: Client, behaviour: Behaviour) -> Result<Self> {
        create_node(&client, NODE, "64", "v1.36.3").await?;
        Ok(Self::run(client, behaviour, true))
    }

    /// Makes so many nodes in a cluster that has a scheduler and real nodes too, and looks after the pods that are put there.
    /// Only pods that tolerate [`STAND_IN`] are.
    ///
    /// # Errors
    /// If a node can't be made.
    pub async fn beside(client: Client, nodes: usize, behaviour: Behaviour) -> Result<Self> {
        for number in 1..=nodes {
            let name = format!("{NODE}-{number}");
            create_node(&client, &name, "64", "v1.36.3").await?;
            let taint = json!({"key": STAND_IN, "value": "true", "effect": "NoSchedule"});
            let patch =
                json!({"metadata": {"labels": {STAND_IN: "true"}}, "spec": {"taints": [taint]}});
            Api::<Node>::all(client.clone())
                .patch(&name, &PatchParams::default(), &Patch::Merge(patch))
                .await
                .with_context(|| format!("tainting the node {name}"))?;
        }
        Ok(Self::run(client, behaviour, false))
    }

    fn run(client: Client, behaviour: Behaviour, schedules: bool) -> Self {
        let pods = Arc::new(Pods {
            client: client.clone(),
            behaviour: Mutex::new(behaviour),
            state: Mutex::default(),
            schedules,
        });
        let (store, writer) = reflector::store();
        let (wake, woken) = mpsc::unbounded();
        let observer = Arc::clone(&pods);
        let watch = watcher(Api::<Pod>::all(client), watcher::Config::default())
            .backoff(Steady)
            .inspect_ok(move |event| observer.state().observe(event))
            .reflect(writer)
            .applied_objects()
            .map_ok(|pod| ObjectRef::from_obj(&pod));
        let queue = stream::select(watch.boxed(), woken.map(Ok));
        let reconcile =
            |pod: Arc<Pod>, pods: Arc<Pods>| async move { pods.reconcile(&pod).await }.boxed();
        let failed = |_: Arc<Pod>, _: &kube::Error, _: Arc<Pods>| Action::requeue(AGAIN);
        let config = controller::Config::default().concurrency(WORKERS);
        let work = applier(
            reconcile,
            failed,
            Arc::clone(&pods),
            store.clone(),
            queue,
            config,
        );
        let task = tokio::spawn(work.for_each(|result| async {
            // Conflicts and pods that went away are the daily bread here; the next look puts them right.
            result
                .inspect_err(|error| tracing::debug!(%error, "node stand-in"))
                .ok();
        }));
        Self {
            pods,
            store,
            wake,
            _task: AbortOnDropHandle::new(task),
        }
    }

    /// From now on; pods that wait for something are looked at again at once.
    pub fn set_behaviour(&self, behaviour: Behaviour) {
        *self
            .pods
            .behaviour
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = behaviour;
        for pod in self.store.state() {
            self.wake.unbounded_send(ObjectRef::from_obj(&pod)).ok();
        }
    }

    /// Sets a condition of a pod.
    ///
    /// # Errors
    /// If the pod is not there or the write is refused.
    pub async fn set_condition(
        &self,
        namespace: &str,
        pod: &str,
        kind: &str,
        status: &str,
    ) -> Result<()> {
        self.edit(namespace, pod, |pod, memory| {
            memory.by_hand |= kind == "Ready";
            Ok(json!({"conditions": [condition(pod, kind, status, "TestBed")]}))
        })
        .await
    }

    /// Sets the phase of a pod; `Succeeded` and `Failed` end its containers too.
    ///
    /// # Errors
    /// If the pod is not there or the write is refused.
    pub async fn set_phase(&self, namespace: &str, pod: &str, phase: &str) -> Result<()> {
        self.edit(namespace, pod, |pod, memory| {
            memory.by_hand = true;
            if !matches!(phase, "Succeeded" | "Failed") {
                return Ok(json!({"phase": phase}));
            }
            let terminated =
                json!({"exitCode": i32::from(phase == "Failed"), "reason": "Completed", "finishedAt": timestamp()});
            Ok(json!({
                "phase": phase,
                "conditions": conditions(pod, &["Ready", "ContainersReady"], "False", "PodCompleted"),
                "containerStatuses": statuses(pod, |_, status| {
                    status["ready"] = false.into();
                    status["started"] = false.into();
                    status["state"] = json!({"terminated": terminated});
                }),
            }))
        })
        .await
    }

    /// Makes a running pod and all its containers Ready, or not Ready. It stays so: `ready_after` no longer counts for it.
    ///
    /// # Errors
    /// If the pod is not there or the write is refused.
    pub async fn set_ready(&self, namespace: &str, pod: &str, ready: bool) -> Result<()> {
        self.edit(namespace, pod, |pod, memory| {
            memory.by_hand = true;
            Ok(readiness(pod, |_, status| set_ready(status, ready)))
        })
        .await
    }

    /// As [`Self::set_ready`] for one container; the pod is Ready when all are.
    ///
    /// # Errors
    /// If the pod is not there or the write is refused.
    pub async fn set_container_ready(
        &self,
        namespace: &str,
        pod: &str,
        container: &str,
        ready: bool,
    ) -> Result<()> {
        self.edit(namespace, pod, |pod, memory| {
            memory.by_hand = true;
            Ok(readiness(pod, |spec, status| {
                if spec.name == container {
                    set_ready(status, ready);
                }
            }))
        })
        .await
    }

    /// Restarts a container, as after a crash: one more in `restartCount`, not ready, and Ready again after `ready_after`.
    ///
    /// # Errors
    /// If the pod or container is not there or the write is refused.
    pub async fn restart_container(
        &self,
        namespace: &str,
        pod: &str,
        container: &str,
    ) -> Result<()> {
        self.edit(namespace, pod, |pod, memory| {
            ensure!(
                containers(pod).any(|(_, c)| c.name == container),
                "there is no container {container}"
            );
            (memory.by_hand, memory.started) = (false, Some(Instant::now()));
            let now = timestamp();
            Ok(readiness(pod, |spec, status| {
                if spec.name == container {
                    let count = status["restartCount"].as_i64().unwrap_or(0) + 1;
                    let end = json!({"exitCode": 1, "reason": "Error", "finishedAt": now});
                    status["ready"] = false.into();
                    status["started"] = spec.startup_probe.is_none().into();
                    status["restartCount"] = count.into();
                    status["lastState"] = json!({"terminated": end});
                    status["state"] = json!({"running": {"startedAt": now}});
                }
            }))
        })
        .await
    }

    /// Reads, changes and writes a pod's status until nobody else wrote in between.
    async fn edit(
        &self,
        namespace: &str,
        name: &str,
        change: impl Fn(&Pod, &mut Memory) -> Result<Value>,
    ) -> Result<()> {
        let api: Api<Pod> = Api::namespaced(self.pods.client.clone(), namespace);
        let what = || format!("setting the status of the pod {namespace}/{name}");
        loop {
            let pod = api.get(name).await.with_context(what)?;
            let patch = {
                let mut state = self.pods.state();
                change(
                    &pod,
                    state
                        .memory
                        .entry(pod.uid().unwrap_or_default())
                        .or_default(),
                )
                .with_context(what)?
            };
            match self.pods.patch_status(&pod, patch).await {
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                result => return result.with_context(what),
            }
        }
    }
}

/// Makes a Ready node without pods: another size or version for the operator to see. Nothing is scheduled there.
///
/// # Errors
/// If the API server refuses it.
pub async fn create_node(
    client: &Client,
    name: &str,
    cpu: &str,
    kubelet_version: &str,
) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let params = PatchParams::apply("testbed").force();
    let labels = json!({"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", "kubernetes.io/hostname": name});
    let node =
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
    let what = || format!("making the node {name}");
    nodes
        .patch(name, &params, &Patch::Apply(node))
        .await
        .with_context(what)?;
    // A new node comes with the taint "not ready", which only a controller that we don't have takes away.
    nodes
        .patch(
            name,
            &PatchParams::default(),
            &Patch::Merge(json!({"spec": {"taints": null}})),
        )
        .await
        .with_context(what)?;
    let (now, size) = (
        timestamp(),
        json!({"cpu": cpu, "memory": "256Gi", "pods": "50000"}),
    );
    let status = json!({"status": {
        "capacity": size, "allocatable": size,
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now, "lastTransitionTime": now}],
        "nodeInfo": {
            "architecture": "amd64", "operatingSystem": "linux", "kubeletVersion": kubelet_version, "bootID": "", "containerRuntimeVersion": "",
            "kernelVersion": "", "kubeProxyVersion": "", "machineID": "", "osImage": "", "systemUUID": "",
        },
    }});
    nodes
        .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
        .await
        .with_context(what)?;
    Ok(())
}

/// What the reconciler works with.
struct Pods {
    client: Client,
    behaviour: Mutex<Behaviour>,
    state: Mutex<State>,
    /// Whether pods without a node are put on [`NODE`]; else somebody else does that.
    schedules: bool,
}

/// What can't be read from the pods themselves.
#[derive(Default)]
struct State {
    memory: HashMap<String, Memory>,
    used: Charge,
}

/// Times with more than the whole seconds that a status has, and what a pod takes from the node.
#[derive(Default)]
struct Memory {
    bound: Option<Instant>,
    started: Option<Instant>,
    deleted: Option<Instant>,
    /// The generation that is to be reported, and since when.
    changed: Option<(i64, Instant)>,
    /// A test has set the readiness: leave it.
    by_hand: bool,
    charge: Charge,
}

/// CPU, bytes, pods.
#[derive(Clone, Copy, Default)]
struct Charge([f64; 3]);

impl State {
    fn observe(&mut self, event: &watcher::Event<Pod>) {
        match event {
            watcher::Event::Apply(pod) | watcher::Event::InitApply(pod) => {
                let on_node = pod
                    .spec
                    .as_ref()
                    .is_some_and(|spec| spec.node_name.as_deref() == Some(NODE));
                // A pod that is being bound right now keeps its place: this may be an older event.
                if on_node || matches!(phase(pod), "Succeeded" | "Failed") {
                    let charge = if matches!(phase(pod), "Succeeded" | "Failed") {
                        Charge::default()
                    } else {
                        Charge::of(pod)
                    };
                    self.charge(pod, charge);
                }
            }
            watcher::Event::Delete(pod) => {
                self.charge(pod, Charge::default());
                self.memory.remove(&pod.uid().unwrap_or_default());
            }
            // Everything is listed anew: whatever is not in it has gone.
            watcher::Event::Init => {
                self.used = Charge::default();
                for memory in self.memory.values_mut() {
                    memory.charge = Charge::default();
                }
            }
            watcher::Event::InitDone => {}
        }
    }

    fn charge(&mut self, pod: &Pod, charge: Charge) {
        let memory = self
            .memory
            .entry(pod.uid().unwrap_or_default())
            .or_default();
        for ((used, old), new) in self.used.0.iter_mut().zip(memory.charge.0).zip(charge.0) {
            *used += new - old;
        }
        memory.charge = charge;
    }

    /// Takes the pod's place on the node, if there is room.
    fn reserve(&mut self, pod: &Pod) -> bool {
        const ALLOCATABLE: [f64; 3] = [64.0, 256.0 * 1024.0 * 1024.0 * 1024.0, 50_000.0];
        let charge = Charge::of(pod);
        let fits = (0..3).all(|i| self.used.0[i] + charge.0[i] <= ALLOCATABLE[i] + 1e-6);
        if fits {
            self.charge(pod, charge);
        }
        fits
    }
}

impl Charge {
    /// As the scheduler counts: per container what is asked for or still allocated; ordinary init containers run alone.
    fn of(pod: &Pod) -> Self {
        let sum = |key: &str| {
            let asked = |container: &Container| {
                let spec = container
                    .resources
                    .as_ref()
                    .and_then(|resources| resources.requests.as_ref());
                let status = status_of(pod, &container.name)
                    .and_then(|status| status.allocated_resources.as_ref());
                [spec, status]
                    .into_iter()
                    .flatten()
                    .filter_map(|map| map.get(key))
                    .map(value)
                    .fold(0.0, f64::max)
            };
            let (mut together, mut alone) = (0.0, 0.0);
            for (list, container) in containers(pod) {
                if list == "containerStatuses" || is_sidecar(container) {
                    together += asked(container);
                } else {
                    alone = f64::max(alone, asked(container));
                }
            }
            f64::max(together, alone)
        };
        Self([sum("cpu"), sum("memory"), 1.0])
    }
}

/// The next thing to do for a pod.
enum Step {
    Nothing,
    Again(Duration),
    Bind,
    Delete,
    Status(Value),
}

impl Pods {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn reconcile(&self, pod: &Pod) -> Result<Action, kube::Error> {
        let behaviour = self
            .behaviour
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
            .of(pod);
        if !self.schedules && !is_bound(pod) {
            return Ok(Action::await_change());
        }
        let step = step(pod, &behaviour, &mut self.state());
        let api: Api<Pod> =
            Api::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default());
        match step {
            Step::Nothing => {}
            Step::Again(after) => return Ok(Action::requeue(after)),
            Step::Status(patch) => self.patch_status(pod, patch).await?,
            Step::Delete => {
                let preconditions = Preconditions {
                    uid: pod.uid(),
                    resource_version: None,
                };
                api.delete(
                    &pod.name_any(),
                    &DeleteParams::default()
                        .grace_period(0)
                        .preconditions(preconditions),
                )
                .await?;
            }
            Step::Bind => {
                let target = ObjectReference {
                    kind: Some("Node".to_owned()),
                    name: Some(NODE.to_owned()),
                    ..ObjectReference::default()
                };
                let metadata = ObjectMeta {
                    name: pod.metadata.name.clone(),
                    uid: pod.uid(),
                    ..ObjectMeta::default()
                };
                let binding = Binding { metadata, target };
                let bound: Result<Status, _> = api
                    .create_subresource(
                        "binding",
                        &pod.name_any(),
                        &PostParams::default(),
                        &binding,
                    )
                    .await;
                if let Err(error) = bound {
                    self.state().charge(pod, Charge::default());
                    return Err(error);
                }
            }
        }
        Ok(Action::await_change())
    }

    async fn patch_status(&self, pod: &Pod, status: Value) -> Result<(), kube::Error> {
        let api: Api<Pod> =
            Api::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default());
        let metadata =
            json!({"uid": pod.metadata.uid, "resourceVersion": pod.metadata.resource_version});
        let patch = Patch::Strategic(json!({"metadata": metadata, "status": status}));
        api.patch_status(&pod.name_any(), &PatchParams::default(), &patch)
            .await
            .map(drop)
    }
}

fn is_bound(pod: &Pod) -> bool {
    pod.spec
        .as_ref()
        .is_some_and(|spec| spec.node_name.is_some())
}

/// What is due for the pod now. It changes nothing but the memory of when things were seen first.
fn step(pod: &Pod, behaviour: &Behaviour, state: &mut State) -> Step {
    let Some(spec) = &pod.spec else {
        return Step::Nothing;
    };
    let (uid, now) = (pod.uid().unwrap_or_default(), Instant::now());
    let left = |since: &mut Option<Instant>, after: Option<Duration>| {
        let since = *since.get_or_insert(now);
        after.map(|after| after.saturating_sub(now - since))
    };
    let Some(node) = &spec.node_name else {
        let schedule = pod
            .annotations()
            .get("testbed/schedule")
            .map(String::as_str);
        let gated = spec
            .scheduling_gates
            .as_ref()
            .is_some_and(|gates| !gates.is_empty());
        if gated || schedule == Some("never") || pod.metadata.deletion_timestamp.is_some() {
            return Step::Nothing;
        }
        if schedule.is_none() && state.reserve(pod) {
            return Step::Bind;
        }
        if find(pod, "PodScheduled")
            .is_some_and(|c| c.status == "False" && c.reason.as_deref() == Some("Unschedulable"))
        {
            return Step::Again(AGAIN);
        }
        return Step::Status(
            json!({"conditions": [condition(pod, "PodScheduled", "False", "Unschedulable")]}),
        );
    };
    if !node.starts_with(NODE) {
        return Step::Nothing;
    }
    let memory = state.memory.entry(uid).or_default();
    if pod.metadata.deletion_timestamp.is_some() {
        return match left(&mut memory.deleted, behaviour.terminate_after) {
            Some(Duration::ZERO) if pod.metadata.deletion_grace_period_seconds != Some(0) => {
                Step::Delete
            }
            Some(left) if !left.is_zero() => Step::Again(left),
            _ => Step::Nothing,
        };
    }
    if matches!(phase(pod), "Succeeded" | "Failed") {
        return Step::Nothing;
    }
    if phase(pod) != "Running" {
        return match left(&mut memory.bound, behaviour.run_after) {
            Some(Duration::ZERO) if !memory.by_hand => Step::Status(running(pod)),
            Some(left) if !left.is_zero() => Step::Again(left),
            _ => Step::Nothing,
        };
    }
    let mut wait = None;
    if !memory.by_hand && !is_ready(pod) {
        match left(&mut memory.started, behaviour.ready_after) {
            Some(Duration::ZERO) => {
                return Step::Status(readiness(pod, |_, status| set_ready(status, true)));
            }
            left => wait = left,
        }
    }
    match resize(pod, behaviour, memory, now) {
        Step::Again(left) => Step::Again(wait.map_or(left, |wait| wait.min(left))),
        Step::Nothing => wait.map_or(Step::Nothing, Step::Again),
        step => step,
    }
}

/// The report about a spec that is newer than the status: a resize, or any other change that counts the generation up.
fn resize(pod: &Pod, behaviour: &Behaviour, memory: &mut Memory, now: Instant) -> Step {
    let generation = pod.metadata.generation.unwrap_or(0);
    let observed = pod
        .status
        .as_ref()
        .and_then(|status| status.observed_generation)
        .unwrap_or(0);
    let differs = containers(pod).any(|(_, container)| {
        status_of(pod, &container.name).is_some_and(|status| {
            let [spec, actual] = [&container.resources, &status.resources]
                .map(|resources| sizes(resources.as_ref()));
            status
                .state
                .as_ref()
                .is_some_and(|state| state.running.is_some())
                && spec != actual
        })
    });
    let pending = find(pod, "PodResizePending").or(find(pod, "PodResizeInProgress"));
    if behaviour.resize == Resize::Ignore
        || (!differs && observed >= generation && pending.is_none())
    {
        return Step::Nothing;
    }
    let (reported, message) = match &behaviour.resize {
        Resize::Deferred if differs => (
            Some(("PodResizePending", "Deferred")),
            "Node didn't have enough resource: cpu",
        ),
        Resize::Infeasible if differs => (
            Some(("PodResizePending", "Infeasible")),
            "Node didn't have enough capacity: cpu",
        ),
        Resize::Error { message } if differs => {
            (Some(("PodResizeInProgress", "Error")), message.as_str())
        }
        _ => (None, ""),
    };
    if let (Some((kind, reason)), true) = (reported, observed >= generation)
        && find(pod, kind).is_some_and(|condition| condition.reason.as_deref() == Some(reason))
    {
        return Step::Nothing;
    }
    let since = match memory.changed {
        Some((seen, since)) if seen == generation => since,
        _ => memory.changed.insert((generation, now)).1,
    };
    match behaviour
        .actuate_after
        .map(|after| after.saturating_sub(now - since))
    {
        None => return Step::Nothing,
        Some(Duration::ZERO) => {}
        Some(left) => return Step::Again(left),
    }
    let (allocates, actuates) = (
        !matches!(reported, Some(("PodResizePending", _))),
        reported.is_none(),
    );
    let update = |container: &Container, status: &mut Value| {
        let resources = sizes(container.resources.as_ref());
        if allocates {
            status["allocatedResources"] = resources["requests"].clone();
        }
        if actuates {
            status["resources"] = resources;
        }
    };
    let mut conditions: Vec<Value> = ["PodResizePending", "PodResizeInProgress"]
        .into_iter()
        .filter(|&kind| {
            find(pod, kind).is_some() && reported.is_none_or(|(reported, _)| reported != kind)
        })
        .map(|kind| json!({"type": kind, "$patch": "delete"}))
        .collect();
    if let Some((kind, reason)) = reported {
        let mut new = condition(pod, kind, "True", reason);
        new["message"] = message.into();
        conditions.push(new);
    }
    Step::Status(json!({
        "observedGeneration": generation, "conditions": conditions,
        "containerStatuses": statuses(pod, update), "initContainerStatuses": init_statuses(pod, update),
    }))
}

/// A pod whose containers have just been started.
fn running(pod: &Pod) -> Value {
    let now = timestamp();
    let started = |container: &Container| {
        let resources = sizes(container.resources.as_ref());
        json!({
            "name": container.name, "image": container.image.as_deref().unwrap_or_default(), "imageID": "",
            "ready": false, "started": container.startup_probe.is_none(), "restartCount": 0, "state": {"running": {"startedAt": now}},
            "allocatedResources": resources["requests"], "resources": resources,
        })
    };
    let (mut init, mut app) = (Vec::new(), Vec::new());
    for (list, container) in containers(pod) {
        let mut status = started(container);
        if list == "containerStatuses" {
            app.push(status);
            continue;
        }
        if !is_sidecar(container) {
            let terminated =
                json!({"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now});
            (status["state"], status["ready"], status["started"]) =
                (json!({"terminated": terminated}), true.into(), false.into());
        }
        init.push(status);
    }
    let mut all = conditions(
        pod,
        &["PodReadyToStartContainers", "Initialized"],
        "True",
        "",
    );
    all.extend(conditions(
        pod,
        &["Ready", "ContainersReady"],
        "False",
        "ContainersNotReady",
    ));
    json!({
        "observedGeneration": pod.metadata.generation, "phase": "Running", "startTime": now, "conditions": all,
        "hostIP": "10.99.0.2", "podIP": "10.244.0.2", "podIPs": [{"ip": "10.244.0.2"}],
        "initContainerStatuses": init, "containerStatuses": app,
    })
}

/// The containers changed, and the pod Ready if all of them are. Ordinary init containers have ended and don't count.
fn readiness(pod: &Pod, change: impl Fn(&Container, &mut Value)) -> Value {
    let mut all = true;
    let mut look = |container: &Container, status: &mut Value| {
        change(container, status);
        all &= status["ready"] == true;
    };
    let app = statuses(pod, &mut look);
    let init = init_statuses(pod, |container, status| {
        if is_sidecar(container) {
            look(container, status);
        }
    });
    let (status, reason) = if all {
        ("True", "")
    } else {
        ("False", "ContainersNotReady")
    };
    let conditions = conditions(pod, &["Ready", "ContainersReady"], status, reason);
    json!({"conditions": conditions, "containerStatuses": app, "initContainerStatuses": init})
}

/// A container that is Ready has started, and stays so.
fn set_ready(status: &mut Value, ready: bool) {
    status["ready"] = ready.into();
    if ready {
        status["started"] = true.into();
    }
}

/// The list of container statuses, changed: the API server replaces such lists as a whole.
fn statuses(pod: &Pod, change: impl FnMut(&Container, &mut Value)) -> Vec<Value> {
    changed(pod, "containerStatuses", change)
}

fn init_statuses(pod: &Pod, change: impl FnMut(&Container, &mut Value)) -> Vec<Value> {
    changed(pod, "initContainerStatuses", change)
}

fn changed(pod: &Pod, list: &str, mut change: impl FnMut(&Container, &mut Value)) -> Vec<Value> {
    let all = containers(pod).filter(|(of, _)| *of == list);
    all.filter_map(|(_, container)| {
        let mut status = json!(status_of(pod, &container.name)?);
        change(container, &mut status);
        Some(status)
    })
    .collect()
}

/// All containers, each with the name of the list that its status is in.
fn containers(pod: &Pod) -> impl Iterator<Item = (&'static str, &Container)> {
    let init = pod
        .spec
        .iter()
        .flat_map(|spec| spec.init_containers.iter().flatten());
    let app = pod.spec.iter().flat_map(|spec| &spec.containers);
    init.map(|container| ("initContainerStatuses", container))
        .chain(app.map(|container| ("containerStatuses", container)))
}

fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

fn status_of<'a>(pod: &'a Pod, container: &str) -> Option<&'a ContainerStatus> {
    let status = pod.status.as_ref()?;
    let mut all = [&status.container_statuses, &status.init_container_statuses]
        .into_iter()
        .flatten()
        .flatten();
    all.find(|status| status.name == container)
}

fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Pending")
}

fn is_ready(pod: &Pod) -> bool {
    find(pod, "Ready").is_some_and(|condition| condition.status == "True")
}

fn find<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    pod.status
        .as_ref()?
        .conditions
        .iter()
        .flatten()
        .find(|condition| condition.type_ == kind)
}

/// A condition whose time moves only when its status does.
fn condition(pod: &Pod, kind: &str, status: &str, reason: &str) -> Value {
    let same = find(pod, kind)
        .filter(|old| old.status == status)
        .and_then(|old| old.last_transition_time.as_ref());
    let time = same.map_or_else(|| timestamp().into(), |time| json!(time));
    let reason = Some(reason).filter(|reason| !reason.is_empty());
    json!({"type": kind, "status": status, "reason": reason, "lastTransitionTime": time, "observedGeneration": pod.metadata.generation})
}

fn conditions(pod: &Pod, kinds: &[&str], status: &str, reason: &str) -> Vec<Value> {
    kinds
        .iter()
        .map(|kind| condition(pod, kind, status, reason))
        .collect()
}

/// Requests and limits alone, comparable between spec and status.
fn sizes(resources: Option<&ResourceRequirements>) -> Value {
    type Map = Option<std::collections::BTreeMap<String, Quantity>>;
    let of = |map: fn(&ResourceRequirements) -> &Map| {
        json!(
            resources
                .and_then(|resources| map(resources).clone())
                .unwrap_or_default()
        )
    };
    json!({"requests": of(|r| &r.requests), "limits": of(|r| &r.limits)})
}

/// Whole seconds, as a kubelet writes.
fn timestamp() -> String {
    Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// A quantity as a number, exact enough to see what fits.
fn value(quantity: &Quantity) -> f64 {
    let text = quantity.0.as_str();
    let suffixes = [
        ("Ki", 1024.0),
        ("Mi", 1024f64.powi(2)),
        ("Gi", 1024f64.powi(3)),
        ("Ti", 1024f64.powi(4)),
        ("Pi", 1024f64.powi(5)),
        ("Ei", 1024f64.powi(6)),
        ("n", 1e-9),
        ("u", 1e-6),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("P", 1e15),
        ("E", 1e18),
    ];
    let (digits, factor) = suffixes
        .iter()
        .find_map(|(suffix, factor)| Some((text.strip_suffix(suffix)?, *factor)))
        .unwrap_or((text, 1.0));
    digits.parse().map_or(0.0, |number: f64| number * factor)
}

impl Behaviour {
    /// The behaviour for one pod: its annotations first.
    fn of(mut self, pod: &Pod) -> Self {
        let delays = [
            ("testbed/run-after", &mut self.run_after),
            ("testbed/ready-after", &mut self.ready_after),
            ("testbed/actuate-after", &mut self.actuate_after),
            ("testbed/terminate-after", &mut self.terminate_after),
        ];
        for (key, delay) in delays {
            match pod.annotations().get(key).map(|text| (text, after(text))) {
                Some((_, Some(given))) => *delay = given,
                Some((text, None)) => eprintln!("{key}: {text}: not understood (500ms, 2s, never)"),
                None => {}
            }
        }
        self.resize = match pod.annotations().get("testbed/resize").map(String::as_str) {
            None => self.resize,
            Some("actuate") => Resize::Actuate,
            Some("deferred") => Resize::Deferred,
            Some("infeasible") => Resize::Infeasible,
            Some("error") => Resize::Error {
                message: "set by the test".to_owned(),
            },
            Some("ignore") => Resize::Ignore,
            Some(text) => {
                eprintln!(
                    "testbed/resize: {text}: not understood (actuate, deferred, infeasible, error, ignore)"
                );
                self.resize
            }
        };
        self
    }
}

/// `500ms`, `2s` or `never`.
#[expect(
    clippy::option_option,
    reason = "not understood, and never, are two things"
)]
fn after(text: &str) -> Option<Option<Duration>> {
    match (text, text.strip_suffix("ms"), text.strip_suffix('s')) {
        ("never", ..) => Some(None),
        (_, Some(milliseconds), _) => milliseconds
            .parse()
            .ok()
            .map(Duration::from_millis)
            .map(Some),
        (_, _, Some(seconds)) => seconds.parse().ok().map(Duration::from_secs).map(Some),
        _ => None,
    }
}
