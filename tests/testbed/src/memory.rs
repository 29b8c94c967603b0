//! A Kubernetes API server in memory, for flow tests under tokio's paused time.
//!
//! [`MemoryServer::client`] gives a [`kube::Client`] whose requests never leave the process. Time is tokio's: under
//! `start_paused = true` an hour passes in milliseconds, and the same test takes the same steps every time. The
//! parts, from the outside in:
//!
//! - `fault`: what a test does to a request on its way ([`Fault`]);
//! - `api`: routes, verbs, preconditions, `metav1.Status` refusals;
//! - `patch`, `select`, `pod`: patch types, selectors, and the rules of `pods` and `pods/resize`;
//! - `watch`: event streams from the history;
//! - `store`: objects and history;
//! - `kubelet`: what follows a resize on a node ([`Kubelet`]).
//!
//! A request once sent is carried out even if its client stops waiting, as over a real network.

mod api;
mod fault;
mod kubelet;
mod patch;
mod pod;
mod select;
mod store;
mod watch;

use std::{
    collections::BTreeMap,
    io, panic,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use chrono::{DateTime, SecondsFormat, TimeZone as _, Utc};
use http::{HeaderMap, Request, Response, header};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use hyper::body::Bytes;
use kube::{Client, client::Body};
use serde_json::{Value, json};
use tokio::time::Instant;

pub(crate) use self::api::Refusal;
use self::{
    api::{Answer, Call},
    fault::End,
    store::{Kind, Store},
};
pub use self::{
    fault::{Fault, FaultId},
    kubelet::{Kubelet, Resize},
};

/// What a request costs in virtual time unless a test says otherwise.
const LATENCY: Duration = Duration::from_millis(2);

pub(crate) type Reply = Response<UnsyncBoxBody<Bytes, io::Error>>;

/// A wall clock that follows tokio's: a fixed base plus the tokio time since the clock was made.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    base: DateTime<Utc>,
    origin: Instant,
}

/// One request as the server saw it.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// When it arrived, since the server was made.
    pub at: Duration,
    /// The client's name, as given to [`MemoryServer::client`].
    pub who: String,
    /// `GET`, `LIST`, `WATCH`, `POST`, `PUT`, `PATCH` or `DELETE`.
    pub verb: &'static str,
    /// The path without the query.
    pub path: String,
    /// The query, decoded.
    pub query: BTreeMap<String, String>,
    /// The `Content-Type` header.
    pub content_type: Option<String>,
    /// The body, if it was JSON.
    pub body: Option<Value>,
    /// The server's answer, also where a fault kept it from the client; 0 while there is none, and for ever where a
    /// fault swallowed the request.
    pub status: u16,
}

/// The server. Clones are the same server.
#[derive(Clone)]
pub struct MemoryServer {
    clock: Clock,
    state: Arc<Mutex<State>>,
    /// Wakes the watches; they look for themselves what has changed.
    changed: tokio::sync::watch::Sender<()>,
}

struct State {
    store: Store,
    log: BTreeMap<u64, Recorded>,
    requests: u64,
    faults: Vec<(FaultId, Fault)>,
    next_fault: u64,
    kubelet: Option<Kubelet>,
    latency: Duration,
    version: String,
    graceful: bool,
    /// Raised by [`MemoryServer::close_watches`]; a watch of an older epoch ends.
    epoch: u64,
}

/// What becomes of a request once the server is done with it.
enum Outcome {
    Reply(Reply),
    Hang,
    Reset,
}

// === impl Clock ===

impl Clock {
    /// A clock that reads `base` now.
    #[must_use]
    pub fn new(base: DateTime<Utc>) -> Self {
        let origin = Instant::now();
        Self { base, origin }
    }

    /// The virtual wall-clock time.
    ///
    /// # Panics
    /// If a test waits for more than some hundred million years.
    #[must_use]
    pub fn now(&self) -> DateTime<Utc> {
        self.base + chrono::Duration::from_std(self.elapsed()).expect("a test's time fits")
    }

    /// The virtual time since the clock was made.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.origin.elapsed()
    }

    /// The time as the API server writes it: whole seconds, `Z`.
    #[must_use]
    pub fn timestamp(&self) -> String {
        self.now().to_rfc3339_opts(SecondsFormat::Secs, true)
    }
}

impl Default for Clock {
    /// 2026-12-01T10:00:00Z.
    fn default() -> Self {
        let base = Utc.with_ymd_and_hms(2026, 12, 1, 10, 0, 0);
        Self::new(base.single().expect("a time that exists"))
    }
}

// === impl Recorded ===

impl Recorded {
    /// Whether this is a write that was meant to stay: a mutating verb, and no dry run.
    #[must_use]
    pub fn is_write(&self) -> bool {
        matches!(self.verb, "POST" | "PUT" | "PATCH" | "DELETE") && !self.is_dry_run()
    }

