//! What admission and the sweeper know of the cluster at one instant: an immutable value, replaced whole.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use super::policy::Policy;

/// All compiled boosts, by namespace.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Sorted by [`precedence`], so that the first that matches wins.
    namespaces: HashMap<String, Vec<Arc<Policy>>>,
}

impl Snapshot {
    /// Puts policies in order. The result does not depend on the order in which they come.
    pub fn new(policies: impl IntoIterator<Item = (String, Arc<Policy>)>) -> Self {
        let mut namespaces: HashMap<String, Vec<Arc<Policy>>> = HashMap::new();
        for (namespace, policy) in policies {
            namespaces.entry(namespace).or_default().push(policy);
        }
        for policies in namespaces.values_mut() {
            policies.sort_by(|a, b| precedence(a).cmp(&precedence(b)));
        }
        Self { namespaces }
    }

    /// The boost for a new pod: of all that match, the oldest, then the first by name.
    #[must_use]
    pub fn select(
        &self,
        namespace: &str,
        labels: Option<&BTreeMap<String, String>>,
    ) -> Option<&Arc<Policy>> {
        static NONE: BTreeMap<String, String> = BTreeMap::new();
        let labels = labels.unwrap_or(&NONE);
        self.namespaces
            .get(namespace)?
            .iter()
            .find(|policy| policy.selects(labels))
    }

    /// The boost of that name, whether or not it still matches: records name their boost.
    #[must_use]
    pub fn named(&self, namespace: &str, name: &str) -> Option<&Arc<Policy>> {
        self.namespaces
            .get(namespace)?
            .iter()
            .find(|policy| policy.name == name)
    }
}

/// Smaller wins.
fn precedence(policy: &Policy) -> impl Ord + '_ {
    (policy.kind, policy.created, policy.name.as_str())
}
