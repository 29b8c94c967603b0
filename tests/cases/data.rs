//! The cases as they stand in `a.yaml` to `f.yaml`: types that accept nothing unknown.
//!
//! The data says what goes in and what is right, never how it is tested: each layer reads what concerns it. The short
//! notation in the texts (`app 250m/500m`, `+50`, `resize app 250m/500m`) is explained in [`crate::notation`].

use std::{collections::BTreeMap, fmt, fs, marker::PhantomData, path::Path, str::FromStr};

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Deserializer, de};
use serde_json::Value;

/// All cases, by id.
#[derive(Debug, Default)]
pub struct Cases(BTreeMap<Id, Case>);

/// A case's id: `B12` is the twelfth row of group B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id {
    /// The group.
    pub group: char,
    /// The row.
    pub row: u32,
}

/// Where a case is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layer {
    /// Values in, values out.
    Pure,
    /// A scripted API server that answers as told.
    Scripted,
    /// A real API server, where needed with something that plays kubelet.
    Cluster,
}

/// One row: what it demands, and exactly the inputs and outcomes that it speaks of.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Case {
    /// The layers that must execute it.
    pub layers: Vec<Layer>,
    /// Layers that execute it although nobody demands it.
    #[serde(default)]
    pub also: Vec<Layer>,
    /// Layers that will have to execute it, or the rest of it.
    #[serde(default)]
    pub later: Vec<Layer>,
    /// What the inputs don't say by themselves.
    #[serde(default)]
    pub about: Option<String>,
    /// A percentage of a quantity.
    #[serde(default)]
    pub percent: Option<Percent>,
    /// Spellings of one quantity.
    #[serde(default)]
    pub equal: Vec<String>,
    /// Pods that are created.
    #[serde(default)]
    pub admit: Many<Admit>,
    /// Bodies that are posted to the webhook.
    #[serde(default)]
    pub post: Many<Post>,
    /// Boosts that are applied.
    #[serde(default)]
    pub apply: Many<Apply>,
    /// Cases whose refused boosts are refused as boosts of the cluster too.
    #[serde(default)]
    pub refusals_of: Vec<Id>,
    /// Boosts that were stored before our definition was there.
    #[serde(default)]
    pub stored: Many<Stored>,
    /// Pods that are created while many boosts end.
    #[serde(default)]
    pub storm: Option<Storm>,
    /// Lives of boosted pods.
    #[serde(default)]
    pub end: Many<Life>,
    /// What upstream's reader makes of our record.
    #[serde(default)]
    pub upstream: Option<Upstream>,
    /// Starts of the process.
    #[serde(default)]
    pub start: Many<Start>,
    /// What the webhook's registration must say, beside all else.
    #[serde(default)]
    pub registration: Option<Value>,
}

/// `of` raised by so many percent.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Percent {
    /// The quantity, as it is written in the pod.
    pub of: String,
    /// Percent.
    pub by: u64,
    /// The right answer.
    pub gives: String,
    /// Whether the answer may be spelled otherwise.
    #[serde(default)]
    pub any_spelling: bool,
    /// Whether no node is known, so that nothing is clamped.
    #[serde(default)]
    pub unclamped: bool,
}

