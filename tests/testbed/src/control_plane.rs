//! A real control plane on loopback: etcd and kube-apiserver, nothing else. No root, no network, ready in seconds.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use http::Request;
use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec},
    core::v1::{Namespace, ServiceAccount},
};
use kube::{
    Api, Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt as _;

use crate::{
    binaries::Binaries,
    pki::Pki,
    process::{Janitor, Signal, Supervised, free_ports},
    wait::{GiveUp, eventually},
};

/// How long a start may take; on an idle machine it is 3 s, but test processes start several at once.
const START: Duration = Duration::from_secs(90);
/// A port that was free may be taken before its program listens: so often everything is started anew.
const ATTEMPTS: usize = 4;

/// Environment of the servers: collecting garbage less often saves a quarter of the API server's work; it is young and small.
const ENV: [(&str, &str); 1] = [("GOGC", "400")];

/// How a control plane is started.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Leave the folder with data, logs, certificates and audit log behind, and say where it is.
    pub keep: bool,
    /// More flags for kube-apiserver, after ours.
    pub api_server_args: Vec<String>,
    /// The address at which nodes and pods reach the API server, if there will be any: then it also does what a node needs, and
    /// demands service accounts, which a controller manager has to make. Otherwise it is on loopback.
    pub address: Option<Ipv4Addr>,
}

/// Where Services have their addresses in a whole cluster.
pub const SERVICES: &str = "10.0.0.0/16";
/// The first of those, which is the API server's own.
const KUBERNETES_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

/// A running etcd and kube-apiserver. They end with this value, and at the latest with this process.
pub struct ControlPlane {
    // Dropped in this order: whoever writes into the folder ends before it is removed.
    api_server: Server,
    etcd: Server,
    /// Kept for its end alone.
    _janitor: Option<Janitor>,
    folder: Folder,
    kubectl: PathBuf,
    pki: Pki,
    address: SocketAddr,
    url: String,
    etcd_url: String,
    admin_kubeconfig: PathBuf,
    admin: Config,
}

/// The folder of a control plane: removed at the end, unless it is to be kept.
#[derive(Debug)]
enum Folder {
    Temporary(TempDir),
    Kept(PathBuf),
}

impl Folder {
    fn path(&self) -> &Path {
        match self {
            Self::Temporary(folder) => folder.path(),
            Self::Kept(folder) => folder,
        }
    }
}

impl ControlPlane {
    /// Starts etcd and kube-apiserver, and returns when the API server is ready.
    ///
    /// # Errors
    /// If the programs can't be found or built, or don't become ready; the error then ends with the last lines of their logs.
    pub async fn start(options: Options) -> Result<Self> {
        // Both TLS providers might be compiled into a test; one that is installed already is as good.
        rustls::crypto::ring::default_provider()
            .install_default()
            .ok();
        let binaries = tokio::task::spawn_blocking(Binaries::find)
            .await
            .context("looking for the control plane's programs")??;
        let mut attempt = 1;
        loop {
            match Self::attempt(&options, binaries.clone()).await {
                Err(error)
                    if attempt < ATTEMPTS
                        && format!("{error:#}").contains("address already in use") =>
                {
                    attempt += 1;
                }
                result => return result,
            }
        }
    }

