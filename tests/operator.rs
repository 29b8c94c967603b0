//! The installed operator on a real API server: two replicas of the binary, with the account, the rights and the
//! policies of the manifests.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::{
    ByteString,
    api::{
        admissionregistration::v1::MutatingWebhookConfiguration,
        core::v1::{Pod, Secret},
    },
};
use kube::{
    Api,
    api::{DynamicObject, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::{Value, json};
use testbed::{
    Behaviour, Cluster, ControlPlane, Options, Supervised,
    cluster::{SYSTEM_NAMESPACE, manifests},
    eventually,
    process::free_ports,
    wait::GiveUp,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const SOON: Duration = Duration::from_secs(30);
const KEY: &str = headstart::api::BOOST_KEY;

fn binary() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_headstart"))
}

/// One cluster for all: a control plane takes seconds to start, and the two cores are shared.
#[tokio::test(flavor = "multi_thread")]
async fn operator() -> Result<()> {
    let behaviour = Behaviour {
        ready_after: None,
        ..Behaviour::default()
    };
    let cluster = Cluster::start(binary(), 2, behaviour).await?;
    for namespace in ["ns", "bad", "upstream", "manual"] {
        namespaced(&cluster, namespace).await?;
    }
    upstreams_objects_are_accepted(&cluster).await?;
    ca_is_put_back(&cluster).await?;
    statuses_say_what_is_wrong(&cluster).await?;
    certificates_are_swapped(&cluster).await?;
    a_new_ca_costs_no_boost(&cluster).await?;
    our_account_may_not_raise(&cluster).await?;
    boosts_are_ended_by_hand(&cluster).await?;
    replicas_are_all_ready_and_one_leads(&cluster).await
}

async fn namespaced(cluster: &Cluster, name: &str) -> Result<()> {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    cluster.plane.apply(&namespace.to_string()).await.map(drop)
}

/// As a user applies them: nothing added, twice, and a third time as the server's dry run.
#[tokio::test(flavor = "multi_thread")]
async fn manifests_are_accepted() -> Result<()> {
    let plane = ControlPlane::start(Options::default()).await?;
    let folder = manifests();
    let folder = folder.to_str().context("the manifests' path is no UTF-8")?;
    plane.kubectl_ok(&["apply", "-k", folder]).await?;
    plane.kubectl_ok(&["apply", "-k", folder]).await?;
    let accepted = plane
        .kubectl_ok(&["apply", "-k", folder, "--dry-run=server"])
        .await?;
    for object in [
        "deployment.apps/headstart",
        "customresourcedefinition",
        "mutatingwebhookconfiguration",
    ] {
        ensure!(
            accepted.contains(object),
            "{object} is not among what was accepted:\n{accepted}"
        );
    }
    Ok(())
}

/// Every form that upstream's documentation shows, with the fields in its places.
async fn upstreams_objects_are_accepted(cluster: &Cluster) -> Result<()> {
    let objects = "
apiVersion: autoscaling.x-k8s.io/v1alpha1
kind: StartupCPUBoost
metadata: {name: percentage, namespace: upstream}
selector:
  matchExpressions:
  - {key: app.kubernetes.io/name, operator: In, values: [spring-rest-jpa]}
spec:
  resourcePolicy:
    containerPolicies:
    - containerName: spring-rest-jpa
      percentageIncrease: {value: 50}
  durationPolicy:
    podCondition: {type: Ready, status: \"True\"}
---
apiVersion: autoscaling.x-k8s.io/v1alpha1
kind: StartupCPUBoost
metadata: {name: fixed, namespace: upstream}
selector:
  matchLabels: {app: one}
spec:
  resourcePolicy:
    containerPolicies:
    - matchContainers: {type: RegexName, value: \"^spring-.*\"}
      percentageIncrease: {value: 50}
    - matchContainers: {type: ExactName, value: istio-proxy}
      fixedResources: {requests: \"1\", limits: \"2\"}
  durationPolicy:
    fixedDuration: {unit: Seconds, value: 60}
    podCondition: {type: Ready, status: \"True\"}
";
    cluster.plane.apply(objects).await?;
    for name in ["percentage", "fixed"] {
        condition(cluster, "upstream", name, "True", "Ready").await?;
    }
    Ok(())
}

async fn ca_is_put_back(cluster: &Cluster) -> Result<()> {
    let webhooks = Api::<MutatingWebhookConfiguration>::all(cluster.plane.admin());
    let ca = |webhook: &MutatingWebhookConfiguration| {
        webhook
            .webhooks
            .as_ref()?
            .first()?
            .client_config
            .ca_bundle
            .clone()
            .filter(|ca| !ca.0.is_empty())
    };
    let published = || async { ca(&webhooks.get("headstart").await?).context("there is no CA") };
    let before = eventually("the CA is published", SOON, published).await?;

    let name = webhooks
        .get("headstart")
        .await?
        .webhooks
        .context("no webhooks")?
        .remove(0)
        .name;
    let wiped = json!({"webhooks": [{"name": name, "clientConfig": {"caBundle": null}}]});
    webhooks
        .patch(
            "headstart",
            &PatchParams::default(),
            &Patch::Strategic(wiped),
        )
        .await?;
    let after = eventually("the CA is back", Duration::from_secs(5), published).await?;
    ensure!(
        before == after,
        "another CA came back than the one that was wiped"
    );
    Ok(())
}

/// An object that got in under upstream's CRD and can't be compiled is said to be invalid, and harms no other.
async fn statuses_say_what_is_wrong(cluster: &Cluster) -> Result<()> {
    let good = boost("good", "bad", 100);
    boosts(cluster, "bad")
        .create(&PostParams::default(), &serde_json::from_value(good)?)
        .await?;
    condition(cluster, "bad", "good", "True", "Ready").await?;

    // Class operators are plain characters to RE2, which the CRD asks, and syntax to Rust.
    let mut odd = boost("odd", "bad", 100);
    odd["spec"]["resourcePolicy"]["containerPolicies"][0]["matchContainers"] =
        json!({"type": "RegexName", "value": "[a&&b]"});
    boosts(cluster, "bad")
        .create(&PostParams::default(), &serde_json::from_value(odd)?)
        .await?;
    let message = condition(cluster, "bad", "odd", "False", "Invalid").await?;
    ensure!(
        message.contains("containerPolicies[0].matchContainers.value"),
        "the field is not named: {message}"
    );
    let table = cluster
        .plane
        .kubectl_ok(&["-n", "bad", "get", "scb"])
        .await?;
    for word in [
        "ACTIVE",
        "BOOSTED NOW",
        "BOOSTED TOTAL",
        "END",
        "AGE",
        "False",
        "True",
    ] {
        ensure!(table.contains(word), "{word} is not in the table:\n{table}");
    }
    eventually("the good boost boosts", SOON, || async {
        ensure!(created_cpu(cluster, "bad").await? == "1", "not boosted");
        Ok(())
    })
    .await
}

/// The served certificate is swapped without a restart, and reviews go on.
async fn certificates_are_swapped(cluster: &Cluster) -> Result<()> {
    let secrets = Api::<Secret>::namespaced(cluster.plane.admin(), SYSTEM_NAMESPACE);
    let cert = |secret: &Secret| {
        secret
            .data
            .as_ref()
            .and_then(|data| data.get("tls.crt").cloned())
    };
    let before = cert(&secrets.get("headstart-certificates").await?).context("no certificate")?;
    let garbage = json!({"data": {"tls.crt": ByteString(b"garbage".to_vec())}});
    secrets
        .patch(
            "headstart-certificates",
            &PatchParams::default(),
            &Patch::Merge(garbage),
        )
        .await?;
    eventually("a new certificate is issued", SOON, || async {
        let now = cert(&secrets.get("headstart-certificates").await?).context("no certificate")?;
        ensure!(now != before && now.0 != b"garbage", "still the old one");
        Ok(())
    })
    .await?;
    eventually("pods are boosted", SOON, || async {
        ensure!(created_cpu(cluster, "bad").await? == "1", "not boosted");
        Ok(())
    })
    .await?;
    for replica in &cluster.replicas {
        replica
            .process()
            .check()
            .with_context(|| format!("{} was restarted", replica.name()))?;
    }
    Ok(())
}

/// Asked for as docs/operate.md says.
async fn a_new_ca_costs_no_boost(cluster: &Cluster) -> Result<()> {
    let secrets = Api::<Secret>::namespaced(cluster.plane.admin(), SYSTEM_NAMESPACE);
    let read = || async {
        let secret = secrets.get("headstart-certificates").await?;
        secret.data.context("no certificates")
    };
    let before = read().await?;
    let args = ["-n", SYSTEM_NAMESPACE, "patch", "--type=json", "-p"];
    let patch = r#"[{"op": "remove", "path": "/data/ca.key"}]"#;
    let args = [&args[..], &[patch, "secret", "headstart-certificates"]].concat();
    cluster.plane.kubectl_ok(&args).await?;
    eventually("a certificate of the new CA is served", SOON, || async {
        let cpu = created_cpu(cluster, "bad").await?;
        ensure!(cpu == "1", GiveUp("a pod is not boosted".to_owned()));
        let now = read().await?;
        ensure!(now["tls.crt"] != before["tls.crt"], "still the old one");
        let cas = String::from_utf8(now["ca.crt"].0.clone())?;
        ensure!(cas.matches("BEGIN").count() == 2, "{cas}");
        Ok(())
    })
    .await
}

/// The policy holds our own account to lowering CPU, whatever our code does.
async fn our_account_may_not_raise(cluster: &Cluster) -> Result<()> {
    let pods = Api::<Pod>::namespaced(cluster.plane.admin(), "ns");
    pods.create(
        &PostParams::default(),
        &serde_json::from_value(pod("victim", "ns"))?,
    )
    .await?;
    let ours = cluster
        .plane
        .service_account_client(SYSTEM_NAMESPACE, "headstart")
        .await?;
    let ours = Api::<Pod>::namespaced(ours, "ns");
    let resize = |cpu: &str| json!({"spec": {"containers": [{"name": "app", "resources": {"requests": {"cpu": cpu}}}]}});
    let dry_run = PatchParams {
        dry_run: true,
        ..PatchParams::default()
    };
    let raised = ours
        .patch_resize("victim", &dry_run, &Patch::Strategic(resize("600m")))
        .await;
    ensure!(
        matches!(&raised, Err(kube::Error::Api(status)) if status.code == 403),
        "a raise was not refused: {raised:?}"
    );
    ours.patch_resize("victim", &dry_run, &Patch::Strategic(resize("400m")))
        .await?;
    Ok(())
}

/// D40: `headstart revert` as cluster-admin ends a boost, a namespace's and all; who may only patch pods is refused, and
/// nothing of the pod is lost by it.
async fn boosts_are_ended_by_hand(cluster: &Cluster) -> Result<()> {
    let plane = &cluster.plane;
    let boost = json!({
        "apiVersion": "autoscaling.x-k8s.io/v1alpha1", "kind": "StartupCPUBoost",
        "metadata": {"name": "b", "namespace": "manual"},
        "spec": {
            "resourcePolicy": {"containerPolicies": [{"containerName": "app", "percentageIncrease": {"value": 100}}]},
            "durationPolicy": {"fixedDuration": {"unit": "Minutes", "value": 60}},
        },
    });
    plane.apply(&boost.to_string()).await?;
    eventually("the boost is known", SOON, || async {
        ensure!(created_cpu(cluster, "manual").await? == "1");
        Ok(())
    })
    .await?;
    for name in ["one", "two", "three"] {
        plane.apply(&pod(name, "manual").to_string()).await?;
    }
    let pods = Api::<Pod>::namespaced(plane.admin(), "manual");
    eventually("all run", SOON, || async {
        let list = pods.list(&kube::api::ListParams::default()).await?;
        let running = |pod: &&Pod| {
            let status = pod.status.as_ref();
            status.and_then(|status| status.phase.as_deref()) == Some("Running")
        };
        ensure!(list.items.iter().filter(running).count() == 3);
        Ok(())
    })
    .await?;

    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "patcher"},
        "rules": [{"apiGroups": [""], "resources": ["pods", "pods/resize"], "verbs": ["get", "list", "patch"]}]});
    let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "patcher"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "patcher"},
        "subjects": [{"kind": "User", "name": "patcher", "apiGroup": "rbac.authorization.k8s.io"}]});
    plane.apply(&role.to_string()).await?;
    plane.apply(&binding.to_string()).await?;
    let patcher = plane.kubeconfig_for("patcher", &[])?;
    let refused = revert(&patcher, &["-n", "manual", "one"]).await?;
    ensure!(refused.0 == Some(1), "{refused:?}");
    ensure!(
        refused.1.contains("NOT ended") && refused.1.contains("startupcpuboosts/record"),
        "{refused:?}"
    );

    let admin = plane.admin_kubeconfig();
    let one = revert(admin, &["-n", "manual", "one"]).await?;
    ensure!(
        one == (Some(0), "1/1 manual/one: ended\n".to_owned()),
        "{one:?}"
    );
    let object = pods.get("one").await?;
    let record = object.metadata.annotations.unwrap_or_default();
    let record: Value = serde_json::from_str(record.get(KEY).context("no record")?)?;
    ensure!(
        record["state"] == "Reverted" && record["endedBy"] == "Manual",
        "{record}"
    );
    let all = revert(admin, &["--all"]).await?;
    ensure!(
        all.0 == Some(0) && all.1.lines().count() == 2 && all.1.contains("2/2 "),
        "{all:?}"
    );
    let none = revert(admin, &["-n", "manual"]).await?;
    ensure!(
        none == (Some(0), "no pod is boosted\n".to_owned()),
        "{none:?}"
    );
    let missing = revert(admin, &["-n", "manual", "missing"]).await?;
    ensure!(missing.0 == Some(1), "{missing:?}");
    Ok(())
}