    /// Whether it asked for `dryRun=All`.
    #[must_use]
    pub fn is_dry_run(&self) -> bool {
        self.query.get("dryRun").is_some_and(|v| v == "All")
    }
}

// === impl MemoryServer ===

/// The outside: making a server, and its clients.
#[expect(clippy::must_use_candidate, reason = "called for what they do")]
impl MemoryServer {
    /// An empty server whose clock starts at the default base.
    #[must_use]
    pub fn new() -> Self {
        Self::with_clock(Clock::default())
    }

    /// An empty server on a clock of the test's.
    #[must_use]
    pub fn with_clock(clock: Clock) -> Self {
        let state = State {
            store: Store::default(),
            log: BTreeMap::new(),
            requests: 0,
            faults: Vec::new(),
            next_fault: 0,
            kubelet: None,
            latency: LATENCY,
            version: "1.36.3".to_owned(),
            graceful: false,
            epoch: 0,
        };
        let server = Self {
            clock,
            state: Arc::new(Mutex::new(state)),
            changed: tokio::sync::watch::Sender::new(()),
        };
        server.create(
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}),
        );
        server
    }

    /// A client; `who` names it in the log, and faults can be aimed at it. To be called inside a tokio runtime.
    #[must_use]
    pub fn client(&self, who: &str) -> Client {
        let (server, who) = (self.clone(), who.to_owned());
        let service = tower::service_fn(move |request: Request<Body>| {
            // A task of its own: what is under way stays under way when the client gives up.
            let task = tokio::spawn(server.clone().serve(who.clone(), request));
            async move {
                match task.await {
                    Ok(Outcome::Reply(reply)) => Ok(reply),
                    Ok(Outcome::Hang) => std::future::pending().await,
                    Ok(Outcome::Reset) => Err(io::Error::from(io::ErrorKind::ConnectionReset)),
                    // A test's hook has panicked, or its runtime ends.
                    Err(e) => match e.try_into_panic() {
                        Ok(payload) => panic::resume_unwind(payload),
                        Err(_) => std::future::pending().await,
                    },
                }
            }
        });
        Client::new(service, "default")
    }

    /// The clock.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// The virtual wall-clock time.
    #[must_use]
    pub fn now(&self) -> DateTime<Utc> {
        self.clock.now()
    }

    /// Sets what every request costs in virtual time.
    pub fn set_latency(&self, latency: Duration) {
        self.state().latency = latency;
    }

    /// Sets the version that `/version` answers, such as `1.33.1`.
    pub fn set_version(&self, version: &str) {
        version.clone_into(&mut self.state().version);
    }

    /// Makes DELETE mark bound pods as terminating (and leave them there) instead of removing them.
    pub fn set_graceful_deletes(&self, graceful: bool) {
        self.state().graceful = graceful;
    }

    /// Takes a resource type away, with its objects, as deleting a CRD does; its watches end.
    ///
    /// # Panics
    /// If the server never knew the type; so do all helpers that name a resource.
    pub fn remove_kind(&self, resource: &str) {
        self.write(|store| store.remove_kind(Kind::named(resource)));
    }

    /// Brings a removed resource type back, empty.
    pub fn add_kind(&self, resource: &str) {
        self.write(|store| store.absent.remove(Kind::named(resource).plural));
    }

    /// Ends every open watch, as a restarting API server or load balancer does.
    pub fn close_watches(&self) {
        self.state().epoch += 1;
        self.changed.send_replace(());
    }

    /// Forgets the history: a watch or a `continue` token from before gets 410.
    pub fn compact(&self) {
        self.state().store.compact();
    }

    /// The requests since the start or the last [`clear_requests`](Self::clear_requests), in order of arrival.
    #[must_use]
    pub fn requests(&self) -> Vec<Recorded> {
        self.state().log.values().cloned().collect()
    }

    /// Tells at once whenever something has changed.
    #[must_use]
    pub fn changes(&self) -> tokio::sync::watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// The requests of these that were [writes](Recorded::is_write), refused ones included.
    #[must_use]
    pub fn writes(&self) -> Vec<Recorded> {
        let mut requests = self.requests();
        requests.retain(Recorded::is_write);
        requests
    }

    /// Empties the log.
    pub fn clear_requests(&self) {
        self.state().log.clear();
    }

    /// Injects a fault; the first that fits a request acts on it.
    pub fn fault(&self, fault: Fault) -> FaultId {
        let mut state = self.state();
        state.next_fault += 1;
        let id = FaultId(state.next_fault);
        state.faults.push((id, fault));
        id
    }

    /// Ends a fault. Requests that it hangs stay hung.
    pub fn lift(&self, id: FaultId) {
        self.state().faults.retain(|(other, _)| *other != id);
    }

    /// Ends all faults.
    pub fn clear_faults(&self) {
        self.state().faults.clear();
    }
}

