//! A stand-in for the Service before the webhooks: a TCP load balancer with endpoints that come and go.
//!
//! It does what kube-proxy and the endpoint controller do together, and has their flaw, which a rolling restart must survive:
//! an endpoint that is no longer ready still gets connections for a while.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};

/// How often readiness is asked for; a kubelet does it every few seconds, tests have no such time.
const PROBE: Duration = Duration::from_millis(200);
/// A backend that does not take a connection, or does not answer its probe, within this is not there.
const PATIENCE: Duration = Duration::from_secs(1);

/// One endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Where connections go.
    pub address: SocketAddr,
    /// Where `GET /readyz` is asked, without TLS.
    pub probe: SocketAddr,
}

/// The running load balancer. Dropping it closes the port and all connections through it.
#[derive(Debug)]
pub struct Balancer {
    address: SocketAddr,
    endpoints: Arc<Mutex<Endpoints>>,
    _tasks: JoinSet<()>,
}

#[derive(Debug)]
struct Endpoints {
    all: Vec<Endpoint>,
    next: usize,
    removal_lag: Duration,
}

#[derive(Debug)]
struct Endpoint {
    backend: Backend,
    /// Whether its probe has ever said so.
    was_ready: bool,
    unready_since: Option<Instant>,
    /// Its readiness is of no matter any more.
    terminating: bool,
    connections: u64,
}

impl Balancer {
    /// Listens on a free loopback port. `removal_lag` is how long an endpoint goes on getting connections after it was first seen
    /// unready: the time that a cluster takes to tell all its nodes.
    ///
    /// # Errors
    /// If there is no free port.
    pub async fn start(removal_lag: Duration) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .await
            .context("opening a port for the load balancer")?;
        let address = listener
            .local_addr()
            .context("reading the load balancer's port")?;
        let endpoints = Arc::new(Mutex::new(Endpoints {
            all: Vec::new(),
            next: 0,
            removal_lag,
        }));
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, Arc::clone(&endpoints)));
        tasks.spawn(probe(Arc::clone(&endpoints)));
        Ok(Self {
            address,
            endpoints,
            _tasks: tasks,
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Adds an endpoint; it gets connections once its probe has said that it is ready. It takes the place of a terminated one with
    /// the same addresses.
    pub fn add(&self, backend: Backend) {
        let endpoint = Endpoint {
            backend,
            was_ready: false,
            unready_since: None,
            terminating: false,
            connections: 0,
        };
        let all = &mut lock(&self.endpoints).all;
        all.retain(|old| !(old.terminating && old.backend == backend));
        all.push(endpoint);
    }

    /// Says that an endpoint's pod has been told to end: it gets no connections after the removal lag, however ready it says it is.
    /// Those that it has live on.
    pub fn terminate(&self, backend: Backend) {
        for endpoint in lock(&self.endpoints).of(backend) {
            endpoint.terminating = true;
            endpoint.unready_since.get_or_insert_with(Instant::now);
        }
    }

    /// Changes how long endpoints that have gone still get connections.
    pub fn set_removal_lag(&self, removal_lag: Duration) {
        lock(&self.endpoints).removal_lag = removal_lag;
    }

    /// Takes an endpoint out at once. Its connections live on.
    pub fn remove(&self, backend: Backend) {
        lock(&self.endpoints)
            .all
            .retain(|endpoint| endpoint.backend != backend);
    }

    /// The endpoints that get connections now.
    #[must_use]
    pub fn serving(&self) -> Vec<Backend> {
        lock(&self.endpoints).serving()
    }

    /// How many connections an endpoint has been given.
    #[must_use]
    pub fn connections(&self, backend: Backend) -> u64 {
        lock(&self.endpoints)
            .of(backend)
            .map(|endpoint| endpoint.connections)
            .sum()
    }
}

impl Endpoints {
    fn of(&mut self, backend: Backend) -> impl Iterator<Item = &mut Endpoint> {
        self.all
            .iter_mut()
            .filter(move |endpoint| endpoint.backend == backend)
    }

    fn serving(&self) -> Vec<Backend> {
        let serving = |endpoint: &&Endpoint| {
            let unready = endpoint.unready_since.map(|since| since.elapsed());
            endpoint.was_ready && unready.is_none_or(|unready| unready < self.removal_lag)
        };
        let serving = self.all.iter().filter(serving);
        serving.map(|endpoint| endpoint.backend).collect()
    }

    /// The serving endpoints, each connection beginning with the next one.
    fn in_turn(&mut self) -> Vec<Backend> {
        let mut serving = self.serving();
        if !serving.is_empty() {
            let first = self.next % serving.len();
            serving.rotate_left(first);
            self.next = self.next.wrapping_add(1);
        }
        serving
    }

    fn probed(&mut self, backend: Backend, ready: bool) {
        for endpoint in self.of(backend).filter(|endpoint| !endpoint.terminating) {
            if ready {
                (endpoint.was_ready, endpoint.unready_since) = (true, None);
            } else {
                endpoint.unready_since.get_or_insert_with(Instant::now);
            }
        }
    }
}

async fn accept(listener: TcpListener, endpoints: Arc<Mutex<Endpoints>>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Ok((client, _)) = listener.accept() => {
                connections.spawn(forward(client, Arc::clone(&endpoints)));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Carries one connection to the first endpoint that takes it. Without any, the client sees its connection closed.
async fn forward(mut client: TcpStream, endpoints: Arc<Mutex<Endpoints>>) {
    let backends = lock(&endpoints).in_turn();
    for backend in backends {
        if let Ok(Ok(mut server)) = timeout(PATIENCE, TcpStream::connect(backend.address)).await {
            for endpoint in lock(&endpoints).of(backend) {
                endpoint.connections += 1;
            }
            client.set_nodelay(true).ok();
            server.set_nodelay(true).ok();
            // How it ends is between the two sides.
            copy_bidirectional(&mut client, &mut server).await.ok();
            return;
        }
    }
}

async fn probe(endpoints: Arc<Mutex<Endpoints>>) {
    let mut ticks = tokio::time::interval(PROBE);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let backends: Vec<Backend> = lock(&endpoints)
            .all
            .iter()
            .map(|endpoint| endpoint.backend)
            .collect();
        let asked = backends
            .iter()
            .map(|backend| async { (*backend, is_ready(backend.probe).await) });
        for (backend, ready) in futures::future::join_all(asked).await {
            lock(&endpoints).probed(backend, ready);
        }
    }
}

/// Whether `GET /readyz` is answered with 200. The status line is all that counts, so no HTTP library is needed.
async fn is_ready(address: SocketAddr) -> bool {
    let status = async {
        let mut stream = TcpStream::connect(address).await?;
        stream
            .write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            .await?;
        let mut line = [0; 12];
        stream.read_exact(&mut line).await?;
        std::io::Result::Ok(line)
    };
    matches!(timeout(PATIENCE, status).await, Ok(Ok(line)) if line == *b"HTTP/1.1 200")
}

fn lock(endpoints: &Mutex<Endpoints>) -> MutexGuard<'_, Endpoints> {
    endpoints.lock().unwrap_or_else(PoisonError::into_inner)
}
