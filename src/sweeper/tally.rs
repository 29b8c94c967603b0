//! How many containers are boosted, and how many were, by boost.
//!
//! Counted from the claims that come and go, whoever ends them. The totals outlive the leader in the boosts' statuses:
//! `total = ended + active`, and a new term goes on from what is stored.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

use crate::{
    api::{BoostStatus, Pod},
    boosts::Key,
    claims::Uid,
    domain::{
        policy::BoostKind,
        record::{Record, State},
    },
};

/// The counts of a term.
#[derive(Debug)]
pub struct Tally {
    counts: Mutex<Counts>,
    changes: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Whether all claims that there were at the begin of the term have been counted.
    settled: bool,
    claims: HashMap<Uid, (Key, u32)>,
    /// What keeps boosts from ending.
    troubles: BTreeMap<Uid, (Key, Trouble)>,
    boosts: BTreeMap<Key, Count>,
}

/// What keeps a boost from ending: a word, and what the API server or the kubelet says.
pub(crate) type Trouble = (&'static str, String);

/// The containers of one boost.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    active: u32,
    /// In this term.
    ended: u32,
    /// Active when the term had settled.
    at_begin: u32,
    /// Ended before this term, once that is known.
    before: Option<u32>,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            counts: Mutex::default(),
            changes: watch::Sender::new(()),
        }
    }
}

impl Tally {
    /// Tells of all changes.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Counts a claim, once.
    pub(super) fn add(&self, uid: &Uid, pod: &Pod) {
        let mut counts = self.counts();
        if counts.claims.contains_key(uid) {
            return;
        }
        let Some((key, containers)) = of(pod) else {
            return;
        };
        counts.boosts.entry(key.clone()).or_default().active += containers;
        counts.claims.insert(Arc::clone(uid), (key, containers));
        self.changes.send_replace(());
    }

    /// A claim has gone.
    pub(super) fn remove(&self, uid: &str) {
        let mut counts = self.counts();
        counts.troubles.remove(uid);
        if let Some((key, containers)) = counts.claims.remove(uid) {
            let count = counts.boosts.entry(key).or_default();
            count.active -= containers;
            count.ended += containers;
            self.changes.send_replace(());
        }
    }

    /// Something keeps a claim's boost from ending, or no longer does.
    pub(super) fn trouble(&self, uid: &Uid, trouble: Option<(&'static str, &str)>) {
        let mut counts = self.counts();
        let key = counts.claims.get(uid).map(|(key, _)| key.clone());
        match key.zip(trouble) {
            Some((key, (reason, text))) => {
                let trouble = (reason, text.to_owned());
                counts.troubles.insert(Arc::clone(uid), (key, trouble));
            }
            None if counts.troubles.remove(uid).is_none() => return,
            None => {}
        }
        self.changes.send_replace(());
    }

    /// How many of a boost's claims can't end, and what is the matter with the first.
    #[must_use]
    pub(crate) fn troubles(&self, key: &Key) -> Option<(usize, Trouble)> {
        let counts = self.counts();
        let mut troubles = counts.troubles.values().filter(|(of, _)| of == key);
        let (_, first) = troubles.next()?;
        Some((troubles.count() + 1, first.clone()))
    }

    /// All claims that there were at the begin of the term have been counted.
    pub(super) fn settle(&self) {
        let mut counts = self.counts();
        counts.settled = true;
        for count in counts.boosts.values_mut() {
            count.at_begin = count.active;
        }
        self.changes.send_replace(());
    }

    /// The term has ended: what was counted is worth nothing in another.
    pub(super) fn clear(&self) {
        *self.counts() = Counts::default();
    }

    /// Whether the counts are known.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.counts().settled
    }

    /// Containers that are boosted now, and all that ever were; `None` until that is known. `stored` is what the boost's
    /// status says at the first time of asking.
    #[must_use]
    pub fn of(&self, key: &Key, stored: &BoostStatus) -> Option<(u32, u32)> {
        let mut counts = self.counts();
        if !counts.settled {
            return None;
        }
        let count = counts.boosts.entry(key.clone()).or_default();
        let before = *count.before.get_or_insert_with(|| {
            let number = |value: Option<i32>| u32::try_from(value.unwrap_or(0)).unwrap_or(0);
            let total = number(stored.total_container_boosts);
            // Those that were counted as active then and are active still must not count as ended.
            let active = number(stored.active_container_boosts).min(count.at_begin);
            total.saturating_sub(active)
        });
        Some((count.active, before + count.ended + count.active))
    }

