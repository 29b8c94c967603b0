//! How an explanation is printed: text for people, JSON for scripts.

use std::fmt::Write;

use json_patch::Patch;
use serde_json::{Value, json};

use super::objects::{NewPod, Objects};
use crate::domain::{
    admission::{Admission, ContainerDecision, Outcome},
    cpu::Cpu,
    policy::{BoostKind, Policy},
    quantity::MilliCpu,
    reason::Reason,
};

/// What would happen to a pod.
pub(super) struct Explanation<'a> {
    pub(super) pod: &'a NewPod,
    /// All boosts that match, the winner first.
    pub(super) candidates: Vec<&'a Policy>,
    /// A node that could never take the boost back.
    pub(super) old_node: Option<&'a str>,
    pub(super) admission: Admission,
    pub(super) patch: Patch,
}

/// One object, on one line. Its fields are an interface: see `docs/explain.md`.
pub(super) fn json(explanation: &Explanation<'_>) -> String {
    let admission = &explanation.admission;
    let record = admission
        .record
        .as_ref()
        .map(|record| serde_json::from_str::<Value>(record).unwrap_or_default());
    let containers = admission.containers.iter().map(container_json);
    let value = json!({
        "boost": admission.boost.as_ref().map(|boost| &boost.name),
        "reason": reason(admission).map(Reason::as_str),
        "containers": containers.collect::<Vec<_>>(),
        "record": record,
        "patch": explanation.patch,
    });
    format!("{value}\n")
}

fn container_json(decision: &ContainerDecision) -> Value {
    let clamped = decision.clamped.map(|_| Reason::Clamped);
    json!({
        "name": decision.name,
        "decision": if decision.is_boosted() { "boost" } else { "leave" },
        "reason": decision.reason.or(clamped).map(Reason::as_str),
        "from": cpu_json(decision.from),
        "to": cpu_json(decision.to),
    })
}

fn cpu_json(cpu: Cpu) -> Value {
    let text = |value: Option<MilliCpu>| value.map(|value| value.to_string());
    json!({"request": text(cpu.request), "limit": text(cpu.limit)})
}

fn reason(admission: &Admission) -> Option<Reason> {
    match admission.outcome {
        Outcome::Skipped(reason) => Some(reason),
        Outcome::Boosted | Outcome::NoBoost | Outcome::Untouchable => None,
    }
}

/// Several lines.
pub(super) fn text(explanation: &Explanation<'_>, objects: &Objects) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write_text(&mut out, explanation, objects);
    out
}

fn write_text(
    out: &mut String,
    explanation: &Explanation<'_>,
    objects: &Objects,
) -> std::fmt::Result {
    let Explanation { pod, admission, .. } = explanation;
    writeln!(
        out,
        "Pod {}/{}: {}",
        pod.namespace,
        pod.name,
        verdict(admission)
    )?;
    if let Some(Reason::OldKubelet) = reason(admission) {
        let node = explanation.old_node.unwrap_or_default();
        writeln!(out, "  node {node} is one of those where it could land")?;
    }
    for decision in &admission.containers {
        write_container(out, decision)?;
    }
    if let (Some(boost), Some(_)) = (&admission.boost, &admission.record) {
        writeln!(out, "  ends: {}", boost.end.describe())?;
    }
    write_boosts(out, explanation, objects)?;
    for note in &objects.notes {
        writeln!(out, "  note: {note}")?;
    }
    if explanation.patch.0.is_empty() {
        return writeln!(out, "  patch: none");
    }
    let record = admission.record.as_ref();
    if let Some(record) = &record {
        writeln!(out, "  record: {record}")?;
    }
    writeln!(out, "  patch:")?;
    // The record is text within JSON there, and hard to read.
    let quoted = record.map(|record| json!(record).to_string());
    for operation in &explanation.patch.0 {
        let line = operation.to_string();
        let line = match &quoted {
            Some(quoted) => line.replace(quoted, "RECORD"),
            None => line,
        };
        writeln!(out, "    {line}")?;
    }
    Ok(())
}

fn verdict(admission: &Admission) -> String {
    let boost = admission.boost.as_deref();
    let name = boost.map(title).unwrap_or_default();
    match admission.outcome {
        Outcome::Boosted => format!("boosted by {name}"),
        Outcome::Skipped(reason) => {
            format!("not boosted by {name}: {reason} ({})", reason.sentence())
        }
        Outcome::NoBoost => "not boosted: no boost matches it".to_owned(),
        Outcome::Untouchable => {
            "not touched: it mirrors a static pod, which only its kubelet may change".to_owned()
        }
    }
}

fn write_container(out: &mut String, decision: &ContainerDecision) -> std::fmt::Result {
    let ContainerDecision { name, from, to, .. } = decision;
    if let Some(reason) = decision.reason {
        return writeln!(
            out,
            "  container {name}: left as it is, {reason} ({})",
            reason.sentence()
        );
    }
    let changes = [
        change("request", from.request, to.request),
        change("limit", from.limit, to.limit),
    ];
    let changes: Vec<String> = changes.into_iter().flatten().collect();
    write!(out, "  container {name}: {}", changes.join(", "))?;
    if let Some(by) = decision.clamped {
        write!(
            out,
            "; less than the policy says, because of {}",
            by.sentence()
        )?;
    }
    writeln!(out)
}

fn change(kind: &str, from: Option<MilliCpu>, to: Option<MilliCpu>) -> Option<String> {
    match (from, to) {
        (from, to) if from == to => None,
        (Some(from), Some(to)) => Some(format!("{kind} {from} -> {to}")),
        (Some(from), None) => Some(format!("{kind} {from} -> none")),
        (None, _) => None,
    }
}

/// The boosts that did not win, each with why.
fn write_boosts(
    out: &mut String,
    explanation: &Explanation<'_>,
    objects: &Objects,
) -> std::fmt::Result {
    for other in explanation.candidates.iter().skip(1) {
        writeln!(out, "  also matches, after the first: {}", title(other))?;
    }
    let namespace = &explanation.pod.namespace;
    for boost in &objects.boosts {
        let (kind, name) = (boost.kind, &boost.name);
        let here = kind == BoostKind::Cluster || boost.namespace == *namespace;
        let matches = |policy: &Policy| {
            let mut candidates = explanation.candidates.iter();
            candidates.any(|known| known.kind == policy.kind && known.name == policy.name)
        };
        match &boost.policy {
            Err(error) => writeln!(out, "  {} {name} is invalid: {error}", kind.as_str())?,
            Ok(_) if !here => writeln!(
                out,
                "  does not match: {} {name}, which is of namespace {}",
                kind.as_str(),
                boost.namespace
            )?,
            Ok(policy) if !matches(policy) => writeln!(
                out,
                "  does not match: {} {name}, by its selector",
                kind.as_str()
            )?,
            Ok(_) => {}
        }
    }
    Ok(())
}

fn title(policy: &Policy) -> String {
    format!("{} {}", policy.kind.as_str(), policy.name)
}
