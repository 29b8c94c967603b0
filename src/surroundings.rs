//! What surrounds the pods, watched on every replica: namespaces, LimitRanges, ResourceQuotas and nodes.
//!
//! Each watch keeps the little that bounds a boost, and publishes it when that changes: a node's heartbeat or a quota
//! that counts memory changes nothing.

use std::{collections::BTreeMap, fmt::Debug, sync::Arc};

use kube::{Api, Client, Resource, runtime::watcher::Event};
use serde::de::DeserializeOwned;

use crate::{
    api::{Labels, LimitRange, LimitRangeItem, Namespace, Node, ResourceQuota},
    domain::{
        limit_range::LimitRanges,
        nodes::{NodeFacts, Nodes},
        quota::Quota,
        snapshot::ByNamespace,
    },
    snapshots::Snapshots,
    watch::{Told, config, forever},
};

/// Keeps the labels of namespaces, for ever.
pub async fn keep_namespaces(client: Client, snapshots: &Snapshots) {
    let labels = |namespace: Namespace| namespace.metadata.labels.unwrap_or_default();
    // The name stands for the namespace here, as it has no other.
    let one = |labels: &BTreeMap<String, Labels>| labels.values().next().cloned().map(Arc::new);
    keep(Api::<Namespace>::all(client), labels, |known| {
        let all = by_namespace(known, one);
        snapshots.set(|parts| parts.namespaces = Some(Arc::new(all)));
    })
    .await;
}

/// Keeps the bounds of LimitRanges, for ever.
pub async fn keep_limit_ranges(client: Client, snapshots: &Snapshots) {
    let items = |range: LimitRange| range.spec.limits;
    let together = |ranges: &BTreeMap<String, Vec<LimitRangeItem>>| {
        let ranges = LimitRanges::new(ranges.values().flatten());
        Some(ranges).filter(|ranges| *ranges != LimitRanges::default())
    };
    keep(Api::<LimitRange>::all(client), items, |known| {
        let all = by_namespace(known, together);
        snapshots.set(|parts| parts.limit_ranges = Some(Arc::new(all)));
    })
    .await;
}

/// Keeps what quotas have left, for ever.
pub async fn keep_quotas(client: Client, snapshots: &Snapshots) {
    let together = |quotas: &BTreeMap<String, Quota>| {
        let bounding = quotas.values().filter(|quota| !quota.is_empty());
        let quotas: Vec<_> = bounding.cloned().collect();
        (!quotas.is_empty()).then(|| Arc::new(quotas))
    };
    let read = |quota: ResourceQuota| Quota::new(&quota);
    keep(Api::<ResourceQuota>::all(client), read, |known| {
        let all = by_namespace(known, together);
        snapshots.set(|parts| parts.quotas = Some(Arc::new(all)));
    })
    .await;
}

/// Keeps the size and age of nodes, for ever.
pub async fn keep_nodes(client: Client, snapshots: &Snapshots) {
    let read = |node: Node| NodeFacts::new(&node);
    keep(Api::<Node>::all(client), read, |known| {
        let nodes = Nodes::new(known.values().flat_map(BTreeMap::values));
        snapshots.set(|parts| parts.nodes = Some(Arc::new(nodes)));
    })
    .await;
}

/// Objects by namespace, then by name. Those of the cluster stand under their own name.
type Known<T> = BTreeMap<Arc<str>, BTreeMap<String, T>>;

/// Watches a type, keeps what `read` makes of each object, and publishes all of it when any of it has changed.
async fn keep<K, T>(api: Api<K>, read: impl Fn(K) -> T, publish: impl Fn(&Known<T>))
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
    T: Clone + PartialEq,
{
    let (mut known, mut listed) = (Known::<T>::new(), Known::<T>::new());
    forever(api, config(), |told| {
        let changed = match told {
            // Every API server has these types; an empty answer would be a mistake.
            Told::Absent => false,
            Told::Event(Event::Init) => {
                listed.clear();
                false
            }
            Told::Event(Event::InitApply(object)) => {
                insert(&mut listed, object, &read);
                false
            }
            Told::Event(Event::InitDone) => {
                known = std::mem::take(&mut listed);
                true
            }
            Told::Event(Event::Apply(object)) => insert(&mut known, object, &read),
            Told::Event(Event::Delete(object)) => remove(&mut known, &object),
        };
        if changed {
            publish(&known);
        }
    })
    .await;
}

fn by_namespace<T, D>(
    known: &Known<T>,
    together: impl Fn(&BTreeMap<String, T>) -> Option<D>,
) -> ByNamespace<D> {
    let all = known.iter();
    all.filter_map(|(namespace, objects)| Some((Arc::clone(namespace), together(objects)?)))
        .collect()
}

fn key(object: &impl Resource) -> (Arc<str>, String) {
    let meta = object.meta();
    let name = meta.name.clone().unwrap_or_default();
    (
        meta.namespace.as_deref().unwrap_or(&name).into(),
        name.clone(),
    )
}

/// Whether it is news.
fn insert<K: Resource, T: PartialEq>(
    known: &mut Known<T>,
    object: K,
    read: &impl Fn(K) -> T,
) -> bool {
    let (namespace, name) = key(&object);
    let new = read(object);
    let objects = known.entry(namespace).or_default();
    if objects.get(&name) == Some(&new) {
        return false;
    }
    objects.insert(name, new);
    true
}

fn remove<T>(known: &mut Known<T>, object: &impl Resource) -> bool {
    let (namespace, name) = key(object);
    let Some(objects) = known.get_mut(&namespace) else {
        return false;
    };
    let removed = objects.remove(&name).is_some();
    if objects.is_empty() {
        known.remove(&namespace);
    }
    removed
}
