//! The manifests as kubectl builds them, with what an overlay adds.

use std::{fs, path::Path, process::Command};

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::{binaries::Binaries, cluster::manifests};

/// What kubectl makes of a `kustomization.yaml` beside the folder `manifests`.
///
/// # Errors
/// If there is no kubectl, or it can't build that.
pub fn kustomize(overlay: &Value) -> Result<Vec<Value>> {
    let folder = tempfile::tempdir()?;
    copy(&manifests(), &folder.path().join("manifests"))?;
    fs::write(
        folder.path().join("kustomization.yaml"),
        overlay.to_string(),
    )?;
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
