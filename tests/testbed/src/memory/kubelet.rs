//! A stand-in for the kubelet: what follows a resize of a bound pod.

use std::time::Duration;

use serde_json::{Value, json};

use super::{MemoryServer, pod, store::text};

/// How the nodes react to a resize.
#[derive(Clone, Debug)]
pub struct Kubelet {
    /// How long after the write.
    pub actuate_after: Duration,
    /// What they do.
    pub resize: Resize,
}

/// A node's reaction to a resize.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Resize {
    /// Done: the container statuses that exist follow the spec, resize conditions go.
    Actuate,
    /// `PodResizePending`, reason `Deferred`.
    Deferred,
    /// `PodResizePending`, reason `Infeasible`.
    Infeasible,
    /// Allocated but not actuated: `PodResizeInProgress`, reason `Error`, with this message.
    Error(String),
    /// Nothing, as from a node that is cut off.
    Never,
}

impl MemoryServer {
    /// Sets the kubelet of all nodes; without one nothing follows a resize. Bound pods that are not settled yet (their
    /// `status.observedGeneration` is behind, or a resize condition is there) are looked at again.
    pub fn kubelet(&self, kubelet: Kubelet) {
        self.state().kubelet = Some(kubelet);
        for pod in self.list("pods") {
            let observed = &pod["status"]["observedGeneration"];
            let behind = !observed.is_null() && *observed != pod["metadata"]["generation"];
            if behind
                || pod::items(&pod["status"]["conditions"])
                    .iter()
                    .any(is_resize)
            {
                let [namespace, name] =
                    ["namespace", "name"].map(|field| text(&pod["metadata"][field]).to_owned());
                self.actuate_later(namespace, name);
            }
        }
    }

    /// Lets the kubelet see a pod after its delay, and do then what it is set to do then.
    pub(super) fn actuate_later(&self, namespace: String, name: String) {
        let Some(Kubelet { actuate_after, .. }) = self.state().kubelet.clone() else {
            return;
        };
        let server = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(actuate_after).await;
            server.actuate(&namespace, &name);
        });
    }

    fn actuate(&self, namespace: &str, name: &str) {
        let kubelet = self.state().kubelet.clone();
        let pod = self.get("pods", namespace, name);
        let bound = pod.is_some_and(|pod| {
            let finished = matches!(text(&pod["status"]["phase"]), "Succeeded" | "Failed");
            !text(&pod["spec"]["nodeName"]).is_empty() && !finished
        });
        if let (Some(Kubelet { resize, .. }), true) = (kubelet, bound)
            && resize != Resize::Never
        {
            let now = self.clock.timestamp();
            self.update("pods", namespace, name, |pod| react(pod, &resize, &now));
        }
    }
}

fn react(pod: &mut Value, resize: &Resize, now: &str) {
    let generation = pod["metadata"]["generation"].clone();
    pod["status"]["observedGeneration"] = generation.clone();
    let condition = |kind: &str, reason: &str, message: &str| {
        json!({"type": kind, "status": "True", "reason": reason, "message": message,
            "lastTransitionTime": now, "lastProbeTime": null, "observedGeneration": generation})
    };
    let condition = match resize {
        Resize::Deferred => Some(condition(
            "PodResizePending",
            "Deferred",
            "Node didn't have enough resource: cpu",
        )),
        Resize::Infeasible => Some(condition(
            "PodResizePending",
            "Infeasible",
            "Node didn't have enough capacity: cpu",
        )),
        Resize::Error(message) => Some(condition("PodResizeInProgress", "Error", message)),
        Resize::Actuate | Resize::Never => None,
    };
    let mut conditions = pod::items(&pod["status"]["conditions"]).to_vec();
    let before = conditions
        .iter()
        .find(|old| {
            condition
                .as_ref()
                .is_some_and(|new| new["type"] == old["type"])
        })
        .cloned();
    conditions.retain(|old| !is_resize(old));
    conditions.extend(condition.map(|mut new| {
        if let Some(before) = before {
            new["lastTransitionTime"] = before["lastTransitionTime"].clone();
        }
        new
    }));
    if !conditions.is_empty() || pod["status"]["conditions"].is_array() {
        pod["status"]["conditions"] = conditions.into();
    }

    let allocated = matches!(resize, Resize::Actuate | Resize::Error(_));
    for (list, statuses) in [
        ("containers", "containerStatuses"),
        ("initContainers", "initContainerStatuses"),
    ] {
        let containers = pod::items(&pod["spec"][list]).to_vec();
        let Some(statuses) = pod["status"]
            .get_mut(statuses)
            .and_then(Value::as_array_mut)
        else {
            continue;
        };
        for status in statuses.iter_mut().filter(|_| allocated) {
            let Some(container) = containers.iter().find(|c| c["name"] == status["name"]) else {
                continue;
            };
            status["allocatedResources"] = container["resources"]["requests"].clone();
            if *resize == Resize::Actuate {
                status["resources"] = container["resources"].clone();
            }
        }
    }
}

fn is_resize(condition: &Value) -> bool {
    matches!(
        text(&condition["type"]),
        "PodResizePending" | "PodResizeInProgress"
    )
}
