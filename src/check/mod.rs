//! `headstart check`: is this cluster fit, and is what is installed in it whole?
//!
//! Each check asks the API server, with the rights of whoever calls, and decides by itself: one that fails stops no other.
//! Nothing is written; the webhook is tried by the dry run of a pod.

mod cluster;
mod crds;
mod policies;
mod rights;
mod webhook;

use std::{fmt::Write as _, time::Duration};

use clap::{Args, ValueEnum};
use futures::{FutureExt as _, future::join_all};
use serde_json::json;
use tokio::time::timeout;

pub(crate) use self::cluster::is_too_old;
use crate::{
    error::Chain,
    kubeconfig::{self, KubeconfigError},
};

/// How long one request may take.
const DEADLINE: Duration = Duration::from_secs(10);

/// Flags of `headstart check`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
The exit status is 0 when no check has failed, and 1 otherwise. Nothing is written to the cluster: the webhook is tried by the
dry run of a pod. It takes an administrator's rights; what you may not ask counts as failed, and the right is named.")]
pub struct CheckArgs {
    /// Where Headstart is installed
    #[arg(short, long, value_name = "NAME", default_value = "headstart-system")]
    pub namespace: String,

    /// The account that it runs as
    #[arg(long, value_name = "NAME", default_value = "headstart")]
    pub service_account: String,

    /// Where the dry run of a pod is tried; a namespace that the webhook is asked about
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub probe_namespace: String,

    /// Form of the output
    #[arg(short, long, value_name = "FORM", default_value = "text")]
    pub output: Output,
}

/// Form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// A line for each check.
    Text,
    /// One object, for scripts: a stable interface.
    Json,
}

/// Why the cluster is not fit, or can't be asked at all.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// There is no cluster to ask.
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigError),
    /// Some checks have failed.
    #[error("{failed} of {checks} checks have failed")]
    Unfit {
        /// How many.
        failed: usize,
        /// Of how many.
        checks: usize,
    },
}

/// What a check has come to; the worst is the greatest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// As it should be.
    Ok,
    /// It works, but not for everything.
    Warning,
    /// Boosts don't work, or would do harm.
    Failed,
}

/// What a check has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How it is.
    pub outcome: Outcome,
    /// What was seen.
    pub detail: String,
    /// What to do about it; none where there is nothing to do.
    pub advice: Option<String>,
}

impl Finding {
    fn ok(detail: impl Into<String>) -> Self {
        Self {
            outcome: Outcome::Ok,
            detail: detail.into(),
            advice: None,
        }
    }

    fn warning(detail: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            outcome: Outcome::Warning,
            detail: detail.into(),
            advice: Some(advice.into()),
        }
    }

    fn failed(detail: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            outcome: Outcome::Failed,
            ..Self::warning(detail, advice)
        }
    }

    /// One finding of several: what is not as it should be, where anything isn't.
    fn all(mut findings: Vec<Self>) -> Self {
        let worst = findings.iter().map(|finding| finding.outcome).max();
        let outcome = worst.unwrap_or(Outcome::Ok);
        if outcome > Outcome::Ok {
            findings.retain(|finding| finding.outcome > Outcome::Ok);
        }
        let (mut details, mut advice) = (Vec::new(), Vec::new());
        for finding in findings {
            details.push(finding.detail);
            advice.extend(finding.advice);
        }
        // The same remedy may be good for several.
        let mut seen = Vec::new();
        advice.retain(|text| {
            let is_new = !seen.contains(text);
            seen.push(text.clone());
            is_new
        });
        Self {
            outcome,
            detail: details.join("; "),
            advice: (!advice.is_empty()).then(|| advice.join("; ")),
        }
    }
}

