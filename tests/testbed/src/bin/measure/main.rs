//! `cargo measure`: the figures of `docs/benchmarks.md`, from the release binary on the real control plane.
//!
//! It prints Markdown, so that a run can be pasted. Figures are from this machine: compare within a run.

mod admission;
mod due;
mod effort;
mod start;
mod storm;
mod view;

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context, Result, bail, ensure};
use testbed::Operator;

#[tokio::main]
async fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["admission"] => admission::admission().await,
        ["start"] => start::start().await,
        ["storm", rate, seconds] => storm::storm(number(rate)?, number(seconds)?).await,
        ["due", pods] => due::due(number(pods)?).await,
        ["view", pods] => view::view(number(pods)?).await,
        _ => bail!(
            "cargo measure admission           reviews a second, beside a server that answers without looking\n\
             cargo measure start               time to Ready, memory, size of the binary\n\
             cargo measure storm RATE SECONDS  pods at a rate: how soon their CPU is taken back\n\
             cargo measure due PODS            boosts that end at once, under a new leader; memory\n\
             cargo measure view PODS           pages out of many boosted pods, reviews meanwhile, memory, two replicas apart"
        ),
    }
}

fn number(text: &str) -> Result<u32> {
    text.parse()
        .with_context(|| format!("{text:?} is no number"))
}

/// KiB.
pub(crate) fn resident(replica: &Operator) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", replica.process().pid()))
        .context("reading the replica's memory")?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .context("no VmRSS")?;
    line.trim()
        .trim_end_matches(" kB")
        .trim()
        .parse()
        .context("VmRSS is no number")
}

/// Builds the binary as it is shipped: static.
pub(crate) async fn release_binary() -> Result<PathBuf> {
    let target = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let target_folder = build(&["--release", "--bin", "headstart", "--target", &target]).await?;
    Ok(target_folder.join(target).join("release/headstart"))
}

/// Builds, and says in which folder all targets are.
pub(crate) async fn build(args: &[&str]) -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = tokio::process::Command::new(cargo)
        .args(["build", "--quiet", "--locked"])
        .args(args)
        .current_dir(&root)
        .stdin(Stdio::null())
        .status()
        .await
        .context("running cargo")?;
    ensure!(status.success(), "cargo build {} failed", args.join(" "));
    Ok(root.join("target"))
}
