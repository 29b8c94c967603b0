//! `cargo measure view`: pages out of many boosted pods, what reviews feel of their being read, memory, and how long two
//! replicas differ after a change.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures::future::{try_join, try_join_all};
use load::{Figures, client::Connection, review};
use serde_json::{Value, json};
use testbed::{
    Behaviour, Cluster, Operator, Rest,
    lives::{self, Lives, NAMESPACE, milliseconds},
    release,
    rest::{MERGE, pods},
    view::{self, API},
};
use tokio::time::{interval, sleep};

use crate::{
    admission::{Bench, SIZE, float, median},
    start,
};

const GROUP: &str = "view";
/// After it a replica has done what it does when much has changed.
const SETTLE: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(900);
const SOON: Duration = Duration::from_secs(30);
/// As kubectl asks.
const PAGE: usize = 500;
const PAGES: usize = 200;
const JSON: &str = "application/json";
const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
/// Reviews a second while the view is read.
const REVIEWS: u32 = 1_000;
const ROUNDS: usize = 5;
const ROUND_SECONDS: u32 = 5;
/// Who change pods, each ten times a second.
const CHANGERS: u32 = 10;
const CHANGES: u32 = 300;
const CHANGE_EVERY: Duration = Duration::from_millis(100);

/// Reads that many boosted pods.
pub(crate) async fn view(count: u32) -> Result<()> {
    let binary = release::static_binary().await?;
    let tools = release::build(&["--release", "--package", "load"])
        .await?
        .join("release");
    // They stay boosted.
    let behaviour = Behaviour {
        ready_after: None,
        ..Behaviour::default()
    };
    let cluster = view::start(&binary, 2, behaviour).await?;
    start::fill(&cluster, "ExactName").await?;
    lives::prepare(&cluster.plane, &[GROUP]).await?;
    let leader = cluster.leader_other_than("").await?;
    let mut followers = cluster.replicas.iter();
    let follower = followers
        .find(|replica| replica.name() != leader)
        .context("there is no follower")?;

    println!("\n| {count} boosted pods | figure |\n|---|---|");
    sleep(SETTLE).await;
    memory("memory of a follower before they come", follower)?;
    let lives = Lives::watch(cluster.plane.admin());
    lives::create(&cluster.plane, GROUP, 0..count).await?;
    lives
        .until_running(usize::try_from(count)?, PATIENCE)
        .await?;
    drop(lives);
    sleep(SETTLE).await;
    memory("… with them", follower)?;

    let address = follower.backend().address.to_string();
    let body = review::body(SIZE, "team-0", "app-0");
    let bench = Bench::start(&cluster, &tools, &address, body).await?;
    let reader = Reader::new(&cluster, &bench).await?;
    reader.pages(follower).await?;
    memory("memory of the follower after that", follower)?;
    reader.divergence(&cluster, count).await?;
    reader.beside_reviews(&bench, &address).await
}

fn row(name: &str, figure: &str) {
    println!("| {name} | {figure} |");
}

fn memory(name: &str, replica: &Operator) -> Result<()> {
    row(
        name,
        &format!("{:.1} MiB", replica.process().resident()? / 1024.0),
    );
    Ok(())
}

/// Somebody with the role `headstart-boost-viewer`.
struct Reader {
    ca: PathBuf,
    token: String,
}

impl Reader {
    async fn new(cluster: &Cluster, bench: &Bench) -> Result<Self> {
        let token = view::token(&cluster.plane, NAMESPACE, "reader").await?;
        let account = format!("--serviceaccount={NAMESPACE}:reader");
        let role = "--clusterrole=headstart-boost-viewer";
        let binding = ["create", "clusterrolebinding", "reader", role, &account];
        cluster.plane.kubectl_ok(&binding).await?;
        let ca = bench.ours.ca.clone();
        Ok(Self { ca, token })
    }

