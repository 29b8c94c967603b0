//! Several replicas in one process on one API server in memory: when the leader is cut off, wakes up late or is one of two
//! that believe they lead, every boost still ends, once, and no value is ever raised.

mod common;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use common::*;
use fastrand::Rng;
use futures::StreamExt as _;
use headstart::{api::Pod, domain::cpu::Cpu};
use kube::{
    Api,
    runtime::watcher::{self, Event},
};
use testbed::memory::{Fault, Kubelet, MemoryServer, Recorded, Resize};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

/// A follower sees the last renewal up to one pause between two attempts late, waits the lease out, and notices that up
/// to one pause late; and what their requests take.
const TAKEOVER: Duration = Duration::from_millis(1_200 + 6_000 + 1_200 + 30);
/// What a leader needs for the two writes once it leads.
const WRITES: Duration = Duration::from_millis(300);
const PODS: [&str; 5] = ["p0", "p1", "p2", "p3", "p4"];

/// The writes that changed something, by pod and kind, and how often.
fn effective(server: &MemoryServer) -> BTreeMap<(String, &'static str), usize> {
    let mut counts = BTreeMap::new();
    for request in pod_writes(server) {
        if let (200, Some((write, pod))) = (request.status, write_of(&request)) {
            *counts.entry((pod.to_owned(), write)).or_default() += 1;
        }
    }
    counts
}

/// Asserts that every pod's boost has ended by one resize and one finish.
fn assert_ended_once(server: &MemoryServer, context: &str) {
    let pods = server.list("pods");
    assert!(pods.iter().all(is_ended), "{context}: {pods:#?}");
    let once: BTreeMap<_, _> = pods
        .iter()
        .filter_map(|pod| pod["metadata"]["name"].as_str())
        .flat_map(|name| ["resize", "finish"].map(|write| ((name.to_owned(), write), 1)))
        .collect();
    assert_eq!(effective(server), once, "{context}");
}

/// Follows every version of every pod that is ever stored.
struct Observer {
    seen: Arc<Mutex<BTreeMap<String, Vec<Cpu>>>>,
    _task: JoinHandle<()>,
}

impl Observer {
    async fn start(server: &MemoryServer) -> Self {
        let seen: Arc<Mutex<BTreeMap<String, Vec<Cpu>>>> = Arc::default();
        let api = Api::<Pod>::all(server.client("observer"));
        let into = Arc::clone(&seen);
        let versions = watcher::watcher(api, watcher::Config::default());
        let task = tokio::spawn(versions.for_each(move |event| {
            match event.expect("nobody disturbs the observer") {
                Event::Apply(pod) | Event::InitApply(pod) => {
                    let name = pod.metadata.name.expect("a name");
                    let mut seen = into.lock().expect("no test has panicked");
                    let versions = seen.entry(name).or_default();
                    versions.push(Cpu::of(&pod.spec.containers[0]));
                }
                Event::Init | Event::InitDone => {}
                Event::Delete(pod) => panic!("nobody deletes {:?}", pod.metadata.name),
            }
            std::future::ready(())
        }));
        let observer = Self { seen, _task: task };
        let pods = server.list("pods").len();
        until("the observer has seen all pods", secs(1), || {
            observer.seen().len() == pods
        })
        .await;
        observer
    }

    fn seen(&self) -> BTreeMap<String, Vec<Cpu>> {
        self.seen.lock().expect("no test has panicked").clone()
    }

    /// Asserts that from one version to the next no value was raised, and no limit lost.
    fn assert_only_lowered(&self, context: &str) {
        for (pod, versions) in self.seen() {
            assert!(
                versions.len() >= 3,
                "{context}: {pod} was changed: {versions:?}"
            );
            for pair in versions.windows(2) {
                assert!(
                    pair[1].request <= pair[0].request
                        && pair[1].limit <= pair[0].limit
                        && pair[1].limit.is_some(),
                    "{context}: {pod} was raised: {versions:?}"
                );
            }
        }
    }
}

/// A server with the Lease and boosted pods, and replicas that stand for election.
async fn cluster<const N: usize>(
    names: [&str; N],
) -> (MemoryServer, [Replica; N], CancellationToken) {
    let server = server();
    server.create(lease());
    for name in PODS {
        server.create(boosted(name, &ready_end()));
    }
    let stop = CancellationToken::new();
    let mut replicas = names.map(|name| Replica::start(&server, name));
    for replica in &mut replicas {
        replica.stand(&stop);
    }
    until("somebody leads", secs(2), || holder(&server).is_some()).await;
    sleep(secs(30)).await;
    (server, replicas, stop)
}

/// Cuts a client off from now on: errors, or no answers. What it had sent is on its way.
fn cut_off(server: &MemoryServer, who: &str, hang: bool) {
    let fault = Fault::on("*", "").who(who).always();
    server.fault(if hang {
        fault.hang()
    } else {
        fault.reply(503, "ServiceUnavailable", "no route")
    });
    server.close_watches();
}