    /// Forgets boosts that are no more, for whose objects nobody asks.
    pub fn retain(&self, exists: impl Fn(&Key) -> bool) {
        let mut counts = self.counts();
        counts
            .boosts
            .retain(|key, count| count.active > 0 || exists(key));
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        // Nobody panics while holding it: numbers are added.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which boost a claim counts for, and how many containers: those that its record names.
fn of(pod: &Pod) -> Option<(Key, u32)> {
    let record = pod.record_text().and_then(|text| Record::read(text).ok());
    if record
        .as_ref()
        .is_some_and(|record| record.state == State::Reverted)
    {
        return None;
    }
    let containers = record.as_ref().map_or(1, |record| {
        let known = record.containers.keys();
        let known = known.filter(|name| pod.container(name).is_some());
        u32::try_from(known.count()).unwrap_or(u32::MAX)
    });
    let boost = record.and_then(|record| record.boost);
    let (kind, name) = match boost {
        Some(boost) => (boost.kind?, boost.name),
        None => (BoostKind::Namespaced, pod.claim()?.to_owned()),
    };
    let namespace = match kind {
        BoostKind::Namespaced => pod.metadata.namespace.clone().unwrap_or_default(),
        BoostKind::Cluster => String::new(),
    };
    Some(((namespace, name), containers))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(containers: &[&str]) -> Pod {
        let originals: BTreeMap<&str, &str> = containers.iter().map(|name| (*name, "1")).collect();
        let record =
            json!({"state": "Active", "initCPURequests": originals, "boost": "b"}).to_string();
        let containers: Vec<_> = containers
            .iter()
            .map(|name| json!({"name": name}))
            .collect();
        serde_json::from_value(json!({
            "metadata": {"namespace": "ns", "labels": {crate::api::BOOST_KEY: "b"}, "annotations": {crate::api::BOOST_KEY: record}},
            "spec": {"containers": containers},
        }))
        .expect("a pod")
    }

    fn key() -> Key {
        ("ns".to_owned(), "b".to_owned())
    }

    fn stored(active: i32, total: i32) -> BoostStatus {
        BoostStatus {
            active_container_boosts: Some(active),
            total_container_boosts: Some(total),
            ..BoostStatus::default()
        }
    }

    #[test]
    fn claims_count_once_and_end_once() {
        let tally = Tally::default();
        assert_eq!(tally.of(&key(), &BoostStatus::default()), None);
        tally.settle();
        assert_eq!(tally.of(&key(), &BoostStatus::default()), Some((0, 0)));
        tally.add(&"u".into(), &pod(&["app", "side"]));
        tally.add(&"u".into(), &pod(&["app", "side"]));
        tally.add(&"v".into(), &pod(&["app"]));
        assert_eq!(tally.of(&key(), &BoostStatus::default()), Some((3, 3)));
        tally.remove("u");
        tally.remove("u");
        assert_eq!(tally.of(&key(), &BoostStatus::default()), Some((1, 3)));
    }

    #[test]
    fn a_new_term_goes_on_from_what_is_stored() {
        // (active and total as stored, active at the begin) and the total that follows.
        for (active, total, found, expected) in [
            (0, 0, 0, 0),
            (1, 1, 1, 1),
            (1, 5, 0, 5), // it ended while nobody led
            (0, 5, 1, 6), // it began while nobody led
            (3, 7, 1, 7),
            (1, 7, 3, 9),
        ] {
            let tally = Tally::default();
            for index in 0..found {
                tally.add(&index.to_string().into(), &pod(&["app"]));
            }
            tally.settle();
            let counted = tally.of(&key(), &stored(active, total));
            assert_eq!(counted, Some((found, expected)), "{active} {total} {found}");
            tally.remove("0");
            // What is written meanwhile is our own, and not counted again.
            let again = tally.of(&key(), &stored(9, 99));
            assert_eq!(again, Some((found.saturating_sub(1), expected)));
        }
    }
}
