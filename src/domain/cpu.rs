//! The two CPU values of a container.

use super::quantity::MilliCpu;
use crate::api::Container;

/// A container's two CPU values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu {
    /// Request; `None` is absent.
    pub request: Option<MilliCpu>,
    /// Limit; `None` is absent, which is more than any limit.
    pub limit: Option<MilliCpu>,
}

impl Cpu {
    /// A container's present values. A value that is no quantity reads as absent (the API server refuses such a pod).
    #[must_use]
    pub fn of(container: &Container) -> Self {
        let read = |text: Option<&str>| text.and_then(|text| text.parse().ok());
        Self {
            request: read(container.cpu_request()),
            limit: read(container.cpu_limit()),
        }
    }

    /// Whether there is nothing to raise.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.request.is_none_or(MilliCpu::is_zero) && self.limit.is_none_or(MilliCpu::is_zero)
    }
}
