//! The layer of scripts: the operator's own adapters in this process, and an API server in memory that answers as told.
//!
//! - `review`: reviews as the API server posts them, and what an answer must be (the layer of values uses it too);
//! - `webhook`: HTTP to the webhook's routes;
//! - `lives`: the leader and a boosted pod, in virtual time;
//! - `storm`: many ends at once, and the webhook meanwhile;
//! - `starts`: starts of the real binary.

mod lives;
pub mod review;
pub mod starts;
mod storm;
mod webhook;

use anyhow::{Context, ensure};
use libtest_mimic::Trial;

use crate::{
    data::{Case, Cases, Id, Layer},
    report,
};

/// One test for each case.
pub fn trials(cases: &'static Cases) -> Vec<Trial> {
    cases
        .iter()
        .filter(|(_, case)| case.runs_in(Layer::Scripted))
        .map(|(id, case)| report::trial(Layer::Scripted, id, move || run(cases, id, case)))
        .collect()
}

/// Executes all parts of a case that need a server or the process, and no real cluster.
fn run(cases: &Cases, id: Id, case: &Case) -> anyhow::Result<()> {
    let mut parts = 0;
    let mut part = |what: &str, about: Option<&String>, result: anyhow::Result<()>| {
        parts += 1;
        let about = about.map_or(String::new(), |about| format!(" ({about})"));
        result.with_context(|| format!("{what}{about}"))
    };
    for admit in case.admit.iter() {
        let checked = webhook::check_admit(cases, admit);
        part("admit", admit.about.as_ref(), checked)?;
    }
    for post in case.post.iter() {
        let checked = webhook::check_post(cases, post);
        part("post", post.about.as_ref(), checked)?;
    }
    for life in case.end.iter() {
        part("end", life.about.as_ref(), lives::check(cases, id, life))?;
    }
    if let Some(storm) = &case.storm {
        part("storm", None, storm::check(cases, id, storm))?;
    }
    for start in case.start.iter() {
        part("start", None, starts::check_process(start))?;
    }
    ensure!(parts > 0, "nothing of this case is about a server");
    Ok(())
}
