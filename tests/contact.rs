//! The contact with the API server, in process and in virtual time: watches on connections that are dead are not believed.

mod common;

use std::time::Duration;

use chrono::{TimeZone as _, Utc};
use common::{LEASE, NS, lease, until};
use headstart::{
    clock::Clock,
    contact::Contact,
    lease::{Elector, Params},
    metrics::Metrics,
    watch::{self, Told},
};
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, ResourceExt as _, runtime::watcher::Event};
use serde_json::json;
use testbed::memory::{Clock as ServerClock, Fault, MemoryServer};
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_util::sync::CancellationToken;

const SOON: Duration = Duration::from_secs(2);

/// A server, and a watch of its namespaces that tells the names of those that are made.
struct Watch {
    server: MemoryServer,
    contact: Contact,
    metrics: Metrics,
    told: mpsc::UnboundedReceiver<String>,
    _task: JoinHandle<()>,
}

impl Watch {
    fn start(faults: Vec<Fault>) -> Self {
        let begin = Utc.with_ymd_and_hms(2026, 1, 1, 0, 0, 0);
        let clock = ServerClock::new(begin.single().expect("a date"));
        let server = MemoryServer::with_clock(clock);
        for fault in faults {
            server.fault(fault);
        }
        let metrics = Metrics::default();
        let contact = Contact::new(metrics.watches.clone(), Clock::new(move || clock.now()));
        let made = server.clone();
        let client = contact.client(move || Ok(made.client("watch")));
        let api = Api::<Namespace>::all(client.expect("a client"));
        let (tell, told) = mpsc::unbounded_channel();
        let task = tokio::spawn(watch::forever(api, watch::config(), move |told| {
            if let Told::Event(Event::Apply(namespace)) = told {
                tell.send(namespace.name_any()).ok();
            }
        }));
        Self {
            server,
            contact,
            metrics,
            told,
            _task: task,
        }
    }

    fn create(&self, name: &str) {
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        self.server.create(namespace);
    }

    async fn hears(&mut self, name: &str) {
        let told = tokio::time::timeout(SOON, self.told.recv()).await;
        assert_eq!(told.expect("it is told"), Some(name.to_owned()));
    }

    /// How often it listed, and how often it watched.
    fn asked(&self) -> (usize, usize) {
        let requests = self.server.requests();
        let of = |verb| {
            requests
                .iter()
                .filter(|request| request.verb == verb)
                .count()
        };
        (of("LIST"), of("WATCH"))
    }

    async fn until_asked(&self, asked: (usize, usize), deadline: Duration) {
        until("it asks", deadline, || self.asked() == asked).await;
    }
}

#[tokio::test(start_paused = true)]
async fn watches_go_on_from_where_they_were() {
    let mut watch = Watch::start(Vec::new());
    watch.until_asked((1, 1), SOON).await;
    watch.create("before");
    watch.hears("before").await;
    watch.contact.renew();
    watch.create("meanwhile");
    watch.hears("meanwhile").await;
    assert_eq!(watch.asked(), (1, 2), "it listed again");
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_does_not_begin_is_asked_for_again() {
    let mut watch = Watch::start(vec![Fault::on("WATCH", "/namespaces").hang()]);
    watch.until_asked((1, 1), SOON).await;
    watch.until_asked((1, 2), Duration::from_secs(12)).await;
    watch.create("after");
    watch.hears("after").await;
}

#[tokio::test(start_paused = true)]
async fn a_list_that_waits_is_ended_when_the_server_is_back() {
    let watch = Watch::start(vec![Fault::on("LIST", "/namespaces").hang()]);
    watch.until_asked((1, 0), SOON).await;
    watch.contact.renew();
    watch.until_asked((2, 1), SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_answered_again_renews_the_contact() {
    let silent = Fault::on("GET", "/leases/*").skip(3).times(2).hang();
    let watch = Watch::start(vec![silent]);
    watch.server.create(lease());
    let api = Api::namespaced(watch.server.client("lease"), NS);
    let elector = Elector::new(api, Params::new(LEASE, "a")).renewing(watch.contact.clone());
    let stop = CancellationToken::new();
    let ended = stop.clone();
    let elector = tokio::spawn(elector.run(stop, |term| async move { term.cancelled().await }));
    watch.until_asked((1, 1), SOON).await;
    // Two attempts of 2 s, and a third that is answered.
    watch.until_asked((1, 2), Duration::from_secs(10)).await;
    ended.cancel();
    elector.await.expect("it ends");
}

#[tokio::test(start_paused = true)]
async fn it_says_when_it_last_heard() {
    let heard = |watch: &Watch| {
        let text = watch.metrics.text();
        let series = "headstart_watch_heard_timestamp_seconds{resource=\"namespaces\"} ";
        let line = text.lines().find_map(|line| line.strip_prefix(series));
        line.map_or(0.0, |value| value.parse().expect("a number"))
    };
    let mut watch = Watch::start(Vec::new());
    watch.until_asked((1, 1), SOON).await;
    until("it has begun", SOON, || heard(&watch) > 0.0).await;
    let begun = heard(&watch);
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(heard(&watch) < begun + 1.0, "nothing was said");
    watch.create("something");
    watch.hears("something").await;
    let later = heard(&watch);
    assert!((begun + 30.0..begun + 31.0).contains(&later), "{later}");
}
