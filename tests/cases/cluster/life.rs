//! Lives of boosted pods, from their creation to the end of the boost.
//!
//! Beside the real pod goes a model of it, to which everything happens too: what the operator writes, and what is left
//! of the pod, must be what they are in the model.

use anyhow::{Context, ensure};
use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use testbed::eventually;

use super::{
    admit::placed,
    audit::Write,
    bed::{Bed, MERGE, SOON, STRATEGIC, boosts, pods},
    compare::{same_pod, same_record, since},
    interloper::{Interloper, Meanwhile},
};
use crate::{
    data::{Admit, Cases, Id, Life, Look, Many},
    notation::{Container, Then, containers, merge, rfc3339, time},
    world::{self, BOOSTED, KEY, World, record_text},
};

/// Lets a pod live and compares all that is written to it, and what is left.
pub async fn check(
    bed: &'static Bed,
    cases: &Cases,
    id: Id,
    place: &str,
    life: &Life,
) -> anyhow::Result<()> {
    let mut real = Real::begin(bed, cases, id, place, life).await?;
    for (index, look) in life.looks.iter().enumerate() {
        let next = life.looks.get(index + 1);
        let at = look.at.as_deref().unwrap_or("then");
        real.look(look, next)
            .await
            .with_context(|| format!("look {} ({at})", index + 1))?;
    }
    real.end().await
}

/// A pod on the cluster, and its model.
struct Real<'a> {
    bed: &'static Bed,
    cases: &'a Cases,
    id: Id,
    life: &'a Life,
    place: &'a str,
    /// Where the pod is.
    path: String,
    /// Its creation.
    admit: Admit,
    /// The pod as it is sent.
    sent: Value,
    model: World,
    uid: String,
    /// Writes that have been compared, and the pod's version in the last of them.
    compared: usize,
    version: Value,
    /// Whether the changes of the next look have been made.
    made: bool,
    /// How the last write that did not succeed is answered.
    answered: String,
    began: DateTime<Utc>,
}

impl<'a> Real<'a> {
    async fn begin(
        bed: &'static Bed,
        cases: &'a Cases,
        id: Id,
        place: &'a str,
        life: &'a Life,
    ) -> anyhow::Result<Self> {
        let admit = world::admitted(cases, id, life)?;
        let mut real = Self {
            bed,
            cases,
            id,
            life,
            place,
            path: format!("{}/p", pods(place)),
            sent: placed(world::sent(cases, &admit)?, place),
            admit,
            model: World::begin(cases, id, life)?,
            uid: String::new(),
            compared: 0,
            version: Value::Null,
            made: false,
            answered: String::new(),
            began: Utc::now(),
        };
        bed.namespace(place).await?;
        let boosts = world::boosts(&real.admit)?;
        let until = real.admit.until.as_deref().unwrap_or_default();
        if until.contains("container Started") {
            add_startup_probes(&mut real.sent);
        }
        if let Some(annotation) = &life.annotation {
            // Admission believes no record that it can't check: the marks come later, from somebody who may.
            bed.create(place, "", &real.sent).await?.accepted()?;
            bed.running(place, "p").await?;
            bed.make_boosts(place, &boosts).await?;
            bed.boosts_are_seen().await?;
            let marks = json!({"labels": {KEY: "b"}, "annotations": {KEY: annotation}});
            // The pod as it is with the marks: the operator may be quicker than a look.
            let marked = real.edit(&json!({"metadata": marks})).await?;
            real.meet(&marked)?;
        } else {
            bed.make_boosts(place, &boosts).await?;
            bed.boosts_are_seen().await?;
            real.create().await?;
            let created = real.pod().await?;
            real.meet(&created)?;
        }
        Ok(real)
    }

    /// Creates the pod, which is boosted as it should be.
    async fn create(&mut self) -> anyhow::Result<()> {
        let boosts = world::boosts(&self.admit)?;
        let mut expected = world::answered(self.cases, &self.admit, &boosts, time(BOOSTED)?)?;
        let note = self.life.looks.iter().find_map(note_of);
        if let Some((key, value)) = note {
            let note = json!({"metadata": {"annotations": {key: value}}});
            for pod in [&mut self.sent, &mut expected, &mut self.model.pod] {
                merge(pod, &note);
            }
        }
        let created = self.bed.create(self.place, "", &self.sent).await?;
        same_pod(
            &created.accepted()?,
            &expected,
            &[("timestamp", since(self.began))],
        )?;
        self.bed.running(self.place, "p").await?;
        if let Some(change) = &self.life.record {
            let pod = self.pod().await?;
            let mut record: Value = serde_json::from_str(record_text(&pod).unwrap_or_default())?;
            merge(&mut record, change);
            let marks = json!({"annotations": {KEY: record.to_string()}});
            self.edit(&json!({"metadata": marks})).await?;
        }
        Ok(())
    }

