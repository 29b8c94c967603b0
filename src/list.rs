//! `headstart list`: which pods are boosted now, with the rights of whoever asks. Needs no operator, and no view.
//!
//! The same objects and the same columns as the view has, made of the pods and the boosts that the API server shows.

use std::{fmt::Debug, sync::Arc, time::Duration};

use chrono::{DateTime, Utc};
use clap::{Args, ValueEnum};
use kube::{
    Api, Client, Resource,
    api::ListParams,
    core::{DeserializeGuard, NamespaceResourceScope},
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

use crate::{
    api::{BOOST_KEY, BoostObject, ClusterStartupCPUBoost, Pod, StartupCPUBoost},
    boosts,
    domain::{
        boosted::{Boosted, Phase},
        end::EndSettings,
        policy::{BoostKind, Policy},
        raise,
        snapshot::BoostIndex,
    },
    error::Chain,
    kubeconfig::{self, KubeconfigError},
    view::object::{Object, ObjectList, Row},
};

/// Objects in one page of a list.
const PAGE: u32 = 500;
/// Why an output is never lost.
const WRITTEN: &str = "texts and numbers can be written";
/// How long reading all pages of something may take.
const DEADLINE: Duration = Duration::from_secs(60);

/// Flags of `headstart list`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  headstart list                        boosted pods of the namespace that your kubeconfig names
  headstart list -A -o wide             of all namespaces, with what each container has
  headstart list -n shop --boost fast   those that one boost has made
  headstart list -A --exit-code         for scripts: 3 when a boost can't be taken back

LENT is what the CPU requests have beyond their originals, or the node has not given back of it; DUE is when it is taken back at the latest as far as is known now.
The phases:
  Active      the boost is not due
  Reverting   it is due, or resized back and not finished
  Stuck       the node does not do the resize, or it was due a minute ago: see the pod's Events
  Orphaned    its boost object is gone or invalid; it ends by the pod's own record
  Unreadable  the record is destroyed: headstart revert

The exit status is 0, also when no pod is boosted; 1 when the cluster can't be asked; 2 for a mistake in the command line; and
with --exit-code 3 when a boost that is listed is Stuck or Unreadable. It takes the right to list pods; boosts that you may not
list are known by the pods' records alone, and none is called Orphaned then.")]
pub struct ListArgs {
    /// Their namespace [default: the one that your kubeconfig names]
    #[arg(short, long, value_name = "NAME", conflicts_with = "all_namespaces")]
    pub namespace: Option<String>,

    /// All namespaces
    #[arg(short = 'A', long)]
    pub all_namespaces: bool,

    /// Only pods that the boost of this name has made
    #[arg(long, value_name = "NAME")]
    pub boost: Option<String>,

    /// Form of the output
    #[arg(short, long, value_name = "FORM", default_value = "table")]
    pub output: Output,

    /// End with status 3 when a boost that is listed is Stuck or Unreadable
    #[arg(long)]
    pub exit_code: bool,
}

/// Form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Table,
    /// With more columns.
    Wide,
    /// One object, a BoostedPodList: a stable interface.
    Json,
    /// The same.
    Yaml,
}

/// Why nothing is listed.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// There is no cluster to ask.
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigError),
    /// The pods can't be read.
    #[error("the pods could not be read: {0}")]
    Pods(String),
}

/// What there is to print, and whether somebody should look at it.
#[derive(Clone, Debug)]
pub struct Listed {
    /// For the standard output.
    pub text: String,
    /// For the standard error.
    pub note: Option<&'static str>,
    /// Whether a boost is Stuck or Unreadable.
    pub needs_help: bool,
}

/// Lists boosted pods.
///
/// # Errors
/// When the pods can't be read.
pub async fn run(args: &ListArgs) -> Result<Listed, ListError> {
    let config = kubeconfig::infer().await?;
    let namespace = args.namespace.as_ref().unwrap_or(&config.default_namespace);
    let namespace = (!args.all_namespaces).then(|| namespace.clone());
    let client = kubeconfig::client(config)?;
    let label = match &args.boost {
        Some(boost) => format!("{BOOST_KEY}={boost}"),
        None => BOOST_KEY.to_owned(),
    };
    let params = ListParams::default().labels(&label);
    let pods: Api<Pod> = api(&client, namespace.as_deref());
    let (pods, boosts) = tokio::join!(
        in_time(&pods, params),
        Known::read(&client, namespace.as_deref())
    );
    let now = Utc::now();
    let pods = pods.map_err(ListError::Pods)?;
    let in_force = pods.iter().filter(|pod| !raise::rests(pod));
    let items: Vec<_> = in_force.map(|pod| boosts.shown(pod, now)).collect();
    let is_trouble =
        |item: &Object<Boosted>| matches!(item.status.phase, Phase::Stuck | Phase::Unreadable);
    Ok(Listed {
        needs_help: items.iter().any(is_trouble),
        note: items.is_empty().then_some("no pod is boosted\n"),
        text: print(items, args, now),
    })
}

