//! The three policies: nobody else changes a record, and our own account may lower CPU, change its marks, and nothing else.
//! Where pods are boosted that run already, it must be allowed to raise CPU. Beside a dry run another operator may have to
//! change its own records.

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy as Policy, ValidatingAdmissionPolicyBinding as Binding,
};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
};

use super::{CheckArgs, Finding, ask, cluster::Told, rights::account};

const RECORD: &str = "headstart-record";
const LOWER_ONLY: &str = "headstart-lower-only";
const MARKS_ONLY: &str = "headstart-marks-only";

pub(super) async fn check(client: &Client, args: &CheckArgs, told: Told) -> Finding {
    // Without their types, which would bring much into the binary for little.
    let all = |resource| Api::<DynamicObject>::all_with(client.clone(), &resource);
    let policies = all(ApiResource::erase::<Policy>(&()));
    let bindings = all(ApiResource::erase::<Binding>(&()));
    let mut findings = Vec::new();
    for name in [RECORD, LOWER_ONLY, MARKS_ONLY] {
        let what = "validatingadmissionpolicies.admissionregistration.k8s.io";
        let policy = ask("get", what, policies.get_opt(name)).await;
        let what = "validatingadmissionpolicybindings.admissionregistration.k8s.io";
        let binding = ask("get", what, bindings.get_opt(name)).await;
        findings.push(match (policy, binding) {
            (Ok(policy), Ok(binding)) if told.raises && name == LOWER_ONLY => {
                judge_raising(policy.is_some() && binding.is_some())
            }
            (Ok(None), Ok(None)) if told.runs_dry && name == RECORD => {
                Finding::ok(format!("{RECORD} is left out, as it runs dry"))
            }
            (Ok(policy), Ok(binding)) => {
                judge(name, policy.as_ref(), binding.as_ref(), &account(args))
            }
            (Err(trouble), _) | (_, Err(trouble)) => trouble,
        });
    }
    Finding::all(findings)
}

/// The policy that lets CPU be lowered alone, where Headstart is told to raise it.
fn judge_raising(is_there: bool) -> Finding {
    if !is_there {
        return Finding::ok(format!(
            "{LOWER_ONLY} is left out, as pods are boosted that run already"
        ));
    }
    Finding::failed(
        format!(
            "{LOWER_ONLY} refuses the boosts of pods that run already, which BOOST_ON_RESTART or BOOST_MISSED_PODS asks for"
        ),
        format!(
            "kubectl delete validatingadmissionpolicybinding {LOWER_ONLY}, or the component manifests/raises"
        ),
    )
}

fn judge(
    name: &str,
    policy: Option<&DynamicObject>,
    binding: Option<&DynamicObject>,
    account: &str,
) -> Finding {
    let Some(problem) = problem(name, policy, binding, account) else {
        return Finding::ok(format!("{name} denies"));
    };
    let ours = |what: &str, file: &str| {
        Finding::warning(
            format!("{problem}: nothing but Headstart's own code keeps its account from {what}"),
            format!(
                "kubectl apply -f manifests/{file} (the account in it must be the one that Headstart runs as)"
            ),
        )
    };
    match name {
        LOWER_ONLY => ours("raising CPU", "policy-lower-only.yaml"),
        MARKS_ONLY => ours(
            "changing images and labels of pods",
            "policy-marks-only.yaml",
        ),
        _ => Finding::failed(
            format!(
                "{problem}: whoever may update a pod can change what its boost is taken back to"
            ),
            "kubectl apply -f manifests/policy-record.yaml",
        ),
    }
}

fn problem(
    name: &str,
    policy: Option<&DynamicObject>,
    binding: Option<&DynamicObject>,
    account: &str,
) -> Option<String> {
    let Some(policy) = policy else {
        return Some(format!("there is no ValidatingAdmissionPolicy {name}"));
    };
    let Some(binding) = binding else {
        return Some(format!(
            "there is no ValidatingAdmissionPolicyBinding {name}"
        ));
    };
    let spec = &binding.data["spec"];
    let mut actions = spec["validationActions"].as_array().into_iter().flatten();
    let binds = spec["policyName"] == name && actions.any(|action| action == "Deny");
    if !binds {
        return Some(format!(
            "the ValidatingAdmissionPolicyBinding {name} does not Deny by {name}"
        ));
    }
    let conditions = policy.data["spec"]["matchConditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let holds_us = name == RECORD
        || conditions.any(|condition| {
            let expression = condition["expression"].as_str();
            expression.is_some_and(|text| text.contains(&format!("'{account}'")))
        });
    (!holds_us).then(|| format!("the ValidatingAdmissionPolicy {name} does not name {account}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::Outcome, *};

    const ACCOUNT: &str = "system:serviceaccount:headstart-system:headstart";

    fn policy() -> DynamicObject {
        let expression = format!("request.userInfo.username == '{ACCOUNT}'");
        let conditions = json!([{"name": "headstart", "expression": expression}]);
        serde_json::from_value(json!({"metadata": {}, "spec": {"matchConditions": conditions}}))
            .expect("a policy")
    }

    fn binding(policy: &str, action: &str) -> DynamicObject {
        let spec = json!({"policyName": policy, "validationActions": [action]});
        serde_json::from_value(json!({"metadata": {}, "spec": spec})).expect("a binding")
    }

    #[test]
    fn all_must_be_there_and_deny() {
        let policy = policy();
        let ours = [LOWER_ONLY, MARKS_ONLY].map(|name| (name, Outcome::Warning));
        for (name, otherwise) in [(RECORD, Outcome::Failed)].into_iter().chain(ours) {
            let (deny, audit) = (binding(name, "Deny"), binding(name, "Audit"));
            let other = binding("other", "Deny");
            let outcome = |policy, binding| judge(name, policy, binding, ACCOUNT).outcome;
            assert_eq!(outcome(Some(&policy), Some(&deny)), Outcome::Ok);
            assert_eq!(outcome(None, Some(&deny)), otherwise);
            assert_eq!(outcome(Some(&policy), None), otherwise);
            assert_eq!(outcome(Some(&policy), Some(&audit)), otherwise);
            assert_eq!(outcome(Some(&policy), Some(&other)), otherwise);
        }
    }

    #[test]
    fn raises_are_not_held_to_lowering() {
        assert_eq!(judge_raising(false).outcome, Outcome::Ok);
        assert_eq!(judge_raising(true).outcome, Outcome::Failed);
    }

    #[test]
    fn one_that_holds_another_account_holds_nobody() {
        let other = "system:serviceaccount:boosts:headstart";
        let (policy, binding) = (policy(), binding(LOWER_ONLY, "Deny"));
        let finding = judge(LOWER_ONLY, Some(&policy), Some(&binding), other);
        assert_eq!(finding.outcome, Outcome::Warning);
        assert!(finding.detail.contains(other), "{finding:?}");
    }
}
