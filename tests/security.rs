//! What people, and Headstart's own account, can do to boosts against everybody's will: on a real API server, with the
//! rights, the policies and the running binary as the manifests bring them. `docs/security.md` says what each test is for.
//!
//! All tests share one cluster; each has a namespace of its own. Rights are those of the roles that a cluster has built in,
//! where there are such: nobody aggregates roles here, so their parts are bound.

use std::{path::Path, time::Duration};

use anyhow::{Context, Result, anyhow, ensure};
use headstart::domain::quantity::MilliCpu;
use http::Request;
use kube::Client;
use serde_json::{Value, json};
use testbed::{
    Answer, Behaviour, Cluster, ControlPlane, Options, Rest,
    cluster::{SYSTEM_NAMESPACE, manifests, run, shared},
    eventually,
    node::NODE,
    rest::{JSON_PATCH, MERGE, STRATEGIC, pods},
};
use tokio::sync::OnceCell;

const KEY: &str = headstart::api::BOOST_KEY;
const OURS: &str = "system:serviceaccount:headstart-system:headstart";
const APPLY: &str = "application/apply-patch+yaml";
const SOON: Duration = Duration::from_secs(60);

/// What the policies say.
const FROZEN: &str = "are Headstart's record of a CPU boost";
const NO_RAISE: &str = "Headstart may only lower CPU";
const NOTHING_ELSE: &str = "Headstart must not ";

/// It ends with the process.
static BED: OnceCell<Result<Bed, String>> = OnceCell::const_new();

struct Bed {
    cluster: Cluster,
    /// May do everything.
    admin: Rest,
    /// Headstart's own account.
    ours: Rest,
    ours_client: Client,
    /// Has the built-in role `edit`, and with it what our manifests add to that role.
    editor: Rest,
    /// May create pods, and nothing else.
    creator: Rest,
    /// May create and change Deployments and ReplicaSets, and nothing else.
    deployer: Rest,
    /// May write statuses of pods, as some operators.
    reporter: Rest,
    /// May write to every other subresource of pods.
    debugger: Rest,
    /// May bind pods to nodes.
    scheduler: Rest,
    /// May change pods and records.
    keeper: Rest,
    /// Has the rights of a kubelet.
    kubelet: Rest,
}

/// Rules of users: API group, resources, verbs.
const RULES: [(&str, &str, &str, &str); 7] = [
    ("creator", "", "pods", "create"),
    (
        "deployer",
        "apps",
        "deployments replicasets",
        "create update",
    ),
    ("reporter", "", "pods/status", "get patch update"),
    ("debugger", "", DEBUGGED, "get patch update"),
    ("scheduler", "", "pods/binding bindings", "create"),
    ("keeper", "", "pods", "get patch update"),
    ("keeper", "autoscaling.x-k8s.io", RECORD, "update"),
];
const DEBUGGED: &str = "pods/resize pods/ephemeralcontainers";
const RECORD: &str = "startupcpuboosts/record";
/// The parts of the built-in role `edit`.
const EDIT: [&str; 4] = [
    "system:aggregate-to-edit",
    "system:aggregate-to-view",
    "headstart-edit",
    "headstart-view",
];

/// The cluster; the first to ask starts it.
async fn bed() -> Result<&'static Bed> {
    shared(&BED, Bed::start()).await
}

impl Bed {
    async fn start() -> Result<Self> {
        let behaviour = Behaviour {
            ready_after: None,
            ..Behaviour::default()
        };
        let restricted = "--enable-admission-plugins=NodeRestriction".to_owned();
        let plane = ControlPlane::start(Options {
            api_server_args: vec![restricted],
            ..Options::default()
        })
        .await?;
        let binary = Path::new(env!("CARGO_BIN_EXE_headstart"));
        let cluster = Cluster::install(plane, binary, 1, behaviour).await?;
        let plane = &cluster.plane;
        let ours_client = plane
            .service_account_client(SYSTEM_NAMESPACE, "headstart")
            .await?;
        let as_user = async |user: &str| {
            let client = plane.client_for(user, &[]).await?;
            anyhow::Ok(Rest::new(client, SOON))
        };
        let node = format!("system:node:{NODE}");
        let bed = Self {
            admin: Rest::new(plane.admin(), SOON),
            ours: Rest::new(ours_client.clone(), SOON),
            ours_client,
            editor: as_user("editor").await?,
            creator: as_user("creator").await?,
            deployer: as_user("deployer").await?,
            reporter: as_user("reporter").await?,
            debugger: as_user("debugger").await?,
            scheduler: as_user("scheduler").await?,
            keeper: as_user("keeper").await?,
            kubelet: Rest::new(plane.client_for(&node, &["system:nodes"]).await?, SOON),
            cluster,
        };
        // Nodes have an authorizer of their own where there are real ones.
        let binding = binding("kubelet", "ClusterRole", "system:node", &node);
        let path = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
        bed.admin.post(path, &binding).await?.accepted()?;
        Ok(bed)
    }
}

const RBAC: &str = "rbac.authorization.k8s.io";

fn binding(name: &str, kind: &str, role: &str, user: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "roleRef": {"apiGroup": RBAC, "kind": kind, "name": role},
        "subjects": [{"apiGroup": RBAC, "kind": "User", "name": user}],
    })
}

/// A namespace in which all users have their rights, and a boost `b` that triples CPU until a pod is Ready.
struct Place {
    bed: &'static Bed,
    name: &'static str,
}

impl Place {
    async fn new(name: &'static str) -> Result<Self> {
        let bed = bed().await?;
        let namespace = json!({"metadata": {"name": name}});
        let made = bed.admin.post("/api/v1/namespaces", &namespace).await?;
        made.accepted()?;
        let path = format!("/apis/{RBAC}/v1/namespaces/{name}");
        let (roles, bindings) = (format!("{path}/roles"), format!("{path}/rolebindings"));
        for (number, (user, group, resources, verbs)) in RULES.into_iter().enumerate() {
            let name = format!("{user}-{number}");
            let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
            let rule =
                json!({"apiGroups": [group], "resources": words(resources), "verbs": words(verbs)});
            let object = json!({"metadata": {"name": name}, "rules": [rule]});
            bed.admin.post(&roles, &object).await?.accepted()?;
            let binding = binding(&name, "Role", &name, user);
            bed.admin.post(&bindings, &binding).await?.accepted()?;
        }
        for role in EDIT {
            let binding = binding(role, "ClusterRole", role, "editor");
            bed.admin.post(&bindings, &binding).await?.accepted()?;
        }
        let place = Self { bed, name };
        let boost = json!({
            "apiVersion": "autoscaling.x-k8s.io/v1alpha1", "kind": "StartupCPUBoost", "metadata": {"name": "b"},
            "selector": {"matchLabels": {"app": "a"}},
            "spec": {
                "resourcePolicy": {"containerPolicies": [{"containerName": "app", "percentageIncrease": {"value": 200}}]},
                "durationPolicy": {"podCondition": {"type": "Ready", "status": "True"}},
            },
        });
        let path =
            format!("/apis/autoscaling.x-k8s.io/v1alpha1/namespaces/{name}/startupcpuboosts");
        eventually("the editor may write boosts", SOON, || async {
            bed.editor.post(&path, &boost).await?.accepted()
        })
        .await?;
        eventually("the boost is known", SOON, || async {
            let path = format!("{}?dryRun=All", pods(name));
            let created = bed.admin.post(&path, &pod("probe")).await?.accepted()?;
            ensure!(created["metadata"]["labels"][KEY] == "b", "not boosted");
            Ok(())
        })
        .await?;
        place.policies_are_in_force().await?;
        Ok(place)
    }

