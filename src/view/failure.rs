//! What a caller is told who does not get what was asked for: a `Status`, as the API server would say it.
//!
//! It never holds data: what is asked for is repeated, nothing else.

use hyper::{Response, StatusCode, header};
use serde_json::json;

use super::resource::{GROUP, Target};

/// Why a request is not answered with an object.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Failure {
    /// Nobody knows who is asking.
    #[error("Unauthorized")]
    Unauthorized,
    /// The caller may not.
    #[error("{0}")]
    Forbidden(String),
    /// There is no such object.
    #[error("{}.{GROUP} \"{}\" not found", .0.resource.plural(), .0.name.as_deref().unwrap_or_default())]
    NotFound(Target),
    /// There is no such path.
    #[error("the server could not find the requested resource")]
    NoSuchPath,
    /// Everything here is read, by get and list.
    #[error(
        "the server does not allow this method on the requested resource: boosts in force can be read (get, list), and end by themselves; `headstart revert` ends one now"
    )]
    MethodNotAllowed,
    /// A parameter can't be read.
    #[error("{0}")]
    BadRequest(String),
    /// The caller wants another form.
    #[error("only the following media types are accepted: application/json")]
    NotAcceptable,
    /// Too many ask at once.
    #[error("too many requests at once, please try again later")]
    TooManyRequests,
    /// What is needed has not been read.
    #[error("{0} not been read yet, please try again later")]
    NotReady(&'static str),
    /// The API server could not be asked about the caller.
    #[error("{0}")]
    Internal(&'static str),
}

impl Failure {
    /// The HTTP status, and the word that clients know it by.
    fn code(&self) -> (StatusCode, &'static str) {
        match self {
            Self::Unauthorized => (StatusCode::UNAUTHORIZED, "Unauthorized"),
            Self::Forbidden(_) => (StatusCode::FORBIDDEN, "Forbidden"),
            Self::NotFound(_) | Self::NoSuchPath => (StatusCode::NOT_FOUND, "NotFound"),
            Self::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
            Self::BadRequest(_) => (StatusCode::BAD_REQUEST, "BadRequest"),
            Self::NotAcceptable => (StatusCode::NOT_ACCEPTABLE, "NotAcceptable"),
            Self::TooManyRequests => (StatusCode::TOO_MANY_REQUESTS, "TooManyRequests"),
            Self::NotReady(_) => (StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable"),
            Self::Internal(_) => (StatusCode::INTERNAL_SERVER_ERROR, "InternalError"),
        }
    }

    /// The answer.
    pub(super) fn response(&self) -> Response<Vec<u8>> {
        let (code, reason) = self.code();
        let passes = matches!(self, Self::TooManyRequests | Self::NotReady(_));
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.to_string(), "reason": reason, "code": code.as_u16(),
        });
        if let Self::NotFound(target) = self {
            let (kind, name) = (target.resource.plural(), &target.name);
            status["details"] = json!({"group": GROUP, "kind": kind, "name": name});
        }
        let mut response = Response::builder()
            .status(code)
            .header(header::CONTENT_TYPE, "application/json");
        if passes {
            status["details"] = json!({"retryAfterSeconds": 1});
            response = response.header(header::RETRY_AFTER, "1");
        }
        response
            .body(status.to_string().into_bytes())
            .expect("a status and headers make a response")
    }
}
