//! What the cluster itself is, and what runs in it: version, resize, nodes, our Deployment, upstream's leftovers.

use k8s_openapi::{
    api::apps::v1::Deployment,
    apimachinery::pkg::{apis::meta::v1::APIResource, version::Info},
};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, ListParams},
};

use super::{CheckArgs, Finding, ask};
use crate::{
    api::{BOOST_KEY, Node, Pod, PodSpec, Toleration},
    config::go_bool,
    domain::nodes::{NodeFacts, Nodes},
    upstream::{self, Leftover},
};

/// In-place resize is on by default from this minor version of Kubernetes 1 on.
const OLDEST_MINOR: u32 = 33;
/// Nodes in one page of a list.
const PAGE: u32 = 500;
/// Nodes that are named.
const NAMED: usize = 10;
/// Our Deployment, as the manifests call it.
const DEPLOYMENT: &str = "headstart";

/// A flag that is on or off: its variable, and itself.
type Flag = (&'static str, &'static str);
/// Each has pods boosted that run already.
const RAISES: [Flag; 2] = [
    ("BOOST_ON_RESTART", "--boost-on-restart"),
    ("BOOST_MISSED_PODS", "--boost-missed-pods"),
];
const DRY_RUN: [Flag; 1] = [("DRY_RUN", "--dry-run")];

/// Whether an API server is too old to resize pods in place.
pub(crate) fn is_too_old(version: &Info) -> bool {
    let minor = version
        .minor
        .trim_end_matches(|c: char| !c.is_ascii_digit());
    version.major == "1" && minor.parse().unwrap_or(0) < OLDEST_MINOR
}

pub(super) async fn version(client: &Client) -> Finding {
    let version = ask("get", "/version", client.apiserver_version()).await;
    version.map_or_else(|trouble| trouble, |version| of_version(&version))
}

fn of_version(version: &Info) -> Finding {
    let text = format!("Kubernetes {}", version.git_version);
    if is_too_old(version) {
        Finding::failed(
            format!("{text}: boosts are taken back by in-place resize, which needs 1.33"),
            "upgrade the control plane and the nodes to 1.33 or newer",
        )
    } else {
        Finding::ok(text)
    }
}

pub(super) async fn resize(client: &Client) -> Finding {
    let resources = ask("get", "/api/v1", client.list_core_api_resources("v1")).await;
    resources.map_or_else(|trouble| trouble, |list| of_resources(&list.resources))
}

fn of_resources(resources: &[APIResource]) -> Finding {
    let resize = |resource: &&APIResource| resource.name == "pods/resize";
    match resources.iter().find(resize) {
        Some(resource) if resource.verbs.iter().any(|verb| verb == "patch") => {
            Finding::ok("pods/resize is served")
        }
        _ => Finding::failed(
            "the API server does not serve pods/resize: boosts could not be taken back",
            "switch the feature gate InPlacePodVerticalScaling on, in the API server and in the kubelets",
        ),
    }
}

/// What our Deployment is told to do. Where it can't be read, nothing; its own check says so.
#[derive(Clone, Copy)]
pub(super) struct Told {
    /// To boost pods that run already.
    pub(super) raises: bool,
    /// To write nothing to pods.
    pub(super) runs_dry: bool,
}

impl Told {
    pub(super) fn of(deployment: Result<&Option<DynamicObject>, &Finding>) -> Self {
        let deployment = deployment.ok().and_then(Option::as_ref);
        let is_any = |flags| deployment.is_some_and(|it| is_any_set(it, flags));
        Self {
            raises: is_any(&RAISES),
            runs_dry: is_any(&DRY_RUN),
        }
    }
}

pub(super) async fn deployment(
    client: &Client,
    args: &CheckArgs,
    deployment: Result<Option<DynamicObject>, Finding>,
    told: Told,
) -> Finding {
    let deployment = match deployment {
        Ok(deployment) => deployment,
        Err(trouble) => return trouble,
    };
    let mut findings = vec![of_deployment(deployment.as_ref(), &args.namespace)];
    if told.runs_dry {
        findings.push(dry_run(client).await);
    }
    Finding::all(findings)
}

