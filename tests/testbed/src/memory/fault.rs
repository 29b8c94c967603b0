//! What a test does to requests on their way.

use std::{fmt, sync::Arc, time::Duration};

use super::{MemoryServer, Recorded, api::Refusal};
use crate::request::Meant;

type Hook = Arc<dyn Fn(&MemoryServer) + Send + Sync>;
type Filter = Arc<dyn Fn(&Recorded) -> bool + Send + Sync>;

/// An injected fault: which requests it meets, and what becomes of them.
///
/// ```
/// # use testbed::memory::{Fault, MemoryServer};
/// let server = MemoryServer::new();
/// server.fault(Fault::on("PATCH", "/pods/*/resize").who("a").times(2).reply(500, "InternalError", "etcd is away"));
/// ```
///
/// It meets one request unless [`times`](Self::times) or [`always`](Self::always) say otherwise, and passes what it
/// does not end: a fault with a [`delay`](Self::delay) or a hook alone only delays or looks on.
#[derive(Clone, Default)]
pub struct Fault {
    meant: Meant,
    who: Option<String>,
    when: Vec<Filter>,
    pub(super) delay: Duration,
    pub(super) before: Vec<Hook>,
    pub(super) after: Vec<Hook>,
    lost: bool,
    pub(super) end: End,
}

/// A fault that was injected; [`MemoryServer::lift`] takes it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FaultId(pub(super) u64);

#[derive(Clone, Debug, Default)]
pub(super) enum End {
    #[default]
    Answer,
    Reply(Refusal),
    Hang,
    Reset,
}

// === impl Fault ===

impl Fault {
    /// Meets requests with a verb of [`Recorded::verb`] (`*`: any) whose path ends in these segments, `*` being any
    /// one: `/pods/*` is a pod, `/pods/*/resize` its resize, `/pods` the list; the empty path fits all.
    #[must_use]
    pub fn on(verb: &str, path: &str) -> Self {
        Self {
            meant: Meant::on(verb, path),
            ..Self::default()
        }
    }

    /// Meets this client's requests only.
    #[must_use]
    pub fn who(mut self, who: &str) -> Self {
        self.who = Some(who.to_owned());
        self
    }

    /// Meets only requests that `fits` says yes to; it must not call the server, which is locked then.
    #[must_use]
    pub fn when(mut self, fits: impl Fn(&Recorded) -> bool + Send + Sync + 'static) -> Self {
        self.when.push(Arc::new(fits));
        self
    }

    /// Lets the first `n` fitting requests pass.
    #[must_use]
    pub fn skip(mut self, n: u32) -> Self {
        self.meant.skip = n;
        self
    }

    /// Meets `n` requests.
    #[must_use]
    pub fn times(mut self, n: u32) -> Self {
        self.meant.left = Some(n);
        self
    }

    /// Meets requests until it is lifted.
    #[must_use]
    pub fn always(mut self) -> Self {
        self.meant.left = None;
        self
    }

    /// Carries nothing out and answers with this `metav1.Status`.
    #[must_use]
    pub fn reply(mut self, code: u16, reason: &str, message: &str) -> Self {
        self.end = End::Reply(Refusal::new(code, reason, message));
        self
    }

    /// Adds `Retry-After` to the [`reply`](Self::reply), which comes before this, or answers 429 with it.
    #[must_use]
    pub fn retry_after(mut self, seconds: u64) -> Self {
        let mut refusal = match self.end {
            End::Reply(refusal) => refusal,
            _ => Refusal::too_many_requests(),
        };
        refusal.retry_after = Some(seconds);
        self.end = End::Reply(refusal);
        self
    }

    /// Holds the request up before anything else happens to it.
    #[must_use]
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Never answers.
    #[must_use]
    pub fn hang(mut self) -> Self {
        self.end = End::Hang;
        self
    }

    /// Breaks the connection instead of an answer.
    #[must_use]
    pub fn reset(mut self) -> Self {
        self.end = End::Reset;
        self
    }

    /// Carries the request out, then breaks the connection, or never answers if [`hang`](Self::hang) is there too.
    #[must_use]
    pub fn lost_answer(mut self) -> Self {
        self.lost = true;
        match self.end {
            End::Hang => self,
            _ => self.reset(),
        }
    }

    /// Runs `hook` before the request is carried out: somebody else is faster.
    #[must_use]
    pub fn before(mut self, hook: impl Fn(&MemoryServer) + Send + Sync + 'static) -> Self {
        self.before.push(Arc::new(hook));
        self
    }

    /// Runs `hook` once the request is carried out (or would have been), before the answer.
    #[must_use]
    pub fn after(mut self, hook: impl Fn(&MemoryServer) + Send + Sync + 'static) -> Self {
        self.after.push(Arc::new(hook));
        self
    }

    /// Whether the request reaches the store.
    pub(super) fn lands(&self) -> bool {
        self.lost || matches!(self.end, End::Answer)
    }

    fn fits(&self, request: &Recorded) -> bool {
        let who = self.who.as_ref().is_none_or(|who| *who == request.who);
        who && self.meant.fits(request.verb, &request.path)
            && self.when.iter().all(|fits| fits(request))
    }
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fault({}: {:?})", self.meant, self.end)
    }
}

/// The fault that meets this request, counted.
pub(super) fn take(faults: &mut [(FaultId, Fault)], request: &Recorded) -> Option<Fault> {
    let mut fitting = faults
        .iter_mut()
        .map(|(_, fault)| fault)
        .filter(|fault| fault.fits(request));
    fitting.find_map(|fault| fault.meant.meets().then(|| fault.clone()))
}
