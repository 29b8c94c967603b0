//! The `headstart` binary: see [`headstart::cli`] for its verbs.

use anyhow::Context;
use headstart::{
    api, app,
    cli::{self, Verb},
    config::RunArgs,
    telemetry,
};
use mimalloc::MiMalloc;

/// musl's own allocator is slow under threads.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> anyhow::Result<()> {
    match cli::parse().verb {
        Verb::Run(args) => run(*args),
        Verb::Crd => {
            print!("{}", api::crds_yaml());
            Ok(())
        }
    }
}

fn run(args: RunArgs) -> anyhow::Result<()> {
    telemetry::start(&args.log_level, args.log_format)
        .with_context(|| format!("--log-level {:?} can't be read", args.log_level))?;
    rustls::crypto::ring::default_provider()
        .install_default()
        .expect("nothing has installed a provider before");
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("the runtime could not be started")?
        .block_on(app::run(args))
        .map_err(Into::into)
}
