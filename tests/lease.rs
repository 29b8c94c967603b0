//! Leader election, in process and in virtual time: never two leaders, whatever the API server does, and soon a new one
//! when the old one is gone.

mod common;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use common::{LEASE, NS, holder, lease, secs, until};
use headstart::lease::{Elector, Params};
use kube::Api;
use serde_json::json;
use testbed::memory::{Fault, MemoryServer};
use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// A follower sees the last renewal up to one pause between two attempts late, waits the lease out, and notices that up
/// to one pause late; and what their requests take.
const TAKEOVER: Duration = Duration::from_millis(1_200 + 6_000 + 1_200 + 30);
/// How long to wait for the first leader.
const SOON: Duration = Duration::from_secs(2);

/// What happened over all candidates.
#[derive(Clone)]
struct Terms {
    server: MemoryServer,
    /// Terms that are on, and the most that ever were at once.
    active: Arc<[AtomicUsize; 2]>,
    /// Who began a term, and when.
    began: Arc<Mutex<Vec<(String, Duration)>>>,
}

/// A term's work while it is on.
struct Working(Terms);

impl Drop for Working {
    fn drop(&mut self) {
        self.0.active[0].fetch_sub(1, SeqCst);
    }
}

impl Terms {
    fn on(server: &MemoryServer) -> Self {
        Self {
            server: server.clone(),
            active: Arc::default(),
            began: Arc::default(),
        }
    }

    /// A candidate, whose work goes on for so long after its term.
    fn candidate(&self, name: &str, stop: &CancellationToken, after: Duration) -> JoinHandle<()> {
        let api = Api::namespaced(self.server.client(name), NS);
        let elector = Elector::new(api, Params::new(LEASE, name));
        let (terms, name) = (self.clone(), name.to_owned());
        tokio::spawn(elector.run(stop.clone(), move |term| {
            let (terms, name) = (terms.clone(), name.clone());
            async move {
                let _working = terms.begin(name);
                term.cancelled().await;
                sleep(after).await;
            }
        }))
    }

    fn begin(&self, name: String) -> Working {
        let active = self.active[0].fetch_add(1, SeqCst) + 1;
        self.active[1].fetch_max(active, SeqCst);
        let at = self.server.clock().elapsed();
        self.began
            .lock()
            .expect("no test has panicked")
            .push((name, at));
        Working(self.clone())
    }

    fn began(&self) -> Vec<(String, Duration)> {
        self.began.lock().expect("no test has panicked").clone()
    }

    fn count(&self) -> usize {
        self.began().len()
    }

    /// The most leaders that there were at once.
    fn most(&self) -> usize {
        self.active[1].load(SeqCst)
    }

    async fn until_count(&self, count: usize, deadline: Duration) -> Duration {
        let what = format!("term {count} has begun");
        until(&what, deadline, || self.count() == count).await
    }
}

fn server() -> MemoryServer {
    let server = MemoryServer::new();
    server.create(lease());
    server
}

/// What cuts a client off: errors, or no answers.
fn cut_off(hang: bool) -> Fault {
    let fault = Fault::on("*", "").always();
    if hang {
        fault.hang()
    } else {
        fault.reply(500, "InternalError", "etcd is away")
    }
}

