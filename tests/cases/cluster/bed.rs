//! The clusters that the cases share, and what they ask of the API server.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, ensure};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use testbed::{
    Answer, Behaviour, Cluster, ControlPlane, Operator, OperatorOptions, Options, Rest, Signal,
    cluster::{RUNTIME, SYSTEM_NAMESPACE, shared},
    eventually,
    rest::{MERGE, pods},
};
use tokio::sync::{OnceCell, Semaphore, SemaphorePermit};

use super::{audit::AuditLog, stored};
use crate::{
    data::{Admit, Cases, Kind},
    notation,
    world::{self, Boost, KEY, record_text},
};

/// How long anything may take that needs no time by itself. Two cores are shared.
pub const SOON: Duration = Duration::from_secs(30);
/// Cases that run at the same time, however many threads the tests have.
const AT_ONCE: u32 = 6;
/// Where boosts are made to see that those before them are known.
const MARKERS: &str = "c-markers";
/// Where pods live whose end shows that the leader has got to what was before them.
const CANARIES: &str = "c-canaries";

static TURNS: Semaphore = Semaphore::const_new(AT_ONCE as usize);
tokio::task_local! {
    /// The turn of the test that runs.
    static TURN: RefCell<Option<SemaphorePermit<'static>>>;
}
/// By flags. They end with the process.
static BEDS: Mutex<Beds> = Mutex::new(BTreeMap::new());
type Beds = BTreeMap<Vec<String>, &'static OnceCell<Result<Bed, String>>>;
/// Where boosts were stored before our definition was there.
static UPGRADED: OnceCell<Result<Bed, String>> = OnceCell::const_new();

/// Clusters with which tests may do as they like, and those of them that nobody has now.
static ROUGH: Semaphore = Semaphore::const_new(2);
static IDLE: Mutex<Vec<&'static Bed>> = Mutex::new(Vec::new());

/// Runs a test to its end.
pub fn run<T>(test: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    RUNTIME.block_on(async {
        let turn = TURNS.acquire().await.context("tests have their turns")?;
        TURN.scope(RefCell::new(Some(turn)), test).await
    })
}

/// Waits for something that takes long by itself; another test has the turn meanwhile.
pub async fn aside<T>(wait: impl Future<Output = T>) -> anyhow::Result<T> {
    drop(TURN.with(RefCell::take));
    let done = wait.await;
    take_turn().await?;
    Ok(done)
}

/// Works while no other test has a turn: how long it takes must not be their doing.
pub async fn alone<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    drop(TURN.with(RefCell::take));
    let all = TURNS.acquire_many(AT_ONCE).await;
    let all = all.context("tests have their turns")?;
    let done = work.await;
    drop(all);
    take_turn().await?;
    done
}

async fn take_turn() -> anyhow::Result<()> {
    let turn = TURNS.acquire().await.context("tests have their turns")?;
    TURN.with(|mine| mine.replace(Some(turn)));
    Ok(())
}

/// One cluster.
pub struct Bed {
    /// The control plane and the stand-in for scheduler and kubelet; the replicas are our own.
    pub cluster: Cluster,
    /// Flags of the replicas.
    flags: Vec<String>,
    /// What the API server has noted of requests about pods.
    pub audit: AuditLog,
    /// May do everything.
    pub api: Rest,
    replicas: RwLock<Vec<Arc<Replica>>>,
    /// Held for reading while a pod is created, and for writing by whoever counts reviews.
    pub admissions: tokio::sync::RwLock<()>,
    numbers: AtomicU32,
}

/// A cluster with which a test may do as it likes.
pub struct Rough {
    pub bed: &'static Bed,
    _turn: SemaphorePermit<'static>,
}

impl Rough {
    /// Leaves it to others, as it was found.
    pub fn give_back(self) {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        idle.push(self.bed);
    }
}

/// A replica of the operator.
pub struct Replica {
    /// The process.
    pub operator: Operator,
    /// To it, past the API server.
    webhook: Rest,
}

