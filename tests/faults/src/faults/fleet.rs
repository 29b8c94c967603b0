//! What befalls all replicas: rolling updates, an outage, leaders that never last.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures::FutureExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, PostParams},
};
use serde_json::json;
use testbed::{
    OperatorOptions, Signal,
    cluster::SYSTEM_NAMESPACE,
    eventually,
    lives::{self, Creation, KEY},
};
use tokio::{task::JoinHandle, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{Fault, LAG, Repeat, Round};
use crate::bed::{Bed, GROUP, PODS, REPLICAS, SOON};

/// Rolling updates, and in the short form.
const UPDATES: (u32, u32) = (10, 2);
/// Pods a second meanwhile: what two cores bear beside API server, etcd and kubelet.
const RATE: u32 = 30;
/// How long all are away.
const OUTAGE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(15));
/// The same for pods that are boosted late, and pods a second meanwhile; and what of their start is left when all are back.
const MISSING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));
const MISSING_RATE: u32 = 20;
/// How soon after the return all that still starts has more CPU: a successor watches the dead leader's
/// lease for 7 s, then raises some 400 pods, of four requests each, at about 60 pods a second on two cores.
const CAUGHT_UP: Duration = Duration::from_secs(15);
/// How long pods take to start, in milliseconds.
const STARTS: Range<u64> = 5_000..60_000;
/// How often, and how long, leaders are killed.
const FLAPPING: (Duration, Duration) = (Duration::from_secs(600), Duration::from_secs(60));
const EVERY: Duration = Duration::from_secs(5);
/// Of a CPU quota.
const PERIOD: Duration = Duration::from_millis(100);
/// How long an endpoint still gets connections after it has gone.
const LAGS: [Duration; 3] = [
    Duration::ZERO,
    Duration::from_secs(1),
    Duration::from_secs(5),
];

pub(super) fn faults() -> Vec<Fault> {
    vec![
        Fault {
            number: 24,
            what: "10 rolling updates during 30 pods/s, endpoints removed 0, 1 or 5 s after they have gone",
            expected: "0 unboosted, 0 refused, 0 failed calls; revert lag p99 ≤ 2 s",
            repeat: Repeat::Once,
            run: |round| rolling_updates(round).boxed(),
        },
        Fault {
            number: 25,
            what: "all replicas are away for a minute",
            expected: "no pod is refused; all that was boosted is reverted when they are back",
            repeat: Repeat::Once,
            run: |round| outage(round).boxed(),
        },
        Fault {
            number: 26,
            what: "failurePolicy is Fail, and all replicas are away",
            expected: "pods are refused, as asked for, but not Headstart's own; it comes back unaided",
            repeat: Repeat::Once,
            run: |round| fails_closed(round).boxed(),
        },
        Fault {
            number: 36,
            what: "the leader gets a tenth of a CPU, then is killed for its memory",
            expected: "every boost ends; it keeps its memory",
            repeat: Repeat::Once,
            run: |round| throttled(round).boxed(),
        },
        Fault {
            number: 38,
            what: "each leader is killed after 5 s, for 10 minutes",
            expected: "every boost ends",
            repeat: Repeat::Once,
            run: |round| flapping(round).boxed(),
        },
        Fault {
            number: 39,
            what: "all replicas are away for 30 s during 20 pods/s, and pods that admission has missed are to be boosted",
            expected: "no pod is refused; all that still start 15 s after the return are boosted by then",
            repeat: Repeat::Once,
            run: |round| missed(round).boxed(),
        },
    ]
}

/// The pods of a load, by what became of them.
pub(super) async fn counted(
    round: &mut Round<'_>,
    results: Vec<Result<Creation>>,
) -> Result<usize> {
    let refused = results.iter().filter(|result| result.is_err()).count();
    let made: Vec<_> = results.iter().flatten().collect();
    let boosted = made.iter().filter(|creation| creation.boosted).count();
    let unboosted = made.len() - boosted;
    round.figures.count("pods", results.len());
    round.figures.count("refused", refused);
    round.figures.count("unboosted", unboosted);
    round.bed.lives.until_finished(boosted, 2 * SOON).await?;
    round.figures.times(LAG, round.bed.lives.lags());
    let error = results.into_iter().find_map(Result::err);
    error.map_or(Ok(unboosted), Err)
}

