//! The webhook as the API server meets it: bodies of all sorts through its route, and real sockets with TLS.
//!
//! Whatever is posted, the answer is `allowed: true` or an HTTP error, which `failurePolicy: Ignore` passes over; nothing
//! makes it panic. Certificates change without a restart, and the end of the process loses no answer.

mod common;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use base64::{Engine as _, prelude::BASE64_STANDARD};
use chrono::{DateTime, Utc};
use common::*;
use headstart::{
    admission::{Admitter, routes},
    api::StartupCPUBoost,
    certs::{Certs, server_config},
    clock::Clock,
    domain::{
        admission::Settings,
        policy::Policy,
        snapshot::{BoostIndex, Snapshot},
    },
    metrics::Metrics,
    server::{Stop, serve},
};
use http_body_util::{BodyExt as _, Full};
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http1::{self, SendRequest},
};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use rustls::{RootCertStore, ServerConfig};
use serde_json::{Value, json};
use testbed::memory::MemoryServer;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use warp::Filter as _;

const PATH: &str = "/mutate-v1-pod";
const MIB: usize = 1 << 20;
/// For what takes real time on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

// === the webhook ===

/// The webhook of one replica.
struct Webhook {
    admitter: Arc<Admitter>,
    metrics: Metrics,
}

impl Webhook {
    /// With the boost `b`: 50 % for the container `app`, until Ready.
    fn new() -> Self {
        let webhook = Self::unsynced();
        let object: StartupCPUBoost =
            serde_json::from_value(boost("b", &until_ready())).expect("a boost");
        let policy = Policy::compile("b", DateTime::default(), &object);
        let policies = [(NS.to_owned(), Arc::new(policy.expect("it compiles")))];
        webhook.admitter.snapshot.store(Some(Arc::new(Snapshot {
            boosts: Arc::new(BoostIndex::new(policies)),
            ..Snapshot::default()
        })));
        webhook
    }

    /// Before the boosts have been read.
    fn unsynced() -> Self {
        let metrics = Metrics::default();
        let now: DateTime<Utc> = "2026-12-01T09:59:58Z".parse().expect("a time");
        let admitter = Admitter {
            snapshot: Arc::new(ArcSwapOption::empty()),
            settings: Settings::default(),
            clock: Clock::new(move || now),
            metrics: metrics.admission.clone(),
            dry_run: false,
        };
        Self {
            admitter: Arc::new(admitter),
            metrics,
        }
    }

    /// The same under `--dry-run`.
    fn dry(self) -> Self {
        let admitter = Admitter {
            dry_run: true,
            ..Admitter::clone(&self.admitter)
        };
        Self {
            admitter: Arc::new(admitter),
            ..self
        }
    }

    /// Posts a body as the API server does.
    async fn post(&self, body: impl Into<Bytes>) -> (StatusCode, Bytes) {
        self.send("POST", PATH, "application/json", body).await
    }

    async fn send(
        &self,
        method: &str,
        path: &str,
        content_type: &str,
        body: impl Into<Bytes>,
    ) -> (StatusCode, Bytes) {
        let request = warp::test::request()
            .method(method)
            .path(path)
            .header("content-type", content_type)
            .body(body.into());
        let (head, body) = request
            .reply(&routes(Arc::clone(&self.admitter)))
            .await
            .into_parts();
        (head.status, body)
    }

    /// Posts a review and reads the answer's `response`.
    async fn answer(&self, review: &Value) -> Value {
        let (status, body) = self.post(review.to_string()).await;
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
        response(&body)
    }

    /// What is counted for an outcome and a reason.
    fn counted(&self, outcome: &str, reason: &str) -> u64 {
        let series = format!(
            "headstart_admission_reviews_total{{outcome=\"{outcome}\",reason=\"{reason}\"}} "
        );
        let text = self.metrics.text();
        let line = text.lines().find_map(|line| line.strip_prefix(&series));
        let count = line.unwrap_or_else(|| panic!("{series} is not in {text}"));
        count.parse().expect("a number")
    }

    /// All reviews that were counted.
    fn counted_in_all(&self) -> u64 {
        let text = self.metrics.text();
        text.lines()
            .filter(|line| line.starts_with("headstart_admission_reviews_total"))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
            .sum()
    }
}

