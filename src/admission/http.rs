//! The webhook's route: bounds on bodies, then [`Admitter::answer`].

use std::{pin::pin, sync::Arc, time::Duration};

use futures::{Stream, StreamExt};
use hyper::StatusCode;
use rustls::server::danger::ClientCertVerifier;
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};
use warp::{Buf, Filter, Reply, http::Response};

use super::Admitter;
use crate::server::Peer;

/// Largest body in bytes. An object in etcd has at most 1.5 MiB; the API server itself takes 3 MiB, and a review holds
/// the object once on CREATE. controller-runtime has the same bound.
const MAX_BODY: usize = 7 << 20;
/// Bodies up to this size are taken as they come. A review of a pod has 5 to 40 kB.
const SMALL_BODY: usize = 64 << 10;
/// All larger bodies together may take so many bytes at once; the others wait, within their deadline. So the memory that
/// anybody can make us take is bounded, and ordinary reviews never wait.
const LARGE_BODIES: usize = 24 << 20;
/// So many characters of the reason go into the log and the answer: it may quote the body, which strangers write.
const MAX_REASON: usize = 300;
/// How long a body may take to arrive. The API server gives up after 2 s.
const BODY_DEADLINE: Duration = Duration::from_secs(5);

/// Refuses reviews of callers that a verifier of `--client-ca` does not accept, where others may connect too. It goes before
/// [`routes`].
#[must_use]
pub fn refusals(
    verifier: Option<Arc<dyn ClientCertVerifier>>,
) -> impl Filter<Extract = (impl Reply,), Error = warp::Rejection> + Clone {
    warp::path!("mutate-v1-pod")
        .and(warp::ext::optional())
        .and_then(move |peer: Option<Peer>| {
            let is_known = verifier.as_ref().is_none_or(|verifier| {
                peer.is_some_and(|peer| peer.is_verified(verifier.as_ref()))
            });
            let forbidden = StatusCode::FORBIDDEN;
            futures::future::ready(if is_known {
                Err(warp::reject())
            } else {
                Ok(refusal(
                    forbidden,
                    "only callers of --client-ca are answered",
                ))
            })
        })
}

/// `POST /mutate-v1-pod`.
#[must_use]
pub fn routes(
    admitter: Arc<Admitter>,
) -> impl Filter<Extract = (impl Reply,), Error = warp::Rejection> + Clone {
    let large = Arc::new(Semaphore::new(LARGE_BODIES));
    warp::path!("mutate-v1-pod")
        .and(warp::post())
        .and(warp::header::optional("content-length"))
        .and(warp::body::stream())
        .then(move |length: Option<u64>, body| {
            let (admitter, large) = (Arc::clone(&admitter), Arc::clone(&large));
            async move {
                match read(length, body, &large).await {
                    Ok((body, _share)) => answer(&admitter, &body),
                    Err(status) => refusal(status, status.canonical_reason().unwrap_or_default()),
                }
            }
        })
}

fn answer(admitter: &Admitter, body: &[u8]) -> Response<Vec<u8>> {
    match admitter.answer(body) {
        Ok(answer) => Response::builder()
            .header("content-type", "application/json")
            .body(answer)
            .expect("a status and a header make a response"),
        Err(error) => {
            let error: String = error.to_string().chars().take(MAX_REASON).collect();
            tracing::warn!(error, "a review could not be read");
            refusal(StatusCode::BAD_REQUEST, &error)
        }
    }
}

fn refusal(status: StatusCode, text: &str) -> Response<Vec<u8>> {
    Response::builder()
        .status(status)
        .body(text.as_bytes().to_vec())
        .expect("a status makes a response")
}

/// Collects a body, and the share that it has in what large bodies may take. One that says that it is too long is not read
/// at all, one that becomes too long no further.
async fn read(
    length: Option<u64>,
    body: impl Stream<Item = Result<impl Buf, warp::Error>>,
    large: &Semaphore,
) -> Result<(Vec<u8>, Option<SemaphorePermit<'_>>), StatusCode> {
    let announced = usize::try_from(length.unwrap_or(0)).unwrap_or(usize::MAX);
    if announced > MAX_BODY {
        return Err(StatusCode::PAYLOAD_TOO_LARGE);
    }
    let collect = async {
        let mut share = None;
        if announced > SMALL_BODY {
            share = Some(take(large, announced).await);
        }
        let mut bytes = Vec::with_capacity(announced);
        let mut body = pin!(body);
        while let Some(chunk) = body.next().await {
            let mut chunk = chunk.map_err(|_| StatusCode::BAD_REQUEST)?;
            let size = bytes.len() + chunk.remaining();
            if size > MAX_BODY {
                return Err(StatusCode::PAYLOAD_TOO_LARGE);
            }
            if size > SMALL_BODY && share.is_none() {
                // Nobody has said how long it will be. Room that grows by doubling would take as much again on the way.
                share = Some(take(large, MAX_BODY).await);
                bytes.reserve_exact(MAX_BODY - bytes.len());
            }
            while chunk.has_remaining() {
                let part = chunk.chunk();
                bytes.extend_from_slice(part);
                let read = part.len();
                chunk.advance(read);
            }
        }
        Ok((bytes, share))
    };
    timeout(BODY_DEADLINE, collect)
        .await
        .unwrap_or(Err(StatusCode::REQUEST_TIMEOUT))
}

async fn take(large: &Semaphore, bytes: usize) -> SemaphorePermit<'_> {
    let bytes = u32::try_from(bytes).expect("no body is that long");
    let share = large.acquire_many(bytes).await;
    share.expect("the semaphore is never closed")
}

#[cfg(test)]
mod tests {
    use futures::stream;
    use hyper::body::Bytes;
    use tokio::time::sleep;

    use super::*;

    /// A body of these parts, which then breaks off without an end.
    fn hanging(parts: Vec<Bytes>) -> impl Stream<Item = Result<Bytes, warp::Error>> {
        stream::iter(parts.into_iter().map(Ok)).chain(stream::pending())
    }

    fn whole(size: usize) -> impl Stream<Item = Result<Bytes, warp::Error>> {
        stream::iter([Ok(Bytes::from(vec![b' '; size]))])
    }

    #[tokio::test(start_paused = true)]
    async fn large_bodies_wait_for_each_other_and_small_ones_for_nobody() {
        let large = Arc::new(Semaphore::new(MAX_BODY));
        let parts = vec![Bytes::from(vec![b' '; SMALL_BODY]); 2];
        let holder = Arc::clone(&large);
        let slow = tokio::spawn(async move {
            let read = read(None, hanging(parts), &holder).await;
            read.map(drop)
        });
        tokio::task::yield_now().await;
        assert_eq!(large.available_permits(), 0);

        let (small, share) = read(None, whole(SMALL_BODY), &large)
            .await
            .expect("it is read");
        assert_eq!((small.len(), share.is_some()), (SMALL_BODY, false));
        // It comes in when the slow one has had its time.
        sleep(Duration::from_secs(1)).await;
        let size = SMALL_BODY + 1;
        let waiting = tokio::spawn({
            let large = Arc::clone(&large);
            async move {
                let read = read(Some(size as u64), whole(size), &large).await;
                read.map(|(bytes, _)| bytes.len())
            }
        });
        sleep(Duration::from_secs(1)).await;
        assert!(!waiting.is_finished());
        assert_eq!(
            slow.await.expect("no panic"),
            Err(StatusCode::REQUEST_TIMEOUT)
        );
        assert_eq!(waiting.await.expect("no panic"), Ok(size));
        assert_eq!(large.available_permits(), MAX_BODY);
    }
}
