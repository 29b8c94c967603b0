//! The test bed itself: what the other tests stand on.

use std::{
    env, fs,
    io::{BufRead as _, BufReader},
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::{authentication::v1::SelfSubjectReview, core::v1::Pod};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use testbed::{
    Backend, Balancer, Behaviour, ControlPlane, NodeStandIn, Options, Signal, Supervised,
    eventually, install,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

const SOON: Duration = Duration::from_secs(20);

/// One control plane and one stand-in for all; the last step restarts the API server under the others' feet.
#[tokio::test(flavor = "multi_thread")]
async fn control_plane() -> Result<()> {
    let start = Instant::now();
    let plane = ControlPlane::start(Options::default()).await?;
    eprintln!("ready after {:?}", start.elapsed());
    assert!(
        plane
            .kubectl_ok(&["version"])
            .await?
            .contains("Server Version: v1.36.3")
    );
    plane.kubectl_ok(&["create", "namespace", "life"]).await?;
    let node = NodeStandIn::start(plane.admin(), Behaviour::default()).await?;
    let pods: Api<Pod> = Api::namespaced(plane.admin(), "life");
    tokio::try_join!(
        resizes(&plane, &node, &pods),
        scheduling(&pods),
        by_hand(&node, &pods),
        identities(&plane),
        manifests(&plane),
    )?;
    rate(plane.admin(), 300).await?;
    outage(&plane, &pods).await
}

async fn resizes(plane: &ControlPlane, node: &NodeStandIn, pods: &Api<Pod>) -> Result<()> {
    create(pods, "resized", "500m", json!({})).await?;
    let ready = holds(pods, "resized", |pod| is(pod, "Ready", "True")).await?;
    let time = serde_json::to_value(&ready)?["status"]["startTime"].to_string();
    assert_eq!(
        time.len(),
        "\"2026-01-01T00:00:00Z\"".len(),
        "{time} has whole seconds"
    );
    let resized = resize(pods, "resized", "1").await?;
    let generation = resized.metadata.generation;
    let done = holds(pods, "resized", |pod| {
        pod.status
            .as_ref()?
            .observed_generation
            .eq(&generation)
            .then_some(())
    })
    .await?;
    assert_eq!(cpu(&done), ["1", "1"]);
    assert!(
        is(&done, "PodResizePending", "True").is_none() && is(&done, "Ready", "True").is_some()
    );
    let audited = plane.audit_events()?.into_iter().find(|event| {
        event["objectRef"]["name"] == "resized"
            && event["objectRef"]["subresource"] == "resize"
            && event["verb"] == "patch"
    });
    let audited = audited.context("the audit log has no resize")?;
    assert_eq!(
        audited["requestObject"]["spec"]["containers"][0]["resources"]["requests"]["cpu"],
        "1"
    );
    assert!(plane.metrics().await?.contains("apiserver_request_total"));

    // Refusals, by the pod's own annotation, and their end.
    for (mode, kind, reason, after) in [
        ("deferred", "PodResizePending", "Deferred", ["500m", "500m"]),
        (
            "infeasible",
            "PodResizePending",
            "Infeasible",
            ["500m", "500m"],
        ),
        ("error", "PodResizeInProgress", "Error", ["500m", "1"]),
    ] {
        create(pods, mode, "500m", json!({"testbed/resize": mode})).await?;
        holds(pods, mode, |pod| is(pod, "Ready", "True")).await?;
        resize(pods, mode, "1").await?;
        let refused = holds(pods, mode, |pod| is(pod, kind, "True")).await?;
        let conditions = serde_json::to_value(&refused)?["status"]["conditions"].clone();
        assert!(
            conditions
                .as_array()
                .into_iter()
                .flatten()
                .any(|c| c["type"] == kind && c["reason"] == reason),
            "{conditions}"
        );
        assert_eq!(cpu(&refused), after);
        let actuate = json!({"metadata": {"annotations": {"testbed/resize": null}}});
        pods.patch(mode, &PatchParams::default(), &Patch::Merge(actuate))
            .await?;
        let done = holds(pods, mode, |pod| {
            is(pod, kind, "True").is_none().then_some(())
        })
        .await?;
        assert_eq!(cpu(&done), ["1", "1"]);
    }
    node.set_behaviour(Behaviour::default());
    Ok(())
}

async fn scheduling(pods: &Api<Pod>) -> Result<()> {
    create(pods, "large", "100", json!({})).await?;
    create(pods, "nobody", "1", json!({"testbed/schedule": "never"})).await?;
    holds(pods, "large", |pod| is(pod, "PodScheduled", "False")).await?;
    resize(pods, "large", "1").await?;
    holds(pods, "large", |pod| is(pod, "Ready", "True")).await?;
    assert!(
        pods.get("nobody")
            .await?
            .spec
            .is_some_and(|spec| spec.node_name.is_none())
    );
    Ok(())
}

async fn by_hand(node: &NodeStandIn, pods: &Api<Pod>) -> Result<()> {
    create(pods, "hand", "1", json!({"testbed/ready-after": "never"})).await?;
    let running = holds(pods, "hand", |pod| is(pod, "Ready", "False")).await?;
    assert_eq!(
        running.status.and_then(|status| status.phase).as_deref(),
        Some("Running")
    );
    node.set_condition("life", "hand", "example.com/warm", "True")
        .await?;
    node.set_ready("life", "hand", true).await?;
    node.restart_container("life", "hand", "app").await?;
    let restarted = serde_json::to_value(pods.get("hand").await?)?["status"].clone();
    assert_eq!(
        restarted["containerStatuses"][0]["restartCount"], 1,
        "{restarted}"
    );
    assert_eq!(
        restarted["containerStatuses"][0]["ready"], false,
        "{restarted}"
    );
    node.set_container_ready("life", "hand", "app", true)
        .await?;
    let ready = pods.get("hand").await?;
    ensure!(
        is(&ready, "Ready", "True").is_some() && is(&ready, "example.com/warm", "True").is_some(),
        "{ready:?}"
    );
    node.set_phase("life", "hand", "Succeeded").await?;
    pods.delete("hand", &DeleteParams::default()).await?;
    eventually("the pod is gone", SOON, || async {
        ensure!(pods.get_opt("hand").await?.is_none(), "it is still there");
        Ok(())
    })
    .await
}

async fn identities(plane: &ControlPlane) -> Result<()> {
    let client = plane.client_for("jane", &["first", "second"]).await?;
    let review = Api::<SelfSubjectReview>::all(client)
        .create(&PostParams::default(), &SelfSubjectReview::default())
        .await?;
    let user = review
        .status
        .and_then(|status| status.user_info)
        .context("no user")?;
    assert_eq!(
        (user.username.as_deref(), user.groups),
        (
            Some("jane"),
            Some(
                ["first", "second", "system:authenticated"]
                    .map(String::from)
                    .into()
            )
        )
    );
    plane
        .kubectl_ok(&["create", "serviceaccount", "-n", "life", "robot"])
        .await?;
    let robot = plane.service_account_client("life", "robot").await?;
    let error = Api::<Pod>::namespaced(robot, "life")
        .list(&ListParams::default())
        .await
        .err()
        .context("RBAC let a stranger in")?;
    assert!(
        error
            .to_string()
            .contains("system:serviceaccount:life:robot"),
        "{error}"
    );
    Ok(())
}

async fn manifests(plane: &ControlPlane) -> Result<()> {
    let folder = plane.folder().join("manifests");
    fs::create_dir_all(&folder)?;
    let schema = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
    let objects = [
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "made"}}),
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "made", "namespace": "made"}}),
        json!({"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "made", "namespace": "made"}}),
        json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "things.example.com"}, "spec": {
            "group": "example.com", "scope": "Namespaced", "names": {"kind": "Thing", "plural": "things"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": schema}]}}),
        json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration", "metadata": {"name": "made"}, "webhooks": [{
            "name": "made.example.com", "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": "Ignore",
            "clientConfig": {"service": {"name": "made", "namespace": "made"}}}]}),
    ];
    for (n, object) in objects.iter().enumerate() {
        fs::write(folder.join(format!("{n}.yaml")), object.to_string())?;
    }
    let resources: Vec<String> = (0..objects.len()).map(|n| format!("{n}.yaml")).collect();
    fs::write(
        folder.join("kustomization.yaml"),
        json!({"resources": resources}).to_string(),
    )?;
    install(plane, &folder, "https://127.0.0.1:1/mutate-v1-pod").await?;
    let url = plane
        .kubectl_ok(&[
            "get",
            "mutatingwebhookconfiguration",
            "made",
            "-o",
            "jsonpath={.webhooks[*].clientConfig.url}",
        ])
        .await?;
    assert_eq!(url, "https://127.0.0.1:1/mutate-v1-pod");
    plane
        .kubectl_ok(&["get", "-n", "made", "things.example.com", "made"])
        .await?;
    Ok(())
}

