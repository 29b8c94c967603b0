//! `headstart explain` of the real binary: what it prints is what the docs say, and its JSON is an interface.

#[path = "common/page.rs"]
mod page;

use std::{
    fmt::Write as _,
    fs,
    io::Write as _,
    process::{Command, Stdio},
};

use headstart::domain::reason::Reason;
use serde_json::{Value, json};

const NOW: &str = "--now=2026-12-01T10:00:00Z";

/// Exit status, standard output and standard error.
fn explain(args: &[&str], input: &str) -> (Option<i32>, String, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_headstart"))
        .arg("explain")
        .args(args)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env_clear()
        .env("HOME", "/nonexistent")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let mut stdin = child.stdin.take().expect("it is piped");
    // It may have ended without reading.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output().expect("the binary ends");
    let text = |bytes| String::from_utf8(bytes).expect("it prints text");
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// The one object that is printed for a pod of these documents.
fn object(args: &[&str], documents: &str) -> Value {
    let now = args.iter().any(|arg| arg.starts_with("--now"));
    let now: &[&str] = if now { &[] } else { &[NOW] };
    let args = [&["--pod", "-", "-o", "json"], now, args].concat();
    let (code, out, err) = explain(&args, documents);
    assert_eq!(code, Some(0), "{err}");
    serde_json::from_str(&out).expect("one JSON object")
}

fn example(name: &str) -> String {
    page::read(&format!("docs/explain/{name}.yaml"))
}

#[test]
fn the_page_shows_what_is_printed() {
    let old = page::read("docs/explain.md");
    let mut new = String::new();
    let mut lines = old.lines();
    while let Some(line) = lines.next() {
        let _ = writeln!(new, "{line}");
        if let Some(name) = line.strip_prefix("```text ") {
            let file = format!("docs/explain/{name}.yaml");
            let (code, out, err) = explain(&["--pod", &file, NOW], "");
            assert_eq!(code, Some(0), "{name}: {err}");
            let _ = writeln!(new, "{out}```");
            lines.by_ref().find(|line| *line == "```");
        }
        if line.starts_with("|---|") && new.contains("## Reasons") {
            for reason in Reason::ALL {
                let _ = writeln!(new, "| `{reason}` | {} |", reason.sentence());
            }
            break;
        }
    }
    page::keep("docs/explain.md", &new);
}

#[test]
fn people_who_operate_are_told_of_every_reason() {
    let page = page::read("docs/operate.md");
    let unnamed = Reason::ALL.map(|reason| format!("`{reason}`"));
    let unnamed: Vec<_> = unnamed
        .iter()
        .filter(|reason| !page.contains(reason.as_str()))
        .collect();
    assert_eq!(unnamed, [""; 0], "docs/operate.md says nothing of these");
}

#[test]
fn the_json_form_is_stable() {
    let expected = json!({
        "boost": "web",
        "reason": null,
        "containers": [
            {"name": "app", "decision": "boost", "reason": null,
             "from": {"request": "250m", "limit": "500m"}, "to": {"request": "380m", "limit": "750m"}},
            {"name": "proxy", "decision": "leave", "reason": "NoContainer",
             "from": {"request": "100m", "limit": null}, "to": {"request": "100m", "limit": null}},
        ],
        "record": {
            "state": "Active",
            "timestamp": "2026-12-01T10:00:00Z",
            "initCPURequests": {"app": "250m"},
            "initCPULimits": {"app": "500m"},
            "boostedCPURequests": {"app": "380m"},
            "boostedCPULimits": {"app": "750m"},
            "boost": "web",
            "end": {"condition": {"type": "Ready", "status": "True", "delaySeconds": 0}, "deadlineSeconds": 3600},
        },
        "patch": [
            {"op": "replace", "path": "/spec/containers/0/resources/requests/cpu", "value": "380m"},
            {"op": "replace", "path": "/spec/containers/0/resources/limits/cpu", "value": "750m"},
            {"op": "add", "path": "/metadata/labels/autoscaling.x-k8s.io~1startup-cpu-boost", "value": "web"},
            {"op": "add", "path": "/metadata/annotations", "value": {"autoscaling.x-k8s.io/startup-cpu-boost":
                r#"{"state":"Active","timestamp":"2026-12-01T10:00:00Z","initCPURequests":{"app":"250m"},"initCPULimits":{"app":"500m"},"boostedCPURequests":{"app":"380m"},"boostedCPULimits":{"app":"750m"},"boost":"web","end":{"condition":{"type":"Ready","status":"True","delaySeconds":0},"deadlineSeconds":3600}}"#}},
        ],
    });
    assert_eq!(object(&[], &example("1-plain")), expected);
}

#[test]
fn what_is_not_boosted_says_why() {
    let quota = object(&[], &example("3-quota"));
    assert_eq!(
        (&quota["boost"], &quota["reason"]),
        (&json!("web"), &json!("Quota"))
    );
    assert_eq!(
        (&quota["record"], &quota["patch"]),
        (&Value::Null, &json!([]))
    );
    let ignored = object(&["--ignore-quota"], &example("3-quota"));
    assert_eq!(ignored["containers"][0]["to"]["request"], "2");

    let clamped = object(&[], &example("2-limitrange"));
    assert_eq!(clamped["containers"][0]["reason"], "Clamped");
    assert_eq!(clamped["record"]["clamped"], json!({"app": "LimitRange"}));
    assert_eq!(clamped["containers"][1]["decision"], "leave");

    let unmatched = object(
        &["-n", "elsewhere"],
        &example("1-plain").replacen("{name: web-1, namespace: shop,", "{name: web-1,", 1),
    );
    assert_eq!(
        (&unmatched["boost"], &unmatched["reason"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(unmatched["patch"], json!([]));
}

#[test]
fn the_operators_flags_count() {
    let flag = object(&["--max-boosted-cpu=300m"], &example("1-plain"));
    assert_eq!(
        flag["containers"][0]["to"],
        json!({"request": "300m", "limit": "500m"})
    );
    let removed = object(&["--remove-limits"], &example("1-plain"));
    assert_eq!(removed["containers"][0]["to"]["limit"], Value::Null);
}

#[test]
fn several_files_and_documents_are_taken_together() {
    let text = example("1-plain");
    let (boost, pod) = text.split_once("---\n").expect("two documents");
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    fs::write(path("b.yaml"), boost).expect("written");
    fs::write(path("p.yaml"), format!("{pod}\n---\n{pod}")).expect("written");
    let (boost, pod) = (path("b.yaml"), path("p.yaml"));
    let (code, out, err) = explain(
        &[
            "--boost", &boost, "--pod", &pod, "--pod", &pod, "-o", "json", NOW,
        ],
        "",
    );
    assert_eq!(code, Some(0), "{err}");
    let pods: Vec<Value> = serde_json::Deserializer::from_str(&out)
        .into_iter()
        .map(|pod| pod.expect("JSON"))
        .collect();
    assert_eq!(pods.len(), 4);
    assert!(pods.iter().all(|pod| pod["boost"] == "web"));
}

/// Status 1, and all these words.
#[track_caller]
fn assert_fails(args: &[&str], input: &str, words: &[&str]) {
    let (code, out, err) = explain(args, input);
    assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
    for word in words {
        assert!(err.contains(word), "{word:?} is not in {err}");
    }
}

#[test]
fn what_cannot_be_read_is_named() {
    assert_fails(
        &["--pod", "missing.yaml", "--offline"],
        "",
        &["missing.yaml", "No such file"],
    );
    assert_fails(
        &["--pod", "-", "--offline"],
        "a: [",
        &["- is no YAML", "line 1"],
    );
    assert_fails(
        &["--pod", "-", "--offline"],
        "kind: Service",
        &["document 1", "Service"],
    );
    assert_fails(
        &["--pod", "-", "--offline"],
        "{kind: Pod, metadata: {}, spec: {containers: x}}",
        &["document 1", "Pod"],
    );
    assert_fails(&["--pod", "-", "--offline"], "", &["names no pod"]);
    assert_fails(
        &["--pod", "-"],
        "{kind: Pod, metadata: {}, spec: {containers: []}}",
        &["no cluster is configured", "--offline"],
    );
}

#[test]
fn an_invalid_boost_affects_nothing_else() {
    let explained = object(&[], &example("5-cluster"));
    assert_eq!(explained["boost"], "java");
    let nested = "{apiVersion: autoscaling.x-k8s.io/v1alpha1, kind: StartupCPUBoost, metadata: {name: b}, \
        spec: {selector: {}, durationPolicy: {fixedDuration: {unit: Seconds, value: 1}}}}\n---\n\
        {kind: Pod, metadata: {name: p}, spec: {containers: []}}";
    let (_, out, _) = explain(&["--pod", "-", NOW], nested);
    assert!(out.contains("selector stands beside spec"), "{out}");
}

/// A boosted pod as `kubectl get -o yaml` shows it, with these conditions.
fn existing(conditions: &Value) -> String {
    let record = r#"{"state":"Active","timestamp":"2026-12-01T09:59:58Z","initCPURequests":{"app":"250m"},"initCPULimits":{"app":"500m"},"boostedCPURequests":{"app":"380m"},"boostedCPULimits":{"app":"750m"},"boost":"web","end":{"condition":{"type":"Ready","status":"True","delaySeconds":0},"deadlineSeconds":3600}}"#;
    let key = "autoscaling.x-k8s.io/startup-cpu-boost";
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web-1", "namespace": "shop", "uid": "U", "resourceVersion": "V1", "generation": 1,
            "labels": {"app": "web", key: "web"}, "annotations": {key: record}},
        "spec": {"nodeName": "n", "containers": [{"name": "app",
            "resources": {"requests": {"cpu": "380m"}, "limits": {"cpu": "750m"}}}]},
        "status": {"phase": "Running", "observedGeneration": 1, "conditions": conditions},
    })
    .to_string()
}

fn condition(kind: &str, at: &str) -> Value {
    json!({"type": kind, "status": "True", "lastTransitionTime": at})
}

#[test]
fn a_boosted_pod_is_explained_as_the_sweeper_sees_it() {
    let scheduled = condition("PodScheduled", "2026-12-01T10:00:00Z");
    let starting = existing(&json!([scheduled]));
    let waits = object(&["--now=2026-12-01T10:00:20Z"], &starting);
    assert_eq!(
        waits,
        json!({"action": "wait", "reason": "NotDue", "until": "2026-12-01T11:00:00Z", "endedBy": null,
            "resize": null, "metadata": null})
    );

    let ready = existing(&json!([
        scheduled,
        condition("Ready", "2026-12-01T10:00:20Z")
    ]));
    let due = object(&["--now=2026-12-01T10:00:21Z"], &ready);
    assert_eq!(
        (&due["action"], &due["reason"], &due["endedBy"]),
        (&json!("revert"), &json!("Due"), &json!("Condition"))
    );
    assert_eq!(
        due["resize"],
        json!({"metadata": {"uid": "U", "resourceVersion": "V1"}, "spec": {"containers": [
            {"name": "app", "resources": {"requests": {"cpu": "250m"}, "limits": {"cpu": "500m"}}}]}})
    );
    let finish = &due["metadata"]["metadata"];
    let key = "autoscaling.x-k8s.io/startup-cpu-boost";
    assert_eq!(finish["labels"], json!({key: null}));
    let record = finish["annotations"][key].as_str().expect("a record");
    let record: Value = serde_json::from_str(record).expect("JSON");
    assert_eq!(record["state"], "Reverted");
    assert_eq!(record["endedTimestamp"], "2026-12-01T10:00:21Z");

    // The boost's present rule counts where the boost is there.
    let boost = example("1-plain").replace(
        "podCondition: {type: Ready, status: \"True\"}",
        "fixedDuration: {unit: Seconds, value: 90}",
    );
    let (boost, _) = boost.split_once("---\n").expect("two documents");
    let edited = object(
        &["--now=2026-12-01T10:00:21Z"],
        &format!("{boost}---\n{ready}"),
    );
    assert_eq!(edited["until"], "2026-12-01T10:01:30Z");

    let destroyed = ready.replace("Active", "Active\\\\");
    let left = object(&["--now=2026-12-01T10:00:21Z"], &destroyed);
    assert_eq!(
        (&left["action"], &left["reason"]),
        (&json!("leave"), &json!("Unreadable"))
    );
    let new = object(&["--as-new", "--offline"], &ready);
    assert_eq!(new["boost"], Value::Null);
}
