//! What is counted: the work of a replica for one pod, from the bytes that come to the bytes that go.

use std::hint::black_box;

use anyhow::{Context as _, Result, bail};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use chrono::Utc;
use headstart::{
    api::Pod,
    domain::{
        end::EndSettings,
        patch,
        revert::{Decision, decide},
    },
};
use json_patch::Patch;
use load::review;
use serde_json::{Value, json};

use crate::common::{admitter, answer};

/// All of them.
pub(crate) const NAMES: [&str; 6] = [
    "a review of 10 kB that boosts",
    "a review of 36 kB that boosts",
    "a review of 10 kB that no boost is for",
    "a review of 10 kB that the last of 1,000 boosts is for",
    "a boosted pod that comes from the watch",
    "a revert, from the pod to its two patches",
];

/// Does one of them so often.
pub(crate) fn repeat(name: &str, times: u32) -> Result<()> {
    let index = NAMES.iter().position(|known| *known == name);
    match index.with_context(|| format!("{name}: not known"))? {
        0 => reviews(10, times),
        1 => reviews(36, times),
        2 => {
            let (admitter, body) = (admitter(200, 5), review::body(10_000, "team-7", "other"));
            for _ in 0..times {
                black_box(admitter.answer(black_box(&body))?);
            }
        }
        3 => {
            let (admitter, body) = (admitter(1, 1000), review::body(10_000, "team-0", "app-999"));
            for _ in 0..times {
                black_box(answer(&admitter, black_box(&body)));
            }
        }
        4 => {
            let pod = serde_json::to_vec(&boosted()?)?;
            for _ in 0..times {
                let mut pod: Pod = serde_json::from_slice(black_box(&pod))?;
                pod.trim();
                black_box(pod);
            }
        }
        _ => {
            let pod: Pod = serde_json::from_value(boosted()?)?;
            let back = back(&pod)?;
            for _ in 0..times {
                black_box(revert(black_box(&pod), black_box(&back))?);
            }
        }
    }
    Ok(())
}

fn reviews(kilobytes: usize, times: u32) {
    let (admitter, body) = (
        admitter(200, 5),
        review::body(kilobytes * 1000, "team-7", "app-4"),
    );
    for _ in 0..times {
        black_box(answer(&admitter, black_box(&body)));
    }
}

/// A pod as admission makes it, which is Ready.
fn boosted() -> Result<Value> {
    let body = review::body(10_000, "team-7", "app-4");
    let answer: Value = serde_json::from_slice(&answer(&admitter(200, 5), &body))?;
    let patch = answer["response"]["patch"].as_str().context("no patch")?;
    let patch: Patch = serde_json::from_slice(&BASE64_STANDARD.decode(patch)?)?;
    let mut review: Value = serde_json::from_slice(&body)?;
    let mut pod = review["request"]["object"].take();
    json_patch::patch(&mut pod, &patch)?;
    pod["metadata"]["name"] = "app-4-6d4cf56db6-x7k2p".into();
    pod["metadata"]["namespace"] = "team-7".into();
    pod["metadata"]["uid"] = "0b9c4f6a-58b2-4c15-8f6b-0b3f8a1c2d3e".into();
    pod["metadata"]["resourceVersion"] = "4711".into();
    pod["spec"]["nodeName"] = "node-1".into();
    let now = Utc::now();
    pod["status"] = json!({
        "phase": "Running",
        "startTime": now,
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": now},
            {"type": "Ready", "status": "True", "lastTransitionTime": now},
        ],
    });
    Ok(pod)
}

/// The same pod after its resize.
fn back(pod: &Pod) -> Result<Pod> {
    let Decision::Revert(revert) = decide(pod, None, EndSettings::default(), Utc::now()) else {
        bail!("it is not due");
    };
    let mut back = pod.clone();
    for to in revert.containers {
        let mut containers = back.spec.containers.iter_mut();
        let container = containers.find(|container| container.name == to.name);
        let resources = &mut container.context("no such container")?.resources;
        let both = [
            (&mut resources.requests, to.to.request),
            (&mut resources.limits, to.to.limit),
        ];
        for (amounts, cpu) in both {
            let amounts = amounts.as_mut().context("it has lost its CPU")?;
            amounts.cpu = cpu.map(|cpu| cpu.to_string());
        }
    }
    Ok(back)
}

/// What the two writes of a revert say.
fn revert(pod: &Pod, back: &Pod) -> Result<[Vec<u8>; 2]> {
    let (settings, now) = (EndSettings::default(), Utc::now());
    let Decision::Revert(revert) = decide(pod, None, settings, now) else {
        bail!("it is not due");
    };
    let Decision::Finish(finish) = decide(back, None, settings, now) else {
        bail!("it is not back");
    };
    let (resize, finish) = (
        patch::resize(pod, &revert.containers),
        patch::finish(back, &finish),
    );
    Ok([serde_json::to_vec(&resize)?, serde_json::to_vec(&finish)?])
}
