//! `cargo measure storm`: pods at a rate, as when nodes come back; how soon each gets its CPU taken back.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::PostParams};
use load::{Figures, microseconds};
use testbed::{Behaviour, Cluster, ControlPlane};
use tokio::time::sleep_until;

use crate::{
    effort::Effort,
    lives::{self, Lives, NAMESPACE},
    release_binary,
};

/// How long a storm may go on after its last pod.
const AFTERMATH: Duration = Duration::from_secs(90);

/// Creates pods at a rate, whatever becomes of them. They run after 0.2 s and are Ready 5 s later.
pub(crate) async fn storm(rate: u32, seconds: u32) -> Result<()> {
    let behaviour = Behaviour {
        run_after: Some(Duration::from_millis(200)),
        ready_after: Some(Duration::from_secs(5)),
        ..Behaviour::default()
    };
    let cluster = Cluster::start(&release_binary().await?, 2, behaviour).await?;
    lives::prepare(&cluster.plane, &["storm"]).await?;
    let lives = Lives::watch(cluster.plane.admin());
    let before = Effort::so_far(&cluster)?;
    let creations = create_at(&cluster.plane, rate, seconds).await?;
    let pods = creations.len();
    let ended = lives.until_finished(pods, AFTERMATH).await;
    let effort = Effort::so_far(&cluster)?.since(&before);

    println!("\n| {rate} pods/s for {seconds} s | figure |\n|---|---|");
    let row = |name: &str, figure: &str| println!("| {name} | {figure} |");
    row("creation, p50 / p99 / max", &milliseconds(&creations));
    row(
        "pods without a boost",
        &(pods - lives.boosted()).to_string(),
    );
    row(
        "from Ready until the CPU is back, p50 / p99 / max",
        &milliseconds(&lives.lags()),
    );
    let left = pods - lives.finished();
    row(
        &format!(
            "pods still boosted {} s after the last",
            AFTERMATH.as_secs()
        ),
        &left.to_string(),
    );
    row(
        "our writes a pod, conflicts included",
        &format!("{:.3}", lives::writes(&cluster.plane, "storm", pods)?),
    );
    row("CPU meanwhile", &effort.to_string());
    if let Err(error) = ended {
        println!("\n{error:#}");
    }
    Ok(())
}

/// Creates pods at a rate, and says how long each creation took.
async fn create_at(plane: &ControlPlane, rate: u32, seconds: u32) -> Result<Vec<Duration>> {
    let began = tokio::time::Instant::now();
    let api: Api<Pod> = Api::namespaced(plane.admin(), NAMESPACE);
    let creations = (0..rate * seconds).map(|index| {
        let api = api.clone();
        tokio::spawn(async move {
            sleep_until(began + Duration::from_secs(1) * index / rate).await;
            let began = Instant::now();
            let pod = lives::pod("storm", index)?;
            api.create(&PostParams::default(), &pod).await?;
            anyhow::Ok(began.elapsed())
        })
    });
    let mut took = Vec::new();
    for creation in creations.collect::<Vec<_>>() {
        took.push(creation.await.context("a creation panicked")??);
    }
    Ok(took)
}

fn milliseconds(durations: &[Duration]) -> String {
    let times = durations.iter().map(|took| microseconds(*took)).collect();
    let Figures { p50, p99, max, .. } = Figures::new(times, 0.0);
    format!("{} / {} / {} ms", p50 / 1000, p99 / 1000, max / 1000)
}
