//! The cluster that a kubeconfig names, for commands that a person runs.

use kube::{Client, Config};

/// Why there is no cluster to ask.
#[derive(Debug, thiserror::Error)]
pub enum KubeconfigError {
    /// There is no cluster.
    #[error("no cluster is configured: set KUBECONFIG")]
    Missing(#[source] kube::config::InferConfigError),
    /// The client can't be built.
    #[error("the API server's client could not be built")]
    Client(#[source] kube::Error),
}

/// How to reach it. kube would repeat what has failed by itself, for minutes; a person wants to be told.
pub(crate) async fn infer() -> Result<Config, KubeconfigError> {
    let mut config = Config::infer().await.map_err(KubeconfigError::Missing)?;
    config.default_retry = false;
    Ok(config)
}

/// A client of it.
pub(crate) fn client(config: Config) -> Result<Client, KubeconfigError> {
    Client::try_from(config).map_err(KubeconfigError::Client)
}
