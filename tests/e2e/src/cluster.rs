//! A whole cluster in a network of its own: control plane, controllers, scheduler, kube-proxy, real nodes with kubelet,
//! containerd and runc, and stand-ins beside them for pods in numbers.

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use serde_json::json;
use testbed::{
    Behaviour, ControlPlane, NodeStandIn, Options, Rest, Supervised, binaries::NodeBinaries,
    control_plane::SERVICES, eventually,
};

use crate::{images, images::WORKLOAD, machine, machine::run};

/// Where the API server is reached, by pods too.
const API_SERVER: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
/// Stand-ins: 64 CPUs and 50,000 pods each.
const STAND_INS: usize = 3;
/// A node is Ready some seconds after its start.
const NODE_READY: Duration = Duration::from_secs(120);

/// All of it. It ends with this value, and at the latest with this process.
pub(crate) struct Cluster {
    /// Real nodes, by the order in which they were started.
    pub(crate) nodes: Vec<RealNode>,
    /// Nodes that only say that pods run.
    _stand_ins: NodeStandIn,
    _parts: Vec<Supervised>,
    /// etcd and kube-apiserver.
    pub(crate) plane: ControlPlane,
    binaries: NodeBinaries,
    archives: Vec<PathBuf>,
    cgroup: String,
}

/// A kubelet and its containerd.
pub(crate) struct RealNode {
    /// Its name in the cluster.
    pub(crate) name: String,
    /// Its cgroup, below which kubelet keeps the pods'.
    pub(crate) cgroup: String,
    kubelet: Supervised,
    containerd: Supervised,
}

impl Cluster {
    /// Starts everything with one real node, and returns when that is Ready. `cgroup` is the run's own; nodes also get
    /// the image `more`.
    ///
    /// # Errors
    /// If anything does not start.
    pub(crate) async fn start(cgroup: &str, more: Option<PathBuf>) -> Result<Self> {
        machine::prepare(cgroup)?;
        network()?;
        let binaries = tokio::task::spawn_blocking(NodeBinaries::find).await??;
        let options = Options {
            address: Some(API_SERVER),
            keep: std::env::var_os("HEADSTART_E2E_KEEP").is_some(),
            ..Options::default()
        };
        let plane = ControlPlane::start(options).await?;
        let folder = plane.folder().to_owned();
        let mut archives = vec![images::headstart(&folder)?, images::workload(&folder)?];
        archives.extend(more);
        let parts = vec![
            controller_manager(&plane, &binaries)?,
            scheduler(&plane, &binaries)?,
            proxy(&plane, &binaries)?,
        ];
        let behaviour = Behaviour {
            run_after: Some(Duration::from_millis(200)),
            ready_after: Some(Duration::from_secs(5)),
            ..Behaviour::default()
        };
        let stand_ins = NodeStandIn::beside(plane.admin(), STAND_INS, behaviour).await?;
        let mut cluster = Self {
            nodes: Vec::new(),
            _stand_ins: stand_ins,
            _parts: parts,
            plane,
            binaries,
            archives,
            cgroup: cgroup.to_owned(),
        };
        cluster.add_node().await?;
        Ok(cluster)
    }

    /// Starts one more real node, and returns when it is Ready.
    ///
    /// # Errors
    /// If it does not get Ready.
    pub(crate) async fn add_node(&mut self) -> Result<&RealNode> {
        let number = u8::try_from(self.nodes.len() + 1).context("too many nodes")?;
        let node = RealNode::start(
            &self.plane,
            &self.binaries,
            &self.cgroup,
            &self.archives,
            number,
        )
        .await?;
        let api: Api<Node> = Api::all(self.plane.admin());
        let name = &node.name;
        let what = format!("{name} is Ready");
        let ready = eventually(&what, NODE_READY, || async {
            let conditions = api
                .get(name)
                .await?
                .status
                .and_then(|status| status.conditions)
                .unwrap_or_default();
            ensure!(
                conditions
                    .iter()
                    .any(|condition| condition.type_ == "Ready" && condition.status == "True"),
                "{conditions:?}"
            );
            Ok(())
        });
        ready.await.with_context(|| {
            format!(
                "the end of kubelet's log:\n{}",
                node.kubelet.last_log_lines(20)
            )
        })?;
        self.nodes.push(node);
        self.nodes.last().context("a node was just added")
    }

    /// The administrator's requests as they are sent.
    pub(crate) fn rest(&self) -> Rest {
        Rest::new(self.plane.admin(), Duration::from_secs(30))
    }

    /// Runs kubectl and returns what it prints.
    ///
    /// # Errors
    /// If it fails.
    pub(crate) async fn kubectl(&self, line: &str) -> Result<String> {
        let args: Vec<&str> = line.split_whitespace().collect();
        self.plane.kubectl_ok(&args).await
    }
}

