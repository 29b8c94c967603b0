//! The layer of values: the domain alone, no server.

use std::{collections::BTreeMap, fs, path::Path, sync::Arc};

use anyhow::{Context, bail, ensure};
use chrono::{DateTime, Utc};
use clap::Parser;
use headstart::{
    api::{ClusterStartupCPUBoost, LimitRange, Node, Pod, ResourceQuota, StartupCPUBoost},
    config::AdmissionArgs,
    domain::{
        admission::{self, Admission, Outcome, Settings},
        end::{EndSettings, EndedBy},
        failure::Failure,
        limit_range::LimitRanges,
        nodes::{NodeFacts, Nodes},
        patch,
        policy::Policy,
        qos::{QosClass, qos_class},
        quantity::MilliCpu,
        quota::Quota,
        raise::{self, Raise},
        record::{LoanValue, Record},
        revert::{self, Decision, Leave, Pending},
        snapshot::{BoostIndex, Snapshot},
        witness,
    },
};
use json_patch::Patch;
use libtest_mimic::Trial;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::{
    data::{
        Admit, Apply, Case, Cases, Class, Id, Kind, Layer, Life, Percent, Post, Stored, Upstream,
    },
    notation::{self, Then, rfc3339, time},
    report,
    scripted::{review, starts},
    world::{self, BOOSTED, Boost, World, record_text},
};

/// One test for each case.
pub fn trials(cases: &'static Cases) -> Vec<Trial> {
    cases
        .iter()
        .filter(|(_, case)| case.runs_in(Layer::Pure))
        .map(|(id, case)| report::trial(Layer::Pure, id, move || run(cases, id, case)))
        .collect()
}

/// Executes all parts of a case that speak of values.
fn run(cases: &Cases, id: Id, case: &Case) -> anyhow::Result<()> {
    let mut parts = 0;
    let mut part = |what: &str, about: Option<&String>, result: anyhow::Result<()>| {
        parts += 1;
        let about = about.map_or(String::new(), |about| format!(" ({about})"));
        result.with_context(|| format!("{what}{about}"))
    };
    if let Some(percent) = &case.percent {
        part("percent", None, check_percent(cases, percent))?;
    }
    if !case.equal.is_empty() {
        part("equal", None, check_equal(cases, &case.equal))?;
    }
    for admit in case.admit.iter() {
        let boosts = world::boosts(admit)?;
        let checked = if admit.unsynced {
            check_unsynced(cases, admit, &boosts)
        } else {
            check_admit(cases, admit, &boosts)
        };
        part("admit", admit.about.as_ref(), checked)?;
    }
    for post in case.post.iter() {
        part("post", post.about.as_ref(), check_post(cases, post))?;
    }
    for apply in case.apply.iter() {
        part("apply", apply.about.as_ref(), check_apply(cases, apply))?;
    }
    for (id, apply) in case.cluster_refusals(cases)? {
        let boost = Boost::applied_as(Kind::ClusterStartupCPUBoost, apply)?;
        let about = apply.about.as_deref().unwrap_or_default();
        let about = Some(format!("{id} {about}"));
        part("apply", about.as_ref(), check_refused(apply, &boost))?;
    }
    for stored in case.stored.iter() {
        part("stored", stored.about.as_ref(), check_stored(cases, stored))?;
    }
    for life in case.end.iter() {
        part("end", life.about.as_ref(), check_life(cases, id, life))?;
    }
    for start in case.start.iter() {
        part("start", None, starts::check_reading(start))?;
    }
    if let Some(upstream) = &case.upstream {
        part("upstream", None, check_upstream(cases, upstream))?;
    }
    if let Some(registration) = &case.registration {
        part("registration", None, check_registration(registration))?;
    }
    ensure!(parts > 0, "nothing of this case is about values");
    Ok(())
}

