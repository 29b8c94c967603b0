//! The Helm chart: it makes what the kustomization makes, values say what differs, and an upgrade takes nothing away that the
//! program has written. `UPDATE_CHART=1 cargo test --test chart` writes the copies in `files/` and the table of values.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    ffi::OsStr,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use clap::CommandFactory as _;
use headstart::cli::Cli;
use serde_json::{Value, json};
use testbed::{
    ControlPlane, Operator, OperatorOptions, Options, Rest,
    binaries::helm,
    cluster::{SYSTEM_NAMESPACE, manifests},
    eventually,
    kustomize::kustomize,
    view::API_SERVICE_PATH,
};

const SOON: Duration = Duration::from_secs(60);
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Where README.md has the table of values; it ends at an empty line.
const HEAD: &str = "| value | default | what |\n|---|---|---|\n";

/// By kind, namespace and name.
type Objects = BTreeMap<(String, String, String), Value>;

fn chart() -> PathBuf {
    manifests().join("chart")
}

fn read(file: &str) -> Result<String> {
    fs::read_to_string(chart().join(file)).with_context(|| file.to_owned())
}

fn values() -> Result<Value> {
    Ok(serde_saphyr::from_str(&read("values.yaml")?)?)
}

/// Runs Helm, with no settings but ours, on `values` where a command takes them.
fn run_helm<A: AsRef<OsStr>>(args: &[A], values: &Value, kubeconfig: &Path) -> Result<Output> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("values.yaml");
    fs::write(&file, values.to_string())?;
    let mut command = Command::new(helm()?);
    command.args(args).env("KUBECONFIG", kubeconfig);
    if !values.is_null() {
        command.arg("--values").arg(&file);
    }
    for home in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        command.env(home, folder.path().join(home));
    }
    Ok(command.output()?)
}

fn succeed(output: Output) -> Result<String> {
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "helm: {errors}");
    Ok(String::from_utf8(output.stdout)?)
}

fn template(chart: &Path, namespace: &str, values: &Value) -> Result<Output> {
    let chart = chart.to_str().context("the chart's path is no UTF-8")?;
    let args = ["template", "headstart", chart, "--namespace", namespace];
    run_helm(&args, values, Path::new("/dev/null"))
}

/// What Helm makes of the chart.
fn render(namespace: &str, values: &Value) -> Result<Objects> {
    let text = succeed(template(&chart(), namespace, values)?)?;
    by_name(serde_saphyr::from_multiple(&text)?)
}

fn by_name(objects: Vec<Value>) -> Result<Objects> {
    let count = objects.len();
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let objects = objects.into_iter().map(|object| {
        let (kind, metadata) = (word(&object["kind"]), &object["metadata"]);
        let key = (kind, word(&metadata["namespace"]), word(&metadata["name"]));
        (key, object)
    });
    let objects: Objects = objects.collect();
    ensure!(objects.len() == count, "an object is there twice");
    Ok(objects)
}

/// What Helm says against these values.
fn refusal(values: &Value) -> Result<String> {
    let output = template(&chart(), SYSTEM_NAMESPACE, values)?;
    ensure!(!output.status.success(), "{values} is not refused");
    Ok(String::from_utf8(output.stderr)?)
}

fn only_container(deployment: &Value) -> &Value {
    &deployment["spec"]["template"]["spec"]["containers"][0]
}

fn deployment(objects: &Objects) -> Result<&Value> {
    let mut found = objects.values();
    let found = found.find(|object| object["kind"] == "Deployment");
    found.context("there is no Deployment")
}

/// The kustomization's objects, as the chart means to have them.
fn meant(overlay: &Value) -> Result<Objects> {
    let mut objects = by_name(kustomize(overlay)?)?;
    // Helm makes the namespace (--create-namespace): as a part of a release, an uninstall would take all in it away.
    objects.retain(|(kind, ..), _| kind != "Namespace");
    for ((kind, ..), object) in &mut objects {
        // Whose they are. `name` is the label that the kustomization gives too, to all but what stands by itself in monitoring/.
        for (label, value) in [
            ("app.kubernetes.io/instance", "headstart".to_owned()),
            ("app.kubernetes.io/managed-by", "Helm".to_owned()),
            ("app.kubernetes.io/name", "headstart".to_owned()),
            ("app.kubernetes.io/version", VERSION.to_owned()),
            ("helm.sh/chart", format!("headstart-{VERSION}")),
        ] {
            object["metadata"]["labels"][label] = value.into();
        }
        // With a definition, all its boosts would go.
        if kind == "CustomResourceDefinition" {
            object["metadata"]["annotations"]["helm.sh/resource-policy"] = "keep".into();
        }
        sort_variables(object);
    }
    Ok(objects)
}