/// A review of the creation of a pod.
fn review(object: &Value) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "u1", "operation": "CREATE", "namespace": NS,
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "userInfo": {"username": "somebody"}, "dryRun": false, "object": object,
        },
    })
}

/// The `response` of an answer, which is never a refusal.
fn response(body: &[u8]) -> Value {
    let answer: Value = serde_json::from_slice(body).expect("an answer is JSON");
    assert_eq!(answer["apiVersion"], "admission.k8s.io/v1");
    assert_eq!(answer["kind"], "AdmissionReview");
    assert_eq!(answer["response"]["uid"], "u1");
    assert_eq!(answer["response"]["allowed"], true);
    answer["response"].clone()
}

/// The patch of a `response`: its operations in the order of their paths.
fn patch(response: &Value) -> Vec<Value> {
    assert_eq!(response["patchType"], "JSONPatch");
    let text = response["patch"].as_str().expect("base64 in a string");
    let bytes = BASE64_STANDARD.decode(text).expect("base64");
    let mut operations: Vec<Value> = serde_json::from_slice(&bytes).expect("operations");
    operations.sort_by_key(|operation| operation["path"].to_string());
    operations
}

/// What the first case's pod is answered with.
fn first_patch() -> Vec<Value> {
    vec![
        json!({"op": "add", "path": "/metadata/annotations", "value": {KEY: record(&ready_end())}}),
        json!({"op": "add", "path": "/metadata/labels/autoscaling.x-k8s.io~1startup-cpu-boost", "value": "b"}),
        json!({"op": "replace", "path": "/spec/containers/0/resources/limits/cpu", "value": "750m"}),
        json!({"op": "replace", "path": "/spec/containers/0/resources/requests/cpu", "value": "380m"}),
    ]
}

// === bodies ===

#[tokio::test]
async fn a_boosted_pod_is_answered_with_its_patch_in_base64_and_a_note_for_the_audit_log() {
    let webhook = Webhook::new();
    let answer = webhook.answer(&review(&pod("p"))).await;
    assert_eq!(patch(&answer), first_patch());
    assert_eq!(answer["auditAnnotations"], json!({"boost": "b"}));
    assert_eq!(webhook.counted("boosted", ""), 1);
    assert_eq!(webhook.counted_in_all(), 1);
}

#[tokio::test]
async fn b46_a_media_type_with_a_charset_changes_nothing() {
    let webhook = Webhook::new();
    let body = review(&pod("p")).to_string();
    let media_type = "application/json; charset=utf-8";
    let (status, body) = webhook.send("POST", PATH, media_type, body).await;
    assert_eq!(status, 200);
    assert_eq!(patch(&response(&body)), first_patch());
}

#[tokio::test]
async fn a_skip_says_why_in_the_audit_log() {
    let webhook = Webhook::new();
    let mut plain = pod("p");
    plain["spec"]["containers"][0]["resources"] = json!({});
    let answer = webhook.answer(&review(&plain)).await;
    assert_eq!(
        answer,
        json!({"uid": "u1", "allowed": true, "auditAnnotations": {"boost": "b", "skipped": "NoCPU"}})
    );
    assert_eq!(webhook.counted("skipped", "NoCPU"), 1);
    // A pod that no boost matches is no skip.
    plain["metadata"]["labels"] = json!({});
    let answer = webhook.answer(&review(&plain)).await;
    assert_eq!(answer, json!({"uid": "u1", "allowed": true}));
}

