//! Carrying out a raise: the order of its writes, and what came of it.
//!
//! First as a dry run, so that what is refused leaves nothing behind; then claim and record; then the resize, on the version
//! that these gave. A crash in between leaves a record whose values are still the originals, which the next look finishes
//! half a minute after it was made.

use super::{
    Sweeper,
    write::{Checked, Writer},
};
use crate::{
    api::Pod,
    domain::{cpu::Cpu, failure::Failure, raise::Raise, revert::Decision},
};

/// Tries of the resize: the kubelet often writes to a pod that is starting.
const TRIES: u32 = 5;

/// What came of a raise.
pub(super) enum Raised {
    /// Claim and record are written, and the values too unless that was refused: the pod as it is now.
    Claimed(Box<Pod>),
    /// It is refused, and nothing was written.
    Refused(Failure),
}

/// Carries a raise out.
pub(super) async fn carry_out(
    sweeper: &Sweeper,
    pod: &Pod,
    raise: &Raise,
) -> Result<Raised, Failure> {
    let writer = &sweeper.writer;
    let counted = |failure: &Failure| sweeper.metrics.raised(raise.cause, failure.as_str());
    match writer.rehearse(pod, &raise.containers).await {
        Ok(Checked) => {}
        Err(failure) if failure.may_pass() => return Err(failure),
        Err(refused) => {
            counted(&refused);
            return Ok(Raised::Refused(refused));
        }
    }
    let claimed = writer.claim(pod, raise).await;
    sweeper.metrics.wrote("claim", claimed.as_ref().err());
    let claimed = claimed?;
    match resize(sweeper, writer, claimed.clone(), raise).await {
        Ok(raised) => {
            sweeper.metrics.raised(raise.cause, "Ok");
            sweeper.events.raised(&raised, raise);
            Ok(Raised::Claimed(Box::new(raised)))
        }
        Err(failure) => {
            counted(&failure);
            if failure.may_pass() {
                return Err(failure);
            }
            sweeper
                .events
                .not_raised(&claimed, raise.cause, failure.as_str(), failure.text());
            Ok(Raised::Claimed(Box::new(claimed)))
        }
    }
}

/// The resize, tried again while only the status of the pod has changed and the boost is not due.
async fn resize(
    sweeper: &Sweeper,
    writer: &Writer,
    mut pod: Pod,
    raise: &Raise,
) -> Result<Pod, Failure> {
    for _ in 0..TRIES {
        let written = writer.resize(&pod, &raise.containers).await;
        sweeper.metrics.wrote("raise", written.as_ref().err());
        match written {
            Err(Failure::Conflict) => {}
            written => return written,
        }
        let now = writer.read(&pod).await?;
        let values = |pod: &Pod| pod.all_containers().map(Cpu::of).collect::<Vec<_>>();
        let is_as_recorded = now.record_text() == pod.record_text() && values(&now) == values(&pod);
        if !is_as_recorded || !matches!(sweeper.decide(&now, None), Decision::Wait(_)) {
            break;
        }
        pod = now;
    }
    Err(Failure::Conflict)
}