    /// Learns what only the real pod can tell: who it is, and when it was boosted.
    fn meet(&mut self, pod: &Value) -> anyhow::Result<()> {
        let uid = pod["metadata"]["uid"].as_str().context("a uid")?;
        uid.clone_into(&mut self.uid);
        let record = record_text(pod).context("the pod has no record")?;
        let annotations = json!({KEY: record});
        let expected = record_text(&self.model.pod).context("the model has no record")?;
        same_record(record, expected, &[("timestamp", since(self.began))]).or_else(|error| {
            match self.life.annotation {
                // Upstream's timestamps are as old as the data says.
                Some(_) => same_record(record, expected, &[]),
                None => Err(error),
            }
        })?;
        merge(
            &mut self.model.pod,
            &json!({"metadata": {"annotations": annotations}}),
        );
        Ok(())
    }

    /// Lets happen what precedes a look, and compares what comes of it.
    async fn look(&mut self, look: &Look, next: Option<&Look>) -> anyhow::Result<()> {
        ensure!(
            !look.new_leader && look.meanwhile.is_empty(),
            "the replicas are shared: none of them can be told what to do"
        );
        let interloper = match &look.answered {
            None => None,
            Some(answered) => {
                answered.clone_into(&mut self.answered);
                let meanwhile = self.meanwhile(answered, next)?;
                Some(Interloper::start(self.bed, self.place, meanwhile).await?)
            }
        };
        // Where the pod was made anew, the operator may have ended its boost already.
        let began = if self.answered.is_empty() {
            Utc::now()
        } else {
            self.began
        };
        if !std::mem::take(&mut self.made) {
            self.enact(look).await?;
        }
        self.model.change(look)?;
        for (index, text) in look.then.iter().enumerate() {
            let is_last = index + 1 == look.then.len();
            let answered = look.answered.as_deref().filter(|_| is_last);
            let alternatives = Then::read(text)?;
            if alternatives == [Then::Forget] {
                self.is_forgotten(look).await?;
                continue;
            }
            let came = self.comes(&alternatives, answered, began).await;
            came.with_context(|| match self.writes() {
                Ok(writes) => format!("expected: {text}; all writes: {writes:#?}"),
                Err(error) => format!("expected: {text}; {error:#}"),
            })?;
        }
        if let Some(interloper) = interloper {
            interloper.end().await?;
            self.made = next.is_some();
        }
        Ok(())
    }

    /// Compares the next write, where there must be one; where there may be none, waits until it would have come.
    async fn comes(
        &mut self,
        alternatives: &[Then],
        answered: Option<&str>,
        began: DateTime<Utc>,
    ) -> anyhow::Result<()> {
        let is_write =
            |then: &Then| matches!(then, Then::Resize(_) | Then::Finish(_) | Then::DropClaim);
        let write = if alternatives.iter().all(is_write) {
            Some(self.next_write().await?)
        } else {
            self.bed.leader_has_seen().await?;
            self.writes()?.into_iter().nth(self.compared)
        };
        let Some(mut write) = write else {
            return Ok(());
        };
        // The kubelet writes to the pod too (409), and an interloper that leaves may still be asked (500). Neither is a
        // fault of the operator's, where the look that follows does better.
        while answered.is_none() && [409, 500].contains(&write.code) {
            self.compared += 1;
            write = self.next_write().await?;
        }
        let fits = |then: &&Then| match then {
            Then::Resize(_) => write.is_resize,
            then => is_write(then) && !write.is_resize,
        };
        let then = alternatives
            .iter()
            .find(fits)
            .context("the operator wrote something else")?;
        let wanted = match then {
            Then::Resize(containers) => self.model.resize_body(containers),
            Then::Finish(by) => {
                let ended = record_text(&write.body)
                    .and_then(|text| serde_json::from_str::<Value>(text).ok());
                let ended = ended.unwrap_or_default()["endedBy"].clone();
                // Where the case doesn't say by what, any will do.
                let by = by.as_deref().or(ended.as_str()).unwrap_or_default();
                self.model.finish_body(by)?
            }
            _ => self.model.drop_claim_body(),
        };
        self.same_body(&write.body, &wanted, began)?;
        let code = match answered {
            None => 200,
            // It compares the version first, and does not get to the uid.
            Some(answered) if is_made_anew(answered) => 409,
            Some(answered) => status_of(answered).parse()?,
        };
        ensure!(
            write.code == code,
            "it was answered with {}, expected {code}",
            write.code
        );
        self.compared += 1;
        match (answered, then) {
            (Some(_), _) => self.model.written(),
            (None, Then::Resize(_)) => self.model.resize(&wanted),
            (None, _) => self.model.finish(&wanted),
        }
        Ok(())
    }

