//! Many boosts end at once while pods are created elsewhere, in virtual time: no answer takes any of it.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use anyhow::ensure;
use chrono::SubsecRound;
use headstart::{admission::Admitter, clock::Clock};
use http::StatusCode;
use serde_json::{Value, json};
use testbed::memory::{self, Kubelet, MemoryServer, Resize};
use tokio::time::{Instant, sleep};

use super::{
    lives::{ACTUATION, Leader, create_pod, put_boosts, slow_resizes},
    review, webhook,
};
use crate::{
    data::{Cases, Id, Life, Look, Post, Storm},
    notation::seconds,
    pure,
    world::{self, KEY, World},
};

/// Where the pods are created meanwhile.
const ELSEWHERE: &str = "elsewhere";
/// Between two of them.
const PAUSE: Duration = Duration::from_millis(400);
/// How long all may take together.
const PATIENCE: Duration = Duration::from_secs(600);

/// Lets them all become Ready, and posts reviews to the replica that ends them.
pub fn check(cases: &Cases, id: Id, storm: &Storm) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()?;
    runtime.block_on(run(cases, id, storm))
}

async fn run(cases: &Cases, id: Id, storm: &Storm) -> anyhow::Result<()> {
    let admit = world::first_admit(cases, id)?;
    let mut world = World::begin(cases, id, &Life::default())?;
    let ready = "10:00:20".to_owned();
    let server = MemoryServer::with_clock(memory::Clock::new(crate::notation::time(&ready)?));
    server.kubelet(Kubelet {
        actuate_after: ACTUATION,
        resize: Resize::Actuate,
    });
    for mut boost in world.boosts.clone() {
        ELSEWHERE.clone_into(&mut boost.namespace);
        boost.object["metadata"]["namespace"] = json!(ELSEWHERE);
        world.boosts.push(boost);
    }
    put_boosts(&server, &world);
    let names: Vec<String> = (0..storm.ready).map(|index| format!("p{index}")).collect();
    for name in &names {
        world.pod["metadata"]["name"] = json!(name);
        create_pod(&server, &world);
    }
    let leader = Leader::start(&server, pure::flags(&admit.flags)?);
    let clock = server.clone();
    let admitter = Arc::new(Admitter {
        snapshot: leader.snapshots.reader(),
        settings: pure::settings(admit)?,
        clock: Clock::new(move || clock.now()),
        metrics: leader.metrics.admission.clone(),
        dry_run: false,
    });
    sleep(Duration::from_secs(1)).await;
    ensure!(
        admitter.snapshot.load().is_some(),
        "it has not read its caches: {:?}",
        leader.snapshots.missing()
    );

    let takes = Duration::from_secs(seconds(&storm.resize_takes)?);
    let [under_way, _] = slow_resizes(&server, takes);
    world.change(&Look {
        ready: Some(ready),
        ..Look::default()
    })?;
    for name in &names {
        server.update("pods", "ns", name, |pod| {
            pod["status"] = world.pod["status"].clone();
        });
    }
    let sent = world::sent(cases, admit)?;
    let mut review = review::of_pod(&sent, false);
    review["request"]["namespace"] = json!(ELSEWHERE);
    let review = review.to_string();
    for _ in 0..storm.created {
        sleep(PAUSE).await;
        ensure!(under_way.load(Relaxed) > 0, "no resize is under way");
        let began = Instant::now();
        let answer =
            webhook::post(&admitter, &Post::default(), review.as_bytes(), review.len()).await?;
        let took = began.elapsed();
        ensure!(took.is_zero(), "the answer took {took:?}");
        ensure!(answer.status == StatusCode::OK, "HTTP {}", answer.status);
        let at = server.now().trunc_subsecs(0);
        review::check_answer_at(cases, admit, &world.boosts, &sent, &answer.body, at)?;
    }

    let is_open = |pod: &Value| pod["metadata"]["labels"].get(KEY).is_some();
    let began = Instant::now();
    while server.list("pods").iter().any(is_open) {
        ensure!(began.elapsed() < PATIENCE, "some are still boosted");
        ensure!(!leader.term.is_finished(), "the term has ended by itself");
        sleep(Duration::from_secs(10)).await;
    }
    let writes = server.writes();
    let resizes = writes
        .iter()
        .filter(|write| write.path.ends_with("/resize"));
    let resizes = resizes.count();
    ensure!(resizes == names.len(), "{resizes} resizes");
    Ok(())
}