#[tokio::test(start_paused = true)]
async fn when_the_leader_is_cut_off_a_follower_ends_every_boost_in_time() {
    for hang in [false, true] {
        let (server, _replicas, _stop) = cluster(["a", "b", "c"]).await;
        let observer = Observer::start(&server).await;
        let leader = holder(&server).expect("somebody leads");
        // Some boosts are due before the partition, some after.
        make_ready(&server, PODS[0]);
        until_ended(&server, PODS[0], WRITES).await;
        cut_off(&server, &leader, hang);
        let began = Instant::now();
        for name in &PODS[1..] {
            make_ready(&server, name);
        }
        until("another leads", TAKEOVER, || {
            holder(&server).is_some_and(|now| now != leader)
        })
        .await;
        for name in PODS {
            until_ended(&server, name, (began + TAKEOVER + WRITES) - Instant::now()).await;
        }

        // Nor does the old leader do anything when it is back.
        server.clear_faults();
        sleep(secs(600)).await;
        let context = format!("hang: {hang}");
        assert_ended_once(&server, &context);
        observer.assert_only_lowered(&context);
        let first = |request: &Recorded| request.who == leader && request.status == 200;
        let by_old = pod_writes(&server).into_iter().filter(first).count();
        assert_eq!(by_old, 2, "{context}: its own two writes");
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_stops_hands_over_at_once() {
    let (server, mut replicas, stop) = cluster(["a"]).await;
    let mut next = Replica::start(&server, "b");
    next.stand(&CancellationToken::new());
    sleep(secs(10)).await;
    stop.cancel();
    for name in PODS {
        make_ready(&server, name);
    }
    for name in PODS {
        until_ended(&server, name, Duration::from_millis(1_210) + WRITES).await;
    }
    replicas[0].stand(&CancellationToken::new());
    sleep(secs(60)).await;
    assert_eq!(holder(&server).as_deref(), Some("b"));
    assert_ended_once(&server, "handed over");
}

#[tokio::test(start_paused = true)]
async fn a_write_that_lands_after_the_next_leader_has_ended_the_boost_changes_nothing() {
    for path in ["/pods/*/resize", "/pods/*"] {
        let (server, _replicas, _stop) = cluster(["a", "b"]).await;
        let observer = Observer::start(&server).await;
        let leader = holder(&server).expect("somebody leads");
        let late = Fault::on("PATCH", path).who(&leader).always();
        server.fault(late.delay(secs(30)));
        for name in PODS {
            make_ready(&server, name);
        }
        until("its writes are under way", secs(1), || {
            let late = |request: &&Recorded| request.who == leader && request.status == 0;
            pod_writes(&server).iter().filter(late).count() == PODS.len()
        })
        .await;
        cut_off(&server, &leader, false);
        let began = Instant::now();
        for name in PODS {
            until_ended(&server, name, (began + TAKEOVER + WRITES) - Instant::now()).await;
        }
        let versions = PODS.map(|name| version(&server, name));

        sleep(secs(60)).await;
        let landed = pod_writes(&server);
        let landed = landed
            .iter()
            .filter(|request| request.who == leader && request.status == 409);
        assert_eq!(landed.count(), PODS.len(), "{path}: they landed, and lost");
        assert_eq!(versions, PODS.map(|name| version(&server, name)), "{path}");
        assert_ended_once(&server, path);
        observer.assert_only_lowered(path);
    }
}

/// A random fault for one of two clients, somewhere in the first requests about pods.
fn random_fault(rng: &mut Rng) -> Fault {
    let (verb, path) = [
        ("PATCH", "/pods/*/resize"),
        ("PATCH", "/pods/*"),
        ("GET", "/pods/*"),
    ][rng.usize(..3)];
    let fault = Fault::on(verb, path)
        .who(["a", "b"][rng.usize(..2)])
        .skip(rng.u32(..6))
        .times(rng.u32(1..4))
        .delay(Duration::from_millis(rng.u64(..50)));
    match rng.usize(..9) {
        0 => fault.reply(500, "InternalError", "etcd is away"),
        1 => fault.reply(503, "ServiceUnavailable", "away"),
        2 => fault.retry_after(rng.u64(1..4)),
        3 => fault.reset(),
        4 => fault.hang(),
        5 => fault.lost_answer(),
        6 => fault.hang().lost_answer(),
        // Within a write's deadline, and beyond.
        7 => fault.delay(Duration::from_millis(rng.u64(..2_000))),
        _ => fault.delay(Duration::from_millis(rng.u64(4_000..12_000))),
    }
}

/// Two leaders at once, on the same pods, through random delays and faults.
async fn two_leaders(seed: u64) {
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    // The program's own jitter too.
    fastrand::seed(seed);
    let server = MemoryServer::new();
    server.set_latency(Duration::from_millis(rng.u64(..20)));
    server.kubelet(Kubelet {
        actuate_after: Duration::from_millis(rng.u64(..1_000)),
        resize: Resize::Actuate,
    });
    // More than go at once.
    let names: Vec<_> = (0..20).map(|i| format!("p{i:02}")).collect();
    for name in &names {
        let end = if rng.bool() {
            ready_end()
        } else {
            fixed_end(5)
        };
        server.create(boosted(name, &end));
    }
    for _ in 0..12 {
        server.fault(random_fault(&mut rng));
    }
    let observer = Observer::start(&server).await;
    let replicas = ["a", "b"].map(|name| Replica::start(&server, name));
    let _terms = [replicas[0].lead(), replicas[1].lead()];
    for name in &names {
        sleep(Duration::from_millis(rng.u64(..400))).await;
        make_ready(&server, name);
        if rng.u32(..5) == 0 {
            server.close_watches();
        }
    }
    for name in &names {
        until_ended(&server, name, secs(300)).await;
    }
    sleep(secs(300)).await;
    let context = format!("seed {seed}: {:#?}", told(&server));
    assert_ended_once(&server, &context);
    observer.assert_only_lowered(&context);
    let conflicts = pod_writes(&server);
    let conflicts = conflicts.iter().filter(|write| write.status == 409).count();
    assert!(conflicts > 0, "{context}: they did meet");
}

#[tokio::test(start_paused = true)]
async fn two_leaders_at_once_end_every_boost_once_and_raise_nothing() {
    for seed in 0..24 {
        two_leaders(seed).await;
    }
}
