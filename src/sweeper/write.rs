//! The two writes of a boost's end, the read between them, and the two of a raise: with a deadline, and what a failure means.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{
    Api, Client, Resource as _,
    api::{
        ApiResource, DynamicObject, GroupVersionKind, ListParams, ObjectList, Patch, PatchParams,
        Request,
    },
};
use serde_json::Value;
use tokio::time::timeout;

use crate::{
    api::{BOOST_KEY, Pod, PodMetadata, PodSpec},
    domain::{
        failure::Failure,
        patch,
        raise::Raise,
        record::Record,
        revert::{ContainerRevert, Finish},
    },
    error::Chain,
};

/// How long a request may take. After it nobody knows whether it happened, which is why every write is safe twice.
const DEADLINE: Duration = Duration::from_secs(5);

/// Pods in one page of a scan.
const SCAN_PAGE: u32 = 500;

/// Writes to pods.
#[derive(Clone)]
pub struct Writer {
    client: Client,
}

impl Writer {
    /// A writer on this client, which must not retry by itself: what failed is looked at again first.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// Reads the pod that `pod` was. Another pod of its name is none of ours.
    ///
    /// # Errors
    /// [`Failure::Gone`] where it is gone.
    pub async fn read(&self, pod: &Pod) -> Result<Pod, Failure> {
        let read = within_deadline(self.pods(pod).get(name(pod))).await?;
        if read.metadata.uid == pod.metadata.uid {
            Ok(read)
        } else {
            Err(Failure::Gone)
        }
    }

    /// Resizes, back or up. The answer is the pod as it is now.
    ///
    /// # Errors
    /// As classified.
    pub async fn resize(&self, pod: &Pod, containers: &[ContainerRevert]) -> Result<Pod, Failure> {
        let body = Patch::Strategic(patch::resize(pod, containers));
        within_deadline(
            self.pods(pod)
                .patch_subresource("resize", name(pod), &params(), &body),
        )
        .await
    }

    /// Marks the record and drops the claim. (A resize silently drops metadata: it can't be one write.)
    ///
    /// # Errors
    /// As classified.
    pub async fn finish(&self, pod: &Pod, finish: &Finish) -> Result<Pod, Failure> {
        let body: Patch<Value> = Patch::Merge(patch::finish(pod, finish));
        within_deadline(self.pods(pod).patch(name(pod), &params(), &body)).await
    }

    /// Changes the record alone.
    ///
    /// # Errors
    /// As classified.
    pub(crate) async fn record(&self, pod: &Pod, record: &Record) -> Result<Pod, Failure> {
        let body: Patch<Value> = Patch::Merge(patch::record(pod, record));
        within_deadline(self.pods(pod).patch(name(pod), &params(), &body)).await
    }

    /// Drops both marks, of a pod whose record nobody can read.
    ///
    /// # Errors
    /// As classified.
    pub(crate) async fn drop_marks(&self, pod: &Pod) -> Result<Pod, Failure> {
        let body: Patch<Value> = Patch::Merge(patch::drop_marks(pod));
        within_deadline(self.pods(pod).patch(name(pod), &params(), &body)).await
    }

    /// Writes claim and record of a raise.
    ///
    /// # Errors
    /// As classified.
    pub(crate) async fn claim(&self, pod: &Pod, raise: &Raise) -> Result<Pod, Failure> {
        let body: Patch<Value> = Patch::Merge(patch::claim(pod, raise));
        within_deadline(self.pods(pod).patch(name(pod), &params(), &body)).await
    }