/// What a dry run leaves as it is.
async fn dry_run(client: &Client) -> Finding {
    let resource = ApiResource::erase::<Pod>(&());
    let api = Api::<DynamicObject>::all_with(client.clone(), &resource);
    let claims = ListParams::default().labels(BOOST_KEY);
    let claims = ask("list", "pods", api.list_metadata(&claims)).await;
    claims.map_or_else(|trouble| trouble, |pods| of_dry_run(pods.items.len()))
}

fn of_dry_run(boosted: usize) -> Finding {
    let dry = "it runs with --dry-run: no pod is boosted";
    let advice = "docs/switching.md says how a trial ends";
    match boosted {
        0 => Finding::warning(dry, advice),
        _ => Finding::warning(
            format!(
                "{dry}, and it takes nothing back from the {boosted} pods that have the label of a boost"
            ),
            format!("{advice}; headstart revert --all ends boosts of an earlier run"),
        ),
    }
}

/// Our Deployment, where there is one.
pub(super) async fn read_deployment(
    client: &Client,
    args: &CheckArgs,
) -> Result<Option<DynamicObject>, Finding> {
    let namespace = &args.namespace;
    // Without its type, which would bring all of a pod's template into the binary.
    let resource = ApiResource::erase::<Deployment>(&());
    let api = Api::<DynamicObject>::namespaced_with(client.clone(), namespace, &resource);
    let what = format!("deployments.apps in {namespace}");
    ask("get", &what, api.get_opt(DEPLOYMENT)).await
}

/// Whether any of these flags is set.
fn is_any_set(deployment: &DynamicObject, flags: &[Flag]) -> bool {
    let containers = &deployment.data["spec"]["template"]["spec"]["containers"];
    let is_on = |value: &str| go_bool(value) == Ok(true);
    containers
        .as_array()
        .into_iter()
        .flatten()
        .any(|container| {
            let list = |field: &str| container[field].as_array().into_iter().flatten();
            flags.iter().any(|(variable, flag)| {
                let mut args = list("args").filter_map(|arg| arg.as_str()?.strip_prefix(flag));
                let mut env = list("env").filter(|env| env["name"] == *variable);
                args.any(|rest| rest.is_empty() || rest.strip_prefix('=').is_some_and(is_on))
                    || env.any(|env| env["value"].as_str().is_some_and(is_on))
            })
        })
}

fn of_deployment(deployment: Option<&DynamicObject>, namespace: &str) -> Finding {
    let name = format!("{namespace}/{DEPLOYMENT}");
    let Some(deployment) = deployment else {
        return Finding::failed(
            format!("there is no Deployment {name}"),
            "kubectl apply -k manifests; where it is in another namespace, give --namespace",
        );
    };
    let data = &deployment.data;
    let wanted = data["spec"]["replicas"].as_i64().unwrap_or(1);
    let ready = data["status"]["readyReplicas"].as_i64().unwrap_or(0);
    let text = format!("{ready} of {wanted} replicas of {name} are Ready");
    let look = format!(
        "kubectl -n {namespace} get pods, and kubectl -n {namespace} logs deployment/{DEPLOYMENT}: /readyz says what a replica waits for"
    );
    if ready == 0 {
        Finding::failed(format!("{text}: no pod is boosted"), look)
    } else if ready < wanted {
        Finding::warning(text, look)
    } else {
        Finding::ok(text)
    }
}

pub(super) async fn nodes(client: &Client) -> Finding {
    let api = Api::<Node>::all(client.clone());
    let mut params = ListParams::default().limit(PAGE);
    let (mut count, mut old) = (0, Vec::new());
    loop {
        let page = match ask("list", "nodes", api.list(&params)).await {
            Ok(page) => page,
            Err(trouble) => return trouble,
        };
        count += page.items.len();
        old.extend(page.items.iter().filter_map(old_kubelet));
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return of_nodes(count, &old);
        }
    }
}