/// A pod that is created, and the right answer.
///
/// The pod is named `p`, in namespace `ns`, with the label `app: a`. The boost is named `b`, in `ns`, and selects
/// `app: a`. The review arrives at 09:59:58. There is one node, with 64 CPUs, and the namespace has no LimitRange, no
/// ResourceQuota and no labels.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Admit {
    /// What this variant is about.
    pub about: Option<String>,
    /// The pod's containers.
    pub pod: Option<String>,
    /// What else there is in the pod; null removes, lists of named things are merged by name.
    pub merge: Option<Value>,
    /// The whole pod. Where `pod` is given too, both mean the same.
    pub object: Option<Value>,
    /// The pod as the right answer of that case left it.
    pub as_answered: Option<Id>,
    /// Our label, as the pod comes with it.
    pub label: Option<String>,
    /// Our annotation, as the pod comes with it.
    pub annotation: Option<String>,
    /// The container policies of boost `b`.
    pub boost: Option<String>,
    /// When `b`'s boosts end; `Ready` unless said.
    pub until: Option<String>,
    /// What else there is in `b`.
    pub boost_merge: Option<Value>,
    /// The whole boost `b`. Where `boost` is given too, both mean the same.
    pub boost_object: Option<Value>,
    /// All boosts, where `b` is not enough.
    pub boosts: Vec<NamedBoost>,
    /// `REMOVE_LIMITS`.
    #[serde(rename = "RL")]
    pub remove_limits: Option<bool>,
    /// Flags that are not at their defaults.
    pub flags: BTreeMap<String, String>,
    /// Whether the request is a dry run.
    pub dry_run: bool,
    /// Whether the caches have not been read yet.
    pub unsynced: bool,
    /// The namespace, by its real name; `ns` unless said.
    pub namespace: Option<String>,
    /// The namespace's labels.
    pub namespace_labels: BTreeMap<String, String>,
    /// Entries of the namespace's LimitRange.
    pub limit_ranges: Vec<Value>,
    /// The pod's containers as its manifest says, where the LimitRange adds to them before the webhook is asked.
    pub manifest: Option<String>,
    /// The namespace's ResourceQuotas.
    pub quotas: Vec<QuotaNote>,
    /// All nodes.
    pub nodes: Option<Vec<NodeNote>>,
    /// The CPU that pods have left free on the only node.
    pub free: Option<String>,
    /// Whether an API server does not call the webhook for it. The answer is for a call all the same.
    pub uncalled: bool,

    /// The right answer: the values, `untouched` or `unmarked`.
    pub answer: String,
    /// Why it is not boosted; `none` where that counts as no skip. Some reason is counted in any case.
    pub reason: Option<String>,
    /// The boost that wins; `b` unless said.
    pub by: Option<String>,
    /// The record's originals; the pod's values of the boosted containers unless said.
    pub init: Option<String>,
    /// What the record says was set; the values that are not the pod's unless said.
    pub set: Option<String>,
    /// The whole answer, in any order; `RECORD` stands for the record.
    pub patch: Option<Vec<Value>>,
    /// The record, to the byte.
    pub record: Option<String>,
    /// The record's `clamped`.
    pub clamped: BTreeMap<String, String>,
    /// The API server refuses the pod as answered, and the message has all of these texts.
    pub refused: Vec<String>,
    /// The answered pod's quality of service.
    pub class: Option<Class>,
    /// What the metrics count.
    pub counters: Option<String>,
}

/// Quality of service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Class {
    /// Requests and limits are equal.
    Guaranteed,
    /// Something is set.
    Burstable,
    /// Nothing is set.
    BestEffort,
}

/// A ResourceQuota.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuotaNote {
    /// Its name.
    pub name: String,
    /// Its bounds.
    pub hard: BTreeMap<String, String>,
    /// What is used of them.
    pub used: BTreeMap<String, String>,
}

/// A Linux node.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeNote {
    /// What pods can have of it.
    pub cpu: String,
    /// Its kubelet's version; `v1.36.3` unless said.
    #[serde(default)]
    pub kubelet: Option<String>,
    /// Its labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Its taints.
    #[serde(default)]
    pub taints: Vec<Value>,
}

/// A boost beside others.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct NamedBoost {
    /// Its name.
    pub name: String,
    /// `StartupCPUBoost` unless said.
    pub kind: Kind,
    /// Its namespace; `ns` unless said.
    pub namespace: Option<String>,
    /// When it was created.
    pub created: Option<String>,
    /// Its container policies.
    pub boost: String,
    /// When its boosts end; `Ready` unless said.
    pub until: Option<String>,
    /// What else there is in it.
    pub merge: Option<Value>,
    /// The field that makes it invalid.
    pub invalid: Option<String>,
}

/// The kinds of boosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Kind {
    /// For one namespace.
    #[default]
    StartupCPUBoost,
    /// For all that it selects.
    ClusterStartupCPUBoost,
}

/// A request to the webhook's port, and the right answer.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Post {
    /// What this variant is about.
    pub about: Option<String>,
    /// `POST` unless said.
    pub method: Option<String>,
    /// `/mutate-v1-pod` unless said.
    pub path: Option<String>,
    /// `application/json` unless said.
    pub content_type: Option<String>,
    /// The body as text. Where none is given it is the review of that case's pod, or of B1's.
    pub text: Option<String>,
    /// The body in hexadecimal.
    pub hex: Option<String>,
    /// The case whose review is the body.
    pub review_of: Option<Id>,
    /// JSON Patch operations on the review.
    pub edit: Vec<Value>,
    /// Nests this many lists at `/request/object/spec/unknown`.
    pub nested: Option<usize>,
    /// Pads the body with blanks to so many MiB.
    pub mebibytes: Option<usize>,
    /// Whether the length is not announced.
    pub chunked: bool,

    /// The HTTP status.
    pub status: u16,
    /// Whether a text says what is wrong.
    pub with_reason: bool,
    /// The answer to a review.
    pub answer: Option<PostAnswer>,
    /// Whether memory stays as it was.
    pub memory_constant: bool,
}