/// All checks, in the order in which they are printed.
#[derive(Clone, Debug)]
pub struct Report(Vec<(&'static str, Finding)>);

impl Report {
    /// Whether no check has failed.
    ///
    /// # Errors
    /// When one has.
    pub fn verdict(&self) -> Result<(), CheckError> {
        let failed = |(_, finding): &&(_, Finding)| finding.outcome == Outcome::Failed;
        match self.0.iter().filter(failed).count() {
            0 => Ok(()),
            failed => Err(CheckError::Unfit {
                failed,
                checks: self.0.len(),
            }),
        }
    }

    /// What to print.
    #[must_use]
    pub fn print(&self, output: Output) -> String {
        match output {
            Output::Text => self.text(),
            Output::Json => self.json(),
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (name, finding) in &self.0 {
            let outcome = match finding.outcome {
                Outcome::Ok => "ok",
                Outcome::Warning => "warn",
                Outcome::Failed => "FAIL",
            };
            let advice = finding.advice.as_ref();
            let advice = advice.map_or(String::new(), |advice| format!("  → {advice}"));
            let line = format!("{outcome:<6}{name:<12}{}{advice}", finding.detail);
            // The API server's messages may have several.
            let line = line.split(['\n', '\r']).collect::<Vec<_>>().join(" ");
            writeln!(text, "{line}").expect("writing to a string does not fail");
        }
        text
    }

    /// Its fields are an interface: see `docs/operate.md`.
    fn json(&self) -> String {
        let checks = self.0.iter().map(|(name, finding)| {
            let outcome = match finding.outcome {
                Outcome::Ok => "Ok",
                Outcome::Warning => "Warning",
                Outcome::Failed => "Failed",
            };
            let (detail, advice) = (&finding.detail, &finding.advice);
            json!({"name": name, "outcome": outcome, "detail": detail, "advice": advice})
        });
        let checks: Vec<_> = checks.collect();
        let value = json!({"fit": self.verdict().is_ok(), "checks": checks});
        format!("{value}\n")
    }
}

/// Makes all checks.
///
/// # Errors
/// When there is no cluster to ask. That one can't be asked is no error: its checks fail.
pub async fn run(args: &CheckArgs) -> Result<Report, CheckError> {
    let mut config = kubeconfig::infer().await?;
    config.connect_timeout = Some(DEADLINE);
    let client = kubeconfig::client(config)?;
    let deployment = cluster::read_deployment(&client, args).await;
    let told = cluster::Told::of(deployment.as_ref());
    let checks = [
        ("version", cluster::version(&client).boxed()),
        ("resize", cluster::resize(&client).boxed()),
        ("crds", crds::check(&client).boxed()),
        ("rights", rights::check(&client, args, told).boxed()),
        ("policies", policies::check(&client, args, told).boxed()),
        (
            "deployment",
            cluster::deployment(&client, args, deployment, told).boxed(),
        ),
        ("webhook", webhook::check(&client, args).boxed()),
        ("nodes", cluster::nodes(&client).boxed()),
        ("upstream", cluster::upstream(&client, told).boxed()),
    ];
    let checks = checks.map(|(name, check)| check.map(move |finding| (name, finding)));
    Ok(Report(join_all(checks).await))
}

/// Waits for an answer. Without one the check has failed, and the finding says why: which right the caller lacks, for one.
async fn ask<T>(
    verb: &str,
    what: &str,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, Finding> {
    match timeout(DEADLINE, request).await {
        Ok(answer) => answer.map_err(|error| trouble(verb, what, &error)),
        Err(_) => Err(Finding::failed(
            format!("no answer to {verb} {what} within {DEADLINE:?}"),
            "look at the API server, and try again",
        )),
    }
}

fn trouble(verb: &str, what: &str, error: &kube::Error) -> Finding {
    // Admission refuses with the same code, and names no verb.
    let lacks_right = |status: &kube::core::Status| {
        status.is_forbidden() && status.message.contains(&format!("cannot {verb} "))
    };
    match error {
        kube::Error::Api(status) if lacks_right(status) => Finding::failed(
            format!("you may not {verb} {what}"),
            format!("you need the right to {verb} {what}"),
        ),
        error => {
            let text = match error {
                // Its chain would repeat the whole status.
                kube::Error::Api(status) => status.message.clone(),
                error => Chain(error).to_string(),
            };
            Finding::failed(
                format!("{verb} {what}: {text}"),
                "look at the API server, and try again",
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn of_several_findings_the_worst_counts_and_what_is_well_is_not_told() {
        let well = Finding::ok("a is there");
        let warning = Finding::warning("b is old", "apply");
        let failed = Finding::failed("c is gone", "apply");
        assert_eq!(
            Finding::all(vec![well.clone(), Finding::ok("d is there")]),
            Finding::ok("a is there; d is there")
        );
        assert_eq!(
            Finding::all(vec![well.clone(), warning.clone()]),
            Finding::warning("b is old", "apply")
        );
        assert_eq!(
            Finding::all(vec![warning, well, failed]),
            Finding::failed("b is old; c is gone", "apply")
        );
    }

    #[test]
    fn a_warning_is_fit_and_a_failure_is_not() {
        let warning = ("nodes", Finding::warning("old", "mend"));
        let report = Report(vec![("version", Finding::ok("v1.36.0")), warning]);
        assert!(report.verdict().is_ok());
        assert_eq!(
            report.text(),
            "ok    version     v1.36.0\nwarn  nodes       old  → mend\n"
        );
        let failed = ("webhook", Finding::failed("a\nb", "mend"));
        let report = Report([report.0, vec![failed]].concat());
        assert!(matches!(
            report.verdict(),
            Err(CheckError::Unfit {
                failed: 1,
                checks: 3
            })
        ));
        assert!(report.text().ends_with("FAIL  webhook     a b  → mend\n"));
        assert_eq!(
            report.json(),
            r#"{"fit":false,"checks":[{"name":"version","outcome":"Ok","detail":"v1.36.0","advice":null},{"name":"nodes","outcome":"Warning","detail":"old","advice":"mend"},{"name":"webhook","outcome":"Failed","detail":"a\nb","advice":"mend"}]}"#
                .to_owned()
                + "\n"
        );
    }

    #[test]
    fn a_right_that_the_caller_lacks_is_named() {
        let refused = |message: &str| {
            let status = Status::failure(message, "Forbidden").with_code(403);
            trouble(
                "create",
                "pods in default",
                &kube::Error::Api(Box::new(status)),
            )
        };
        let right = refused(r#"pods is forbidden: User "u" cannot create resource "pods""#);
        assert_eq!(
            right,
            Finding::failed(
                "you may not create pods in default",
                "you need the right to create pods in default"
            )
        );
        let quota = refused("exceeded quota: q");
        assert_eq!(quota.detail, "create pods in default: exceeded quota: q");
    }
}
