//! Flags and environment variables of `headstart run`.
//!
//! A value that can't be read stops the start: it is never taken for a default. An empty variable counts as unset, as Go
//! programs take it.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use chrono::TimeDelta;
use clap::{Args, ValueEnum};

use crate::{
    certs::Lifetimes,
    domain::{admission::Settings, end::EndSettings, quantity::MilliCpu},
};

/// Flags of `headstart run`. Each has an environment variable.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// Namespace of our own Lease, Secret and Service
    #[arg(
        long,
        env = "POD_NAMESPACE",
        default_value = "headstart-system",
        value_name = "NAME"
    )]
    pub namespace: String,

    /// Who this replica is in the Lease: its pod's name [default: the host's name]
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pub identity: Option<String>,

    /// Where the webhook listens (TLS)
    #[arg(
        long,
        env = "WEBHOOK_ADDRESS",
        default_value = "0.0.0.0:9443",
        value_name = "ADDRESS"
    )]
    pub webhook_address: SocketAddr,

    /// Where /livez, /readyz and /metrics are (plain HTTP)
    #[arg(
        long,
        env = "PROBE_ADDRESS",
        default_value = "0.0.0.0:8080",
        value_name = "ADDRESS"
    )]
    pub probe_address: SocketAddr,

    /// What pods get, and until when.
    #[command(flatten)]
    pub admission: AdmissionArgs,

    /// Boost pods also that were created while no webhook answered, by a resize, while they are still starting
    #[arg(long, env = "BOOST_MISSED_PODS", default_value = "false", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool)]
    pub boost_missed_pods: bool,

    /// Write nothing to pods and boosts: log and count what would be boosted, and what would be taken back
    #[arg(long, env = "DRY_RUN", default_value = "false", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool)]
    pub dry_run: bool,

    /// The Secret that holds the webhook's certificates
    #[arg(
        long,
        env = "CERTIFICATE_SECRET",
        default_value = "headstart-certificates",
        value_name = "NAME"
    )]
    pub certificate_secret: String,

    /// DNS names and addresses in the webhook's certificate [default: headstart.NAMESPACE.svc]
    #[arg(
        long = "certificate-name",
        env = "CERTIFICATE_NAMES",
        value_delimiter = ',',
        value_name = "NAME"
    )]
    pub certificate_names: Vec<String>,

    /// How long a certificate is valid that Headstart makes: 1m to 365d; it is renewed after two thirds of that
    #[arg(long, env = "CERTIFICATE_LIFETIME", default_value = "90d", value_name = "DURATION", value_parser = certificate_lifetime)]
    pub certificate_lifetime: Duration,

    /// How long the CA of such certificates is valid, at least twice as long as they are: 2m to 3650d; it is renewed alike
    #[arg(long, env = "CA_LIFETIME", default_value = "3650d", value_name = "DURATION", value_parser = ca_lifetime)]
    pub ca_lifetime: Duration,

    /// A folder with tls.crt, tls.key and ca.crt that somebody else renews, such as cert-manager: Headstart then makes no
    /// certificates, and leaves the webhook configuration alone
    #[arg(long, env = "CERTIFICATE_DIRECTORY", value_name = "FOLDER",
          conflicts_with_all = ["certificate_secret", "certificate_lifetime", "ca_lifetime", "webhook_configuration"])]
    pub certificate_directory: Option<PathBuf>,

    /// CAs in PEM form: only callers with a client certificate of theirs are answered; read at the start
    #[arg(long, env = "CLIENT_CA", value_name = "FILE")]
    pub client_ca: Option<PathBuf>,

    /// Serve boosts in force as an aggregated API, on the webhook's port (manifests/view)
    #[arg(long, env = "VIEW", default_value = "false", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool)]
    pub view: bool,

    /// The MutatingWebhookConfiguration that gets the CA
    #[arg(
        long,
        env = "WEBHOOK_CONFIGURATION",
        default_value = "headstart",
        value_name = "NAME"
    )]
    pub webhook_configuration: String,

    /// The Lease of the leader
    #[arg(long, env = "LEASE", default_value = "headstart", value_name = "NAME")]
    pub lease: String,

    /// How long to go on serving after SIGTERM, until nobody sends reviews here any more: 0s to 5m
    #[arg(long, env = "SHUTDOWN_DELAY", default_value = "10s", value_name = "DURATION", value_parser = shutdown)]
    pub shutdown_delay: Duration,

    /// What is logged: error, warn, info, debug, trace, or by module (headstart=debug,info)
    #[arg(long, env = "LOG_LEVEL", default_value = "info", value_name = "FILTER")]
    pub log_level: String,

    /// How it is logged
    #[arg(
        long,
        env = "LOG_FORMAT",
        default_value = "json",
        value_name = "FORMAT"
    )]
    pub log_format: LogFormat,
}

/// Flags that decide what a pod gets, and until when: `headstart run` and `headstart explain` have them.
#[derive(Args, Clone, Debug)]
pub struct AdmissionArgs {
    /// Remove a boosted container's CPU limit instead of raising it, where that keeps the pod's QoS class
    #[arg(long, env = "REMOVE_LIMITS", default_value = "false", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool)]
    pub remove_limits: bool,

    /// The most CPU that a boosted request or limit may have: 2, 1500m
    #[arg(long, env = "MAX_BOOSTED_CPU", value_name = "CPU", value_parser = cpu)]
    pub max_boosted_cpu: Option<MilliCpu>,

