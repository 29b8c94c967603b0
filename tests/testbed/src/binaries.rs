//! The programs of the control plane: where they are, or how they come to be.
//!
//! Nothing is downloaded ready-made: the Go module `kube` beside this crate holds etcd, kube-apiserver and kubectl in one program,
//! and what makes a whole cluster of them in a second one; the module `helm` names Helm. Each is built once, when it is first asked
//! for, and kept in the user's cache. People who have envtest's binaries set `KUBEBUILDER_ASSETS` and build nothing for a control
//! plane.

use std::{
    env,
    fs::{self, File},
    io::{BufRead, BufReader},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use sha2::{Digest as _, Sha256};

/// A package of a Go module: a program, or one that goes by several names and looks at the one it was started by.
struct Package {
    /// The module that builds it: a folder beside this crate's `src`.
    module: &'static str,
    /// Its path, as Go wants it.
    path: &'static str,
    /// The files of the module that it is made from.
    sources: &'static [&'static str],
    /// Whether it is told the version of Kubernetes that the module requires.
    is_kubernetes: bool,
    /// What the program is called in the cache.
    program: &'static str,
    /// The other names that it has there.
    names: &'static [&'static str],
    /// What it is, for people who wait for it.
    what: &'static str,
    /// How long its build takes on two cores, in words.
    takes: &'static str,
}

const CONTROL_PLANE: Package = Package {
    module: "kube",
    path: ".",
    sources: &["main.go", "go.mod", "go.sum"],
    is_kubernetes: true,
    program: "kube",
    names: &["etcd", "kube-apiserver", "kubectl"],
    what: "the test control plane",
    takes: "about 10 minutes",
};
const NODE: Package = Package {
    module: "kube",
    path: "./node",
    sources: &["node/main.go", "go.mod", "go.sum"],
    is_kubernetes: true,
    program: "node",
    names: &[
        "kube-controller-manager",
        "kube-proxy",
        "kube-scheduler",
        "kubelet",
    ],
    what: "the rest of a test cluster",
    takes: "about 5 minutes after the control plane",
};
const HELM: Package = Package {
    module: "helm",
    path: "helm.sh/helm/v4/cmd/helm",
    sources: &["go.mod", "go.sum"],
    is_kubernetes: false,
    program: "helm",
    names: &[],
    what: "Helm",
    takes: "about 4 minutes",
};
const NO_GO: &str = "Go 1.26 or newer is needed to build the test control plane and Helm: install it; for the control plane alone, KUBEBUILDER_ASSETS may name a folder with etcd, kube-apiserver and kubectl instead";

/// Paths of the three programs.
#[derive(Clone, Debug)]
pub struct Binaries {
    /// The store behind the API server.
    pub etcd: PathBuf,
    /// The API server.
    pub kube_apiserver: PathBuf,
    /// The client that people use, so tests use it too.
    pub kubectl: PathBuf,
}

impl Binaries {
    /// Finds the programs, and builds them where there are none: about 10 minutes once, then cached. Blocks meanwhile.
    ///
    /// # Errors
    /// If `KUBEBUILDER_ASSETS` names a folder that lacks a program; if Go is missing or the build fails.
    pub fn find() -> Result<Self> {
        let folder = match env::var_os("KUBEBUILDER_ASSETS") {
            Some(assets) if !assets.is_empty() => {
                let assets = PathBuf::from(assets);
                for name in CONTROL_PLANE.names {
                    ensure!(
                        assets.join(name).is_file(),
                        "KUBEBUILDER_ASSETS is {}, but there is no {name} in it: put it there, or unset the variable to have it built",
                        assets.display()
                    );
                }
                assets
            }
            _ => cached(&CONTROL_PLANE)?,
        };
        let program = |name| folder.join(name);
        Ok(Self {
            etcd: program("etcd"),
            kube_apiserver: program("kube-apiserver"),
            kubectl: program("kubectl"),
        })
    }
}

/// Paths of what turns a control plane into a cluster with a real node.
#[derive(Clone, Debug)]
pub struct NodeBinaries {
    /// The controllers: Deployments, endpoints, service accounts …
    pub kube_controller_manager: PathBuf,
    /// What makes a Service's address lead to its pods.
    pub kube_proxy: PathBuf,
    /// The scheduler.
    pub kube_scheduler: PathBuf,
    /// The node's agent.
    pub kubelet: PathBuf,
}

impl NodeBinaries {
    /// Finds the programs, and builds them where there are none. Blocks meanwhile.
    ///
    /// # Errors
    /// If Go is missing or the build fails.
    pub fn find() -> Result<Self> {
        let folder = cached(&NODE)?;
        let program = |name| folder.join(name);
        Ok(Self {
            kube_controller_manager: program("kube-controller-manager"),
            kube_proxy: program("kube-proxy"),
            kube_scheduler: program("kube-scheduler"),
            kubelet: program("kubelet"),
        })
    }
}

/// Finds Helm, and builds it where it has not been built. Blocks meanwhile.
///
/// # Errors
/// If Go is missing or the build fails.
pub fn helm() -> Result<PathBuf> {
    Ok(cached(&HELM)?.join(HELM.program))
}

