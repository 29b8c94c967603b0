//! Bodies of admission reviews, of pods as Deployments of real applications make them.

use serde_json::{Value, json};

/// A review of a pod of about that many bytes, to be created in a namespace, with a label `app` and two containers: one
/// called as the label says, and a `proxy`.
#[must_use]
pub fn body(bytes: usize, namespace: &str, app: &str) -> Vec<u8> {
    let mut variables = 0;
    loop {
        let body = review(namespace, &pod(app, variables))
            .to_string()
            .into_bytes();
        if body.len() >= bytes {
            return body;
        }
        // Each has about 100 bytes.
        variables += (bytes - body.len()) / 150 + 1;
    }
}

fn review(namespace: &str, pod: &Value) -> Value {
    json!({
        "kind": "AdmissionReview",
        "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
            "requestResource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": namespace,
            "operation": "CREATE",
            "userInfo": {
                "username": "system:serviceaccount:kube-system:replicaset-controller",
                "uid": "4d1ac6a4-2f2c-4f5c-9d2c-0a3f0f8b7c11",
                "groups": ["system:serviceaccounts", "system:serviceaccounts:kube-system", "system:authenticated"],
            },
            "object": pod,
            "oldObject": null,
            "dryRun": false,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        },
    })
}

fn pod(app: &str, variables: usize) -> Value {
    let env: Vec<Value> = (0..variables)
        .map(|index| match index % 4 {
            0 => json!({"name": format!("POD_FIELD_{index}"), "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}}),
            1 => json!({"name": format!("SECRET_{index}"), "valueFrom": {"secretKeyRef": {"name": "credentials", "key": format!("key-{index}")}}}),
            _ => json!({"name": format!("SERVICE_ENDPOINT_{index}"), "value": format!("https://service-{index}.team.svc.cluster.local:8443/api/v1?timeout=30s")}),
        })
        .collect();
    let probe = |path: &str| {
        json!({
            "httpGet": {"path": path, "port": 8080, "scheme": "HTTP"},
            "initialDelaySeconds": 5, "timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3,
        })
    };
    let mounts = json!([
        {"name": "config", "mountPath": "/etc/config"},
        {"name": "kube-api-access-x7k2p", "readOnly": true, "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"},
    ]);
    json!({
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "generateName": format!("{app}-6d4cf56db6-"),
            "creationTimestamp": null,
            "labels": {"app": app, "pod-template-hash": "6d4cf56db6", "app.kubernetes.io/part-of": "shop"},
            "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": "9090"},
            "ownerReferences": [{
                "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": format!("{app}-6d4cf56db6"),
                "uid": "b1f5d4a3-9c0e-4f57-8f44-1f2f3a4b5c6d", "controller": true, "blockOwnerDeletion": true,
            }],
        },
        "spec": {
            "volumes": [
                {"name": "config", "configMap": {"name": "config", "defaultMode": 420}},
                {"name": "kube-api-access-x7k2p", "projected": {"sources": [
                    {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
                    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                ], "defaultMode": 420}},
            ],
            "containers": [
                {
                    "name": app, "image": "example.com/shop/app:1.2.3",
                    "command": ["java"], "args": ["-XX:MaxRAMPercentage=75", "-jar", "/app.jar"],
                    "ports": [{"name": "http", "containerPort": 8080, "protocol": "TCP"}],
                    "env": env,
                    "resources": {"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "500m", "memory": "1Gi"}},
                    "volumeMounts": mounts,
                    "livenessProbe": probe("/live"), "readinessProbe": probe("/ready"), "startupProbe": probe("/started"),
                    "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
                    "imagePullPolicy": "IfNotPresent",
                    "securityContext": {"capabilities": {"drop": ["ALL"]}, "runAsNonRoot": true, "allowPrivilegeEscalation": false},
                },
                {
                    "name": "proxy", "image": "example.com/mesh/proxy:2.0.0",
                    "args": ["--concurrency", "2", "--log-level", "warning"],
                    "resources": {"limits": {"cpu": "1", "memory": "256Mi"}, "requests": {"cpu": "100m", "memory": "128Mi"}},
                    "volumeMounts": mounts,
                    "readinessProbe": probe("/healthz"),
                    "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
                    "imagePullPolicy": "IfNotPresent",
                },
            ],
            "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst",
            "serviceAccountName": "default", "serviceAccount": "default", "securityContext": {},
            "schedulerName": "default-scheduler", "enableServiceLinks": true, "preemptionPolicy": "PreemptLowerPriority",
            "tolerations": [
                {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
                {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
            ],
        },
        "status": {},
    })
}
