//! What a leader writes: decided by the domain, or by a domain with a fault.

use std::{collections::BTreeMap, sync::Arc};

use chrono::{DateTime, Utc};
use headstart::{
    api::{BOOST_KEY, Pod},
    domain::{
        admission::Settings,
        end::{EndSettings, EndedBy, MONTH_SECONDS},
        patch,
        quantity::MilliCpu,
        raise,
        record::Record,
        revert::{ContainerRevert, Decision, Finish, Leave, Revert, decide, decide_now},
        snapshot::{BoostIndex, Snapshot},
        witness,
    },
};
use serde_json::{Value, json};

use crate::{
    scene::{BOOST, KINDS, LAST, Scene, at, resources},
    server::Stored,
};

/// A fault to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// The program as it is.
    None,
    /// Rule 3: a boost has no deadline.
    NoDeadline,
    /// Rule 3: the boost is finished, then the pod resized.
    FinishFirst,
    /// Rule 3: finished without waiting for the kubelet.
    Unconfirmed,
    /// Rule 3: a raise is resized first, then claimed and recorded.
    RaiseFirst,
    /// Rule 4: every recorded value goes back to its original, whatever it is now.
    AllOriginals,
    /// Rule 4: what to revert is judged when the pod is first seen.
    JudgedFirst,
    /// Rule 5: bodies without `resourceVersion`.
    NoVersion,
    /// Rule 5: bodies without `uid`.
    NoUid,
}

/// What a write is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Purpose {
    Revert,
    Finish,
    /// Claim and record of a raise.
    Claim,
    /// The resize of a raise.
    Raise,
}

impl Purpose {
    /// Whether it goes to `pods/resize`.
    pub(crate) fn is_resize(self) -> bool {
        matches!(self, Self::Revert | Self::Raise)
    }
}

/// A PATCH on its way.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Write {
    pub(crate) purpose: Purpose,
    pub(crate) body: Value,
    /// Uid and version of the copy on which it was decided, which the body may not name.
    pub(crate) decided_on: (u8, u16),
    /// Whether that copy had a record that could be read.
    pub(crate) record_was_read: bool,
}

impl Write {
    /// The values that a resize names, a bit for each.
    pub(crate) fn values(&self, scene: &Scene) -> u8 {
        let mut values = 0;
        for patch in self.body["spec"]["containers"]
            .as_array()
            .into_iter()
            .flatten()
        {
            let index = scene
                .containers
                .iter()
                .position(|it| patch["name"] == it.name);
            for (kind, name) in KINDS.iter().enumerate() {
                if patch["resources"][name]["cpu"].is_string() {
                    values |= 1 << (2 * index.unwrap_or_default() + kind);
                }
            }
        }
        values
    }
}

/// A leader at the moment of a decision.
pub(crate) struct Leader<'a> {
    pub(crate) scene: &'a Scene,
    pub(crate) mutation: Mutation,
    pub(crate) boosts: &'a BoostIndex,
    pub(crate) now: u8,
    /// Its copy of the pod.
    pub(crate) seen: &'a Stored,
    /// What it remembers: an earlier copy. Only in the middle of a raise; a fault may remember more.
    pub(crate) memory: Option<&'a Stored>,
}