/// The package's folder in the cache, built if it is not there.
fn cached(package: &Package) -> Result<PathBuf> {
    let module = Path::new(env!("CARGO_MANIFEST_DIR")).join(package.module);
    let go = go_version(&module)?;
    let mut flags = "-s -w".to_owned();
    if package.is_kubernetes {
        flags += &version_flags(&module)?;
    }
    let mut hash = Sha256::new();
    for file in package.sources {
        let path = module.join(file);
        hash.update(fs::read(&path).with_context(|| format!("reading {}", path.display()))?);
    }
    hash.update(&flags);
    hash.update(&go);
    let digest = hash.finalize();
    let start = digest.first_chunk().context("a SHA-256 has 32 bytes")?;
    let key = format!("{:016x}", u64::from_be_bytes(*start));

    let cache = env::var_os("XDG_CACHE_HOME")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from);
    let cache = cache.or_else(|| env::home_dir().map(|home| home.join(".cache")));
    let cache = cache
        .context("no place to cache what Go builds: set HOME or XDG_CACHE_HOME")?
        .join("headstart");
    let program = package.program;
    let folder = cache.join(format!("{program}-{key}"));
    if folder.join(program).is_file() {
        return Ok(folder);
    }

    fs::create_dir_all(&cache).with_context(|| format!("creating {}", cache.display()))?;
    let path = cache.join(format!("{program}-{key}.lock"));
    let lock = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
    // Test processes run at the same time: one builds, the others wait here and find the result.
    lock.lock()
        .with_context(|| format!("locking {}", path.display()))?;
    if !folder.join(program).is_file() {
        build(package, &module, &flags, &folder)?;
    }
    Ok(folder)
}

/// What `go version` says inside the module, which may ask for a newer toolchain than the one installed.
fn go_version(module: &Path) -> Result<String> {
    let Ok(output) = Command::new("go")
        .arg("version")
        .current_dir(module)
        .output()
    else {
        bail!(NO_GO)
    };
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{NO_GO} (`go version` says: {})",
        error.trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Without a version the server would call itself v0.0.0, and clients that look at versions would go wrong.
fn version_flags(module: &Path) -> Result<String> {
    let path = module.join("go.mod");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let version = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("k8s.io/kubernetes "))
        .map(str::trim);
    let version = version
        .with_context(|| format!("{} does not require k8s.io/kubernetes", path.display()))?;
    let mut numbers = version.trim_start_matches('v').split('.');
    let (Some(major), Some(minor)) = (numbers.next(), numbers.next()) else {
        bail!(
            "{}: {version} is not a version of Kubernetes",
            path.display()
        )
    };
    let set = "-X k8s.io/component-base/version.git";
    Ok(format!(
        " {set}Version={version} {set}Major={major} {set}Minor={minor}"
    ))
}

/// Builds beside `folder` and renames at the end: what stands in the cache is always whole.
fn build(package: &Package, module: &Path, flags: &str, folder: &Path) -> Result<()> {
    let start = Instant::now();
    let (what, mut names) = (package.what, package.names.join(", "));
    if !names.is_empty() {
        names = format!(" ({names})");
    }
    eprintln!(
        "Building {what}{names} with Go: {}, once. It is kept in {}",
        package.takes,
        folder.display()
    );
    let unfinished = folder.with_extension("unfinished");
    fs::remove_dir_all(&unfinished).ok();
    fs::create_dir_all(&unfinished)
        .with_context(|| format!("creating {}", unfinished.display()))?;
    let mut go = Command::new("go")
        .args(["build", "-v", "-trimpath", "-ldflags", flags, "-o"])
        .arg(unfinished.join(package.program))
        .arg(package.path)
        .current_dir(module)
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context(NO_GO)?;
    let lines = BufReader::new(go.stderr.take().context("Go's output was not piped")?).lines();
    let (mut packages, mut reported, mut tail) = (0, Instant::now(), Vec::new());
    // Go names each package as it compiles it; only the last lines matter if it fails.
    for line in lines.map_while(Result::ok) {
        packages += 1;
        if reported.elapsed() > Duration::from_secs(30) {
            eprintln!(
                "… {packages} packages in {} min",
                start.elapsed().as_secs() / 60
            );
            reported = Instant::now();
        }
        tail.push(line);
        tail.drain(..tail.len().saturating_sub(20));
    }
    let status = go.wait().context("waiting for Go")?;
    ensure!(
        status.success(),
        "`go build` in {} failed ({status}):\n{}",
        module.display(),
        tail.join("\n")
    );
    for name in package.names {
        symlink(package.program, unfinished.join(name))
            .with_context(|| format!("naming {name}"))?;
    }
    fs::remove_dir_all(folder).ok();
    fs::rename(&unfinished, folder)
        .with_context(|| format!("moving the build to {}", folder.display()))?;
    eprintln!("Built {what} in {} s", start.elapsed().as_secs());
    Ok(())
}