/// The quantity itself, and the values of a pod that is created with it.
fn check_percent(cases: &Cases, percent: &Percent) -> anyhow::Result<()> {
    let of: MilliCpu = percent.of.parse()?;
    let got = of.increased_by(percent.by);
    ensure!(
        got == percent.gives.parse()?,
        "got {got}, expected {}",
        percent.gives
    );
    ensure!(
        percent.any_spelling || got.to_string() == percent.gives,
        "{} is spelled {got}",
        percent.gives
    );
    let admit = Admit {
        pod: Some(format!("app {0}/{0}", percent.of)),
        boost: Some(format!("+{}", percent.by)),
        answer: format!("{0}/{0}", percent.gives),
        init: Some(format!("{of}/{of}")),
        nodes: percent.unclamped.then(Vec::new),
        ..Admit::default()
    };
    check_admit(cases, &admit, &world::boosts(&admit)?)
}

/// No difference may be seen between spellings: not in a pod, in a boost, or in a record.
fn check_equal(cases: &Cases, spellings: &[String]) -> anyhow::Result<()> {
    let canonical = spellings[0].parse::<MilliCpu>()?.to_string();
    for spelling in spellings {
        let cpu: MilliCpu = spelling.parse()?;
        ensure!(
            cpu.to_string() == canonical,
            "{spelling} is {cpu}, not {canonical}"
        );
        let in_pod = Admit {
            pod: Some(format!("app {spelling}/{spelling}")),
            boost: Some("+100".to_owned()),
            answer: "1400m/1400m".to_owned(),
            init: Some(format!("{canonical}/{canonical}")),
            ..Admit::default()
        };
        let in_boost = Admit {
            pod: Some("app 100m/100m".to_owned()),
            boost: Some(format!("fix {spelling}/{spelling}")),
            answer: format!("{canonical}/{canonical}"),
            ..Admit::default()
        };
        // Equal is no change, however it is spelled.
        let in_both = Admit {
            pod: Some(format!("app {spelling}/-")),
            boost: Some(format!("fix {canonical}")),
            answer: "untouched".to_owned(),
            ..Admit::default()
        };
        for admit in [in_pod, in_boost, in_both] {
            check_admit(cases, &admit, &world::boosts(&admit)?).context(spelling.clone())?;
        }
        let record =
            json!({"initCPURequests": {"app": spelling}, "initCPULimits": {"app": spelling}});
        let record = Record::read(&record.to_string())?;
        let loan = record.containers["app"].clone()?;
        let original = |value: Option<LoanValue>| value.map(|value| value.original);
        ensure!(original(loan.request) == Some(cpu) && original(loan.limit) == Some(cpu));
    }
    Ok(())
}

