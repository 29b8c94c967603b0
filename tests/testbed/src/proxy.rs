//! A way to the API server that loses, delays and refuses requests: an HTTPS reverse proxy, one for each client to be troubled.
//!
//! It shows the API server's own certificate, so a kubeconfig needs no more than another port. Clients are known by bearer tokens,
//! which pass through; a client certificate would end here. A request is taken whole before anything becomes of it, and is then
//! carried out even if its client has gone; answers stream.

use std::{
    collections::BTreeMap,
    fmt, io,
    net::{Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Poll,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use futures::{FutureExt as _, TryStreamExt as _, future::FusedFuture as _, stream};
use http::Request;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::{
    body::{Body, Bytes, Incoming},
    client::conn::http1::SendRequest,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use load::client::connector;
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{oneshot, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    control_plane::ControlPlane,
    memory::{Refusal, Reply},
    pki::Pki,
    request::{Meant, verb},
};

/// A fault: which requests it meets, and what becomes of them. See [`crate::memory::Fault`], whose words these are.
///
/// It meets one request unless [`times`](Self::times) or [`always`](Self::always) say otherwise, and one with a
/// [`delay`](Self::delay) alone lets requests pass.
#[derive(Clone, Debug)]
pub struct Fault {
    meant: Meant,
    share: Option<(f64, fastrand::Rng)>,
    delay: Duration,
    end: End,
}

#[derive(Clone, Debug)]
enum End {
    Answer,
    Reply(Refusal),
    Hang,
    LostAnswer,
}

/// Where on its way a [`Hold`] stops a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Moment {
    /// Before the API server has seen it.
    Before,
    /// When it was carried out: its answer is stopped.
    After,
}

/// Stops one request. Dropped, it never lets go of what it has stopped, and stops nothing any more.
#[derive(Debug)]
#[must_use = "dropping it loses the request"]
pub struct Hold {
    what: String,
    arrived: watch::Receiver<bool>,
    released: oneshot::Sender<()>,
}

/// The proxy's end of a [`Hold`].
#[derive(Debug)]
struct Holding {
    meant: Meant,
    moment: Moment,
    arrived: watch::Sender<bool>,
    released: oneshot::Receiver<()>,
}

/// One request as the proxy saw it.
#[derive(Clone, Debug)]
pub struct Seen {
    /// `GET`, `LIST`, `WATCH`, `POST`, `PUT`, `PATCH` or `DELETE`.
    pub verb: &'static str,
    /// The path with the query.
    pub path: String,
    /// Of the answer, whether or not that reached the client; 0 while there is none.
    pub status: u16,
    /// When it arrived.
    pub when: Instant,
}

/// The running proxy. Dropping it closes the port and all connections through it, and nothing is forwarded any more.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    desk: Arc<Desk>,
    _ends: DropGuard,
}

/// What all connections share.
struct Desk {
    server: SocketAddr,
    connector: TlsConnector,
    state: Mutex<State>,
    silences: watch::Sender<()>,
    end: CancellationToken,
}

#[derive(Debug, Default)]
struct State {
    faults: Vec<Fault>,
    holds: Vec<Holding>,
    requests: u64,
    seen: BTreeMap<u64, Seen>,
}

/// What a request met when it arrived.
struct Met {
    id: u64,
    fault: Option<Fault>,
    before: Option<Holding>,
    after: Option<Holding>,
}

/// A connection to the API server, beside each one to a client. It is made anew when the API server has closed it.
type Upstream = tokio::sync::Mutex<Option<SendRequest<Full<Bytes>>>>;

// === impl Fault ===

impl Fault {
    /// Meets requests with a verb of [`Seen::verb`] (`*`: any) whose path, without the query, ends in these segments, `*` being any
    /// one: `/pods/*` is a pod, `/pods/*/resize` its resize, `/pods` the list; the empty path fits all.
    #[must_use]
    pub fn on(verb: &str, path: &str) -> Self {
        Self {
            meant: Meant::on(verb, path),
            share: None,
            delay: Duration::ZERO,
            end: End::Answer,
        }
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

    /// Meets requests until [`Proxy::clear`].
    #[must_use]
    pub fn always(mut self) -> Self {
        self.meant.left = None;
        self
    }

    /// Meets only this share of the fitting requests, from 0 to 1: which ones, the seed says.
    #[must_use]
    pub fn share(mut self, share: f64, seed: u64) -> Self {
        self.share = Some((share, fastrand::Rng::with_seed(seed)));
        self
    }

    /// Forwards nothing and answers with this `metav1.Status`.
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

    /// Never answers, and forwards nothing.
    #[must_use]
    pub fn hang(mut self) -> Self {
        self.end = End::Hang;
        self
    }

    /// Forwards the request, and never answers.
    #[must_use]
    pub fn lost_answer(mut self) -> Self {
        self.end = End::LostAnswer;
        self
    }

    /// Whether it meets this request, which is counted.
    fn meets(&mut self, verb: &str, path: &str) -> bool {
        let Self { meant, share, .. } = self;
        meant.fits(verb, path)
            && share
                .as_mut()
                .is_none_or(|(share, random)| random.f64() < *share)
            && meant.meets()
    }
}

// === impl Hold ===

impl Hold {
    /// Waits until a request is held.
    ///
    /// # Errors
    /// If none is by the deadline.
    pub async fn arrived(&self, deadline: Duration) -> Result<()> {
        let mut arrived = self.arrived.clone();
        let held = timeout(deadline, arrived.wait_for(|arrived| *arrived)).await;
        let what = || format!("waiting for {}", self.what);
        held.with_context(what)?.map(drop).with_context(what)
    }

    /// Lets the request go on its way, whether or not its client still waits for it.
    pub fn release(self) {
        // Where no request has come, or the proxy is gone, nobody waits.
        self.released.send(()).ok();
    }
}

impl Holding {
    /// Whether the request may go on.
    async fn passes(self) -> bool {
        self.arrived.send_replace(true);
        self.released.await.is_ok()
    }
}

// === impl Proxy ===

impl Proxy {
    /// Listens on a free loopback port, before this API server.
    ///
    /// # Errors
    /// If there is no free port, or the certificates can't be read.
    pub async fn start(plane: &ControlPlane) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .await
            .context("opening a port for the proxy")?;
        let address = listener.local_addr().context("reading the proxy's port")?;
        let end = CancellationToken::new();
        let desk = Arc::new(Desk {
            server: plane.address(),
            connector: connector(&plane.pki().path("ca.crt"))?,
            state: Mutex::default(),
            silences: watch::Sender::default(),
            end: end.clone(),
        });
        desk.spawn(accept(listener, acceptor(plane.pki())?, Arc::clone(&desk)));
        Ok(Self {
            address,
            desk,
            _ends: end.drop_guard(),
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Injects a fault; the first that fits a request acts on it.
    pub fn fault(&self, fault: Fault) {
        self.desk.state().faults.push(fault);
    }

    /// Ends all faults. Requests that one hangs stay hung, and holds hold.
    pub fn clear(&self) {
        self.desk.state().faults.clear();
    }

    /// Silences all answers that are open, which are watches: nothing more comes of them, and their connections stay open.
    pub fn silence(&self) {
        self.desk.silences.send_replace(());
    }

    /// Stops the next request that [`Fault::on`] would meet.
    pub fn hold(&self, verb: &str, path: &str, moment: Moment) -> Hold {
        let meant = Meant::on(verb, path);
        let what = format!("{meant}, to be held {moment:?}");
        let (arrived, released) = (watch::channel(false), oneshot::channel());
        self.desk.state().holds.push(Holding {
            meant,
            moment,
            arrived: arrived.0,
            released: released.1,
        });
        Hold {
            what,
            arrived: arrived.1,
            released: released.0,
        }
    }

    /// The requests since the start or the last [`forget`](Self::forget), in order of arrival.
    #[must_use]
    pub fn requests(&self) -> Vec<Seen> {
        self.desk.state().seen.values().cloned().collect()
    }

    /// Forgets the requests so far.
    pub fn forget(&self) {
        self.desk.state().seen.clear();
    }
}

/// A body that, once it is silenced, neither goes on nor ends.
fn until_silenced(
    mut body: Incoming,
    mut silences: watch::Receiver<()>,
) -> impl Body<Data = Bytes, Error = io::Error> {
    let mut over = Box::pin(async move { silences.changed().await.ok() }.fuse());
    let frames = stream::poll_fn(move |context| {
        if over.is_terminated() || over.poll_unpin(context).is_ready() {
            return Poll::Pending;
        }
        Pin::new(&mut body).poll_frame(context)
    });
    StreamBody::new(frames.map_err(io::Error::other))
}

/// TLS as the API server has it, HTTP/1.1 alone.
fn acceptor(pki: &Pki) -> Result<TlsAcceptor> {
    let (certificate, key) = (pki.path("apiserver.crt"), pki.path("apiserver.key"));
    let certificate =
        CertificateDer::from_pem_file(certificate).context("reading the certificate")?;
    let key = PrivateKeyDer::from_pem_file(key).context("reading the key")?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn accept(listener: TcpListener, acceptor: TlsAcceptor, desk: Arc<Desk>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Ok((client, _)) = listener.accept() => {
                connections.spawn(Arc::clone(&desk).converse(client, acceptor.clone()));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

// === impl Desk ===

impl Desk {
    async fn converse(self: Arc<Self>, client: TcpStream, acceptor: TlsAcceptor) {
        client.set_nodelay(true).ok();
        let Ok(client) = acceptor.accept(client).await else {
            return;
        };
        let upstream = Arc::new(Upstream::default());
        let service = service_fn(|request| Arc::clone(&self).serve(Arc::clone(&upstream), request));
        let http = hyper::server::conn::http1::Builder::new();
        // How it ends is the client's affair.
        http.serve_connection(TokioIo::new(client), service)
            .await
            .ok();
    }

    /// An error breaks the connection.
    async fn serve(
        self: Arc<Self>,
        upstream: Arc<Upstream>,
        request: Request<Incoming>,
    ) -> io::Result<Reply> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
        let request = Request::from_parts(head, Full::new(body));
        let (answer, answered) = oneshot::channel();
        // A task of its own: what is under way stays under way when the client is gone.
        let desk = Arc::clone(&self);
        self.spawn(async move {
            if let Some(reply) = desk.carry(&upstream, request).await.transpose() {
                answer.send(reply).ok();
            }
        });
        match answered.await {
            Ok(reply) => reply,
            Err(_) => std::future::pending().await,
        }
    }

    /// None: there is to be no answer.
    async fn carry(
        &self,
        upstream: &Upstream,
        request: Request<Full<Bytes>>,
    ) -> io::Result<Option<Reply>> {
        let Met {
            id,
            fault,
            before,
            after,
        } = self.arrive(&request);
        if let Some(hold) = before
            && !hold.passes().await
        {
            return Ok(None);
        }
        let (delay, end) = fault.map_or((Duration::ZERO, End::Answer), |fault| {
            (fault.delay, fault.end)
        });
        sleep(delay).await;
        let reply = match &end {
            End::Hang => return Ok(None),
            End::Reply(refusal) => refusal.reply(),
            End::Answer | End::LostAnswer => self.forward(upstream, request).await?,
        };
        if let Some(seen) = self.state().seen.get_mut(&id) {
            seen.status = reply.status().as_u16();
        }
        let lost = matches!(end, End::LostAnswer);
        if let Some(hold) = after
            && !hold.passes().await
        {
            return Ok(None);
        }
        Ok(Some(reply).filter(|_| !lost))
    }

    /// Notes a request, and what it meets.
    fn arrive<B>(&self, request: &Request<B>) -> Met {
        let uri = request.uri();
        let (path, query) = (uri.path(), uri.query().unwrap_or_default());
        let verb = verb(request.method(), path, query);
        let mut state = self.state();
        state.requests += 1;
        let id = state.requests;
        let seen = Seen {
            verb,
            path: uri
                .path_and_query()
                .map_or(path, |whole| whole.as_str())
                .to_owned(),
            status: 0,
            when: Instant::now(),
        };
        state.seen.insert(id, seen);
        let mut faults = state.faults.iter_mut();
        let fault = faults.find_map(|fault| fault.meets(verb, path).then(|| fault.clone()));
        let [before, after] =
            [Moment::Before, Moment::After].map(|moment| state.held(moment, verb, path));
        Met {
            id,
            fault,
            before,
            after,
        }
    }

    async fn forward(
        &self,
        upstream: &Upstream,
        request: Request<Full<Bytes>>,
    ) -> io::Result<Reply> {
        let mut connection = upstream.lock().await;
        let mut open = connection.take();
        if let Some(sender) = &mut open
            && sender.ready().await.is_err()
        {
            open = None;
        }
        let mut sender = match open {
            Some(sender) => sender,
            None => self.connect().await?,
        };
        let reply = sender
            .send_request(request)
            .await
            .map_err(io::Error::other)?;
        *connection = Some(sender);
        let silences = self.silences.subscribe();
        Ok(reply.map(|body| until_silenced(body, silences).boxed_unsync()))
    }

    async fn connect(&self) -> io::Result<SendRequest<Full<Bytes>>> {
        let tcp = TcpStream::connect(self.server).await?;
        tcp.set_nodelay(true)?;
        let tls = self
            .connector
            .connect(ServerName::from(self.server.ip()), tcp)
            .await?;
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tls))
            .await
            .map_err(io::Error::other)?;
        self.spawn(async { drop(connection.await) });
        Ok(sender)
    }

    /// Runs this to its end, or to the proxy's.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        tokio::spawn(self.end.clone().run_until_cancelled_owned(task));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Desk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Desk({:?})", self.state())
    }
}

impl State {
    /// The hold that stops this request at that moment, taken out. Those that were dropped or released early stop nothing.
    fn held(&mut self, moment: Moment, verb: &str, path: &str) -> Option<Holding> {
        self.holds.retain(|hold| !hold.arrived.is_closed());
        let mut holds = self.holds.iter();
        let found = holds.position(|hold| hold.moment == moment && hold.meant.fits(verb, path))?;
        Some(self.holds.remove(found))
    }
}
