//! Many pods, made and watched: when each is boosted, Ready, back at its CPU, and finished.

use std::{
    collections::HashMap,
    io::{BufRead as _, BufReader},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::api::resource::Quantity};
use kube::{
    Api, Client, ResourceExt as _,
    api::PostParams,
    runtime::{WatchStreamExt as _, watcher},
};
use load::{Figures, microseconds};
use serde_json::{Value, json};
use tokio::time::sleep_until;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    control_plane::ControlPlane,
    node::STAND_IN,
    wait::{Steady, eventually},
};

/// Where they are.
pub const NAMESPACE: &str = "storm";
/// Of the record and of the claim.
pub const KEY: &str = "autoscaling.x-k8s.io/startup-cpu-boost";
/// What the pods ask for, and their limit: little, so that many fit on the one node. A boost doubles both.
pub const ORIGINAL: &str = "1m";
/// See [`ORIGINAL`].
pub const LIMIT: &str = "5m";
const ACCOUNT: &str = "system:serviceaccount:headstart-system:headstart";
const SOON: Duration = Duration::from_secs(30);
/// Pods that are created at a time.
const CREATE_AT_ONCE: usize = 32;

/// Makes the namespace with boosts until Ready, one for each of these groups of pods.
///
/// # Errors
/// If one is refused, or the replicas don't say that they know it.
pub async fn prepare(plane: &ControlPlane, groups: &[&str]) -> Result<()> {
    let mut objects = vec![
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": NAMESPACE}}),
    ];
    objects.extend(groups.iter().map(|group| {
        json!({
            "apiVersion": "autoscaling.x-k8s.io/v1alpha1",
            "kind": "StartupCPUBoost",
            "metadata": {"name": group, "namespace": NAMESPACE},
            "selector": {"matchLabels": {"group": group}},
            "spec": {
                "resourcePolicy": {"containerPolicies": [
                    {"matchContainers": {"type": "ExactName", "value": "app"}, "fixedResources": {"requests": "2m", "limits": "10m"}},
                ]},
                "durationPolicy": {"podCondition": {"type": "Ready", "status": "True"}},
            },
        })
    }));
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    plane.apply(&list.to_string()).await?;
    // A pod that comes before the replicas know its boost gets none.
    eventually("the boosts are known", SOON, || async {
        let active = r#"jsonpath={.items[*].status.conditions[?(@.type=="Active")].status}"#;
        let known = plane
            .kubectl_ok(&["get", "scb", "-n", NAMESPACE, "-o", active])
            .await?;
        ensure!(known.split_whitespace().count() == groups.len(), "{known}");
        Ok(())
    })
    .await
}

/// The group of pods that wait for ever: no boost matches them, and no scheduler takes them.
pub const UNRELATED: &str = "unrelated";

/// The pod of that number in a group. It goes to stand-ins, also where there are real nodes.
///
/// # Errors
/// Never: it is a pod.
pub fn pod(group: &str, index: u32) -> Result<Pod> {
    let resources = json!({"requests": {"cpu": ORIGINAL}, "limits": {"cpu": LIMIT}});
    let mut pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": format!("{group}-{index}"), "labels": {"group": group}},
        "spec": {
            "containers": [{"name": "app", "image": "app", "resources": resources}],
            "tolerations": [{"key": STAND_IN, "operator": "Exists"}],
        },
    });
    if group == UNRELATED {
        pod["spec"]["schedulingGates"] = json!([{"name": "example.com/never"}]);
    }
    serde_json::from_value(pod).context("making a pod")
}

/// Creates the pods of these numbers in a group as fast as the API server takes them.
///
/// # Errors
/// If one is refused.
pub async fn create(plane: &ControlPlane, group: &str, pods: Range<u32>) -> Result<()> {
    let api: Api<Pod> = Api::namespaced(plane.admin(), NAMESPACE);
    let created = pods.map(|index| {
        let api = api.clone();
        async move {
            let pod = pod(group, index)?;
            api.create(&PostParams::default(), &pod).await?;
            anyhow::Ok(())
        }
    });
    let created = stream::iter(created).buffer_unordered(CREATE_AT_ONCE);
    created.try_for_each(|()| async { Ok(()) }).await
}

/// How a creation went.
pub struct Creation {
    /// How long it took.
    pub took: Duration,
    /// Whether the answer has a claim.
    pub boosted: bool,
}