fn check_admit(cases: &Cases, admit: &Admit, boosts: &[Boost]) -> anyhow::Result<()> {
    let sent = world::sent(cases, admit)?;
    let (at, later) = (time(BOOSTED)?, time(BOOSTED)? + notation::SECOND);
    let (admission, patch, patched) = answer(admit, &sent, boosts.iter(), at)?;
    let expected = world::answered(cases, admit, boosts, at)?;
    same_pod(&patched, &expected)?;
    match (admit.answer.as_str(), admission.outcome) {
        ("untouched" | "unmarked", outcome) => {
            ensure!(outcome != Outcome::Boosted, "counted as boosted");
            match (admit.reason.as_deref(), outcome) {
                (Some("none"), Outcome::Skipped(got)) => bail!("skipped for {got}"),
                (Some(reason), Outcome::Skipped(got)) => {
                    ensure!(got.as_str() == reason, "skipped for {got}");
                }
                (Some("none"), _) | (None, Outcome::Skipped(_)) => {}
                (None, Outcome::NoBoost) if admit.answer == "unmarked" => {}
                (_, outcome) => bail!("{outcome:?} counts no reason"),
            }
        }
        (_, outcome) => ensure!(outcome == Outcome::Boosted, "counted as {outcome:?}"),
    }
    ensure!(
        admit.answer != "unmarked" || !patch.0.is_empty(),
        "there are no marks to remove"
    );
    ensure!(
        admit.answer != "untouched" || patch.0.is_empty(),
        "untouched, but the patch is {}",
        json!(patch)
    );
    if let Some(class) = admit.class {
        let class_of = |pod: &Value| -> anyhow::Result<Class> {
            let pod: Pod = serde_json::from_value(pod.clone())?;
            let values: Vec<_> = pod
                .all_containers()
                .map(headstart::domain::cpu::Cpu::of)
                .collect();
            Ok(match qos_class(&pod, |index| values[index]) {
                QosClass::Guaranteed => Class::Guaranteed,
                QosClass::Burstable => Class::Burstable,
                QosClass::BestEffort => Class::BestEffort,
            })
        };
        let (before, after) = (class_of(&sent)?, class_of(&patched)?);
        ensure!(
            (before, after) == (class, class),
            "{before:?} became {after:?}, expected {class:?}"
        );
    }
    if let Some(record) = &admit.record {
        let got = record_text(&patched).unwrap_or_default();
        ensure!(got == record, "the record is\n{got}\nexpected\n{record}");
    }
    if let Some(expected) = &admit.patch {
        same_patch(&patch, expected, &patched)?;
    }

    // On every replica and every time the same, apart from the time in the record.
    let (_, reversed, _) = answer(admit, &sent, boosts.iter().rev(), at)?;
    ensure!(patch == reversed, "the order of the boosts matters");
    let (_, _, again) = answer(admit, &sent, boosts.iter(), later)?;
    same_pod(&again, &world::answered(cases, admit, boosts, later)?).context("a second later")
}

/// Before the boosts have been read: what the whole answer says.
fn check_unsynced(cases: &Cases, admit: &Admit, boosts: &[Boost]) -> anyhow::Result<()> {
    let sent = world::sent(cases, admit)?;
    let (admitter, _) = review::admitter(admit, None)?;
    let answer = admitter.answer(review::of_pod(&sent, admit.dry_run).to_string().as_bytes())?;
    review::check_answer(cases, admit, boosts, &sent, &answer)?;
    let answer: Value = serde_json::from_slice(&answer)?;
    let skipped = &answer["response"]["auditAnnotations"]["skipped"];
    ensure!(*skipped == json!(admit.reason), "skipped for {skipped}");
    Ok(())
}

/// The answer to a body, or why there is none.
fn check_post(cases: &Cases, post: &Post) -> anyhow::Result<()> {
    for body in review::bodies(cases, post)? {
        let (admitter, _) = review::admitter(body.admit, Some(&body.boosts))?;
        match (post.status, admitter.answer(&body.bytes), post.answer) {
            (400, Err(reason), None) => ensure!(!reason.to_string().is_empty(), "no reason"),
            (200, Ok(answer), Some(expected)) => {
                review::check_post_answer(cases, &body, expected, &answer)?;
            }
            (_, Ok(answer), _) => bail!("answered: {}", String::from_utf8_lossy(&answer)),
            (_, Err(reason), _) => bail!("not answered: {reason}"),
        }
    }
    Ok(())
}

/// The answer to a review, and the pod that it makes. Every operation applies, and changes something.
fn answer<'a>(
    admit: &Admit,
    sent: &Value,
    boosts: impl Iterator<Item = &'a Boost>,
    at: DateTime<Utc>,
) -> anyhow::Result<(Admission, Patch, Value)> {
    let pod: Pod = serde_json::from_value(sent.clone())?;
    let (snapshot, settings) = (snapshot(admit, boosts)?, settings(admit)?);
    let admission = admission::admit(&snapshot, settings, "ns", &pod, at);
    let patch = patch::admission(&pod, &admission);
    let mut patched = sent.clone();
    for operation in &patch.0 {
        let before = patched.clone();
        json_patch::patch(&mut patched, std::slice::from_ref(operation))
            .with_context(|| format!("the patch does not apply: {}", json!(patch)))?;
        ensure!(
            before != patched,
            "an operation changes nothing: {}",
            json!(operation)
        );
    }
    Ok((admission, patch, patched))
}