/// The back door: what a test does to objects as "somebody else", without a request, latency or validation.
#[expect(clippy::must_use_candidate, reason = "called for what they do")]
impl MemoryServer {
    /// Stores an object as given, status included, and returns it with what the server adds: uid, resourceVersion,
    /// generation, creationTimestamp, a namespace (`default`) and, where that is new, the Namespace.
    ///
    /// # Panics
    /// If its kind is unknown or it exists.
    pub fn create(&self, object: Value) -> Value {
        let kind = Kind::of(&object).expect("a known apiVersion and kind");
        let now = self.clock.timestamp();
        let made = self.write(|store| store.create(kind, object, &now));
        made.unwrap_or_else(|key| panic!("{key:?} exists"))
    }

    /// Changes an object in place and returns it; a changed spec raises its generation.
    ///
    /// # Panics
    /// If there is no such object.
    pub fn update(
        &self,
        resource: &str,
        namespace: &str,
        name: &str,
        change: impl FnOnce(&mut Value),
    ) -> Value {
        let key = Kind::named(resource).key(namespace, name);
        self.write(|store| {
            let mut object = store
                .get(&key)
                .cloned()
                .expect("the object to change exists");
            change(&mut object);
            store.replace(key, object)
        })
    }

    /// Reads an object.
    #[must_use]
    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        let key = Kind::named(resource).key(namespace, name);
        self.state().store.get(&key).cloned()
    }

    /// All objects of a type, by namespace and name.
    #[must_use]
    pub fn list(&self, resource: &str) -> Vec<Value> {
        let state = self.state();
        let objects = state.store.current(Kind::named(resource).plural);
        objects.map(|(_, object)| object.clone()).collect()
    }

    /// Removes an object at once and returns its last state.
    pub fn delete(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        let key = Kind::named(resource).key(namespace, name);
        self.write(|store| store.remove(&key))
    }

    /// Marks an object as terminating; [`delete`](Self::delete) then removes it.
    ///
    /// # Panics
    /// If there is no such object.
    pub fn terminate(&self, resource: &str, namespace: &str, name: &str) -> Value {
        let now = self.clock.timestamp();
        self.update(resource, namespace, name, |object| {
            store::terminate(object, &now);
        })
    }
}

/// The inside.
impl MemoryServer {
    fn state(&self) -> MutexGuard<'_, State> {
        // A test's closure may panic under the lock; the test fails by itself.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Works on the store and wakes the watches.
    fn write<T>(&self, work: impl FnOnce(&mut Store) -> T) -> T {
        let done = work(&mut self.state().store);
        self.changed.send_replace(());
        done
    }

    async fn serve(self, who: String, request: Request<Body>) -> Outcome {
        let (head, body) = request.into_parts();
        let body = body.collect_bytes().await.unwrap_or_default();
        let call = Call::new(&head, &body);

        let (id, fault, latency) = {
            let mut state = self.state();
            let recorded = call.recorded(who, self.clock.elapsed());
            let fault = fault::take(&mut state.faults, &recorded);
            state.requests += 1;
            let id = state.requests;
            state.log.insert(id, recorded);
            (id, fault.unwrap_or_default(), state.latency)
        };
        tokio::time::sleep(latency + fault.delay).await;

        for hook in &fault.before {
            hook(&self);
        }
        let reply = if let End::Reply(refusal) = &fault.end {
            Some(refusal.reply())
        } else if fault.lands() {
            Some(self.answer(&call))
        } else {
            None
        };
        if let (Some(reply), Some(recorded)) = (&reply, self.state().log.get_mut(&id)) {
            recorded.status = reply.status().as_u16();
        }
        for hook in &fault.after {
            hook(&self);
        }

        match (fault.end, reply) {
            (End::Answer | End::Reply(_), Some(reply)) => Outcome::Reply(reply),
            (End::Reset, _) => Outcome::Reset,
            _ => Outcome::Hang,
        }
    }

    fn answer(&self, call: &Call) -> Reply {
        let answer = {
            let mut state = self.state();
            let now = self.clock.timestamp();
            api::answer(&mut state, &now, call)
        };
        match answer {
            Ok(Answer::Object(code, object)) => {
                if call.changes() {
                    self.changed.send_replace(());
                }
                if let Some((namespace, name)) = call.resized() {
                    self.actuate_later(namespace, name);
                }
                json_reply(code, &object, HeaderMap::new())
            }
            Ok(Answer::Watch(request)) => watch::reply(self, request),
            Err(refusal) => refusal.reply(),
        }
    }
}

impl Default for MemoryServer {
    fn default() -> Self {
        Self::new()
    }
}

fn json_reply(code: u16, body: &Value, headers: HeaderMap) -> Reply {
    let body = Full::new(Bytes::from(body.to_string()));
    let mut reply = Response::new(body.map_err(|never| match never {}).boxed_unsync());
    *reply.status_mut() = http::StatusCode::from_u16(code).expect("a test's status code is valid");
    *reply.headers_mut() = headers;
    let json = header::HeaderValue::from_static("application/json");
    reply.headers_mut().insert(header::CONTENT_TYPE, json);
    reply
}
