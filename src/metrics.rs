//! What can be measured from outside. Labels are closed lists and namespaces, never pod names.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
    time::Duration,
};

use chrono::{DateTime, Utc};
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use crate::{
    boosts::Key,
    domain::{
        admission::Outcome,
        clamp::Clamp,
        end::EndedBy,
        failure::Failure,
        reason::Reason,
        record::Cause,
        revert::{Finish, Revert},
    },
    upstream,
};

/// Media type of [`Metrics::text`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What keeps boosts from ending: failures that last, states of a resize, and a record that can't be read.
const STUCK: [&str; 9] = [
    "MissingRight",
    "NotResizable",
    "Refused",
    "LimitRangeDefaults",
    "Transient",
    "Deferred",
    "Infeasible",
    "Error",
    "Unreadable",
];

/// All series of this process.
#[derive(Debug)]
pub struct Metrics {
    registry: Mutex<Registry>,
    /// Of the webhook, on every replica.
    pub admission: AdmissionMetrics,
    /// Of the sweeper, on the leader only.
    pub revert: RevertMetrics,
    /// Whether this replica leads.
    pub leader: Gauge,
    /// Boost objects by namespace, on the leader only (upstream's name).
    boosts: Family<NamespaceLabel, Gauge>,
    /// The namespaces that have a series in `boosts`.
    counted: Mutex<BTreeSet<String>>,
    containers: ContainerMetrics,
    /// Of the served certificate, on every replica.
    pub certificate: CertificateMetrics,
    /// What is left of upstream, on every replica.
    upstream_leftovers: Family<KindLabel, Gauge>,
    /// Of the watches, on every replica.
    pub watches: WatchMetrics,
    /// Of the view, on every replica where it is on.
    view: ViewMetrics,
}

