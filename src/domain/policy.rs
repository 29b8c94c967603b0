//! Compiles a boost object into a [`Policy`]: selectors and regular expressions ready to match, quantities read, the
//! end rule in seconds.
//!
//! The CRD's schema refuses bad objects at `kubectl apply`. What got in anyway (stored under upstream's CRD, or with a
//! regular expression that Rust reads otherwise than RE2) fails to compile here, and affects nothing but itself.

use std::fmt;

use chrono::{DateTime, Utc};
use kube::core::{Selector, SelectorExt};
use regex::Regex;
use serde::{Serialize, Serializer};

use super::{
    end::{ConditionRule, EndRule, MONTH_SECONDS},
    quantity::MilliCpu,
};
use crate::api::{self, BoostObject, ControlledValues, Labels, MatchType};

/// Longest name that fits a label value.
const LABEL_VALUE_LENGTH: usize = 63;
/// Compiled size in bytes that a container regex may have.
const REGEX_SIZE: usize = 1 << 18;

/// Which kind of object a boost comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BoostKind {
    /// `StartupCPUBoost`, in one namespace.
    #[default]
    Namespaced,
    /// `ClusterStartupCPUBoost`, in all namespaces that it selects.
    Cluster,
}

impl BoostKind {
    /// The objects' kind, as the API spells it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Namespaced => "StartupCPUBoost",
            Self::Cluster => "ClusterStartupCPUBoost",
        }
    }

    /// The kind of that spelling.
    #[must_use]
    pub fn named(kind: &str) -> Option<Self> {
        [Self::Namespaced, Self::Cluster]
            .into_iter()
            .find(|known| known.as_str() == kind)
    }
}

impl Serialize for BoostKind {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.as_str())
    }
}

/// A boost, ready to be applied.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The object's kind.
    pub kind: BoostKind,
    /// Its name, which becomes the claim.
    pub name: String,
    /// When it was created: the oldest of several matching boosts wins.
    pub created: DateTime<Utc>,
    selector: Selector,
    namespaces: Selector,
    containers: Vec<ContainerPolicy>,
    /// When its boosts end.
    pub end: EndRule,
    /// Whether a container that restarts afterwards is boosted again.
    pub boost_on_restart: bool,
}

/// What to do with the containers that one entry of `containerPolicies` matches.
#[derive(Clone, Debug)]
pub struct ContainerPolicy {
    name: NameMatcher,
    include_sidecars: bool,
    /// Which values are raised.
    pub controlled: ControlledValues,
    /// To what.
    pub target: Target,
}

/// What a container's values are raised to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Each by so many percent.
    Percentage(u64),
    /// To these; `None` leaves the value.
    Fixed {
        /// CPU request.
        request: Option<MilliCpu>,
        /// CPU limit.
        limit: Option<MilliCpu>,
    },
}

#[derive(Clone, Debug)]
enum NameMatcher {
    Exact(String),
    Regex(Regex),
}

/// Why an object can't be applied: the field, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyError {
    /// Path of the field.
    pub field: String,
    /// What is wrong, and what to write instead.
    pub problem: String,
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl std::error::Error for PolicyError {}

fn invalid<T>(field: impl Into<String>, problem: impl Into<String>) -> Result<T, PolicyError> {
    Err(PolicyError {
        field: field.into(),
        problem: problem.into(),
    })
}

impl Policy {
    /// Compiles `object`, which is called `name` and was created at `created`.
    ///
    /// # Errors
    /// Names the first field that can't be applied.
    pub fn compile(
        name: &str,
        created: DateTime<Utc>,
        object: &impl BoostObject,
    ) -> Result<Self, PolicyError> {
        if name.len() > LABEL_VALUE_LENGTH {
            return invalid(
                "metadata.name",
                "has more than 63 characters, which no label value may have",
            );
        }
        let policies = object
            .spec()
            .resource_policy
            .as_ref()
            .map_or(&[][..], |policy| &policy.container_policies);
        Ok(Self {
            kind: object.boost_kind(),
            name: name.to_owned(),
            created,
            selector: compile_selector("selector", object.selector())?,
            namespaces: compile_selector("namespaceSelector", object.namespace_selector())?,
            containers: policies
                .iter()
                .enumerate()
                .map(compile_container)
                .collect::<Result<_, _>>()?,
            end: compile_end(&object.spec().duration_policy)?,
            boost_on_restart: object.spec().boost_on_restart.unwrap_or(false),
        })
    }

