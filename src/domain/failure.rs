//! What a failed write means, and when to try again.
//!
//! The API server says with the same code that a right is missing, that a quota is full and that a node is too small;
//! the texts that tell them apart are Kubernetes' own (1.33 to 1.36).

use std::time::Duration;

/// What went wrong with a write to a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The pod has changed since it was read (409): look again.
    Conflict,
    /// The pod is gone (404, 410), or another one has its name (422 on `metadata.uid`): forget it.
    Gone,
    /// The server asks to come back later (429).
    Throttled(Duration),
    /// It may or may not have happened: a timeout, a broken connection, 5xx. Look again.
    Transient(String),
    /// Our account lacks a right (403 of RBAC).
    MissingRight(String),
    /// The kubelet has not reported resources yet, or is too old to resize (422).
    NotResizable(String),
    /// The API server would add LimitRange defaults to the pod's containers with the resize.
    LimitRangeDefaults(String),
    /// Refused by validation, an admission plugin or a third party's webhook (403, 422).
    Refused(String),
}

/// Shortest and longest pause after a failure that may pass by itself.
const TRANSIENT: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));
/// Longest pause after conflicts: the API server is well, and the pod should be back soon after the others are done with it.
const CONFLICT: Duration = Duration::from_secs(2);
/// Pause after a failure that somebody has to mend: at most one try a minute.
const SLOW: Duration = Duration::from_secs(60);
/// A pod that just started may lack `status.resources` for a moment; so many tries come quickly.
const QUICK_TRIES: u32 = 5;
/// Pause where a 429 names none.
const THROTTLED: Duration = Duration::from_secs(1);

/// What `policy-lower-only.yaml` says of a resize to which LimitRanger has added defaults.
const POLICY: &str = "Headstart must not touch other resources";

impl Failure {
    /// Reads the API server's answer.
    #[must_use]
    pub fn from_status(code: u16, message: &str, retry_after: Option<Duration>) -> Self {
        let text = || message.to_owned();
        match code {
            409 => Self::Conflict,
            // Our own policy notices them before anything is written.
            403 if message.contains(POLICY) => Self::LimitRangeDefaults(text()),
            404 | 410 => Self::Gone,
            422 if message.contains("metadata.uid") => Self::Gone,
            429 => Self::Throttled(retry_after.unwrap_or(THROTTLED)),
            403 if message.contains("cannot patch resource") => Self::MissingRight(text()),
            422 if message.contains("without support for resize") => Self::NotResizable(text()),
            400..=499 => Self::Refused(text()),
            _ => Self::Transient(text()),
        }
    }

    /// How long to wait before the next try, or `None` when there is none to make.
    ///
    /// `failures` counts the failures in a row, this one included; `jitter` is from 0 to 1 and spreads many pods that
    /// failed together over half as much time again.
    #[must_use]
    pub fn pause(&self, failures: u32, jitter: f64) -> Option<Duration> {
        let spread = |pause: Duration| pause.mul_f64(1.0 + jitter.clamp(0.0, 1.0) / 2.0);
        let backoff = || {
            TRANSIENT
                .0
                .saturating_mul(1 << failures.saturating_sub(1).min(16))
                .min(TRANSIENT.1)
        };
        match self {
            Self::Gone => None,
            // The first time at once; a storm of conflicts backs off.
            Self::Conflict if failures <= 1 => Some(Duration::ZERO),
            Self::Conflict => Some(spread(backoff().min(CONFLICT))),
            Self::Transient(_) => Some(spread(backoff())),
            Self::Throttled(pause) => Some(spread(*pause)),
            Self::NotResizable(_) if failures <= QUICK_TRIES => Some(spread(backoff())),
            Self::MissingRight(_)
            | Self::NotResizable(_)
            | Self::LimitRangeDefaults(_)
            | Self::Refused(_) => Some(spread(SLOW)),
        }
    }

    /// Whether it should pass by itself.
    #[must_use]
    pub const fn may_pass(&self) -> bool {
        match self {
            Self::Conflict | Self::Gone | Self::Throttled(_) | Self::Transient(_) => true,
            Self::MissingRight(_)
            | Self::NotResizable(_)
            | Self::LimitRangeDefaults(_)
            | Self::Refused(_) => false,
        }
    }

    /// What the API server says, where it says anything.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Conflict => "the pod changes all the time",
            Self::Gone => "the pod is gone",
            Self::Throttled(_) => "the API server asks to come back later",
            Self::Transient(text)
            | Self::MissingRight(text)
            | Self::NotResizable(text)
            | Self::LimitRangeDefaults(text)
            | Self::Refused(text) => text,
        }
    }

    /// A word for metrics and logs.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Conflict => "Conflict",
            Self::Gone => "Gone",
            Self::Throttled(_) => "Throttled",
            Self::Transient(_) => "Transient",
            Self::MissingRight(_) => "MissingRight",
            Self::NotResizable(_) => "NotResizable",
            Self::LimitRangeDefaults(_) => "LimitRangeDefaults",
            Self::Refused(_) => "Refused",
        }
    }
}
