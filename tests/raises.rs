//! Boosts of pods that run already, on a real API server, as the component `manifests/raises` leaves it: after a restart, and
//! late where no webhook was asked. With the policy that the component leaves out, a raise is refused and given up.

use std::{path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use headstart::api::BOOST_KEY;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::PostParams};
use serde_json::{Value, json};
use testbed::{Behaviour, Cluster, eventually};

const SOON: Duration = Duration::from_secs(30);
const NAMESPACE: &str = "shop";
const POLICY: &str = "headstart-lower-only";

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_run_already_are_boosted() -> Result<()> {
    let binary = Path::new(env!("CARGO_BIN_EXE_headstart"));
    let behaviour = Behaviour {
        ready_after: Some(Duration::from_secs(2)),
        ..Behaviour::default()
    };
    let mut cluster = Cluster::start(binary, 0, behaviour).await?;
    let flags = ["--boost-on-restart", "--boost-missed-pods"];
    cluster.add_replica(&flags).await?.wait_ready(SOON).await?;
    let place = Place(&cluster);
    place.begin().await?;
    place.a_raise_that_a_policy_refuses_is_given_up().await?;
    let args = ["delete", "validatingadmissionpolicybinding", POLICY];
    cluster.plane.kubectl_ok(&args).await?;
    place.a_restart_is_boosted().await?;
    place.a_missed_pod_is_boosted().await
}

/// A cluster with the boost `fast-start`, which doubles the CPU of `app`.
struct Place<'a>(&'a Cluster);

impl Place<'_> {
    async fn begin(&self) -> Result<()> {
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
        let boost = json!({
            "apiVersion": "autoscaling.x-k8s.io/v1alpha1",
            "kind": "StartupCPUBoost",
            "metadata": {"name": "fast-start", "namespace": NAMESPACE},
            "spec": {
                "resourcePolicy": {"containerPolicies": [
                    {"matchContainers": {"type": "ExactName", "value": "app"}, "percentageIncrease": {"value": 100}},
                ]},
                "durationPolicy": {"podCondition": {"type": "Ready", "status": "True"}},
            },
        });
        let list = json!({"apiVersion": "v1", "kind": "List", "items": [namespace, boost]});
        self.0.plane.apply(&list.to_string()).await?;
        eventually("the boost is active", SOON, || async {
            let args = ["get", "scb", "fast-start", "-n", NAMESPACE, "-o", "json"];
            let boost: Value = serde_json::from_str(&self.0.plane.kubectl_ok(&args).await?)?;
            ensure!(boost["status"]["conditions"][0]["status"] == "True");
            Ok(())
        })
        .await?;
        let pod = self.create("p").await?;
        ensure!(
            pod["spec"]["containers"][0]["resources"] == cpu("1", "2"),
            "{pod}"
        );
        self.until_rested("p").await
    }

    async fn a_raise_that_a_policy_refuses_is_given_up(&self) -> Result<()> {
        self.0.node.restart_container(NAMESPACE, "p", "app").await?;
        eventually("it is given up", SOON, || async {
            let pod = self.read("p").await?;
            ensure!(record(&pod)?["restarts"] == json!({"app": 1}), "{pod}");
            ensure!(
                pod["spec"]["containers"][0]["resources"] == cpu("500m", "1"),
                "{pod}"
            );
            let args = [
                "get",
                "events",
                "-n",
                NAMESPACE,
                "-o",
                "jsonpath={.items[*].note} {.items[*].message}",
            ];
            let events = self.0.plane.kubectl_ok(&args).await?;
            ensure!(events.contains("may only lower CPU"), "{events}");
            Ok(())
        })
        .await?;
        self.until_rested("p").await
    }

    async fn a_restart_is_boosted(&self) -> Result<()> {
        // The API server takes a moment to forget the policy.
        eventually("a restart is boosted", SOON, || async {
            self.until_rested("p").await?;
            self.0.node.restart_container(NAMESPACE, "p", "app").await?;
            eventually("it is raised", Duration::from_secs(2), || {
                self.raised("p", "Restart")
            })
            .await
        })
        .await?;
        self.until_rested("p").await
    }

    async fn a_missed_pod_is_boosted(&self) -> Result<()> {
        let args = ["delete", "mutatingwebhookconfiguration", "headstart"];
        self.0.plane.kubectl_ok(&args).await?;
        let mut number = 0;
        // The API server takes a moment to forget the webhook.
        let name = loop {
            number += 1;
            ensure!(number < 100, "the webhook is still asked");
            let name = format!("late-{number}");
            if self.create(&name).await?["metadata"]["labels"]
                .get(BOOST_KEY)
                .is_none()
            {
                break name;
            }
        };
        eventually("it is boosted late", SOON, || self.raised(&name, "Late")).await?;
        self.until_rested(&name).await
    }

    async fn raised(&self, name: &str, cause: &str) -> Result<()> {
        let pod = self.read(name).await?;
        let record = record(&pod)?;
        ensure!(record["cause"] == cause, "{record}");
        ensure!(
            record["initCPURequests"] == json!({"app": "500m"}),
            "{record}"
        );
        ensure!(
            pod["spec"]["containers"][0]["resources"] == cpu("1", "2"),
            "{pod}"
        );
        Ok(())
    }

    /// The pod is Ready, has what it asked for, and keeps its label.
    async fn until_rested(&self, name: &str) -> Result<()> {
        eventually("its boost has ended", SOON + SOON, || async {
            let pod = self.read(name).await?;
            ensure!(record(&pod)?["state"] == "Reverted", "{pod}");
            ensure!(
                pod["spec"]["containers"][0]["resources"] == cpu("500m", "1"),
                "{pod}"
            );
            ensure!(
                pod["metadata"]["labels"][BOOST_KEY] == "fast-start",
                "{pod}"
            );
            let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
            ensure!(conditions.any(|it| it["type"] == "Ready" && it["status"] == "True"));
            Ok(())
        })
        .await
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.0.plane.admin(), NAMESPACE)
    }

    async fn create(&self, name: &str) -> Result<Value> {
        let container =
            json!({"name": "app", "image": "example.com/shop:1", "resources": cpu("500m", "1")});
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": "shop"}},
            "spec": {"containers": [container]},
        });
        let pod = serde_json::from_value(pod)?;
        let created = self.pods().create(&PostParams::default(), &pod).await?;
        Ok(serde_json::to_value(created)?)
    }

    async fn read(&self, name: &str) -> Result<Value> {
        Ok(serde_json::to_value(self.pods().get(name).await?)?)
    }
}

fn cpu(request: &str, limit: &str) -> Value {
    json!({"requests": {"cpu": request}, "limits": {"cpu": limit}})
}

fn record(pod: &Value) -> Result<Value> {
    let text = pod["metadata"]["annotations"][BOOST_KEY].as_str();
    Ok(serde_json::from_str(text.context("there is no record")?)?)
}