    /// Whether it is for a pod with these labels.
    #[must_use]
    pub fn selects(&self, labels: &Labels) -> bool {
        self.selector.matches(labels)
    }

    /// Whether it is for pods of a namespace with these labels. Only a boost of the cluster asks.
    #[must_use]
    pub fn selects_namespace(&self, labels: &Labels) -> bool {
        self.namespaces.matches(labels)
    }

    /// The first container policy that fits a container.
    #[must_use]
    pub fn for_container(&self, name: &str, is_sidecar: bool) -> Option<&ContainerPolicy> {
        self.containers
            .iter()
            .find(|policy| (policy.include_sidecars || !is_sidecar) && policy.name.matches(name))
    }
}

impl NameMatcher {
    fn matches(&self, name: &str) -> bool {
        match self {
            Self::Exact(exact) => exact == name,
            Self::Regex(regex) => regex.is_match(name),
        }
    }
}

/// Compiles a label selector; `field` is its path, for messages. An absent selector selects everything.
fn compile_selector(
    field: &str,
    selector: Option<&api::LabelSelector>,
) -> Result<Selector, PolicyError> {
    let selector = selector.cloned().unwrap_or_default();
    for (index, expression) in selector.match_expressions.iter().flatten().enumerate() {
        let path = format!("{field}.matchExpressions[{index}]");
        let values = expression.values.as_deref().unwrap_or_default();
        match (expression.operator.as_str(), values.is_empty()) {
            ("In" | "NotIn", true) => {
                return invalid(
                    format!("{path}.values"),
                    format!("{} needs at least one value", expression.operator),
                );
            }
            ("Exists" | "DoesNotExist", false) => {
                return invalid(
                    format!("{path}.values"),
                    format!("{} takes no values", expression.operator),
                );
            }
            ("In" | "NotIn" | "Exists" | "DoesNotExist", _) => {}
            (unknown, _) => {
                let problem =
                    format!("{unknown:?} is unknown: write In, NotIn, Exists or DoesNotExist");
                return invalid(format!("{path}.operator"), problem);
            }
        }
    }
    Selector::try_from(selector).or_else(|error| invalid(field, error.to_string()))
}

fn compile_container(
    (index, policy): (usize, &api::ContainerPolicy),
) -> Result<ContainerPolicy, PolicyError> {
    let path = format!("spec.resourcePolicy.containerPolicies[{index}]");
    let older_name = policy
        .container_name
        .as_ref()
        .filter(|name| !name.is_empty());
    let (name, include_sidecars) = match (older_name, &policy.match_containers) {
        (Some(name), None) => (NameMatcher::Exact(name.clone()), false),
        (None, Some(matcher)) => {
            let name = match matcher.kind {
                MatchType::ExactName => NameMatcher::Exact(matcher.value.clone()),
                MatchType::RegexName => {
                    NameMatcher::Regex(compile_regex(&matcher.value).or_else(|problem| {
                        invalid(format!("{path}.matchContainers.value"), problem)
                    })?)
                }
            };
            (name, matcher.include_sidecars.unwrap_or(false))
        }
        _ => return invalid(path, "set exactly one of containerName and matchContainers"),
    };
    let target = match (&policy.percentage_increase, &policy.fixed_resources) {
        (Some(increase), None) => match u64::try_from(increase.value) {
            Ok(percent) if percent > 0 => Target::Percentage(percent),
            _ => {
                return invalid(
                    format!("{path}.percentageIncrease.value"),
                    "must be at least 1",
                );
            }
        },
        (None, Some(fixed)) => compile_fixed(&path, fixed)?,
        _ => {
            return invalid(
                path,
                "set exactly one of percentageIncrease and fixedResources",
            );
        }
    };
    Ok(ContainerPolicy {
        name,
        include_sidecars,
        controlled: policy.controlled_values.unwrap_or_default(),
        target,
    })
}