    /// An API server learns of new policies within a second or two.
    async fn policies_are_in_force(&self) -> Result<()> {
        let mut probe = pod("probe");
        probe["metadata"]["labels"]["app"] = "unmatched".into();
        probe["metadata"]["annotations"] = json!({"testbed/schedule": "never"});
        self.create(&self.bed.editor, &probe).await?;
        let path = self.path("probe");
        let raise = json!({"containers": [{"name": "app", "resources": cpu("501m", "1")}]});
        let raise = json!({"spec": raise});
        let other = json!({"metadata": {"labels": {"other": "x"}}});
        let forged = json!({"metadata": {"labels": {KEY: "other"}}});
        for (by, subresource, body, words) in [
            (&self.bed.editor, "", forged, FROZEN),
            (&self.bed.ours, "/resize", raise, NO_RAISE),
            (&self.bed.ours, "", other, NOTHING_ELSE),
        ] {
            let path = format!("{path}{subresource}?dryRun=All");
            eventually("the policy is in force", SOON, || async {
                refused(&by.patch(&path, STRATEGIC, &body).await?, words)
            })
            .await?;
        }
        self.bed.admin.delete(&path).await?.accepted().map(drop)
    }

    /// Path of a pod.
    fn path(&self, pod: &str) -> String {
        format!("{}/{pod}", pods(self.name))
    }

    async fn create(&self, by: &Rest, pod: &Value) -> Result<Value> {
        eventually("the user's rights are known", SOON, || async {
            let answer = by.post(&pods(self.name), pod).await?;
            answer.accepted()
        })
        .await
    }

    async fn get(&self, pod: &str) -> Result<Value> {
        self.bed.admin.get(&self.path(pod)).await?.accepted()
    }

    /// Waits until a pod runs, and nobody is about to write to it.
    async fn runs(&self, pod: &str) -> Result<Value> {
        eventually("the pod runs", SOON, || async {
            let pod = self.get(pod).await?;
            ensure!(pod["status"]["phase"] == "Running", "{}", pod["status"]);
            Ok(pod)
        })
        .await
    }

    /// A pod that [`pod`] made, running with its boost.
    async fn boosted(&self, name: &str) -> Result<Value> {
        self.create(&self.bed.editor, &pod(name)).await?;
        let pod = self.runs(name).await?;
        ensure!(*cpu_of(&pod) == cpu("1500m", "3"), "{}", cpu_of(&pod));
        Ok(pod)
    }

    /// Makes a pod Ready, and waits until nothing is left to be done about it.
    async fn settled(&self, name: &str) -> Result<Value> {
        let node = &self.bed.cluster.node;
        node.set_ready(self.name, name, true).await?;
        eventually("the boost has ended", SOON, || async {
            let pod = self.get(name).await?;
            let (claim, record) = marks(&pod);
            ensure!(claim.is_null(), "it has a claim");
            ensure!(
                record.is_null() || said_of(record)?["state"] == "Reverted",
                "the record is {record}"
            );
            ensure!(
                pod["status"]["observedGeneration"] == pod["metadata"]["generation"],
                "a resize is under way"
            );
            let actual = &pod["status"]["containerStatuses"][0]["resources"];
            ensure!(actual["requests"] == cpu_of(&pod)["requests"]);
            Ok(pod)
        })
        .await
    }

    /// Asks until the answer is not that RBAC lacks something: rights take a moment to be known.
    async fn ask(&self, by: &Rest, attempt: &Attempt) -> Result<Answer> {
        eventually("the user's rights are known", SOON, || async {
            let answer = attempt.send(by).await?;
            let lacks = answer.said().contains("cannot ") && answer.said().contains("in API group");
            ensure!(!lacks, "{}", answer.said());
            ensure!(answer.code != 409, "somebody else was faster");
            Ok(answer)
        })
        .await
    }

    /// Tries all that could change the marks of a pod at this path, and looks that they are what they were.
    async fn can_not_touch(&self, by: &Rest, name: &str, subresource: &str) -> Result<()> {
        let before = self.get(name).await?;
        let path = self.path(name) + subresource;
        for change in touches() {
            for attempt in attempts(&path, &before, &change) {
                let answer = self.ask(by, &attempt).await?;
                refused(&answer, FROZEN).with_context(|| attempt.to_string())?;
            }
        }
        let after = self.get(name).await?;
        ensure!(marks(&before) == marks(&after), "the marks have changed");
        Ok(())
    }

    /// Changes other metadata in every way.
    async fn can_change_the_rest(&self, by: &Rest, name: &str, subresource: &str) -> Result<()> {
        let before = self.get(name).await?;
        let path = self.path(name) + subresource;
        let change = json!({"labels": {"other": "x"}, "annotations": {"other": "x"}});
        for attempt in attempts(&path, &before, &change) {
            let answer = self.ask(by, &attempt).await?;
            answer.accepted().with_context(|| attempt.to_string())?;
        }
        let after = self.get(name).await?;
        ensure!(after["metadata"]["labels"]["other"] == "x");
        ensure!(after["metadata"]["annotations"]["other"] == "x");
        ensure!(marks(&before) == marks(&after), "the marks have changed");
        Ok(())
    }

    /// Looks that the API server has noted who was boosted, and who tried to change a record.
    async fn audit_log_tells(&self) -> Result<()> {
        eventually("the audit log tells", SOON, || async {
            let events = self.bed.cluster.plane.audit_events()?;
            let mut here = events
                .iter()
                .filter(|event| event["objectRef"]["namespace"] == self.name);
            let boost = "pods.headstart.autoscaling.x-k8s.io/boost";
            let boosted = |event: &Value| event["annotations"][boost] == "b";
            ensure!(here.clone().any(boosted), "nobody was boosted");
            let tried = here.any(|event| {
                let status = &event["responseStatus"];
                let message = status["message"].as_str().unwrap_or_default();
                status["code"] == 403 && message.contains("headstart-record")
            });
            ensure!(tried, "nobody tried to change a record");
            Ok(())
        })
        .await
    }

