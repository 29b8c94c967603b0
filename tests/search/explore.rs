//! The search: every state once, nearest first, and from each the way to the end.

use std::{
    collections::HashSet,
    fmt,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    invariants::{Invariant, Violation, unended},
    scene::{LAST, Scene, at},
    server::Stored,
    world::{Event, Model, Step, World},
};

/// So many steps a leader that is left alone may take. It needs a dozen.
const PATIENCE: usize = 100;

/// What a search has found.
pub(crate) struct Report {
    pub(crate) trace: Option<Trace>,
    states: usize,
    steps: usize,
    depth: usize,
    pods: usize,
    took: Duration,
}

/// A shortest way to a violation.
pub(crate) struct Trace {
    pub(crate) violation: Violation,
    pub(crate) steps: Vec<String>,
}

impl Report {
    /// Of two searches that have no state in common.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            trace: self.trace.or(other.trace),
            states: self.states + other.states,
            steps: self.steps + other.steps,
            depth: self.depth.max(other.depth),
            pods: self.pods + other.pods,
            took: self.took.max(other.took),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            states,
            steps,
            depth,
            pods,
            took,
            ..
        } = self;
        write!(
            f,
            "{states} states, {steps} steps, depth {depth}, {pods} pods, {took:.1?}"
        )
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, step) in (1..).zip(&self.steps) {
            writeln!(f, "{number:3}. {step}")?;
        }
        write!(f, "  => {}", self.violation)
    }
}

/// Steps, each with the world before and after it.
type Path = Vec<(Step, World, World)>;

/// A state that was reached, and how.
struct Node {
    world: World,
    parent: usize,
    step: Step,
    /// Whether its leaders have changed places after the step.
    swapped: bool,
    depth: usize,
}

/// Searches until nothing is new, or a violation is found.
pub(crate) fn search(model: Model, actions: u8, scenes: impl Fn(&Scene) -> bool) -> Report {
    let began = Instant::now();
    let mut search = Search {
        model,
        nodes: Vec::new(),
        known: HashSet::new(),
        ending: HashSet::new(),
    };
    for world in search.model.begin(actions, scenes) {
        search.reach(world, 0, Step::Begin, 0);
    }
    let (mut next, mut steps, mut trace) = (0, 0, None);
    while next < search.nodes.len() && trace.is_none() {
        trace = search.visit(next, &mut steps);
        next += 1;
    }
    Report {
        trace,
        states: search.nodes.len(),
        steps,
        depth: search.nodes.last().map_or(0, |node| node.depth),
        pods: search.model.pods(),
        took: began.elapsed(),
    }
}

struct Search {
    model: Model,
    /// In the order in which they were reached.
    nodes: Vec<Node>,
    known: HashSet<World>,
    /// From where a leader that is alone is known to come to an end.
    ending: HashSet<World>,
}

impl Search {
    fn reach(&mut self, world: World, parent: usize, step: Step, depth: usize) {
        let (world, swapped) = self.model.canonical(world);
        if self.known.insert(world) {
            self.nodes.push(Node {
                world,
                parent,
                step,
                swapped,
                depth,
            });
        }
    }

    fn visit(&mut self, node: usize, steps: &mut usize) -> Option<Trace> {
        let Node { world, depth, .. } = self.nodes[node];
        for leader in 0..2 {
            if let Err((rest, violation)) = self.comes_to_an_end(world.alone(leader)) {
                let mut trace = Tale::default();
                trace.until(self, node);
                trace.alone(leader);
                for (step, before, after) in rest {
                    trace.add(&self.model, step, &before, Some(&after));
                }
                let steps = trace.lines;
                return Some(Trace { violation, steps });
            }
        }
        for (step, next) in self.model.steps(&world) {
            *steps += 1;
            match next {
                Ok(next) => self.reach(next, node, step, depth + 1),
                Err(violation) => {
                    let mut trace = Tale::default();
                    trace.until(self, node);
                    trace.add(&self.model, step, &world, None);
                    let steps = trace.lines;
                    return Some(Trace { violation, steps });
                }
            }
        }
        None
    }

    /// Lets one leader go on, the kubelet do what is asked of it, and time pass when there is nothing else to do. What is
    /// on its way from elsewhere never lands here: where it does, it leads to a state that is visited too.
    fn comes_to_an_end(&mut self, from: World) -> Result<(), (Path, Violation)> {
        let (mut world, mut path) = (from, Path::new());
        let fails = |path, what: String| {
            let invariant = Invariant::Ends;
            Err((path, Violation { invariant, what }))
        };
        while !self.ending.contains(&world) {
            if path.len() > PATIENCE {
                return fails(path, "there is no end to it".to_owned());
            }
            let (step, next) = match self.goes_on(&world) {
                Ok(Some(next)) => next,
                Err(violation) => return Err((path, violation)),
                Ok(None) => {
                    let pod = world.pod.map(|pod| self.model.pod(pod));
                    match pod.and_then(|pod| unended(world.scene(), pod)) {
                        Some(what) => return fails(path, what),
                        None => break,
                    }
                }
            };
            path.push((step, world, next));
            world = next;
        }
        self.ending.insert(from);
        self.ending
            .extend(path.into_iter().map(|(_, _, world)| world));
        Ok(())
    }