#[tokio::test(start_paused = true)]
async fn when_the_leader_is_cut_off_one_other_leads_in_time() {
    // Work that ends soon after its term, and work that never does.
    for after in [secs(1), secs(100_000)] {
        for hang in [false, true] {
            let server = server();
            let (terms, stop) = (Terms::on(&server), CancellationToken::new());
            let tasks = ["a", "b", "c"].map(|name| terms.candidate(name, &stop, after));
            terms.until_count(1, SOON).await;
            sleep(secs(60)).await;
            let leader = holder(&server).expect("somebody leads");
            server.fault(cut_off(hang).who(&leader));
            let took = terms.until_count(2, TAKEOVER).await;
            assert!(took >= secs(4), "not before the lease is out: {took:?}");
            sleep(secs(60)).await;
            server.clear_faults();
            sleep(secs(60)).await;
            assert_eq!(
                terms.count(),
                2,
                "the old leader follows: {:?}",
                terms.began()
            );
            assert_eq!(terms.most(), 1, "never two at once");

            stop.cancel();
            for task in tasks {
                timeout(secs(7), task)
                    .await
                    .expect("it ends")
                    .expect("no panic");
            }
            if after == secs(1) {
                assert_eq!(holder(&server).unwrap_or_default(), "", "released");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_short_outage_ends_no_term_and_a_long_one_does() {
    for hang in [false, true] {
        let server = server();
        let (terms, stop) = (Terms::on(&server), CancellationToken::new());
        let _task = terms.candidate("a", &stop, secs(0));
        terms.until_count(1, SOON).await;
        sleep(secs(5)).await;

        // A request that hangs is given up after 2 s, so the outage is over before the deadline of 4 s either way.
        server.fault(cut_off(hang));
        sleep(if hang { secs(1) } else { secs(2) }).await;
        server.clear_faults();
        sleep(secs(30)).await;
        assert_eq!(
            terms.count(),
            1,
            "a short outage ends no term (hang: {hang})"
        );

        server.fault(cut_off(hang));
        until("the term has ended", secs(4), || {
            terms.active[0].load(SeqCst) == 0
        })
        .await;
        sleep(secs(300)).await;
        assert_eq!(terms.count(), 1, "nobody leads without the API server");
        server.clear_faults();
        // A hung attempt ends first.
        terms.until_count(2, secs(4)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_stops_releases_and_the_next_begins_at_once() {
    let server = server();
    let terms = Terms::on(&server);
    let stops = [CancellationToken::new(), CancellationToken::new()];
    let first = terms.candidate("a", &stops[0], secs(0));
    terms.until_count(1, SOON).await;
    let _second = terms.candidate("b", &stops[1], secs(0));
    sleep(secs(60)).await;
    stops[0].cancel();
    terms.until_count(2, Duration::from_millis(1_210)).await;
    first.await.expect("no panic");
    assert_eq!(holder(&server).as_deref(), Some("b"));
    assert_eq!(terms.most(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_release_comes_only_after_the_work_has_ended() {
    let server = server();
    let (terms, stop) = (Terms::on(&server), CancellationToken::new());
    let task = terms.candidate("a", &stop, secs(3));
    terms.until_count(1, SOON).await;
    sleep(secs(10)).await;
    stop.cancel();
    sleep(Duration::from_millis(2_900)).await;
    assert_eq!(holder(&server).as_deref(), Some("a"), "its work goes on");
    timeout(secs(1), task)
        .await
        .expect("it ends")
        .expect("no panic");
    assert_eq!(holder(&server).unwrap_or_default(), "");
}

#[tokio::test(start_paused = true)]
async fn after_a_crash_the_lease_is_waited_out_by_others_and_taken_up_by_its_holder() {
    for (name, least, most) in [
        ("b", secs(5), TAKEOVER),
        ("a", secs(0), Duration::from_millis(10)),
    ] {
        let server = server();
        let (terms, stop) = (Terms::on(&server), CancellationToken::new());
        let crashed = terms.candidate("a", &stop, secs(0));
        terms.until_count(1, SOON).await;
        sleep(secs(60)).await;
        crashed.abort();
        let _task = terms.candidate(name, &stop, secs(0));
        let took = terms.until_count(2, most).await;
        assert!(took >= least, "{name}: {took:?}");
        let transitions =
            server.get("leases", NS, LEASE).expect("there")["spec"]["leaseTransitions"].clone();
        assert_eq!(transitions, if name == "a" { 1 } else { 2 });
    }
}

#[tokio::test(start_paused = true)]
async fn times_that_others_wrote_are_not_compared() {
    for renewed in ["1999-01-01T00:00:00.000000Z", "2099-01-01T00:00:00.000000Z"] {
        let server = MemoryServer::new();
        let mut held = lease();
        held["spec"] = json!({"holderIdentity": "dead", "renewTime": renewed, "acquireTime": renewed,
            "leaseDurationSeconds": 3600, "leaseTransitions": 7});
        server.create(held);
        let (terms, stop) = (Terms::on(&server), CancellationToken::new());
        let _task = terms.candidate("a", &stop, secs(0));
        let took = terms.until_count(1, TAKEOVER).await;
        assert!(took >= secs(6), "{renewed}: {took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_whose_lease_somebody_else_has_taken_stops() {
    let server = server();
    let (terms, stop) = (Terms::on(&server), CancellationToken::new());
    let _task = terms.candidate("a", &stop, secs(0));
    terms.until_count(1, SOON).await;
    sleep(secs(10)).await;
    server.update("leases", NS, LEASE, |lease| {
        lease["spec"]["holderIdentity"] = "thief".into();
    });
    until("the term has ended", secs(4), || {
        terms.active[0].load(SeqCst) == 0
    })
    .await;
    assert_eq!(
        holder(&server).as_deref(),
        Some("thief"),
        "it is not released"
    );
}

#[tokio::test(start_paused = true)]
async fn of_those_who_try_at_the_same_moment_one_wins() {
    let server = server();
    let (terms, stop) = (Terms::on(&server), CancellationToken::new());
    let names: Vec<_> = (0..10).map(|i| format!("r{i}")).collect();
    let _tasks: Vec<_> = names
        .iter()
        .map(|name| terms.candidate(name, &stop, secs(0)))
        .collect();
    sleep(secs(120)).await;
    assert_eq!((terms.count(), terms.most()), (1, 1), "{:?}", terms.began());
    let refused = server.writes();
    let refused = refused.iter().filter(|write| write.status == 409).count();
    assert_eq!(refused, 9, "they did try at the same moment");
}

#[tokio::test(start_paused = true)]
async fn a_missing_lease_is_waited_for_and_not_made() {
    let server = MemoryServer::new();
    let (terms, stop) = (Terms::on(&server), CancellationToken::new());
    let _task = terms.candidate("a", &stop, secs(0));
    sleep(secs(120)).await;
    assert_eq!(terms.count(), 0);
    assert!(server.writes().is_empty(), "{:?}", server.writes());
    let asked = server.requests().len();
    assert!((95..=121).contains(&asked), "asked {asked} times in 120 s");
    server.create(lease());
    terms.until_count(1, SOON).await;

    // It may go while it is held, too.
    server.delete("leases", NS, LEASE);
    until("the term has ended", secs(5), || {
        terms.active[0].load(SeqCst) == 0
    })
    .await;
    server.create(lease());
    terms.until_count(2, SOON).await;
}

#[tokio::test(start_paused = true)]
async fn work_that_ends_by_itself_gives_the_lease_back() {
    let server = server();
    let terms = Terms::on(&server);
    let api = Api::namespaced(server.client("a"), NS);
    let elector = Elector::new(api, Params::new(LEASE, "a"));
    let (stop, work) = (CancellationToken::new(), terms.clone());
    let _task = tokio::spawn(elector.run(stop.clone(), move |_| {
        let working = work.begin("a".to_owned());
        async move {
            sleep(secs(10)).await;
            drop(working);
        }
    }));
    terms.until_count(1, SOON).await;
    sleep(Duration::from_millis(10_002)).await;
    terms.until_count(2, SOON).await;
    assert_eq!(terms.most(), 1);
}

#[test]
#[should_panic(expected = "out of order")]
fn times_that_cannot_work_are_refused() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let params = Params {
            deadline: secs(6),
            ..Params::new(LEASE, "a")
        };
        let api = Api::namespaced(MemoryServer::new().client("a"), NS);
        drop(Elector::new(api, params));
    });
}
