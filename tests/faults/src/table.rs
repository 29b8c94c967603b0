//! The table of `docs/reliability.md`: a row for each fault, replaced when it is inflicted again.

use std::{collections::BTreeMap, fmt};

use anyhow::Result;
use chrono::Utc;
use testbed::docs;

use crate::figures::Figures;

const HEAD: &str = "| | fault | what has to happen | times | outcome | p50 / p99 / max | on |\n|---|---|---|---|---|---|---|";

/// Whether what has to happen did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Held,
    Broken(String),
}

/// A fault, and what came out.
pub(crate) struct Row {
    pub(crate) number: u8,
    pub(crate) what: &'static str,
    pub(crate) expected: &'static str,
    pub(crate) repetitions: u32,
    pub(crate) outcome: Outcome,
    pub(crate) figures: Figures,
}

/// For the terminal.
impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            repetitions,
            figures,
            ..
        } = self;
        match &self.outcome {
            Outcome::Held => write!(f, "   held {repetitions} times: {figures}"),
            Outcome::Broken(why) => write!(f, "   BROKEN after {repetitions} times: {why}"),
        }
    }
}

impl Row {
    fn markdown(&self, date: &str) -> String {
        let outcome = match self.outcome {
            Outcome::Held => "held",
            Outcome::Broken(_) => "**broken**",
        };
        let Self {
            number,
            what,
            expected,
            repetitions,
            figures,
            ..
        } = self;
        format!(
            "| {number} | {what} | {expected} | {repetitions} | {outcome} | {figures} | {date} |"
        )
    }
}

/// The table of these faults alone.
pub(crate) fn markdown(rows: &[Row]) -> String {
    let date = date();
    let rows: Vec<_> = rows.iter().map(|row| row.markdown(&date)).collect();
    format!("{HEAD}\n{}", rows.join("\n"))
}

/// Puts these rows into the document, in place of older ones of the same faults.
///
/// # Errors
/// If it can't be read or written, or has no place for them.
pub(crate) fn write(rows: &[Row]) -> Result<()> {
    let date = date();
    replace("faults", |table| {
        let old = table.lines().filter_map(|line| Some((number(line)?, line)));
        let new: Vec<_> = rows.iter().map(|row| row.markdown(&date)).collect();
        let new = new.iter().filter_map(|line| Some((number(line)?, &**line)));
        // The later of two rows of a fault stays.
        let all: BTreeMap<u8, &str> = old.chain(new).collect();
        let lines: Vec<_> = all.into_values().collect();
        format!("{HEAD}\n{}", lines.join("\n"))
    })
}

/// Puts what comes of a part of the document in its place.
///
/// # Errors
/// If it can't be read or written, or has no such part.
pub(crate) fn replace(part: &str, change: impl FnOnce(&str) -> String) -> Result<()> {
    docs::replace("reliability.md", part, change)
}

/// The fault that a row is about.
fn number(row: &str) -> Option<u8> {
    row.split('|').nth(1)?.trim().parse().ok()
}

/// Of today.
pub(crate) fn date() -> String {
    Utc::now().format("%Y-%m-%d").to_string()
}
