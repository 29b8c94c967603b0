//! Puts together what admission goes by: each cache hands in its part, and replaces it whole.
//!
//! Admission reads without a lock. Nothing is published before every part has been read for the first time, so that no
//! pod is judged by half of what there is to know.

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwapOption;

use crate::{
    api::Labels,
    domain::{
        limit_range::LimitRanges,
        nodes::Nodes,
        quota::Quota,
        snapshot::{BoostIndex, ByNamespace, Snapshot},
    },
};

/// The published snapshot and its parts.
#[derive(Debug, Default)]
pub struct Snapshots {
    current: Arc<ArcSwapOption<Snapshot>>,
    parts: Mutex<Parts>,
}

/// The parts of a [`Snapshot`], each absent until it has been read.
#[derive(Debug, Default)]
pub struct Parts {
    /// See [`Snapshot::boosts`].
    pub boosts: Option<Arc<BoostIndex>>,
    /// See [`Snapshot::namespaces`].
    pub namespaces: Option<Arc<ByNamespace<Arc<Labels>>>>,
    /// See [`Snapshot::limit_ranges`].
    pub limit_ranges: Option<Arc<ByNamespace<LimitRanges>>>,
    /// See [`Snapshot::quotas`].
    pub quotas: Option<Arc<ByNamespace<Arc<Vec<Quota>>>>>,
    /// See [`Snapshot::nodes`].
    pub nodes: Option<Arc<Nodes>>,
}

impl Parts {
    fn whole(&self) -> Option<Snapshot> {
        Some(Snapshot {
            boosts: Arc::clone(self.boosts.as_ref()?),
            namespaces: Arc::clone(self.namespaces.as_ref()?),
            limit_ranges: Arc::clone(self.limit_ranges.as_ref()?),
            quotas: Arc::clone(self.quotas.as_ref()?),
            nodes: Arc::clone(self.nodes.as_ref()?),
        })
    }

    /// The parts that have not been read, for messages.
    fn missing(&self) -> Vec<&'static str> {
        [
            ("boosts", self.boosts.is_none()),
            ("namespaces", self.namespaces.is_none()),
            ("limitranges", self.limit_ranges.is_none()),
            ("resourcequotas", self.quotas.is_none()),
            ("nodes", self.nodes.is_none()),
        ]
        .into_iter()
        .filter_map(|(name, missing)| missing.then_some(name))
        .collect()
    }
}

impl Snapshots {
    /// The published snapshot, for readers; empty until all parts have been read.
    #[must_use]
    pub fn reader(&self) -> Arc<ArcSwapOption<Snapshot>> {
        Arc::clone(&self.current)
    }

    /// Changes parts and publishes.
    pub fn set(&self, change: impl FnOnce(&mut Parts)) {
        // Nobody panics while holding it: a part is replaced, nothing else.
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut parts);
        if let Some(snapshot) = parts.whole() {
            self.current.store(Some(Arc::new(snapshot)));
        }
    }

    /// The bounds of a namespace's LimitRanges; `None` until they have been read.
    #[must_use]
    pub fn limit_ranges(&self, namespace: &str) -> Option<LimitRanges> {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let all = parts.limit_ranges.as_ref()?;
        Some(all.get(namespace).copied().unwrap_or_default())
    }

    /// The parts that have not been read yet.
    #[must_use]
    pub fn missing(&self) -> Vec<&'static str> {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.missing()
    }
}