    /// Looks that our account has asked for nothing in this namespace that is more than `asked`, or no CPU. Returns how often
    /// it has resized.
    fn nothing_was_raised(&self, asked: impl Fn(&str) -> Option<Value>) -> Result<usize> {
        let events = self.bed.cluster.plane.audit_events()?;
        let resizes = events.iter().filter(|event| {
            let object = &event["objectRef"];
            event["user"]["username"] == OURS
                && object["namespace"] == self.name
                && object["subresource"] == "resize"
                // Tests act as our account too, and only so.
                && !event["requestURI"].to_string().contains("dryRun")
        });
        let mut count = 0;
        for resize in resizes {
            let name = resize["objectRef"]["name"].as_str().unwrap_or_default();
            let Some(asked) = asked(name) else { continue };
            let body = &resize["requestObject"]["spec"]["containers"];
            for container in body.as_array().context("a resize has containers")? {
                let to = &container["resources"];
                ensure!(is_at_most(to, &asked)?, "{name} was resized to {to}");
            }
            count += 1;
        }
        Ok(count)
    }
}

// === objects ===

/// A pod that asks for 500m, limit 1.
fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": "a"}},
        "spec": {"containers": [{"name": "app", "image": "x", "resources": cpu("500m", "1")}]},
    })
}

fn cpu(request: &str, limit: &str) -> Value {
    json!({"requests": {"cpu": request}, "limits": {"cpu": limit}})
}

/// Resources of the first container.
fn cpu_of(pod: &Value) -> &Value {
    &pod["spec"]["containers"][0]["resources"]
}

/// Claim and record.
fn marks(pod: &Value) -> (&Value, &Value) {
    let metadata = &pod["metadata"];
    (&metadata["labels"][KEY], &metadata["annotations"][KEY])
}

fn said_of(record: &Value) -> Result<Value> {
    let text = record.as_str().context("there is no record")?;
    Ok(serde_json::from_str(text)?)
}

/// Whether resources have nothing but CPU, or what is asked for too, and no more of it. No limit is more than any.
fn is_at_most(resources: &Value, asked: &Value) -> Result<bool> {
    for kind in ["requests", "limits"] {
        let of = |resources: &Value| resources[kind].as_object().cloned().unwrap_or_default();
        let (has, asked) = (of(resources), of(asked));
        for (key, value) in &has {
            if key != "cpu" && asked.get(key) != Some(value) {
                return Ok(false);
            }
        }
        let cpu = |value: Option<&Value>| -> Result<Option<MilliCpu>> {
            let text = value.and_then(Value::as_str);
            text.map(|text| text.parse().map_err(|error| anyhow!("{text}: {error}")))
                .transpose()
        };
        match (cpu(has.get("cpu"))?, cpu(asked.get("cpu"))?) {
            (Some(has), Some(asked)) if has > asked => return Ok(false),
            (Some(_), None) if kind == "requests" => return Ok(false),
            _ => {}
        }
    }
    Ok(true)
}

fn refused(answer: &Answer, words: &str) -> Result<()> {
    ensure!(
        answer.code == 403 && answer.said().contains(words),
        "answered with {}: {}",
        answer.code,
        answer.body
    );
    Ok(())
}

// === attempts ===

/// A write to a pod.
struct Attempt {
    path: String,
    kind: &'static str,
    body: Value,
}

/// Stands for the media type of a PUT.
const PUT: &str = "PUT";
/// Stands for that of a POST.
const POST: &str = "POST";

impl Attempt {
    fn new(path: impl Into<String>, kind: &'static str, body: Value) -> Self {
        let path = path.into();
        Self { path, kind, body }
    }

    async fn send(&self, by: &Rest) -> Result<Answer> {
        match self.kind {
            POST => by.post(&self.path, &self.body).await,
            PUT => {
                // Whoever replaces a pod has read it before; the version would only say that the kubelet was faster.
                let mut body = self.body.clone();
                if let Some(metadata) = body["metadata"].as_object_mut() {
                    metadata.remove("resourceVersion");
                }
                by.put(&self.path, &body).await
            }
            kind => by.patch(&self.path, kind, &self.body).await,
        }
    }
}

impl std::fmt::Display for Attempt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.kind, self.path)?;
        if self.kind == PUT {
            return Ok(());
        }
        write!(f, " {}", self.body)
    }
}

/// Changes of metadata that touch the marks of a boosted pod.
fn touches() -> Vec<Value> {
    let forged = r#"{"state":"Active","initCPURequests":{"app":"8"},"boostedCPURequests":{"app":"1500m"},"boost":"b"}"#;
    vec![
        json!({"annotations": {KEY: forged}}),
        json!({"annotations": {KEY: "no record"}}),
        json!({"annotations": {KEY: ""}}),
        json!({"annotations": {KEY: null}}),
        json!({"labels": {KEY: "other"}}),
        json!({"labels": {KEY: ""}}),
        json!({"labels": {KEY: null}}),
        json!({"labels": {KEY: null, "other": "x"}, "annotations": {KEY: null}}),
        json!({"labels": null, "annotations": null}),
    ]
}

/// A change of a pod's metadata by every kind of write that can say it.
fn attempts(path: &str, pod: &Value, change: &Value) -> Vec<Attempt> {
    let body = json!({"metadata": change});
    let mut attempts = vec![
        Attempt::new(path, MERGE, body.clone()),
        Attempt::new(path, STRATEGIC, body.clone()),
    ];
    let mut replaced = pod.clone();
    json_patch::merge(&mut replaced, &body);
    attempts.push(Attempt::new(path, PUT, replaced));
    let mut operations = Vec::new();
    let (mut adds_only, present) = (true, &pod["metadata"]);
    for map in ["labels", "annotations"] {
        match &change[map] {
            Value::Null => {
                if change.get(map).is_some() {
                    adds_only = false;
                    operations.push(json!({"op": "remove", "path": format!("/metadata/{map}")}));
                }
            }
            values => {
                for (key, value) in values.as_object().into_iter().flatten() {
                    let path = format!("/metadata/{map}/{}", key.replace('/', "~1"));
                    if value.is_null() {
                        adds_only = false;
                        operations.push(json!({"op": "remove", "path": path}));
                    } else if present[map].is_null() {
                        let path = format!("/metadata/{map}");
                        operations.push(json!({"op": "add", "path": path, "value": {key: value}}));
                    } else {
                        operations.push(json!({"op": "add", "path": path, "value": value}));
                    }
                }
            }
        }
    }
    attempts.push(Attempt::new(path, JSON_PATCH, operations.into()));
    if adds_only {
        let mut metadata = change.clone();
        metadata["name"] = pod["metadata"]["name"].clone();
        let body = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata});
        let path = format!("{path}?fieldManager=somebody&force=true");
        attempts.push(Attempt::new(path, APPLY, body));
    }
    attempts
}

// === records of pods that are there ===

