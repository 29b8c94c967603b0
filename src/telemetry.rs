//! Logs: one JSON object a line for machines, or text for people.

use tracing_subscriber::{EnvFilter, filter::ParseError, fmt};

use crate::config::LogFormat;

/// kube logs each failed request as an error; whoever made it logs it with its meaning.
const DOUBLED: &str = "kube_client::client::builder";

/// Starts logging to standard output.
///
/// # Errors
/// When `filter` can't be read.
pub fn start(filter: &str, format: LogFormat) -> Result<(), ParseError> {
    let filter = EnvFilter::builder()
        .with_regex(false)
        .parse(format!("{DOUBLED}=off,{filter}"))?;
    let builder = fmt().with_env_filter(filter);
    match format {
        LogFormat::Json => builder.json().flatten_event(true).init(),
        LogFormat::Text => builder.init(),
    }
    Ok(())
}
