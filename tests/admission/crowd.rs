//! 2,000 odd pods: each is admitted if it would have been without us, and is what the domain says.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use chrono::{DateTime, Utc};
use futures::{StreamExt, TryStreamExt, stream};
use headstart::{
    api::{BOOST_KEY, Pod},
    domain::{
        admission::{Admission, Outcome, Settings, admit},
        patch,
        quantity::MilliCpu,
        reason::Reason,
        snapshot::Snapshot,
    },
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use testbed::{
    Answer, Operator, OperatorOptions, eventually,
    generate::{self, Choices, PRIORITY_CLASS, RUNTIME_CLASS},
};

use crate::{
    bed::{self, Bed, SOON, UNCALLED, bed},
    world::{self, Place},
};

/// Pods of a round.
const PODS: u32 = 1_000;
/// Requests under way at a time.
const AT_ONCE: usize = 8;
/// The seed, unless the environment has another.
const SEED: u64 = 20_261_201;
const DRY_RUN: &str = "?dryRun=All";

/// Runs both rounds.
pub(crate) async fn admit_all() -> Result<()> {
    let seed = match std::env::var("HEADSTART_SEED") {
        Ok(seed) => seed.parse().context("reading HEADSTART_SEED")?,
        Err(_) => SEED,
    };
    println!("HEADSTART_SEED={seed}");
    let mut choices = Choices::seeded(seed);
    let bed = bed().await?;
    let places = world::make(bed, &mut choices).await?;
    classes_are_known(bed).await?;
    let mut report = Report::default();
    for (number, round) in rounds().iter().enumerate() {
        let began = Instant::now();
        round
            .run(bed, &places, &mut choices, number, &mut report)
            .await?;
        println!("round {number}: {:?}", began.elapsed());
    }
    println!("{:#?}", report.seen);
    report.check()?;
    report.is_wide()
}

/// Flags of a replica, and what they mean to the domain.
struct Round {
    flags: &'static [&'static str],
    settings: Settings,
}

fn rounds() -> [Round; 2] {
    [
        Round {
            flags: &[],
            settings: Settings::default(),
        },
        Round {
            flags: &[
                "--remove-limits",
                "--max-boosted-cpu=3",
                "--skip-guaranteed",
            ],
            settings: Settings {
                remove_limits: true,
                max_boosted_cpu: Some(MilliCpu::new(3000)),
                skip_guaranteed: true,
                ..Settings::default()
            },
        },
    ]
}

impl Round {
    /// Starts a replica, which then has read all that is there, and creates pods.
    async fn run(
        &self,
        bed: &Bed,
        places: &[Place],
        choices: &mut Choices,
        number: usize,
        report: &mut Report,
    ) -> Result<()> {
        let (plane, balancer) = (&bed.cluster.plane, &bed.cluster.balancer);
        let mut options = OperatorOptions::new(bed::binary(), format!("round-{number}"));
        let flags = self.flags.iter().map(|flag| (*flag).to_owned());
        options.args.extend(flags);
        let replica = Operator::start(plane, &options).await?;
        balancer.add(replica.backend());
        replica.wait_ready(SOON).await?;
        let crowd = Crowd {
            bed,
            settings: self.settings,
            snapshot: world::snapshot(&bed.client).await?,
        };
        for place in places {
            crowd.place_is_known(place).await?;
        }
        let failed_open = bed.counted(FAILED_OPEN).await?;
        let pods = (0..PODS).map(|index| {
            let turn = usize::try_from(index).expect("it is small") % places.len();
            (&places[turn], pod(choices, &format!("p-{number}-{index}")))
        });
        let pods: Vec<_> = pods.collect();
        let mut answers = stream::iter(&pods)
            .map(|(place, pod)| crowd.meet(place, pod, place.in_earnest))
            .buffer_unordered(AT_ONCE);
        while let Some(met) = answers.try_next().await? {
            report.add(met);
        }
        let failed_open = bed.counted(FAILED_OPEN).await? - failed_open;
        ensure!(failed_open == 0, "{failed_open} calls failed open");
        let refused = bed.counted(REJECTED).await?;
        ensure!(refused == 0, "{refused} pods were refused by the webhook");
        balancer.remove(replica.backend());
        replica.crash()
    }
}

const FAILED_OPEN: &str = "apiserver_admission_webhook_fail_open_count";
const REJECTED: &str = "apiserver_admission_webhook_rejection_count";

/// A pod that no scheduler takes, so that the sweeper leaves it alone.
fn pod(choices: &mut Choices, name: &str) -> Value {
    let mut pod = generate::pod(choices, name);
    pod["spec"]["schedulingGates"] = json!([{"name": "example.com/never"}]);
    pod
}

