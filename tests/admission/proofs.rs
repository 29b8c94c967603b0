//! Why we clamp and skip: the boosted form, created past us, is refused, or can't be resized back.
//!
//! Each test has a namespace of its own. Resizes are made with the operator's account and rights, as it makes them.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use testbed::{
    Answer, eventually,
    rest::{STRATEGIC, pods},
};

use testbed::cluster::run;

use crate::bed::{Bed, SOON, UNCALLED, bed};

/// A namespace in which our webhook is not called.
struct Place {
    bed: &'static Bed,
    name: &'static str,
}

impl Place {
    async fn new(name: &'static str) -> Result<Self> {
        let bed = bed().await?;
        bed.namespace(name, &json!({UNCALLED: "yes"})).await?;
        Ok(Self { bed, name })
    }

    /// With a LimitRange of one entry.
    async fn bounded(name: &'static str, item: Value) -> Result<Self> {
        let place = Self::new(name).await?;
        place.bed.limit_range(name, &json!([item])).await?;
        Ok(place)
    }

    /// With a quota that has used up nothing.
    async fn with_quota(name: &'static str, key: &str, hard: &str) -> Result<Self> {
        let place = Self::new(name).await?;
        let hard = json!({key: hard});
        let quota = json!({"spec": {"hard": hard}, "status": {"hard": hard, "used": {key: "0"}}});
        place.bed.quota(name, &quota).await?;
        Ok(place)
    }

    async fn create(&self, pod: &Value) -> Result<Answer> {
        self.bed.create(self.name, "", pod).await
    }

    /// Creates a pod in earnest once it is refused with these words no longer.
    async fn create_unless(&self, words: &str, pod: &Value) -> Result<Answer> {
        eventually("the API server knows the bounds", SOON, || async {
            let answer = self.create(pod).await?;
            ensure!(!answer.said().contains(words), "{}", answer.said());
            Ok(answer)
        })
        .await
    }

    /// Creates a pod and waits until it runs.
    async fn run(&self, pod: &Value) -> Result<()> {
        self.create(pod).await?.accepted()?;
        self.bed.running(self.name, "p").await
    }

    /// The operator's resize of the container `app` of the pod `p`.
    async fn resize(&self, resources: Value) -> Result<Answer> {
        let containers = json!([{"name": "app", "resources": resources}]);
        self.bed.resize(self.name, "p", &containers).await
    }
}

/// A pod of these containers, which are called `app` and `side`.
fn pod(resources: &[Value]) -> Value {
    let names = ["app", "side"];
    let containers = resources.iter().zip(names);
    let containers = containers
        .map(|(resources, name)| json!({"name": name, "image": "x", "resources": resources}));
    let containers: Vec<Value> = containers.collect();
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": containers}})
}

/// CPU `resources` of a container.
fn cpu(request: &str, limit: &str) -> Value {
    json!({"requests": {"cpu": request}, "limits": {"cpu": limit}})
}

fn requests(request: &str) -> Value {
    json!({"requests": {"cpu": request}})
}

#[track_caller]
fn refused(answer: &Answer, code: u16, words: &str) -> Result<()> {
    ensure!(
        answer.code == code && answer.said().contains(words),
        "answered with {}: {}",
        answer.code,
        answer.body
    );
    Ok(())
}

// === LimitRanges ===

#[test]
fn a_container_above_a_max_is_refused() -> Result<()> {
    run(async {
        let item = json!({"type": "Container", "max": {"cpu": "1"}});
        let place = Place::bounded("max", item).await?;
        let answer = place.create(&pod(&[cpu("500m", "2")])).await?;
        let words = "maximum cpu usage per Container is 1, but limit is 2";
        refused(&answer, 403, words)
    })
}

#[test]
fn a_pod_above_a_max_is_refused() -> Result<()> {
    run(async {
        let item = json!({"type": "Pod", "max": {"cpu": "1"}});
        let place = Place::bounded("pod-max", item).await?;
        let answer = place
            .create(&pod(&[cpu("500m", "700m"), cpu("500m", "800m")]))
            .await?;
        let words = "maximum cpu usage per Pod is 1, but limit is 1500m";
        refused(&answer, 403, words)
    })
}

