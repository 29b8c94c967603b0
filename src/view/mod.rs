//! The view: boosts in force, as an aggregated API that every replica serves from its own caches.
//!
//! `visibility.autoscaling.x-k8s.io/v1alpha1` can be read (get, list) and nothing else. It is off by default: an aggregated
//! API that can't be reached keeps every namespace of a cluster from being deleted.
//!
//! ```text
//! request ─ resource ─► Route ─┬─► discovery
//!                              └─ trust, caller ─► User ─ reviews ─► claims ─ domain::boosted ─► object ─ answer ─► JSON
//! ```
//!
//! Pages are made on threads of their own, few at once, so that admission does not wait for them.

mod accept;
mod answer;
mod caller;
mod discovery;
mod failure;
pub mod object;
mod publish;
mod query;
mod resource;
mod reviews;
mod tls;
mod trust;

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use chrono::{DateTime, Utc};
use hyper::{HeaderMap, Method, Response};
use kube::Client;
use rustls::server::danger::ClientCertVerifier;
use serde_json::Value;
use tokio::sync::Semaphore;
use warp::{Filter, Reply};

pub use self::resource::{GROUP, VERSION};
use self::{
    accept::{DISCOVERY, Form, TABLE, negotiate},
    answer::{CACHE_AGE, LEADER, Page, REPLICA, Source, json_response, typed_response},
    caller::{Claimed, claimed},
    failure::Failure,
    object::Object,
    query::Query,
    resource::{Resource, Route, Target},
    reviews::Reviews,
    trust::TrustSlot,
};
use crate::{
    api::Pod,
    boosts::{Boosts, Key, kind_of},
    claims::{Claims, Place},
    clock::Clock,
    domain::{
        boosted::{Boosted, Summary},
        end::EndSettings,
        policy::BoostKind,
        snapshot::BoostIndex,
    },
    metrics::Metrics,
    server::Peer,
};

/// Requests for objects that are worked on at once; more are told to come again.
const AT_ONCE: usize = 16;
/// Pages that are made at once: one core is left to admission wherever there are two.
const MADE_AT_ONCE: usize = 1;
/// Claims that are taken out of the cache at once.
const STRIDE: usize = 500;

/// What the view is made of.
pub struct View {
    claims: Arc<Claims>,
    boosts: Arc<Boosts>,
    settings: EndSettings,
    clock: Clock,
    metrics: Arc<Metrics>,
    replica: String,
    trust: TrustSlot,
    reviews: Reviews,
    asking: Semaphore,
    making: Semaphore,
}

/// A request, as far as it matters.
struct Asked {
    path: String,
    method: Method,
    query: String,
    headers: HeaderMap,
    peer: Option<Peer>,
}

/// Everything that a page is made from, at one instant.
struct Sight {
    now: DateTime<Utc>,
    index: Arc<BoostIndex>,
    source: Source,
}

impl View {
    /// A view of these caches, on this replica. `client` is for reviews of callers.
    #[must_use]
    pub fn new(
        claims: Arc<Claims>,
        boosts: Arc<Boosts>,
        settings: EndSettings,
        clock: Clock,
        metrics: Arc<Metrics>,
        replica: String,
        client: Client,
    ) -> Self {
        Self {
            claims,
            boosts,
            settings,
            clock,
            metrics,
            replica,
            trust: TrustSlot::empty(),
            reviews: Reviews::new(client),
            asking: Semaphore::new(AT_ONCE),
            making: Semaphore::new(MADE_AT_ONCE),
        }
    }

    /// Keeps what it needs beside the caches, for ever: whom to trust, and the CA that the aggregator trusts us by, which is
    /// that of the webhook configuration of this name.
    pub async fn keep(&self, client: Client, webhook: &str) {
        tokio::join!(
            trust::keep(client.clone(), &self.trust),
            publish::keep(client, webhook)
        );
    }

    async fn answer(self: Arc<Self>, asked: Asked) -> Response<Vec<u8>> {
        let began = Instant::now();
        let route = Route::read(&asked.method, &asked.path);
        let answer = match route {
            Ok(Route::Objects(target)) => {
                let view = Arc::clone(&self);
                let answer = view.objects(target, &asked).await;
                let answer = answer.unwrap_or_else(|failure| failure.response());
                self.metrics
                    .viewed(answer.status().as_u16(), began.elapsed());
                return answer;
            }
            Ok(Route::Groups) => groups(&asked.headers),
            Ok(Route::Group) => plain(&asked.headers, &discovery::group()),
            Ok(Route::Version) => plain(&asked.headers, &discovery::version()),
            Err(failure) => Err(failure),
        };
        answer.unwrap_or_else(|failure| failure.response())
    }

