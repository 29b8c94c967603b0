//! Decides how certificates are rotated: the next step, from what the Secret and the webhook configuration hold.
//!
//! The API server must be able to verify the leaf of every replica at every instant, by a webhook configuration that it may
//! have read seconds ago. So a new CA is known before a leaf of it is served, and the old one for as long as a leaf of it can
//! be valid:
//!
//! | step | CAs in the Secret | leaf in the Secret | CAs in the webhook configuration |
//! |---|---|---|---|
//! | | old | of old | old |
//! | `Authority` | **new, old** | of old | old |
//! | `Publish` | new, old | of old | **new, old** |
//! | `Leaf`, 10 s later | new, old | **of new** | new, old |
//! | `Drop`, a leaf's lifetime after `Authority` | **new** | of new | new, old |
//! | `Publish` | new | of new | **new** |
//!
//! Any replica takes any step, and may end after it: nothing but the 10 s is remembered.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

/// How long a CA must have been read back from the webhook configuration before a leaf of it is issued: API servers watch the
/// configuration as we do, and all of them have it by then.
pub const PROPAGATION: Duration = Duration::from_secs(10);

/// How long certificates are valid when they are issued.
#[derive(Clone, Copy, Debug)]
pub struct Lifetimes {
    /// Leaves.
    pub leaf: TimeDelta,
    /// CAs.
    pub authority: TimeDelta,
}

/// When a certificate was made and when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dates {
    /// When it was made; it counts from a little earlier.
    pub made: DateTime<Utc>,
    /// When it ends.
    pub ends: DateTime<Utc>,
}

/// A leaf that can be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeafState {
    /// Its dates; it ends with its CA at the latest.
    pub dates: Dates,
    /// Which of the CAs it verifies under.
    pub issuer: usize,
}

/// What can be used of what the Secret holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// The CAs, newest first.
    pub authorities: Vec<Dates>,
    /// Whether the key of the first is there.
    pub has_key: bool,
    /// The leaf, where it can be served.
    pub leaf: Option<LeafState>,
}

/// How the webhook configuration compares with the Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Configuration {
    /// There is none that we know of.
    Absent,
    /// It has other CAs.
    Outdated,
    /// It has had the Secret's CAs for so long, as far as this process has seen.
    Published(Duration),
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make a CA and a leaf of it at once: nothing can be served.
    All,
    /// Make a CA, to stand before those that there are.
    Authority,
    /// Issue a leaf under the first CA.
    Leaf,
    /// Drop the CAs that no valid leaf can be of.
    Drop,
    /// Write the CAs into the webhook configuration.
    Publish,
    /// Look again after so long.
    Wait(Duration),
}

impl Dates {
    /// When it should be renewed: at two thirds of its lifetime, or of the one that it would be given now if that is shorter.
    #[must_use]
    pub fn due(self, lifetime: TimeDelta) -> DateTime<Utc> {
        self.made + (self.ends - self.made).min(lifetime) / 3 * 2
    }
}

impl State {
    /// When something should be renewed, the leaf or the CA that issues.
    #[must_use]
    pub fn due(&self, lifetimes: Lifetimes) -> Option<DateTime<Utc>> {
        let leaf = self.leaf.map(|leaf| leaf.dates.due(lifetimes.leaf));
        let first = self.authorities.first();
        let authority = first.map(|dates| dates.due(lifetimes.authority));
        leaf.into_iter().chain(authority).min()
    }

    /// Whether a valid leaf of this CA may be in use.
    #[must_use]
    pub fn needs(&self, index: usize, lifetimes: Lifetimes, now: DateTime<Utc>) -> bool {
        let serves = self.leaf.is_some_and(|leaf| leaf.issuer == index);
        serves || self.last_leaf_ends(index, lifetimes) > now
    }

    /// When no leaf of this CA can be valid any more: all of them are older than the next CA.
    fn last_leaf_ends(&self, index: usize, lifetimes: Lifetimes) -> DateTime<Utc> {
        let end = self.authorities[index].ends;
        match index.checked_sub(1) {
            Some(newer) => end.min(self.authorities[newer].made + lifetimes.leaf),
            None => end,
        }
    }

    /// Whether there is nothing to go on from: no leaf to serve, and no CA to issue one.
    #[must_use]
    pub fn is_lost(&self, now: DateTime<Utc>) -> bool {
        self.leaf.is_none() && self.issuing(now).is_none()
    }

    /// The CA that can issue.
    fn issuing(&self, now: DateTime<Utc>) -> Option<Dates> {
        let first = self.authorities.first().copied();
        first.filter(|first| self.has_key && first.ends > now)
    }
}

/// Decides on the next step. Following the steps ends in [`Step::Wait`], whatever the Secret held.
#[must_use]
pub fn next(
    state: &State,
    configuration: Configuration,
    lifetimes: Lifetimes,
    now: DateTime<Utc>,
) -> Step {
    let issuing = state.issuing(now);
    let Some(leaf) = state.leaf.filter(|leaf| leaf.dates.ends > now) else {
        return issuing.map_or(Step::All, |_| Step::Leaf);
    };
    let Some(authority) = issuing else {
        return Step::Authority;
    };
    if leaf.issuer > 0 {
        return match configuration {
            Configuration::Outdated => Step::Publish,
            Configuration::Published(since) => match PROPAGATION.saturating_sub(since) {
                Duration::ZERO => Step::Leaf,
                left => Step::Wait(left),
            },
            // Nobody is known to trust the new CA. At the old leaf's end that matters no more.
            Configuration::Absent => until(leaf.dates.ends, now),
        };
    }
    let authority_due = authority.due(lifetimes.authority);
    if authority_due <= now {
        return Step::Authority;
    }
    let leaf_due = leaf.dates.due(lifetimes.leaf);
    if leaf_due <= now {
        return Step::Leaf;
    }
    if configuration == Configuration::Outdated {
        return Step::Publish;
    }
    let older = 1..state.authorities.len();
    let drop_due = older.map(|index| state.last_leaf_ends(index, lifetimes));
    let drop_due = drop_due.min().unwrap_or(leaf_due);
    if drop_due <= now {
        return Step::Drop;
    }
    until(leaf_due.min(authority_due).min(drop_due), now)
}

