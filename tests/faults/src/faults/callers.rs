//! What befalls the webhook's port: callers that send what is no review, too much, too slowly, or without the right to.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures::{FutureExt as _, future::join_all};
use load::client::{Connection, TlsConnector, connector, connector_for, post};
use testbed::{OperatorOptions, lives};
use tokio::{
    io::AsyncReadExt as _,
    net::TcpStream,
    time::{sleep, timeout},
};

use super::{Fault, Repeat, Round};
use crate::bed::{GROUP, PODS, SOON};

/// The largest body that is read, in bytes: 7 MiB.
const LARGEST: usize = 7 << 20;
/// What a replica's memory may grow by under attack, in KiB.
const GROWTH: f64 = 32.0 * 1024.0;
/// Connections of an attacker, of each kind.
const STALLED: usize = 150;
/// Headers have to be there by then.
const CLOSED: Duration = Duration::from_secs(15);

pub(super) fn faults() -> Vec<Fault> {
    vec![
        Fault {
            number: 29,
            what: "reviews that are none: no uid, other kinds and versions, null, nested 10,000 deep, invalid UTF-8",
            expected: "a valid answer or 400, never a refusal; the process lives",
            repeat: Repeat::Once,
            run: |round| malformed(round).boxed(),
        },
        Fault {
            number: 30,
            what: "bodies of 8 MiB, of 1 GiB, without end, and compressed ones",
            expected: "413, 415 or an end, before more than 7 MiB are read; memory stays",
            repeat: Repeat::Once,
            run: |round| oversized(round).boxed(),
        },
        Fault {
            number: 31,
            what: "450 connections that stall in the handshake, in the headers and in the body",
            expected: "they are closed within 15 s; pods are boosted meanwhile",
            repeat: Repeat::Once,
            run: |round| stalled(round).boxed(),
        },
        Fault {
            number: 32,
            what: "a caller that wants HTTP/2, or speaks it without asking",
            expected: "ALPN has only http/1.1, and nothing is answered",
            repeat: Repeat::Once,
            run: |round| http2(round).boxed(),
        },
        Fault {
            number: 33,
            what: "callers without a certificate, where the webhook asks for the API server's",
            expected: "the handshake fails; the probes tell nobody anything about pods",
            repeat: Repeat::Once,
            run: |round| strangers(round).boxed(),
        },
    ]
}

/// Of replica 0.
struct Target {
    connector: TlsConnector,
    address: String,
}

impl Target {
    async fn of(round: &Round<'_>) -> Result<Self> {
        let ca = round.bed.published_ca().await?;
        Ok(Self {
            connector: connector(&ca)?,
            address: round.bed.replicas[0].operator.backend().address.to_string(),
        })
    }

    /// What a request is answered with; none where the connection is closed instead.
    async fn ask(&self, request: &[u8]) -> Result<Option<(u16, String)>> {
        let mut connection = Connection::open(&self.connector, &self.address).await?;
        // It may be closed while there is still something to send.
        connection.send(request).await.ok();
        let answer = timeout(SOON, connection.answer()).await;
        let answer = answer.context("it is neither answered nor closed")?;
        Ok(answer
            .ok()
            .map(|(status, body)| (status, String::from_utf8_lossy(body).into_owned())))
    }
}

