//! The plain port: `/livez`, `/readyz` and `/metrics`.
//!
//! Ready means able to answer reviews rightly: caches read, certificate loaded, and the TLS listener answers. Leading
//! plays no part, so followers are Ready and a rollout goes on. Live means that the process answers.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;
use warp::{Filter, Reply, http::StatusCode};

use crate::{
    certs::Certs,
    claims::Claims,
    metrics::{self, Metrics},
    snapshots::Snapshots,
};

/// A handshake with ourselves takes about a millisecond.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(1);

/// What readiness is made of.
#[derive(Clone)]
pub struct Readiness {
    /// Everything that admission goes by.
    pub snapshots: Arc<Snapshots>,
    /// Claims that have been listed.
    pub claims: Arc<Claims>,
    /// A certificate that is loaded.
    pub certs: Arc<Certs>,
    /// Where the TLS listener is.
    pub webhook: SocketAddr,
    /// Cancelled when the process is asked to end.
    pub ending: CancellationToken,
}

impl Readiness {
    /// What is missing, if anything is.
    async fn missing(&self) -> Option<String> {
        if self.ending.is_cancelled() {
            return Some("shutting down".to_owned());
        }
        let unread = self.snapshots.missing();
        if !unread.is_empty() {
            return Some(format!("not read yet: {}", unread.join(", ")));
        }
        if !self.claims.synced() {
            return Some("the boosted pods have not been listed yet".to_owned());
        }
        if !self.certs.slot().is_loaded() {
            return Some("no certificate is loaded yet".to_owned());
        }
        match timeout(HANDSHAKE_DEADLINE, self.handshake()).await {
            Ok(Some(())) => None,
            _ => Some("the webhook's listener does not answer".to_owned()),
        }
    }

    /// A TLS handshake with our own listener, verified as the API server verifies it.
    async fn handshake(&self) -> Option<()> {
        let roots = self.certs.roots()?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .ok()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from(self.certs.name().to_owned()).ok()?;
        let stream = TcpStream::connect(loopback(self.webhook)).await.ok()?;
        TlsConnector::from(Arc::new(config))
            .connect(name, stream)
            .await
            .ok()
            .map(drop)
    }
}

/// A listener on all addresses is reached on loopback.
fn loopback(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(if address.is_ipv4() {
            [127, 0, 0, 1].into()
        } else {
            std::net::Ipv6Addr::LOCALHOST.into()
        });
    }
    address
}

/// The three paths.
pub fn routes(
    readiness: Readiness,
    metrics: Arc<Metrics>,
) -> impl Filter<Extract = (impl Reply,), Error = warp::Rejection> + Clone {
    let livez = warp::path!("livez").map(|| "ok".to_owned());
    let readyz = warp::path!("readyz").then(move || {
        let readiness = readiness.clone();
        async move {
            match readiness.missing().await {
                None => warp::reply::with_status("ok".to_owned(), StatusCode::OK),
                Some(missing) => warp::reply::with_status(missing, StatusCode::SERVICE_UNAVAILABLE),
            }
        }
    });
    let metrics = warp::path!("metrics").map(move || {
        warp::reply::with_header(metrics.text(), "content-type", metrics::CONTENT_TYPE)
    });
    warp::get().and(livez.or(readyz).or(metrics))
}
