//! The in-memory API server against kube's own client, watcher and reflector, under paused time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use futures::{StreamExt as _, stream::BoxStream};
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Namespace, Pod},
};
use kube::{
    Api, Client, Error, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, DynamicObject, GroupVersionKind, PartialObjectMeta, Status},
    runtime::{
        WatchStreamExt as _, reflector,
        watcher::{self, Event, InitialListStrategy},
    },
};
use serde_json::{Value, json};
use testbed::memory::{Fault, Kubelet, MemoryServer, Resize};
use tokio::time::{Instant, sleep, timeout};

const LABEL: &str = "autoscaling.x-k8s.io/startup-cpu-boost";

/// A running, bound pod with one container and one sidecar.
fn pod(name: &str) -> Value {
    let resources = json!({"requests": {"cpu": "2", "memory": "64Mi"}, "limits": {"cpu": "4"}});
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": {LABEL: "boost"}, "annotations": {"note": "old"}},
        "spec": {
            "nodeName": "node",
            "containers": [{"name": "app", "image": "app", "resources": resources}],
            "initContainers": [{"name": "side", "image": "side", "restartPolicy": "Always"}],
        },
        "status": {"phase": "Running", "observedGeneration": 1, "containerStatuses": [{
            "name": "app", "image": "app", "imageID": "", "ready": true, "restartCount": 0,
            "resources": resources, "allocatedResources": resources["requests"],
        }]},
    })
}

fn resize_to(cpu: &str) -> Value {
    json!({"spec": {"containers": [{"name": "app", "resources": {"requests": {"cpu": cpu}}}]}})
}

fn pods(client: &Client) -> Api<Pod> {
    Api::namespaced(client.clone(), "default")
}

async fn resize(api: &Api<Pod>, patch: &Value) -> Result<Pod, Error> {
    api.patch_resize("p", &PatchParams::default(), &Patch::Strategic(patch))
        .await
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Error>) -> Status {
    match result {
        Err(Error::Api(status)) => *status,
        other => panic!("not a refusal: {other:?}"),
    }
}

fn events(client: &Client, config: watcher::Config) -> BoxStream<'static, String> {
    let stream = watcher::watcher(pods(client), config).default_backoff();
    stream
        .map(|event| event.map_or_else(|e| format!("error: {e}"), |e| e.to_string()))
        .boxed()
}

async fn next(stream: &mut BoxStream<'static, String>) -> String {
    let next = timeout(Duration::from_secs(30), stream.next()).await;
    next.expect("an event within 30 s")
        .expect("a watcher never ends")
}

// === watches ===