async fn rolling_updates(round: &mut Round<'_>) -> Result<()> {
    let updates = if round.short { UPDATES.1 } else { UPDATES.0 };
    let over = CancellationToken::new();
    let load = load(round.bed, over.clone());
    for update in 0..updates {
        let lag = LAGS[update as usize % LAGS.len()];
        round.bed.balancer.set_removal_lag(lag);
        roll(round.bed).await?;
    }
    over.cancel();
    let unboosted = counted(round, load.await?).await?;
    ensure!(unboosted == 0, "{unboosted} pods got no boost");
    super::ensure_handed_over(round)?;
    let metrics = round.bed.plane.metrics().await?;
    let failed = metrics
        .lines()
        .filter(|line| line.starts_with("apiserver_admission_webhook_fail_open_count{"))
        .find(|line| line.contains("headstart") && !line.ends_with(" 0"));
    ensure!(failed.is_none(), "calls failed: {failed:?}");
    Ok(())
}

/// As a Deployment with `maxSurge` 1 and `maxUnavailable` 0 does it: a new replica is Ready before an old one goes.
pub(crate) async fn roll(bed: &mut Bed) -> Result<()> {
    for _ in 0..REPLICAS {
        bed.add().await?;
        bed.until_ready().await?;
        let old = bed.take(0);
        bed.balancer.terminate(old.operator.backend());
        ensure!(old.operator.stop(SOON).await? == 0, "it did not end well");
    }
    Ok(())
}

/// Pods at a rate, until it is over.
pub(crate) fn load(bed: &mut Bed, over: CancellationToken) -> JoinHandle<Vec<Result<Creation>>> {
    let (client, first) = (bed.plane.admin(), bed.reserve(1 << 20));
    tokio::spawn(async move {
        let mut all = Vec::new();
        let mut next = first;
        while !over.is_cancelled() {
            let pod = |index| lives::pod(GROUP, next + index);
            all.extend(lives::create_at(client.clone(), RATE, 1, pod).await);
            next += RATE;
        }
        all
    })
}

async fn outage(round: &mut Round<'_>) -> Result<()> {
    super::burst(round).await?;
    round.bed.crash_all()?;
    let outage = if round.short { OUTAGE.1 } else { OUTAGE.0 };
    let seconds = u32::try_from(outage.as_secs())?;
    let first = round.bed.reserve(RATE * seconds);
    let pod = |index| lives::pod(GROUP, first + index);
    let results = lives::create_at(round.bed.plane.admin(), RATE, seconds, pod).await;
    let refused = results.iter().filter(|result| result.is_err()).count();
    let late = results.iter().flatten().map(|creation| creation.took);
    round.figures.times("creation without a webhook", late);
    round.figures.count("refused", refused);
    ensure!(refused == 0, "{refused} pods were refused");
    let began = Instant::now();
    for _ in 0..REPLICAS {
        round.bed.add().await?;
    }
    round.bed.until_ready().await?;
    round.figures.time("until all are Ready", began.elapsed());
    round.bed.lives.until_finished(PODS, SOON).await?;
    round.figures.time("until all is reverted", began.elapsed());
    Ok(())
}

async fn missed(round: &mut Round<'_>) -> Result<()> {
    round.bed.allow_raises().await?;
    round.bed.crash_all()?;
    let outage = if round.short { MISSING.1 } else { MISSING.0 };
    let seconds = u32::try_from(outage.as_secs())?;
    let Round { bed, random, .. } = round;
    let start = |_| bed.pod(Some(Duration::from_millis(random.u64(STARTS))));
    let pods: Vec<Pod> = (0..MISSING_RATE * seconds)
        .map(start)
        .collect::<Result<_>>()?;
    let pod = |index| Ok(pods[index as usize].clone());
    let made = lives::create_at(round.bed.plane.admin(), MISSING_RATE, seconds, pod).await;
    let refused = made.iter().filter(|made| made.is_err()).count();
    round.figures.count("refused", refused);
    ensure!(refused == 0, "{refused} pods were refused");
    let back = Instant::now();
    for _ in 0..REPLICAS {
        let late = |_, options: &mut OperatorOptions| {
            options.args.push("--boost-missed-pods".to_owned());
        };
        round.bed.add_as(late).await?;
    }
    round.bed.until_ready().await?;
    round.bed.lives.until_ready(pods.len(), 2 * SOON).await?;
    let raises = round.bed.lives.raises();
    let late = raises
        .iter()
        .filter_map(|(seen, raised, _)| Some((*seen, (*raised)?)));
    let late: Vec<_> = late.collect();
    let since = |begin: fn(Instant, Instant) -> Instant| {
        let late = late.iter();
        late.map(move |(seen, raised)| raised.saturating_duration_since(begin(*seen, back)))
    };
    let return_to_raise = since(|_, back| back).collect::<Vec<_>>();
    let creation_to_raise = since(|seen, _| seen).collect::<Vec<_>>();
    round
        .figures
        .times("from the return until boosted", return_to_raise);
    round
        .figures
        .times("from creation until boosted", creation_to_raise);
    round.figures.count("pods", pods.len());
    round.figures.count("boosted late", late.len());
    let starting = raises.iter().filter(|(_, raised, ready)| {
        raised.is_none() && ready.is_some_and(|ready| ready > back + CAUGHT_UP)
    });
    let forgotten = starting.count();
    ensure!(
        forgotten == 0,
        "{forgotten} pods that still started got no boost"
    );
    round.bed.lives.until_finished(late.len(), SOON).await
}