/// Their order means nothing, and is another where kustomize puts a component's before those that are there.
fn sort_variables(object: &mut Value) {
    if let Some(variables) = object.pointer_mut("/spec/template/spec/containers/0/env")
        && let Some(variables) = variables.as_array_mut()
    {
        variables.sort_by_key(|variable| variable["name"].to_string());
    }
}

fn compare(values: &Value, overlay: &Value) -> Result<()> {
    let mut made = render(SYSTEM_NAMESPACE, values)?;
    made.values_mut().for_each(sort_variables);
    let meant = meant(overlay)?;
    let names = |objects: &Objects| objects.keys().cloned().collect::<BTreeSet<_>>();
    let different: Vec<_> = names(&made)
        .symmetric_difference(&names(&meant))
        .cloned()
        .collect();
    ensure!(different.is_empty(), "{values}: only one has {different:?}");
    for (name, object) in &made {
        ensure!(
            *object == meant[name],
            "{values}: {name:?} is\n{object:#}\nand should be\n{:#}",
            meant[name]
        );
    }
    Ok(())
}

#[test]
fn it_makes_what_the_kustomization_makes() -> Result<()> {
    let on = json!({"enabled": true});
    let monitoring = json!({"podMonitor": true, "rules": true, "dashboard": true});
    let component = |name: &str| json!({"resources": ["manifests"], "components": [format!("manifests/{name}")]});
    compare(&json!({}), &json!({"resources": ["manifests"]}))?;
    compare(&json!({"view": on}), &component("view"))?;
    compare(&json!({"raises": on}), &component("raises"))?;
    compare(&json!({"certManager": on}), &component("cert-manager"))?;
    compare(
        &json!({"view": on, "raises": on, "certManager": on, "monitoring": monitoring}),
        &json!({
            "resources": ["manifests", "manifests/monitoring"],
            "components": ["manifests/view", "manifests/raises", "manifests/cert-manager"],
        }),
    )
}

/// Fails where a file of the chart is not this, or writes it.
fn keep(file: &str, text: &str) -> Result<()> {
    let path = chart().join(file);
    if env::var_os("UPDATE_CHART").is_some() {
        return fs::write(path, text).with_context(|| file.to_owned());
    }
    ensure!(
        fs::read_to_string(path)? == text,
        "{file} is not as it should be: run `UPDATE_CHART=1 cargo test --test chart`"
    );
    Ok(())
}

/// All files below a folder of the chart.
fn files(folder: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(chart().join(folder))? {
        let entry = entry?;
        let name = entry.file_name();
        let name = format!("{folder}/{}", name.to_str().context("a name")?);
        if entry.file_type()?.is_dir() {
            found.extend(files(&name)?);
        } else {
            found.push(name);
        }
    }
    Ok(found)
}

/// Helm reads nothing outside of a chart, and Flux and Windows don't follow links, so these are copies.
#[test]
fn its_files_are_the_manifests() -> Result<()> {
    let files = files("files")?;
    assert!(!files.is_empty());
    for file in files {
        let original = file.strip_prefix("files/").context("a file of files/")?;
        let original = fs::read_to_string(manifests().join(original));
        keep(&file, &original.with_context(|| file.clone())?)?;
    }
    let about: Value = serde_saphyr::from_str(&read("Chart.yaml")?)?;
    assert_eq!(about["version"], VERSION);
    assert_eq!(about["appVersion"], VERSION);
    Ok(())
}

