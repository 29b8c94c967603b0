//! The two writes of a boost's end, and the read between them: with a deadline, and what a failure means.

use std::time::Duration;

use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::Value;
use tokio::time::timeout;

use crate::{
    api::Pod,
    domain::{
        failure::Failure,
        patch,
        revert::{Finish, Revert},
    },
    error::Chain,
};

/// How long a request may take. After it nobody knows whether it happened, which is why every write is safe twice.
const DEADLINE: Duration = Duration::from_secs(5);

/// Writes to pods.
#[derive(Clone)]
pub struct Writer {
    client: Client,
}

impl Writer {
    /// A writer on this client, which must not retry by itself: what failed is looked at again first.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// Reads the pod that `pod` was. Another pod of its name is none of ours.
    ///
    /// # Errors
    /// [`Failure::Gone`] where it is gone.
    pub async fn read(&self, pod: &Pod) -> Result<Pod, Failure> {
        let read = within_deadline(self.pods(pod).get(name(pod))).await?;
        if read.metadata.uid == pod.metadata.uid {
            Ok(read)
        } else {
            Err(Failure::Gone)
        }
    }

    /// Resizes back. The answer is the pod as it is now.
    ///
    /// # Errors
    /// As classified.
    pub async fn resize(&self, pod: &Pod, revert: &Revert) -> Result<Pod, Failure> {
        let body = Patch::Strategic(patch::resize(pod, revert));
        within_deadline(
            self.pods(pod)
                .patch_subresource("resize", name(pod), &params(), &body),
        )
        .await
    }

    /// Marks the record and drops the claim. (A resize silently drops metadata: it can't be one write.)
    ///
    /// # Errors
    /// As classified.
    pub async fn finish(&self, pod: &Pod, finish: &Finish) -> Result<Pod, Failure> {
        let body: Patch<Value> = Patch::Merge(patch::finish(pod, finish));
        within_deadline(self.pods(pod).patch(name(pod), &params(), &body)).await
    }

    fn pods(&self, pod: &Pod) -> Api<Pod> {
        Api::namespaced(
            self.client.clone(),
            pod.metadata.namespace.as_deref().unwrap_or_default(),
        )
    }
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

fn params() -> PatchParams {
    PatchParams {
        field_manager: Some("headstart".to_owned()),
        ..PatchParams::default()
    }
}

async fn within_deadline<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, Failure> {
    match timeout(DEADLINE, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) => {
            let seconds = status
                .details
                .as_ref()
                .map_or(0, |details| details.retry_after_seconds);
            let retry_after = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
            Err(Failure::from_status(
                status.code,
                &status.message,
                retry_after,
            ))
        }
        Ok(Err(error)) => Err(Failure::Transient(Chain(&error).to_string())),
        Err(_) => Err(Failure::Transient(format!("no answer within {DEADLINE:?}"))),
    }
}
