//! What happens between a resize of the operator's and its arrival in the store.
//!
//! It is done by a validating webhook: the API server asks it after it has compared the resize's `resourceVersion` with
//! the pod, and before it writes. Then the pod is another one than the resize was meant for.

use std::{
    convert::Infallible,
    net::Ipv4Addr,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, ensure};
use base64::{Engine, prelude::BASE64_STANDARD};
use headstart::server::{Stop, serve};
use http_body_util::{BodyExt, Full};
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    service::service_fn,
};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use serde_json::{Value, json};
use testbed::eventually;
use tokio::{net::TcpListener, time::sleep};
use tokio_util::sync::CancellationToken;

use super::bed::{Bed, MERGE, SOON, STRATEGIC, operator, pods};

const CONFIGURATIONS: &str =
    "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";

/// What happens.
pub enum Meanwhile {
    /// The pod gets an annotation.
    Annotated(Value),
    /// Somebody resizes it.
    Resized(Value),
    /// It is deleted, and one of the same name created.
    Remade(Value),
    /// Time passes, at every resize of every pod.
    Slow(Duration),
}

/// It happens once, to the pod `p` of one namespace; there must be one.
pub struct Interloper {
    bed: &'static Bed,
    place: String,
    shared: Arc<Shared>,
    running: CancellationToken,
}

struct Shared {
    bed: &'static Bed,
    place: String,
    meanwhile: Meanwhile,
    /// Reviews so far.
    asked: AtomicU32,
    /// Resizes of the operator's so far.
    met: AtomicU32,
    /// Whether it has happened.
    happened: AtomicBool,
}

impl Interloper {
    /// From now on the operator's first resize there meets it.
    pub async fn start(
        bed: &'static Bed,
        place: &str,
        meanwhile: Meanwhile,
    ) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let url = format!("https://{}/", listener.local_addr()?);
        let pki = bed.cluster.plane.folder().join("pki");
        let tls = Arc::new(tls(&pki)?);
        let interloper = Self {
            bed,
            place: place.to_owned(),
            shared: Arc::new(Shared {
                bed,
                place: place.to_owned(),
                meanwhile,
                asked: AtomicU32::default(),
                met: AtomicU32::default(),
                happened: AtomicBool::default(),
            }),
            running: CancellationToken::new(),
        };
        let shared = Arc::clone(&interloper.shared);
        let service = service_fn(move |request| {
            let shared = Arc::clone(&shared);
            async move { Ok::<_, Infallible>(shared.answer(request).await) }
        });
        let stop = Stop {
            closing: interloper.running.clone(),
            stopped: interloper.running.clone(),
            drain: Duration::from_secs(1),
        };
        tokio::spawn(serve(listener, Some(tls), service, 64, stop));
        let ca = std::fs::read(pki.join("ca.crt"))?;
        let configuration = configuration(place, &url, &BASE64_STANDARD.encode(ca));
        bed.post(CONFIGURATIONS, &configuration).await?.accepted()?;
        eventually("the interloper is asked", SOON, || async {
            let path = format!("{}/p/resize?dryRun=All", pods(place));
            bed.patch(&path, STRATEGIC, &json!({})).await?.accepted()?;
            let asked = interloper.shared.asked.load(Ordering::Relaxed);
            ensure!(asked > 0, "not yet");
            Ok(())
        })
        .await?;
        Ok(interloper)
    }

    /// The operator's resizes that it has met so far.
    pub fn met(&self) -> u32 {
        self.shared.met.load(Ordering::Relaxed)
    }

    /// Ends it; it must have happened.
    pub async fn end(self) -> anyhow::Result<()> {
        let path = format!("{CONFIGURATIONS}/{}", self.place);
        self.bed.delete(&path).await?.accepted()?;
        self.running.cancel();
        ensure!(
            self.shared.happened.load(Ordering::Relaxed),
            "the operator has not resized, or what was to happen meanwhile has failed"
        );
        Ok(())
    }
}

impl Shared {
    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let done = self.review(request).await;
        let answer = done.unwrap_or_else(|error| {
            eprintln!("the interloper in {}: {error:#}", self.place);
            json!({})
        });
        let mut response = Response::new(Full::new(Bytes::from(answer.to_string())));
        let json = http::HeaderValue::from_static("application/json");
        response.headers_mut().insert("content-type", json);
        response
    }

    async fn review(&self, request: Request<Incoming>) -> anyhow::Result<Value> {
        let body = request.into_body().collect().await?.to_bytes();
        let review: Value = serde_json::from_slice(&body)?;
        let request = &review["request"];
        let is_operator = request["userInfo"]["username"] == *operator();
        if is_operator {
            self.met.fetch_add(1, Ordering::Relaxed);
        }
        if let (true, Meanwhile::Slow(takes)) = (is_operator, &self.meanwhile) {
            sleep(*takes).await;
            self.happened.store(true, Ordering::Relaxed);
        } else if is_operator && !self.happened.swap(true, Ordering::Relaxed) {
            let done = self.happen().await;
            self.happened.store(done.is_ok(), Ordering::Relaxed);
            done?;
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        Ok(json!({
            "apiVersion": review["apiVersion"],
            "kind": review["kind"],
            "response": {"uid": request["uid"], "allowed": true},
        }))
    }

    async fn happen(&self) -> anyhow::Result<()> {
        let pod = format!("{}/p", pods(&self.place));
        match &self.meanwhile {
            Meanwhile::Annotated(body) => {
                self.bed.patch(&pod, MERGE, body).await?.accepted()?;
            }
            Meanwhile::Resized(body) => {
                let path = format!("{pod}/resize");
                self.bed.patch(&path, STRATEGIC, body).await?.accepted()?;
            }
            Meanwhile::Remade(again) => {
                self.bed.remove(&self.place, "p").await?;
                self.bed.create(&self.place, "", again).await?.accepted()?;
            }
            Meanwhile::Slow(takes) => sleep(*takes).await,
        }
        Ok(())
    }
}

fn configuration(place: &str, url: &str, ca: &str) -> Value {
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": place},
        "webhooks": [{
            "name": "interloper.cases.test",
            "admissionReviewVersions": ["v1"],
            "clientConfig": {"url": url, "caBundle": ca},
            "rules": [{
                "operations": ["UPDATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods/resize"],
            }],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": place}},
            "failurePolicy": "Fail",
            "timeoutSeconds": 30,
            "sideEffects": "None",
        }],
    })
}

/// With the API server's own certificate, which is for this address.
fn tls(pki: &Path) -> anyhow::Result<ServerConfig> {
    let chain =
        CertificateDer::pem_file_iter(pki.join("apiserver.crt"))?.collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_file(pki.join("apiserver.key"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .context("the API server's certificate")
}