/// Exit status and output of `headstart revert`.
async fn revert(kubeconfig: &Path, args: &[&str]) -> Result<(Option<i32>, String)> {
    let output = tokio::process::Command::new(binary())
        .arg("revert")
        .args(args)
        .env("KUBECONFIG", kubeconfig)
        .output()
        .await?;
    Ok((output.status.code(), String::from_utf8(output.stdout)?))
}

async fn replicas_are_all_ready_and_one_leads(cluster: &Cluster) -> Result<()> {
    let leader = cluster.leader_other_than("").await?;
    for replica in &cluster.replicas {
        replica.wait_ready(SOON).await?;
        let metrics = replica.metrics().await?;
        let leads = if replica.name() == leader {
            "headstart_leader 1"
        } else {
            "headstart_leader 0"
        };
        ensure!(
            metrics.contains(leads),
            "{} does not say {leads:?}",
            replica.name()
        );
        ensure!(
            metrics.contains("headstart_admission_reviews_total{outcome=\"boosted\""),
            "no admission series"
        );
    }
    Ok(())
}

/// Nothing is restarted for it: the replica says what it waits for, and goes on trying.
#[tokio::test(flavor = "multi_thread")]
async fn without_an_api_server_a_replica_lives_and_is_not_ready() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [nobody, webhook, probe] = free_ports()?;
    let kubeconfig = folder.path().join("kubeconfig");
    let cluster =
        json!({"server": format!("https://127.0.0.1:{nobody}"), "insecure-skip-tls-verify": true});
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    });
    std::fs::write(&kubeconfig, config.to_string())?;
    let log = folder.path().join("log");
    let address = |port: u16| format!("127.0.0.1:{port}");
    let replica = Supervised::spawn(
        "alone",
        binary(),
        &[
            "run",
            "--webhook-address",
            &address(webhook),
            "--probe-address",
            &address(probe),
        ],
        &[("KUBECONFIG", &kubeconfig)],
        &log,
    )?;
    let tries = || std::fs::read_to_string(&log).map(|log| log.matches("trying again").count());
    eventually("it has tried several times", SOON, || async {
        replica.check()?;
        ensure!(tries()? > 5, "not yet");
        Ok(())
    })
    .await?;
    let ask = |path: &'static str| async move {
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", probe)).await?;
        stream
            .write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())
            .await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        anyhow::Ok(answer)
    };
    ensure!(ask("/livez").await?.contains(" 200 "), "it is not live");
    let ready = ask("/readyz").await?;
    ensure!(
        ready.contains(" 503 ") && ready.contains("not read yet: boosts, namespaces"),
        "it should not be ready: {ready}"
    );
    replica.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn start_is_refused_without_a_cluster() -> Result<()> {
    let output = tokio::process::Command::new(binary())
        .arg("run")
        .env_clear()
        .env("KUBECONFIG", "/nowhere")
        .output()
        .await?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(1),
        "it exited with {:?}",
        output.status
    );
    ensure!(
        text.contains("KUBECONFIG"),
        "the message does not say what to do: {text}"
    );
    Ok(())
}

