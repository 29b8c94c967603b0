//! The troubled ways to an API server, and its etcd: what the fault suite stands on.

use std::{
    io::ErrorKind,
    net::{Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use http::Request;
use k8s_openapi::api::core::v1::{ConfigMap, Event, PodTemplate};
use kube::{
    Api, Client, Error, ResourceExt as _,
    api::{ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams},
};
use serde_json::json;
use testbed::{
    ControlPlane, Link, Options, Proxy, Signal, Wire,
    control_plane::client,
    eventually,
    proxy::{Fault, Moment},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::timeout,
};

const SOON: Duration = Duration::from_secs(20);
/// For so long nothing must come. What comes by mistake is there within a few milliseconds.
const SILENCE: Duration = Duration::from_millis(200);
const NAMESPACE: &str = "ways";
/// Of the faults that meet a share.
const SEED: u64 = 7;

// === links ===

#[tokio::test]
async fn latency_is_paid_once_each_way() -> Result<()> {
    let (link, _ends) = linked().await?;
    let latency = Duration::from_millis(150);
    let mut stream = TcpStream::connect(link.address()).await?;
    echo(&mut stream, b"fast").await?;
    link.set(Wire {
        latency,
        ..Wire::default()
    });
    let start = Instant::now();
    echo(&mut stream, b"slow").await?;
    ensure!(
        start.elapsed() >= 2 * latency,
        "after {:?}",
        start.elapsed()
    );
    // Chunk by chunk, it would take half a minute.
    let start = Instant::now();
    echo(&mut stream, &vec![b'x'; 2 << 20]).await?;
    ensure!(
        start.elapsed() < 10 * latency,
        "after {:?}",
        start.elapsed()
    );
    // Under way, as the wire gets fast.
    let hour = Duration::from_secs(3600);
    link.set(Wire {
        latency: hour,
        ..Wire::default()
    });
    stream.write_all(b"x").await?;
    silent(&mut stream).await?;
    link.set(Wire::default());
    ensure!(
        timeout(SOON, stream.read_u8()).await?? == b'x',
        "other bytes"
    );
    Ok(())
}

#[tokio::test]
async fn the_rate_is_one_for_all_connections() -> Result<()> {
    let (link, _ends) = linked().await?;
    link.set(Wire {
        bytes_per_second: Some(1_000_000),
        ..Wire::default()
    });
    let mut first = TcpStream::connect(link.address()).await?;
    let mut second = TcpStream::connect(link.address()).await?;
    let (start, bytes) = (Instant::now(), vec![b'x'; 200_000]);
    tokio::try_join!(echo(&mut first, &bytes), echo(&mut second, &bytes))?;
    let took = start.elapsed();
    ensure!(took >= Duration::from_millis(380), "400 kB took {took:?}");
    ensure!(took < Duration::from_secs(2), "400 kB took {took:?}");

    link.set(Wire {
        bytes_per_second: Some(1),
        ..Wire::default()
    });
    first.write_all(&bytes).await?;
    link.set(Wire::default());
    let mut answer = vec![0; bytes.len()];
    timeout(SOON, first.read_exact(&mut answer)).await??;
    Ok(())
}

#[tokio::test]
async fn a_blackhole_forgets_connections() -> Result<()> {
    let (link, mut ends) = linked().await?;
    let mut old = TcpStream::connect(link.address()).await?;
    echo(&mut old, b"before").await?;
    link.set(Wire {
        blackhole: true,
        ..Wire::default()
    });
    old.write_all(b"lost").await?;
    let mut meanwhile = TcpStream::connect(link.address()).await?;
    meanwhile.write_all(b"lost").await?;
    silent(&mut old).await?;
    silent(&mut meanwhile).await?;

    link.set(Wire::default());
    let mut new = TcpStream::connect(link.address()).await?;
    echo(&mut new, b"after").await?;
    for stream in [&mut old, &mut meanwhile] {
        stream.write_all(b"still lost").await?;
        silent(stream).await?;
    }
    drop((old, meanwhile));
    eventually("one connection knows no other side", SOON, || async {
        ensure!(link.open() == 2, "{} are open", link.open());
        Ok(())
    })
    .await?;
    ensure!(ends.try_recv().is_err(), "the server learned of the end");
    drop(new);
    ensure!(
        timeout(SOON, ends.recv()).await? == Some(None),
        "no orderly end"
    );
    Ok(())
}

#[tokio::test]
async fn connections_are_reset_and_refused() -> Result<()> {
    let (link, mut ends) = linked().await?;
    let mut old = TcpStream::connect(link.address()).await?;
    echo(&mut old, b"x").await?;
    link.set(Wire {
        refuse: true,
        ..Wire::default()
    });
    let refused = async { TcpStream::connect(link.address()).await?.read_u8().await };
    let refused = refused.await.err().context("it was let in")?;
    ensure!(refused.kind() == ErrorKind::ConnectionReset, "{refused}");
    echo(&mut old, b"it lives on").await?;
    link.reset();
    let reset = timeout(SOON, old.read_u8()).await?;
    let reset = reset.err().context("it lives")?;
    ensure!(reset.kind() == ErrorKind::ConnectionReset, "{reset}");
    let end = timeout(SOON, ends.recv()).await?;
    ensure!(end == Some(Some(ErrorKind::ConnectionReset)), "{end:?}");
    ensure!(link.open() == 0, "{} are open", link.open());
    Ok(())
}

// === proxies, and the servers ===

/// One control plane for all; the last steps end its servers under the others' feet.
#[tokio::test(flavor = "multi_thread")]
async fn control_plane() -> Result<()> {
    let plane = ControlPlane::start(Options::default()).await?;
    for args in [
        &["create", "namespace", NAMESPACE][..],
        &["create", "serviceaccount", "-n", NAMESPACE, "robot"],
        &[
            "create",
            "clusterrolebinding",
            "robot",
            "--clusterrole=cluster-admin",
            "--serviceaccount=ways:robot",
        ],
    ] {
        plane.kubectl_ok(args).await?;
    }
    tokio::try_join!(
        replies(&plane),
        shares(&plane),
        lost(&plane),
        held_before(&plane),
        held_after(&plane),
        watches(&plane),
    )?;
    etcd(&plane).await?;
    compaction(&plane).await
}

async fn replies(plane: &ControlPlane) -> Result<()> {
    let way = Way::start(plane).await?;
    let fault = Fault::on("PATCH", "/configmaps/*").skip(1).times(2);
    way.proxy
        .fault(fault.reply(409, "Conflict", "somebody else was there"));
    way.create("replies").await?;
    let patch = Patch::Merge(json!({"data": {"key": "value"}}));
    let params = PatchParams::default();
    let mut codes = Vec::new();
    for _ in 0..4 {
        let patched = way.maps().patch("replies", &params, &patch).await;
        codes.push(patched.map_or_else(|error| code(&error), |_| 200));
    }
    ensure!(codes == [200, 409, 409, 200], "{codes:?}");

    way.proxy
        .fault(Fault::on("GET", "/configmaps/replies").retry_after(3));
    let map = format!("/api/v1/namespaces/{NAMESPACE}/configmaps/replies");
    let request = Request::get(map).body(kube::client::Body::empty())?;
    let refused = way.client.send(request).await?;
    let header = refused.headers().get("retry-after");
    ensure!(
        refused.status() == 429 && header.is_some_and(|seconds| seconds == "3"),
        "{refused:?}"
    );

    way.proxy
        .fault(Fault::on("*", "").always().reply(500, "InternalError", ""));
    ensure!(way.maps().get("replies").await.is_err(), "it is answered");
    way.proxy.clear();
    way.maps().get("replies").await?;
    let seen = way.proxy.requests();
    let seen: Vec<_> = seen.iter().map(|seen| (seen.verb, seen.status)).collect();
    let patches = codes.iter().map(|code| ("PATCH", *code));
    let mut expected = vec![("POST", 201)];
    expected.extend(patches);
    expected.extend([("GET", 429), ("GET", 500), ("GET", 200)]);
    ensure!(seen == expected, "{seen:?}");
    way.proxy.forget();
    ensure!(way.proxy.requests().is_empty(), "it has not forgotten");
    Ok(())
}

async fn shares(plane: &ControlPlane) -> Result<()> {
    let way = Way::start(plane).await?;
    let mut runs = Vec::new();
    for _ in 0..2 {
        let fault = Fault::on("GET", "/configmaps/*").share(0.25, SEED).always();
        way.proxy.fault(fault.reply(503, "ServiceUnavailable", ""));
        let mut met = Vec::new();
        for n in 0..40 {
            let got = way.maps().get("nothing").await;
            if code(&got.err().context("it is there")?) == 503 {
                met.push(n);
            }
        }
        way.proxy.clear();
        runs.push(met);
    }
    ensure!(
        runs[0] == runs[1],
        "the same seed, other requests: {runs:?}"
    );
    ensure!((4..=16).contains(&runs[0].len()), "no quarter: {runs:?}");
    Ok(())
}

async fn lost(plane: &ControlPlane) -> Result<()> {
    let way = Way::start(plane).await?;
    way.proxy.fault(Fault::on("POST", "/configmaps").hang());
    way.proxy
        .fault(Fault::on("POST", "/configmaps").lost_answer());
    for name in ["hung", "lost"] {
        let created = timeout(SILENCE, way.create(name)).await;
        ensure!(created.is_err(), "{name} is answered");
    }
    let admin = Api::<ConfigMap>::namespaced(plane.admin(), NAMESPACE);
    eventually("it was carried out", SOON, || async {
        Ok(admin.get("lost").await.map(drop)?)
    })
    .await?;
    ensure!(admin.get_opt("hung").await?.is_none(), "it was carried out");

    let delay = Duration::from_millis(150);
    way.proxy
        .fault(Fault::on("POST", "/configmaps").delay(delay));
    let start = Instant::now();
    way.create("delayed").await?;
    ensure!(start.elapsed() >= delay, "after {:?}", start.elapsed());
    let seen = way.proxy.requests();
    let statuses: Vec<_> = seen.iter().map(|seen| seen.status).collect();
    ensure!(statuses == [0, 201, 201], "{statuses:?}");
    Ok(())
}

async fn held_before(plane: &ControlPlane) -> Result<()> {
    let way = Way::start(plane).await?;
    let admin = Api::<ConfigMap>::namespaced(plane.admin(), NAMESPACE);
    for (name, released) in [("dropped", false), ("released", true)] {
        let hold = way.proxy.hold("POST", "/configmaps", Moment::Before);
        let other = way.other(plane).await?;
        let sender = tokio::spawn(async move { other.create(name).await });
        hold.arrived(SOON).await?;
        sender.abort();
        eventually("the sender's connection is gone", SOON, || async {
            ensure!(way.link.open() == 0, "{} are open", way.link.open());
            Ok(())
        })
        .await?;
        ensure!(admin.get_opt(name).await?.is_none(), "it was carried out");
        if released {
            hold.release();
        }
    }
    eventually("what was released is carried out", SOON, || async {
        Ok(admin.get("released").await.map(drop)?)
    })
    .await?;
    ensure!(
        admin.get_opt("dropped").await?.is_none(),
        "it was carried out"
    );

    // What has stopped nothing stops nothing later.
    drop(way.proxy.hold("POST", "/configmaps", Moment::Before));
    way.proxy
        .hold("POST", "/configmaps", Moment::Before)
        .release();
    let hold = way.proxy.hold("POST", "/configmaps/never", Moment::Before);
    way.create("passes").await?;
    ensure!(hold.arrived(SILENCE).await.is_err(), "another path");
    Ok(())
}

async fn held_after(plane: &ControlPlane) -> Result<()> {
    let way = Way::start(plane).await?;
    let hold = way.proxy.hold("POST", "/configmaps", Moment::After);
    let (creating, other) = (way.other(plane).await?, way.other(plane).await?);
    let creating = tokio::spawn(async move { creating.create("answered-late").await });
    hold.arrived(SOON).await?;
    other.maps().get("answered-late").await?;
    ensure!(!creating.is_finished(), "it is answered");
    hold.release();
    timeout(SOON, creating).await??
}

async fn watches(plane: &ControlPlane) -> Result<()> {
    let way = Way::start(plane).await?;
    let templates = Api::<PodTemplate>::namespaced(plane.admin(), NAMESPACE);
    let mut watch = way.watch().await?;
    for name in ["first", "second"] {
        create_template(&templates, name).await?;
        ensure!(next(&mut watch).await? == name, "another event");
    }
    let seen = way.proxy.requests();
    ensure!(
        seen.iter()
            .any(|seen| seen.verb == "WATCH" && seen.status == 200),
        "{seen:?}"
    );

    let mut muted = way.other(plane).await?.watch().await?;
    way.proxy.silence();
    let mut later = way.other(plane).await?.watch().await?;
    create_template(&templates, "unheard").await?;
    ensure!(next(&mut later).await? == "unheard", "another event");
    ensure!(timeout(SILENCE, muted.next()).await.is_err(), "it is heard");

    way.link.set(Wire {
        blackhole: true,
        ..Wire::default()
    });
    way.link.set(Wire::default());
    create_template(&templates, "third").await?;
    for silent in [&mut watch, &mut later] {
        ensure!(
            timeout(SILENCE, silent.next()).await.is_err(),
            "it is heard"
        );
    }
    let other = way.other(plane).await?;
    let mut again = other.watch().await?;
    create_template(&templates, "fourth").await?;
    ensure!(next(&mut again).await? == "fourth", "another event");

    // The connection that is dead still holds its watch, as the other side knows of no end.
    drop((watch, muted, later, again));
    way.link.reset();
    eventually("the API server's watches end", SOON, || async {
        let metrics = plane.metrics().await?;
        let mut open = metrics.lines().filter(|line| {
            line.starts_with("apiserver_longrunning_requests{")
                && line.contains("resource=\"podtemplates\",scope=\"namespace\"")
        });
        ensure!(open.all(|line| line.ends_with(" 0")), "they are open");
        Ok(())
    })
    .await
}

async fn etcd(plane: &ControlPlane) -> Result<()> {
    let maps = Api::<ConfigMap>::namespaced(plane.admin(), NAMESPACE);
    plane.signal_etcd(Signal::STOP)?;
    let written = timeout(SILENCE, create(&maps, "stalled")).await;
    ensure!(written.is_err(), "it is written");
    plane.signal_etcd(Signal::CONT)?;
    create(&maps, "before").await?;
    plane.stop_etcd().await?;
    ensure!(plane.signal_etcd(Signal::TERM).is_err(), "it runs");
    plane.start_etcd().await?;
    maps.get("before").await?;
    create(&maps, "after").await
}

async fn compaction(plane: &ControlPlane) -> Result<()> {
    let events = Api::<Event>::namespaced(plane.admin(), NAMESPACE);
    let maps = Api::<ConfigMap>::namespaced(plane.admin(), NAMESPACE);
    let old = maps.list(&ListParams::default()).await?;
    let old = old.metadata.resource_version.context("no version")?;
    create(&maps, "later").await?;
    // The API server does not cache Events.
    ensure!(gone(&events, &old).await?.is_none(), "before the time");
    plane.compact().await?;
    ensure!(gone(&events, &old).await? == Some(410), "it is remembered");
    plane.stop_api_server().await?;
    plane.start_api_server().await?;
    ensure!(gone(&maps, &old).await? == Some(410), "it is remembered");
    plane.compact().await
}

/// The code with which a watch from that version ends, if it does.
async fn gone<K>(api: &Api<K>, version: &str) -> Result<Option<u16>>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let watch = api.watch(&WatchParams::default(), version).await;
    let mut watch = match watch {
        Err(error) => return Ok(Some(code(&error))),
        Ok(watch) => watch.boxed(),
    };
    match timeout(SILENCE, watch.try_next()).await {
        Ok(Ok(Some(WatchEvent::Error(status)))) => Ok(Some(status.code)),
        Ok(Err(error)) => Ok(Some(code(&error))),
        _ => Ok(None),
    }
}

// === helpers ===

/// Process → link → proxy → API server, and a client at its begin.
struct Way {
    link: Link,
    proxy: Proxy,
    client: Client,
}

impl Way {
    async fn start(plane: &ControlPlane) -> Result<Self> {
        let proxy = Proxy::start(plane).await?;
        let link = Link::start(proxy.address()).await?;
        let client = robot(plane, link.address()).await?;
        Ok(Self {
            link,
            proxy,
            client,
        })
    }

    /// One more client, with connections of its own.
    async fn other(&self, plane: &ControlPlane) -> Result<Sender> {
        Ok(Sender(robot(plane, self.link.address()).await?))
    }

    fn maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    async fn create(&self, name: &str) -> Result<()> {
        create(&self.maps(), name).await
    }

    async fn watch(&self) -> Result<Names> {
        Sender(self.client.clone()).watch().await
    }
}

/// A client that can go into a task.
struct Sender(Client);

/// What a watch of PodTemplates tells.
type Names = std::pin::Pin<Box<dyn Stream<Item = Result<String>> + Send>>;

impl Sender {
    fn maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.0.clone(), NAMESPACE)
    }

    async fn create(&self, name: &str) -> Result<()> {
        create(&self.maps(), name).await
    }

    /// From now on.
    async fn watch(&self) -> Result<Names> {
        let api = Api::<PodTemplate>::namespaced(self.0.clone(), NAMESPACE);
        let listed = api.list(&ListParams::default()).await?;
        let version = listed.metadata.resource_version.context("no version")?;
        let params = WatchParams::default().disable_bookmarks();
        let events = api.watch(&params, &version).await?;
        let name = |event: kube::Result<WatchEvent<PodTemplate>>| match event {
            Ok(WatchEvent::Added(template)) => Ok(template.name_any()),
            other => bail!("{other:?}"),
        };
        Ok(events.map(name).boxed())
    }
}

