//! What befalls the process that leads: it is killed, told to end, or stopped and woken.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::FutureExt as _;
use testbed::{Signal, eventually, proxy::Moment};
use tokio::time::sleep;

use super::{Fault, LAG, Repeat, Round, TAKEOVER, WINDOW, burst, ensure_handed_over, reverted};
use crate::bed::{PODS, SOON};

/// How long a zombie sleeps; in the short form just longer than its lease.
const SLEEP: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));

pub(super) fn faults() -> Vec<Fault> {
    vec![
        Fault {
            number: 1,
            what: "the leader is killed before, during and after each of a revert's two writes",
            expected: "the next leader completes it; one effective resize a pod; at most 8 s late",
            repeat: Repeat::Timing,
            run: |round| killed_within_a_revert(round).boxed(),
        },
        Fault {
            number: 2,
            what: "the leader gets SIGTERM in a burst of reverts",
            expected: "nothing is lost; revert lag p99 ≤ 2 s",
            repeat: Repeat::Timing,
            run: |round| told_to_end(round).boxed(),
        },
        Fault {
            number: 3,
            what: "the leader is stopped (SIGSTOP) with a write on its way, and woken when another leads",
            expected: "the other takes over; the late write gets 409 and changes nothing; the process follows",
            repeat: Repeat::Timing,
            run: |round| stopped_and_woken(round).boxed(),
        },
    ]
}

async fn killed_within_a_revert(round: &mut Round<'_>) -> Result<()> {
    let leader = round.bed.leader().await?;
    let path = ["/pods/*/resize", "/pods/*"][round.random.usize(..2)];
    let moment = [Moment::Before, Moment::After][round.random.usize(..2)];
    let hold = round.bed.replicas[leader].proxy.hold("PATCH", path, moment);
    burst(round).await?;
    hold.arrived(SOON).await?;
    let victim = round.bed.take(leader);
    victim.operator.crash()?;
    drop(hold);
    let killed = Instant::now();
    reverted(round, PODS, TAKEOVER).await?;
    let took = killed.elapsed();
    round.figures.time("until all are reverted", took);
    Ok(())
}

async fn told_to_end(round: &mut Round<'_>) -> Result<()> {
    burst(round).await?;
    let leader = round.bed.leader().await?;
    // Anywhere in the burst.
    sleep(WINDOW.mul_f64(round.random.f64())).await;
    let victim = round.bed.take(leader);
    let (ended, finished) = tokio::join!(
        victim.operator.stop(SOON),
        round.bed.lives.until_finished(PODS, SOON)
    );
    finished?;
    ensure!(ended? == 0, "it did not end in good order");
    round.figures.times(LAG, round.bed.lives.lags());
    ensure_handed_over(round)
}

async fn stopped_and_woken(round: &mut Round<'_>) -> Result<()> {
    let leader = round.bed.leader().await?;
    let hold = round.bed.replicas[leader]
        .proxy
        .hold("PATCH", "/pods/*/resize", Moment::Before);
    burst(round).await?;
    hold.arrived(SOON).await?;
    let began = Instant::now();
    let zombie = round.bed.replicas[leader].operator.name().to_owned();
    round.bed.replicas[leader]
        .operator
        .process()
        .kill(Signal::STOP)?;
    round.bed.leader_other_than(&zombie).await?;
    round.figures.time("until another leads", began.elapsed());
    reverted(round, PODS, TAKEOVER).await?;

    let sleeps = if round.short { SLEEP.1 } else { SLEEP.0 };
    sleep(sleeps.saturating_sub(began.elapsed())).await;
    round.bed.check().await?;
    let before = round.bed.ledger.resizes();
    hold.release();
    let process = round.bed.replicas[leader].operator.process();
    process.kill(Signal::CONT)?;
    round.bed.replicas[leader].operator.wait_ready(SOON).await?;
    round.bed.check().await?;
    let late = round.bed.ledger.resizes() - before;
    round
        .figures
        .count("late writes that changed something", usize::try_from(late)?);
    ensure!(late == 0, "{late} of its writes changed something");
    let process = &round.bed.replicas[leader].operator;
    eventually("it no longer leads", SOON, || async {
        let metrics = process.metrics().await?;
        ensure!(metrics.contains("headstart_leader 0"), "it leads");
        Ok(())
    })
    .await
}
