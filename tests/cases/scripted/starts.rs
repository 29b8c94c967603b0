//! Starts of `headstart run`: how its flags and variables are read, here and by the real binary.

use std::{
    env, fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::{self, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use clap::{CommandFactory, FromArgMatches, builder::Resettable};
use headstart::{
    cli::{Cli, Verb},
    config::RunArgs,
};

use serde_json::{Value, json};

use crate::data::Start;

/// The exit status for a command line or an environment that can't be read.
const REFUSED: i32 = 2;

/// How long the operator may take to say something, in real time on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

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
    let Verb::Run(args) = Cli::from_arg_matches(&matches)?.verb else {
        unreachable!("the verb is run");
    };
    Ok(*args)
}

fn check_args(args: &RunArgs, start: &Start) -> anyhow::Result<()> {
    ensure!(!start.runs_with.is_empty(), "what does it run with?");
    for (flag, value) in &start.runs_with {
        let got = match flag.as_str() {
            "remove-limits" => args.admission.settings().remove_limits.to_string(),
            "boost-on-restart" => args.admission.boost_on_restart.to_string(),
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
    let mut command = Command::new(env!("CARGO_BIN_EXE_headstart"));
    command
        .arg("run")
        .args(&start.args)
        .env_clear()
        .env("HOME", "/nonexistent")
        .envs(&start.env);
    if let Some(version) = &start.api_server {
        return check_running(command, version, &start.says);
    }
    let output = command.output()?;
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

/// Lets it run against an API server that knows nothing but its version, until it has said all of this in one line.
fn check_running(mut command: Command, version: &str, words: &[String]) -> anyhow::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let known = json!({"gitVersion": version, "major": "1", "minor": minor(version)?});
    // It ends with the tests.
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let known = known.clone();
            thread::spawn(move || serve(&stream, &known));
        }
    });
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    });
    let name = format!("headstart-cases-{}-{}", process::id(), address.port());
    let path = env::temp_dir().join(name);
    fs::write(&path, kubeconfig.to_string())?;

    let mut operator = command
        .env("KUBECONFIG", &path)
        .env("WEBHOOK_ADDRESS", "127.0.0.1:0")
        .env("PROBE_ADDRESS", "127.0.0.1:0")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (sender, lines) = mpsc::channel();
    let pipes: [Option<Box<dyn Read + Send>>; 2] = [
        operator.stdout.take().map(|pipe| Box::new(pipe) as _),
        operator.stderr.take().map(|pipe| Box::new(pipe) as _),
    ];
    for pipe in pipes.into_iter().flatten() {
        let sender = sender.clone();
        thread::spawn(move || {
            let lines = BufReader::new(pipe).lines().map_while(Result::ok);
            // Nobody listens any more once the line has come.
            lines.map(|line| sender.send(line)).all(|sent| sent.is_ok())
        });
    }
    drop(sender);
    let (mut said, deadline) = (Vec::new(), Instant::now() + PATIENCE);
    let found = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match lines.recv_timeout(left) {
            Ok(line) if words.iter().all(|word| line.contains(word)) => break true,
            Ok(line) => said.push(line),
            Err(_) => break false,
        }
    };
    let runs = operator.try_wait()?.is_none();
    operator.kill()?;
    operator.wait()?;
    fs::remove_file(&path)?;
    ensure!(
        found,
        "{words:?} is not in one line of\n{}",
        said.join("\n")
    );
    ensure!(runs, "it has ended");
    Ok(())
}

fn minor(version: &str) -> anyhow::Result<&str> {
    version.split('.').nth(1).context("a version has parts")
}

/// Answers the requests of a connection: 404, except for the version.
fn serve(stream: &TcpStream, known: &Value) -> std::io::Result<()> {
    let (mut reader, mut writer) = (BufReader::new(stream), stream);
    loop {
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if line.trim_end().is_empty() {
                break;
            }
            head.push(line.to_ascii_lowercase());
        }
        let length = head
            .iter()
            .find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body)?;
        let asked = head
            .first()
            .is_some_and(|line| line.starts_with("get /version "));
        let (status, body) = if asked {
            ("200 OK", known.clone())
        } else {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                "code": 404, "reason": "NotFound", "message": "not found"});
            ("404 Not Found", status)
        };
        let body = body.to_string();
        write!(
            writer,
            "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        writer.flush()?;
    }
}