fn until(at: DateTime<Utc>, now: DateTime<Utc>) -> Step {
    Step::Wait((at - now).to_std().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::{Configuration::*, Step::*, *};

    const LIFETIMES: Lifetimes = Lifetimes {
        leaf: TimeDelta::minutes(30),
        authority: TimeDelta::minutes(300),
    };

    fn at(minute: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(60 * minute, 0).expect("a time")
    }

    fn dates(made: i64, ends: i64) -> Dates {
        Dates {
            made: at(made),
            ends: at(ends),
        }
    }

    /// CAs that were made in these minutes, the key, and a leaf: made when, of which CA.
    fn state(authorities: &[i64], has_key: bool, leaf: Option<(i64, usize)>) -> State {
        State {
            authorities: authorities
                .iter()
                .map(|made| dates(*made, made + 300))
                .collect(),
            has_key,
            leaf: leaf.map(|(made, issuer)| LeafState {
                dates: dates(made, made + 30),
                issuer,
            }),
        }
    }

    fn minutes(minutes: u64) -> Step {
        Wait(Duration::from_secs(60 * minutes))
    }

    /// Asserts that this is the step at minute 100, where the webhook configuration is so.
    #[track_caller]
    fn assert_step(what: &str, state: &State, configuration: Configuration, step: Step) {
        let next = next(state, configuration, LIFETIMES, at(100));
        assert_eq!(next, step, "{what}");
    }

    const LONG: Configuration = Published(PROPAGATION);

    #[test]
    fn what_cannot_be_served_or_issued_is_made() {
        for (what, state, step) in [
            ("nothing", state(&[], false, None), All),
            ("no key, no leaf", state(&[90], false, None), All),
            ("a CA that has ended", state(&[-201], true, None), All),
            ("no leaf", state(&[90], true, None), Leaf),
            ("an ended leaf", state(&[70], true, Some((70, 0))), Leaf),
            ("no key", state(&[90], false, Some((90, 0))), Authority),
        ] {
            for configuration in [LONG, Outdated, Absent] {
                assert_step(what, &state, configuration, step);
            }
        }
    }

    #[test]
    fn a_leaf_of_a_new_ca_waits_until_that_is_known() {
        let new = state(&[100, 0], true, Some((90, 1)));
        assert_step("not published", &new, Outdated, Publish);
        let (short, left) = (Duration::from_secs(4), Duration::from_secs(6));
        assert_step("not known yet", &new, Published(short), Wait(left));
        assert_step("known", &new, LONG, Leaf);
        assert_step("nobody can know", &new, Absent, minutes(20));
        let lost = state(&[100, 0], false, Some((90, 1)));
        assert_step("its key is lost", &lost, LONG, Authority);
    }

    #[test]
    fn what_is_due_is_renewed() {
        let well = state(&[0], true, Some((90, 0)));
        assert_step("all well", &well, LONG, minutes(10));
        assert_step("no configuration", &well, Absent, minutes(10));
        assert_step("wiped there", &well, Outdated, Publish);
        for (what, state, step) in [
            ("the leaf", state(&[0], true, Some((80, 0))), Leaf),
            ("the CA", state(&[-100], true, Some((90, 0))), Authority),
            ("both", state(&[-100], true, Some((80, 0))), Authority),
        ] {
            for configuration in [LONG, Outdated, Absent] {
                assert_step(what, &state, configuration, step);
            }
        }
    }

    #[test]
    fn an_old_ca_is_dropped_when_no_leaf_of_it_can_be_valid() {
        let drop = |authorities: &[i64], leaf| {
            let state = state(authorities, true, Some((leaf, 0)));
            next(&state, LONG, LIFETIMES, at(100))
        };
        assert_eq!(drop(&[75, 0], 90), minutes(5));
        assert_eq!(drop(&[70, 0], 90), Drop);
        assert_eq!(drop(&[95, -200], 96), Drop, "it has ended itself");
        assert_eq!(drop(&[90, 65, 0], 91), Drop, "of three the last");
    }

    #[test]
    fn lifetimes_that_are_shortened_count_at_once() {
        let day = TimeDelta::days(1);
        let year = Dates {
            made: at(0),
            ends: at(0) + day * 365,
        };
        assert_eq!(year.due(day * 90), at(0) + day * 60);
        assert_eq!(year.due(day * 3650), at(0) + (day * 365) / 3 * 2);
    }

    #[test]
    fn a_ca_is_needed_while_a_leaf_of_it_can_be_valid() {
        let state = state(&[90, 75, 65, 0], true, Some((91, 0)));
        let needed = |index| state.needs(index, LIFETIMES, at(100));
        // 65 was replaced at 75 and its leaves end at 105; 0 was replaced at 65.
        assert_eq!([0, 1, 2, 3].map(needed), [true, true, true, false]);
    }
}