fn api<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// All that a list has, page by page.
///
/// # Errors
/// When a page can't be read.
pub(crate) async fn pages<K>(api: &Api<K>, params: ListParams) -> kube::Result<Vec<K>>
where
    K: Clone + Debug + DeserializeOwned,
{
    let (mut params, mut items) = (params.limit(PAGE), Vec::new());
    loop {
        let page = api.list(&params).await?;
        items.extend(page.items);
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(items);
        }
    }
}

async fn in_time<K>(api: &Api<K>, params: ListParams) -> Result<Vec<K>, String>
where
    K: Clone + Debug + DeserializeOwned,
{
    match timeout(DEADLINE, pages(api, params)).await {
        Ok(Ok(items)) => Ok(items),
        // Its chain would repeat the whole status.
        Ok(Err(kube::Error::Api(status))) => Err(status.message.clone()),
        Ok(Err(error)) => Err(Chain(&error).to_string()),
        Err(_) => Err(format!("no answer within {DEADLINE:?}")),
    }
}

/// The boosts, as far as the caller may read them.
struct Known {
    index: BoostIndex,
    /// The kinds that could be read.
    kinds: Vec<BoostKind>,
}

impl Known {
    async fn read(client: &Client, namespace: Option<&str>) -> Self {
        let own: Api<DeserializeGuard<StartupCPUBoost>> = api(client, namespace);
        let wide = Api::<DeserializeGuard<ClusterStartupCPUBoost>>::all(client.clone());
        let (own, wide) = tokio::join!(policies(&own), policies(&wide));
        let mut known = Self {
            index: BoostIndex::default(),
            kinds: Vec::new(),
        };
        let mut all = Vec::new();
        for (kind, policies) in [(BoostKind::Namespaced, own), (BoostKind::Cluster, wide)] {
            if let Ok(policies) = policies {
                known.kinds.push(kind);
                all.extend(policies);
            }
        }
        known.index = BoostIndex::new(all);
        known
    }

    fn shown(&self, pod: &Pod, now: DateTime<Utc>) -> Object<Boosted> {
        let policy = self.index.of_pod(pod).map(Arc::as_ref);
        let mut boosted = Boosted::of(pod, policy, EndSettings::default(), now);
        let is_known = boosted
            .boost
            .kind
            .is_none_or(|kind| self.kinds.contains(&kind));
        if boosted.phase == Phase::Orphaned && !is_known {
            boosted.phase = Phase::Active;
        }
        Object::boosted_pod(pod, boosted)
    }
}

/// What the boosts of a kind compile to, each with its namespace. Those that are invalid are none.
async fn policies<K>(api: &Api<DeserializeGuard<K>>) -> Result<Vec<(String, Arc<Policy>)>, String>
where
    K: BoostObject + Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let objects = in_time(api, ListParams::default()).await?;
    let read = objects.into_iter().map(boosts::read);
    let policies =
        read.filter_map(|((namespace, _), stored)| Some((namespace, stored.policy.ok()?)));
    Ok(policies.collect())
}

fn print(items: Vec<Object<Boosted>>, args: &ListArgs, now: DateTime<Utc>) -> String {
    match args.output {
        Output::Table | Output::Wide if items.is_empty() => String::new(),
        Output::Table => table(&items, args.all_namespaces, false, now),
        Output::Wide => table(&items, args.all_namespaces, true, now),
        Output::Json => serde_json::to_string_pretty(&value(items)).expect(WRITTEN) + "\n",
        Output::Yaml => serde_saphyr::to_string(&value(items)).expect(WRITTEN),
    }
}

fn value(items: Vec<Object<Boosted>>) -> Value {
    serde_json::to_value(ObjectList::boosted_pods(items)).expect(WRITTEN)
}

/// As kubectl prints tables.
fn table(
    items: &[Object<Boosted>],
    with_namespace: bool,
    is_wide: bool,
    now: DateTime<Utc>,
) -> String {
    let columns = || {
        Boosted::COLUMNS
            .iter()
            .filter(|column| is_wide || !column.2)
    };
    let head = ["Namespace", "Name"].into_iter();
    let head = head.chain(columns().map(|column| column.0));
    let mut rows = vec![head.map(str::to_uppercase).collect::<Vec<_>>()];
    rows.extend(items.iter().map(|item| {
        let place = [&item.metadata.namespace, &item.metadata.name];
        let cells = item.status.cells(now).into_iter().zip(Boosted::COLUMNS);
        let cells = cells.filter(|(_, column)| is_wide || !column.2);
        place
            .into_iter()
            .cloned()
            .chain(cells.map(|(cell, _)| cell))
            .collect()
    }));
    if !with_namespace {
        for row in &mut rows {
            row.remove(0);
        }
    }
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths);
        let cells = cells.map(|(cell, width)| format!("{cell:<width$}   "));
        cells.collect::<String>().trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}
