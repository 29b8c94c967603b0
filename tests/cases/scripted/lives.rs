//! Lives of boosted pods: the leader with its caches and its sweeper, against a server on which things happen at the
//! times that the case says. What is written is compared with what is right, look by look.
//!
//! [`World`] says what the pod must be; the server has the pod that is. The node does a resize within a look only where
//! the look goes on after it; elsewhere the next look says what the node has made of it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use arc_swap::ArcSwapOption;
use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use headstart::{
    boosts::Boosts,
    claims::Claims,
    clock::Clock,
    domain::{admission::Settings, snapshot::Snapshot},
    metrics::Metrics,
    snapshots::Snapshots,
    status::Reporter,
    surroundings,
    sweeper::{Events, Sweeper, Tally, Writer},
};
use serde_json::{Value, json};
use testbed::memory::{self, Fault, Kubelet, MemoryServer, Recorded, Resize};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use super::review;
use crate::{
    data::{Admit, Cases, Id, Life, Look, Retries},
    notation::{Then, merge, rfc3339, seconds, time},
    pure, told,
    world::{self, KEY, World, record_text},
};

const RESIZE: &str = "/pods/*/resize";
const FINISH: &str = "/pods/*";
/// How long the node takes for a resize.
pub(super) const ACTUATION: Duration = Duration::from_millis(250);
/// How long the first write of a look may take, in virtual time, unless the case says otherwise.
const AT_ONCE: Duration = Duration::from_millis(200);
/// How long a write may take that follows another, and the node's work in between.
const PROMPT: Duration = Duration::from_secs(1);
/// What watches need to tell of a change.
const SETTLED: Duration = Duration::from_millis(50);
/// What a boost's status needs to tell of a change: it is written every 2 s at most.
const REPORTED: Duration = Duration::from_secs(5);
/// How long nothing may be written after the end.
const QUIET: Duration = Duration::from_secs(2 * 3600);
/// The longest pause of a slow retry, jitter included.
const SLOW: Duration = Duration::from_secs(90);

/// Lets a pod live its life.
pub fn check(cases: &Cases, id: Id, life: &Life) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()?;
    runtime.block_on(async {
        if let Some(pods) = life.pods {
            return check_many(cases, id, life, pods).await;
        }
        let mut stage = Stage::begin(cases, id, life).await?;
        for (index, look) in life.looks.iter().enumerate() {
            let at = look.at.as_deref().unwrap_or("the same time");
            let next = life.looks.get(index + 1);
            stage.look(look, next).await.with_context(|| {
                format!("look {} at {at}, expected: {:?}", index + 1, look.then.0)
            })?;
        }
        stage.end(life).await.context("after the last look")
    })
}

/// A leading replica. Dropping it is a crash.
pub(super) struct Leader {
    claims: Arc<Claims>,
    boosts: Arc<Boosts>,
    pub(super) metrics: Arc<Metrics>,
    /// What its admission goes by.
    pub(super) snapshots: Arc<Snapshots>,
    pub(super) term: JoinHandle<()>,
    _caches: JoinSet<()>,
}

impl Leader {
    pub(super) fn start(server: &MemoryServer, settings: Settings) -> Self {
        let snapshots = Arc::<Snapshots>::default();
        let (claims, boosts) = (
            Arc::<Claims>::default(),
            Arc::new(Boosts::new(Arc::clone(&snapshots))),
        );
        let metrics = Arc::<Metrics>::default();
        let mut caches = JoinSet::new();
        let (kept, client) = (Arc::clone(&claims), server.client("leader"));
        caches.spawn(async move { kept.keep(client).await });
        let (kept, client) = (Arc::clone(&boosts), server.client("leader"));
        caches.spawn(async move { kept.keep(client).await });
        let (kept, client) = (Arc::clone(&snapshots), server.client("leader"));
        caches.spawn(async move {
            tokio::join!(
                surroundings::keep_namespaces(client.clone(), &kept),
                surroundings::keep_limit_ranges(client.clone(), &kept),
                surroundings::keep_quotas(client.clone(), &kept),
                surroundings::keep_nodes(client, &kept),
            );
        });
        let clock = server.clock();
        let wall = server.clock();
        let events = Arc::new(Events::new(
            server.client("leader"),
            "leader".to_owned(),
            Clock::new(move || wall.now()),
            metrics.revert.clone(),
        ));
        let kept = Arc::clone(&events);
        caches.spawn(async move { kept.keep().await });
        let tally = Arc::<Tally>::default();
        let wall = server.clock();
        let reporter = Reporter {
            client: server.client("leader"),
            boosts: Arc::clone(&boosts),
            tally: Arc::clone(&tally),
            clock: Clock::new(move || wall.now()),
            metrics: Arc::clone(&metrics),
            dry_run: false,
        };
        let sweeper = Sweeper {
            writer: Writer::new(server.client("leader")),
            claims: Arc::clone(&claims),
            boosts: Arc::clone(&boosts),
            snapshots: Arc::clone(&snapshots),
            settings,
            missed: None,
            clock: Clock::new(move || clock.now()),
            tally,
            events,
            metrics: metrics.revert.clone(),
            dry_run: false,
        };
        let term = CancellationToken::new();
        let work = async move {
            tokio::join!(sweeper.lead(term.clone()), reporter.lead(term));
        };
        Self {
            claims,
            boosts,
            metrics,
            snapshots,
            term: tokio::spawn(work),
            _caches: caches,
        }
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.term.abort();
    }
}

