//! The command line of the real binary: what it prints, what it refuses, and with which exit status.

use std::{
    collections::BTreeMap,
    process::{Command, Output},
    time::Duration,
};

use clap::{CommandFactory as _, FromArgMatches as _};
use headstart::{
    cli::{Cli, Verb},
    config::RunArgs,
};

/// What the binary did.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

/// Runs the binary with these variables and no others, and with a home directory in which there is nothing.
fn run(args: &[&str], variables: &[(&str, &str)]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_headstart"));
    command
        .args(args)
        .env_clear()
        .env("HOME", "/nonexistent")
        .envs(variables.iter().copied());
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().expect("the binary runs");
    let text = |bytes| String::from_utf8(bytes).expect("it prints text");
    Ran {
        code: status.code(),
        stdout: text(stdout),
        stderr: text(stderr),
    }
}

/// Asserts that the start stops with status 2, and that the message has all these words.
#[track_caller]
fn assert_refused(args: &[&str], variables: &[(&str, &str)], words: &[&str]) {
    let ran = run(&[&["run"], args].concat(), variables);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    for word in words {
        assert!(ran.stderr.contains(word), "{word:?} is not in {ran:?}");
    }
    assert_eq!(ran.stdout, "", "a refusal is no output");
}

/// Asserts that the command line is taken: what then stops the start is that there is no cluster.
#[track_caller]
fn assert_taken(args: &[&str], variables: &[(&str, &str)]) {
    let ran = run(&[&["run"], args].concat(), variables);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("no cluster is configured"), "{ran:?}");
}

/// The flags as they are read in this process, from a command line alone.
fn read(args: &[&str]) -> RunArgs {
    // The variables of whoever runs the test must not play a part.
    let unset = |arg: clap::Arg| arg.env(clap::builder::Resettable::Reset);
    let command = Cli::command().mut_subcommands(|verb| verb.mut_args(unset));
    let matches = command
        .try_get_matches_from([&["headstart", "run"], args].concat())
        .expect("the command line is right");
    match Cli::from_arg_matches(&matches)
        .expect("it can be read")
        .verb
    {
        Verb::Run(args) => *args,
        Verb::Crd | Verb::Explain(_) | Verb::List(_) | Verb::Revert(_) | Verb::Check(_) => {
            panic!("another verb")
        }
    }
}

