//! `cargo measure`: the figures of `docs/benchmarks.md`, from the release binary on the real control plane.
//!
//! It prints Markdown, so that a run can be pasted. Figures are from this machine: compare within a run.

mod admission;
mod cost;
mod due;
mod effort;
mod scale;
mod start;
mod storm;
mod view;

use anyhow::{Context, Result, bail};

#[tokio::main]
async fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["admission"] => admission::admission().await,
        ["start"] => start::start().await,
        ["storm", rate, seconds] => storm::storm(number(rate)?, number(seconds)?).await,
        ["due", pods] => due::due(number(pods)?).await,
        ["cost", pods] => cost::cost(number(pods)?).await,
        ["scale", pods] => scale::scale(number(pods)?).await,
        ["view", pods] => view::view(number(pods)?).await,
        _ => bail!(
            "cargo measure admission           reviews a second, beside a server that answers without looking\n\
             cargo measure start               time to Ready, memory, size of the binary\n\
             cargo measure storm RATE SECONDS  pods at a rate: how soon their CPU is taken back\n\
             cargo measure due PODS            boosts that end at once, under a new leader; memory\n\
             cargo measure cost PODS           what a boosted pod costs the API server, beside a plain one
             cargo measure scale PODS          a replica beside so many pods, in steps: time to Ready, memory, bytes read
             cargo measure view PODS           pages out of many boosted pods, reviews meanwhile, memory, two replicas apart"
        ),
    }
}

fn number(text: &str) -> Result<u32> {
    text.parse()
        .with_context(|| format!("{text:?} is no number"))
}