impl Cluster {
    /// Shows what a person would look at when something has failed.
    pub(crate) async fn show(&self) {
        for line in [
            "get pods -A -o wide",
            "get events -A --sort-by=.lastTimestamp",
            "logs -n headstart-system -l app.kubernetes.io/name=headstart --tail=40 --prefix",
        ] {
            let shown = self
                .kubectl(line)
                .await
                .unwrap_or_else(|error| format!("{error:#}"));
            let lines: Vec<&str> = shown.lines().collect();
            println!(
                "\n$ kubectl {line}\n{}",
                lines[lines.len().saturating_sub(60)..].join("\n")
            );
        }
    }

    /// Ends the containers and what is mounted for them, so that the folder can be removed. The rest ends with the process.
    pub(crate) async fn stop(self) {
        for node in &self.nodes {
            node.kubelet.stop(Duration::from_secs(5)).await.ok();
            let folder = self.plane.folder().join(&node.name);
            let socket = folder.join("containerd.sock").display().to_string();
            let ctr =
                |args: &[&str]| run("ctr", &[&["-a", &socket, "-n", "k8s.io"], args].concat());
            let tasks =
                machine::output("ctr", &["-a", &socket, "-n", "k8s.io", "tasks", "ls", "-q"]);
            for task in tasks.unwrap_or_default().split_whitespace() {
                ctr(&["tasks", "kill", "-s", "9", task]).ok();
            }
            node.containerd.stop(Duration::from_secs(5)).await.ok();
        }
        machine::unmount(self.plane.folder());
    }
}

/// A network without a way out: an empty bridge holds the API server's address, and Services need a route before they are
/// translated.
fn network() -> Result<()> {
    let ip = |line: &str| run("ip", &line.split(' ').collect::<Vec<_>>());
    ip("link set lo up")?;
    ip("link add up0 type bridge")?;
    ip(&format!("addr add {API_SERVER}/24 dev up0"))?;
    ip("link set up0 up")?;
    ip(&format!("route add {SERVICES} dev up0"))?;
    fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("switching forwarding on")
}

/// Flags of a component that acts as this user.
fn acting_as(plane: &ControlPlane, user: &str) -> Result<Vec<String>> {
    let kubeconfig = plane.kubeconfig_for(user, &[])?;
    let mut flags = [
        "kubeconfig",
        "authentication-kubeconfig",
        "authorization-kubeconfig",
    ]
    .map(|flag| format!("--{flag}={}", kubeconfig.display()))
    .to_vec();
    flags.extend(["--leader-elect=false", "--bind-address=127.0.0.1"].map(str::to_owned));
    Ok(flags)
}

fn controller_manager(plane: &ControlPlane, binaries: &NodeBinaries) -> Result<Supervised> {
    let mut args = acting_as(plane, "system:kube-controller-manager")?;
    args.extend([
        format!(
            "--service-account-private-key-file={}",
            plane.pki().path("sa.key").display()
        ),
        format!("--root-ca-file={}", plane.pki().path("ca.crt").display()),
        "--use-service-account-credentials".to_owned(),
        "--kube-api-qps=200".to_owned(),
        "--kube-api-burst=400".to_owned(),
        "--concurrent-replicaset-syncs=20".to_owned(),
        // The stand-ins send no heartbeats.
        "--node-monitor-grace-period=24h".to_owned(),
    ]);
    start(
        plane,
        "kube-controller-manager",
        &binaries.kube_controller_manager,
        &args,
    )
}

fn scheduler(plane: &ControlPlane, binaries: &NodeBinaries) -> Result<Supervised> {
    start(
        plane,
        "kube-scheduler",
        &binaries.kube_scheduler,
        &acting_as(plane, "system:kube-scheduler")?,
    )
}

/// It is the machine's, so one is enough for all nodes: they share its network.
fn proxy(plane: &ControlPlane, binaries: &NodeBinaries) -> Result<Supervised> {
    let config = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "mode": "iptables", "hostnameOverride": "node-1", "clusterCIDR": "10.244.0.0/16",
        "clientConnection": {"kubeconfig": plane.admin_kubeconfig()},
        "conntrack": {"maxPerCore": 0},
    });
    let file = plane.folder().join("kube-proxy.json");
    write(&file, &config)?;
    start(
        plane,
        "kube-proxy",
        &binaries.kube_proxy,
        &[format!("--config={}", file.display())],
    )
}

fn start(plane: &ControlPlane, name: &str, program: &Path, args: &[String]) -> Result<Supervised> {
    let log = plane.folder().join(format!("{name}.log"));
    Supervised::spawn(name, program, args, &[("GOGC", "200")], &log)
}

fn write(path: &Path, value: &serde_json::Value) -> Result<()> {
    fs::write(path, value.to_string()).with_context(|| format!("writing {}", path.display()))
}