#[tokio::test(start_paused = true)]
async fn a_reflector_follows_a_label_selector() {
    for strategy in [
        InitialListStrategy::ListWatch,
        InitialListStrategy::StreamingList,
    ] {
        let server = MemoryServer::new();
        server.create(pod("a"));
        let mut config = watcher::Config::default().labels(LABEL);
        config.initial_list_strategy = strategy;
        let (store, writer) = reflector::store();
        let stream = reflector(writer, watcher::watcher(pods(&server.client("a")), config));
        tokio::spawn(stream.for_each(|event| async { drop(event.expect("no error")) }));
        store.wait_until_ready().await.expect("the watcher lives");
        let names = || {
            let mut names: Vec<_> = store.state().iter().map(|pod| pod.name_any()).collect();
            names.sort();
            names
        };
        assert_eq!(names(), ["a"]);

        server.create(pod("b"));
        server.create(
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}, "spec": {}}),
        );
        sleep(Duration::from_secs(1)).await;
        assert_eq!(names(), ["a", "b"]);

        // A lost label looks like a deletion, of a pod that is not terminating.
        server.update("pods", "default", "a", |pod| {
            pod["metadata"]["labels"] = json!({});
        });
        sleep(Duration::from_secs(1)).await;
        assert_eq!(names(), ["b"]);
        server.delete("pods", "default", "b");
        sleep(Duration::from_secs(1)).await;
        assert!(names().is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_label_is_a_deletion_of_the_last_fitting_state() {
    let server = MemoryServer::new();
    server.create(pod("a"));
    let config = watcher::Config::default().labels(&format!("{LABEL} in (boost, other)"));
    let mut stream = watcher::watcher(pods(&server.client("a")), config).boxed();
    while !matches!(stream.next().await, Some(Ok(Event::InitDone))) {}
    let change = server.clone();
    tokio::spawn(async move {
        sleep(Duration::from_secs(5)).await;
        change.update("pods", "default", "a", |pod| {
            pod["metadata"]["labels"][LABEL] = "third".into();
        });
    });
    let Some(Ok(Event::Delete(gone))) = stream.next().await else {
        panic!("no deletion")
    };
    let now = server
        .get("pods", "default", "a")
        .expect("it is still there");
    assert_eq!(gone.labels()[LABEL], "boost");
    assert_eq!(
        gone.resource_version().as_deref(),
        now["metadata"]["resourceVersion"].as_str()
    );
    assert!(gone.metadata.deletion_timestamp.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_watch_resumes_after_a_close_and_lists_again_after_410() {
    let server = MemoryServer::new();
    server.create(pod("a"));
    let mut stream = events(&server.client("a"), watcher::Config::default());
    assert_eq!(next(&mut stream).await, "Init");
    assert_eq!(next(&mut stream).await, "InitApply(a)");
    assert_eq!(next(&mut stream).await, "InitDone");
    server.create(pod("b"));
    assert_eq!(next(&mut stream).await, "Apply(b)");

    server.close_watches();
    server.create(pod("c"));
    assert_eq!(
        next(&mut stream).await,
        "Apply(c)",
        "resumed, nothing lost, no second list"
    );
    assert_eq!(verbs(&server), ["LIST", "WATCH", "WATCH"]);

    // Cut off, and what it missed is forgotten.
    server.fault(Fault::on("WATCH", "pods").reply(503, "ServiceUnavailable", "away"));
    server.close_watches();
    server.delete("pods", "default", "a");
    server.compact();
    let mut seen = Vec::new();
    while seen.last().is_none_or(|last| last != "InitDone") {
        seen.push(next(&mut stream).await);
    }
    assert!(
        seen[0].contains("away") && seen[1].contains("too old resource version"),
        "{seen:?}"
    );
    assert_eq!(
        seen[2..],
        ["Init", "InitApply(b)", "InitApply(c)", "InitDone"]
    );
}

fn verbs(server: &MemoryServer) -> Vec<&'static str> {
    server
        .requests()
        .iter()
        .map(|request| request.verb)
        .collect()
}

#[tokio::test(start_paused = true)]
async fn an_idle_watch_lives_on_bookmarks_and_is_renewed_by_its_timeout() {
    let server = MemoryServer::new();
    server.create(pod("a"));
    let mut stream = events(&server.client("a"), watcher::Config::default());
    let began = (Instant::now(), std::time::Instant::now());
    let idle = async { while !stream.next().await.is_some_and(|e| e.contains("error")) {} };
    timeout(Duration::from_secs(1000), idle)
        .await
        .expect_err("no error in 1,000 s");
    assert!(began.0.elapsed() >= Duration::from_secs(1000));
    assert!(
        began.1.elapsed() < Duration::from_secs(1),
        "real time: {:?}",
        began.1.elapsed()
    );
    assert_eq!(
        verbs(&server),
        ["LIST", "WATCH", "WATCH", "WATCH", "WATCH"],
        "290 s each"
    );
    // Only bookmarks can have brought it past what is forgotten here.
    server.create(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}));
    timeout(Duration::from_secs(70), stream.next())
        .await
        .expect_err("nothing about pods");
    server.compact();
    server.close_watches();
    server.create(pod("b"));
    assert_eq!(next(&mut stream).await, "Apply(b)");
}

