//! The webhook's route: bounds on bodies, then [`Admitter::answer`].

use std::{pin::pin, sync::Arc, time::Duration};

use futures::{Stream, StreamExt};
use hyper::StatusCode;
use tokio::time::timeout;
use warp::{Buf, Filter, Reply, http::Response};

use super::Admitter;

/// Largest body in bytes. An object in etcd has at most 1.5 MiB; the API server itself takes 3 MiB, and a review holds
/// the object once on CREATE. controller-runtime has the same bound.
const MAX_BODY: usize = 7 << 20;
/// How long a body may take to arrive. The API server gives up after 2 s.
const BODY_DEADLINE: Duration = Duration::from_secs(5);

/// `POST /mutate-v1-pod`.
#[must_use]
pub fn routes(
    admitter: Arc<Admitter>,
) -> impl Filter<Extract = (impl Reply,), Error = warp::Rejection> + Clone {
    warp::path!("mutate-v1-pod")
        .and(warp::post())
        .and(warp::header::optional("content-length"))
        .and(warp::body::stream())
        .then(move |length: Option<u64>, body| {
            let admitter = Arc::clone(&admitter);
            async move {
                match read(length, body).await {
                    Ok(body) => answer(&admitter, &body),
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
            tracing::warn!(%error, "a review could not be read");
            refusal(StatusCode::BAD_REQUEST, &error.to_string())
        }
    }
}

fn refusal(status: StatusCode, text: &str) -> Response<Vec<u8>> {
    Response::builder()
        .status(status)
        .body(text.as_bytes().to_vec())
        .expect("a status makes a response")
}

/// Collects a body. One that says that it is too long is not read at all, one that becomes too long no further.
async fn read(
    length: Option<u64>,
    body: impl Stream<Item = Result<impl Buf, warp::Error>>,
) -> Result<Vec<u8>, StatusCode> {
    let announced = usize::try_from(length.unwrap_or(0)).unwrap_or(usize::MAX);
    if announced > MAX_BODY {
        return Err(StatusCode::PAYLOAD_TOO_LARGE);
    }
    let collect = async {
        let mut bytes = Vec::with_capacity(announced);
        let mut body = pin!(body);
        while let Some(chunk) = body.next().await {
            let mut chunk = chunk.map_err(|_| StatusCode::BAD_REQUEST)?;
            if bytes.len() + chunk.remaining() > MAX_BODY {
                return Err(StatusCode::PAYLOAD_TOO_LARGE);
            }
            while chunk.has_remaining() {
                let part = chunk.chunk();
                bytes.extend_from_slice(part);
                let read = part.len();
                chunk.advance(read);
            }
        }
        Ok(bytes)
    };
    timeout(BODY_DEADLINE, collect)
        .await
        .unwrap_or(Err(StatusCode::REQUEST_TIMEOUT))
}