impl Bed {
    /// The cluster whose replicas have these flags; the first to ask starts it.
    pub async fn with(flags: &[String]) -> anyhow::Result<&'static Self> {
        let cell = *BEDS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(flags.to_owned())
            .or_insert_with(|| Box::leak(Box::default()));
        let start = async {
            let plane = ControlPlane::start(Options::default()).await?;
            Self::start(plane, flags, 2).await
        };
        shared(cell, start).await
    }

    /// The cluster on which boosts of all cases were stored under upstream's definition, before ours was installed.
    pub async fn upgraded(cases: &Cases) -> anyhow::Result<&'static Self> {
        let start = async {
            let plane = ControlPlane::start(Options::default()).await?;
            stored::store(cases, &plane).await?;
            Self::start(plane, &[], 2).await
        };
        shared(&UPGRADED, start).await
    }

    /// A cluster with one replica that nobody else is on. It is to be retired.
    pub async fn own(flags: &[String]) -> anyhow::Result<&'static Self> {
        let plane = ControlPlane::start(Options::default()).await?;
        let bed = Box::pin(Self::start(plane, flags, 1)).await?;
        Ok(Box::leak(Box::new(bed)))
    }

    /// A cluster with one replica that nobody else is on as long as this lives.
    pub async fn rough() -> anyhow::Result<Rough> {
        // It may take long until another test gives one back.
        let turn = aside(ROUGH.acquire()).await??;
        let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let bed = match idle {
            Some(bed) => bed,
            None => Self::own(&[]).await?,
        };
        Ok(Rough { bed, _turn: turn })
    }

    /// Stops all that takes time.
    pub fn retire(&self) -> anyhow::Result<()> {
        self.crash_replicas()?;
        self.cluster.plane.signal_api_server(Signal::KILL)
    }

    /// The replicas that run.
    pub fn replicas(&self) -> Vec<Arc<Replica>> {
        let replicas = self.replicas.read();
        replicas.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// All of them crash.
    pub fn crash_replicas(&self) -> anyhow::Result<()> {
        let mut replicas = self
            .replicas
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        for replica in replicas.drain(..) {
            self.cluster.balancer.remove(replica.operator.backend());
            replica.operator.crash()?;
        }
        Ok(())
    }

    /// Starts one more, and waits until it is Ready.
    pub async fn start_replica(&self) -> anyhow::Result<()> {
        let binary = Path::new(env!("CARGO_BIN_EXE_headstart"));
        let name = format!("headstart-{}", self.number());
        let mut options = OperatorOptions::new(binary, name);
        options.args.clone_from(&self.flags);
        let operator = Operator::start(&self.cluster.plane, &options).await?;
        operator.wait_ready(SOON).await?;
        self.cluster.balancer.add(operator.backend());
        let ca = eventually("the CA is published", SOON, || self.published_ca()).await?;
        let address = format!("https://{}", operator.backend().address);
        let webhook = Rest::new(client(&address, &ca).await?, SOON);
        let replica = Arc::new(Replica { operator, webhook });
        let replicas = self.replicas.write();
        replicas
            .unwrap_or_else(PoisonError::into_inner)
            .push(replica);
        Ok(())
    }

    async fn start(plane: ControlPlane, flags: &[String], replicas: u8) -> anyhow::Result<Self> {
        let behaviour = Behaviour {
            ready_after: None,
            ..Behaviour::default()
        };
        let binary = Path::new(env!("CARGO_BIN_EXE_headstart"));
        let cluster = Cluster::install(plane, binary, 0, behaviour).await?;
        if flags.iter().any(|flag| flag == "--boost-on-restart=true") {
            // As the component `manifests/raises` has it.
            let policy = "headstart-lower-only";
            let delete = ["delete", "validatingadmissionpolicybinding", policy];
            cluster.plane.kubectl_ok(&delete).await?;
        }
        let bed = Self {
            api: Rest::new(cluster.plane.admin(), SOON),
            audit: AuditLog::of(&cluster.plane),
            replicas: RwLock::default(),
            flags: flags.to_owned(),
            admissions: tokio::sync::RwLock::default(),
            numbers: AtomicU32::default(),
            cluster,
        };
        for _ in 0..replicas {
            bed.start_replica().await?;
        }
        bed.namespace(MARKERS).await?;
        bed.namespace(CANARIES).await?;
        bed.make_canary_boost().await?;
        bed.boosts_are_seen().await?;
        bed.replicas_are_asked().await?;
        Ok(bed)
    }

    /// Waits until the API server asks the replicas about new pods.
    pub async fn replicas_are_asked(&self) -> anyhow::Result<()> {
        eventually("the API server asks the replicas", SOON, || async {
            let path = format!("{}?dryRun=All", pods(CANARIES));
            let created = self.api.post(&path, &canary("probe")).await?.accepted()?;
            let label = &created["metadata"]["labels"][KEY];
            ensure!(*label == "canary", "not boosted");
            Ok(())
        })
        .await
    }

    /// Makes the boost of pods whose end shows how far the leader has got.
    pub async fn make_canary_boost(&self) -> anyhow::Result<()> {
        let mut boost = notation::boost("canary", CANARIES, "+100", "Ready")?;
        boost["selector"] = json!({"matchLabels": {"canary": "yes"}});
        self.api
            .post(&boosts(CANARIES), &boost)
            .await?
            .accepted()
            .map(drop)
    }

    async fn published_ca(&self) -> anyhow::Result<String> {
        let path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/headstart";
        let configuration = self.api.get(path).await?.accepted()?;
        let ca = configuration["webhooks"][0]["clientConfig"].get("caBundle");
        let ca = ca.and_then(Value::as_str).filter(|ca| !ca.is_empty());
        Ok(ca.context("there is none")?.to_owned())
    }

    /// Makes a namespace, if it is not there.
    pub async fn namespace(&self, name: &str) -> anyhow::Result<()> {
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        let answer = self.api.post("/api/v1/namespaces", &namespace).await?;
        if answer.code == 409 {
            return Ok(());
        }
        answer.accepted().map(drop)
    }

    /// Makes boosts: those of `ns` in this namespace, those of another in another. They may not be known yet.
    pub async fn make_boosts(&self, place: &str, made: &[Boost]) -> anyhow::Result<()> {
        for boost in made {
            ensure!(
                boost.invalid.is_none(),
                "an API server with our definition does not take {}",
                boost.name
            );
            let mut object = boost.object.clone();
            ensure!(
                boost.kind == Kind::StartupCPUBoost,
                "a boost of the cluster is for all cases there"
            );
            let namespace = if boost.namespace == "ns" {
                place.to_owned()
            } else {
                let other = format!("{place}-{}", boost.namespace);
                self.namespace(&other).await?;
                other
            };
            object["metadata"]["namespace"] = json!(namespace);
            let path = format!("{}?fieldValidation=Strict", boosts(&namespace));
            self.api
                .post(&path, &object)
                .await?
                .accepted()
                .with_context(|| format!("the boost {}", boost.name))?;
        }
        Ok(())
    }

    /// Waits until every replica knows all boosts as they are now.
    ///
    /// A boost more is made, which a replica can't know without all that was before it: they come in one watch, in
    /// order.
    pub async fn boosts_are_seen(&self) -> anyhow::Result<()> {
        let name = format!("m-{}", self.number());
        let selected = json!({"marker": name});
        let mut boost = notation::boost(&name, MARKERS, "+100", "Ready")?;
        boost["selector"] = json!({"matchLabels": selected});
        self.api.post(&boosts(MARKERS), &boost).await?.accepted()?;
        let is_boosted = |response: &Value| response.get("patch").is_some();
        self.all_answer(MARKERS, &selected, is_boosted).await?;
        let path = format!("{}/{name}", boosts(MARKERS));
        self.api.delete(&path).await?.accepted().map(drop)
    }

    /// Gives a namespace what a case says of it, and waits until that counts: for every replica, and for the API
    /// server's own plugins.
    pub async fn surround(&self, place: &str, admit: &Admit) -> anyhow::Result<()> {
        ensure!(admit.nodes.is_none(), "the nodes are there for all cases");
        if !admit.namespace_labels.is_empty() {
            self.label(place, &admit.namespace_labels).await?;
        }
        let (ranges, quotas) = (world::limit_ranges(admit), world::quotas(&admit.quotas));
        for range in &ranges {
            self.bound(place, range).await?;
        }
        for quota in &quotas {
            self.bound(place, quota).await?;
        }
        if !ranges.is_empty() {
            self.limit_ranges_are_seen().await?;
            self.refuses_much(place, "maximum cpu usage per Container")
                .await?;
        }
        if !quotas.is_empty() {
            let quota = json!({
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "compute"},
                "spec": {"hard": {"requests.cpu": "100m"}},
            });
            // A replica that ignores quotas skips nothing for one.
            if !admit.flags.contains_key("ignore-quota") {
                self.is_seen(&json!({}), Some(&quota), "Quota").await?;
            }
            self.refuses_much(place, "exceeded quota").await?;
        }
        Ok(())
    }

    /// Gives a namespace a LimitRange with these entries, beside those that it has, and waits until that counts. Without
    /// entries it is taken away.
    pub async fn limit(&self, place: &str, entries: &[Value]) -> anyhow::Result<()> {
        const LATER: &str = "later";
        if entries.is_empty() {
            let path = format!("/api/v1/namespaces/{place}/limitranges/{LATER}");
            return self.api.delete(&path).await?.accepted().map(drop);
        }
        self.bound(place, &world::limit_range(LATER, entries))
            .await?;
        self.limit_ranges_are_seen().await?;
        let mut pod = notation::pod("app -/-")?;
        pod["metadata"] = json!({"name": "plain", "namespace": place});
        eventually("the API server knows the defaults", SOON, || async {
            let created = self.create(place, "?dryRun=All", &pod).await?.accepted()?;
            let resources = &created["spec"]["containers"][0]["resources"];
            ensure!(resources["limits"]["cpu"].is_string(), "no limit was added");
            Ok(())
        })
        .await
    }

    /// Gives a namespace more quotas, and waits until the API server knows them.
    pub async fn hold_to(&self, place: &str, quotas: &[Value]) -> anyhow::Result<()> {
        for quota in quotas {
            self.bound(place, quota).await?;
        }
        self.refuses_much(place, "exceeded quota").await
    }

    /// Waits until every replica knows all LimitRanges as they are now.
    async fn limit_ranges_are_seen(&self) -> anyhow::Result<()> {
        let item = json!({"type": "Container", "max": {"cpu": "100m"}});
        let range = world::limit_range("bounds", &[item]);
        self.is_seen(&json!({}), Some(&range), "Clamped").await
    }

    /// Gives a namespace exactly these labels, and waits until every replica knows them.
    pub async fn label(
        &self,
        place: &str,
        labels: &BTreeMap<String, String>,
    ) -> anyhow::Result<()> {
        let path = format!("/api/v1/namespaces/{place}");
        let mut namespace = self.api.get(&path).await?.accepted()?;
        // The API server adds its own.
        namespace["metadata"]["labels"] = json!(labels);
        self.api.put(&path, &namespace).await?.accepted()?;
        let disabled = json!({KEY: "disabled"});
        self.is_seen(&disabled, None, "Disabled").await
    }

    /// Makes a LimitRange or a ResourceQuota, whose status nobody else would write.
    async fn bound(&self, place: &str, object: &Value) -> anyhow::Result<()> {
        let mut object = object.clone();
        object["metadata"]["namespace"] = json!(place);
        let kind = object["kind"].as_str().unwrap_or_default().to_lowercase();
        let path = format!("/api/v1/namespaces/{place}/{kind}s");
        let mut made = self.api.post(&path, &object).await?.accepted()?;
        if let Some(status) = object.get("status") {
            made["status"] = status.clone();
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            self.api
                .put(&format!("{path}/{name}/status"), &made)
                .await?
                .accepted()?;
        }
        Ok(())
    }

    /// Waits until every replica knows all namespaces, LimitRanges or quotas as they are now.
    ///
    /// One more is made, for which a pod is skipped; a replica can't know it without all that was before it.
    async fn is_seen(
        &self,
        labels: &Value,
        object: Option<&Value>,
        skipped: &str,
    ) -> anyhow::Result<()> {
        let place = format!("{MARKERS}-{}", self.number());
        let metadata = json!({"name": place, "labels": labels});
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
        self.api
            .post("/api/v1/namespaces", &namespace)
            .await?
            .accepted()?;
        let boost = notation::boost("b", &place, "+100", "Ready")?;
        self.api.post(&boosts(&place), &boost).await?.accepted()?;
        if let Some(object) = object {
            self.bound(&place, object).await?;
        }
        let is_skipped = |response: &Value| response["auditAnnotations"]["skipped"] == *skipped;
        self.all_answer(&place, &json!({"app": "a"}), is_skipped)
            .await
    }

    /// Waits until the API server refuses a pod that asks for very much, and says this.
    async fn refuses_much(&self, place: &str, text: &str) -> anyhow::Result<()> {
        let mut pod = notation::pod("app 1000/1000")?;
        pod["metadata"] = json!({"name": "much", "namespace": place});
        eventually("the API server knows the bounds", SOON, || async {
            let answer = self.create(place, "?dryRun=All", &pod).await?;
            let said = answer.body["message"].to_string();
            let is_it = answer.code == 403 && said.contains(text);
            ensure!(is_it, "answered with {}: {said}", answer.code);
            Ok(())
        })
        .await
    }

    /// Waits until every replica answers so for a new pod with these labels.
    async fn all_answer(
        &self,
        namespace: &str,
        labels: &Value,
        is_right: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<()> {
        let mut pod = notation::pod("app 100m/-")?;
        pod["metadata"] = json!({"name": "p", "namespace": namespace, "labels": labels});
        let review = json!({
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {
                "uid": "u",
                "resource": {"group": "", "version": "v1", "resource": "pods"},
                "namespace": namespace,
                "operation": "CREATE",
                "dryRun": true,
                "object": pod,
            },
        });
        for replica in self.replicas() {
            eventually("a replica knows what is new", SOON, || async {
                let sent = replica.webhook.post("/mutate-v1-pod", &review);
                let answer = sent.await?.accepted()?;
                ensure!(is_right(&answer["response"]), "it answers {answer}");
                Ok(())
            })
            .await?;
        }
        Ok(())
    }

    /// Waits until the leader has got to all that has happened so far: a pod becomes Ready, and its boost ends.
    pub async fn leader_has_seen(&self) -> anyhow::Result<()> {
        let name = format!("canary-{}", self.number());
        let path = format!("{}/{name}", pods(CANARIES));
        let created = self
            .create(CANARIES, "", &canary(&name))
            .await?
            .accepted()?;
        if created["metadata"]["labels"].get(KEY).is_none() {
            // While there is no definition, no pod is boosted; a record is enough for its end.
            let record = json!({
                "state": "Active",
                "initCPURequests": {"app": "5m"},
                "end": {"condition": {"type": "Ready", "status": "True"}},
            });
            let marks = json!({
                "labels": {KEY: "canary"},
                "annotations": {KEY: record.to_string()},
            });
            let marked = json!({"metadata": marks});
            self.api.patch(&path, MERGE, &marked).await?.accepted()?;
        }
        self.running(CANARIES, &name).await?;
        self.cluster.node.set_ready(CANARIES, &name, true).await?;
        eventually("a canary's boost ends", SOON, || async {
            let pod = self.api.get(&path).await?.accepted()?;
            let record = record_text(&pod).unwrap_or_default();
            // Where restarts are boosted, it keeps its label.
            let has_ended = pod["metadata"]["labels"].get(KEY).is_none()
                || record.contains(r#""state":"Reverted""#);
            ensure!(has_ended, "it goes on");
            Ok(())
        })
        .await?;
        self.remove(CANARIES, &name).await
    }

    /// Waits until a pod runs, and the kubelet has seen its last change.
    pub async fn running(&self, namespace: &str, name: &str) -> anyhow::Result<Value> {
        let path = format!("{}/{name}", pods(namespace));
        eventually("the pod runs", SOON, || async {
            let pod = self.api.get(&path).await?.accepted()?;
            let (generation, status) = (&pod["metadata"]["generation"], &pod["status"]);
            ensure!(
                status["phase"] == "Running" && status["observedGeneration"] == *generation,
                "its status is {status}"
            );
            Ok(pod)
        })
        .await
    }

    /// Waits until no node is large enough for a pod.
    pub async fn unschedulable(&self, namespace: &str, name: &str) -> anyhow::Result<()> {
        let path = format!("{}/{name}", pods(namespace));
        eventually("no node is large enough for it", SOON, || async {
            let pod = self.api.get(&path).await?.accepted()?;
            let conditions = &pod["status"]["conditions"];
            let reason = &conditions[0]["reason"];
            ensure!(*reason == "Unschedulable", "its status says {conditions}");
            Ok(())
        })
        .await
    }

    /// Creates a pod; `query` as in `?dryRun=All`.
    pub async fn create(
        &self,
        namespace: &str,
        query: &str,
        pod: &Value,
    ) -> anyhow::Result<Answer> {
        let _others_may_too = self.admissions.read().await;
        self.api
            .post(&format!("{}{query}", pods(namespace)), pod)
            .await
    }

    /// Removes a pod at once.
    pub async fn remove(&self, namespace: &str, name: &str) -> anyhow::Result<()> {
        let path = format!("{}/{name}?gracePeriodSeconds=0", pods(namespace));
        self.api.delete(&path).await?.accepted().map(drop)
    }

    /// The admission reviews that all replicas have counted.
    pub async fn reviews(&self) -> anyhow::Result<u64> {
        let mut sum = 0;
        for replica in self.replicas() {
            let text = replica.operator.metrics().await?;
            let series = text
                .lines()
                .filter(|line| line.starts_with("headstart_admission_reviews_total{"));
            for line in series {
                let (_, count) = line.rsplit_once(' ').context("a series has a value")?;
                sum += count.parse::<u64>()?;
            }
        }
        Ok(sum)
    }

    /// The metrics of the replica that leads.
    pub async fn leader_metrics(&self) -> anyhow::Result<String> {
        let leader = self.cluster.leader_other_than("").await?;
        let replicas = self.replicas();
        let mut replicas = replicas.iter();
        let replica = replicas.find(|replica| replica.operator.name() == leader);
        replica
            .with_context(|| format!("{leader} is none of them"))?
            .operator
            .metrics()
            .await
    }

    fn number(&self) -> u32 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }
}