#[test]
fn helm_has_nothing_against_it_and_packs_all_of_it() -> Result<()> {
    let (folder, chart) = (tempfile::tempdir()?, chart());
    let nowhere = Path::new("/dev/null");
    let lint = [OsStr::new("lint"), OsStr::new("--strict"), chart.as_ref()];
    succeed(run_helm(&lint, &Value::Null, nowhere)?)?;
    let package = [OsStr::new("package"), chart.as_ref()];
    let to = [OsStr::new("--destination"), folder.path().as_ref()];
    succeed(run_helm(&[package, to].concat(), &Value::Null, nowhere)?)?;
    let packed = folder.path().join(format!("headstart-{VERSION}.tgz"));
    let of = |chart: &Path| succeed(template(chart, SYSTEM_NAMESPACE, &json!({}))?);
    assert_eq!(of(&packed)?, of(&chart)?);
    Ok(())
}

/// What each switch takes away, and nothing else.
#[test]
fn what_is_switched_off_is_gone() -> Result<()> {
    let whole = render(SYSTEM_NAMESPACE, &json!({}))?;
    let policy = |name: &str| {
        let kinds = [
            "ValidatingAdmissionPolicy",
            "ValidatingAdmissionPolicyBinding",
        ];
        kinds
            .map(|kind| format!("{kind} headstart-{name}"))
            .to_vec()
    };
    for (values, gone) in [
        (
            json!({"crds": {"install": false}}),
            ["clusterstartupcpuboosts", "startupcpuboosts"]
                .map(|name| format!("CustomResourceDefinition {name}.autoscaling.x-k8s.io"))
                .to_vec(),
        ),
        (
            json!({"userRoles": false}),
            ["edit", "view"]
                .map(|name| format!("ClusterRole headstart-{name}"))
                .to_vec(),
        ),
        (
            json!({"networkPolicy": {"enabled": false}}),
            vec!["NetworkPolicy headstart".to_owned()],
        ),
        (
            json!({"podDisruptionBudget": {"enabled": false}}),
            vec!["PodDisruptionBudget headstart".to_owned()],
        ),
        (json!({"policies": {"record": false}}), policy("record")),
        (
            json!({"policies": {"lowerOnly": false}}),
            policy("lower-only"),
        ),
        (
            json!({"policies": {"marksOnly": false}}),
            policy("marks-only"),
        ),
    ] {
        let left = render(SYSTEM_NAMESPACE, &values)?;
        let mut expected = whole.clone();
        expected.retain(|(kind, _, name), _| !gone.contains(&format!("{kind} {name}")));
        ensure!(left == expected, "{values} takes away something else");
        ensure!(left.len() + gone.len() == whole.len(), "{values}: {gone:?}");
    }
    Ok(())
}

