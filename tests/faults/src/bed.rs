//! Where faults are inflicted: replicas as processes on a real API server, each with a link and a proxy of its own on the way
//! there, a load balancer before their webhooks, and a stand-in for scheduler and kubelet.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Pod, Secret},
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams},
};
use load::client::{Connection, connector, post};
use serde_json::{Value, json};
use testbed::{
    Backend, Balancer, Behaviour, ControlPlane, NodeStandIn, Operator, OperatorOptions, Options,
    cluster::{SYSTEM_NAMESPACE, manifests},
    eventually, install,
    link::{Link, Wire},
    lives::{self, KEY, Lives, NAMESPACE},
    proxy::Proxy,
};

use crate::ledger::Ledger;

/// Replicas, as the manifests have them.
pub(crate) const REPLICAS: usize = 3;
/// How long what is no matter of the fault may take.
pub(crate) const SOON: Duration = Duration::from_secs(60);
/// What a replica may hold at rest.
const MOST_MEMORY: f64 = 64.0 * 1024.0;
const MOST_FILES: usize = 128;
/// Lines of each replica's log that an error shows.
const LOG: usize = 40;
/// Pods of one repetition.
pub(crate) const PODS: usize = 20;
/// The group of pods, and the boost until Ready that is theirs.
pub(crate) const GROUP: &str = "storm";

/// All of it. It ends with this value, and at the latest with this process.
pub(crate) struct Bed {
    pub(crate) replicas: Vec<Replica>,
    pub(crate) balancer: Balancer,
    pub(crate) node: NodeStandIn,
    pub(crate) lives: Lives,
    pub(crate) ledger: Ledger,
    pub(crate) plane: ControlPlane,
    binary: PathBuf,
    /// How many replicas, and how many pods, were ever made: names don't come twice.
    started: usize,
    pods: u32,
}

/// A replica and its way to the API server: process → link → proxy → API server.
pub(crate) struct Replica {
    pub(crate) operator: Operator,
    pub(crate) link: Link,
    pub(crate) proxy: Proxy,
}

impl Bed {
    /// Starts it, and waits until all replicas are Ready and one leads.
    ///
    /// # Errors
    /// If anything does not start.
    pub(crate) async fn start(binary: &Path) -> Result<Self> {
        let plane = ControlPlane::start(Options::default()).await?;
        let balancer = Balancer::start(Duration::ZERO).await?;
        let url = format!("https://{}/mutate-v1-pod", balancer.address());
        install(&plane, &manifests(), &url).await?;
        let node = NodeStandIn::start(plane.admin(), Behaviour::default()).await?;
        let mut bed = Self {
            replicas: Vec::new(),
            balancer,
            node,
            lives: Lives::watch(plane.admin()),
            ledger: Ledger::of(&plane),
            plane,
            binary: binary.to_owned(),
            started: 0,
            pods: 0,
        };
        for _ in 0..REPLICAS {
            bed.add().await?;
        }
        bed.until_ready().await?;
        lives::prepare(&bed.plane, &[GROUP]).await?;
        Ok(bed)
    }

    /// Starts one more replica, as the manifests have it; it may not be Ready yet.
    ///
    /// # Errors
    /// If it does not start.
    pub(crate) async fn add(&mut self) -> Result<()> {
        self.add_as(|_, _| {}).await
    }

    /// The same, changed; the number is its own.
    ///
    /// # Errors
    /// If it does not start.
    pub(crate) async fn add_as(
        &mut self,
        change: impl FnOnce(usize, &mut OperatorOptions),
    ) -> Result<()> {
        let proxy = Proxy::start(&self.plane).await?;
        let link = Link::start(proxy.address()).await?;
        let name = format!("headstart-{}", self.started);
        let mut options = OperatorOptions::new(&self.binary, name);
        options.server = Some(link.address());
        change(self.started, &mut options);
        self.started += 1;
        let operator = Operator::start(&self.plane, &options).await?;
        self.balancer.add(operator.backend());
        self.replicas.push(Replica {
            operator,
            link,
            proxy,
        });
        Ok(())
    }

