//! A wire that can be slowed and cut: a TCP forwarder in front of any address.
//!
//! What passes is bytes, so it knows nothing of TLS or HTTP ([`crate::Proxy`] does). The kernel answers for us all that TCP itself
//! asks: a cut wire looks silent to programs, but acknowledges what they send.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::{Mutex, mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep_until},
};

/// What is read at once, in bytes.
const CHUNK: usize = 16 << 10;
/// Chunks under way in one direction of a connection: 16 MiB, so that a second of latency leaves 16 MiB/s.
const UNDER_WAY: usize = 1024;
/// A wire of limited rate sends pieces of at most this length, so that a change of the rate is felt at once.
const PIECE: Duration = Duration::from_millis(50);
/// A timer is late by up to a millisecond, which must not add up.
const LATE: Duration = Duration::from_millis(5);

/// How a [`Link`] treats what passes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Wire {
    /// How long a byte is under way, in each direction.
    pub latency: Duration,
    /// How many pass in each direction, of all connections together; at least one does.
    pub bytes_per_second: Option<u64>,
    /// Nothing passes, not even the end of a connection, and new ones are accepted. Connections of then and before stay dead when
    /// this is over, as behind a NAT that has forgotten them; later ones live.
    pub blackhole: bool,
    /// New connections are reset.
    pub refuse: bool,
}

/// The running forwarder. Dropping it closes the port and all connections through it.
#[derive(Debug)]
pub struct Link {
    // Dropped first: connections must not outlive what they watch.
    _accepting: JoinSet<()>,
    address: SocketAddr,
    state: watch::Sender<State>,
    lanes: Arc<[Lane; 2]>,
    /// Cloned once for each open connection.
    open: Arc<()>,
}

/// The wire, and how often all connections of the time were given up.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    wire: Wire,
    cuts: u64,
    resets: u64,
}

/// What the connections of a link share.
#[derive(Clone)]
struct Shared {
    target: SocketAddr,
    state: watch::Receiver<State>,
    lanes: Arc<[Lane; 2]>,
    open: Arc<()>,
}

/// One direction of the wire.
#[derive(Debug, Default)]
struct Lane {
    /// Until when it is busy.
    busy: Mutex<Option<Instant>>,
    /// Bytes that have passed.
    passed: AtomicU64,
}

/// One direction of a connection.
#[derive(Clone)]
struct Way<'a> {
    state: watch::Receiver<State>,
    /// How many cuts there had been when the connection was opened: it is dead after one more.
    cuts: u64,
    lane: &'a Lane,
}

// === impl Link ===

impl Link {
    /// Listens on a free loopback port, and carries every connection to `target`.
    ///
    /// # Errors
    /// If there is no free port.
    pub async fn start(target: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .await
            .context("opening a port for the link")?;
        let address = listener.local_addr().context("reading the link's port")?;
        let state = watch::Sender::default();
        let shared = Shared {
            target,
            state: state.subscribe(),
            lanes: Arc::default(),
            open: Arc::default(),
        };
        let (lanes, open) = (Arc::clone(&shared.lanes), Arc::clone(&shared.open));
        let mut accepting = JoinSet::new();
        accepting.spawn(shared.accept(listener));
        Ok(Self {
            _accepting: accepting,
            address,
            state,
            lanes,
            open,
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes the wire, for open connections too.
    pub fn set(&self, wire: Wire) {
        self.state.send_modify(|state| {
            state.wire = wire;
            state.cuts += u64::from(wire.blackhole);
        });
    }

    /// Resets every open connection, on both sides.
    pub fn reset(&self) {
        self.state.send_modify(|state| state.resets += 1);
    }

    /// How many bytes have come back from the target so far.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.lanes[1].passed.load(Ordering::Relaxed)
    }

    /// How many connections are open.
    #[must_use]
    pub fn open(&self) -> usize {
        // The link itself has one, the accepting task another.
        Arc::strong_count(&self.open).saturating_sub(2)
    }
}

// === impl Shared ===

impl Shared {
    async fn accept(self, listener: TcpListener) {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                Ok((client, _)) = listener.accept() => {
                    let born = *self.state.borrow();
                    connections.spawn(self.clone().connection(client, born));
                }
                Some(_) = connections.join_next() => {}
            }
        }
    }

    /// Carries one connection to its end. An end that is no orderly one is a reset on both sides.
    async fn connection(self, mut client: TcpStream, born: State) {
        let mut server = None;
        let mut state = self.state.clone();
        let reset = state.wait_for(|state| state.resets != born.resets);
        let orderly = tokio::select! {
            ended = self.carry(&mut client, &mut server, born) => ended.is_ok(),
            _ = reset => false,
        };
        if !orderly {
            for stream in [Some(client), server].iter().flatten() {
                stream.set_zero_linger().ok();
            }
        }
    }

