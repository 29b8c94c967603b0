//! Who gets what: by certificate, token and the front proxy's headers, right and wrong. No refusal holds any data.

use anyhow::{Result, ensure};
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use serde_json::{Value, json};
use testbed::{
    Cluster, Operator,
    cluster::run,
    eventually,
    view::{API, FLAGS, token},
};

use super::{SOON, cluster, direct::Caller, rest, start};

const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
const MARY: [(&str, &str); 2] = [("X-Remote-User", "mary"), ("X-Remote-Group", "shoppers")];

/// Gives `headstart-boost-viewer` to a subject, in a namespace.
async fn bind(cluster: &Cluster, name: &str, subject: &Value) -> Result<()> {
    let binding = json!({
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "headstart-boost-viewer"},
        "subjects": [subject],
    });
    let path = format!("{RBAC}/namespaces/shop/rolebindings");
    rest(cluster)
        .post(&path, &binding)
        .await?
        .accepted()
        .map(drop)
}

fn user(kind: &str, name: &str) -> Value {
    json!({"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name})
}

/// A certificate of a CA that nobody knows, and its key.
fn foreign(name: &str) -> Result<(String, String)> {
    let ca = CertificateParams::default();
    let issuer = Issuer::new(ca, KeyPair::generate()?);
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params
        .distinguished_name
        .push(DnType::OrganizationName, "system:masters");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &issuer)?;
    Ok((certificate.pem(), key.serialize_pem()))
}

async fn expect(
    what: &str,
    caller: &Caller,
    replica: &Operator,
    path: &str,
    headers: &[(&str, &str)],
    code: u16,
) -> Result<()> {
    let (answered, body) = caller.get(replica, path, headers).await?;
    ensure!(
        answered == code,
        "{what}: {path} is answered with {answered}: {body}"
    );
    if code >= 400 {
        let text = body.to_string();
        ensure!(
            body["kind"] == "Status" && body["code"] == code,
            "{what}: {text}"
        );
        ensure!(
            !text.contains("fast-0") && !text.contains("300m"),
            "{what}: {text}"
        );
    }
    Ok(())
}

#[test]
fn callers_get_what_they_may_see() -> Result<()> {
    run(async {
        let cluster = cluster().await?;
        let replica = &cluster.replicas[1];
        let (inside, all) = (
            format!("{API}/namespaces/shop/boostedpods"),
            format!("{API}/boostedpods"),
        );
        let outside = format!("{API}/namespaces/empty/boostedpods");
        let one = format!("{inside}/fast-1");
        bind(cluster, "shoppers", &user("Group", "shoppers")).await?;
        let account = json!({"kind": "ServiceAccount", "name": "viewer", "namespace": "shop"});
        bind(cluster, "viewer", &account).await?;

        let nobody = Caller::nobody(cluster).await?;
        let aggregator = Caller::aggregator(cluster).await?;
        let shopper = Caller::user(cluster, "bob", &["shoppers"]).await?;
        let stranger = Caller::user(cluster, "eve", &[]).await?;
        let (certificate, key) = foreign("front-proxy-client")?;
        let foreigner = Caller::with(cluster, &certificate, &key).await?;
        let viewer = format!("Bearer {}", token(&cluster.plane, "shop", "viewer").await?);
        let other = format!("Bearer {}", token(&cluster.plane, "shop", "other").await?);
        let (viewer, other) = (
            [("Authorization", viewer.as_str())],
            [("Authorization", other.as_str())],
        );
        let forged = [("Authorization", "Bearer forged")];
        let master = [
            ("X-Remote-User", "root"),
            ("X-Remote-Group", "system:masters"),
        ];
        eventually("the bindings are known", SOON, || async {
            expect("a shopper", &shopper, replica, &inside, &[], 200).await
        })
        .await?;

        let none: &[(&str, &str)] = &[];
        for (what, caller, headers, codes) in [
            ("nobody", &nobody, none, [401; 4]),
            ("spoofed headers", &nobody, &master[..], [401; 4]),
            ("a forged token", &nobody, &forged[..], [401; 4]),
            ("a token without rights", &nobody, &other[..], [403; 4]),
            ("a token", &nobody, &viewer[..], [200, 200, 403, 403]),
            (
                "spoofed headers beside a token",
                &nobody,
                &[viewer[0], master[0], master[1]][..],
                [200, 200, 403, 403],
            ),
            ("a certificate of an unknown CA", &foreigner, none, [401; 4]),
            ("spoofed headers with it", &foreigner, &master[..], [401; 4]),
            (
                "a token with it",
                &foreigner,
                &viewer[..],
                [200, 200, 403, 403],
            ),
            (
                "a client certificate without rights",
                &stranger,
                none,
                [403; 4],
            ),
            ("spoofed headers with it", &stranger, &master[..], [403; 4]),
            ("a client certificate", &shopper, none, [200, 200, 403, 403]),
            ("the front proxy for nobody", &aggregator, none, [401; 4]),
            (
                "the front proxy for somebody",
                &aggregator,
                &MARY[..],
                [200, 200, 403, 403],
            ),
            (
                "the front proxy for a stranger",
                &aggregator,
                &MARY[..1],
                [403; 4],
            ),
            (
                "the front proxy for anonymous",
                &aggregator,
                &[("X-Remote-User", "system:anonymous")][..],
                [403; 4],
            ),
            (
                "the front proxy for an administrator",
                &aggregator,
                &master[..],
                [200; 4],
            ),
        ] {
            for (path, code) in [&inside, &one, &outside, &all].into_iter().zip(codes) {
                expect(what, caller, replica, path, headers, code).await?;
            }
        }
        Ok(())
    })
}

#[test]
fn discovery_is_for_everybody() -> Result<()> {
    run(async {
        let cluster = cluster().await?;
        let (replica, nobody) = (&cluster.replicas[0], Caller::nobody(cluster).await?);
        for (path, kind) in [
            ("/apis", "APIGroupList"),
            ("/apis/visibility.autoscaling.x-k8s.io", "APIGroup"),
            (API, "APIResourceList"),
        ] {
            let (code, body) = nobody.get(replica, path, &[]).await?;
            ensure!(code == 200 && body["kind"] == kind, "{path}: {code} {body}");
        }
        let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
        let (code, head, body) = nobody
            .ask(replica, "GET", "/apis", &[("Accept", accept)])
            .await?;
        ensure!(
            code == 200 && head.contains(accept) && body.contains("boostedpods"),
            "{head} {body}"
        );
        for path in [
            "/openapi/v2",
            "/openapi/v3",
            "/apis/apps",
            "/api/v1/pods",
            "/healthz",
        ] {
            let (code, _, body) = nobody.ask(replica, "GET", path, &[]).await?;
            ensure!(code == 404, "{path}: {code} {body}");
        }
        for accept in ["application/vnd.kubernetes.protobuf", "text/html"] {
            let (code, _) = nobody.get(replica, API, &[("Accept", accept)]).await?;
            ensure!(code == 406, "{accept}: {code}");
        }
        Ok(())
    })
}

#[test]
fn no_number_does_harm() -> Result<()> {
    run(async {
        let cluster = cluster().await?;
        let (replica, admin) = (&cluster.replicas[0], Caller::admin(cluster).await?);
        for (limit, code) in [
            ("-1", 200),
            ("0", 200),
            ("2000000000", 200),
            ("9223372036854775807", 200),
            ("9223372036854775808", 400),
            ("x", 400),
        ] {
            let path = format!("{API}/boostedpods?limit={limit}");
            let (answered, body) = admin.get(replica, &path, &[]).await?;
            ensure!(answered == code, "{limit}: {answered} {body}");
        }
        let path = format!("{API}/boostedpods?continue=eA");
        let (code, body) = admin.get(replica, &path, &[]).await?;
        ensure!(code == 400 && body["reason"] == "BadRequest", "{body}");
        Ok(())
    })
}

/// `--client-ca` is for reviews: the view has callers without a certificate too.
#[test]
fn the_webhooks_callers_are_verified_as_without_the_view() -> Result<()> {
    run(async {
        let mut cluster = start(1).await?;
        let ca = cluster.plane.pki().path("ca.crt").display().to_string();
        let flags = [&FLAGS[..], &["--client-ca", &ca]].concat();
        cluster.add_replica(&flags).await?.wait_ready(SOON).await?;
        let replica = &cluster.replicas[1];
        let nobody = Caller::nobody(&cluster).await?;
        let (certificate, key) = foreign("kube-apiserver")?;
        let foreigner = Caller::with(&cluster, &certificate, &key).await?;
        let known = Caller::user(&cluster, "kube-apiserver", &[]).await?;
        for (caller, code) in [(&nobody, 403), (&foreigner, 403), (&known, 400)] {
            let length = [("Content-Length", "0")];
            let (answered, _, body) = caller
                .ask(replica, "POST", "/mutate-v1-pod", &length)
                .await?;
            ensure!(answered == code, "{answered} {body}");
        }
        expect(
            "nobody",
            &nobody,
            replica,
            &format!("{API}/boostedpods"),
            &[],
            401,
        )
        .await?;
        let (code, _) = nobody.get(replica, API, &[]).await?;
        ensure!(code == 200, "{code}");
        Ok(())
    })
}

/// Off by default, and then nothing is there.
#[test]
fn without_the_flag_there_is_nothing() -> Result<()> {
    run(async {
        let mut cluster = start(1).await?;
        let flags = &FLAGS[1..];
        cluster.add_replica(flags).await?.wait_ready(SOON).await?;
        let admin = Caller::admin(&cluster).await?;
        for path in [API, "/apis", "/openapi/v2"] {
            let (code, _, body) = admin.ask(&cluster.replicas[1], "GET", path, &[]).await?;
            ensure!(code == 404, "{path}: {code} {body}");
        }
        Ok(())
    })
}
