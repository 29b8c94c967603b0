//! A control plane with Headstart in it: manifests applied, replicas running under their account, a balancer before them
//! and a stand-in for scheduler and kubelet.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use serde_json::json;
use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::OnceCell};

use crate::{
    balancer::Balancer,
    control_plane::{ControlPlane, Options},
    node::{Behaviour, NodeStandIn},
    operator::{Operator, OperatorOptions, install},
    wait::eventually,
};

/// Namespace of the manifests.
pub const SYSTEM_NAMESPACE: &str = "headstart-system";
/// A replica is Ready within a second; test processes share two cores.
const READY: Duration = Duration::from_secs(30);

/// Where a cluster lives that many tests of a process share: it outlives each of their own runtimes.
pub static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime needs nothing that can be missing")
});

/// Runs a test on [`RUNTIME`] to its end.
pub fn run<T>(test: impl Future<Output = T>) -> T {
    RUNTIME.block_on(test)
}

/// What the tests of a process share: the first to ask starts it.
///
/// # Errors
/// If it did not start; the same for all who ask.
pub fn shared<T>(
    cell: &'static OnceCell<Result<T, String>>,
    start: impl Future<Output = Result<T>>,
) -> impl Future<Output = Result<&'static T>> {
    // On the heap: this is too large for a test's stack.
    let start = Box::pin(start);
    let start = || async { start.await.map_err(|error| format!("{error:#}")) };
    async move {
        let started = cell.get_or_init(start).await.as_ref();
        started.map_err(|error| anyhow!("the cluster did not start: {error}"))
    }
}

/// All of it. It ends with this value, and at the latest with this process.
pub struct Cluster {
    /// Replicas, by the order in which they were started.
    pub replicas: Vec<Operator>,
    /// Stands for the webhook's Service.
    pub balancer: Balancer,
    /// Scheduler and kubelet.
    pub node: NodeStandIn,
    /// etcd and kube-apiserver.
    pub plane: ControlPlane,
    binary: PathBuf,
    started: usize,
}

impl Cluster {
    /// Starts a control plane with `replicas` of `binary` in it, and waits until all are Ready.
    ///
    /// # Errors
    /// If anything does not start.
    pub async fn start(binary: &Path, replicas: usize, behaviour: Behaviour) -> Result<Self> {
        Self::install(
            ControlPlane::start(Options::default()).await?,
            binary,
            replicas,
            behaviour,
        )
        .await
    }

    /// The same on a control plane that runs already.
    ///
    /// # Errors
    /// If anything is refused or does not start.
    pub async fn install(
        plane: ControlPlane,
        binary: &Path,
        replicas: usize,
        behaviour: Behaviour,
    ) -> Result<Self> {
        let balancer = Balancer::start(Duration::ZERO).await?;
        let url = format!("https://{}/mutate-v1-pod", balancer.address());
        install(&plane, &manifests(), &url).await?;
        let node = NodeStandIn::start(plane.admin(), behaviour).await?;
        let mut cluster = Self {
            replicas: Vec::new(),
            balancer,
            node,
            plane,
            binary: binary.to_owned(),
            started: 0,
        };
        for _ in 0..replicas {
            cluster.add_replica(&[]).await?;
        }
        try_join_all(
            cluster
                .replicas
                .iter()
                .map(|replica| replica.wait_ready(READY)),
        )
        .await?;
        Ok(cluster)
    }

    /// Starts one more replica, with more flags, and puts it behind the balancer. It may not be Ready yet.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn add_replica(&mut self, args: &[&str]) -> Result<&Operator> {
        let mut options = OperatorOptions::new(&self.binary, format!("headstart-{}", self.started));
        options
            .args
            .extend(args.iter().map(|argument| (*argument).to_owned()));
        self.started += 1;
        let operator = Operator::start(&self.plane, &options).await?;
        self.balancer.add(operator.backend());
        self.replicas.push(operator);
        self.replicas.last().context("a replica was just added")
    }

    /// Takes the replica of that name out, to be crashed or stopped. The balancer notices by itself.
    ///
    /// # Errors
    /// If there is none.
    pub fn take_replica(&mut self, name: &str) -> Result<Operator> {
        let index = self
            .replicas
            .iter()
            .position(|replica| replica.name() == name);
        Ok(self
            .replicas
            .remove(index.with_context(|| format!("no replica is called {name}"))?))
    }

    /// Who holds the lease; waits until somebody other than `old` does.
    ///
    /// # Errors
    /// If nobody takes it in time.
    pub async fn leader_other_than(&self, old: &str) -> Result<String> {
        let leases = Api::<Lease>::namespaced(self.plane.admin(), SYSTEM_NAMESPACE);
        eventually("somebody leads", READY, || async {
            let holder = leases
                .get("headstart")
                .await?
                .spec
                .and_then(|spec| spec.holder_identity);
            let holder = holder
                .filter(|holder| !holder.is_empty())
                .context("nobody holds the lease")?;
            ensure!(holder != old, "{old} still holds the lease");
            Ok(holder)
        })
        .await
    }
}

/// The repository's manifests.
#[must_use]
pub fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../manifests")
}

/// A kustomization of the repository's manifests, with these components of theirs.
///
/// # Errors
/// If the manifests can't be copied.
pub fn overlay(components: &[&str]) -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    copy(&manifests(), &folder.path().join("manifests"))?;
    let overlay = json!({"resources": ["manifests"], "components": components});
    let path = folder.path().join("kustomization.yaml");
    fs::write(path, overlay.to_string())?;
    Ok(folder)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}
