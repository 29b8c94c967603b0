//! `cargo faults plot`: how late reverts are through a leader kill and a rolling update, as `docs/revert-lag.svg`.

use std::{
    fmt::Write as _,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use testbed::{docs, lives};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{
    bed::{Bed, SOON},
    faults::{load, roll},
};

/// When the leader is killed and when the update begins, from the begin of the load.
const KILLED: Duration = Duration::from_secs(20);
const UPDATED: Duration = Duration::from_secs(45);
/// And how long it goes on afterwards.
const AFTER: Duration = Duration::from_secs(10);

/// Of the picture, in pixels; the plot has a margin in it.
const SIZE: (f64, f64) = (900.0, 360.0);
const MARGIN: (f64, f64) = (60.0, 40.0);
/// Lags in the picture, in milliseconds: its axis is logarithmic.
const LAGS: (f64, f64) = (1.0, 10_000.0);

/// Draws it.
///
/// # Errors
/// If the run fails, or the picture can't be written.
pub(crate) async fn plot(mut bed: Bed) -> Result<PathBuf> {
    let over = CancellationToken::new();
    let began = Instant::now();
    let load = load(&mut bed, over.clone());
    sleep(KILLED).await;
    let leader = bed.leader().await?;
    bed.take(leader).operator.crash()?;
    let killed = began.elapsed();
    bed.add().await?;
    bed.until_ready().await?;
    sleep(UPDATED.saturating_sub(began.elapsed())).await;
    let updated = began.elapsed();
    roll(&mut bed).await?;
    let rolled = began.elapsed();
    sleep(AFTER).await;
    over.cancel();
    let made = load.await?.into_iter().flatten().count();
    bed.lives.until_finished(made, 2 * SOON).await?;
    bed.check().await?;

    let points: Vec<_> = bed
        .lives
        .reverts()
        .into_iter()
        .map(|(ready, lag)| (ready.saturating_duration_since(began), lag))
        .collect();
    let svg = svg(
        &points,
        &[
            ("leader killed", killed),
            ("rolling update", updated),
            ("its end", rolled),
        ],
    );
    let path = docs::folder().join("revert-lag.svg");
    std::fs::write(&path, svg).with_context(|| format!("writing {}", path.display()))?;
    let lags: Vec<_> = points.iter().map(|point| point.1).collect();
    eprintln!("{} reverts: {}", lags.len(), lives::milliseconds(&lags));
    Ok(path)
}

/// A point for each revert, and a line for each event.
fn svg(points: &[(Duration, Duration)], events: &[(&str, Duration)]) -> String {
    let last = points.iter().map(|point| point.0).max();
    let end = last.unwrap_or_default().max(Duration::from_secs(1));
    let (width, height) = (SIZE.0 - 2.0 * MARGIN.0, SIZE.1 - 2.0 * MARGIN.1);
    let x = |at: Duration| MARGIN.0 + at.div_duration_f64(end) * width;
    let decades = (LAGS.1 / LAGS.0).log10();
    let y = |milliseconds: f64| {
        MARGIN.1 + height - (milliseconds.clamp(LAGS.0, LAGS.1) / LAGS.0).log10() / decades * height
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
        SIZE.0, SIZE.1
    );
    let mut line = |text: String| {
        svg.write_fmt(format_args!("{text}\n"))
            .expect("a string can be written to");
    };
    let (left, right, bottom) = (MARGIN.0, SIZE.0 - MARGIN.0, SIZE.1 - MARGIN.1);
    for (milliseconds, label) in [
        (1.0, "1 ms"),
        (10.0, "10 ms"),
        (100.0, "100 ms"),
        (1_000.0, "1 s"),
        (10_000.0, "10 s"),
    ] {
        let y = y(milliseconds);
        line(format!(
            "<path d=\"M{left} {y:.1}H{right}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            left - 6.0,
            y + 4.0
        ));
    }
    for second in (0..=end.as_secs()).step_by(10) {
        let x = x(Duration::from_secs(second));
        line(format!(
            "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{second} s</text>",
            bottom + 18.0
        ));
    }
    for (name, at) in events {
        let x = x(*at);
        line(format!(
            "<path d=\"M{x:.1} {}V{bottom}\" stroke=\"#c33\" stroke-dasharray=\"4 3\"/><text x=\"{:.1}\" y=\"{}\" fill=\"#c33\">{name}</text>",
            MARGIN.1,
            x + 4.0,
            MARGIN.1 - 6.0
        ));
    }
    for (at, lag) in points {
        line(format!(
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"2\" fill=\"#26c\" fill-opacity=\"0.5\"/>",
            x(*at),
            y(lag.as_secs_f64() * 1000.0)
        ));
    }
    line("</svg>".to_owned());
    svg
}