/// Everything that there is when a pod is created.
pub fn snapshot<'a>(
    admit: &Admit,
    boosts: impl Iterator<Item = &'a Boost>,
) -> anyhow::Result<Snapshot> {
    let ranges: Vec<LimitRange> = read_all(world::limit_ranges(admit))?;
    let quotas: Vec<ResourceQuota> = read_all(world::quotas(&admit.quotas))?;
    let nodes: Vec<Node> = read_all(world::nodes(admit))?;
    let items = ranges.iter().flat_map(|range| &range.spec.limits);
    let quotas: Vec<Quota> = quotas.iter().map(Quota::new).collect();
    let nodes: Vec<NodeFacts> = nodes.iter().map(NodeFacts::new).collect();
    let labels = Arc::new(admit.namespace_labels.clone());
    Ok(Snapshot {
        boosts: Arc::new(index(boosts)?),
        namespaces: Arc::new([("ns".into(), labels)].into()),
        limit_ranges: Arc::new([("ns".into(), LimitRanges::new(items))].into()),
        quotas: Arc::new([("ns".into(), Arc::new(quotas))].into()),
        nodes: Arc::new(Nodes::new(&nodes)),
    })
}

fn read_all<T: DeserializeOwned>(objects: Vec<Value>) -> anyhow::Result<Vec<T>> {
    Ok(serde_json::from_value(objects.into())?)
}

fn index<'a>(boosts: impl Iterator<Item = &'a Boost>) -> anyhow::Result<BoostIndex> {
    let mut policies = Vec::new();
    for boost in boosts {
        match (compile(boost)?, &boost.invalid) {
            (Ok(policy), None) => policies.push((boost.namespace.clone(), Arc::new(policy))),
            // It affects nothing but itself.
            (Err(error), Some(field)) => ensure!(error.contains(field), "{error}"),
            (Ok(_), Some(field)) => bail!("{}: {field} is not refused", boost.name),
            (Err(error), None) => bail!("{}: {error}", boost.name),
        }
    }
    Ok(BoostIndex::new(policies))
}

fn compile(boost: &Boost) -> anyhow::Result<Result<Policy, String>> {
    let (name, object) = (&boost.name, boost.object.clone());
    let compiled = match boost.kind {
        Kind::StartupCPUBoost => {
            let object: StartupCPUBoost = serde_json::from_value(object)?;
            Policy::compile(name, boost.created, &object)
        }
        Kind::ClusterStartupCPUBoost => {
            let object: ClusterStartupCPUBoost = serde_json::from_value(object)?;
            Policy::compile(name, boost.created, &object)
        }
    };
    Ok(compiled.map_err(|error| error.to_string()))
}

/// What the flags of a case say, read as the command line reads them.
pub fn settings(admit: &Admit) -> anyhow::Result<Settings> {
    let mut settings = flags(&admit.flags)?;
    settings.remove_limits |= admit.remove_limits.unwrap_or(false);
    Ok(settings)
}

/// The same of a life.
pub fn flags(flags: &BTreeMap<String, String>) -> anyhow::Result<Settings> {
    #[derive(clap::Parser)]
    struct Flags {
        #[command(flatten)]
        admission: AdmissionArgs,
    }
    let args = flags
        .iter()
        .map(|(flag, value)| format!("--{flag}={value}"));
    let flags = Flags::try_parse_from(std::iter::once("flags".to_owned()).chain(args))?;
    Ok(flags.admission.settings())
}