#[tokio::test(start_paused = true)]
async fn a_type_that_is_not_there_can_come_later() {
    let server = MemoryServer::new();
    let resource = ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk("autoscaling.x-k8s.io", "v1alpha1", "StartupCPUBoost"),
        "startupcpuboosts",
    );
    let api: Api<DynamicObject> = Api::all_with(server.client("a"), &resource);
    let boost = json!({"apiVersion": "autoscaling.x-k8s.io/v1alpha1", "kind": "StartupCPUBoost",
        "metadata": {"name": "boost"}, "selector": {}, "spec": {}});
    server.create(boost.clone());
    assert_eq!(
        api.list(&ListParams::default())
            .await
            .expect("served")
            .items
            .len(),
        1
    );

    server.remove_kind("startupcpuboosts");
    let status = refused(api.list(&ListParams::default()).await);
    assert_eq!((status.code, status.reason.as_str()), (404, "NotFound"));
    assert_eq!(
        status.message,
        "the server could not find the requested resource"
    );
    server.add_kind("startupcpuboosts");
    assert!(
        api.list(&ListParams::default())
            .await
            .expect("served")
            .items
            .is_empty()
    );

    // The generation of a custom resource counts every field but metadata and status.
    let made = server.create(boost);
    assert_eq!(made["metadata"]["generation"], 1);
    let api: Api<DynamicObject> = Api::namespaced_with(server.client("a"), "default", &resource);
    let params = PatchParams::default();
    let selector =
        Patch::Merge(json!({"selector": {"matchLabels": {"a": "b"}}, "status": {"x": 1}}));
    let changed = api
        .patch("boost", &params, &selector)
        .await
        .expect("patched");
    assert_eq!(
        (changed.metadata.generation, changed.data.get("status")),
        (Some(2), None)
    );
    let status = Patch::Merge(
        json!({"metadata": {"labels": {"a": "b"}}, "spec": {"x": 1}, "status": {"x": 1}}),
    );
    let changed = api
        .patch_status("boost", &params, &status)
        .await
        .expect("patched");
    assert_eq!(
        (changed.metadata.generation, &changed.data["status"]),
        (Some(2), &json!({"x": 1}))
    );
    assert!(changed.labels().is_empty() && changed.data["spec"] == json!({}));
    assert_eq!(
        refused(
            api.patch("boost", &params, &Patch::Strategic(json!({})))
                .await
        )
        .code,
        415
    );
}

#[tokio::test(start_paused = true)]
async fn lists_come_in_pages_of_one_moment_and_as_metadata() {
    let server = MemoryServer::new();
    for i in 0..5 {
        server.create(pod(&format!("p{i}")));
    }
    server.update("pods", "default", "p4", |pod| {
        pod["metadata"]["labels"] = Value::Null;
    });
    let client = server.client("a");
    let list = async |params: ListParams| {
        let list = pods(&client).list_metadata(&params).await.expect("a page");
        let names: Vec<_> = list.items.iter().map(PartialObjectMeta::name_any).collect();
        (names.join(" "), list.metadata.continue_.unwrap_or_default())
    };
    let page = ListParams::default().limit(2);
    let (names, token) = list(page.clone()).await;
    assert_eq!(names, "p0 p1");
    server.delete("pods", "default", "p2");
    let (names, token) = list(page.clone().continue_token(&token)).await;
    assert_eq!(names, "p2 p3", "as it was at the first page");
    server.compact();
    let gone = pods(&client).list(&page.continue_token(&token)).await;
    assert_eq!(refused(gone).code, 410);

    for (selector, names) in [
        (format!("!{LABEL}"), "p4"),
        (format!("{LABEL}=boost"), "p0 p1 p3"),
        (format!("{LABEL}!=boost"), "p4"),
        (format!("{LABEL} notin (a,boost),!x"), "p4"),
    ] {
        assert_eq!(
            list(ListParams::default().labels(&selector)).await.0,
            names,
            "{selector}"
        );
    }
    let fields = |fields: &str| list(ListParams::default().fields(fields));
    assert_eq!(fields("metadata.name=p3,spec.nodeName=node").await.0, "p3");
    assert_eq!(fields("status.phase!=Running").await.0, "");

    let config = watcher::Config::default().labels(LABEL);
    let partial: Api<PartialObjectMeta<Pod>> = Api::namespaced(client.clone(), "default");
    let mut stream = watcher::watcher(partial, config).applied_objects().boxed();
    let first = stream.next().await.expect("never ends").expect("no error");
    assert_eq!(first.name_any(), "p0");
}

