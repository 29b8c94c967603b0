//! `cargo measure admission`: reviews a second over TLS, beside a server that answers without looking; memory under load.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use kube::Api;
use load::{Figures, client::Connection, review};
use testbed::{Behaviour, Cluster, Operator, Supervised, eventually, release};
use tokio::{io::AsyncWriteExt as _, process::Command, time::sleep};

use crate::start;

/// Bytes of a review, as Deployments of real applications have them.
pub(crate) const SIZE: usize = 10_000;
const CONNECTIONS: [u32; 3] = [1, 16, 64];
/// The two servers take turns, so that what else the machine does befalls both.
const ROUNDS: usize = 5;
const ROUND_SECONDS: u32 = 3;
const RATE: u32 = 1_000;
const SOON: Duration = Duration::from_secs(10);

/// Posts reviews of a pod that a boost matches, with 1,000 boosts in 200 namespaces.
pub(crate) async fn admission() -> Result<()> {
    let binary = release::static_binary().await?;
    let tools = release::build(&["--release", "--package", "load"])
        .await?
        .join("release");
    let mut cluster = Cluster::start(&binary, 0, Behaviour::default()).await?;
    start::fill(&cluster, "ExactName").await?;
    let replica = cluster.add_replica(&[]).await?.backend();
    cluster.replicas[0].wait_ready(SOON).await?;

    let body = review::body(SIZE, "team-0", "app-0");
    let bench = Bench::start(&cluster, &tools, &replica.address.to_string(), body).await?;
    bench.compare().await?;
    bench.rate().await?;
    bench.memory(&cluster.replicas[0]).await
}

/// The two servers, and who posts to them.
pub(crate) struct Bench {
    reviews: PathBuf,
    body: Vec<u8>,
    pub(crate) ours: Target,
    constant: Target,
    _server: Supervised,
}

/// A server, and the authority that its certificate is from.
pub(crate) struct Target {
    address: String,
    pub(crate) ca: PathBuf,
}

