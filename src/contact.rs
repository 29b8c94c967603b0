//! The contact with the API server: when each watch was last heard, and an end to those that are open while it was away.
//!
//! A connection can die without a word: a NAT or a firewall forgets it, and a watch on it would be believed until its call
//! should have ended, 50 s later. The [lease](crate::lease) is asked for every second, on a connection of its own. Once it is
//! answered again after it was not, all open answers are ended, and so are the connections that wait to be used again. Watches
//! go on from the version that they have seen: nothing is listed again.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use futures::{StreamExt as _, TryStreamExt as _};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::{
    Request, Response,
    body::{Bytes, Frame},
};
use kube::{Client, client::Body};
use tokio::{sync::watch, time::timeout};

use crate::{clock::Clock, metrics::WatchMetrics};

/// The API server begins to answer a watch at once; what has not begun by then goes over a connection that is dead.
const FIRST_BYTE: Duration = Duration::from_secs(10);

/// Why a request was given up.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("the API server did not begin to answer within {} s", FIRST_BYTE.as_secs())]
    Silent,
    #[error("the API server was away; asking again on a new connection")]
    Ended,
}

/// What the watches and the elector share. Clones are the same contact.
#[derive(Clone, Debug)]
pub struct Contact {
    /// How often it was renewed.
    renewals: watch::Sender<u64>,
    metrics: WatchMetrics,
    clock: Clock,
}

impl Contact {
    /// Tells these metrics when something was heard.
    #[must_use]
    pub fn new(metrics: WatchMetrics, clock: Clock) -> Self {
        Self {
            renewals: watch::Sender::default(),
            metrics,
            clock,
        }
    }

    /// Ends all that was asked before and is still being answered.
    pub fn renew(&self) {
        self.renewals.send_modify(|renewals| *renewals += 1);
    }

    /// A client whose answers end when the contact is renewed. It is made of another one, and then of a new one, which has
    /// connections of its own.
    ///
    /// # Errors
    /// If none can be made.
    pub fn client(
        &self,
        make: impl Fn() -> kube::Result<Client> + Send + Sync + 'static,
    ) -> kube::Result<Client> {
        let first = make()?;
        let (contact, namespace) = (self.clone(), first.default_namespace().to_owned());
        let current = Mutex::new((*self.renewals.borrow(), first));
        let service = tower::service_fn(move |request| {
            let (contact, client) = (contact.clone(), contact.current(&current, &make));
            async move { contact.send(&client, request).await }
        });
        Ok(Client::new(service, namespace))
    }

    /// The client of the present renewal. One that can't be made leaves the old one in its place.
    fn current(
        &self,
        current: &Mutex<(u64, Client)>,
        make: impl Fn() -> kube::Result<Client>,
    ) -> Client {
        let renewals = *self.renewals.borrow();
        let mut current = current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.0 != renewals
            && let Ok(client) = make()
        {
            *current = (renewals, client);
        }
        current.1.clone()
    }

    async fn send(
        &self,
        client: &Client,
        request: Request<Body>,
    ) -> kube::Result<Response<impl hyper::body::Body<Data = Bytes, Error = kube::Error> + use<>>>
    {
        let mut renewals = self.renewals.subscribe();
        let watched = watched(&request).map(|resource| self.metrics.of(resource));
        let answer = begun(client.send(request), watched.is_some());
        let response = tokio::select! {
            response = answer => response?,
            Ok(()) = renewals.changed() => return Err(lost(Lost::Ended)),
        };
        let clock = self.clock.clone();
        let hear = move || {
            if let Some(heard) = &watched {
                heard.set(clock.now().timestamp());
            }
        };
        hear();
        let end = Box::pin(async move { renewals.changed().await.ok() });
        Ok(response.map(|body| {
            let data = body.into_data_stream().inspect_ok(move |_| hear());
            StreamBody::new(data.take_until(end).map_ok(Frame::data))
        }))
    }
}

/// A watch has to begin soon; a list may take its time.
async fn begun(
    answer: impl Future<Output = kube::Result<Response<Body>>>,
    is_watch: bool,
) -> kube::Result<Response<Body>> {
    if !is_watch {
        return answer.await;
    }
    let answer = timeout(FIRST_BYTE, answer).await;
    answer.unwrap_or_else(|_| Err(lost(Lost::Silent)))
}

/// The resource that is watched, where it is a watch: `pods`.
fn watched(request: &Request<Body>) -> Option<String> {
    let uri = request.uri();
    let is_watch = uri.query()?.split('&').any(|pair| pair == "watch=true");
    let resource = uri.path().rsplit('/').next().filter(|_| is_watch)?;
    Some(resource.to_owned())
}

fn lost(why: Lost) -> kube::Error {
    kube::Error::Service(why.into())
}
