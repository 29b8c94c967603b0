//! The manifests as kubectl builds them, with what an overlay adds.

use std::{fs, path::Path, process::Command};

use anyhow::{Result, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::{binaries::Binaries, cluster::manifests};

/// A folder with a `kustomization.yaml` beside a copy of the folder `manifests`.
///
/// # Errors
/// If the manifests can't be copied.
pub fn overlay(kustomization: &Value) -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    copy(&manifests(), &folder.path().join("manifests"))?;
    let path = folder.path().join("kustomization.yaml");
    fs::write(path, kustomization.to_string())?;
    Ok(folder)
}

/// What kubectl makes of it.
///
/// # Errors
/// If there is no kubectl, or it can't build that.
pub fn kustomize(kustomization: &Value) -> Result<Vec<Value>> {
    let folder = overlay(kustomization)?;
    let mut kubectl = Command::new(Binaries::find()?.kubectl);
    let built = kubectl.arg("kustomize").arg(folder.path()).output()?;
    let errors = String::from_utf8_lossy(&built.stderr);
    ensure!(built.status.success(), "kubectl kustomize: {errors}");
    Ok(serde_saphyr::from_multiple(&String::from_utf8(
        built.stdout,
    )?)?)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}