async fn robot(plane: &ControlPlane, server: SocketAddr) -> Result<Client> {
    let kubeconfig = plane.service_account_kubeconfig_at(server, NAMESPACE, "robot");
    client(&kubeconfig.await?).await
}

async fn create(maps: &Api<ConfigMap>, name: &str) -> Result<()> {
    let map = serde_json::from_value(json!({"metadata": {"name": name}}))?;
    Ok(maps.create(&PostParams::default(), &map).await.map(drop)?)
}

async fn create_template(templates: &Api<PodTemplate>, name: &str) -> Result<()> {
    let pod = json!({"spec": {"containers": [{"name": "c", "image": "none"}]}});
    let template = serde_json::from_value(json!({"metadata": {"name": name}, "template": pod}))?;
    let created = templates.create(&PostParams::default(), &template).await;
    Ok(created.map(drop)?)
}

async fn next(watch: &mut Names) -> Result<String> {
    timeout(SOON, watch.next()).await?.context("it has ended")?
}

/// The API server's code; 0 if it is no answer of its.
fn code(error: &Error) -> u16 {
    match error {
        Error::Api(status) => status.code,
        _ => 0,
    }
}

/// How a server's connection ended: none, in good order.
type End = Option<ErrorKind>;

/// A link to a server that says back what it hears, and how its connections end.
async fn linked() -> Result<(Link, mpsc::UnboundedReceiver<End>)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let link = Link::start(listener.local_addr()?).await?;
    let (ended, ends) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let ended = ended.clone();
            tokio::spawn(async move {
                let (mut from, mut to) = stream.split();
                let copied = tokio::io::copy(&mut from, &mut to).await;
                ended.send(copied.err().map(|error| error.kind())).ok();
            });
        }
    });
    Ok((link, ends))
}

/// Sends it, and waits until it is back.
async fn echo(stream: &mut TcpStream, bytes: &[u8]) -> Result<()> {
    let (mut from, mut to) = stream.split();
    let mut back = vec![0; bytes.len()];
    let exchange = async { tokio::try_join!(to.write_all(bytes), from.read_exact(&mut back)) };
    timeout(SOON, exchange).await??;
    ensure!(back == bytes, "other bytes");
    Ok(())
}

/// Nothing comes.
async fn silent(stream: &mut TcpStream) -> Result<()> {
    let read = timeout(SILENCE, stream.read_u8()).await;
    ensure!(read.is_err(), "{read:?} came");
    Ok(())
}