    async fn attempt(options: &Options, binaries: Binaries) -> Result<Self> {
        let folder =
            TempDir::with_prefix("headstart-").context("making a folder for the control plane")?;
        let (folder, janitor) = if options.keep {
            let folder = folder.keep();
            eprintln!("The control plane keeps its files in {}", folder.display());
            (Folder::Kept(folder), None)
        } else {
            let janitor = Janitor::start(folder.path())?;
            (Folder::Temporary(folder), Some(janitor))
        };
        let path = folder.path();
        let addresses = options.address.iter().copied();
        let addresses: Vec<_> = addresses.chain([KUBERNETES_SERVICE]).collect();
        let pki = Pki::create(&path.join("pki"), &addresses)?;
        let policy = path.join("audit-policy.json");
        std::fs::write(&policy, audit_policy().to_string())
            .with_context(|| format!("writing {}", policy.display()))?;

        let [etcd_port, peer_port, port] = free_ports()?;
        let address = SocketAddr::from((options.address.unwrap_or(Ipv4Addr::LOCALHOST), port));
        let url = format!("https://{address}");
        let args = etcd_args(path, etcd_port, peer_port);
        let etcd = Server::start("etcd", binaries.etcd, args, path)?;
        let mut args = api_server_args(path, &pki, etcd_port, port);
        args.extend(match options.address {
            None => loopback_args(),
            Some(address) => cluster_args(&pki, address),
        });
        args.extend(options.api_server_args.iter().cloned());
        let api_server = Server::start("kube-apiserver", binaries.kube_apiserver, args, path)?;
        let admin_kubeconfig = pki.user_kubeconfig(&url, "admin", &["system:masters"])?;
        let admin = config(&admin_kubeconfig).await?;
        let plane = Self {
            api_server,
            etcd,
            _janitor: janitor,
            folder,
            kubectl: binaries.kubectl,
            pki,
            address,
            url,
            etcd_url: format!("http://127.0.0.1:{etcd_port}"),
            admin_kubeconfig,
            admin,
        };
        plane.wait_ready().await?;
        Ok(plane)
    }

    async fn wait_ready(&self) -> Result<()> {
        let servers = [&self.etcd, &self.api_server].map(Server::process);
        let admin = self.admin();
        let ready = eventually("the API server is ready", START, || async {
            for server in &servers {
                runs(server)?;
            }
            let request = Request::get("/readyz").body(Vec::new())?;
            let answer = admin.request_text(request).await?;
            ensure!(answer == "ok", "/readyz says {answer}");
            // Made in the background, after /readyz says ok.
            Api::<Namespace>::all(admin.clone()).get("default").await?;
            Ok(())
        });
        ready.await.with_context(|| {
            let logs = servers.each_ref().map(|server| {
                format!(
                    "{}:\n{}",
                    server.log_path().display(),
                    server.last_log_lines(15)
                )
            });
            format!("starting the control plane. {}", logs.join("\n"))
        })
    }

    /// Where the API server listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The same as a URL.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The folder with logs, certificates and the audit log; a place for more files of the test.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A client that may do everything. Each has its own connections, and lives with the runtime that asks for it: so tests with
    /// a runtime each can share one control plane in a `static`.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    #[must_use]
    pub fn admin(&self) -> Client {
        Client::try_from(self.admin.clone()).expect("certificates that we made are understood")
    }

    /// The certificates and keys of this control plane.
    #[must_use]
    pub fn pki(&self) -> &Pki {
        &self.pki
    }

    /// The kubeconfig behind [`Self::admin`].
    #[must_use]
    pub fn admin_kubeconfig(&self) -> &Path {
        &self.admin_kubeconfig
    }

    /// A kubeconfig for a user in up to two groups, who may do what RBAC lets them.
    ///
    /// # Errors
    /// If there are more groups, or files can't be written.
    pub fn kubeconfig_for(&self, user: &str, groups: &[&str]) -> Result<PathBuf> {
        self.pki.user_kubeconfig(&self.url, user, groups)
    }

    /// A client with connections of its own, as [`Self::kubeconfig_for`].
    ///
    /// # Errors
    /// As [`Self::kubeconfig_for`].
    pub async fn client_for(&self, user: &str, groups: &[&str]) -> Result<Client> {
        client(&self.kubeconfig_for(user, groups)?).await
    }

    /// A kubeconfig with a token of a service account that exists, good for a day: what a pod would find mounted.
    ///
    /// # Errors
    /// If there is no such service account.
    pub async fn service_account_kubeconfig(&self, namespace: &str, name: &str) -> Result<PathBuf> {
        self.service_account_kubeconfig_at(self.address, namespace, name)
            .await
    }