#[test]
fn an_editor_can_not_touch_a_record() -> Result<()> {
    run(async {
        let place = Place::new("editor").await?;
        let editor = &place.bed.editor;
        let boosted = place.boosted("p").await?;
        place.can_not_touch(editor, "p", "").await?;
        place.can_change_the_rest(editor, "p", "").await?;

        // Nor give a pod that has none the record of another, or an empty one.
        let mut plain = pod("plain");
        plain["metadata"]["labels"]["app"] = "unmatched".into();
        place.create(editor, &plain).await?;
        let plain = place.runs("plain").await?;
        let (claim, record) = marks(&boosted);
        for change in [
            json!({"labels": {KEY: claim}, "annotations": {KEY: record}}),
            json!({"annotations": {KEY: record}}),
            json!({"labels": {KEY: claim}}),
            json!({"labels": {KEY: ""}}),
            json!({"annotations": {KEY: ""}}),
        ] {
            for attempt in attempts(&place.path("plain"), &plain, &change) {
                let answer = place.ask(editor, &attempt).await?;
                refused(&answer, FROZEN).with_context(|| attempt.to_string())?;
            }
        }
        let plain = place.get("plain").await?;
        ensure!(marks(&plain) == (&Value::Null, &Value::Null));

        // It has no way to resize, or to write statuses.
        for subresource in ["/resize", "/status"] {
            let path = place.path("p") + subresource;
            let answer = editor.patch(&path, STRATEGIC, &json!({})).await?;
            refused(&answer, "cannot patch resource")?;
        }

        let ended = place.settled("p").await?;
        ensure!(*cpu_of(&ended) == cpu("500m", "1"), "{}", cpu_of(&ended));
        ensure!(said_of(marks(&ended).1)?["endedBy"] == "Condition");
        // What was lent stays to be seen.
        for change in [
            json!({"annotations": {KEY: null}}),
            json!({"annotations": {KEY: record}}),
            json!({"labels": {KEY: "b"}}),
        ] {
            for attempt in attempts(&place.path("p"), &ended, &change) {
                let answer = place.ask(editor, &attempt).await?;
                refused(&answer, FROZEN).with_context(|| attempt.to_string())?;
            }
        }
        // A pod with a record can be deleted as any other.
        editor.delete(&place.path("p")).await?.accepted()?;
        place.audit_log_tells().await
    })
}

#[test]
fn who_writes_statuses_can_not_touch_a_record() -> Result<()> {
    run(async {
        let place = Place::new("statuses").await?;
        let reporter = &place.bed.reporter;
        place.boosted("p").await?;
        place.can_not_touch(reporter, "p", "/status").await?;
        place.can_change_the_rest(reporter, "p", "/status").await?;
        let condition = json!({"type": "example.com/told", "status": "True"});
        let told = json!({"status": {"conditions": [condition]}});
        let path = place.path("p") + "/status";
        let answer = reporter.patch(&path, STRATEGIC, &told).await?;
        let conditions = answer.accepted()?["status"]["conditions"].clone();
        let mut conditions = conditions.as_array().into_iter().flatten();
        ensure!(conditions.any(|condition| condition["type"] == "example.com/told"));
        let ended = place.settled("p").await?;
        ensure!(*cpu_of(&ended) == cpu("500m", "1"), "{}", cpu_of(&ended));
        Ok(())
    })
}

#[test]
fn a_kubelet_writes_statuses_and_no_records() -> Result<()> {
    run(async {
        let place = Place::new("kubelet").await?;
        let kubelet = &place.bed.kubelet;
        place.boosted("p").await?;
        let path = place.path("p") + "/status";
        let ready =
            json!({"status": {"conditions": [{"type": "example.com/seen", "status": "True"}]}});
        let answer = kubelet.patch(&path, STRATEGIC, &ready).await?;
        answer.accepted()?;
        let forged = json!({"metadata": {"annotations": {KEY: "no record"}}});
        refused(&kubelet.patch(&path, STRATEGIC, &forged).await?, FROZEN)?;
        // Labels are the node restriction's before they are ours.
        let forged = json!({"metadata": {"labels": {KEY: "other"}}});
        refused(&kubelet.patch(&path, STRATEGIC, &forged).await?, "")?;
        let pod = place.get("p").await?;
        ensure!(marks(&pod).0 == "b" && said_of(marks(&pod).1)?["state"] == "Active");
        Ok(())
    })
}

/// The policy need not name these subresources: the API server drops what they say of metadata.
#[test]
fn other_subresources_drop_metadata() -> Result<()> {
    run(async {
        let place = Place::new("debugger").await?;
        let debugger = &place.bed.debugger;
        let before = place.boosted("p").await?;
        let container = json!([{"name": "shell", "image": "x"}]);
        let bodies = [
            (
                "/resize",
                json!({"containers": [{"name": "app", "resources": {"requests": {"cpu": "1400m"}}}]}),
            ),
            (
                "/ephemeralcontainers",
                json!({"ephemeralContainers": container}),
            ),
        ];
        for (subresource, spec) in bodies {
            let path = place.path("p") + subresource;
            for change in touches() {
                for attempt in attempts(&path, &before, &change) {
                    // It makes the caller an owner of fields that are then not written.
                    if attempt.kind == APPLY {
                        continue;
                    }
                    let answer = place.ask(debugger, &attempt).await?;
                    answer.accepted().with_context(|| attempt.to_string())?;
                    let after = place.get("p").await?;
                    ensure!(marks(&before) == marks(&after), "by {attempt}");
                }
            }
            let body = json!({"metadata": {"labels": {KEY: null}, "annotations": {KEY: "no record"}}, "spec": spec});
            let attempt = Attempt::new(path, STRATEGIC, body);
            place.ask(debugger, &attempt).await?.accepted()?;
        }
        let after = place.get("p").await?;
        ensure!(marks(&before) == marks(&after), "the marks have changed");
        ensure!(
            cpu_of(&after)["requests"]["cpu"] == "1400m",
            "it was resized"
        );
        ensure!(after["spec"]["ephemeralContainers"][0]["name"] == "shell");
        Ok(())
    })
}

/// The API server copies labels and annotations of a binding to the pod.
#[test]
fn a_binding_brings_no_marks() -> Result<()> {
    run(async {
        let place = Place::new("scheduler").await?;
        let (editor, scheduler) = (&place.bed.editor, &place.bed.scheduler);
        for (name, label) in [("boosted", "a"), ("plain", "unmatched")] {
            let mut pod = pod(name);
            pod["metadata"]["labels"]["app"] = label.into();
            pod["metadata"]["annotations"] = json!({"testbed/schedule": "never"});
            place.create(editor, &pod).await?;
            let before = place.get(name).await?;
            let binding = |metadata: Value| {
                let mut binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": metadata,
                    "target": {"kind": "Node", "name": NODE}});
                binding["metadata"]["name"] = name.into();
                binding
            };
            let paths = [
                place.path(name) + "/binding",
                format!("/api/v1/namespaces/{}/bindings", place.name),
            ];
            for path in &paths {
                for metadata in [
                    json!({"annotations": {KEY: "no record"}}),
                    json!({"annotations": {KEY: ""}}),
                    json!({"labels": {KEY: "other"}}),
                    json!({"labels": {KEY: ""}}),
                ] {
                    let attempt = Attempt::new(path, POST, binding(metadata));
                    let answer = place.ask(scheduler, &attempt).await?;
                    refused(&answer, FROZEN).with_context(|| attempt.to_string())?;
                }
            }
            let path = place.path(name) + "/binding";
            let other = json!({"labels": {"other": "x"}, "annotations": {"other": "x"}});
            let attempt = Attempt::new(path, POST, binding(other));
            place.ask(scheduler, &attempt).await?.accepted()?;
            let after = place.runs(name).await?;
            ensure!(after["metadata"]["annotations"]["other"] == "x");
            ensure!(marks(&before) == marks(&after), "the marks have changed");
        }
        Ok(())
    })
}

