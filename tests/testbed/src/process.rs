//! Child processes that end when the test process ends, also when that is killed.
//!
//! Rust's `Child` is left behind by a `SIGKILL` of its parent, and the usual remedy (`PR_SET_PDEATHSIG`) needs `unsafe`.
//! Here a shell stands between the two and holds the reading end of a pipe. The kernel closes our end however we end, the
//! shell reads the end of file, and ends the program.

use std::{
    ffi::OsStr,
    fs::File,
    io::{BufRead, BufReader},
    net::{Ipv4Addr, TcpListener},
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, kill_process};

pub use rustix::process::Signal;

use crate::wait::eventually;

/// Runs `"$@"`, prints its pid, passes on its exit code, and ends it at the end of standard input.
///
/// Descriptor 3 is our pipe (a shell gives background commands an empty standard input), 4 is where the pid goes; both
/// standard outputs are the log. `CONT` lets a stopped program take its `TERM`.
const SUPERVISOR: &str = r#"
exec 3<&0 </dev/null 4>&1 >&2
"$@" 3<&- 4>&- &
child=$!
echo "$child" >&4
exec 4>&-
(
  while read -r _ <&3; do :; done
  kill -TERM "$child"; kill -CONT "$child"
  tries=0
  while [ "$tries" -lt 50 ] && kill -0 "$child"; do sleep 0.1; tries=$((tries + 1)); done
  kill -KILL "$child"
) 2>/dev/null &
watcher=$!
wait "$child" 2>/dev/null
code=$?
kill "$watcher" 2>/dev/null
exit "$code"
"#;

/// Waits for the end of standard input, then removes `$1`, again until nobody writes there any more.
const JANITOR: &str = r#"
while read -r _; do :; done
tries=0
while [ "$tries" -lt 80 ]; do rm -rf "$1" && sleep 0.1; [ -e "$1" ] || break; tries=$((tries + 1)); done
"#;

/// A child process that does not outlive us. Dropping it kills it at once; [`Supervised::stop`] is the polite way.
#[derive(Debug)]
pub struct Supervised {
    name: String,
    pid: Pid,
    log: PathBuf,
    shell: Mutex<Child>,
}

impl Supervised {
    /// Starts `program` with its output appended to the file `log` and our environment plus `env`.
    ///
    /// It is in a process group of its own, so that Ctrl-C in a terminal reaches us alone.
    ///
    /// # Errors
    /// If the log can't be opened or no shell can be started. A program that can't be executed shows as exit code 126 or 127.
    pub fn spawn<A, K, V>(
        name: &str,
        program: &Path,
        args: &[A],
        env: &[(K, V)],
        log: &Path,
    ) -> Result<Self>
    where
        A: AsRef<OsStr>,
        K: AsRef<OsStr>,
        V: AsRef<OsStr>,
    {
        let output = File::options().create(true).append(true).open(log);
        let mut shell = Command::new("/bin/sh")
            .args(["-c", SUPERVISOR, name])
            .arg(program)
            .args(args)
            .envs(env.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(output.with_context(|| format!("opening the log {}", log.display()))?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting /bin/sh for {name}"))?;
        let mut line = String::new();
        if let Some(pid) = shell.stdout.take() {
            BufReader::new(pid)
                .read_line(&mut line)
                .with_context(|| format!("reading the pid of {name}"))?;
        }
        let Some(pid) = line.trim().parse().ok().and_then(Pid::from_raw) else {
            let status = shell.wait();
            bail!("/bin/sh printed no pid for {name} but {line:?}: {status:?}");
        };
        Ok(Self {
            name: name.to_owned(),
            pid,
            log: log.to_owned(),
            shell: Mutex::new(shell),
        })
    }

    /// The process id of the program itself, not of the shell above it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Where its standard output and standard error go.
    #[must_use]
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// The last `count` lines it has written, for error messages.
    #[must_use]
    pub fn last_log_lines(&self, count: usize) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(count)..].join("\n")
    }

