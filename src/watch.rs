//! Watches that never end: the loop around kube's watcher that the caches share.

use std::{fmt::Debug, time::Duration};

use futures::{StreamExt, pin_mut};
use kube::{
    Api, Resource,
    runtime::watcher::{self, Event, watcher},
};
use serde::de::DeserializeOwned;
use tokio::time::sleep;

use crate::error::Chain;

/// How long one watch call lasts, in seconds. A connection that silently died is noticed 5 s after it.
const CALL_SECONDS: u32 = 45;
/// Objects in one page of a list. Each page costs the API server about 20 ms beside what its pods cost, 0.1 ms each; a page is
/// held in memory twice while it is read.
const PAGE: u32 = 500;
/// Pauses after errors grow from the first to one of the others: where the API server can't be reached, which costs it
/// nothing, and where it refuses.
const PAUSE: Duration = Duration::from_millis(500);
const LONGEST_UNREACHED: Duration = Duration::from_secs(2);
const LONGEST_REFUSED: Duration = Duration::from_secs(4);
/// How often to ask for a resource type that the server doesn't have; up to as much again is added at random.
const ABSENT_PAUSE: Duration = Duration::from_secs(10);

/// What a watch tells its cache.
#[derive(Debug)]
pub enum Told<K> {
    /// Something about an object, or about the list.
    Event(Event<K>),
    /// The API server has no such resource type (any more): as good as an empty list.
    Absent,
}

/// Everything of a type, with the timeouts that all our watches have.
#[must_use]
pub fn config() -> watcher::Config {
    watcher::Config::default()
        .timeout(CALL_SECONDS)
        .page_size(PAGE)
}

/// Watches for ever and hands on what it is told. Errors are logged; the watch goes on after a pause.
pub async fn forever<K>(api: Api<K>, config: watcher::Config, mut tell: impl FnMut(Told<K>))
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let what = api.resource_url().to_owned();
    let events = watcher(api, config);
    pin_mut!(events);
    let mut pauses = Pauses::default();
    while let Some(event) = events.next().await {
        let error = match event {
            Ok(event) => {
                pauses = Pauses::default();
                tell(Told::Event(event));
                continue;
            }
            Err(error) => error,
        };
        if is_absent(&error) {
            tracing::warn!(
                what,
                "the API server has no such resource type; asking again"
            );
            tell(Told::Absent);
            sleep(ABSENT_PAUSE.mul_f64(1.0 + fastrand::f64())).await;
        } else if is_expired(&error) {
            // It will list anew. Replicas hear of it together, and should not list together.
            tracing::info!(
                what,
                "the API server no longer knows what has happened since; listing"
            );
            sleep(PAUSE.mul_f64(fastrand::f64())).await;
        } else {
            let pause = pauses.next(refusal(&error).is_some());
            tracing::warn!(what, error = %Chain(&error), ?pause, "a watch failed; trying again");
            sleep(pause).await;
        }
    }
}

/// Watches the object of this name for ever, and hands on what it is; none where it is gone, also where nobody heard it go.
pub async fn one<K>(api: Api<K>, name: &str, mut tell: impl FnMut(Option<K>))
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let named = config().fields(&format!("metadata.name={name}"));
    let mut listed = None;
    forever(api, named, |told| match told {
        Told::Event(Event::Init) => listed = None,
        Told::Event(Event::InitApply(object)) => listed = Some(object),
        Told::Event(Event::InitDone) => tell(listed.take()),
        Told::Event(Event::Apply(object)) => tell(Some(object)),
        Told::Event(Event::Delete(_)) | Told::Absent => tell(None),
    })
    .await;
}

/// The pauses after errors in a row.
#[derive(Default)]
struct Pauses {
    failures: u32,
    refused: bool,
}

impl Pauses {
    /// The next one. A server that refuses after it could not be reached has just come back: that row begins anew.
    fn next(&mut self, refused: bool) -> Duration {
        if self.refused != refused {
            self.failures = 0;
        }
        self.refused = refused;
        let longest = if refused {
            LONGEST_REFUSED
        } else {
            LONGEST_UNREACHED
        };
        let pause = PAUSE
            .saturating_mul(1 << self.failures.min(10))
            .min(longest);
        self.failures += 1;
        pause.mul_f64(0.5 + fastrand::f64() / 2.0)
    }
}

fn is_absent(error: &watcher::Error) -> bool {
    let listing = matches!(
        error,
        watcher::Error::InitialListFailed(_) | watcher::Error::WatchStartFailed(_)
    );
    listing && refusal(error) == Some(404)
}

/// What a watch should go on from is too old, so it has to begin anew.
fn is_expired(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchError(_)) && refusal(error) == Some(410)
}

/// The code of an API server that could be reached.
fn refusal(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => Some(status.code),
        _ => None,
    }
}