/// Compares two pods; their records as JSON, which must be compact.
pub fn same_pod(got: &Value, expected: &Value) -> anyhow::Result<()> {
    let comparable = |pod: &Value| -> anyhow::Result<(Value, Option<Value>)> {
        let mut pod = pod.clone();
        let record = record_text(&pod).and_then(|text| serde_json::from_str::<Value>(text).ok());
        if let Some(record) = &record {
            let compact = Some(record.to_string());
            ensure!(
                record_text(&pod) == compact.as_deref(),
                "the record is not compact"
            );
            pod["metadata"]["annotations"][world::KEY] = json!("RECORD");
        }
        Ok((pod, record))
    };
    let (got, expected) = (comparable(got)?, comparable(expected)?);
    ensure!(
        got.0 == expected.0,
        "the pod is\n{}\nexpected\n{}",
        got.0,
        expected.0
    );
    let text = |record: Option<Value>| record.unwrap_or_default().to_string();
    ensure!(
        got.1 == expected.1,
        "the record is\n{}\nexpected\n{}",
        text(got.1),
        text(expected.1)
    );
    Ok(())
}

/// Compares the operations of a patch in any order; `RECORD` stands for the record.
fn same_patch(got: &Patch, expected: &[Value], patched: &Value) -> anyhow::Result<()> {
    let sorted = |operations: Vec<Value>| {
        let mut texts: Vec<String> = operations.iter().map(sorted_text).collect();
        texts.sort();
        texts
    };
    let got = serde_json::from_value::<Vec<Value>>(json!(got))?;
    let record = record_text(patched).unwrap_or_default();
    let expected: Vec<Value> = expected
        .iter()
        .map(|operation| {
            let mut operation = operation.clone();
            let value = &mut operation["value"];
            if *value == "RECORD" {
                *value = json!(record);
            } else if value.get(world::KEY) == Some(&json!("RECORD")) {
                value[world::KEY] = json!(record);
            } else if value.is_null() {
                notation::merge(&mut operation, &json!({"value": null}));
            }
            operation
        })
        .collect();
    let (got, expected) = (sorted(got), sorted(expected));
    ensure!(
        got == expected,
        "the patch is\n{got:#?}\nexpected\n{expected:#?}"
    );
    Ok(())
}

/// An operation as text, its fields in the order of their names.
fn sorted_text(operation: &Value) -> String {
    let fields: BTreeMap<String, Value> =
        serde_json::from_value(operation.clone()).expect("an operation is an object");
    json!(fields).to_string()
}

/// What compiling can tell, which is what saves us from objects that no schema has seen.
fn check_apply(cases: &Cases, apply: &Apply) -> anyhow::Result<()> {
    ensure!(
        apply.refused.is_empty() == apply.accepted.is_some(),
        "is it accepted or refused?"
    );
    let boost = Boost::applied(apply)?;
    let Some(accepted) = &apply.accepted else {
        return check_refused(apply, &boost);
    };
    compile(&boost)?.map_err(anyhow::Error::msg)?;
    for admit in accepted {
        check_admit(cases, admit, std::slice::from_ref(&boost))?;
    }
    Ok(())
}

/// It does not compile, unless only the schema can tell.
fn check_refused(apply: &Apply, boost: &Boost) -> anyhow::Result<()> {
    // Or it can't even be read.
    let Ok(compiled) = compile(boost) else {
        return Ok(());
    };
    match (compiled, apply.only_schema) {
        (Ok(_), true) => Ok(()),
        (Ok(_), false) => bail!("compiled, but is to be refused for {:?}", apply.refused),
        (Err(error), true) => bail!(error),
        (Err(error), false) => {
            for field in &apply.refused {
                ensure!(error.contains(field), "{error:?} does not name {field}");
            }
            Ok(())
        }
    }
}

