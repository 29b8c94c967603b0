//! `headstart check` on a real API server: on a fit cluster, on one where everything is wrong, and for somebody who may not
//! ask. And `headstart run`, which tells of upstream's leftovers.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::ListParams};
use regex::Regex;
use serde_json::{Value, json};
use testbed::{
    Behaviour, Cluster,
    cluster::{SYSTEM_NAMESPACE, manifests},
    eventually,
    process::free_ports,
};

const SOON: Duration = Duration::from_secs(30);
/// The checks, in the order in which they are printed.
const CHECKS: [&str; 9] = [
    "version",
    "resize",
    "crds",
    "rights",
    "policies",
    "deployment",
    "webhook",
    "nodes",
    "upstream",
];
/// What upstream's manifests make, each with the command that removes it.
const LEFTOVERS: [(&str, &str); 3] = [
    (
        "MutatingWebhookConfiguration",
        "kubectl delete mutatingwebhookconfiguration kube-startup-cpu-boost-mutating-webhook-configuration",
    ),
    (
        "ValidatingWebhookConfiguration",
        "kubectl delete validatingwebhookconfiguration kube-startup-cpu-boost-validating-webhook-configuration",
    ),
    (
        "Deployment",
        "kubectl delete -n kube-startup-cpu-boost-system deployment kube-startup-cpu-boost-controller-manager",
    ),
];

/// What is said about a cluster where everything is wrong: check, outcome, words of the detail and of the advice.
const TOLD: [(&str, &str, &str, &str); 10] = [
    (
        "crds",
        "Failed",
        "lacks namespaceSelector",
        "kubectl apply -f manifests/crd.yaml",
    ),
    (
        "rights",
        "Failed",
        "lacks: patch pods/resize",
        "kubectl apply -f manifests/rbac.yaml",
    ),
    (
        "policies",
        "Failed",
        "no ValidatingAdmissionPolicy headstart-record",
        "policy-record.yaml",
    ),
    (
        "policies",
        "Failed",
        "ValidatingAdmissionPolicyBinding headstart-lower-only",
        "policy-lower-only.yaml",
    ),
    (
        "deployment",
        "Failed",
        "0 of 3 replicas of headstart-system/headstart are Ready",
        "kubectl -n headstart-system",
    ),
    ("webhook", "Failed", "no caBundle", "logs"),
    (
        "webhook",
        "Failed",
        "failurePolicy Ignore",
        "kubectl apply -f manifests/webhook.yaml",
    ),
    ("webhook", "Failed", "failed calling webhook", "9443"),
    ("nodes", "Warning", "old (v1.32.9)", "upgrade"),
    (
        "upstream",
        "Failed",
        "Deployment kube-startup-cpu-boost-system/kube-startup-cpu-boost-controller-manager",
        LEFTOVERS[2].1,
    ),
];

/// One cluster for all: it is made less fit from step to step.
#[tokio::test(flavor = "multi_thread")]
async fn check() -> Result<()> {
    let binary = Path::new(env!("CARGO_BIN_EXE_headstart"));
    let mut cluster = Cluster::start(binary, 1, Behaviour::default()).await?;
    set_ready(&cluster, 3).await?;
    a_fit_cluster_is_fit(&cluster).await?;
    who_may_not_ask_is_told_what_it_takes(&cluster).await?;
    leftovers_are_named(&mut cluster).await?;
    with_cert_manager_fewer_rights_are_needed(&cluster).await?;
    a_dry_run_is_warned_of_and_needs_less(&cluster).await?;
    all_that_is_wrong_is_named(&mut cluster).await
}

/// What the program has done.
struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ran {
    /// The one object that `-o json` prints, by the names of its checks: outcome, detail, advice.
    fn checks(&self) -> Result<BTreeMap<String, (String, String, String)>> {
        let object: Value = serde_json::from_str(&self.stdout)
            .with_context(|| format!("no JSON: {} {}", self.stdout, self.stderr))?;
        ensure!(object["fit"] == (self.code == Some(0)), "{object}");
        let checks = object["checks"].as_array().context("no list")?;
        let names: Vec<_> = checks.iter().map(|check| check["name"].as_str()).collect();
        ensure!(names == CHECKS.map(Some), "{names:?}");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        for check in checks {
            let keys: Vec<_> = check.as_object().context("no object")?.keys().collect();
            ensure!(keys == ["name", "outcome", "detail", "advice"], "{keys:?}");
            let is_well = check["outcome"] == "Ok";
            ensure!(check["advice"].is_null() == is_well, "{check}");
            ensure!(!text(&check["detail"]).is_empty(), "{check}");
        }
        let checks = checks.iter().map(|check| {
            let found = ["outcome", "detail", "advice"].map(|key| text(&check[key]));
            (text(&check["name"]), found.into())
        });
        Ok(checks.collect())
    }
}

