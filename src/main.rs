//! The `headstart` binary: see [`headstart::cli`] for its verbs.

use std::{
    io::{ErrorKind, Write},
    process::ExitCode,
};

use anyhow::Context;
use headstart::{
    api, app, check,
    cli::{self, Verb},
    config::RunArgs,
    explain, list, revert, telemetry,
};
use mimalloc::MiMalloc;

/// musl's own allocator is slow under threads.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// `headstart list --exit-code`: a boost can't be taken back.
const NEEDS_HELP: u8 = 3;

fn main() -> ExitCode {
    match dispatch(cli::parse().verb) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(verb: Verb) -> anyhow::Result<ExitCode> {
    match verb {
        Verb::Run(args) => run(*args)?,
        Verb::Crd => print(&api::crds_yaml())?,
        Verb::Explain(args) => {
            provide_crypto();
            print(&runtime()?.block_on(explain::run(&args))?)?;
        }
        Verb::List(args) => {
            provide_crypto();
            let listed = runtime()?.block_on(list::run(&args))?;
            eprint!("{}", listed.note.unwrap_or_default());
            print(&listed.text)?;
            if args.exit_code && listed.needs_help {
                return Ok(NEEDS_HELP.into());
            }
        }
        Verb::Revert(args) => {
            provide_crypto();
            // Progress is told as it comes; that nobody reads it must not stop the work.
            let say = |line: &str| drop(print(line));
            runtime()?.block_on(revert::run(&args, say))?;
        }
        Verb::Check(args) => {
            provide_crypto();
            let report = runtime()?.block_on(check::run(&args))?;
            print(&report.print(args.output))?;
            report.verdict()?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a whole output. A reader that has seen enough is no error.
fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("printing"),
        _ => Ok(()),
    }
}

fn run(args: RunArgs) -> anyhow::Result<()> {
    telemetry::start(&args.log_level, args.log_format)
        .with_context(|| format!("--log-level {:?} can't be read", args.log_level))?;
    provide_crypto();
    runtime()?.block_on(app::run(args)).map_err(Into::into)
}

fn provide_crypto() {
    rustls::crypto::ring::default_provider()
        .install_default()
        .expect("nothing has installed a provider before");
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("the runtime could not be started")
}
