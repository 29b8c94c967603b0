//! What a run costs in CPU, by who spends it.

use std::{fmt, time::Instant};

use anyhow::{Context as _, Result};
use testbed::Cluster;

/// Clock ticks a second in `/proc/PID/stat`, the same on every Linux.
const TICKS: f64 = 100.0;

/// CPU seconds since the processes began, or between two looks.
pub(crate) struct Effort {
    at: Instant,
    wall: f64,
    servers: f64,
    replicas: f64,
    /// The stand-in for scheduler and kubelet, the clients, and the watch that measures.
    bed: f64,
}

impl Effort {
    pub(crate) fn so_far(cluster: &Cluster) -> Result<Self> {
        let sum = |pids: &mut dyn Iterator<Item = u32>| pids.map(spent).sum::<Result<f64>>();
        let mut replicas = cluster
            .replicas
            .iter()
            .map(|replica| replica.process().pid());
        Ok(Self {
            at: Instant::now(),
            wall: 0.0,
            servers: sum(&mut cluster.plane.pids().into_iter())?,
            replicas: sum(&mut replicas)?,
            bed: spent(std::process::id())?,
        })
    }

    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            at: self.at,
            wall: (self.at - before.at).as_secs_f64(),
            servers: self.servers - before.servers,
            replicas: self.replicas - before.replicas,
            bed: self.bed - before.bed,
        }
    }
}

impl Effort {
    /// CPU seconds of the API server and etcd.
    pub(crate) const fn servers(&self) -> f64 {
        self.servers
    }
}

impl fmt::Display for Effort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let cores = u32::try_from(cores).map_or(f64::NAN, f64::from);
        let share = |spent: f64| 100.0 * spent / self.wall / cores;
        write!(
            f,
            "API server and etcd {:.0} %, Headstart {:.1} %, stand-in and clients {:.0} % of {cores} cores",
            share(self.servers),
            share(self.replicas),
            share(self.bed)
        )
    }
}

/// CPU seconds of a process.
fn spent(pid: u32) -> Result<f64> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    // The name of the program, in brackets, may hold spaces. User and system time are the fields 14 and 15 of all.
    let (_, fields) = stat.rsplit_once(')').context("no name in it")?;
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks: f64 = ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    Ok(ticks / TICKS)
}