    /// Kills all replicas.
    ///
    /// # Errors
    /// If one has ended by itself.
    pub(crate) fn crash_all(&mut self) -> Result<()> {
        let mut all = self.replicas.drain(..);
        all.try_for_each(|replica| replica.operator.crash())
    }

    /// Kills all replicas, starts others instead, and waits until one of them leads.
    ///
    /// # Errors
    /// If they don't become Ready.
    pub(crate) async fn replace_all(
        &mut self,
        change: impl Fn(usize, &mut OperatorOptions),
    ) -> Result<()> {
        self.crash_all()?;
        for _ in 0..REPLICAS {
            self.add_as(&change).await?;
        }
        self.until_ready().await?;
        self.leader().await.map(drop)
    }

    /// Lets pods that run already be boosted: without the policy that the component `manifests/raises` leaves out.
    ///
    /// # Errors
    /// If it is not there.
    pub(crate) async fn allow_raises(&mut self) -> Result<()> {
        self.ledger.allow_raises();
        let policy = "headstart-lower-only";
        let delete = ["delete", "validatingadmissionpolicybinding", policy];
        self.plane.kubectl_ok(&delete).await.map(drop)
    }

    /// Waits until all replicas are Ready and get reviews.
    ///
    /// # Errors
    /// If they are not in time.
    pub(crate) async fn until_ready(&self) -> Result<()> {
        let ready = self.replicas.iter();
        try_join_all(ready.map(|replica| replica.operator.wait_ready(SOON))).await?;
        let backends: Vec<Backend> = self.backends();
        eventually("all replicas get reviews", SOON, || async {
            let serving = self.balancer.serving();
            ensure!(
                backends.iter().all(|backend| serving.contains(backend)),
                "{serving:?} do"
            );
            Ok(())
        })
        .await
    }

    /// Where they are called.
    pub(crate) fn backends(&self) -> Vec<Backend> {
        let replicas = self.replicas.iter();
        replicas.map(|replica| replica.operator.backend()).collect()
    }

    /// Takes a replica out, to be ended. The balancer notices by itself.
    pub(crate) fn take(&mut self, index: usize) -> Replica {
        self.replicas.remove(index)
    }

    /// The replica that leads; waits until one does whose name is not `old`.
    ///
    /// # Errors
    /// If none does in time.
    pub(crate) async fn leader_other_than(&self, old: &str) -> Result<usize> {
        let leases = Api::<Lease>::namespaced(self.plane.admin(), SYSTEM_NAMESPACE);
        eventually("somebody leads", SOON, || async {
            let holder = leases.get("headstart").await?.spec;
            let holder = holder.and_then(|spec| spec.holder_identity);
            let holder = holder.context("nobody holds the lease")?;
            ensure!(holder != old, "{old} still holds it");
            let mut replicas = self.replicas.iter();
            let leader = replicas.position(|replica| replica.operator.name() == holder);
            leader.with_context(|| format!("{holder} holds it, who is gone"))
        })
        .await
    }

    /// The replica that leads.
    ///
    /// # Errors
    /// If none does in time.
    pub(crate) async fn leader(&self) -> Result<usize> {
        self.leader_other_than("").await
    }

    /// Numbers for so many pods; the first of them.
    pub(crate) fn reserve(&mut self, pods: u32) -> u32 {
        let first = self.pods;
        self.pods += pods;
        first
    }

