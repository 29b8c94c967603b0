//! Watches: one line of JSON an event, from the history and then as it grows.

use std::{collections::VecDeque, time::Duration};

use futures::stream;
use http::HeaderMap;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Bytes, Frame};
use serde_json::{Value, json};
use tokio::{sync::watch::Receiver, time::Instant};

use super::{
    MemoryServer, Reply,
    api::{Refusal, metadata_only},
    json_reply,
    select::Selector,
    store::{Change, Kind},
};

/// How often a watch that allows bookmarks gets one.
const BOOKMARK_EVERY: Duration = Duration::from_secs(60);

/// How long a watch lasts that sets no `timeoutSeconds`.
const LONGEST: u64 = 1800;

/// What a client asked for.
pub(super) struct Request {
    pub(super) kind: &'static Kind,
    pub(super) namespace: Option<String>,
    pub(super) selector: Selector,
    pub(super) metadata_only: bool,
    /// None: the present objects first.
    pub(super) version: Option<u64>,
    /// A streamed list: the present objects, then a bookmark that says so.
    pub(super) initial_events: bool,
    pub(super) bookmarks: bool,
    pub(super) timeout: Option<u64>,
    pub(super) epoch: u64,
}

struct Watch {
    request: Request,
    server: MemoryServer,
    changed: Receiver<()>,
    /// The version up to which everything is in `lines`; none before the initial events.
    seen: Option<u64>,
    lines: VecDeque<Bytes>,
    ended: bool,
    bookmark_at: Instant,
    ends_at: Instant,
}

/// The streaming answer to a watch.
pub(super) fn reply(server: &MemoryServer, request: Request) -> Reply {
    let watch = Watch {
        server: server.clone(),
        changed: server.changes(),
        seen: request.version,
        lines: VecDeque::new(),
        ended: false,
        bookmark_at: Instant::now() + BOOKMARK_EVERY,
        ends_at: Instant::now() + Duration::from_secs(request.timeout.unwrap_or(LONGEST)),
        request,
    };
    let lines = stream::unfold(watch, |mut watch| async move {
        let line = watch.next().await?;
        Some((Ok(Frame::data(line)), watch))
    });
    let mut reply = json_reply(200, &Value::Null, HeaderMap::new());
    *reply.body_mut() = StreamBody::new(lines).boxed_unsync();
    reply
}

// === impl Watch ===

impl Watch {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            self.look();
            if let Some(line) = self.lines.pop_front() {
                return Some(line);
            }
            if self.ended {
                return None;
            }
            tokio::select! {
                biased;
                _ = self.changed.changed() => {}
                () = tokio::time::sleep_until(self.ends_at) => self.ended = true,
                () = tokio::time::sleep_until(self.bookmark_at), if self.request.bookmarks => {
                    self.bookmark_at += BOOKMARK_EVERY;
                    self.bookmark(false);
                }
            }
        }
    }

    /// Turns what is new in the store into lines.
    fn look(&mut self) {
        let server = self.server.clone();
        let state = server.state();
        let store = &state.store;
        if state.epoch != self.request.epoch || store.absent.contains(self.request.kind.plural) {
            self.ended = true;
        }
        if self.ended {
            return;
        }
        if self.seen.is_none() || self.request.initial_events {
            for (key, object) in store.current(self.request.kind.plural) {
                let here = self
                    .request
                    .namespace
                    .as_ref()
                    .is_none_or(|namespace| key.namespace == *namespace);
                if here && self.request.selector.fits(object) {
                    self.push("ADDED", object);
                }
            }
            self.seen = Some(store.version);
            if std::mem::take(&mut self.request.initial_events) {
                self.bookmark(true);
            }
        }
        let seen = self.seen.replace(store.version).unwrap_or_default();
        if let Some(changes) = store.since(seen) {
            for change in changes {
                self.tell(change);
            }
        } else {
            self.push_line("ERROR", &Refusal::expired(seen, store).status());
            self.ended = true;
        }
    }

    /// The event of a change as this watch sees it: an object that no longer fits is deleted, with its last fitting
    /// state and the version of the change.
    fn tell(&mut self, change: &Change) {
        let Request {
            kind,
            namespace,
            selector,
            ..
        } = &self.request;
        if change.key.plural != kind.plural
            || namespace
                .as_ref()
                .is_some_and(|n| *n != change.key.namespace)
        {
            return;
        }
        let old = change.old.as_ref().filter(|object| selector.fits(object));
        let new = change.new.as_ref().filter(|object| selector.fits(object));
        match (old, new) {
            (None, Some(new)) => self.push("ADDED", new),
            (Some(_), Some(new)) => self.push("MODIFIED", new),
            (Some(old), None) => {
                let mut old = old.clone();
                old["metadata"]["resourceVersion"] = change.version.to_string().into();
                self.push("DELETED", &old);
            }
            (None, None) => {}
        }
    }

    fn bookmark(&mut self, initial_end: bool) {
        let version = self.seen.unwrap_or_default().to_string();
        let kind = self.request.kind;
        let mut object = json!({"apiVersion": kind.api_version(), "kind": kind.name, "metadata": {"resourceVersion": version}});
        if initial_end {
            object["metadata"]["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        self.push("BOOKMARK", &object);
    }

    fn push(&mut self, event: &str, object: &Value) {
        if self.request.metadata_only {
            self.push_line(event, &metadata_only(object));
        } else {
            self.push_line(event, object);
        }
    }

    fn push_line(&mut self, event: &str, object: &Value) {
        let line = json!({"type": event, "object": object});
        self.lines.push_back(Bytes::from(format!("{line}\n")));
    }
}
