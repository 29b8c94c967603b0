//! Who was executed: a record of every case and layer, and the table that is printed at the end.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, PoisonError},
};

use libtest_mimic::{Failed, Trial};

use crate::data::{Cases, Id, Layer};

/// Whether the case passed, for each that was executed.
static EXECUTED: Mutex<BTreeMap<(Layer, Id), bool>> = Mutex::new(BTreeMap::new());

/// The test of one case in one layer.
pub fn trial(
    layer: Layer,
    id: Id,
    run: impl FnOnce() -> anyhow::Result<()> + Send + 'static,
) -> Trial {
    Trial::test(format!("{}::{id}", layer.as_str()), move || {
        note(layer, id, false);
        run().map_err(|error| Failed::from(format!("{error:#}")))?;
        note(layer, id, true);
        Ok(())
    })
}

fn note(layer: Layer, id: Id, passed: bool) {
    let mut executed = EXECUTED.lock().unwrap_or_else(PoisonError::into_inner);
    executed.insert((layer, id), passed);
}

/// Prints the table; returns how many cases are missing: demanded in a layer of this build and not executed there.
pub fn print(cases: &Cases, layers: &[Layer], everything: bool) -> usize {
    let executed = EXECUTED.lock().unwrap_or_else(PoisonError::into_inner);
    let groups: BTreeSet<char> = cases.iter().map(|(id, _)| id.group).collect();
    println!("layer     group  executed  passed  ids");
    for layer in layers {
        for group in &groups {
            let ids: Vec<Id> = executed
                .keys()
                .filter(|(of, id)| of == layer && id.group == *group)
                .map(|(_, id)| *id)
                .collect();
            let passed = ids.iter().filter(|id| executed[&(*layer, **id)]).count();
            if !ids.is_empty() {
                let (layer, count) = (layer.as_str(), ids.len());
                let ids = ranges(&ids);
                println!("{layer:<9} {group:<5}  {count:>8}  {passed:>6}  {ids}");
            }
        }
    }
    if !everything {
        return 0;
    }
    let mut missing = 0;
    for layer in [Layer::Pure, Layer::Scripted, Layer::Cluster] {
        let name = layer.as_str();
        let lacking: Vec<Id> = cases
            .iter()
            .filter(|(id, case)| case.runs_in(layer) && !executed.contains_key(&(layer, *id)))
            .map(|(id, _)| id)
            .collect();
        if !lacking.is_empty() && layers.contains(&layer) {
            missing += lacking.len();
            println!("missing in layer {name}: {}", ranges(&lacking));
        } else if !lacking.is_empty() {
            println!("no layer {name} in this build for: {}", ranges(&lacking));
        }
        let later: Vec<Id> = cases
            .iter()
            .filter(|(_, case)| case.later.contains(&layer))
            .map(|(id, _)| id)
            .collect();
        if !later.is_empty() {
            println!("later in layer {name}: {}", ranges(&later));
        }
    }
    missing
}

/// `A1–A3, A7`.
fn ranges(ids: &[Id]) -> String {
    let mut runs: Vec<(Id, Id)> = Vec::new();
    for id in ids {
        match runs.last_mut() {
            Some((_, last)) if last.group == id.group && last.row + 1 == id.row => *last = *id,
            _ => runs.push((*id, *id)),
        }
    }
    let texts: Vec<String> = runs
        .iter()
        .map(|(first, last)| match last.row - first.row {
            0 => first.to_string(),
            1 => format!("{first}, {last}"),
            _ => format!("{first}–{last}"),
        })
        .collect();
    texts.join(", ")
}
