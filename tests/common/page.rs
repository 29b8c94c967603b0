//! Pages that a test makes, whole or in part.

use std::{env, fs, path::Path};

/// The text of a page.
pub(crate) fn read(page: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    fs::read_to_string(path).expect(page)
}

/// Fails where a page is not this, or writes it under `UPDATE_DOCS=1`.
#[track_caller]
pub(crate) fn keep(page: &str, new: &str) {
    if env::var_os("UPDATE_DOCS").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
        fs::write(path, new).expect(page);
        return;
    }
    assert!(
        read(page) == new,
        "{page} is not as it should be: run `UPDATE_DOCS=1 cargo test --test {}`",
        env!("CARGO_CRATE_NAME")
    );
}
