//! Requests to an API server as they are sent, and answers as they come: what a typed client would hide or refuse.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use http::{Method, Request};
use kube::{Client, client::Body};
use serde_json::Value;
use tokio::time::timeout;

/// Media type of a JSON Patch.
pub const JSON_PATCH: &str = "application/json-patch+json";
/// Media type of a merge patch.
pub const MERGE: &str = "application/merge-patch+json";
/// Media type of a strategic merge patch.
pub const STRATEGIC: &str = "application/strategic-merge-patch+json";
const JSON: &str = "application/json";

/// Path of a namespace's pods.
#[must_use]
pub fn pods(namespace: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/pods")
}

/// Asks a server. Whatever it answers is an [`Answer`]; an error is what is none, or none in time.
#[derive(Clone)]
pub struct Rest {
    client: Client,
    patience: Duration,
}

/// What the server said.
#[derive(Debug)]
pub struct Answer {
    /// The HTTP status.
    pub code: u16,
    /// Under which id the API server noted the request; empty where it did not.
    pub audit_id: String,
    /// An object, or a `Status`.
    pub body: Value,
}

impl Answer {
    /// The object.
    ///
    /// # Errors
    /// If it is a refusal.
    pub fn accepted(self) -> Result<Value> {
        let said = self.said();
        ensure!(self.is_accepted(), "answered with {}: {said}", self.code);
        Ok(self.body)
    }

    /// Whether it is no refusal.
    #[must_use]
    pub const fn is_accepted(&self) -> bool {
        self.code < 300
    }

    /// Why it is refused.
    #[must_use]
    pub fn said(&self) -> &str {
        self.body["message"].as_str().unwrap_or_default()
    }
}

impl Rest {
    /// Asks as this client; an answer may take so long.
    #[must_use]
    pub const fn new(client: Client, patience: Duration) -> Self {
        Self { client, patience }
    }

    /// GET.
    ///
    /// # Errors
    /// If no answer comes.
    pub async fn get(&self, path: &str) -> Result<Answer> {
        self.send(Method::GET, path, None).await
    }

    /// POST of JSON.
    ///
    /// # Errors
    /// If no answer comes.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Answer> {
        self.send(Method::POST, path, Some((JSON, body))).await
    }

    /// PUT of JSON.
    ///
    /// # Errors
    /// If no answer comes.
    pub async fn put(&self, path: &str, body: &Value) -> Result<Answer> {
        self.send(Method::PUT, path, Some((JSON, body))).await
    }

    /// PATCH of a media type.
    ///
    /// # Errors
    /// If no answer comes.
    pub async fn patch(&self, path: &str, kind: &str, body: &Value) -> Result<Answer> {
        self.send(Method::PATCH, path, Some((kind, body))).await
    }

    /// DELETE.
    ///
    /// # Errors
    /// If no answer comes.
    pub async fn delete(&self, path: &str) -> Result<Answer> {
        self.send(Method::DELETE, path, None).await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<(&str, &Value)>,
    ) -> Result<Answer> {
        let what = || format!("{method} {path}");
        let mut request = Request::builder().method(method.clone()).uri(path);
        let mut bytes = Vec::new();
        if let Some((kind, body)) = body {
            request = request.header("content-type", kind);
            bytes = serde_json::to_vec(body)?;
        }
        let exchange = async {
            let answer = self.client.send(request.body(Body::from(bytes))?).await?;
            let (head, body) = answer.into_parts();
            anyhow::Ok((head, body.collect_bytes().await?))
        };
        let exchanged = timeout(self.patience, exchange).await;
        let (head, body) = exchanged.with_context(what)?.with_context(what)?;
        let audit_id = head.headers.get("audit-id").and_then(|id| id.to_str().ok());
        let body = serde_json::from_slice(&body).with_context(|| {
            let text = String::from_utf8_lossy(&body);
            format!("{} is answered with {text}", what())
        });
        Ok(Answer {
            code: head.status.as_u16(),
            audit_id: audit_id.unwrap_or_default().to_owned(),
            body: body?,
        })
    }
}
