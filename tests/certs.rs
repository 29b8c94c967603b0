//! The webhook's certificates, in process and in virtual time: replicas that race for an empty Secret agree on what one of
//! them made, the API server is told the CA, and whatever somebody does to the Secret or to the webhook configuration is
//! brought in order again, without a restart and without touching what is not ours.
//!
//! Through every rotation [`Replicas::trusted_while`] holds: whoever has read the webhook configuration within the last
//! seconds can verify every replica at every instant.

mod common;

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    fs,
    os::unix::fs::symlink,
    path::Path,
    sync::Arc,
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use chrono::{DateTime, TimeDelta, Utc};
use common::*;
use headstart::{
    certs::{
        Bundle, Certs, Held, Lifetimes, Source,
        rotation::{PROPAGATION, State},
        server_config,
    },
    metrics::Metrics,
};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject as _},
    time_provider::TimeProvider,
};
use serde_json::{Value, json};
use testbed::memory::{Clock, Fault, MemoryServer, Recorded};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

const WEBHOOKS: &str = "mutatingwebhookconfigurations";
/// How long anything may take to be brought in order that need not wait for the API server.
const SOON: Duration = Duration::from_secs(5);
/// How long a change of the CA may take.
const SWAP: Duration = Duration::from_secs(20);
/// How often a test looks at what goes on.
const POLL: Duration = Duration::from_millis(50);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// Lifetimes of which a test sees many.
const SHORT: Lifetimes = Lifetimes {
    leaf: TimeDelta::seconds(90),
    authority: TimeDelta::seconds(180),
};

/// A server whose clock begins at the real time: readiness, and what makes old certificates here, have no other.
fn server() -> MemoryServer {
    MemoryServer::with_clock(Clock::new(Utc::now()))
}