    /// Sends the resize as a dry run, and looks whether it would change anything but our CPU values: on a resize the API
    /// server adds LimitRange defaults to every container of the pod, also a memory limit to a running process.
    ///
    /// # Errors
    /// [`Failure::LimitRangeDefaults`] where it would.
    pub(crate) async fn rehearse(
        &self,
        pod: &Pod,
        containers: &[ContainerRevert],
    ) -> Result<Checked, Failure> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let resource = ApiResource::erase::<Pod>(&());
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), namespace, &resource);
        let stored = within_deadline(api.get(name(pod))).await?;
        if stored.metadata.uid != pod.metadata.uid {
            return Err(Failure::Gone);
        }
        if stored.metadata.resource_version != pod.metadata.resource_version {
            return Err(Failure::Conflict);
        }
        let body = Patch::Strategic(patch::resize(pod, containers));
        let dry_run = PatchParams {
            dry_run: true,
            ..params()
        };
        let resize = api.patch_subresource("resize", name(pod), &dry_run, &body);
        match within_deadline(resize).await {
            Ok(answer) => match patch::beyond_cpu(&stored.data, &answer.data, containers) {
                None => Ok(Checked),
                Some(surplus) => Err(Failure::LimitRangeDefaults(surplus)),
            },
            Err(failure) => Err(failure),
        }
    }

    /// The pod template of the pod's owner, where it has one.
    ///
    /// # Errors
    /// As classified; an owner that is gone is no failure.
    pub(crate) async fn template(&self, pod: &Pod) -> Result<Option<PodSpec>, Failure> {
        let Some(owner) = controller(pod) else {
            return Ok(None);
        };
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), namespace, &owner.resource);
        match within_deadline(api.get(&owner.name)).await {
            Ok(object) if object.metadata.uid.as_deref() == Some(&owner.uid) => {
                let spec = object.data["spec"]["template"]["spec"].clone();
                Ok(serde_json::from_value(spec).ok())
            }
            Ok(_) | Err(Failure::Gone) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// The pods without a claim, of one namespace or of all: one page of them.
    ///
    /// # Errors
    /// As classified.
    pub(crate) async fn unclaimed(
        &self,
        namespace: Option<&str>,
        next: Option<&str>,
    ) -> Result<Page, Failure> {
        let params = ListParams {
            label_selector: Some(format!("!{BOOST_KEY}")),
            limit: Some(SCAN_PAGE),
            continue_token: next.map(str::to_owned),
            ..ListParams::default()
        };
        let list = within_deadline(async {
            // kube's own type keeps `managedFields`, which are most of a page.
            let list = Request::new(Pod::url_path(&(), namespace)).list_metadata(&params);
            let list = list.map_err(kube::Error::BuildRequest)?;
            self.client.request::<ObjectList<PodMetadata>>(list).await
        });
        let list = list.await?;
        let next = list.metadata.continue_.filter(|token| !token.is_empty());
        let pods = list.items.into_iter().map(|item| item.metadata);
        Ok(Page {
            pods: pods.collect(),
            next,
        })
    }

    fn pods(&self, pod: &Pod) -> Api<Pod> {
        Api::namespaced(
            self.client.clone(),
            pod.metadata.namespace.as_deref().unwrap_or_default(),
        )
    }
}

/// A resize that has been tried and would change nothing else.
#[derive(Debug)]
pub(crate) struct Checked;

/// A page of pods' metadata.
pub(crate) struct Page {
    pub(crate) pods: Vec<ObjectMeta>,
    pub(crate) next: Option<String>,
}

struct Owner {
    resource: ApiResource,
    name: String,
    uid: String,
}

/// The controller of a pod, where it is of a kind that has a pod template and that we may read.
fn controller(pod: &Pod) -> Option<Owner> {
    let mut owners = pod.metadata.owner_references.iter().flatten();
    let owner = owners.find(|owner| owner.controller == Some(true))?;
    let (group, version) = owner.api_version.split_once('/')?;
    match (group, owner.kind.as_str()) {
        ("apps", "ReplicaSet" | "StatefulSet" | "DaemonSet") | ("batch", "Job") => {}
        _ => return None,
    }
    let kind = GroupVersionKind::gvk(group, version, &owner.kind);
    let plural = format!("{}s", owner.kind.to_lowercase());
    Some(Owner {
        resource: ApiResource::from_gvk_with_plural(&kind, &plural),
        name: owner.name.clone(),
        uid: owner.uid.clone(),
    })
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

fn params() -> PatchParams {
    PatchParams {
        field_manager: Some("headstart".to_owned()),
        ..PatchParams::default()
    }
}

async fn within_deadline<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, Failure> {
    match timeout(DEADLINE, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) => {
            let seconds = status
                .details
                .as_ref()
                .map_or(0, |details| details.retry_after_seconds);
            let retry_after = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
            Err(Failure::from_status(
                status.code,
                &status.message,
                retry_after,
            ))
        }
        Ok(Err(error)) => Err(Failure::Transient(Chain(&error).to_string())),
        Err(_) => Err(Failure::Transient(format!("no answer within {DEADLINE:?}"))),
    }
}