impl Leader<'_> {
    /// What it writes now, if anything, and whether it is to remember the copy afterwards.
    pub(crate) fn write(&self) -> Option<(Write, bool)> {
        let raise = self.raise().or_else(|| self.raise_again());
        let (purpose, mut body, remember) = raise.or_else(|| self.end())?;
        let without = match self.mutation {
            Mutation::NoVersion => Some("resourceVersion"),
            Mutation::NoUid => Some("uid"),
            _ => None,
        };
        if let (Some(key), Some(metadata)) = (without, body["metadata"].as_object_mut()) {
            metadata.shift_remove(key);
        }
        let record = self.seen.record.as_deref();
        let record_was_read = record.is_some_and(|text| Record::read(text).is_ok());
        let write = Write {
            purpose,
            body,
            decided_on: (self.seen.uid, self.seen.version),
            record_was_read,
        };
        Some((write, remember))
    }

    /// The two writes of a raise: claim and record with the values as they are, then the resize on the version that this
    /// gave. A leader that has lost its memory in between doesn't go on.
    fn raise(&self) -> Option<(Purpose, Value, bool)> {
        // Where a fault remembers more, a memory is no sign of a raise.
        if matches!(self.mutation, Mutation::FinishFirst | Mutation::JudgedFirst) {
            return None;
        }
        let first = if self.mutation == Mutation::RaiseFirst {
            Purpose::Raise
        } else {
            Purpose::Claim
        };
        // With other values it would be another scene.
        let untouched = self.scene.originals().eq(self.seen.values.iter().copied());
        let unmarked = self.seen.claim.is_none() && self.seen.record.is_none();
        let (purpose, remember) = match self.memory {
            // Later there would be no instant after the half minute that it has.
            None if self.now == LAST => return None,
            None if untouched && unmarked && !self.seen.ghost.raised => (first, true),
            Some(_) if first == Purpose::Claim => (Purpose::Raise, false),
            Some(_) => (Purpose::Claim, false),
            None => return None,
        };
        self.scene
            .missed
            .then(|| (purpose, self.raise_body(purpose), remember))
    }

    /// The same after a restart, as the domain decides.
    fn raise_again(&self) -> Option<(Purpose, Value, bool)> {
        if !self.scene.restarts {
            return None;
        }
        let pod = self.memory.unwrap_or(self.seen).read(self.scene);
        let Decision::Raise(restarted) = self.decide(&pod) else {
            return None;
        };
        let snapshot = Snapshot {
            boosts: Arc::new(self.boosts.clone()),
            ..Snapshot::default()
        };
        let now = at(self.now);
        let raise = raise::again(&snapshot, Settings::default(), &pod, &restarted, now).ok()?;
        let seen = self.seen.read(self.scene);
        let claims_first = self.mutation != Mutation::RaiseFirst;
        let (purpose, body) = if self.memory.is_none() == claims_first {
            (Purpose::Claim, patch::claim(&seen, &raise))
        } else {
            (Purpose::Raise, patch::resize(&seen, &raise.containers))
        };
        Some((purpose, body, self.memory.is_none()))
    }

    fn raise_body(&self, purpose: Purpose) -> Value {
        let (uid, version) = (self.seen.uid.to_string(), self.seen.version.to_string());
        let preconditions = json!({"uid": uid, "resourceVersion": version});
        let mut body = json!({"metadata": preconditions});
        if purpose == Purpose::Claim {
            body["metadata"]["labels"] = json!({BOOST_KEY: BOOST});
            body["metadata"]["annotations"] = json!({BOOST_KEY: self.scene.record(self.now)});
            return body;
        }
        let containers = self.scene.containers.iter().map(
            |container| json!({"name": container.name, "resources": resources(container.boosted)}),
        );
        body["spec"] = json!({"containers": containers.collect::<Vec<_>>()});
        body
    }

    /// The two writes of an end.
    fn end(&self) -> Option<(Purpose, Value, bool)> {
        let now = at(self.now);
        let pod = self.seen.read(self.scene);
        let revert = |revert: &Revert| {
            (
                Purpose::Revert,
                patch::resize(&pod, &revert.containers),
                false,
            )
        };
        let finish = |finish: &Finish| (Purpose::Finish, patch::finish(&pod, finish), false);
        let memory = self.memory.map(|memory| memory.read(self.scene));
        match (self.mutation, self.decide(&pod)) {
            (Mutation::FinishFirst, Decision::Revert(due)) => {
                Some(match ended(&pod, due.due.by, now) {
                    Some(done) => (Purpose::Finish, patch::finish(&pod, &done), true),
                    None => revert(&due),
                })
            }
            (Mutation::FinishFirst, _) if memory.is_some() => match self.decide(&memory?) {
                Decision::Revert(due) => Some(revert(&due)),
                _ => None,
            },
            (Mutation::Unconfirmed, Decision::Watch(_)) => {
                Some(finish(&ended(&pod, EndedBy::Condition, now)?))
            }
            (Mutation::AllOriginals, Decision::Revert(due)) => {
                let containers = self.scene.containers.iter().zip(&pod.spec.containers);
                let containers = containers.map(|(container, now)| ContainerRevert {
                    name: now.name.clone(),
                    init: false,
                    to: headstart::domain::cpu::Cpu {
                        request: container.original[0].map(MilliCpu::new),
                        limit: container.original[1].map(MilliCpu::new),
                    },
                });
                Some(revert(&Revert {
                    containers: containers.collect(),
                    due: due.due,
                }))
            }
            (Mutation::JudgedFirst, Decision::Revert(due)) => {
                let first = memory.unwrap_or_else(|| pod.clone());
                match decide_now(&first, None, EndSettings::default(), now) {
                    Decision::Revert(judged) => Some(revert(&judged)),
                    _ => Some(revert(&due)),
                }
            }
            (_, Decision::Revert(due)) => Some(revert(&due)),
            (_, Decision::Finish(done)) => Some(finish(&done)),
            (
                _,
                Decision::Raise(_) | Decision::Wait(_) | Decision::Watch(_) | Decision::Leave(_),
            ) => None,
        }
    }

    /// As the sweeper decides, with the template of the owner where the record can't be read.
    fn decide(&self, pod: &Pod) -> Decision {
        let mut settings = EndSettings {
            boost_on_restart: self.scene.restarts,
            ..EndSettings::default()
        };
        let mut pod = pod.clone();
        if self.mutation == Mutation::NoDeadline {
            settings.deadline_seconds = MONTH_SECONDS;
            forget_deadline(&mut pod);
        }
        let policy = self.boosts.of_pod(&pod).map(AsRef::as_ref);
        let now = at(self.now);
        let decision = decide(&pod, policy, settings, now);
        let Some(template) = self.scene.template() else {
            return decision;
        };
        if !matches!(decision, Decision::Leave(Leave::Unreadable(_))) {
            return decision;
        }
        match witness::repair(&pod, &template, policy, settings, now) {
            Some(repaired) => decide(&repaired, policy, settings, now),
            None => decision,
        }
    }
}

fn ended(pod: &Pod, by: EndedBy, now: DateTime<Utc>) -> Option<Finish> {
    let record = Record::read(pod.record_text()?).ok()?;
    Some(Finish {
        ended: Some((Box::new(record.ended(by, now)), by)),
        keeps_claim: false,
    })
}

fn forget_deadline(pod: &mut Pod) {
    let annotations: &mut BTreeMap<String, String> =
        pod.metadata.annotations.get_or_insert_default();
    let Some(text) = annotations.get_mut(BOOST_KEY) else {
        return;
    };
    if let Ok(Value::Object(mut record)) = serde_json::from_str(text) {
        if let Some(Value::Object(end)) = record.get_mut("end") {
            end.shift_remove("deadlineSeconds");
        }
        *text = Value::Object(record).to_string();
    }
}
