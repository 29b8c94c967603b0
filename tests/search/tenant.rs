//! What a tenant may do to its pod and its boost where no policy keeps it from it.

use headstart::domain::record::{Record, State};
use serde_json::{Value, json};

use crate::{
    scene::{self, Scene},
    server::{RecordBy, Stored},
};

/// Something that it does to the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Act {
    /// One of [`Scene::resizes`].
    Resize(u8),
    /// Takes the label away.
    DropClaim,
    /// Overwrites it.
    OtherClaim,
    /// Takes the record away.
    DropRecord,
    /// Makes it unreadable.
    RuinRecord,
    /// Writes in it that the boost has ended.
    SayEnded,
    /// Writes in it that the pod had asked for more than the boost has given.
    SayMore,
}

impl Act {
    /// All that may be done to a pod of this scene.
    pub(crate) fn all(scene: &Scene) -> impl Iterator<Item = Self> {
        let resizes = (0..)
            .zip(scene.resizes)
            .map(|(index, _)| Self::Resize(index));
        resizes.chain([
            Self::DropClaim,
            Self::OtherClaim,
            Self::DropRecord,
            Self::RuinRecord,
            Self::SayEnded,
            Self::SayMore,
        ])
    }

    /// The pod afterwards; `None` where nothing comes of it.
    pub(crate) fn on(self, scene: &Scene, pod: &Stored) -> Option<Stored> {
        match self {
            Self::Resize(index) => resize(scene, pod, usize::from(index)),
            Self::DropClaim => pod.change(|pod| pod.claim = None),
            Self::OtherClaim => pod.change(|pod| pod.claim = Some("other".into())),
            Self::DropRecord => write(pod, None, RecordBy::Nobody),
            Self::RuinRecord => write(pod, Some("oops"), RecordBy::Nobody),
            Self::SayEnded => {
                let mut record = record(pod)?;
                record["state"] = "Reverted".into();
                write(pod, Some(&record.to_string()), RecordBy::Tenant)
            }
            Self::SayMore => {
                let mut record = record(pod)?;
                for map in ["initCPURequests", "initCPULimits"] {
                    let values = record.get_mut(map).and_then(Value::as_object_mut);
                    for (_, value) in values.into_iter().flatten() {
                        *value = json!("64");
                    }
                }
                write(pod, Some(&record.to_string()), RecordBy::Tenant)
            }
        }
    }
}

fn resize(scene: &Scene, pod: &Stored, index: usize) -> Option<Stored> {
    let (container, [request, limit]) = scene.resizes[index];
    let resources = scene::resources([request, limit]);
    let name = scene.containers[container].name;
    let body = json!({"spec": {"containers": [{"name": name, "resources": resources}]}});
    let mut after = pod.resize(scene, &body).ok().filter(|after| after != pod)?;
    // Where no boost is in force, nothing is ours.
    let record = pod
        .record
        .as_deref()
        .and_then(|text| Record::read(text).ok());
    let is_active = record.is_some_and(|record| record.state == State::Active);
    for (index, (was, is)) in pod.values.iter().zip(&after.values).enumerate() {
        let bit = 1 << index;
        if was == is {
            continue;
        }
        after.ghost.written &= !bit;
        after.ghost.undone &= !bit;
        after.ghost.theirs &= !bit;
        if !is_active || scene.is_theirs(index, *is) {
            after.ghost.theirs |= bit;
        }
    }
    (after != *pod).then_some(after)
}

fn record(pod: &Stored) -> Option<Value> {
    serde_json::from_str(pod.record.as_ref()?).ok()
}

fn write(pod: &Stored, text: Option<&str>, by: RecordBy) -> Option<Stored> {
    pod.change(|pod| {
        pod.record = text.map(Into::into);
        pod.ghost.record = pod.ghost.record.max(by);
    })
}
