//! What the run takes from the machine, and what it leaves behind: nothing.
//!
//! The run has network, mounts and processes to itself (`unshare`), so that everything in it ends with it, containers included,
//! and no address of the cluster can ever leave the machine. Only cgroups are the machine's own; they are removed at the end.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};

/// A program that must be there, and Debian's package with it.
const PROGRAMS: [(&str, &str); 9] = [
    ("buildah", "buildah"),
    ("busybox", "busybox-static"),
    ("conntrack", "conntrack"),
    ("containerd", "containerd"),
    ("ctr", "containerd"),
    ("ip", "iproute2"),
    ("iptables", "iptables"),
    ("runc", "runc"),
    ("unshare", "util-linux"),
];
/// Where Debian has the plugins that give pods their addresses; they are in no `PATH`.
pub(crate) const CNI_PLUGINS: &str = "/usr/lib/cni";
/// Set inside: the cgroup that the run may use.
const CGROUP: &str = "HEADSTART_E2E_CGROUP";
/// Folders that programs of the cluster write to whatever they are told: empty ones inside.
const OWN_FOLDERS: [&str; 5] = [
    "/run/netns",
    "/run/containerd",
    "/var/lib/cni",
    "/var/log",
    "/var/lib/kubelet",
];

/// The name of the run's cgroup, if this process is inside already.
pub(crate) fn own_cgroup() -> Option<String> {
    std::env::var(CGROUP).ok()
}

/// Checks that all that is needed is there.
///
/// # Errors
/// One line that says what is missing, and how to get it.
pub(crate) fn check() -> Result<()> {
    ensure!(cfg!(target_os = "linux"), "a real node needs Linux");
    ensure!(
        rustix::process::geteuid().is_root(),
        "a real node needs root: run it with sudo"
    );
    let missing = PROGRAMS
        .iter()
        .filter(|(program, _)| find(program).is_err());
    let mut packages: Vec<&str> = missing.map(|(_, package)| *package).collect();
    if !Path::new(CNI_PLUGINS).join("bridge").is_file() {
        packages.push("containernetworking-plugins");
    }
    packages.dedup();
    if !packages.is_empty() {
        bail!(
            "a real node needs some of Debian's packages: apt-get install {}",
            packages.join(" ")
        );
    }
    Ok(())
}

/// Where a program is; administrators' are not in everybody's `PATH`.
///
/// # Errors
/// If it is nowhere.
pub(crate) fn find(program: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut files = std::env::split_paths(&path)
        .chain(sbin)
        .map(|folder| folder.join(program));
    files
        .find(|file| file.is_file())
        .with_context(|| format!("there is no {program}"))
}

/// Runs this program again with network, mounts and processes of its own, and tidies up after it.
///
/// # Errors
/// If it can't be started.
pub(crate) fn enter() -> Result<ExitStatus> {
    let cgroup = format!("headstart-e2e-{}", std::process::id());
    let itself = std::env::current_exe().context("looking for this program")?;
    // The shell is the first process in there: it takes leave of the containers' orphans, and all end when it does.
    let status = Command::new("unshare")
        .args([
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ])
        .args(["/bin/sh", "-c", r#""$@"; exit $?"#, "e2e"])
        .arg(itself)
        .args(std::env::args_os().skip(1))
        .env(CGROUP, &cgroup)
        .status()
        .context("running unshare")?;
    remove_cgroups(&cgroup);
    Ok(status)
}

/// Gives the programs of the cluster empty folders where they write whatever they are told, and makes the cgroup.
///
/// # Errors
/// If the machine does not let us.
pub(crate) fn prepare(cgroup: &str) -> Result<()> {
    for folder in OWN_FOLDERS {
        fs::create_dir_all(folder).with_context(|| format!("creating {folder}"))?;
        run("mount", &["-t", "tmpfs", "headstart-e2e", folder])?;
    }
    hierarchies()?
        .iter()
        .try_for_each(|hierarchy| make_cgroup(hierarchy, cgroup))
}

/// Makes a cgroup in a hierarchy, inside of one that is there.
///
/// # Errors
/// If the kernel refuses it.
pub(crate) fn make_cgroup(hierarchy: &Path, cgroup: &str) -> Result<()> {
    let folder = hierarchy.join(cgroup);
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let parent = folder.parent().unwrap_or(hierarchy);
    if is_unified() {
        let controllers = fs::read_to_string(parent.join("cgroup.controllers"))
            .context("reading the controllers")?;
        for controller in controllers.split_whitespace() {
            fs::write(
                parent.join("cgroup.subtree_control"),
                format!("+{controller}"),
            )
            .ok();
        }
    }
    // A new cpuset is empty in the first version of cgroups, and then nothing may run in it.
    for file in ["cpuset.cpus", "cpuset.mems"] {
        if let Ok(value) = fs::read(parent.join(file)) {
            fs::write(folder.join(file), value).ok();
        }
    }
    Ok(())
}

/// The roots of all hierarchies: one for each controller, or one for all in the second version.
pub(crate) fn hierarchies() -> Result<Vec<PathBuf>> {
    let root = Path::new("/sys/fs/cgroup");
    if is_unified() {
        return Ok(vec![root.to_owned()]);
    }
    let mut hierarchies = Vec::new();
    for entry in fs::read_dir(root).context("reading /sys/fs/cgroup")? {
        let path = entry.context("reading /sys/fs/cgroup")?.path();
        // Links (cpu, cpuacct) lead to the same hierarchy; `unified` has no controllers.
        if path.is_dir() && !path.is_symlink() && !path.ends_with("unified") {
            hierarchies.push(path);
        }
    }
    Ok(hierarchies)
}

/// Whether the machine has the second version of cgroups.
pub(crate) fn is_unified() -> bool {
    Path::new("/sys/fs/cgroup/cgroup.controllers").is_file()
}

/// Removes the cgroup in all hierarchies. Its processes have got their `KILL`, but may take a moment to end.
fn remove_cgroups(cgroup: &str) {
    for hierarchy in hierarchies().unwrap_or_default() {
        let folder = hierarchy.join(cgroup);
        for _ in 0..50 {
            remove_cgroup(&folder);
            if !folder.exists() {
                break;
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Cgroups are removed one by one, the innermost first; the files in them go with them.
fn remove_cgroup(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            remove_cgroup(&entry.path());
        }
    }
    fs::remove_dir(folder).ok();
}

/// Unmounts all that is mounted below a folder.
pub(crate) fn unmount(folder: &Path) {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    let mut below: Vec<&str> = points
        .filter(|point| Path::new(point).starts_with(folder))
        .collect();
    below.sort_unstable();
    // What is inside of something else is unmounted first.
    for point in below.into_iter().rev() {
        run("umount", &["-l", point]).ok();
    }
}

/// Runs a program to its end.
///
/// # Errors
/// If it fails; with what it said.
pub(crate) fn run(program: &str, args: &[&str]) -> Result<()> {
    output(program, args).map(drop)
}

/// Runs a program to its end, and returns what it printed.
///
/// # Errors
/// If it fails; with what it said.
pub(crate) fn output(program: &str, args: &[&str]) -> Result<String> {
    let what = || format!("{program} {}", args.join(" "));
    let output = Command::new(program)
        .args(args)
        .output()
        .with_context(what)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{} failed ({}): {}",
        what(),
        output.status,
        said.trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
