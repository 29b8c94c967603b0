//! The CPU bounds of a namespace's LimitRanges.
//!
//! LimitRanger judges the pod as the webhooks have left it, so a boost that breaks a bound would refuse the pod (403).

use super::{
    cpu::Cpu,
    quantity::{MilliCpu, parse_milli},
    totals::{Kind, total},
};
use crate::api::{Amounts, CpuAmount, Keys, LimitRangeItem, Pod};

/// What all LimitRanges of a namespace say together: of several bounds the narrowest counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitRanges {
    /// For each container.
    pub container: Bounds,
    /// For the pod's totals.
    pub pod: Bounds,
    /// Whether a container without a limit would get one, or refuse the pod.
    pub wants_limits: bool,
    /// What containers get that name no limit.
    default_limits: Defaults,
    /// What containers get that name no request.
    default_requests: Defaults,
}

/// Which resources have a default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Defaults {
    cpu: bool,
    memory: bool,
    other: bool,
}

impl Defaults {
    fn add(&mut self, keys: &Keys) {
        for key in keys.keys() {
            match key.as_str() {
                "cpu" => self.cpu = true,
                "memory" => self.memory = true,
                _ => self.other = true,
            }
        }
    }

    /// Whether a container with these amounts would get another. What else it has is not known here, so any other default
    /// counts.
    fn add_to(self, amounts: Option<&Amounts>) -> bool {
        let lacks = |amount: fn(&Amounts) -> &Option<String>| {
            amounts.is_none_or(|amounts| amount(amounts).is_none())
        };
        self.other
            || (self.cpu && lacks(|amounts| &amounts.cpu))
            || (self.memory && lacks(|amounts| &amounts.memory))
    }
}

/// Bounds of one type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Least request and limit.
    pub min: Option<MilliCpu>,
    /// Largest request and limit.
    pub max: Option<MilliCpu>,
    /// Of limit ÷ request.
    pub ratio: Option<Ratio>,
}

/// `maxLimitRequestRatio`, in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ratio(u64);

impl LimitRanges {
    /// Reads the entries of all LimitRanges of a namespace. Amounts that can't be read bound nothing.
    pub fn new<'a>(items: impl IntoIterator<Item = &'a LimitRangeItem>) -> Self {
        let mut ranges = Self::default();
        for item in items {
            let bounds = match item.kind.as_str() {
                "Container" => &mut ranges.container,
                "Pod" => &mut ranges.pod,
                _ => continue,
            };
            let read = |amount: &CpuAmount| amount.cpu.as_deref()?.parse::<MilliCpu>().ok();
            let max = read(&item.max);
            let ratio = item.max_limit_request_ratio.cpu.as_deref();
            let ratio = ratio.and_then(Ratio::read);
            bounds.min = bounds.min.max(read(&item.min));
            bounds.max = least(bounds.max, max);
            bounds.ratio = least(bounds.ratio, ratio);
            ranges.wants_limits |= max.is_some() || ratio.is_some();
            if item.kind == "Container" {
                ranges.wants_limits |= item.default_limit.contains_key("cpu");
                ranges.default_limits.add(&item.default_limit);
                ranges.default_requests.add(&item.default_request);
            }
        }
        ranges
    }

    /// Whether LimitRanger would admit the pod if `values` were its containers' (`PodValidateLimitFunc`). It judges a
    /// resize too, so a pod of which this is false can't be resized back.
    #[must_use]
    pub fn admit(&self, pod: &Pod, values: &[Cpu]) -> bool {
        let sum = |kind: Kind| {
            let is_there = values.iter().any(|cpu| kind.of(*cpu).is_some());
            is_there.then(|| MilliCpu::new(total(pod, kind, values)))
        };
        let whole = || Cpu {
            request: sum(Kind::Request),
            limit: sum(Kind::Limit),
        };
        values.iter().all(|cpu| self.container.admit(*cpu)) && self.pod.admit(whole())
    }

    /// Whether the API server might add defaults to a pod that is resized, as it does to all containers alike.
    #[must_use]
    pub fn might_add_to(&self, pod: &Pod) -> bool {
        pod.all_containers().any(|container| {
            let resources = &container.resources;
            self.default_limits.add_to(resources.limits.as_ref())
                || self.default_requests.add_to(resources.requests.as_ref())
        })
    }
}

