//! The program under test as a process against a test control plane, and its manifests in it.

use std::{
    ffi::OsString,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{
    balancer::Backend,
    control_plane::ControlPlane,
    process::{Signal, Supervised, free_ports},
    wait::{GiveUp, eventually},
};

/// How the operator is started.
#[derive(Clone, Debug)]
pub struct OperatorOptions {
    /// The program, `headstart`.
    pub binary: PathBuf,
    /// The pod's name as it sees it: its identity among the replicas.
    pub name: String,
    /// Where it believes to run; its service account, Lease and Secret are there.
    pub namespace: String,
    /// The identity it acts as, with the rights that the manifests give it.
    pub service_account: String,
    /// Where it finds the API server: a [`crate::Link`] or [`crate::Proxy`] before it, or the plane itself.
    pub server: Option<SocketAddr>,
    /// Where it serves: a restarted replica may keep its addresses, as a pod does. Free ports otherwise.
    pub backend: Option<Backend>,
    /// More flags.
    pub args: Vec<String>,
    /// More environment.
    pub env: Vec<(String, String)>,
}

impl OperatorOptions {
    /// The names that the manifests use, and nothing special.
    #[must_use]
    pub fn new(binary: impl Into<PathBuf>, name: impl Into<String>) -> Self {
        Self {
            binary: binary.into(),
            name: name.into(),
            namespace: "headstart-system".to_owned(),
            service_account: "headstart".to_owned(),
            server: None,
            backend: None,
            args: Vec::new(),
            env: Vec::new(),
        }
    }
}

/// One running replica. It ends with this value, and at the latest with this process.
#[derive(Debug)]
pub struct Operator {
    name: String,
    process: Supervised,
    backend: Backend,
}

impl Operator {
    /// Starts `headstart run`, acting as its service account.
    ///
    /// # Errors
    /// If the service account does not exist (see [`install`]) or the program can't be started.
    pub async fn start(plane: &ControlPlane, options: &OperatorOptions) -> Result<Self> {
        let backend = options.backend.map_or_else(free_backend, Ok)?;
        let kubeconfig = plane
            .service_account_kubeconfig_at(
                options.server.unwrap_or(plane.address()),
                &options.namespace,
                &options.service_account,
            )
            .await?;
        let mut args: Vec<OsString> = vec!["run".into()];
        for (flag, value) in [
            ("--webhook-address", backend.address.to_string()),
            ("--probe-address", backend.probe.to_string()),
        ] {
            args.extend([flag.into(), value.into()]);
        }
        args.extend(["--certificate-name".into(), "127.0.0.1".into()]);
        args.extend(options.args.iter().map(OsString::from));
        let mut env: Vec<(OsString, OsString)> = vec![
            ("KUBECONFIG".into(), kubeconfig.into()),
            ("POD_NAME".into(), options.name.clone().into()),
            ("POD_NAMESPACE".into(), options.namespace.clone().into()),
        ];
        env.extend(
            options
                .env
                .iter()
                .map(|(key, value)| (key.into(), value.into())),
        );
        let log = plane.folder().join(format!("{}.log", options.name));
        let process = Supervised::spawn(&options.name, &options.binary, &args, &env, &log)?;
        Ok(Self {
            name: options.name.clone(),
            process,
            backend,
        })
    }

    /// Waits until `/readyz` says so.
    ///
    /// # Errors
    /// If it does not by the deadline, or the program ends; with the end of its log.
    pub async fn wait_ready(&self, deadline: Duration) -> Result<()> {
        let ready = eventually("the operator is ready", deadline, || async {
            self.process
                .check()
                .map_err(|error| GiveUp(format!("{error:#}")))?;
            self.get("/readyz").await.map(drop)
        });
        ready
            .await
            .with_context(|| format!("the end of its log:\n{}", self.process.last_log_lines(20)))
    }

    /// Its metrics, as text.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn metrics(&self) -> Result<String> {
        self.get("/metrics").await
    }

    /// The answer of its plain port to a GET, which must be 200.
    ///
    /// # Errors
    /// If it is not.
    pub async fn get(&self, path: &str) -> Result<String> {
        let what = || format!("GET http://{}{path}", self.backend.probe);
        let exchange = async {
            let mut stream = TcpStream::connect(self.backend.probe).await?;
            // HTTP/1.0: the answer comes in one piece and ends with the connection.
            stream
                .write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes())
                .await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await?;
            std::io::Result::Ok(answer)
        };
        let answer = tokio::time::timeout(Duration::from_secs(5), exchange)
            .await
            .with_context(what)?
            .with_context(what)?;
        let (head, body) = answer.split_once("\r\n\r\n").with_context(what)?;
        ensure!(
            head.split(' ').nth(1) == Some("200"),
            "{} is answered with {head}\n{body}",
            what()
        );
        Ok(body.to_owned())
    }

    /// Its identity among the replicas.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its webhook and probe ports, for a [`crate::Balancer`].
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// The process: to read its log, to signal it, to see how it ended.
    #[must_use]
    pub fn process(&self) -> &Supervised {
        &self.process
    }

    /// A crash.
    ///
    /// # Errors
    /// If it has ended already.
    pub fn crash(&self) -> Result<()> {
        self.process.kill(Signal::KILL)
    }

    /// Ends it as a kubelet would, and returns its exit code.
    ///
    /// # Errors
    /// If it can't be ended.
    pub async fn stop(&self, deadline: Duration) -> Result<i32> {
        self.process.stop(deadline).await
    }
}