// === writes ===

#[tokio::test(start_paused = true)]
async fn a_resize_changes_resources_only() {
    let server = MemoryServer::new();
    let made = server.create(pod("p"));
    let api = pods(&server.client("a"));
    let mut patch = resize_to("500m");
    patch["metadata"] = json!({"uid": made["metadata"]["uid"], "resourceVersion": made["metadata"]["resourceVersion"],
        "labels": {LABEL: null}, "annotations": {"note": "new"}});
    patch["status"] = json!({"phase": "Failed"});
    let dry = PatchParams {
        dry_run: true,
        ..PatchParams::default()
    };
    let answer = api
        .patch_resize("p", &dry, &Patch::Strategic(&patch))
        .await
        .expect("fine");
    assert_eq!(answer.metadata.generation, Some(2));
    assert_eq!(
        server.get("pods", "default", "p"),
        Some(made.clone()),
        "a dry run stores nothing"
    );
    assert!(server.writes().is_empty() && server.requests()[0].is_dry_run());

    resize(&api, &patch).await.expect("resized");
    let now = server.get("pods", "default", "p").expect("it is there");
    let mut expected = made.clone();
    expected["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "500m".into();
    expected["metadata"]["generation"] = 2.into();
    expected["metadata"]["resourceVersion"] = now["metadata"]["resourceVersion"].clone();
    assert_eq!(
        now, expected,
        "merged by name; metadata and status are dropped silently"
    );

    let stale = refused(resize(&api, &patch).await);
    assert_eq!((stale.code, stale.reason.as_str()), (409, "Conflict"));
    let refusal = |patch: Value| {
        let api = api.clone();
        async move { refused(resize(&api, &patch).await) }
    };
    for (patch, message) in [
        (
            json!({"metadata": {"uid": "x"}}),
            r#"metadata.uid: Invalid value: "x": field is immutable"#,
        ),
        (
            json!({"spec": {"containers": [{"name": "who", "resources": {}}]}}),
            "spec.containers: Forbidden: containers may not be added or removed on resize",
        ),
        (
            json!({"spec": {"containers": [{"name": "app", "resources": {"limits": {"cpu": null}}}]}}),
            "spec.containers[0].resources.limits: Forbidden: resource limits cannot be removed",
        ),
        (
            resize_to("5"),
            "must be less than or equal to cpu limit of 4",
        ),
        (
            json!({"spec": {"containers": [{"name": "app", "resources": {
                "requests": {"cpu": "1"}, "limits": {"cpu": "1", "memory": "64Mi"}}}],
                "initContainers": [{"name": "side", "resources": {"limits": {"cpu": "1", "memory": "1Mi"}}}]}}),
            "Pod QOS Class may not change as a result of resizing",
        ),
    ] {
        let status = refusal(patch).await;
        assert_eq!(
            (status.code, status.reason.as_str()),
            (422, "Invalid"),
            "{message}"
        );
        assert!(
            status.message.contains(message),
            "{} / {message}",
            status.message
        );
    }
    assert_eq!(
        server.get("pods", "default", "p"),
        Some(now),
        "refusals store nothing"
    );
    assert_eq!(
        refused(api.patch_resize("q", &dry, &Patch::Strategic(&patch)).await).code,
        404
    );
}

#[tokio::test(start_paused = true)]
async fn a_resize_brings_limit_range_defaults_along() {
    let server = MemoryServer::new();
    server.create(pod("p"));
    server.create(
        json!({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "l"},
        "spec": {"limits": [{"type": "Container", "default": {"memory": "128Mi"}}]}}),
    );
    let resized = resize(&pods(&server.client("a")), &resize_to("500m"))
        .await
        .expect("resized");
    let pod = serde_json::to_value(resized).expect("JSON");
    assert_eq!(
        pod["spec"]["containers"][0]["resources"]["limits"],
        json!({"cpu": "4", "memory": "128Mi"})
    );
    assert_eq!(
        pod["spec"]["initContainers"][0]["resources"]["limits"]["memory"],
        "128Mi"
    );
}