#[test]
fn crd_prints_the_manifest() {
    let ran = run(&["crd"], &[]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let manifest = include_str!("../manifests/crd.yaml");
    assert!(
        ran.stdout == manifest,
        "headstart crd > manifests/crd.yaml brings it up to date"
    );
}

#[test]
fn values_that_cannot_be_read_stop_the_start_and_are_named() {
    for value in ["yes", "on", "2", "TRue", " true"] {
        let words = ["REMOVE_LIMITS", value, "1, t, true, 0, f and false"];
        assert_refused(&[], &[("REMOVE_LIMITS", value)], &words);
    }
    let words = ["--remove-limits", "yes", "1, t, true, 0, f and false"];
    assert_refused(&["--remove-limits=yes"], &[], &words);

    for value in [
        "0",
        "10s",
        "59s",
        "31d",
        "x",
        "1",
        "1.5h",
        "-1m",
        "",
        "99999999999999999999d",
    ] {
        let flag = format!("--boost-deadline={value}");
        assert_refused(&[&flag], &[], &["--boost-deadline", value, "1m to 30d"]);
    }
    assert_refused(
        &["--boost-deadline", "0"],
        &[],
        &["--boost-deadline", "'0'", "1m to 30d"],
    );
    assert_refused(
        &[],
        &[("BOOST_DEADLINE", "10s")],
        &["BOOST_DEADLINE", "10s", "1m to 30d"],
    );
    assert_refused(
        &["--webhook-address", "9443"],
        &[],
        &["--webhook-address", "9443"],
    );
    assert_refused(
        &["--log-format", "xml"],
        &[],
        &["--log-format", "xml", "json", "text"],
    );
}

#[test]
fn lifetimes_of_certificates_are_bounded_and_fit_each_other() {
    for value in ["59s", "366d", "0", "x"] {
        let words = ["--certificate-lifetime", value, "1m to 365d"];
        assert_refused(&["--certificate-lifetime", value], &[], &words);
    }
    let words = ["CA_LIFETIME", "3651d", "2m to 3650d"];
    assert_refused(&[], &[("CA_LIFETIME", "3651d")], &words);
    let words = ["--ca-lifetime", "at least twice --certificate-lifetime"];
    assert_refused(&["--ca-lifetime", "179d"], &[], &words);
    assert_taken(&["--ca-lifetime", "180d"], &[]);
    let short = [("CERTIFICATE_LIFETIME", "90s"), ("CA_LIFETIME", "3m")];
    assert_taken(&[], &short);
}

#[test]
fn certificates_come_from_files_or_are_made() {
    let files = ["--certificate-directory", "/certificates"];
    assert_taken(&files, &[]);
    for (flag, value) in [
        ("--certificate-secret", "ours"),
        ("--certificate-lifetime", "90d"),
        ("--ca-lifetime", "3650d"),
        ("--webhook-configuration", "headstart"),
    ] {
        let args = [&files[..], &[flag, value]].concat();
        assert_refused(&args, &[], &["--certificate-directory", flag]);
    }
    let variable = [("CERTIFICATE_SECRET", "ours")];
    assert_refused(&files, &variable, &["--certificate-directory"]);
}

#[test]
fn the_place_that_a_bad_value_comes_from_is_named() {
    let from_variable = "comes from the environment variable";
    let ran = run(&["run"], &[("REMOVE_LIMITS", "yes")]);
    assert!(ran.stderr.contains(from_variable), "{ran:?}");
    // The flag wins over the variable, so the variable is not to blame.
    let ran = run(
        &["run", "--remove-limits=yes"],
        &[("REMOVE_LIMITS", "true")],
    );
    assert!(!ran.stderr.contains(from_variable), "{ran:?}");
}

#[test]
fn upstreams_variables_are_read_as_upstream_reads_them() {
    for value in [
        "1", "t", "T", "true", "TRUE", "True", "0", "f", "F", "false", "FALSE", "False", "",
    ] {
        assert_taken(&[], &[("REMOVE_LIMITS", value)]);
        assert_taken(&[], &[("BOOST_ON_RESTART", value)]);
    }
    assert_refused(
        &[],
        &[("BOOST_ON_RESTART", "yes")],
        &["BOOST_ON_RESTART", "yes", "allowed are"],
    );
    assert_taken(&[], &[("POD_NAMESPACE", "boosts"), ("POD_NAME", "a")]);
    assert_taken(&[], &[("DRY_RUN", "t")]);
    assert_refused(&[], &[("DRY_RUN", "yes")], &["DRY_RUN", "yes"]);
}

#[test]
fn an_empty_variable_is_unset_for_every_flag() {
    let command = Cli::command();
    let run = command
        .find_subcommand("run")
        .expect("there is the verb run");
    let variables: Vec<_> = run
        .get_arguments()
        .filter_map(|arg| arg.get_env()?.to_str())
        .collect();
    assert!(variables.len() > 10, "{variables:?}");
    let empty: Vec<_> = variables.iter().map(|variable| (*variable, "")).collect();
    assert_taken(&[], &empty);
}

#[test]
fn every_flag_has_a_variable_of_its_own() {
    let command = Cli::command();
    let run = command
        .find_subcommand("run")
        .expect("there is the verb run");
    let mut flags = BTreeMap::new();
    for arg in run.get_arguments().filter(|arg| arg.get_id() != "help") {
        let variable = arg.get_env().expect("a variable").to_owned();
        let taken = flags.insert(variable, arg.get_id().clone());
        assert_eq!(taken, None, "{}", arg.get_id());
    }
}

#[test]
fn flags_are_read() {
    let args = read(&[]);
    assert!(!args.admission.remove_limits);
    assert_eq!(args.names(), ["headstart.headstart-system.svc"]);
    assert_eq!(args.admission.settings().end.deadline_seconds, 3600);
    assert_eq!(args.admission.settings().end.unschedulable_seconds, 30);

    for (args, remove) in [
        (&["--remove-limits"][..], true),
        (&["--remove-limits=true"], true),
        (&["--remove-limits=0"], false),
    ] {
        assert_eq!(
            read(args).admission.settings().remove_limits,
            remove,
            "{args:?}"
        );
    }
    for (value, seconds) in [("1m", 60), ("90s", 90), ("2h", 7200), ("30d", 2_592_000)] {
        let args = read(&["--boost-deadline", value, "--unschedulable-after", value]);
        let end = args.admission.settings().end;
        assert_eq!(
            (end.deadline_seconds, end.unschedulable_seconds),
            (seconds, seconds)
        );
    }
    for (args, dry) in [
        (&[][..], false),
        (&["--dry-run"], true),
        (&["--dry-run=f"], false),
    ] {
        assert_eq!(read(args).dry_run, dry, "{args:?}");
    }
    let args = read(&["--shutdown-delay", "0", "--namespace", "ours"]);
    assert_eq!(args.shutdown_delay, Duration::ZERO);
    assert_eq!(args.names(), ["headstart.ours.svc"]);
    let args = read(&[
        "--certificate-name",
        "a.ours.svc,10.0.0.1",
        "--certificate-name",
        "b",
    ]);
    assert_eq!(args.names(), ["a.ours.svc", "10.0.0.1", "b"]);
}

#[test]
fn what_is_not_known_is_refused() {
    assert_refused(&["--no-such-flag"], &[], &["--no-such-flag"]);
    assert_refused(&["stray"], &[], &["stray"]);
    let ran = run(&["dance"], &[]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("dance"), "{ran:?}");
    assert_eq!(run(&[], &[]).code, Some(2), "a verb is needed");
}

#[test]
fn without_a_cluster_the_start_stops_and_says_so() {
    let ran = run(&["run"], &[]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    for word in ["no cluster is configured", "KUBECONFIG"] {
        assert!(ran.stderr.contains(word), "{ran:?}");
    }
    let ran = run(&["run"], &[("KUBECONFIG", "/nonexistent/kubeconfig")]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("/nonexistent/kubeconfig"), "{ran:?}");
    assert!(!ran.stderr.contains("panicked"), "{ran:?}");
}

#[test]
fn help_and_version_are_no_errors() {
    for args in [
        &["--help"][..],
        &["run", "--help"],
        &["crd", "--help"],
        &["check", "--help"],
        &["--version"],
    ] {
        let ran = run(args, &[]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert!(!ran.stdout.is_empty() && ran.stderr.is_empty(), "{ran:?}");
    }
    let help = run(&["run", "--help"], &[]).stdout;
    for word in [
        "--remove-limits",
        "REMOVE_LIMITS",
        "--boost-deadline",
        "POD_NAMESPACE",
        "1m to 30d",
    ] {
        assert!(help.contains(word), "{word:?} is not in {help}");
    }
}