#[test]
fn values_get_where_they_belong() -> Result<()> {
    let digest = format!("sha256:{}", "0a".repeat(32));
    let values = json!({
        "replicas": 2,
        "image": {"repository": "example.com/headstart", "digest": digest, "pullPolicy": "Always", "pullSecrets": [{"name": "pull"}]},
        "args": ["--max-boosted-cpu=4"],
        "env": [{"name": "LOG_FORMAT", "value": "text"}],
        "resources": {"limits": {"cpu": 1, "memory": "1Gi"}},
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
        "priorityClassName": "mine",
        "nodeSelector": {"pool": "infra"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": null,
        "topologySpreadConstraints": [],
        "raises": {"enabled": true, "boostMissedPods": false},
        "certManager": {"enabled": true, "issuerRef": {"kind": "ClusterIssuer", "name": "mine"}},
        "monitoring": {"podMonitor": true, "labels": {"release": "prometheus"}},
    });
    // A namespace that YAML would take for a number.
    let objects = render("123", &values)?;
    for ((kind, namespace, name), object) in &objects {
        let text = object.to_string();
        ensure!(!text.contains(SYSTEM_NAMESPACE), "{kind} {name}: {text}");
        ensure!(["", "123"].contains(&&**namespace), "{kind} {name}");
    }
    assert!(!objects.keys().any(|(kind, ..)| kind == "ResourceQuota"));
    let issuers = objects.keys().filter(|(kind, ..)| kind == "Issuer");
    assert_eq!(issuers.count(), 0);
    let of = |kind: &str| &objects[&(kind.to_owned(), "123".to_owned(), "headstart".to_owned())];
    assert_eq!(of("Certificate")["spec"]["issuerRef"]["name"], "mine");
    assert_eq!(
        of("Certificate")["spec"]["dnsNames"][0],
        "headstart.123.svc"
    );
    assert_eq!(
        of("PodMonitor")["metadata"]["labels"]["release"],
        "prometheus"
    );

    let deployment = deployment(&objects)?;
    assert_eq!(deployment["spec"]["replicas"], 2);
    let template = &deployment["spec"]["template"];
    let labels = json!({"app.kubernetes.io/name": "headstart", "c": "d"});
    assert_eq!(template["metadata"]["labels"], labels);
    assert_eq!(template["metadata"]["annotations"], json!({"a": "b"}));
    let pod = &template["spec"];
    assert_eq!(pod["priorityClassName"], "mine");
    let nodes = json!({"kubernetes.io/os": "linux", "pool": "infra"});
    assert_eq!(pod["nodeSelector"], nodes);
    assert_eq!(pod["tolerations"], json!([{"operator": "Exists"}]));
    assert_eq!(pod["imagePullSecrets"], json!([{"name": "pull"}]));
    assert_eq!(pod.get("affinity"), None);
    assert_eq!(pod.get("topologySpreadConstraints"), None);
    let container = only_container(deployment);
    let image = format!("example.com/headstart@{digest}");
    assert_eq!(container["image"], image);
    assert_eq!(container["imagePullPolicy"], "Always");
    assert_eq!(container["args"], json!(["run", "--max-boosted-cpu=4"]));
    let resources = json!({"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"cpu": 1, "memory": "512Mi"}});
    assert_eq!(container["resources"], resources);
    let names: BTreeSet<_> = variables(container).collect();
    let expected = [
        "BOOST_ON_RESTART",
        "CERTIFICATE_DIRECTORY",
        "LOG_FORMAT",
        "POD_NAME",
        "POD_NAMESPACE",
    ];
    assert_eq!(names, BTreeSet::from(expected));
    Ok(())
}

fn variables(container: &Value) -> impl Iterator<Item = &str> {
    let variables = container["env"].as_array().into_iter().flatten();
    variables.filter_map(|variable| variable["name"].as_str())
}

/// Twice in one container, the later would win, and what fits it would not be there: rights, policies, memory.
#[test]
fn what_the_chart_sets_is_not_set_again() -> Result<()> {
    let on = json!({"enabled": true});
    let all = render(
        SYSTEM_NAMESPACE,
        &json!({"view": on, "raises": on, "certManager": on}),
    )?;
    let command = Cli::command();
    let run = command.find_subcommand("run").context("the verb run")?;
    for name in variables(only_container(deployment(&all)?)) {
        let refused = refusal(&json!({"env": [{"name": name, "value": "x"}]}))?;
        ensure!(refused.contains("/env/0/name"), "{refused}");
        let mut flags = run.get_arguments();
        let flag = flags.find(|flag| flag.get_env().is_some_and(|env| env == name));
        let flag = flag.and_then(|flag| flag.get_long()).context("its flag")?;
        for word in [format!("--{flag}"), format!("--{flag}=x")] {
            let refused = refusal(&json!({"args": [word]}))?;
            ensure!(refused.contains("/args/0"), "{refused}");
        }
    }
    let refused = refusal(&json!({"podLabels": {"app.kubernetes.io/name": "other"}}))?;
    // It says so of the wrong value, but names the label.
    ensure!(refused.contains("app.kubernetes.io/name"), "{refused}");
    Ok(())
}

/// The paths that have a comment right above them in `values.yaml`, with that.
fn documented() -> Result<Vec<(String, String)>> {
    let (mut found, mut comment, mut path) =
        (Vec::new(), Vec::new(), Vec::<(usize, String)>::new());
    for line in read("values.yaml")?.lines() {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        if let Some(words) = text.strip_prefix('#') {
            comment.push(words.trim().to_owned());
            continue;
        }
        let comment = std::mem::take(&mut comment).join(" ");
        let Some((key, _)) = text.split_once(':') else {
            continue;
        };
        path.retain(|(outer, _)| *outer < indent);
        path.push((indent, key.to_owned()));
        if !comment.is_empty() {
            let keys: Vec<_> = path.iter().map(|(_, key)| key.as_str()).collect();
            found.push((keys.join("."), comment));
        }
    }
    Ok(found)
}

fn pointer(path: &str) -> String {
    format!("/{}", path.replace('.', "/"))
}

/// Paths of all that holds no further values, unless it is part of what `documented` says.
fn undocumented(values: &Value, path: &str, documented: &BTreeSet<&str>, found: &mut Vec<String>) {
    for (key, value) in values.as_object().into_iter().flatten() {
        let path = format!("{path}{key}");
        if documented.contains(path.as_str()) {
            continue;
        }
        match value.as_object() {
            Some(inner) if !inner.is_empty() => {
                undocumented(value, &format!("{path}."), documented, found);
            }
            _ => found.push(path),
        }
    }
}

#[test]
fn the_readme_lists_all_values() -> Result<()> {
    let (values, documented) = (values()?, documented()?);
    let paths = documented.iter().map(|(path, _)| path.as_str()).collect();
    let mut missing = Vec::new();
    undocumented(&values, "", &paths, &mut missing);
    ensure!(missing.is_empty(), "{missing:?} have no comment");
    let mut table = HEAD.to_owned();
    for (path, comment) in &documented {
        let default = values.pointer(&pointer(path));
        let default = default.with_context(|| path.clone())?.to_string();
        let default = if default.len() > 40 {
            "as in [values.yaml](values.yaml)".to_owned()
        } else {
            format!("`{default}`")
        };
        writeln!(table, "| `{path}` | {default} | {comment} |")?;
    }
    let readme = read("README.md")?;
    let (before, rest) = readme.split_once(HEAD).context("the table's head")?;
    let (_, after) = rest.split_once("\n\n").unwrap_or((rest, ""));
    keep("README.md", &format!("{before}{table}\n{after}"))
}

/// In a section, a key that is spelled wrong would be silently without effect.
#[test]
fn unknown_values_are_refused() -> Result<()> {
    let values = values()?;
    let mut sections = BTreeSet::from([String::new()]);
    for (path, _) in documented()? {
        sections.extend(path.rsplit_once('.').map(|(section, _)| section.to_owned()));
    }
    assert!(sections.len() > 5, "{sections:?}");
    for section in &sections {
        let mut wrong = json!({"misspelt": true});
        for key in section.rsplit('.').filter(|key| !key.is_empty()) {
            wrong = json!({key: wrong});
        }
        let refused = refusal(&wrong)?;
        ensure!(refused.contains("misspelt"), "{section}: {refused}");
    }
    // And each value that is known has a type.
    for (path, _) in documented()? {
        let mut wrong = json!(1.5);
        for key in path.rsplit('.') {
            wrong = json!({key: wrong});
        }
        ensure!(values.pointer(&pointer(&path)).is_some(), "{path}");
        refusal(&wrong)?;
    }
    Ok(())
}

/// Helm on a cluster.
struct Release<'a>(&'a ControlPlane);

impl Release<'_> {
    fn helm(&self, args: &[&str], values: &Value) -> Result<String> {
        let release = ["--namespace", SYSTEM_NAMESPACE];
        let output = run_helm(
            &[args, &release].concat(),
            values,
            self.0.admin_kubeconfig(),
        )?;
        succeed(output).with_context(|| args.join(" "))
    }

    async fn get(&self, path: &str) -> Result<Value> {
        Rest::new(self.0.admin(), SOON).get(path).await?.accepted()
    }

    /// What the program has written into objects of the release: certificates, the CA by which it is known, who leads.
    async fn written(&self) -> Result<[Value; 4]> {
        let ours = |group: &str, resource: &str| {
            format!("{group}/namespaces/{SYSTEM_NAMESPACE}/{resource}")
        };
        let secret = ours("/api/v1", "secrets/headstart-certificates");
        let lease = ours("/apis/coordination.k8s.io/v1", "leases/headstart");
        let webhook =
            "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/headstart";
        let (secret, lease) = (self.get(&secret).await?, self.get(&lease).await?);
        let (webhook, service) = (self.get(webhook).await?, self.get(API_SERVICE_PATH).await?);
        let written = [
            &secret["data"],
            &webhook["webhooks"][0]["clientConfig"]["caBundle"],
            &service["spec"]["caBundle"],
            &lease["spec"]["holderIdentity"],
        ];
        Ok(written.map(Value::clone))
    }
}

/// Install, upgrade and uninstall on a real API server, around a replica that runs.
#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_takes_nothing_away_and_an_uninstall_leaves_boosts() -> Result<()> {
    let plane = ControlPlane::start(Options::default()).await?;
    let release = Release(&plane);
    let chart = chart();
    let chart = chart.to_str().context("the chart's path is no UTF-8")?;
    let values = |replicas: u8| json!({"replicas": replicas, "view": {"enabled": true}});
    let install = ["install", "headstart", chart, "--create-namespace"];
    let notes = release.helm(&install, &values(3))?;
    ensure!(notes.contains("headstart check"), "{notes}");

    let binary = env!("CARGO_BIN_EXE_headstart");
    let mut options = OperatorOptions::new(binary, "headstart-0");
    options.args.push("--view".to_owned());
    let replica = Operator::start(&plane, &options).await?;
    replica.wait_ready(SOON).await?;
    let before = eventually("it has written all that it writes", SOON, || async {
        let written = release.written().await?;
        ensure!(!written.contains(&Value::Null), "{written:?}");
        Ok(written)
    })
    .await?;

    release.helm(&["upgrade", "headstart", chart], &values(2))?;
    assert_eq!(release.written().await?, before);
    let deployment = ["get", "deployment", "headstart", "-n", SYSTEM_NAMESPACE];
    let replicas = ["-o", "jsonpath={.spec.replicas}"];
    let replicas = plane
        .kubectl_ok(&[&deployment[..], &replicas].concat())
        .await?;
    assert_eq!(replicas, "2");

    let boost = json!({
        "apiVersion": "autoscaling.x-k8s.io/v1alpha1", "kind": "StartupCPUBoost",
        "metadata": {"name": "fast-start", "namespace": "default"},
        "selector": {"matchLabels": {"app": "shop"}},
        "spec": {
            "resourcePolicy": {"containerPolicies": [{"containerName": "app", "percentageIncrease": {"value": 200}}]},
            "durationPolicy": {"podCondition": {"type": "Ready", "status": "True"}},
        },
    });
    plane.apply(&boost.to_string()).await?;
    release.helm(&["uninstall", "headstart"], &Value::Null)?;
    // A definition that was deleted serves its objects until they are gone.
    let crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    for name in ["clusterstartupcpuboosts", "startupcpuboosts"] {
        let path = format!("{crds}/{name}.autoscaling.x-k8s.io");
        let definition = release.get(&path).await?;
        assert_eq!(definition["metadata"].get("deletionTimestamp"), None);
    }
    let boosts = ["get", "startupcpuboosts", "-n", "default", "-o", "name"];
    let boosts = plane.kubectl_ok(&boosts).await?;
    ensure!(boosts.contains("fast-start"), "{boosts}");
    let gone = plane.kubectl(&deployment).await?;
    assert!(!gone.status.success());
    Ok(())
}