#[tokio::test(start_paused = true)]
async fn the_main_resource_takes_metadata_and_no_resources() {
    let server = MemoryServer::new();
    let made = server.create(pod("p"));
    let api = pods(&server.client("a"));
    let patch = async |patch: Value| {
        api.patch("p", &PatchParams::default(), &Patch::Merge(patch))
            .await
    };
    let version = made["metadata"]["resourceVersion"].clone();
    let marks = json!({"metadata": {"resourceVersion": version, "labels": {LABEL: null}}, "status": {"phase": "x"}});
    let pod = patch(marks.clone()).await.expect("patched");
    assert!(pod.metadata.labels.is_none() && pod.metadata.generation == Some(1));
    assert_eq!(
        pod.status.and_then(|status| status.phase).as_deref(),
        Some("Running")
    );
    assert_eq!(refused(patch(marks).await).code, 409);
    let status = refused(patch(json!({"metadata": {"uid": "x"}})).await);
    assert_eq!(
        (
            status.code,
            status.details.expect("given").causes[0].field.as_str()
        ),
        (422, "metadata.uid")
    );
    let strategic = Patch::Strategic(resize_to("1"));
    let status = refused(api.patch("p", &PatchParams::default(), &strategic).await);
    assert!(status.code == 422 && status.message.contains("pod updates may not change fields"));
    // No change is no write.
    let same = patch(json!({"metadata": {"annotations": {"note": "old"}}}))
        .await
        .expect("patched");
    assert_eq!(
        same.metadata.resource_version,
        pod.metadata.resource_version
    );

    let json_patch = |value: Value| serde_json::from_value(value).expect("a JSON patch");
    let test =
        json_patch(json!([{"op": "test", "path": "/metadata/annotations/note", "value": "x"}]));
    let status = refused(
        api.patch("p", &PatchParams::default(), &Patch::<()>::Json(test))
            .await,
    );
    assert_eq!(status.code, 422);
    let add =
        json_patch(json!([{"op": "add", "path": "/metadata/annotations/a~1b", "value": "x"}]));
    let pod = api
        .patch("p", &PatchParams::default(), &Patch::<()>::Json(add))
        .await
        .expect("patched");
    assert_eq!(pod.annotations()["a/b"], "x");
}

#[tokio::test(start_paused = true)]
async fn leases_conflict_and_objects_are_made_once() {
    let server = MemoryServer::new();
    let api: Api<Lease> = Api::namespaced(server.client("a"), "system");
    let lease: Lease =
        serde_json::from_value(json!({"metadata": {"name": "l"}, "spec": {}})).expect("a lease");
    let made = api
        .create(&PostParams::default(), &lease)
        .await
        .expect("created");
    assert_eq!(
        made.creation_timestamp().expect("set").0.to_string(),
        "2026-12-01T10:00:00Z"
    );
    assert_eq!(
        refused(api.create(&PostParams::default(), &lease).await).reason,
        "AlreadyExists"
    );
    assert_eq!(
        refused(api.replace("l", &PostParams::default(), &lease).await).code,
        422,
        "without a version"
    );
    let mut mine = made.clone();
    mine.spec.get_or_insert_default().holder_identity = Some("a".to_owned());
    api.replace("l", &PostParams::default(), &mine)
        .await
        .expect("replaced");
    let status = refused(api.replace("l", &PostParams::default(), &made).await);
    assert!(
        status.code == 409
            && status
                .message
                .starts_with("Operation cannot be fulfilled on leases.coordination.k8s.io")
    );
    let namespaces: Api<Namespace> = Api::all(server.client("a"));
    assert!(
        namespaces
            .get("system")
            .await
            .expect("implied")
            .labels()
            .contains_key("kubernetes.io/metadata.name")
    );

    let applied = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": {"holderIdentity": "b"}});
    let lease = api
        .patch("l2", &PatchParams::apply("me"), &Patch::Apply(&applied))
        .await
        .expect("made");
    assert_eq!(lease.name_any(), "l2");
    let wrong = DeleteParams {
        preconditions: Some(kube::api::Preconditions {
            uid: Some("x".to_owned()),
            ..Default::default()
        }),
        ..DeleteParams::default()
    };
    assert_eq!(refused(api.delete("l2", &wrong).await).code, 409);
    assert!(
        api.delete("l2", &DeleteParams::default())
            .await
            .expect("deleted")
            .is_right()
    );
    assert_eq!(refused(api.get("l2").await).code, 404);
    assert_eq!(
        server
            .client("a")
            .apiserver_version()
            .await
            .expect("a version")
            .git_version,
        "v1.36.3"
    );
}