async fn fails_closed(round: &mut Round<'_>) -> Result<()> {
    round.bed.until_all_boost(true).await?;
    set_failure_policy(round.bed, "Fail").await?;
    round.bed.crash_all()?;
    let api = round.bed.pods();
    let refused = eventually("pods are refused", SOON, || async {
        let pod = lives::pod(GROUP, u32::MAX)?;
        let dry_run = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        ensure!(api.create(&dry_run, &pod).await.is_err(), "one is not");
        Ok(())
    });
    refused.await?;
    // As its Deployment would make it.
    let own = Api::<Pod>::namespaced(round.bed.plane.admin(), SYSTEM_NAMESPACE);
    let pod = serde_json::from_value(json!({
        "metadata": {"name": "headstart"},
        "spec": {
            "serviceAccountName": "headstart",
            "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "headstart", "image": "headstart",
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
            }],
        },
    }))?;
    let made = own.create(&PostParams::default(), &pod).await;
    let made = made.context("its own pod is refused")?;
    own.delete(&made.name_any(), &DeleteParams::default())
        .await?;
    let began = Instant::now();
    for _ in 0..REPLICAS {
        round.bed.add().await?;
    }
    let pod = round.bed.pod(Some(Duration::ZERO))?;
    let created = eventually("pods are created again", SOON, || async {
        Ok(api.create(&PostParams::default(), &pod).await?)
    });
    ensure!(created.await?.labels().contains_key(KEY), "it got no boost");
    round
        .figures
        .time("until pods are boosted again", began.elapsed());
    round.bed.lives.until_finished(1, SOON).await?;
    set_failure_policy(round.bed, "Ignore").await?;
    round.bed.ledger.excuse_refusals(&round.bed.plane).await
}

async fn set_failure_policy(bed: &Bed, policy: &str) -> Result<()> {
    let patch = json!([{"op": "replace", "path": "/webhooks/0/failurePolicy", "value": policy}])
        .to_string();
    let patch = [
        "patch",
        "mutatingwebhookconfiguration",
        "headstart",
        "--type=json",
        "-p",
        &patch,
    ];
    bed.plane.kubectl_ok(&patch).await.map(drop)
}

async fn throttled(round: &mut Round<'_>) -> Result<()> {
    let leader = round.bed.leader().await?;
    let victim = round.bed.take(leader);
    let (slow, over) = (victim.operator.process(), CancellationToken::new());
    // As a CPU quota does it: it runs for a tenth of each period.
    let throttle = async {
        while !over.is_cancelled() {
            slow.kill(Signal::STOP)?;
            sleep(PERIOD.mul_f64(0.9)).await;
            slow.kill(Signal::CONT)?;
            sleep(PERIOD.mul_f64(0.1)).await;
        }
        anyhow::Ok(())
    };
    let load = async {
        super::burst(round).await?;
        let finished = round.bed.lives.until_finished(PODS, SOON).await;
        over.cancel();
        finished
    };
    tokio::try_join!(throttle, load)?;
    round
        .figures
        .times("revert lag with a tenth of a CPU", round.bed.lives.lags());
    let memory = victim.operator.process().resident()? / 1024.0;
    round.figures.number("MiB", memory);
    super::burst(round).await?;
    victim.operator.crash()?;
    round.bed.add().await?;
    round.bed.lives.until_finished(2 * PODS, SOON).await
}

async fn flapping(round: &mut Round<'_>) -> Result<()> {
    let whole = if round.short { FLAPPING.1 } else { FLAPPING.0 };
    let began = Instant::now();
    let mut pods = 0;
    while began.elapsed() < whole {
        super::burst(round).await?;
        pods += PODS;
        let leader = round.bed.leader().await?;
        sleep(EVERY).await;
        round.bed.take(leader).operator.crash()?;
        round.figures.count("leaders killed", 1);
        round.bed.add().await?;
        round.bed.until_ready().await?;
    }
    round.bed.lives.until_finished(pods, SOON).await?;
    let lags = round.bed.lives.lags();
    lags.first().context("no pod was reverted")?;
    round.figures.times(LAG, lags);
    Ok(())
}