/// A node with an old kubelet that pods may come to, as admission sees it.
fn old_kubelet(node: &Node) -> Option<String> {
    let spec = PodSpec {
        tolerations: vec![Toleration {
            operator: "Exists".to_owned(),
            ..Toleration::default()
        }],
        ..PodSpec::default()
    };
    let goes_everywhere = Pod {
        spec,
        ..Pod::default()
    };
    let nodes = Nodes::new(&[NodeFacts::new(node)]);
    let name = nodes.too_old_for(&goes_everywhere)?;
    Some(format!(
        "{name} ({})",
        node.status.node_info.kubelet_version
    ))
}

fn of_nodes(count: usize, old: &[String]) -> Finding {
    if old.is_empty() {
        return Finding::ok(format!(
            "of {count} nodes none that takes pods has a kubelet older than 1.33"
        ));
    }
    let named = old[..old.len().min(NAMED)].join(", ");
    let more = match old.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Finding::warning(
        format!(
            "{} of {count} nodes have a kubelet older than 1.33: {named}{more}. Pods that could land there are not boosted (OldKubelet)",
            old.len()
        ),
        "upgrade them, cordon them, or taint them against pods that shall be boosted",
    )
}

pub(super) async fn upstream(client: &Client, told: Told) -> Finding {
    let mut findings = Vec::new();
    let mut found = Vec::new();
    for kind in upstream::Kind::ALL {
        let what = match kind {
            upstream::Kind::MutatingWebhookConfiguration => {
                "mutatingwebhookconfigurations.admissionregistration.k8s.io"
            }
            upstream::Kind::ValidatingWebhookConfiguration => {
                "validatingwebhookconfigurations.admissionregistration.k8s.io"
            }
            upstream::Kind::Deployment => "deployments.apps in all namespaces",
        };
        match ask("list", what, upstream::find(client, kind)).await {
            Ok(leftovers) => found.extend(leftovers),
            Err(trouble) => findings.push(trouble),
        }
    }
    findings.push(of_leftovers(&found, told.runs_dry));
    Finding::all(findings)
}

