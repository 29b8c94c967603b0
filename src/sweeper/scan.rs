//! Finds boosted pods whose label was lost while nobody watched.
//!
//! A list of the metadata of all pods without a claim, a minute after a term begins and then hourly, in small pages at no
//! more than two a second: dear to nobody, and enough for what hardly ever happens. Where pods are boosted that admission has
//! missed, one at once, for those that were created while nobody watched and run already.

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::sleep};

use chrono::TimeDelta;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Sweeper, Writer};
use crate::{
    api::{BOOST_KEY, Pod},
    boosts::created,
    domain::record::{Record, State},
};

/// From the begin of a term to the first scan.
const FIRST: Duration = Duration::from_secs(60);
/// From one scan to the next.
const AGAIN: Duration = Duration::from_secs(3600);
/// Between two pages.
const PACE: Duration = Duration::from_millis(500);
/// Pods that were created so long ago are likely to have started.
const YOUNG: TimeDelta = TimeDelta::minutes(5);
/// Pods that wait to be looked at.
pub(super) const QUEUE: usize = 100;

/// Scans until nobody asks any more.
pub(super) async fn scan(sweeper: &Sweeper, found: &mpsc::Sender<Arc<Pod>>) {
    let writer = &sweeper.writer;
    if sweeper.missed.is_some() {
        let oldest = sweeper.clock.now() - YOUNG;
        let is_young = |pod: &ObjectMeta| created(pod.creation_timestamp.as_ref()) > oldest;
        let unmarked = |pod: &ObjectMeta| record(pod).is_none() && is_young(pod);
        if once(writer, found, &unmarked).await.is_none() {
            return;
        }
    }
    let is_active = |pod: &ObjectMeta| {
        let record = record(pod).and_then(|text| Record::read(text).ok());
        record.is_some_and(|record| record.state == State::Active)
    };
    sleep(FIRST).await;
    loop {
        if once(writer, found, &is_active).await.is_none() {
            return;
        }
        sleep(AGAIN).await;
    }
}

fn record(pod: &ObjectMeta) -> Option<&str> {
    let text = pod.annotations.as_ref()?.get(BOOST_KEY)?;
    Some(text)
}

/// One scan; a page that can't be read ends it. `None` when nobody asks any more.
async fn once(
    writer: &Writer,
    found: &mpsc::Sender<Arc<Pod>>,
    is_meant: &(dyn Fn(&ObjectMeta) -> bool + Sync),
) -> Option<()> {
    let mut next: Option<String> = None;
    loop {
        let page = match writer.unclaimed(None, next.as_deref()).await {
            Ok(page) => page,
            Err(failure) => {
                tracing::warn!(
                    failure = failure.as_str(),
                    text = failure.text(),
                    "pods without a claim can't be listed; trying again in an hour"
                );
                return Some(());
            }
        };
        for metadata in page.pods {
            if is_meant(&metadata) {
                let pod = Pod {
                    metadata,
                    ..Pod::default()
                };
                found.send(Arc::new(pod)).await.ok()?;
            }
        }
        next = page.next;
        if next.is_none() {
            return Some(());
        }
        sleep(PACE).await;
    }
}
