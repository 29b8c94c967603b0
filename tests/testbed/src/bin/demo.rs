//! `cargo demo`: the main job on a real control plane, told in the terminal.
//!
//! It starts etcd and kube-apiserver, applies the manifests, runs two replicas of the real binary under the account and
//! the policies that the manifests give it, and pretends to be scheduler and kubelet. It exits with 0 only if everything
//! that it tells has happened.

use std::{
    io::{IsTerminal, Write},
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::PostParams};
use serde_json::{Value, json};
use testbed::{Behaviour, Cluster, ControlPlane, Options, eventually, release};

const NAMESPACE: &str = "shop";
const KEY: &str = "autoscaling.x-k8s.io/startup-cpu-boost";
/// How long anything in the story may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// A lease of 6 s, a follower's retry of at most 1.2 s, and the writes.
const FAILOVER: Duration = Duration::from_secs(9);

#[tokio::main]
async fn main() -> Result<()> {
    let mut keep = false;
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--keep" => keep = true,
            "--help" | "-h" => {
                println!(
                    "cargo demo [--keep]\n\n  --keep  leave the cluster up at the end, until Ctrl-C"
                );
                return Ok(());
            }
            other => bail!("unknown argument {other:?}: only --keep is known"),
        }
    }
    Box::pin(story(keep)).await.context("the demo failed")
}

async fn story(keep: bool) -> Result<()> {
    println!(
        "{}",
        paint(
            "1",
            "Headstart: more CPU while pods start, taken back in place."
        )
    );
    chapter("Build the operator");
    let binary = build().await?;

    chapter("Start a control plane");
    let began = Instant::now();
    let plane = ControlPlane::start(Options::default()).await?;
    let version = plane.admin().apiserver_version().await?.git_version;
    say(&format!(
        "etcd and kube-apiserver {version} at {}, up in {}",
        plane.url(),
        seconds(began)
    ));

    let mut stage = Stage::set(plane, &binary).await?;
    stage.boost_and_revert().await?;
    stage.kill_the_leader().await?;
    stage.delete_the_boost().await?;

    println!(
        "\n{}",
        paint(
            "32",
            "All of it happened. Every pod is back at what it asked for."
        )
    );
    if keep {
        let kubeconfig = stage.cluster.plane.admin_kubeconfig().display();
        println!(
            "\nThe cluster is up until you press Ctrl-C. In another terminal:\n\n  export KUBECONFIG={kubeconfig}"
        );
        println!("  kubectl -n {NAMESPACE} get pods,scb\n");
        tokio::signal::ctrl_c()
            .await
            .context("waiting for Ctrl-C")?;
    }
    Ok(())
}

/// The cluster, and the pods that play in it.
struct Stage {
    cluster: Cluster,
    pods: Api<Pod>,
}

impl Stage {
    async fn set(plane: ControlPlane, binary: &Path) -> Result<Self> {
        chapter("Install");
        let began = Instant::now();
        let behaviour = Behaviour {
            ready_after: None,
            ..Behaviour::default()
        };
        let cluster = Cluster::install(plane, binary, 2, behaviour).await?;
        say("kubectl apply -k manifests: accepted; a load balancer stands in for the Service");
        say(&format!(
            "two replicas, each as the ServiceAccount of the manifests: Ready, all in {}",
            seconds(began)
        ));
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
        cluster.plane.apply(&namespace.to_string()).await?;
        cluster.plane.apply(BOOST).await?;
        let pods = Api::namespaced(cluster.plane.admin(), NAMESPACE);
        let stage = Self { cluster, pods };
        let leader = stage.cluster.leader_other_than("").await?;
        say(&format!(
            "both answer admission; {leader} leads, so it alone takes boosts back"
        ));
        stage.boosts_count().await?;
        show(BOOST);
        Ok(stage)
    }

    /// Waits until new pods are boosted: the CA is in the webhook configuration and both replicas know the boost.
    async fn boosts_count(&self) -> Result<()> {
        eventually("both replicas boost", PATIENCE, || async {
            for _ in 0..2 * self.cluster.replicas.len() {
                let dry_run = PostParams {
                    dry_run: true,
                    ..PostParams::default()
                };
                let pod = self.pods.create(&dry_run, &pod("probe")?).await?;
                ensure!(
                    cpu(&pod) == ("1500m".to_owned(), "3".to_owned()),
                    "not boosted yet"
                );
            }
            Ok(())
        })
        .await
    }