    /// As [`Self::service_account_kubeconfig`], with the address of a [`crate::Link`] or a [`crate::Proxy`] before the API server.
    ///
    /// # Errors
    /// If there is no such service account.
    pub async fn service_account_kubeconfig_at(
        &self,
        server: SocketAddr,
        namespace: &str,
        name: &str,
    ) -> Result<PathBuf> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.admin(), namespace);
        let spec = TokenRequestSpec {
            expiration_seconds: Some(24 * 3600),
            ..TokenRequestSpec::default()
        };
        let request = TokenRequest {
            spec,
            ..TokenRequest::default()
        };
        let answer = accounts
            .create_token_request(name, &kube::api::PostParams::default(), &request)
            .await
            .with_context(|| {
                format!(
                    "asking for a token of the service account {namespace}/{name}: create it first"
                )
            })?;
        let token = answer
            .status
            .context("the answer to a TokenRequest had no status")?
            .token;
        let (server, user) = (format!("https://{server}"), format!("{namespace}-{name}"));
        self.pki.token_kubeconfig(&server, &user, namespace, &token)
    }

    /// A client that acts as a service account.
    ///
    /// # Errors
    /// If there is no such service account.
    pub async fn service_account_client(&self, namespace: &str, name: &str) -> Result<Client> {
        client(&self.service_account_kubeconfig(namespace, name).await?).await
    }

    /// `kubectl` as the administrator, ready to be run or given more; its caches stay in our folder.
    #[must_use]
    pub fn kubectl_command(&self) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(&self.kubectl);
        command
            .env("KUBECONFIG", &self.admin_kubeconfig)
            .env("HOME", self.folder())
            .env_remove("XDG_CACHE_HOME");
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// Runs `kubectl` with these arguments, whatever comes out.
    ///
    /// # Errors
    /// If it can't be run.
    pub async fn kubectl(&self, args: &[&str]) -> Result<Output> {
        self.kubectl_command()
            .args(args)
            .output()
            .await
            .with_context(|| format!("running kubectl {}", args.join(" ")))
    }

    /// Runs `kubectl` and returns what it prints.
    ///
    /// # Errors
    /// If it fails; the error has what it prints then.
    pub async fn kubectl_ok(&self, args: &[&str]) -> Result<String> {
        printed(args, &self.kubectl(args).await?)
    }

    /// Server-side applies manifests, YAML or JSON, and returns what `kubectl` prints.
    ///
    /// # Errors
    /// If one is refused.
    pub async fn apply(&self, manifests: &str) -> Result<String> {
        let args = ["apply", "--server-side", "--force-conflicts", "-f", "-"];
        let mut command = self.kubectl_command();
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut kubectl = command.spawn().context("running kubectl apply")?;
        let mut stdin = kubectl
            .stdin
            .take()
            .context("kubectl's input was not piped")?;
        let writing = async move { stdin.write_all(manifests.as_bytes()).await };
        let (written, output) = tokio::join!(writing, kubectl.wait_with_output());
        let printed = printed(&args, &output.context("waiting for kubectl apply")?)?;
        written.context("writing to kubectl apply")?;
        Ok(printed)
    }

    /// The audit log so far: request bodies of all writes to pods (with the answers, where a service account wrote), the rest of
    /// the writes, and every request of a service account.
    ///
    /// # Errors
    /// If the log can't be read.
    pub fn audit_events(&self) -> Result<Vec<Value>> {
        let path = self.folder().join("audit.jsonl");
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("reading {}", path.display()))?;
        // The last line may be half written.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole
            .lines()
            .map(|line| {
                serde_json::from_str(line)
                    .with_context(|| format!("reading the audit event {line}"))
            })
            .collect()
    }

    /// The API server's own metrics, as text.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn metrics(&self) -> Result<String> {
        let request = Request::get("/metrics").body(Vec::new())?;
        self.admin()
            .request_text(request)
            .await
            .context("reading the API server's metrics")
    }

    /// The process ids of etcd and of the API server.
    #[must_use]
    pub fn pids(&self) -> [u32; 2] {
        [&self.etcd, &self.api_server].map(|server| server.process().pid())
    }

    /// Sends the API server a signal: `STOP` makes it hang until `CONT`, `KILL` is a crash.
    ///
    /// # Errors
    /// If it does not run.
    pub fn signal_api_server(&self, signal: Signal) -> Result<()> {
        self.api_server.process().kill(signal)
    }

    /// Ends the API server at once; etcd keeps the data. (In good order it would wait a minute for its watches.)
    ///
    /// # Errors
    /// If it does not end.
    pub async fn stop_api_server(&self) -> Result<()> {
        self.api_server.stop().await
    }

    /// Starts the API server again after [`Self::stop_api_server`] or a crash: same port, same data.
    ///
    /// # Errors
    /// If it still runs, or does not become ready.
    pub async fn start_api_server(&self) -> Result<()> {
        self.api_server.start_again()?;
        self.wait_ready().await
    }

    /// Sends etcd a signal, as [`Self::signal_api_server`].
    ///
    /// # Errors
    /// If it does not run.
    pub fn signal_etcd(&self, signal: Signal) -> Result<()> {
        self.etcd.process().kill(signal)
    }

    /// Ends etcd at once; what it has written stays. The API server goes on without it.
    ///
    /// # Errors
    /// If it does not end.
    pub async fn stop_etcd(&self) -> Result<()> {
        self.etcd.stop().await
    }

    /// Starts etcd again after [`Self::stop_etcd`] or a crash: same ports, same data. Waits until the API server has found it.
    ///
    /// # Errors
    /// If it still runs, or does not answer.
    pub async fn start_etcd(&self) -> Result<()> {
        self.etcd.start_again()?;
        let etcd = self.etcd.process();
        let answers = eventually("etcd answers", START, || async {
            runs(&etcd)?;
            self.ask_etcd("maintenance/status", &json!({})).await
        });
        answers.await?;
        self.wait_ready().await
    }

    /// Makes etcd forget its history so far. A watch from then gets 410 where the API server has to ask etcd for it. What it caches,
    /// it remembers until it is started again.
    ///
    /// # Errors
    /// If etcd refuses.
    pub async fn compact(&self) -> Result<()> {
        // A key that nobody reads: with it there is always something to compact.
        let key = json!({"key": "Y29tcGFjdGlvbg=="});
        let written = self.ask_etcd("kv/put", &key).await?;
        let history = json!({"revision": written["header"]["revision"], "physical": true});
        self.ask_etcd("kv/compaction", &history).await.map(drop)
    }

    /// Asks etcd through its JSON gateway.
    async fn ask_etcd(&self, what: &str, body: &Value) -> Result<Value> {
        let mut config = Config::new(self.etcd_url.parse().context("etcd's URL")?);
        config.default_retry = false;
        let request = Request::post(format!("/v3/{what}")).body(serde_json::to_vec(body)?)?;
        let answer = Client::try_from(config)?.request(request).await;
        answer.with_context(|| format!("asking etcd for {what}"))
    }
}

