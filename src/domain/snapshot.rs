//! What admission and the sweeper know of the cluster at one instant: immutable values, each replaced whole.

use std::{collections::HashMap, sync::Arc};

use super::{
    limit_range::LimitRanges,
    nodes::Nodes,
    policy::{BoostKind, Policy},
    quota::Quota,
    record::Record,
};
use crate::api::{Labels, Pod};

/// Something about each namespace that has any of it.
pub type ByNamespace<T> = HashMap<Arc<str>, T>;

/// Label with which a namespace opts out, and its value.
pub const DISABLED: (&str, &str) = (crate::api::BOOST_KEY, "disabled");

/// Everything that admission goes by.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// All compiled boosts.
    pub boosts: Arc<BoostIndex>,
    /// Labels of the namespaces.
    pub namespaces: Arc<ByNamespace<Arc<Labels>>>,
    /// LimitRanges, where there are any.
    pub limit_ranges: Arc<ByNamespace<LimitRanges>>,
    /// ResourceQuotas that bound CPU, where there are any.
    pub quotas: Arc<ByNamespace<Arc<Vec<Quota>>>>,
    /// The nodes.
    pub nodes: Arc<Nodes>,
}

impl Snapshot {
    /// The boost for a new pod: of all that match, the first of [`Snapshot::candidates`].
    #[must_use]
    pub fn select<'a>(
        &'a self,
        namespace: &'a str,
        labels: Option<&'a Labels>,
    ) -> Option<&'a Arc<Policy>> {
        self.candidates(namespace, labels).next()
    }

    /// All boosts that match a new pod, in order of precedence: those of its namespace, then those of the cluster; the
    /// oldest, then the first by name.
    pub fn candidates<'a>(
        &'a self,
        namespace: &'a str,
        labels: Option<&'a Labels>,
    ) -> impl Iterator<Item = &'a Arc<Policy>> {
        static NONE: Labels = Labels::new();
        let labels = labels.unwrap_or(&NONE);
        let of_namespace = self.labels(namespace).unwrap_or(&NONE);
        let own = self.boosts.namespaces.get(namespace).into_iter().flatten();
        let wide = self.boosts.cluster.iter();
        own.chain(wide.filter(|policy| policy.selects_namespace(of_namespace)))
            .filter(|policy| policy.selects(labels))
    }

    /// Whether the namespace has opted out.
    #[must_use]
    pub fn is_disabled(&self, namespace: &str) -> bool {
        self.labels(namespace)
            .and_then(|labels| labels.get(DISABLED.0))
            .is_some_and(|value| value == DISABLED.1)
    }

    /// The bounds of the namespace's LimitRanges.
    #[must_use]
    pub fn limit_ranges(&self, namespace: &str) -> LimitRanges {
        self.limit_ranges
            .get(namespace)
            .copied()
            .unwrap_or_default()
    }

    /// The namespace's quotas.
    #[must_use]
    pub fn quotas(&self, namespace: &str) -> &[Quota] {
        self.quotas
            .get(namespace)
            .map(|quotas| quotas.as_slice())
            .unwrap_or_default()
    }

    fn labels(&self, namespace: &str) -> Option<&Labels> {
        self.namespaces.get(namespace).map(AsRef::as_ref)
    }
}

/// All compiled boosts, each list in order of precedence, so that the first that matches wins.
#[derive(Clone, Debug, Default)]
pub struct BoostIndex {
    namespaces: HashMap<String, Vec<Arc<Policy>>>,
    cluster: Vec<Arc<Policy>>,
}

impl BoostIndex {
    /// Puts policies in order, each with its namespace (which means nothing for those of the cluster). The result does
    /// not depend on the order in which they come.
    pub fn new(policies: impl IntoIterator<Item = (String, Arc<Policy>)>) -> Self {
        let mut index = Self::default();
        for (namespace, policy) in policies {
            match policy.kind {
                BoostKind::Namespaced => {
                    index.namespaces.entry(namespace).or_default().push(policy);
                }
                BoostKind::Cluster => index.cluster.push(policy),
            }
        }
        let lists = index.namespaces.values_mut();
        for policies in lists.chain([&mut index.cluster]) {
            policies.sort_by(|a, b| precedence(a).cmp(&precedence(b)));
        }
        index
    }

    /// The boost that a pod's record names, or where there is none to read, its claim. Whether it still matches the pod
    /// makes no difference.
    #[must_use]
    pub fn of_pod(&self, pod: &Pod) -> Option<&Arc<Policy>> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let record = pod.record_text().and_then(|text| Record::read(text).ok());
        if let Some(boost) = record.and_then(|record| record.boost) {
            return self.named(boost.kind?, namespace, &boost.name);
        }
        let claim = pod.claim()?;
        self.named(BoostKind::Namespaced, namespace, claim)
            .or_else(|| self.named(BoostKind::Cluster, namespace, claim))
    }

    /// The boost of that kind and name.
    #[must_use]
    pub fn named(&self, kind: BoostKind, namespace: &str, name: &str) -> Option<&Arc<Policy>> {
        let policies = match kind {
            BoostKind::Namespaced => self.namespaces.get(namespace)?,
            BoostKind::Cluster => &self.cluster,
        };
        policies.iter().find(|policy| policy.name == name)
    }
}

/// Smaller wins.
fn precedence(policy: &Policy) -> impl Ord + '_ {
    (policy.created, policy.name.as_str())
}