/// A webhook configuration with two webhooks and fields of all sorts, and no CA.
fn webhook() -> Value {
    let webhook = |name: &str| {
        json!({
            "name": name, "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": "Ignore",
            "timeoutSeconds": 2, "matchPolicy": "Equivalent", "reinvocationPolicy": "Never",
            "clientConfig": {"service": {"name": "headstart", "namespace": NS, "path": "/mutate-v1-pod", "port": 443}},
            "namespaceSelector": {"matchExpressions": [
                {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system"]}]},
            "matchConditions": [{"name": "not-windows", "expression": "true"}],
            "rules": [{"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}],
        })
    };
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": CERTIFICATES, "labels": {"team": "platform"}},
        "webhooks": [webhook("pods.headstart"), webhook("other.headstart")],
    })
}

/// Some replicas that keep certificates; dropping them stops them.
struct Replicas {
    server: MemoryServer,
    lifetimes: Lifetimes,
    running: RefCell<Vec<Running>>,
}

struct Running {
    name: String,
    certs: Arc<Certs>,
    _task: JoinSet<()>,
}

impl Replicas {
    fn start(server: &MemoryServer, names: &[&str], lifetimes: Lifetimes) -> Self {
        let replicas = Self {
            server: server.clone(),
            lifetimes,
            running: RefCell::default(),
        };
        for name in names {
            replicas.add(name, certificates_for(server, name, lifetimes));
        }
        replicas
    }

    fn add(&self, name: &str, certs: Arc<Certs>) {
        let (mut task, kept) = (JoinSet::new(), Arc::clone(&certs));
        task.spawn(async move { kept.keep().await });
        self.running.borrow_mut().push(Running {
            name: name.to_owned(),
            certs,
            _task: task,
        });
    }

    /// Ends one, and starts it anew.
    fn restart(&self, index: usize) {
        let Running { name, .. } = self.running.borrow_mut().remove(index);
        self.add(&name, certificates_for(&self.server, &name, self.lifetimes));
    }

    fn certs(&self) -> Vec<Arc<Certs>> {
        let running = self.running.borrow();
        running.iter().map(|it| Arc::clone(&it.certs)).collect()
    }

    fn all_serve(&self) -> bool {
        self.certs().iter().all(|certs| certs.slot().is_loaded())
    }

    /// The leaves that they serve to a client that trusts what the webhook configuration says, the first of it.
    async fn leaves(&self) -> Vec<Option<Vec<u8>>> {
        let (trusted, mut leaves) = (bundles(&self.server)[0].clone(), Vec::new());
        for certs in self.certs() {
            leaves.push(leaf(&certs, &trusted, self.server.now()).await);
        }
        leaves
    }

    /// Runs `scenario`, and holds meanwhile that whoever trusts what has been published within the last seconds can
    /// verify each replica that has something to serve.
    async fn trusted_while<T>(&self, scenario: impl Future<Output = T>) -> T {
        let watch = async {
            let mut published = VecDeque::from([(Instant::now(), bundles(&self.server))]);
            let mut seen = (Instant::now() - SOON, Vec::new());
            let mut changes = self.server.changes();
            loop {
                let now = Instant::now();
                let current = bundles(&self.server);
                if published.back().is_none_or(|(_, last)| *last != current) {
                    published.push_back((now, current));
                    seen.1.clear();
                }
                // What was replaced longer ago is known to nobody.
                while published
                    .get(1)
                    .is_some_and(|(since, _)| *since + PROPAGATION < now)
                {
                    published.pop_front();
                }
                let served: Vec<_> = self.certs().iter().map(|it| it.roots()).collect();
                let served: Vec<_> = served
                    .iter()
                    .map(|roots| roots.as_ref().map_or(0, |roots| Arc::as_ptr(roots).addr()))
                    .collect();
                if served != seen.1 || seen.0 + SOON <= now {
                    self.verify(&published).await;
                    seen = (now, served);
                }
                // What is published counts from its instant: replicas count so too.
                let _ = timeout(POLL, changes.changed()).await;
            }
        };
        tokio::select! {
            done = scenario => done,
            () = watch => unreachable!("it never ends"),
        }
    }

    async fn verify(&self, published: &VecDeque<(Instant, Vec<String>)>) {
        for certs in self.certs().iter().filter(|it| it.slot().is_loaded()) {
            for (since, bundles) in published {
                let verified = leaf(certs, &bundles[0], self.server.now()).await;
                assert!(
                    verified.is_some(),
                    "what was published {:?} ago does not verify what is served: {} CAs; now it is {}, and held is {:?}",
                    since.elapsed(),
                    bundles[0].matches("BEGIN").count(),
                    self.server.now(),
                    held(&self.server).state()
                );
            }
        }
    }
}

/// The CA bundles of the webhook configuration, in PEM; empty where there is none.
fn bundles(server: &MemoryServer) -> Vec<String> {
    let webhook = server
        .get(WEBHOOKS, "", CERTIFICATES)
        .expect("the webhook configuration exists");
    let webhooks = webhook["webhooks"].as_array().expect("a list");
    let bundle = |webhook: &Value| text(&webhook["clientConfig"]["caBundle"]);
    webhooks.iter().map(bundle).collect()
}

/// A value of the Secret, or of a `caBundle`.
fn text(value: &Value) -> String {
    let bytes = BASE64_STANDARD.decode(value.as_str().unwrap_or_default());
    String::from_utf8_lossy(&bytes.expect("base64")).into_owned()
}

/// The time that a client goes by.
#[derive(Debug)]
struct At(DateTime<Utc>);

impl TimeProvider for At {
    fn current_time(&self) -> Option<UnixTime> {
        let seconds = u64::try_from(self.0.timestamp()).ok()?;
        Some(UnixTime::since_unix_epoch(Duration::from_secs(seconds)))
    }
}

/// The certificate that is served, if a client that trusts these CAs accepts it.
async fn leaf(certs: &Certs, trusted: &str, at: DateTime<Utc>) -> Option<Vec<u8>> {
    let mut roots = RootCertStore::empty();
    for ca in CertificateDer::pem_slice_iter(trusted.as_bytes()) {
        roots.add(ca.expect("PEM")).expect("a CA");
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_details(provider, Arc::new(At(at)))
        .with_safe_default_protocol_versions()
        .expect("ring has what TLS needs")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let (client, server) = tokio::io::duplex(1 << 16);
    let acceptor = TlsAcceptor::from(server_config(certs.slot(), None).expect("TLS"));
    let connector = TlsConnector::from(Arc::new(config));
    let host = ServerName::try_from(HOST).expect("a DNS name");
    let (client, _) = tokio::join!(connector.connect(host, client), acceptor.accept(server));
    let client = client.ok()?;
    let (_, session) = client.get_ref();
    Some(session.peer_certificates()?.first()?.to_vec())
}

fn secret(server: &MemoryServer) -> Value {
    server
        .get("secrets", NS, CERTIFICATES)
        .expect("the Secret exists")
}

/// What the Secret holds.
fn held(server: &MemoryServer) -> Held {
    let data = &secret(server)["data"];
    let bundle = Bundle {
        ca: text(&data["ca.crt"]),
        ca_key: text(&data["ca.key"]),
        cert: text(&data["tls.crt"]),
        key: text(&data["tls.key"]),
    };
    Held::read(bundle, &[HOST.to_owned()], server.now())
}

/// Whether nothing is left to do but to wait: a leaf of the newest CA, and all CAs published.
fn is_in_order(server: &MemoryServer) -> bool {
    let held = held(server);
    let State { has_key, leaf, .. } = held.state();
    let published = bundles(server);
    has_key
        && leaf.is_some_and(|leaf| leaf.issuer == 0)
        && published.iter().all(|ca| *ca == held.bundle.ca)
}

async fn until_in_order(server: &MemoryServer, deadline: Duration) {
    until("all is in order", deadline, || is_in_order(server)).await;
}

/// Forces another CA, as a person does.
fn drop_ca_key(server: &MemoryServer) {
    server.update("secrets", NS, CERTIFICATES, |secret| {
        let data = secret["data"].as_object_mut().expect("an object");
        data.remove("ca.key").expect("there is one");
    });
}

/// Puts these values into the Secret, as somebody else.
fn put(server: &MemoryServer, values: &Bundle) {
    server.update("secrets", NS, CERTIFICATES, |secret| {
        secret["data"] = json!({
            "ca.crt": BASE64_STANDARD.encode(&values.ca), "ca.key": BASE64_STANDARD.encode(&values.ca_key),
            "tls.crt": BASE64_STANDARD.encode(&values.cert), "tls.key": BASE64_STANDARD.encode(&values.key),
        });
    });
}

/// The successful writes.
fn effective(server: &MemoryServer) -> Vec<Recorded> {
    let mut writes = server.writes();
    writes.retain(|write| write.status == 200);
    writes
}

/// Waits until the webhook configuration has the Secret's CA everywhere.
async fn until_published(server: &MemoryServer, deadline: Duration) {
    until("the CA is published", deadline, || {
        let ca = text(&secret(server)["data"]["ca.crt"]);
        !ca.is_empty() && bundles(server).iter().all(|bundle| *bundle == ca)
    })
    .await;
}

/// A server with an empty Secret, a webhook configuration and one replica that has brought both in order.
async fn in_order() -> (MemoryServer, Replicas) {
    let server = server();
    server.create(empty_secret());
    server.create(webhook());
    let replicas = Replicas::start(&server, &["a"], LIFETIMES);
    until_published(&server, SOON).await;
    server.clear_requests();
    (server, replicas)
}

#[tokio::test(start_paused = true)]
async fn of_three_replicas_one_issues_and_all_serve_it() {
    let server = server();
    server.create(empty_secret());
    server.create(webhook());
    // Slow enough that nobody sees another's write before their own.
    server.set_latency(Duration::from_millis(300));
    let replicas = Replicas::start(&server, &["a", "b", "c"], LIFETIMES);
    until_published(&server, SOON).await;
    until("all serve", SOON, || replicas.all_serve()).await;
    sleep(SOON).await;

    let puts: Vec<_> = server
        .writes()
        .iter()
        .filter(|write| write.verb == "PUT")
        .map(|write| write.status)
        .collect();
    let won = puts.iter().filter(|status| **status == 200).count();
    assert_eq!(won, 1, "one wins: {puts:?}");
    assert!(puts.len() > 1, "they did race: {puts:?}");
    let leaves = replicas.leaves().await;
    assert!(leaves[0].is_some(), "the API server accepts it");
    assert!(leaves.iter().all(|leaf| *leaf == leaves[0]));

    // In order, nobody writes anything.
    server.clear_requests();
    sleep(Duration::from_secs(3600)).await;
    assert!(server.writes().is_empty(), "{:?}", server.writes());
}

#[tokio::test(start_paused = true)]
async fn only_the_ca_is_written_into_the_webhook_configuration() {
    let (server, _replicas) = in_order().await;
    let mut published = server.get(WEBHOOKS, "", CERTIFICATES).expect("it is there");
    for webhook in published["webhooks"].as_array_mut().expect("a list") {
        let config = webhook["clientConfig"].as_object_mut().expect("an object");
        config.remove("caBundle").expect("it is published");
    }
    assert_eq!(published["webhooks"], webhook()["webhooks"]);
    assert_eq!(published["metadata"]["labels"], json!({"team": "platform"}));
}

#[tokio::test(start_paused = true)]
async fn a_ca_that_is_wiped_or_replaced_comes_back() {
    for wrong in [Value::Null, "".into(), BASE64_STANDARD.encode("x").into()] {
        let (server, _replicas) = in_order().await;
        server.update(WEBHOOKS, "", CERTIFICATES, |webhook| {
            webhook["webhooks"][1]["clientConfig"]["caBundle"] = wrong;
        });
        until_published(&server, SOON).await;
        assert_eq!(effective(&server).len(), 1);
    }
    // Also where the whole configuration is applied anew.
    let (server, _replicas) = in_order().await;
    server.delete(WEBHOOKS, "", CERTIFICATES);
    sleep(Duration::from_secs(60)).await;
    server.create(webhook());
    until_published(&server, SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_field_that_somebody_changes_meanwhile_keeps_their_value() {
    let (server, _replicas) = in_order().await;
    server.fault(Fault::on("PATCH", "*").before(|server| {
        server.update(WEBHOOKS, "", CERTIFICATES, |webhook| {
            webhook["webhooks"][0]["timeoutSeconds"] = 1.into();
        });
    }));
    server.update(WEBHOOKS, "", CERTIFICATES, |webhook| {
        webhook["webhooks"][0]["clientConfig"]["caBundle"] = Value::Null;
    });
    until_published(&server, SOON).await;
    let statuses: Vec<_> = server.writes().iter().map(|write| write.status).collect();
    assert_eq!(statuses, [409, 200]);
    let now = server.get(WEBHOOKS, "", CERTIFICATES).expect("it is there");
    assert_eq!(now["webhooks"][0]["timeoutSeconds"], 1);
}

#[tokio::test(start_paused = true)]
async fn another_valid_bundle_in_the_secret_is_served_without_a_restart() {
    let (server, replicas) = in_order().await;
    let before = replicas.leaves().await;
    let other = issue(LIFETIMES, server.now());
    put(&server, &other);
    until_published(&server, SOON).await;
    assert_eq!(bundles(&server)[0], other.ca);
    let after = replicas.leaves().await;
    assert!(after[0].is_some() && after != before);
    let written = effective(&server);
    assert!(
        written.iter().all(|write| write.verb == "PATCH"),
        "the Secret is not written: {written:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_cannot_be_served_is_issued_anew() {
    let now = Utc::now();
    let (one, two) = (issue(LIFETIMES, now), issue(LIFETIMES, now));
    let elsewhere = Bundle::default().with_authority(LIFETIMES, now);
    let elsewhere = elsewhere.expect("it can be made");
    let elsewhere = elsewhere.with_leaf(&["elsewhere.ns.svc".to_owned()], LIFETIMES, now);
    for (what, garbage) in [
        (
            "no PEM",
            Bundle {
                cert: "x".to_owned(),
                ..one.clone()
            },
        ),
        (
            "no CA",
            Bundle {
                ca: String::new(),
                ..one.clone()
            },
        ),
        (
            "another's key",
            Bundle {
                key: two.key.clone(),
                ..one.clone()
            },
        ),
        (
            "another's CA",
            Bundle {
                ca: two.ca.clone(),
                ..one.clone()
            },
        ),
        ("for another name", elsewhere.expect("it can be made")),
        ("ended", issue(LIFETIMES, now - TimeDelta::days(91))),
        ("nothing", Bundle::default()),
    ] {
        let (server, replicas) = in_order().await;
        let before = replicas.leaves().await;
        put(&server, &garbage);
        until_in_order(&server, SWAP).await;
        sleep(SOON).await;
        let after = replicas.leaves().await;
        assert!(after[0].is_some() && after != before, "{what}");
        let puts = effective(&server);
        let puts = puts.iter().filter(|write| write.verb == "PUT").count();
        assert!(puts <= 2, "{what}: {puts} times");
    }
    // Also where a key is missing, and where a value is no text.
    for broken in [
        json!({"tls.crt": "AAAA"}),
        json!({}),
        json!({"ca.crt": "/w==", "ca.key": "/w==", "tls.crt": "/w==", "tls.key": "/w=="}),
    ] {
        let (server, _replicas) = in_order().await;
        server.update("secrets", NS, CERTIFICATES, |secret| {
            secret["data"] = broken;
        });
        until("it is issued anew", SOON, || {
            text(&secret(&server)["data"]["ca.crt"]).starts_with("-----BEGIN")
        })
        .await;
        until_published(&server, SOON).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_renewed_at_two_thirds_though_nobody_touches_it() {
    let (server, replicas) = in_order().await;
    let before = held(&server).bundle;
    // A replica that comes late sees the same as one that was there all the time.
    drop(replicas);
    let minute = Duration::from_secs(60);
    sleep(DAY * 59 + minute * (24 * 60 - 2)).await;
    let _replicas = Replicas::start(&server, &["a"], LIFETIMES);
    sleep(minute).await;
    assert!(held(&server).bundle == before, "a minute is left");
    sleep(2 * minute).await;
    let after = held(&server).bundle;
    assert!(after.cert != before.cert && after.key != before.key);
    assert!(after.ca == before.ca && after.ca_key == before.ca_key);
    assert_eq!(effective(&server).len(), 1, "no CA needs to be published");
}

#[tokio::test(start_paused = true)]
async fn a_missing_secret_is_waited_for_and_not_made() {
    let server = server();
    server.create(webhook());
    let replicas = Replicas::start(&server, &["a"], LIFETIMES);
    sleep(Duration::from_secs(600)).await;
    assert!(server.writes().is_empty(), "{:?}", server.writes());
    assert!(!replicas.all_serve());
    server.create(empty_secret());
    until_published(&server, SOON).await;
    assert!(replicas.all_serve());

    // What is loaded stays in service when the Secret goes.
    server.delete("secrets", NS, CERTIFICATES);
    server.clear_requests();
    sleep(Duration::from_secs(600)).await;
    assert!(replicas.leaves().await[0].is_some());
    assert!(server.writes().is_empty(), "{:?}", server.writes());
}

#[tokio::test(start_paused = true)]
async fn writes_that_fail_are_tried_again() {
    for fault in [
        Fault::on("PUT", "/secrets/*").reply(500, "InternalError", "etcd is away"),
        Fault::on("PUT", "/secrets/*").reset(),
        Fault::on("PUT", "/secrets/*").lost_answer(),
        Fault::on("PUT", "/secrets/*").hang(),
        Fault::on("PATCH", "*").reply(503, "ServiceUnavailable", "away"),
        Fault::on("PATCH", "*").lost_answer(),
        Fault::on("PATCH", "*").hang(),
    ] {
        let server = server();
        server.create(empty_secret());
        server.create(webhook());
        server.fault(fault.clone());
        let replicas = Replicas::start(&server, &["a"], LIFETIMES);
        // A write that hangs is given up after 5 s.
        timeout(3 * SOON, until_published(&server, 3 * SOON))
            .await
            .unwrap_or_else(|_| panic!("{fault:?}"));
        sleep(SOON).await;
        assert!(replicas.leaves().await[0].is_some(), "{fault:?}");
    }
}

// === rotation ===

/// Makes both objects, starts replicas, and waits for order.
async fn started(names: &[&str], lifetimes: Lifetimes) -> (MemoryServer, Replicas) {
    let server = server();
    server.create(empty_secret());
    server.create(webhook());
    let replicas = Replicas::start(&server, names, lifetimes);
    until_in_order(&server, SOON).await;
    until("all serve", SOON, || replicas.all_serve()).await;
    // What is published first is published without order: until now nobody could call.
    sleep(PROPAGATION).await;
    server.clear_requests();
    (server, replicas)
}

/// CAs in the Secret, which of them the leaf is of, CAs in the webhook configuration.
type Phase = (usize, Option<usize>, usize);

fn phase(server: &MemoryServer) -> Phase {
    let state = held(server).state();
    let published = bundles(server)[0].matches("BEGIN").count();
    let issuer = state.leaf.map(|leaf| leaf.issuer);
    (state.authorities.len(), issuer, published)
}

/// The phases that follow within this time, and when each began.
async fn phases(server: &MemoryServer, time: Duration) -> Vec<(Duration, Phase)> {
    let begin = Instant::now();
    let mut phases = vec![(Duration::ZERO, phase(server))];
    while begin.elapsed() < time {
        sleep(POLL).await;
        let now = phase(server);
        if phases.last().is_none_or(|(_, last)| *last != now) {
            phases.push((begin.elapsed(), now));
        }
    }
    phases
}

#[tokio::test(start_paused = true)]
async fn another_ca_comes_in_order() {
    // A CA that is not renewed by itself meanwhile.
    let lifetimes = Lifetimes {
        authority: TimeDelta::hours(1),
        ..SHORT
    };
    let (server, replicas) = started(&["a", "b", "c"], lifetimes).await;
    // Slow enough that each phase is seen.
    server.set_latency(5 * POLL);
    drop_ca_key(&server);
    let scenario = phases(&server, Duration::from_secs(120));
    let phases = replicas.trusted_while(scenario).await;
    let (times, phases): (Vec<_>, Vec<_>) = phases.into_iter().unzip();
    assert_eq!(
        phases,
        [
            (1, Some(0), 1),
            (2, Some(1), 1),
            (2, Some(1), 2),
            (2, Some(0), 2),
            (1, Some(0), 2),
            (1, Some(0), 1),
        ]
    );
    assert!(times[2] < Duration::from_secs(1), "{times:?}");
    assert!(times[3] >= times[2] + PROPAGATION, "{times:?}");
    assert!(times[3] < SWAP, "{times:?}");
    let lives = times[4].checked_sub(times[1]).expect("in order");
    // Dates have whole seconds.
    assert!(lives >= Duration::from_secs(89), "{times:?}");
}

#[tokio::test(start_paused = true)]
async fn an_old_ca_that_somebody_takes_out_is_trusted_no_more() {
    let (server, replicas) = started(&["a", "b", "c"], LIFETIMES).await;
    let old = held(&server).bundle.ca;
    let scenario = async {
        drop_ca_key(&server);
        sleep(SWAP).await;
        let both = held(&server).bundle;
        let new = both.ca.strip_suffix(&old).expect("the old CA is the last");
        let ca = new.to_owned();
        put(&server, &Bundle { ca, ..both });
        sleep(SOON).await;
    };
    replicas.trusted_while(scenario).await;
    assert_eq!(phase(&server), (1, Some(0), 1));
    assert!(is_in_order(&server));
}

#[tokio::test(start_paused = true)]
async fn many_rotations_follow_each_other() {
    let (server, replicas) = started(&["a", "b", "c"], SHORT).await;
    let (mut cas, mut leaves) = (Vec::new(), Vec::new());
    let scenario = async {
        for _ in 0..1200 {
            sleep(Duration::from_secs(1)).await;
            let Bundle { ca_key, cert, .. } = held(&server).bundle;
            cas.push(ca_key);
            leaves.push(cert);
            let count = bundles(&server)[0].matches("BEGIN").count();
            assert!(count <= 2, "{count} CAs");
        }
    };
    replicas.trusted_while(scenario).await;
    cas.dedup();
    leaves.dedup();
    // Each CA is renewed after 120 s, and each leaf after 60 s.
    assert!((9..=11).contains(&cas.len()), "{} CAs", cas.len());
    assert!((18..=24).contains(&leaves.len()), "{} leaves", leaves.len());
    let conflicts = server.writes().iter().filter(|it| it.status == 409).count();
    let writes = effective(&server).len();
    assert!(
        conflicts * 10 < writes,
        "{conflicts} conflicts in {writes} writes"
    );
}

#[tokio::test(start_paused = true)]
async fn rotation_bears_restarts_conflicts_slow_replicas_and_forced_swaps() {
    for seed in 0..5 {
        println!("seed {seed}");
        fastrand::seed(seed);
        let mut random = fastrand::Rng::with_seed(seed);
        let (server, replicas) = started(&["a", "b", "c"], SHORT).await;
        let scenario = async {
            for _ in 0..60 {
                sleep(Duration::from_millis(random.u64(1..15_000))).await;
                match random.u8(0..7) {
                    0..=2 => replicas.restart(random.usize(0..3)),
                    3 if held(&server).state().has_key => drop_ca_key(&server),
                    4 => {
                        let touch = Fault::on("PUT", "/secrets/*").before(|server| {
                            server.update("secrets", NS, CERTIFICATES, |secret| {
                                secret["metadata"]["labels"]["touched"] = "x".into();
                            });
                        });
                        server.fault(touch);
                    }
                    5 => {
                        let slow = Duration::from_millis(random.u64(0..4000));
                        server.fault(Fault::on("*", "").times(3).delay(slow));
                    }
                    _ => {
                        let lost = Fault::on("*", "/*").when(Recorded::is_write);
                        server.fault(lost.lost_answer());
                    }
                }
            }
            server.clear_faults();
            sleep(SWAP).await;
            until_in_order(&server, Duration::from_secs(60)).await;
        };
        replicas.trusted_while(scenario).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_hears_nothing_is_trusted_until_its_leaf_ends() {
    let (server, replicas) = started(&["a", "b"], SHORT).await;
    let deaf = Fault::on("WATCH", "").who("b").always().hang();
    let deaf = server.fault(deaf);
    server.close_watches();
    let begin = held(&server).state().leaf.expect("it is served").dates;
    drop_ca_key(&server);
    let before = replicas.leaves().await;
    let time = (begin.ends - server.now() - TimeDelta::seconds(1)).to_std();
    replicas
        .trusted_while(sleep(time.expect("it is valid")))
        .await;
    let after = replicas.leaves().await;
    assert_ne!(after[0], before[0]);
    assert_eq!(after[1], before[1]);
    server.lift(deaf);
    replicas.restart(1);
    until("all serve", SOON, || replicas.all_serve()).await;
    let leaves = replicas.leaves().await;
    assert!(leaves[0].is_some());
    assert_eq!(leaves[0], leaves[1]);
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_lags_behind_publishes_no_cas_of_before() {
    let (server, replicas) = started(&["a", "b"], LIFETIMES).await;
    server.fault(Fault::on("WATCH", "/secrets").who("b").always().hang());
    server.close_watches();
    sleep(SOON).await;
    drop_ca_key(&server);
    replicas.trusted_while(sleep(SWAP)).await;
    assert!(is_in_order(&server));
    let patches = effective(&server);
    let patches = patches.iter().filter(|write| write.verb == "PATCH").count();
    assert_eq!(patches, 1);
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_is_emptied_comes_back_in_order() {
    let (server, replicas) = started(&["a", "b", "c"], LIFETIMES).await;
    let before = held(&server).bundle;
    let scenario = async {
        server.update("secrets", NS, CERTIFICATES, |secret| {
            secret["data"] = Value::Null;
        });
        sleep(SWAP).await;
    };
    replicas.trusted_while(scenario).await;
    assert!(is_in_order(&server));
    let after = held(&server).bundle;
    assert!(after.ca.ends_with(&before.ca) && after.ca != before.ca);
    assert!(after.cert != before.cert);
}

#[tokio::test(start_paused = true)]
async fn a_new_ca_waits_for_the_webhook_configuration_as_long_as_the_leaf_lives() {
    let (server, replicas) = started(&["a"], SHORT).await;
    server.delete(WEBHOOKS, "", CERTIFICATES);
    drop_ca_key(&server);
    sleep(SWAP).await;
    let leaf = held(&server).state().leaf;
    assert_eq!(leaf.map(|leaf| leaf.issuer), Some(1));
    server.create(webhook());
    until_in_order(&server, SWAP).await;

    // Where it stays away, a leaf is issued all the same.
    server.delete(WEBHOOKS, "", CERTIFICATES);
    let mut ended = 0;
    for _ in 0..300 {
        sleep(Duration::from_secs(1)).await;
        let leaf = held(&server).state().leaf;
        ended = if leaf.is_some() { 0 } else { ended + 1 };
        assert!(ended < 5, "it is issued when the last one has ended");
    }
    server.create(webhook());
    until_in_order(&server, SWAP).await;
    assert!(replicas.leaves().await[0].is_some());
}

#[tokio::test(start_paused = true)]
async fn what_has_ended_while_nobody_was_there_heals() {
    for (what, away, cas) in [
        ("the leaf", Duration::from_secs(100), 1),
        ("the CA too", Duration::from_secs(200), 1),
        ("all for years", DAY * 1000, 1),
    ] {
        let lifetimes = Lifetimes {
            authority: TimeDelta::seconds(190),
            ..SHORT
        };
        let (server, replicas) = started(&["a"], lifetimes).await;
        drop(replicas);
        sleep(away).await;
        let replicas = Replicas::start(&server, &["a", "b"], LIFETIMES);
        until_in_order(&server, SOON).await;
        until("all serve", SOON, || replicas.all_serve()).await;
        replicas.trusted_while(sleep(SWAP * 5)).await;
        assert!(is_in_order(&server), "{what}");
        let count = held(&server).state().authorities.len();
        assert_eq!(count, cas, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn other_names_need_another_leaf_and_no_other_ca() {
    let (server, replicas) = started(&["a"], LIFETIMES).await;
    let before = held(&server).bundle;
    let more = ["10.0.0.1", HOST, "headstart"].map(str::to_owned).to_vec();
    let params = headstart::certs::Params {
        namespace: NS.to_owned(),
        secret: CERTIFICATES.to_owned(),
        webhook: CERTIFICATES.to_owned(),
        lifetimes: LIFETIMES,
    };
    let source = Source::Secret(server.client("b"), params);
    let wider = Certs::new(source, more.clone(), clock(&server), Arc::default());
    let scenario = async {
        replicas.add("b", Arc::new(wider));
        sleep(SWAP).await;
    };
    replicas.trusted_while(scenario).await;
    let after = held(&server).bundle;
    assert!(after.ca == before.ca && after.cert != before.cert);
    let held = Held::read(after, &more, server.now());
    assert!(held.leaf.is_ok(), "{:?}", held.leaf);
    let writes = effective(&server);
    assert_eq!(writes.len(), 1, "who needs fewer names is content");
}

/// A CA and a leaf as the version before this made them: from the day before, for 10 years and for a year.
fn old_form(made: DateTime<Utc>) -> Bundle {
    use chrono::Datelike as _;
    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

    let day = |at: DateTime<Utc>| {
        let part = |number: u32| u8::try_from(number).expect("it is small");
        rcgen::date_time_ymd(at.year(), part(at.month()), part(at.day()))
    };
    let params = |name: &str, names: &[&str], days| {
        let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.not_before = day(made - TimeDelta::days(1));
        params.not_after = day(made + TimeDelta::days(days));
        params
    };
    let (ca_key, key) = (KeyPair::generate(), KeyPair::generate());
    let (ca_key, key) = (ca_key.expect("a key"), key.expect("a key"));
    let mut ca = params("headstart-ca", &[], 3650);
    ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    let leaf = params("headstart", &[HOST], 365);
    let issuer = Issuer::from_params(&ca, &ca_key);
    Bundle {
        ca: ca.self_signed(&ca_key).expect("it can be made").pem(),
        cert: leaf.signed_by(&key, &issuer).expect("it can be made").pem(),
        ca_key: ca_key.serialize_pem(),
        key: key.serialize_pem(),
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_version_before_made_is_taken_over() {
    for (days, renews) in [(0, false), (50, false), (70, true), (360, true)] {
        let server = server();
        let old = old_form(server.now() - TimeDelta::days(days));
        server.create(empty_secret());
        server.create(webhook());
        put(&server, &old);
        server.update(WEBHOOKS, "", CERTIFICATES, |webhook| {
            for webhook in webhook["webhooks"].as_array_mut().expect("a list") {
                webhook["clientConfig"]["caBundle"] = BASE64_STANDARD.encode(&old.ca).into();
            }
        });
        let replicas = Replicas::start(&server, &["a", "b"], LIFETIMES);
        replicas.trusted_while(sleep(SWAP)).await;
        let new = held(&server).bundle;
        assert!(new.ca == old.ca && new.ca_key == old.ca_key, "{days} days");
        assert_eq!(new.cert != old.cert, renews, "{days} days");
        assert_eq!(server.writes().is_empty(), !renews, "{days} days");

        // Its CA can be changed like any other.
        drop_ca_key(&server);
        replicas.trusted_while(sleep(SWAP)).await;
        assert_eq!(phase(&server), (2, Some(0), 2), "{days} days");
    }
}

#[tokio::test(start_paused = true)]
async fn whatever_the_secret_holds_ends_in_order() {
    let now = Utc::now();
    let short = Lifetimes {
        leaf: TimeDelta::seconds(30),
        authority: TimeDelta::seconds(60),
    };
    let bundles = [
        issue(LIFETIMES, now),
        issue(LIFETIMES, now),
        issue(LIFETIMES, now - TimeDelta::days(80)),
        issue(LIFETIMES, now - TimeDelta::days(3000)),
        issue(LIFETIMES, now - TimeDelta::days(4000)),
        issue(short, now),
        Bundle::default(),
        Bundle {
            ca: "x".to_owned(),
            ca_key: "x".to_owned(),
            cert: "x".to_owned(),
            key: "x".to_owned(),
        },
    ];
    for seed in 0..40 {
        println!("seed {seed}");
        fastrand::seed(seed);
        let mut random = fastrand::Rng::with_seed(seed);
        let mut any = || &bundles[random.usize(..bundles.len())];
        let (first, leaf) = (any(), any());
        let mixed = Bundle {
            ca: [&first.ca, &any().ca, &any().ca]
                .map(String::as_str)
                .concat(),
            ca_key: any().ca_key.clone(),
            cert: leaf.cert.clone(),
            key: leaf.key.clone(),
        };
        let (published, has_key) = (any().ca.clone(), random.bool());
        let server = MemoryServer::with_clock(Clock::new(now));
        server.create(empty_secret());
        put(&server, &mixed);
        if has_key {
            server.update("secrets", NS, CERTIFICATES, |secret| {
                secret["data"]["ca.key"] = BASE64_STANDARD.encode(&first.ca_key).into();
            });
        }
        server.create(webhook());
        server.update(WEBHOOKS, "", CERTIFICATES, |webhook| {
            webhook["webhooks"][0]["clientConfig"]["caBundle"] =
                BASE64_STANDARD.encode(&published).into();
        });
        let replicas = Replicas::start(&server, &["a"], LIFETIMES);
        until_in_order(&server, 2 * SWAP).await;
        replicas.trusted_while(sleep(4 * SWAP)).await;
        assert!(is_in_order(&server));
        // A new CA, its leaf, and each of three CAs dropped, all but the leaf with a publication.
        let writes = effective(&server).len();
        assert!(writes <= 10, "{writes} writes");
    }
}

// === files ===

/// Files in a folder, as a kubelet mounts a Secret: swapped at once, by a symlink.
struct Mounted {
    folder: tempfile::TempDir,
    swaps: Cell<u32>,
}

impl Mounted {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for file in ["ca.crt", "tls.crt", "tls.key"] {
            let target = Path::new("..data").join(file);
            symlink(target, folder.path().join(file)).expect("a link");
        }
        let swaps = Cell::new(0);
        Self { folder, swaps }
    }

    fn put(&self, bundle: &Bundle) {
        self.swaps.set(self.swaps.get() + 1);
        let folder = self.folder.path();
        let version = format!("..{}", self.swaps.get());
        fs::create_dir(folder.join(&version)).expect("a folder");
        for (file, text) in [
            ("ca.crt", &bundle.ca),
            ("tls.crt", &bundle.cert),
            ("tls.key", &bundle.key),
        ] {
            fs::write(folder.join(&version).join(file), text).expect("a file");
        }
        symlink(&version, folder.join("..new")).expect("a link");
        fs::rename(folder.join("..new"), folder.join("..data")).expect("it can be swapped");
    }

    fn serve(&self, metrics: &Arc<Metrics>) -> (Arc<Certs>, JoinSet<()>) {
        let (source, metrics) = (
            Source::Directory(self.folder.path().to_owned()),
            Arc::clone(metrics),
        );
        let clock = headstart::clock::Clock::system();
        let certs = Certs::new(source, vec![HOST.to_owned()], clock, metrics);
        let (certs, mut task) = (Arc::new(certs), JoinSet::new());
        let kept = Arc::clone(&certs);
        task.spawn(async move { kept.keep().await });
        (certs, task)
    }
}

/// Whether a client that trusts this CA is served this leaf.
async fn serves(certs: &Certs, bundle: &Bundle) -> bool {
    let expected = CertificateDer::from_pem_slice(bundle.cert.as_bytes()).expect("PEM");
    let served = leaf(certs, &bundle.ca, Utc::now()).await;
    served.as_deref() == Some(&*expected)
}

#[tokio::test(start_paused = true)]
async fn files_are_served_when_they_are_a_whole_set() {
    /// Longer than files are left alone.
    const LOOK: Duration = Duration::from_secs(11);
    let (mounted, metrics) = (Mounted::new(), Arc::default());
    let (certs, _task) = mounted.serve(&metrics);
    sleep(LOOK).await;
    assert!(!certs.slot().is_loaded(), "there are none yet");

    let (one, two) = (issue(LIFETIMES, Utc::now()), issue(LIFETIMES, Utc::now()));
    mounted.put(&one);
    sleep(LOOK).await;
    assert!(serves(&certs, &one).await);
    let ends = (Utc::now() + TimeDelta::days(89)).timestamp();
    let shown = metrics.text();
    let line = shown
        .lines()
        .find_map(|line| line.strip_prefix("headstart_certificate_not_after_seconds "));
    let shown: f64 = line.expect("it is shown").parse().expect("a number");
    assert!(shown > f64::from(i32::try_from(ends).expect("before 2038")));

    for (what, broken) in [
        (
            "half of a swap",
            Bundle {
                cert: two.cert.clone(),
                ..one.clone()
            },
        ),
        (
            "the other half",
            Bundle {
                key: two.key.clone(),
                ..one.clone()
            },
        ),
        (
            "another CA",
            Bundle {
                ca: two.ca.clone(),
                ..one.clone()
            },
        ),
        (
            "garbage",
            Bundle {
                cert: "x".to_owned(),
                ..two.clone()
            },
        ),
        ("nothing", Bundle::default()),
        ("ended", issue(LIFETIMES, Utc::now() - TimeDelta::days(100))),
    ] {
        mounted.put(&broken);
        sleep(LOOK).await;
        assert!(serves(&certs, &one).await, "{what}");
    }
    fs::remove_file(mounted.folder.path().join("..data")).expect("it is there");
    sleep(LOOK).await;
    assert!(serves(&certs, &one).await, "the files are gone");

    mounted.put(&two);
    sleep(LOOK).await;
    assert!(serves(&certs, &two).await);
    assert!(!serves(&certs, &one).await);
    let roots = certs.roots().expect("they are loaded");
    assert_eq!(roots.len(), 1);
}

/// A leaf, the CA between it and the root, and the root as `ca.crt`: as a CA of a company issues.
fn chain() -> Bundle {
    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

    let params = |name: &str, names: Vec<String>, is_ca: bool| {
        let mut params = CertificateParams::new(names).expect("names");
        params.distinguished_name.push(DnType::CommonName, name);
        if is_ca {
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        }
        params
    };
    let [root_key, between_key, key] = std::array::from_fn(|_| KeyPair::generate().expect("a key"));
    let root = params("root", Vec::new(), true);
    let between = params("between", Vec::new(), true);
    let leaf = params("leaf", vec![HOST.to_owned()], false);
    let issuer = Issuer::from_params(&root, &root_key);
    let between_cert = between.signed_by(&between_key, &issuer);
    let issuer = Issuer::from_params(&between, &between_key);
    let leaf = leaf.signed_by(&key, &issuer).expect("it can be made");
    Bundle {
        ca: root.self_signed(&root_key).expect("it can be made").pem(),
        cert: leaf.pem() + &between_cert.expect("it can be made").pem(),
        key: key.serialize_pem(),
        ca_key: String::new(),
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_between_a_leaf_and_its_ca_is_served_with_it() {
    let mounted = Mounted::new();
    let chain = chain();
    mounted.put(&chain);
    let (certs, _task) = mounted.serve(&Arc::default());
    until("it is served", SOON, || certs.slot().is_loaded()).await;
    assert!(serves(&certs, &chain).await);
}
