//! The components of the manifests, as kubectl builds them: their parts fit each other and the program; with cert-manager no
//! right is left that only certificates of our own need, where pods are boosted that run already, no policy is in the way, and a dry
//! run may write to no pod.

use anyhow::{Context, Result};
use clap::{CommandFactory as _, Parser as _};
use headstart::{
    cli::{Cli, Verb},
    config::RunArgs,
};
use serde_json::{Value, json};
use testbed::kustomize::kustomize;

/// What kubectl makes of the manifests, with these components of theirs.
fn build(components: &[&str]) -> Result<Vec<Value>> {
    kustomize(&json!({"resources": ["manifests"], "components": components}))
}

fn with_component() -> Result<Vec<Value>> {
    build(&["manifests/cert-manager"])
}

fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> Result<&'a Value> {
    let fits = |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
    objects
        .iter()
        .find(fits)
        .with_context(|| format!("there is no {kind} {name}"))
}

/// How the container starts the program: its arguments, and its variables as the flags that they stand for.
fn run_args(container: &Value) -> Result<RunArgs> {
    let command = Cli::command();
    let run = command.find_subcommand("run").context("the verb run")?;
    let mut words = vec!["headstart".to_owned()];
    for word in container["args"].as_array().context("arguments")? {
        words.push(word.as_str().context("a word")?.to_owned());
    }
    for variable in container["env"].as_array().context("variables")? {
        let Some(value) = variable["value"].as_str() else {
            continue;
        };
        let name = variable["name"].as_str().context("a name")?;
        let mut flags = run.get_arguments();
        let flag = flags.find(|flag| flag.get_env().is_some_and(|env| env == name));
        let flag = flag.and_then(|flag| flag.get_long());
        let flag = flag.with_context(|| format!("{name} is a variable of no flag"))?;
        words.push(format!("--{flag}={value}"));
    }
    match Cli::try_parse_from(words)?.verb {
        Verb::Run(args) => Ok(*args),
        verb => anyhow::bail!("it runs {verb:?}"),
    }
}

#[test]
fn the_parts_fit_each_other_and_the_program() -> Result<()> {
    let objects = with_component()?;
    let deployment = find(&objects, "Deployment", "headstart")?;
    let pod = &deployment["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let args = run_args(container)?;

    let directory = args.certificate_directory.as_ref();
    let directory = directory.and_then(|path| path.to_str()).context("a path")?;
    let (mount, volume) = (&container["volumeMounts"][0], &pod["volumes"][0]);
    assert_eq!(mount["mountPath"], directory);
    assert_eq!(mount["name"], volume["name"]);

    let leaf = find(&objects, "Certificate", "headstart")?;
    let (namespace, spec) = (&leaf["metadata"]["namespace"], &leaf["spec"]);
    assert_eq!(volume["secret"]["secretName"], spec["secretName"]);
    assert_eq!(deployment["metadata"]["namespace"], *namespace);
    assert_eq!(namespace.as_str(), Some(args.namespace.as_str()));
    let names = spec["dnsNames"].as_array().context("names")?;
    assert_eq!(json!(args.names()), json!(names));

    let issuer = spec["issuerRef"]["name"].as_str().context("an issuer")?;
    let issuer = find(&objects, "Issuer", issuer)?;
    let authority = find(&objects, "Certificate", "headstart-ca")?;
    assert_eq!(authority["spec"]["isCA"], true);
    assert_eq!(
        issuer["spec"]["ca"]["secretName"],
        authority["spec"]["secretName"]
    );
    let issuer = &authority["spec"]["issuerRef"]["name"];
    let issuer = find(&objects, "Issuer", issuer.as_str().context("an issuer")?)?;
    assert!(issuer["spec"]["selfSigned"].is_object());

    let webhook = find(&objects, "MutatingWebhookConfiguration", "headstart")?;
    let annotation = &webhook["metadata"]["annotations"]["cert-manager.io/inject-ca-from"];
    let names = [namespace, &leaf["metadata"]["name"]].map(|name| name.as_str().unwrap_or("?"));
    assert_eq!(annotation.as_str(), Some(names.join("/").as_str()));
    Ok(())
}

#[test]
fn only_what_our_own_certificates_need_is_gone() -> Result<()> {
    let (mut before, after) = (build(&[])?, with_component()?);
    let mut gone = Vec::new();
    for kind in ["ClusterRole", "Role"] {
        let rules = |objects| -> Result<Vec<Value>> {
            let role = find(objects, kind, "headstart")?;
            Ok(role["rules"].as_array().context("rules")?.clone())
        };
        let (mut rules_before, rules_after) = (rules(&before)?, rules(&after)?);
        rules_before.retain(|rule| !rules_after.contains(rule));
        gone.extend(rules_before);
    }
    let gone: Vec<_> = gone
        .iter()
        .map(|rule| (&rule["resources"], &rule["resourceNames"]))
        .collect();
    assert_eq!(
        gone,
        [
            (
                &json!(["mutatingwebhookconfigurations"]),
                &json!(["headstart"])
            ),
            (&json!(["secrets"]), &json!(["headstart-certificates"])),
        ]
    );
    before.retain(|object| {
        let (kind, name) = (&object["kind"], &object["metadata"]["name"]);
        let is_there = |other: &Value| other["kind"] == *kind && other["metadata"]["name"] == *name;
        !after.iter().any(is_there)
    });
    let gone: Vec<_> = before.iter().map(|object| &object["kind"]).collect();
    assert_eq!(gone, ["Secret"]);
    Ok(())
}

#[test]
fn raises_are_asked_for_and_not_held_to_lowering() -> Result<()> {
    let objects = build(&["manifests/raises"])?;
    let deployment = find(&objects, "Deployment", "headstart")?;
    let args = run_args(&deployment["spec"]["template"]["spec"]["containers"][0])?;
    assert!(args.admission.boost_on_restart && args.boost_missed_pods);
    let lower_only = |object: &&Value| object["metadata"]["name"] == "headstart-lower-only";
    assert_eq!(objects.iter().find(lower_only), None);
    for name in ["headstart-record", "headstart-marks-only"] {
        find(&objects, "ValidatingAdmissionPolicyBinding", name)?;
    }
    let whole = build(&[])?;
    assert_eq!(
        whole.iter().filter(lower_only).count(),
        2,
        "the default keeps it"
    );
    Ok(())
}

#[test]
fn a_dry_run_may_not_write_to_pods_and_lets_others_change_their_records() -> Result<()> {
    for components in [
        &["manifests/dry-run"][..],
        &["manifests/raises", "manifests/dry-run"],
        &["manifests/cert-manager", "manifests/dry-run"],
    ] {
        let objects = build(components)?;
        let deployment = find(&objects, "Deployment", "headstart")?;
        let args = run_args(&deployment["spec"]["template"]["spec"]["containers"][0])?;
        assert!(args.dry_run);
        let role = find(&objects, "ClusterRole", "headstart")?;
        let rules = role["rules"].as_array().context("rules")?;
        let writes = |rule: &&Value| {
            let mut verbs = rule["verbs"].as_array().into_iter().flatten();
            verbs.any(|verb| !["get", "list", "watch"].map(Value::from).contains(verb))
        };
        let writes: Vec<_> = rules.iter().filter(writes).collect();
        for rule in writes {
            assert_eq!(rule["resources"], json!(["mutatingwebhookconfigurations"]));
        }
        let record = |object: &Value| object["metadata"]["name"] == "headstart-record";
        assert!(!objects.iter().any(record));
    }
    Ok(())
}
