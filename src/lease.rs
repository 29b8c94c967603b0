//! Leader election on a `coordination.k8s.io/v1` Lease: client-go's algorithm, with the term as a value.
//!
//! The lease saves work and protects nothing: a paused leader may write after its term, so each write is safe by itself
//! (`metadata.uid` and `metadata.resourceVersion` in its body). That is why the times may be short: a lease lost to a
//! slow API server ends the term, not the process.

use std::{future::Future, time::Duration};

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{Api, api::PostParams};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::{contact::Contact, error::Chain};

/// Releasing is a courtesy to the next leader; it must not hold up the end.
const RELEASE_DEADLINE: Duration = Duration::from_secs(2);

/// Which lease, for whom, and how long.
#[derive(Clone, Debug)]
pub struct Params {
    /// The Lease object's name. It must exist: the manifests bring it, so that no right to create leases is needed.
    pub name: String,
    /// Who this replica is: its pod's name, so that a restarted container takes up its own term again at once.
    pub identity: String,
    /// How long a follower waits after the last change that it saw.
    pub lease: Duration,
    /// The leader stops working this long after its last successful renewal was sent.
    pub deadline: Duration,
    /// Between two attempts.
    pub retry: Duration,
}

impl Params {
    /// The times of DESIGN: 6 s, 4 s and 1 s. After a crash the next leader begins within 6 s + 1.2 s.
    #[must_use]
    pub fn new(name: impl Into<String>, identity: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            identity: identity.into(),
            lease: Duration::from_secs(6),
            deadline: Duration::from_secs(4),
            retry: Duration::from_secs(1),
        }
    }
}

/// What this replica last saw, dated by its own monotonic clock: times that others wrote are never compared.
#[derive(Default)]
struct Observed(Option<(LeaseSpec, Instant)>);

impl Observed {
    fn see(&mut self, spec: &LeaseSpec) {
        if self.0.as_ref().is_none_or(|(seen, _)| seen != spec) {
            self.0 = Some((spec.clone(), Instant::now()));
        }
    }

    fn expired(&self, lease: Duration) -> bool {
        self.0.as_ref().is_some_and(|(_, at)| at.elapsed() >= lease)
    }

    /// When a lease that nobody renews runs out, if that is still to come.
    fn runs_out(&self, lease: Duration) -> Option<Instant> {
        let (_, at) = self.0.as_ref()?;
        Some(*at + lease).filter(|runs_out| *runs_out > Instant::now())
    }
}

/// A candidate.
pub struct Elector {
    api: Api<Lease>,
    params: Params,
    seen: Observed,
    contact: Option<Contact>,
    /// The last attempt was not answered.
    silent: bool,
}

impl Elector {
    /// A candidate on this API, whose client should have connections of its own: renewals must not wait behind other
    /// requests.
    ///
    /// # Panics
    /// When the times are not in order: twice `retry` < `deadline` < `lease`.
    #[must_use]
    pub fn new(api: Api<Lease>, params: Params) -> Self {
        assert!(
            params.retry * 2 < params.deadline && params.deadline < params.lease,
            "lease times out of order"
        );
        Self {
            api,
            params,
            seen: Observed::default(),
            contact: None,
            silent: false,
        }
    }

    /// Renews this contact whenever the API server answers again after it did not.
    #[must_use]
    pub fn renewing(self, contact: Contact) -> Self {
        let contact = Some(contact);
        Self { contact, ..self }
    }

    /// Runs `lead` once a term until `stop`. The token given to `lead` is cancelled when the term ends; work that does
    /// not end by itself is dropped before a follower may begin.
    pub async fn run<F, Fut>(mut self, stop: CancellationToken, mut lead: F)
    where
        F: FnMut(CancellationToken) -> Fut,
        Fut: Future<Output = ()>,
    {
        while !stop.is_cancelled() {
            let mut renewed = tokio::select! {
                () = stop.cancelled() => return,
                sent = self.acquire() => sent,
            };
            let term = stop.child_token();
            tracing::info!(identity = self.params.identity, "leading");
            {
                let work = lead(term.clone());
                tokio::pin!(work);
                let done = tokio::select! {
                    () = self.renew_until_lost(&mut renewed) => false,
                    () = stop.cancelled() => false,
                    () = &mut work => true,
                };
                term.cancel();
                if !done {
                    // A follower counts from when it saw our last write, which is later than when we sent it.
                    let _ = timeout_at(renewed + self.params.lease, &mut work).await;
                }
            }
            // At the end of the process it is released in any case: that is guarded by a look at the holder.
            let lost = !stop.is_cancelled() && renewed.elapsed() >= self.params.deadline;
            tracing::info!(identity = self.params.identity, lost, "no longer leading");
            if !lost {
                self.release().await;
            }
        }
    }

