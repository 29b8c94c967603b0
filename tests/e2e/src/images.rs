//! Container images as archives: Headstart's own as `.ci/image` ships it, and a small one for everything else.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use crate::machine::run;

/// A shell and small programs, for pods that do as they are told; the sandbox of each pod is one of them.
pub(crate) const WORKLOAD: &str = "localhost/workload:1";

/// What a workload may call.
const COMMANDS: [&str; 8] = ["cat", "dd", "rm", "sh", "sleep", "test", "touch", "true"];

/// The repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Builds Headstart's image from the static binary, and says where the archive is.
///
/// # Errors
/// If it can't be built.
pub(crate) fn headstart() -> Result<PathBuf> {
    let architecture = match std::env::consts::ARCH {
        "aarch64" => "arm64",
        _ => "amd64",
    };
    let script = root().join(".ci/image");
    let status = Command::new(&script)
        .arg(architecture)
        .status()
        .with_context(|| format!("running {}", script.display()))?;
    ensure!(
        status.success(),
        "{} {architecture} failed ({status})",
        script.display()
    );
    Ok(root().join(format!("target/image/headstart-{architecture}.tar")))
}

/// Builds the image of the workloads in a folder, and says where the archive is.
///
/// # Errors
/// If it can't be built.
pub(crate) fn workload(folder: &Path) -> Result<PathBuf> {
    let context = folder.join("workload");
    let bin = context.join("root/bin");
    fs::create_dir_all(&bin).with_context(|| format!("creating {}", bin.display()))?;
    fs::copy(which("busybox")?, bin.join("busybox")).context("copying busybox")?;
    for name in COMMANDS {
        symlink("busybox", bin.join(name)).with_context(|| format!("linking {name}"))?;
    }
    let text =
        "FROM scratch\nCOPY root /\nUSER 65532:65532\nENTRYPOINT [\"/bin/sleep\", \"1000000\"]\n";
    fs::write(context.join("Containerfile"), text).context("writing a Containerfile")?;
    let archive = folder.join("workload.tar");
    let stores = [folder.join("buildah"), folder.join("buildah-run")];
    let [root, runroot] = stores.each_ref().map(|path| path.display().to_string());
    let storage = [
        "--storage-driver",
        "vfs",
        "--root",
        &root,
        "--runroot",
        &runroot,
    ];
    let context = context.display().to_string();
    let destination = format!("docker-archive:{}:{WORKLOAD}", archive.display());
    run(
        "buildah",
        &[
            &["build", "--quiet", "--isolation", "chroot"],
            &storage[..],
            &["-t", WORKLOAD, &context],
        ]
        .concat(),
    )?;
    run(
        "buildah",
        &[
            &["push", "--quiet"],
            &storage[..],
            &[WORKLOAD, &destination],
        ]
        .concat(),
    )?;
    Ok(archive)
}

fn which(program: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut found = std::env::split_paths(&path).map(|folder| folder.join(program));
    found
        .find(|file| file.is_file())
        .with_context(|| format!("there is no {program}"))
}
