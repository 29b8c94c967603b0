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
/// Objects in one page of a list: a page is held in memory twice while it is read.
const PAGE: u32 = 100;
/// Pauses after errors grow from the first to the second.
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));
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

/// Only the object of this name.
#[must_use]
pub fn named(name: &str) -> watcher::Config {
    config().fields(&format!("metadata.name={name}"))
}

/// Watches for ever and hands on what it is told. Errors are logged; the watch goes on after a pause.
pub async fn forever<K>(api: Api<K>, config: watcher::Config, mut tell: impl FnMut(Told<K>))
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let what = api.resource_url().to_owned();
    let events = watcher(api, config);
    pin_mut!(events);
    let mut failures = 0;
    while let Some(event) = events.next().await {
        let error = match event {
            Ok(event) => {
                failures = 0;
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
        } else {
            failures += 1;
            let pause = PAUSE
                .0
                .saturating_mul(1 << failures.min(10))
                .min(PAUSE.1)
                .mul_f64(0.5 + fastrand::f64() / 2.0);
            tracing::warn!(what, error = %Chain(&error), ?pause, "a watch failed; trying again");
            sleep(pause).await;
        }
    }
}

fn is_absent(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status.code == 404,
        _ => false,
    }
}