fn compile_fixed(path: &str, fixed: &api::FixedResources) -> Result<Target, PolicyError> {
    let read =
        |field: &str, value: Option<&api::CpuValue>| -> Result<Option<MilliCpu>, PolicyError> {
            let Some(value) = value else { return Ok(None) };
            match value.0.parse::<MilliCpu>() {
                Ok(cpu) => Ok(Some(cpu).filter(|cpu| !cpu.is_zero())),
                Err(error) => invalid(
                    format!("{path}.fixedResources.{field}"),
                    format!("{:?} is {error}", value.0),
                ),
            }
        };
    let request = read("requests", Some(&fixed.requests))?;
    let limit = read("limits", fixed.limits.as_ref())?;
    match (request, limit) {
        (None, None) => invalid(
            format!("{path}.fixedResources"),
            "requests or limits must be above 0",
        ),
        (Some(request), Some(limit)) if limit < request => invalid(
            format!("{path}.fixedResources.limits"),
            "must not be below requests",
        ),
        _ => Ok(Target::Fixed { request, limit }),
    }
}

fn compile_end(duration: &api::DurationPolicy) -> Result<EndRule, PolicyError> {
    let path = "spec.durationPolicy";
    let fixed_seconds = match &duration.fixed_duration {
        None => None,
        Some(fixed) => match u64::try_from(fixed.value) {
            Ok(value) if value > 0 => {
                let unit = match fixed.unit {
                    api::DurationUnit::Seconds => 1,
                    api::DurationUnit::Minutes => 60,
                };
                Some(value.saturating_mul(unit).min(MONTH_SECONDS))
            }
            _ => return invalid(format!("{path}.fixedDuration.value"), "must be at least 1"),
        },
    };
    let condition = match &duration.pod_condition {
        None => None,
        Some(condition) if condition.kind.is_empty() => {
            return invalid(
                format!("{path}.podCondition.type"),
                "must not be empty, write for example Ready",
            );
        }
        Some(condition) if condition.status.is_empty() => {
            return invalid(
                format!("{path}.podCondition.status"),
                "must not be empty, write for example \"True\"",
            );
        }
        Some(condition) => match u64::try_from(condition.delay_seconds.unwrap_or(0)) {
            Ok(delay_seconds) => Some(ConditionRule {
                kind: condition.kind.clone(),
                status: condition.status.clone(),
                delay_seconds: delay_seconds.min(MONTH_SECONDS),
            }),
            Err(_) => {
                return invalid(
                    format!("{path}.podCondition.delaySeconds"),
                    "must not be negative",
                );
            }
        },
    };
    let rule = EndRule {
        fixed_seconds,
        condition,
        container_condition: duration.container_condition,
    };
    if rule.is_empty() {
        return invalid(
            path,
            "set at least one of fixedDuration, podCondition and containerCondition",
        );
    }
    Ok(rule)
}

/// Compiles a container regex, unless Rust reads it otherwise than RE2, which the API server has checked it with.
fn compile_regex(pattern: &str) -> Result<Regex, String> {
    use regex_syntax::ast::{self, Visitor};

    /// Class operators (`&&`, `--`, `~~`) and nested classes: plain characters to RE2, syntax to Rust.
    struct ClassSyntax;
    impl Visitor for ClassSyntax {
        type Output = ();
        type Err = &'static str;
        fn finish(self) -> Result<(), Self::Err> {
            Ok(())
        }
        fn visit_class_set_item_pre(&mut self, item: &ast::ClassSetItem) -> Result<(), Self::Err> {
            match item {
                ast::ClassSetItem::Bracketed(_) => {
                    Err("a character class inside a character class")
                }
                _ => Ok(()),
            }
        }
        fn visit_class_set_binary_op_pre(
            &mut self,
            _: &ast::ClassSetBinaryOp,
        ) -> Result<(), Self::Err> {
            Err("a class operator (&&, --, ~~)")
        }
    }

    let tree = ast::parse::Parser::new()
        .parse(pattern)
        .map_err(|error| error.to_string())?;
    ast::visit(&tree, ClassSyntax).map_err(|what| {
        format!("has {what}, which RE2 and Rust read differently: escape it with a backslash")
    })?;
    regex::RegexBuilder::new(pattern)
        .size_limit(REGEX_SIZE)
        .build()
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_a_regex_that_rust_reads_otherwise_than_re2() {
        for pattern in [
            "[a&&b]",
            "[a--b]",
            "[a~~b]",
            "[[a]b]",
            r"\Qa.b\E",
            "a(",
            "a{1,2000}{1,2000}",
        ] {
            assert!(compile_regex(pattern).is_err(), "{pattern}");
        }
        for pattern in [
            "",
            "app",
            "^app$",
            "[[:alpha:]]",
            "[a-z&]",
            r"[\[a]",
            "a|b",
            r"\d+",
        ] {
            assert!(compile_regex(pattern).is_ok(), "{pattern}");
        }
    }
}
