//! What only the API server knows of a caller: whose token it is, and what they may. Asked on a client of its own, within a
//! deadline, and remembered for some seconds; what can't be asked is refused.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use hyper::Request;
use kube::Client;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{sync::Semaphore, time::timeout};

use super::{
    caller::{User, with_everybody},
    failure::Failure,
    resource::{GROUP, Target, VERSION},
};
use crate::error::Chain;

/// How long an answer is remembered: as long as API servers do.
const REMEMBERED: Duration = Duration::from_secs(10);
/// Answers that are remembered.
const MOST: usize = 1024;
/// Questions that are longer, in bytes, are asked every time: what strangers can make us keep is bounded.
const LONGEST: usize = 4 << 10;
/// Tokens that are asked about at once. Strangers may send any, and leave room for callers who have proven who they are.
const TOKENS_AT_ONCE: usize = 8;
/// How long an answer may take.
const DEADLINE: Duration = Duration::from_secs(5);
/// May do everything, as with the API server itself.
const MASTERS: &str = "system:masters";

/// Asks, and remembers.
pub(super) struct Reviews {
    client: Client,
    asking: Semaphore,
    tokens: Remembered<Vec<u8>, Option<User>>,
    rights: Remembered<String, bool>,
}

/// A review as it is sent.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Review<S> {
    kind: &'static str,
    api_version: &'static str,
    spec: S,
}

/// What comes back.
#[derive(Deserialize)]
struct Reviewed<S> {
    status: S,
}

#[derive(Serialize)]
struct Token<'a> {
    token: &'a str,
}

#[derive(Deserialize)]
struct Authenticated {
    #[serde(default)]
    authenticated: bool,
    user: Option<User>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Access<'a> {
    #[serde(flatten)]
    user: &'a User,
    resource_attributes: Attributes<'a>,
}

#[derive(Serialize)]
struct Attributes<'a> {
    group: &'a str,
    version: &'a str,
    resource: &'a str,
    verb: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
}

#[derive(Deserialize)]
struct Allowed {
    #[serde(default)]
    allowed: bool,
}

impl Reviews {
    /// Asks through this client.
    pub(super) fn new(client: Client) -> Self {
        Self {
            client,
            asking: Semaphore::new(TOKENS_AT_ONCE),
            tokens: Remembered::default(),
            rights: Remembered::default(),
        }
    }

    /// Whose token it is. Tokens themselves are not remembered.
    pub(super) async fn user(&self, token: &str) -> Result<User, Failure> {
        let key = digest(&SHA256, token.as_bytes()).as_ref().to_vec();
        let known = self.tokens.get(&key);
        let user = if let Some(known) = known {
            known
        } else {
            let asking = self.asking.try_acquire();
            let _asking = asking.map_err(|_| Failure::TooManyRequests)?;
            let review = Review {
                kind: "TokenReview",
                api_version: "authentication.k8s.io/v1",
                spec: Token { token },
            };
            let path = "/apis/authentication.k8s.io/v1/tokenreviews";
            let answer: Option<Authenticated> = self.ask(path, &review).await;
            let answer = answer.ok_or(Failure::Internal("the token could not be checked"))?;
            let user = answer.user.filter(|_| answer.authenticated);
            self.tokens.put(key, user.clone());
            user
        };
        user.map(with_everybody).ok_or(Failure::Unauthorized)
    }