async fn run(kubeconfig: &Path, args: &[&str]) -> Result<Ran> {
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_headstart"))
        .arg("check")
        .args(args)
        .env("KUBECONFIG", kubeconfig)
        .output()
        .await?;
    Ok(Ran {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout)?,
        stderr: String::from_utf8(output.stderr)?,
    })
}

/// What the Deployment's controller would say.
async fn set_ready(cluster: &Cluster, ready: u32) -> Result<()> {
    let status =
        json!({"status": {"replicas": 3, "readyReplicas": ready, "availableReplicas": ready}});
    let patch = format!("--patch={status}");
    let args = ["-n", SYSTEM_NAMESPACE, "patch", "deployment", "headstart"];
    let args = [&args[..], &["--subresource=status", "--type=merge", &patch]].concat();
    cluster.plane.kubectl_ok(&args).await.map(drop)
}

/// The lines that a block of the page shows.
fn shown(block: &str) -> Result<Vec<String>> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/operate.md");
    let page = fs::read_to_string(page).context("reading the page")?;
    let begin = format!("```text {block}\n$ headstart check\n");
    let (_, rest) = page
        .split_once(&begin)
        .with_context(|| format!("no {block}"))?;
    let (lines, _) = rest.split_once("```").context("the block has no end")?;
    let lines: Vec<_> = lines.lines().map(str::to_owned).collect();
    ensure!(!lines.is_empty(), "nothing is shown");
    Ok(lines)
}

/// Fails where the page shows what is not printed.
fn ensure_shown(block: &str, ran: &Ran) -> Result<()> {
    let version = Regex::new(r"Kubernetes v\S+")?;
    let without_version = |text: &str| version.replace_all(text, "Kubernetes V").into_owned();
    let printed = without_version(&(ran.stdout.clone() + &ran.stderr));
    for line in shown(block)? {
        let line = without_version(&line);
        let is_printed = printed.lines().any(|printed| printed == line);
        ensure!(
            is_printed,
            "docs/operate.md shows {line:?}, not printed is it in:\n{printed}"
        );
    }
    Ok(())
}

async fn a_fit_cluster_is_fit(cluster: &Cluster) -> Result<()> {
    let admin = cluster.plane.admin_kubeconfig();
    let ran = eventually("the cluster is fit", SOON, || async {
        let ran = run(admin, &[]).await?;
        ensure!(ran.code == Some(0), "{}{}", ran.stdout, ran.stderr);
        Ok(ran)
    })
    .await?;
    eprintln!("{}", ran.stdout);
    ensure!(ran.stderr.is_empty(), "{}", ran.stderr);
    let names = ran
        .stdout
        .lines()
        .map(|line| line.split_whitespace().nth(1));
    let names: Option<Vec<_>> = names.collect();
    ensure!(names == Some(CHECKS.to_vec()), "{}", ran.stdout);
    ensure!(ran.stdout.lines().all(|line| line.starts_with("ok    ")));
    ensure_shown("fit", &ran)?;

    let checks = run(admin, &["-o", "json"]).await?.checks()?;
    ensure!(
        checks.values().all(|(outcome, ..)| outcome == "Ok"),
        "{checks:?}"
    );
    let pods = Api::<Pod>::namespaced(cluster.plane.admin(), "default");
    let pods = pods.list(&ListParams::default()).await?;
    ensure!(pods.items.is_empty(), "the dry run has left a pod");

    // Another place is another install: there is none.
    let elsewhere = run(admin, &["-n", "elsewhere", "-o", "json"]).await?;
    let checks = elsewhere.checks()?;
    ensure!(elsewhere.code == Some(1));
    for (check, words) in [
        (
            "rights",
            "system:serviceaccount:elsewhere:headstart lacks: get pods,",
        ),
        ("deployment", "no Deployment elsewhere/headstart"),
    ] {
        ensure!(
            checks[check].0 == "Failed" && checks[check].1.contains(words),
            "{checks:?}"
        );
    }
    ensure!(checks["policies"].0 == "Warning", "{checks:?}");
    Ok(())
}

