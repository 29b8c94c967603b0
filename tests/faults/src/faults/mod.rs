//! The faults, by what they befall. Numbers are those of the plan; a fault returns once all that was inflicted has passed and
//! what has to happen has.

mod boosts;
mod callers;
mod clocks;
mod crowd;
mod fleet;
mod leader;
mod network;
mod records;
mod server;
mod writes;

pub(crate) use self::fleet::{load, roll};

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use fastrand::Rng;
use futures::future::BoxFuture;
use testbed::lives::figures;

use crate::{
    bed::{Bed, PODS, SOON},
    figures::Figures,
};

/// The name of a figure: from Ready until the CPU is back.
const LAG: &str = "revert lag";
/// A lease of 6 s, a follower's retry of at most 1.2 s, and the writes.
const TAKEOVER: Duration = Duration::from_secs(8);
/// What a hand-over in good order may cost.
const HAND_OVER: Duration = Duration::from_secs(2);
/// Within it the pods of a round become Ready.
const WINDOW: Duration = Duration::from_secs(2);

/// How often a fault is inflicted.
#[derive(Clone, Copy)]
pub(crate) enum Repeat {
    Once,
    /// Its timing matters.
    Timing,
    /// So it does, and each time takes a minute.
    Slow,
}

impl Repeat {
    /// How often that is, also in the short form.
    pub(crate) fn times(self, short: bool) -> u32 {
        match (self, short) {
            (Self::Once, _) | (Self::Slow, true) => 1,
            (Self::Timing, true) => 5,
            (Self::Timing | Self::Slow, false) => 20,
        }
    }
}

/// A fault.
pub(crate) struct Fault {
    pub(crate) number: u8,
    pub(crate) what: &'static str,
    pub(crate) expected: &'static str,
    pub(crate) repeat: Repeat,
    pub(crate) run: for<'a, 'b> fn(&'a mut Round<'b>) -> BoxFuture<'a, Result<()>>,
}

/// One repetition of it.
pub(crate) struct Round<'a> {
    pub(crate) bed: &'a mut Bed,
    pub(crate) random: Rng,
    pub(crate) figures: &'a mut Figures,
    pub(crate) short: bool,
}

/// All of them, by their numbers.
pub(crate) fn all() -> Vec<Fault> {
    let mut all: Vec<_> = [
        boosts::faults(),
        callers::faults(),
        clocks::faults(),
        crowd::faults(),
        fleet::faults(),
        leader::faults(),
        network::faults(),
        records::faults(),
        server::faults(),
        writes::faults(),
    ]
    .into_iter()
    .flatten()
    .collect();
    all.sort_by_key(|fault| fault.number);
    all
}

/// Creates the pods of a round; they become Ready at random instants.
async fn burst(round: &mut Round<'_>) -> Result<()> {
    let window = u64::try_from(WINDOW.as_millis())?;
    let Round { bed, random, .. } = round;
    let pods = (0..PODS).map(|_| bed.pod(Some(Duration::from_millis(random.u64(..window)))));
    let pods = pods.collect::<Result<Vec<_>>>()?;
    bed.create(pods).await.map(drop)
}

/// Waits until so many pods are finished, each at most so late.
async fn reverted(round: &mut Round<'_>, pods: usize, bound: Duration) -> Result<()> {
    round.bed.lives.until_finished(pods, SOON).await?;
    let lags = round.bed.lives.lags();
    let worst = lags.iter().max().context("no pod was reverted")?;
    ensure!(*worst <= bound, "a pod was reverted {worst:?} late");
    round.figures.times(LAG, lags);
    Ok(())
}

/// What a hand-over in good order may cost all but a hundredth of the pods.
fn ensure_handed_over(round: &Round<'_>) -> Result<()> {
    let p99 = Duration::from_micros(figures(&round.bed.lives.lags()).p99);
    ensure!(p99 <= HAND_OVER, "revert lag p99 {p99:?}");
    Ok(())
}
