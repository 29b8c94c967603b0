//! The cases: inputs with right answers, as data in `a.yaml` to `g.yaml`, and the layers that execute them.
//!
//! Each case is one test per layer, named like `pure::B1`. A case says which layers must execute it; when all tests were
//! asked for and one of those didn't run, the whole run fails. What was executed stands in a table at the end.

#![allow(
    unreachable_pub,
    reason = "nothing of a test binary can be reached from outside"
)]

mod cluster;
#[expect(
    dead_code,
    reason = "some of the data is for layers that this build does not have"
)]
mod data;
mod notation;
mod pure;
mod report;
mod scripted;
mod told;
mod world;

use std::{path::Path, process::ExitCode};

use libtest_mimic::{Arguments, Trial};

use data::{Cases, Layer};

/// Makes a layer's tests of the cases.
type Trials = fn(&'static Cases) -> Vec<Trial>;

/// The layers of this build.
const LAYERS: &[(Layer, Trials)] = &[
    (Layer::Pure, pure::trials),
    (Layer::Scripted, scripted::trials),
    (Layer::Cluster, cluster::trials),
];

/// Tests at the same time. What is too much for a cluster has turns of its own.
const THREADS: usize = 16;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Most of the time they wait.
    arguments.test_threads.get_or_insert(THREADS);
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    let cases = match Cases::read(&directory) {
        // They live as long as the process.
        Ok(cases) => &*Box::leak(Box::new(cases)),
        Err(error) => {
            eprintln!("{error:#}");
            return ExitCode::FAILURE;
        }
    };
    let trials = LAYERS
        .iter()
        .flat_map(|(_, trials)| trials(cases))
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if arguments.list {
        return conclusion.exit_code();
    }
    let everything = arguments.filter.is_none() && arguments.skip.is_empty() && !arguments.ignored;
    let layers: Vec<Layer> = LAYERS.iter().map(|(layer, _)| *layer).collect();
    let missing = report::print(cases, &layers, everything);
    if missing > 0 {
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}
