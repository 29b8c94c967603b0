//! The view behind its real Service, in a cluster with controllers: all replicas say the same, also after the leader is
//! killed, and what becomes of namespaces that are deleted while no replica answers it.
//!
//! What single callers may see is proved in `tests/view`, without controllers.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testbed::{
    cluster::{SYSTEM_NAMESPACE, manifests},
    eventually,
    view::{API, API_SERVICE, until_available},
};

use crate::{
    cluster::Cluster,
    images,
    objects::{
        SOON, apply_boosts, boost, container, cpu, create_boosted, namespace, percent, pod,
        remove_namespace,
    },
    scenarios::{
        install::{apply, replicas, rolled_out, settled},
        rights::{granted, used},
    },
};

const NS: &str = "seen";
const SCALE: &str = "scale -n headstart-system deployment/headstart --replicas";

pub(crate) async fn view(cluster: &mut Cluster) -> Result<Vec<String>> {
    apply(cluster, &images::root().join("tests/view")).await?;
    settled(cluster).await?;
    until_available(&cluster.plane, "True").await?;
    namespace(cluster, NS).await?;
    apply_boosts(cluster, &[boost(NS, "app", &json!([percent("app", 100)]))]).await?;
    for name in ["one", "two"] {
        let app = container("app", &cpu("20m", "40m"), "");
        create_boosted(cluster, &pod(NS, name, "app", &[app])).await?;
    }
    viewers_see_theirs(cluster).await?;
    let served = a_killed_leader_changes_no_answer(cluster).await?;
    rights_are_used(cluster).await?;
    namespaces_wait_for_a_replica(cluster).await?;
    namespaces_wait_for_nobody_without_the_api(cluster).await?;
    remove(cluster).await?;
    remove_namespace(cluster, NS).await?;
    Ok(vec![
        "who may view a namespace sees its boosts in force, by aggregation, and no other's".to_owned(),
        format!("three replicas say the same, and again after the leader was killed; {served} of 20 requests meanwhile were answered"),
        "namespaces that are deleted while nobody answers go when a replica is back, or the APIService is gone".to_owned(),
    ])
}

/// By the role that the component brings, which the controllers have made a part of `view`.
async fn viewers_see_theirs(cluster: &Cluster) -> Result<()> {
    let bind = format!("create rolebinding viewer -n {NS} --clusterrole=view --user=viewer");
    cluster.kubectl(&bind).await?;
    let own = format!("get boostedpods -n {NS} --as=viewer -o name");
    let seen = eventually("the viewer sees them", SOON, || cluster.kubectl(&own)).await?;
    ensure!(seen.lines().count() == 2, "{seen}");
    let all = ["get", "boostedpods", "-A", "--as=viewer"];
    let refused = cluster.plane.kubectl(&all).await?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(
        !refused.status.success() && said.contains("(Forbidden)"),
        "{refused:?}"
    );
    Ok(())
}

/// Asks each replica at its own address, with a token, and all of them through the Service. Says how many of the requests
/// just after the crash were answered.
async fn a_killed_leader_changes_no_answer(cluster: &Cluster) -> Result<usize> {
    let reader = Reader::new(cluster).await?;
    let before = reader.all_say_the_same(cluster).await?;
    let leader = leader(cluster).await?;
    let kill =
        format!("delete pod {leader} -n {SYSTEM_NAMESPACE} --grace-period=0 --force --wait=false");
    cluster.kubectl(&kill).await?;
    let mut served = 0;
    for _ in 0..20 {
        let list = format!("get --raw {}", path());
        if let Ok(list) = cluster.kubectl(&list).await {
            let list: Value = serde_json::from_str(&list)?;
            ensure!(list["items"] == before, "{list} and {before}");
            served += 1;
        }
    }
    eventually("somebody else leads", SOON, || async {
        ensure!(self::leader(cluster).await? != leader, "{leader} leads");
        Ok(())
    })
    .await?;
    settled(cluster).await?;
    let after = reader.all_say_the_same(cluster).await?;
    ensure!(after == before, "{after} and {before}");
    Ok(served)
}

fn path() -> String {
    format!("{API}/namespaces/{NS}/boostedpods")
}

async fn leader(cluster: &Cluster) -> Result<String> {
    let lease =
        format!("get lease headstart -n {SYSTEM_NAMESPACE} -o jsonpath={{.spec.holderIdentity}}");
    cluster.kubectl(&lease).await
}

/// An account that may view the namespace, and asks replicas without the API server.
struct Reader {
    kubeconfig: PathBuf,
    ca: PathBuf,
}

