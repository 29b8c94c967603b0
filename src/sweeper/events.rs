//! Events on pods: what `kubectl describe pod` shows of a boost's end, of what keeps it from ending, and of boosts of pods that
//! run already.
//!
//! Events of success go through a bounded queue, at most ten a second; what does not fit is counted and dropped. Failures
//! always get one, once a boost and reason: the name says which, so that the next leader's is the same and is refused.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, Client, api::PostParams};
use tokio::{
    sync::{Mutex, mpsc},
    time::{interval, timeout},
};

use crate::{
    api::Pod,
    clock::Clock,
    domain::{
        cpu::Cpu,
        end::EndedBy,
        quantity::MilliCpu,
        raise::Raise,
        record::{Cause, LoanValue, Record, Set},
        revert::Finish,
    },
    error::Chain,
    metrics::RevertMetrics,
};

/// Events of success that wait.
const QUEUE: usize = 100;
/// Between two events of success.
const PACE: Duration = Duration::from_millis(100);
/// How long a write may take.
const DEADLINE: Duration = Duration::from_secs(5);
/// Longest note in bytes that the API server takes.
const LONGEST_NOTE: usize = 1024;
/// Who reports.
const CONTROLLER: &str = "autoscaling.x-k8s.io/headstart";

/// Takes events; [`Events::keep`] writes them.
pub struct Events {
    client: Client,
    instance: String,
    clock: Clock,
    metrics: RevertMetrics,
    successes: (mpsc::Sender<Event>, Mutex<mpsc::Receiver<Event>>),
    failures: (
        mpsc::UnboundedSender<Event>,
        Mutex<mpsc::UnboundedReceiver<Event>>,
    ),
}

impl Events {
    /// Events of the replica `instance`.
    #[must_use]
    pub fn new(client: Client, instance: String, clock: Clock, metrics: RevertMetrics) -> Self {
        let (success, successes) = mpsc::channel(QUEUE);
        let (failure, failures) = mpsc::unbounded_channel();
        Self {
            client,
            instance,
            clock,
            metrics,
            successes: (success, Mutex::new(successes)),
            failures: (failure, Mutex::new(failures)),
        }
    }

    /// Writes events, for ever.
    pub async fn keep(&self) {
        let failures = async {
            let mut failures = self.failures.1.lock().await;
            while let Some(event) = failures.recv().await {
                self.write(event).await;
            }
        };
        let successes = async {
            let mut successes = self.successes.1.lock().await;
            let mut pace = interval(PACE);
            while let Some(event) = successes.recv().await {
                pace.tick().await;
                self.write(event).await;
            }
        };
        tokio::join!(failures, successes);
    }

    /// A boost has ended.
    pub(super) fn ended(&self, pod: &Pod, finish: &Finish) {
        let Some((record, by)) = &finish.ended else {
            return;
        };
        let reason = match by {
            EndedBy::Superseded => "BoostSuperseded",
            _ => "BoostEnded",
        };
        let note = self.end_note(record, *by);
        let event = self.event(pod, record.timestamp, "Revert", "Normal", reason, note);
        self.succeeded(event);
    }

    fn succeeded(&self, event: Event) {
        if self.successes.0.try_send(event).is_err() {
            self.metrics.event("Dropped");
        }
    }

    /// A pod that runs was boosted.
    pub(super) fn raised(&self, pod: &Pod, raise: &Raise) {
        let record = Record::read(&raise.record).ok();
        let containers = record.map_or_else(String::new, |record| spell_out(&record, false));
        let why = match raise.cause {
            Cause::Restart => "after a restart",
            Cause::Late => "late, as nobody answered when the pod was created",
        };
        let note = format!("CPU boost by {} {why}: {containers}", raise.boost);
        let event = self.event(
            pod,
            Some(self.clock.now()),
            "Boost",
            "Normal",
            "Boosted",
            note,
        );
        self.succeeded(event);
    }