    /// Boost also where a ResourceQuota has no room for it; the API server then refuses the pod
    #[arg(long, env = "IGNORE_QUOTA", default_value = "false", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool)]
    pub ignore_quota: bool,

    /// Boost also pods that could land on a node whose kubelet is older than 1.33 and can't take the boost back
    #[arg(long, env = "ALLOW_OLD_KUBELETS", default_value = "false", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool)]
    pub allow_old_kubelets: bool,

    /// Leave Guaranteed pods alone: under a static CPU manager they can't be resized back
    #[arg(long, env = "SKIP_GUARANTEED", default_value = "false", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool)]
    pub skip_guaranteed: bool,

    /// Boost a container again, by a resize, when it restarts after its boost has ended; a boost's own boostOnRestart does so
    /// for its pods alone
    #[arg(long, env = "BOOST_ON_RESTART", default_value = "false", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool)]
    pub boost_on_restart: bool,

    /// The latest end of any boost, counted from scheduling: 1m to 30d
    #[arg(long, env = "BOOST_DEADLINE", default_value = "1h", value_name = "DURATION", value_parser = deadline)]
    pub boost_deadline: Duration,

    /// Take the boost back from a pod that has not found a node for so long: 1s to 30d
    #[arg(long, env = "UNSCHEDULABLE_AFTER", default_value = "30s", value_name = "DURATION", value_parser = unschedulable)]
    pub unschedulable_after: Duration,
}

/// Form of the logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// Text.
    Text,
}

impl RunArgs {
    /// The names that the webhook's certificate is for.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        if self.certificate_names.is_empty() {
            vec![format!("headstart.{}.svc", self.namespace)]
        } else {
            self.certificate_names.clone()
        }
    }

    /// How long certificates are valid that we make.
    #[must_use]
    pub fn lifetimes(&self) -> Lifetimes {
        let delta = |lifetime| TimeDelta::from_std(lifetime).expect("they are bounded");
        Lifetimes {
            leaf: delta(self.certificate_lifetime),
            authority: delta(self.ca_lifetime),
        }
    }

    /// What is wrong with flags that are right by themselves.
    #[must_use]
    pub fn contradiction(&self) -> Option<String> {
        // A CA is renewed when a third of its life is left. A leaf of it must live on until the new CA is known, though it
        // ends with its own.
        (self.ca_lifetime < 2 * self.certificate_lifetime).then(|| {
            format!(
                "--ca-lifetime ({:?}) must be at least twice --certificate-lifetime ({:?})",
                self.ca_lifetime, self.certificate_lifetime
            )
        })
    }
}

impl AdmissionArgs {
    /// What the domain needs of them.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings {
            remove_limits: self.remove_limits,
            max_boosted_cpu: self.max_boosted_cpu,
            ignore_quota: self.ignore_quota,
            allow_old_kubelets: self.allow_old_kubelets,
            skip_guaranteed: self.skip_guaranteed,
            end: EndSettings {
                deadline_seconds: self.boost_deadline.as_secs(),
                unschedulable_seconds: self.unschedulable_after.as_secs(),
                boost_on_restart: self.boost_on_restart,
            },
        }
    }
}

const MINUTE: u64 = 60;
const DAY: u64 = 24 * 60 * MINUTE;

/// A boolean as Go's `strconv.ParseBool` reads it: upstream's variables are read so.
pub(crate) fn go_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("allowed are 1, t, true, 0, f and false".to_owned()),
    }
}

fn cpu(text: &str) -> Result<MilliCpu, String> {
    match text.parse::<MilliCpu>() {
        Ok(cpu) if !cpu.is_zero() => Ok(cpu),
        Ok(_) => Err("must be above 0".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn deadline(text: &str) -> Result<Duration, String> {
    duration_from(text, MINUTE, 30 * DAY, "1m to 30d")
}

fn certificate_lifetime(text: &str) -> Result<Duration, String> {
    duration_from(text, MINUTE, 365 * DAY, "1m to 365d")
}

fn ca_lifetime(text: &str) -> Result<Duration, String> {
    duration_from(text, 2 * MINUTE, 3650 * DAY, "2m to 3650d")
}

fn unschedulable(text: &str) -> Result<Duration, String> {
    duration_from(text, 1, 30 * DAY, "1s to 30d")
}

/// A time to wait for others.
pub(crate) fn wait(text: &str) -> Result<Duration, String> {
    duration_from(text, 1, 60 * MINUTE, "1s to 1h")
}

fn shutdown(text: &str) -> Result<Duration, String> {
    duration_from(text, 0, 5 * MINUTE, "0s to 5m")
}

/// A whole number with a unit, within bounds (in seconds).
fn duration_from(text: &str, least: u64, most: u64, allowed: &str) -> Result<Duration, String> {
    let unit = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(unit);
    let factor = match unit {
        "s" => 1,
        "m" => MINUTE,
        "h" => 60 * MINUTE,
        "d" => DAY,
        // Zero needs no unit.
        "" if number == "0" => 1,
        _ => 0,
    };
    let seconds = number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(factor))
        .filter(|_| factor > 0);
    match seconds {
        Some(seconds) if (least..=most).contains(&seconds) => Ok(Duration::from_secs(seconds)),
        _ => Err(format!(
            "allowed are {allowed}, as a whole number with a unit: 90s, 10m, 1h, 2d"
        )),
    }
}
