//! What a whole pod asks for, as LimitRanger, ResourceQuota and the scheduler sum it.

use super::{cpu::Cpu, quantity::MilliCpu};
use crate::api::{Container, Pod};

/// Which of a container's two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// CPU request.
    Request,
    /// CPU limit.
    Limit,
}

impl Kind {
    /// That value.
    #[must_use]
    pub const fn of(self, cpu: Cpu) -> Option<MilliCpu> {
        match self {
            Self::Request => cpu.request,
            Self::Limit => cpu.limit,
        }
    }
}

/// The pod's total in milli-CPU if `values` were its containers' (regular ones, then init ones); what is absent counts
/// as nothing.
///
/// Containers and sidecars run together; before them each init container runs with the sidecars started by then. The
/// larger counts (`PodRequests` and `PodLimits` of k8s.io/component-helpers; `podRequests` of the LimitRanger plugin).
/// The sandbox's overhead is not in it.
#[must_use]
pub fn total(pod: &Pod, kind: Kind, values: &[Cpu]) -> u64 {
    let milli = |cpu: &Cpu| kind.of(*cpu).map_or(0, MilliCpu::milli);
    let (regular, init) = values.split_at(pod.spec.containers.len().min(values.len()));
    let running: u64 = regular.iter().map(milli).sum();
    let (mut sidecars, mut starting) = (0, 0);
    for (container, cpu) in pod.spec.init_containers.iter().zip(init) {
        let alone = if Container::is_sidecar(container) {
            sidecars += milli(cpu);
            0
        } else {
            milli(cpu)
        };
        starting = starting.max(sidecars + alone);
    }
    starting.max(running + sidecars)
}

/// What the sandbox needs beside the containers, in milli-CPU: quotas and the scheduler count it, LimitRanges don't.
#[must_use]
pub fn overhead(pod: &Pod) -> u64 {
    let overhead = pod.spec.overhead.as_ref();
    let cpu = overhead.and_then(|overhead| overhead.cpu.as_deref()?.parse::<MilliCpu>().ok());
    cpu.map_or(0, MilliCpu::milli)
}