#[tokio::test]
async fn b41_and_b42_what_cannot_be_read_is_answered_with_400_and_the_reason() {
    let without = |path: &[&str]| {
        let mut review = review(&pod("p"));
        let (last, before) = path.split_last().expect("a path");
        let parent = before.iter().fold(&mut review, |at, field| &mut at[*field]);
        parent.as_object_mut().expect("an object").remove(*last);
        review.to_string()
    };
    let with = |change: fn(&mut Value)| {
        let mut review = review(&pod("p"));
        change(&mut review);
        review.to_string()
    };
    let cases = [
        ("not json".to_owned(), "no AdmissionReview"),
        (String::new(), "no AdmissionReview"),
        ("null".to_owned(), "no AdmissionReview"),
        ("[]".to_owned(), ""),
        ("{}".to_owned(), "expected an AdmissionReview"),
        (without(&["request"]), "request is missing"),
        (without(&["request", "uid"]), "request.uid is missing"),
        (without(&["request", "object"]), "request.object is missing"),
        (
            with(|review| review["apiVersion"] = "admission.k8s.io/v1beta1".into()),
            "v1beta1",
        ),
        (with(|review| review["kind"] = "Pod".into()), "Pod"),
        (
            with(|review| review["request"]["object"] = Value::Null),
            "request.object",
        ),
        (
            with(|review| review["request"]["object"]["spec"]["containers"] = "x".into()),
            "no pod",
        ),
        (
            with(|review| review["request"]["object"] = json!([])),
            "no pod",
        ),
        (
            review(&pod("p")).to_string().replace("\"app\"", "\"app"),
            "",
        ),
    ];
    let webhook = Webhook::new();
    let count = cases.len();
    for (body, reason) in cases {
        let (status, answer) = webhook.post(body.clone()).await;
        let answer = String::from_utf8(answer.to_vec()).expect("text");
        assert_eq!(status, 400, "{body}: {answer}");
        assert!(
            !answer.is_empty() && answer.contains(reason),
            "{body}: {answer}"
        );
    }
    assert_eq!(webhook.counted("unreadable", ""), count as u64);
    assert_eq!(webhook.counted_in_all(), count as u64);
}

/// Else strangers would write as much into the log as into their requests.
#[tokio::test]
async fn b42_the_reason_is_short_however_long_the_words_that_it_quotes() {
    let webhook = Webhook::new();
    for field in ["kind", "apiVersion"] {
        let mut review = review(&pod("p"));
        review[field] = "ä".repeat(1 << 20).into();
        let (status, answer) = webhook.post(review.to_string()).await;
        assert_eq!(status, 400, "{field}");
        assert!(answer.len() < 1000, "{field}: {} bytes", answer.len());
    }
}

#[tokio::test]
async fn b42_invalid_utf_8_is_refused_wherever_it_is() {
    let webhook = Webhook::new();
    let body = review(&pod("p")).to_string();
    let broken = |place: &str| {
        let mut bytes = body.clone().into_bytes();
        let at = body.find(place).expect("it is there") + place.len();
        bytes.insert(at, 0xff);
        bytes
    };
    for place in [
        "\"name\":\"p",
        "\"namespace\":\"n",
        // Also where nobody reads it.
        "\"image\":\"x",
        "\"username\":\"",
    ] {
        let (status, _) = webhook.post(broken(place)).await;
        assert_eq!(status, 400, "{place}");
    }
}

#[tokio::test]
async fn b42_nesting_10000_deep_is_refused_wherever_it_is() {
    let webhook = Webhook::new();
    let places = [
        // Fields that are read.
        "apiVersion",
        "request",
        "uid",
        "object",
        "metadata",
        "labels",
        "annotations",
        "containers",
        "resources",
        "status",
        // Fields that are passed over.
        "unknown",
        "oldObject",
        "options",
        "managedFields",
        "volumes",
    ];
    for place in places {
        for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
            let deep = format!("{}0{}", open.repeat(10_000), close.repeat(10_000));
            let body = nested(place, &deep);
            let (status, answer) = webhook.post(body).await;
            assert_eq!(status, 400, "{place}: {}", String::from_utf8_lossy(&answer));
        }
        // Never closed.
        let (status, _) = webhook.post(nested(place, &"[".repeat(100_000))).await;
        assert_eq!(status, 400, "{place}");
    }
    // What is passed over may be as deep as anything real, and brackets in a string are no nesting.
    for (place, value) in [
        (
            "volumes",
            format!("{}0{}", "[".repeat(500), "]".repeat(500)),
        ),
        ("managedFields", format!("\"{}\"", "[{\\\"".repeat(10_000))),
    ] {
        let (status, answer) = webhook.post(nested(place, &value)).await;
        assert_eq!(status, 200, "{place}");
        assert_eq!(patch(&response(&answer)).len(), 4);
    }
}