    /// All pods of the repetitions.
    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.plane.admin(), NAMESPACE)
    }

    /// One more pod of the group. It becomes Ready so long after it runs, or when it is told to.
    ///
    /// # Errors
    /// Never: it is a pod.
    pub(crate) fn pod(&mut self, ready_after: Option<Duration>) -> Result<Pod> {
        let mut pod = lives::pod(GROUP, self.reserve(1))?;
        let after = ready_after.map_or("never".to_owned(), |after| {
            format!("{}ms", after.as_millis())
        });
        let annotations = pod.annotations_mut();
        annotations.insert("testbed/ready-after".to_owned(), after);
        Ok(pod)
    }

    /// Creates pods.
    ///
    /// # Errors
    /// If one is refused or not boosted.
    pub(crate) async fn create(&self, pods: impl IntoIterator<Item = Pod>) -> Result<Vec<Pod>> {
        let created = pods.into_iter().map(|pod| async move {
            let created = self.pods().create(&PostParams::default(), &pod).await?;
            let name = created.name_any();
            ensure!(created.labels().contains_key(KEY), "{name} got no boost");
            anyhow::Ok(created)
        });
        try_join_all(created).await
    }

    /// Creates a round's pods, which become Ready when they are told to, and waits until they run.
    ///
    /// # Errors
    /// If one is refused, not boosted, or does not run.
    pub(crate) async fn create_waiting(&mut self, count: usize) -> Result<Vec<Pod>> {
        let pods: Vec<Pod> = (0..count).map(|_| self.pod(None)).collect::<Result<_>>()?;
        let pods = self.create(pods).await?;
        self.lives.until_running(count, SOON).await?;
        Ok(pods)
    }

    /// Makes running pods Ready.
    ///
    /// # Errors
    /// If one is not there.
    pub(crate) async fn make_ready(&self, pods: &[Pod]) -> Result<()> {
        let told = pods.iter().map(|pod| async move {
            let name = pod.name_any();
            self.node.set_ready(NAMESPACE, &name, true).await
        });
        try_join_all(told).await.map(drop)
    }

    /// Deletes pods, whatever they are, and waits until they are gone.
    ///
    /// # Errors
    /// If one stays.
    pub(crate) async fn delete(&self, pods: &[Pod]) -> Result<()> {
        let now = DeleteParams::default().grace_period(0);
        let api = self.pods();
        for pod in pods {
            api.delete(&pod.name_any(), &now).await?;
        }
        eventually("they are gone", SOON, || async {
            for pod in pods {
                let left = api.get_metadata_opt(&pod.name_any()).await?;
                let uid = left.and_then(|left| left.uid());
                ensure!(
                    uid.is_none() || uid != pod.uid(),
                    "{} is left",
                    pod.name_any()
                );
            }
            Ok(())
        })
        .await
    }

    /// Makes the group's boost, or makes it again as it was, and waits until all replicas act by it.
    ///
    /// # Errors
    /// If they don't.
    pub(crate) async fn restore_boost(&self) -> Result<()> {
        lives::prepare(&self.plane, &[GROUP]).await?;
        self.until_all_boost(true).await
    }

    /// Deletes the group's boost, and does not wait until anybody knows.
    ///
    /// # Errors
    /// If it is not there.
    pub(crate) async fn delete_boost(&self) -> Result<()> {
        let delete = ["delete", "scb", "-n", NAMESPACE, GROUP];
        self.plane.kubectl_ok(&delete).await.map(drop)
    }

    /// Merges this into the group's boost, and does not wait until anybody knows.
    ///
    /// # Errors
    /// If it is refused.
    pub(crate) async fn edit_boost(&self, edit: &Value) -> Result<()> {
        let edit = edit.to_string();
        let patch = [
            "patch",
            "scb",
            "-n",
            NAMESPACE,
            GROUP,
            "--type=merge",
            "-p",
            &edit,
        ];
        self.plane.kubectl_ok(&patch).await.map(drop)
    }

    /// Waits until all replicas boost the group's pods, or none does.
    ///
    /// # Errors
    /// If they don't.
    pub(crate) async fn until_all_boost(&self, boost: bool) -> Result<()> {
        eventually("all replicas know", SOON, || async {
            for replica in 0..self.replicas.len() {
                let name = self.replicas[replica].operator.name();
                ensure!(self.asks(replica).await? == boost, "{name} does not");
            }
            Ok(())
        })
        .await
    }

    /// Asks a replica itself for a review of a pod of the group: whether it would boost it.
    ///
    /// # Errors
    /// If it does not answer.
    pub(crate) async fn asks(&self, replica: usize) -> Result<bool> {
        let path = self.published_ca().await?;
        let address = self.replicas[replica]
            .operator
            .backend()
            .address
            .to_string();
        let mut connection = Connection::open(&connector(&path)?, &address).await?;
        let review = review(&serde_json::to_value(lives::pod(GROUP, 0)?)?);
        connection
            .send(&post(review.to_string().as_bytes()))
            .await?;
        let (status, body) = connection.answer().await?;
        let answer: Value = serde_json::from_slice(body)?;
        ensure!(
            status == 200 && answer["response"]["allowed"] == true,
            "{status}: {answer}"
        );
        Ok(answer["response"]["patch"].is_string())
    }

    /// A file with what the replicas' certificates are to be verified by.
    ///
    /// # Errors
    /// If they have published none.
    pub(crate) async fn published_ca(&self) -> Result<PathBuf> {
        let secrets = Api::<Secret>::namespaced(self.plane.admin(), SYSTEM_NAMESPACE);
        let secret = secrets.get("headstart-certificates").await?;
        let ca = secret.data.unwrap_or_default().remove("ca.crt");
        let path = self.plane.folder().join("webhook-ca.crt");
        std::fs::write(&path, ca.context("the Secret has no CA")?.0)?;
        Ok(path)
    }

    /// Makes it as it was at the begin: no faults, all replicas, no pods.
    ///
    /// # Errors
    /// If it does not become so.
    pub(crate) async fn heal(&mut self) -> Result<()> {
        for replica in &self.replicas {
            replica.link.set(Wire::default());
            replica.proxy.clear();
            replica.proxy.forget();
        }
        self.node.set_behaviour(Behaviour::default());
        while self.replicas.len() < REPLICAS {
            self.add().await?;
        }
        self.until_ready().await?;
        self.leader().await?;
        let pods = self.pods();
        let all = ListParams::default();
        let now = DeleteParams::default().grace_period(0);
        pods.delete_collection(&now, &all).await?;
        eventually("all pods are gone", SOON, || async {
            let left = pods.list_metadata(&all).await?.items.len();
            ensure!(left == 0, "{left} are left");
            Ok(())
        })
        .await?;
        self.lives.forget();
        Ok(())
    }

    /// What has to hold at rest after any fault.
    ///
    /// # Errors
    /// If it does not.
    pub(crate) async fn check(&mut self) -> Result<()> {
        self.ledger.check(&self.plane).await?;
        for replica in &self.replicas {
            let process = replica.operator.process();
            process.check().context("a replica has ended by itself")?;
            let (memory, files) = (process.resident()?, process.open_files()?);
            let name = replica.operator.name();
            ensure!(memory <= MOST_MEMORY, "{name} holds {memory} KiB");
            ensure!(files <= MOST_FILES, "{name} has {files} files open");
        }
        Ok(())
    }

    /// For an error: where the logs of the replicas are about.
    pub(crate) fn state(&self) -> String {
        let logs = self.replicas.iter().map(|replica| {
            let (name, log) = (
                replica.operator.name(),
                replica.operator.process().last_log_lines(LOG),
            );
            format!("{name}:\n{log}")
        });
        logs.collect::<Vec<_>>().join("\n")
    }
}

/// As the API server asks.
fn review(pod: &Value) -> Value {
    json!({
        "kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": NAMESPACE, "operation": "CREATE", "userInfo": {}, "object": pod, "dryRun": true,
        },
    })
}
