//! Puts the parts of `headstart run` together, and ends them in order.
//!
//! Every long task lives in one `JoinSet`. None of them ever ends by itself, so one that does ends the process with its
//! cause, and Kubernetes starts it anew; a task that died unnoticed would leave a replica that looks healthy and reverts
//! nothing (linkerd/linkerd2#15506).

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use futures::{FutureExt as _, future::BoxFuture};
use hyper_util::service::TowerToHyperService;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client, Config};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use warp::Filter as _;

use crate::{
    admission::{self, Admitter},
    boosts::Boosts,
    certs::{self, CertSlot, Certs},
    check::is_too_old,
    claims::Claims,
    clock::Clock,
    config::RunArgs,
    contact::Contact,
    error::Chain,
    lease::{Elector, Params},
    metrics::Metrics,
    probes::{self, Readiness},
    server::{Stop, connection_limit, serve},
    snapshots::Snapshots,
    status::Reporter,
    surroundings,
    sweeper::{Events, Missed, Sweeper, Tally, Writer},
    upstream,
    view::{self, View},
};

/// Connections that the webhook holds at once; the API server opens a few.
const WEBHOOK_CONNECTIONS: usize = 512;
/// Connections that the plain port holds at once.
const PROBE_CONNECTIONS: usize = 64;
/// How long answers that are under way may take at the end: as long as the API server waits for them.
const DRAIN: Duration = Duration::from_secs(2);
/// How long the term's work may take to end: a write's deadline.
const TERM_END: Duration = Duration::from_secs(6);
/// Until the API server answers, it is asked for its version this often.
const VERSION_RETRY: Duration = Duration::from_secs(5);
/// How long a connection may be silent while an answer is awaited: 5 s more than a watch call lasts, so that a watch on a
/// connection that silently died is noticed within 50 s.
const READ_TIMEOUT: Duration = Duration::from_secs(50);