/// Whoever has the right may change a record, and gets no more CPU by it than the pod has.
#[test]
fn who_may_write_records_raises_nothing_by_it() -> Result<()> {
    run(async {
        let place = Place::new("keeper").await?;
        let keeper = &place.bed.keeper;
        let cases = [
            // Nothing of it is ours then: it stays as it is.
            ("higher", "64", cpu("1500m", "3"), "Superseded"),
            ("lower", "100m", cpu("100m", "100m"), "Condition"),
        ];
        for (name, original, then, by) in cases {
            let boosted = place.boosted(name).await?;
            let mut record = said_of(marks(&boosted).1)?;
            for map in ["initCPURequests", "initCPULimits"] {
                record[map] = json!({"app": original});
            }
            let change = json!({"metadata": {"annotations": {KEY: record.to_string()}}});
            let attempt = Attempt::new(place.path(name), MERGE, change);
            place.ask(keeper, &attempt).await?.accepted()?;
            let ended = place.settled(name).await?;
            let is = cpu_of(&ended);
            ensure!(*is == then, "{name}: {is}");
            ensure!(said_of(marks(&ended).1)?["endedBy"] == by);
        }
        let resizes = place.nothing_was_raised(|_| Some(cpu("500m", "1")))?;
        ensure!(resizes == 1, "{resizes} resizes");
        Ok(())
    })
}

// === records of new pods ===

/// A new pod that carries marks of its maker's own. Sizes are request and limit of CPU.
struct Forgery {
    name: &'static str,
    /// Value of its label `app`; the boost selects `a`.
    app: &'static str,
    /// What it asks for.
    asks: &'static str,
    record: String,
    /// What it gets.
    gets: &'static str,
    /// What it has in the end.
    then: &'static str,
}

/// Resources as these: `500m/1`, or `500m/` without a limit.
fn size(text: &str) -> Value {
    let (request, limit) = text.split_once('/').unwrap_or((text, ""));
    match limit {
        "" => json!({"requests": {"cpu": request}}),
        limit => cpu(request, limit),
    }
}

/// An Active record of these originals and set values, and with more fields.
fn record(originals: &str, set: &str, more: &str) -> String {
    let maps = [("init", originals), ("boosted", set)].map(|(word, size)| {
        let (request, limit) = size.split_once('/').unwrap_or((size, ""));
        format!(
            r#""{word}CPURequests":{{"app":"{request}"}},"{word}CPULimits":{{"app":"{limit}"}}"#
        )
    });
    let maps = maps.join(",");
    format!(r#"{{"state":"Active","timestamp":"2026-01-01T00:00:00Z",{maps}{more}}}"#)
}

fn forgeries() -> Vec<Forgery> {
    let forged = |name, app, record, gets, then| Forgery {
        name,
        app,
        asks: "500m/1",
        record,
        gets,
        then,
    };
    let low = || record("100m/200m", "500m/1", "");
    let high = |more| record("8/16", "500m/1", more);
    let unset = || record("100m/200m", "2/4", "");
    let other = r#","boost":"other","end":{"deadlineSeconds":2592000}"#;
    let memory = r#","initMemoryRequests":{"app":"64Gi"},"boost":"b""#;
    let memory = record("500m/1", "500m/1", memory);
    let of_another = || record("500m/1", "1500m/3", r#","boost":"b""#);
    let ended = low().replace("Active", "Reverted");
    let garbage = || "no record".to_owned();
    let mut whole = forged("copied-whole", "a", of_another(), "1500m/3", "500m/1");
    whole.asks = "1500m/3";
    let removed = record("500m/600m", "500m/", "");
    let mut removed = forged("removed", "u", removed, "500m/600m", "500m/600m");
    removed.asks = "500m/";
    vec![
        // Believed, because it has the values that are said to be set: the liar's own pod gets less.
        forged("lower", "a", low(), "300m/600m", "100m/200m"),
        forged("lower-u", "u", low(), "100m/200m", "100m/200m"),
        // A manifest as it is read from the cluster. One that says that its limit was removed.
        whole,
        removed,
        // All others are replaced, or removed where no boost selects the pod.
        forged("higher", "a", high(""), "1500m/3", "500m/1"),
        forged("higher-u", "u", high(""), "500m/1", "500m/1"),
        forged("other", "a", high(other), "1500m/3", "500m/1"),
        forged("other-u", "u", high(other), "500m/1", "500m/1"),
        forged("not-set", "a", unset(), "1500m/3", "500m/1"),
        forged("not-set-u", "u", unset(), "500m/1", "500m/1"),
        forged("copied", "a", of_another(), "1500m/3", "500m/1"),
        forged("copied-u", "u", of_another(), "500m/1", "500m/1"),
        forged("ended", "a", ended, "1500m/3", "500m/1"),
        forged("memory", "a", memory, "1500m/3", "500m/1"),
        forged("garbage", "a", garbage(), "1500m/3", "500m/1"),
        forged("garbage-u", "u", garbage(), "500m/1", "500m/1"),
        forged("empty-u", "u", String::new(), "500m/1", "500m/1"),
    ]
}

impl Forgery {
    fn pod(&self, name: &str) -> Value {
        let mut pod = pod(name);
        pod["metadata"]["labels"] = json!({"app": self.app, KEY: "other"});
        pod["metadata"]["annotations"] = json!({KEY: self.record});
        let mut resources = size(self.asks);
        resources["requests"]["memory"] = "64Mi".into();
        pod["spec"]["containers"][0]["resources"] = resources;
        pod
    }

    async fn check(&self, place: &Place, by: &Rest, pod: &Value) -> Result<()> {
        let with_memory = |values: &str| {
            let mut values = size(values);
            values["requests"]["memory"] = "64Mi".into();
            values
        };
        let created = place.create(by, pod).await?;
        let name = created["metadata"]["name"].as_str().context("no name")?;
        let is = cpu_of(&created);
        ensure!(*is == with_memory(self.gets), "it gets {is}");
        match (self.app, marks(&created)) {
            ("a", (claim, record)) => {
                let record = said_of(record)?;
                ensure!(claim == "b" && record["boost"] == "b", "{record}");
                ensure!(record["state"] == "Active", "{record}");
                ensure!(record["end"]["deadlineSeconds"] == 3600, "{record}");
            }
            (_, marks) => ensure!(marks == (&Value::Null, &Value::Null), "{marks:?}"),
        }
        place.runs(name).await?;
        let ended = place.settled(name).await?;
        let is = cpu_of(&ended);
        ensure!(*is == with_memory(self.then), "it ends with {is}");
        ensure!(is_at_most(is, &with_memory(self.asks))?, "{is}");
        Ok(())
    }
}

#[test]
fn marks_of_a_new_pod_lower_the_liars_own_at_most() -> Result<()> {
    run(async {
        let place = Place::new("creator").await?;
        for forgery in forgeries() {
            let pod = forgery.pod(forgery.name);
            let done = forgery.check(&place, &place.bed.creator, &pod).await;
            done.with_context(|| forgery.name)?;
        }
        let all = forgeries();
        let asked = |name: &str| Some(size(all.iter().find(|it| it.name == name)?.asks));
        let resizes = place.nothing_was_raised(asked)?;
        ensure!(resizes == 9, "{resizes} resizes");
        Ok(())
    })
}

#[test]
fn marks_of_a_template_lower_the_liars_own_at_most() -> Result<()> {
    run(async {
        let place = Place::new("deployer").await?;
        let path = format!("/apis/apps/v1/namespaces/{}/replicasets", place.name);
        for forgery in forgeries() {
            let template = forgery.pod("");
            let (mut metadata, spec) = (template["metadata"].clone(), &template["spec"]);
            metadata
                .as_object_mut()
                .context("an object")?
                .remove("name");
            let owner = json!({
                "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": forgery.name},
                "spec": {
                    "selector": {"matchLabels": {"app": forgery.app}},
                    "template": {"metadata": metadata, "spec": spec},
                },
            });
            let owner = eventually("the deployer's rights are known", SOON, || async {
                place.bed.deployer.post(&path, &owner).await?.accepted()
            })
            .await?;
            // There is no controller here: this is what it does.
            let template = &owner["spec"]["template"];
            let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]});
            pod["metadata"]["name"] = format!("{}-1", forgery.name).into();
            pod["metadata"]["ownerReferences"] = json!([{
                "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": forgery.name, "controller": true,
                "uid": owner["metadata"]["uid"],
            }]);
            let done = forgery.check(&place, &place.bed.admin, &pod).await;
            done.with_context(|| forgery.name)?;
        }
        let all = forgeries();
        let asked = |name: &str| {
            let name = name.strip_suffix("-1")?;
            Some(size(all.iter().find(|it| it.name == name)?.asks))
        };
        let resizes = place.nothing_was_raised(asked)?;
        ensure!(resizes == 9, "{resizes} resizes");
        Ok(())
    })
}