async fn who_may_not_ask_is_told_what_it_takes(cluster: &Cluster) -> Result<()> {
    let nobody = cluster.plane.kubeconfig_for("nobody", &[])?;
    let ran = run(&nobody, &["-o", "json"]).await?;
    ensure!(ran.code == Some(1), "{}", ran.stderr);
    ensure!(
        ran.stderr == "error: 7 of 9 checks have failed\n",
        "{}",
        ran.stderr
    );
    let checks = ran.checks()?;
    for name in ["version", "resize"] {
        ensure!(checks[name].0 == "Ok", "everybody may ask: {checks:?}");
    }
    for (name, right) in [
        ("crds", "get customresourcedefinitions.apiextensions.k8s.io"),
        ("rights", "create subjectaccessreviews.authorization.k8s.io"),
        (
            "policies",
            "get validatingadmissionpolicies.admissionregistration.k8s.io",
        ),
        ("deployment", "get deployments.apps in headstart-system"),
        (
            "webhook",
            "get mutatingwebhookconfigurations.admissionregistration.k8s.io",
        ),
        ("nodes", "list nodes"),
        (
            "upstream",
            "list mutatingwebhookconfigurations.admissionregistration.k8s.io",
        ),
    ] {
        let (outcome, _, advice) = &checks[name];
        let said = format!("you need the right to {right}");
        ensure!(
            outcome == "Failed" && advice.contains(&said),
            "{name}: {checks:?}"
        );
    }
    Ok(())
}

/// Upstream as its manifests install it, and once more as its Helm chart may: found wherever it is.
async fn leftovers_are_named(cluster: &mut Cluster) -> Result<()> {
    let webhook = |kind: &str, name: &str, entry: &str| {
        let service =
            json!({"namespace": "kube-startup-cpu-boost-system", "name": "webhook-service"});
        json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": name},
            "webhooks": [{"name": entry, "admissionReviewVersions": ["v1"], "sideEffects": "None",
                "clientConfig": {"service": service}}]})
    };
    let deployment = |namespace: &str| {
        let labels = json!({"control-plane": "controller-manager"});
        json!({"apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": "kube-startup-cpu-boost-controller-manager", "namespace": namespace},
            "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels},
                "spec": {"containers": [{"name": "manager", "image": "x"}]}}}})
    };
    let namespace =
        |name: &str| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    let (mutating, validating) = (
        "cpuboost.autoscaling.x-k8s.io",
        "vstartupcpuboost.autoscaling.x-k8s.io",
    );
    let usual = |kind: &str| {
        let kind = kind.trim_end_matches("WebhookConfiguration").to_lowercase();
        format!("kube-startup-cpu-boost-{kind}-webhook-configuration")
    };
    let items = [
        namespace("kube-startup-cpu-boost-system"),
        namespace("charts"),
        webhook(LEFTOVERS[0].0, &usual(LEFTOVERS[0].0), mutating),
        webhook(LEFTOVERS[1].0, &usual(LEFTOVERS[1].0), validating),
        deployment("kube-startup-cpu-boost-system"),
        webhook(LEFTOVERS[0].0, "renamed-mutating", mutating),
        webhook(LEFTOVERS[1].0, "renamed-validating", validating),
        deployment("charts"),
    ];
    let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
    cluster.plane.apply(&list.to_string()).await?;

    let admin = cluster.plane.admin_kubeconfig();
    let ran = run(admin, &["-o", "json"]).await?;
    ensure!(
        ran.code == Some(1) && ran.stderr == "error: 1 of 9 checks have failed\n",
        "{}",
        ran.stdout
    );
    let (outcome, _, advice) = ran.checks()?.remove("upstream").context("no check")?;
    ensure!(outcome == "Failed");
    let renamed = [
        "kubectl delete mutatingwebhookconfiguration renamed-mutating",
        "kubectl delete validatingwebhookconfiguration renamed-validating",
        "kubectl delete -n charts deployment kube-startup-cpu-boost-controller-manager",
        "never delete its CustomResourceDefinition",
    ];
    for words in LEFTOVERS.map(|(_, command)| command).iter().chain(&renamed) {
        ensure!(advice.contains(words), "{words:?} is not in {advice}");
    }

    // A replica that finds them at its start says so, with the rights that it has.
    let replica = cluster.add_replica(&[]).await?;
    eventually("the replica tells of upstream", SOON, || async {
        let metrics = replica.metrics().await?;
        let log = fs::read_to_string(replica.process().log_path())?;
        for (kind, command) in LEFTOVERS {
            let gauge = format!("headstart_upstream_leftovers{{kind=\"{kind}\"}} 1");
            ensure!(metrics.contains(&gauge), "{gauge} is not in the metrics");
            ensure!(log.contains(command), "{command:?} is not in the log");
        }
        ensure!(log.contains("never its CustomResourceDefinition"), "{log}");
        Ok(())
    })
    .await?;
    let gauge = "headstart_upstream_leftovers{kind=\"Deployment\"} 0";
    let metrics = cluster.replicas[0].metrics().await?;
    ensure!(
        metrics.contains(gauge),
        "the first replica looked when there was nothing"
    );

    // The next step has upstream as its manifests install it.
    let plane = &cluster.plane;
    for (kind, name) in [
        (LEFTOVERS[0].0, "renamed-mutating"),
        (LEFTOVERS[1].0, "renamed-validating"),
    ] {
        plane.kubectl_ok(&["delete", kind, name]).await?;
    }
    let charts = ["delete", "-n", "charts", "deployment", "--all"];
    plane.kubectl_ok(&charts).await.map(drop)
}

