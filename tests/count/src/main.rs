//! `cargo count`: how many instructions the work takes that is done for each pod, counted by callgrind in the code as it is
//! shipped: optimised, static, with the same allocator.
//!
//! Counts, unlike times, are the same on a busy machine and on another one, so a run in CI can fail for them. `counts.txt` has
//! those of before; a new compiler may change them, and then they are written anew.

#[path = "../../../benches/common/mod.rs"]
mod common;
mod work;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result, bail, ensure};
use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

const USAGE: &str = "\
cargo count           counts, and fails where it is more than before
cargo count --write   counts, and writes tests/count/counts.txt

It needs valgrind (apt install valgrind).";

/// A process does the work so often less and more; the difference is the work's own, without the start of the process.
const LESS: u32 = 20;
const MORE: u32 = 120;
/// In percent. Hash tables are seeded anew in each process, which is worth some tenths.
const TOLERANCE: u64 = 3;

fn main() -> Result<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        [] => compare(&count_all()?),
        ["--write"] => {
            let text: String =
                count_all()?
                    .iter()
                    .fold(String::new(), |mut text, (name, count)| {
                        writeln!(text, "{count:>9} {name}").expect("a string takes all");
                        text
                    });
            std::fs::write(path(), text).context("writing the counts")?;
            Ok(ExitCode::SUCCESS)
        }
        // What valgrind runs.
        ["do", name, times] => work::repeat(name, times.parse()?).map(|()| ExitCode::SUCCESS),
        _ => bail!(USAGE),
    }
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("counts.txt")
}

/// Instructions each time, by what is done.
fn count_all() -> Result<Vec<(&'static str, u64)>> {
    let names = work::NAMES.iter();
    names
        .map(|name| {
            let [less, more] = [LESS, MORE].map(|times| instructions(name, times));
            let each = more?.saturating_sub(less?) / u64::from(MORE - LESS);
            Ok((*name, each))
        })
        .collect()
}

/// Instructions of a process that does it so often.
fn instructions(name: &str, times: u32) -> Result<u64> {
    let program = std::env::current_exe().context("looking for ourselves")?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args(["do", name, &times.to_string()])
        .output()
        .context("running valgrind: is it installed? (apt install valgrind)")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{name} failed under valgrind:\n{said}"
    );
    let collected = said
        .lines()
        .find_map(|line| line.split_once("Collected : "));
    let (_, count) =
        collected.with_context(|| format!("callgrind has counted nothing:\n{said}"))?;
    count.trim().parse().context("callgrind's count")
}

fn compare(counts: &[(&str, u64)]) -> Result<ExitCode> {
    let text = std::fs::read_to_string(path()).context("reading the counts of before")?;
    let lines = text.lines().filter_map(|line| line.trim().split_once(' '));
    let before: BTreeMap<&str, u64> = lines
        .map(|(count, name)| Ok((name, count.parse().context("a count")?)))
        .collect::<Result<_>>()?;
    let mut grown = false;
    println!("| for each | instructions | before |\n|---|---|---|");
    for (name, now) in counts {
        let before = *before
            .get(name)
            .with_context(|| format!("{name} has never been counted: cargo count --write"))?;
        println!("| {name} | {now} | {before} |");
        grown |= *now * 100 > before * (100 + TOLERANCE);
        if *now * (100 + TOLERANCE) < before * 100 {
            println!("{name} takes less: cargo count --write keeps it so");
        }
    }
    if grown {
        println!(
            "More than {TOLERANCE} % above what it was. Where that is wanted, or the compiler is another: cargo count --write"
        );
    }
    Ok(ExitCode::from(u8::from(grown)))
}