/// Where nobody asked us (here: by the pod's namespace; when no replica answers it is the same), forged marks get into the
/// cluster. The leader then goes by them, and lowers.
#[test]
fn marks_that_got_past_the_webhook_only_lower() -> Result<()> {
    run(async {
        let bed = bed().await?;
        let place = Place {
            bed,
            name: "kube-system",
        };
        let end = r#","boost":"b","end":{"fixedSeconds":1}"#;
        let cases = [
            ("lower", record("100m/200m", "500m/1", end), "100m/200m"),
            ("higher", record("8/16", "500m/1", end), "500m/1"),
            ("not-set", record("100m/200m", "2/4", end), "500m/1"),
        ];
        for (name, record, then) in &cases {
            let mut pod = pod(name);
            pod["metadata"]["labels"][KEY] = "b".into();
            pod["metadata"]["annotations"] = json!({KEY: record});
            let created = place.create(&bed.admin, &pod).await?;
            ensure!(*cpu_of(&created) == cpu("500m", "1"), "we were asked");
            place.runs(name).await?;
            let ended = place.settled(name).await?;
            ensure!(*cpu_of(&ended) == size(then), "{name}: {}", cpu_of(&ended));
        }
        let resizes = place.nothing_was_raised(|_| Some(cpu("500m", "1")))?;
        ensure!(resizes == 1, "{resizes} resizes");
        Ok(())
    })
}

// === our own account ===