/// The first case's review, with this JSON text as the value of a field, which is added where it is not there.
fn nested(field: &str, value: &str) -> String {
    const MARK: &str = "the value goes here";
    let mut review = review(&pod("p"));
    let request = &mut review["request"];
    match field {
        "apiVersion" | "unknown" => review[field] = MARK.into(),
        "request" => review["request"] = MARK.into(),
        "metadata" | "status" => request["object"][field] = MARK.into(),
        "labels" | "annotations" | "managedFields" => {
            request["object"]["metadata"][field] = MARK.into();
        }
        "containers" | "volumes" => request["object"]["spec"][field] = MARK.into(),
        "resources" => request["object"]["spec"]["containers"][0][field] = MARK.into(),
        _ => request[field] = MARK.into(),
    }
    review.to_string().replace(&format!("\"{MARK}\""), value)
}

#[tokio::test]
async fn b43_a_body_that_is_too_long_is_answered_with_413() {
    let webhook = Webhook::new();
    let mut long = review(&pod("p"));
    long["request"]["object"]["metadata"]["annotations"]["x"] = "x".repeat(8 * MIB).into();
    assert_eq!(webhook.post(long.to_string()).await.0, 413);
    // Below the bound, size does not matter.
    long["request"]["object"]["metadata"]["annotations"]["x"] = "x".repeat(6 * MIB).into();
    let answer = webhook.answer(&long).await;
    assert_eq!(patch(&answer).len(), 4);
}

#[tokio::test]
async fn b44_other_methods_and_paths_are_answered_with_405_and_404() {
    let webhook = Webhook::new();
    for method in ["GET", "PUT", "DELETE", "PATCH", "HEAD"] {
        let (status, _) = webhook.send(method, PATH, "application/json", "").await;
        assert_eq!(status, 405, "{method}");
    }
    for path in ["/", "/mutate-v1-pods", "/mutate-v1-pod/x", "/metrics"] {
        let body = review(&pod("p")).to_string();
        let (status, _) = webhook.send("POST", path, "application/json", body).await;
        assert_eq!(status, 404, "{path}");
    }
}

#[tokio::test]
async fn b45_reviews_of_other_things_are_allowed_and_not_counted() {
    let webhook = Webhook::new();
    for (field, value) in [
        ("operation", json!("UPDATE")),
        ("operation", json!("DELETE")),
        ("subResource", json!("resize")),
        (
            "resource",
            json!({"group": "apps", "version": "v1", "resource": "deployments"}),
        ),
        (
            "resource",
            json!({"group": "", "version": "v1", "resource": "services"}),
        ),
    ] {
        let mut review = review(&pod("p"));
        review["request"][field] = value.clone();
        let answer = webhook.answer(&review).await;
        assert_eq!(answer, json!({"uid": "u1", "allowed": true}), "{value}");
    }
    assert_eq!(webhook.counted_in_all(), 0);
}

#[tokio::test]
async fn b39_before_the_boosts_are_read_pods_are_allowed_unpatched_and_counted() {
    let webhook = Webhook::unsynced();
    let answer = webhook.answer(&review(&pod("p"))).await;
    assert_eq!(
        answer,
        json!({"uid": "u1", "allowed": true, "auditAnnotations": {"skipped": "Unsynced"}})
    );
    assert_eq!(webhook.counted("skipped", "Unsynced"), 1);
    assert_eq!(webhook.counted_in_all(), 1);
}

#[tokio::test]
async fn dry_runs_get_the_same_answer_and_count_nothing() {
    for webhook in [Webhook::new(), Webhook::unsynced()] {
        let mut dry = review(&pod("p"));
        dry["request"]["dryRun"] = true.into();
        let dry = webhook.answer(&dry).await;
        assert_eq!(webhook.counted_in_all(), 0);
        assert!(
            webhook
                .metrics
                .text()
                .contains("headstart_admission_duration_seconds_count 0"),
            "{}",
            webhook.metrics.text()
        );
        assert_eq!(dry, webhook.answer(&review(&pod("p"))).await);
        assert_eq!(webhook.counted_in_all(), 1);
    }
}

