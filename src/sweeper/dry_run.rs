//! What a dry run (`--dry-run`) says instead of writing to a pod.

use std::collections::BTreeSet;

use super::Sweeper;
use crate::{
    api::Pod,
    domain::{
        cpu::Cpu,
        revert::{ContainerRevert, Decision, Revert},
    },
};

/// What has been told of a pod: each write, with what it would change.
pub(super) type Told = BTreeSet<(&'static str, String)>;

/// Logs and counts what a decision would write to a pod, once.
pub(super) fn tell(sweeper: &Sweeper, pod: &Pod, told: &mut Told, decision: &Decision) {
    let (write, what) = match decision {
        Decision::Revert(revert) => ("resize", way_back(pod, revert)),
        Decision::Finish(finish) => {
            let by = finish.ended.as_ref().map(|(_, by)| by.as_str());
            ("finish", by.unwrap_or_default().to_owned())
        }
        Decision::Raise(restarted) => ("raise", restarted.join(", ")),
        Decision::Wait(_) | Decision::Watch(_) | Decision::Leave(_) => return,
    };
    if !told.insert((write, what.clone())) {
        return;
    }
    sweeper.metrics.would_write(write);
    let meta = &pod.metadata;
    let (namespace, name) = (meta.namespace.as_deref(), meta.name.as_deref());
    let boost = pod.claim();
    tracing::info!(
        namespace,
        name,
        boost,
        write,
        what,
        "dry run: the pod would be written to"
    );
}

/// Each container's values as they are, and as they were before: `app 1500m/3 -> 500m/1`.
fn way_back(pod: &Pod, revert: &Revert) -> String {
    let change = |container: &ContainerRevert| {
        let now = pod.container(&container.name).map(Cpu::of);
        let now = now.unwrap_or_default();
        let then = Cpu {
            request: container.to.request.or(now.request),
            limit: container.to.limit.or(now.limit),
        };
        format!("{} {now} -> {then}", container.name)
    };
    let changes: Vec<_> = revert.containers.iter().map(change).collect();
    changes.join(", ")
}