    /// Compares two bodies: containers in any order, the pod by what it really is.
    fn same_body(
        &mut self,
        got: &Value,
        wanted: &Value,
        began: DateTime<Utc>,
    ) -> anyhow::Result<()> {
        let (mut got, mut wanted) = (got.clone(), wanted.clone());
        let metadata = &got["metadata"];
        ensure!(
            metadata["uid"] == *self.uid,
            "the body is not for {}: {got}",
            self.uid
        );
        let version = metadata["resourceVersion"].clone();
        ensure!(
            version.as_str().is_some_and(|version| !version.is_empty()),
            "the body is for no version: {got}"
        );
        ensure!(
            version != self.version,
            "written again without another look: {got}"
        );
        self.version = version;
        if let (Some(got), Some(wanted)) = (record_text(&got), record_text(&wanted)) {
            same_record(got, wanted, &[("endedTimestamp", since(began))])?;
        }
        for body in [&mut got, &mut wanted] {
            merge(
                &mut body["metadata"],
                &json!({"uid": null, "resourceVersion": null}),
            );
            if record_text(body).is_some() {
                body["metadata"]["annotations"][KEY] = json!("RECORD");
            }
            for list in ["containers", "initContainers"] {
                let list = body.get_mut("spec").and_then(|spec| spec.get_mut(list));
                if let Some(list) = list.and_then(Value::as_array_mut) {
                    list.sort_by_key(|container| container["name"].to_string());
                }
            }
        }
        ensure!(got == wanted, "the body is\n{got}\nexpected\n{wanted}");
        Ok(())
    }

    /// The pod has been made anew: the old one is forgotten, the new one not written to, but looked at for itself.
    async fn is_forgotten(&mut self, look: &Look) -> anyhow::Result<()> {
        let old = self.uid.clone();
        self.bed.leader_has_seen().await?;
        let writes = self.writes()?;
        ensure!(
            writes.len() == self.compared,
            "written all the same: {writes:?}"
        );
        if look.silent {
            let path = format!("/api/v1/namespaces/{}/events", self.place);
            let events = self.bed.get(&path).await?.accepted()?;
            let about = events["items"]
                .as_array()
                .into_iter()
                .flatten()
                .find(|event| event["involvedObject"]["uid"] == *old);
            ensure!(about.is_none(), "there is an Event: {about:?}");
        }
        self.model = World::begin(self.cases, self.id, self.life)?;
        let anew = self.pod().await?;
        self.meet(&anew)?;
        ensure!(self.uid != old, "the pod was not made anew");
        self.is_immutable(&old).await?;
        same_pod(&self.pod().await?, &self.model.pod, &[])?;
        self.bed.running(self.place, "p").await?;
        let first = self.life.looks.first().context("there is a first look")?;
        let resize = first.then.first().context("it resizes")?.clone();
        let own = Look {
            at: first.at.clone(),
            ready: first.ready.clone(),
            then: Many(vec![resize, "finish(Condition)".to_owned()]),
            ..Look::default()
        };
        self.made = false;
        Box::pin(self.look(&own, None)).await
    }

    /// A write for the old pod that names no version is answered as the case says.
    async fn is_immutable(&self, old: &str) -> anyhow::Result<()> {
        let path = format!("{}/resize?dryRun=All", self.path);
        let body = json!({"metadata": {"uid": old}});
        let refused = self.bed.patch(&path, STRATEGIC, &body).await?;
        let got = format!("{} {}", refused.code, refused.body["message"]);
        let (code, text) = self.answered.split_once(' ').context("code and text")?;
        let (_, text) = text.split_once(": ").context("the text names the pod")?;
        let text = text.replace("\"U\"", &format!("\\\"{old}\\\""));
        ensure!(
            got.starts_with(code) && got.contains(&text),
            "it is answered with {got}, expected {text:?}"
        );
        Ok(())
    }

