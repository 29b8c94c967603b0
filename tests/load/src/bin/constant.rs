//! `constant CERTIFICATE KEY ANSWER`: what no webhook can be faster than. It reads each body over TLS, and answers with the
//! bytes of a file whatever was asked. It prints its address.

use std::{convert::Infallible, io::Write as _, sync::Arc};

use anyhow::{Context as _, Result, bail};
use http_body_util::{BodyExt as _, Full};
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    header::CONTENT_TYPE,
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

#[tokio::main]
async fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [certificate, key, answer] = &args[..] else {
        bail!("constant CERTIFICATE KEY ANSWER");
    };
    let answer = Bytes::from(std::fs::read(answer).context("reading the answer")?);
    let certificates = CertificateDer::pem_file_iter(certificate)?.collect::<Result<_, _>>()?;
    let key = PrivateKeyDer::from_pem_file(key)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls =
        ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let tls = tls
        .with_no_client_auth()
        .with_single_cert(certificates, key)?;
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    std::io::stdout().flush()?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let (acceptor, answer) = (acceptor.clone(), answer.clone());
        tokio::spawn(async move {
            let Ok(stream) = acceptor.accept(stream).await else {
                return;
            };
            let service = service_fn(move |request: Request<Incoming>| {
                let answer = answer.clone();
                async move {
                    // A body that breaks off is no reason to answer otherwise.
                    let _ = request.into_body().collect().await;
                    let response = Response::builder().header(CONTENT_TYPE, "application/json");
                    Ok::<_, Infallible>(
                        response
                            .body(Full::new(answer))
                            .expect("a body and a header make a response"),
                    )
                }
            });
            // The client closes when it has what it wants.
            let _ = http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}