/// One pod's life on a server.
struct Stage<'a> {
    cases: &'a Cases,
    /// The pod's creation.
    admit: Admit,
    server: MemoryServer,
    /// What must be.
    world: World,
    settings: Settings,
    leader: Option<Leader>,
    /// The pod when it was young, which is how it comes when it is made anew.
    young: World,
    /// The pod's uid on the server.
    uid: Value,
    /// So many writes have been compared.
    compared: usize,
    /// When the last of them arrived.
    last: Duration,
    /// Whether the server has the next look's changes already: they came between a read and a write.
    changed: bool,
    /// When the definition was deleted, where it is.
    undefined: Option<Duration>,
}

impl<'a> Stage<'a> {
    async fn begin(cases: &'a Cases, id: Id, life: &Life) -> anyhow::Result<Self> {
        let mut world = World::begin(cases, id, life)?;
        let server = MemoryServer::with_clock(memory::Clock::new(world.now));
        let unscheduled = Look {
            scheduled: Some("not yet".to_owned()),
            ..Look::default()
        };
        let scheduled = Look {
            at: Some("10:00:00".to_owned()),
            scheduled: Some("10:00:00".to_owned()),
            ..Look::default()
        };
        world.change(&unscheduled)?;
        if let Some(template) = &life.template {
            let owner = server.create(world::owner(template)?);
            merge(&mut world.pod, &world::owned_by(&owner));
        }
        let mut stage = Self {
            cases,
            admit: world::admitted(cases, id, life)?,
            settings: pure::flags(&life.flags)?,
            leader: None,
            uid: create_pod(&server, &world),
            server,
            young: world.clone(),
            world,
            compared: 0,
            last: Duration::ZERO,
            changed: false,
            undefined: None,
        };
        stage.put_boosts();
        // Pods that upstream has boosted are there when we come.
        if life.annotation.is_none() {
            stage.leader = Some(Leader::start(&stage.server, stage.settings));
        }
        if life
            .looks
            .first()
            .is_some_and(|look| look.scheduled.is_none())
        {
            sleep(stage.until(time("10:00:00")?)).await;
            stage.world.change(&scheduled)?;
            put(&stage.server, &stage.world);
        }
        Ok(stage)
    }

    /// Makes a look's changes, waits for the writes, and compares them.
    async fn look(&mut self, look: &Look, next: Option<&Look>) -> anyhow::Result<()> {
        if let Some(at) = &look.at {
            let at = time(at)?;
            ensure!(at >= self.world.now, "the looks are in order");
            sleep(self.until(at)).await;
        }
        let mut began = self.server.clock().elapsed();
        if self.changed {
            // What follows was decided when the conflict was seen.
            began = self.last;
        }
        self.ensure_compared(began)?;
        self.server.clear_faults();
        if look.new_leader || self.leader.is_none() {
            // What an earlier leader has sent is its own affair.
            self.leader = Some(Leader::start(&self.server, self.settings));
        }
        self.change(look)?;
        self.script(look, next)?;

        let expected = expected_writes(look)?;
        let patience = look.within.as_deref().map_or(Ok(AT_ONCE), duration)? + PROMPT;
        let enough = || self.open_writes().len() >= expected;
        while !enough() && self.server.clock().elapsed() < began + patience {
            sleep(patience / 400).await;
        }
        if !self.changed && look.answered.as_deref() != Some("unsent") {
            // The last of them is answered.
            sleep(SETTLED).await;
        }
        if next.is_some_and(|next| next.new_leader) {
            self.leader = None;
        }
        if let Some(right) = &look.admits {
            sleep(PROMPT).await;
            self.check_admission(right)?;
        }
        self.wait_for(look, next).await?;
        if next.is_none() && look.tells() {
            sleep(REPORTED).await;
        }
        self.compare(look, began)?;
        self.check_tries(look, began)?;
        self.check_leader(look)?;
        self.check_told(look)
    }

