//! The view in a [`Cluster`]: switched on by the component of the manifests, and reached through the API server's aggregator.
//!
//! Nobody gives Services addresses here, so ours is an `ExternalName` for loopback, and the APIService names the port.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, SYSTEM_NAMESPACE},
    control_plane::{ControlPlane, Options},
    node::Behaviour,
    operator::install,
    rest::{MERGE, Rest},
    wait::eventually,
};

/// Name of the APIService.
pub const API_SERVICE: &str = "v1alpha1.visibility.autoscaling.x-k8s.io";
/// Where its objects are.
pub const API: &str = "/apis/visibility.autoscaling.x-k8s.io/v1alpha1";
/// Path of the APIService.
pub const API_SERVICE_PATH: &str =
    "/apis/apiregistration.k8s.io/v1/apiservices/v1alpha1.visibility.autoscaling.x-k8s.io";
/// Flags of a replica that serves it under the Service's name.
pub const FLAGS: [&str; 3] = [
    "--view",
    "--certificate-name",
    "headstart.headstart-system.svc",
];
/// The aggregator looks again within 30 s.
const AVAILABLE: Duration = Duration::from_secs(90);
const READY: Duration = Duration::from_secs(30);

/// Starts a cluster with the view on all replicas, and waits until its API is available.
///
/// # Errors
/// If anything does not start.
pub async fn start(binary: &Path, replicas: usize, behaviour: Behaviour) -> Result<Cluster> {
    let plane = ControlPlane::start(Options::default()).await?;
    let mut cluster = Cluster::install(plane, binary, 0, behaviour).await?;
    let url = format!("https://{}/mutate-v1-pod", cluster.balancer.address());
    install(&cluster.plane, &overlay(), &url).await?;
    let service = ["delete", "service", "headstart", "-n", SYSTEM_NAMESPACE];
    cluster.plane.kubectl_ok(&service).await?;
    let service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "headstart", "namespace": SYSTEM_NAMESPACE},
        "spec": {"type": "ExternalName", "externalName": "localhost"},
    });
    cluster.plane.apply(&service.to_string()).await?;
    send_to(&cluster.plane, cluster.balancer.address()).await?;
    for _ in 0..replicas {
        cluster.add_replica(&FLAGS).await?;
    }
    for replica in &cluster.replicas {
        replica.wait_ready(READY).await?;
    }
    if replicas > 0 {
        until_available(&cluster.plane, "True").await?;
    }
    Ok(cluster)
}

/// Makes the aggregator ask at this address.
///
/// # Errors
/// If the APIService can't be changed.
pub async fn send_to(plane: &ControlPlane, address: SocketAddr) -> Result<()> {
    let patch = json!({"spec": {"service": {"port": address.port()}}});
    let rest = Rest::new(plane.admin(), READY);
    let patched = rest.patch(API_SERVICE_PATH, MERGE, &patch).await?;
    patched.accepted().map(drop)
}

/// Waits until the aggregator says so of our API.
///
/// # Errors
/// If it does not in time.
pub async fn until_available(plane: &ControlPlane, status: &str) -> Result<()> {
    let rest = Rest::new(plane.admin(), READY);
    eventually("the API is (not) available", AVAILABLE, || async {
        let service = rest.get(API_SERVICE_PATH).await?.accepted()?;
        let conditions = service["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        let available = conditions.any(|condition: &Value| {
            condition["type"] == "Available" && condition["status"] == status
        });
        ensure!(available, "{}", service["status"]);
        Ok(())
    })
    .await
}

/// Makes a service account, and a token for it.
///
/// # Errors
/// If the API server gives none.
pub async fn token(plane: &ControlPlane, namespace: &str, name: &str) -> Result<String> {
    let account = json!({"metadata": {"name": name}});
    let accounts = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
    let rest = Rest::new(plane.admin(), READY);
    rest.post(&accounts, &account).await?.accepted()?;
    let kubeconfig = plane.service_account_kubeconfig(namespace, name).await?;
    let kubeconfig: Value = serde_json::from_str(&std::fs::read_to_string(kubeconfig)?)?;
    let token = kubeconfig["users"][0]["user"]["token"].as_str();
    Ok(token.context("no token")?.to_owned())
}

fn overlay() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../view")
}
