//! `cargo faults rules`: each rule that never bends is broken on purpose, in a copy of the source, and a fault has to notice.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, Result, ensure};
use testbed::release;
use tokio::process::Command;

/// A rule, how it is broken, and the fault that has to notice.
pub(crate) struct Rule {
    pub(crate) number: u8,
    pub(crate) what: &'static str,
    pub(crate) broken: &'static str,
    pub(crate) fault: u8,
    file: &'static str,
    from: &'static str,
    to: &'static str,
}

/// All of them that are in the program. (That nothing is silent is held by the closed lists of reasons, and by the cases.)
pub(crate) const RULES: [Rule; 7] = [
    Rule {
        number: 1,
        what: "no answer of ours refuses a pod",
        broken: "answers say `allowed: false`",
        fault: 11,
        file: "src/admission/review.rs",
        from: "to.serialize_bool(true)",
        to: "to.serialize_bool(false)",
    },
    Rule {
        number: 2,
        what: "the pod carries the whole state",
        broken: "records have what was set in place of what was asked for",
        fault: 11,
        file: "src/domain/admission.rs",
        from: "from.map(|original| LoanValue { original, set })",
        to: "from.map(|original| LoanValue { original: to.unwrap_or(original), set })",
    },
    Rule {
        number: 3,
        what: "every boost ends",
        broken: "a new leader looks only at what changes in its own term",
        fault: 1,
        file: "src/claims.rs",
        from: "state.changed = Some(state.pods.keys().cloned().collect());",
        to: "state.changed = Some(BTreeSet::new());",
    },
    Rule {
        number: 4,
        what: "a revert only lowers",
        broken: "it goes to what the record says, also upwards",
        fault: 15,
        file: "src/domain/revert.rs",
        from: "(Set::To(set), Some(now)) if now == set && value.original < now => {",
        to: "(Set::To(set), Some(now)) if now == set => {",
    },
    Rule {
        number: 5,
        what: "every write is safe twice and from two leaders",
        broken: "writes don't say for which pod they are, and for which version of it",
        fault: 17,
        file: "src/domain/patch.rs",
        from: "    metadata.insert(\"uid\".into(), json!(pod.metadata.uid));\n    metadata.insert(\n        \"resourceVersion\".into(),\n        json!(pod.metadata.resource_version),\n    );\n",
        to: "    metadata.insert(\"name\".into(), json!(pod.metadata.name));\n",
    },
    Rule {
        number: 6,
        what: "the admission path is pure: all replicas give the same answer",
        broken: "every other answer is given without looking at the boosts",
        fault: 11,
        file: "src/admission/mod.rs",
        from: "        let counted = |outcome| Some(outcome).filter(|_| !asked.is_dry_run);\n",
        to: "        let counted = |outcome| Some(outcome).filter(|_| !asked.is_dry_run);\n        if fastrand::bool() {\n            return Ok((None, review::unchanged(&asked.uid)));\n        }\n",
    },
    Rule {
        number: 7,
        what: "Ready does not mean leader",
        broken: "only the leader is Ready",
        fault: 11,
        file: "src/probes.rs",
        from: "    let readyz = warp::path!(\"readyz\").then(move || {\n        let readiness = readiness.clone();\n        async move {\n            match readiness.missing().await {",
        to: "    let leader = Arc::clone(&metrics);\n    let readyz = warp::path!(\"readyz\").then(move || {\n        let readiness = readiness.clone();\n        let follows = !leader.text().contains(\"\\nheadstart_leader 1\\n\");\n        async move {\n            match readiness.missing().await.or(follows.then(String::new)) {",
    },
];

/// Of the table.
pub(crate) const HEAD: &str =
    "| | rule | how it is broken | fault | what notices |\n|---|---|---|---|---|";

/// The end of an error's chain, which says what was awaited and what was seen, without what would end a cell.
pub(crate) fn short(error: &str) -> String {
    let parts: Vec<&str> = error.split(": ").filter(|part| !part.is_empty()).collect();
    let last = parts[parts.len().saturating_sub(2)..].join(": ");
    let text: String = last.chars().take(160).collect();
    text.replace(['|', '\n'], " ")
}

/// A copy of what is in the repository, with a target folder of its own that stays.
pub(crate) struct Copy(PathBuf);

impl Copy {
    /// Makes it.
    ///
    /// # Errors
    /// If git does not say what is in the repository, or a file can't be copied.
    pub(crate) async fn make() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let listed = Command::new("git")
            .args([
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ])
            .current_dir(&root)
            .output()
            .await
            .context("running git ls-files")?;
        ensure!(listed.status.success(), "git ls-files failed");
        let copy = root.join("target/rules");
        let files = String::from_utf8(listed.stdout).context("reading git ls-files")?;
        for file in files.split_terminator('\0') {
            let to = copy.join(file);
            let folder = to.parent().context("a file is in no folder")?;
            std::fs::create_dir_all(folder)?;
            let text = std::fs::read(root.join(file)).with_context(|| format!("reading {file}"))?;
            write_changed(&to, &text)?;
        }
        Ok(Self(copy))
    }

    /// The program with this rule broken.
    ///
    /// # Errors
    /// If the source is not as the rule's breaker knows it, or does not compile.
    pub(crate) async fn broken(&self, rule: &Rule) -> Result<PathBuf> {
        let path = self.0.join(rule.file);
        let whole = std::fs::read_to_string(&path)?;
        let times = whole.matches(rule.from).count();
        ensure!(
            times == 1,
            "{} has {times} times what breaks rule {}",
            rule.file,
            rule.number
        );
        std::fs::write(&path, whole.replace(rule.from, rule.to))?;
        let built = self.build().await;
        std::fs::write(&path, whole)?;
        built.with_context(|| format!("breaking rule {}", rule.number))
    }

    async fn build(&self) -> Result<PathBuf> {
        let status = release::cargo()
            .args(["build", "--quiet", "--locked", "--bin", "headstart"])
            .current_dir(&self.0)
            .stdin(Stdio::null())
            .status()
            .await
            .context("running cargo")?;
        ensure!(status.success(), "cargo build failed");
        Ok(self.0.join("target/debug/headstart"))
    }
}

/// A file that stays as it is keeps its time, so that it is not compiled again.
fn write_changed(path: &Path, text: &[u8]) -> Result<()> {
    if std::fs::read(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
