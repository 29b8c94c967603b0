//! Starts of `headstart run`: how its flags and variables are read, here and by the real binary.

use std::process::Command;

use anyhow::{Context, bail, ensure};
use clap::{CommandFactory, FromArgMatches, builder::Resettable};
use headstart::{
    cli::{Cli, Verb},
    config::RunArgs,
};

use crate::data::Start;

/// The exit status for a command line or an environment that can't be read.
const REFUSED: i32 = 2;

/// Reads the start's flags in this process.
///
/// Nobody can set variables here without reaching into other tests, so each becomes the flag that it is declared for.
pub fn check_reading(start: &Start) -> anyhow::Result<()> {
    let command = Cli::command();
    let run = command.find_subcommand("run").context("there is no run")?;
    let (mut args, mut words) = (start.args.clone(), start.refused.clone());
    for (variable, value) in &start.env {
        let flag = run
            .get_arguments()
            .find(|arg| arg.get_env().is_some_and(|name| name == variable.as_str()))
            .and_then(clap::Arg::get_long)
            .with_context(|| format!("no flag reads {variable}"))?;
        args.push(format!("--{flag}={value}"));
        for word in words.iter_mut().filter(|word| *word == variable) {
            flag.clone_into(word);
        }
    }
    match (read(&args), words.is_empty()) {
        (Ok(args), true) => check_args(&args, start),
        (Err(error), false) => {
            let text = error.to_string();
            for word in &words {
                ensure!(text.contains(word.as_str()), "{word:?} is not in {text}");
            }
            Ok(())
        }
        (Ok(_), false) => bail!("{args:?} is not refused"),
        (Err(error), true) => Err(error).context("it is refused"),
    }
}

fn read(args: &[String]) -> Result<RunArgs, clap::Error> {
    // The variables of whoever runs the tests must not play a part.
    let unset = |arg: clap::Arg| arg.env(Resettable::Reset);
    let command = Cli::command().mut_subcommands(|verb| verb.mut_args(unset));
    let line = ["headstart", "run"].map(str::to_owned).into_iter();
    let matches = command.try_get_matches_from(line.chain(args.iter().cloned()))?;
    match Cli::from_arg_matches(&matches)?.verb {
        Verb::Run(args) => Ok(*args),
        Verb::Crd => unreachable!("the verb is run"),
    }
}

fn check_args(args: &RunArgs, start: &Start) -> anyhow::Result<()> {
    ensure!(!start.runs_with.is_empty(), "what does it run with?");
    for (flag, value) in &start.runs_with {
        let got = match flag.as_str() {
            "remove-limits" => args.settings().remove_limits.to_string(),
            "boost-on-restart" => args.boost_on_restart.to_string(),
            "namespace" => args.namespace.clone(),
            _ => bail!("{flag} can't be asked for"),
        };
        ensure!(got == *value, "it runs with {flag} {got}, expected {value}");
    }
    Ok(())
}

/// Starts the binary with these variables and no others. One that is not refused comes as far as looking for a cluster,
/// which there isn't.
pub fn check_process(start: &Start) -> anyhow::Result<()> {
    let output = Command::new(env!("CARGO_BIN_EXE_headstart"))
        .arg("run")
        .args(&start.args)
        .env_clear()
        .env("HOME", "/nonexistent")
        .envs(&start.env)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let (code, words) = if start.refused.is_empty() {
        (1, vec!["no cluster is configured"])
    } else {
        let words = start.refused.iter().map(String::as_str).collect();
        (REFUSED, words)
    };
    ensure!(
        output.status.code() == Some(code),
        "{}, expected {code}: {said}",
        output.status
    );
    for word in words {
        ensure!(said.contains(word), "{word:?} is not in {said}");
    }
    ensure!(output.stdout.is_empty(), "it prints something else too");
    Ok(())
}