    fn goes_on(&mut self, world: &World) -> Result<Option<(Step, World)>, Violation> {
        let model = &mut self.model;
        if let Some(next) = model.actuate(world) {
            return Ok(Some((Step::Cluster(Event::Actuate), next)));
        }
        if let Some(next) = model.land(world, 0, true) {
            let step = Step::Land {
                leader: 0,
                answered: true,
            };
            return Ok(Some((step, next?)));
        }
        if let Some(next) = model.look(world, 0) {
            return Ok(Some((Step::Look(0), next)));
        }
        if let Some(next) = model.send(world, 0) {
            return Ok(Some((Step::Send(0), next)));
        }
        let now = world.now + 1;
        Ok((now <= LAST).then_some((Step::Tick, World { now, ..*world })))
    }
}

/// A trace in the making.
struct Tale {
    lines: Vec<String>,
    /// The leaders by their places.
    names: [&'static str; 2],
}

impl Default for Tale {
    fn default() -> Self {
        Self {
            lines: Vec::new(),
            names: ["A", "B"],
        }
    }
}

impl Tale {
    /// All that led to a node.
    fn until(&mut self, search: &Search, mut node: usize) {
        let mut path = Vec::new();
        loop {
            path.push(node);
            if search.nodes[node].step == Step::Begin {
                break;
            }
            node = search.nodes[node].parent;
        }
        for node in path.into_iter().rev().map(|node| &search.nodes[node]) {
            let mut world = node.world;
            if node.swapped {
                world.leaders.swap(0, 1);
            }
            self.add(
                &search.model,
                node.step,
                &search.nodes[node.parent].world,
                Some(&world),
            );
            if node.swapped {
                self.names.swap(0, 1);
            }
        }
    }

    /// From here on the leader of that place goes on alone, in the first place.
    fn alone(&mut self, leader: usize) {
        let name = self.names[leader];
        self.names = [name; 2];
        self.lines
            .push(format!("nothing goes wrong any more, and {name} goes on"));
    }

    fn add(&mut self, model: &Model, step: Step, before: &World, after: Option<&World>) {
        let name = |leader: usize| self.names[leader];
        let write = |id| {
            let write = model.write(id);
            format!("{:?} {}", write.purpose, write.body)
        };
        let what = match step {
            Step::Begin => after.map_or("", |world| world.scene().name).to_owned(),
            Step::Look(leader) => format!("{} looks", name(leader)),
            Step::Send(leader) => {
                let sent = after.and_then(|world| world.leaders[leader].waiting);
                format!(
                    "{} sends {}",
                    name(leader),
                    sent.map(write).unwrap_or_default()
                )
            }
            Step::Land { leader, answered } => {
                let answer = if answered {
                    "answered"
                } else {
                    "the answer is lost"
                };
                format!("{}'s write lands, {answer}", name(leader))
            }
            Step::Crash(leader) => format!("{} crashes", name(leader)),
            Step::LandAdrift(leader) => format!("what {} had sent lands", name(leader)),
            Step::Tick => after.map_or_else(String::new, |world| {
                format!("{} s have passed", (at(world.now) - at(0)).num_seconds())
            }),
            step => format!("{step:?}"),
        };
        let pod = after.and_then(|world| world.pod);
        let news = match pod.filter(|pod| Some(*pod) != before.pod || step == Step::Begin) {
            Some(pod) => format!(" → {}", in_short(model.pod(pod))),
            None => String::new(),
        };
        self.lines.push(format!("{what}{news}"));
    }
}

/// A pod in a line.
fn in_short(pod: &Stored) -> String {
    let values: Vec<String> = pod
        .values
        .iter()
        .map(|value| value.map_or("-".to_owned(), |milli| milli.to_string()))
        .collect();
    let record: Option<Value> = pod
        .record
        .as_deref()
        .and_then(|text| serde_json::from_str(text).ok());
    let record = record.map_or_else(
        || pod.record.as_deref().unwrap_or("no record").to_owned(),
        |record| {
            let state = record["state"].as_str().unwrap_or("Active");
            let by = record["endedBy"].as_str().unwrap_or_default();
            format!("{state} {by}").trim_end().to_owned()
        },
    );
    let claim = if pod.claim.is_some() {
        "claimed"
    } else {
        "no claim"
    };
    let (uid, version, kubelet) = (pod.uid, pod.version, pod.kubelet);
    format!(
        "pod {uid} v{version}: {} {claim}, {record}, kubelet {kubelet:?}",
        values.join("/")
    )
}
