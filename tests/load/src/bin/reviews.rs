//! `reviews`: posts the body on standard input over TLS, again and again, and prints what came of it as JSON.

use std::{
    io::Read as _,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use load::{
    Figures,
    client::{Connection, connector, post},
    microseconds,
};
use memchr::memmem;
use tokio::{sync::mpsc, task::JoinSet};
use tokio_rustls::TlsConnector;

const USAGE: &str = "reviews CA ADDRESS fast CONNECTIONS SECONDS    one review after another on each connection
reviews CA ADDRESS rate REVIEWS SECONDS        so many a second; times count from when each was to be sent
reviews CA ADDRESS slow CONNECTIONS SECONDS    a byte a second
reviews CA ADDRESS large CONNECTIONS SECONDS   bodies of 8 MiB, announced and not";
/// Connections over which a rate is spread.
const SPREAD: u32 = 16;
/// What a right answer has: the body's pod is one that a boost selects.
const RIGHT: [&[u8]; 2] = [b"\"allowed\":true", b"\"patch\":\""];

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [ca, address, kind, count, seconds] = &args[..] else {
        bail!("{USAGE}");
    };
    let mut body = Vec::new();
    std::io::stdin().read_to_end(&mut body)?;
    let load = Load {
        connector: connector(&PathBuf::from(ca))?,
        address: address.clone(),
        request: post(&body).leak(),
        time: Duration::from_secs(seconds.parse().context("SECONDS")?),
    };
    let count: u32 = count.parse().context("the third argument")?;
    let began = Instant::now();
    let times = match kind.as_str() {
        "fast" => load.on(count, |load, _| load.fast()).await?,
        "rate" => {
            load.on(SPREAD, move |load, index| load.at_rate(index, count))
                .await?
        }
        "slow" => load.on(count, |load, _| load.slow()).await?,
        "large" => {
            load.on(count, |load, index| load.large(index % 2 == 0))
                .await?
        }
        _ => bail!("{USAGE}"),
    };
    let figures = Figures::new(times, began.elapsed().as_secs_f64());
    println!("{}", serde_json::to_string(&figures)?);
    Ok(())
}

/// What is sent, to whom, for how long.
#[derive(Clone)]
struct Load {
    connector: TlsConnector,
    address: String,
    request: &'static [u8],
    time: Duration,
}

impl Load {
    /// Runs on so many connections, and collects the times.
    async fn on<F>(&self, connections: u32, run: impl Fn(Self, u32) -> F) -> Result<Vec<u64>>
    where
        F: Future<Output = Result<Vec<u64>>> + Send + 'static,
    {
        let mut runs = JoinSet::new();
        for index in 0..connections {
            runs.spawn(run(self.clone(), index));
        }
        let mut times = Vec::new();
        while let Some(run) = runs.join_next().await {
            times.append(&mut run.context("a connection panicked")??);
        }
        Ok(times)
    }

    async fn open(&self) -> Result<Connection> {
        Connection::open(&self.connector, &self.address).await
    }

    async fn fast(self) -> Result<Vec<u64>> {
        let mut connection = self.open().await?;
        let mut times = Vec::new();
        let end = Instant::now() + self.time;
        loop {
            let sent = Instant::now();
            if sent >= end {
                return Ok(times);
            }
            self.ask(&mut connection).await?;
            times.push(microseconds(sent.elapsed()));
        }
    }

    async fn at_rate(self, index: u32, rate: u32) -> Result<Vec<u64>> {
        let mut connection = self.open().await?;
        // The runtime's own timers are up to 1 ms late, which is more than an answer takes.
        let (send, mut due) = mpsc::unbounded_channel();
        let began = Instant::now();
        std::thread::spawn(move || {
            for number in 0.. {
                let after = Duration::from_secs(1) * (number * SPREAD + index) / rate;
                if after >= self.time {
                    break;
                }
                std::thread::sleep((began + after).saturating_duration_since(Instant::now()));
                if send.send(began + after).is_err() {
                    break;
                }
            }
        });
        let mut times = Vec::new();
        while let Some(due) = due.recv().await {
            self.ask(&mut connection).await?;
            times.push(microseconds(due.elapsed()));
        }
        Ok(times)
    }

    async fn ask(&self, connection: &mut Connection) -> Result<()> {
        connection.send(self.request).await?;
        let (status, answer) = connection.answer().await?;
        ensure!(
            status == 200
                && RIGHT
                    .iter()
                    .all(|part| memmem::find(answer, part).is_some()),
            "answered with {status}: {}",
            String::from_utf8_lossy(answer)
        );
        Ok(())
    }

    /// Heads and bodies that never come to an end; whoever closes gets another.
    async fn slow(self) -> Result<Vec<u64>> {
        let end = tokio::time::Instant::now() + self.time;
        let mut second = tokio::time::interval(Duration::from_secs(1));
        while tokio::time::Instant::now() < end {
            let Ok(mut connection) = self.open().await else {
                second.tick().await;
                continue;
            };
            for byte in self.request {
                second.tick().await;
                let closed = connection.send(std::slice::from_ref(byte)).await.is_err();
                if closed || tokio::time::Instant::now() >= end {
                    break;
                }
            }
        }
        Ok(Vec::new())
    }

    /// Too much: refused with 413 or by closing, whether it was announced or comes in chunks.
    async fn large(self, announced: bool) -> Result<Vec<u64>> {
        let end = Instant::now() + self.time;
        let part = vec![b' '; 64 << 10];
        let head = if announced {
            format!(
                "POST /mutate-v1-pod HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n",
                8 << 20
            )
        } else {
            "POST /mutate-v1-pod HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
                .to_owned()
        };
        let chunk = [b"10000\r\n", part.as_slice(), b"\r\n"].concat();
        let piece = if announced { &part } else { &chunk };
        let mut times = Vec::new();
        while Instant::now() < end {
            let sent = Instant::now();
            let mut connection = self.open().await?;
            // It may close in the middle, which is an answer too.
            let mut open = connection.send(head.as_bytes()).await.is_ok();
            for _ in 0..(8 << 20) / part.len() {
                open = open && connection.send(piece).await.is_ok();
            }
            times.push(microseconds(sent.elapsed()));
        }
        Ok(times)
    }
}