/// Under `--dry-run` the API server's own dry run shows what would be; whatever it would store stays as it is.
#[tokio::test]
async fn a_dry_run_patches_nothing_that_is_stored() {
    let webhook = Webhook::new().dry();
    let answer = webhook.answer(&review(&pod("p"))).await;
    let notes = json!({"boost": "b", "would-boost": "app 250m/500m -> 380m/750m"});
    let told = json!({"uid": "u1", "allowed": true, "auditAnnotations": notes});
    assert_eq!(answer, told);
    // Nothing is taken off a pod either.
    let mut marked = pod("p");
    marked["metadata"]["labels"] = json!({KEY: "other"});
    let answer = webhook.answer(&review(&marked)).await;
    assert_eq!(answer, json!({"uid": "u1", "allowed": true}));
    let mut unsized_pod = pod("p");
    unsized_pod["spec"]["containers"][0]["resources"] = json!({});
    let answer = webhook.answer(&review(&unsized_pod)).await;
    assert_eq!(answer["auditAnnotations"]["skipped"], "NoCPU");
    assert_eq!(answer.get("patch"), None);

    for (outcome, reason, count) in [
        ("would_boost", "", 1),
        ("boosted", "", 0),
        ("unmatched", "", 1),
        ("skipped", "NoCPU", 1),
    ] {
        assert_eq!(webhook.counted(outcome, reason), count, "{outcome}");
    }
    let mut shown = review(&pod("p"));
    shown["request"]["dryRun"] = true.into();
    assert_eq!(patch(&webhook.answer(&shown).await), first_patch());
    assert_eq!(webhook.counted_in_all(), 3);
}

// === sockets ===

/// A listener with TLS, and what ends it. Its path `/slow` answers when the test lets it.
struct Listener {
    address: SocketAddr,
    closing: CancellationToken,
    stopped: CancellationToken,
    /// One permit lets one request to `/slow` answer.
    slow: Arc<Semaphore>,
    /// How many requests to `/slow` have come.
    arrived: Arc<Semaphore>,
    served: JoinHandle<std::io::Result<()>>,
}

impl Listener {
    async fn start(certs: Option<&Certs>, connections: usize, drain: Duration) -> Self {
        let tls = certs.map(|certs| server_config(certs.slot(), None).expect("TLS"));
        Self::start_with(tls, connections, drain).await
    }

    async fn start_with(
        tls: Option<Arc<ServerConfig>>,
        connections: usize,
        drain: Duration,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (slow, arrived) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let shared = (Arc::clone(&slow), Arc::clone(&arrived));
        let slow_path = warp::path!("slow").then(move || {
            let (slow, arrived) = shared.clone();
            async move {
                arrived.add_permits(1);
                slow.acquire().await.expect("it is not closed").forget();
                "slow"
            }
        });
        let routes = slow_path.or(routes(Webhook::new().admitter));
        let (closing, stopped) = (CancellationToken::new(), CancellationToken::new());
        let stop = Stop {
            closing: closing.clone(),
            stopped: stopped.clone(),
            drain,
        };
        let service = TowerToHyperService::new(warp::service(routes));
        let served = tokio::spawn(serve(listener, tls, service, connections, stop));
        Self {
            address,
            closing,
            stopped,
            slow,
            arrived,
            served,
        }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address)
            .await
            .expect("the listener accepts")
    }

    async fn connect_tls(&self, certs: &Certs) -> std::io::Result<SendRequest<Full<Bytes>>> {
        let roots = certs.roots().expect("a certificate is loaded");
        Ok(speak(handshake(self.connect().await, roots, &["http/1.1"]).await?).await)
    }

    /// Waits until so many requests to `/slow` are under way.
    async fn until_slow(&self, count: u32) {
        let arrived = self.arrived.acquire_many(count);
        timeout(PATIENCE, arrived)
            .await
            .expect("they arrive")
            .expect("it is not closed")
            .forget();
    }

    /// Waits until it has stopped.
    async fn has_stopped(self) {
        let stopped = timeout(PATIENCE, self.served).await.expect("it stops");
        stopped.expect("no panic").expect("no error");
        let refused = TcpStream::connect(self.address).await;
        assert!(refused.is_err(), "nobody listens any more");
    }
}