impl Bounds {
    /// What bounds a value must be there: `minConstraint`, `maxConstraint` and `limitRequestRatioConstraint` of the
    /// LimitRanger plugin.
    fn admit(&self, cpu: Cpu) -> bool {
        let Cpu { request, limit } = cpu;
        let above = |min| {
            request.is_some_and(|request| request >= min) && limit.is_none_or(|limit| limit >= min)
        };
        let below = |max| {
            limit.is_some_and(|limit| limit <= max) && request.is_none_or(|request| request <= max)
        };
        let near = |ratio: Ratio| match (request, limit) {
            (Some(request), Some(limit)) if !request.is_zero() && !limit.is_zero() => {
                ratio.allows(limit.milli(), request.milli())
            }
            _ => false,
        };
        self.min.is_none_or(above) && self.max.is_none_or(below) && self.ratio.is_none_or(near)
    }
}

fn least<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

impl Ratio {
    fn read(text: &str) -> Option<Self> {
        parse_milli(text)
            .ok()
            .and_then(|milli| u64::try_from(milli).ok())
            .map(Self)
    }

    /// Whether a limit stays within it. Computed as LimitRanger does (`limitRequestRatioConstraint`, floating point
    /// included): an exact comparison could find fitting what the API server refuses.
    #[must_use]
    #[allow(clippy::cast_precision_loss)]
    pub fn allows(self, limit: u64, request: u64) -> bool {
        (limit as f64 / request as f64) * 1000.0 <= self.0 as f64
    }

    /// The largest limit for a request, in milli-CPU.
    #[must_use]
    pub fn largest_limit(self, request: u64) -> u64 {
        let exact = u128::from(self.0) * u128::from(request) / 1000;
        let exact = u64::try_from(exact).unwrap_or(u64::MAX);
        // Floating point may be off by one last digit, never by 1m.
        if self.allows(exact, request) {
            exact
        } else {
            exact.saturating_sub(1)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn item(kind: &str, max: Option<&str>, ratio: Option<&str>) -> LimitRangeItem {
        let amount = |cpu: Option<&str>| crate::api::CpuAmount {
            cpu: cpu.map(str::to_owned),
        };
        LimitRangeItem {
            kind: kind.to_owned(),
            max: amount(max),
            max_limit_request_ratio: amount(ratio),
            ..LimitRangeItem::default()
        }
    }

    #[test]
    fn the_least_of_several_bounds_counts() {
        let items = [
            item("Container", Some("2"), Some("3")),
            item("Pod", Some("8"), None),
            item("Container", Some("1500m"), Some("4")),
            item("PersistentVolumeClaim", Some("1m"), None),
        ];
        let ranges = LimitRanges::new(&items);
        assert_eq!(ranges.container.max, Some(MilliCpu::new(1500)));
        assert_eq!(ranges.container.ratio, Some(Ratio(3000)));
        assert_eq!(ranges.pod.max, Some(MilliCpu::new(8000)));
        assert!(ranges.wants_limits);
        assert_eq!(LimitRanges::new([]), LimitRanges::default());
    }

    #[test]
    fn values_are_admitted_as_limit_ranger_admits_them() {
        let cpu = |request: u64, limit: u64| {
            let some = |milli| (milli > 0).then(|| MilliCpu::new(milli));
            Cpu {
                request: some(request),
                limit: some(limit),
            }
        };
        let bounds = Bounds {
            min: Some(MilliCpu::new(100)),
            ..Bounds::default()
        };
        assert!(bounds.admit(cpu(100, 0)) && bounds.admit(cpu(100, 100)));
        assert!(!bounds.admit(cpu(99, 100)) && !bounds.admit(cpu(0, 100)));
        let bounds = Bounds {
            max: Some(MilliCpu::new(100)),
            ..Bounds::default()
        };
        assert!(bounds.admit(cpu(100, 100)) && bounds.admit(cpu(0, 100)));
        assert!(!bounds.admit(cpu(100, 0)) && !bounds.admit(cpu(100, 101)));
        let bounds = Bounds {
            ratio: Some(Ratio(4000)),
            ..Bounds::default()
        };
        assert!(bounds.admit(cpu(100, 400)));
        assert!(!bounds.admit(cpu(100, 401)) && !bounds.admit(cpu(100, 0)));
    }

    proptest! {
        #[test]
        fn the_largest_limit_is_allowed_and_one_more_is_not(ratio in 1000..100_000u64, request in 1..10_000_000u64) {
            let ratio = Ratio(ratio);
            let limit = ratio.largest_limit(request);
            prop_assert!(ratio.allows(limit, request));
            prop_assert!(!ratio.allows(limit + 2, request));
        }
    }
}
