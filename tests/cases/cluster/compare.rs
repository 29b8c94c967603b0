//! What the API server has stored against what is right: CPU by quantity, marks exactly, times by when they may be.

use anyhow::{Context, ensure};
use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};

use crate::world::{self, KEY, record_text};

/// From and to.
pub type Window = (DateTime<Utc>, DateTime<Utc>);

/// Since then until now, give or take the second that timestamps are rounded to, and the one that a look may come late.
pub fn since(began: DateTime<Utc>) -> Window {
    (
        began - TimeDelta::seconds(2),
        Utc::now() + TimeDelta::seconds(1),
    )
}

/// Compares CPU values, labels and annotations; all else in a pod is none of ours.
///
/// `times` are fields of the record that are compared by when they may be.
pub fn same_pod(got: &Value, expected: &Value, times: &[(&str, Window)]) -> anyhow::Result<()> {
    for list in ["containers", "initContainers"] {
        let containers = expected["spec"].get(list).and_then(Value::as_array);
        for container in containers.into_iter().flatten() {
            same_cpu(got, container)?;
        }
    }
    for map in ["labels", "annotations"] {
        let plain = |pod: &Value| {
            let mut marks = pod["metadata"].get(map).cloned().unwrap_or(json!({}));
            if map == "annotations" && marks.get(KEY).is_some() {
                marks[KEY] = json!("RECORD");
            }
            marks
        };
        let (got, expected) = (plain(got), plain(expected));
        ensure!(got == expected, "the {map} are {got}, expected {expected}");
    }
    match (record_text(got), record_text(expected)) {
        (Some(got), Some(expected)) => same_record(got, expected, times),
        // One alone has been seen above.
        _ => Ok(()),
    }
}

fn same_cpu(got: &Value, expected: &Value) -> anyhow::Result<()> {
    let name = expected["name"]
        .as_str()
        .context("a container has a name")?;
    let got = world::find(got, name)?;
    for kind in ["requests", "limits"] {
        let (got, expected) = (world::cpu(got, kind), world::cpu(expected, kind));
        let millis = |cpu: &Option<String>| cpu.as_deref().map(millis).transpose();
        ensure!(
            millis(&got)? == millis(&expected)?,
            "{name} has {} of {kind}, expected {}",
            got.as_deref().unwrap_or("none"),
            expected.as_deref().unwrap_or("none"),
        );
    }
    Ok(())
}

/// A quantity as the API server or the data spells it, in micro-CPU.
fn millis(cpu: &str) -> anyhow::Result<i64> {
    let factors = [("m", 3), ("u", 0), ("", 6)];
    let (number, factor) = factors
        .iter()
        .find_map(|(unit, factor)| Some((cpu.strip_suffix(unit)?, *factor)))
        .context("a quantity")?;
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    ensure!(part.len() <= factor, "{cpu} is finer than it can be here");
    format!("{whole}{part:0<factor$}")
        .parse()
        .with_context(|| format!("{cpu:?} is no quantity of CPU"))
}

/// Compares two records: the values exactly, some times by when they may be. A record is compact JSON.
pub fn same_record(got: &str, expected: &str, times: &[(&str, Window)]) -> anyhow::Result<()> {
    let Ok(mut expected) = serde_json::from_str::<Value>(expected) else {
        ensure!(got == expected, "the record is {got}, expected {expected}");
        return Ok(());
    };
    let mut read: Value =
        serde_json::from_str(got).with_context(|| format!("the record is {got}"))?;
    let compact = read.to_string();
    ensure!(compact == got, "the record is not compact: {got}");
    for (field, (from, to)) in times {
        let Some(time) = expected.get_mut(*field) else {
            continue;
        };
        *time = Value::Null;
        let at: DateTime<Utc> = read[*field]
            .as_str()
            .with_context(|| format!("the record has no {field}: {got}"))?
            .parse()
            .with_context(|| format!("{field} in {got}"))?;
        ensure!(
            (*from..=*to).contains(&at),
            "{field} is {at}, expected from {from} to {to}"
        );
        read[*field] = Value::Null;
    }
    ensure!(
        read == expected,
        "the record is\n{got}\nexpected, times apart,\n{expected}"
    );
    Ok(())
}

/// Whether everything in `part` is in `whole` too; lists must be equal in length.
pub fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => part
            .iter()
            .all(|(key, part)| whole.get(key).is_some_and(|whole| contains(whole, part))),
        (Value::Array(whole), Value::Array(part)) => {
            whole.len() == part.len()
                && whole
                    .iter()
                    .zip(part)
                    .all(|(whole, part)| contains(whole, part))
        }
        (whole, part) => whole == part,
    }
}
