//! What has to hold: of every write that the API server accepts, and of every end.

use std::fmt;

use chrono::{DateTime, TimeDelta, Utc};
use headstart::domain::record::{Record, State};
use serde_json::Value;

use crate::{
    leader::{Purpose, Write},
    scene::Scene,
    server::{Kubelet, RecordBy, Seen, Stored},
};

/// The rules, one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Invariant {
    /// Rule 3: whatever has happened, one leader that goes on looking ends the boost.
    Ends,
    /// Rule 3: it is not called done before the kubelet has done it.
    Done,
    /// Rule 4: a revert only lowers, and to `min(original, current)`.
    Lowers,
    /// Rule 4: CPU and nothing else, in the same `QoS` class.
    CpuOnly,
    /// Rule 4: somebody else's later change stands.
    TheirChange,
    /// Rule 5: no write lands on a pod of another uid.
    OtherPod,
    /// Rule 5: no write lands that was decided on another version.
    Stale,
    /// I4: a boost needs one resize of each value.
    Once,
    /// A record is never deleted, and once `Reverted` never written again.
    Record,
    /// No write of ours is refused for what it says.
    Valid,
    /// A raise has 30 s from its record to its resize.
    Grace,
    /// A restart is boosted once.
    Again,
}

/// A rule that was broken, and by what.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) invariant: Invariant,
    pub(crate) what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.invariant, self.what)
    }
}

/// What an accepted write breaks.
pub(crate) fn broken(
    scene: &Scene,
    write: &Write,
    before: &Stored,
    after: &Stored,
) -> Vec<Violation> {
    let mut broken = Vec::new();
    let mut check = |invariant, holds: bool, what: &str| {
        if !holds {
            let what = what.to_owned();
            broken.push(Violation { invariant, what });
        }
    };
    let (uid, version) = write.decided_on;
    check(
        Invariant::OtherPod,
        uid == before.uid,
        "a write meant for another pod",
    );
    check(
        Invariant::Stale,
        version == before.version,
        "a write decided on another version",
    );
    check(
        Invariant::CpuOnly,
        !after.surplus && before.is_guaranteed(scene) == after.is_guaranteed(scene),
        "a write that changes more than CPU",
    );
    check(
        Invariant::Record,
        before.record.is_none() || after.record.is_some(),
        "a record is deleted",
    );
    check(
        Invariant::Record,
        !is_reverted(before)
            || before.record == after.record
            || scene.restarts && write.purpose == Purpose::Claim,
        "a Reverted record is written again",
    );
    check(
        Invariant::Again,
        after.ghost.raises <= 1,
        "a restart is boosted twice",
    );
    if write.purpose == Purpose::Revert {
        revert(scene, write, before, after, &mut check);
    } else if write.purpose != Purpose::Raise {
        check(
            Invariant::CpuOnly,
            before.values == after.values,
            "marks that resize",
        );
    }
    if is_reverted(after) && !is_reverted(before) && after.ghost.record != RecordBy::Tenant {
        check(
            Invariant::Done,
            after.ghost.undone == 0,
            "finished before the kubelet has done the resize",
        );
        check(
            Invariant::Grace,
            after.ghost.raised || raise_is_over(after),
            "a raise is finished within 30 s",
        );
    }
    broken
}

fn revert(
    scene: &Scene,
    write: &Write,
    before: &Stored,
    after: &Stored,
    check: &mut impl FnMut(Invariant, bool, &str),
) {
    let named = write.values(scene);
    check(
        Invariant::Once,
        named & before.ghost.written == 0,
        "a value is resized a second time",
    );
    let (were, are) = (&before.values, &after.values);
    for (index, original) in scene.originals().enumerate() {
        if were[index] == are[index] {
            continue;
        }
        let what = format!("value {index}: {:?} → {:?}", were[index], are[index]);
        // An absent limit is more than any limit.
        let lower = are[index].is_some_and(|is| were[index].is_none_or(|was| is < was));
        check(Invariant::Lowers, lower, &what);
        // The template tells what a pod had, not what somebody has made of it since.
        let is_theirs = before.ghost.theirs & 1 << index != 0;
        check(
            Invariant::TheirChange,
            !is_theirs || !write.record_was_read,
            &what,
        );
        if before.ghost.record != RecordBy::Tenant {
            let request = if index % 2 == 1 { are[index - 1] } else { None };
            let to = original.max(request);
            // Where the request holds it up, 1m more may keep the class.
            let above = request.filter(|_| request > original).map(|to| to + 1);
            let is_right = are[index] == to || above.is_some() && are[index] == above;
            check(Invariant::Lowers, is_right, &what);
        }
    }
}

fn is_reverted(pod: &Stored) -> bool {
    let record = pod
        .record
        .as_deref()
        .and_then(|text| Record::read(text).ok());
    record.is_some_and(|record| record.state == State::Reverted)
}

/// Whether the half minute that a raise has is over.
fn raise_is_over(pod: &Stored) -> bool {
    let record = pod
        .record
        .as_deref()
        .and_then(|text| serde_json::from_str(text).ok());
    let record: Value = record.unwrap_or_default();
    let time = |field: &str| record[field].as_str()?.parse::<DateTime<Utc>>().ok();
    match (time("timestamp"), time("endedTimestamp")) {
        (Some(began), Some(ended)) => ended - began >= TimeDelta::seconds(30),
        _ => true,
    }
}

/// Why the boost of a pod has not ended, where it has not and nothing excuses that.
///
/// Excused: a kubelet that refuses for good; a record that can't be read where neither owner nor claim tells more.
pub(crate) fn unended(scene: &Scene, pod: &Stored) -> Option<String> {
    if pod.kubelet == Kubelet::Infeasible(Seen::Yes) {
        return None;
    }
    let record = pod
        .record
        .as_deref()
        .and_then(|text| Record::read(text).ok());
    match &record {
        None if pod.claim.is_some() && scene.owned => {
            return Some("the record is not repaired".to_owned());
        }
        None if pod.claim.is_some() || pod.ghost.record != RecordBy::Us => return None,
        Some(record) if record.state == State::Active => {
            return Some("the record is Active".to_owned());
        }
        Some(_) if pod.claim.is_some() && !scene.restarts => {
            return Some("the claim is there".to_owned());
        }
        // What somebody else has written in it goes for it.
        Some(_) if pod.ghost.record == RecordBy::Tenant => return None,
        None | Some(_) => {}
    }
    let values = pod
        .values
        .iter()
        .copied()
        .zip(scene.originals())
        .enumerate();
    for (index, (is, original)) in values {
        let settled = (pod.ghost.theirs | pod.ghost.written) & 1 << index != 0;
        if is != original && !settled {
            return Some(format!("value {index} is {is:?}, not {original:?}"));
        }
    }
    None
}