    /// Whether it still runs (a stopped process does).
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.exit_code().is_none()
    }

    /// The exit code once it has ended; 128 + N after signal N.
    #[must_use]
    pub fn exit_code(&self) -> Option<i32> {
        self.shell().try_wait().ok().flatten().map(code)
    }

    /// Fails where the program has ended, with its exit code and the end of its log.
    ///
    /// # Errors
    /// If it has ended.
    pub fn check(&self) -> Result<()> {
        match self.exit_code() {
            None => Ok(()),
            Some(code) => {
                bail!(
                    "{} ended with exit code {code}; the end of its log:\n{}",
                    self.name,
                    self.last_log_lines(20)
                )
            }
        }
    }

    /// Sends a signal to the program: also `STOP` and `CONT`, to play a process that hangs.
    ///
    /// # Errors
    /// If it has ended.
    pub fn kill(&self, signal: Signal) -> Result<()> {
        // The shell lives as long as the program, so the pid is not somebody else's by now.
        self.check()?;
        kill_process(self.pid, signal)
            .with_context(|| format!("sending {signal:?} to {}", self.name))
    }

    /// Its resident memory, in KiB.
    ///
    /// # Errors
    /// If it has ended.
    pub fn resident(&self) -> Result<f64> {
        let path = format!("/proc/{}/status", self.pid());
        let status = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let mut lines = status.lines();
        let line = lines.find_map(|line| line.strip_prefix("VmRSS:"));
        let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB"));
        let kibibytes = kibibytes.with_context(|| format!("no VmRSS in {path}"))?;
        kibibytes.trim().parse().context("VmRSS is no number")
    }

    /// How many files it has open.
    ///
    /// # Errors
    /// If it has ended.
    pub fn open_files(&self) -> Result<usize> {
        let path = format!("/proc/{}/fd", self.pid());
        let files = std::fs::read_dir(&path).with_context(|| format!("reading {path}"))?;
        Ok(files.count())
    }

    /// Waits for its end, and returns the exit code.
    ///
    /// # Errors
    /// If it still runs at the deadline.
    pub async fn wait(&self, deadline: Duration) -> Result<i32> {
        let what = format!("{} ends", self.name);
        eventually(&what, deadline, || async {
            self.exit_code().context("it still runs")
        })
        .await
    }

    /// Ends it with `TERM`, and with `KILL` when it has not ended at the deadline. Returns its exit code.
    ///
    /// # Errors
    /// If not even `KILL` ends it.
    pub async fn stop(&self, deadline: Duration) -> Result<i32> {
        if self.kill(Signal::TERM).is_ok() && self.kill(Signal::CONT).is_ok() {
            if let Ok(code) = self.wait(deadline).await {
                return Ok(code);
            }
            self.kill(Signal::KILL).ok();
        }
        self.wait(Duration::from_secs(10)).await
    }

    fn shell(&self) -> MutexGuard<'_, Child> {
        self.shell.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        self.kill(Signal::KILL).ok();
        // Waiting takes no time after a KILL, and whoever removes the program's files next must find them unused.
        self.shell().wait().ok();
    }
}

/// Removes a folder when this process ends, however it ends: a control plane in a `static` is never dropped.
#[derive(Debug)]
pub(crate) struct Janitor(Child);

impl Janitor {
    pub(crate) fn start(folder: &Path) -> Result<Self> {
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(JANITOR).arg("janitor").arg(folder);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        Ok(Self(
            command.spawn().context("starting /bin/sh to clean up")?,
        ))
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().ok();
    }
}

/// Ports of the loopback address that nobody listens on. Somebody may take one before its user does: be ready to ask again.
///
/// # Errors
/// If the system has no free ports.
pub fn free_ports<const N: usize>() -> Result<[u16; N]> {
    // All listeners are open at once, so that no port comes twice.
    let mut listeners = Vec::with_capacity(N);
    let mut ports = [0; N];
    for port in &mut ports {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .context("looking for a free loopback port")?;
        *port = listener
            .local_addr()
            .context("reading a port number")?
            .port();
        listeners.push(listener);
    }
    Ok(ports)
}

fn code(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}