    async fn carry(
        &self,
        client: &mut TcpStream,
        server: &mut Option<TcpStream>,
        born: State,
    ) -> io::Result<()> {
        if born.wire.refuse {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        if born.wire.blackhole {
            // The other side never hears of it.
            swallow(client).await;
            return Ok(());
        }
        let server = server.insert(TcpStream::connect(self.target).await?);
        for stream in [&*client, &*server] {
            stream.set_nodelay(true)?;
        }
        let way = |lane| Way {
            state: self.state.clone(),
            cuts: born.cuts,
            lane,
        };
        let [there, back] = &*self.lanes;
        let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
            (client.split(), server.split());
        tokio::try_join!(
            way(there).carry(&mut from_client, &mut to_server),
            way(back).carry(&mut from_server, &mut to_client),
        )?;
        Ok(())
    }
}

// === impl Way ===

impl Way<'_> {
    /// Carries bytes, and at last their end, from one side to the other.
    async fn carry(self, from: &mut ReadHalf<'_>, to: &mut WriteHalf<'_>) -> io::Result<()> {
        let (sender, receiver) = mpsc::channel(UNDER_WAY);
        tokio::try_join!(self.clone().send(from, sender), self.receive(receiver, to))?;
        Ok(())
    }

    async fn send(
        self,
        from: &mut ReadHalf<'_>,
        wire: mpsc::Sender<(Instant, Vec<u8>)>,
    ) -> io::Result<()> {
        loop {
            let mut chunk = Vec::with_capacity(CHUNK);
            let read = from.read_buf(&mut chunk).await;
            if !self.lives() {
                swallow(from).await;
                return Ok(());
            }
            let ended = read? == 0;
            // Who receives lives as long as this.
            wire.send((Instant::now(), chunk)).await.ok();
            if ended {
                return Ok(());
            }
        }
    }

    async fn receive(
        mut self,
        mut wire: mpsc::Receiver<(Instant, Vec<u8>)>,
        to: &mut WriteHalf<'_>,
    ) -> io::Result<()> {
        while let Some((sent, chunk)) = wire.recv().await {
            self.deliver(sent, &chunk, to).await?;
        }
        Ok(())
    }

    /// Hands a chunk over when it is there; an empty one is the end.
    async fn deliver(
        &mut self,
        sent: Instant,
        chunk: &[u8],
        to: &mut WriteHalf<'_>,
    ) -> io::Result<()> {
        self.travel(sent).await;
        if chunk.is_empty() && self.lives() {
            return to.shutdown().await;
        }
        let mut left = chunk;
        while !left.is_empty() {
            let (piece, rest) = left.split_at(self.piece().min(left.len()));
            self.lane.pass(piece.len(), &mut self.state).await;
            if !self.lives() {
                return Ok(());
            }
            to.write_all(piece).await?;
            self.lane
                .passed
                .fetch_add(piece.len() as u64, Ordering::Relaxed);
            left = rest;
        }
        Ok(())
    }

    /// Waits until what was sent then is there, with the latency of now, or is lost.
    async fn travel(&mut self, sent: Instant) {
        while self.lives() {
            let latency = self.state.borrow_and_update().wire.latency;
            tokio::select! {
                () = sleep_until(sent + latency) => return,
                _ = self.state.changed() => {}
            }
        }
    }

    fn lives(&self) -> bool {
        self.state.borrow().cuts == self.cuts
    }

    /// Bytes that are sent in one piece.
    fn piece(&self) -> usize {
        let rate = self.state.borrow().wire.bytes_per_second;
        let bytes = u128::from(rate.unwrap_or(u64::MAX)) * PIECE.as_millis() / 1000;
        usize::try_from(bytes).unwrap_or(usize::MAX).max(1)
    }
}

// === impl Lane ===

impl Lane {
    /// Waits until so many bytes have been sent.
    async fn pass(&self, bytes: usize, state: &mut watch::Receiver<State>) {
        let mut busy = self.busy.lock().await;
        loop {
            let wire = state.borrow_and_update().wire;
            let Some(rate) = wire.bytes_per_second else {
                return;
            };
            let rate = u32::try_from(rate.max(1)).unwrap_or(u32::MAX);
            let takes = Duration::from_secs(bytes as u64) / rate;
            let now = Instant::now();
            let end = busy.map_or(now, |busy| busy.max(now - LATE)) + takes;
            tokio::select! {
                () = sleep_until(end) => {
                    *busy = Some(end);
                    return;
                }
                _ = state.changed() => {}
            }
        }
    }
}

/// Reads until the other side ends, for nobody.
async fn swallow(from: &mut (impl AsyncRead + Unpin)) {
    tokio::io::copy(from, &mut tokio::io::sink()).await.ok();
}