#[test]
fn a_limit_too_far_above_its_request_is_refused() -> Result<()> {
    run(async {
        let item = json!({"type": "Container", "maxLimitRequestRatio": {"cpu": "2"}});
        let place = Place::bounded("ratio", item).await?;
        let answer = place.create(&pod(&[cpu("500m", "2")])).await?;
        let words = "cpu max limit to request ratio per Container is 2, but provided ratio is 4";
        refused(&answer, 403, words)
    })
}

#[test]
fn a_removed_limit_comes_back_as_the_default() -> Result<()> {
    run(async {
        let item = json!({"type": "Container", "default": {"cpu": "500m"}});
        let place = Place::bounded("default-limit", item).await?;
        let created = place.create(&pod(&[requests("400m")])).await?.accepted()?;
        let limit = &created["spec"]["containers"][0]["resources"]["limits"]["cpu"];
        ensure!(limit == "500m", "the limit is {limit}");
        let mut boosted = pod(&[requests("800m")]);
        boosted["metadata"]["name"] = "boosted".into();
        let answer = place.create(&boosted).await?;
        refused(
            &answer,
            422,
            "must be less than or equal to cpu limit of 500m",
        )
    })
}

/// A pod that asks for less than it must would be refused. Boosted it is taken, and stays so: LimitRanger judges the
/// resize as well.
#[test]
fn a_pod_below_a_min_can_not_be_resized_back() -> Result<()> {
    run(async {
        let item = json!({"type": "Container", "min": {"cpu": "200m"}});
        let place = Place::bounded("min", item).await?;
        let words = "minimum cpu usage per Container is 200m, but request is 100m";
        refused(&place.create(&pod(&[cpu("100m", "1")])).await?, 403, words)?;
        place.run(&pod(&[cpu("200m", "2")])).await?;
        refused(&place.resize(cpu("100m", "1")).await?, 403, words)
    })
}

/// The same with a ratio that the original breaks.
#[test]
fn a_pod_that_breaks_a_ratio_can_not_be_resized_back() -> Result<()> {
    run(async {
        let item = json!({"type": "Container", "maxLimitRequestRatio": {"cpu": "2"}});
        let place = Place::bounded("ratio-back", item).await?;
        let words = "cpu max limit to request ratio per Container is 2, but provided ratio is 10";
        refused(&place.create(&pod(&[cpu("100m", "1")])).await?, 403, words)?;
        place.run(&pod(&[cpu("500m", "1")])).await?;
        refused(&place.resize(requests("100m")).await?, 403, words)
    })
}

// === quotas ===

#[test]
fn a_pod_above_a_quota_is_refused() -> Result<()> {
    run(async {
        let place = Place::with_quota("quota", "requests.cpu", "1").await?;
        let answer = place
            .create_unless("status unknown", &pod(&[requests("2")]))
            .await?;
        let words = "exceeded quota: compute, requested: requests.cpu=2, used: requests.cpu=0, limited: requests.cpu=1";
        refused(&answer, 403, words)
    })
}

#[test]
fn a_quota_of_limits_wants_a_limit() -> Result<()> {
    run(async {
        let place = Place::with_quota("quota-limits", "limits.cpu", "8").await?;
        let answer = place
            .create_unless("status unknown", &pod(&[requests("500m")]))
            .await?;
        let words = "failed quota: compute: must specify limits.cpu for: app";
        refused(&answer, 403, words)
    })
}

// === validation ===

#[test]
fn a_request_above_its_limit_is_refused() -> Result<()> {
    run(async {
        let place = Place::new("above-limit").await?;
        let answer = place.create(&pod(&[cpu("1", "500m")])).await?;
        refused(
            &answer,
            422,
            "must be less than or equal to cpu limit of 500m",
        )
    })
}