/// What became of boosts that no schema of ours has seen.
fn check_stored(cases: &Cases, stored: &Stored) -> anyhow::Result<()> {
    let boosts = Boost::stored(stored)?;
    for admit in &stored.pods {
        check_admit(cases, admit, &boosts)?;
    }
    let corrected = Boost::corrected(stored)?;
    for admit in &stored.then {
        check_admit(cases, admit, &corrected).context("corrected")?;
    }
    Ok(())
}

/// Looks at a boosted pod again and again; the writes that are decided are compared and done.
fn check_life(cases: &Cases, id: Id, life: &Life) -> anyhow::Result<()> {
    let mut world = World::begin(cases, id, life)?;
    let settings = flags(&life.flags)?.end;
    let template = life.template.as_deref();
    let (mut failure, mut raise) = (None, None::<Raise>);
    for look in &life.looks {
        world.change(look)?;
        let mut bodies = Vec::new();
        for (index, text) in look.then.iter().enumerate() {
            let is_last = index + 1 == look.then.len();
            let answered = look.answered.as_deref().filter(|_| is_last);
            let alternatives = Then::read(text)?;
            if alternatives == [Then::Forget] {
                ensure!(
                    failure.take() == Some(Failure::Gone),
                    "nothing says that the pod is gone"
                );
                continue;
            }
            if let (Some(raise), [Then::Resize(containers)]) = (raise.take(), &alternatives[..]) {
                let pod: Pod = serde_json::from_value(world.pod.clone())?;
                let wanted = world.resize_body(containers);
                same_body(&patch::resize(&pod, &raise.containers), &wanted)?;
                world.resize(&wanted);
                continue;
            }
            let decision = decide(&world, settings, template)?;
            if let (Decision::Raise(restarted), None) = (&decision, &look.refuses) {
                raise = again(cases, id, life, &world, restarted)?;
            }
            let context = || format!("at {}: {decision:?}, expected: {text}", rfc3339(world.now));
            let matched = alternatives
                .iter()
                .find(|then| is_it(then, &decision))
                .with_context(context)?;
            if let (Some(due), Decision::Revert(revert)) = (&look.due, &decision) {
                ensure!(revert.due.at == time(due)?, "due at {}", revert.due.at);
            }
            let (got, wanted) =
                bodies_of(&world, matched, &decision, raise.as_ref()).with_context(context)?;
            bodies.extend(got.iter().map(ToString::to_string));
            if let Some((got, wanted)) = got.zip(wanted) {
                same_body(&got, &wanted).with_context(context)?;
                let write = |world: &mut World| match matched {
                    Then::Resize(_) => world.resize(&wanted),
                    _ => world.finish(&wanted),
                };
                failure = answer_write(&mut world, answered, write)?;
                if let (Some(failure), Some(name)) = (&failure, &look.failure) {
                    ensure!(failure.as_str() == name, "it is read as {failure:?}");
                }
            }
        }
        if !look.bodies.is_empty() {
            ensure!(
                bodies == look.bodies,
                "the bodies are\n{bodies:#?}\nexpected\n{:#?}",
                look.bodies
            );
        }
    }
    if is_ended(&world.pod) {
        // Nothing is ever written again.
        let decision = decide(&world, settings, template)?;
        ensure!(
            matches!(decision, Decision::Leave(_)),
            "after the end: {decision:?}"
        );
    }
    Ok(())
}

/// What becomes of a write; the failure, if it fails.
fn answer_write(
    world: &mut World,
    answered: Option<&str>,
    write: impl FnOnce(&mut World),
) -> anyhow::Result<Option<Failure>> {
    match answered {
        None => write(world),
        Some("unsent") => {}
        Some("lost") => {
            write(world);
            return Ok(Some(Failure::Transient("timed out".to_owned())));
        }
        Some(cut @ ("hang" | "reset")) => return Ok(Some(Failure::Transient(cut.to_owned()))),
        Some(status) => {
            let (code, message) = status.split_once(' ').unwrap_or((status, ""));
            let failure = Failure::from_status(code.parse()?, message, None);
            if failure == Failure::Conflict {
                world.written();
            }
            return Ok(Some(failure));
        }
    }
    Ok(None)
}