    /// A pod that runs is not boosted. `reason` is a word of a closed list.
    pub(super) fn not_raised(&self, pod: &Pod, cause: Cause, reason: &str, text: &str) {
        let why = match cause {
            Cause::Restart => "again after a restart",
            Cause::Late => "late",
        };
        let note = format!("The pod is not boosted {why}: {text}");
        let event = self.event(
            pod,
            Some(self.clock.now()),
            "Boost",
            "Warning",
            reason,
            note,
        );
        // The receiver lives as long as this.
        let _ = self.failures.0.send(event);
    }

    /// Something keeps a boost from ending. `reason` is a word of a closed list.
    pub(super) fn failed(&self, pod: &Pod, reason: &str, text: &str) {
        let record = pod.record_text().and_then(|text| Record::read(text).ok());
        let boosted = record.and_then(|record| record.timestamp);
        let note =
            format!("The CPU boost could not be taken back, and will be tried again: {text}");
        let event = self.event(pod, boosted, "Revert", "Warning", reason, note);
        // The receiver lives as long as this.
        let _ = self.failures.0.send(event);
    }

    fn end_note(&self, record: &Record, by: EndedBy) -> String {
        let boost = record.boost.as_ref();
        let boost = boost.map_or(String::new(), |boost| format!(" by {}", boost.name));
        let after = record.timestamp.map_or(String::new(), |began| {
            format!(
                " after {}s",
                (self.clock.now() - began).num_seconds().max(0)
            )
        });
        format!(
            "CPU boost{boost} ended{after} ({}): {}",
            by.as_str(),
            spell_out(record, true)
        )
    }

    fn event(
        &self,
        pod: &Pod,
        boosted: Option<chrono::DateTime<chrono::Utc>>,
        action: &str,
        kind: &str,
        reason: &str,
        mut note: String,
    ) -> Event {
        let meta = &pod.metadata;
        while note.len() > LONGEST_NOTE {
            note.pop();
        }
        let mut hash = DefaultHasher::new();
        (&meta.uid, boosted, reason).hash(&mut hash);
        let name = meta.name.clone().unwrap_or_default();
        let now = Timestamp::from_microsecond(self.clock.now().timestamp_micros());
        Event {
            metadata: ObjectMeta {
                name: Some(format!("{name}.{:016x}", hash.finish())),
                namespace: meta.namespace.clone(),
                ..ObjectMeta::default()
            },
            action: Some(action.to_owned()),
            event_time: now.ok().map(MicroTime),
            note: Some(note),
            reason: Some(reason.to_owned()),
            regarding: Some(ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: Some(name),
                namespace: meta.namespace.clone(),
                uid: meta.uid.clone(),
                resource_version: meta.resource_version.clone(),
                ..ObjectReference::default()
            }),
            reporting_controller: Some(CONTROLLER.to_owned()),
            reporting_instance: Some(self.instance.clone()),
            type_: Some(kind.to_owned()),
            ..Event::default()
        }
    }

    async fn write(&self, event: Event) {
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let api = Api::<Event>::namespaced(self.client.clone(), &namespace);
        let params = PostParams::default();
        match timeout(DEADLINE, api.create(&params, &event)).await {
            Ok(Ok(_)) => self.metrics.event("Ok"),
            // An earlier leader has said it.
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => {
                self.metrics.event("Known");
            }
            Ok(Err(error)) => {
                self.metrics.event("Failed");
                let name = event.metadata.name;
                tracing::debug!(namespace, name, error = %Chain(&error), "an Event was not written");
            }
            Err(_) => self.metrics.event("Failed"),
        }
    }
}

/// Each container's values on their way back, or up.
fn spell_out(record: &Record, back: bool) -> String {
    let containers = record.containers.iter().filter_map(|(name, loan)| {
        let loan = loan.as_ref().ok()?;
        let values = |set| Cpu {
            request: value(loan.request, set),
            limit: value(loan.limit, set),
        };
        Some(format!("{name} {} -> {}", values(back), values(!back)))
    });
    containers.collect::<Vec<_>>().join(", ")
}

/// One value as it was set, or as it was before.
fn value(value: Option<LoanValue>, set: bool) -> Option<MilliCpu> {
    value.and_then(|value| match (set, value.set) {
        (true, Set::To(cpu)) => Some(cpu),
        (true, Set::Removed | Set::Unrecorded) => None,
        (false, _) | (true, Set::Untouched) => Some(value.original),
    })
}
