//! Finds boosted pods whose label was lost while nobody watched.
//!
//! A list of the metadata of all pods without a claim, a minute after a term begins and then hourly, in small pages at no
//! more than two a second: dear to nobody, and enough for what hardly ever happens.

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::sleep};

use super::Writer;
use crate::{
    api::{BOOST_KEY, Pod},
    domain::record::{Record, State},
};

/// From the begin of a term to the first scan.
const FIRST: Duration = Duration::from_secs(60);
/// From one scan to the next.
const AGAIN: Duration = Duration::from_secs(3600);
/// Between two pages.
const PACE: Duration = Duration::from_millis(500);
/// Pods that wait to be looked at.
pub(super) const QUEUE: usize = 100;

/// Scans until nobody asks any more.
pub(super) async fn scan(writer: &Writer, found: &mpsc::Sender<Arc<Pod>>) {
    sleep(FIRST).await;
    loop {
        if once(writer, found).await.is_none() {
            return;
        }
        sleep(AGAIN).await;
    }
}

/// One scan; a page that can't be read ends it. `None` when nobody asks any more.
async fn once(writer: &Writer, found: &mpsc::Sender<Arc<Pod>>) -> Option<()> {
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
            let annotations = metadata.annotations.as_ref();
            let text = annotations.and_then(|annotations| annotations.get(BOOST_KEY));
            let record = text.and_then(|text| Record::read(text).ok());
            if record.is_some_and(|record| record.state == State::Active) {
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