    async fn boost_and_revert(&self) -> Result<()> {
        chapter("A pod is created");
        say("it asks for 500m CPU, limit 1");
        let began = Instant::now();
        let pod = self.create("checkout").await?;
        let (request, limit) = cpu(&pod);
        ensure!(
            (request.as_str(), limit.as_str()) == ("1500m", "3"),
            "it was not boosted: {request}/{limit}"
        );
        say(&format!(
            "it gets {request}, limit {limit}, in the same request ({})",
            millis(began)
        ));
        self.running(&["checkout"]).await?;
        self.describe("checkout").await?;

        chapter("It becomes Ready");
        let lag = self.ready_and_reverted(&["checkout"]).await?;
        ensure!(
            lag < Duration::from_secs(1),
            "taking the CPU back took {lag:?}, more than a second"
        );
        say(&format!(
            "back at 500m, limit 1, {} ms later, by a resize in place",
            lag.as_millis()
        ));
        self.finished(&["checkout"]).await?;
        self.describe("checkout").await
    }

    async fn kill_the_leader(&mut self) -> Result<()> {
        chapter("The leader dies in the middle of five boosts");
        let names = ["cart-1", "cart-2", "cart-3", "cart-4", "cart-5"];
        for name in names {
            self.create(name).await?;
        }
        self.running(&names).await?;
        let leader = self.cluster.leader_other_than("").await?;
        self.cluster.take_replica(&leader)?.crash()?;
        let killed = Instant::now();
        say(&format!(
            "{leader} is killed (SIGKILL), and the five pods become Ready with nobody leading"
        ));
        self.ready_and_reverted(&names).await?;
        let lag = killed.elapsed();
        ensure!(
            lag < FAILOVER,
            "the failover took {lag:?}, more than {FAILOVER:?}"
        );
        let next = self.cluster.leader_other_than(&leader).await?;
        say(&format!(
            "{next} took the lease and reverted all five, {} after the kill",
            seconds(killed)
        ));
        let pod = self.create("cart-6").await?;
        ensure!(
            cpu(&pod).0 == "1500m",
            "the surviving replica did not boost a new pod"
        );
        say("a pod created meanwhile was boosted by the surviving replica");
        self.finished(&names).await?;
        self.ready_and_reverted(&["cart-6"]).await.map(drop)
    }

    async fn delete_the_boost(&self) -> Result<()> {
        chapter("The boost object is deleted while two pods are boosted");
        let names = ["search-1", "search-2"];
        for name in names {
            self.create(name).await?;
        }
        self.running(&names).await?;
        self.cluster
            .plane
            .kubectl_ok(&["-n", NAMESPACE, "delete", "scb", "fast-start"])
            .await?;
        say("kubectl delete scb fast-start: the pods go on starting with their boost");
        let lag = self.ready_and_reverted(&names).await?;
        say(&format!(
            "Ready: both are back within {} ms, by their own records alone",
            lag.as_millis()
        ));
        self.finished(&names).await
    }

    async fn create(&self, name: &str) -> Result<Pod> {
        self.pods
            .create(&PostParams::default(), &pod(name)?)
            .await
            .with_context(|| format!("creating the pod {name}"))
    }

    async fn running(&self, names: &[&str]) -> Result<()> {
        self.each(names, "is Running", |pod| {
            pod.status
                .as_ref()
                .and_then(|status| status.phase.as_deref())
                == Some("Running")
        })
        .await
    }

    /// Makes pods Ready, and says how long their CPU took to come back after that.
    async fn ready_and_reverted(&self, names: &[&str]) -> Result<Duration> {
        try_join_all(
            names
                .iter()
                .map(|name| self.cluster.node.set_ready(NAMESPACE, name, true)),
        )
        .await?;
        let began = Instant::now();
        self.each(names, "is back at 500m", |pod| {
            cpu(pod) == ("500m".to_owned(), "1".to_owned())
        })
        .await?;
        Ok(began.elapsed())
    }

