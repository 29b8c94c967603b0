//! HTTP to the webhook's routes, with no socket between.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use anyhow::{Context, ensure};
use futures::stream;
use headstart::{
    admission::{self, Admitter},
    certs::{Certs, Source},
    claims::Claims,
    clock::Clock,
    metrics::Metrics,
    probes::{self, Readiness},
};
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Bytes, Frame};
use tokio_util::sync::CancellationToken;

use super::review::{self, Body};
use crate::{
    data::{Admit, Cases, Post},
    world,
};

/// Bodies arrive in pieces of that many bytes.
const PIECE: usize = 64 << 10;

/// What came back.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) body: Bytes,
    /// So many bytes of the request's body were taken.
    taken: usize,
}

/// Posts the review of a pod that is created, and compares the answer and what is counted.
pub fn check_admit(cases: &Cases, admit: &Admit) -> anyhow::Result<()> {
    let boosts = world::boosts(admit)?;
    let sent = world::sent(cases, admit)?;
    let (admitter, metrics) = review::admitter(admit, (!admit.unsynced).then_some(&boosts[..]))?;
    let before = metrics.text();
    let review = review::of_pod(&sent, admit.dry_run).to_string();
    let answer = in_real_time(post(
        &admitter,
        &Post::default(),
        review.as_bytes(),
        review.len(),
    ))?;
    ensure!(answer.status == StatusCode::OK, "HTTP {}", answer.status);
    review::check_answer(cases, admit, &boosts, &sent, &answer.body)?;

    let after = metrics.text();
    if admit.counters.as_deref() == Some("unchanged") {
        ensure!(before == after, "something was counted:\n{after}");
    } else {
        let (before, after) = (reviews(&before), reviews(&after));
        ensure!(after == before + 1, "{before} reviews became {after}");
    }
    if let Some(reason) = admit.reason.as_ref().filter(|reason| *reason != "none") {
        let line = format!(
            r#"headstart_admission_reviews_total{{outcome="skipped",reason="{reason}"}} 1"#
        );
        ensure!(
            after.lines().any(|counted| counted == line),
            "{line} is not in\n{after}"
        );
    }
    if admit.unsynced {
        in_real_time(check_not_ready())?;
    }
    Ok(())
}

/// The reviews that were counted, whatever became of them.
fn reviews(metrics: &str) -> u64 {
    metrics
        .lines()
        .filter(|line| line.starts_with("headstart_admission_reviews_total{"))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
        .sum()
}

/// A replica whose caches have not been read is not Ready.
async fn check_not_ready() -> anyhow::Result<()> {
    let (metrics, clock) = (Arc::<Metrics>::default(), Clock::system());
    let certs = Certs::new(
        Source::Directory("/nonexistent".into()),
        vec!["headstart.ns.svc".to_owned()],
        clock,
        Arc::clone(&metrics),
    );
    let readiness = Readiness {
        snapshots: Arc::default(),
        claims: Arc::<Claims>::default(),
        certs: Arc::new(certs),
        webhook: ([127, 0, 0, 1], 0).into(),
        ending: CancellationToken::new(),
    };
    let routes = probes::routes(readiness, metrics);
    let ready = warp::test::request().path("/readyz").reply(&routes).await;
    ensure!(
        ready.status() == StatusCode::SERVICE_UNAVAILABLE,
        "/readyz answers {}",
        ready.status()
    );
    let live = warp::test::request().path("/livez").reply(&routes).await;
    ensure!(live.status() == StatusCode::OK, "/livez: {}", live.status());
    Ok(())
}

/// Posts each of a case's bodies, and compares the answer.
pub fn check_post(cases: &Cases, note: &Post) -> anyhow::Result<()> {
    for body in review::bodies(cases, note)? {
        let length = note.mebibytes.map_or(body.bytes.len(), |mebi| mebi << 20);
        let answer = send(note, &body, length)?;
        let text = String::from_utf8_lossy(&answer.body);
        ensure!(
            answer.status.as_u16() == note.status,
            "HTTP {}, expected {}: {text}",
            answer.status,
            note.status
        );
        if note.with_reason {
            let named = answer.status.canonical_reason().unwrap_or_default();
            ensure!(!text.is_empty() && text != named, "no reason: {text:?}");
        }
        if let Some(expected) = note.answer {
            review::check_post_answer(cases, &body, expected, &answer.body)?;
        }
        if note.memory_constant {
            let longer = send(note, &body, length * 16)?;
            ensure!(longer.status == answer.status, "HTTP {}", longer.status);
            ensure!(
                longer.taken == answer.taken && answer.taken < length,
                "of {length} bytes {} were taken, of {} {}",
                answer.taken,
                length * 16,
                longer.taken
            );
            ensure!(
                note.chunked || answer.taken == 0,
                "{} bytes were taken although the length was announced",
                answer.taken
            );
        }
    }
    Ok(())
}

/// Posts a body, padded to so many bytes.
fn send(note: &Post, body: &Body<'_>, length: usize) -> anyhow::Result<Answer> {
    let (admitter, _) = review::admitter(body.admit, Some(&body.boosts))?;
    in_real_time(post(&admitter, note, &body.bytes, length))
}

pub(super) async fn post(
    admitter: &Arc<Admitter>,
    note: &Post,
    start: &[u8],
    length: usize,
) -> anyhow::Result<Answer> {
    let taken = Arc::<AtomicUsize>::default();
    let count = Arc::clone(&taken);
    let start = Bytes::copy_from_slice(start);
    // Pieces are made when they are asked for, so that what is taken can be told from what is offered.
    let pieces = (0..length).step_by(PIECE).map(move |at| {
        let end = length.min(at + PIECE);
        count.fetch_add(end - at, Relaxed);
        let mut piece = start
            .slice(at.min(start.len())..end.min(start.len()))
            .to_vec();
        piece.resize(end - at, b' ');
        Ok::<_, Infallible>(Frame::data(Bytes::from(piece)))
    });
    let mut request = Request::builder()
        .method(note.method.as_deref().unwrap_or("POST"))
        .uri(note.path.as_deref().unwrap_or("/mutate-v1-pod"))
        .header(
            header::CONTENT_TYPE,
            note.content_type.as_deref().unwrap_or("application/json"),
        );
    if !note.chunked {
        request = request.header(header::CONTENT_LENGTH, length);
    }
    let request = request.body(StreamBody::new(stream::iter(pieces)))?;
    let service = hyper_util::service::TowerToHyperService::new(warp::service(admission::routes(
        Arc::clone(admitter),
    )));
    let answer = hyper::service::Service::call(&service, request).await?;
    let (head, body) = answer.into_parts();
    let body = body.collect().await.context("the answer breaks off")?;
    Ok(Answer {
        status: head.status,
        body: body.to_bytes(),
        taken: taken.load(Relaxed),
    })
}

fn in_real_time<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()?
        .block_on(work)
}