/// A request that a boost brings up to the limit makes the pod Guaranteed, for good.
#[test]
fn a_resize_may_not_change_the_class() -> Result<()> {
    run(async {
        let place = Place::new("class").await?;
        let resources = json!({
            "requests": {"cpu": "1", "memory": "64Mi"},
            "limits": {"cpu": "1", "memory": "64Mi"},
        });
        place.run(&pod(&[resources])).await?;
        let answer = place.resize(requests("500m")).await?;
        refused(
            &answer,
            422,
            "Pod QOS Class may not change as a result of resizing",
        )
    })
}

/// A limit that a boost adds stays for good.
#[test]
fn a_resize_may_not_remove_a_limit() -> Result<()> {
    run(async {
        let place = Place::new("remove-limit").await?;
        place.run(&pod(&[cpu("500m", "1")])).await?;
        let answer = place.resize(json!({"limits": {"cpu": null}})).await?;
        refused(&answer, 422, "resource limits cannot be removed")
    })
}

/// The claims are the other container's.
#[test]
fn a_pod_with_a_resource_claim_can_not_be_resized() -> Result<()> {
    run(async {
        let place = Place::new("claims").await?;
        let mut claimed = pod(&[cpu("500m", "1"), json!({"claims": [{"name": "gpu"}]})]);
        claimed["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimName": "gpu"}]);
        place.run(&claimed).await?;
        let answer = place.resize(cpu("250m", "500m")).await?;
        refused(&answer, 422, "only cpu and memory resources are mutable")
    })
}

#[test]
fn a_container_above_its_pods_resources_is_refused() -> Result<()> {
    run(async {
        let place = Place::new("pod-level").await?;
        let mut pod = pod(&[requests("2")]);
        pod["spec"]["resources"] = cpu("1", "1");
        let answer = place.create(&pod).await?;
        refused(
            &answer,
            422,
            "must be greater than or equal to aggregate container requests",
        )
    })
}

#[test]
fn a_mirror_pod_can_not_be_resized() -> Result<()> {
    run(async {
        let place = Place::new("mirror").await?;
        let mut mirror = pod(&[cpu("500m", "1")]);
        mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
        mirror["spec"]["nodeName"] = testbed::node::NODE.into();
        place.run(&mirror).await?;
        let answer = place.resize(cpu("250m", "500m")).await?;
        refused(&answer, 422, "static pods cannot be resized")
    })
}

#[test]
fn a_windows_pod_can_not_be_resized() -> Result<()> {
    run(async {
        let place = Place::new("windows").await?;
        let mut windows = pod(&[cpu("500m", "1")]);
        windows["spec"]["os"] = json!({"name": "windows"});
        place.run(&windows).await?;
        let answer = place.resize(cpu("250m", "500m")).await?;
        refused(&answer, 422, "windows pods cannot be resized")
    })
}

/// Kubelets before 1.33 don't report what running containers have.
#[test]
fn a_pod_on_an_old_kubelet_can_not_be_resized() -> Result<()> {
    run(async {
        let place = Place::new("old-kubelet").await?;
        let mut pod = pod(&[cpu("500m", "1")]);
        // Nobody looks after pods there.
        pod["spec"]["nodeName"] = "elsewhere".into();
        place.create(&pod).await?.accepted()?;
        let running = json!({"running": {"startedAt": "2026-12-01T10:00:00Z"}});
        let status = json!({
            "name": "app", "image": "x", "imageID": "", "ready": true, "restartCount": 0,
            "started": true, "state": running,
        });
        let status = json!({"status": {"phase": "Running", "containerStatuses": [status]}});
        let path = format!("{}/p/status", pods(place.name));
        place
            .bed
            .api
            .patch(&path, STRATEGIC, &status)
            .await?
            .accepted()?;
        let answer = place.resize(cpu("250m", "500m")).await?;
        refused(
            &answer,
            422,
            "Pod running on node without support for resize",
        )
    })
}
