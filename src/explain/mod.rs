//! `headstart explain`: what would happen to this pod, and why.
//!
//! For a new pod it asks the same [`admit`] as the webhook, of the same snapshot: made of files, or of what the cluster has
//! now. For a pod that exists and is boosted it asks what the sweeper asks. It writes nothing anywhere.

mod cluster;
mod end;
mod objects;
mod print;

use std::{path::PathBuf, sync::Arc};

use chrono::{DateTime, Utc};
use clap::{Args, ValueEnum};

pub use self::{cluster::ClusterError, objects::ObjectError};
use self::{
    objects::{NewPod, Objects},
    print::Explanation,
};
use crate::{
    config::AdmissionArgs,
    domain::{admission::admit, patch, snapshot::Snapshot},
};

/// Flags of `headstart explain`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Without any of --boost, --limit-range, --quota, --node, --namespace and --offline the cluster is asked, with your own rights.
A file may hold several documents; - is the standard input. Pods are taken as the webhook would get them: the API server
first sets requests that are absent to the limits, and the defaults of LimitRanges.

  headstart explain --pod pod.yaml
  headstart explain --boost boost.yaml --pod pod.yaml --limit-range limits.yaml
  kubectl get pod web-0 -o yaml | headstart explain --boost boost.yaml --pod - -o json")]
pub struct ExplainArgs {
    /// The pods, or workloads whose pods are meant
    #[arg(long, value_name = "FILE", required = true)]
    pub pod: Vec<PathBuf>,

    /// Boosts of both kinds
    #[arg(long, value_name = "FILE")]
    pub boost: Vec<PathBuf>,

    /// LimitRanges
    #[arg(long, value_name = "FILE")]
    pub limit_range: Vec<PathBuf>,

    /// ResourceQuotas, with what is used of them
    #[arg(long, value_name = "FILE")]
    pub quota: Vec<PathBuf>,

    /// Nodes
    #[arg(long, value_name = "FILE")]
    pub node: Vec<PathBuf>,

    /// Namespaces, for their labels
    #[arg(long = "namespace", value_name = "FILE")]
    pub namespace_files: Vec<PathBuf>,

    /// Ask no cluster, even if no file but the pod's is given
    #[arg(long)]
    pub offline: bool,

    /// Namespace of objects that name none
    #[arg(short = 'n', value_name = "NAME", default_value = "default")]
    pub default_namespace: String,

    /// Take pods that exist and carry marks of a boost for new ones, too
    #[arg(long)]
    pub as_new: bool,

    /// The present: dates the record, and what is due by then
    #[arg(long, value_name = "RFC 3339")]
    pub now: Option<DateTime<Utc>>,

    /// Form of the output
    #[arg(short, long, value_name = "FORM", default_value = "text")]
    pub output: Output,

    /// What the operator's flags say; they are read from the same variables
    #[command(flatten)]
    pub admission: AdmissionArgs,
}

/// Form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// One object a pod, for scripts: a stable interface.
    Json,
}

/// Why nothing can be explained.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// A file is not what it should be.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// The cluster does not tell.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// There is no pod in the files.
    #[error("--pod names no pod")]
    NoPod,
}

/// Explains, and returns what to print.
///
/// # Errors
/// When a file can't be read or the cluster can't be asked. A boost that is invalid is no error: it affects nothing else.
pub async fn run(args: &ExplainArgs) -> Result<String, ExplainError> {
    let mut objects = Objects::new(&args.default_namespace);
    let files = [
        &args.pod,
        &args.boost,
        &args.limit_range,
        &args.quota,
        &args.node,
        &args.namespace_files,
    ];
    for file in files.into_iter().flatten() {
        objects.read_file(file)?;
    }
    if objects.pods.is_empty() {
        return Err(ExplainError::NoPod);
    }
    let alone = files.into_iter().flatten().count() == args.pod.len();
    if alone && !args.offline && objects.has_only_pods() {
        match cluster::read(&mut objects).await {
            // A record is enough to tell how a boost ends.
            Err(ClusterError::Kubeconfig(_)) if objects.all_exist() => {}
            read => read?,
        }
    }
    let snapshot = objects.snapshot();
    let now = args.now.unwrap_or_else(Utc::now);
    let explained = objects.pods.iter().map(|pod| {
        if end::concerns(&pod.pod) && !args.as_new {
            let policy = snapshot.boosts.of_pod(&pod.pod).map(Arc::as_ref);
            let end = end::explain(pod, policy, args.admission.settings().end, now);
            return match args.output {
                Output::Json => end::json(&end),
                Output::Text => end::text(&end),
            };
        }
        let explanation = explain(&snapshot, args, pod, now);
        match args.output {
            Output::Json => print::json(&explanation),
            Output::Text => print::text(&explanation, &objects),
        }
    });
    let separator = match args.output {
        Output::Json => "",
        Output::Text => "\n",
    };
    Ok(explained.collect::<Vec<_>>().join(separator))
}

fn explain<'a>(
    snapshot: &'a Snapshot,
    args: &ExplainArgs,
    new: &'a NewPod,
    now: DateTime<Utc>,
) -> Explanation<'a> {
    let labels = new.pod.metadata.labels.as_ref();
    let settings = args.admission.settings();
    let admission = admit(snapshot, settings, &new.namespace, &new.pod, now);
    let candidates = snapshot.candidates(&new.namespace, labels);
    Explanation {
        pod: new,
        candidates: candidates.map(Arc::as_ref).collect(),
        old_node: snapshot.nodes.too_old_for(&new.pod),
        patch: patch::admission(&new.pod, &admission),
        admission,
    }
}