/// A JSON Patch on an object that has no namespace.
async fn patch(cluster: &Cluster, kind: &str, name: &str, operations: &Value) -> Result<()> {
    let operations = format!("--patch={operations}");
    let args = ["patch", kind, name, "--type=json", &operations];
    cluster.plane.kubectl_ok(&args).await.map(drop)
}

async fn with_cert_manager_fewer_rights_are_needed(cluster: &Cluster) -> Result<()> {
    let plane = &cluster.plane;
    let rules = fs::read_to_string(manifests().join("rbac.yaml"))?;
    let rule = json!([
        {"op": "test", "path": "/rules/9/resourceNames", "value": ["headstart"]},
        {"op": "remove", "path": "/rules/9"},
    ]);
    patch(cluster, "clusterrole", "headstart", &rule).await?;
    let is = |outcome: &'static str| async move {
        eventually("rights are as they were made", SOON, || async {
            let ran = run(plane.admin_kubeconfig(), &["-o", "json"]).await?;
            let checks = ran.checks()?;
            ensure!(checks["rights"].0 == outcome, "{checks:?}");
            Ok(())
        })
        .await
    };
    is("Failed").await?;
    let annotate = ["annotate", "mutatingwebhookconfiguration", "headstart"];
    let key = "cert-manager.io/inject-ca-from";
    let set = format!("{key}=headstart-system/headstart");
    plane.kubectl_ok(&[&annotate[..], &[&set]].concat()).await?;
    is("Ok").await?;
    let unset = format!("{key}-");
    plane
        .kubectl_ok(&[&annotate[..], &[&unset]].concat())
        .await?;
    plane.apply(&rules).await?;
    is("Ok").await
}

/// As the component `manifests/dry-run` leaves it.
async fn a_dry_run_is_warned_of_and_needs_less(cluster: &Cluster) -> Result<()> {
    let plane = &cluster.plane;
    let set = |value| async move {
        let args = [
            "-n",
            SYSTEM_NAMESPACE,
            "set",
            "env",
            "deployment/headstart",
            value,
        ];
        plane.kubectl_ok(&args).await
    };
    set("DRY_RUN=true").await?;
    let rule = json!([
        {"op": "test", "path": "/rules/1/resources", "value": ["pods/resize"]},
        {"op": "remove", "path": "/rules/1"},
    ]);
    patch(cluster, "clusterrole", "headstart", &rule).await?;
    let policy = "validatingadmissionpolicy,validatingadmissionpolicybinding";
    plane
        .kubectl_ok(&["delete", policy, "headstart-record"])
        .await?;
    let ran = run(plane.admin_kubeconfig(), &["-o", "json"]).await?;
    let checks = ran.checks()?;
    let (outcome, detail, advice) = &checks["deployment"];
    ensure!(
        outcome == "Warning" && detail.contains("--dry-run") && advice.contains("switching.md"),
        "{checks:?}"
    );
    for name in ["rights", "policies", "webhook"] {
        ensure!(checks[name].0 == "Ok", "{name}: {checks:?}");
    }
    for file in ["rbac.yaml", "policy-record.yaml"] {
        plane
            .apply(&fs::read_to_string(manifests().join(file))?)
            .await?;
    }
    set("DRY_RUN-").await?;
    eventually("all is as it was", SOON, || async {
        let checks = run(plane.admin_kubeconfig(), &["-o", "json"])
            .await?
            .checks()?;
        for name in ["rights", "policies", "deployment"] {
            ensure!(checks[name].0 == "Ok", "{name}: {checks:?}");
        }
        Ok(())
    })
    .await
}

