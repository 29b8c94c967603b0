//! The invariants, as the API server's own audit log and metrics tell of them: whatever is inflicted, no pod is refused by us
//! (I1), every pod at rest has the CPU that its owner asked for (I2), a revert only lowers and keeps the `QoS` class (I3), each
//! boost is reverted by one effective write (I4), and none of our writes meets another pod of the same name (I5).

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    io::{BufRead as _, BufReader, Seek as _, SeekFrom},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _, api::ListParams};
use serde_json::Value;
use testbed::{ControlPlane, eventually, lives::NAMESPACE};

const ACCOUNT: &str = "system:serviceaccount:headstart-system:headstart";
/// How long the last writes may take after everything that was asked for is back.
const REST: Duration = Duration::from_secs(60);

/// What has been read so far.
pub(crate) struct Ledger {
    path: PathBuf,
    offset: u64,
    /// What owners asked for, by the pod's name.
    asked: HashMap<String, Vec<Cpu>>,
    /// Effective resizes by the pod's uid: raises apart from reverts.
    resizes: HashMap<(String, bool), u32>,
    /// Whether pods that run already may be boosted.
    raises: bool,
    broken: Vec<String>,
    /// Refusals that were asked for.
    excused: f64,
}

impl Ledger {
    pub(crate) fn of(plane: &ControlPlane) -> Self {
        Self {
            path: plane.folder().join("audit.jsonl"),
            offset: 0,
            asked: HashMap::new(),
            resizes: HashMap::new(),
            raises: false,
            broken: Vec::new(),
            excused: 0.0,
        }
    }

    /// Reads on, and says what was broken; then looks at the pods themselves.
    ///
    /// # Errors
    /// If an invariant does not hold.
    pub(crate) async fn check(&mut self, plane: &ControlPlane) -> Result<()> {
        let pods = Api::<Pod>::namespaced(plane.admin(), NAMESPACE);
        self.read()?;
        let asked = &self.asked;
        eventually("every pod has the CPU that was asked for", REST, || async {
            for pod in pods.list(&ListParams::default()).await?.items {
                let name = pod.name_any();
                let wanted = asked
                    .get(&name)
                    .with_context(|| format!("{name} is unknown"))?;
                let pod = serde_json::to_value(&pod)?;
                let has = cpu(&pod);
                ensure!(has == *wanted, "{name} has {has:?}");
            }
            Ok(())
        })
        .await?;
        self.read()?;
        let metrics = plane.metrics().await?;
        let refused = refusals(&metrics) - self.excused;
        ensure!(refused == 0.0, "{refused} pods were refused by us (I1)");
        ensure!(self.broken.is_empty(), "{}", self.broken.join("; "));
        Ok(())
    }

    /// What was refused until now is what a test asked for.
    ///
    /// # Errors
    /// If the API server or its log can't be read.
    pub(crate) async fn excuse_refusals(&mut self, plane: &ControlPlane) -> Result<()> {
        self.read()?;
        self.broken.retain(|broken| !broken.starts_with("I1"));
        self.excused = refusals(&plane.metrics().await?);
        Ok(())
    }

    /// Reads on, and forgets pods that are gone. What was broken stays known.
    ///
    /// # Errors
    /// If the log or the pods can't be read.
    pub(crate) async fn forget_gone(&mut self, plane: &ControlPlane) -> Result<()> {
        let pods = Api::<Pod>::namespaced(plane.admin(), NAMESPACE);
        let there = pods.list_metadata(&ListParams::default()).await?;
        self.read()?;
        let names: HashSet<_> = there
            .items
            .iter()
            .map(kube::ResourceExt::name_any)
            .collect();
        let uids: HashSet<_> = there
            .items
            .iter()
            .filter_map(kube::ResourceExt::uid)
            .collect();
        self.asked.retain(|name, _| names.contains(name));
        self.resizes.retain(|(uid, _), _| uids.contains(uid));
        Ok(())
    }

    /// From now on pods that run already may be boosted, once each.
    pub(crate) fn allow_raises(&mut self) {
        self.raises = true;
    }

    /// Effective resizes since the begin.
    pub(crate) fn resizes(&self) -> u32 {
        self.resizes.values().sum()
    }

    fn read(&mut self) -> Result<()> {
        let what = || format!("reading {}", self.path.display());
        let mut file = File::open(&self.path).with_context(what)?;
        file.seek(SeekFrom::Start(self.offset)).with_context(what)?;
        let mut lines = BufReader::new(file);
        let mut line = String::new();
        loop {
            line.clear();
            let read = lines
                .read_line(&mut line)
                .context("reading the audit log")?;
            // The last line may be half written.
            if !line.ends_with('\n') {
                return Ok(());
            }
            self.offset += read as u64;
            let event = serde_json::from_str(&line).context("reading the audit log")?;
            self.event(&event);
        }
    }

    fn event(&mut self, event: &Value) {
        let about = &event["objectRef"];
        let name = about["name"].as_str().unwrap_or_default();
        let status = event["responseStatus"]["code"].as_u64().unwrap_or_default();
        if about["resource"] != "pods" || event["stage"] != "ResponseComplete" {
            return;
        }
        match (event["verb"].as_str(), about["subresource"].as_str()) {
            (Some("create"), None) if status < 300 => {
                self.asked
                    .insert(name.to_owned(), cpu(&event["requestObject"]));
            }
            (Some("create"), None) => {
                let message = event["responseStatus"]["message"]
                    .as_str()
                    .unwrap_or_default();
                if message.contains("headstart") {
                    self.broken
                        .push(format!("I1: {name} was refused: {message}"));
                }
            }
            (Some("patch"), subresource)
                if status < 300 && event["user"]["username"] == ACCOUNT =>
            {
                self.write(event, subresource == Some("resize"));
            }
            _ => {}
        }
    }

    /// A write of ours that was carried out.
    fn write(&mut self, event: &Value, is_resize: bool) {
        let (sent, stored) = (&event["requestObject"], &event["responseObject"]);
        let name = stored["metadata"]["name"].as_str().unwrap_or_default();
        let uid = &stored["metadata"]["uid"];
        if sent["metadata"]["uid"] != *uid {
            self.broken
                .push(format!("I5: a write to {name} met another pod"));
        }
        let version = &sent["metadata"]["resourceVersion"];
        if !is_resize || *version == stored["metadata"]["resourceVersion"] {
            return;
        }
        let uid = uid.as_str().unwrap_or_default().to_owned();
        let is_other = self
            .asked
            .get(name)
            .is_some_and(|asked| *asked != cpu(stored));
        let is_raise = is_other && self.raises;
        let resizes = self.resizes.entry((uid, is_raise)).or_default();
        *resizes += 1;
        if *resizes > 1 {
            self.broken
                .push(format!("I4: {name} was resized {resizes} times"));
        }
        if is_other && !is_raise {
            self.broken
                .push(format!("I3: {name} was resized to {:?}", cpu(stored)));
        }
    }
}

/// Container, request and limit.
type Cpu = [String; 3];

fn cpu(pod: &Value) -> Vec<Cpu> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
    containers
        .map(|container| {
            let resources = &container["resources"];
            let (request, limit) = (&resources["requests"]["cpu"], &resources["limits"]["cpu"]);
            [text(&container["name"]), text(request), text(limit)]
        })
        .collect()
}

/// The API server's count of pods that our webhook kept from being created.
fn refusals(metrics: &str) -> f64 {
    let ours = metrics.lines().filter(|line| {
        line.starts_with("apiserver_admission_webhook_rejection_count{")
            && line.contains("headstart")
    });
    ours.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
        .sum()
}
