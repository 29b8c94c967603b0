//! The boosts that exist, of both kinds: watched on every replica, compiled once a change, published as a
//! [`BoostIndex`].
//!
//! Admission goes by it, as part of its snapshot; the sweeper asks it for a record's boost; the leader reports from here
//! what each object compiles to.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    sync::{Arc, Mutex, PoisonError},
};

use arc_swap::ArcSwapOption;
use chrono::{DateTime, Utc};
use kube::{Api, Client, Resource, core::DeserializeGuard, runtime::watcher::Event};
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::{
    api::{BoostObject, BoostStatus, ClusterStartupCPUBoost, StartupCPUBoost},
    domain::{
        policy::{BoostKind, Policy, PolicyError},
        snapshot::BoostIndex,
    },
    snapshots::Snapshots,
    watch::{Told, config, forever},
};

/// A boost object as far as the operator is concerned.
#[derive(Clone, Debug)]
pub struct Stored {
    uid: Option<String>,
    /// The object's generation: which version of the spec this is.
    pub generation: Option<i64>,
    /// The version that was read.
    pub version: Option<String>,
    /// What it compiles to.
    pub policy: Result<Arc<Policy>, PolicyError>,
    /// What its status says.
    pub status: BoostStatus,
}

/// Namespace and name; a boost of the cluster has no namespace.
pub type Key = (String, String);

/// The cache.
#[derive(Debug)]
pub struct Boosts {
    snapshots: Arc<Snapshots>,
    /// Empty until the boosts have been read for the first time.
    index: ArcSwapOption<BoostIndex>,
    stored: Mutex<Stores>,
    specs: watch::Sender<()>,
    changes: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Stores {
    all: BTreeMap<Key, Stored>,
    /// Whether the namespaced ones have been read, and those of the cluster.
    synced: [bool; 2],
}

impl Boosts {
    /// An empty cache that hands its part to `snapshots`.
    #[must_use]
    pub fn new(snapshots: Arc<Snapshots>) -> Self {
        Self {
            snapshots,
            index: ArcSwapOption::empty(),
            stored: Mutex::default(),
            specs: watch::Sender::new(()),
            changes: watch::Sender::new(()),
        }
    }

    /// Keeps the cache, for ever.
    pub async fn keep(&self, client: Client) {
        tokio::join!(
            self.keep_kind::<StartupCPUBoost>(client.clone(), BoostKind::Namespaced),
            self.keep_kind::<ClusterStartupCPUBoost>(client, BoostKind::Cluster),
        );
    }

    async fn keep_kind<K>(&self, client: Client, kind: BoostKind)
    where
        K: BoostObject + Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send,
        K: 'static,
    {
        // A guard per object: one that can't be read must not fail the list.
        let api: Api<DeserializeGuard<K>> = Api::all(client);
        let mut listed = BTreeMap::new();
        forever(api, config(), |told| match told {
            Told::Absent => self.replace(kind, BTreeMap::new()),
            Told::Event(Event::Init) => listed.clear(),
            Told::Event(Event::InitApply(object)) => {
                let (key, stored) = read(object);
                listed.insert(key, stored);
            }
            Told::Event(Event::InitDone) => self.replace(kind, std::mem::take(&mut listed)),
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

    /// All compiled boosts; empty until they have been read for the first time.
    #[must_use]
    pub fn index(&self) -> Option<Arc<BoostIndex>> {
        self.index.load_full()
    }

    /// Whether the boosts have been read.
    #[must_use]
    pub fn synced(&self) -> bool {
        self.index.load().is_some()
    }

    /// All of them, by namespace and name.
    #[must_use]
    pub fn all(&self) -> BTreeMap<Key, Stored> {
        self.stored().all.clone()
    }

    /// All their names.
    #[must_use]
    pub fn keys(&self) -> Vec<Key> {
        self.stored().all.keys().cloned().collect()
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

    fn stored(&self) -> std::sync::MutexGuard<'_, Stores> {
        // Nobody panics while holding it: the map is only read and replaced.
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn replace(&self, kind: BoostKind, new: BTreeMap<Key, Stored>) {
        {
            let mut stored = self.stored();
            stored.all.retain(|key, _| kind_of(key) != kind);
            stored.all.extend(new);
            stored.synced[usize::from(kind == BoostKind::Cluster)] = true;
        }
        self.publish();
        self.changes.send_replace(());
    }

    fn update(&self, key: Key, new: Option<Stored>) {
        let same_spec = {
            let all = &mut self.stored().all;
            let old = all.remove(&key);
            let same = match (&old, &new) {
                (Some(old), Some(new)) => old.uid == new.uid && old.generation == new.generation,
                _ => false,
            };
            if let Some(mut new) = new {
                if let (true, Some(old)) = (same, old) {
                    new.policy = old.policy;
                }
                all.insert(key, new);
            }
            same
        };
        // Our own status writes come back as events; they change no answer.
        if !same_spec {
            self.publish();
        }
        self.changes.send_replace(());
    }

    /// Publishes what compiles, once both kinds have been read.
    fn publish(&self) {
        let index = {
            let stored = self.stored();
            if stored.synced != [true; 2] {
                return;
            }
            let all = stored.all.iter();
            Arc::new(BoostIndex::new(all.filter_map(
                |((namespace, _), stored)| Some((namespace.clone(), stored.policy.clone().ok()?)),
            )))
        };
        self.index.store(Some(Arc::clone(&index)));
        self.snapshots.set(|parts| parts.boosts = Some(index));
        self.specs.send_replace(());
    }
}

/// Which kind of boost a key is of.
#[must_use]
pub fn kind_of((namespace, _): &Key) -> BoostKind {
    if namespace.is_empty() {
        BoostKind::Cluster
    } else {
        BoostKind::Namespaced
    }
}

/// Reads an object that may be invalid.
pub(crate) fn read<K>(DeserializeGuard(object): DeserializeGuard<K>) -> (Key, Stored)
where
    K: BoostObject + Resource<DynamicType = ()>,
{
    let (metadata, status) = match &object {
        Ok(boost) => (boost.meta().clone(), boost.status().cloned()),
        Err(invalid) => (invalid.metadata.clone(), None),
    };
    let name = metadata.name.unwrap_or_default();
    let policy = match object {
        Ok(boost) => Policy::compile(&name, created(metadata.creation_timestamp.as_ref()), &boost),
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
        version: metadata.resource_version,
        policy: policy.map(Arc::new),
        status: status.unwrap_or_default(),
    };
    (key, stored)
}

/// When an object was created.
pub(crate) fn created(
    time: Option<&k8s_openapi::apimachinery::pkg::apis::meta::v1::Time>,
) -> DateTime<Utc> {
    time.and_then(|time| DateTime::from_timestamp(time.0.as_second(), 0))
        .unwrap_or_default()
}
