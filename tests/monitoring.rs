//! Alerts and dashboard ask for series that the program really exports, and the docs describe those.

#[path = "common/page.rs"]
mod page;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    time::Duration,
};

use headstart::metrics::Metrics;
use regex::Regex;
use serde_json::Value;

/// Where the docs have the table of series; it ends at an empty line.
const HEAD: &str = "| series | kind | meaning |\n|---|---|---|\n";

/// What `/metrics` tells of a family of series.
#[derive(Debug, Default)]
struct Family {
    kind: String,
    help: String,
    labels: BTreeSet<String>,
}

impl Family {
    /// What is added to its name.
    fn suffixes(&self) -> &'static [&'static str] {
        match self.kind.as_str() {
            "counter" => &["_total"],
            "histogram" => &["_bucket", "_sum", "_count"],
            _ => &[""],
        }
    }
}

/// All families by name, in the order of `/metrics`, after each has been given something to show.
fn families() -> Vec<(String, Family)> {
    let metrics = Metrics::default();
    let boost = ("shop".to_owned(), "fast-start".to_owned());
    metrics.count_boosts([&boost.0].into_iter());
    metrics.count_containers(&BTreeMap::from([(boost, (1, 1))]));
    metrics.viewed(200, Duration::ZERO);
    let _ = metrics.watches.of("pods".to_owned());
    let text = metrics.text();
    let label = Regex::new(r#"(\w+)=""#).expect("a pattern");
    let mut families: Vec<(String, Family)> = Vec::new();
    for line in text.lines() {
        if let Some((name, help)) = described(line, "# HELP ") {
            let family = Family {
                help: help.trim_end_matches('.').to_owned(),
                ..Family::default()
            };
            families.push((name.to_owned(), family));
            continue;
        }
        let Some((_, family)) = families.last_mut() else {
            continue;
        };
        if let Some((_, kind)) = described(line, "# TYPE ") {
            kind.clone_into(&mut family.kind);
        } else {
            let labels = label.captures_iter(line).map(|found| found[1].to_owned());
            family.labels.extend(labels.filter(|label| label != "le"));
        }
    }
    families
}

fn described<'a>(line: &'a str, what: &str) -> Option<(&'a str, &'a str)> {
    line.strip_prefix(what)?.split_once(' ')
}

/// Every series with the labels that it has.
fn exported() -> BTreeMap<String, BTreeSet<String>> {
    let mut series = BTreeMap::new();
    for (name, family) in families() {
        for suffix in family.suffixes() {
            let mut labels = family.labels.clone();
            if *suffix == "_bucket" {
                labels.insert("le".to_owned());
            }
            series.insert(format!("{name}{suffix}"), labels);
        }
    }
    series
}

/// Holds an expression to what is exported: it asks for series of ours, and by labels that they have.
fn check(expression: &str, exported: &BTreeMap<String, BTreeSet<String>>) {
    let word = Regex::new(r"\b(headstart|boost)_\w+").expect("a pattern");
    let asked: Vec<&str> = word
        .find_iter(expression)
        .map(|found| found.as_str())
        .collect();
    assert!(!asked.is_empty(), "{expression} asks for nothing of ours");
    let known = asked.iter().map(|name| {
        let labels = exported.get(*name);
        labels.unwrap_or_else(|| panic!("{name} is not among {exported:?}"))
    });
    let known: BTreeSet<&str> = known.flatten().map(String::as_str).collect();
    let labels = Regex::new(r#"by \(([^)]*)\)|(\w+)\s*(?:=~|!~|!=|=)\s*""#).expect("a pattern");
    for found in labels.captures_iter(expression) {
        let by = found.get(1).or(found.get(2)).expect("one of both").as_str();
        for label in by.split(',').map(str::trim) {
            // What Prometheus adds to every series of a pod.
            assert!(
                known.contains(label) || label == "pod",
                "{expression} asks by {label}, which is not among {known:?}"
            );
        }
    }
}

#[test]
fn alerts_ask_for_series_that_exist() {
    let text = page::read("manifests/monitoring/rules.yaml");
    let rules: Value = serde_saphyr::from_str(&text).expect("YAML");
    let exported = exported();
    let rules = rules["spec"]["groups"][0]["rules"]
        .as_array()
        .expect("a list");
    assert!(rules.len() >= 5);
    for rule in rules {
        check(rule["expr"].as_str().expect("an expression"), &exported);
        assert!(rule["annotations"]["description"].is_string(), "{rule}");
    }
}

#[test]
fn the_dashboard_asks_for_series_that_exist() {
    let text = page::read("manifests/monitoring/dashboard.json");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let exported = exported();
    let panels = dashboard["panels"].as_array().expect("a list");
    let mut asked = String::new();
    let (mut ids, mut taken) = (BTreeSet::new(), BTreeSet::new());
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64()), "an id twice: {panel}");
        assert!(panel["title"].is_string() && panel["description"].is_string());
        let place = |key: &str| panel["gridPos"][key].as_u64().expect(key);
        let (left, top) = (place("x"), place("y"));
        assert!(left + place("w") <= 24, "too wide: {panel}");
        for x in left..left + place("w") {
            for y in top..top + place("h") {
                assert!(taken.insert((x, y)), "over another: {panel}");
            }
        }
        for target in panel["targets"].as_array().expect("a list") {
            let expression = target["expr"].as_str().expect("an expression");
            check(expression, &exported);
            asked += expression;
        }
    }
    for (name, _) in families() {
        assert!(asked.contains(&name), "no panel shows {name}");
    }
}

/// `UPDATE_DOCS=1` writes the table anew.
#[test]
fn the_docs_have_every_series() {
    let mut table = HEAD.to_owned();
    for (name, family) in families() {
        let labels: Vec<_> = family.labels.into_iter().collect();
        let labels = match labels.join(",") {
            none if none.is_empty() => none,
            some => format!("{{{some}}}"),
        };
        let total = if family.kind == "counter" {
            "_total"
        } else {
            ""
        };
        let (kind, help) = (family.kind, family.help);
        writeln!(table, "| `{name}{total}{labels}` | {kind} | {help} |").expect("it is a string");
    }
    let docs = page::read("docs/operate.md");
    let begin = docs.find(HEAD).expect("the table's head");
    let end = docs[begin..]
        .find("\n\n")
        .map_or(docs.len(), |length| begin + length + 1);
    page::keep(
        "docs/operate.md",
        &format!("{}{table}{}", &docs[..begin], &docs[end..]),
    );
}
