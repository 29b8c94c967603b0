//! The accept loop: HTTP/1.1 over TLS or plain, bounded and drained.

use std::{io, sync::Arc, time::Duration};

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
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// A handshake takes two round trips; who needs longer is not the API server.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// How long a request's headers may take. It also closes idle keep-alive connections, so it must stay above the 90 s
/// after which the API server drops them itself, or a request could meet a closing connection.
const HEADER_DEADLINE: Duration = Duration::from_secs(120);
/// After an accept error, such as too many open files, so that the loop doesn't spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

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
    let service = Closing {
        service,
        closing: stop.closing,
    };
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
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
        let (acceptor, http, service, watcher) = (
            acceptor.clone(),
            http.clone(),
            service.clone(),
            open.watcher(),
        );
        tokio::spawn(async move {
            let _slot = slot;
            let Some(acceptor) = acceptor else {
                return converse(&http, stream, service, watcher).await;
            };
            match timeout(HANDSHAKE_DEADLINE, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => converse(&http, stream, service, watcher).await,
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
    service: S,
    watcher: hyper_util::server::graceful::Watcher,
) where
    S: Service<Request<Incoming>, Response = Response<B>>,
    S::Error: std::error::Error + Send + Sync + 'static,
    B: Body + 'static,
    B::Error: std::error::Error + Send + Sync,
{
    let connection = http.serve_connection(TokioIo::new(stream), service);
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "a connection ended with an error");
    }
}

/// Adds `Connection: close` to every answer once the server is closing.
#[derive(Clone)]
struct Closing<S> {
    service: S,
    closing: CancellationToken,
}

impl<S, B> Service<Request<Incoming>> for Closing<S>
where
    S: Service<Request<Incoming>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = Response<B>;
    type Error = S::Error;
    type Future = futures::future::MapOk<S::Future, CloseWhen<B>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        use futures::TryFutureExt;
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