/// What an answered review says; `allowed` is true and the uid is the request's in all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PostAnswer {
    /// No patch.
    NoPatch,
    /// What is right for the case whose review it was.
    AsTheCase,
}

/// A boost that is applied: B1's with a change.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Apply {
    /// What this variant is about.
    pub about: Option<String>,
    /// `StartupCPUBoost` unless said.
    pub kind: Kind,
    /// What else is in its one container policy; null removes.
    pub policy: Option<Value>,
    /// Replaces its `durationPolicy`.
    pub duration: Option<Value>,
    /// Replaces its `selector`.
    pub selector: Option<Value>,
    /// Any other change; null removes.
    pub merge: Option<Value>,
    /// How strict the server is about unknown fields; `Strict`, as kubectl asks for, unless said.
    pub validation: Option<Validation>,

    /// Refused, and the message names all of these fields.
    pub refused: Vec<String>,
    /// Refused, and the message has all of these texts too.
    pub text: Vec<String>,
    /// Only the schema can tell; what is stored all the same is good enough to be used.
    pub only_schema: bool,
    /// Accepted, and this is what becomes of pods, one after another.
    pub accepted: Option<Vec<Admit>>,
    /// Accepted, and the status becomes this; `GENERATION` stands for `metadata.generation`.
    pub status: Option<Value>,
}

/// A boost `b` that was stored under upstream's definition, and over it ours is installed.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Stored {
    /// What this variant is about.
    pub about: Option<String>,
    /// How it differs from B1's.
    pub change: Apply,
    /// It is Invalid, and the message names this field.
    pub invalid: String,
    /// The boosts beside it.
    pub beside: Vec<NamedBoost>,
    /// What becomes of pods.
    pub pods: Vec<Admit>,
    /// How it is corrected; null removes.
    pub corrected: Option<Value>,
    /// It is Ready then, and this becomes of pods.
    pub then: Vec<Admit>,
}

/// Many pods of the case become Ready at once, and every resize takes that long. Meanwhile pods like them are created
/// elsewhere, and each is answered at once.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Storm {
    /// The pods that become Ready.
    pub ready: u32,
    /// How long a resize takes.
    pub resize_takes: String,
    /// The pods that are created meanwhile.
    pub created: u32,
}

/// `fieldValidation` of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Validation {
    /// Unknown fields are refused.
    Strict,
    /// Unknown fields are dropped.
    Ignore,
}

/// A boosted pod's life, look by look.
///
/// Unless said it is B1's pod: boosted by B1's answer, scheduled at 10:00:00, running, not Ready. What `pod`, `boost`,
/// `until` and `answer` say replaces that of the case that it is the life of.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Life {
    /// What this variant is about.
    pub about: Option<String>,
    /// The case whose pod it is.
    pub of: Option<Id>,
    /// The pod's containers as it was created; where `annotation` is given, as it is now.
    pub pod: Option<String>,
    /// The container policies of `b`.
    pub boost: Option<String>,
    /// When `b`'s boosts end.
    pub until: Option<String>,
    /// `REMOVE_LIMITS`.
    #[serde(rename = "RL")]
    pub remove_limits: Option<bool>,
    /// The values that the pod got.
    pub answer: Option<String>,
    /// The annotation, where it is not what our admission writes.
    pub annotation: Option<String>,
    /// Changes in the record; null removes.
    pub record: Option<Value>,
    /// Flags that are not at their defaults.
    pub flags: BTreeMap<String, String>,
    /// When it was boosted; 09:59:58 unless said.
    pub boosted: Option<String>,
    /// The containers as the template of its owner, a ReplicaSet, has them; unless said it has no owner.
    pub template: Option<String>,
    /// What else there is in the namespace.
    pub beside: Vec<Value>,
    /// The CPU that other pods have left free on the only node.
    pub free: Option<String>,
    /// That many pods live it, each scheduled a second after another, in no order of their names.
    pub pods: Option<u32>,
    /// That many of them are written to at once, at most.
    pub at_once: Option<u32>,
    /// What happens, in order.
    pub looks: Vec<Look>,
}

