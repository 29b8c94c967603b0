//! The alert rules ask for series that the program really exports.

use std::{collections::BTreeSet, fs};

use headstart::metrics::Metrics;
use serde_json::Value;

/// The names of series in an expression.
fn series(expression: &str) -> BTreeSet<&str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    expression
        .split(|c| !is_name(c))
        .filter(|word| word.starts_with("headstart_") || word.starts_with("boost_"))
        .collect()
}

/// The families that `/metrics` describes, by the names of their series.
fn exported() -> BTreeSet<String> {
    let text = Metrics::default().text();
    let mut names = BTreeSet::new();
    for line in text.lines() {
        let Some((name, kind)) = line
            .strip_prefix("# TYPE ")
            .and_then(|line| line.split_once(' '))
        else {
            continue;
        };
        let suffixes: &[&str] = match kind {
            "counter" => &["_total"],
            "histogram" => &["_bucket", "_sum", "_count"],
            _ => &[""],
        };
        names.extend(suffixes.iter().map(|suffix| format!("{name}{suffix}")));
    }
    names
}

#[test]
fn alerts_ask_for_series_that_exist() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/manifests/monitoring/rules.yaml"
    );
    let text = fs::read_to_string(path).expect("the rules");
    let rules: Value = serde_saphyr::from_str(&text).expect("YAML");
    let exported = exported();
    let rules = rules["spec"]["groups"][0]["rules"]
        .as_array()
        .expect("a list");
    assert!(rules.len() >= 5);
    for rule in rules {
        let expression = rule["expr"].as_str().expect("an expression");
        let asked = series(expression);
        assert!(!asked.is_empty(), "{expression} asks for nothing of ours");
        for name in asked {
            assert!(exported.contains(name), "{name} is not among {exported:?}");
        }
        assert!(rule["annotations"]["description"].is_string(), "{rule}");
    }
}

#[test]
fn the_docs_describe_every_series() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/operate.md");
    let docs = fs::read_to_string(path).expect("the page");
    for name in exported() {
        let family = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|suffix| name.strip_suffix(suffix))
            .unwrap_or(&name);
        assert!(docs.contains(family), "{family} is not in docs/operate.md");
    }
}