/// What [`our_account_may_only_lower`] resizes: nothing comes of it, all is tried as a dry run.
fn sized_pods() -> Vec<Value> {
    let of = |name: &str, spec: Value| {
        let annotations = json!({"testbed/schedule": "never"});
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "annotations": annotations}, "spec": spec})
    };
    let app = |resources: Value| json!({"name": "app", "image": "x", "resources": resources});
    let mut sidecar = app(cpu("100m", "200m"));
    sidecar["name"] = "side".into();
    sidecar["restartPolicy"] = "Always".into();
    let memory = json!({"requests": {"cpu": "500m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}});
    let many = (0..200).map(|number| {
        let mut container = app(memory.clone());
        container["name"] = format!("c{number}").into();
        container
    });
    let many: Vec<_> = many.collect();
    vec![
        of(
            "sized",
            json!({"initContainers": [sidecar], "containers": [app(memory)]}),
        ),
        of(
            "no-cpu",
            json!({"containers": [app(json!({"requests": {"memory": "64Mi"}}))]}),
        ),
        of(
            "no-limit",
            json!({"containers": [app(json!({"requests": {"cpu": "500m"}}))]}),
        ),
        of(
            "whole",
            json!({"resources": cpu("2", "4"), "containers": [app(cpu("500m", "1"))]}),
        ),
        of("many", json!({"containers": many})),
    ]
}

/// The `spec` of a resize in words: container (`*` is each of many, `pod` the pod as a whole), and what it is to have.
fn resize(text: &str) -> Result<Value> {
    let (whose, what) = text.split_once(' ').context("two words")?;
    let mut resources = json!({});
    for value in what.split(' ') {
        let (path, value) = value.split_once('=').context("a value")?;
        let (kind, key) = path.split_once('.').context("a kind of value")?;
        resources[kind][key] = value.into();
    }
    let of = |name: String| json!({"name": name, "resources": resources});
    Ok(match whose {
        "pod" => json!({"resources": resources}),
        "side" => json!({"initContainers": [of("side".to_owned())]}),
        "*" => {
            let all = (0..200).map(|number| of(format!("c{number}")));
            json!({"containers": all.collect::<Vec<_>>()})
        }
        name => json!({"containers": [of(name.to_owned())]}),
    })
}

#[test]
fn our_account_may_only_lower() -> Result<()> {
    const DENIED: [(&str, &str, &str); 15] = [
        ("sized", "app requests.cpu=501m", NO_RAISE),
        ("sized", "app limits.cpu=1001m", NO_RAISE),
        ("sized", "side requests.cpu=101m", NO_RAISE),
        ("sized", "side limits.cpu=201m", NO_RAISE),
        ("sized", "app requests.memory=65Mi", NOTHING_ELSE),
        ("sized", "app requests.memory=63Mi", NOTHING_ELSE),
        ("sized", "app limits.memory=2Gi", NOTHING_ELSE),
        ("sized", "app limits.memory=512Mi", NOTHING_ELSE),
        ("no-cpu", "app requests.cpu=1m", NO_RAISE),
        ("no-limit", "app limits.memory=1Gi", NOTHING_ELSE),
        ("whole", "pod requests.cpu=3", NOTHING_ELSE),
        ("whole", "pod requests.cpu=1", NOTHING_ELSE),
        ("whole", "pod limits.cpu=8", NOTHING_ELSE),
        ("whole", "pod requests.memory=1Gi", NOTHING_ELSE),
        ("many", "* requests.cpu=501m", NO_RAISE),
    ];
    const ALLOWED: [(&str, &str); 5] = [
        ("sized", "app requests.cpu=400m limits.cpu=900m"),
        ("sized", "side requests.cpu=50m limits.cpu=100m"),
        ("no-limit", "app limits.cpu=1"),
        ("whole", "app requests.cpu=400m limits.cpu=900m"),
        // What the expressions may cost is enough for the largest pod that is boosted.
        ("many", "* requests.cpu=400m limits.cpu=900m"),
    ];
    run(async {
        let place = Place::new("lower-only").await?;
        let ours = &place.bed.ours;
        for pod in sized_pods() {
            place.create(&place.bed.admin, &pod).await?;
        }
        let resize = async |name: &str, text: &str| {
            let path = format!("{}/resize?dryRun=All", place.path(name));
            let body = json!({"spec": resize(text)?});
            ours.patch(&path, STRATEGIC, &body).await
        };
        for (name, text, words) in DENIED {
            let answer = resize(name, text).await?;
            refused(&answer, words).with_context(|| format!("{name}: {text}"))?;
        }
        for (name, text) in ALLOWED {
            let answer = resize(name, text).await?;
            answer
                .accepted()
                .with_context(|| format!("{name}: {text}"))?;
        }
        // What is in a resize beside resources is dropped by the API server itself.
        let path = format!("{}/resize?dryRun=All", place.path("sized"));
        let marks = json!({"finalizers": ["example.com/x"], "labels": {"x": "x"}});
        let beside = json!({"metadata": marks});
        let resized = ours.patch(&path, STRATEGIC, &beside).await?.accepted()?;
        let metadata = &resized["metadata"];
        ensure!(metadata["finalizers"].is_null() && metadata["labels"].is_null());
        let image = json!({"spec": {"containers": [{"name": "app", "image": "other"}]}});
        let resized = ours.patch(&path, STRATEGIC, &image).await?.accepted()?;
        ensure!(resized["spec"]["containers"][0]["image"] == "x");
        Ok(())
    })
}

/// `patch pods` reaches far more than metadata.
#[test]
fn our_account_may_only_change_its_marks() -> Result<()> {
    run(async {
        let place = Place::new("marks-only").await?;
        let (ours, admin) = (&place.bed.ours, &place.bed.admin);
        let mut made = pod("p");
        made["metadata"]["annotations"] = json!({"mine": "x"});
        place.create(admin, &made).await?;
        let stored = place.runs("p").await?;
        let mut tolerations = stored["spec"]["tolerations"].clone();
        let all = json!({"operator": "Exists"});
        tolerations.as_array_mut().context("a list")?.push(all);
        let owner =
            json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "none", "uid": "1-2-3"});
        let image = json!({"spec": {"containers": [{"name": "app", "image": "other"}]}});
        let bodies = [
            image.clone(),
            json!({"spec": {"activeDeadlineSeconds": 1}}),
            json!({"spec": {"tolerations": tolerations}}),
            json!({"metadata": {"labels": {"app": "other"}}}),
            json!({"metadata": {"labels": {"app": null}}}),
            json!({"metadata": {"labels": {"app": null, "other": "a"}}}),
            json!({"metadata": {"labels": {"app": null, KEY: "b"}}}),
            json!({"metadata": {"labels": {"new": ""}}}),
            json!({"metadata": {"annotations": {"mine": "y"}}}),
            json!({"metadata": {"annotations": {"mine": null}}}),
            json!({"metadata": {"annotations": {"new": ""}}}),
            json!({"metadata": {"annotations": null}}),
            json!({"metadata": {"finalizers": ["example.com/x"]}}),
            json!({"metadata": {"ownerReferences": [owner]}}),
        ];
        let path = format!("{}?dryRun=All", place.path("p"));
        for body in bodies {
            let answer = ours.patch(&path, STRATEGIC, &body).await?;
            refused(&answer, NOTHING_ELSE).with_context(|| body.to_string())?;
            // Without the policy it is more than a way to write nonsense.
            let answer = admin.patch(&path, STRATEGIC, &body).await?;
            answer.accepted().with_context(|| body.to_string())?;
        }
        let with_ours = json!({"metadata": {"labels": {KEY: null}}, "spec": image["spec"]});
        let answer = ours.patch(&path, STRATEGIC, &with_ours).await?;
        refused(&answer, NOTHING_ELSE)?;

        let finish = json!({"metadata": {"labels": {KEY: null}, "annotations": {KEY: "{}"}}});
        for body in [
            finish.clone(),
            json!({"metadata": {"annotations": {KEY: null}}}),
            json!({"metadata": {"labels": {KEY: "other"}}}),
        ] {
            let answer = ours.patch(&path, MERGE, &body).await?;
            answer.accepted().with_context(|| body.to_string())?;
        }

        // As many labels and annotations as nobody has do not cost the API server's patience, nor us the finish.
        let many = |count: usize| (0..count).map(|number| (format!("n{number}"), json!("")));
        for count in [990, 3000] {
            let many: serde_json::Map<_, _> = many(count).collect();
            let change = json!({"metadata": {"labels": many, "annotations": many}});
            let changed = admin.patch(&place.path("p"), MERGE, &change).await?;
            changed.accepted()?;
            let answer = ours.patch(&path, MERGE, &finish).await?;
            answer.accepted().with_context(|| count.to_string())?;
        }
        Ok(())
    })
}

/// Asks whether our account may.
async fn may(verb: &str, group: &str, resource: &str, more: Value) -> Result<bool> {
    let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
    let mut attributes =
        json!({"verb": verb, "group": group, "resource": resource, "subresource": subresource});
    json_patch::merge(&mut attributes, &more);
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    });
    let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    let answer = bed().await?.ours.post(path, &review).await?.accepted()?;
    Ok(answer["status"]["allowed"] == true)
}

/// Resources, where they have one after their group, and verbs.
const DENIED: &str = "
    secrets: get list watch create delete patch update
    pods: create delete deletecollection update
    pods/status: patch update
    pods/resize: get update
    pods/exec: get create
    pods/attach: get create
    pods/portforward: get create
    pods/proxy: get create
    pods/log: get
    pods/ephemeralcontainers: patch update
    pods/eviction: create
    pods/binding: create
    bindings: create
    configmaps: get list create patch update
    serviceaccounts: get list create patch impersonate
    serviceaccounts/token: create
    users: impersonate
    groups: impersonate
    namespaces: create delete patch update
    nodes: patch update delete
    nodes/proxy: get create
    apps deployments: list create patch update delete
    apps replicasets: list create patch update delete
    batch jobs: list create patch update delete
    coordination.k8s.io leases: list create delete patch
    certificates.k8s.io certificatesigningrequests/approval: update
    autoscaling.x-k8s.io startupcpuboosts: create delete patch update
    autoscaling.x-k8s.io clusterstartupcpuboosts: create delete patch update
    admissionregistration.k8s.io mutatingwebhookconfigurations: create delete patch update
    admissionregistration.k8s.io validatingwebhookconfigurations: create delete patch update
    admissionregistration.k8s.io validatingadmissionpolicies: create delete patch update
    admissionregistration.k8s.io validatingadmissionpolicybindings: create delete patch update
    rbac.authorization.k8s.io clusterroles: create patch update bind escalate
    rbac.authorization.k8s.io clusterrolebindings: create patch update
    rbac.authorization.k8s.io roles: create patch update bind escalate
    rbac.authorization.k8s.io rolebindings: create patch update
    apiextensions.k8s.io customresourcedefinitions: create patch update";

