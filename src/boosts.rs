//! The boosts that exist: watched on every replica, compiled once a change, published as a [`Snapshot`].
//!
//! Admission reads the snapshot without a lock; the sweeper asks it for a record's boost; the leader reports from here
//! what each object compiles to.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use arc_swap::ArcSwapOption;
use chrono::{DateTime, Utc};
use kube::{Api, Client, core::DeserializeGuard, runtime::watcher::Event};
use tokio::sync::watch;

use crate::{
    api::{BoostStatus, StartupCPUBoost},
    domain::{
        policy::{BoostKind, Policy, PolicyError},
        snapshot::Snapshot,
    },
    watch::{Told, config, forever},
};

/// A boost object as far as the operator is concerned.
#[derive(Clone, Debug)]
pub struct Stored {
    uid: Option<String>,
    /// The object's generation: which version of the spec this is.
    pub generation: Option<i64>,
    /// What it compiles to.
    pub policy: Result<Arc<Policy>, PolicyError>,
    /// What its status says.
    pub status: BoostStatus,
}

/// Namespace and name.
type Key = (String, String);

/// The cache.
#[derive(Debug)]
pub struct Boosts {
    /// Empty until the boosts have been read for the first time.
    pub snapshot: Arc<ArcSwapOption<Snapshot>>,
    stored: Mutex<BTreeMap<Key, Stored>>,
    specs: watch::Sender<()>,
    changes: watch::Sender<()>,
}

impl Default for Boosts {
    fn default() -> Self {
        Self {
            snapshot: Arc::default(),
            stored: Mutex::default(),
            specs: watch::Sender::new(()),
            changes: watch::Sender::new(()),
        }
    }
}

impl Boosts {
    /// Keeps the cache, for ever.
    pub async fn keep(&self, client: Client) {
        // A guard per object: one that can't be read must not fail the list.
        let api: Api<DeserializeGuard<StartupCPUBoost>> = Api::all(client);
        let mut listed = BTreeMap::new();
        forever(api, config(), |told| match told {
            Told::Absent => self.replace(BTreeMap::new()),
            Told::Event(Event::Init) => listed.clear(),
            Told::Event(Event::InitApply(object)) => {
                let (key, stored) = read(object);
                listed.insert(key, stored);
            }
            Told::Event(Event::InitDone) => self.replace(std::mem::take(&mut listed)),
            Told::Event(Event::Apply(object)) => {
                let (key, stored) = read(object);
                self.update(key, Some(stored));
            }
            Told::Event(Event::Delete(object)) => {
                let (key, _) = read(object);
                self.update(key, None);
            }
        })
        .await;
    }

    /// Whether the boosts have been read.
    #[must_use]
    pub fn synced(&self) -> bool {
        self.snapshot.load().is_some()
    }

    /// All of them, by namespace and name.
    #[must_use]
    pub fn all(&self) -> BTreeMap<Key, Stored> {
        self.stored().clone()
    }

    /// Tells of changes that may change an answer or an end.
    #[must_use]
    pub fn specs(&self) -> watch::Receiver<()> {
        self.specs.subscribe()
    }

    /// Tells of all changes, of statuses too.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    fn stored(&self) -> std::sync::MutexGuard<'_, BTreeMap<Key, Stored>> {
        // Nobody panics while holding it: the map is only read and replaced.
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn replace(&self, new: BTreeMap<Key, Stored>) {
        *self.stored() = new;
        self.publish();
        self.changes.send_replace(());
    }

    fn update(&self, key: Key, new: Option<Stored>) {
        let same_spec = {
            let mut stored = self.stored();
            let old = stored.remove(&key);
            let same = match (&old, &new) {
                (Some(old), Some(new)) => old.uid == new.uid && old.generation == new.generation,
                _ => false,
            };
            if let Some(mut new) = new {
                if let (true, Some(old)) = (same, old) {
                    new.policy = old.policy;
                }
                stored.insert(key, new);
            }
            same
        };
        // Our own status writes come back as events; they change no answer.
        if !same_spec {
            self.publish();
        }
        self.changes.send_replace(());
    }

    fn publish(&self) {
        let policies: Vec<_> = self
            .stored()
            .iter()
            .filter_map(|((namespace, _), stored)| {
                Some((namespace.clone(), stored.policy.clone().ok()?))
            })
            .collect();
        self.snapshot.store(Some(Arc::new(Snapshot::new(policies))));
        self.specs.send_replace(());
    }
}

fn read(DeserializeGuard(object): DeserializeGuard<StartupCPUBoost>) -> (Key, Stored) {
    let (metadata, status) = match &object {
        Ok(boost) => (boost.metadata.clone(), boost.status.clone()),
        Err(invalid) => (invalid.metadata.clone(), None),
    };
    let name = metadata.name.unwrap_or_default();
    let policy = match object {
        Ok(boost) => Policy::compile(
            BoostKind::Namespaced,
            &name,
            created(metadata.creation_timestamp.as_ref()),
            &boost,
        ),
        Err(invalid) => Err(PolicyError {
            field: "spec".to_owned(),
            problem: invalid.error,
        }),
    };
    let key = (metadata.namespace.unwrap_or_default(), name);
    if let Err(error) = &policy {
        tracing::warn!(namespace = key.0, name = key.1, %error, "a boost can't be applied");
    }
    let stored = Stored {
        uid: metadata.uid,
        generation: metadata.generation,
        policy: policy.map(Arc::new),
        status: status.unwrap_or_default(),
    };
    (key, stored)
}

fn created(time: Option<&k8s_openapi::apimachinery::pkg::apis::meta::v1::Time>) -> DateTime<Utc> {
    time.and_then(|time| DateTime::from_timestamp(time.0.as_second(), 0))
        .unwrap_or_default()
}