/// Series of the view, on every replica where it is on.
#[derive(Debug)]
struct ViewMetrics {
    requests: Family<CodeLabel, Counter>,
    seconds: Histogram,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NamespaceLabel {
    namespace: String,
}

/// Boosted containers by boost, on the leader only (upstream's names).
#[derive(Debug, Default)]
struct ContainerMetrics {
    active: Family<BoostLabels, Gauge>,
    total: Family<BoostLabels, Counter>,
    /// The boosts that have series.
    counted: Mutex<BTreeSet<Key>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BoostLabels {
    namespace: String,
    boost: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClampLabel {
    by: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WriteLabels {
    write: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndLabel {
    by: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RaiseLabels {
    cause: &'static str,
    result: &'static str,
}

/// When watches were last heard, by resource, in Unix seconds.
#[derive(Clone, Debug, Default)]
pub struct WatchMetrics(Family<ResourceLabel, Gauge>);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResourceLabel {
    resource: String,
}

/// Series of the served certificate, in Unix seconds; 0 until there is one.
#[derive(Clone, Debug, Default)]
pub struct CertificateMetrics {
    not_after: Gauge<f64, AtomicU64>,
    ca_not_after: Gauge<f64, AtomicU64>,
    renewal_due: Gauge<f64, AtomicU64>,
}

/// Series of the webhook.
#[derive(Clone, Debug)]
pub struct AdmissionMetrics {
    reviews: Family<OutcomeLabels, Counter>,
    clamped: Family<ClampLabel, Counter>,
    seconds: Histogram,
}

/// Series of the sweeper.
#[derive(Clone, Debug)]
pub struct RevertMetrics {
    events: Family<ResultLabel, Counter>,
    stuck: Family<ReasonLabel, Counter>,
    writes: Family<WriteLabels, Counter>,
    ended: Family<EndLabel, Counter>,
    raises: Family<RaiseLabels, Counter>,
    lag: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        let boosts = Family::default();
        registry.register(
            "boost_configurations",
            "On the leader: boost objects (upstream's name); those of the cluster have an empty namespace",
            boosts.clone(),
        );
        let containers = ContainerMetrics::default();
        registry.register(
            "boost_containers_active",
            "On the leader: containers that are boosted now (upstream's name)",
            containers.active.clone(),
        );
        registry.register(
            "boost_containers",
            "On the leader: containers boosted since the boost was made (upstream's name); kept in its status, so it survives leaders",
            containers.total.clone(),
        );
        let ours = registry.sub_registry_with_prefix("headstart");
        let admission = AdmissionMetrics::register(ours);
        let revert = RevertMetrics::register(ours);
        let certificate = CertificateMetrics::register(ours);
        let leader = Gauge::default();
        ours.register("leader", "1 while this replica leads", leader.clone());
        let watches = WatchMetrics::register(ours);
        let upstream_leftovers = Family::<KindLabel, Gauge>::default();
        for kind in upstream::Kind::ALL {
            let kind = kind.as_str();
            let _ = upstream_leftovers.get_or_create(&KindLabel { kind });
        }
        ours.register(
            "upstream_leftovers",
            "1 while this of kube-startup-cpu-boost is installed under its usual name; looked at every 5 minutes",
            upstream_leftovers.clone(),
        );
        let view = ViewMetrics::register(ours);
        Self {
            registry: Mutex::new(registry),
            admission,
            revert,
            leader,
            boosts,
            counted: Mutex::default(),
            containers,
            certificate,
            upstream_leftovers,
            watches,
            view,
        }
    }
}

impl Metrics {
    /// Everything, in OpenMetrics' text form.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        encode(&mut text, &registry).expect("writing to a string does not fail");
        text
    }

    /// Counts boost objects, one for each namespace that is named.
    pub fn count_boosts<'a>(&self, namespaces: impl Iterator<Item = &'a String>) {
        let mut counts = BTreeMap::<&String, i64>::new();
        for namespace in namespaces {
            *counts.entry(namespace).or_default() += 1;
        }
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        for gone in counted
            .iter()
            .filter(|namespace| !counts.contains_key(namespace))
        {
            self.boosts.remove(&NamespaceLabel {
                namespace: gone.clone(),
            });
        }
        for (namespace, count) in &counts {
            let label = NamespaceLabel {
                namespace: (*namespace).clone(),
            };
            self.boosts.get_or_create(&label).set(*count);
        }
        *counted = counts.into_keys().cloned().collect();
    }

    /// Shows boosted containers, active and total, by boost. Other boosts' series go away.
    pub fn count_containers(&self, counts: &BTreeMap<Key, (u32, u32)>) {
        let containers = &self.containers;
        let labels = |(namespace, boost): &Key| BoostLabels {
            namespace: namespace.clone(),
            boost: boost.clone(),
        };
        let counted = &containers.counted;
        let mut counted = counted.lock().unwrap_or_else(PoisonError::into_inner);
        for gone in counted.iter().filter(|key| !counts.contains_key(key)) {
            containers.active.remove(&labels(gone));
            containers.total.remove(&labels(gone));
        }
        for (key, (active, total)) in counts {
            let series = containers.active.get_or_create(&labels(key));
            series.set(i64::from(*active));
            let series = containers.total.get_or_create(&labels(key));
            series.inc_by(u64::from(*total).saturating_sub(series.get()));
        }
        *counted = counts.keys().cloned().collect();
    }

    /// Shows whether something of upstream's install is left.
    pub fn upstream_left(&self, kind: upstream::Kind, is_left: bool) {
        let kind = kind.as_str();
        let gauge = self.upstream_leftovers.get_or_create(&KindLabel { kind });
        gauge.set(i64::from(is_left));
    }

    /// Counts a request to the view, with its HTTP status.
    pub fn viewed(&self, code: u16, took: Duration) {
        self.view.requests.get_or_create(&CodeLabel { code }).inc();
        self.view.seconds.observe(took.as_secs_f64());
    }

    /// Marks a term, until what this returns is dropped. Series of the leader end with it.
    #[must_use]
    pub fn lead(self: &Arc<Self>) -> Leading {
        self.leader.set(1);
        Leading(Arc::clone(self))
    }
}

/// A term that is on. The work of a term may be dropped at any moment, so its end is marked by a drop too.
#[derive(Debug)]
pub struct Leading(Arc<Metrics>);

impl Drop for Leading {
    fn drop(&mut self) {
        self.0.leader.set(0);
        self.0.count_boosts(std::iter::empty());
        self.0.count_containers(&BTreeMap::new());
    }
}

impl WatchMetrics {
    fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "watch_heard_timestamp_seconds",
            "When the API server last said something on the watch of this resource, in Unix seconds: how old the cache may be. A quiet watch is heard each minute",
            metrics.0.clone(),
        );
        metrics
    }

    /// When the watch of this resource was last heard, if ever.
    #[must_use]
    pub fn heard(&self, resource: &str) -> Option<DateTime<Utc>> {
        let heard = self.of(resource.to_owned()).get();
        DateTime::from_timestamp_secs(heard).filter(|_| heard > 0)
    }