    async fn objects(
        self: Arc<Self>,
        target: Target,
        asked: &Asked,
    ) -> Result<Response<Vec<u8>>, Failure> {
        let query = Query::read(&asked.query, &target)?;
        let form =
            negotiate(&asked.headers, &[Form::Plain, TABLE]).ok_or(Failure::NotAcceptable)?;
        let _asking = self
            .asking
            .try_acquire()
            .map_err(|_| Failure::TooManyRequests)?;
        self.admit(asked, &target).await?;
        let _making = self
            .making
            .acquire()
            .await
            .expect("the semaphore is never closed");
        let view = Arc::clone(&self);
        let made = tokio::task::spawn_blocking(move || view.make(target, &query, form));
        made.await
            .unwrap_or(Err(Failure::Internal("the answer could not be made")))
    }

    /// Lets a caller in who may read the target.
    async fn admit(&self, asked: &Asked, target: &Target) -> Result<(), Failure> {
        let trust = self.trust.load_full();
        let trust = trust.ok_or(Failure::NotReady("the cluster's CAs have"))?;
        let chain = asked.peer.as_ref().map(Peer::chain).unwrap_or_default();
        let user = match claimed(&trust, chain, &asked.headers) {
            Claimed::User(user) => user,
            Claimed::Token(token) => self.reviews.user(token).await?,
            Claimed::Nobody => return Err(Failure::Unauthorized),
        };
        self.reviews.authorize(&user, target).await
    }

    fn make(
        &self,
        target: Target,
        query: &Query,
        form: Form,
    ) -> Result<Response<Vec<u8>>, Failure> {
        let sight = self.sight()?;
        match (target.resource, &target.name) {
            (Resource::BoostedPods, Some(name)) => {
                let place = Place {
                    namespace: target.namespace.clone().unwrap_or_default(),
                    name: name.clone(),
                };
                let pod = self.claims.at(&place);
                let pod = pod.ok_or(Failure::NotFound(target))?;
                let (object, now) = (self.boosted_pod(&pod, &sight), sight.now);
                Ok(answer::one(object, sight.source, form, query.include, now))
            }
            (Resource::BoostedPods, None) => {
                let page = self.boosted_pods(&target, query, &sight);
                Ok(list(target.resource, page, sight, form, query))
            }
            (resource, Some(name)) => {
                let mut summaries = self.summaries(&target, &sight, &Place::default());
                let key = (target.namespace.clone().unwrap_or_default(), name.clone());
                let summary = summaries.remove(&key);
                let summary = summary.ok_or(Failure::NotFound(target))?;
                let object = Object::summary(resource, place(key), summary);
                let now = sight.now;
                Ok(answer::one(object, sight.source, form, query.include, now))
            }
            (resource, None) => {
                let summaries = self.summaries(&target, &sight, &query.after);
                let page = summary_page(resource, summaries, query);
                Ok(list(resource, page, sight, form, query))
            }
        }
    }

    fn sight(&self) -> Result<Sight, Failure> {
        let version = self.claims.version();
        let version = version.ok_or(Failure::NotReady("the boosted pods have"))?;
        let index = self.boosts.index();
        let now = self.clock.now();
        let heard = self.metrics.watches.heard("pods");
        let age = heard.map_or(0, |heard| (now - heard).num_seconds().max(0));
        let annotations = [
            (REPLICA, self.replica.clone()),
            (LEADER, (self.metrics.leader.get() == 1).to_string()),
            (CACHE_AGE, age.to_string()),
        ];
        Ok(Sight {
            now,
            index: index.ok_or(Failure::NotReady("the boosts have"))?,
            source: Source {
                annotations: annotations.into(),
                version,
            },
        })
    }

    fn boosted(&self, pod: &Pod, sight: &Sight) -> Boosted {
        let policy = sight.index.of_pod(pod).map(Arc::as_ref);
        Boosted::of(pod, policy, self.settings, sight.now)
    }

    fn boosted_pod(&self, pod: &Pod, sight: &Sight) -> Object<Boosted> {
        Object::boosted_pod(pod, self.boosted(pod, sight))
    }

