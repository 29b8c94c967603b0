//! What repetitions of a fault came to, by name.

use std::{collections::BTreeMap, fmt, time::Duration};

use testbed::lives::milliseconds;

/// Figures in the order of their names.
#[derive(Default)]
pub(crate) struct Figures {
    times: BTreeMap<&'static str, Vec<Duration>>,
    counts: BTreeMap<&'static str, u64>,
    numbers: BTreeMap<&'static str, f64>,
}

impl Figures {
    /// One more time.
    pub(crate) fn time(&mut self, what: &'static str, time: Duration) {
        self.times(what, [time]);
    }

    /// More times.
    pub(crate) fn times(&mut self, what: &'static str, times: impl IntoIterator<Item = Duration>) {
        self.times.entry(what).or_default().extend(times);
    }

    /// Adds to a count, which is shown also where it stays 0.
    pub(crate) fn count(&mut self, what: &'static str, count: usize) {
        *self.counts.entry(what).or_default() += count as u64;
    }

    /// Another number, of which the largest is shown.
    pub(crate) fn number(&mut self, what: &'static str, number: f64) {
        let largest = self.numbers.entry(what).or_default();
        *largest = largest.max(number);
    }
}

/// `revert lag 12 / 409 / 907 ms; unboosted 0`: times are p50 / p99 / max.
impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let times = self.times.iter();
        let times = times.map(|(what, times)| format!("{what} {}", milliseconds(times)));
        let counts = self.counts.iter();
        let counts = counts.map(|(what, count)| format!("{what} {count}"));
        let numbers = self.numbers.iter();
        let numbers = numbers.map(|(what, number)| format!("{what} {number:.2}"));
        let all: Vec<_> = times.chain(counts).chain(numbers).collect();
        f.write_str(&all.join("; "))
    }
}