    async fn finished(&self, names: &[&str]) -> Result<()> {
        self.each(names, "has lost its claim", |pod| {
            pod.metadata
                .labels
                .as_ref()
                .is_none_or(|labels| !labels.contains_key(KEY))
        })
        .await
    }

    async fn each(
        &self,
        names: &[&str],
        what: &str,
        is: impl Fn(&Pod) -> bool + Copy,
    ) -> Result<()> {
        try_join_all(names.iter().map(|name| async move {
            eventually(&format!("the pod {name} {what}"), PATIENCE, || async {
                let pod = self.pods.get(name).await?;
                ensure!(is(&pod), "its CPU is {:?}", cpu(&pod));
                Ok(())
            })
            .await
        }))
        .await
        .map(drop)
    }

    /// What `kubectl describe` says of our marks.
    async fn describe(&self, name: &str) -> Result<()> {
        let text = self
            .cluster
            .plane
            .kubectl_ok(&["-n", NAMESPACE, "describe", "pod", name])
            .await?;
        let marks: Vec<&str> = text
            .lines()
            .skip_while(|line| !line.starts_with("Labels:"))
            .take_while(|line| !line.starts_with("Status:"))
            .collect();
        show(&format!(
            "$ kubectl describe pod {name}\n{}",
            marks.join("\n")
        ));
        let record = self
            .pods
            .get(name)
            .await?
            .metadata
            .annotations
            .unwrap_or_default()
            .remove(KEY);
        let record: Value = serde_json::from_str(&record.context("the record is gone")?)?;
        show(&format!("in full: {record}"));
        Ok(())
    }
}

const BOOST: &str = "\
apiVersion: autoscaling.x-k8s.io/v1alpha1
kind: StartupCPUBoost
metadata:
  name: fast-start
  namespace: shop
selector:
  matchLabels:
    app: shop
spec:
  resourcePolicy:
    containerPolicies:
    - matchContainers: {type: ExactName, value: app}
      percentageIncrease: {value: 200}
  durationPolicy:
    podCondition: {type: Ready, status: \"True\"}
";

fn pod(name: &str) -> Result<Pod> {
    let pod: Value = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": "shop"}},
        "spec": {"containers": [{
            "name": "app",
            "image": "shop:1",
            "resources": {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}},
        }]},
    });
    serde_json::from_value(pod).context("the demo's own pod")
}

/// Request and limit of the pod's container.
fn cpu(pod: &Pod) -> (String, String) {
    let resources = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.containers.first()?.resources.clone())
        .unwrap_or_default();
    let cpu = |amounts: Option<std::collections::BTreeMap<String, _>>| {
        let amount: Option<k8s_openapi::apimachinery::pkg::api::resource::Quantity> =
            amounts?.remove("cpu");
        Some(amount?.0)
    };
    (
        cpu(resources.requests).unwrap_or_default(),
        cpu(resources.limits).unwrap_or_default(),
    )
}

/// Builds the binary as a user would; cargo says what it does.
async fn build() -> Result<PathBuf> {
    let began = Instant::now();
    let output = release::cargo()
        .args([
            "build",
            "--bin",
            "headstart",
            "--message-format=json-render-diagnostics",
        ])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
        .stderr(Stdio::inherit())
        .output()
        .await
        .context("running cargo")?;
    ensure!(output.status.success(), "the operator could not be built");
    let binary = String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .context("cargo did not say where the operator is")?;
    say(&format!("target/debug/headstart, in {}", seconds(began)));
    Ok(binary)
}

fn chapter(title: &str) {
    println!("\n{}", paint("1;36", title));
}

fn say(line: &str) {
    println!("  {line}");
    let _ = std::io::stdout().flush();
}

fn show(text: &str) {
    println!();
    for line in text.lines() {
        println!("{}", paint("2", &format!("    {line}")));
    }
}

fn paint(code: &str, text: &str) -> String {
    if std::io::stdout().is_terminal() {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}

fn seconds(since: Instant) -> String {
    format!("{:.1} s", since.elapsed().as_secs_f64())
}

fn millis(since: Instant) -> String {
    format!("{} ms", since.elapsed().as_millis())
}
