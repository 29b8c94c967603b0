//! Logs: one JSON object a line for machines, or text for people.

use tracing_subscriber::{EnvFilter, filter::ParseError, fmt};

use crate::config::LogFormat;

/// Starts logging to standard output.
///
/// # Errors
/// When `filter` can't be read.
pub fn start(filter: &str, format: LogFormat) -> Result<(), ParseError> {
    let filter = EnvFilter::builder().with_regex(false).parse(filter)?;
    let builder = fmt().with_env_filter(filter);
    match format {
        LogFormat::Json => builder.json().flatten_event(true).init(),
        LogFormat::Text => builder.init(),
    }
    Ok(())
}
