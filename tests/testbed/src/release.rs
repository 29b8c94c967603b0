//! The program as it is shipped, built where it is not yet.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, Result, ensure};
use tokio::process::Command;

/// Builds the binary as it is shipped: optimised and static.
///
/// # Errors
/// If it can't be built.
pub async fn static_binary() -> Result<PathBuf> {
    let target = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let target_folder = build(&["--release", "--bin", "headstart", "--target", &target]).await?;
    Ok(target_folder.join(target).join("release/headstart"))
}

/// Runs `cargo build` with these arguments, and says in which folder all targets are.
///
/// # Errors
/// If it fails.
pub async fn build(args: &[&str]) -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let status = cargo()
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

/// The cargo that runs us, to build something with.
#[must_use]
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for name in handed_on() {
        cargo.env_remove(name);
    }
    cargo
}

/// The variables that `.cargo/config.toml` gives to what cargo runs, and so to us. A build that is handed them on takes them for
/// a change to what was built without us, and links all anew.
pub fn handed_on() -> impl Iterator<Item = OsString> {
    let names = std::env::vars_os().map(|(name, _)| name);
    names.filter(|name| name.as_encoded_bytes().starts_with(b"CFLAGS_"))
}