    /// Returns when the successful attempt was sent.
    async fn acquire(&mut self) -> Instant {
        loop {
            let sent = Instant::now();
            if self.bounded_attempt().await {
                return sent;
            }
            // Spread, so that followers don't ask in step; but at the instant at which the lease runs out at the latest.
            let next = Instant::now() + self.params.retry.mul_f64(1.0 + 0.2 * fastrand::f64());
            let runs_out = self.seen.runs_out(self.params.lease);
            sleep_until(runs_out.map_or(next, |runs_out| next.min(runs_out))).await;
        }
    }

    /// Returns once the deadline has passed since the last successful renewal was sent.
    async fn renew_until_lost(&mut self, renewed: &mut Instant) {
        let mut sent = *renewed;
        loop {
            let end = *renewed + self.params.deadline;
            // Counted from the sending, so that an attempt that hangs leaves time for another.
            sleep_until((sent + self.params.retry).max(Instant::now()).min(end)).await;
            sent = Instant::now();
            if sent >= end {
                return;
            }
            if timeout_at(end, self.bounded_attempt())
                .await
                .unwrap_or(false)
            {
                *renewed = sent;
            }
        }
    }

    async fn bounded_attempt(&mut self) -> bool {
        let answer = timeout(self.params.deadline / 2, self.attempt()).await;
        let was_silent = std::mem::replace(&mut self.silent, answer.is_err());
        if let (true, Ok(_), Some(contact)) = (was_silent, &answer, &self.contact) {
            contact.renew();
        }
        match answer {
            Ok(Ok(held)) => held,
            Ok(Err(error)) => {
                tracing::warn!(lease = self.params.name, error = %Chain(&error), "the lease could not be read or written");
                false
            }
            Err(_) => {
                tracing::warn!(
                    lease = self.params.name,
                    "the API server did not answer about the lease"
                );
                false
            }
        }
    }

    /// One read, then one conditional write: `resourceVersion` makes two winners impossible.
    async fn attempt(&mut self) -> kube::Result<bool> {
        let mut lease = self.api.get(&self.params.name).await?;
        let spec = lease.spec.take().unwrap_or_default();
        self.seen.see(&spec);
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        let mine = holder == self.params.identity;
        if !mine && !holder.is_empty() && !self.seen.expired(self.params.lease) {
            return Ok(false);
        }
        let now = MicroTime(Timestamp::now());
        lease.spec = Some(if mine {
            LeaseSpec {
                renew_time: Some(now),
                ..spec
            }
        } else {
            self.claim(spec, now)
        });
        match self
            .api
            .replace(&self.params.name, &PostParams::default(), &lease)
            .await
        {
            Ok(lease) => {
                self.seen.see(&lease.spec.unwrap_or_default());
                Ok(true)
            }
            Err(kube::Error::Api(status)) if status.is_conflict() => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn claim(&self, spec: LeaseSpec, now: MicroTime) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.params.identity.clone()),
            lease_duration_seconds: i32::try_from(self.params.lease.as_secs()).ok(),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            lease_transitions: Some(spec.lease_transitions.unwrap_or(0) + 1),
            ..spec
        }
    }

    /// Lets the next leader begin at once.
    async fn release(&mut self) {
        let free = async {
            let mut lease = self.api.get(&self.params.name).await?;
            let mine = |spec: &&mut LeaseSpec| {
                spec.holder_identity.as_deref() == Some(&*self.params.identity)
            };
            let Some(spec) = lease.spec.as_mut().filter(mine) else {
                return Ok(());
            };
            spec.holder_identity = None;
            spec.lease_duration_seconds = Some(1);
            self.api
                .replace(&self.params.name, &PostParams::default(), &lease)
                .await
                .map(drop)
        };
        let released: Result<kube::Result<()>, _> = timeout(RELEASE_DEADLINE, free).await;
        if !matches!(released, Ok(Ok(()))) {
            tracing::warn!(
                lease = self.params.name,
                "the lease was not released; the next leader waits it out"
            );
        }
    }
}