/// As docs/install.md says it: after kube-startup-cpu-boost, whose definition lacks fields, and after the kustomization.
#[tokio::test(flavor = "multi_thread")]
async fn it_takes_over_what_others_installed() -> Result<()> {
    let plane = ControlPlane::start(Options::default()).await?;
    let release = Release(&plane);
    let chart = chart();
    let chart = chart.to_str().context("the chart's path is no UTF-8")?;
    let install = ["install", "headstart", chart, "--create-namespace"];
    let take = ["--take-ownership", "--force-conflicts"];
    let taking = [&install[..], &take].concat();

    let upstreams = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/cases/cluster/upstream-crd.yaml"
    );
    plane.kubectl_ok(&["apply", "-f", upstreams]).await?;
    ensure!(
        release.helm(&install, &json!({})).is_err(),
        "it took the definition unasked"
    );
    release.helm(&taking, &json!({}))?;
    let field = "startupcpuboosts.spec.durationPolicy.podCondition.delaySeconds";
    eventually("the definition is ours", SOON, || async {
        plane.kubectl_ok(&["explain", field]).await
    })
    .await?;
    release.helm(&["uninstall", "headstart"], &Value::Null)?;

    let manifests = manifests();
    let manifests = manifests
        .to_str()
        .context("the manifests' path is no UTF-8")?;
    plane.kubectl_ok(&["apply", "-k", manifests]).await?;
    release.helm(&taking, &json!({"replicas": 2})).map(drop)
}
