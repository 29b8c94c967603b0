//! What befalls clocks and certificates.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures::FutureExt as _;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use kube::Api;
use load::{
    client::{Connection, TlsConnector, connector, post},
    review::body,
};
use testbed::{
    Backend, Signal,
    cluster::SYSTEM_NAMESPACE,
    lives::{self, NAMESPACE},
    release,
};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{interval, sleep},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use super::{Fault, Repeat, Round, reverted};
use crate::bed::{Bed, GROUP, PODS, REPLICAS, SOON};

/// How wrong a clock is, in minutes; and what a boost of fixed duration may be late by then.
const SKEWS: [i64; 3] = [-10, 0, 10];
const USUAL: Duration = Duration::from_secs(2);
/// A leaf a minute: it is renewed after two thirds of this.
const LEAF: &str = "90s";
const CA: &str = "3m";
/// How long, and in the short form.
const ROTATING: (Duration, Duration) = (Duration::from_secs(600), Duration::from_secs(150));
/// Reviews a second, each on a connection of its own; and pods.
const REVIEWS: u64 = 200;
const CREATIONS: u32 = 10;
/// The API server's own watch of the webhook configuration is later than its write by about this.
const PROPAGATION: Duration = Duration::from_secs(1);
/// Where Debian has it.
const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

pub(super) fn faults() -> Vec<Fault> {
    vec![
        Fault {
            number: 10,
            what: "clocks of two of three replicas are ten minutes wrong, to either side, and jump",
            expected: "one leader; reverts are early or late by no more than the clock is wrong",
            repeat: Repeat::Once,
            run: |round| skewed(round).boxed(),
        },
        Fault {
            number: 23,
            what: "a new certificate every minute and a new CA, during 200 reviews/s on new connections",
            expected: "0 failed handshakes; 0 unboosted",
            repeat: Repeat::Once,
            run: |round| rotating(round).boxed(),
        },
    ]
}

async fn skewed(round: &mut Round<'_>) -> Result<()> {
    ensure!(
        Path::new(FAKETIME).exists(),
        "{FAKETIME} is missing; the Debian package is libfaketime"
    );
    let binary = release::build(&["--bin", "headstart"]).await?;
    let binary = binary.join("debug/headstart");
    let folder = round.bed.plane.folder().to_owned();
    let clock = |replica: usize| folder.join(format!("clock-{replica}"));
    for (replica, skew) in SKEWS.into_iter().enumerate() {
        std::fs::write(clock(replica), offset(skew))?;
    }
    round
        .bed
        .replace_all(|number, options| {
            options.binary.clone_from(&binary);
            let file = clock(number % REPLICAS).to_string_lossy().into_owned();
            options.env.extend(faketime(&file));
        })
        .await?;
    round.bed.until_all_boost(true).await?;
    let mut ended = 0;
    for _ in 0..REPLICAS {
        // Two jump while one leads, then the next one does.
        for replica in 0..REPLICAS {
            let skew = SKEWS[round.random.usize(..SKEWS.len())];
            std::fs::write(clock(replica), offset(skew))?;
        }
        super::burst(round).await?;
        ended += PODS;
        round.bed.lives.until_finished(ended, SOON).await?;
        let leader = round.bed.leader().await?;
        let leader = &round.bed.replicas[leader].operator;
        let name = leader.name().to_owned();
        leader.process().kill(Signal::STOP)?;
        let next = round.bed.leader_other_than(&name).await;
        let stopped = round.bed.replicas.iter();
        let mut stopped = stopped.filter(|replica| replica.operator.name() == name);
        let stopped = stopped.next().context("nobody removed it")?;
        stopped.operator.process().kill(Signal::CONT)?;
        next?;
    }
    reverted(round, ended, USUAL).await
}

/// As faketime reads it: seconds from the right time.
fn offset(minutes: i64) -> String {
    format!("{:+}", minutes * 60)
}

