//! The claims: pods that carry the label of a boost in force.
//!
//! Every replica keeps them, so that a new leader starts from a warm cache; only the leader acts on them.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kube::{Api, Client, runtime::watcher::Event};
use tokio::sync::Notify;

use crate::{
    api::{BOOST_KEY, Pod},
    domain::raise,
    watch::{Told, config, forever},
};

/// A pod's uid: names are used again. Shared, as several lists have it.
pub type Uid = Arc<str>;

/// The cache.
#[derive(Debug, Default)]
pub struct Claims {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    synced: bool,
    pods: HashMap<Uid, Arc<Pod>>,
    /// What has changed since the leader last asked; nobody asks while nobody leads here.
    changed: Option<BTreeSet<Uid>>,
}

impl Claims {
    /// Keeps the cache, for ever.
    pub async fn keep(&self, client: Client) {
        let mut listed: HashMap<Uid, Arc<Pod>> = HashMap::new();
        forever(
            Api::<Pod>::all(client),
            config().labels(BOOST_KEY),
            |told| match told {
                // Every API server has pods; an empty answer here would be a mistake.
                Told::Absent => {}
                Told::Event(Event::Init) => listed.clear(),
                Told::Event(Event::InitApply(mut pod)) => {
                    pod.trim();
                    raise::rest(&mut pod);
                    listed.insert(uid(&pod), Arc::new(pod));
                }
                Told::Event(Event::InitDone) => self.replace(std::mem::take(&mut listed)),
                Told::Event(Event::Apply(mut pod)) => {
                    pod.trim();
                    raise::rest(&mut pod);
                    let uid = uid(&pod);
                    self.change(uid, |pods, uid| {
                        pods.insert(uid, Arc::new(pod));
                    });
                }
                Told::Event(Event::Delete(pod)) => self.change(uid(&pod), |pods, uid| {
                    pods.remove(&uid);
                }),
            },
        )
        .await;
    }

    /// Whether the claims have been listed.
    #[must_use]
    pub fn synced(&self) -> bool {
        self.state().synced
    }

    /// The pod of that uid, as last seen.
    #[must_use]
    pub fn get(&self, uid: &str) -> Option<Arc<Pod>> {
        self.state().pods.get(uid).cloned()
    }

    /// Begins to follow: all claims count as changed.
    pub fn follow(&self) {
        let mut state = self.state();
        state.changed = Some(state.pods.keys().cloned().collect());
        self.changed.notify_one();
    }

    /// Ends it.
    pub fn unfollow(&self) {
        self.state().changed = None;
    }

    /// Waits for changes since the last call, and takes them. Only one task may follow.
    pub async fn changes(&self) -> BTreeSet<Uid> {
        loop {
            let changed = self.take_changes();
            if !changed.is_empty() {
                return changed;
            }
            self.changed.notified().await;
        }
    }

    /// Takes the changes since the last call, without waiting.
    pub fn take_changes(&self) -> BTreeSet<Uid> {
        let changed = &mut self.state().changed;
        changed.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nobody panics while holding it: maps are only read and changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn replace(&self, pods: HashMap<Uid, Arc<Pod>>) {
        let mut state = self.state();
        let old = std::mem::replace(&mut state.pods, pods);
        state.synced = true;
        let State { pods, changed, .. } = &mut *state;
        if let Some(changed) = changed {
            changed.extend(old.into_keys().chain(pods.keys().cloned()));
        }
        self.changed.notify_one();
    }

    fn change(&self, uid: Uid, apply: impl FnOnce(&mut HashMap<Uid, Arc<Pod>>, Uid)) {
        let mut state = self.state();
        if let Some(changed) = &mut state.changed {
            changed.insert(uid.clone());
        }
        apply(&mut state.pods, uid);
        self.changed.notify_one();
    }
}

/// The uid of a pod; the API server gives each one.
pub(crate) fn uid(pod: &Pod) -> Uid {
    pod.metadata.uid.as_deref().unwrap_or_default().into()
}
