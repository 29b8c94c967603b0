//! Admission on a real API server: 2,000 odd pods, and proofs of what goes wrong with pods that we skip.
//!
//! One control plane serves all tests of this program. Namespaces with the label [`bed::UNCALLED`] are the API server's
//! alone: there our webhook is not called.

mod bed;
mod crowd;
mod proofs;
mod world;

use anyhow::Result;

/// Show 2 of the issue: whatever is created, we refuse nothing, and every pod is what the domain says it is.
///
/// `HEADSTART_SEED` repeats a run.
#[test]
fn odd_pods_are_admitted_as_without_us() -> Result<()> {
    testbed::cluster::run(crowd::admit_all())
}