async fn malformed(round: &mut Round<'_>) -> Result<()> {
    let target = Target::of(round).await?;
    let pod = serde_json::to_string(&lives::pod(GROUP, 0)?)?;
    let review = |request: &str| {
        format!(
            r#"{{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {request}}}"#
        )
    };
    let deep = format!("{}1{}", r#"{"a":"#.repeat(10_000), "}".repeat(10_000));
    let bodies: Vec<Vec<u8>> = vec![
        Vec::new(),
        b"null".to_vec(),
        b"[]".to_vec(),
        b"{".to_vec(),
        b"\xff\xfe{}".to_vec(),
        review("null").into(),
        review("{}").into(),
        review(&format!(r#"{{"uid": "", "object": {pod}}}"#)).into(),
        review(&format!(r#"{{"object": {pod}}}"#)).into(),
        review(r#"{"uid": "1", "object": null}"#).into(),
        review(&format!(r#"{{"uid": "1", "object": {deep}}}"#)).into(),
        review(r#"{"uid": "1", "object": {"spec": {"containers": 5}}}"#).into(),
        review(&format!(r#"{{"uid": "1", "object": {pod}}}"#))
            .replace("/v1", "/v1beta1")
            .into(),
        review(&format!(r#"{{"uid": "1", "object": {pod}}}"#))
            .replace("AdmissionReview", "Pod")
            .into(),
        [br#"{"kind": ""#.as_slice(), &[0xc3, 0x28], br#""}"#].concat(),
    ];
    for body in &bodies {
        let answer = target.ask(&post(body)).await?;
        let (status, text) = answer.context("it is not answered")?;
        let begin = String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned();
        ensure!(
            matches!(status, 200 | 400),
            "{begin} is answered with {status}"
        );
        ensure!(
            !text.contains(r#""allowed":false"#),
            "{begin} is refused: {text}"
        );
        round.figures.count("bodies", 1);
    }
    ensure!(round.bed.asks(0).await?, "it no longer boosts");
    Ok(())
}

async fn oversized(round: &mut Round<'_>) -> Result<()> {
    let target = Target::of(round).await?;
    let process = round.bed.replicas[0].operator.process();
    let before = process.resident()?;
    let head = |headers: &str| {
        format!(
            "POST /mutate-v1-pod HTTP/1.1\r\nHost: headstart\r\nContent-Type: application/json\r\n{headers}\r\n\r\n"
        )
    };
    let large = vec![b' '; LARGEST + (1 << 20)];
    let chunk = [
        format!("{:x}\r\n", 1 << 20).as_bytes(),
        &large[..1 << 20],
        b"\r\n",
    ]
    .concat();
    let endless = [
        head("Transfer-Encoding: chunked").as_bytes(),
        &chunk.repeat(64),
    ]
    .concat();
    let bomb = head("Content-Encoding: gzip\r\nContent-Length: 20") + &"\u{1f}".repeat(20);
    let promised = [head("Content-Length: 1073741824").as_bytes(), &large].concat();
    for (what, request) in [
        ("8 MiB", post(&large)),
        ("1 GiB", promised),
        ("without end", endless),
        ("compressed", bomb.into_bytes()),
    ] {
        if let Some((status, _)) = target.ask(&request).await? {
            ensure!(
                matches!(status, 400 | 413 | 415),
                "{what} is answered with {status}"
            );
        }
        round.figures.count("bodies", 1);
    }
    let growth = process.resident()? - before;
    ensure!(growth <= GROWTH, "it grew by {growth} KiB");
    round.figures.number("MiB more", growth.max(0.0) / 1024.0);
    ensure!(round.bed.asks(0).await?, "it no longer boosts");
    Ok(())
}

async fn stalled(round: &mut Round<'_>) -> Result<()> {
    let target = Arc::new(Target::of(round).await?);
    let before = round.bed.replicas[0].operator.process().resident()?;
    let attack = |begin: Option<&'static str>| {
        let attackers = (0..STALLED).map(|_| until_closed(Arc::clone(&target), begin));
        tokio::spawn(join_all(attackers.collect::<Vec<_>>()))
    };
    let attacks = [
        attack(None),
        attack(Some("POST /mutate-v1-pod HTTP/1.1\r\nHost: ")),
        attack(Some(
            "POST /mutate-v1-pod HTTP/1.1\r\nHost: headstart\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{",
        )),
    ];
    sleep(Duration::from_secs(1)).await;
    super::burst(round).await?;
    round.bed.lives.until_finished(PODS, SOON).await?;
    let growth = round.bed.replicas[0].operator.process().resident()? - before;
    for attack in attacks {
        for took in attack.await? {
            round.figures.time("until one is closed", took?);
        }
    }
    ensure!(growth <= GROWTH, "it grew by {growth} KiB");
    round.figures.number("MiB more", growth.max(0.0) / 1024.0);
    Ok(())
}

/// Says only this, after the handshake, and waits for the end.
async fn until_closed(target: Arc<Target>, says: Option<&str>) -> Result<Duration> {
    let began = Instant::now();
    let end = async {
        let Some(says) = says else {
            let mut tcp = TcpStream::connect(&target.address).await?;
            tcp.read_u8().await.ok();
            return anyhow::Ok(());
        };
        let mut connection = Connection::open(&target.connector, &target.address).await?;
        connection.send(says.as_bytes()).await?;
        connection.answer().await.ok();
        Ok(())
    };
    timeout(CLOSED, end)
        .await
        .context("a connection stays open")??;
    Ok(began.elapsed())
}

async fn http2(round: &mut Round<'_>) -> Result<()> {
    let target = Target::of(round).await?;
    let ca = round.bed.published_ca().await?;
    let connector = connector_for(&ca, &["h2", "http/1.1"])?;
    let connection = Connection::open(&connector, &target.address).await?;
    let chosen = connection.protocol();
    ensure!(chosen == Some(b"http/1.1"), "{chosen:?} was chosen");
    // The preface of HTTP/2, and frames that would cost an implementation of it most.
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let frames = [&preface[..], &[0, 0, 0, 4, 0, 0, 0, 0, 0].repeat(1000)].concat();
    if let Some((status, _)) = target.ask(&frames).await? {
        ensure!(status >= 400, "HTTP/2 is answered with {status}");
    }
    round.figures.count("accepted", 0);
    ensure!(round.bed.asks(0).await?, "it no longer boosts");
    Ok(())
}

async fn strangers(round: &mut Round<'_>) -> Result<()> {
    let ca = round
        .bed
        .plane
        .pki()
        .path("ca.crt")
        .to_string_lossy()
        .into_owned();
    let asks = |_: usize, options: &mut OperatorOptions| {
        options.args.extend(["--client-ca".to_owned(), ca.clone()]);
    };
    round.bed.add_as(asks).await?;
    let last = round.bed.replicas.len() - 1;
    let strict = &round.bed.replicas[last].operator;
    strict.wait_ready(SOON).await?;
    let target = Target {
        address: strict.backend().address.to_string(),
        ..Target::of(round).await?
    };
    let body = serde_json::to_vec(&lives::pod(GROUP, 0)?)?;
    let answer = target.ask(&post(&body)).await;
    ensure!(
        !matches!(answer, Ok(Some(_))),
        "a stranger is answered: {answer:?}"
    );
    let metrics = strict.metrics().await?;
    ensure!(!metrics.contains("storm-"), "the metrics name pods");
    round.figures.count("answered", 0);
    let strict = round.bed.take(last);
    round.bed.balancer.terminate(strict.operator.backend());
    ensure!(
        strict.operator.stop(SOON).await? == 0,
        "it did not end well"
    );
    Ok(())
}