fn is_ended(pod: &Value) -> bool {
    let has_claim = pod["metadata"]["labels"].get(world::KEY).is_some();
    let state = record_text(pod)
        .and_then(|text| serde_json::from_str::<Value>(text).ok())
        .map(|record| record["state"] == "Reverted");
    !has_claim && state == Some(true)
}

/// Decides, where the record can't be read by what the owner's template says.
fn decide(
    world: &World,
    settings: EndSettings,
    template: Option<&str>,
) -> anyhow::Result<Decision> {
    let pod: Pod = serde_json::from_value(world.pod.clone())?;
    let index = index(world.boosts.iter())?;
    let policy = index.of_pod(&pod).map(Arc::as_ref);
    let decision = revert::decide(&pod, policy, settings, world.now);
    let (Decision::Leave(Leave::Unreadable(_)), Some(template)) = (&decision, template) else {
        return Ok(decision);
    };
    let template: Pod = serde_json::from_value(notation::pod(template)?)?;
    let repaired = witness::repair(&pod, &template.spec, policy, settings, world.now);
    let repaired = repaired.context("it can't be repaired")?;
    Ok(revert::decide(&repaired, policy, settings, world.now))
}

/// The boost of containers that have restarted, if there is one.
fn again(
    cases: &Cases,
    id: Id,
    life: &Life,
    world: &World,
    restarted: &[String],
) -> anyhow::Result<Option<Raise>> {
    let admit = world::admitted(cases, id, life)?;
    let pod: Pod = serde_json::from_value(world.pod.clone())?;
    let (snapshot, settings) = (snapshot(&admit, world.boosts.iter())?, settings(&admit)?);
    Ok(raise::again(&snapshot, settings, &pod, restarted, world.now).ok())
}

/// Whether a decision is the expected one; bodies apart.
fn is_it(then: &Then, decision: &Decision) -> bool {
    match (then, decision) {
        (Then::NoWrite, Decision::Wait(_) | Decision::Watch(_) | Decision::Leave(_))
        | (Then::Wait(None), Decision::Wait(_))
        | (Then::Watch(None), Decision::Watch(_))
        | (Then::Leave(None), Decision::Leave(_))
        | (Then::Claim(_) | Then::GiveUp, Decision::Raise(_))
        | (Then::Resize(_), Decision::Revert(_)) => true,
        (Then::Wait(until @ Some(_)), Decision::Wait(at)) => until == at,
        (Then::Finish(by), Decision::Finish(finish)) => match (&finish.ended, by) {
            (Some((_, got)), Some(by)) => got.as_str() == by,
            (ended, _) => ended.is_some(),
        },
        (Then::DropClaim, Decision::Finish(finish)) => finish.ended.is_none(),
        (Then::Watch(Some(why)), Decision::Watch(pending)) => {
            let word = match pending {
                Pending::Kubelet => "Kubelet",
                Pending::Deferred(_) => "Deferred",
                Pending::Infeasible(_) => "Infeasible",
                Pending::Error(_) => "Error",
            };
            word == why
        }
        (Then::Leave(Some(why)), Decision::Leave(leave)) => {
            let word = match leave {
                Leave::NotBoosted => "NotBoosted",
                Leave::Ended => "Ended",
                Leave::Terminating => "Terminating",
                Leave::Unreadable(_) => "Unreadable",
            };
            word == why
        }
        _ => false,
    }
}