/// What has changed, and what is to be done about it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Look {
    /// When; as before unless said.
    pub at: Option<String>,
    /// Whether another process looks, which knows nothing of before.
    pub new_leader: bool,

    /// Where the scheduler is: since when it is `scheduled`, `unschedulable 10:00:00`, `gated 10:00:00`, `not yet`.
    pub scheduled: Option<String>,
    /// Since when Ready is True.
    pub ready: Option<String>,
    /// A container that has died and runs again since then; `app unseen`: so fast that the kubelet never said that the pod is
    /// not Ready.
    pub restarted: Option<String>,
    /// The pod's phase.
    pub phase: Option<String>,
    /// Our label: `removed`, or another value.
    pub label: Option<String>,
    /// Our annotation: `removed`, or another value.
    pub annotation: Option<String>,
    /// Changes in the record; null removes.
    pub record: Option<Value>,
    /// Values that somebody else sets by resize.
    pub somebody: Option<String>,
    /// What else is in the body of that resize, and makes no difference.
    pub dropped: Option<Value>,
    /// Any other change of the pod; null removes, lists of named things are merged by name.
    pub merge: Option<Value>,
    /// What becomes of `b`: `deleted`, `until 600s`, `selects app=other`; or of the type of all boosts: `definition
    /// deleted`, `definition installed` with the boosts as they were.
    pub boost: Option<String>,
    /// A boost that is created.
    pub new_boost: Option<NamedBoost>,
    /// The writes of another leader.
    pub meanwhile: Many<String>,
    /// The entries of a LimitRange that is made; none: it is deleted.
    pub limit_ranges: Option<Vec<Value>>,
    /// The ResourceQuotas that are made.
    pub quotas: Vec<QuotaNote>,
    /// That many pods like it are created, and boosted.
    pub more: u32,

    /// What the API server answers to the dry run of a raise.
    pub refuses: Option<String>,

    /// The right decisions, one after another; the writes among them succeed.
    pub then: Many<String>,
    /// What becomes of the last write, where it doesn't succeed: an HTTP status with its text, `lost` (written, but the
    /// answer never comes), `unsent` (the process dies first), `hang` (not written, and no answer) or `reset` (not
    /// written, and the connection breaks).
    pub answered: Option<String>,
    /// `Retry-After` of that answer, in seconds.
    pub retry_after: Option<u64>,
    /// What the metrics call that failure.
    pub failure: Option<String>,
    /// How that write is tried again, until the next look with the same outcome.
    pub retries: Option<Retries>,
    /// How long after the look the first write may come; at once unless said.
    pub within: Option<String>,
    /// Since when it is due.
    pub due: Option<String>,
    /// The bodies of the writes, to the byte.
    pub bodies: Vec<String>,
    /// The resize that is tried with `dryRun=All`, and written no further.
    pub tries: Option<String>,
    /// Whether nobody hears of it: no Event.
    pub silent: bool,
    /// All Events about the pod until then, by reason; what stands after a colon is in the message.
    pub events: Option<Vec<String>>,
    /// The reason for which `b` has the condition `Stuck`; `none` where it has not.
    pub stuck: Option<String>,
    /// The containers of `b` counted as boosted afterwards, in its status and in the metrics.
    pub active: Option<u32>,
    /// All that it has ever boosted, as counted there.
    pub total: Option<u32>,
    /// Lines of the leader's metrics.
    pub metrics: Vec<String>,
    /// What is in no line of them.
    pub no_metrics: Option<String>,
    /// What `kubectl get scb` prints of `b`, by column.
    pub columns: BTreeMap<String, String>,
    /// What is in the output of `kubectl describe pod p`.
    pub described: Vec<String>,
    /// The right answer to a pod like this one that is created now: the values or `untouched`.
    pub admits: Option<String>,
}

impl Look {
    /// Whether it says what people and other programs are told.
    pub const fn tells(&self) -> bool {
        self.events.is_some()
            || self.is_in_status()
            || self.no_metrics.is_some()
            || !self.metrics.is_empty()
    }

    /// Whether some of it is in the boost's status.
    pub const fn is_in_status(&self) -> bool {
        self.stuck.is_some() || self.active.is_some() || self.total.is_some()
    }
}

/// How a write that fails is tried again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Retries {
    /// At most once a minute.
    Slow,
    /// A few times quickly, then as above.
    QuickThenSlow,
    /// After pauses that grow, and stay below a minute.
    Growing,
}

/// What a reader that knows only upstream's fields makes of a record of ours.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Upstream {
    /// The case whose record it reads.
    pub reads: Id,
    /// The state.
    pub state: String,
    /// What it reverts to.
    pub init: String,
}