/// No replicas, and whatever else somebody may have changed or taken away.
async fn spoil(cluster: &mut Cluster) -> Result<()> {
    while let Some(name) = cluster
        .replicas
        .first()
        .map(|replica| replica.name().to_owned())
    {
        cluster.take_replica(&name)?.crash()?;
    }
    let plane = &cluster.plane;
    // Nobody puts the CA back any more, and nobody listens there.
    let [nobody] = free_ports()?;
    let config = json!({"url": format!("https://127.0.0.1:{nobody}/")});
    let webhook = json!([
        {"op": "replace", "path": "/webhooks/0/clientConfig", "value": config},
    ]);
    let role: Value = serde_json::from_str(
        &plane
            .kubectl_ok(&["get", "clusterrole", "headstart", "-o", "json"])
            .await?,
    )?;
    let mut rules = role["rules"].as_array().context("no rules")?.clone();
    rules.retain(|rule| rule["resources"] != json!(["pods/resize"]));
    let role = json!([{"op": "replace", "path": "/rules", "value": rules}]);
    let field = "/spec/versions/0/schema/openAPIV3Schema/properties/namespaceSelector";
    let crd = json!([{"op": "remove", "path": field}]);
    for (kind, name, operations) in [
        ("mutatingwebhookconfiguration", "headstart", webhook),
        ("clusterrole", "headstart", role),
        ("crd", "clusterstartupcpuboosts.autoscaling.x-k8s.io", crd),
    ] {
        patch(cluster, kind, name, &operations).await?;
    }
    for (kind, name) in [
        ("validatingadmissionpolicy", "headstart-record"),
        ("validatingadmissionpolicybinding", "headstart-lower-only"),
    ] {
        plane.kubectl_ok(&["delete", kind, name]).await?;
    }
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "old"}});
    plane.apply(&node.to_string()).await?;
    let info =
        json!({"status": {"nodeInfo": {"kubeletVersion": "v1.32.9", "operatingSystem": "linux"}}});
    let patch = format!("--patch={info}");
    plane
        .kubectl_ok(&[
            "patch",
            "node",
            "old",
            "--subresource=status",
            "--type=merge",
            &patch,
        ])
        .await?;
    Ok(())
}

async fn all_that_is_wrong_is_named(cluster: &mut Cluster) -> Result<()> {
    spoil(cluster).await?;
    let plane = &cluster.plane;
    set_ready(cluster, 2).await?;
    eventually("what is left over is fit in part", SOON, || async {
        let ran = run(plane.admin_kubeconfig(), &["-o", "json"]).await?;
        let checks = ran.checks()?;
        ensure!(checks["deployment"].0 == "Warning", "{checks:?}");
        let (outcome, detail, _) = &checks["webhook"];
        let silent =
            detail.contains("nobody answers") && detail.ends_with("pods are created unboosted");
        ensure!(outcome == "Failed" && silent, "{checks:?}");
        Ok(())
    })
    .await?;
    let fail = json!([{"op": "replace", "path": "/webhooks/0/failurePolicy", "value": "Fail"}]);
    patch(cluster, "mutatingwebhookconfiguration", "headstart", &fail).await?;
    set_ready(cluster, 0).await?;

    // Authorizer and admission see what has changed a moment later.
    eventually("all that is wrong is named", SOON, || async {
        let ran = run(plane.admin_kubeconfig(), &["-o", "json"]).await?;
        ensure!(ran.code == Some(1), "{}", ran.stderr);
        let checks = ran.checks()?;
        for (name, outcome, detail, advice) in TOLD {
            let (is, says, advises) = &checks[name];
            ensure!(
                is == outcome && says.contains(detail) && advises.contains(advice),
                "{name}: {detail:?}, {advice:?}: {checks:?}"
            );
        }
        for name in ["version", "resize"] {
            ensure!(
                checks[name].0 == "Ok",
                "one that fails stops no other: {checks:?}"
            );
        }
        Ok(())
    })
    .await?;
    let ran = run(plane.admin_kubeconfig(), &[]).await?;
    eprintln!("{}{}", ran.stdout, ran.stderr);
    ensure!(ran.code == Some(1));
    ensure_shown("unfit", &ran)
}
