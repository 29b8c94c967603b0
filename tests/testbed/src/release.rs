//! The program as it is shipped, built where it is not yet.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, Result, ensure};

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
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = tokio::process::Command::new(cargo);
    // `.cargo/config.toml` gives them to what cargo runs, and so to us. Handed on, they would look like a change to what was
    // built without us, and all would be linked anew.
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"CFLAGS_") {
            command.env_remove(name);
        }
    }
    let status = command
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
