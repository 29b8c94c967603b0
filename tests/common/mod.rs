//! What the flow tests share: the pod, the boost and the record of the contract's first case, and whole replicas on the
//! in-memory API server.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::{sync::Arc, time::Duration};

use chrono::{DateTime, TimeDelta, Utc};
use headstart::{
    boosts::Boosts,
    certs::{self, Bundle, Certs, Lifetimes},
    claims::Claims,
    clock::Clock,
    domain::admission::Settings,
    lease::{Elector, Params},
    metrics::Metrics,
    snapshots::Snapshots,
    status::Reporter,
    surroundings::{keep_limit_ranges, keep_namespaces, keep_nodes, keep_quotas},
    sweeper::{Events, Missed, Sweeper, Tally, Writer},
};
use kube::Api;
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use serde_json::{Value, json};
use testbed::memory::{Kubelet, MemoryServer, Recorded, Resize};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep, timeout},
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::sync::CancellationToken;

/// Key of the claim and of the record.
pub(crate) use headstart::api::BOOST_KEY as KEY;

/// Namespace of all pods and boosts here.
pub(crate) const NS: &str = "ns";

/// When the pods were scheduled: what the in-memory server's clock shows at the start.
pub(crate) const SCHEDULED: &str = "2026-12-01T10:00:00Z";

/// How long the kubelet takes for a resize.
pub(crate) const ACTUATION: Duration = Duration::from_millis(250);

// === objects ===

pub(crate) fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// CPU `resources` of a container.
pub(crate) fn cpu(request: &str, limit: &str) -> Value {
    json!({"requests": {"cpu": request}, "limits": {"cpu": limit}})
}

/// The pod as its owner wrote it: `app 250m/500m`.
pub(crate) fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": NS, "labels": {"app": "a"}},
        "spec": {"containers": [{"name": "app", "image": "x", "resources": cpu("250m", "500m")}]},
    })
}

/// A boost of 50 % for the container `app`, with this `durationPolicy`.
pub(crate) fn boost(name: &str, duration_policy: &Value) -> Value {
    json!({
        "apiVersion": "autoscaling.x-k8s.io/v1alpha1", "kind": "StartupCPUBoost",
        "metadata": {"name": name, "namespace": NS},
        "selector": {"matchLabels": {"app": "a"}},
        "spec": {
            "resourcePolicy": {"containerPolicies": [
                {"matchContainers": {"type": "ExactName", "value": "app"}, "percentageIncrease": {"value": 50}}]},
            "durationPolicy": duration_policy,
        },
    })
}

/// A boost's rule: until the pod is Ready.
pub(crate) fn until_ready() -> Value {
    json!({"podCondition": {"type": "Ready", "status": "True"}})
}

/// A boost's rule: so many seconds.
pub(crate) fn for_seconds(seconds: u64) -> Value {
    json!({"fixedDuration": {"unit": "Seconds", "value": seconds}})
}

/// The same two rules as records have them.
pub(crate) fn ready_end() -> Value {
    json!({"condition": {"type": "Ready", "status": "True", "delaySeconds": 0}, "deadlineSeconds": 3600})
}

/// See [`ready_end`].
pub(crate) fn fixed_end(seconds: u64) -> Value {
    json!({"fixedSeconds": seconds, "deadlineSeconds": 3600})
}

/// The record that admission by the boost `b` leaves on [`pod`].
pub(crate) fn record(end: &Value) -> String {
    format!(
        r#"{{"state":"Active","timestamp":"2026-12-01T09:59:58Z","initCPURequests":{{"app":"250m"}},"initCPULimits":{{"app":"500m"}},"boostedCPURequests":{{"app":"380m"}},"boostedCPULimits":{{"app":"750m"}},"boost":"b","end":{end}}}"#
    )
}

