//! Lives of boosted pods, from their creation to the end of the boost.
//!
//! Beside the real pod goes a model of it, to which everything happens too: what the operator writes, and what is left
//! of the pod, must be what they are in the model.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};
use testbed::{
    eventually,
    rest::{JSON_PATCH, MERGE, STRATEGIC, pods},
};

use super::{
    admit::{FILLER, crowd, placed},
    audit::Write,
    bed::{self, Bed, SOON, boosts, operator},
    compare::{Window, same_pod, same_record, since},
    interloper::{Interloper, Meanwhile, Other},
    rough,
};
use crate::{
    data::{Admit, Cases, Id, Life, Look, Many, Retries},
    notation::{Container, Then, containers, merge, rfc3339, seconds, time},
    told,
    world::{self, BOOSTED, KEY, World, record_text},
};

/// How long a test keeps its turn while it waits for a write.
const AT_HAND: Duration = Duration::from_secs(5);
/// The shortest pause of a slow retry.
const SLOW: TimeDelta = TimeDelta::seconds(60);
/// So much of a story's time may really have to pass.
const STORY: TimeDelta = TimeDelta::seconds(60);
/// So many tries may be quick.
const QUICK: usize = 10;
/// So many tries show that pauses grow.
const GROWN: usize = 6;
/// By then nobody waits for an answer any more.
const GIVEN_UP: Duration = Duration::from_secs(20);

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
    /// When the write that is refused was tried, and how it is tried again.
    tries: Vec<DateTime<Utc>>,
    retries: Option<Retries>,
    /// The operator's role as it was, where a right was taken from it.
    role: Option<Value>,
    /// The definition of boosts, where it was deleted.
    definition: Option<Value>,
    /// How many pods like it there are.
    others: u32,
    /// Where the pods are that have filled the node.
    crowd: Option<String>,
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
            tries: Vec::new(),
            retries: None,
            role: None,
            definition: None,
            others: 0,
            crowd: None,
            began: Utc::now(),
        };
        bed.namespace(place).await?;
        if let Some(free) = &life.free {
            real.crowd = Some(crowd(bed, place, free).await?);
        }
        for object in &life.beside {
            let mut object = object.clone();
            object["metadata"]["namespace"] = json!(place);
            bed.cluster.plane.apply(&object.to_string()).await?;
        }
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
        if self.crowd.is_some() {
            self.bed.unschedulable(self.place, "p").await?;
        } else {
            self.bed.running(self.place, "p").await?;
        }
        match &self.life.record {
            Some(change) => self.change_record(change).await,
            None => Ok(()),
        }
    }

    /// Creates another pod like it, which is boosted too.
    async fn create_another(&mut self) -> anyhow::Result<()> {
        self.bed.boosts_are_seen().await?;
        self.bed.replicas_are_asked().await?;
        self.others += 1;
        let mut sent = self.sent.clone();
        sent["metadata"]["name"] = json!(format!("p-{}", self.others));
        let boosts = world::boosts(&self.admit)?;
        let expected = world::answered(self.cases, &self.admit, &boosts, time(BOOSTED)?)?;
        let created = self.bed.create(self.place, "", &sent).await?.accepted()?;
        same_pod(&created, &expected, &[("timestamp", since(self.began))])
    }

    /// A pod like it that would be created now gets these values.
    async fn is_admitted(&self, answer: &str) -> anyhow::Result<()> {
        let admit = Admit {
            answer: answer.to_owned(),
            ..self.admit.clone()
        };
        let boosts = world::boosts(&admit)?;
        let expected = world::answered(self.cases, &admit, &boosts, time(BOOSTED)?)?;
        let mut sent = self.sent.clone();
        sent["metadata"]["name"] = json!("q");
        eventually("a pod is admitted so", SOON, || async {
            let created = self.bed.create(self.place, "?dryRun=All", &sent).await?;
            let times = [("timestamp", since(self.began))];
            same_pod(&created.accepted()?, &expected, &times)
        })
        .await
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
        if let Some(role) = self.role.take() {
            rough::give_right(self.bed, &role).await?;
        }
        let made = std::mem::take(&mut self.made);
        ensure!(
            made || look.meanwhile.is_empty(),
            "another leader writes when this one does"
        );
        let interloper = self.interloper(look, next).await?;
        // Where the pod was made anew, the operator may have ended its boost already.
        let began = if self.answered.is_empty() {
            Utc::now()
        } else {
            self.began
        };
        if look.new_leader {
            // Those that were there see nothing of what is new.
            self.bed.crash_replicas()?;
        }
        if !made {
            self.enact(look).await?;
        }
        if look.new_leader {
            self.bed.start_replica().await?;
        }
        self.model.change(look)?;
        for _ in 0..look.more {
            self.create_another().await?;
        }
        if let Some(resize) = &look.tries {
            self.is_tried(resize, began).await?;
        }
        for (index, text) in look.then.iter().enumerate() {
            let is_last = index + 1 == look.then.len();
            let answered = look.answered.as_deref().filter(|_| is_last);
            let alternatives = Then::read(text)?;
            if alternatives == [Then::Forget] {
                self.is_forgotten(look).await?;
                continue;
            }
            if let (Some("reset"), Some((interloper, _))) = (answered, &interloper) {
                // Nothing is noted of a write during which the API server dies. More may be cut until the interloper goes.
                interloper.has_met().await?;
                rough::restart_api_server(self.bed).await?;
                continue;
            }
            let came = self.comes(&alternatives, answered, look, began).await;
            came.with_context(|| match self.writes() {
                Ok(writes) => format!("expected: {text}; all writes: {writes:#?}"),
                Err(error) => format!("expected: {text}; {error:#}"),
            })?;
        }
        if look.then.last().is_none_or(|then| then != "forget") {
            self.is_told(look, &self.uid).await?;
        }
        self.is_printed(look).await?;
        if let Some(answer) = &look.admits {
            self.is_admitted(answer).await?;
        }
        if let Some((interloper, makes_next)) = interloper {
            interloper.end().await?;
            self.made = makes_next && next.is_some();
        }
        Ok(())
    }

    /// Who makes the API server answer as a look says, and whether that makes the next look's changes. Nobody is needed
    /// where what precedes the look makes it answer so.
    async fn interloper(
        &mut self,
        look: &Look,
        next: Option<&Look>,
    ) -> anyhow::Result<Option<(Interloper, bool)>> {
        let Some(answered) = &look.answered else {
            return Ok(None);
        };
        answered.clone_into(&mut self.answered);
        (self.retries, self.tries) = (look.retries, Vec::new());
        let Some(meanwhile) = self.meanwhile(look, next)? else {
            return Ok(None);
        };
        let makes_next = !matches!(meanwhile, Meanwhile::Refused(..) | Meanwhile::Slow(_));
        let interloper = Interloper::start(self.bed, self.place, meanwhile).await?;
        Ok(Some((interloper, makes_next)))
    }

    /// Compares the next write, where there must be one; where there may be none, waits until it would have come.
    async fn comes(
        &mut self,
        alternatives: &[Then],
        answered: Option<&str>,
        look: &Look,
        began: DateTime<Utc>,
    ) -> anyhow::Result<()> {
        let is_write = |then: &Then| {
            matches!(
                then,
                Then::Resize(_) | Then::Finish(_) | Then::DropClaim | Then::Claim(_) | Then::GiveUp
            )
        };
        let patience = self.patience(look)?;
        let write = if alternatives.iter().all(is_write) {
            Some(self.next_write(patience).await?)
        } else {
            self.bed.leader_has_seen().await?;
            self.writes()?.into_iter().nth(self.compared)
        };
        let Some(mut write) = write else {
            return Ok(());
        };
        // The kubelet writes to the pod too (409), and an interloper that leaves may still be asked (500). Neither is a
        // fault of the operator's, where the look that follows does better. What is refused may have been tried again.
        while answered.is_none() && self.may_fail(&write) {
            self.compared += 1;
            self.note_try(&write)?;
            write = self.next_write(patience).await?;
        }
        self.note_try(&write)?;
        // A pod that was boosted before we came may be ended before anything happens.
        ensure!(
            write.received >= began || self.life.annotation.is_some(),
            "the operator wrote before that, at {}",
            write.received
        );
        let fits = |then: &&Then| match then {
            Then::Resize(_) => write.is_resize,
            then => is_write(then) && !write.is_resize,
        };
        let then = alternatives
            .iter()
            .find(fits)
            .context("the operator wrote something else")?;
        let mut wanted = match then {
            Then::Resize(containers) => self.model.resize_body(containers),
            Then::Claim(values) => self.model.claim_body(values)?,
            Then::GiveUp => self.model.give_up_body()?,
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
        // Where the right to write is missing, nobody reads the body.
        if !answered.is_some_and(is_missing_right) {
            let time = match then {
                Then::Claim(_) => "timestamp",
                _ => "endedTimestamp",
            };
            self.same_body(&write.body, &wanted, (time, since(began)))?;
            if let Some(record) = record_text(&write.body) {
                // With the real time in it.
                wanted["metadata"]["annotations"][KEY] = json!(record);
            }
        }
        let code = match answered {
            None => 200,
            // Whatever nobody waits for any more.
            Some(answered) if is_cut(answered) && write.code != 200 => write.code,
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
            (Some(answered), _) if self.retries.is_some() => {
                if !is_cut(answered) {
                    self.says(&write, answered)?;
                }
                if self.retries == Some(Retries::Growing) {
                    self.pauses_grow(&wanted, began).await?;
                }
            }
            (Some(_), _) => self.model.written(),
            (None, Then::Resize(_)) => self.model.resize(&wanted),
            (None, _) => self.model.finish(&wanted),
        }
        Ok(())
    }

    /// How long a write may take.
    fn patience(&self, look: &Look) -> anyhow::Result<Duration> {
        let within = look.within.as_deref().map_or(Ok(0), seconds)?;
        let story = self.model.now - time("10:00:00")?;
        let story = story.clamp(TimeDelta::zero(), STORY).to_std()?;
        Ok(SOON + story.max(Duration::from_secs(within)))
    }

    /// Whether a write that is not answered as it should be in the end is no fault.
    fn may_fail(&self, write: &Write) -> bool {
        let is_retried = self.retries.is_some();
        let is_same = || write.code.to_string() == status_of(&self.answered);
        [409, 500].contains(&write.code)
            || is_retried && write.code != 200 && (is_cut(&self.answered) || is_same())
    }

    /// Waits for more tries of a write; each is like the first, and the pauses grow.
    async fn pauses_grow(&mut self, wanted: &Value, began: DateTime<Utc>) -> anyhow::Result<()> {
        while self.tries.len() < GROWN {
            let write = self.next_write(SOON).await?;
            // What failed has changed nothing, so the next may be for the same version.
            self.version = Value::Null;
            self.same_body(&write.body, wanted, ("endedTimestamp", since(began)))?;
            ensure!(self.may_fail(&write), "it is {write:?}");
            self.note_try(&write)?;
            self.compared += 1;
        }
        let pauses: Vec<TimeDelta> = self
            .tries
            .windows(2)
            .map(|pair| pair[1] - pair[0])
            .collect();
        // How long a try takes is in them, so that not each must be longer than the one before.
        ensure!(
            pauses.last() > pauses.first() && pauses.iter().all(|pause| *pause < SLOW),
            "the pauses are {pauses:?}"
        );
        Ok(())
    }

    /// Compares the pauses between the tries of a write that is refused.
    fn note_try(&mut self, write: &Write) -> anyhow::Result<()> {
        let Some(retries) = self.retries else {
            return Ok(());
        };
        let pause = self.tries.last().map(|last| write.received - *last);
        self.tries.push(write.received);
        match (retries, pause) {
            (Retries::Slow, Some(pause)) => ensure!(pause >= SLOW, "tried again after {pause}"),
            (Retries::QuickThenSlow, Some(pause)) if pause < SLOW => {
                ensure!(self.tries.len() <= QUICK, "too many quick tries");
            }
            _ => {}
        }
        if write.code < 300 {
            self.retries = None;
        }
        // Nothing says that the pod must have changed.
        self.version = Value::Null;
        Ok(())
    }

    /// Compares what the API server said with the data, where the operator and the namespace have other names.
    fn says(&self, write: &Write, answered: &str) -> anyhow::Result<()> {
        let (_, text) = answered.split_once(' ').context("code and text")?;
        let text = text
            .replace("\"u\"", &format!("{:?}", operator()))
            .replace("\"ns\"", &format!("{:?}", self.place));
        ensure!(
            write.message.contains(&text),
            "the API server says {:?}, expected {text:?}",
            write.message
        );
        Ok(())
    }

    /// The operator tries a resize with a dry run.
    async fn is_tried(&mut self, resize: &str, began: DateTime<Utc>) -> anyhow::Result<()> {
        let [Then::Resize(containers)] = &Then::read(resize)?[..] else {
            bail!("{resize:?} is no resize");
        };
        let tried = eventually("the operator tries", SOON, || async {
            let mut tries = self.bed.audit.tries(self.place, "p")?;
            tries.retain(|tried| tried.received >= began);
            tries
                .into_iter()
                .next()
                .context("no dry run is in the audit log")
        })
        .await?;
        // The policy under which we may touch nothing but CPU notices the defaults too.
        let is_tried = [200, 403].contains(&tried.code);
        ensure!(is_tried && tried.is_resize, "it is {tried:?}");
        let wanted = self.model.resize_body(containers);
        self.same_body(&tried.body, &wanted, ("endedTimestamp", since(began)))?;
        self.version = Value::Null;
        Ok(())
    }

    /// What people and other programs are told.
    async fn is_told(&self, look: &Look, uid: &str) -> anyhow::Result<()> {
        if !look.tells() {
            return Ok(());
        }
        let bed = self.bed;
        eventually("people are told", SOON, || async {
            if let Some(right) = &look.events {
                let path = format!("/apis/events.k8s.io/v1/namespaces/{}/events", self.place);
                let events = bed.api.get(&path).await?.accepted()?;
                let events = events["items"].as_array().context("a list")?;
                told::same_events(events, uid, right)?;
            }
            if look.is_in_status() {
                let b = bed.api.get(&format!("{}/b", boosts(self.place))).await?;
                told::same_status(&b.accepted()?, look)?;
            }
            told::same_metrics(&bed.leader_metrics().await?, self.place, look)
        })
        .await
    }

    /// What kubectl prints.
    async fn is_printed(&self, look: &Look) -> anyhow::Result<()> {
        let plane = &self.bed.cluster.plane;
        if !look.columns.is_empty() {
            eventually("kubectl prints the boost", SOON, || async {
                let printed = plane
                    .kubectl_ok(&["get", "scb", "b", "-n", self.place])
                    .await?;
                told::same_columns(&printed, &look.columns)
            })
            .await?;
        }
        if !look.described.is_empty() {
            eventually("kubectl describes the pod", SOON, || async {
                let described = plane
                    .kubectl_ok(&["describe", "pod", "p", "-n", self.place])
                    .await?;
                for part in &look.described {
                    ensure!(described.contains(part), "{part:?} is not in\n{described}");
                }
                Ok(())
            })
            .await?;
        }
        Ok(())
    }

    /// Compares two bodies: containers in any order, the pod by what it really is.
    fn same_body(
        &mut self,
        got: &Value,
        wanted: &Value,
        time: (&str, Window),
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
            same_record(got, wanted, &[time])?;
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
            let events = self.bed.api.get(&path).await?.accepted()?;
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
        self.is_told(look, &old).await?;
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
        let refused = self.bed.api.patch(&path, STRATEGIC, &body).await?;
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

    /// What happens while the operator writes, so that the API server answers as a look says.
    fn meanwhile(&mut self, look: &Look, next: Option<&Look>) -> anyhow::Result<Option<Meanwhile>> {
        let answered = self.answered.as_str();
        if is_made_anew(answered) {
            return Ok(Some(Meanwhile::Remade(self.sent.clone())));
        }
        if is_cut(answered) {
            return Ok(Some(Meanwhile::Slow(GIVEN_UP)));
        }
        if let Some((_, text)) = answered.split_once("denied the request: ") {
            let code = status_of(answered).parse()?;
            return Ok(Some(Meanwhile::Refused(code, text.to_owned())));
        }
        if let Some((code, text)) = answered
            .split_once(' ')
            .filter(|(code, _)| code.starts_with('5'))
        {
            return Ok(Some(Meanwhile::Refused(code.parse()?, text.to_owned())));
        }
        if status_of(answered) != "409" {
            ensure!(
                look.merge.is_some()
                    || look.limit_ranges.is_some()
                    || self.life.record.is_some()
                    || is_missing_right(answered),
                "{answered:?}: nothing makes a real API server answer so"
            );
            return Ok(None);
        }
        let Some(next) = next else {
            bail!("what comes of the conflict?");
        };
        if !next.meanwhile.is_empty() {
            let writes = next.meanwhile.iter().map(|text| other(text));
            return Ok(Some(Meanwhile::Written(writes.collect::<Result<_, _>>()?)));
        }
        if let Some(values) = next.somebody.as_deref() {
            return Ok(Some(Meanwhile::Resized(resize_of(&containers(values)?))));
        }
        let change = json!({"metadata": {"annotations": {"other": "annotation"}}});
        merge(&mut self.model.pod, &change);
        Ok(Some(Meanwhile::Annotated(change)))
    }

    /// Makes the changes that precede a look.
    async fn enact(&mut self, look: &Look) -> anyhow::Result<()> {
        ensure!(
            look.scheduled.is_none() || self.crowd.is_some(),
            "the stand-in for the scheduler does as it likes"
        );
        let (node, place) = (&self.bed.cluster.node, self.place);
        if let Some(entries) = &look.limit_ranges {
            self.bed.limit(place, entries).await?;
        }
        if !look.quotas.is_empty() {
            let quotas = world::quotas(&look.quotas);
            self.bed.hold_to(place, &quotas).await?;
        }
        if let Some(change) = &look.record {
            self.change_record(change).await?;
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
            self.bed
                .api
                .patch(&path, STRATEGIC, &body)
                .await?
                .accepted()?;
        }
        match (note_of(look), &look.merge) {
            (Some((key, value)), Some(change)) => {
                let annotated = json!({"metadata": {"annotations": {key: value}}});
                self.edit(&annotated).await?;
                merge(&mut self.model.pod, &annotated);
                if value == IGNORE {
                    self.change_pod(change).await?;
                }
                self.comes_about(change).await?;
            }
            (None, Some(change)) => self.change_pod(change).await?,
            (_, None) => {}
        }
        match look.boost.as_deref() {
            None => {}
            Some("definition deleted") => {
                self.definition = Some(rough::delete_definition(self.bed).await?);
            }
            Some("definition installed") => {
                let definition = self.definition.take().context("it is there")?;
                rough::install_definition(self.bed, &definition).await?;
                let boosts = world::boosts(&self.admit)?;
                self.bed.make_boosts(place, &boosts).await?;
            }
            Some(change) => self.change_boost(change, look).await?,
        }
        if look.answered.as_deref().is_some_and(is_missing_right) {
            self.role = Some(rough::take_right(self.bed).await?);
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
        if let Some(container) = &look.restarted {
            self.another_second().await?;
            node.restart_container(place, "p", container).await?;
        }
        // What makes the boost due comes last.
        if look.ready.is_some() {
            node.set_ready(place, "p", true).await?;
        }
        if let Some(phase) = &look.phase {
            node.set_phase(place, "p", phase).await?;
        }
        Ok(())
    }

    /// Waits for a second that is not the record's: conditions have no finer times, and one that changed in the second of the
    /// boost may have changed before it.
    async fn another_second(&self) -> anyhow::Result<()> {
        let pod = self.pod().await?;
        let record: Value = serde_json::from_str(record_text(&pod).unwrap_or("{}"))?;
        let text = record["timestamp"].as_str().unwrap_or_default();
        let boosted = text.parse::<DateTime<Utc>>().unwrap_or_default();
        eventually("a second has begun since the boost", SOON, || async {
            ensure!(Utc::now().timestamp() > boosted.timestamp());
            Ok(())
        })
        .await
    }

    /// Changes the real pod's record.
    async fn change_record(&self, change: &Value) -> anyhow::Result<()> {
        let change = world::changed_record(&self.pod().await?, change)?;
        self.edit(&change).await.map(drop)
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
            self.bed.api.put(&path, &pod).await?.accepted()
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
            self.bed.api.delete(&path).await?.accepted()?;
        } else {
            let mut model = self.model.clone();
            model.change(&Look {
                boost: look.boost.clone(),
                ..Look::default()
            })?;
            let b = model.boosts.iter().find(|boost| boost.name == "b");
            let changed = &b.context("there is no b")?.object;
            // Without a version: the operator may write its status meanwhile.
            let set = |field: &str| json!({"op": "add", "path": format!("/{field}"), "value": changed[field]});
            let body = json!([set("selector"), set("spec")]);
            self.bed
                .api
                .patch(&path, JSON_PATCH, &body)
                .await?
                .accepted()?;
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
        same_pod(&self.pod().await?, &self.model.pod, &ended).context("at the end")?;
        if let Some(crowd) = &self.crowd {
            let scheduled = self.bed.running(self.place, "p").await;
            scheduled.context("it is not scheduled")?;
            self.bed.remove(crowd, FILLER).await?;
        }
        // Nobody starts them again.
        for replica in self.bed.replicas() {
            replica.operator.process().check()?;
        }
        Ok(())
    }

    async fn pod(&self) -> anyhow::Result<Value> {
        self.bed.api.get(&self.path).await?.accepted()
    }

    /// A change of the pod by somebody who may do everything.
    async fn edit(&self, change: &Value) -> anyhow::Result<Value> {
        let done = self.bed.api.patch(&self.path, MERGE, change).await?;
        done.accepted()
    }

    fn writes(&self) -> anyhow::Result<Vec<Write>> {
        self.bed.audit.writes(self.place, "p")
    }

    async fn next_write(&self, patience: Duration) -> anyhow::Result<Write> {
        let find = || async {
            let write = self.writes()?.into_iter().nth(self.compared);
            write.context("nothing is in the audit log")
        };
        match eventually("the operator writes", AT_HAND, find).await {
            Ok(write) => Ok(write),
            Err(_) => bed::aside(eventually("the operator writes", patience, find)).await?,
        }
    }
}

/// What the stand-in for the kubelet does with resizes that it is not to see.
const IGNORE: &str = "ignore";

/// A write of another leader's.
fn other(text: &str) -> anyhow::Result<Other> {
    match &Then::read(text)?[..] {
        [Then::Resize(containers)] => Ok(Other::Resize(resize_of(containers))),
        [Then::Finish(Some(by))] => Ok(Other::Finish(by.clone())),
        _ => bail!("{text:?} is no write"),
    }
}

/// Whether a life does to its cluster what would disturb others.
pub fn is_rough(life: &Life) -> bool {
    let is_rough = |look: &Look| {
        let redefined = look.boost.as_deref();
        look.new_leader
            || redefined.is_some_and(|change| change.starts_with("definition"))
            || look.answered.as_deref() == Some("reset")
            || look.answered.as_deref().is_some_and(is_missing_right)
    };
    life.free.is_some() || life.looks.iter().any(is_rough)
}

/// Whether a write never gets an answer.
fn is_cut(answered: &str) -> bool {
    matches!(answered, "hang" | "reset")
}

/// Whether a write is answered so because our account lacks a right.
fn is_missing_right(answered: &str) -> bool {
    answered.contains("cannot patch resource")
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
    if let Some(resources) = reported_resources(change) {
        let does = if resources.is_null() {
            IGNORE
        } else {
            "actuate"
        };
        return Some(("testbed/resize", does.to_owned()));
    }
    let after = match change.get("status")?.get("observedGeneration")?.as_i64()? {
        1 => "never",
        _ => "0ms",
    };
    Some(("testbed/actuate-after", after.to_owned()))
}

/// What the kubelet reports of a container's resources, in a change of a pod.
fn reported_resources(change: &Value) -> Option<&Value> {
    let statuses = change.get("status")?.get("containerStatuses")?.as_array()?;
    statuses.iter().find_map(|status| status.get("resources"))
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