    /// Waits until what a look's end shows can be seen.
    async fn wait_for(&self, look: &Look, next: Option<&Look>) -> anyhow::Result<()> {
        let until = match next {
            Some(Look { at: Some(at), .. }) => {
                // Timers of the next look's time belong to it.
                self.until(time(at)?)
                    .saturating_sub(Duration::from_millis(1))
            }
            Some(_) => Duration::ZERO,
            None => {
                let last = look.then.last().context("what is right?")?;
                match Then::read(last)?.as_slice() {
                    [Then::Wait(Some(until))] => self.until(*until).saturating_sub(SETTLED),
                    [Then::Wait(None) | Then::NoWrite, ..] => PROMPT,
                    _ => Duration::ZERO,
                }
            }
        };
        sleep(until).await;
        // A write that has just been sent is answered.
        while self.changed && self.writes().last().is_some_and(|last| last.status == 0) {
            sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    /// Sets what becomes of the writes, and how the node reacts.
    fn script(&mut self, look: &Look, next: Option<&Look>) -> anyhow::Result<()> {
        let is_resize = |text: &String| text.starts_with("resize");
        let goes_on = look.then.iter().rev().skip(1).any(is_resize);
        self.server.kubelet(Kubelet {
            actuate_after: ACTUATION,
            resize: if goes_on {
                Resize::Actuate
            } else {
                Resize::Never
            },
        });
        if let Some(refuses) = &look.refuses {
            let (code, text) = refuses.split_once(' ').context("a code and a text")?;
            let fault = Fault::on("PATCH", RESIZE).when(Recorded::is_dry_run);
            self.server
                .fault(fault.reply(code.parse()?, "Scripted", text));
        }
        let Some(answered) = look.answered.as_deref() else {
            return Ok(());
        };
        let last = look.then.last().context("what is answered?")?;
        let path = if is_resize(last) { RESIZE } else { FINISH };
        let mut fault = Fault::on("PATCH", path);
        if look.retries.is_some() || answered == "unsent" {
            fault = fault.always();
        }
        fault = match answered {
            "unsent" | "hang" => fault.hang(),
            "lost" => fault.hang().lost_answer(),
            "reset" => fault.reset(),
            "409" => {
                self.changed = true;
                let mut after = self.world.clone();
                for before in look.then.iter().rev().skip(1) {
                    if let [Then::Resize(containers)] = &Then::read(before)?[..] {
                        let body = after.resize_body(containers);
                        after.resize(&body);
                    }
                }
                if let Some(next) = next {
                    after.change(next)?;
                }
                fault.before(move |server| {
                    put(server, &after);
                    server.update("pods", "ns", "p", |pod| {
                        pod["status"]["podIP"] = json!("10.0.0.1");
                    });
                })
            }
            status => {
                let (code, text) = status.split_once(' ').unwrap_or((status, ""));
                let young = self.young.clone();
                let fault = match code {
                    "404" => fault.before(|server| {
                        server.delete("pods", "ns", "p");
                    }),
                    "422" if text.contains("metadata.uid") => fault.before(move |server| {
                        server.delete("pods", "ns", "p");
                        create_pod(server, &young);
                    }),
                    _ => fault,
                };
                let fault = fault.reply(code.parse()?, "Scripted", text);
                match look.retry_after {
                    Some(seconds) => fault.retry_after(seconds),
                    None => fault,
                }
            }
        };
        self.server.fault(fault);
        Ok(())
    }

    /// Makes a look's changes in both worlds.
    fn change(&mut self, look: &Look) -> anyhow::Result<()> {
        let conflicted = std::mem::take(&mut self.changed);
        self.world.change(look)?;
        match look.boost.as_deref() {
            Some("definition deleted") => {
                self.server.remove_kind("startupcpuboosts");
                self.undefined = Some(self.server.clock().elapsed());
            }
            Some("definition installed") => {
                self.server.add_kind("startupcpuboosts");
                let since = self.undefined.take().context("it is there")?;
                let requests = self.server.requests();
                let asked = requests
                    .iter()
                    .filter(|request| {
                        request.at > since && request.path.ends_with("/startupcpuboosts")
                    })
                    .count();
                let passed = self.server.clock().elapsed().saturating_sub(since);
                let most = passed.as_secs() / 10 + 2;
                ensure!(
                    asked as u64 <= most,
                    "asked {asked} times, {most} are enough"
                );
            }
            _ => {}
        }
        if let Some(entries) = &look.limit_ranges {
            self.server.delete("limitranges", "ns", "later");
            if !entries.is_empty() {
                self.server.create(world::limit_range("later", entries));
            }
        }
        for quota in world::quotas(&look.quotas) {
            self.server.create(quota);
        }
        for index in 0..look.more {
            let mut other = self.young.clone();
            other.pod["metadata"]["name"] = json!(format!("p-{index}"));
            create_pod(&self.server, &other);
        }
        if self.undefined.is_none() {
            self.put_boosts();
        }
        if !conflicted && self.pod().is_some_and(|pod| self.is_same_pod(&pod)) {
            put(&self.server, &self.world);
        }
        Ok(())
    }

    /// Compares the writes since the last look with those that are right.
    fn compare(&mut self, look: &Look, began: Duration) -> anyhow::Result<()> {
        let (mut last, mut bodies) = (began, Vec::new());
        let mut patience = look.within.as_deref().map_or(Ok(AT_ONCE), duration)?;
        for (index, text) in look.then.iter().enumerate() {
            let answered = look
                .answered
                .as_deref()
                .filter(|_| index + 1 == look.then.len());
            let alternatives = Then::read(text)?;
            let open = self.open_writes();
            let Some(write) = open.first().filter(|write| {
                let is_it = |then: &Then| is_write(then, write);
                alternatives.iter().any(is_it)
            }) else {
                let found = open.first().map(in_words);
                ensure!(
                    !alternatives.iter().all(is_some_write),
                    "expected {text}, found {found:?} of {:?}",
                    self.in_words()
                );
                continue;
            };
            ensure!(
                write.at >= last && write.at <= last + patience,
                "{text} came {:?} after what precedes it",
                write.at.checked_sub(last)
            );
            (last, patience, self.last) = (write.at, PROMPT, write.at);
            self.compare_write(&alternatives, write, answered)
                .with_context(|| text.clone())?;
            self.compared += 1;
            bodies.push(write.body.clone().unwrap_or_default());
            if let Some(retries) = look.retries {
                let tries = self.take_retries(write);
                check_pauses(retries, &tries).with_context(|| text.clone())?;
            }
        }
        if !self.changed {
            self.ensure_compared(Duration::MAX)?;
        }
        if !look.bodies.is_empty() {
            same_bytes(bodies, &look.bodies)?;
        }
        if look.silent {
            let loud = self.server.writes();
            let loud: Vec<_> = loud
                .iter()
                .filter(|write| write.at >= began && write.path.ends_with("/events"))
                .collect();
            ensure!(loud.is_empty(), "somebody hears of it: {loud:?}");
        }
        let fate = look.answered.as_deref();
        match self.pod() {
            Some(pod) if self.is_same_pod(&pod) && fate != Some("409") => {
                same_pod(&pod, &self.world.pod)
            }
            _ => Ok(()),
        }
    }

    /// Compares one write with the right one, and makes it in the world that must be.
    fn compare_write(
        &mut self,
        alternatives: &[Then],
        write: &Recorded,
        answered: Option<&str>,
    ) -> anyhow::Result<()> {
        let status = match answered {
            None | Some("lost") => 200,
            Some("unsent" | "hang" | "reset") => 0,
            Some(status) => status.split(' ').next().unwrap_or(status).parse()?,
        };
        ensure!(
            write.status == status,
            "answered with {}, expected {status}",
            write.status
        );
        let got = write.body.as_ref().context("the write has no body")?;
        let metadata = &mut self.world.pod["metadata"];
        metadata["uid"] = self.uid.clone();
        // That it is the right version is seen from the answer: the server compares it.
        ensure!(
            got["metadata"]["resourceVersion"].is_string(),
            "no resourceVersion: {got}"
        );
        metadata["resourceVersion"] = got["metadata"]["resourceVersion"].clone();
        self.world.now = self.moment(write);
        let is_resize = write.path.ends_with("/resize");
        let mut problem = None;
        for then in alternatives {
            let right = match then {
                Then::Resize(containers) if is_resize => self.world.resize_body(containers),
                Then::Finish(by) if !is_resize => {
                    let ended = record_text(got)
                        .and_then(|text| serde_json::from_str::<Value>(text).ok())
                        .unwrap_or_default();
                    let by = by.as_deref().or(ended["endedBy"].as_str());
                    self.world.finish_body(by.unwrap_or_default())?
                }
                Then::DropClaim if !is_resize => self.world.drop_claim_body(),
                Then::Claim(values) if !is_resize => self.world.claim_body(values)?,
                Then::GiveUp if !is_resize => self.world.give_up_body()?,
                _ => continue,
            };
            match pure::same_body(got, &right) {
                Ok(()) => {
                    let kind = if is_resize {
                        "strategic-merge"
                    } else {
                        "merge"
                    };
                    let expected = format!("application/{kind}-patch+json");
                    ensure!(
                        write.content_type.as_deref() == Some(expected.as_str()),
                        "its type is {:?}",
                        write.content_type
                    );
                    match answered {
                        None | Some("lost") if is_resize => self.world.resize(&right),
                        None | Some("lost") => self.world.finish(&right),
                        _ => {}
                    }
                    return Ok(());
                }
                Err(error) => problem = Some(error),
            }
        }
        Err(problem.unwrap_or_else(|| anyhow::anyhow!("it is another write")))
    }

    /// The tries of one write: all with the same outcome.
    fn take_retries(&mut self, first: &Recorded) -> Vec<Duration> {
        let mut tries = vec![first.at];
        for write in self.open_writes() {
            if (write.path.as_str(), write.status) != (first.path.as_str(), first.status) {
                break;
            }
            tries.push(write.at);
            self.compared += 1;
        }
        tries
    }

    /// What the leader shows after a look.
    fn check_leader(&self, look: &Look) -> anyhow::Result<()> {
        let Some(leader) = &self.leader else {
            return Ok(());
        };
        ensure!(!leader.term.is_finished(), "the term has ended by itself");
        if let Some(failure) = &look.failure {
            let label = format!(r#"result="{failure}""#);
            let metrics = leader.metrics.text();
            ensure!(
                metrics
                    .lines()
                    .any(|line| line.starts_with("headstart_pod_writes_total")
                        && line.contains(&label)),
                "{label} is not in\n{metrics}"
            );
        }
        let forgotten = look.then.iter().any(|then| then == "forget");
        let uid = self.uid.as_str().unwrap_or_default();
        ensure!(
            !forgotten || leader.claims.get(uid).is_none(),
            "it is not forgotten"
        );
        Ok(())
    }

    /// The resize that is tried before it is written, and not written.
    fn check_tries(&self, look: &Look, began: Duration) -> anyhow::Result<()> {
        let Some(right) = &look.tries else {
            return Ok(());
        };
        let [Then::Resize(containers)] = &Then::read(right)?[..] else {
            bail!("{right:?} is no resize");
        };
        let mut tries = self.server.requests();
        tries.retain(|request| {
            request.at >= began && request.is_dry_run() && request.path.ends_with("/resize")
        });
        let mut world = self.world.clone();
        for tried in &tries {
            let got = tried.body.as_ref().context("it has no body")?;
            let version = &got["metadata"]["resourceVersion"];
            let identity = json!({"metadata": {"uid": self.uid, "resourceVersion": version}});
            merge(&mut world.pod, &identity);
            pure::same_body(got, &world.resize_body(containers)).context("the dry run")?;
        }
        let tries: Vec<Duration> = tries.iter().map(|tried| tried.at).collect();
        check_pauses(look.retries.unwrap_or(Retries::Slow), &tries)
    }

    /// What people and other programs are told.
    fn check_told(&self, look: &Look) -> anyhow::Result<()> {
        if let Some(right) = &look.events {
            let uid = self.uid.as_str().unwrap_or_default();
            told::same_events(&self.server.list("events"), uid, right)?;
        }
        if look.is_in_status() {
            let b = self.server.get("startupcpuboosts", "ns", "b");
            told::same_status(&b.context("there is no b")?, look)?;
        }
        match &self.leader {
            Some(leader) => told::same_metrics(&leader.metrics.text(), "ns", look),
            None => Ok(()),
        }
    }

    /// What a pod like this one gets that is created now.
    fn check_admission(&self, right: &str) -> anyhow::Result<()> {
        let leader = self.leader.as_ref().context("nobody is there")?;
        let missing = leader.snapshots.missing();
        ensure!(missing.is_empty(), "it is not Ready: {missing:?}");
        let admit = Admit {
            answer: right.to_owned(),
            ..self.admit.clone()
        };
        let now = self.server.now();
        let admitter = headstart::admission::Admitter {
            snapshot: Arc::new(ArcSwapOption::from_pointee(leader.boosts.index().map(
                |boosts| Snapshot {
                    boosts,
                    ..Snapshot::default()
                },
            ))),
            settings: Settings {
                end: self.settings.end,
                ..pure::settings(&admit)?
            },
            clock: Clock::new(move || now),
            metrics: leader.metrics.admission.clone(),
            dry_run: false,
        };
        let sent = world::sent(self.cases, &admit)?;
        let answer = admitter.answer(review::of_pod(&sent, false).to_string().as_bytes())?;
        let boosts = &self.world.boosts;
        review::check_answer_at(self.cases, &admit, boosts, &sent, &answer, now)
            .context("a pod created now")
    }

    /// Nothing more is written, for hours; but a pod that was made anew has a boost of its own.
    async fn end(mut self, life: &Life) -> anyhow::Result<()> {
        let last = life.looks.last().and_then(|look| look.then.last());
        let last = Then::read(last.context("a life has looks")?)?;
        if matches!(last[..], [Then::Wait(_) | Then::NoWrite, ..]) {
            return Ok(());
        }
        ensure!(
            !matches!(last[..], [Then::Resize(_), ..]),
            "no life ends with a resize"
        );
        self.server.clear_faults();
        if let Some(pod) = self.pod().filter(|pod| !self.is_same_pod(pod)) {
            sleep(PROMPT).await;
            self.ensure_compared(Duration::MAX)?;
            return self.end_namesake(pod["metadata"]["uid"].clone()).await;
        }
        let began = self.server.clock().elapsed();
        sleep(QUIET).await;
        self.ensure_compared(Duration::MAX)?;
        let requests = self.server.requests();
        let reads: Vec<_> = requests
            .iter()
            .filter(|request| {
                let settled = began + Duration::from_secs(60);
                request.at > settled && request.path.contains("/pods/")
            })
            .collect();
        ensure!(reads.is_empty(), "it is read again: {}", reads.len());
        Ok(())
    }

    /// The new pod of that name gets Ready, and its boost ends like any other.
    async fn end_namesake(&mut self, uid: Value) -> anyhow::Result<()> {
        self.server.kubelet(Kubelet {
            actuate_after: ACTUATION,
            resize: Resize::Actuate,
        });
        let now = self.server.clock().timestamp();
        self.server.update("pods", "ns", "p", |pod| {
            let ready = json!({"type": "Ready", "status": "True", "lastTransitionTime": now});
            pod["status"]["conditions"] = json!([ready]);
            pod["spec"]["nodeName"] = json!("n");
            pod["status"]["startTime"] = json!(now);
            pod["status"]["observedGeneration"] =
                json!(pod["metadata"]["generation"].as_u64().unwrap_or(1) + 1);
        });
        sleep(PROMPT * 2).await;
        let writes: Vec<_> = self
            .open_writes()
            .iter()
            .map(|write| {
                let body = write.body.clone().unwrap_or_default();
                (write.status, body["metadata"]["uid"].clone())
            })
            .collect();
        let right = vec![(200, uid.clone()), (200, uid)];
        ensure!(writes == right, "writes to the new pod: {writes:?}");
        Ok(())
    }

    /// Fails if something was written before that time which nothing in the case speaks of.
    fn ensure_compared(&self, before: Duration) -> anyhow::Result<()> {
        let open = self.open_writes();
        let early: Vec<_> = open
            .iter()
            .filter(|write| write.at < before)
            .map(in_words)
            .collect();
        ensure!(early.is_empty(), "nothing speaks of {early:?}");
        Ok(())
    }

    fn writes(&self) -> Vec<Recorded> {
        let mut writes = self.server.writes();
        writes.retain(|write| is_pod_write(write) && is_about_p(write));
        writes
    }

    fn open_writes(&self) -> Vec<Recorded> {
        self.writes().split_off(self.compared)
    }

    fn in_words(&self) -> Vec<String> {
        self.writes().iter().map(in_words).collect()
    }

    fn pod(&self) -> Option<Value> {
        self.server.get("pods", "ns", "p")
    }

    fn is_same_pod(&self, pod: &Value) -> bool {
        pod["metadata"]["uid"] == self.uid
    }

    fn put_boosts(&self) {
        put_boosts(&self.server, &self.world);
    }

    fn until(&self, at: DateTime<Utc>) -> Duration {
        (at - self.server.now()).to_std().unwrap_or_default()
    }

    /// When a write arrived, as Kubernetes writes times.
    fn moment(&self, write: &Recorded) -> DateTime<Utc> {
        let ago = self.server.clock().elapsed().saturating_sub(write.at);
        (self.server.now() - ago).trunc_subsecs(0)
    }
}

/// Creates the pod, and returns its uid.
pub(super) fn create_pod(server: &MemoryServer, world: &World) -> Value {
    let mut pod = world.pod.clone();
    if let Some(metadata) = pod["metadata"].as_object_mut() {
        metadata.retain(|field, _| field != "uid" && field != "resourceVersion");
    }
    server.create(pod)["metadata"]["uid"].clone()
}

/// Makes the server's pod what it must be. Identity, version and count of generations are the server's.
fn put(server: &MemoryServer, world: &World) {
    server.update("pods", "ns", "p", |pod| {
        let mut target = world.pod.clone();
        for field in ["uid", "resourceVersion", "generation", "creationTimestamp"] {
            target["metadata"][field] = pod["metadata"][field].clone();
        }
        let generation = |pod: &Value| pod["metadata"]["generation"].as_i64().unwrap_or(1);
        let raised = i64::from(pod["spec"] != target["spec"]);
        let ahead = generation(pod) + raised - generation(&world.pod);
        if let Some(observed) = target["status"]["observedGeneration"].as_i64() {
            target["status"]["observedGeneration"] = json!(observed + ahead);
        }
        *pod = target;
    });
}

/// Makes the server's boosts what they must be.
pub(super) fn put_boosts(server: &MemoryServer, world: &World) {
    let name = |object: &Value| {
        ["namespace", "name"].map(|field| {
            object["metadata"][field]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        })
    };
    for there in server.list("startupcpuboosts") {
        let [namespace, name] = name(&there);
        let is_it = |boost: &&world::Boost| boost.namespace == namespace && boost.name == name;
        match world.boosts.iter().find(is_it) {
            None => drop(server.delete("startupcpuboosts", &namespace, &name)),
            Some(boost) => {
                server.update("startupcpuboosts", &namespace, &name, |object| {
                    for field in ["selector", "spec"] {
                        object[field] = boost.object[field].clone();
                    }
                });
            }
        }
    }
    for boost in &world.boosts {
        let there = server.get("startupcpuboosts", &boost.namespace, &boost.name);
        if there.is_none() {
            let mut object = boost.object.clone();
            object["metadata"]["creationTimestamp"] = json!(rfc3339(boost.created));
            server.create(object);
        }
    }
}

/// Whether a request is a PATCH of a pod or of its resize.
fn is_pod_write(write: &Recorded) -> bool {
    write.verb == "PATCH" && write.path.contains("/pods/")
}

/// Whether a write is to the pod that the case is about.
fn is_about_p(write: &Recorded) -> bool {
    let path = write.path.strip_suffix("/resize").unwrap_or(&write.path);
    path.ends_with("/pods/p")
}

fn is_some_write(then: &Then) -> bool {
    matches!(then, Then::Resize(_)) || is_metadata(then)
}

fn is_metadata(then: &Then) -> bool {
    matches!(
        then,
        Then::Finish(_) | Then::DropClaim | Then::Claim(_) | Then::GiveUp
    )
}

/// Whether a write is of the expected kind.
fn is_write(then: &Then, write: &Recorded) -> bool {
    let is_resize = write.path.ends_with("/resize");
    match then {
        Then::Resize(_) => is_resize,
        _ => is_metadata(then) && !is_resize,
    }
}

/// How many writes there must be.
fn expected_writes(look: &Look) -> anyhow::Result<usize> {
    let mut count = 0;
    for text in look.then.iter() {
        count += usize::from(Then::read(text)?.iter().all(is_some_write));
    }
    Ok(count)
}

fn in_words(write: &Recorded) -> String {
    let body = write.body.clone().unwrap_or_default();
    format!("{:?} {} {} {body}", write.at, write.path, write.status)
}

fn duration(text: &str) -> anyhow::Result<Duration> {
    seconds(text).map(Duration::from_secs)
}

/// Compares what the server has with what must be; their statuses apart, and their records as JSON.
fn same_pod(got: &Value, right: &Value) -> anyhow::Result<()> {
    let comparable = |pod: &Value| {
        // An empty map is none.
        let map = |field: &str| {
            let map = pod["metadata"].get(field).and_then(Value::as_object);
            map.filter(|map| !map.is_empty())
        };
        let (labels, annotations) = (map("labels"), map("annotations"));
        let mut pod = json!({"metadata": {"labels": labels, "annotations": annotations}, "spec": pod["spec"]});
        if let Some(record) = record_text(&pod) {
            let record: Value = serde_json::from_str(record).unwrap_or_else(|_| json!(record));
            pod["metadata"]["annotations"][KEY] = record;
        }
        pod
    };
    let (got, right) = (comparable(got), comparable(right));
    ensure!(got == right, "the pod is\n{got}\nexpected\n{right}");
    Ok(())
}

/// Compares bodies to the byte, apart from the pod's identity and versions.
fn same_bytes(bodies: Vec<Value>, right: &[String]) -> anyhow::Result<()> {
    let got = bodies.into_iter().enumerate().map(|(index, mut body)| {
        body["metadata"]["uid"] = json!("U");
        body["metadata"]["resourceVersion"] = json!(format!("V{}", index + 1));
        body.to_string()
    });
    let got: Vec<String> = got.collect();
    ensure!(
        got == right,
        "the bodies are\n{got:#?}\nexpected\n{right:#?}"
    );
    Ok(())
}

/// Checks the pauses between tries.
fn check_pauses(retries: Retries, tries: &[Duration]) -> anyhow::Result<()> {
    let pauses: Vec<Duration> = tries
        .windows(2)
        .map(|pair| pair[1].saturating_sub(pair[0]))
        .collect();
    let minute = Duration::from_secs(60);
    let is_slow = |pauses: &[Duration]| {
        !pauses.is_empty()
            && pauses
                .iter()
                .all(|pause| (minute..SLOW + PROMPT).contains(pause))
    };
    let right = match retries {
        Retries::Slow => is_slow(&pauses),
        Retries::QuickThenSlow => {
            let quick = pauses.iter().take_while(|pause| **pause < minute).count();
            let spent: Duration = pauses[..quick].iter().sum();
            (2..=10).contains(&quick) && spent < minute && is_slow(&pauses[quick..])
        }
        Retries::Growing => {
            let growth = pauses.get(..5).is_some_and(<[Duration]>::is_sorted);
            growth && pauses.iter().all(|pause| *pause < minute)
        }
    };
    ensure!(
        right,
        "expected {retries:?} retries, the pauses are {pauses:?}"
    );
    Ok(())
}

/// Many pods are overdue when a leader takes over: the most overdue comes first, and not all go at once.
async fn check_many(cases: &Cases, id: Id, life: &Life, count: u32) -> anyhow::Result<()> {
    let [look] = &life.looks[..] else {
        bail!("many pods are looked at once");
    };
    let at = time(look.at.as_deref().context("when?")?)?;
    let server = MemoryServer::with_clock(memory::Clock::new(at));
    server.kubelet(Kubelet {
        actuate_after: ACTUATION,
        resize: Resize::Actuate,
    });
    let mut worlds = Vec::new();
    for index in 0..count {
        let mut world = World::begin(cases, id, life)?;
        // 7919 is prime, so each comes up once.
        let since = world.now + TimeDelta::seconds(i64::from(index * 7919 % count));
        world.change(&Look {
            scheduled: Some(since.format("%H:%M:%S").to_string()),
            ..Look::default()
        })?;
        world.pod["metadata"]["name"] = json!(format!("p{index:03}"));
        let uid = create_pod(&server, &world);
        world.pod["metadata"]["uid"] = uid;
        worlds.push((since, world));
    }
    worlds.sort_by_key(|(since, _)| *since);
    if let Some((_, world)) = worlds.first() {
        put_boosts(&server, world);
    }
    let [_, most] = slow_resizes(&server, Duration::from_millis(100));
    let leader = Leader::start(&server, pure::flags(&life.flags)?);
    let is_pod_open = |pod: &Value| pod["metadata"]["labels"].get(KEY).is_some();
    let patience = Duration::from_secs(600);
    while server.list("pods").iter().any(is_pod_open) {
        ensure!(
            server.clock().elapsed() < patience,
            "some are still boosted"
        );
        ensure!(!leader.term.is_finished(), "the term has ended by itself");
        sleep(Duration::from_millis(100)).await;
    }
    sleep(QUIET).await;

    let mut writes = server.writes();
    writes.retain(is_pod_write);
    let resized: Vec<String> = writes
        .iter()
        .filter_map(|write| write.path.strip_suffix("/resize"))
        .map(|path| path.rsplit('/').next().unwrap_or_default().to_owned())
        .collect();
    let names = worlds
        .iter()
        .map(|(_, world)| world.pod["metadata"]["name"].as_str().unwrap_or_default());
    ensure!(
        resized.iter().map(String::as_str).eq(names),
        "they were resized in this order: {resized:?}"
    );
    for (_, world) in &worlds {
        check_one_of_many(&server, world, look, &writes)?;
    }
    let (most, bound) = (most.load(Relaxed), life.at_once.unwrap_or(count) as usize);
    ensure!(
        1 < most && most <= bound,
        "{most} at once, expected more than one and {bound} at most"
    );
    Ok(())
}

/// Exactly the right writes went to one of the pods, and it is what it must be.
fn check_one_of_many(
    server: &MemoryServer,
    world: &World,
    look: &Look,
    writes: &[Recorded],
) -> anyhow::Result<()> {
    let (mut world, clock) = (world.clone(), server.clock());
    let name = world.pod["metadata"]["name"].clone();
    let name = name.as_str().unwrap_or_default();
    let path = format!("/api/v1/namespaces/ns/pods/{name}");
    let own: Vec<_> = writes
        .iter()
        .filter(|write| write.path.strip_suffix("/resize").unwrap_or(&write.path) == path)
        .collect();
    ensure!(own.len() == look.then.len(), "{name}: {} writes", own.len());
    for (write, text) in own.into_iter().zip(look.then.iter()) {
        let got = write.body.as_ref().context("no body")?;
        world.pod["metadata"]["resourceVersion"] = got["metadata"]["resourceVersion"].clone();
        world.now = (server.now() - clock.elapsed().saturating_sub(write.at)).trunc_subsecs(0);
        match &Then::read(text)?[..] {
            [Then::Resize(containers)] => {
                let right = world.resize_body(containers);
                pure::same_body(got, &right)?;
                world.resize(&right);
            }
            [Then::Finish(Some(by))] => {
                let right = world.finish_body(by)?;
                pure::same_body(got, &right)?;
                world.finish(&right);
            }
            _ => bail!("{text:?} is no write"),
        }
        ensure!(
            write.status == 200,
            "{name}: answered with {}",
            write.status
        );
    }
    let pod = server.get("pods", "ns", name).context("it is gone")?;
    same_pod(&pod, &world.pod)
}

/// Makes each resize take so long. Returns how many are under way now, and at once at most.
pub(super) fn slow_resizes(server: &MemoryServer, takes: Duration) -> [Arc<AtomicUsize>; 2] {
    let (now, most) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let under_way = Arc::clone(&now);
    let (arriving, highest) = (Arc::clone(&now), Arc::clone(&most));
    let arrives = move |_: &Recorded| {
        highest.fetch_max(arriving.fetch_add(1, Relaxed) + 1, Relaxed);
        true
    };
    let fault = Fault::on("PATCH", RESIZE).always().delay(takes);
    server.fault(fault.when(arrives).after(move |_| {
        now.fetch_sub(1, Relaxed);
    }));
    [under_way, most]
}