/// What finish makes of a record: two words change, all else stays as it was, to the byte.
pub(crate) fn ended(record: &str, at: &str, by: &str) -> String {
    let record = record.replace(r#""state":"Active""#, r#""state":"Reverted""#);
    let rest = record.strip_suffix('}').expect("a record is an object");
    format!(r#"{rest},"endedTimestamp":"{at}","endedBy":"{by}"}}"#)
}

/// The pod as admission by the boost `b` left it, running and not Ready.
pub(crate) fn boosted(name: &str, end: &Value) -> Value {
    let mut pod = pod(name);
    let resources = cpu("380m", "750m");
    pod["metadata"]["labels"][KEY] = "b".into();
    pod["metadata"]["annotations"] = json!({KEY: record(end)});
    pod["spec"]["nodeName"] = "node".into();
    pod["spec"]["containers"][0]["resources"] = resources.clone();
    pod["status"] = json!({"phase": "Running", "observedGeneration": 1, "containerStatuses": [{
        "name": "app", "ready": false, "started": true, "restartCount": 0,
        "resources": resources, "allocatedResources": resources["requests"],
    }]});
    set_condition(&mut pod, "PodScheduled", "True", SCHEDULED);
    set_condition(&mut pod, "Ready", "False", SCHEDULED);
    pod
}

/// Sets a condition of a pod as the kubelet would.
pub(crate) fn set_condition(pod: &mut Value, kind: &str, status: &str, at: &str) {
    let new = json!({"type": kind, "status": status, "lastTransitionTime": at});
    let conditions = &mut pod["status"]["conditions"];
    if !conditions.is_array() {
        *conditions = json!([]);
    }
    let conditions = conditions.as_array_mut().expect("just made sure");
    conditions.retain(|old| old["type"] != kind);
    conditions.push(new);
}

/// Lets a pod become Ready now. Returns when that was, as conditions and records have it.
pub(crate) fn make_ready(server: &MemoryServer, name: &str) -> String {
    let now = server.clock().timestamp();
    server.update("pods", NS, name, |pod| {
        set_condition(pod, "Ready", "True", &now);
    });
    now
}

/// The pod of that name.
pub(crate) fn stored(server: &MemoryServer, name: &str) -> Value {
    server
        .get("pods", NS, name)
        .unwrap_or_else(|| panic!("the pod {name} exists"))
}

/// A pod's `resourceVersion`.
pub(crate) fn version(server: &MemoryServer, name: &str) -> Value {
    stored(server, name)["metadata"]["resourceVersion"].clone()
}

/// CPU of the container `app`.
pub(crate) fn cpu_of(pod: &Value) -> &Value {
    &pod["spec"]["containers"][0]["resources"]
}

/// A pod's record, empty where it has none.
pub(crate) fn record_of(pod: &Value) -> &str {
    pod["metadata"]["annotations"][KEY]
        .as_str()
        .unwrap_or_default()
}

/// Whether a pod still has its claim.
pub(crate) fn is_claimed(pod: &Value) -> bool {
    !pod["metadata"]["labels"][KEY].is_null()
}

/// Whether a pod's boost has ended as it should: originals back, claim gone, the record says so.
pub(crate) fn is_ended(pod: &Value) -> bool {
    *cpu_of(pod) == cpu("250m", "500m")
        && !is_claimed(pod)
        && record_of(pod).contains(r#""state":"Reverted""#)
}

// === requests ===

/// Which of the two writes a request to a pod is, with the pod's name.
pub(crate) fn write_of(request: &Recorded) -> Option<(&'static str, &str)> {
    let (_, rest) = request.path.split_once("/pods/")?;
    match (request.verb, rest.split_once('/')) {
        ("PATCH", Some((name, "resize"))) => Some(("resize", name)),
        ("PATCH", None) => Some(("finish", rest)),
        _ => None,
    }
}

/// The writes to pods, refused ones included.
pub(crate) fn pod_writes(server: &MemoryServer) -> Vec<Recorded> {
    let mut requests = server.requests();
    requests.retain(|request| write_of(request).is_some());
    requests
}

/// The requests about single pods in words: `PATCH resize 200`, `GET 404`, `PATCH finish 409`.
pub(crate) fn told(server: &MemoryServer) -> Vec<String> {
    let about_pods = |request: &Recorded| {
        let write = write_of(request).map(|(write, _)| write);
        match (request.verb, write) {
            ("GET", _) if request.path.contains("/pods/") => {
                Some(format!("GET {}", request.status))
            }
            (verb, Some(write)) => Some(format!("{verb} {write} {}", request.status)),
            _ => None,
        }
    };
    server.requests().iter().filter_map(about_pods).collect()
}

// === time ===

/// Whether no boost is in force, and the claim is there for the next restart.
pub(crate) fn is_resting(pod: &Value) -> bool {
    is_claimed(pod)
        && *cpu_of(pod) == cpu("250m", "500m")
        && record_of(pod).contains(r#""state":"Reverted""#)
}

/// The container of the pod dies, and runs again.
pub(crate) fn restart(server: &MemoryServer) {
    let now = server.clock().timestamp();
    server.update("pods", NS, "p", |pod| {
        let status = &mut pod["status"]["containerStatuses"][0];
        status["restartCount"] = json!(status["restartCount"].as_u64().unwrap_or(0) + 1);
        status["ready"] = json!(false);
        status["state"] = json!({"running": {"startedAt": now}});
        set_condition(pod, "Ready", "False", &now);
    });
}

/// A server whose kubelet does what it is asked after [`ACTUATION`].
pub(crate) fn server() -> MemoryServer {
    let server = MemoryServer::new();
    set_kubelet(&server, Resize::Actuate);
    server
}

/// Sets how the nodes react to a resize.
pub(crate) fn set_kubelet(server: &MemoryServer, resize: Resize) {
    server.kubelet(Kubelet {
        actuate_after: ACTUATION,
        resize,
    });
}

/// Sleeps until the server's clock shows so many seconds since its start.
pub(crate) async fn sleep_until_second(server: &MemoryServer, seconds: f64) {
    let at = Duration::from_secs_f64(seconds);
    sleep(at.saturating_sub(server.clock().elapsed())).await;
}

/// Looks again until something holds, and fails after the deadline. Returns how long it took, to a five-hundredth of the
/// deadline.
pub(crate) async fn until(
    what: &str,
    deadline: Duration,
    mut holds: impl FnMut() -> bool,
) -> Duration {
    let began = Instant::now();
    let pause = (deadline / 500).max(Duration::from_millis(5));
    while !holds() {
        assert!(
            began.elapsed() <= deadline,
            "waited {deadline:?} until {what}"
        );
        sleep(pause).await;
    }
    began.elapsed()
}

/// Waits until a pod's boost has ended.
pub(crate) async fn until_ended(server: &MemoryServer, name: &str, deadline: Duration) -> Duration {
    until(&format!("the boost of {name} has ended"), deadline, || {
        is_ended(&stored(server, name))
    })
    .await
}

// === replicas ===

/// One replica: its caches and what runs on them. Dropping it is a crash.
pub(crate) struct Replica {
    name: String,
    server: MemoryServer,
    snapshots: Arc<Snapshots>,
    events: Arc<Events>,
    pub(crate) boosts: Arc<Boosts>,
    pub(crate) claims: Arc<Claims>,
    pub(crate) tally: Arc<Tally>,
    pub(crate) metrics: Arc<Metrics>,
    /// What its flags say.
    pub(crate) settings: Settings,
    /// Whether it boosts pods that admission has missed.
    pub(crate) missed: bool,
    /// Whether it runs dry.
    pub(crate) dry_run: bool,
    tasks: JoinSet<()>,
}

/// A term that a test has given to a replica. Dropping it is a crash too.
pub(crate) struct Term {
    token: CancellationToken,
    work: Option<JoinHandle<()>>,
}

impl Replica {
    /// Starts the caches. All its requests have this name.
    pub(crate) fn start(server: &MemoryServer, name: &str) -> Self {
        let snapshots = Arc::<Snapshots>::default();
        let boosts = Arc::new(Boosts::new(Arc::clone(&snapshots)));
        let claims = Arc::new(Claims::default());
        let mut tasks = JoinSet::new();
        let (kept, client) = (Arc::clone(&boosts), server.client(name));
        tasks.spawn(async move { kept.keep(client).await });
        let (kept, client) = (Arc::clone(&claims), server.client(name));
        tasks.spawn(async move { kept.keep(client).await });
        let (kept, client) = (Arc::clone(&snapshots), server.client(name));
        tasks.spawn(async move {
            tokio::join!(
                keep_namespaces(client.clone(), &kept),
                keep_limit_ranges(client.clone(), &kept),
                keep_quotas(client.clone(), &kept),
                keep_nodes(client, &kept),
            );
        });
        let metrics = Arc::<Metrics>::default();
        let events = Arc::new(Events::new(
            server.client(name),
            name.to_owned(),
            clock(server),
            metrics.revert.clone(),
        ));
        let kept = Arc::clone(&events);
        tasks.spawn(async move { kept.keep().await });
        Self {
            name: name.to_owned(),
            server: server.clone(),
            snapshots,
            events,
            boosts,
            claims,
            tally: Arc::default(),
            metrics,
            settings: Settings::default(),
            missed: false,
            dry_run: false,
            tasks,
        }
    }

    /// The sweeper for a term.
    pub(crate) fn sweeper(&self) -> Sweeper {
        Sweeper {
            writer: Writer::new(self.server.client(&self.name)),
            claims: Arc::clone(&self.claims),
            boosts: Arc::clone(&self.boosts),
            snapshots: Arc::clone(&self.snapshots),
            settings: self.settings,
            missed: self.missed.then(|| Missed {
                client: self.server.client(&self.name),
                namespace: NS.to_owned() + "-own",
            }),
            clock: clock(&self.server),
            tally: Arc::clone(&self.tally),
            events: Arc::clone(&self.events),
            metrics: self.metrics.revert.clone(),
            dry_run: self.dry_run,
        }
    }

    /// The reporter for a term.
    pub(crate) fn reporter(&self) -> Reporter {
        Reporter {
            client: self.server.client(&self.name),
            boosts: Arc::clone(&self.boosts),
            tally: Arc::clone(&self.tally),
            clock: clock(&self.server),
            metrics: Arc::clone(&self.metrics),
            dry_run: self.dry_run,
        }
    }

    /// Begins a term with reports, without an election.
    pub(crate) fn lead_and_report(&self) -> Term {
        let token = CancellationToken::new();
        let (sweeper, reporter) = (self.sweeper(), self.reporter());
        let (term, leading) = (token.clone(), self.metrics.lead());
        let work = tokio::spawn(async move {
            // Which of the two ends first is nobody's business: the series go with the term.
            let _leading = leading;
            tokio::join!(sweeper.lead(term.clone()), reporter.lead(term));
        });
        Term {
            token,
            work: Some(work),
        }
    }

    /// Begins a term without an election.
    pub(crate) fn lead(&self) -> Term {
        let token = CancellationToken::new();
        let work = tokio::spawn(self.sweeper().lead(token.clone()));
        Term {
            token,
            work: Some(work),
        }
    }

    /// Stands for election, and sweeps in every term that it wins.
    pub(crate) fn stand(&mut self, stop: &CancellationToken) {
        let lease = Api::namespaced(self.server.client(&self.name), NS);
        let elector = Elector::new(lease, Params::new(LEASE, &self.name));
        let (sweeper, stop) = (self.sweeper(), stop.clone());
        self.tasks.spawn(async move {
            elector.run(stop, |term| sweeper.clone().lead(term)).await;
        });
    }
}

impl Term {
    /// Ends the term as a lost lease does, and waits until its work has ended.
    pub(crate) async fn end(mut self) {
        self.token.cancel();
        let work = self.work.take().expect("a term ends once");
        timeout(Duration::from_secs(6), work)
            .await
            .expect("a term's work ends within a write's deadline")
            .expect("a term's work does not panic");
    }
}

impl Drop for Term {
    fn drop(&mut self) {
        if let Some(work) = &self.work {
            work.abort();
        }
    }
}

/// A replica with the flags that make it raise.
pub(crate) fn raising(server: &MemoryServer, name: &str) -> Replica {
    let mut replica = Replica::start(server, name);
    replica.settings.end.boost_on_restart = true;
    replica.missed = true;
    replica
}

/// What a counter says in the text of `/metrics`; nothing where it is not there.
pub(crate) fn counted(metrics: &str, series: &str) -> u64 {
    let mut lines = metrics.lines();
    let value = lines.find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    value.map_or(0, |value| value.parse().expect("a number"))
}

/// The program's clock, turned by the server's.
pub(crate) fn clock(server: &MemoryServer) -> Clock {
    let server = server.clone();
    Clock::new(move || server.now())
}

/// Name of the Lease.
pub(crate) const LEASE: &str = "headstart";

/// The Lease as the manifests bring it.
pub(crate) fn lease() -> Value {
    json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": LEASE, "namespace": NS}, "spec": {}})
}

/// Who holds the Lease.
pub(crate) fn holder(server: &MemoryServer) -> Option<String> {
    let lease = server.get("leases", NS, LEASE)?;
    Some(lease["spec"]["holderIdentity"].as_str()?.to_owned())
}

// === certificates ===

/// Name in the webhook's certificate.
pub(crate) const HOST: &str = "headstart.ns.svc";

/// Name of the certificates' Secret and of the webhook configuration.
pub(crate) const CERTIFICATES: &str = "headstart";

/// The certificates' Secret as the manifests bring it.
pub(crate) fn empty_secret() -> Value {
    json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": CERTIFICATES, "namespace": NS}})
}

/// How long certificates live where a test doesn't say: as by default.
pub(crate) const LIFETIMES: Lifetimes = Lifetimes {
    leaf: TimeDelta::days(90),
    authority: TimeDelta::days(3650),
};

/// A CA and a leaf as Headstart makes them.
pub(crate) fn issue(lifetimes: Lifetimes, at: DateTime<Utc>) -> Bundle {
    let bundle = Bundle::default().with_authority(lifetimes, at);
    bundle
        .and_then(|bundle| bundle.with_leaf(&[HOST.to_owned()], lifetimes, at))
        .expect("they can be made")
}

/// The certificates as one replica keeps them in the Secret.
pub(crate) fn certificates(server: &MemoryServer, who: &str) -> Arc<Certs> {
    certificates_for(server, who, LIFETIMES)
}

/// As [`certificates`], for so long.
pub(crate) fn certificates_for(
    server: &MemoryServer,
    who: &str,
    lifetimes: Lifetimes,
) -> Arc<Certs> {
    let params = certs::Params {
        namespace: NS.to_owned(),
        secret: CERTIFICATES.to_owned(),
        webhook: CERTIFICATES.to_owned(),
        lifetimes,
    };
    Arc::new(Certs::new(
        certs::Source::Secret(server.client(who), params),
        vec![HOST.to_owned()],
        clock(server),
        Arc::default(),
    ))
}

/// A TLS handshake as the API server makes it: verified by these CAs under [`HOST`].
pub(crate) async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    roots: Arc<RootCertStore>,
    alpn: &[&str],
) -> std::io::Result<TlsStream<S>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring has what TLS needs")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    let host = ServerName::try_from(HOST).expect("a DNS name");
    TlsConnector::from(Arc::new(config))
        .connect(host, stream)
        .await
}
