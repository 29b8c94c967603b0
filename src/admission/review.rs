//! `AdmissionReview` v1, trimmed: what is read of a request, and the answer as bytes.
//!
//! Own types instead of kube's: the pod is parsed only where the review is about a new pod, and the patch goes out in
//! base64 (kube writes an array of numbers, three times as long).

use std::{borrow::Cow, collections::BTreeMap};

use base64::{Engine, prelude::BASE64_STANDARD};
use json_patch::Patch;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::json;
use crate::{
    api::Pod,
    domain::{
        admission::{Admission, Outcome},
        reason::Reason,
    },
};

const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";

/// Objects nested deeper than this are refused. serde bounds only what it builds; what it passes over may be as deep as
/// the body is long.
const MAX_DEPTH: usize = 1_000;

/// Why a body is no review that can be answered.
#[derive(Debug, thiserror::Error)]
pub enum BadReview {
    /// Not UTF-8.
    #[error("the body is no text: {0}")]
    NotText(std::str::Utf8Error),
    /// Not JSON, or not of the shape.
    #[error("the body is no AdmissionReview: {0}")]
    Unreadable(serde_json::Error),
    /// Another kind or version.
    #[error("expected an {KIND} of {API_VERSION}, got kind {kind:?} of apiVersion {version:?}")]
    Kind {
        /// What `apiVersion` says.
        version: String,
        /// What `kind` says.
        kind: String,
    },
    /// A field that every review has.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// The pod.
    #[error("request.object is no pod: {0}")]
    Pod(serde_json::Error),
    /// Nested too deep.
    #[error("the body is nested more than {MAX_DEPTH} deep")]
    TooDeep,
}

/// What is asked.
pub(super) struct Asked<'a> {
    /// To be echoed.
    pub(super) uid: Cow<'a, str>,
    /// Where the pod will be; its own metadata may not say it yet.
    pub(super) namespace: Cow<'a, str>,
    /// Whether nothing may be counted.
    pub(super) is_dry_run: bool,
    /// The pod, where the review is about the creation of one.
    pub(super) new_pod: Option<Pod>,
}

/// A review of an object that is read as `O`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review<'a, O> {
    #[serde(borrow, default)]
    api_version: Cow<'a, str>,
    #[serde(borrow, default)]
    kind: Cow<'a, str>,
    #[serde(borrow, bound(deserialize = "O: Deserialize<'de>"))]
    request: Option<Request<'a, O>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request<'a, O> {
    #[serde(borrow, default)]
    uid: Cow<'a, str>,
    #[serde(borrow, default)]
    namespace: Cow<'a, str>,
    #[serde(borrow, default)]
    operation: Cow<'a, str>,
    #[serde(borrow, default)]
    resource: Resource<'a>,
    #[serde(default)]
    sub_resource: Option<String>,
    #[serde(default)]
    dry_run: Option<bool>,
    object: Option<O>,
}

#[derive(Default, Deserialize)]
struct Resource<'a> {
    #[serde(borrow, default)]
    group: Cow<'a, str>,
    #[serde(borrow, default)]
    resource: Cow<'a, str>,
}

/// Reads a body.
///
/// Nearly all reviews are about pods, and the quick reader understands them. Where it doesn't, serde_json finds out what is
/// the matter, and whether it matters.
pub(super) fn read(body: &[u8]) -> Result<Asked<'_>, BadReview> {
    let text = str::from_utf8(body).map_err(BadReview::NotText)?;
    if let Some(review) = json::read::<Review<'_, Pod>>(text, MAX_DEPTH) {
        return review.asked(Ok);
    }
    check_depth(body)?;
    let review: Review<'_, &RawValue> =
        serde_json::from_str(text).map_err(BadReview::Unreadable)?;
    review.asked(|object| serde_json::from_str(object.get()).map_err(BadReview::Pod))
}

/// Refuses what is nested too deep.
fn check_depth(body: &[u8]) -> Result<(), BadReview> {
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for byte in body {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => depth += 1,
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err(BadReview::TooDeep);
        }
    }
    Ok(())
}

impl<'a, O> Review<'a, O> {
    /// What it asks; the object is read as a pod where it is to be one.
    fn asked(self, pod: impl FnOnce(O) -> Result<Pod, BadReview>) -> Result<Asked<'a>, BadReview> {
        if self.api_version != API_VERSION || self.kind != KIND {
            return Err(BadReview::Kind {
                version: self.api_version.into_owned(),
                kind: self.kind.into_owned(),
            });
        }
        let request = self.request.ok_or(BadReview::Missing("request"))?;
        if request.uid.is_empty() {
            return Err(BadReview::Missing("request.uid"));
        }
        let new_pod = if request.is_about_new_pod() {
            let object = request.object.ok_or(BadReview::Missing("request.object"))?;
            Some(pod(object)?)
        } else {
            None
        };
        Ok(Asked {
            uid: request.uid,
            namespace: request.namespace,
            is_dry_run: request.dry_run == Some(true),
            new_pod,
        })
    }
}

