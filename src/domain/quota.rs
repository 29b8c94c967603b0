//! What a namespace's ResourceQuotas have left.
//!
//! Quota is the last to judge a new pod, with its boost in it: a boost that does not fit would refuse the pod (403). Two
//! pods that are created at the same moment may both see room for one; the second is then refused as it might have been
//! by the other alone, and its owner creates it again.

use super::{
    cpu::Cpu,
    qos::QosClass,
    quantity::parse_milli,
    totals::{Kind, overhead, total},
};
use crate::api::{Pod, QuotaAmounts, ResourceQuota, ScopeRequirement};

/// A ResourceQuota, as far as CPU is concerned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    scopes: Vec<Scope>,
    bounds: Vec<Bound>,
}

/// One CPU bound of a quota, in milli-CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bound {
    kind: Kind,
    hard: u128,
    used: u128,
}

/// What a pod must be for a quota to count it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Scope {
    Terminating(bool),
    BestEffort(bool),
    PriorityClass {
        operator: String,
        values: Vec<String>,
    },
    /// Not understood here, or not worth it (`CrossNamespacePodAffinity`): counted, so that no pod is refused.
    Any,
}

impl Quota {
    /// Reads a quota. Amounts that can't be read bound nothing.
    #[must_use]
    pub fn new(quota: &ResourceQuota) -> Self {
        let named = quota.spec.scopes.iter().map(|scope| Scope::new(scope));
        let selected = quota.spec.scope_selector.match_expressions.iter();
        // What is enforced stands in the status; before the first count there is only the spec.
        let hard = if quota.status.hard == QuotaAmounts::default() {
            &quota.spec.hard
        } else {
            &quota.status.hard
        };
        Self {
            scopes: named.chain(selected.map(Scope::required)).collect(),
            bounds: bounds(hard, &quota.status.used),
        }
    }

    /// Whether containers without a CPU limit are refused.
    #[must_use]
    pub fn wants_limits(&self) -> bool {
        self.bounds.iter().any(|bound| bound.kind == Kind::Limit)
    }

    /// Whether it bounds no CPU.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bounds.is_empty()
    }

    /// Whether there is room for a pod with the values `to`, as far as these are more than `from`.
    #[must_use]
    pub fn has_room(&self, pod: &Pod, class: QosClass, from: &[Cpu], to: &[Cpu]) -> bool {
        if !self.scopes.iter().all(|scope| scope.counts(pod, class)) {
            return true;
        }
        self.bounds.iter().all(|bound| {
            let (before, after) = (total(pod, bound.kind, from), total(pod, bound.kind, to));
            after <= before || bound.used + u128::from(after + overhead(pod)) <= bound.hard
        })
    }
}

fn bounds(hard: &QuotaAmounts, used: &QuotaAmounts) -> Vec<Bound> {
    let amount = |text: &Option<String>| text.as_deref().and_then(|text| parse_milli(text).ok());
    let bound = |kind, hard, used| {
        let hard = amount(hard)?;
        let used = amount(used).unwrap_or(0);
        Some(Bound { kind, hard, used })
    };
    [
        bound(Kind::Request, &hard.cpu, &used.cpu),
        bound(Kind::Request, &hard.requests, &used.requests),
        bound(Kind::Limit, &hard.limits, &used.limits),
    ]
    .into_iter()
    .flatten()
    .collect()
}

impl Scope {
    fn new(name: &str) -> Self {
        match name {
            "Terminating" => Self::Terminating(true),
            "NotTerminating" => Self::Terminating(false),
            "BestEffort" => Self::BestEffort(true),
            "NotBestEffort" => Self::BestEffort(false),
            "PriorityClass" => Self::PriorityClass {
                operator: "Exists".to_owned(),
                values: Vec::new(),
            },
            _ => Self::Any,
        }
    }

    fn required(requirement: &ScopeRequirement) -> Self {
        match requirement.scope_name.as_str() {
            "PriorityClass" => Self::PriorityClass {
                operator: requirement.operator.clone(),
                values: requirement.values.clone(),
            },
            // The API allows only Exists for the others.
            other => Self::new(other),
        }
    }

    /// As `podMatchesScopeFunc` of Kubernetes' quota evaluator.
    fn counts(&self, pod: &Pod, class: QosClass) -> bool {
        match self {
            Self::Terminating(terminating) => {
                let deadline = pod.spec.active_deadline_seconds;
                deadline.is_some_and(|seconds| seconds >= 0) == *terminating
            }
            Self::BestEffort(best_effort) => (class == QosClass::BestEffort) == *best_effort,
            Self::PriorityClass { operator, values } => {
                let class = pod.spec.priority_class_name.as_deref();
                let class = class.filter(|class| !class.is_empty());
                let listed = class.is_some_and(|class| values.iter().any(|value| value == class));
                match operator.as_str() {
                    "In" => listed,
                    "NotIn" => !listed,
                    "DoesNotExist" => class.is_none(),
                    _ => class.is_some(),
                }
            }
            Self::Any => true,
        }
    }
}
