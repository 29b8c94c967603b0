//! The command line.

use clap::{
    Arg, Command, CommandFactory, FromArgMatches, Parser, Subcommand,
    error::{ContextKind, ErrorKind},
};

use crate::{
    check::CheckArgs, config::RunArgs, explain::ExplainArgs, list::ListArgs, revert::RevertArgs,
};

/// Gives Kubernetes pods more CPU while they start, and takes it back in place.
#[derive(Debug, Parser)]
#[command(name = "headstart", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run the operator: webhook and, where this replica leads, sweeper
    Run(Box<RunArgs>),
    /// Print the CustomResourceDefinitions
    Crd,
    /// Explain what would happen to a pod, and why; with files alone no cluster is needed
    Explain(Box<ExplainArgs>),
    /// List the pods that are boosted now: since when, by how much, until when
    List(ListArgs),
    /// End boosts now: of a pod, a namespace or all
    Revert(RevertArgs),
    /// Is this cluster fit, and is what is installed in it whole?
    Check(CheckArgs),
}

/// Reads the command line and the environment; exits with status 2 and a message when something can't be read.
#[must_use]
pub fn parse() -> Cli {
    let mut command = without_empty_variables(Cli::command());
    if is_plugin() {
        command = command.bin_name("kubectl headstart");
    }
    let read = command
        .clone()
        .try_get_matches()
        .and_then(|matches| Cli::from_arg_matches(&matches))
        .and_then(|cli| match &cli.verb {
            Verb::Run(args) => match args.contradiction() {
                Some(text) => Err(command.clone().error(ErrorKind::ArgumentConflict, text)),
                None => Ok(cli),
            },
            _ => Ok(cli),
        });
    read.unwrap_or_else(|error| {
        let variable = variable_of(&command, &error);
        // Help and versions are "errors" too; they exit with 0.
        let code = error.exit_code();
        if let Err(error) = error.print() {
            tracing::debug!(%error, "the message could not be printed");
        }
        if let Some(variable) = variable {
            eprintln!("\nThe value comes from the environment variable {variable}.");
        }
        std::process::exit(code)
    })
}

/// Whether kubectl runs us, which it does where we are linked as `kubectl-headstart`.
fn is_plugin() -> bool {
    let program = std::env::args_os().next().unwrap_or_default();
    let name = std::path::Path::new(&program).file_name();
    name.is_some_and(|name| name == "kubectl-headstart")
}

/// An empty variable counts as unset.
fn without_empty_variables(command: Command) -> Command {
    let unset = |arg: Arg| {
        let is_empty = arg
            .get_env()
            .and_then(std::env::var_os)
            .is_some_and(|value| value.is_empty());
        if is_empty {
            arg.env(clap::builder::Resettable::Reset)
        } else {
            arg
        }
    };
    command.mut_subcommands(|verb| verb.mut_args(unset))
}

/// The variable that a bad value comes from: clap names the flag alone.
fn variable_of(command: &Command, error: &clap::Error) -> Option<String> {
    let flag = error.get(ContextKind::InvalidArg)?.to_string();
    let value = error.get(ContextKind::InvalidValue)?.to_string();
    let long = flag
        .trim_start_matches("--")
        .split([' ', '=', '['])
        .next()?;
    let arg = command
        .get_subcommands()
        .flat_map(Command::get_arguments)
        .find(|arg| arg.get_long() == Some(long))?;
    let variable = arg.get_env()?;
    let on_command_line =
        std::env::args().any(|given| given.split('=').next() == Some(&*format!("--{long}")));
    let from_variable =
        !on_command_line && std::env::var_os(variable).is_some_and(|set| *set == *value);
    from_variable.then(|| variable.to_string_lossy().into_owned())
}