impl Reader {
    async fn new(cluster: &Cluster) -> Result<Self> {
        for line in [
            format!("create serviceaccount reader -n {NS}"),
            format!(
                "create rolebinding reader -n {NS} --clusterrole=view --serviceaccount={NS}:reader"
            ),
        ] {
            cluster.kubectl(&line).await?;
        }
        let bundle = "go-template={{.spec.caBundle|base64decode}}";
        let bundle = ["get", "apiservice", API_SERVICE, "-o", bundle];
        let ca = cluster.plane.folder().join("view-ca.pem");
        fs::write(&ca, cluster.plane.kubectl_ok(&bundle).await?)?;
        let kubeconfig = cluster
            .plane
            .service_account_kubeconfig(NS, "reader")
            .await?;
        Ok(Self { kubeconfig, ca })
    }

    /// What all replicas show.
    async fn all_say_the_same(&self, cluster: &Cluster) -> Result<Value> {
        eventually("all replicas say the same", SOON, || async {
            let mut lists = Vec::new();
            for replica in replicas(cluster).await? {
                lists.push(self.ask(cluster, &replica).await?);
            }
            let leaders = lists.iter().filter(|(_, leads)| *leads).count();
            ensure!(
                lists.len() == 3 && leaders == 1,
                "{leaders} of {} lead",
                lists.len()
            );
            let items = lists.pop().context("there is none")?.0;
            ensure!(
                items.as_array().map(Vec::len) == Some(2)
                    && lists.iter().all(|(other, _)| *other == items),
                "{items} and {lists:?}"
            );
            Ok(items)
        })
        .await
    }

    /// A replica's list, and whether it says that it leads.
    async fn ask(&self, cluster: &Cluster, replica: &Value) -> Result<(Value, bool)> {
        let ip = replica["status"]["podIP"].as_str().context("no address")?;
        let text = |path: &Path| path.display().to_string();
        let flags = [
            format!("--kubeconfig={}", text(&self.kubeconfig)),
            format!("--certificate-authority={}", text(&self.ca)),
            format!("--server=https://{ip}:9443"),
            "--tls-server-name=headstart.headstart-system.svc".to_owned(),
        ];
        let line = format!("get --raw {} {}", path(), flags.join(" "));
        let list: Value = serde_json::from_str(&cluster.kubectl(&line).await?)?;
        let about = |key: &str| {
            &list["metadata"]["annotations"][format!("visibility.autoscaling.x-k8s.io/{key}")]
        };
        ensure!(
            about("replica") == &replica["metadata"]["name"],
            "another replica answers: {}",
            list["metadata"]
        );
        Ok((list["items"].clone(), about("leader") == "true"))
    }
}

/// Those that the component adds.
async fn rights_are_used(cluster: &Cluster) -> Result<()> {
    let role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/headstart-visibility";
    let granted = granted(cluster, &[role]).await?;
    eventually("every right was used", SOON, || async {
        let used = used(&cluster.plane.audit_events()?);
        let unused: Vec<_> = granted.difference(&used).collect();
        ensure!(unused.is_empty(), "granted and never used: {unused:?}");
        Ok(())
    })
    .await
}

/// As long as nobody can say what the group has, a namespace might have something of it, and may have to wait.
async fn namespaces_wait_for_a_replica(cluster: &Cluster) -> Result<()> {
    delete_while_nobody_answers(cluster, "waits").await?;
    cluster.kubectl(&format!("{SCALE}=3")).await?;
    rolled_out(cluster).await?;
    until_gone(cluster, "waits").await
}

/// What `docs/see.md` says to do in an emergency.
async fn namespaces_wait_for_nobody_without_the_api(cluster: &Cluster) -> Result<()> {
    delete_while_nobody_answers(cluster, "hangs").await?;
    let delete = format!("delete apiservice {API_SERVICE}");
    cluster.kubectl(&delete).await?;
    until_gone(cluster, "hangs").await
}

/// Begins to delete a namespace when all replicas are gone and the API server knows it. Whether it waits depends on how old
/// the controller's knowledge of the group is.
async fn delete_while_nobody_answers(cluster: &Cluster, name: &str) -> Result<()> {
    namespace(cluster, name).await?;
    cluster.kubectl(&format!("{SCALE}=0")).await?;
    until_available(&cluster.plane, "False").await?;
    let delete = format!("delete namespace {name} --wait=false");
    cluster.kubectl(&delete).await.map(drop)
}

async fn until_gone(cluster: &Cluster, name: &str) -> Result<()> {
    let wait = format!("wait namespace/{name} --for=delete --timeout=180s");
    cluster.kubectl(&wait).await.map(drop)
}

/// Switches the view off again.
async fn remove(cluster: &Cluster) -> Result<()> {
    let component = manifests().join("view");
    let files = ["apiservice.yaml", "rbac.yaml"].map(|file| component.join(file));
    for file in files {
        let delete = format!("delete -f {} --ignore-not-found", file.display());
        cluster.kubectl(&delete).await?;
    }
    apply(cluster, &manifests()).await?;
    settled(cluster).await
}
