//! `cargo measure storm`: pods at a rate, as when nodes come back; how soon each gets its CPU taken back.

use std::time::Duration;

use anyhow::Result;
use testbed::{
    Behaviour, Cluster,
    lives::{self, Lives, milliseconds},
    release,
};

use crate::effort::Effort;

/// How long a storm may go on after its last pod.
const AFTERMATH: Duration = Duration::from_secs(90);

/// Creates pods at a rate, whatever becomes of them. They run after 0.2 s and are Ready 5 s later.
pub(crate) async fn storm(rate: u32, seconds: u32) -> Result<()> {
    let behaviour = Behaviour {
        run_after: Some(Duration::from_millis(200)),
        ready_after: Some(Duration::from_secs(5)),
        ..Behaviour::default()
    };
    let cluster = Cluster::start(&release::static_binary().await?, 2, behaviour).await?;
    lives::prepare(&cluster.plane, &["storm"]).await?;
    let lives = Lives::watch(cluster.plane.admin());
    let before = Effort::so_far(&cluster)?;
    let pod = |index| lives::pod("storm", index);
    let creations = lives::create_at(cluster.plane.admin(), rate, seconds, pod).await;
    let creations: Vec<_> = creations.into_iter().collect::<Result<_>>()?;
    let pods = creations.len();
    let took: Vec<_> = creations.iter().map(|creation| creation.took).collect();
    let ended = lives.until_finished(pods, AFTERMATH).await;
    let effort = Effort::so_far(&cluster)?.since(&before);

    println!("\n| {rate} pods/s for {seconds} s | figure |\n|---|---|");
    let row = |name: &str, figure: &str| println!("| {name} | {figure} |");
    row("creation, p50 / p99 / max", &milliseconds(&took));
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
