//! The accept loop: HTTP/1.1 over TLS or plain, bounded and drained.

use std::{
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use hyper::{
    Request, Response,
    body::{Body, Incoming},
    server::conn::http1,
    service::Service,
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, UnixTime},
    server::danger::ClientCertVerifier,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, BufReader},
    net::TcpListener,
    sync::Semaphore,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;

/// A handshake takes two round trips; who needs longer is not the API server.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// How long a request's headers may take. It also closes idle keep-alive connections, so it must stay above the 90 s
/// after which the API server drops them itself, or a request could meet a closing connection.
const HEADER_DEADLINE: Duration = Duration::from_secs(120);
/// How long a new connection may be silent, its handshake included. The API server opens one because it has something
/// to ask.
const FIRST_REQUEST_DEADLINE: Duration = Duration::from_secs(10);
/// What a connection may have in its buffer, in bytes: a usual review whole. Without a bound it grows to 400 KiB.
const READ_BUFFER: usize = 64 << 10;
/// What is read of a connection at once, in bytes: a TLS record. rustls by itself asks the kernel for 4 KiB at a time.
const READ_AT_ONCE: usize = 16 << 10;
/// After an accept error, such as too many open files, so that the loop doesn't spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The certificates that the other side of a connection has shown, its own first. What they are worth is for the handler to
/// say; it finds them among the request's extensions.
#[derive(Clone, Debug)]
pub struct Peer(Arc<Shown>);

#[derive(Debug)]
struct Shown {
    chain: Vec<CertificateDer<'static>>,
    /// Verifying takes longer than an answer, and who a connection belongs to doesn't change.
    is_verified: OnceLock<bool>,
}

impl Peer {
    fn of<S>(stream: &TlsStream<S>) -> Option<Self> {
        let (_, connection) = stream.get_ref();
        let chain = connection.peer_certificates()?.to_vec();
        Some(Self(Arc::new(Shown {
            chain,
            is_verified: OnceLock::new(),
        })))
    }

    /// All of them.
    #[must_use]
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.0.chain
    }

    /// Whether they were good when this was first asked on the connection, always by the same verifier.
    #[must_use]
    pub fn is_verified(&self, verifier: &dyn ClientCertVerifier) -> bool {
        *self.0.is_verified.get_or_init(|| {
            self.0.chain.split_first().is_some_and(|(leaf, more)| {
                let now = UnixTime::now();
                verifier.verify_client_cert(leaf, more, now).is_ok()
            })
        })
    }
}

/// When a server stops.
#[derive(Clone, Debug)]
pub struct Stop {
    /// Go on serving, but close each connection after its next answer: the API server keeps connections to a replica
    /// that is going away (kubernetes/kubernetes#127335).
    pub closing: CancellationToken,
    /// Stop accepting, and wait for what is under way.
    pub stopped: CancellationToken,
    /// How long to wait for it.
    pub drain: Duration,
}

