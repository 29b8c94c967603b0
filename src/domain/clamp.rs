//! What bounds a container's new values beside its policy: LimitRanges, `--max-boosted-cpu` and the largest node.
//!
//! A clamp never lowers: a value whose bound is at or below the original stays as it was.

use super::{
    cpu::Cpu,
    limit_range::LimitRanges,
    quantity::MilliCpu,
    totals::{Kind, overhead, total},
};
use crate::api::Pod;

/// Why a container gets less than its policy says. The spelling is the record's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Clamp {
    /// The namespace's LimitRanges.
    LimitRange,
    /// `--max-boosted-cpu`.
    Flag,
    /// No node is that large.
    Node,
}

impl Clamp {
    /// All of them, for metrics that exist from the start.
    pub const ALL: [Self; 3] = [Self::LimitRange, Self::Flag, Self::Node];

    /// The word for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::LimitRange => "LimitRange",
            Self::Flag => "Flag",
            Self::Node => "Node",
        }
    }

    /// What it is, for people.
    #[must_use]
    pub const fn sentence(self) -> &'static str {
        match self {
            Self::LimitRange => "a LimitRange",
            Self::Flag => "--max-boosted-cpu",
            Self::Node => "the largest node",
        }
    }
}

/// The bounds for a pod.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ceilings<'a> {
    pub(super) pod: &'a Pod,
    pub(super) ranges: LimitRanges,
    /// Of each value of a container.
    pub(super) flag: Option<MilliCpu>,
    /// Of the pod's requests, its sandbox included.
    pub(super) node: Option<MilliCpu>,
}

/// A value on its way down, and what brought it there.
#[derive(Clone, Copy)]
struct Lowered {
    milli: u64,
    by: Option<Clamp>,
}

impl Lowered {
    fn to(&mut self, milli: u64, by: Clamp) {
        if milli < self.milli {
            *self = Self {
                milli,
                by: Some(by),
            };
        }
    }
}

impl Ceilings<'_> {
    /// The most of `wanted` that container `index` may get, where the others have `planned` and it had `from`.
    pub(super) fn clamp(
        &self,
        index: usize,
        from: Cpu,
        wanted: Cpu,
        planned: &mut [Cpu],
    ) -> (Cpu, Option<Clamp>) {
        let before = planned[index];
        planned[index] = wanted;
        let request = self.clamp_request(from, wanted, planned);
        let limit = self.clamp_limit(from, wanted, planned);
        // Requests above limits are refused; a limit comes down no further than the original, and so do requests.
        let request = request.map(|mut request| {
            if let Some(limit) = limit {
                request.to(limit.milli, limit.by.unwrap_or(Clamp::LimitRange));
            }
            request
        });
        let clamped = |value: Option<Lowered>| value.map(|value| MilliCpu::new(value.milli));
        planned[index] = Cpu {
            request: clamped(request).max(from.request),
            limit: clamped(limit),
        };
        let ratio = self.clamp_ratio(index, from, planned);
        let clamped = planned[index];
        planned[index] = before;
        let by = |value: Option<Lowered>| value.and_then(|value| value.by);
        let by = by(request).or(by(limit)).or(ratio);
        (clamped, by.filter(|_| clamped != wanted))
    }

    fn clamp_request(&self, from: Cpu, wanted: Cpu, planned: &[Cpu]) -> Option<Lowered> {
        let mut value = Lowered {
            milli: wanted.request?.milli(),
            by: None,
        };
        if wanted.request > from.request {
            let asked = total(self.pod, Kind::Request, planned);
            self.clamp_both(&mut value, asked);
            if let Some(node) = self.node {
                let excess = (asked + overhead(self.pod)).saturating_sub(node.milli());
                let left = wanted.request?.milli().saturating_sub(excess);
                value.to(left, Clamp::Node);
            }
            value.milli = value.milli.max(from.request?.milli());
        }
        Some(value)
    }

    fn clamp_limit(&self, from: Cpu, wanted: Cpu, planned: &[Cpu]) -> Option<Lowered> {
        let mut value = Lowered {
            milli: wanted.limit?.milli(),
            by: None,
        };
        if wanted.limit > from.limit {
            self.clamp_both(&mut value, total(self.pod, Kind::Limit, planned));
            value.milli = value.milli.max(from.limit?.milli());
        }
        Some(value)
    }

    /// The bounds that hold for requests and limits alike; `asked` is the pod's total with the value in it.
    fn clamp_both(&self, value: &mut Lowered, asked: u64) {
        let wanted = value.milli;
        if let Some(max) = self.ranges.container.max {
            value.to(max.milli(), Clamp::LimitRange);
        }
        if let Some(max) = self.ranges.pod.max {
            let excess = asked.saturating_sub(max.milli());
            value.to(wanted.saturating_sub(excess), Clamp::LimitRange);
        }
        if let Some(flag) = self.flag {
            value.to(flag.milli(), Clamp::Flag);
        }
    }

    /// Brings a raised limit down to the ratios, in `planned`.
    fn clamp_ratio(&self, index: usize, from: Cpu, planned: &mut [Cpu]) -> Option<Clamp> {
        let Cpu {
            request: Some(request),
            limit: Some(limit),
        } = planned[index]
        else {
            return None;
        };
        let mut most = limit.milli();
        if let Some(ratio) = self.ranges.container.ratio {
            most = most.min(ratio.largest_limit(request.milli()));
        }
        if let Some(ratio) = self.ranges.pod.ratio {
            let requests = total(self.pod, Kind::Request, planned);
            let limits = total(self.pod, Kind::Limit, planned);
            let excess = limits.saturating_sub(ratio.largest_limit(requests));
            most = most.min(limit.milli().saturating_sub(excess));
        }
        let to = MilliCpu::new(most).max(from.limit?).max(request);
        planned[index].limit = Some(to.min(limit));
        (to < limit).then_some(Clamp::LimitRange)
    }
}