#[tokio::test(start_paused = true)]
async fn a_pod_goes_at_once_or_gracefully() {
    let server = MemoryServer::new();
    server.create(pod("p"));
    let api = pods(&server.client("a"));
    let delete = async || {
        api.delete("p", &DeleteParams::default())
            .await
            .expect("deleted")
    };
    server.set_graceful_deletes(true);
    let pod = delete().await.left().expect("the terminating pod");
    assert!(pod.metadata.deletion_timestamp.is_some() && pod.metadata.generation == Some(2));
    server.set_graceful_deletes(false);
    assert!(delete().await.is_right());
    assert_eq!(server.get("pods", "default", "p"), None);
    server.create(json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}));
    let pod = server.terminate("pods", "default", "p");
    assert_eq!(pod["metadata"]["deletionTimestamp"], "2026-12-01T10:00:00Z");
}

// === faults ===

#[tokio::test(start_paused = true)]
async fn faults_meet_whom_they_are_aimed_at() {
    let server = MemoryServer::new();
    server.create(pod("p"));
    let (a, b) = (pods(&server.client("a")), pods(&server.client("b")));
    server.fault(
        Fault::on("PATCH", "/pods/*/resize")
            .who("a")
            .times(2)
            .reply(429, "TooManyRequests", "slow")
            .retry_after(7),
    );
    for _ in 0..2 {
        let status = refused(resize(&a, &resize_to("1")).await);
        assert_eq!(status.details.expect("given").retry_after_seconds, 7);
        let metadata = Patch::Merge(json!({"metadata": {"annotations": {}}}));
        a.patch("p", &PatchParams::default(), &metadata)
            .await
            .expect("another path");
    }
    resize(&b, &resize_to("1")).await.expect("another client");
    resize(&a, &resize_to("2")).await.expect("used up");
    let log: Vec<_> = server
        .writes()
        .iter()
        .map(|r| format!("{} {}", r.who, r.status))
        .collect();
    assert_eq!(log, ["a 429", "a 200", "a 429", "a 200", "b 200", "a 200"]);

    let id = server.fault(Fault::on("*", "").skip(1).always().reset());
    a.get("p").await.expect("skipped");
    for _ in 0..3 {
        assert!(matches!(a.get("p").await, Err(Error::Service(_))));
    }
    server.lift(id);
    a.get("p").await.expect("lifted");
    assert_eq!(
        server
            .requests()
            .iter()
            .filter(|request| request.status == 0)
            .count(),
        3
    );
}

