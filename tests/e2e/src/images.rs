//! Container images as archives: Headstart's own as `.ci/image` ships it, and a small one for everything else.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use testbed::release;

use crate::machine::{find, output, run};

/// Headstart's image as the manifests name it.
const NAMED: &str = "headstart:0.1.0";

/// A shell and small programs, for pods that do as they are told; the sandbox of each pod is one of them.
pub(crate) const WORKLOAD: &str = "localhost/workload:1";

/// What a workload may call.
const COMMANDS: [&str; 9] = [
    "awk", "cat", "dd", "rm", "sh", "sleep", "test", "touch", "true",
];

/// The repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Where buildah keeps what it works on.
fn storage(folder: &Path) -> [String; 6] {
    let [root, runroot] =
        ["buildah", "buildah-run"].map(|name| folder.join(name).display().to_string());
    let option = |name: &str| name.to_owned();
    [
        option("--storage-driver"),
        option("vfs"),
        option("--root"),
        root,
        option("--runroot"),
        runroot,
    ]
}

fn buildah(command: &[&str], folder: &Path, rest: &[&str]) -> Result<String> {
    let storage = storage(folder);
    let storage = storage.iter().map(String::as_str);
    let args: Vec<&str> = command
        .iter()
        .copied()
        .chain(storage)
        .chain(rest.iter().copied())
        .collect();
    output("buildah", &args)
}

/// Builds Headstart's image from the static binary, as it is shipped.
///
/// # Errors
/// If it can't be built.
pub(crate) fn build() -> Result<()> {
    let script = root().join(".ci/image");
    let mut command = Command::new(&script);
    for name in release::handed_on() {
        command.env_remove(name);
    }
    let status = command
        .arg(architecture())
        .status()
        .with_context(|| format!("running {}", script.display()))?;
    ensure!(status.success(), "{} failed ({status})", script.display());
    Ok(())
}

/// As images call this machine's.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "aarch64" => "arm64",
        _ => "amd64",
    }
}

/// Puts the image that [`build`] has left into a folder, and says where its archive is, under the name that the manifests give
/// it: a cluster's nodes would get it by that name from a registry.
///
/// # Errors
/// If there is none.
pub(crate) fn headstart(folder: &Path) -> Result<PathBuf> {
    let built = root().join(format!("target/image/headstart-{}.tar", architecture()));
    let id = buildah(
        &["pull", "--quiet"],
        folder,
        &[&format!("oci-archive:{}", built.display())],
    )?;
    let archive = folder.join("headstart.tar");
    let destination = format!("docker-archive:{}:{NAMED}", archive.display());
    buildah(&["push", "--quiet"], folder, &[id.trim(), &destination])?;
    Ok(archive)
}

/// The application of the scenario `felt`.
pub(crate) const SPRING: &str = "localhost/spring:1";

/// Builds the application of the scenario `felt`.
///
/// # Errors
/// If it can't be built.
pub(crate) fn build_spring() -> Result<()> {
    run(
        &root().join("tests/e2e/felt/build").display().to_string(),
        &[],
    )
}

/// Where [`build_spring`] leaves its archive.
pub(crate) fn spring() -> PathBuf {
    root().join("target/felt/spring.tar")
}

/// Builds the image of the workloads in a folder, and says where the archive is.
///
/// # Errors
/// If it can't be built.
pub(crate) fn workload(folder: &Path) -> Result<PathBuf> {
    let context = folder.join("workload");
    let bin = context.join("root/bin");
    fs::create_dir_all(&bin).with_context(|| format!("creating {}", bin.display()))?;
    fs::copy(find("busybox")?, bin.join("busybox")).context("copying busybox")?;
    for name in COMMANDS {
        symlink("busybox", bin.join(name)).with_context(|| format!("linking {name}"))?;
    }
    let text =
        "FROM scratch\nCOPY root /\nUSER 65532:65532\nENTRYPOINT [\"/bin/sleep\", \"1000000\"]\n";
    fs::write(context.join("Containerfile"), text).context("writing a Containerfile")?;
    let archive = folder.join("workload.tar");
    let context = context.display().to_string();
    let destination = format!("docker-archive:{}:{WORKLOAD}", archive.display());
    buildah(
        &["build", "--quiet", "--isolation", "chroot"],
        folder,
        &["-t", WORKLOAD, &context],
    )?;
    buildah(&["push", "--quiet"], folder, &[WORKLOAD, &destination])?;
    Ok(archive)
}