impl Bench {
    /// With the constant server beside the one at this address.
    pub(crate) async fn start(
        cluster: &Cluster,
        tools: &Path,
        address: &str,
        body: Vec<u8>,
    ) -> Result<Self> {
        let folder = cluster.plane.folder();
        let ours = Target {
            address: address.to_owned(),
            ca: folder.join("webhook-ca.pem"),
        };
        std::fs::write(&ours.ca, ca(cluster).await?)?;
        let connector = load::client::connector(&ours.ca)?;
        let mut connection = Connection::open(&connector, address).await?;
        connection.send(&load::client::post(&body)).await?;
        let (status, answer) = connection.answer().await?;
        let text = String::from_utf8_lossy(answer);
        ensure!(
            status == 200 && text.contains("\"patch\""),
            "answered with {status}: {text}"
        );

        let files =
            ["constant.pem", "constant-key.pem", "constant-answer"].map(|name| folder.join(name));
        let certified = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()])?;
        std::fs::write(&files[0], certified.cert.pem())?;
        std::fs::write(&files[1], certified.signing_key.serialize_pem())?;
        std::fs::write(&files[2], answer)?;
        let log = folder.join("constant.log");
        let none: [(&str, &str); 0] = [];
        let server = Supervised::spawn("constant", &tools.join("constant"), &files, &none, &log)?;
        let address = eventually("the constant server says where it is", SOON, || async {
            let log = std::fs::read_to_string(&log)?;
            let line = log.lines().find(|line| line.starts_with("127.0.0.1:"));
            line.map(str::to_owned).context("it has not said it")
        })
        .await?;
        let [ca, ..] = files;
        Ok(Self {
            reviews: tools.join("reviews"),
            body,
            ours,
            constant: Target { address, ca },
            _server: server,
        })
    }

    /// Loads a server from a second process.
    pub(crate) async fn load(
        &self,
        target: &Target,
        kind: &str,
        count: u32,
        seconds: u32,
    ) -> Result<Figures> {
        let mut reviews = Command::new(&self.reviews)
            .arg(&target.ca)
            .args([
                &target.address,
                kind,
                &count.to_string(),
                &seconds.to_string(),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("starting `reviews`")?;
        let mut input = reviews.stdin.take().context("it is piped")?;
        input.write_all(&self.body).await?;
        drop(input);
        let output = reviews.wait_with_output().await?;
        ensure!(output.status.success(), "`reviews {kind}` failed");
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    async fn compare(&self) -> Result<()> {
        println!(
            "\n| connections | Headstart, reviews/s | p50 | p99 | constant server | share |\n|---|---|---|---|---|---|"
        );
        for connections in CONNECTIONS {
            let (mut ours, mut constant) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                ours.push(
                    self.load(&self.ours, "fast", connections, ROUND_SECONDS)
                        .await?,
                );
                constant.push(
                    self.load(&self.constant, "fast", connections, ROUND_SECONDS)
                        .await?,
                );
            }
            let shares = ours
                .iter()
                .zip(&constant)
                .map(|(ours, constant)| ours.rate() / constant.rate());
            println!(
                "| {connections} | {:.0} | {:.2} ms | {:.2} ms | {:.0}/s | {:.0} % |",
                median(ours.iter().map(Figures::rate)),
                milliseconds(median(ours.iter().map(|figures| float(figures.p50)))),
                milliseconds(median(ours.iter().map(|figures| float(figures.p99)))),
                median(constant.iter().map(Figures::rate)),
                100.0 * median(shares),
            );
        }
        Ok(())
    }

    async fn rate(&self) -> Result<()> {
        let figures = self.load(&self.ours, "rate", RATE, 30).await?;
        println!(
            "\nAt {RATE} reviews/s for 30 s: p50 {:.2} ms, p99 {:.2} ms, max {:.2} ms.",
            milliseconds(float(figures.p50)),
            milliseconds(float(figures.p99)),
            milliseconds(float(figures.max))
        );
        Ok(())
    }

    async fn memory(&self, replica: &Operator) -> Result<()> {
        println!("\n| load | memory after, MiB | at most meanwhile |\n|---|---|---|");
        println!("| none | {:.1} | |", replica.process().resident()? / 1024.0);
        for (what, kind, count, seconds) in [
            ("64 connections, as fast as they can, 10 s", "fast", 64, 10),
            ("the same for 60 s", "fast", 64, 60),
            ("16 clients with bodies of 8 MiB, 20 s", "large", 16, 20),
            (
                "400 clients that send a byte a second, 20 s",
                "slow",
                400,
                20,
            ),
            ("64 connections once more, 10 s", "fast", 64, 10),
        ] {
            let mut load = std::pin::pin!(self.load(&self.ours, kind, count, seconds));
            let mut most = 0.0_f64;
            loop {
                tokio::select! {
                    loaded = &mut load => break loaded.map(drop)?,
                    () = sleep(Duration::from_millis(100)) => most = most.max(replica.process().resident()?),
                }
            }
            println!(
                "| {what} | {:.1} | {:.1} |",
                replica.process().resident()? / 1024.0,
                most / 1024.0
            );
        }
        Ok(())
    }
}

/// What the API server verifies the webhook by.
async fn ca(cluster: &Cluster) -> Result<Vec<u8>> {
    let webhooks = Api::<MutatingWebhookConfiguration>::all(cluster.plane.admin());
    eventually("the webhook has a CA", SOON, || async {
        let webhook = webhooks
            .get("headstart")
            .await?
            .webhooks
            .unwrap_or_default();
        let first = webhook.into_iter().next().context("no webhook")?;
        Ok(first.client_config.ca_bundle.context("no CA yet")?.0)
    })
    .await
}

pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[allow(clippy::cast_precision_loss)]
pub(crate) fn float(microseconds: u64) -> f64 {
    microseconds as f64
}

fn milliseconds(microseconds: f64) -> f64 {
    microseconds / 1000.0
}
