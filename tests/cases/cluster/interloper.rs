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
use chrono::Utc;
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
use testbed::{
    eventually,
    rest::{MERGE, STRATEGIC, pods},
};
use tokio::{net::TcpListener, time::sleep};
use tokio_util::sync::CancellationToken;

use super::bed::{Bed, SOON, operator};
use crate::{
    notation::{merge, rfc3339},
    world::{KEY, record_text},
};

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
    /// Another leader does this. Where it does no more than finish, it meets the operator's finish, else its resize.
    Written(Vec<Other>),
    /// A third party refuses it, with this code and text, every time.
    Refused(u16, String),
    /// Time passes, at every resize of every pod.
    Slow(Duration),
}

/// A write of another leader's.
pub enum Other {
    /// This resize.
    Resize(Value),
    /// The boost is finished, by this.
    Finish(String),
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
        let (resource, subpath) = if interloper.shared.is_about_resizes() {
            ("pods/resize", "/resize")
        } else {
            ("pods", "")
        };
        let ca = BASE64_STANDARD.encode(ca);
        let configuration = configuration(place, resource, &url, &ca);
        bed.api
            .post(CONFIGURATIONS, &configuration)
            .await?
            .accepted()?;
        eventually("the interloper is asked", SOON, || async {
            let path = format!("{}/p{subpath}?dryRun=All", pods(place));
            bed.api
                .patch(&path, STRATEGIC, &json!({}))
                .await?
                .accepted()?;
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

    /// Waits until it has met one.
    pub async fn has_met(&self) -> anyhow::Result<()> {
        eventually("a resize is under way", SOON, || async {
            ensure!(self.met() > 0, "none is");
            Ok(())
        })
        .await
    }

    /// Ends it; it must have happened.
    pub async fn end(self) -> anyhow::Result<()> {
        let path = format!("{CONFIGURATIONS}/{}", self.place);
        self.bed.api.delete(&path).await?.accepted()?;
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
        let is_resize = request["subResource"] == "resize";
        let is_operator =
            request["userInfo"]["username"] == *operator() && is_resize == self.is_about_resizes();
        if is_operator {
            self.met.fetch_add(1, Ordering::Relaxed);
        }
        if let (true, Meanwhile::Slow(takes)) = (is_operator, &self.meanwhile) {
            self.happened.store(true, Ordering::Relaxed);
            sleep(*takes).await;
        } else if let (true, Meanwhile::Refused(code, text)) = (is_operator, &self.meanwhile) {
            self.happened.store(true, Ordering::Relaxed);
            let status = json!({"code": code, "message": text});
            return Ok(json!({
                "apiVersion": review["apiVersion"],
                "kind": review["kind"],
                "response": {"uid": request["uid"], "allowed": false, "status": status},
            }));
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

    /// Whether it meets resizes; if not, it meets writes to the pod itself.
    fn is_about_resizes(&self) -> bool {
        !matches!(&self.meanwhile, Meanwhile::Written(writes) if matches!(writes[..], [Other::Finish(_)]))
    }

    async fn happen(&self) -> anyhow::Result<()> {
        let pod = format!("{}/p", pods(&self.place));
        match &self.meanwhile {
            Meanwhile::Annotated(body) => {
                self.bed.api.patch(&pod, MERGE, body).await?.accepted()?;
            }
            Meanwhile::Resized(body) => {
                let path = format!("{pod}/resize");
                self.bed
                    .api
                    .patch(&path, STRATEGIC, body)
                    .await?
                    .accepted()?;
            }
            Meanwhile::Remade(again) => {
                self.bed.remove(&self.place, "p").await?;
                self.bed.create(&self.place, "", again).await?.accepted()?;
            }
            Meanwhile::Written(writes) => {
                for write in writes {
                    self.write(&pod, write).await?;
                }
            }
            Meanwhile::Refused(..) | Meanwhile::Slow(_) => {}
        }
        Ok(())
    }

    /// Writes as another leader does.
    async fn write(&self, path: &str, write: &Other) -> anyhow::Result<()> {
        let done = match write {
            Other::Resize(body) => {
                let path = format!("{path}/resize");
                self.bed.api.patch(&path, STRATEGIC, body).await?
            }
            Other::Finish(by) => {
                let pod = self.bed.api.get(path).await?.accepted()?;
                let record = record_text(&pod).context("it has no record")?;
                let mut record: Value = serde_json::from_str(record)?;
                let now = rfc3339(Utc::now());
                let end = json!({"state": "Reverted", "endedTimestamp": now, "endedBy": by});
                merge(&mut record, &end);
                let marks =
                    json!({"labels": {KEY: null}, "annotations": {KEY: record.to_string()}});
                let body = json!({"metadata": marks});
                self.bed.api.patch(path, MERGE, &body).await?
            }
        };
        done.accepted().map(drop)
    }
}

fn configuration(place: &str, resource: &str, url: &str, ca: &str) -> Value {
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": place},
        "webhooks": [{
            "name": "w.example.com",
            "admissionReviewVersions": ["v1"],
            "clientConfig": {"url": url, "caBundle": ca},
            "rules": [{
                "operations": ["UPDATE"], "apiGroups": [""], "apiVersions": ["v1"],
                "resources": [resource],
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
