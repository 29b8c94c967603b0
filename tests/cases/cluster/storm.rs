//! Many boosts end at once while pods are created elsewhere.

use std::time::Duration;

use anyhow::{Context, ensure};
use chrono::Utc;
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};
use testbed::{Behaviour, eventually, rest::pods};
use tokio::time::sleep;

use super::{
    admit::placed,
    bed::{Bed, alone},
    compare::{same_pod, since},
    interloper::{Interloper, Meanwhile},
};
use crate::{
    data::{Cases, Id, Storm},
    notation::{seconds, time},
    world::{self, BOOSTED},
};

/// Requests at the same time.
const AT_ONCE: usize = 8;
/// How long so many pods may take to be created and run.
const PATIENCE: Duration = Duration::from_secs(180);

/// Lets them all become Ready, and creates pods meanwhile. One that the webhook answers too late comes without a boost.
///
/// The only replica is the one that ends the boosts.
pub async fn check(
    bed: &'static Bed,
    cases: &Cases,
    id: Id,
    place: &str,
    storm: &Storm,
) -> anyhow::Result<()> {
    let admit = world::first_admit(cases, id)?;
    let boosts = world::boosts(admit)?;
    let elsewhere = format!("{place}-elsewhere");
    for place in [place, &elsewhere] {
        bed.namespace(place).await?;
        bed.make_boosts(place, &boosts).await?;
    }
    bed.boosts_are_seen().await?;
    let expected = world::answered(cases, admit, &boosts, time(BOOSTED)?)?;
    let sent = world::sent(cases, admit)?;
    let began = Utc::now();
    let create = |place: String, name: String| {
        let (mut pod, expected) = (placed(sent.clone(), &place), &expected);
        async move {
            pod["metadata"]["name"] = json!(name);
            let created = bed.create(&place, "", &pod).await?.accepted()?;
            let times = [("timestamp", since(began))];
            same_pod(&created, expected, &times).with_context(|| format!("{place}/{name}"))
        }
    };

    let name = |index| match index {
        // An interloper looks for it.
        0 => "p".to_owned(),
        index => format!("p-{index}"),
    };
    stream::iter(0..storm.ready)
        .map(|index| create(place.to_owned(), name(index)))
        .buffer_unordered(AT_ONCE)
        .try_collect::<()>()
        .await?;
    eventually("all pods run", PATIENCE, || async {
        sleep(Duration::from_millis(500)).await;
        let list = bed.api.get(&pods(place)).await?.accepted()?;
        let items = list["items"].as_array().context("a list")?;
        let is_running = |pod: &&Value| pod["status"]["phase"] == "Running";
        let running = items.iter().filter(is_running).count();
        ensure!(running == storm.ready as usize, "{running} run");
        Ok(())
    })
    .await?;

    let takes = Duration::from_secs(seconds(&storm.resize_takes)?);
    let storm = async {
        let slow = Interloper::start(bed, place, Meanwhile::Slow(takes)).await?;
        bed.cluster.node.set_behaviour(Behaviour::default());
        slow.has_met().await?;
        stream::iter(0..storm.created)
            .map(|index| create(elsewhere.clone(), format!("p-{index}")))
            .buffer_unordered(AT_ONCE)
            .try_collect::<()>()
            .await?;
        let met = slow.met();
        ensure!(met < storm.ready, "the storm was over too soon");
        slow.end().await
    };
    alone(storm).await
}
