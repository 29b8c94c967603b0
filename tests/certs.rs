//! The webhook's certificates, in process and in virtual time: replicas that race for an empty Secret agree on what one of
//! them made, the API server is told the CA, and whatever somebody does to the Secret or to the webhook configuration is
//! brought in order again, without a restart and without touching what is not ours.

mod common;

use std::{sync::Arc, time::Duration};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use chrono::{TimeDelta, Utc};
use common::*;
use headstart::certs::{Bundle, Certs, server_config};
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject as _},
};
use serde_json::{Value, json};
use testbed::memory::{Clock, Fault, MemoryServer, Recorded};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

const WEBHOOKS: &str = "mutatingwebhookconfigurations";
/// How long anything may take to be brought in order.
const SOON: Duration = Duration::from_secs(5);

/// A server whose clock shows the real time: whoever verifies a certificate has no other.
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
    certs: Vec<Arc<Certs>>,
    _tasks: JoinSet<()>,
}

impl Replicas {
    fn start<const N: usize>(server: &MemoryServer, names: [&str; N]) -> Self {
        let certs: Vec<_> = names.map(|name| certificates(server, name)).into();
        let mut tasks = JoinSet::new();
        for kept in &certs {
            let kept = Arc::clone(kept);
            tasks.spawn(async move { kept.keep().await });
        }
        Self {
            certs,
            _tasks: tasks,
        }
    }

    fn all_serve(&self) -> bool {
        self.certs.iter().all(|certs| certs.slot().is_loaded())
    }

    /// The leaves that they serve to a client that trusts what the webhook configuration says, the first of it.
    async fn leaves(&self, server: &MemoryServer) -> Vec<Option<Vec<u8>>> {
        let mut leaves = Vec::new();
        for certs in &self.certs {
            leaves.push(leaf(certs, roots(&bundles(server)[0])).await);
        }
        leaves
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

fn roots(pem: &str) -> Arc<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for ca in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        roots.add(ca.expect("PEM")).expect("a CA");
    }
    Arc::new(roots)
}

/// The certificate that is served, if a client with these CAs accepts it.
async fn leaf(certs: &Certs, roots: Arc<RootCertStore>) -> Option<Vec<u8>> {
    let (client, server) = tokio::io::duplex(1 << 16);
    let acceptor = TlsAcceptor::from(server_config(certs.slot(), None).expect("TLS"));
    let accepted = acceptor.accept(server);
    let (client, _) = tokio::join!(handshake(client, roots, &["http/1.1"]), accepted);
    let client = client.ok()?;
    let (_, session) = client.get_ref();
    Some(session.peer_certificates()?.first()?.to_vec())
}

fn secret(server: &MemoryServer) -> Value {
    server
        .get("secrets", NS, CERTIFICATES)
        .expect("the Secret exists")
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

fn issue(at: chrono::DateTime<Utc>) -> Bundle {
    Bundle::issue(&[HOST.to_owned()], at).expect("it can be issued")
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
    let replicas = Replicas::start(&server, ["a"]);
    until_published(&server, SOON).await;
    server.clear_requests();
    (server, replicas)
}

#[tokio::test(start_paused = true)]
async fn of_three_replicas_one_issues_and_all_serve_it() {
    let server = server();
    server.create(empty_secret());
    server.create(webhook());
    let replicas = Replicas::start(&server, ["a", "b", "c"]);
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
    let leaves = replicas.leaves(&server).await;
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
    let before = replicas.leaves(&server).await;
    let other = issue(server.now());
    put(&server, &other);
    until_published(&server, SOON).await;
    assert_eq!(bundles(&server)[0], other.ca);
    let after = replicas.leaves(&server).await;
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
    let (one, two) = (issue(now), issue(now));
    let elsewhere = Bundle::issue(&["elsewhere.ns.svc".to_owned()], now).expect("issued");
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
        ("for another name", elsewhere),
        ("about to end", issue(now - TimeDelta::days(340))),
    ] {
        let (server, replicas) = in_order().await;
        let before = replicas.leaves(&server).await;
        put(&server, &garbage);
        let still = text(&secret(&server)["data"]["tls.crt"]);
        until("it is issued anew", SOON, || {
            text(&secret(&server)["data"]["tls.crt"]) != still
        })
        .await;
        until_published(&server, SOON).await;
        sleep(SOON).await;
        let after = replicas.leaves(&server).await;
        assert!(after[0].is_some() && after != before, "{what}");
        let puts = effective(&server);
        let puts = puts.iter().filter(|write| write.verb == "PUT").count();
        assert_eq!(puts, 1, "{what}: once");
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
async fn a_certificate_is_issued_anew_before_it_ends_though_nobody_touches_it() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let (server, replicas) = in_order().await;
    // A replica that comes late sees the same as one that was there all the year.
    let before = text(&secret(&server)["data"]["tls.crt"]);
    drop(replicas);
    sleep(DAY * (365 - 32)).await;
    let _replicas = Replicas::start(&server, ["a"]);
    sleep(DAY).await;
    assert_eq!(
        text(&secret(&server)["data"]["tls.crt"]),
        before,
        "32 to 31 days left"
    );
    until("it is issued anew", DAY * 2, || {
        text(&secret(&server)["data"]["tls.crt"]) != before
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_missing_secret_is_waited_for_and_not_made() {
    let server = server();
    server.create(webhook());
    let replicas = Replicas::start(&server, ["a"]);
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
    assert!(replicas.leaves(&server).await[0].is_some());
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
        let replicas = Replicas::start(&server, ["a"]);
        // A write that hangs is given up after 5 s.
        timeout(3 * SOON, until_published(&server, 3 * SOON))
            .await
            .unwrap_or_else(|_| panic!("{fault:?}"));
        sleep(SOON).await;
        assert!(replicas.leaves(&server).await[0].is_some(), "{fault:?}");
    }
}
