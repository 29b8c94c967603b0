//! `cargo e2e`: Headstart as users run it. Its image in pods, behind its Service, asked by a real API server, its pods on a real
//! kubelet, and what changes read from the cgroups themselves.
//!
//! Needs root on Linux and some of Debian's packages; says so in one line where they are missing. `cargo e2e NAME…` runs some of
//! the scenarios, `HEADSTART_E2E_KEEP=1` leaves logs and data behind. `felt` runs only where it is named: it needs Maven and the
//! network, and writes what it measures into `docs`.

mod cgroup;
mod cluster;
mod images;
mod load;
mod machine;
mod objects;
mod scenarios;

use std::{process::ExitCode, time::Instant};

use anyhow::Result;
use testbed::binaries::{Binaries, NodeBinaries};

use cluster::Cluster;

fn main() -> ExitCode {
    let result = match machine::own_cgroup() {
        Some(cgroup) => inside(&cgroup),
        None => outside(),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Of scenarios, as they were given.
fn names() -> Vec<String> {
    std::env::args().skip(1).collect()
}

fn outside() -> Result<ExitCode> {
    machine::check()?;
    // Whatever may have to be fetched and built: inside there is no way to where it comes from.
    images::build()?;
    if scenarios::felt_is_named(&names()) {
        images::build_spring()?;
    }
    Binaries::find()?;
    NodeBinaries::find()?;
    let status = machine::enter()?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

#[tokio::main]
async fn inside(cgroup: &str) -> Result<ExitCode> {
    let began = Instant::now();
    let names = names();
    let felt = scenarios::felt_is_named(&names).then(images::spring);
    let mut cluster = Cluster::start(cgroup, felt).await?;
    println!("a cluster: {:.0} s", began.elapsed().as_secs_f32());
    let result = scenarios::run(&mut cluster, &names).await;
    if result.is_err() {
        cluster.show().await;
    }
    cluster.stop().await;
    result.map(|()| ExitCode::SUCCESS)
}
