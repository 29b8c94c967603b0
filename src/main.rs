//! The `headstart` binary: see [`headstart::cli`] for its verbs.

use headstart::{
    api, app,
    cli::{self, Verb},
    telemetry,
};
use mimalloc::MiMalloc;

/// musl's own allocator is slow under threads.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    rustls::crypto::ring::default_provider()
        .install_default()
        .expect("nothing has installed a provider before");
    match cli::parse().verb {
        Verb::Run(args) => {
            telemetry::start(&args.log_level, args.log_format)?;
            app::run(*args).await?;
        }
        Verb::Crd => print!("{}", api::crds_yaml()),
    }
    Ok(())
}
