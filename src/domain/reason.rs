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
    /// A container of the pod has resource claims: the API server refuses to resize such a pod (up to 1.36).
    ResourceClaims,
    /// The pod has pod-level resources: before 1.36 it can't be resized.
    PodLevelResources,
    /// It could land on a node whose kubelet is older than 1.33 and can't resize.
    OldKubelet,
    /// It is Guaranteed, and `--skip-guaranteed` leaves those out.
    Guaranteed,
    /// A ResourceQuota has no room for the boost.
    Quota,
    /// A LimitRange, `--max-boosted-cpu` or the largest node leaves nothing to raise; or the API server would refuse the
    /// pod as it is; or it has so many containers that its record could not be read again.
    Clamped,
    /// The namespace has opted out.
    Disabled,
    /// The caches had not been read when the review came.
    Unsynced,
}

impl Reason {
    /// All of them, for metrics that exist from the start.
    pub const ALL: [Self; 13] = [
        Self::NoContainer,
        Self::NoCPU,
        Self::NotHigher,
        Self::QoSChange,
        Self::RestartContainer,
        Self::ResourceClaims,
        Self::PodLevelResources,
        Self::OldKubelet,
        Self::Guaranteed,
        Self::Quota,
        Self::Clamped,
        Self::Disabled,
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
            Self::OldKubelet => "OldKubelet",
            Self::Guaranteed => "Guaranteed",
            Self::Quota => "Quota",
            Self::Clamped => "Clamped",
            Self::Disabled => "Disabled",
            Self::Unsynced => "Unsynced",
        }
    }

    /// What it means, for people.
    #[must_use]
    pub const fn sentence(self) -> &'static str {
        match self {
            Self::NoContainer => "no container policy fits",
            Self::NoCPU => "it has neither a CPU request nor a CPU limit",
            Self::NotHigher => "the policy asks for no more than it has",
            Self::QoSChange => "the pod would get another QoS class and could not be resized back",
            Self::RestartContainer => {
                "its resizePolicy for cpu is RestartContainer: taking the boost back would restart it"
            }
            Self::ResourceClaims => "a container has resource claims: such a pod can't be resized",
            Self::PodLevelResources => {
                "the pod has pod-level resources: before Kubernetes 1.36 it can't be resized"
            }
            Self::OldKubelet => {
                "it could land on a node whose kubelet is older than 1.33 and can't take the boost back; --allow-old-kubelets boosts it all the same"
            }
            Self::Guaranteed => "the pod is Guaranteed, and --skip-guaranteed is set",
            Self::Quota => {
                "a ResourceQuota has no room for the boost; --ignore-quota boosts it all the same, and the API server refuses it"
            }
            Self::Clamped => {
                "a LimitRange, --max-boosted-cpu or the largest node leaves nothing to raise, or the API server refuses the pod as it is"
            }
            Self::Disabled => {
                "its namespace has the label autoscaling.x-k8s.io/startup-cpu-boost: disabled"
            }
            Self::Unsynced => "the caches had not been read yet",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
