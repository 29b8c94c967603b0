//! The two CPU values of a container.

use std::fmt;

use serde::Serialize;

use super::quantity::MilliCpu;
use crate::api::Container;

/// A container's two CPU values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Cpu {
    /// Request; `None` is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<MilliCpu>,
    /// Limit; `None` is absent, which is more than any limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<MilliCpu>,
}

/// As `request/limit`, with `-` for what is absent.
impl fmt::Display for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |value: Option<MilliCpu>| value.map_or("-".to_owned(), |cpu| cpu.to_string());
        write!(f, "{}/{}", text(self.request), text(self.limit))
    }
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
