//! The claims: pods that carry the label of a boost in force.
//!
//! Every replica keeps them, so that a new leader starts from a warm cache and all of them can show the boosts in force;
//! only the leader acts on them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Bound,
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
    /// The newest version that was seen.
    version: u64,
    pods: HashMap<Uid, Arc<Pod>>,
    /// Those whose boost is in force, in the order of lists. Of two that have had a place one after the other, the later
    /// counts.
    order: BTreeMap<Place, Arc<Pod>>,
    /// What has changed since the leader last asked; nobody asks while nobody leads here.
    changed: Option<BTreeSet<Uid>>,
}

/// A pod with what of it is kept.
#[derive(Debug)]
struct Kept {
    pod: Arc<Pod>,
    /// Whether its boost has not ended.
    in_force: bool,
}

impl Kept {
    fn of(mut pod: Pod) -> Self {
        pod.trim();
        let in_force = !raise::rest(&mut pod);
        let pod = Arc::new(pod);
        Self { pod, in_force }
    }
}

/// Where a pod stands in a list: by namespace, then by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The pod's namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl Place {
    /// A pod's.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
        let (namespace, name) = (&pod.metadata.namespace, &pod.metadata.name);
        Self {
            namespace: namespace.clone().unwrap_or_default(),
            name: name.clone().unwrap_or_default(),
        }
    }
}