/// How many pods a second come to life: the stand-in must not be what a load test measures.
async fn rate(client: Client, count: usize) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client, "default");
    let start = Instant::now();
    let creating = (0..count).map(|n| {
        let pods = pods.clone();
        async move { create(&pods, &format!("many-{n}"), "10m", json!({})).await }
    });
    futures::future::try_join_all(creating).await?;
    let created = start.elapsed();
    for n in 0..count {
        holds(&pods, &format!("many-{n}"), |pod| is(pod, "Ready", "True")).await?;
    }
    eprintln!(
        "{count} pods created in {created:?}, Ready after {:?}",
        start.elapsed()
    );
    Ok(())
}

async fn outage(plane: &ControlPlane, pods: &Api<Pod>) -> Result<()> {
    plane.stop_api_server().await?;
    ensure!(
        pods.list(&ListParams::default()).await.is_err(),
        "the API server still answers"
    );
    plane.start_api_server().await?;
    create(pods, "after", "1", json!({})).await?;
    holds(pods, "after", |pod| is(pod, "Ready", "True")).await?;
    Ok(())
}

/// Tells this test's second run that it is the parent which the first one kills.
const NESTED: &str = "TESTBED_NESTED";

#[tokio::test]
async fn processes_end_with_a_killed_parent() -> Result<()> {
    if env::var_os(NESTED).is_some() {
        let folder = tempfile::tempdir()?;
        let child = sh("nested", "sleep 1000", &folder.path().join("log"))?;
        println!("pid={}", child.pid());
        return child.wait(Duration::from_secs(60)).await.map(drop);
    }
    let mut parent = Command::new(env::current_exe()?)
        .args([
            "--exact",
            "processes_end_with_a_killed_parent",
            "--nocapture",
        ])
        .env(NESTED, "yes")
        .stdout(Stdio::piped())
        .spawn()?;
    let lines = BufReader::new(parent.stdout.take().context("no output")?).lines();
    let line = lines
        .map_while(Result::ok)
        .find(|line| line.contains("pid="))
        .context("no pid")?;
    let pid = line.split("pid=").nth(1).context("no pid")?.to_owned();
    let child = Path::new("/proc").join(&pid);
    assert!(child.exists());
    parent.kill()?;
    parent.wait()?;
    eventually("the child has ended", SOON, || async {
        ensure!(!child.exists(), "{pid} runs");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn processes_stop_and_tell() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let failing = sh(
        "failing",
        "echo \"it is $WORD\"; exit 7",
        &folder.path().join("failing"),
    )?;
    assert_eq!(failing.wait(SOON).await?, 7);
    let error = failing.check().err().context("it failed")?.to_string();
    assert!(
        error.contains("exit code 7") && error.contains("it is so"),
        "{error}"
    );
    assert!(failing.kill(Signal::TERM).is_err());

    let stubborn = sh(
        "stubborn",
        "trap '' TERM; echo ready; while :; do sleep 0.05; done",
        &folder.path().join("stubborn"),
    )?;
    eventually("the trap is set", SOON, || async {
        stubborn
            .last_log_lines(1)
            .contains("ready")
            .then_some(())
            .context("no")
    })
    .await?;
    stubborn.kill(Signal::STOP)?;
    let state = || fs::read_to_string(format!("/proc/{}/stat", stubborn.pid()));
    eventually("it is stopped", SOON, || async {
        state()?.contains(") T ").then_some(()).context("it runs")
    })
    .await?;
    stubborn.kill(Signal::CONT)?;
    eventually("it goes on", SOON, || async {
        (!state()?.contains(") T "))
            .then_some(())
            .context("it is stopped")
    })
    .await?;
    assert!(stubborn.is_alive());
    assert_eq!(stubborn.stop(Duration::from_millis(200)).await?, 137);

    let missing = Supervised::spawn(
        "missing",
        Path::new("/does/not/exist"),
        &[""; 0],
        &[("", ""); 0],
        &folder.path().join("missing"),
    )?;
    assert_eq!(missing.wait(SOON).await?, 127);
    Ok(())
}

#[tokio::test]
async fn balancer_follows_readiness() -> Result<()> {
    let balancer = Balancer::start(Duration::from_millis(300)).await?;
    let (first, second) = (backend(b'1').await?, backend(b'2').await?);
    for (backend, _) in [&first, &second] {
        balancer.add(*backend);
    }
    eventually("both serve", SOON, || async {
        ensure!(balancer.serving().len() == 2, "not yet");
        Ok(())
    })
    .await?;
    let mut kept = TcpStream::connect(balancer.address()).await?;
    let owner = kept.read_u8().await?;
    let other = TcpStream::connect(balancer.address())
        .await?
        .read_u8()
        .await?;
    assert_ne!(owner, other, "connections take turns");
    let (unready, ready) = if owner == b'1' {
        (&first, &second)
    } else {
        (&second, &first)
    };
    unready.1.store(false, Ordering::Relaxed);
    eventually("one serves", SOON, || async {
        ensure!(balancer.serving() == [ready.0], "not yet");
        Ok(())
    })
    .await?;
    for _ in 0..3 {
        assert_eq!(
            TcpStream::connect(balancer.address())
                .await?
                .read_u8()
                .await?,
            other
        );
    }
    kept.write_all(b"x").await?;
    assert_eq!(kept.read_u8().await?, b'x', "the connection lives on");
    // Ready, but nobody listens there: the next one is tried.
    let [closed] = testbed::process::free_ports()?;
    balancer.add(Backend {
        address: (Ipv4Addr::LOCALHOST, closed).into(),
        probe: ready.0.probe,
    });
    eventually("two serve", SOON, || async {
        ensure!(balancer.serving().len() == 2, "not yet");
        Ok(())
    })
    .await?;
    for _ in 0..2 {
        assert_eq!(
            TcpStream::connect(balancer.address())
                .await?
                .read_u8()
                .await?,
            other
        );
    }
    Ok(())
}

/// A server that says its name and echoes, and is ready as long as the flag says so.
async fn backend(name: u8) -> Result<(Backend, Arc<AtomicBool>)> {
    let ready = Arc::new(AtomicBool::new(true));
    let [server, probe] = [listener().await?, listener().await?];
    let backend = Backend {
        address: server.local_addr()?,
        probe: probe.local_addr()?,
    };
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = server.accept().await {
            tokio::spawn(async move {
                stream.write_u8(name).await?;
                let (mut read, mut write) = stream.split();
                tokio::io::copy(&mut read, &mut write).await
            });
        }
    });
    let flag = Arc::clone(&ready);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = probe.accept().await {
            let status = if flag.load(Ordering::Relaxed) {
                "200 OK"
            } else {
                "503 Unavailable"
            };
            stream.read_u8().await.ok();
            stream
                .write_all(format!("HTTP/1.1 {status}\r\n\r\n").as_bytes())
                .await
                .ok();
        }
    });
    Ok((backend, ready))
}

