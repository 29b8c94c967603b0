//! Writes what the leader has to say of each boost into its status.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use chrono::SecondsFormat;
use kube::{
    Api, Client, Resource,
    api::{Patch, PatchParams},
};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::{
    api::{BoostStatus, ClusterStartupCPUBoost, Condition, StartupCPUBoost},
    boosts::{Boosts, Key, Stored, kind_of},
    clock::Clock,
    domain::policy::BoostKind,
    error::Chain,
    metrics::Metrics,
    sweeper::Tally,
};

/// A status is written at most this often.
const PAUSE: Duration = Duration::from_secs(2);
/// How long to wait for the counts before the first report.
const SETTLE_PATIENCE: Duration = Duration::from_secs(10);
/// How long the last report of a term may take: the lease is released after it.
const LAST_REPORT: Duration = Duration::from_secs(1);
/// How long a write may take.
const DEADLINE: Duration = Duration::from_secs(5);

/// Reports on boosts during a term.
#[derive(Clone)]
pub struct Reporter {
    /// Writes statuses.
    pub client: Client,
    /// The boosts.
    pub boosts: Arc<Boosts>,
    /// Counts boosted containers.
    pub tally: Arc<Tally>,
    /// Dates transitions.
    pub clock: Clock,
    /// Counts boosts.
    pub metrics: Arc<Metrics>,
    /// `--dry-run`: boosts are counted, and their statuses left as they are. They may be another operator's, and new pods are
    /// not boosted.
    pub dry_run: bool,
}

impl Reporter {
    /// Reports until the term ends.
    pub async fn lead(self, term: CancellationToken) {
        let (mut boosts, mut counts) = (self.boosts.changes(), self.tally.changes());
        let work = async {
            let settled = counts.wait_for(|()| self.tally.is_settled());
            let _ = timeout(SETTLE_PATIENCE, settled).await;
            loop {
                boosts.mark_unchanged();
                counts.mark_unchanged();
                let all_written = self.report().await;
                sleep(PAUSE).await;
                if all_written {
                    // The senders live as long as the caches.
                    let _ = tokio::select! {
                        changed = boosts.changed() => changed,
                        changed = counts.changed() => changed,
                    };
                }
            }
        };
        tokio::select! {
            () = term.cancelled() => {}
            () = work => {}
        }
        // What has ended since the last report would be forgotten otherwise. A leader that lost its lease to another is
        // refused: the other has written meanwhile, or goes on from this.
        let _ = timeout(LAST_REPORT, self.report()).await;
    }

    /// Writes the statuses that are not as they should be. Says whether all could be written.
    async fn report(&self) -> bool {
        let boosts = self.boosts.all();
        self.metrics
            .count_boosts(boosts.keys().map(|(namespace, _)| namespace));
        self.tally.retain(|key| boosts.contains_key(key));
        let mut counts = BTreeMap::new();
        let mut all_written = true;
        for (key, stored) in boosts {
            let count = self.tally.of(&key, &stored.status);
            let status = self.status(&key, &stored, count);
            if !self.dry_run && status != stored.status {
                all_written &= self.write(&key, &stored, &status).await;
            }
            counts.extend(count.map(|count| (key, count)));
        }
        self.metrics.count_containers(&counts);
        all_written
    }

    async fn write(&self, key: &Key, stored: &Stored, status: &BoostStatus) -> bool {
        let (namespace, name) = key;
        let client = self.client.clone();
        let written = match kind_of(key) {
            BoostKind::Namespaced => {
                let api = Api::<StartupCPUBoost>::namespaced(client, namespace);
                timeout(DEADLINE, patch(&api, name, stored, status)).await
            }
            BoostKind::Cluster => {
                let api = Api::<ClusterStartupCPUBoost>::all(client);
                timeout(DEADLINE, patch(&api, name, stored, status)).await
            }
        };
        match written {
            Ok(Ok(())) => return true,
            // It was deleted meanwhile.
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => return true,
            // It has changed; the watch tells how.
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => {}
            Ok(Err(error)) => {
                tracing::warn!(namespace, name, error = %Chain(&error), "a status was not written");
            }
            Err(_) => tracing::warn!(namespace, name, "a status was not written: no answer"),
        }
        false
    }

    /// The status that a boost should have; what others wrote into it stays.
    fn status(&self, key: &Key, stored: &Stored, count: Option<(u32, u32)>) -> BoostStatus {
        let mut status = stored.status.clone();
        let active = match &stored.policy {
            Ok(policy) => {
                status.end = Some(policy.end.describe());
                ("Active", "True", "Ready", "New pods are boosted".to_owned())
            }
            Err(error) => {
                status.end = None;
                ("Active", "False", "Invalid", error.to_string())
            }
        };
        self.set_condition(&mut status, stored.generation, active);
        let Some((active, total)) = count else {
            return status;
        };
        let number = |count| Some(i32::try_from(count).unwrap_or(i32::MAX));
        status.active_container_boosts = number(active);
        status.total_container_boosts = number(total);
        let known = status.conditions.iter().any(|it| it.kind == "Stuck");
        if let Some((pods, (reason, text))) = self.tally.troubles(key) {
            let message = match pods {
                1 => format!("CPU can't be taken back from a pod: {text}"),
                _ => format!("CPU can't be taken back from {pods} pods, for example: {text}"),
            };
            let stuck = ("Stuck", "True", reason, message);
            self.set_condition(&mut status, stored.generation, stuck);
        } else if known {
            let message = "CPU is taken back when it is due".to_owned();
            let well = ("Stuck", "False", "Reverted", message);
            self.set_condition(&mut status, stored.generation, well);
        }
        status
    }

    /// Sets a condition: its type, status, reason and message.
    fn set_condition(
        &self,
        status: &mut BoostStatus,
        generation: Option<i64>,
        (kind, value, reason, message): (&str, &str, &str, String),
    ) {
        let conditions = &mut status.conditions;
        let old = conditions.iter().position(|it| it.kind == kind);
        let since = old
            .map(|index| &conditions[index])
            .filter(|condition| condition.status == value)
            .map_or_else(
                || self.clock.now().to_rfc3339_opts(SecondsFormat::Secs, true),
                |condition| condition.last_transition_time.clone(),
            );
        let condition = Condition {
            kind: kind.to_owned(),
            status: value.to_owned(),
            observed_generation: generation,
            last_transition_time: since,
            reason: reason.to_owned(),
            message,
        };
        match old {
            Some(index) => conditions[index] = condition,
            None => conditions.push(condition),
        }
    }
}

/// Writes over the version that was read, or not at all: totals never go back.
async fn patch<K>(
    api: &Api<K>,
    name: &str,
    stored: &Stored,
    status: &BoostStatus,
) -> kube::Result<()>
where
    K: Resource + Clone + std::fmt::Debug + DeserializeOwned,
{
    let params = PatchParams {
        field_manager: Some("headstart".to_owned()),
        ..PatchParams::default()
    };
    let body = Patch::Merge(json!({
        "metadata": {"resourceVersion": stored.version},
        "status": status,
    }));
    api.patch_status(name, &params, &body).await.map(drop)
}
