//! `headstart revert`: ends boosts now, with the rights of whoever asks.
//!
//! What the sweeper does, by the same decisions and the same writes, at once and for all pods that are named: before an
//! uninstall, before going back to upstream, or for the one pod that nobody else can end. Needs no operator.

use std::time::{Duration, Instant};

use chrono::Utc;
use clap::Args;
use futures::{StreamExt, stream};
use kube::{Api, Client, api::ListParams};
use tokio::time::sleep;

use crate::{
    api::{BOOST_KEY, Pod, PodSpec},
    config::wait,
    domain::{
        end::{EndSettings, EndedBy},
        failure::Failure,
        record::{Record, State},
        revert::{Decision, Leave, Pending, Revert, decide_now},
        witness,
    },
    error::Chain,
    kubeconfig::{self, KubeconfigError},
    list::pages,
    sweeper::Writer,
};

/// Pods that are worked on at once.
const AT_ONCE: usize = 8;
/// Between two looks at a pod whose resize is under way, and after a failure that may pass.
const PAUSE: Duration = Duration::from_millis(500);

/// Flags of `headstart revert`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
  headstart revert -n shop web-0    one pod
  headstart revert -n shop          all boosted pods of a namespace
  headstart revert --all            all boosted pods of the cluster

Pods that are created afterwards are boosted again as long as the webhook is there.")]
pub struct RevertArgs {
    /// Pods; without any, all boosted pods of the namespace
    #[arg(value_name = "POD", conflicts_with = "all")]
    pub pods: Vec<String>,

    /// Their namespace
    #[arg(
        short,
        long,
        value_name = "NAME",
        required_unless_present = "all",
        conflicts_with = "all"
    )]
    pub namespace: Option<String>,

    /// All boosted pods of the cluster
    #[arg(long)]
    pub all: bool,

    /// How long to wait for each pod's kubelet: 1s to 1h
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = wait)]
    pub timeout: Duration,

    /// Where neither record nor owner tells what a pod had: drop its marks, and leave it the CPU that it has
    #[arg(long)]
    pub drop_unreadable: bool,
}

/// Why not all boosts have ended.
#[derive(Debug, thiserror::Error)]
pub enum RevertError {
    /// There is no cluster to ask.
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigError),
    /// The pods can't be read.
    #[error("the pods could not be read: {0}")]
    Pods(String),
    /// Some could not be ended.
    #[error("{failed} of {pods} boosts have not ended")]
    Failed {
        /// How many.
        failed: usize,
        /// Of how many.
        pods: usize,
    },
}

/// Ends boosts, and says what becomes of each pod.
///
/// # Errors
/// When the cluster can't be asked, or a boost has not ended.
pub async fn run(args: &RevertArgs, say: impl Fn(&str)) -> Result<(), RevertError> {
    let client = kubeconfig::client(kubeconfig::infer().await?)?;
    let writer = Writer::new(client.clone());
    let pods = find(&client, &writer, args).await?;
    if pods.is_empty() {
        say("no pod is boosted\n");
        return Ok(());
    }
    let (count, mut done, mut failed) = (pods.len(), 0, 0);
    let ends = pods.into_iter().map(|pod| {
        let writer = &writer;
        async move {
            let title = title(&pod);
            (title, End::new(writer, pod, args).run().await)
        }
    });
    let mut ends = stream::iter(ends).buffer_unordered(AT_ONCE);
    while let Some((title, end)) = ends.next().await {
        done += 1;
        let line = match end {
            Ok(what) => format!("{done}/{count} {title}: {what}\n"),
            Err(problem) => {
                failed += 1;
                format!("{done}/{count} {title}: NOT ended: {problem}\n")
            }
        };
        say(&line);
    }
    if failed > 0 {
        return Err(RevertError::Failed {
            failed,
            pods: count,
        });
    }
    Ok(())
}

fn title(pod: &Pod) -> String {
    let meta = &pod.metadata;
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    format!("{}/{}", text(&meta.namespace), text(&meta.name))
}

/// The pods that are named, or all that are boosted: by their label, and by their record where the label was lost.
async fn find(
    client: &Client,
    writer: &Writer,
    args: &RevertArgs,
) -> Result<Vec<Pod>, RevertError> {
    let api: Api<Pod> = match &args.namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    };
    let problem = |error: kube::Error| RevertError::Pods(Chain(&error).to_string());
    if !args.pods.is_empty() {
        let named = stream::iter(&args.pods).then(|name| api.get(name));
        let named: Vec<_> = named.collect().await;
        return named
            .into_iter()
            .collect::<kube::Result<_>>()
            .map_err(problem);
    }
    let params = ListParams::default().labels(BOOST_KEY);
    let mut found = pages(&api, params).await.map_err(problem)?;
    let mut next = None;
    loop {
        let page = writer
            .unclaimed(args.namespace.as_deref(), next.as_deref())
            .await
            .map_err(|failure| RevertError::Pods(failure.text().to_owned()))?;
        let lost = page.pods.into_iter().filter(|metadata| {
            let annotations = metadata.annotations.as_ref();
            let text = annotations.and_then(|annotations| annotations.get(BOOST_KEY));
            let record = text.and_then(|text| Record::read(text).ok());
            record.is_some_and(|record| record.state == State::Active)
        });
        for metadata in lost {
            let (namespace, name) = (metadata.namespace.clone(), metadata.name.clone());
            let api: Api<Pod> =
                Api::namespaced(client.clone(), namespace.as_deref().unwrap_or_default());
            let pod = api.get_opt(name.as_deref().unwrap_or_default()).await;
            found.extend(pod.map_err(problem)?);
        }
        next = page.next;
        if next.is_none() {
            return Ok(found);
        }
    }
}

