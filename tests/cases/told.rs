//! What people and other programs are told of a boost: Events, the boost's status, metrics.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::data::Look;

/// Compares the Events about a pod with the reasons that are right, in any order.
pub fn same_events(events: &[Value], uid: &str, right: &[String]) -> anyhow::Result<()> {
    let text = |event: &Value, field: &str| event[field].as_str().unwrap_or_default().to_owned();
    let mut left: Vec<(String, String)> = events
        .iter()
        .filter(|event| event["regarding"]["uid"] == *uid)
        .map(|event| (text(event, "reason"), text(event, "note")))
        .collect();
    let all = format!("{left:?}");
    for right in right {
        let (reason, part) = right.split_once(": ").unwrap_or((right, ""));
        let at = left
            .iter()
            .position(|(got, note)| got == reason && note.contains(part));
        let at = at.with_context(|| format!("no Event is {right:?}: {all}"))?;
        left.swap_remove(at);
    }
    ensure!(left.is_empty(), "nothing speaks of the Events {left:?}");
    Ok(())
}

/// Compares what is counted in a boost's status, and whether it is stuck.
pub fn same_status(boost: &Value, look: &Look) -> anyhow::Result<()> {
    let status = &boost["status"];
    for (field, right) in [
        ("activeContainerBoosts", look.active),
        ("totalContainerBoosts", look.total),
    ] {
        let got = &status[field];
        ensure!(
            right.is_none_or(|right| *got == right),
            "{field} is {got}, expected {right:?}"
        );
    }
    let Some(right) = &look.stuck else {
        return Ok(());
    };
    let conditions = status["conditions"].as_array().into_iter().flatten();
    let mut stuck = conditions.filter(|condition| condition["type"] == "Stuck");
    let stuck = stuck
        .next()
        .filter(|condition| condition["status"] == "True");
    let got = stuck.map_or("none", |condition| {
        condition["reason"].as_str().unwrap_or_default()
    });
    ensure!(got == right, "it is stuck for {got}, expected {right}");
    Ok(())
}

/// Compares the leader's metrics; the boost is `b` in that namespace.
pub fn same_metrics(text: &str, namespace: &str, look: &Look) -> anyhow::Result<()> {
    let counted = |name: &str, count: Option<u32>| {
        let labels = format!("namespace=\"{namespace}\",boost=\"b\"");
        count.map(|count| format!("{name}{{{labels}}} {count}"))
    };
    let lines = [
        counted("boost_containers_active", look.active),
        counted("boost_containers_total", look.total),
    ];
    let placed =
        |line: &String| line.replace("namespace=\"ns\"", &format!("namespace=\"{namespace}\""));
    let lines = lines.into_iter().flatten();
    for line in lines.chain(look.metrics.iter().map(placed)) {
        ensure!(
            text.lines().any(|got| got == line),
            "{line:?} is not in\n{text}"
        );
    }
    if let Some(reason) = look.stuck.as_deref().filter(|reason| *reason != "none") {
        let begin = format!("headstart_boosts_stuck_total{{reason=\"{reason}\"}} ");
        let count = text.lines().find_map(|line| line.strip_prefix(&begin));
        ensure!(
            count.is_some_and(|count| count != "0"),
            "{begin}is {count:?}"
        );
    }
    if let Some(part) = look.no_metrics.as_ref().map(placed) {
        let found = text.lines().find(|line| line.contains(&part));
        ensure!(found.is_none(), "there is {found:?}");
    }
    Ok(())
}

/// Compares a table of one row that kubectl prints with its columns; `any` is any text. There are no other columns.
pub fn same_columns(printed: &str, right: &BTreeMap<String, String>) -> anyhow::Result<()> {
    let mut lines = printed.lines();
    let (Some(header), Some(row), None) = (lines.next(), lines.next(), lines.next()) else {
        anyhow::bail!("it is no table of one row:\n{printed}");
    };
    // Columns are apart by three blanks, and names of columns have one at most.
    let names = header.split("   ").map(str::trim);
    let names: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
    let mut starts: Vec<usize> = Vec::new();
    for name in &names {
        let from = starts.last().map_or(0, |last| last + 1);
        let at = header[from..].find(name).context("it is a column")?;
        starts.push(from + at);
    }
    let mut got = BTreeMap::new();
    for (index, name) in names.iter().enumerate() {
        let end = starts.get(index + 1).copied().unwrap_or(row.len());
        let text = row.get(starts[index]..end).context("the row is short")?;
        got.insert((*name).to_owned(), text.trim().to_owned());
    }
    let is_right = |(name, text): (&String, &String)| {
        let right = right.get(name);
        right.is_some_and(|right| right == text || right == "any" && !text.is_empty())
    };
    ensure!(
        got.len() == right.len() && got.iter().all(is_right),
        "the columns are {got:?}, expected {right:?}"
    );
    Ok(())
}