    /// The series of a resource.
    #[must_use]
    pub fn of(&self, resource: String) -> Gauge {
        self.0.get_or_create_owned(&ResourceLabel { resource })
    }
}

impl CertificateMetrics {
    fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "certificate_not_after_seconds",
            "When the served certificate ends, in Unix seconds",
            metrics.not_after.clone(),
        );
        registry.register(
            "certificate_ca_not_after_seconds",
            "When the CA of the served certificate ends, in Unix seconds",
            metrics.ca_not_after.clone(),
        );
        registry.register(
            "certificate_renewal_due_seconds",
            "When the served certificate or its CA should be renewed, whichever is first, in Unix seconds: after two thirds of its life",
            metrics.renewal_due.clone(),
        );
        metrics
    }

    /// Shows until when a certificate and its CA are valid, and when the first of them should be renewed.
    pub fn serves(&self, ends: DateTime<Utc>, ca_ends: DateTime<Utc>, due: DateTime<Utc>) {
        for (gauge, at) in [
            (&self.not_after, ends),
            (&self.ca_not_after, ca_ends),
            (&self.renewal_due, due),
        ] {
            gauge.set((at - DateTime::UNIX_EPOCH).as_seconds_f64());
        }
    }
}

impl ViewMetrics {
    fn register(registry: &mut Registry) -> Self {
        let requests = Family::default();
        let seconds = Histogram::new(exponential_buckets(0.001, 2.0, 12));
        registry.register(
            "view_requests",
            "Requests for boosts in force, by HTTP status; only where the view is on",
            Family::clone(&requests),
        );
        registry.register(
            "view_duration_seconds",
            "From such a request to its answer, reviews of the caller included",
            seconds.clone(),
        );
        Self { requests, seconds }
    }
}

impl AdmissionMetrics {
    fn register(registry: &mut Registry) -> Self {
        let reviews = Family::<OutcomeLabels, Counter>::default();
        for reason in Reason::ALL {
            let _ = reviews.get_or_create(&OutcomeLabels {
                outcome: "skipped",
                reason: reason.as_str(),
            });
        }
        for outcome in [
            "boosted",
            "would_boost",
            "unmatched",
            "ignored",
            "unreadable",
        ] {
            let _ = reviews.get_or_create(&OutcomeLabels {
                outcome,
                reason: "",
            });
        }
        let clamped = Family::<ClampLabel, Counter>::default();
        for by in Clamp::ALL {
            let _ = clamped.get_or_create(&ClampLabel { by: by.as_str() });
        }
        let seconds = Histogram::new(exponential_buckets(1e-5, 2.0, 14));
        registry.register(
            "admission_clamped_containers",
            "Containers boosted by less than their policy says, by what bounds them; neither --dry-run nor the API server's dry runs are counted",
            clamped.clone(),
        );
        registry.register(
            "admission_reviews",
            "Admission reviews answered: boosted, would_boost (under --dry-run), skipped with its reason, unmatched, ignored (mirror pods), unreadable; the API server's dry runs are not counted",
            reviews.clone(),
        );
        registry.register(
            "admission_duration_seconds",
            "From a review's body to its answer",
            seconds.clone(),
        );
        Self {
            reviews,
            clamped,
            seconds,
        }
    }

    /// Counts an answer; `None` is one that must not be counted.
    pub fn answered(&self, outcome: Option<Outcome>, took: Duration) {
        let Some(outcome) = outcome else { return };
        let (outcome, reason) = match outcome {
            Outcome::Boosted => ("boosted", ""),
            Outcome::Skipped(reason) => ("skipped", reason.as_str()),
            Outcome::NoBoost => ("unmatched", ""),
            Outcome::Untouchable => ("ignored", ""),
        };
        self.count(outcome, reason);
        self.seconds.observe(took.as_secs_f64());
    }

    /// Counts an answer that a dry run has given about a pod that would have been boosted.
    pub fn would_boost(&self, took: Duration) {
        self.count("would_boost", "");
        self.seconds.observe(took.as_secs_f64());
    }

    /// Counts a container that got less than its policy says.
    pub fn clamped(&self, by: Clamp) {
        self.clamped
            .get_or_create(&ClampLabel { by: by.as_str() })
            .inc();
    }

    /// Counts a body that could not be read.
    pub fn unreadable(&self) {
        self.count("unreadable", "");
    }

    fn count(&self, outcome: &'static str, reason: &'static str) {
        let labels = OutcomeLabels { outcome, reason };
        self.reviews.get_or_create(&labels).inc();
    }
}

