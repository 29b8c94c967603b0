//! Any bytes, as a review: answered with `allowed: true` or refused as unreadable, and a patch that the API server can
//! apply and that touches CPU and marks only.
//!
//! The first byte chooses how: see [`Mode`]. The rest is the review, or the pod in it.
#![no_main]

use std::sync::LazyLock;

use base64::{Engine, prelude::BASE64_STANDARD};
use headstart::{admission::Admitter, api::Pod};
use headstart_fuzz::{admitter, boosts, check, settings, snapshot};
use json_patch::Patch;
use k8s_openapi::api::core::v1;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

/// By `REMOVE_LIMITS`.
static SYNCED: LazyLock<[Admitter; 2]> = LazyLock::new(|| {
    [false, true].map(|remove_limits| admitter(Some(snapshot(boosts())), settings(remove_limits)))
});
static UNSYNCED: LazyLock<Admitter> = LazyLock::new(|| admitter(None, settings(false)));

/// The bits of the first byte. ASCII digits are modes: `0` is a review, `4` a pod.
struct Mode(u8);

impl Mode {
    fn admitter(&self) -> &'static Admitter {
        if self.0 & 2 == 2 {
            &UNSYNCED
        } else {
            &SYNCED[usize::from(self.0 & 1)]
        }
    }

    fn body(&self, bytes: &[u8]) -> Vec<u8> {
        if self.0 & 4 == 0 {
            return bytes.to_vec();
        }
        let head = br#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","namespace":"ns","operation":"CREATE","resource":{"group":"","version":"v1","resource":"pods"},"object":"#;
        [head, bytes, b"}}"].concat()
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((mode, bytes)) = data.split_first() else {
        return;
    };
    let mode = Mode(*mode);
    let body = mode.body(bytes);
    let Ok(answer) = mode.admitter().answer(&body) else {
        return;
    };
    let answer: Value = serde_json::from_slice(&answer).expect("an answer is JSON");
    let response = &answer["response"];
    assert_eq!(response["allowed"], true);
    // What was passed over in reading may be no JSON that a value can be made of.
    let Ok(review) = serde_json::from_slice::<Value>(&body) else {
        return;
    };
    let request = &review["request"];
    if let Some(request) = request.as_object() {
        assert_eq!(Some(&response["uid"]), request.get("uid"));
    }
    if let Some(patch) = response["patch"].as_str() {
        assert_eq!(response["patchType"], "JSONPatch");
        patched(&request["object"], patch);
    }
});

/// Holds a patch to the laws, for a pod that an API server could have sent.
fn patched(before: &Value, patch: &str) {
    if serde_json::from_value::<v1::Pod>(before.clone()).is_err() {
        return;
    }
    let bytes = BASE64_STANDARD.decode(patch).expect("a patch is base64");
    let patch: Patch = serde_json::from_slice(&bytes).expect("a patch is a JSON Patch");
    assert!(!patch.0.is_empty(), "an empty patch");
    let mut after = before.clone();
    json_patch::patch(&mut after, &patch).expect("the patch applies");
    check::only_cpu_and_marks_differ(before, &after);
    let (before, after): (Pod, Pod) = (check::read(before), check::read(&after));
    if before.record_text().is_none() {
        check::nothing_is_lowered(&before, &after);
        check::class_is_kept(&before, &after);
    }
    check::record_is_kept(&after);
}
