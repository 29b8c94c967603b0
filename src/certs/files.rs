//! `--certificate-directory`: certificates from files that somebody else renews.
//!
//! They are looked at again and again rather than watched: Kubernetes swaps a symlink above them, and every other way to mount
//! files has another way to tell.

use std::{fs, io, path::Path, time::Duration};

use chrono::TimeDelta;
use tokio::{task::spawn_blocking, time::sleep};

use super::{Bundle, Certs};
use crate::error::Chain;

/// The files, as cert-manager names them: the CA, the chain and its key.
const FILES: [&str; 3] = ["ca.crt", "tls.crt", "tls.key"];
/// How often they are looked at.
const EVERY: Duration = Duration::from_secs(5);

/// Why the files can't be read.
#[derive(Debug, thiserror::Error)]
#[error("{file} can't be read")]
struct FileError {
    file: &'static str,
    source: io::Error,
}

/// Serves what the folder holds whenever that is a whole set; until then, what was served before.
pub(super) async fn keep(certs: &Certs, directory: &Path) {
    let mut told = None;
    loop {
        let trouble = look(certs, directory).await;
        if let Some(error) = trouble.as_ref().filter(|_| trouble != told) {
            tracing::warn!(
                ?directory,
                error,
                "the certificate's files can't be served; looking again every {EVERY:?}"
            );
        }
        told = trouble;
        sleep(EVERY).await;
    }
}

/// Says what is wrong, if something is.
async fn look(certs: &Certs, directory: &Path) -> Option<String> {
    let directory = directory.to_owned();
    let bundle = spawn_blocking(move || read(&directory)).await;
    let held = match bundle.expect("reading does not panic") {
        Ok(bundle) => certs.read(bundle),
        Err(error) => return Some(Chain(&error).to_string()),
    };
    match &held.leaf {
        Ok(leaf) => {
            // As cert-manager renews where it is not told otherwise.
            let due = leaf.state.dates.due(TimeDelta::MAX);
            certs.serve(&held, leaf, due);
            None
        }
        Err(error) => Some(Chain(error).to_string()),
    }
}

fn read(directory: &Path) -> Result<Bundle, FileError> {
    let text = |file| {
        let text = fs::read_to_string(directory.join(file));
        text.map_err(|source| FileError { file, source })
    };
    let [ca, cert, key] = FILES.map(text);
    Ok(Bundle {
        ca: ca?,
        cert: cert?,
        key: key?,
        ca_key: String::new(),
    })
}
