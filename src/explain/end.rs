//! The explanation for a pod that exists and carries marks of ours: what the sweeper would do about it now, and why.

use chrono::{DateTime, SecondsFormat, Utc};
use serde_json::{Value, json};

use super::objects::NewPod;
use crate::{
    api::Pod,
    domain::{
        end::{EndSettings, EndedBy},
        patch,
        policy::Policy,
        record::{Record, State},
        revert::{Decision, Revert, decide},
    },
};

/// What the sweeper would do.
pub(super) struct End<'a> {
    pod: &'a NewPod,
    action: &'static str,
    reason: &'static str,
    /// What the kubelet, or the reader of the record, says.
    detail: Option<String>,
    until: Option<DateTime<Utc>>,
    by: Option<EndedBy>,
    resize: Option<Value>,
    metadata: Option<Value>,
}

/// Whether a pod is one that the sweeper would look at: it exists, and carries marks of ours.
pub(super) fn concerns(pod: &Pod) -> bool {
    let exists = pod.metadata.uid.is_some()
        || pod.has_node()
        || pod.status.phase.is_some()
        || !pod.status.conditions.is_empty();
    exists && (pod.claim().is_some() || pod.record_text().is_some())
}

/// Decides as the sweeper does.
pub(super) fn explain<'a>(
    pod: &'a NewPod,
    policy: Option<&Policy>,
    settings: EndSettings,
    now: DateTime<Utc>,
) -> End<'a> {
    let decision = decide(&pod.pod, policy, settings, now);
    let mut end = End {
        pod,
        action: "leave",
        reason: decision.reason(&pod.pod),
        detail: decision.detail().map(str::to_owned),
        until: None,
        by: None,
        resize: None,
        metadata: None,
    };
    match decision {
        Decision::Revert(revert) => {
            (end.action, end.by) = ("revert", Some(revert.due.by));
            end.resize = Some(patch::resize(&pod.pod, &revert.containers));
            let after = resized(&pod.pod, &revert);
            if let Decision::Finish(finish) = decide(&after, policy, settings, now) {
                end.metadata = Some(patch::finish(&pod.pod, &finish));
            }
        }
        Decision::Finish(finish) => {
            end.by = finish.ended.as_ref().map(|(_, by)| *by);
            end.action = "finish";
            end.metadata = Some(patch::finish(&pod.pod, &finish));
        }
        Decision::Raise(_) => end.action = "raise",
        Decision::Wait(until) => (end.action, end.until) = ("wait", until),
        Decision::Watch(_) => end.action = "wait",
        Decision::Leave(_) => {}
    }
    end
}

/// The pod as it will be when the kubelet has done the resize.
fn resized(pod: &Pod, revert: &Revert) -> Pod {
    let mut pod = pod.clone();
    let spec = &mut pod.spec;
    for container in spec.containers.iter_mut().chain(&mut spec.init_containers) {
        let mut reverts = revert.containers.iter();
        let Some(to) = reverts.find(|revert| revert.name == container.name) else {
            continue;
        };
        let resources = &mut container.resources;
        for (amounts, to) in [
            (&mut resources.requests, to.to.request),
            (&mut resources.limits, to.to.limit),
        ] {
            if let Some(to) = to {
                amounts.get_or_insert_default().cpu = Some(to.to_string());
            }
        }
    }
    pod.status
        .conditions
        .retain(|condition| !condition.kind.starts_with("PodResize"));
    pod.status.observed_generation = pod.metadata.generation;
    if pod.status.observed_generation.is_none() {
        pod.metadata.generation = Some(1);
    }
    pod
}

/// One object, on one line. Its fields are an interface: see `docs/explain.md`.
pub(super) fn json(end: &End<'_>) -> String {
    let until = end.until.map(time);
    let value = json!({
        "action": end.action,
        "reason": end.reason,
        "until": until,
        "endedBy": end.by.map(EndedBy::as_str),
        "resize": end.resize,
        "metadata": end.metadata,
    });
    format!("{value}\n")
}

/// Several lines.
pub(super) fn text(end: &End<'_>) -> String {
    let mut lines = vec![format!(
        "Pod {}/{}: {}",
        end.pod.namespace,
        end.pod.name,
        sentence(end)
    )];
    if let Some(record) = end
        .pod
        .pod
        .record_text()
        .and_then(|text| Record::read(text).ok())
    {
        let state = match record.state {
            State::Active => "in force",
            State::Reverted => "ended",
        };
        let boost = record.boost.map_or(String::new(), |boost| {
            format!(", by the boost {}", boost.name)
        });
        let since = record
            .timestamp
            .map_or(String::new(), |since| format!(" since {}", time(since)));
        lines.push(format!("  boost: {state}{since}{boost}"));
    }
    for (write, body) in [("resize", &end.resize), ("then", &end.metadata)] {
        if let Some(body) = body {
            lines.push(format!("  {write}: {body}"));
        }
    }
    lines.join("\n") + "\n"
}

fn sentence(end: &End<'_>) -> String {
    let detail = end.detail.as_deref().unwrap_or("no more is known");
    let by = end.by.map_or("", EndedBy::as_str);
    match end.reason {
        "Due" => format!("would be reverted now ({by})"),
        "Returned" => format!("would be finished now, its values are back ({by})"),
        "Superseded" => {
            "would be finished now: somebody else has changed every value of ours".to_owned()
        }
        "Terminated" => "would be finished now: it has run to its end".to_owned(),
        "AlreadyReverted" => "its boost has ended; the label would be removed".to_owned(),
        "NotDue" => match end.until {
            Some(until) => format!(
                "keeps its boost until {}, or what comes before it",
                time(until)
            ),
            None => "keeps its boost until it changes".to_owned(),
        },
        "NotScheduled" => match end.until {
            Some(until) => format!("keeps its boost until {} if it finds no node", time(until)),
            None => {
                "keeps its boost while it waits for a node; time counts from then on".to_owned()
            }
        },
        "Resizing" => "is being resized back; the kubelet is at it".to_owned(),
        "Deferred" | "Infeasible" | "Error" => {
            format!(
                "was resized, and the node does not do it ({}): {detail}",
                end.reason
            )
        }
        "Ended" => "has had its boost; a restart of a container makes another".to_owned(),
        "Restarted" => "would be boosted again now: a container has restarted".to_owned(),
        "Terminating" => "is being deleted and left alone".to_owned(),
        "Unreadable" => format!(
            "carries a record that can't be read ({detail}); it is repaired from its owner's template where it has one"
        ),
        _ => "is not boosted".to_owned(),
    }
}

fn time(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::AutoSi, true)
}
