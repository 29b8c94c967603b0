//! Finds pods for which nobody answered when they were created, while they are still starting.
//!
//! A watch on pending pods without a claim, which are few: each is looked at once, as it gets a node. Those that run already
//! when a term begins are found by the [scan](super::scan).

use std::{collections::HashSet, sync::Arc};

use kube::{Api, Client, runtime::watcher::Event};
use tokio::sync::mpsc;

use super::Sweeper;
use crate::{
    api::{BOOST_KEY, Pod},
    claims::uid,
    watch::{Told, config, forever},
};

/// What it takes to boost pods that admission has missed.
#[derive(Clone)]
pub struct Missed {
    /// Watches pending pods.
    pub client: Client,
    /// Our own namespace, of which the webhook is never asked.
    pub namespace: String,
}

/// Watches for ever.
pub(super) async fn watch(
    sweeper: &Sweeper,
    missed: &Missed,
    found: &mpsc::UnboundedSender<Arc<Pod>>,
) {
    let mut known = HashSet::new();
    let pending = config()
        .labels(&format!("!{BOOST_KEY}"))
        .fields("status.phase=Pending");
    forever(
        Api::<Pod>::all(missed.client.clone()),
        pending,
        |told| match told {
            Told::Event(Event::Apply(pod) | Event::InitApply(pod)) => {
                if sweeper.missed(&pod).is_some() && known.insert(uid(&pod)) {
                    // Who receives lives as long as the term.
                    let _ = found.send(Arc::new(pod));
                }
            }
            Told::Event(Event::Delete(pod)) => {
                known.remove(&uid(&pod));
            }
            Told::Event(Event::Init) => known.clear(),
            Told::Event(Event::InitDone) | Told::Absent => {}
        },
    )
    .await;
}