impl<O> Request<'_, O> {
    fn is_about_new_pod(&self) -> bool {
        let is_pod = self.resource.group.is_empty() && self.resource.resource == "pods";
        let is_whole = self.sub_resource.as_deref().unwrap_or_default().is_empty();
        self.operation == "CREATE" && is_pod && is_whole
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer<'a> {
    api_version: &'static str,
    kind: &'static str,
    response: Response<'a>,
}

/// There is no way to say `allowed: false`, even by mistake.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Response<'a> {
    uid: &'a str,
    allowed: True,
    /// They appear in the API server's audit log, under the webhook's name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    audit_annotations: Notes<'a>,
}

/// What the audit log gets to say of an answer.
type Notes<'a> = BTreeMap<&'static str, Cow<'a, str>>;

struct True;

impl Serialize for True {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bool(true)
    }
}

/// The answer that changes nothing and says nothing.
pub(super) fn unchanged(uid: &str) -> Vec<u8> {
    answer(uid, None, BTreeMap::new())
}

/// The answer that changes nothing, for a reason.
pub(super) fn skipped(uid: &str, boost: Option<&str>, reason: Reason) -> Vec<u8> {
    answer(uid, None, notes(boost, Some(reason)))
}

/// The answer with a patch. An empty patch is left out.
pub(super) fn patched(uid: &str, admission: &Admission, patch: &Patch) -> Vec<u8> {
    let bytes = (!patch.0.is_empty())
        .then(|| serde_json::to_vec(patch).expect("a JSON Patch can be written as JSON"));
    answer(uid, bytes, notes_of(admission))
}

/// The answer of a dry run: it changes nothing, and says what would be changed. (No warning: whoever creates a pod would see
/// one each time, and has asked for nothing.)
pub(super) fn told(uid: &str, admission: &Admission) -> Vec<u8> {
    let mut notes = notes_of(admission);
    if let Some(changes) = changes(admission) {
        notes.insert("would-boost", changes.into());
    }
    answer(uid, None, notes)
}

fn notes_of(admission: &Admission) -> Notes<'_> {
    let reason = match admission.outcome {
        Outcome::Skipped(reason) => Some(reason),
        _ => None,
    };
    let boost = admission.boost.as_ref().map(|boost| boost.name.as_str());
    let mut notes = notes(boost, reason);
    if let Some(clamped) = clamped(admission) {
        notes.insert("clamped", clamped.into());
    }
    notes
}

fn notes(boost: Option<&str>, reason: Option<Reason>) -> Notes<'_> {
    let boost = boost.map(|boost| ("boost", boost.into()));
    boost
        .into_iter()
        .chain(reason.map(|reason| ("skipped", reason.as_str().into())))
        .collect()
}

/// What containers get, in their order: `app 500m/1 -> 1500m/3`. `None` where none is boosted.
pub(super) fn changes(admission: &Admission) -> Option<String> {
    let boosted = admission.containers.iter().filter(|it| it.is_boosted());
    let changes = boosted.map(|it| format!("{} {} -> {}", it.name, it.from, it.to));
    Some(changes.collect::<Vec<_>>().join(", ")).filter(|text| !text.is_empty())
}

/// Which containers get less than their policy says, and why: `app=LimitRange`.
fn clamped(admission: &Admission) -> Option<String> {
    let clamps = admission
        .containers
        .iter()
        .filter_map(|decision| Some(format!("{}={}", decision.name, decision.clamped?.as_str())));
    Some(clamps.collect::<Vec<_>>().join(",")).filter(|text| !text.is_empty())
}

fn answer(uid: &str, patch: Option<Vec<u8>>, audit_annotations: Notes<'_>) -> Vec<u8> {
    let response = Response {
        uid,
        allowed: True,
        audit_annotations,
    };
    let answer = Answer {
        api_version: API_VERSION,
        kind: KIND,
        response,
    };
    let mut text = serde_json::to_string(&answer).expect("an answer can be written as JSON");
    if let Some(patch) = patch {
        // Nothing in base64 needs escaping, so it goes in as it is, at the end of the response.
        let end = text.split_off(text.len() - "}}".len());
        text.push_str(r#","patchType":"JSONPatch","patch":""#);
        BASE64_STANDARD.encode_string(patch, &mut text);
        text.push('"');
        text.push_str(&end);
    }
    text.into_bytes()
}