    /// Whether a user may read something.
    pub(super) async fn authorize(&self, user: &User, target: &Target) -> Result<(), Failure> {
        if user.groups.iter().any(|group| group == MASTERS) {
            return Ok(());
        }
        let resource_attributes = Attributes {
            group: GROUP,
            version: VERSION,
            resource: target.resource.plural(),
            verb: target.verb(),
            namespace: target.namespace.as_deref(),
            name: target.name.as_deref(),
        };
        let spec = Access {
            user,
            resource_attributes,
        };
        let key = serde_json::to_string(&spec).expect("texts can be written");
        let allowed = if let Some(known) = self.rights.get(&key) {
            known
        } else {
            let review = Review {
                kind: "SubjectAccessReview",
                api_version: "authorization.k8s.io/v1",
                spec,
            };
            let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
            let answer: Option<Allowed> = self.ask(path, &review).await;
            let answer = answer.ok_or(Failure::Internal("the right could not be checked"))?;
            if key.len() <= LONGEST {
                self.rights.put(key, answer.allowed);
            }
            answer.allowed
        };
        allowed
            .then_some(())
            .ok_or_else(|| forbidden(&user.name, target))
    }

    async fn ask<S: DeserializeOwned>(&self, path: &str, review: &impl Serialize) -> Option<S> {
        let body = serde_json::to_vec(review).expect("texts can be written");
        let request = Request::post(path)
            .header("content-type", "application/json")
            .body(body)
            .expect("a path and a header make a request");
        match timeout(DEADLINE, self.client.request::<Reviewed<S>>(request)).await {
            Ok(Ok(reviewed)) => return Some(reviewed.status),
            Ok(Err(error)) => {
                tracing::warn!(path, error = %Chain(&error), "a caller of the view could not be reviewed");
            }
            Err(_) => tracing::warn!(path, "a caller of the view was not reviewed in time"),
        }
        None
    }
}

/// As the API server puts it.
fn forbidden(user: &str, target: &Target) -> Failure {
    let resource = target.resource.plural();
    let name = target.name.as_ref();
    let name = name.map_or(String::new(), |name| format!(" \"{name}\""));
    let place = match &target.namespace {
        Some(namespace) => format!("in the namespace \"{namespace}\""),
        None => "at the cluster scope".to_owned(),
    };
    Failure::Forbidden(format!(
        "{resource}.{GROUP}{name} is forbidden: User \"{user}\" cannot {} resource \"{resource}\" in API group \"{GROUP}\" {place}",
        target.verb()
    ))
}

/// Answers, each for a while. When there are too many, all are forgotten.
struct Remembered<K, V>(Mutex<HashMap<K, (Instant, V)>>);

impl<K, V> Default for Remembered<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, V: Clone> Remembered<K, V> {
    fn get(&self, key: &K) -> Option<V> {
        let answers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, value) = answers.get(key)?;
        (at.elapsed() < REMEMBERED).then(|| value.clone())
    }

    fn put(&self, key: K, value: V) {
        let mut answers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if answers.len() >= MOST {
            answers.retain(|_, (at, _)| at.elapsed() < REMEMBERED);
        }
        if answers.len() >= MOST {
            answers.clear();
        }
        answers.insert(key, (Instant::now(), value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_remembered_than_there_is_room_for() {
        let remembered = Remembered::<usize, usize>::default();
        for number in 0..=3 * MOST {
            remembered.put(number, number);
            assert_eq!(remembered.get(&number), Some(number));
        }
        let kept = remembered.0.lock().expect("nobody panicked").len();
        assert!(kept <= MOST, "{kept}");
        assert_eq!(remembered.get(&0), None);
    }

    #[test]
    fn a_question_is_about_one_user_and_one_target() {
        let user = User {
            name: "alice".to_owned(),
            groups: vec!["dev".to_owned()],
            ..User::default()
        };
        let spec = Access {
            user: &user,
            resource_attributes: Attributes {
                group: GROUP,
                version: VERSION,
                resource: "boostedpods",
                verb: "list",
                namespace: Some("n"),
                name: None,
            },
        };
        assert_eq!(
            serde_json::to_string(&spec).expect("JSON"),
            r#"{"user":"alice","uid":"","groups":["dev"],"extra":{},"resourceAttributes":{"group":"visibility.autoscaling.x-k8s.io","version":"v1alpha1","resource":"boostedpods","verb":"list","namespace":"n"}}"#
        );
    }
}
