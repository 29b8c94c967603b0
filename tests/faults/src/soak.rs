//! `cargo faults soak MINUTES`: pods come and go all the while, and replicas must not grow.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kube::api::{DeleteParams, ListParams};
use testbed::{Behaviour, lives};
use tokio::time::{interval, sleep};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::bed::{Bed, GROUP};

/// Pods a second, and how long each lives.
const RATE: u32 = 50;
const LIFE: Duration = Duration::from_secs(10);
/// Between two looks at the replicas.
const PAUSE: Duration = Duration::from_secs(10);
/// What a replica's memory may grow by in an hour, in KiB: within it, it would take days to reach its limit.
const SLOPE: f64 = 1024.0;
/// A quarter of the time goes by until caches and allocator have what they need.
const WARM_UP: usize = 4;

/// Minutes since the begin, KiB, open files.
type Sample = [f64; 3];

/// Runs it, and says what came out in one line of a table.
///
/// # Errors
/// If an invariant does not hold, or a replica grows.
pub(crate) async fn soak(mut bed: Bed, minutes: u32) -> Result<String> {
    bed.node.set_behaviour(Behaviour {
        ready_after: Some(Duration::from_secs(1)),
        ..Behaviour::default()
    });
    let over = CancellationToken::new();
    let (load, reaper) = (load(&mut bed, over.clone()), reap(&bed));
    let began = Instant::now();
    let mut samples: Vec<Vec<Sample>> = bed.replicas.iter().map(|_| Vec::new()).collect();
    let mut ticks = interval(PAUSE);
    while began.elapsed() < Duration::from_secs(60 * u64::from(minutes)) {
        ticks.tick().await;
        for (replica, samples) in bed.replicas.iter().zip(&mut samples) {
            let process = replica.operator.process();
            let files = f64::from(u32::try_from(process.open_files()?)?);
            samples.push([
                began.elapsed().as_secs_f64() / 60.0,
                process.resident()?,
                files,
            ]);
            replica.proxy.forget();
        }
        bed.ledger.forget_gone(&bed.plane).await?;
        bed.lives.forget_finished();
    }
    over.cancel();
    let (pods, failed) = load.await?;
    sleep(2 * LIFE).await;
    drop(reaper);
    bed.check().await?;
    ensure!(
        failed == 0,
        "{failed} of {pods} pods were refused or got no boost"
    );
    let mut cells = Vec::new();
    for samples in &samples {
        let warm = &samples[samples.len() / WARM_UP..];
        let (memory, files) = (slope(warm, 1) * 60.0, slope(warm, 2) * 60.0);
        let last = samples.last().context("no sample was taken")?;
        ensure!(
            memory <= SLOPE,
            "a replica grows by {memory:.0} KiB an hour"
        );
        cells.push(format!(
            "{:.1} MiB, {memory:+.0} KiB/h, {} files, {files:+.1}/h",
            last[1] / 1024.0,
            last[2]
        ));
    }
    Ok(format!("{minutes} min, {pods} pods: {}", cells.join("; ")))
}

/// Pods at the rate, until it is over: how many, and how many got no boost.
fn load(bed: &mut Bed, over: CancellationToken) -> tokio::task::JoinHandle<(usize, usize)> {
    let (client, mut next) = (bed.plane.admin(), bed.reserve(1 << 24));
    tokio::spawn(async move {
        let (mut pods, mut failed) = (0, 0);
        while !over.is_cancelled() {
            let pod = |index| lives::pod(GROUP, next + index);
            let made = lives::create_at(client.clone(), RATE, 1, pod).await;
            pods += made.len();
            failed += made
                .iter()
                .filter(|made| !made.as_ref().is_ok_and(|made| made.boosted))
                .count();
            next += RATE;
        }
        (pods, failed)
    })
}

/// Deletes pods that have lived.
fn reap(bed: &Bed) -> AbortOnDropHandle<()> {
    let pods = bed.pods();
    AbortOnDropHandle::new(tokio::spawn(async move {
        let now = DeleteParams::default().grace_period(0);
        let finished = ListParams::default().labels(&format!("!{}", lives::KEY));
        loop {
            sleep(LIFE).await;
            // What can't be deleted now is deleted the next time.
            pods.delete_collection(&now, &finished).await.ok();
        }
    }))
}

/// What a column grows by in a minute: least squares.
fn slope(samples: &[Sample], column: usize) -> f64 {
    let count: f64 = samples.iter().map(|_| 1.0).sum();
    let mean = |of: usize| samples.iter().map(|sample| sample[of]).sum::<f64>() / count;
    let (at, value) = (mean(0), mean(column));
    let with = |of: usize, middle: f64| {
        let products = samples
            .iter()
            .map(|sample| (sample[0] - at) * (sample[of] - middle));
        products.sum::<f64>()
    };
    with(column, value) / with(0, at).max(f64::MIN_POSITIVE)
}
