//! The cluster that all tests here share, and what they ask of its API server.

use std::{path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use kube::Client;
use serde_json::{Value, json};
use testbed::{
    Answer, Behaviour, Cluster, ControlPlane, Options, Rest,
    cluster::{SYSTEM_NAMESPACE, shared},
    eventually,
    rest::{STRATEGIC, pods},
};
use tokio::sync::OnceCell;

/// How long anything may take that needs no time by itself.
pub(crate) const SOON: Duration = Duration::from_secs(60);
/// A label of namespaces for whose pods our webhook is not called.
pub(crate) const UNCALLED: &str = "uncalled";

const WEBHOOKS: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";

/// It ends with the process.
static BED: OnceCell<Result<Bed, String>> = OnceCell::const_new();

/// The binary under test.
pub(crate) fn binary() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_headstart"))
}

/// The cluster, and two ways to talk to its API server.
pub(crate) struct Bed {
    /// Without a replica: whoever wants one starts it.
    pub(crate) cluster: Cluster,
    /// May do everything.
    pub(crate) client: Client,
    /// May do everything.
    pub(crate) api: Rest,
    /// May do what the manifests let the operator do.
    operator: Rest,
}

/// The cluster; the first to ask starts it.
pub(crate) async fn bed() -> Result<&'static Bed> {
    shared(&BED, Bed::start()).await
}

impl Bed {
    async fn start() -> Result<Self> {
        let behaviour = Behaviour {
            ready_after: None,
            ..Behaviour::default()
        };
        let plane = ControlPlane::start(Options::default()).await?;
        let cluster = Cluster::install(plane, binary(), 0, behaviour).await?;
        let plane = &cluster.plane;
        let operator = plane
            .service_account_client(SYSTEM_NAMESPACE, "headstart")
            .await?;
        let bed = Self {
            client: plane.admin(),
            api: Rest::new(plane.admin(), SOON),
            operator: Rest::new(operator, SOON),
            cluster,
        };
        bed.leave_out_uncalled().await?;
        Ok(bed)
    }

    /// Adds one expression to the webhook's namespaceSelector, and changes nothing else of it.
    async fn leave_out_uncalled(&self) -> Result<()> {
        let path = format!("{WEBHOOKS}/headstart");
        let mut webhook = self.api.get(&path).await?.accepted()?;
        let expressions = &mut webhook["webhooks"][0]["namespaceSelector"]["matchExpressions"];
        let expressions = expressions.as_array_mut().context("it has a selector")?;
        expressions.push(json!({"key": UNCALLED, "operator": "DoesNotExist"}));
        self.api.put(&path, &webhook).await?.accepted().map(drop)
    }

    /// Makes a namespace with these labels.
    pub(crate) async fn namespace(&self, name: &str, labels: &Value) -> Result<()> {
        let metadata = json!({"name": name, "labels": labels});
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
        let made = self.api.post("/api/v1/namespaces", &namespace).await?;
        made.accepted().map(drop)
    }

    /// Makes a LimitRange of these entries.
    pub(crate) async fn limit_range(&self, namespace: &str, items: &Value) -> Result<()> {
        let range = json!({
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "bounds"},
            "spec": {"limits": items},
        });
        let path = format!("/api/v1/namespaces/{namespace}/limitranges");
        self.api.post(&path, &range).await?.accepted().map(drop)
    }

    /// Makes a ResourceQuota with this `spec` and `status`, which nobody else would write.
    pub(crate) async fn quota(&self, namespace: &str, quota: &Value) -> Result<()> {
        let path = format!("/api/v1/namespaces/{namespace}/resourcequotas");
        let mut object = quota.clone();
        object["metadata"] = json!({"name": "compute"});
        let mut made = self.api.post(&path, &object).await?.accepted()?;
        made["status"] = quota["status"].clone();
        let path = format!("{path}/compute/status");
        self.api.put(&path, &made).await?.accepted().map(drop)
    }

    /// Creates a pod; `query` as in `?dryRun=All`.
    pub(crate) async fn create(&self, namespace: &str, query: &str, pod: &Value) -> Result<Answer> {
        self.api
            .post(&format!("{}{query}", pods(namespace)), pod)
            .await
    }

    /// Waits until a pod runs.
    pub(crate) async fn running(&self, namespace: &str, name: &str) -> Result<()> {
        let path = format!("{}/{name}", pods(namespace));
        eventually("the pod runs", SOON, || async {
            let pod = self.api.get(&path).await?.accepted()?;
            let status = &pod["status"];
            ensure!(status["phase"] == "Running", "its status is {status}");
            Ok(())
        })
        .await
    }

    /// Resizes a pod as the operator: these containers' `resources`.
    pub(crate) async fn resize(
        &self,
        namespace: &str,
        name: &str,
        containers: &Value,
    ) -> Result<Answer> {
        let path = format!("{}/{name}/resize", pods(namespace));
        let body = json!({"spec": {"containers": containers}});
        self.operator.patch(&path, STRATEGIC, &body).await
    }

    /// A counter of the API server's, all series together; one that is absent has counted nothing.
    pub(crate) async fn counted(&self, metric: &str) -> Result<u64> {
        let text = self.cluster.plane.metrics().await?;
        let series = text.lines().filter_map(|line| {
            let rest = line.strip_prefix(metric)?;
            rest.starts_with('{').then(|| rest.rsplit(' ').next())?
        });
        let counts = series.map(|count| count.parse::<u64>().with_context(|| metric.to_owned()));
        counts.sum()
    }
}