/// Waits until the API server's plugins know the classes that pods name.
async fn classes_are_known(bed: &Bed) -> Result<()> {
    let place = "classes";
    bed.namespace(place, &json!({UNCALLED: "yes"})).await?;
    let mut pod = probe();
    pod["spec"]["priorityClassName"] = PRIORITY_CLASS.into();
    pod["spec"]["runtimeClassName"] = RUNTIME_CLASS.into();
    eventually("the classes are known", SOON, || async {
        bed.create(place, DRY_RUN, &pod).await?.accepted()
    })
    .await
    .map(drop)
}

/// A pod that asks for little, and is within all bounds.
fn probe() -> Value {
    let resources = json!({"requests": {"cpu": "200m"}, "limits": {"cpu": "200m"}});
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "labels": {"app": "a"}},
        "spec": {"containers": [{"name": "app", "image": "x", "resources": resources}]},
    })
}

// === one pod ===

/// What pods meet.
struct Crowd<'a> {
    bed: &'a Bed,
    settings: Settings,
    snapshot: Snapshot,
}

/// What became of a pod.
struct Met {
    /// In a word.
    outcome: String,
    /// Whether any container was clamped.
    clamped: bool,
    /// What is wrong, if anything is: in a few words, and in all words.
    wrong: Option<(&'static str, String)>,
}

impl Crowd<'_> {
    /// Waits until the API server and the replica know a namespace's bounds and boosts.
    async fn place_is_known(&self, place: &Place) -> Result<()> {
        eventually(&format!("{} is known", place.name), SOON, || async {
            let met = self.meet(place, &probe(), false).await?;
            ensure!(!met.outcome.contains(UNKNOWN), "{}", met.outcome);
            ensure!(met.wrong.is_none(), "{:?}", met.wrong);
            Ok(())
        })
        .await
    }

    /// Creates a pod in a namespace's twin, without us, and then in the namespace.
    async fn meet(&self, place: &Place, pod: &Value, in_earnest: bool) -> Result<Met> {
        let without = self.bed.create(&place.twin, DRY_RUN, pod).await?;
        let query = if in_earnest { "" } else { DRY_RUN };
        let with = self.bed.create(&place.name, query, pod).await?;
        let clue = |what: &str| format!("{what}\n  {pod}\n  in {place:?}");
        // A record that is believed makes its originals what counts, in place of what the API server judged alone.
        let may_differ = !pod["metadata"]["annotations"][BOOST_KEY].is_null();
        match (without.is_accepted(), with.is_accepted()) {
            (true, true) => self.compare(place, without.body, &with.body, clue),
            (false, false) if may_differ => Ok(Met::right("Refused with a record")),
            (false, true) if may_differ => Ok(Met::right("Admitted for its record")),
            (false, false) => Ok(Met::refused(place, &without, &with, clue)),
            (true, false) => Ok(Met::wrong(
                "refused because of us",
                clue(&format!("{}: {}", with.code, with.said())),
            )),
            (false, true) => Ok(Met::wrong(
                "admitted because of us",
                clue(&format!("{}: {}", without.code, without.said())),
            )),
        }
    }

    /// Compares what was created with what the domain makes of the pod as the webhook got it.
    fn compare(
        &self,
        place: &Place,
        got: Value,
        created: &Value,
        clue: impl Fn(&str) -> String,
    ) -> Result<Met> {
        // The webhook's matchConditions leave these out.
        let is_called = got["spec"]["os"]["name"] != "windows";
        let typed = Pod::deserialize(&got)?;
        let at = timestamp(created).unwrap_or_default();
        let admission = admit(&self.snapshot, self.settings, &place.name, &typed, at);
        let mut expected = got;
        if typed.record_text().is_some() {
            // The class of the pod as its owner wrote it, before somebody's boost: the API server's own affair.
            expected["status"]["qosClass"] = created["status"]["qosClass"].clone();
        }
        if is_called {
            json_patch::patch(&mut expected, &patch::admission(&typed, &admission))?;
        }
        let (expected, created) = (comparable(expected), comparable(created.clone()));
        let wrong = (expected != created).then(|| {
            let mut found = Vec::new();
            differences(&expected, &created, "", &mut found);
            ("not what the domain says", clue(&found.join("; ")))
        });
        Ok(Met {
            outcome: outcome(&admission, is_called),
            clamped: is_boosted(&admission) && is_clamped(&admission),
            wrong,
        })
    }
}

impl Met {
    fn right(outcome: &str) -> Self {
        Self {
            outcome: outcome.to_owned(),
            clamped: false,
            wrong: None,
        }
    }

    fn wrong(what: &'static str, details: String) -> Self {
        Self {
            outcome: what.to_owned(),
            clamped: false,
            wrong: Some((what, details)),
        }
    }