fn faketime(file: &str) -> [(String, String); 4] {
    [
        ("LD_PRELOAD", FAKETIME),
        ("FAKETIME_TIMESTAMP_FILE", file),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ("FAKETIME_CACHE_DURATION", "1"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
}

async fn rotating(round: &mut Round<'_>) -> Result<()> {
    // Nothing is left of the certificates that live for months.
    let secret = [
        "patch",
        "secret",
        "-n",
        SYSTEM_NAMESPACE,
        "headstart-certificates",
    ];
    let empty = ["--type=merge", "-p", r#"{"data": null}"#];
    round.bed.crash_all()?;
    round
        .bed
        .plane
        .kubectl_ok(&[&secret[..], &empty].concat())
        .await?;
    let lifetimes = ["--certificate-lifetime", LEAF, "--ca-lifetime", CA];
    round
        .bed
        .replace_all(|_, options| options.args.extend(lifetimes.map(str::to_owned)))
        .await?;
    round.bed.until_all_boost(true).await?;

    let (trust, over) = (Trust::follow(round.bed).await?, CancellationToken::new());
    let backends = round.bed.backends();
    let callers = tokio::spawn(call(trust.bundle.clone(), backends, over.clone()));
    let whole = if round.short { ROTATING.1 } else { ROTATING.0 };
    let (first, seconds) = (
        round
            .bed
            .reserve(CREATIONS * u32::try_from(whole.as_secs())?),
        u32::try_from(whole.as_secs())?,
    );
    let pod = |index| lives::pod(GROUP, first + index);
    let made = lives::create_at(round.bed.plane.admin(), CREATIONS, seconds, pod).await;
    over.cancel();
    let Calls { times, failed } = callers.await?;
    round.figures.count("reviews", times.len());
    round.figures.count("failed", failed.len());
    round.figures.times("a review with its handshake", times);
    let swaps = trust.swaps.load(Ordering::Relaxed);
    round.figures.count("bundles published", swaps);
    let unboosted = super::fleet::counted(round, made).await?;
    ensure!(
        failed.is_empty(),
        "{} reviews failed: {}",
        failed.len(),
        failed[0]
    );
    ensure!(unboosted == 0, "{unboosted} pods got no boost");
    ensure!(swaps > 0, "{swaps} bundles were published");
    Ok(())
}

/// What the API server believes: the published bundle, as it was a moment ago.
struct Trust {
    bundle: watch::Receiver<TlsConnector>,
    swaps: Arc<AtomicUsize>,
    _task: AbortOnDropHandle<()>,
}

impl Trust {
    async fn follow(bed: &Bed) -> Result<Self> {
        let webhooks = Api::<MutatingWebhookConfiguration>::all(bed.plane.admin());
        let path = bed.plane.folder().join("published-ca.crt");
        let mut published = bundle(&webhooks).await?;
        std::fs::write(&path, &published)?;
        let (believe, believed) = watch::channel(connector(&path)?);
        let swaps = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&swaps);
        let task = tokio::spawn(async move {
            loop {
                sleep(PROPAGATION / 5).await;
                let Ok(now) = bundle(&webhooks).await else {
                    continue;
                };
                if now == published {
                    continue;
                }
                sleep(PROPAGATION).await;
                published = now;
                counted.fetch_add(1, Ordering::Relaxed);
                let connector = std::fs::write(&path, &published).map(|()| connector(&path));
                if let Ok(Ok(connector)) = connector {
                    believe.send_replace(connector);
                }
            }
        });
        Ok(Self {
            bundle: believed,
            swaps,
            _task: AbortOnDropHandle::new(task),
        })
    }
}

async fn bundle(webhooks: &Api<MutatingWebhookConfiguration>) -> Result<Vec<u8>> {
    let published = webhooks.get("headstart").await?;
    let webhook = published.webhooks.unwrap_or_default().into_iter().next();
    let bundle = webhook.and_then(|webhook| webhook.client_config.ca_bundle);
    Ok(bundle.context("no bundle is published")?.0)
}

/// What became of reviews.
#[derive(Default)]
struct Calls {
    times: Vec<Duration>,
    failed: Vec<String>,
}

/// Asks for reviews until it is over, each on a connection of its own, of each replica in turn.
async fn call(
    bundle: watch::Receiver<TlsConnector>,
    backends: Vec<Backend>,
    over: CancellationToken,
) -> Calls {
    let mut ticks = interval(Duration::from_micros(1_000_000 / REVIEWS));
    let (mut asked, mut calls) = (JoinSet::new(), Calls::default());
    let body = Arc::new(post(&body(2_000, NAMESPACE, "app")));
    for backend in backends.iter().cycle() {
        ticks.tick().await;
        if over.is_cancelled() {
            break;
        }
        let (connector, body, address) = (
            bundle.borrow().clone(),
            Arc::clone(&body),
            backend.address.to_string(),
        );
        asked.spawn(async move {
            let began = Instant::now();
            let mut connection = Connection::open(&connector, &address).await?;
            connection.send(&body).await?;
            let (status, _) = connection.answer().await?;
            ensure!(status == 200, "it was answered with {status}");
            Ok(began.elapsed())
        });
        while let Some(done) = asked.try_join_next() {
            calls.note(done);
        }
    }
    while let Some(done) = asked.join_next().await {
        calls.note(done);
    }
    calls
}

impl Calls {
    fn note(&mut self, done: Result<Result<Duration>, tokio::task::JoinError>) {
        match done {
            Ok(Ok(took)) => self.times.push(took),
            Ok(Err(error)) => self.failed.push(format!("{error:#}")),
            Err(error) => self.failed.push(error.to_string()),
        }
    }
}