/// Creates pods at a rate, whatever becomes of them, and says how each creation went. `pod` makes the pod of a number.
///
/// # Errors
/// In the single results: what was refused, or not answered.
///
/// # Panics
/// If `pod` does.
pub async fn create_at(
    client: Client,
    rate: u32,
    seconds: u32,
    pod: impl Fn(u32) -> Result<Pod>,
) -> Vec<Result<Creation>> {
    let start = tokio::time::Instant::now();
    let api: Api<Pod> = Api::namespaced(client, NAMESPACE);
    let creations = (0..rate * seconds).map(|index| {
        let (api, pod) = (api.clone(), pod(index));
        tokio::spawn(async move {
            sleep_until(start + Duration::from_secs(1) * index / rate).await;
            let began = Instant::now();
            let made = api.create(&PostParams::default(), &pod?).await?;
            let (took, boosted) = (began.elapsed(), made.labels().contains_key(KEY));
            anyhow::Ok(Creation { took, boosted })
        })
    });
    let mut results = Vec::new();
    for creation in creations.collect::<Vec<_>>() {
        results.push(creation.await.expect("a creation does not panic"));
    }
    results
}

/// Times as [`Figures`] have them: in microseconds.
#[must_use]
pub fn figures(times: &[Duration]) -> Figures {
    let times = times.iter().map(|took| microseconds(*took)).collect();
    Figures::new(times, 0.0)
}

/// `p50 / p99 / max ms` of these times.
#[must_use]
pub fn milliseconds(times: &[Duration]) -> String {
    let Figures { p50, p99, max, .. } = figures(times);
    format!("{} / {} / {} ms", p50 / 1000, p99 / 1000, max / 1000)
}

/// What is known of a pod.
#[derive(Clone, Copy)]
struct Life {
    seen: Instant,
    boosted: bool,
    raised: Option<Instant>,
    running: bool,
    ready: Option<Instant>,
    back: Option<Instant>,
    finished: bool,
}

/// All pods that were ever seen boosted, as a watch tells of them.
pub struct Lives {
    lives: Arc<Mutex<HashMap<String, Life>>>,
    _watch: AbortOnDropHandle<()>,
}

impl Lives {
    /// Watches from now on.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    #[must_use]
    pub fn watch(client: Client) -> Self {
        let lives = Arc::<Mutex<HashMap<String, Life>>>::default();
        let seen = Arc::clone(&lives);
        let pods: Api<Pod> = Api::namespaced(client, NAMESPACE);
        let events = watcher(pods, watcher::Config::default()).backoff(Steady);
        let events = events.applied_objects();
        let watch = events.for_each(move |pod| {
            if let Ok(pod) = pod {
                let mut lives = seen.lock().unwrap_or_else(PoisonError::into_inner);
                let life = lives.entry(pod.name_any());
                life.or_insert_with(Life::new).observe(&pod);
            }
            std::future::ready(())
        });
        Self {
            lives,
            _watch: AbortOnDropHandle::new(tokio::spawn(watch)),
        }
    }

    fn lives(&self) -> MutexGuard<'_, HashMap<String, Life>> {
        self.lives.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets all of them, for the next part of a run.
    pub fn forget(&self) {
        self.lives().clear();
    }

    /// Forgets those that are finished.
    pub fn forget_finished(&self) {
        self.lives().retain(|_, life| !life.finished);
    }

    /// When each that has its CPU back was Ready, and how long it took from then.
    #[must_use]
    pub fn reverts(&self) -> Vec<(Instant, Duration)> {
        let revert = |life: &Life| {
            let ready = life.ready?;
            Some((ready, life.back?.saturating_duration_since(ready)))
        };
        self.lives().values().filter_map(revert).collect()
    }

    /// When each was first seen, when it had more CPU, and when it was Ready.
    #[must_use]
    pub fn raises(&self) -> Vec<(Instant, Option<Instant>, Option<Instant>)> {
        let lives = self.lives();
        lives
            .values()
            .map(|life| (life.seen, life.raised, life.ready))
            .collect()
    }

    fn count(&self, is: impl Fn(&Life) -> bool) -> usize {
        self.lives().values().filter(|life| is(life)).count()
    }

    /// How many were boosted.
    #[must_use]
    pub fn boosted(&self) -> usize {
        self.count(|life| life.boosted)
    }

    /// How many are finished.
    #[must_use]
    pub fn finished(&self) -> usize {
        self.count(|life| life.finished)
    }