    /// The claims of a target after a place, a stride at a time: the cache is never held for longer.
    fn claims_of<'a>(
        &'a self,
        namespace: Option<&'a str>,
        mut after: Place,
    ) -> impl Iterator<Item = Arc<Pod>> + 'a {
        let mut is_end = false;
        std::iter::from_fn(move || {
            let some = (!is_end).then(|| self.claims.after(&after, namespace, STRIDE))?;
            is_end = some.len() < STRIDE;
            after = some.last().map(|pod| Place::of(pod))?;
            Some(some)
        })
        .flatten()
    }

    fn boosted_pods(&self, target: &Target, query: &Query, sight: &Sight) -> Page<Boosted> {
        let claims = self.claims_of(target.namespace.as_deref(), query.after.clone());
        let is_wanted =
            |pod: &Arc<Pod>| query.claim.is_none() || pod.claim() == query.claim.as_deref();
        let mut claims = claims.filter(is_wanted).peekable();
        let items: Vec<_> = claims
            .by_ref()
            .take(query.limit)
            .map(|pod| self.boosted_pod(&pod, sight))
            .collect();
        let last = items.last().map(|last| Place {
            namespace: last.metadata.namespace.clone(),
            name: last.metadata.name.clone(),
        });
        Page {
            next: last.filter(|_| claims.peek().is_some()),
            items,
        }
    }

    /// What the boosts of a target have lent, those without any too, from a namespace on.
    fn summaries(&self, target: &Target, sight: &Sight, from: &Place) -> BTreeMap<Key, Summary> {
        let kind = if target.resource.is_namespaced() {
            BoostKind::Namespaced
        } else {
            BoostKind::Cluster
        };
        let namespace = target.namespace.as_deref();
        let is_asked =
            |of: &str| namespace.map_or(of >= from.namespace.as_str(), |namespace| of == namespace);
        let known = self.boosts.keys().into_iter();
        let known = known.filter(|key| kind_of(key) == kind && is_asked(&key.0));
        let mut summaries: BTreeMap<Key, Summary> =
            known.map(|key| (key, Summary::default())).collect();
        let begin = Place {
            namespace: namespace.unwrap_or(&from.namespace).to_owned(),
            name: String::new(),
        };
        for pod in self.claims_of(namespace, begin) {
            let boosted = self.boosted(&pod, sight);
            if boosted.boost.kind == Some(kind) {
                let namespace = match kind {
                    BoostKind::Namespaced => Place::of(&pod).namespace,
                    BoostKind::Cluster => String::new(),
                };
                let key = (namespace, boosted.boost.name.clone());
                summaries.entry(key).or_default().add(&boosted);
            }
        }
        summaries
    }
}

fn list<S: object::Row + serde::Serialize>(
    resource: Resource,
    page: Page<S>,
    sight: Sight,
    form: Form,
    query: &Query,
) -> Response<Vec<u8>> {
    let now = sight.now;
    answer::list(resource, page, sight.source, form, query.include, now)
}

fn summary_page(
    resource: Resource,
    summaries: BTreeMap<Key, Summary>,
    query: &Query,
) -> Page<Summary> {
    let rest = summaries.into_iter();
    let mut rest = rest
        .map(|(key, summary)| (place(key), summary))
        .filter(|(place, _)| *place > query.after)
        .peekable();
    let mut next = None;
    let mut items = Vec::new();
    while let Some((place, summary)) = rest.next() {
        items.push(Object::summary(resource, place.clone(), summary));
        if items.len() == query.limit {
            next = rest.peek().map(|_| place);
            break;
        }
    }
    Page { items, next }
}

fn place((namespace, name): Key) -> Place {
    Place { namespace, name }
}

fn groups(headers: &HeaderMap) -> Result<Response<Vec<u8>>, Failure> {
    match negotiate(headers, &[Form::Plain, DISCOVERY]) {
        Some(Form::Plain) => Ok(json_response(&discovery::groups())),
        Some(_) => Ok(typed_response(
            &discovery::aggregated(),
            discovery::AGGREGATED,
        )),
        None => Err(Failure::NotAcceptable),
    }
}

fn plain(headers: &HeaderMap, value: &Value) -> Result<Response<Vec<u8>>, Failure> {
    negotiate(headers, &[Form::Plain]).ok_or(Failure::NotAcceptable)?;
    Ok(json_response(value))
}

/// Asks callers for a certificate, and takes any or none: who has signed it is looked at for each request.
#[must_use]
pub fn any_caller() -> Arc<dyn ClientCertVerifier> {
    Arc::new(tls::AnyCaller::new())
}

/// Everything under `/apis` and `/openapi`; there is no schema, and none is better than a wrong one.
pub fn routes(
    view: Arc<View>,
) -> impl Filter<Extract = (impl Reply,), Error = warp::Rejection> + Clone {
    let ours = warp::path("apis").or(warp::path("openapi")).unify();
    let query = warp::query::raw().or(warp::any().map(String::new)).unify();
    ours.and(warp::path::full())
        .and(warp::method())
        .and(query)
        .and(warp::header::headers_cloned())
        .and(warp::ext::optional::<Peer>())
        .then(
            move |path: warp::path::FullPath, method, query, headers, peer| {
                let asked = Asked {
                    path: path.as_str().to_owned(),
                    method,
                    query,
                    headers,
                    peer,
                };
                Arc::clone(&view).answer(asked)
            },
        )
}
