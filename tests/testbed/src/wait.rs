//! Waiting for something to become true: by looking again until a deadline, never by sleeping for a guess.

use std::{
    fmt,
    future::Future,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use kube::runtime::utils::Backoff;

/// How long `eventually` pauses between two looks: short against every time a test measures.
const PAUSE: Duration = Duration::from_millis(20);

/// An error that ends `eventually` at once: what it waits for can no longer come true.
#[derive(Debug)]
pub struct GiveUp(pub String);

impl fmt::Display for GiveUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for GiveUp {}

/// Between two attempts of a watch: what stands in for a cluster must not be what a recovery waits for.
#[derive(Debug)]
pub(crate) struct Steady;

impl Iterator for Steady {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(10 * PAUSE)
    }
}

impl Backoff for Steady {
    fn reset(&mut self) {}
}

/// Calls `probe` until it answers `Ok`, and returns that value.
///
/// `what` names the awaited state in the error ("the pod is Ready").
///
/// # Errors
/// After `deadline`: the last error of `probe`. At once where that error is [`GiveUp`].
pub async fn eventually<T, F, Fut>(what: &str, deadline: Duration, mut probe: F) -> Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T>>,
{
    let start = Instant::now();
    let mut last = anyhow::anyhow!("the first look did not come back");
    loop {
        let left = deadline.saturating_sub(start.elapsed());
        match tokio::time::timeout(left, probe()).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) if error.is::<GiveUp>() => {
                return Err(error).with_context(|| format!("waiting until {what}"));
            }
            Ok(Err(error)) => last = error,
            Err(_) => {}
        }
        if start.elapsed() >= deadline {
            return Err(last).with_context(|| format!("waited {deadline:?} until {what}"));
        }
        tokio::time::sleep(PAUSE).await;
    }
}
