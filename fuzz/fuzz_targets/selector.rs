//! Label selectors and container names: a compiled boost matches what its object says.
#![no_main]

use std::collections::BTreeMap;

use headstart::domain::policy::Policy;
use headstart_fuzz::{compile, reference::Requirement};
use libfuzzer_sys::{
    arbitrary::{self, Arbitrary},
    fuzz_target,
};
use regex::Regex;
use serde_json::{Value, json};

/// Longest pattern that the CRD lets in.
const LONGEST: usize = 1000;

/// A key or a value; a few, so that they meet.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Word(u8);

impl Word {
    fn text(self) -> &'static str {
        let words = ["a", "b", "c", "", "app.kubernetes.io/name", "ü", "A", "a "];
        words[usize::from(self.0) % words.len()]
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Operator(u8);

impl Operator {
    fn text(self) -> &'static str {
        let usual = ["In", "NotIn", "Exists", "DoesNotExist"];
        match self.0 {
            250.. => ["in", "", "Gt", "Equals", "Lt", "!"][usize::from(self.0 - 250)],
            index => usual[usize::from(index) % usual.len()],
        }
    }
}

#[derive(Arbitrary, Debug)]
struct Case<'a> {
    match_labels: Option<Vec<(Word, Word)>>,
    expressions: Option<Vec<(Word, Operator, Option<Vec<Word>>)>>,
    labels: Vec<(Word, Word)>,
    exact: &'a str,
    sidecars: bool,
    names: Vec<&'a str>,
    pattern: &'a str,
}

fuzz_target!(|case: Case<'_>| {
    selects(&case);
    if case.pattern.chars().count() <= LONGEST {
        fits(&case);
    }
});

fn map(pairs: &[(Word, Word)]) -> BTreeMap<String, String> {
    let owned = |(key, value): &(Word, Word)| (key.text().to_owned(), value.text().to_owned());
    pairs.iter().map(owned).collect()
}

fn boost(selector: &Value, policies: &Value) -> Value {
    json!({
        "metadata": {"name": "b", "namespace": "ns"},
        "selector": selector,
        "spec": {
            "resourcePolicy": {"containerPolicies": policies},
            "durationPolicy": {"containerCondition": "Started"},
        },
    })
}

fn selects(case: &Case<'_>) {
    let requirements: Vec<_> = case.expressions.iter().flatten().map(requirement).collect();
    let match_labels = case.match_labels.as_deref().map(map);
    let selector = json!({
        "matchLabels": match_labels,
        "matchExpressions": case.expressions.as_ref().map(|list| list.iter().map(expression).collect::<Vec<_>>()),
    });
    let compiled = compile("b", 0, boost(&selector, &json!([])));
    let valid = requirements.iter().all(Requirement::is_valid);
    assert_eq!(compiled.is_ok(), valid, "{selector}: {compiled:?}");
    let Ok(policy) = compiled else { return };
    let labels = map(&case.labels);
    let expected = match_labels
        .iter()
        .flatten()
        .all(|(key, value)| labels.get(key) == Some(value))
        && requirements
            .iter()
            .all(|requirement| requirement.is_met(&labels));
    assert_eq!(
        policy.selects(&labels),
        expected,
        "{selector} on {labels:?}"
    );
}

type Expression = (Word, Operator, Option<Vec<Word>>);

fn requirement((key, operator, values): &Expression) -> Requirement<'static> {
    let values = values.iter().flatten().map(|word| word.text());
    Requirement {
        key: key.text(),
        operator: operator.text(),
        values: values.collect(),
    }
}

fn expression((key, operator, values): &Expression) -> Value {
    let values = values
        .as_ref()
        .map(|values| values.iter().map(|word| word.text()).collect::<Vec<_>>());
    let mut expression = json!({"key": key.text(), "operator": operator.text()});
    if let Some(values) = values {
        expression["values"] = json!(values);
    }
    expression
}

/// The first policy is for a name, the second for a pattern.
fn fits(case: &Case<'_>) {
    let policies = json!([
        {
            "matchContainers": {"type": "ExactName", "value": case.exact, "includeSidecars": case.sidecars},
            "percentageIncrease": {"value": 1},
        },
        {
            "matchContainers": {"type": "RegexName", "value": case.pattern, "includeSidecars": true},
            "percentageIncrease": {"value": 2},
        },
    ]);
    let compiled = compile("b", 0, boost(&Value::Null, &policies));
    let Ok(regex) = Regex::new(case.pattern) else {
        assert!(compiled.is_err(), "{:?} was compiled", case.pattern);
        return;
    };
    let Ok(policy) = compiled else { return };
    for name in case.names.iter().copied().chain([case.exact, "app"]) {
        for sidecar in [false, true] {
            let exact = name == case.exact && (case.sidecars || !sidecar);
            let expected = if exact {
                Some(1)
            } else {
                regex.is_match(name).then_some(2)
            };
            assert_eq!(percentage(&policy, name, sidecar), expected, "{name:?}");
        }
    }
}

fn percentage(policy: &Policy, name: &str, sidecar: bool) -> Option<u64> {
    use headstart::domain::policy::Target;
    match policy.for_container(name, sidecar)?.target {
        Target::Percentage(percent) => Some(percent),
        Target::Fixed { .. } => None,
    }
}
