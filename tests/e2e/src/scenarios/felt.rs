//! What a boost is for: how long two workloads take until they are Ready, with one and without, on the real node.

use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use chrono::Utc;
use serde_json::{Value, json};
use testbed::{docs, eventually};

use crate::{
    cluster::Cluster,
    images::SPRING,
    objects::{
        apply_boosts, boost, cgroup, claim, container, cpu, create, get, is, namespace, percent,
        pod, remove_namespace, runs, size, until_finished, until_limit,
    },
};

const NS: &str = "felt";
/// Of each workload, with a boost and without, in turns.
const RUNS: usize = 5;
/// Half a CPU, and four times as much while it starts: all that a machine with two has. The request is small since kubelet keeps one
/// of them from pods' requests (`reservedSystemCPUs`), and Headstart's replicas are on the node too.
const ORIGINAL: (&str, &str) = ("100m", "500m");
const PERCENT: u32 = 300;
const LIMITS: (u64, u64) = (500, 2000);
/// Two processes, each with about two seconds of a CPU to burn.
const BURN: &str = "burn() { awk 'BEGIN { for (i = 0; i < 6500000; i++) x += i }'; }; burn & burn & wait; touch /tmp/ready";
const PATIENCE: Duration = Duration::from_secs(300);

/// Where the picture and the table go.
const PICTURE: &str = "felt-boost.svg";
const PAGE: &str = "benchmarks.md";
const PART: &str = "felt";

/// Times from creation to Ready, sorted, and from Ready until the cgroup is back.
struct Felt {
    what: &'static str,
    without: Vec<Duration>,
    with: Vec<Duration>,
    back: Vec<Duration>,
}

/// Measures, and writes what comes out into the documents.
pub(crate) async fn felt(cluster: &mut Cluster) -> Result<Vec<String>> {
    namespace(cluster, NS).await?;
    let boosts = ["burn", "spring"].map(|app| boost(NS, app, &json!([percent(app, PERCENT)])));
    apply_boosts(cluster, &boosts).await?;
    let all = [
        measure(cluster, "burn", "awk, twice 2 s of a CPU", &burn()).await?,
        measure(cluster, "spring", "Spring Boot, JPA, H2", &spring()).await?,
    ];
    remove_namespace(cluster, NS).await?;
    let path = docs::folder().join(PICTURE);
    std::fs::write(&path, picture(&all)).with_context(|| format!("writing {}", path.display()))?;
    let table = table(&all);
    let part =
        format!("![Bars: from creation to Ready, with a boost and without]({PICTURE})\n\n{table}");
    docs::replace(PAGE, PART, |_| part)?;
    Ok(table.lines().map(str::to_owned).collect())
}

fn burn() -> Value {
    container("burn", &cpu(ORIGINAL.0, ORIGINAL.1), BURN)
}

fn spring() -> Value {
    let mut resources = cpu(ORIGINAL.0, ORIGINAL.1);
    for kind in ["requests", "limits"] {
        resources[kind]["memory"] = "512Mi".into();
    }
    json!({
        "name": "spring", "image": SPRING, "resources": resources,
        "readinessProbe": {"httpGet": {"path": "/actuator/health/readiness", "port": 8080}, "periodSeconds": 1},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    })
}

async fn measure(
    cluster: &Cluster,
    app: &str,
    what: &'static str,
    container: &Value,
) -> Result<Felt> {
    let mut felt = Felt {
        what,
        without: Vec::new(),
        with: Vec::new(),
        back: Vec::new(),
    };
    for run in 1..=RUNS {
        let containers = std::slice::from_ref(container);
        let plain = pod(NS, &format!("{app}-plain-{run}"), "plain", containers);
        felt.without.push(one(cluster, app, &plain).await?.0);
        let boosted = pod(NS, &format!("{app}-boosted-{run}"), app, containers);
        let (ready, back) = one(cluster, app, &boosted).await?;
        felt.with.push(ready);
        felt.back.push(back.context("it got no boost")?);
    }
    for times in [&mut felt.without, &mut felt.with, &mut felt.back] {
        times.sort_unstable();
    }
    Ok(felt)
}

