//! What the kernel holds a container to: the end of the chain, after API server, kubelet and runtime.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use crate::machine;

/// The CPU cgroup of a running container.
pub(crate) struct CpuCgroup(PathBuf);

impl CpuCgroup {
    /// Looks for it below the node's; `id` is as the status has it.
    ///
    /// # Errors
    /// If there is none: the container is not there any more.
    pub(crate) fn find(node: &str, id: &str) -> Result<Self> {
        let id = id.rsplit('/').next().unwrap_or(id);
        let root = Path::new("/sys/fs/cgroup");
        let root = if machine::is_unified() {
            root.join(node)
        } else {
            root.join("cpu").join(node)
        };
        let found = search(&root, id, 5)
            .with_context(|| format!("no cgroup of {id} below {}", root.display()));
        found.map(Self)
    }

    /// The limit in milli-CPU; `None` is no limit.
    ///
    /// # Errors
    /// If the cgroup has gone.
    pub(crate) fn limit(&self) -> Result<Option<u64>> {
        let (quota, period) = if machine::is_unified() {
            let text = self.read("cpu.max")?;
            let (quota, period) = text.split_once(' ').context("cpu.max has two numbers")?;
            (quota.to_owned(), period.to_owned())
        } else {
            (
                self.read("cpu.cfs_quota_us")?,
                self.read("cpu.cfs_period_us")?,
            )
        };
        let period: u64 = period.parse().context("the period is a number")?;
        // Without a limit it is "-1", or "max".
        Ok(quota.parse::<u64>().ok().map(|quota| quota * 1000 / period))
    }

    /// Its share where CPU is short, as the first version of cgroups counts: 1024 a CPU.
    ///
    /// # Errors
    /// If the cgroup has gone.
    pub(crate) fn shares(&self) -> Result<u64> {
        let file = if machine::is_unified() {
            "cpu.weight"
        } else {
            "cpu.shares"
        };
        self.read(file)?
            .parse()
            .with_context(|| format!("{file} is a number"))
    }

    fn read(&self, file: &str) -> Result<String> {
        let path = self.0.join(file);
        let text =
            fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        Ok(text.trim().to_owned())
    }
}

/// The folder of that name, at most so deep.
fn search(folder: &Path, name: &str, depth: u8) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?;
    for path in entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
    {
        if path.ends_with(name) {
            return Some(path);
        }
        if depth > 0
            && let Some(found) = search(&path, name, depth - 1)
        {
            return Some(found);
        }
    }
    None
}