impl Claims {
    /// Keeps the cache, for ever.
    pub async fn keep(&self, client: Client) {
        let mut listed: HashMap<Uid, Kept> = HashMap::new();
        forever(
            Api::<Pod>::all(client),
            config().labels(BOOST_KEY),
            |told| match told {
                // Every API server has pods; an empty answer here would be a mistake.
                Told::Absent => {}
                Told::Event(Event::Init) => listed.clear(),
                Told::Event(Event::InitApply(pod)) => {
                    listed.insert(uid(&pod), Kept::of(pod));
                }
                Told::Event(Event::InitDone) => self.replace(std::mem::take(&mut listed)),
                Told::Event(Event::Apply(pod)) => {
                    let (of, kept) = (uid(&pod), Kept::of(pod));
                    self.change(of, |state, uid| state.insert(uid, kept));
                }
                Told::Event(Event::Delete(pod)) => self.change(uid(&pod), |state, uid| {
                    state.see(&pod);
                    state.remove(&uid);
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

    /// The pod of that place.
    #[must_use]
    pub fn at(&self, place: &Place) -> Option<Arc<Pod>> {
        self.state().order.get(place).cloned()
    }

    /// At most so many pods whose place comes after that one, in order; of one namespace or of all. A pod that is there all
    /// the time is met exactly once by somebody who goes on from the last place of each answer.
    #[must_use]
    pub fn after(&self, place: &Place, namespace: Option<&str>, most: usize) -> Vec<Arc<Pod>> {
        let state = self.state();
        let after = (Bound::Excluded(place), Bound::Unbounded);
        let rest = state.order.range::<Place, _>(after);
        rest.take_while(|(place, _)| namespace.is_none_or(|of| place.namespace == of))
            .take(most)
            .map(|(_, pod)| Arc::clone(pod))
            .collect()
    }

    /// The newest `resourceVersion` that it has seen; `None` before the claims have been listed.
    #[must_use]
    pub fn version(&self) -> Option<u64> {
        let state = self.state();
        Some(state.version).filter(|_| state.synced)
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

    fn replace(&self, pods: HashMap<Uid, Kept>) {
        let mut state = self.state();
        let old = std::mem::take(&mut state.pods);
        state.order.clear();
        state.synced = true;
        for (uid, pod) in pods {
            state.insert(uid, pod);
        }
        let State { pods, changed, .. } = &mut *state;
        if let Some(changed) = changed {
            changed.extend(old.into_keys().chain(pods.keys().cloned()));
        }
        self.changed.notify_one();
    }

    fn change(&self, uid: Uid, apply: impl FnOnce(&mut State, Uid)) {
        let mut state = self.state();
        if let Some(changed) = &mut state.changed {
            changed.insert(uid.clone());
        }
        apply(&mut state, uid);
        self.changed.notify_one();
    }
}

impl State {
    fn insert(&mut self, uid: Uid, Kept { pod, in_force }: Kept) {
        self.see(&pod);
        let place = Place::of(&pod);
        if in_force {
            self.order.insert(place, Arc::clone(&pod));
        } else {
            self.order.remove(&place);
        }
        self.pods.insert(uid, pod);
    }

    fn remove(&mut self, uid: &Uid) {
        let Some(pod) = self.pods.remove(uid) else {
            return;
        };
        let place = Place::of(&pod);
        // Its place may have gone to another pod by now.
        let there = self.order.get(&place);
        if there.is_some_and(|there| Arc::ptr_eq(there, &pod)) {
            self.order.remove(&place);
        }
    }

    /// Notes a version. They are numbers of one sequence (KEP-5504); one that is none tells nothing.
    fn see(&mut self, pod: &Pod) {
        let version = pod.metadata.resource_version.as_deref();
        let version = version.and_then(|version| version.parse().ok());
        self.version = self.version.max(version.unwrap_or(0));
    }
}

/// The uid of a pod; the API server gives each one.
pub(crate) fn uid(pod: &Pod) -> Uid {
    pod.metadata.uid.as_deref().unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn pod(uid: usize, namespace: u8, name: u8) -> Arc<Pod> {
        let pod = json!({
            "metadata": {
                "uid": uid.to_string(), "resourceVersion": uid.to_string(),
                "namespace": format!("n{namespace}"), "name": format!("p{name}"),
            },
            "spec": {},
        });
        Arc::new(serde_json::from_value(pod).expect("a pod"))
    }

    fn insert(claims: &Claims, pod: &Arc<Pod>) {
        let kept = Kept::of(Pod::clone(pod));
        claims.change(uid(pod), |state, uid| state.insert(uid, kept));
    }

    fn remove(claims: &Claims, pod: &Arc<Pod>) {
        claims.change(uid(pod), |state, uid| state.remove(&uid));
    }

    #[test]
    fn a_pod_that_took_the_name_of_another_stays_when_that_one_goes() {
        let claims = Claims::default();
        let (old, new) = (pod(1, 0, 0), pod(2, 0, 0));
        insert(&claims, &old);
        insert(&claims, &new);
        remove(&claims, &old);
        let there = claims.at(&Place::of(&new)).expect("it is there");
        assert_eq!(there.metadata.uid.as_deref(), Some("2"));
        remove(&claims, &new);
        assert!(claims.at(&Place::of(&new)).is_none());
    }

    #[test]
    fn a_pod_whose_boost_has_ended_is_kept_for_restarts_and_not_listed() {
        let claims = Claims::default();
        let boosted = pod(1, 0, 0);
        insert(&claims, &boosted);
        let mut ended = Pod::clone(&boosted);
        let record = (
            crate::api::BOOST_KEY.to_owned(),
            r#"{"state":"Reverted"}"#.to_owned(),
        );
        ended
            .metadata
            .annotations
            .get_or_insert_default()
            .extend([record]);
        insert(&claims, &Arc::new(ended));
        assert!(claims.get("1").is_some(), "it is kept");
        assert!(claims.at(&Place::of(&boosted)).is_none(), "it is listed");
        insert(&claims, &boosted);
        assert!(
            claims.at(&Place::of(&boosted)).is_some(),
            "it is boosted again"
        );
    }

    #[test]
    fn nothing_is_known_before_the_first_list() {
        let claims = Claims::default();
        insert(&claims, &pod(7, 0, 0));
        assert!(claims.version().is_none());
        let listed = Kept::of(Pod::clone(&pod(8, 0, 0)));
        claims.replace(HashMap::from([("8".into(), listed)]));
        assert_eq!(claims.version(), Some(8));
        assert!(claims.at(&Place::of(&pod(7, 0, 0))).is_some());
    }

    proptest! {
        /// Pods come and go between the pages. (proptest prints the seed of a failure.)
        #[test]
        fn a_pod_that_stays_is_met_once_and_nobody_twice(
            stay in prop::collection::btree_set((0u8..3, 0u8..30), 0..40),
            changes in prop::collection::vec((0u8..3, 0u8..30, any::<bool>()), 0..60),
            most in 1usize..7,
            namespace in prop::option::of(0u8..3),
        ) {
            let claims = Claims::default();
            let stay: Vec<_> = stay.into_iter().enumerate().map(|(uid, at)| pod(uid, at.0, at.1)).collect();
            let places: BTreeSet<_> = stay.iter().map(|pod| Place::of(pod)).collect();
            for pod in &stay {
                insert(&claims, pod);
            }
            let namespace = namespace.map(|namespace| format!("n{namespace}"));
            let mut last = Place { namespace: namespace.clone().unwrap_or_default(), name: String::new() };
            let (mut met, mut changes) = (Vec::new(), changes.into_iter().enumerate());
            loop {
                let page = claims.after(&last, namespace.as_deref(), most);
                let Some(end) = page.last() else { break };
                last = Place::of(end);
                met.extend(page.iter().map(|pod| Place::of(pod)));
                for (uid, (namespace, name, comes)) in changes.by_ref().take(5) {
                    let pod = pod(1000 + uid, namespace, name);
                    let there = claims.at(&Place::of(&pod)).filter(|_| !places.contains(&Place::of(&pod)));
                    match (there, comes) {
                        (Some(there), false) => remove(&claims, &there),
                        (None, true) if !places.contains(&Place::of(&pod)) => insert(&claims, &pod),
                        _ => {}
                    }
                }
            }
            prop_assert!(met.windows(2).all(|two| two[0] < two[1]), "in order and once: {met:?}");
            let of_namespace = |place: &&Place| namespace.as_ref().is_none_or(|namespace| place.namespace == *namespace);
            let missed: Vec<_> = places.iter().filter(of_namespace).filter(|place| !met.contains(place)).collect();
            prop_assert!(missed.is_empty(), "{missed:?}");
        }
    }
}