impl RealNode {
    async fn start(
        plane: &ControlPlane,
        binaries: &NodeBinaries,
        cgroup: &str,
        archives: &[PathBuf],
        number: u8,
    ) -> Result<Self> {
        let name = format!("node-{number}");
        let folder = plane.folder().join(&name);
        let config = folder.join("cni");
        fs::create_dir_all(&config).with_context(|| format!("creating {}", config.display()))?;
        let address = Ipv4Addr::new(10, 99, 0, number);
        if address != API_SERVER {
            run(
                "ip",
                &["addr", "add", &format!("{address}/24"), "dev", "up0"],
            )?;
        }
        let socket = folder.join("containerd.sock");
        write(&config.join("10-pods.conflist"), &cni(number, &folder))?;
        fs::write(
            folder.join("containerd.toml"),
            containerd_config(&folder, &socket),
        )
        .context("writing containerd.toml")?;
        let flags = [
            "-c".to_owned(),
            folder.join("containerd.toml").display().to_string(),
        ];
        let containerd = start(
            plane,
            &format!("containerd-{number}"),
            &machine::find("containerd")?,
            &flags,
        )?;
        let socket = socket.display().to_string();
        eventually("containerd answers", Duration::from_secs(30), || async {
            containerd.check()?;
            run("ctr", &["-a", &socket, "version"])
        })
        .await?;
        for archive in archives {
            run(
                "ctr",
                &[
                    "-a",
                    &socket,
                    "-n",
                    "k8s.io",
                    "images",
                    "import",
                    &archive.display().to_string(),
                ],
            )?;
        }
        let cgroup = format!("{cgroup}/{name}");
        for hierarchy in machine::hierarchies()? {
            machine::make_cgroup(&hierarchy, &cgroup)?;
        }
        let user = format!("system:node:{name}");
        let kubeconfig = plane.kubeconfig_for(&user, &["system:nodes"])?;
        let config = folder.join("kubelet.json");
        write(&config, &kubelet_config(plane, &socket, &cgroup, number))?;
        let args = [
            format!("--config={}", config.display()),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--hostname-override={name}"),
            format!("--root-dir={}", folder.join("kubelet").display()),
            format!("--node-ip={address}"),
            format!("--cert-dir={}", folder.join("kubelet-pki").display()),
        ];
        let kubelet = start(
            plane,
            &format!("kubelet-{number}"),
            &binaries.kubelet,
            &args,
        )?;
        Ok(Self {
            name,
            cgroup,
            kubelet,
            containerd,
        })
    }
}

/// Pods get addresses from a bridge of their node.
fn cni(number: u8, folder: &Path) -> serde_json::Value {
    json!({
        "cniVersion": "0.4.0", "name": format!("pods-{number}"),
        "plugins": [{
            "type": "bridge", "bridge": format!("pods{number}"), "isGateway": true, "hairpinMode": true, "ipMasq": false,
            "ipam": {
                "type": "host-local", "dataDir": folder.join("ipam"),
                "ranges": [[{"subnet": format!("10.244.{number}.0/24")}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }],
    })
}

/// `restrict_oom_score_adj`: without the right to raise scores every sandbox would fail.
fn containerd_config(folder: &Path, socket: &Path) -> String {
    let (folder, socket) = (folder.display(), socket.display());
    let plugins = machine::CNI_PLUGINS;
    format!(
        r#"version = 2
root = "{folder}/containerd"
state = "{folder}/containerd-state"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "{WORKLOAD}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{folder}/cni"
    bin_dir = "{plugins}"
"#
    )
}

fn kubelet_config(
    plane: &ControlPlane,
    socket: &str,
    cgroup: &str,
    number: u8,
) -> serde_json::Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "failCgroupV1": false,
        // Nobody answers there; without one, kubelet complains about each pod.
        "clusterDNS": ["10.0.0.10"],
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{cgroup}"),
        "containerRuntimeEndpoint": format!("unix://{socket}"),
        "authentication": {
            "anonymous": {"enabled": false}, "webhook": {"enabled": true},
            "x509": {"clientCAFile": plane.pki().path("ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "failSwapOn": false,
        "enforceNodeAllocatable": ["none"],
        "localStorageCapacityIsolation": false,
        "makeIPTablesUtilChains": false,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%", "nodefs.inodesFree": "1%"},
        "maxOpenFiles": 20000,
        "port": 10250 + i32::from(number) * 10,
        "healthzPort": 10251 + i32::from(number) * 10,
        // Two on one machine: pods of a cluster's own must fit in beside what the tests ask for.
        "maxPods": 110,
        // On all but the first, as on many nodes: Guaranteed pods are kept on CPUs, and can't be resized (E18).
        "cpuManagerPolicy": if number == 1 { "none" } else { "static" },
        "reservedSystemCPUs": "0",
    })
}