impl RevertMetrics {
    fn register(registry: &mut Registry) -> Self {
        let writes = Family::<WriteLabels, Counter>::default();
        for write in ["resize", "finish"] {
            let _ = writes.get_or_create(&WriteLabels {
                write,
                result: "Ok",
            });
        }
        let ended = Family::<EndLabel, Counter>::default();
        for by in EndedBy::ALL {
            let _ = ended.get_or_create(&EndLabel { by: by.as_str() });
        }
        let raises = Family::<RaiseLabels, Counter>::default();
        for cause in Cause::ALL {
            let _ = raises.get_or_create(&RaiseLabels {
                cause: cause.as_str(),
                result: "Ok",
            });
        }
        registry.register(
            "raises",
            "Pods that ran already: boosted by a resize (result Ok), or not and why; after a restart (cause Restart), or late because nobody answered when they were created (Late)",
            raises.clone(),
        );
        let lag = Histogram::new(exponential_buckets(0.01, 2.0, 16));
        registry.register("pod_writes", "On the leader: writes to pods: resize and finish of a revert, claim and raise of pods that ran already; by result, which is DryRun for those that --dry-run has told of instead", writes.clone());
        registry.register(
            "boosts_ended",
            "On the leader: ended boosts by cause",
            ended.clone(),
        );
        registry.register(
            "revert_lag_seconds",
            "On the leader: from the instant at which a boost was due to its resize",
            lag.clone(),
        );
        let events = Family::<ResultLabel, Counter>::default();
        for result in ["Ok", "Known", "Failed", "Dropped"] {
            let _ = events.get_or_create(&ResultLabel { result });
        }
        let stuck = Family::<ReasonLabel, Counter>::default();
        for reason in STUCK {
            let _ = stuck.get_or_create(&ReasonLabel { reason });
        }
        registry.register(
            "events",
            "On the leader: Events about boosts: Ok, Known (an earlier leader's), Failed, Dropped (more than ten a second)",
            Family::clone(&events),
        );
        registry.register(
            "boosts_stuck",
            "On the leader: boosts that could not be taken back when they were due, each counted once a reason",
            Family::clone(&stuck),
        );
        Self {
            events,
            stuck,
            writes,
            ended,
            raises,
            lag,
        }
    }

    /// Counts an Event.
    pub fn event(&self, result: &'static str) {
        self.events.get_or_create(&ResultLabel { result }).inc();
    }

    /// Counts a boost that something keeps from ending.
    pub fn stuck(&self, reason: &'static str) {
        self.stuck.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Counts a resize.
    pub fn reverted(&self, revert: &Revert, now: DateTime<Utc>, failure: Option<&Failure>) {
        self.wrote("resize", failure);
        if failure.is_none() {
            self.lag
                .observe((now - revert.due.at).as_seconds_f64().max(0.0));
        }
    }

    /// Counts a finish.
    pub fn finished(&self, finish: &Finish, failure: Option<&Failure>) {
        self.wrote("finish", failure);
        if let (None, Some((_, by))) = (failure, &finish.ended) {
            self.ended
                .get_or_create(&EndLabel { by: by.as_str() })
                .inc();
        }
    }

    /// Counts a boost of a pod that ran already: `result` is `Ok`, or the word for what kept it from being made.
    pub fn raised(&self, cause: Cause, result: &'static str) {
        let cause = cause.as_str();
        self.raises
            .get_or_create(&RaiseLabels { cause, result })
            .inc();
    }

    /// Counts a write to a pod.
    pub fn wrote(&self, write: &'static str, failure: Option<&Failure>) {
        self.count_write(write, failure.map_or("Ok", Failure::as_str));
    }

    /// Counts a write to a pod that a dry run has not made.
    pub fn would_write(&self, write: &'static str) {
        self.count_write(write, "DryRun");
    }

    fn count_write(&self, write: &'static str, result: &'static str) {
        let labels = WriteLabels { write, result };
        self.writes.get_or_create(&labels).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A zombie's work is dropped and not awaited; it used to say for ever that it leads.
    #[test]
    fn a_term_that_is_dropped_has_ended() {
        let metrics = Arc::new(Metrics::default());
        let term = metrics.lead();
        metrics.count_boosts([&"ns".to_owned()].into_iter());
        assert!(metrics.text().contains("headstart_leader 1"));
        drop(term);
        let text = metrics.text();
        assert!(text.contains("headstart_leader 0"));
        assert!(!text.contains("namespace=\"ns\""), "{text}");
    }
}