    /// From Ready until the CPU is back.
    #[must_use]
    pub fn lags(&self) -> Vec<Duration> {
        self.reverts().into_iter().map(|revert| revert.1).collect()
    }

    /// Waits until that many pods run, and says how many of them are boosted: the webhook may not always be in time.
    ///
    /// # Errors
    /// If they don't by then.
    pub async fn until_running(&self, pods: usize, patience: Duration) -> Result<usize> {
        self.until("run", pods, patience, |life| life.running)
            .await?;
        Ok(self.count(|life| life.running && life.boosted))
    }

    /// Waits until that many are Ready.
    ///
    /// # Errors
    /// If they don't by then.
    pub async fn until_ready(&self, pods: usize, patience: Duration) -> Result<()> {
        let is = |life: &Life| life.ready.is_some();
        self.until("are Ready", pods, patience, is).await
    }

    /// Waits until that many have their CPU back.
    ///
    /// # Errors
    /// If they don't by then.
    pub async fn until_back(&self, pods: usize, patience: Duration) -> Result<()> {
        let is = |life: &Life| life.back.is_some();
        self.until("are back at their CPU", pods, patience, is)
            .await
    }

    /// Waits until that many are finished.
    ///
    /// # Errors
    /// If they don't by then.
    pub async fn until_finished(&self, pods: usize, patience: Duration) -> Result<()> {
        let is = |life: &Life| life.finished;
        self.until("are finished", pods, patience, is).await
    }

    async fn until(
        &self,
        what: &str,
        pods: usize,
        patience: Duration,
        is: impl Fn(&Life) -> bool + Copy,
    ) -> Result<()> {
        eventually(&format!("{pods} pods {what}"), patience, || async {
            let count = self.count(is);
            ensure!(count >= pods, "{count} do");
            Ok(())
        })
        .await
    }
}

impl Life {
    fn new() -> Self {
        Self {
            seen: Instant::now(),
            boosted: false,
            raised: None,
            running: false,
            ready: None,
            back: None,
            finished: false,
        }
    }

    fn observe(&mut self, pod: &Pod) {
        let is_original = request(pod).is_some_and(|cpu| cpu.0 == ORIGINAL);
        let has_claim = pod.labels().contains_key(KEY);
        let status = pod.status.as_ref();
        let mut conditions = status
            .and_then(|status| status.conditions.as_deref())
            .into_iter()
            .flatten();
        self.boosted |= has_claim;
        self.running |= status.is_some_and(|status| status.phase.as_deref() == Some("Running"));
        if conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True") {
            self.ready.get_or_insert_with(Instant::now);
        }
        if has_claim && !is_original {
            self.raised.get_or_insert_with(Instant::now);
        }
        // A pod that is boosted late has its claim before it has the CPU.
        if self.raised.is_some() && is_original {
            self.back.get_or_insert_with(Instant::now);
        }
        self.finished |= self.boosted && is_original && !has_claim;
    }
}

fn request(pod: &Pod) -> Option<&Quantity> {
    let container = pod.spec.as_ref()?.containers.first()?;
    container.resources.as_ref()?.requests.as_ref()?.get("cpu")
}

/// How many writes to each pod of a group were ours, by the audit log; what was refused counts too.
///
/// # Errors
/// If the log can't be read.
pub fn writes(plane: &ControlPlane, group: &str, pods: usize) -> Result<f64> {
    let path = plane.folder().join("audit.jsonl");
    let file = std::fs::File::open(&path).with_context(|| format!("reading {}", path.display()))?;
    let mut writes = 0;
    for line in BufReader::new(file).lines() {
        let line = line.context("reading the audit log")?;
        // Most lines are not ours, and need not be read as JSON.
        if line.contains(ACCOUNT) {
            let event: Value = serde_json::from_str(&line).context("reading the audit log")?;
            writes += u32::from(is_write(&event, group));
        }
    }
    let pods = u32::try_from(pods).context("counting pods")?;
    Ok(f64::from(writes) / f64::from(pods))
}

fn is_write(event: &Value, group: &str) -> bool {
    let about = &event["objectRef"];
    let name = about["name"].as_str().unwrap_or_default();
    event["user"]["username"] == ACCOUNT
        && about["resource"] == "pods"
        && event["verb"] == "patch"
        && name
            .rsplit_once('-')
            .is_some_and(|(begin, _)| begin == group)
}