async fn listener() -> std::io::Result<TcpListener> {
    TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await
}

fn sh(name: &str, script: &str, log: &Path) -> Result<Supervised> {
    Supervised::spawn(
        name,
        Path::new("/bin/sh"),
        &["-c", script],
        &[("WORD", "so")],
        log,
    )
}

async fn create(pods: &Api<Pod>, name: &str, cpu: &str, annotations: Value) -> Result<Pod> {
    let pod = serde_json::from_value(json!({
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"containers": [{"name": "app", "image": "app", "resources": {"requests": {"cpu": cpu}}}]},
    }))?;
    pods.create(&PostParams::default(), &pod)
        .await
        .with_context(|| format!("creating {name}"))
}

async fn resize(pods: &Api<Pod>, name: &str, cpu: &str) -> Result<Pod> {
    let patch =
        json!({"spec": {"containers": [{"name": "app", "resources": {"requests": {"cpu": cpu}}}]}});
    pods.patch_resize(name, &PatchParams::default(), &Patch::Strategic(patch))
        .await
        .with_context(|| format!("resizing {name}"))
}

async fn holds(pods: &Api<Pod>, name: &str, wanted: impl Fn(&Pod) -> Option<()>) -> Result<Pod> {
    eventually(&format!("{name} is as wanted"), SOON, || async {
        let pod = pods.get(name).await?;
        wanted(&pod).with_context(|| format!("it is {:?}", pod.status))?;
        Ok(pod)
    })
    .await
}

fn is(pod: &Pod, kind: &str, status: &str) -> Option<()> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions
        .iter()
        .any(|condition| condition.type_ == kind && condition.status == status)
        .then_some(())
}

/// CPU requests as the status has them: actual and allocated.
fn cpu(pod: &Pod) -> [String; 2] {
    let status = pod
        .status
        .as_ref()
        .and_then(|status| status.container_statuses.as_ref()?.first());
    let actual = status.and_then(|status| status.resources.as_ref()?.requests.as_ref());
    let allocated = status.and_then(|status| status.allocated_resources.as_ref());
    [actual, allocated].map(|map| {
        map.and_then(|map| map.get("cpu"))
            .map(|cpu| cpu.0.clone())
            .unwrap_or_default()
    })
}
