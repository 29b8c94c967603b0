//! The `QoS` class of a pod, as `GetPodQOS` in Kubernetes computes it from containers and init containers.
//!
//! A boost must not change it: a pod created in another class could never be resized back (`ValidatePodResize`).

use super::{cpu::Cpu, quantity::parse_milli};
use crate::api::Pod;

/// Quality of service, decided by CPU and memory alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QosClass {
    /// Every container has equal requests and limits of both.
    Guaranteed,
    /// Something is set.
    Burstable,
    /// Nothing is set.
    BestEffort,
}

/// The class that `pod` would have if `cpu(i)` were the values of its i-th container (regular ones, then init ones).
///
/// Amounts that can't be read count as set and unequal; the API server refuses such a pod anyway.
pub fn qos_class(pod: &Pod, cpu: impl Fn(usize) -> Cpu) -> QosClass {
    let (mut any, mut guaranteed) = (false, true);
    // Sums over all containers, as Kubernetes compares them: [cpu, memory].
    let (mut requests, mut limits) = ([0u128; 2], [0u128; 2]);
    for (index, container) in pod.all_containers().enumerate() {
        let cpu = cpu(index);
        let memory = |amounts: Option<&crate::api::Amounts>| {
            let text = amounts.and_then(|amounts| amounts.memory.as_deref());
            text.map_or(0, |text| parse_milli(text).unwrap_or(1))
        };
        let request = [
            milli(cpu.request),
            memory(container.resources.requests.as_ref()),
        ];
        let limit = [
            milli(cpu.limit),
            memory(container.resources.limits.as_ref()),
        ];
        any |= request.iter().chain(&limit).any(|amount| *amount > 0);
        guaranteed &= limit.iter().all(|amount| *amount > 0);
        for resource in 0..2 {
            // Amounts of memory may be anything up to 128 bits; the API server caps each at 64 when it compares.
            requests[resource] = requests[resource].saturating_add(request[resource]);
            limits[resource] = limits[resource].saturating_add(limit[resource]);
        }
    }
    match (any, guaranteed && requests == limits) {
        (false, _) => QosClass::BestEffort,
        (true, true) => QosClass::Guaranteed,
        (true, false) => QosClass::Burstable,
    }
}

fn milli(cpu: Option<super::quantity::MilliCpu>) -> u128 {
    cpu.map_or(0, |cpu| u128::from(cpu.milli()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Found by fuzzing: four times 10³⁵ bytes are more thousandths than 128 bits hold.
    #[test]
    fn absurd_amounts_of_memory_are_summed() {
        let amounts = json!({"cpu": "1", "memory": "100000000000000000000000000000000000"});
        let container =
            |name| json!({"name": name, "resources": {"requests": amounts, "limits": amounts}});
        let containers = ["a", "b", "c", "d"].map(container);
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {}, "spec": {"containers": containers}}))
                .expect("it is a pod");
        let cpus: Vec<Cpu> = pod.all_containers().map(Cpu::of).collect();
        assert_eq!(qos_class(&pod, |index| cpus[index]), QosClass::Guaranteed);
    }
}
