//! The domain is pure: nothing in `src/domain` knows a Kubernetes client, an async runtime, a socket, a file, a clock or a
//! random number. Its answers then depend on what it is given and on nothing else, so that every replica gives the same.
//!
//! `kube::core` is allowed: it holds types and label selectors, and no client.

#[path = "common/source.rs"]
mod source;

use std::{fs, path::Path};

use source::{paths, sources, tokens};

/// Paths that may not be named, by their first segments.
const FORBIDDEN: &[&[&str]] = &[
    &["chrono", "Local"],
    &["fastrand"],
    &["getrandom"],
    &["hyper"],
    &["hyper_util"],
    &["kube", "Api"],
    &["kube", "Client"],
    &["kube", "Config"],
    &["kube", "api"],
    &["kube", "client"],
    &["kube", "config"],
    &["kube", "runtime"],
    &["rand"],
    &["reqwest"],
    &["std", "env"],
    &["std", "fs"],
    &["std", "net"],
    &["std", "process"],
    &["std", "thread"],
    &["std", "time", "Instant"],
    &["std", "time", "SystemTime"],
    &["tokio"],
    &["tokio_rustls"],
    &["tokio_util"],
    &["warp"],
    // Clocks under the names that a `use` gives them.
    &["Instant", "now"],
    &["Local", "now"],
    &["SystemTime", "now"],
    &["Timestamp", "now"],
    &["Utc", "now"],
    // The adapters around the domain.
    &["crate", "admission"],
    &["crate", "app"],
    &["crate", "boosts"],
    &["crate", "certs"],
    &["crate", "claims"],
    &["crate", "clock"],
    &["crate", "lease"],
    &["crate", "metrics"],
    &["crate", "server"],
    &["crate", "sweeper"],
    &["crate", "watch"],
];

/// The forbidden paths that a source text names, as `line: path`. Comments and string literals don't count; paths in
/// braces are put together, and a glob counts as everything that it may bring.
fn offences(source: &str) -> Vec<String> {
    let tokens = tokens(source);
    let mut found: Vec<_> = paths(&tokens)
        .into_iter()
        .filter(|(_, path)| FORBIDDEN.iter().any(|forbidden| names(path, forbidden)))
        .map(|(line, path)| format!("{line}: {}", path.join("::")))
        .collect();
    found.sort();
    found.dedup();
    found
}

/// Whether a path names what is forbidden: begins with it, or may bring it by a glob. Two-segment clocks count at a
/// path's end too (`chrono::Utc::now`).
fn names(path: &[&str], forbidden: &[&str]) -> bool {
    let begins = path.starts_with(forbidden);
    let ends = forbidden.len() == 2 && forbidden[1] == "now" && path.ends_with(forbidden);
    let globs = path
        .strip_suffix(&["*"])
        .is_some_and(|before| forbidden.starts_with(before) || before.starts_with(forbidden));
    begins || ends || globs
}

#[test]
fn the_domain_is_pure() {
    let sources = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/domain"));
    assert!(sources.len() >= 10, "found only {}", sources.len());
    let found: Vec<_> = sources
        .iter()
        .flat_map(|(path, source)| {
            let offences = offences(source);
            offences.into_iter().map(move |o| format!("{path}:{o}"))
        })
        .collect();
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn the_adapters_are_not() {
    // Were the checker blind, it would find nothing here either.
    for file in [
        "src/sweeper/term.rs",
        "src/lease.rs",
        "src/server.rs",
        "src/clock.rs",
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let source = fs::read_to_string(path).expect("a source file can be read");
        assert_ne!(offences(&source), [""; 0], "{file}");
    }
}

#[test]
fn the_checker_finds_what_is_forbidden() {
    for (source, found) in [
        (
            "use tokio::time::sleep;",
            vec!["1: tokio", "1: tokio::time", "1: tokio::time::sleep"],
        ),
        (
            "fn f() {\n    tokio::spawn(g());\n}",
            vec!["2: tokio", "2: tokio::spawn"],
        ),
        ("use kube::Client;", vec!["1: kube::Client"]),
        ("use kube::{core::Selector, Api};", vec!["1: kube::Api"]),
        (
            "use kube::{\n    core::{Selector, SelectorExt},\n    runtime::watcher,\n};",
            vec!["3: kube::runtime", "3: kube::runtime::watcher"],
        ),
        ("use kube::*;", vec!["1: kube::*"]),
        ("use kube::{core::Selector, *};", vec!["1: kube::*"]),
        (
            "use std::time::{Duration, Instant};",
            vec!["1: std::time::Instant"],
        ),
        ("use std::time::*;", vec!["1: std::time::*"]),
        ("use std::{collections::BTreeMap, fs};", vec!["1: std::fs"]),
        (
            "use std::{fs::File, env};",
            vec!["1: std::env", "1: std::fs", "1: std::fs::File"],
        ),
        ("let now = Utc::now();", vec!["1: Utc::now"]),
        ("let now = chrono::Utc::now();", vec!["1: chrono::Utc::now"]),
        (
            "let now = jiff::Timestamp::now();",
            vec!["1: jiff::Timestamp::now"],
        ),
        ("use chrono::{Local, Utc};", vec!["1: chrono::Local"]),
        (
            "let x = fastrand::f64();",
            vec!["1: fastrand", "1: fastrand::f64"],
        ),
        (
            "let x: &'a str = f('\\'', '\"'); rand::random()",
            vec!["1: rand", "1: rand::random"],
        ),
        (
            "use crate::{api::Pod, metrics::Metrics};",
            vec!["1: crate::metrics", "1: crate::metrics::Metrics"],
        ),
        (
            "let x = r#\"a\"b\"#; warp::any()",
            vec!["1: warp", "1: warp::any"],
        ),
    ] {
        assert_eq!(offences(source), found, "{source}");
    }
}

#[test]
fn the_checker_passes_over_what_is_allowed() {
    for source in [
        "use kube::core::{Selector, SelectorExt};",
        "use chrono::{DateTime, TimeDelta, Utc};",
        "use std::time::Duration;",
        "// tokio::spawn would be wrong, and so would Utc::now()\n/// kube::Client\n/* std::fs */",
        r#"let text = "tokio::spawn and \" std::fs::read";"#,
        r##"let text = r#"Utc::now() " std::net"#;"##,
        "let now = now; let time = record.time; a * tokio_like::b",
        "fn rule(&self, now: DateTime<Utc>) -> Decision { self.hyperbole() }",
        "use crate::api::Pod; use super::metrics_of;",
        "mod m { use std::collections::BTreeMap; }",
    ] {
        assert_eq!(offences(source), [""; 0], "{source}");
    }
}
