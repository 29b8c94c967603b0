//! An exhaustive search for a schedule under which the end of a boost goes wrong.
//!
//! The world is small: one pod, an API server, a kubelet, two leaders that both believe to lead, and a tenant. What a
//! leader does is decided by [`headstart::domain`] itself, and what it sends are the bodies of
//! [`headstart::domain::patch`]; the rest is a model. Every order of their steps is tried, by breadth, so the trace of a
//! violation is a shortest one.
//!
//! Modelled:
//! - **leaders** ([`leader`]): a look copies the pod, which may change afterwards; a decision is taken on the copy, at any
//!   later time; its write lands at any later time, or never, or after its sender has crashed or given up waiting; the
//!   answer arrives or is lost. A crash takes the memory, at each step.
//! - **raises** of a running pod, in the order of their writes: claim and record, then the resize on the version that this
//!   gave. Those after a restart are the domain's; of those for a pod that admission has missed, the bodies are the model's.
//! - **the API server** ([`server`]): `uid` (422) and `resourceVersion` (409) of a body; a resize drops metadata, keeps the
//!   `QoS` class and refuses a request above its limit; a write that changes nothing makes no version. Versions count anew
//!   in each pod: nothing is built on their being unique in a cluster.
//! - **the kubelet**: does a resize, defers it and does it later, or refuses it for good.
//! - **the tenant** ([`tenant`]), a bounded number of times, with the policies absent: resizes, takes the label away or
//!   overwrites it, removes the record, ruins it, or lies in it; deletes the pod, or recreates it under its name; edits or
//!   deletes the boost.
//! - **time**: before a boost is due (but by its condition), after the fixed duration, after every deadline. One clock for
//!   all.
//! - **pods** ([`scene`]): burstable, guaranteed, two containers that end apart, a removed limit, upstream's record on a
//!   server that tracks no generations, one that fits no node, one that was missed by admission,
//!   one of which a container restarts.
//!
//! Left out, because it can't matter: copies of a pod more than one version old, and writes on their way that the server
//! can only refuse (see [`world::Model::canonical`]).
//!
//! Not modelled: how a leader finds a pod (watch, scan), pauses between its looks, LimitRange defaults, failures that
//! the server answers before it reads the write, terminating and terminal pods, clocks that differ.
//!
//! [`invariants`] says what has to hold of every write and of every end; [`explore`] searches.

mod explore;
mod invariants;
mod leader;
mod scene;
mod server;
mod tenant;
mod world;

use std::thread;

use explore::{Report, search};
use invariants::Invariant;
use leader::Mutation;
use scene::{SCENES, Scene};
use world::Model;

/// Times that the tenant acts.
const ACTIONS: u8 = 1;

/// Searches a program with a fault, and says what it violates.
fn found(mutation: Mutation) -> Invariant {
    found_beside(mutation, &[], |scene| !scene.held_up && !scene.restarts)
}

/// The same, where some violations are known, and not looked for.
fn found_beside(
    mutation: Mutation,
    tolerated: &'static [Invariant],
    scenes: fn(&Scene) -> bool,
) -> Invariant {
    let report = search(Model::new(mutation, tolerated), ACTIONS, scenes);
    let Some(trace) = &report.trace else {
        panic!("{mutation:?} goes unnoticed: {report}");
    };
    println!(
        "{mutation:?}, {} steps: {report}\n{trace}",
        trace.steps.len()
    );
    trace.violation.invariant
}

fn finds_nothing(scenes: fn(&Scene) -> bool) {
    // Scenes have no state in common.
    let scenes = SCENES.iter().filter(|scene| scenes(scene));
    let report = thread::scope(|scope| {
        let search_one = |scene: &'static Scene| {
            scope.spawn(|| {
                let model = Model::new(Mutation::None, &[]);
                search(model, ACTIONS, |other| other.name == scene.name)
            })
        };
        let searches: Vec<_> = scenes.map(search_one).collect();
        let reports = searches.into_iter().map(|it| it.join().expect("no panic"));
        reports.reduce(Report::and).expect("there are scenes")
    });
    println!("search: {report}");
    if let Some(trace) = &report.trace {
        panic!("{trace}");
    }
}

#[test]
fn no_schedule_breaks_an_invariant() {
    finds_nothing(|scene| !scene.held_up && !scene.missed && !scene.restarts);
}

#[test]
fn a_restart_is_boosted_once_and_not_for_ever() {
    finds_nothing(|scene| scene.restarts);
}

#[test]
fn a_raise_has_half_a_minute() {
    finds_nothing(|scene| scene.missed);
}

#[test]
fn a_raised_request_holds_no_boost_up() {
    finds_nothing(|scene| scene.held_up);
}

#[test]
fn without_a_deadline_is_found() {
    assert_eq!(found(Mutation::NoDeadline), Invariant::Ends);
}

#[test]
fn finishing_first_is_found() {
    assert_eq!(found(Mutation::FinishFirst), Invariant::Ends);
}

#[test]
fn without_waiting_for_the_kubelet_is_found() {
    assert_eq!(found(Mutation::Unconfirmed), Invariant::Done);
}

#[test]
fn a_raise_without_a_record_is_found() {
    assert_eq!(found(Mutation::RaiseFirst), Invariant::Ends);
}

#[test]
fn a_raise_after_a_restart_without_a_record_is_found() {
    let broken = found_beside(Mutation::RaiseFirst, &[], |scene| scene.restarts);
    assert!(
        matches!(broken, Invariant::Again | Invariant::Ends),
        "{broken:?}"
    );
}

#[test]
fn taking_all_back_to_the_originals_is_found() {
    assert_eq!(found(Mutation::AllOriginals), Invariant::Lowers);
}

#[test]
fn judging_before_it_is_due_is_found() {
    let broken = found(Mutation::JudgedFirst);
    assert!(
        matches!(broken, Invariant::Lowers | Invariant::TheirChange),
        "{broken:?}"
    );
}

#[test]
fn without_the_version_is_found() {
    assert_eq!(found(Mutation::NoVersion), Invariant::Stale);
}

/// What follows from it.
#[test]
fn without_the_version_something_is_undone() {
    let broken = found_beside(Mutation::NoVersion, &[Invariant::Stale], |scene| {
        !scene.held_up && !scene.restarts
    });
    assert_ne!(broken, Invariant::Stale);
}

#[test]
fn without_the_uid_is_found() {
    assert_eq!(found(Mutation::NoUid), Invariant::OtherPod);
}