    /// What makes the API server answer a write so.
    fn meanwhile(&mut self, answered: &str, next: Option<&Look>) -> anyhow::Result<Meanwhile> {
        if is_made_anew(answered) {
            return Ok(Meanwhile::Remade(self.sent.clone()));
        }
        ensure!(
            status_of(answered) == "409",
            "{answered:?}: nothing makes a real API server answer so"
        );
        if let Some(values) = next.and_then(|next| next.somebody.as_deref()) {
            return Ok(Meanwhile::Resized(resize_of(&containers(values)?)));
        }
        let change = json!({"metadata": {"annotations": {"other": "annotation"}}});
        merge(&mut self.model.pod, &change);
        Ok(Meanwhile::Annotated(change))
    }

    /// Makes the changes that precede a look.
    async fn enact(&mut self, look: &Look) -> anyhow::Result<()> {
        ensure!(
            look.scheduled.is_none(),
            "the stand-in for the scheduler does as it likes"
        );
        let (node, place) = (&self.bed.cluster.node, self.place);
        if look.ready.is_some() {
            node.set_ready(place, "p", true).await?;
        }
        if let Some(phase) = &look.phase {
            node.set_phase(place, "p", phase).await?;
        }
        for (map, mark) in [("labels", &look.label), ("annotations", &look.annotation)] {
            if let Some(mark) = mark {
                let mark = Some(mark).filter(|mark| *mark != "removed");
                self.edit(&json!({"metadata": {map: {KEY: mark}}})).await?;
            }
        }
        if let Some(values) = &look.somebody {
            let mut body = resize_of(&containers(values)?);
            let dropped = look.dropped.clone().unwrap_or(json!({}));
            merge(&mut body, &dropped);
            let path = format!("{}/resize", self.path);
            self.bed.patch(&path, STRATEGIC, &body).await?.accepted()?;
        }
        match (note_of(look), &look.merge) {
            (Some((key, value)), Some(change)) => {
                let annotated = json!({"metadata": {"annotations": {key: value}}});
                self.edit(&annotated).await?;
                merge(&mut self.model.pod, &annotated);
                self.comes_about(change).await?;
            }
            (None, Some(change)) => self.change_pod(change).await?,
            (_, None) => {}
        }
        if let Some(change) = &look.boost {
            self.change_boost(change, look).await?;
        }
        if let Some(boost) = &look.new_boost {
            let mut model = self.model.clone();
            let known = model.boosts.len();
            model.change(&Look {
                new_boost: Some(boost.clone()),
                ..Look::default()
            })?;
            self.bed.make_boosts(place, &model.boosts[known..]).await?;
            self.bed.boosts_are_seen().await?;
        }
        Ok(())
    }

    /// Merges a change into the pod; its times are now.
    async fn change_pod(&self, change: &Value) -> anyhow::Result<()> {
        if let Some(metadata) = change.get("metadata") {
            let is_mark = |key: &String| matches!(key.as_str(), "labels" | "annotations");
            let fields = metadata.as_object().context("metadata is a map")?;
            ensure!(
                fields.keys().all(is_mark),
                "only the API server sets {metadata}"
            );
            self.edit(&json!({"metadata": metadata})).await?;
        }
        let Some(status) = change.get("status") else {
            return Ok(());
        };
        let mut status = json!({"status": status});
        set_times(&mut status, &rfc3339(Utc::now()));
        let path = format!("{}/status", self.path);
        eventually("the status is written", SOON, || async {
            let mut pod = self.pod().await?;
            merge(&mut pod, &status);
            self.bed.put(&path, &pod).await?.accepted()
        })
        .await?;
        Ok(())
    }

    /// Waits until the stand-in for the kubelet has reported what a look speaks of.
    async fn comes_about(&self, change: &Value) -> anyhow::Result<()> {
        let Some(wanted) = resize_condition(change) else {
            return Ok(());
        };
        eventually("the kubelet reports about the resize", SOON, || async {
            let pod = self.pod().await?;
            let conditions = pod["status"]["conditions"].as_array();
            let reported = conditions
                .into_iter()
                .flatten()
                .find(|condition| condition["type"] == wanted["type"]);
            let got = reported.and_then(|condition| condition["reason"].as_str());
            ensure!(got == wanted["reason"].as_str(), "it reports {got:?}");
            Ok(())
        })
        .await
    }