fn boosts(cluster: &Cluster, namespace: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("autoscaling.x-k8s.io", "v1alpha1", "StartupCPUBoost");
    let resource = ApiResource::from_gvk_with_plural(&kind, "startupcpuboosts");
    Api::namespaced_with(cluster.plane.admin(), namespace, &resource)
}

fn boost(name: &str, namespace: &str, percent: u32) -> Value {
    json!({
        "apiVersion": "autoscaling.x-k8s.io/v1alpha1",
        "kind": "StartupCPUBoost",
        "metadata": {"name": name, "namespace": namespace},
        "selector": {"matchLabels": {"app": "a"}},
        "spec": {
            "resourcePolicy": {"containerPolicies": [{
                "matchContainers": {"type": "ExactName", "value": "app"},
                "percentageIncrease": {"value": percent},
            }]},
            "durationPolicy": {"podCondition": {"type": "Ready", "status": "True"}},
        },
    })
}

fn pod(name: &str, namespace: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": "a"}},
        "spec": {"containers": [{"name": "app", "image": "x", "resources": {"requests": {"cpu": "500m"}}}]},
    })
}

/// The request that a new pod would get.
async fn created_cpu(cluster: &Cluster, namespace: &str) -> Result<String> {
    let pods = Api::<Pod>::namespaced(cluster.plane.admin(), namespace);
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let created = pods
        .create(&dry_run, &serde_json::from_value(pod("probe", namespace))?)
        .await?;
    let marked = created
        .metadata
        .annotations
        .is_some_and(|annotations| annotations.contains_key(KEY));
    let requests = created
        .spec
        .and_then(|spec| spec.containers.into_iter().next()?.resources?.requests);
    let cpu = requests
        .and_then(|requests| requests.get("cpu").cloned())
        .context("no request")?
        .0;
    ensure!(marked == (cpu != "500m"), "marks and values disagree");
    Ok(cpu)
}

/// Waits for a boost's `Active` condition, for the present generation; its message.
async fn condition(
    cluster: &Cluster,
    namespace: &str,
    name: &str,
    status: &str,
    reason: &str,
) -> Result<String> {
    let began = Instant::now();
    let api = boosts(cluster, namespace);
    let message = eventually(&format!("{name} is Active={status}"), SOON, || async {
        let object = api.get(name).await?;
        let condition = object.data["status"]["conditions"][0].clone();
        ensure!(
            condition["type"] == "Active"
                && condition["status"] == status
                && condition["reason"] == reason,
            "the condition is {condition}"
        );
        ensure!(
            condition["observedGeneration"] == json!(object.metadata.generation),
            "of an older generation"
        );
        Ok(condition["message"].as_str().unwrap_or_default().to_owned())
    })
    .await?;
    eprintln!(
        "{namespace}/{name}: Active={status} after {:?}",
        began.elapsed()
    );
    Ok(message)
}
