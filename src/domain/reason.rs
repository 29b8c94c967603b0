//! The closed list of reasons for which a pod, or a container of it, is not boosted.
//!
//! They appear in metrics, in the audit annotation of the answer and in `headstart explain`; their spelling is an
//! interface.

use std::fmt;

/// Why a boost that matches a pod changes nothing, or less than it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// No container policy fits.
    NoContainer,
    /// The container has neither a CPU request nor a CPU limit.
    NoCPU,
    /// The policy asks for no more than the container has.
    NotHigher,
    /// The boost would change the pod's `QoS` class, and could then not be reverted.
    QoSChange,
    /// `resizePolicy` cpu is `RestartContainer`: the revert would restart it.
    RestartContainer,
    /// The container has resource claims: the API server refuses to resize it (up to 1.36).
    ResourceClaims,
    /// The pod has pod-level resources: before 1.36 it can't be resized.
    PodLevelResources,
    /// The caches had not been read when the review came.
    Unsynced,
}

impl Reason {
    /// All of them, for metrics that exist from the start.
    pub const ALL: [Self; 8] = [
        Self::NoContainer,
        Self::NoCPU,
        Self::NotHigher,
        Self::QoSChange,
        Self::RestartContainer,
        Self::ResourceClaims,
        Self::PodLevelResources,
        Self::Unsynced,
    ];

    /// The word for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NoContainer => "NoContainer",
            Self::NoCPU => "NoCPU",
            Self::NotHigher => "NotHigher",
            Self::QoSChange => "QoSChange",
            Self::RestartContainer => "RestartContainer",
            Self::ResourceClaims => "ResourceClaims",
            Self::PodLevelResources => "PodLevelResources",
            Self::Unsynced => "Unsynced",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