/// The end of one boost.
struct End<'a> {
    writer: &'a Writer,
    args: &'a RevertArgs,
    pod: Pod,
    template: Option<PodSpec>,
    until: Instant,
}

impl<'a> End<'a> {
    fn new(writer: &'a Writer, pod: Pod, args: &'a RevertArgs) -> Self {
        Self {
            writer,
            args,
            pod,
            template: None,
            until: Instant::now() + args.timeout,
        }
    }

    /// Returns what was done, or why the boost has not ended.
    async fn run(mut self) -> Result<String, String> {
        let mut done = "was not boosted any more";
        loop {
            let written = match self.decide() {
                Decision::Revert(revert) => {
                    done = "ended";
                    match self.unannounced() {
                        // A leader that sees the values back finishes the boost, and has to know why.
                        Some(record) => self.writer.record(&self.pod, &record).await,
                        None => self.resize(&revert).await,
                    }
                }
                Decision::Finish(finish) => {
                    done = "ended";
                    self.writer.finish(&self.pod, &finish).await
                }
                Decision::Watch(pending) => {
                    self.pause_or(&describe(&pending)).await?;
                    self.writer.read(&self.pod).await
                }
                Decision::Leave(Leave::NotBoosted) => return Ok(done.to_owned()),
                Decision::Leave(Leave::Terminating) => return Ok("is being deleted".to_owned()),
                Decision::Leave(Leave::Unreadable(problem)) => {
                    match self.unreadable(&problem).await? {
                        None => continue,
                        Some(written) => {
                            done = "marks dropped; it keeps the CPU that it has";
                            written
                        }
                    }
                }
                // A boost that is ended by hand is always due, and never made again.
                Decision::Wait(_) | Decision::Raise(_) | Decision::Leave(Leave::Ended) => {
                    return Err("it is not due".to_owned());
                }
            };
            match written {
                Ok(pod) => self.pod = pod,
                Err(failure) if !self.recover(&failure).await? => {
                    return Ok("is gone".to_owned());
                }
                Err(_) => {}
            }
        }
    }

    async fn resize(&self, revert: &Revert) -> Result<Pod, Failure> {
        // Which LimitRanges there are is not known here.
        self.writer.rehearse(&self.pod, &revert.containers).await?;
        self.writer.resize(&self.pod, &revert.containers).await
    }

    /// The record as it announces what ends it, where it doesn't yet.
    fn unannounced(&self) -> Option<Record> {
        let record = Record::read(self.pod.record_text()?).ok()?;
        let announced = record.announced() == Some(EndedBy::Manual);
        (!announced).then(|| record.announcing(EndedBy::Manual))
    }

    fn decide(&self) -> Decision {
        let (settings, now) = (EndSettings::default(), Utc::now());
        let decision = decide_now(&self.pod, None, settings, now);
        match (&decision, &self.template) {
            (Decision::Leave(Leave::Unreadable(_)), Some(template)) => {
                let repaired = witness::repair(&self.pod, template, None, settings, now);
                repaired.map_or(decision, |pod| decide_now(&pod, None, settings, now))
            }
            _ => decision,
        }
    }

    /// Asks the owner for the template; where there is none, drops the marks if that is asked for.
    async fn unreadable(&mut self, problem: &str) -> Result<Option<Result<Pod, Failure>>, String> {
        if self.template.is_none() {
            match self.writer.template(&self.pod).await {
                Ok(Some(template)) => {
                    self.template = Some(template);
                    return Ok(None);
                }
                Ok(None) => {}
                Err(failure) => return Err(failure.text().to_owned()),
            }
        }
        if self.pod.claim().is_none() && self.pod.record_text().is_none() {
            return Err("it carries no record".to_owned());
        }
        if self.args.drop_unreadable {
            return Ok(Some(self.writer.drop_marks(&self.pod).await));
        }
        Err(format!(
            "its record can't be read ({problem}) and no owner tells what it had; --drop-unreadable drops its marks and leaves its CPU as it is"
        ))
    }

    /// After a failure: whether there is still a pod to go on with.
    async fn recover(&mut self, failure: &Failure) -> Result<bool, String> {
        match failure {
            Failure::Gone => return Ok(false),
            Failure::Conflict => {}
            Failure::Throttled(pause) => sleep(*pause).await,
            Failure::Transient(text) => self.pause_or(text).await?,
            Failure::MissingRight(text)
            | Failure::NotResizable(text)
            | Failure::LimitRangeDefaults(text)
            | Failure::Refused(text) => return Err(text.clone()),
        }
        match self.writer.read(&self.pod).await {
            Ok(pod) => self.pod = pod,
            Err(Failure::Gone) => return Ok(false),
            Err(failure) => self.pause_or(failure.text()).await?,
        }
        Ok(true)
    }

    /// Waits a little, unless there was enough time already.
    async fn pause_or(&self, problem: &str) -> Result<(), String> {
        if Instant::now() >= self.until {
            return Err(format!("no end within {:?}: {problem}", self.args.timeout));
        }
        sleep(PAUSE).await;
        Ok(())
    }
}

fn describe(pending: &Pending) -> String {
    match pending {
        Pending::Kubelet => "the kubelet has not done the resize".to_owned(),
        Pending::Deferred(text) => format!("the resize is Deferred: {text}"),
        Pending::Infeasible(text) => format!("the resize is Infeasible: {text}"),
        Pending::Error(text) => format!("the resize fails: {text}"),
    }
}