#[tokio::test(start_paused = true)]
async fn a_hang_meets_the_clients_timeout_and_a_late_write_still_lands() {
    let server = MemoryServer::new();
    server.create(pod("p"));
    let api = pods(&server.client("a"));
    let cpu =
        || server.list("pods")[0]["spec"]["containers"][0]["resources"]["requests"]["cpu"].clone();
    let began = Instant::now();
    server.fault(Fault::on("PATCH", "/pods/p/resize").hang());
    timeout(Duration::from_secs(10), resize(&api, &resize_to("1")))
        .await
        .expect_err("hung");
    assert_eq!(
        (began.elapsed(), cpu()),
        (Duration::from_secs(10), json!("2"))
    );

    server.fault(Fault::on("PATCH", "/pods/p/resize").delay(Duration::from_secs(60)));
    timeout(Duration::from_secs(10), resize(&api, &resize_to("1")))
        .await
        .expect_err("delayed");
    assert_eq!(cpu(), "2");
    sleep(Duration::from_secs(51)).await;
    assert_eq!(cpu(), "1", "on its way when the client gave up");
    assert_eq!(server.now().to_rfc3339(), "2026-12-01T10:01:11+00:00");
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_is_a_write_that_happened() {
    let server = MemoryServer::new();
    server.create(pod("p"));
    let api = pods(&server.client("a"));
    server.fault(Fault::on("PATCH", "/pods/*/resize").lost_answer());
    assert!(matches!(
        resize(&api, &resize_to("1")).await,
        Err(Error::Service(_))
    ));
    assert_eq!(server.list("pods")[0]["metadata"]["generation"], 2);
    server.fault(Fault::on("PATCH", "/pods/*/resize").lost_answer().hang());
    timeout(Duration::from_secs(1), resize(&api, &resize_to("500m")))
        .await
        .expect_err("hung");
    assert_eq!(server.list("pods")[0]["metadata"]["generation"], 3);
    assert_eq!(
        server.writes().iter().map(|r| r.status).collect::<Vec<_>>(),
        [200, 200]
    );
}

#[tokio::test(start_paused = true)]
async fn somebody_else_is_faster() {
    let server = MemoryServer::new();
    let made = server.create(pod("p"));
    let seen = Arc::new(AtomicU32::new(0));
    let after = seen.clone();
    let fault = Fault::on("PATCH", "/pods/p")
        .when(|request| request.content_type.as_deref() == Some("application/merge-patch+json"))
        .before(|server| {
            server.update("pods", "default", "p", |pod| {
                pod["metadata"]["labels"]["x"] = "y".into();
            });
        })
        .after(move |_| {
            after.fetch_add(1, SeqCst);
        });
    server.fault(fault);
    let patch = Patch::Merge(
        json!({"metadata": {"resourceVersion": made["metadata"]["resourceVersion"], "labels": null}}),
    );
    let api = pods(&server.client("a"));
    assert_eq!(
        refused(api.patch("p", &PatchParams::default(), &patch).await).code,
        409
    );
    assert_eq!(seen.load(SeqCst), 1);
}

// === the kubelet ===

#[tokio::test(start_paused = true)]
async fn the_kubelet_follows_resizes() {
    let server = MemoryServer::new();
    server.create(pod("p"));
    let api = pods(&server.client("a"));
    let status = || server.get("pods", "default", "p").expect("it is there")["status"].clone();
    let kubelet = |resize| {
        server.kubelet(Kubelet {
            actuate_after: Duration::from_secs(3),
            resize,
        });
    };

    kubelet(Resize::Deferred);
    resize(&api, &resize_to("1")).await.expect("resized");
    sleep(Duration::from_secs(2)).await;
    assert_eq!(status()["observedGeneration"], 1);
    sleep(Duration::from_secs(2)).await;
    let deferred = status();
    assert_eq!(deferred["observedGeneration"], 2);
    assert_eq!(deferred["conditions"][0]["type"], "PodResizePending");
    assert_eq!(deferred["conditions"][0]["reason"], "Deferred");
    assert_eq!(
        deferred["containerStatuses"][0]["allocatedResources"]["cpu"],
        "2"
    );

    kubelet(Resize::Error("cgroup".to_owned()));
    sleep(Duration::from_secs(4)).await;
    assert_eq!(status()["conditions"][0]["message"], "cgroup");
    assert_eq!(
        status()["containerStatuses"][0]["allocatedResources"]["cpu"],
        "1"
    );
    assert_eq!(
        status()["containerStatuses"][0]["resources"]["requests"]["cpu"],
        "2"
    );

    kubelet(Resize::Actuate);
    sleep(Duration::from_secs(4)).await;
    assert_eq!(status()["conditions"], json!([]));
    assert_eq!(
        status()["containerStatuses"][0]["resources"]["requests"]["cpu"],
        "1"
    );

    kubelet(Resize::Never);
    resize(&api, &resize_to("500m")).await.expect("resized");
    sleep(Duration::from_secs(60)).await;
    assert_eq!(status()["observedGeneration"], 2);
}
