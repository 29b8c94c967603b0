//! What people see: the page `docs/see.md` shows what `kubectl` really prints about boosts on a real API server.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::PostParams};
use regex::Regex;
use serde_json::{Value, json};
use testbed::{Behaviour, Cluster, eventually};

const SOON: Duration = Duration::from_secs(30);
const NAMESPACE: &str = "shop";

#[tokio::test(flavor = "multi_thread")]
async fn the_page_shows_what_is_printed() -> Result<()> {
    let binary = Path::new(env!("CARGO_BIN_EXE_headstart"));
    let cluster = Cluster::start(binary, 1, Behaviour::default()).await?;
    prepare(&cluster).await?;
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/see.md");
    let old = fs::read_to_string(&page).context("reading the page")?;
    let new = printed_again(&cluster, &old).await?;
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&page, &new).context("writing the page")?;
    }
    ensure!(
        comparable(&old)? == comparable(&new)?,
        "{} differs from what is printed: run `UPDATE_DOCS=1 cargo test --test printed`. It would be:\n{new}",
        PathBuf::from("docs/see.md").display()
    );
    Ok(())
}

/// Pods of one boost in all states: still starting, started, and one whose node refuses to take the CPU back.
async fn prepare(cluster: &Cluster) -> Result<()> {
    let boost = json!({
        "apiVersion": "autoscaling.x-k8s.io/v1alpha1",
        "kind": "StartupCPUBoost",
        "metadata": {"name": "fast-start", "namespace": NAMESPACE},
        "selector": {"matchLabels": {"app": "shop"}},
        "spec": {
            "resourcePolicy": {"containerPolicies": [
                {"matchContainers": {"type": "ExactName", "value": "app"}, "percentageIncrease": {"value": 200}},
            ]},
            "durationPolicy": {
                "fixedDuration": {"unit": "Minutes", "value": 10},
                "podCondition": {"type": "Ready", "status": "True"},
            },
        },
    });
    let namespace =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [namespace, boost]});
    cluster.plane.apply(&list.to_string()).await?;
    let status = || async {
        let args = ["get", "scb", "fast-start", "-n", NAMESPACE, "-o", "json"];
        let boost: Value = serde_json::from_str(&cluster.plane.kubectl_ok(&args).await?)?;
        Ok::<_, anyhow::Error>(boost["status"].clone())
    };
    eventually("the boost is active", SOON, || async {
        ensure!(status().await?["conditions"][0]["status"] == "True");
        Ok(())
    })
    .await?;
    for (name, annotations) in [
        ("starting", json!({"testbed/ready-after": "never"})),
        ("started", json!({"testbed/ready-after": "2s"})),
        ("stuck", json!({"testbed/resize": "infeasible"})),
    ] {
        create(cluster, name, &annotations).await?;
    }
    eventually("one has ended and one is stuck", SOON, || async {
        let status = status().await?;
        let conditions = status["conditions"].to_string();
        ensure!(conditions.contains("Stuck"), "{conditions}");
        ensure!(status["activeContainerBoosts"] == 2, "{status}");
        let events = ["get", "events", "-n", NAMESPACE, "-o", "name"];
        let events = cluster.plane.kubectl_ok(&events).await?;
        ensure!(events.lines().count() == 2, "{events}");
        Ok(())
    })
    .await
}

async fn create(cluster: &Cluster, name: &str, annotations: &Value) -> Result<()> {
    let resources = json!({"requests": {"cpu": "250m", "memory": "64Mi"}, "limits": {"cpu": "1"}});
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "shop"}, "annotations": annotations},
        "spec": {"containers": [{"name": "app", "image": "example.com/shop:1", "resources": resources}]},
    });
    let pods = Api::<Pod>::namespaced(cluster.plane.admin(), NAMESPACE);
    let pod = serde_json::from_value(pod)?;
    pods.create(&PostParams::default(), &pod).await?;
    Ok(())
}

/// The page, with what each command after a prompt prints now. `| sed -n '/^BEGIN/,$p'` leaves out what is before a line,
/// as in a shell. The test bed's own annotations are left out.
async fn printed_again(cluster: &Cluster, page: &str) -> Result<String> {
    let mut new = String::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        writeln!(new, "{line}")?;
        let Some(command) = line.strip_prefix("$ kubectl ") else {
            continue;
        };
        let (command, from) = match command.split_once(" | sed -n '/^") {
            Some((command, rest)) => (command, rest.split_once("/,$p'").map(|(from, _)| from)),
            None => (command, None),
        };
        let args: Vec<&str> = command.split_whitespace().collect();
        let printed = cluster.plane.kubectl_ok(&args).await?;
        let printed = printed
            .lines()
            .skip_while(|line| from.is_some_and(|from| !line.starts_with(from)));
        for line in printed.filter(|line| !line.contains("testbed/")) {
            writeln!(new, "{}", line.trim_end())?;
        }
        let end = lines.by_ref().find(|line| line.starts_with("```"));
        writeln!(new, "{}", end.context("a block has no end")?)?;
    }
    Ok(new)
}

/// Without what differs from run to run: instants, ages, identities, and the width of columns.
fn comparable(page: &str) -> Result<String> {
    let mut text = page.to_owned();
    for (pattern, to) in [
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "INSTANT"),
        (r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d \+\d{4}", "INSTANT"),
        (r"\b(\d+m)?\d+s\b", "AGE"),
        (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UID"),
        (r"(Resource Version:) +\d+", "$1 VERSION"),
        (r"10\.244\.0\.\d+", "ADDRESS"),
        (r"[ \t]+", " "),
        (r"-{3,}", "---"),
    ] {
        text = Regex::new(pattern)?.replace_all(&text, to).into_owned();
    }
    Ok(text)
}
