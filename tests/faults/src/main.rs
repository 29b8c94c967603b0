//! `cargo faults`: what Headstart survives, on a real API server, with each replica behind a proxy of its own that can be
//! slowed, cut or made to lie. An invariant checker reads the audit log all the while.
//!
//! Figures are from this machine: compare within a run. A seed repeats a run as far as two schedulers allow.

mod bed;
mod faults;
mod figures;
mod ledger;
mod plot;
mod rules;
mod soak;
mod table;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, Result};
use fastrand::Rng;
use testbed::release;

use crate::{
    bed::Bed,
    faults::{Fault, Repeat, Round},
    figures::Figures,
    table::{Outcome, Row},
};

const USAGE: &str = "\
cargo faults [--short] [--write] [NUMBER…]   inflicts all faults, or these
cargo faults [--write] rules                 breaks each rule of the program, for a fault to notice
cargo faults [--write] soak MINUTES          lets pods come and go for so long
cargo faults plot                            draws docs/revert-lag.svg

  --short    5 repetitions instead of 20, and smaller crowds
  --write    write what comes out into docs/reliability.md

HEADSTART_SEED repeats a run; HEADSTART_BINARY is another binary than the one that is built.";

/// What is to be done.
struct Args {
    what: What,
    short: bool,
    write: bool,
    seed: u64,
}

enum What {
    /// All if there are none.
    Faults(Vec<u8>),
    Rules,
    Soak(u32),
    Plot,
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let args = args()?;
    eprintln!("HEADSTART_SEED={}", args.seed);
    match &args.what {
        What::Faults(numbers) => inflict_all(&args, numbers).await,
        What::Rules => break_all(&args).await,
        What::Soak(minutes) => soak(&args, *minutes).await,
        What::Plot => {
            let path = plot::plot(Bed::start(&binary().await?).await?).await?;
            println!("{}", path.display());
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn args() -> Result<Args> {
    let seed = match std::env::var("HEADSTART_SEED") {
        Ok(seed) => seed.parse().context("HEADSTART_SEED is no number")?,
        Err(_) => fastrand::u64(..),
    };
    let mut all: Vec<String> = std::env::args().skip(1).collect();
    let mut flag = |name: &str| {
        let before = all.len();
        all.retain(|arg| arg != name);
        all.len() < before
    };
    let (short, write) = (flag("--short"), flag("--write"));
    let words: Vec<&str> = all.iter().map(String::as_str).collect();
    let what = match words[..] {
        ["rules"] => What::Rules,
        ["plot"] => What::Plot,
        ["soak", minutes] => What::Soak(minutes.parse().context(USAGE)?),
        ref numbers => {
            let numbers = numbers.iter().map(|number| number.parse().context(USAGE));
            What::Faults(numbers.collect::<Result<_>>()?)
        }
    };
    Ok(Args {
        what,
        short,
        write,
        seed,
    })
}

async fn binary() -> Result<PathBuf> {
    match std::env::var_os("HEADSTART_BINARY") {
        Some(binary) => Ok(binary.into()),
        None => release::static_binary().await,
    }
}

async fn inflict_all(args: &Args, numbers: &[u8]) -> Result<ExitCode> {
    let binary = binary().await?;
    let mut broken = false;
    let mut rows = Vec::new();
    for fault in faults::all() {
        if numbers.is_empty() || numbers.contains(&fault.number) {
            let repetitions = fault.repeat.times(args.short);
            let row = inflict(&fault, &binary, repetitions, args).await;
            eprintln!("{row}");
            broken |= row.outcome != Outcome::Held;
            // At once: a run is long.
            if args.write {
                table::write(std::slice::from_ref(&row))?;
            }
            rows.push(row);
        }
    }
    println!("{}", table::markdown(&rows));
    Ok(ExitCode::from(u8::from(broken)))
}

async fn break_all(args: &Args) -> Result<ExitCode> {
    let copy = rules::Copy::make().await?;
    let mut lines = Vec::new();
    let mut unnoticed = false;
    for rule in rules::RULES {
        let binary = copy.broken(&rule).await?;
        let faults = faults::all();
        let fault = faults.iter().find(|fault| fault.number == rule.fault);
        let fault = fault.context("there is no such fault")?;
        let row = inflict(fault, &binary, Repeat::Timing.times(true), args).await;
        let noticed = match row.outcome {
            Outcome::Held => "**no**".to_owned(),
            Outcome::Broken(why) => rules::short(&why),
        };
        unnoticed |= noticed == "**no**";
        let rules::Rule {
            number,
            what,
            broken,
            ..
        } = rule;
        let line = format!(
            "| {number} | {what} | {broken} | {} | {noticed} |",
            fault.number
        );
        eprintln!("{line}");
        lines.push(line);
    }
    let text = format!("{}\n{}", rules::HEAD, lines.join("\n"));
    println!("{text}");
    if args.write {
        table::replace("rules", |_| text)?;
    }
    Ok(ExitCode::from(u8::from(unnoticed)))
}

async fn soak(args: &Args, minutes: u32) -> Result<ExitCode> {
    let line = soak::soak(Bed::start(&binary().await?).await?, minutes).await?;
    let line = format!("{}, {line}", table::date());
    println!("{line}");
    if args.write {
        table::replace("soak", |_| line)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Inflicts a fault so often, on a bed of its own, and says what came out.
async fn inflict(fault: &Fault, binary: &Path, repetitions: u32, args: &Args) -> Row {
    eprintln!("{}. {}", fault.number, fault.what);
    let mut figures = Figures::default();
    let mut done = 0;
    let run = async {
        let mut bed = Bed::start(binary).await?;
        while done < repetitions {
            bed.heal().await.context("between two repetitions")?;
            // Each repetition has a seed of its own, so that it can be told apart in the log.
            let seed = args.seed ^ (u64::from(fault.number) << 32) ^ u64::from(done);
            let mut round = Round {
                bed: &mut bed,
                random: Rng::with_seed(seed),
                figures: &mut figures,
                short: args.short,
            };
            let inflicted = (fault.run)(&mut round).await;
            inflicted.with_context(|| format!("repetition {done}; {}", bed.state()))?;
            bed.check().await.context("the invariants")?;
            done += 1;
        }
        anyhow::Ok(())
    };
    let outcome = match run.await {
        Ok(()) => Outcome::Held,
        Err(error) => Outcome::Broken(format!("{error:#}")),
    };
    Row {
        number: fault.number,
        what: fault.what,
        expected: fault.expected,
        repetitions: done,
        outcome,
        figures,
    }
}
