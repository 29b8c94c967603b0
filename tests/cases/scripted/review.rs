//! Reviews as the API server posts them, and what their answers must be.

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use arc_swap::ArcSwapOption;
use base64::{Engine, prelude::BASE64_STANDARD};
use chrono::{DateTime, Utc};
use headstart::{admission::Admitter, clock::Clock, domain::snapshot::Snapshot, metrics::Metrics};
use json_patch::PatchOperation;
use serde_json::{Value, json};

use crate::{
    data::{Admit, Cases, Id, Post, PostAnswer},
    notation::time,
    pure,
    world::{self, BOOSTED, Boost},
};

/// The uid of all reviews.
const UID: &str = "705ab4f5-6393-11e8-b7cc-42010a800002";
/// Stands for nested lists until the body is text: a value of that depth could not be built.
const NESTED: &str = "NESTED";

/// An admitter that knows these boosts, or has not read any yet, and what it counts.
pub fn admitter(
    admit: &Admit,
    boosts: Option<&[Boost]>,
) -> anyhow::Result<(Arc<Admitter>, Arc<Metrics>)> {
    let snapshot: Option<Snapshot> = boosts
        .map(|boosts| pure::snapshot(admit, boosts.iter()))
        .transpose()?;
    let at = time(BOOSTED)?;
    let metrics = Arc::<Metrics>::default();
    let admitter = Admitter {
        snapshot: Arc::new(ArcSwapOption::new(snapshot.map(Arc::new))),
        settings: pure::settings(admit)?,
        clock: Clock::new(move || at),
        metrics: metrics.admission.clone(),
        dry_run: false,
    };
    Ok((Arc::new(admitter), metrics))
}

/// The review of a pod that is created in `ns`.
pub fn of_pod(pod: &Value, dry_run: bool) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": UID,
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
            "requestResource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "ns",
            "operation": "CREATE",
            "userInfo": {"username": "system:serviceaccount:kube-system:replicaset-controller"},
            "object": pod,
            "oldObject": null,
            "dryRun": dry_run,
            "options": {"apiVersion": "meta.k8s.io/v1", "kind": "CreateOptions"},
        },
    })
}

/// A body that is posted, and whose review it is.
pub struct Body<'a> {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// The pod of the case as it was sent.
    pub sent: Value,
    /// What is right for that pod.
    pub admit: &'a Admit,
    /// The boosts that there are then.
    pub boosts: Vec<Boost>,
}

/// The bodies of a post: one for each pod of the case whose reviews they are.
pub fn bodies<'a>(cases: &'a Cases, post: &Post) -> anyhow::Result<Vec<Body<'a>>> {
    let b1 = Id { group: 'B', row: 1 };
    let admits = &cases.get(post.review_of.unwrap_or(b1))?.admit;
    ensure!(!admits.is_empty(), "that case creates no pod");
    admits
        .iter()
        .map(|admit| body(cases, post, admit))
        .collect()
}

fn body<'a>(cases: &Cases, post: &Post, admit: &'a Admit) -> anyhow::Result<Body<'a>> {
    let mut review = of_pod(&world::sent(cases, admit)?, admit.dry_run);
    let edit: Vec<PatchOperation> = serde_json::from_value(json!(post.edit))?;
    json_patch::patch(&mut review, &edit).context("the review can't be edited so")?;
    let sent = review
        .pointer("/request/object")
        .cloned()
        .unwrap_or_default();
    if post.nested.is_some() {
        review["request"]["object"]["spec"]["unknown"] = json!(NESTED);
    }
    let bytes = match (&post.text, &post.hex, post.nested) {
        (Some(text), None, None) => text.clone().into_bytes(),
        (None, Some(hex), None) => from_hex(hex)?,
        (None, None, None) => review.to_string().into_bytes(),
        (None, None, Some(depth)) => {
            let nested = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
            let review = review.to_string();
            review
                .replace(&json!(NESTED).to_string(), &nested)
                .into_bytes()
        }
        _ => bail!("which body is it?"),
    };
    Ok(Body {
        bytes,
        sent,
        admit,
        boosts: world::boosts(admit)?,
    })
}

fn from_hex(text: &str) -> anyhow::Result<Vec<u8>> {
    let digits: Vec<u32> = text
        .chars()
        .map(|digit| digit.to_digit(16).context("no hexadecimal digit"))
        .collect::<anyhow::Result<_>>()?;
    let bytes = digits.chunks(2).map(|pair| match pair {
        [high, low] => Ok(u8::try_from(high * 16 + low)?),
        _ => bail!("half a byte"),
    });
    bytes.collect()
}

/// Compares the answer to a posted review with the right one.
pub fn check_post_answer(
    cases: &Cases,
    body: &Body<'_>,
    expected: PostAnswer,
    answer: &[u8],
) -> anyhow::Result<()> {
    match expected {
        PostAnswer::NoPatch => {
            let patched = check_envelope(answer, &body.sent)?;
            ensure!(patched.is_none(), "there is a patch: {}", text(answer));
            Ok(())
        }
        PostAnswer::AsTheCase => check_answer(cases, body.admit, &body.boosts, &body.sent, answer),
    }
}

/// Compares the answer to the review of a pod with what is right for it.
pub fn check_answer(
    cases: &Cases,
    admit: &Admit,
    boosts: &[Boost],
    sent: &Value,
    answer: &[u8],
) -> anyhow::Result<()> {
    check_answer_at(cases, admit, boosts, sent, answer, time(BOOSTED)?)
}

/// The same for an answer that was given at `at`.
pub fn check_answer_at(
    cases: &Cases,
    admit: &Admit,
    boosts: &[Boost],
    sent: &Value,
    answer: &[u8],
    at: DateTime<Utc>,
) -> anyhow::Result<()> {
    let patched = check_envelope(answer, sent)?;
    ensure!(
        patched.is_some() == (admit.answer != "untouched"),
        "is there a patch? {}",
        text(answer)
    );
    let right = world::answered(cases, admit, boosts, at)?;
    pure::same_pod(&patched.unwrap_or_else(|| sent.clone()), &right)
}

/// Checks what holds for every answer, and returns the object as its patch makes it, if there is one.
fn check_envelope(answer: &[u8], sent: &Value) -> anyhow::Result<Option<Value>> {
    let answer: Value = serde_json::from_slice(answer).context("the answer is no JSON")?;
    ensure!(
        answer["apiVersion"] == "admission.k8s.io/v1" && answer["kind"] == "AdmissionReview",
        "the answer is no review: {answer}"
    );
    let response = &answer["response"];
    ensure!(response["allowed"] == true, "it is not allowed: {answer}");
    ensure!(response["uid"] == UID, "another uid: {answer}");
    let Some(patch) = response.get("patch") else {
        ensure!(response.get("patchType").is_none(), "{answer}");
        return Ok(None);
    };
    ensure!(response["patchType"] == "JSONPatch", "{answer}");
    let patch = BASE64_STANDARD.decode(patch.as_str().context("the patch is no text")?)?;
    let patch: json_patch::Patch = serde_json::from_slice(&patch)?;
    ensure!(!patch.0.is_empty(), "an empty patch");
    let mut patched = sent.clone();
    json_patch::patch(&mut patched, &patch)
        .with_context(|| format!("the patch does not apply: {}", json!(patch)))?;
    Ok(Some(patched))
}

fn text(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}
