//! The rights of our account: all that `manifests/rbac.yaml` grants, asked one by one; where cert-manager keeps the webhook's CA,
//! without those for certificates of our own, and where it runs dry, without those to write to pods and boosts.

use futures::{StreamExt as _, stream};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::{Api, Client, api::PostParams};

use super::{CheckArgs, Finding, ask, cluster::Told, webhook};

/// Reviews that are asked for at once.
const AT_ONCE: usize = 8;

/// A rule of `manifests/rbac.yaml`; a test holds the two together.
struct Rule {
    /// Whether it is the Role's, in our own namespace, or the ClusterRole's.
    is_ours: bool,
    group: &'static str,
    resources: &'static [&'static str],
    name: Option<&'static str>,
    verbs: &'static [&'static str],
}

impl Rule {
    const fn of(
        group: &'static str,
        resources: &'static [&'static str],
        verbs: &'static [&'static str],
    ) -> Self {
        Self {
            is_ours: false,
            group,
            resources,
            name: None,
            verbs,
        }
    }

    const fn named(self, name: &'static str) -> Self {
        Self {
            name: Some(name),
            ..self
        }
    }

    const fn ours(self) -> Self {
        Self {
            is_ours: true,
            ..self
        }
    }
}

const ADMISSION: &str = "admissionregistration.k8s.io";
const BOOSTS: &str = "autoscaling.x-k8s.io";

const RULES: [Rule; 15] = [
    Rule::of("", &["pods"], &["get", "list", "watch", "patch"]),
    Rule::of("", &["pods/resize"], &["patch"]),
    Rule::of(
        BOOSTS,
        &["startupcpuboosts", "clusterstartupcpuboosts"],
        &["list", "watch"],
    ),
    Rule::of(
        "",
        &["namespaces", "limitranges", "resourcequotas", "nodes"],
        &["list", "watch"],
    ),
    Rule::of(
        BOOSTS,
        &["startupcpuboosts/status", "clusterstartupcpuboosts/status"],
        &["patch"],
    ),
    Rule::of("events.k8s.io", &["events"], &["create"]),
    Rule::of(
        "apps",
        &["replicasets", "statefulsets", "daemonsets"],
        &["get"],
    ),
    Rule::of("batch", &["jobs"], &["get"]),
    Rule::of(BOOSTS, &["startupcpuboosts/record"], &["update"]),
    Rule::of(
        ADMISSION,
        &["mutatingwebhookconfigurations"],
        &["list", "watch", "patch"],
    )
    .named("headstart"),
    Rule::of(ADMISSION, &["mutatingwebhookconfigurations"], &["get"])
        .named("kube-startup-cpu-boost-mutating-webhook-configuration"),
    Rule::of(ADMISSION, &["validatingwebhookconfigurations"], &["get"])
        .named("kube-startup-cpu-boost-validating-webhook-configuration"),
    Rule::of("apps", &["deployments"], &["get"]).named("kube-startup-cpu-boost-controller-manager"),
    Rule::of("", &["secrets"], &["list", "watch", "update"])
        .named("headstart-certificates")
        .ours(),
    Rule::of("coordination.k8s.io", &["leases"], &["get", "update"])
        .named("headstart")
        .ours(),
];

/// One right: a verb on a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Right {
    is_ours: bool,
    group: &'static str,
    resource: &'static str,
    name: Option<&'static str>,
    verb: &'static str,
}

impl Right {
    /// Whether it is needed for nothing but certificates of our own, and their CA in the webhook configuration.
    fn is_for_certificates(self) -> bool {
        let of_webhook = self.resource == "mutatingwebhookconfigurations";
        self.resource == "secrets" || of_webhook && self.name == Some(webhook::CONFIGURATION)
    }

    /// Whether it is needed for nothing but what a dry run doesn't do: to write to pods and boosts, and Events.
    fn is_for_boosts(self) -> bool {
        let of_pods = matches!(self.resource, "pods" | "pods/resize") && self.verb == "patch";
        of_pods || self.group == BOOSTS && self.resource.contains('/') || self.resource == "events"
    }

    /// As people are told of it.
    fn text(self) -> String {
        let name = self.name.map_or(String::new(), |name| format!(" ({name})"));
        format!("{} {}{name}", self.verb, self.resource)
    }

    /// The question whether an account has it.
    fn review(self, args: &CheckArgs) -> SubjectAccessReview {
        let (resource, subresource) = match self.resource.split_once('/') {
            Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
            None => (self.resource, None),
        };
        let attributes = ResourceAttributes {
            group: Some(self.group.to_owned()),
            resource: Some(resource.to_owned()),
            subresource,
            name: self.name.map(str::to_owned),
            namespace: self.is_ours.then(|| args.namespace.clone()),
            verb: Some(self.verb.to_owned()),
            ..ResourceAttributes::default()
        };
        // As the API server puts a service account into groups.
        let groups = vec![
            "system:serviceaccounts".to_owned(),
            format!("system:serviceaccounts:{}", args.namespace),
            "system:authenticated".to_owned(),
        ];
        SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(account(args)),
                groups: Some(groups),
                resource_attributes: Some(attributes),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        }
    }
}