/// A start of `headstart run`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Start {
    /// Environment.
    pub env: BTreeMap<String, String>,
    /// Flags.
    pub args: Vec<String>,
    /// What it runs with.
    pub runs_with: BTreeMap<String, String>,
    /// It does not start, and says all of this.
    pub refused: Vec<String>,
    /// The version of the API server that it finds; there is none unless said.
    pub api_server: Option<String>,
    /// It starts, and says all of this in one line.
    pub says: Vec<String>,
}

/// One of them, or a list.
#[derive(Clone, Debug)]
pub struct Many<T>(pub Vec<T>);

impl<T> Default for Many<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> std::ops::Deref for Many<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Many<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Visitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> de::Visitor<'de> for Visitor<T> {
            type Value = Vec<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("one entry or a list of entries")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<T>, E> {
                T::deserialize(de::value::StrDeserializer::new(text)).map(|one| vec![one])
            }
            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Vec<T>, A::Error> {
                T::deserialize(de::value::MapAccessDeserializer::new(map)).map(|one| vec![one])
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
                let mut list = Vec::new();
                while let Some(one) = seq.next_element()? {
                    list.push(one);
                }
                Ok(list)
            }
        }
        from.deserialize_any(Visitor(PhantomData)).map(Self)
    }
}

impl Cases {
    /// Reads every `.yaml` of a directory; each holds the cases of the group that it is named after.
    pub fn read(directory: &Path) -> anyhow::Result<Self> {
        let mut cases = BTreeMap::new();
        let files =
            fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))?;
        for file in files {
            let path = file?.path();
            if path.extension().is_none_or(|extension| extension != "yaml") {
                continue;
            }
            let group = path
                .file_stem()
                .map(|stem| stem.to_string_lossy().to_uppercase());
            let text = fs::read_to_string(&path)?;
            let read: BTreeMap<Id, Case> = serde_saphyr::from_str(&text)
                .map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
            for (id, case) in read {
                ensure!(
                    group.as_deref() == Some(&id.group.to_string()),
                    "{id} stands in {}",
                    path.display()
                );
                ensure!(!case.is_empty(), "{id} says nothing");
                cases.insert(id, case);
            }
        }
        Ok(Self(cases))
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Id, &Case)> {
        self.0.iter().map(|(id, case)| (*id, case))
    }

    /// The case of that id.
    pub fn get(&self, id: Id) -> anyhow::Result<&Case> {
        self.0
            .get(&id)
            .with_context(|| format!("there is no case {id}"))
    }
}

impl Case {
    fn is_empty(&self) -> bool {
        self.percent.is_none()
            && self.equal.is_empty()
            && self.admit.is_empty()
            && self.post.is_empty()
            && self.apply.is_empty()
            && self.refusals_of.is_empty()
            && self.stored.is_empty()
            && self.storm.is_none()
            && self.end.is_empty()
            && self.upstream.is_none()
            && self.start.is_empty()
    }

    /// The boosts that are refused as boosts of the cluster: those of the cases that it names.
    pub fn cluster_refusals<'a>(&self, cases: &'a Cases) -> anyhow::Result<Vec<(Id, &'a Apply)>> {
        let mut refusals = Vec::new();
        for id in &self.refusals_of {
            let applied = cases.get(*id)?.apply.iter();
            let refused: Vec<_> = applied.filter(|apply| !apply.refused.is_empty()).collect();
            ensure!(!refused.is_empty(), "{id} refuses nothing");
            refusals.extend(refused.into_iter().map(|apply| (*id, apply)));
        }
        Ok(refusals)
    }

    /// Whether a layer executes it.
    pub fn runs_in(&self, layer: Layer) -> bool {
        self.layers.contains(&layer) || self.also.contains(&layer)
    }
}

impl Kind {
    /// As the API spells it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::StartupCPUBoost => "StartupCPUBoost",
            Self::ClusterStartupCPUBoost => "ClusterStartupCPUBoost",
        }
    }
}

impl Layer {
    /// Its name, which begins the names of its tests.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pure => "pure",
            Self::Scripted => "scripted",
            Self::Cluster => "cluster",
        }
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.group, self.row)
    }
}

impl FromStr for Id {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> anyhow::Result<Self> {
        let mut letters = text.chars();
        match letters.next() {
            Some(group @ 'A'..='Z') => Ok(Self {
                group,
                row: letters
                    .as_str()
                    .parse()
                    .with_context(|| format!("{text:?} is no id"))?,
            }),
            _ => bail!("{text:?} is no id"),
        }
    }
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?
            .parse()
            .map_err(de::Error::custom)
    }
}