fn free_backend() -> Result<Backend> {
    let [address, probe] = free_ports()?.map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    Ok(Backend { address, probe })
}

/// Applies a kustomization of Headstart's, with the webhook at `webhook_url` instead of a Service.
///
/// The Deployment is applied too, as a plain object: no controller makes pods of it.
///
/// # Errors
/// If the manifests can't be built, one is refused, or a CRD is not established in time.
pub async fn install(plane: &ControlPlane, manifests: &Path, webhook_url: &str) -> Result<()> {
    let text = plane
        .kubectl_command()
        .arg("kustomize")
        .arg(manifests)
        .output()
        .await
        .context("running kubectl kustomize")?;
    if !text.status.success() {
        bail!(
            "kubectl kustomize {} failed:\n{}",
            manifests.display(),
            String::from_utf8_lossy(&text.stderr)
        );
    }
    let text = String::from_utf8(text.stdout).context("kubectl kustomize printed no UTF-8")?;
    let objects: Vec<Value> =
        serde_saphyr::from_multiple(&text).context("reading what kubectl kustomize printed")?;
    let (first, mut rest): (Vec<_>, Vec<_>) = objects.into_iter().partition(|object| {
        object["kind"] == "Namespace" || object["kind"] == "CustomResourceDefinition"
    });
    for webhook in rest
        .iter_mut()
        .filter(|object| object["kind"] == "MutatingWebhookConfiguration")
    {
        for entry in webhook["webhooks"].as_array_mut().into_iter().flatten() {
            // Without a caBundle, as shipped: filling that in is the operator's own work.
            entry["clientConfig"] = json!({"url": webhook_url});
        }
    }
    plane.apply(&list(&first)).await?;
    for crd in first
        .iter()
        .filter(|object| object["kind"] == "CustomResourceDefinition")
    {
        let name = crd["metadata"]["name"]
            .as_str()
            .context("a CustomResourceDefinition has no name")?;
        let (name, established) = (format!("crd/{name}"), "--for=condition=Established");
        plane
            .kubectl_ok(&["wait", established, "--timeout=30s", &name])
            .await?;
    }
    plane.apply(&list(&rest)).await?;
    Ok(())
}

fn list(objects: &[Value]) -> String {
    json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string()
}
