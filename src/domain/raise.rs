//! Which pods that run already are boosted by a resize: those of which a container has restarted, and those for which nobody
//! answered when they were created.
//!
//! Decided from the pod as it is, like all else: a restart is a `restartCount` above the one in the record. What the
//! containers get is [admission]'s decision, from the values that they have now; whether a node and a
//! quota have room for it, the API server and the kubelet say.

use std::iter;

use chrono::{DateTime, TimeDelta, Utc};

use super::{
    admission::{self, Settings},
    end::{self, EndSettings},
    policy::Policy,
    reason::Reason,
    record::{Cause, Record, State},
    revert::ContainerRevert,
    snapshot::Snapshot,
};
use crate::api::{ContainerStatus, Pod, Resources};

/// Namespaces that the webhook leaves out, beside our own.
const LEFT_OUT: [&str; 2] = ["kube-system", "kube-node-lease"];

/// A boost of a pod that runs: claim and record first, then a resize that raises CPU and changes nothing else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Raise {
    /// Why.
    pub cause: Cause,
    /// The containers, and what they are raised to.
    pub containers: Vec<ContainerRevert>,
    /// The claim: the boost's name.
    pub boost: String,
    /// The record's text.
    pub record: String,
}

/// Whether the claim of a pod outlives its boost. Where the boost is not known, it does if it did before: boosts that have not
/// been read yet must not cost all pods their claims.
pub(super) fn is_wanted(record: &Record, policy: Option<&Policy>, settings: EndSettings) -> bool {
    let wanted = policy.map_or(record.counts_restarts(), |policy| policy.boost_on_restart);
    settings.boost_on_restart || wanted
}

/// Whether the boost of a pod has ended. Of the pods that have a claim, these wait for a restart.
#[must_use]
pub fn rests(pod: &Pod) -> bool {
    let record = pod.record_text().and_then(|text| Record::read(text).ok());
    record.is_some_and(|record| record.state == State::Reverted)
}

/// Forgets what only a boost in force asks of a pod, where it has ended: claims that are kept for restarts are many. Before a
/// raise the pod is read anew. Tells whether it has ended.
pub fn rest(pod: &mut Pod) -> bool {
    if !rests(pod) {
        return false;
    }
    pod.metadata.owner_references = None;
    let conditions = &mut pod.status.conditions;
    conditions.retain(|condition| matches!(&*condition.kind, "Ready" | "PodResizePending"));
    conditions.shrink_to_fit();
    let spec = &mut pod.spec;
    for container in spec.containers.iter_mut().chain(&mut spec.init_containers) {
        (container.resources, container.resize_policy) = (Resources::default(), Vec::new());
    }
    let status = &mut pod.status;
    let statuses = status.container_statuses.iter_mut();
    for status in statuses.chain(&mut status.init_container_statuses) {
        status.allocated_resources = None;
    }
    true
}

/// The containers that have restarted since the record was written, and are still starting.
///
/// None of a crash loop: after one boost, the pod must have been Ready before it gets another.
pub(super) fn restarted(
    pod: &Pod,
    record: &Record,
    policy: &Policy,
    settings: EndSettings,
    now: DateTime<Utc>,
) -> Vec<String> {
    let is_ready = pod
        .condition("Ready")
        .is_some_and(|condition| condition.status == "True");
    let boosted = record.timestamp;
    let was_ready = is_ready || boosted.is_none_or(|boosted| was_ready_after(pod, boosted));
    if !was_ready || pod.is_over() || pod.condition("PodResizePending").is_some() {
        return Vec::new();
    }
    let has_restarted = |status: &&ContainerStatus| {
        let known = record.restarts(&status.name).unwrap_or(0);
        i64::from(status.restart_count) > known
    };
    let statuses = meant(pod, policy).filter_map(|name| pod.container_status(name));
    statuses
        .filter(has_restarted)
        .filter(|status| is_starting(pod, status, policy, settings, now))
        .map(|status| status.name.clone())
        .collect()
}

/// The containers that a policy fits.
fn meant<'a>(pod: &'a Pod, policy: &'a Policy) -> impl Iterator<Item = &'a str> {
    let regular = pod
        .spec
        .containers
        .iter()
        .map(|container| (container, false));
    let sidecars = pod.spec.init_containers.iter();
    let sidecars = sidecars.filter(|container| container.is_sidecar());
    regular
        .chain(sidecars.map(|container| (container, true)))
        .filter(|(container, is_init)| policy.for_container(&container.name, *is_init).is_some())
        .map(|(container, _)| container.name.as_str())
}