/// Serves until it is stopped.
///
/// `tls` is absent for plain HTTP. At most `connections` are open at once; more wait in the kernel's queue.
///
/// # Errors
/// Never at present: accept errors are logged and retried.
pub async fn serve<S, B>(
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    service: S,
    connections: usize,
    stop: Stop,
) -> io::Result<()>
where
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: std::error::Error + Send + Sync,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: std::error::Error + Send + Sync,
{
    let acceptor = tls.map(TlsAcceptor::from);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .max_buf_size(READ_BUFFER)
        .header_read_timeout(HEADER_DEADLINE);
    let open = GracefulShutdown::new();
    let slots = Arc::new(Semaphore::new(connections));

    loop {
        let accepted = async {
            let slot = Arc::clone(&slots)
                .acquire_owned()
                .await
                .expect("the semaphore is never closed");
            listener
                .accept()
                .await
                .map(|(stream, peer)| (stream, peer, slot))
        };
        let (stream, peer, slot) = tokio::select! {
            biased;
            () = stop.stopped.cancelled() => break,
            accepted = accepted => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
        };
        // Without it, small answers would wait for the peer's delayed acknowledgement. Best effort.
        let _ = stream.set_nodelay(true);
        let (acceptor, http, watcher) = (acceptor.clone(), http.clone(), open.watcher());
        let mut service = Guarded {
            service: service.clone(),
            closing: stop.closing.clone(),
            asked: Arc::default(),
            peer: None,
        };
        let opened = Instant::now();
        tokio::spawn(async move {
            let _slot = slot;
            let Some(acceptor) = acceptor else {
                return converse(&http, stream, opened, service, watcher).await;
            };
            let stream = BufReader::with_capacity(READ_AT_ONCE, stream);
            match timeout(HANDSHAKE_DEADLINE, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => {
                    service.peer = Peer::of(&stream);
                    converse(&http, stream, opened, service, watcher).await;
                }
                Ok(Err(error)) => tracing::debug!(%peer, %error, "TLS handshake failed"),
                Err(_) => tracing::debug!(%peer, "TLS handshake timed out"),
            }
        });
    }
    drop(listener);
    if timeout(stop.drain, open.shutdown()).await.is_err() {
        tracing::warn!("connections were still open at the end of the drain");
    }
    Ok(())
}

async fn converse<S, B>(
    http: &http1::Builder,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    opened: Instant,
    service: Guarded<S>,
    watcher: hyper_util::server::graceful::Watcher,
) where
    S: Service<Request<Incoming>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: std::error::Error + Send + Sync + 'static,
    B: Body + 'static,
    B::Error: std::error::Error + Send + Sync,
{
    let asked = Arc::clone(&service.asked);
    let silent = async {
        sleep_until(opened + FIRST_REQUEST_DEADLINE).await;
        if asked.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    let connection = http.serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        biased;
        ended = watcher.watch(connection) => if let Err(error) = ended {
            tracing::debug!(%error, "a connection ended with an error");
        },
        () = silent => tracing::debug!("a connection on which nothing was asked is closed"),
    }
}

/// How many connections may be open at once: at most `wanted`, and no more than half of the files that this process may
/// have open, so that the clients of the API server never lack one.
#[must_use]
pub fn connection_limit(wanted: usize) -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    open_files(&limits).map_or(wanted, |files| wanted.min(files / 2).max(1))
}

/// The soft limit of open files, as Linux prints it.
fn open_files(limits: &str) -> Option<usize> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Adds `Connection: close` to every answer once the server is closing, knows whether anything was asked, and tells who asks.
#[derive(Clone)]
struct Guarded<S> {
    service: S,
    closing: CancellationToken,
    asked: Arc<AtomicBool>,
    peer: Option<Peer>,
}

impl<S, B> Service<Request<Incoming>> for Guarded<S>
where
    S: Service<Request<Incoming>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = Response<B>;
    type Error = S::Error;
    type Future = futures::future::MapOk<S::Future, CloseWhen<B>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        use futures::TryFutureExt;
        if let Some(peer) = &self.peer {
            request.extensions_mut().insert(peer.clone());
        }
        self.asked.store(true, Ordering::Relaxed);
        let closing = self.closing.clone();
        self.service
            .call(request)
            .map_ok(Box::new(move |mut response: Response<B>| {
                if closing.is_cancelled() {
                    let close = hyper::header::HeaderValue::from_static("close");
                    response
                        .headers_mut()
                        .insert(hyper::header::CONNECTION, close);
                }
                response
            }))
    }
}

type CloseWhen<B> = Box<dyn FnOnce(Response<B>) -> Response<B> + Send>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_open_files_is_read() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max processes             95789                95789                processes \n\
                      Max open files            1024                 1048576              files     \n";
        assert_eq!(open_files(limits), Some(1024));
        assert_eq!(open_files("Max open files unlimited unlimited files"), None);
        assert!((1..=512).contains(&connection_limit(512)));
    }
}