/// One of the two programs. It can be ended and started again.
struct Server {
    name: &'static str,
    binary: PathBuf,
    args: Vec<String>,
    log: PathBuf,
    process: Mutex<Arc<Supervised>>,
}

impl Server {
    fn start(
        name: &'static str,
        binary: PathBuf,
        args: Vec<String>,
        folder: &Path,
    ) -> Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let process = Supervised::spawn(name, &binary, &args, &ENV, &log)?;
        Ok(Self {
            name,
            binary,
            args,
            log,
            process: Mutex::new(Arc::new(process)),
        })
    }

    fn start_again(&self) -> Result<()> {
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(!process.is_alive(), "{} runs already", self.name);
        let again = Supervised::spawn(self.name, &self.binary, &self.args, &ENV, &self.log)?;
        *process = Arc::new(again);
        Ok(())
    }

    async fn stop(&self) -> Result<()> {
        let process = self.process();
        process.kill(Signal::KILL)?;
        process.wait(Duration::from_secs(10)).await.map(drop)
    }

    /// The process of now, or the last one.
    fn process(&self) -> Arc<Supervised> {
        Arc::clone(&self.process.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Whoever waits for a program that has ended gives up.
fn runs(program: &Supervised) -> Result<(), GiveUp> {
    program
        .check()
        .map_err(|error| GiveUp(format!("{error:#}")))
}

/// A client for a kubeconfig that shows errors as they come: a test must not pass by kube's own retries.
///
/// # Errors
/// If the kubeconfig can't be read.
pub async fn client(kubeconfig: &Path) -> Result<Client> {
    let config = config(kubeconfig).await?;
    Client::try_from(config).with_context(|| format!("making a client of {}", kubeconfig.display()))
}

async fn config(kubeconfig: &Path) -> Result<Config> {
    let what = || format!("reading {}", kubeconfig.display());
    let read = Kubeconfig::read_from(kubeconfig).with_context(what)?;
    let options = KubeConfigOptions::default();
    let mut config = Config::from_custom_kubeconfig(read, &options)
        .await
        .with_context(what)?;
    config.default_retry = false;
    // The API server is on loopback, whatever the environment says about proxies.
    config.proxy_url = None;
    Ok(config)
}

fn printed(args: &[&str], output: &Output) -> Result<String> {
    let out = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!(
            "kubectl {} failed ({}):\n{}{out}",
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(out.into_owned())
}

/// `--unsafe-no-fsync`: the data need not survive the machine.
fn etcd_args(folder: &Path, port: u16, peer_port: u16) -> Vec<String> {
    let (client, peer) = (
        format!("http://127.0.0.1:{port}"),
        format!("http://127.0.0.1:{peer_port}"),
    );
    vec![
        format!("--data-dir={}", folder.join("etcd").display()),
        "--unsafe-no-fsync".to_owned(),
        "--quota-backend-bytes=4294967296".to_owned(),
        "--log-level=warn".to_owned(),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=default={peer}"),
    ]
}

fn api_server_args(folder: &Path, pki: &Pki, etcd_port: u16, port: u16) -> Vec<String> {
    let flags = [
        format!("--etcd-servers=http://127.0.0.1:{etcd_port}"),
        format!("--secure-port={port}"),
        format!("--service-cluster-ip-range={SERVICES}"),
        "--allow-privileged".to_owned(),
        "--enable-admission-plugins=ResourceQuota,LimitRanger".to_owned(),
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local".to_owned(),
        "--requestheader-allowed-names=front-proxy-client".to_owned(),
        "--requestheader-username-headers=X-Remote-User".to_owned(),
        "--requestheader-group-headers=X-Remote-Group".to_owned(),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
        // With one, as is the default, pods that come and go at 50/s pile up on a busy machine.
        "--delete-collection-workers=8".to_owned(),
        // In megabytes: a rotated log would hide events from the tests.
        "--audit-log-maxsize=100000".to_owned(),
    ];
    let files = [
        ("--audit-policy-file", folder.join("audit-policy.json")),
        ("--audit-log-path", folder.join("audit.jsonl")),
        ("--client-ca-file", pki.path("ca.crt")),
        ("--tls-cert-file", pki.path("apiserver.crt")),
        ("--tls-private-key-file", pki.path("apiserver.key")),
        ("--service-account-key-file", pki.path("sa.pub")),
        ("--service-account-signing-key-file", pki.path("sa.key")),
        ("--requestheader-client-ca-file", pki.path("front-ca.crt")),
        ("--proxy-client-cert-file", pki.path("front.crt")),
        ("--proxy-client-key-file", pki.path("front.key")),
    ];
    let files = files
        .into_iter()
        .map(|(flag, path)| format!("{flag}={}", path.display()));
    flags.into_iter().chain(files).collect()
}

/// No network, no nodes, no controllers.
fn loopback_args() -> Vec<String> {
    let flags = [
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        // The API server would write its own address into Endpoints, where loopback is not allowed.
        "--endpoint-reconciler-type=none",
        "--authorization-mode=RBAC",
        // Nobody makes the default service accounts that it demands.
        "--disable-admission-plugins=ServiceAccount",
    ];
    flags.map(str::to_owned).to_vec()
}

/// For kubelets, which it also calls, and for pods.
fn cluster_args(pki: &Pki, address: Ipv4Addr) -> Vec<String> {
    let file = |flag: &str, name: &str| format!("{flag}={}", pki.path(name).display());
    vec![
        "--bind-address=0.0.0.0".to_owned(),
        format!("--advertise-address={address}"),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        file("--kubelet-client-certificate", "kubelet-client.crt"),
        file("--kubelet-client-key", "kubelet-client.key"),
    ]
}

/// Enough to count and read every write to a pod, to see what an operator's have changed, and all that it asks for.
fn audit_policy() -> Value {
    let writes = ["create", "update", "patch", "delete", "deletecollection"];
    json!({
        "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "RequestResponse", "verbs": writes, "userGroups": ["system:serviceaccounts"],
             "resources": [{"group": "", "resources": ["pods", "pods/resize"]}]},
            {"level": "Request", "verbs": writes, "resources": [{"group": "", "resources": ["pods", "pods/resize", "pods/status"]}]},
            {"level": "Metadata", "verbs": writes},
            {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
            {"level": "None"},
        ],
    })
}