/// Whether a container runs and a boost that began with this run would not have ended yet.
fn is_starting(
    pod: &Pod,
    status: &ContainerStatus,
    policy: &Policy,
    settings: EndSettings,
    now: DateTime<Utc>,
) -> bool {
    let Some(began) = status.began() else {
        return false;
    };
    let (rule, name) = (&policy.end, status.name.as_str());
    let deadline = rule.deadline_seconds(settings);
    let due = rule.due_again(pod, iter::once(name), began, deadline, now);
    due.at > now && !rule.container_is_done(pod, name) && !was_ready_after(pod, began)
}

/// Whether the pod has ceased to be Ready after that instant, so that it was Ready at some time in between. The kubelet says
/// that a container has died before it starts it again.
fn was_ready_after(pod: &Pod, instant: DateTime<Utc>) -> bool {
    let unready = pod
        .condition("Ready")
        .filter(|condition| condition.status != "True");
    let since = unready.and_then(|condition| condition.last_transition_time);
    since.is_some_and(|since| since > instant)
}

/// The boost of containers that have restarted, by the boost that the record names, while that is for the pod.
///
/// # Errors
/// Why there is none.
pub fn again(
    snapshot: &Snapshot,
    settings: Settings,
    pod: &Pod,
    restarted: &[String],
    now: DateTime<Utc>,
) -> Result<Raise, Reason> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let policy = snapshot.boosts.of_pod(pod).filter(|policy| {
        let mut candidates = snapshot.candidates(namespace, pod.metadata.labels.as_ref());
        candidates.any(|candidate| (candidate.kind, &candidate.name) == (policy.kind, &policy.name))
    });
    let policy = policy.ok_or(Reason::NoContainer)?;
    admission::raise(
        snapshot,
        settings,
        pod,
        policy,
        Cause::Restart,
        restarted,
        now,
    )
}

/// The record that remembers the restarts of a pod that is not boosted for them; `None` where it could not be read again.
#[must_use]
pub fn given_up(pod: &Pod) -> Option<Record> {
    let record = Record::read(pod.record_text()?).ok()?;
    record.counting(pod.restarts())
}

/// The boost of a pod that has a node and is still starting, and for which nobody answered when it was created.
///
/// It carries no marks, and of the boosts that were there before it, one is for it. `own` is our own namespace, of which the
/// webhook is never asked.
#[must_use]
pub fn missed(
    snapshot: &Snapshot,
    settings: Settings,
    pod: &Pod,
    own: &str,
    now: DateTime<Utc>,
) -> Option<Raise> {
    let meta = &pod.metadata;
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    let unmarked = pod.claim().is_none() && pod.record_text().is_none();
    let is_left_out = namespace == own || LEFT_OUT.contains(&namespace);
    let is_over = meta.deletion_timestamp.is_some() || pod.is_over();
    let is_busy = !pod.has_node() || pod.condition("PodResizePending").is_some();
    if !unmarked || is_left_out || is_over || is_busy || admission::is_untouchable(pod) {
        return None;
    }
    let created = meta.creation_timestamp.as_ref()?;
    let created = DateTime::from_timestamp(created.0.as_second(), 0)?;
    let policy = snapshot
        .select(namespace, meta.labels.as_ref())
        .filter(|policy| policy.created <= created)?;
    let rule = &policy.end;
    let is_done = |name: &&str| rule.container_is_done(pod, name);
    let names: Vec<&str> = meant(pod, policy).filter(|name| !is_done(name)).collect();
    let deadline = rule.deadline_seconds(settings.end);
    let start = end::start(pod, Some(created))?;
    let due = rule.due_again(pod, names.iter().copied(), start, deadline, now);
    let latest = created + TimeDelta::seconds(i64::try_from(deadline).unwrap_or(0));
    if due.at <= now || latest <= now {
        return None;
    }
    let names: Vec<String> = names.into_iter().map(str::to_owned).collect();
    admission::raise(snapshot, settings, pod, policy, Cause::Late, &names, now).ok()
}