/// Path of a namespace's boosts.
pub fn boosts(namespace: &str) -> String {
    format!("/apis/autoscaling.x-k8s.io/v1alpha1/namespaces/{namespace}/startupcpuboosts")
}

/// Path of the boosts of a kind; a namespace's, where they have one.
pub fn boosts_of(kind: Kind, namespace: &str) -> String {
    match kind {
        Kind::StartupCPUBoost => boosts(namespace),
        Kind::ClusterStartupCPUBoost => {
            "/apis/autoscaling.x-k8s.io/v1alpha1/clusterstartupcpuboosts".to_owned()
        }
    }
}

/// Who the operator is to the API server.
pub fn operator() -> String {
    format!("system:serviceaccount:{SYSTEM_NAMESPACE}:headstart")
}

fn canary(name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"canary": "yes"}},
        "spec": {"containers": [{"name": "app", "image": "x", "resources": {"requests": {"cpu": "10m"}}}]},
    })
}

/// A client without an identity, for a server with a certificate of this CA.
async fn client(server: &str, ca: &str) -> anyhow::Result<Client> {
    let kubeconfig: Kubeconfig = serde_json::from_value(json!({
        "clusters": [{"name": "x", "cluster": {"server": server, "certificate-authority-data": ca}}],
        "users": [{"name": "x", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "current-context": "x",
    }))?;
    let options = KubeConfigOptions::default();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
    config.default_retry = false;
    config.proxy_url = None;
    Ok(Client::try_from(config)?)
}