/// From the creation of a pod until it is Ready, and, where it is boosted, from then until the kernel has taken the CPU back.
async fn one(cluster: &Cluster, app: &str, pod: &Value) -> Result<(Duration, Option<Duration>)> {
    let name = pod["metadata"]["name"].as_str().context("it has a name")?;
    let began = Instant::now();
    let boosted = claim(&create(cluster, pod).await?).is_some();
    let running = until(cluster, name, runs).await?;
    let cgroup = cgroup(cluster, &running, app)?;
    let wanted = if boosted { LIMITS.1 } else { LIMITS.0 };
    let limit = cgroup.limit()?;
    ensure!(limit == Some(wanted), "its cgroup has {limit:?}");
    until(cluster, name, |pod| is(pod, "Ready")).await?;
    let ready = Instant::now();
    until_limit(&cgroup, LIMITS.0).await?;
    let back = ready.elapsed();
    if boosted {
        let pod = until_finished(cluster, NS, name).await?;
        let (request, limit) = ORIGINAL;
        ensure!(size(&pod, app) == format!("{request}/{limit}"), "{pod}");
    }
    let line = format!("delete pod -n {NS} {name}");
    cluster.kubectl(&line).await?;
    Ok((ready - began, boosted.then_some(back)))
}

async fn until(cluster: &Cluster, name: &str, is: impl Fn(&Value) -> bool) -> Result<Value> {
    eventually(&format!("{name} has started"), PATIENCE, || async {
        let pod = get(cluster, NS, name).await?;
        ensure!(is(&pod), "its status is {}", pod["status"]);
        Ok(pod)
    })
    .await
}

fn median(times: &[Duration]) -> Duration {
    times[times.len() / 2]
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// `median (least to most)`.
fn range(times: &[Duration]) -> String {
    let (least, most) = (times[0], times[times.len() - 1]);
    format!(
        "{} ({} to {})",
        seconds(median(times)),
        seconds(least),
        seconds(most)
    )
}

fn table(all: &[Felt]) -> String {
    let mut text = format!(
        "| until Ready, median of {RUNS} (least to most) | without a boost | with one | times as fast | from Ready until the cgroup has {} again |\n|---|---|---|---|---|",
        ORIGINAL.1
    );
    for felt in all {
        let times = median(&felt.without).div_duration_f64(median(&felt.with));
        let back = median(&felt.back).as_millis();
        let most = felt.back[RUNS - 1].as_millis();
        write!(
            text,
            "\n| {} | {} | {} | {times:.1} | {back} ms, at most {most} ms |",
            felt.what,
            range(&felt.without),
            range(&felt.with)
        )
        .expect("a string takes all");
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    write!(
        text,
        "\n\n{}, {cores} cores.",
        Utc::now().format("%Y-%m-%d")
    )
    .expect("a string takes all");
    text
}

/// Of the picture, in pixels: width, of which so much is for names; height of a bar, and of what is between two workloads.
const WIDTH: f64 = 760.0;
const NAMES: f64 = 210.0;
const BAR: f64 = 26.0;
const GAP: f64 = 26.0;

/// Two bars for each workload, as long as the median, with a line from the least to the most.
fn picture(all: &[Felt]) -> String {
    let longest = all.iter().flat_map(|felt| &felt.without).max();
    let longest = longest.map_or(1.0, Duration::as_secs_f64);
    let scale = (WIDTH - NAMES - 90.0) / longest;
    let x = |time: Duration| NAMES + time.as_secs_f64() * scale;
    let mut bars = String::new();
    let mut y = GAP;
    for felt in all {
        for (name, times, colour) in [
            (felt.what, &felt.without, "#8a94a6"),
            ("with a boost", &felt.with, "#2f6fde"),
        ] {
            let (middle, text) = (y + BAR / 2.0, seconds(median(times)));
            let (from, to) = (x(times[0]), x(times[RUNS - 1]));
            write!(
                bars,
                "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{name}</text>\n\
                 <rect x=\"{NAMES}\" y=\"{y}\" width=\"{:.1}\" height=\"{}\" fill=\"{colour}\"/>\n\
                 <path d=\"M{from:.1} {middle}H{to:.1}\" stroke=\"#111\" stroke-width=\"2\"/>\n\
                 <text x=\"{:.1}\" y=\"{}\">{text}</text>\n",
                NAMES - 10.0,
                middle + 4.0,
                x(median(times)) - NAMES,
                BAR - 4.0,
                to + 8.0,
                middle + 4.0,
            )
            .expect("a string takes all");
            y += BAR;
        }
        y += GAP;
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {y}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"{NAMES}\" y=\"17\" font-weight=\"bold\">From creation to Ready: a limit of 500m, and of 2000m while it starts</text>\n\
         {bars}</svg>\n"
    )
}
