//! What loads the webhook: reviews of a given size, and how their answers are measured.
//!
//! A crate of its own, so that the programs that are compared are small and built as they are measured: optimised.

pub mod client;
pub mod review;

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What a run of `reviews` came to, as it prints it. Times are in microseconds.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Figures {
    /// Answers.
    pub requests: u64,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// Half of the answers came sooner.
    pub p50: u64,
    /// All but a hundredth.
    pub p99: u64,
    /// The last.
    pub max: u64,
}

/// A time as [`Figures`] have it.
#[must_use]
pub fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Figures {
    /// Of so many answers within so many seconds, these are the times.
    #[must_use]
    pub fn new(mut times: Vec<u64>, seconds: f64) -> Self {
        times.sort_unstable();
        let at = |percent: usize| {
            let index = times.len().saturating_sub(1) * percent / 100;
            times.get(index).copied().unwrap_or(0)
        };
        Self {
            requests: times.len() as u64,
            seconds,
            p50: at(50),
            p99: at(99),
            max: at(100),
        }
    }

    /// Answers a second.
    #[must_use]
    #[allow(clippy::cast_precision_loss)]
    pub fn rate(&self) -> f64 {
        self.requests as f64 / self.seconds
    }
}
