//! Straight at a replica, past the aggregator: with any certificate, any header, or none.

use std::{fmt::Write as _, path::Path, sync::Arc};

use anyhow::{Context, Result, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use serde_json::Value;
use testbed::{Cluster, Operator, view::API_SERVICE_PATH};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use crate::rest;

/// Somebody who asks.
pub(crate) struct Caller(Arc<ClientConfig>);

impl Caller {
    /// Without a certificate.
    pub(crate) async fn nobody(cluster: &Cluster) -> Result<Self> {
        Ok(Self(Arc::new(config(cluster).await?.with_no_client_auth())))
    }

    /// With a certificate and its key, in PEM.
    pub(crate) async fn with(cluster: &Cluster, certificate: &str, key: &str) -> Result<Self> {
        let chain: Vec<_> =
            CertificateDer::pem_slice_iter(certificate.as_bytes()).collect::<Result<_, _>>()?;
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes())?;
        let config = config(cluster).await?.with_client_auth_cert(chain, key)?;
        Ok(Self(Arc::new(config)))
    }

    /// With the files of a certificate and its key.
    pub(crate) async fn with_files(
        cluster: &Cluster,
        certificate: &Path,
        key: &Path,
    ) -> Result<Self> {
        let [certificate, key] = [certificate, key].map(std::fs::read_to_string);
        Self::with(cluster, &certificate?, &key?).await
    }

    /// As a user of the cluster's CA.
    pub(crate) async fn user(cluster: &Cluster, name: &str, groups: &[&str]) -> Result<Self> {
        let kubeconfig = cluster.plane.kubeconfig_for(name, groups)?;
        let kubeconfig: Value = serde_json::from_str(&std::fs::read_to_string(kubeconfig)?)?;
        let user = &kubeconfig["users"][0]["user"];
        let file = |key: &str| user[key].as_str().map(Path::new).context("no such file");
        Self::with_files(cluster, file("client-certificate")?, file("client-key")?).await
    }

    /// Who may do everything.
    pub(crate) async fn admin(cluster: &Cluster) -> Result<Self> {
        Self::user(cluster, "admin", &["system:masters"]).await
    }

    /// As the API server's aggregator.
    pub(crate) async fn aggregator(cluster: &Cluster) -> Result<Self> {
        let pki = cluster.plane.pki();
        Self::with_files(cluster, &pki.path("front.crt"), &pki.path("front.key")).await
    }

    /// GET.
    pub(crate) async fn get(
        &self,
        replica: &Operator,
        path: &str,
        headers: &[(&str, &str)],
    ) -> Result<(u16, Value)> {
        let (code, _, body) = self.ask(replica, "GET", path, headers).await?;
        let body = serde_json::from_str(&body).with_context(|| format!("{path}: {code} {body}"))?;
        Ok((code, body))
    }

    /// Anything; the answer's status, head and body.
    pub(crate) async fn ask(
        &self,
        replica: &Operator,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
    ) -> Result<(u16, String, String)> {
        let tcp = TcpStream::connect(replica.backend().address).await?;
        let host = ServerName::try_from("127.0.0.1")?;
        let mut stream = TlsConnector::from(Arc::clone(&self.0))
            .connect(host, tcp)
            .await?;
        // HTTP/1.0: the answer ends with the connection.
        let mut request = format!("{method} {path} HTTP/1.0\r\nHost: localhost\r\n");
        for (name, value) in headers {
            write!(request, "{name}: {value}\r\n")?;
        }
        stream
            .write_all(format!("{request}\r\n").as_bytes())
            .await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
        let code = head.split(' ').nth(1).context("no status")?.parse()?;
        Ok((code, head.to_owned(), body.to_owned()))
    }
}

/// Verifies replicas as the aggregator does, by the CA in the APIService.
async fn config(
    cluster: &Cluster,
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>> {
    let service = rest(cluster).get(API_SERVICE_PATH).await?.accepted()?;
    let ca = service["spec"]["caBundle"].as_str().context("no CA")?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&BASE64_STANDARD.decode(ca)?) {
        roots.add(certificate?)?;
    }
    ensure!(!roots.is_empty(), "no CA");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider);
    let config = config.with_safe_default_protocol_versions()?;
    Ok(config.with_root_certificates(roots))
}