    /// A pod that nobody wants must be refused in the same words: no value of ours may be in them.
    fn refused(
        place: &Place,
        without: &Answer,
        with: &Answer,
        clue: impl Fn(&str) -> String,
    ) -> Self {
        // A patch makes the API server read a quantity anew, which may change its notation.
        let words = |said: &str| said.replace("e-3", "m");
        let here = without.said().replace(&place.twin, &place.name);
        if words(&here) != words(with.said()) || without.code != with.code {
            let said = clue(&format!("{here}\n  with us: {}", with.said()));
            return Self::wrong("refused in other words", said);
        }
        let why = [UNKNOWN, "quota", "ratio", "maximum", "minimum"];
        let why = why.into_iter().find(|words| here.contains(words));
        Self::right(&format!(
            "Refused {}: {}",
            with.code,
            why.unwrap_or("other")
        ))
    }
}

/// What the API server says while it does not know a quota.
const UNKNOWN: &str = "status unknown";

/// When a pod's record was made.
fn timestamp(pod: &Value) -> Option<DateTime<Utc>> {
    let record = pod["metadata"]["annotations"][BOOST_KEY].as_str()?;
    let record: Value = serde_json::from_str(record).ok()?;
    record["timestamp"].as_str()?.parse().ok()
}

/// A pod without what is its own in any case, and without empty maps.
fn comparable(mut pod: Value) -> Value {
    let metadata = pod["metadata"].as_object_mut().expect("a pod has metadata");
    for field in [
        "namespace",
        "uid",
        "creationTimestamp",
        "resourceVersion",
        "managedFields",
    ] {
        metadata.shift_remove(field);
    }
    metadata.retain(|_, value| *value != json!({}));
    // They say when a pod was found gated.
    let status = pod["status"].as_object_mut();
    status
        .expect("the API server adds it")
        .shift_remove("conditions");
    for list in ["containers", "initContainers"] {
        for container in pod["spec"][list].as_array_mut().into_iter().flatten() {
            let resources = container["resources"].as_object_mut();
            let resources = resources.expect("the API server writes it out");
            resources.retain(|_, value| *value != json!({}));
        }
    }
    pod
}

/// Writes down where a pod is not as expected.
fn differences(expected: &Value, got: &Value, path: &str, found: &mut Vec<String>) {
    match (expected, got) {
        (Value::Object(expected), Value::Object(got)) => {
            let keys: BTreeSet<_> = expected.keys().chain(got.keys()).collect();
            for key in keys {
                let of = |map: &Map<String, Value>| map.get(key).cloned().unwrap_or_default();
                differences(&of(expected), &of(got), &format!("{path}/{key}"), found);
            }
        }
        (Value::Array(expected), Value::Array(got)) if expected.len() == got.len() => {
            for (index, (expected, got)) in expected.iter().zip(got).enumerate() {
                differences(expected, got, &format!("{path}/{index}"), found);
            }
        }
        _ if expected == got => {}
        _ => found.push(format!("{path} is {got}, expected {expected}")),
    }
}

fn outcome(admission: &Admission, is_called: bool) -> String {
    match admission.outcome {
        _ if !is_called => "Uncalled".to_owned(),
        Outcome::Skipped(reason) => reason.to_string(),
        outcome => format!("{outcome:?}"),
    }
}

fn is_boosted(admission: &Admission) -> bool {
    admission.outcome == Outcome::Boosted
}

fn is_clamped(admission: &Admission) -> bool {
    let mut decisions = admission.containers.iter();
    decisions.any(|decision| decision.clamped.is_some())
}

// === all of them ===

/// What became of the crowd.
#[derive(Default)]
struct Report {
    seen: BTreeMap<String, u32>,
    wrong: BTreeMap<&'static str, Vec<String>>,
}

impl Report {
    fn add(&mut self, met: Met) {
        if met.clamped {
            *self.seen.entry("Boosted, clamped".to_owned()).or_default() += 1;
        }
        *self.seen.entry(met.outcome).or_default() += 1;
        if let Some((what, details)) = met.wrong {
            self.wrong.entry(what).or_default().push(details);
        }
    }

    fn check(&self) -> Result<()> {
        let mut text = String::new();
        for (what, details) in &self.wrong {
            writeln!(text, "{} pods: {what}", details.len())?;
            for details in details.iter().take(3) {
                writeln!(text, "- {details}")?;
            }
        }
        ensure!(text.is_empty(), "{text}");
        Ok(())
    }

    /// Whether the crowd met what there is to meet, as far as it is not rare.
    fn is_wide(&self) -> Result<()> {
        let rare = [Reason::Unsynced, Reason::QoSChange, Reason::Clamped];
        let reasons = Reason::ALL.iter().filter(|reason| !rare.contains(reason));
        let reasons = reasons.map(|reason| reason.as_str());
        let others = [
            "Boosted",
            "Boosted, clamped",
            "NoBoost",
            "Uncalled",
            "Refused 403: quota",
            "Refused 403: maximum",
            "Refused 422: other",
        ];
        let missing = reasons.chain(others);
        let missing: Vec<_> = missing
            .filter(|name| !self.seen.contains_key(*name))
            .collect();
        ensure!(missing.is_empty(), "{missing:?} did not occur");
        Ok(())
    }
}
