//! The API server's audit log, as far as it is about pods.

use std::{
    collections::HashMap,
    fmt,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use anyhow::Context;
use chrono::{DateTime, Utc};
use serde_json::Value;
use testbed::{ControlPlane, eventually};

use super::bed::{SOON, operator};

/// The log, read as it grows.
pub struct AuditLog {
    path: PathBuf,
    read: Mutex<Noted>,
}

/// What has been read of it.
#[derive(Default)]
struct Noted {
    bytes: u64,
    /// By namespace.
    events: HashMap<String, Vec<Value>>,
}

/// What the API server has noted of the creation of a pod.
#[derive(Debug)]
pub struct Review {
    /// Whether our webhook was asked.
    pub called: bool,
    /// The operations that it answered with.
    pub patch: Vec<Value>,
    /// What it noted: why it did not boost.
    pub skipped: Option<String>,
    /// What it noted: the boost that matches.
    pub boost: Option<String>,
}

/// A write of the operator's to a pod.
pub struct Write {
    /// When the API server got it.
    pub received: DateTime<Utc>,
    /// Whether it was a resize.
    pub is_resize: bool,
    /// Its body.
    pub body: Value,
    /// How it was answered.
    pub code: u64,
    /// What the answer said, if it was a refusal.
    pub message: String,
}

impl fmt::Debug for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.is_resize { "resize" } else { "patch" };
        let (received, code, message) = (self.received, self.code, &self.message);
        let body = &self.body;
        write!(
            f,
            "{received} {what} answered with {code} {message}: {body}"
        )
    }
}

impl AuditLog {
    pub fn of(plane: &ControlPlane) -> Self {
        Self {
            path: plane.folder().join("audit.jsonl"),
            read: Mutex::default(),
        }
    }

    /// What was noted under an id: how our webhook was asked about a new pod.
    pub async fn review(&self, namespace: &str, id: &str) -> anyhow::Result<Review> {
        let find = || async {
            let mut found = self.events(namespace, |event| event["auditID"] == id)?;
            found.pop().context("nothing is noted of it")
        };
        let event = eventually("the creation is in the audit log", SOON, find).await?;
        let mut review = Review {
            called: false,
            patch: Vec::new(),
            skipped: None,
            boost: None,
        };
        let notes = event["annotations"].as_object().into_iter().flatten();
        for (key, value) in notes {
            let text = value.as_str().unwrap_or_default();
            let (group, name) = key.split_once('/').unwrap_or((key, ""));
            let of_ours = || -> anyhow::Result<Option<Value>> {
                let note: Value = serde_json::from_str(text)?;
                Ok(Some(note).filter(|note| note["configuration"] == "headstart"))
            };
            match (group, name) {
                ("mutation.webhook.admission.k8s.io", _) => review.called |= of_ours()?.is_some(),
                ("patch.webhook.admission.k8s.io", _) => {
                    if let Some(note) = of_ours()? {
                        review.patch = serde_json::from_value(note["patch"].clone())?;
                    }
                }
                ("failed-open.mutation.webhook.admission.k8s.io", _) => {
                    anyhow::bail!("the webhook did not answer: {text}")
                }
                ("pods.headstart.autoscaling.x-k8s.io", "skipped") => {
                    review.skipped = Some(text.to_owned());
                }
                ("pods.headstart.autoscaling.x-k8s.io", "boost") => {
                    review.boost = Some(text.to_owned());
                }
                _ => {}
            }
        }
        Ok(review)
    }

    /// The operator's writes to a pod of that name, in order, refused ones and those in vain included.
    pub fn writes(&self, namespace: &str, pod: &str) -> anyhow::Result<Vec<Write>> {
        self.patches(namespace, pod, false)
    }

    /// What it has tried with a dry run.
    pub fn tries(&self, namespace: &str, pod: &str) -> anyhow::Result<Vec<Write>> {
        self.patches(namespace, pod, true)
    }

    fn patches(&self, namespace: &str, pod: &str, dry_run: bool) -> anyhow::Result<Vec<Write>> {
        let operator = operator();
        let mut events = self.events(namespace, |event| {
            let (of, verb) = (&event["objectRef"], &event["verb"]);
            event["user"]["username"] == *operator
                && of["name"] == pod
                && !["get", "list", "watch"].iter().any(|read| verb == read)
                && is_dry_run(event) == dry_run
        })?;
        // Noted when answered, and not quite in order.
        events.sort_by_key(|event| event["requestReceivedTimestamp"].to_string());
        let write = |event: Value| {
            let subresource = event["objectRef"].get("subresource");
            anyhow::ensure!(
                event["verb"] == "patch" && subresource.is_none_or(|name| name == "resize"),
                "the operator wrote something else: {event}"
            );
            Ok(Write {
                received: serde_json::from_value(event["requestReceivedTimestamp"].clone())?,
                is_resize: subresource.is_some(),
                body: event["requestObject"].clone(),
                code: event["responseStatus"]["code"].as_u64().unwrap_or_default(),
                message: event["responseStatus"]["message"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned(),
            })
        };
        events.into_iter().map(write).collect()
    }

    /// The events of a namespace.
    fn events(
        &self,
        namespace: &str,
        wanted: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Vec<Value>> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(read.bytes))?;
        let mut new = Vec::new();
        file.read_to_end(&mut new)?;
        // The last line may be half written.
        let end = new.iter().rposition(|byte| *byte == b'\n');
        let whole = end.map_or(0, |end| end + 1);
        let lines = new[..whole].split(|byte| *byte == b'\n');
        for line in lines.filter(|line| !line.is_empty()) {
            let event: Value = serde_json::from_slice(line)?;
            let of = &event["objectRef"];
            if of["resource"] == "pods" {
                let namespace = of["namespace"].as_str().unwrap_or_default().to_owned();
                read.events.entry(namespace).or_default().push(event);
            }
        }
        read.bytes += whole as u64;
        let events = read.events.get(namespace).into_iter().flatten();
        Ok(events.filter(|event| wanted(event)).cloned().collect())
    }
}

fn is_dry_run(event: &Value) -> bool {
    let uri = event["requestURI"].as_str().unwrap_or_default();
    uri.contains("dryRun=All")
}
