//! Pods at a rate on the stand-ins, while something is done to the operator, and what became of each of them.

use std::{fmt, time::Duration};

use anyhow::{Context as _, Result, ensure};
use testbed::lives::{self, Creation, Lives, NAMESPACE, figures, milliseconds};
use tokio_util::task::AbortOnDropHandle;

use crate::cluster::Cluster;

/// Pods a second, as in the table of `docs/benchmarks.md`.
const RATE: u32 = 15;
/// How long the last pods may take to be Ready and get their CPU back.
const AFTERMATH: Duration = Duration::from_secs(60);

/// Pods that are being made.
pub(crate) struct Load {
    lives: Lives,
    creations: AbortOnDropHandle<Vec<Result<Creation>>>,
}

/// What became of them.
pub(crate) struct Seen {
    pods: usize,
    refused: Vec<String>,
    unboosted: usize,
    still_boosted: usize,
    creations: Vec<Duration>,
    lags: Vec<Duration>,
}

impl Load {
    /// Starts to make pods, so many seconds long.
    ///
    /// # Errors
    /// If the boost is refused.
    pub(crate) async fn start(cluster: &Cluster, seconds: u32) -> Result<Self> {
        lives::prepare(&cluster.plane, &["storm"]).await?;
        let lives = Lives::watch(cluster.plane.admin());
        let client = cluster.plane.admin();
        let pod = |index| {
            let mut pod = lives::pod("storm", index)?;
            let spec = pod.spec.as_mut().context("it has a spec")?;
            spec.node_selector =
                Some([(testbed::node::STAND_IN.to_owned(), "true".to_owned())].into());
            Ok(pod)
        };
        let creations = tokio::spawn(lives::create_at(client, RATE, seconds, pod));
        Ok(Self {
            lives,
            creations: AbortOnDropHandle::new(creations),
        })
    }

    /// Waits until all are made and have their CPU back, counts, and removes them.
    ///
    /// # Errors
    /// If they can't be counted.
    pub(crate) async fn end(self, cluster: &Cluster) -> Result<Seen> {
        let results = self.creations.await.context("making pods panicked")?;
        let refused = results
            .iter()
            .filter_map(|result| result.as_ref().err())
            .map(|error| format!("{error:#}"))
            .collect();
        let made: Vec<&Creation> = results.iter().flatten().collect();
        let boosted = made.iter().filter(|creation| creation.boosted).count();
        // Whether they are is said by the count below.
        self.lives.until_finished(boosted, AFTERMATH).await.ok();
        let seen = Seen {
            pods: results.len(),
            refused,
            unboosted: made.len() - boosted,
            still_boosted: boosted.saturating_sub(self.lives.finished()),
            creations: made.iter().map(|creation| creation.took).collect(),
            lags: self.lives.lags(),
        };
        cluster
            .kubectl(&format!("delete namespace {NAMESPACE} --timeout=180s"))
            .await?;
        Ok(seen)
    }
}

impl Seen {
    /// The promise: whatever happens to replicas one at a time, each pod is boosted and gets its CPU back.
    ///
    /// # Errors
    /// If one was refused, not boosted, or is still boosted.
    pub(crate) fn nothing_is_lost(&self) -> Result<()> {
        ensure!(self.unboosted == 0, "{self}");
        self.nothing_is_refused()
    }

    /// What holds also while no replica is there: pods start, and what was boosted gets its CPU back.
    ///
    /// # Errors
    /// If one was refused, or is still boosted.
    pub(crate) fn nothing_is_refused(&self) -> Result<()> {
        ensure!(
            self.refused.is_empty() && self.still_boosted == 0,
            "{self}: {:?}",
            self.refused.first()
        );
        Ok(())
    }

    /// The 99th percentile from Ready until the CPU is back.
    pub(crate) fn lag_p99(&self) -> Duration {
        Duration::from_micros(figures(&self.lags).p99)
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pods, refused, unboosted, left) = (
            self.pods,
            self.refused.len(),
            self.unboosted,
            self.still_boosted,
        );
        write!(
            f,
            "of {pods} pods {refused} refused, {unboosted} unboosted, {left} still boosted; revert lag p50 / p99 / max {}; creation {}",
            milliseconds(&self.lags),
            milliseconds(&self.creations)
        )
    }
}