/// HTTP/1.1 over a connection.
async fn speak<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
) -> SendRequest<Full<Bytes>> {
    let (sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .expect("a connection");
    tokio::spawn(connection);
    sender
}

async fn get_slow(sender: &mut SendRequest<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
    let request = Request::get("/slow").header("host", HOST);
    let request = request.body(Full::default()).expect("a request");
    sender.send_request(request).await
}

async fn post_review(sender: &mut SendRequest<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
    sender.ready().await?;
    let request = Request::post(PATH).header("host", HOST);
    let body = Full::from(review(&pod("p")).to_string());
    sender
        .send_request(request.body(body).expect("a request"))
        .await
}

/// Reads an answer that has the first case's patch.
async fn assert_boosted(answer: hyper::Result<Response<Incoming>>) {
    let answer = answer.expect("an answer");
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.headers()["content-type"], "application/json");
    let body = answer.into_body().collect().await.expect("a body");
    assert_eq!(patch(&response(&body.to_bytes())), first_patch());
}

/// Certificates as a replica keeps them, and the Secret that they are in.
struct Kept {
    server: MemoryServer,
    certs: Arc<Certs>,
    _tasks: JoinSet<()>,
}

impl Kept {
    /// Not loaded yet.
    fn empty() -> Self {
        let server = MemoryServer::with_clock(testbed::memory::Clock::new(Utc::now()));
        let certs = certificates(&server, "a");
        let mut tasks = JoinSet::new();
        let kept = Arc::clone(&certs);
        tasks.spawn(async move { kept.keep().await });
        Self {
            server,
            certs,
            _tasks: tasks,
        }
    }

    async fn loaded() -> Self {
        let kept = Self::empty();
        kept.server.create(empty_secret());
        until("a certificate is loaded", PATIENCE, || {
            kept.certs.slot().is_loaded()
        })
        .await;
        kept
    }

    fn roots(&self) -> Arc<RootCertStore> {
        self.certs.roots().expect("a certificate is loaded")
    }