fn of_leftovers(found: &[Leftover], is_dry: bool) -> Finding {
    if found.is_empty() {
        return Finding::ok("nothing of kube-startup-cpu-boost is installed");
    }
    let join = |texts: Vec<String>, with: &str| texts.join(with);
    let names = join(found.iter().map(Leftover::to_string).collect(), ", ");
    let removals = format!(
        "{}; never delete its CustomResourceDefinition: all boosts would go with it",
        join(found.iter().map(Leftover::removal).collect(), "; ")
    );
    if is_dry {
        return Finding::warning(
            format!("kube-startup-cpu-boost is installed, beside a dry run: {names}"),
            format!("when the dry run ends: {removals}"),
        );
    }
    Finding::failed(
        format!("kube-startup-cpu-boost is installed too, and would boost the same pods: {names}"),
        removals,
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{super::Outcome, *};
    use crate::upstream::Kind;

    #[test]
    fn raises_are_asked_for_by_variables_and_by_flags() {
        let is_raising = |container: serde_json::Value| {
            let template = json!({"spec": {"containers": [container]}});
            let deployment = json!({"metadata": {}, "spec": {"template": template}});
            let deployment = serde_json::from_value(deployment).expect("a Deployment");
            is_any_set(&deployment, &RAISES)
        };
        let env = |value: &str| json!({"env": [{"name": "BOOST_MISSED_PODS", "value": value}]});
        assert!(is_raising(env("true")) && is_raising(env("1")));
        assert!(!is_raising(env("false")) && !is_raising(json!({"args": ["run"]})));
        assert!(is_raising(json!({"args": ["run", "--boost-on-restart"]})));
        assert!(!is_raising(json!({"args": ["--boost-on-restart=false"]})));
    }

    #[test]
    fn versions_from_1_33_on_are_fit() {
        for (major, minor, old) in [
            ("1", "32", true),
            ("1", "33", false),
            ("1", "36+", false),
            ("1", "9+", true),
            ("1", "", true),
            ("2", "0", false),
        ] {
            let version = Info {
                major: major.to_owned(),
                minor: minor.to_owned(),
                ..Info::default()
            };
            assert_eq!(is_too_old(&version), old, "{major}.{minor}");
            let failed = of_version(&version).outcome == Outcome::Failed;
            assert_eq!(failed, old, "{major}.{minor}");
        }
    }

    #[test]
    fn resize_must_be_served_for_patch() {
        let resource = |name: &str, verbs: &[&str]| APIResource {
            name: name.to_owned(),
            verbs: verbs.iter().map(|verb| (*verb).to_owned()).collect(),
            ..APIResource::default()
        };
        let pods = || resource("pods", &["create", "patch"]);
        let outcome = |list: &[APIResource]| of_resources(list).outcome;
        let resize = resource("pods/resize", &["get", "patch", "update"]);
        assert_eq!(outcome(&[pods(), resize]), Outcome::Ok);
        assert_eq!(outcome(&[pods()]), Outcome::Failed);
        let resize = resource("pods/resize", &["get"]);
        assert_eq!(outcome(&[pods(), resize]), Outcome::Failed);
    }

    #[test]
    fn replicas_must_be_ready() {
        let outcome = |replicas: Value, ready: Value| {
            let deployment = json!({"spec": {"replicas": replicas, "selector": {}, "template": {}},
                "status": {"readyReplicas": ready}});
            let deployment = serde_json::from_value(deployment).expect("a Deployment");
            of_deployment(Some(&deployment), "ns").outcome
        };
        assert_eq!(outcome(json!(3), json!(3)), Outcome::Ok);
        assert_eq!(outcome(json!(3), json!(4)), Outcome::Ok);
        assert_eq!(outcome(json!(3), json!(2)), Outcome::Warning);
        assert_eq!(outcome(json!(3), json!(null)), Outcome::Failed);
        assert_eq!(outcome(json!(0), json!(null)), Outcome::Failed);
        assert_eq!(outcome(json!(null), json!(1)), Outcome::Ok);
        assert_eq!(of_deployment(None, "ns").outcome, Outcome::Failed);
    }

    #[test]
    fn old_kubelets_are_named_where_pods_may_come_to_them() {
        let node = |version: &str, spec: Value| {
            let node = json!({"metadata": {"name": "n"}, "spec": spec,
                "status": {"nodeInfo": {"kubeletVersion": version, "operatingSystem": "linux"}}});
            old_kubelet(&serde_json::from_value(node).expect("a node"))
        };
        let taints = json!({"taints": [{"key": "k", "effect": "NoSchedule"}]});
        let old = Some("n (v1.32.1)".to_owned());
        assert_eq!(node("v1.32.1", json!({})), old);
        assert_eq!(node("v1.32.1", taints), old);
        assert_eq!(node("v1.32.1", json!({"unschedulable": true})), None);
        assert_eq!(node("v1.33.0", json!({})), None);

        assert_eq!(of_nodes(2, &[]).outcome, Outcome::Ok);
        let names: Vec<_> = (0..12).map(|n| format!("node-{n} (v1.30.0)")).collect();
        let many = of_nodes(20, &names);
        assert_eq!(many.outcome, Outcome::Warning);
        assert!(many.detail.starts_with("12 of 20 nodes"), "{many:?}");
        assert!(
            many.detail.contains("node-9 (v1.30.0) and 2 more."),
            "{many:?}"
        );
    }

    #[test]
    fn each_leftover_has_its_command() {
        assert_eq!(of_leftovers(&[], false).outcome, Outcome::Ok);
        let leftover = |kind, namespace: Option<&str>, name: &str| Leftover {
            kind,
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
        };
        let leftovers = [
            leftover(Kind::MutatingWebhookConfiguration, None, "m"),
            leftover(Kind::Deployment, Some("boosts"), "d"),
        ];
        let beside = of_leftovers(&leftovers, true);
        assert_eq!(beside.outcome, Outcome::Warning);
        let found = of_leftovers(&leftovers, false);
        assert_eq!(found.outcome, Outcome::Failed);
        let advice = found.advice.unwrap_or_default();
        for words in [
            "kubectl delete mutatingwebhookconfiguration m; ",
            "kubectl delete -n boosts deployment d; ",
            "never delete its CustomResourceDefinition",
        ] {
            assert!(advice.contains(words), "{words:?} is not in {advice}");
        }
    }
}
