//! Figures in documents: a part that a command writes stands between two comments of its name.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// The folder of documents.
#[must_use]
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

/// Puts what comes of a part of a document in its place: what is between `<!-- PART -->` and `<!-- /PART -->`.
///
/// # Errors
/// If it can't be read or written, or has no such part.
pub fn replace(document: &str, part: &str, change: impl FnOnce(&str) -> String) -> Result<()> {
    let path = folder().join(document);
    let what = || format!("{part} in {}", path.display());
    let (begin, end) = (format!("<!-- {part} -->"), format!("<!-- /{part} -->"));
    let text = std::fs::read_to_string(&path).with_context(what)?;
    let (before, rest) = text.split_once(&begin).with_context(what)?;
    let (old, after) = rest.split_once(&end).with_context(what)?;
    let text = format!("{before}{begin}\n{}\n{end}{after}", change(old));
    std::fs::write(&path, text).with_context(what)
}