/// Why the operator did not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// There is no cluster to talk to.
    #[error("no cluster is configured: run inside one, or set KUBECONFIG")]
    Kubeconfig(#[source] kube::config::InferConfigError),
    /// The client can't be built.
    #[error("the API server's client could not be built")]
    Client(#[source] kube::Error),
    /// Callers can't be verified.
    #[error("--client-ca can't be used")]
    ClientCa(#[from] certs::CallersError),
    /// A port is not to be had.
    #[error("{flag} {address} can't be listened on")]
    Listen {
        /// The flag that names it.
        flag: &'static str,
        /// The address.
        address: SocketAddr,
        /// What the system says.
        #[source]
        error: io::Error,
    },
    /// Signals can't be received.
    #[error("signals can't be received")]
    Signals(#[source] io::Error),
    /// A task that never ends has ended.
    #[error("the task {task} has ended: {cause}")]
    TaskEnded {
        /// Which.
        task: &'static str,
        /// Why.
        cause: String,
    },
}

/// The stages of the end, each before the next.
#[derive(Clone, Default)]
struct Ending {
    /// SIGTERM has come: no longer Ready, connections close after their answers, the term ends.
    begun: CancellationToken,
    /// Nobody sends here any more: the listener closes.
    stopped: CancellationToken,
}

/// Runs the operator until SIGTERM or SIGINT.
///
/// # Errors
/// When it can't start, or one of its tasks ends.
pub async fn run(args: RunArgs) -> Result<(), AppError> {
    let config = config().await?;
    tracing::info!(api_server = %config.cluster_url, version = env!("CARGO_PKG_VERSION"), "starting");
    if args.dry_run {
        tracing::warn!("dry run: no pod is boosted, and no boost that is in force is taken back");
    }
    let webhook = listen("--webhook-address", args.webhook_address).await?;
    let probes = listen("--probe-address", args.probe_address).await?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(AppError::Signals)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(AppError::Signals)?;

    let ending = Ending::default();
    let mut tasks = Tasks::default();
    let elector = start(&args, &config, &ending, webhook, probes, &mut tasks)?;

    tokio::select! {
        ended = tasks.next_end() => return Err(ended),
        _ = interrupt.recv() => tracing::info!("SIGINT: shutting down"),
        _ = terminate.recv() => tracing::info!("SIGTERM: shutting down"),
    }
    ending.begun.cancel();
    // Endpoints are told of the end at the same time as we are, and take a while to stop sending.
    let term_ends = async {
        if timeout(TERM_END, elector.cancelled()).await.is_err() {
            tracing::warn!("the term's work did not end in time");
        }
    };
    tokio::join!(sleep(args.shutdown_delay), term_ends);
    ending.stopped.cancel();
    tasks.drained(DRAIN + Duration::from_secs(1)).await;
    tracing::info!("stopped");
    Ok(())
}

/// Starts all tasks. The token is cancelled when the elector has ended its term and released the lease.
fn start(
    args: &RunArgs,
    config: &Config,
    ending: &Ending,
    webhook: TcpListener,
    probes: TcpListener,
    tasks: &mut Tasks,
) -> Result<CancellationToken, AppError> {
    let (clock, metrics) = (Clock::system(), Arc::new(Metrics::default()));
    let (snapshots, claims) = (Arc::new(Snapshots::default()), Arc::new(Claims::default()));
    let boosts = Arc::new(Boosts::new(Arc::clone(&snapshots)));
    let settings = args.admission.settings();
    let contact = Contact::new(metrics.watches.clone(), clock.clone());
    let client = || {
        let config = config.clone();
        let client = contact.client(move || Client::try_from(config.clone()));
        client.map_err(AppError::Client)
    };
    // Watches hold a connection each; writes and the lease have clients of their own.
    let watching = client()?;

    let kept = (Arc::clone(&boosts), watching.clone());
    tasks.forever("boosts", async move { kept.0.keep(kept.1).await });
    let kept = (Arc::clone(&claims), watching.clone());
    tasks.forever("claims", async move { kept.0.keep(kept.1).await });

    keep_surroundings(&watching, &snapshots, tasks);

    let certs = Arc::new(Certs::new(
        certificates(args, &watching),
        args.names(),
        clock.clone(),
        Arc::clone(&metrics),
    ));
    let (kept, slot) = (Arc::clone(&certs), certs.slot());
    tasks.forever("certificates", async move { kept.keep().await });
    tasks.forever("version", check_version(watching.clone()));
    let missed = missed(args, &watching);
    tasks.forever("upstream", upstream::keep(watching, Arc::clone(&metrics)));

    let stop = || Stop {
        closing: ending.begun.clone(),
        stopped: ending.stopped.clone(),
        drain: DRAIN,
    };
    let readiness = Readiness {
        snapshots: Arc::clone(&snapshots),
        claims: Arc::clone(&claims),
        certs,
        webhook: args.webhook_address,
        ending: ending.begun.clone(),
    };
    let admitter = Arc::new(Admitter {
        snapshot: snapshots.reader(),
        settings,
        clock: clock.clone(),
        metrics: metrics.admission.clone(),
        dry_run: args.dry_run,
    });
    let caches = (Arc::clone(&claims), Arc::clone(&boosts));
    let view = start_view(args, caches, &clock, &metrics, client, tasks)?;
    let served = serve_webhook(webhook, slot, args, admitter, view, stop())?;
    tasks.until_stopped("webhook", served);
    tasks.until_stopped(
        "probes",
        serve_probes(probes, readiness, Arc::clone(&metrics), stop()),
    );

    let tally = Arc::<Tally>::default();
    let events = Arc::new(Events::new(
        client()?,
        identity(args),
        clock.clone(),
        metrics.revert.clone(),
    ));
    let kept = Arc::clone(&events);
    tasks.forever("events", async move { kept.keep().await });
    let sweeper = Sweeper {
        writer: Writer::new(client()?),
        claims,
        boosts: Arc::clone(&boosts),
        snapshots,
        settings,
        missed,
        clock: clock.clone(),
        tally: Arc::clone(&tally),
        events,
        metrics: metrics.revert.clone(),
        dry_run: args.dry_run,
    };
    let reporter = Reporter {
        client: client()?,
        boosts,
        tally,
        clock,
        metrics: Arc::clone(&metrics),
        dry_run: args.dry_run,
    };
    // What finds out whether the API server answers must not wait for what it finds.
    let lease = Client::try_from(config.clone()).map_err(AppError::Client)?;
    let lease = Api::<Lease>::namespaced(lease, &args.namespace);
    let elector = Elector::new(lease, Params::new(&args.lease, identity(args))).renewing(contact);
    Ok(stand(
        elector,
        (sweeper, reporter),
        metrics,
        ending.begun.clone(),
        tasks,
    ))
}

/// Stands for election until the end. The token is cancelled when the last term has ended and the lease is released.
fn stand(
    elector: Elector,
    (sweeper, reporter): (Sweeper, Reporter),
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    tasks: &mut Tasks,
) -> CancellationToken {
    let released = CancellationToken::new();
    let done = released.clone();
    tasks.until_stopped("elector", async move {
        elector
            .run(stop, |term| {
                let (sweeper, reporter, metrics) =
                    (sweeper.clone(), reporter.clone(), Arc::clone(&metrics));
                async move {
                    let _leading = metrics.lead();
                    tokio::join!(sweeper.lead(term.clone()), reporter.lead(term));
                }
            })
            .await;
        done.cancel();
        Ok(())
    });
    released
}

/// Where the webhook's certificates come from.
fn certificates(args: &RunArgs, client: &Client) -> certs::Source {
    if let Some(directory) = &args.certificate_directory {
        return certs::Source::Directory(directory.clone());
    }
    let params = certs::Params {
        namespace: args.namespace.clone(),
        secret: args.certificate_secret.clone(),
        webhook: args.webhook_configuration.clone(),
        lifetimes: args.lifetimes(),
    };
    certs::Source::Secret(client.clone(), params)
}

/// Starts what the view needs beside the caches, where it is switched on.
fn start_view(
    args: &RunArgs,
    (claims, boosts): (Arc<Claims>, Arc<Boosts>),
    clock: &Clock,
    metrics: &Arc<Metrics>,
    client: impl Fn() -> Result<Client, AppError>,
    tasks: &mut Tasks,
) -> Result<Option<Arc<View>>, AppError> {
    if !args.view {
        return Ok(None);
    }
    let view = Arc::new(View::new(
        claims,
        boosts,
        args.admission.settings().end,
        clock.clone(),
        Arc::clone(metrics),
        identity(args),
        client()?,
    ));
    let (kept, client) = (Arc::clone(&view), client()?);
    let webhook = args.webhook_configuration.clone();
    let keep = async move { Box::pin(kept.keep(client, &webhook)).await };
    tasks.forever("view", keep);
    Ok(Some(view))
}

/// What finds pods that admission has missed, where they are boosted.
fn missed(args: &RunArgs, client: &Client) -> Option<Missed> {
    args.boost_missed_pods.then(|| Missed {
        client: client.clone(),
        namespace: args.namespace.clone(),
    })
}

fn keep_surroundings(client: &Client, snapshots: &Arc<Snapshots>, tasks: &mut Tasks) {
    let kept = || (client.clone(), Arc::clone(snapshots));
    let (client, parts) = kept();
    tasks.forever("namespaces", async move {
        surroundings::keep_namespaces(client, &parts).await;
    });
    let (client, parts) = kept();
    tasks.forever("limitranges", async move {
        surroundings::keep_limit_ranges(client, &parts).await;
    });
    let (client, parts) = kept();
    tasks.forever("resourcequotas", async move {
        surroundings::keep_quotas(client, &parts).await;
    });
    let (client, parts) = kept();
    tasks.forever("nodes", async move {
        surroundings::keep_nodes(client, &parts).await;
    });
}

/// Serves reviews and, where there is one, the view. The view has callers of its own, so everybody may connect then.
fn serve_webhook(
    listener: TcpListener,
    slot: Arc<CertSlot>,
    args: &RunArgs,
    admitter: Arc<Admitter>,
    view: Option<Arc<View>>,
    stop: Stop,
) -> Result<BoxFuture<'static, io::Result<()>>, certs::CallersError> {
    let connections = connection_limit(WEBHOOK_CONNECTIONS);
    let (client_ca, reviews) = (args.client_ca.as_deref(), admission::routes(admitter));
    let Some(view) = view else {
        let tls = certs::server_config(slot, client_ca)?;
        let service = TowerToHyperService::new(warp::service(reviews));
        return Ok(serve(listener, Some(tls), service, connections, stop).boxed());
    };
    let tls = certs::serving(slot, view::any_caller());
    let callers = client_ca
        .map(|file| certs::callers(Some(file)))
        .transpose()?;
    let routes = admission::refusals(callers)
        .or(reviews)
        .or(view::routes(view));
    let service = TowerToHyperService::new(warp::service(routes));
    Ok(serve(listener, Some(tls), service, connections, stop).boxed())
}

async fn serve_probes(
    listener: TcpListener,
    readiness: Readiness,
    metrics: Arc<Metrics>,
    stop: Stop,
) -> io::Result<()> {
    let service = TowerToHyperService::new(warp::service(probes::routes(readiness, metrics)));
    let connections = connection_limit(PROBE_CONNECTIONS);
    serve(listener, None, service, connections, stop).await
}

async fn config() -> Result<Config, AppError> {
    let mut config = Config::infer().await.map_err(AppError::Kubeconfig)?;
    // kube would repeat writes by itself, for minutes; what failed is looked at again first.
    config.default_retry = false;
    config.connect_timeout = Some(Duration::from_secs(5));
    // A watch call lasts 45 s; an answer that has not come by then never will. (A watch that hangs before its first byte
    // would otherwise freeze its cache for ever.)
    config.read_timeout = Some(READ_TIMEOUT);
    config.reset_reader_on_write = true;
    Ok(config)
}

async fn listen(flag: &'static str, address: SocketAddr) -> Result<TcpListener, AppError> {
    TcpListener::bind(address)
        .await
        .map_err(|error| AppError::Listen {
            flag,
            address,
            error,
        })
}

/// The pod's name; outside a cluster, the host's.
fn identity(args: &RunArgs) -> String {
    let host =
        || std::fs::read_to_string("/proc/sys/kernel/hostname").map(|name| name.trim().to_owned());
    args.identity
        .clone()
        .or_else(|| host().ok())
        .unwrap_or_else(|| "headstart".to_owned())
}

/// Says once whether the cluster can resize pods in place. Never ends.
async fn check_version(client: Client) {
    loop {
        match client.apiserver_version().await {
            Ok(version) => {
                if is_too_old(&version) {
                    tracing::error!(
                        version = version.git_version,
                        "this cluster is too old: boosts are taken back by in-place resize, which needs Kubernetes 1.33"
                    );
                } else {
                    tracing::info!(version = version.git_version, "found the API server");
                }
                return std::future::pending().await;
            }
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "the API server does not answer; trying again");
                sleep(VERSION_RETRY).await;
            }
        }
    }
}