    /// Puts another bundle into the Secret, and waits until it is served.
    async fn swap(&self) {
        let before = self.roots();
        let new = issue(LIFETIMES, Utc::now());
        let values = [
            ("ca.crt", new.ca),
            ("ca.key", new.ca_key),
            ("tls.crt", new.cert),
            ("tls.key", new.key),
        ];
        self.server.update("secrets", NS, CERTIFICATES, |secret| {
            for (key, value) in values {
                secret["data"][key] = BASE64_STANDARD.encode(value).into();
            }
        });
        until("the new certificate is served", PATIENCE, || {
            !Arc::ptr_eq(&before, &self.roots())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_certificate_changes_without_a_restart_and_without_a_broken_connection() {
    let kept = Kept::empty();
    let listener = Listener::start(Some(&kept.certs), 64, PATIENCE).await;
    // Without a certificate handshakes fail, and the listener goes on.
    let nobody = Arc::new(RootCertStore::empty());
    let early = handshake(listener.connect().await, nobody, &["http/1.1"]).await;
    assert!(early.is_err());
    kept.server.create(empty_secret());
    until("a certificate is loaded", PATIENCE, || {
        kept.certs.slot().is_loaded()
    })
    .await;

    let old_roots = kept.roots();
    let mut old = listener
        .connect_tls(&kept.certs)
        .await
        .expect("it verifies");
    assert_boosted(post_review(&mut old).await).await;
    kept.swap().await;
    let stale = handshake(listener.connect().await, old_roots, &["http/1.1"]).await;
    assert!(stale.is_err(), "the old CA counts no more");
    let mut new = listener
        .connect_tls(&kept.certs)
        .await
        .expect("it verifies by the new CA");
    assert_boosted(post_review(&mut new).await).await;
    assert_boosted(post_review(&mut old).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http_2_is_not_to_be_had() {
    let kept = Kept::loaded().await;
    let listener = Listener::start(Some(&kept.certs), 64, PATIENCE).await;
    for (offered, agreed) in [
        (&["h2", "http/1.1"][..], Some(Some("http/1.1"))),
        (&["http/1.1"], Some(Some("http/1.1"))),
        (&[], Some(None)),
        (&["h2"], None),
    ] {
        let stream = handshake(listener.connect().await, kept.roots(), offered).await;
        let got = stream.as_ref().ok().map(|stream| {
            let protocol = stream.get_ref().1.alpn_protocol();
            protocol.map(|name| std::str::from_utf8(name).expect("a name"))
        });
        assert_eq!(got, agreed, "{offered:?}");
    }
}

/// Waits until the other side closes, and says how long that took.
async fn closed(mut stream: TcpStream) -> Duration {
    let began = Instant::now();
    let read = timeout(Duration::from_secs(600), stream.read(&mut [0; 64])).await;
    assert_eq!(read.expect("it is closed").ok(), Some(0));
    began.elapsed()
}

#[tokio::test(start_paused = true)]
async fn silent_clients_are_dropped() {
    let kept = Kept::loaded().await;
    // One connection at a time, so that a silent client keeps everybody else out while it lasts.
    let listener = Listener::start(Some(&kept.certs), 1, PATIENCE).await;
    let took = closed(listener.connect().await).await;
    assert!((5..7).contains(&took.as_secs()), "handshake: {took:?}");
    let mut next = listener
        .connect_tls(&kept.certs)
        .await
        .expect("it is let in");
    assert_boosted(post_review(&mut next).await).await;

    let plain = Listener::start(None, 1, PATIENCE).await;
    let took = closed(plain.connect().await).await;
    assert!(
        (10..12).contains(&took.as_secs()),
        "first request: {took:?}"
    );
    // Once something was asked: longer than the 90 s after which the API server itself closes an idle connection.
    let mut stream = plain.connect().await;
    let get = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    stream.write_all(get).await.expect("sent");
    let answer = read_head(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
    let took = closed_after_rest(stream).await;
    assert!((120..130).contains(&took.as_secs()), "idle: {took:?}");
}

/// Reads what is left of an answer, and waits until the other side closes.
async fn closed_after_rest(mut stream: TcpStream) -> Duration {
    let began = Instant::now();
    let mut rest = Vec::new();
    let rest = timeout(Duration::from_secs(600), stream.read_to_end(&mut rest));
    rest.await.expect("it is closed").expect("no error");
    began.elapsed()
}

/// A CA, and a certificate and a key that it has signed for a client, each in PEM form.
fn client_pki() -> (String, String, String) {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("a key");
    let ca = params.self_signed(&key).expect("a CA").pem();
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    let cert = params.signed_by(&key, &issuer).expect("a certificate");
    (ca, cert.pem(), key.serialize_pem())
}

/// What comes back for a review over a connection with this client certificate, if any.
async fn ask_as(
    address: SocketAddr,
    kept: &Kept,
    client: Option<(&str, &str)>,
) -> Option<StatusCode> {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring has what TLS needs")
        .with_root_certificates(kept.roots());
    let config = match client {
        None => config.with_no_client_auth(),
        Some((cert, key)) => {
            let cert = CertificateDer::from_pem_slice(cert.as_bytes()).expect("a certificate");
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).expect("a key");
            let config = config.with_client_auth_cert(vec![cert], key);
            config.expect("they belong together")
        }
    };
    let host = rustls::pki_types::ServerName::try_from(HOST).expect("a DNS name");
    let stream = TcpStream::connect(address).await.ok()?;
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = connector.connect(host, stream).await.ok()?;
    let mut sender = speak(stream).await;
    Some(post_review(&mut sender).await.ok()?.status())
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_client_ca_only_its_clients_are_answered() {
    let kept = Kept::loaded().await;
    let (ca, cert, key) = client_pki();
    let (_, stranger, stranger_key) = client_pki();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("ca.crt");
    std::fs::write(&file, ca).expect("written");
    let tls = server_config(kept.certs.slot(), Some(&file)).expect("TLS");
    let listener = Listener::start_with(Some(tls), 8, PATIENCE).await;
    let ask = |client| ask_as(listener.address, &kept, client);
    assert_eq!(ask(Some((&cert, &key))).await, Some(StatusCode::OK));
    assert_eq!(ask(Some((&stranger, &stranger_key))).await, None);
    assert_eq!(ask(None).await, None);

    std::fs::write(&file, "nothing").expect("written");
    let error = server_config(kept.certs.slot(), Some(&file)).expect_err("no certificate");
    assert_eq!(error.to_string(), "the file has no certificate");
    assert!(server_config(kept.certs.slot(), Some(&folder.path().join("gone"))).is_err());
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let listener = Listener::start(None, 1, PATIENCE).await;
    let mut stream = listener.connect().await;
    let head = format!("POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{");
    stream.write_all(head.as_bytes()).await.expect("sent");
    let began = Instant::now();
    let answer = read_head(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert_eq!(began.elapsed().as_secs(), 5);
}

/// Reads an answer's status line and headers, in small letters.
async fn read_head(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        let byte = timeout(PATIENCE, stream.read_u8()).await;
        answer.push(byte.expect("an answer in time").expect("an answer"));
    }
    String::from_utf8(answer).expect("text")
}

#[tokio::test(flavor = "multi_thread")]
async fn b43_long_bodies_are_not_read_to_their_end() {
    let listener = Listener::start(None, 64, PATIENCE).await;
    // One that says so is not read at all.
    let mut stream = listener.connect().await;
    let length = 8 * MIB;
    let head = format!("POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.expect("sent");
    let answer = read_head(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");

    // One that does not is read up to the bound. (The test sends no byte more: what is left unread at the end would
    // reset the connection, and the answer with it.)
    let mut stream = listener.connect().await;
    let head = format!("POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n");
    stream.write_all(head.as_bytes()).await.expect("sent");
    for _ in 0..7 {
        let chunk = [format!("{MIB:x}\r\n").as_bytes(), &vec![b' '; MIB], b"\r\n"].concat();
        stream.write_all(&chunk).await.expect("sent");
    }
    stream.write_all(b"100000\r\n ").await.expect("sent");
    let answer = read_head(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_end_connections_close_after_their_answers_and_answers_under_way_are_given() {
    let kept = Kept::loaded().await;
    let listener = Listener::start(Some(&kept.certs), 64, PATIENCE).await;
    let connect = || async { listener.connect_tls(&kept.certs).await.expect("TLS") };
    let (mut busy, mut idle, mut late) = (connect().await, connect().await, connect().await);
    let answer = post_review(&mut idle).await;
    let close = |answer: &hyper::Result<Response<Incoming>>| {
        let answer = answer.as_ref().expect("an answer");
        let value = answer.headers().get("connection");
        value.map(|value| value.to_str().expect("text").to_owned())
    };
    assert_eq!(close(&answer), None);
    assert_boosted(answer).await;

    // Going away: each answer is its connection's last, and new connections are still served.
    listener.closing.cancel();
    for mut sender in [idle, connect().await] {
        let answer = post_review(&mut sender).await;
        assert_eq!(close(&answer).as_deref(), Some("close"));
        assert_boosted(answer).await;
        until("the connection is closed", PATIENCE, || sender.is_closed()).await;
    }

    // Gone: what is under way is answered, what is idle closes, nobody is let in.
    let under_way = tokio::spawn(async move { get_slow(&mut busy).await });
    listener.until_slow(1).await;
    listener.stopped.cancel();
    until("idle connections are closed", PATIENCE, || late.is_closed()).await;
    assert!(post_review(&mut late).await.is_err());
    let address = listener.address;
    let refused = async {
        while TcpStream::connect(address).await.is_ok() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, refused)
        .await
        .expect("new connections are refused");
    assert!(
        !listener.served.is_finished(),
        "it waits for what is under way"
    );
    listener.slow.add_permits(1);
    let answer = under_way.await.expect("no panic").expect("an answer");
    assert_eq!(answer.status(), 200);
    let body = answer.into_body().collect().await.expect("a body");
    assert_eq!(body.to_bytes(), "slow");
    listener.has_stopped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drain_has_a_bound() {
    let listener = Listener::start(None, 64, Duration::from_millis(50)).await;
    let mut sender = speak(listener.connect().await).await;
    let _under_way = tokio::spawn(async move { get_slow(&mut sender).await });
    listener.until_slow(1).await;
    listener.stopped.cancel();
    listener.has_stopped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_connections_than_allowed_wait_for_their_turn() {
    let listener = Listener::start(None, 2, PATIENCE).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut sender = speak(listener.connect().await).await;
        held.push(tokio::spawn(async move { get_slow(&mut sender).await }));
    }
    listener.until_slow(2).await;
    let mut third = speak(listener.connect().await).await;
    let third = tokio::spawn(async move { post_review(&mut third).await });
    sleep(Duration::from_millis(100)).await;
    assert!(!third.is_finished(), "only two at once");
    listener.slow.add_permits(2);
    for answer in held {
        answer.await.expect("no panic").expect("an answer");
    }
    assert_boosted(third.await.expect("no panic")).await;
}