/// The body that is written, and the one that is right.
fn bodies_of(
    world: &World,
    then: &Then,
    decision: &Decision,
    raise: Option<&Raise>,
) -> anyhow::Result<(Option<Value>, Option<Value>)> {
    let pod: Pod = serde_json::from_value(world.pod.clone())?;
    let (got, wanted) = match (then, decision) {
        (Then::Resize(containers), Decision::Revert(revert)) => (
            patch::resize(&pod, &revert.containers),
            world.resize_body(containers),
        ),
        (Then::Finish(_), Decision::Finish(finish)) => {
            let by = finish.ended.as_ref().map(|(_, by)| *by);
            let by = by.map_or("", EndedBy::as_str);
            (patch::finish(&pod, finish), world.finish_body(by)?)
        }
        (Then::DropClaim, Decision::Finish(finish)) => {
            (patch::finish(&pod, finish), world.drop_claim_body())
        }
        (Then::Claim(values), _) => {
            let raise = raise.context("it is not boosted again")?;
            (patch::claim(&pod, raise), world.claim_body(values)?)
        }
        (Then::GiveUp, _) => {
            ensure!(raise.is_none(), "it is boosted again: {raise:?}");
            let record = raise::given_up(&pod).context("its record can't be read")?;
            (patch::record(&pod, &record), world.give_up_body()?)
        }
        _ => return Ok((None, None)),
    };
    Ok((Some(got), Some(wanted)))
}

/// Compares two bodies: containers in any order, records as JSON.
pub fn same_body(got: &Value, expected: &Value) -> anyhow::Result<()> {
    let comparable = |body: &Value| {
        let mut body = body.clone();
        for list in ["containers", "initContainers"] {
            if let Some(list) = body
                .get_mut("spec")
                .and_then(|spec| spec.get_mut(list)?.as_array_mut())
            {
                list.sort_by_key(|container| container["name"].to_string());
            }
        }
        if let Some(text) = record_text(&body) {
            let record: Value = serde_json::from_str(text).unwrap_or_default();
            body["metadata"]["annotations"][world::KEY] = record;
        }
        body
    };
    ensure!(
        comparable(got) == comparable(expected),
        "the body is\n{got}\nexpected\n{expected}"
    );
    Ok(())
}

/// The part of a record that upstream's 0.20, HEAD and 0.21 read; they ignore the rest.
#[derive(Deserialize)]
struct UpstreamRecord {
    state: Option<String>,
    timestamp: DateTime<Utc>,
    #[serde(default, rename = "initCPURequests")]
    requests: BTreeMap<String, String>,
    #[serde(default, rename = "initCPULimits")]
    limits: BTreeMap<String, String>,
}

fn check_upstream(cases: &Cases, upstream: &Upstream) -> anyhow::Result<()> {
    let admit = world::first_admit(cases, upstream.reads)?;
    let sent = world::sent(cases, admit)?;
    let at = time(BOOSTED)?;
    let boosts = world::boosts(admit)?;
    let (_, _, patched) = answer(admit, &sent, boosts.iter(), at)?;
    let record: UpstreamRecord = serde_json::from_str(record_text(&patched).context("no record")?)?;
    ensure!(record.state.as_ref() == Some(&upstream.state));
    ensure!(record.timestamp == at);
    let (mut requests, mut limits) = (BTreeMap::new(), BTreeMap::new());
    for container in notation::containers(&upstream.init)? {
        requests.extend(container.request.map(|cpu| (container.name.clone(), cpu)));
        limits.extend(container.limit.map(|cpu| (container.name, cpu)));
    }
    ensure!(
        record.requests == requests && record.limits == limits,
        "it reads {:?} and {:?}",
        record.requests,
        record.limits
    );
    Ok(())
}

/// The webhook's registration in the manifests.
fn check_registration(expected: &Value) -> anyhow::Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/webhook.yaml");
    let manifest: Value = serde_saphyr::from_str(&fs::read_to_string(path)?)?;
    let webhook = &manifest["webhooks"][0];
    let mut with = webhook.clone();
    notation::merge(&mut with, expected);
    ensure!(
        *webhook == with,
        "the registration is\n{webhook}\nexpected in it\n{expected}"
    );
    Ok(())
}