/// The user that our account is.
pub(super) fn account(args: &CheckArgs) -> String {
    let (namespace, name) = (&args.namespace, &args.service_account);
    format!("system:serviceaccount:{namespace}:{name}")
}

fn rights() -> impl Iterator<Item = Right> {
    RULES.iter().flat_map(|rule| {
        rule.resources.iter().flat_map(move |resource| {
            rule.verbs.iter().map(move |verb| Right {
                is_ours: rule.is_ours,
                group: rule.group,
                resource,
                name: rule.name,
                verb,
            })
        })
    })
}

pub(super) async fn check(client: &Client, args: &CheckArgs, told: Told) -> Finding {
    let api = Api::<SubjectAccessReview>::all(client.clone());
    let makes_certificates = !webhook::is_injected(client).await;
    let needed = rights().filter(|right| makes_certificates || !right.is_for_certificates());
    let needed = needed.filter(|right| !told.runs_dry || !right.is_for_boosts());
    let reviews = stream::iter(needed).map(|right| {
        let api = &api;
        async move {
            let (review, params) = (right.review(args), PostParams::default());
            let what = "subjectaccessreviews.authorization.k8s.io";
            let answer = ask("create", what, api.create(&params, &review)).await?;
            let is_given = answer.status.is_some_and(|status| status.allowed);
            Ok((right, is_given))
        }
    });
    let answers: Vec<Result<_, Finding>> = reviews.buffered(AT_ONCE).collect().await;
    let answers: Result<Vec<_>, _> = answers.into_iter().collect();
    answers.map_or_else(
        |trouble| trouble,
        |answers| of_rights(&account(args), &answers),
    )
}

fn of_rights(account: &str, answers: &[(Right, bool)]) -> Finding {
    let missing = answers.iter().filter(|(_, is_given)| !is_given);
    let missing: Vec<_> = missing.map(|(right, _)| right.text()).collect();
    if missing.is_empty() {
        return Finding::ok(format!("{account} has all {} that it needs", answers.len()));
    }
    Finding::failed(
        format!("{account} lacks: {}", missing.join(", ")),
        "kubectl apply -f manifests/rbac.yaml; where it runs as another account, give --namespace and --service-account",
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::{super::Outcome, *};

    #[test]
    fn the_table_is_the_manifest() {
        let text = include_str!("../../manifests/rbac.yaml");
        let objects: Vec<Value> = serde_saphyr::from_multiple(text).expect("YAML");
        let mut granted = BTreeSet::new();
        for object in &objects {
            let words = |list: &Value| -> Vec<String> {
                let words = list.as_array().into_iter().flatten();
                words
                    .map(|word| word.as_str().expect("a word").to_owned())
                    .collect()
            };
            for rule in object["rules"].as_array().into_iter().flatten() {
                let mut names: Vec<_> = words(&rule["resourceNames"])
                    .into_iter()
                    .map(Some)
                    .collect();
                if names.is_empty() {
                    names.push(None);
                }
                for group in words(&rule["apiGroups"]) {
                    for resource in words(&rule["resources"]) {
                        for verb in words(&rule["verbs"]) {
                            for name in &names {
                                let is_ours = object["kind"] == "Role";
                                granted.insert((
                                    is_ours,
                                    group.clone(),
                                    resource.clone(),
                                    name.clone(),
                                    verb.clone(),
                                ));
                            }
                        }
                    }
                }
            }
        }
        let table = rights().map(|right| {
            let name = right.name.map(str::to_owned);
            (
                right.is_ours,
                right.group.to_owned(),
                right.resource.to_owned(),
                name,
                right.verb.to_owned(),
            )
        });
        assert_eq!(table.collect::<BTreeSet<_>>(), granted);
    }

    #[test]
    fn some_rights_are_for_our_own_certificates() {
        let rights = rights().filter(|right| right.is_for_certificates());
        let rights: Vec<_> = rights.map(Right::text).collect();
        assert_eq!(
            rights.join(", "),
            "list mutatingwebhookconfigurations (headstart), \
             watch mutatingwebhookconfigurations (headstart), \
             patch mutatingwebhookconfigurations (headstart), \
             list secrets (headstart-certificates), \
             watch secrets (headstart-certificates), \
             update secrets (headstart-certificates)"
        );
    }

    #[test]
    fn some_rights_are_to_write_to_pods_and_boosts() {
        let rights = rights().filter(|right| right.is_for_boosts());
        let rights: Vec<_> = rights.map(Right::text).collect();
        assert_eq!(
            rights.join(", "),
            "patch pods, patch pods/resize, \
             patch startupcpuboosts/status, patch clusterstartupcpuboosts/status, \
             create events, update startupcpuboosts/record"
        );
    }

    #[test]
    fn what_is_missing_is_named() {
        let answers = |missing: &str| {
            let answer = |right: Right| (right, right.text() != missing);
            rights().map(answer).collect::<Vec<_>>()
        };
        assert_eq!(of_rights("a", &answers("")).outcome, Outcome::Ok);
        let finding = of_rights("a", &answers("patch pods/resize"));
        assert_eq!(finding.outcome, Outcome::Failed);
        assert_eq!(finding.detail, "a lacks: patch pods/resize");
    }
}