    async fn change_boost(&self, change: &str, look: &Look) -> anyhow::Result<()> {
        let path = format!("{}/b", boosts(self.place));
        if change == "deleted" {
            self.bed.delete(&path).await?.accepted()?;
        } else {
            let mut model = self.model.clone();
            model.change(&Look {
                boost: look.boost.clone(),
                ..Look::default()
            })?;
            let b = model.boosts.iter().find(|boost| boost.name == "b");
            let changed = &b.context("there is no b")?.object;
            let mut object = self.bed.get(&path).await?.accepted()?;
            for field in ["selector", "spec"] {
                object[field] = changed[field].clone();
            }
            self.bed.put(&path, &object).await?.accepted()?;
        }
        self.bed.boosts_are_seen().await
    }

    /// Compares what is left: nothing more is written.
    async fn end(&self) -> anyhow::Result<()> {
        self.bed.leader_has_seen().await?;
        let writes = self.writes()?;
        ensure!(
            writes.len() == self.compared,
            "more writes than expected: {writes:?}"
        );
        let ended = [("endedTimestamp", since(self.began))];
        same_pod(&self.pod().await?, &self.model.pod, &ended).context("at the end")
    }

    async fn pod(&self) -> anyhow::Result<Value> {
        self.bed.get(&self.path).await?.accepted()
    }

    /// A change of the pod by somebody who may do everything.
    async fn edit(&self, change: &Value) -> anyhow::Result<Value> {
        let done = self.bed.patch(&self.path, MERGE, change).await?;
        done.accepted()
    }

    fn writes(&self) -> anyhow::Result<Vec<Write>> {
        self.bed.audit.writes(self.place, "p")
    }

    async fn next_write(&self) -> anyhow::Result<Write> {
        eventually("the operator writes", SOON, || async {
            let write = self.writes()?.into_iter().nth(self.compared);
            write.context("nothing is in the audit log")
        })
        .await
    }
}

/// Whether a write is answered so because another pod has got the name.
fn is_made_anew(answered: &str) -> bool {
    answered.contains("metadata.uid")
}

/// The status of an answer in the data.
fn status_of(answered: &str) -> &str {
    answered.split(' ').next().unwrap_or_default()
}

/// Somebody's resize: of anything, with no precondition.
fn resize_of(containers: &[Container]) -> Value {
    let mut spec = json!({});
    for container in containers {
        let mut resources = json!({});
        for (kind, cpu) in [
            ("requests", &container.request),
            ("limits", &container.limit),
        ] {
            if let Some(cpu) = cpu {
                resources[kind] = json!({"cpu": cpu});
            }
        }
        let list = container.role.list();
        let entry = json!([{"name": container.name, "resources": resources}]);
        merge(&mut spec, &json!({list: entry}));
    }
    json!({"spec": spec})
}

/// The annotation that makes the stand-in for the kubelet report of a resize what a look says of it.
fn note_of(look: &Look) -> Option<(&'static str, String)> {
    let change = look.merge.as_ref()?;
    if let Some(condition) = resize_condition(change) {
        let reason = condition["reason"].as_str().unwrap_or("actuate");
        return Some(("testbed/resize", reason.to_lowercase()));
    }
    let after = match change.get("status")?.get("observedGeneration")?.as_i64()? {
        1 => "never",
        _ => "0ms",
    };
    Some(("testbed/actuate-after", after.to_owned()))
}

/// The condition of a resize in a change of a pod.
fn resize_condition(change: &Value) -> Option<&Value> {
    let conditions = change.get("status")?.get("conditions")?.as_array()?;
    conditions.iter().find(|condition| {
        ["PodResizePending", "PodResizeInProgress"]
            .iter()
            .any(|kind| condition["type"] == *kind)
    })
}

/// Without a probe a container has started as soon as it runs.
fn add_startup_probes(pod: &mut Value) {
    let containers = pod["spec"]["containers"].as_array_mut();
    for container in containers.into_iter().flatten() {
        container["startupProbe"] = json!({"exec": {"command": ["x"]}});
    }
}

/// Makes all of the data's times now.
fn set_times(value: &mut Value, now: &str) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(|entry| set_times(entry, now)),
        Value::Object(fields) => fields.values_mut().for_each(|entry| set_times(entry, now)),
        Value::String(text) if text.starts_with("2026-12-01T") => now.clone_into(text),
        _ => {}
    }
}