#[test]
fn our_account_has_no_other_rights() -> Result<()> {
    const ADMISSION: &str = "admissionregistration.k8s.io";
    run(async {
        for line in DENIED.lines().filter(|line| !line.is_empty()) {
            let (resource, verbs) = line.trim().split_once(": ").context("verbs")?;
            let (group, resource) = resource.split_once(' ').unwrap_or(("", resource));
            for verb in verbs.split(' ') {
                for namespace in ["default", SYSTEM_NAMESPACE, "kube-system"] {
                    let place = json!({"namespace": namespace});
                    let may = may(verb, group, resource, place).await?;
                    ensure!(!may, "may {verb} {resource} in {namespace}");
                }
            }
        }
        // The names that it has rights by.
        let own = json!({"namespace": SYSTEM_NAMESPACE, "name": "headstart-certificates"});
        ensure!(may("update", "", "secrets", own.clone()).await?);
        for verb in ["get", "patch", "delete", "create"] {
            ensure!(
                !may(verb, "", "secrets", own.clone()).await?,
                "may {verb} it"
            );
        }
        let elsewhere = json!({"namespace": "default", "name": "headstart-certificates"});
        ensure!(!may("update", "", "secrets", elsewhere).await?);
        let webhooks = "mutatingwebhookconfigurations";
        ensure!(may("patch", ADMISSION, webhooks, json!({"name": "headstart"})).await?);
        ensure!(!may("patch", ADMISSION, webhooks, json!({"name": "other"})).await?);
        real_requests_are_refused().await
    })
}

/// What the reviews say, met by requests.
async fn real_requests_are_refused() -> Result<()> {
    let bed = bed().await?;
    let refused = |answer: &Answer| refused(answer, OURS);
    refused(&bed.ours.get("/api/v1/secrets").await?)?;
    let secrets = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets");
    refused(&bed.ours.get(&secrets).await?)?;
    refused(
        &bed.ours
            .get(&format!("{secrets}/headstart-certificates"))
            .await?,
    )?;
    let own = format!("{secrets}?fieldSelector=metadata.name%3Dheadstart-certificates");
    let listed = bed.ours.get(&own).await?.accepted()?;
    ensure!(
        listed["items"]
            .as_array()
            .is_some_and(|items| items.len() == 1)
    );
    refused(&bed.ours.post(&pods("default"), &pod("ours")).await?)?;
    let existing = format!("{}/never", pods("default"));
    refused(&bed.ours.delete(&existing).await?)?;
    let request = Request::get("/api/v1/secrets").header("Impersonate-User", "admin");
    let request = request.header("Impersonate-Group", "system:masters");
    let answer = bed
        .ours_client
        .send(request.body(Vec::new().into())?)
        .await?;
    ensure!(answer.status() == 403, "impersonating: {}", answer.status());
    Ok(())
}

/// What nothing holds: it needs this right to publish its CA, and no policy is asked about webhook configurations. Whoever has
/// our token can have pods of the whole cluster, and more, sent to a server of their own. `docs/security.md` says so.
#[test]
fn our_account_can_point_its_webhook_elsewhere() -> Result<()> {
    run(async {
        let path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/headstart?dryRun=All";
        let rules = json!([{"operations": ["*"], "apiGroups": ["*"], "apiVersions": ["*"], "resources": ["*/*"]}]);
        let elsewhere = json!([
            {"op": "replace", "path": "/webhooks/0/clientConfig", "value": {"url": "https://example.com/"}},
            {"op": "replace", "path": "/webhooks/0/rules", "value": rules},
        ]);
        let ours = &bed().await?.ours;
        let patched = ours.patch(path, JSON_PATCH, &elsewhere).await?.accepted()?;
        let url = &patched["webhooks"][0]["clientConfig"]["url"];
        ensure!(url == "https://example.com/");
        Ok(())
    })
}

// === our own pods ===

/// What the template would be with less: where, its value there, and why it is refused.
const LESS: &str = r#"
    /spec/securityContext/runAsUser | 0 | runAsUser=0
    /spec/securityContext/runAsNonRoot | none | runAsNonRoot != true
    /spec/securityContext/seccompProfile | none | seccompProfile
    /spec/containers/0/securityContext/capabilities | none | unrestricted capabilities
    /spec/containers/0/securityContext/allowPrivilegeEscalation | none | allowPrivilegeEscalation != false
    /spec/hostNetwork | true | host namespaces
    /spec/volumes | [{"name": "v", "hostPath": {"path": "/"}}] | hostPath"#;

#[test]
fn our_pods_meet_the_strictest_pod_security() -> Result<()> {
    run(async {
        let bed = bed().await?;
        let namespace = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}");
        let enforced = bed.admin.get(&namespace).await?.accepted()?["metadata"]["labels"]
            ["pod-security.kubernetes.io/enforce"]
            .clone();
        ensure!(enforced == "restricted", "{enforced}");
        let text = std::fs::read_to_string(manifests().join("deployment.yaml"))?;
        let deployment: Value = serde_saphyr::from_str(&text)?;
        let mut pod = deployment["spec"]["template"].clone();
        pod["metadata"]["name"] = "headstart".into();
        let create = format!("{}?dryRun=All", pods(SYSTEM_NAMESPACE));
        bed.admin.post(&create, &pod).await?.accepted()?;

        for line in LESS.lines().filter(|line| !line.is_empty()) {
            let [path, value, words] = line.splitn(3, " | ").map(str::trim).collect::<Vec<_>>()[..]
            else {
                anyhow::bail!("not three parts: {line}");
            };
            let change = match value {
                "none" => json!([{"op": "remove", "path": path}]),
                value => {
                    let value: Value = serde_json::from_str(value)?;
                    json!([{"op": "add", "path": path, "value": value}])
                }
            };
            let mut changed = pod.clone();
            let change: json_patch::Patch = serde_json::from_value(change)?;
            json_patch::patch(&mut changed, &change)?;
            let answer = bed.admin.post(&create, &changed).await?;
            refused(&answer, "violates PodSecurity").context(line)?;
            ensure!(answer.said().contains(words), "{line}: {}", answer.said());
        }
        Ok(())
    })
}
