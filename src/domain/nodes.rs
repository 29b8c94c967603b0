//! What the nodes allow: how large a pod fits anywhere, and where it could never be resized back.

use super::quantity::MilliCpu;
use crate::api::{Labels, Node, Pod, Taint, Toleration};

/// In-place resize is on by default from this minor version of Kubernetes 1 on.
const OLDEST_MINOR: u32 = 33;

/// The nodes of the cluster, as far as they bound a boost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
    /// The most that any known node can give to pods; without nodes there is no bound.
    pub largest: Option<MilliCpu>,
    /// Schedulable nodes whose kubelet can't resize, by name.
    old: Vec<OldNode>,
}

/// What is kept of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeFacts {
    allocatable: Option<MilliCpu>,
    old: Option<OldNode>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct OldNode {
    name: String,
    labels: Labels,
    /// Those that keep pods away.
    taints: Vec<Taint>,
}

impl NodeFacts {
    /// Reads a node. Windows nodes count for nothing: pods for them are never boosted.
    #[must_use]
    pub fn new(node: &Node) -> Self {
        if is_windows(node) {
            return Self {
                allocatable: None,
                old: None,
            };
        }
        let is_old =
            minor(&node.status.node_info.kubelet_version).is_some_and(|minor| minor < OLDEST_MINOR);
        let taints = node.spec.taints.iter();
        let old = (is_old && !node.spec.unschedulable).then(|| OldNode {
            name: node.metadata.name.clone().unwrap_or_default(),
            labels: node.metadata.labels.clone().unwrap_or_default(),
            taints: taints
                .filter(|taint| taint.effect != "PreferNoSchedule")
                .cloned()
                .collect(),
        });
        let allocatable = node.status.allocatable.cpu.as_deref();
        Self {
            allocatable: allocatable.and_then(|text| text.parse().ok()),
            old,
        }
    }
}

impl Nodes {
    /// All nodes together.
    pub fn new<'a>(nodes: impl IntoIterator<Item = &'a NodeFacts>) -> Self {
        let mut all = Self::default();
        for node in nodes {
            all.largest = all.largest.max(node.allocatable);
            all.old.extend(node.old.clone());
        }
        all
    }

    /// The name of a node that the pod could land on, and that could never take its boost back.
    ///
    /// Judged by the node that the pod names, its nodeSelector and its tolerations. Affinity is left out: it can only
    /// narrow the choice, so that a pod may go without a boost that it could have had.
    #[must_use]
    pub fn too_old_for(&self, pod: &Pod) -> Option<&str> {
        let spec = &pod.spec;
        let lands = |node: &&OldNode| {
            let chosen = spec
                .node_name
                .as_deref()
                .is_none_or(|name| name.is_empty() || name == node.name);
            let mut wanted = spec.node_selector.iter();
            chosen
                && wanted.all(|(key, value)| node.labels.get(key) == Some(value))
                && node.taints.iter().all(|taint| {
                    spec.tolerations
                        .iter()
                        .any(|toleration| tolerates(toleration, taint))
                })
        };
        self.old.iter().find(lands).map(|node| node.name.as_str())
    }
}

fn is_windows(node: &Node) -> bool {
    let labelled = node
        .metadata
        .labels
        .as_ref()
        .and_then(|labels| labels.get("kubernetes.io/os"));
    node.status.node_info.operating_system == "windows"
        || labelled.is_some_and(|os| os == "windows")
}

/// The minor version of a kubelet of Kubernetes 1, where it can be read.
fn minor(version: &str) -> Option<u32> {
    let rest = version.trim_start_matches('v').strip_prefix("1.")?;
    let end = rest
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(rest.len());
    rest[..end].parse().ok()
}

/// As `ToleratesTaint` of Kubernetes; an operator that is unknown here counts as tolerating.
fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.is_empty() || toleration.effect == taint.effect;
    let key = toleration.key.is_empty() || toleration.key == taint.key;
    let value = match toleration.operator.as_str() {
        "" | "Equal" => !toleration.key.is_empty() && toleration.value == taint.value,
        _ => true,
    };
    effect && key && value
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn facts(node: Value) -> NodeFacts {
        NodeFacts::new(&serde_json::from_value(node).expect("a node"))
    }

    fn old(taints: &Value, unschedulable: bool) -> Nodes {
        Nodes::new(&[facts(json!({
            "metadata": {"name": "old", "labels": {"pool": "a"}},
            "spec": {"taints": taints, "unschedulable": unschedulable},
            "status": {"allocatable": {"cpu": "4"}, "nodeInfo": {"kubeletVersion": "v1.32.9-gke.1", "operatingSystem": "linux"}},
        }))])
    }

    fn lands(nodes: &Nodes, spec: &Value) -> bool {
        let mut pod = json!({"metadata": {}, "spec": {"containers": []}});
        pod["spec"]
            .as_object_mut()
            .expect("a map")
            .extend(spec.as_object().expect("a map").clone());
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        nodes.too_old_for(&pod).is_some()
    }

    #[test]
    fn versions() {
        for (version, expected) in [
            ("v1.31.4", Some(31)),
            ("v1.33.0-rc.1+k3s1", Some(33)),
            ("1.9", Some(9)),
            ("v2.0.0", None),
            ("", None),
        ] {
            assert_eq!(minor(version), expected, "{version}");
        }
    }

    #[test]
    fn an_old_node_matters_to_pods_that_could_land_on_it() {
        let open = old(&json!(null), false);
        assert!(lands(&open, &json!({})));
        assert!(lands(&open, &json!({"nodeSelector": {"pool": "a"}})));
        assert!(!lands(&open, &json!({"nodeSelector": {"pool": "b"}})));
        assert!(!lands(&open, &json!({"nodeName": "new"})));
        assert!(!lands(&old(&json!(null), true), &json!({})));

        let tainted = old(
            &json!([{"key": "k", "value": "v", "effect": "NoSchedule"}]),
            false,
        );
        assert!(!lands(&tainted, &json!({})));
        for (toleration, expected) in [
            (json!({"operator": "Exists"}), true),
            (json!({"key": "k", "operator": "Exists"}), true),
            (json!({"key": "k", "value": "v"}), true),
            (json!({"key": "k", "value": "w"}), false),
            (
                json!({"key": "k", "value": "v", "effect": "NoExecute"}),
                false,
            ),
            (json!({"key": "other", "operator": "Exists"}), false),
        ] {
            assert_eq!(
                lands(&tainted, &json!({"tolerations": [toleration]})),
                expected,
                "{toleration}"
            );
        }
        let soft = old(&json!([{"key": "k", "effect": "PreferNoSchedule"}]), false);
        assert!(lands(&soft, &json!({})));
    }

    #[test]
    fn the_largest_node_counts_and_windows_does_not() {
        let node = |cpu: &str, os: &str| {
            facts(
                json!({"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": cpu},
                "nodeInfo": {"kubeletVersion": "v1.30.0", "operatingSystem": os}}}),
            )
        };
        let nodes = Nodes::new(&[
            node("3920m", "linux"),
            node("8", "linux"),
            node("64", "windows"),
        ]);
        assert_eq!(nodes.largest, Some(MilliCpu::new(8000)));
        assert_eq!(nodes.old.len(), 2);
        assert_eq!(Nodes::new([]).largest, None);
    }
}
