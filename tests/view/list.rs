//! `headstart list`, which needs no view, shows what the view shows; by itself, and as a plugin of kubectl.

use std::{path::Path, process::Output};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testbed::{
    Cluster,
    cluster::{SYSTEM_NAMESPACE, run},
    eventually,
    rest::{STRATEGIC, pods},
    view::API,
};
use tokio::process::Command;

use super::{KEY, SOON, cluster, kubectl, rest, start};

const BINARY: &str = env!("CARGO_BIN_EXE_headstart");

async fn list_as(kubeconfig: &Path, args: &[&str]) -> Result<Output> {
    let mut command = Command::new(BINARY);
    command.arg("list").args(args).env("KUBECONFIG", kubeconfig);
    command.output().await.context("running headstart list")
}

async fn list(cluster: &Cluster, args: &[&str]) -> Result<Output> {
    list_as(cluster.plane.admin_kubeconfig(), args).await
}

fn text(output: &Output) -> Result<&str> {
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {error}", output.status);
    Ok(std::str::from_utf8(&output.stdout)?)
}

#[test]
fn it_lists_what_the_view_shows() -> Result<()> {
    run(async {
        let cluster = cluster().await?;
        let shown = rest(cluster)
            .get(&format!("{API}/boostedpods"))
            .await?
            .accepted()?;
        let listed = list(cluster, &["-A", "-o", "json"]).await?;
        let listed: Value = serde_json::from_str(text(&listed)?)?;
        ensure!(
            listed["kind"] == "BoostedPodList" && listed["items"] == shown["items"],
            "{listed} {shown}"
        );
        let yaml = list(cluster, &["-A", "-o", "yaml"]).await?;
        let yaml: Value = serde_saphyr::from_str(text(&yaml)?)?;
        ensure!(yaml["items"] == listed["items"], "{yaml}");

        // The table is kubectl's, but for ages that have gone on.
        let words = |table: &str| -> Vec<String> {
            let steady = table
                .split_whitespace()
                .filter(|word| !word.starts_with(|c: char| c.is_ascii_digit()));
            steady.map(str::to_owned).collect()
        };
        for wide in [&[][..], &["-o", "wide"][..]] {
            let ours = list(cluster, &[&["-A"][..], wide].concat()).await?;
            let theirs =
                kubectl(cluster, &format!("get boostedpods -A {}", wide.join(" "))).await?;
            ensure!(
                words(text(&ours)?) == words(&theirs),
                "{} {theirs}",
                text(&ours)?
            );
        }
        Ok(())
    })
}

#[test]
fn namespaces_and_boosts_narrow_it() -> Result<()> {
    run(async {
        let cluster = cluster().await?;
        let slow = list(cluster, &["-n", "shop", "--boost", "slow"]).await?;
        ensure!(
            super::names(text(&slow)?) == ["slow-0", "slow-1"],
            "{slow:?}"
        );
        for args in [&["-n", "empty"][..], &[][..]] {
            let none = list(cluster, args).await?;
            ensure!(none.status.success() && none.stdout.is_empty(), "{none:?}");
            ensure!(none.stderr == b"no pod is boosted\n", "{none:?}");
        }
        let none = list(cluster, &["-n", "empty", "-o", "json"]).await?;
        let none: Value = serde_json::from_str(text(&none)?)?;
        ensure!(none["items"] == json!([]), "{none}");
        Ok(())
    })
}

#[test]
fn it_says_what_it_may_not_see() -> Result<()> {
    run(async {
        let cluster = cluster().await?;
        let kubeconfig = cluster.plane.kubeconfig_for("nobody", &[])?;
        let refused = list_as(&kubeconfig, &["-A"]).await?;
        let error = String::from_utf8_lossy(&refused.stderr);
        ensure!(
            refused.status.code() == Some(1) && error.contains("cannot list resource \"pods\""),
            "{refused:?}"
        );
        // Who may read pods, and no boosts, takes none for gone.
        let role = json!({"metadata": {"name": "pods"}, "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]});
        let binding = json!({
            "metadata": {"name": "pods"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "pods"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "reader"}],
        });
        let path = "/apis/rbac.authorization.k8s.io/v1/namespaces/shop";
        for (kind, object) in [("roles", role), ("rolebindings", binding)] {
            rest(cluster)
                .post(&format!("{path}/{kind}"), &object)
                .await?
                .accepted()?;
        }
        let kubeconfig = cluster.plane.kubeconfig_for("reader", &[])?;
        let listed = eventually("the role is known", SOON, || async {
            let listed = list_as(&kubeconfig, &["-n", "shop"]).await?;
            Ok(text(&listed)?.to_owned())
        })
        .await?;
        ensure!(listed.matches("Active").count() == 5, "{listed}");
        Ok(())
    })
}

#[test]
fn scripts_learn_what_is_stuck() -> Result<()> {
    run(async {
        // Nobody need run for it.
        let mut cluster = start(1).await?;
        cluster.take_replica("headstart-0")?.crash()?;
        let code = |output: Output| output.status.code();
        ensure!(code(list(&cluster, &["-A", "--exit-code"]).await?) == Some(0));
        let oops = json!({"metadata": {"annotations": {KEY: "oops"}}});
        let path = format!("{}/fast-0", pods("shop"));
        rest(&cluster)
            .patch(&path, STRATEGIC, &oops)
            .await?
            .accepted()?;
        ensure!(code(list(&cluster, &["-A", "--exit-code"]).await?) == Some(3));
        ensure!(code(list(&cluster, &["-A"]).await?) == Some(0));
        Ok(())
    })
}

#[test]
fn kubectl_has_it_as_a_plugin() -> Result<()> {
    run(async {
        let cluster = cluster().await?;
        let folder = tempfile::tempdir()?;
        std::os::unix::fs::symlink(BINARY, folder.path().join("kubectl-headstart"))?;
        let kubectl = |args: &'static [&'static str]| {
            let mut command = cluster.plane.kubectl_command();
            command
                .arg("headstart")
                .args(args)
                .env("PATH", folder.path());
            async move { command.output().await.context("running kubectl") }
        };
        let listed = kubectl(&["list", "-A", "--boost", "slow"]).await?;
        ensure!(text(&listed)?.lines().count() == 3, "{listed:?}");
        let help = kubectl(&["list", "--help"]).await?;
        ensure!(
            text(&help)?.contains("Usage: kubectl headstart list"),
            "{help:?}"
        );
        for verb in ["explain", "revert", "check", "run"] {
            let help = kubectl(&["help"]).await?;
            ensure!(text(&help)?.contains(verb), "{help:?}");
        }
        let mistake = kubectl(&["list", "--oops"]).await?;
        ensure!(mistake.status.code() == Some(2), "{mistake:?}");
        let checked = kubectl(&["check", "-n", SYSTEM_NAMESPACE, "-o", "json"]).await?;
        ensure!(checked.stdout.starts_with(b"{\"fit\":"), "{checked:?}");
        Ok(())
    })
}
