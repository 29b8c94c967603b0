//! A client that costs little: HTTP/1.1 over TLS, one request at a time on each connection, answers looked at by the byte.

use std::{path::Path, sync::Arc};

use anyhow::{Context as _, Result, bail, ensure};
use memchr::memmem;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::client::TlsStream;

pub use tokio_rustls::TlsConnector;

/// A connection.
pub struct Connection {
    stream: TlsStream<TcpStream>,
    buffer: Vec<u8>,
}

/// Reads the certificate authority to be believed, and makes connections of it.
///
/// # Errors
/// If the file is no certificate.
pub fn connector(ca: &Path) -> Result<TlsConnector> {
    connector_for(ca, &[])
}

/// The same, offering these protocols (ALPN).
///
/// # Errors
/// If the file is no certificate.
pub fn connector_for(ca: &Path, protocols: &[&str]) -> Result<TlsConnector> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(ca).context("reading the CA")? {
        roots.add(certificate.context("reading the CA")?)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    let protocols = protocols.iter().map(|name| name.as_bytes().to_vec());
    config.alpn_protocols = protocols.collect();
    Ok(TlsConnector::from(Arc::new(config)))
}

/// A POST of a body, head and all.
#[must_use]
pub fn post(body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST /mutate-v1-pod?timeout=2s HTTP/1.1\r\nHost: headstart\r\nUser-Agent: kube-apiserver-admission\r\n\
         Content-Type: application/json\r\nAccept: application/json, */*\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

impl Connection {
    /// Connects to `address`, `IP:PORT`.
    ///
    /// # Errors
    /// If nobody listens there, or it is somebody else.
    pub async fn open(connector: &TlsConnector, address: &str) -> Result<Self> {
        let tcp = TcpStream::connect(address).await.context("connecting")?;
        tcp.set_nodelay(true)?;
        let host = address.rsplit_once(':').context("no port")?.0.to_owned();
        let name = ServerName::try_from(host).context("no name or address")?;
        let stream = connector
            .connect(name, tcp)
            .await
            .context("the handshake")?;
        Ok(Self {
            stream,
            buffer: Vec::with_capacity(16 << 10),
        })
    }

    /// The protocol that the other side has chosen, if it was offered any.
    #[must_use]
    pub fn protocol(&self) -> Option<&[u8]> {
        self.stream.get_ref().1.alpn_protocol()
    }

    /// Writes what is to be sent.
    ///
    /// # Errors
    /// If the connection was closed.
    pub async fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).await?;
        self.stream.flush().await?;
        Ok(())
    }

    /// Reads the answer: its status and its body.
    ///
    /// # Errors
    /// If the connection was closed before its end.
    pub async fn answer(&mut self) -> Result<(u16, &[u8])> {
        self.buffer.clear();
        let (mut begin, mut end) = (0, usize::MAX);
        while self.buffer.len() < end {
            ensure!(
                self.stream.read_buf(&mut self.buffer).await? > 0,
                "closed before the answer's end"
            );
            if begin == 0
                && let Some(at) = memmem::find(&self.buffer, b"\r\n\r\n")
            {
                begin = at + 4;
                end = begin + length(&self.buffer[..begin])?;
            }
        }
        let status = std::str::from_utf8(self.buffer.get(9..12).context("no status")?)?;
        Ok((status.parse()?, &self.buffer[begin..end]))
    }
}

/// The `content-length` of an answer's head.
fn length(head: &[u8]) -> Result<usize> {
    for line in head.split(|byte| *byte == b'\n') {
        if let Some((name, value)) = line.split_at_checked(15)
            && name.eq_ignore_ascii_case(b"content-length:")
        {
            return Ok(std::str::from_utf8(value)?.trim().parse()?);
        }
    }
    bail!("the answer has no content-length")
}