    async fn open(&self, address: &str) -> Result<Connection> {
        Connection::open(&load::client::connector(&self.ca)?, address).await
    }

    async fn get<'a>(
        &self,
        connection: &'a mut Connection,
        path: &str,
        accept: &str,
    ) -> Result<&'a [u8]> {
        let token = &self.token;
        let request = format!(
            "GET {API}/{path} HTTP/1.1\r\nHost: headstart\r\nAuthorization: Bearer {token}\r\nAccept: {accept}\r\n\r\n"
        );
        connection.send(request.as_bytes()).await?;
        let (status, body) = connection.answer().await?;
        let text = || String::from_utf8_lossy(body);
        ensure!(
            status == 200,
            "{path} is answered with {status}: {}",
            text()
        );
        Ok(body)
    }

    /// Pages, the whole list and the summaries, one after another.
    async fn pages(&self, replica: &Operator) -> Result<()> {
        let mut connection = self.open(&replica.backend().address.to_string()).await?;
        let page = format!("boostedpods?limit={PAGE}");
        let whole = format!("{page}&includeObject=Object");
        for (what, path, accept) in [
            ("as JSON", &page, JSON),
            ("as a table", &page, TABLE),
            ("as a table with whole objects", &whole, TABLE),
            (
                "summaries of all boosts",
                &"boostsummaries".to_owned(),
                JSON,
            ),
        ] {
            let before = spent(replica).await?;
            let (mut took, mut bytes) = (Vec::new(), 0);
            for _ in 0..PAGES {
                let began = Instant::now();
                bytes = self.get(&mut connection, path, accept).await?.len();
                took.push(began.elapsed());
            }
            let after = spent(replica).await?;
            let mean = 1000.0 * (after.0 - before.0) / (after.1 - before.1);
            let figure = format!(
                "{mean:.1} ms in the server (mean); {} at the client; {} kB",
                milliseconds(&took),
                bytes / 1000
            );
            let what = if path.starts_with("boostedpods") {
                format!("a page of {PAGE} {what}, {PAGES} times")
            } else {
                format!("{what}, {PAGES} times")
            };
            row(&what, &figure);
        }
        let (began, mut next, mut items) = (Instant::now(), String::new(), 0);
        loop {
            let path = format!("{page}&continue={next}");
            let list = self.get(&mut connection, &path, JSON).await?;
            let list: Value = serde_json::from_slice(list)?;
            items += list["items"].as_array().map_or(0, Vec::len);
            match list["metadata"]["continue"].as_str() {
                Some(token) => token.clone_into(&mut next),
                None => break,
            }
        }
        let took = began.elapsed().as_secs_f64();
        row(
            "the whole list, page by page",
            &format!("{items} in {took:.2} s"),
        );
        Ok(())
    }

    /// Pods change; how long after the write's answer each of two replicas shows it.
    async fn divergence(&self, cluster: &Cluster, pods: u32) -> Result<()> {
        let began = Instant::now();
        let changes = (0..CHANGERS).map(|first| self.change(cluster, first, pods));
        let shown: Vec<_> = try_join_all(changes).await?.into_iter().flatten().collect();
        let rate = f64::from(CHANGERS * CHANGES) / began.elapsed().as_secs_f64();
        let each: Vec<_> = shown.iter().flatten().copied().collect();
        let apart: Vec<_> = shown
            .iter()
            .map(|[one, other]| one.abs_diff(*other))
            .collect();
        let of = format!("at {rate:.0} changes/s, p50 / p99 / max");
        row(
            &format!("from a write's answer to a replica's showing it, {of}"),
            &milliseconds(&each),
        );
        row(
            &format!("between the two replicas, {of}"),
            &milliseconds(&apart),
        );
        Ok(())
    }

    async fn change(
        &self,
        cluster: &Cluster,
        first: u32,
        count: u32,
    ) -> Result<Vec<[Duration; 2]>> {
        let rest = Rest::new(cluster.plane.admin(), SOON);
        let [one, other] =
            [0, 1].map(|index| cluster.replicas[index].backend().address.to_string());
        let (mut one, mut other) = (self.open(&one).await?, self.open(&other).await?);
        let (mut due, mut shown) = (interval(CHANGE_EVERY), Vec::new());
        for change in 0..CHANGES {
            due.tick().await;
            let name = format!("{GROUP}-{}", (first + CHANGERS * change) % count);
            let annotations =
                json!({"metadata": {"annotations": {"example.com/change": change.to_string()}}});
            let path = format!("{}/{name}", pods(NAMESPACE));
            let pod = rest.patch(&path, MERGE, &annotations).await?.accepted()?;
            let (version, changed) = (version(&pod)?, Instant::now());
            let path = format!("namespaces/{NAMESPACE}/boostedpods/{name}");
            let (one, other) = try_join(
                self.until_shown(&mut one, &path, version),
                self.until_shown(&mut other, &path, version),
            )
            .await?;
            shown.push([one, other].map(|at| at - changed));
        }
        Ok(shown)
    }

    async fn until_shown(
        &self,
        connection: &mut Connection,
        path: &str,
        wanted: u64,
    ) -> Result<Instant> {
        let began = Instant::now();
        while version(&serde_json::from_slice(
            self.get(connection, path, JSON).await?,
        )?)? < wanted
        {
            ensure!(began.elapsed() < SOON, "{path} is not shown");
            sleep(Duration::from_millis(1)).await;
        }
        Ok(Instant::now())
    }

    /// The same reviews while nobody reads, somebody reads some pages a second, and somebody reads without a pause.
    async fn beside_reviews(&self, bench: &Bench, address: &str) -> Result<()> {
        let pauses = [None, Some(Duration::from_millis(200)), Some(Duration::ZERO)];
        let mut rounds: [Vec<Figures>; 3] = Default::default();
        for _ in 0..ROUNDS {
            for (pause, figures) in pauses.into_iter().zip(&mut rounds) {
                let reviews = bench.load(&bench.ours, "rate", REVIEWS, ROUND_SECONDS);
                figures.push(tokio::select! {
                    figures = reviews => figures?,
                    read = self.read(address, pause) => return read,
                });
            }
        }
        println!("\n| {REVIEWS} reviews/s while | p50 | p99 |\n|---|---|---|");
        for (what, figures) in [
            "nobody reads the view",
            "somebody reads 5 pages a second",
            "somebody reads page after page",
        ]
        .into_iter()
        .zip(&rounds)
        {
            let of = |value: fn(&Figures) -> u64| {
                median(figures.iter().map(|figures| float(value(figures)))) / 1000.0
            };
            let (p50, p99) = (of(|figures| figures.p50), of(|figures| figures.p99));
            println!("| {what} | {p50:.2} ms | {p99:.2} ms |");
        }
        Ok(())
    }

    /// Reads pages for ever, or nothing.
    async fn read(&self, address: &str, pause: Option<Duration>) -> Result<()> {
        let Some(pause) = pause else {
            return std::future::pending().await;
        };
        let mut connection = self.open(address).await?;
        let page = format!("boostedpods?limit={PAGE}");
        loop {
            self.get(&mut connection, &page, JSON).await?;
            sleep(pause).await;
        }
    }
}

fn version(object: &Value) -> Result<u64> {
    let version = object["metadata"]["resourceVersion"].as_str();
    version.context("no version")?.parse().context("no number")
}

/// What the replica itself says: seconds for requests to the view, and how many there were.
async fn spent(replica: &Operator) -> Result<(f64, f64)> {
    let text = replica.get("/metrics").await?;
    let of = |name: &str| {
        let name = format!("headstart_view_duration_seconds_{name} ");
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(name.as_str()));
        value
            .context("no such series")?
            .parse()
            .context("no number")
    };
    Ok((of("sum")?, of("count")?))
}