/// The long tasks.
#[derive(Default)]
struct Tasks(JoinSet<(&'static str, io::Result<()>)>);

impl Tasks {
    /// A task that never ends, whatever happens.
    fn forever(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.0.spawn(async move {
            task.await;
            (name, Ok(()))
        });
    }

    /// A task that ends when it is told to.
    fn until_stopped(
        &mut self,
        name: &'static str,
        task: impl Future<Output = io::Result<()>> + Send + 'static,
    ) {
        self.0.spawn(async move { (name, task.await) });
    }

    /// Waits for one to end, which none should.
    async fn next_end(&mut self) -> AppError {
        let (task, cause) = match self.0.join_next().await {
            Some(Ok((task, Ok(())))) => (task, "it returned".to_owned()),
            Some(Ok((task, Err(error)))) => (task, error.to_string()),
            Some(Err(panic)) => ("?", panic.to_string()),
            None => ("all", "there are none".to_owned()),
        };
        AppError::TaskEnded { task, cause }
    }

    /// Waits until those that were told to end have ended: the rest never does.
    async fn drained(&mut self, deadline: Duration) {
        let ends = async {
            let mut listeners = 2;
            while listeners > 0 {
                match self.0.join_next().await {
                    Some(Ok(("webhook" | "probes", _))) => listeners -= 1,
                    Some(_) => {}
                    None => return,
                }
            }
        };
        let _ = timeout(deadline, ends).await;
    }
}
