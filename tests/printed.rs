//! What people see: the page `docs/see.md` shows what `kubectl` and `headstart list` really print about boosts on a real API
//! server, and `docs/see.svg` is a picture of it.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::PostParams};
use regex::Regex;
use serde_json::{Value, json};
use testbed::{Behaviour, Cluster, eventually, view};
use tokio::process::Command;

const SOON: Duration = Duration::from_secs(30);
const BINARY: &str = env!("CARGO_BIN_EXE_headstart");
const NAMESPACE: &str = "shop";

#[tokio::test(flavor = "multi_thread")]
async fn the_page_shows_what_is_printed() -> Result<()> {
    let cluster = view::start(Path::new(BINARY), 1, Behaviour::default()).await?;
    prepare(&cluster).await?;
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/see.md");
    let old = fs::read_to_string(&page).context("reading the page")?;
    let new = printed_again(&cluster, &old).await?;
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&page, &new).context("writing the page")?;
        fs::write(page.with_extension("svg"), picture(&new)?).context("writing the picture")?;
        return Ok(());
    }
    let old_picture = fs::read_to_string(page.with_extension("svg"))?;
    ensure!(
        comparable(&old_picture)? == comparable(&picture(&new)?)?,
        "docs/see.svg differs from what is printed: run `UPDATE_DOCS=1 cargo test --test printed`"
    );
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
        let Some(command) = line.strip_prefix("$ ") else {
            continue;
        };
        let (command, from) = match command.split_once(" | sed -n '/^") {
            Some((command, rest)) => (command, rest.split_once("/,$p'").map(|(from, _)| from)),
            None => (command, None),
        };
        let printed = run(cluster, command).await?;
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

async fn run(cluster: &Cluster, line: &str) -> Result<String> {
    let args: Vec<&str> = line.split_whitespace().collect();
    match args[..] {
        ["kubectl", ref args @ ..] => cluster.plane.kubectl_ok(args).await,
        ["headstart", ref args @ ..] => {
            let kubeconfig = cluster.plane.admin_kubeconfig();
            let mut command = Command::new(BINARY);
            let output = command.args(args).env("KUBECONFIG", kubeconfig).output();
            let output = output.await.context("running headstart")?;
            ensure!(output.status.success(), "{line}: {output:?}");
            Ok(String::from_utf8(output.stdout)?)
        }
        _ => bail!("{line} is no command that is known here"),
    }
}

/// The page's first command and what it prints, as in a terminal.
fn picture(page: &str) -> Result<String> {
    let (_, block) = page.split_once("```console\n").context("no block")?;
    let (block, _) = block.split_once("```").context("a block has no end")?;
    let columns = block.lines().map(str::len).max().unwrap_or(0);
    let (width, height) = (columns * 9 + 48, block.lines().count() * 22 + 62);
    let mut picture = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace" font-size="15">
<rect width="{width}" height="{height}" rx="8" fill="#1d1f21"/>
<g><circle cx="22" cy="20" r="6" fill="#cc6666"/><circle cx="42" cy="20" r="6" fill="#f0c674"/><circle cx="62" cy="20" r="6" fill="#b5bd68"/></g>
<g fill="#c5c8c6" xml:space="preserve">
"##
    );
    for (index, line) in block.lines().enumerate() {
        let (y, length) = (index * 22 + 58, line.len() * 9);
        let line = line.replace('&', "&amp;").replace('<', "&lt;");
        writeln!(
            picture,
            r#"<text x="24" y="{y}" textLength="{length}" xml:space="preserve">{line}</text>"#
        )?;
    }
    Ok(picture + "</g>\n</svg>\n")
}

/// Without what differs from run to run: instants, ages, identities, and the width of columns.
fn comparable(page: &str) -> Result<String> {
    let mut text = page.to_owned();
    for (pattern, to) in [
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "INSTANT"),
        (r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d \+\d{4}", "INSTANT"),
        (r"\b(\d+m)?\d+s\b", "AGE"),
        (r"\bin \d+m\b", "in AGE"),
        (r#"(resourceVersion|cache-age-seconds): "\d+""#, "$1"),
        (r#"(textLength|width|height)="\d+""#, "$1"),
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
