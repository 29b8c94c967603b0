//! A state of the world, and the steps that lead from it to others.
//!
//! Pods and writes are kept once and named by number, and what becomes of them is worked out once: few of them make up
//! many states.

use std::{collections::HashMap, hash::Hash, num::NonZeroU32, rc::Rc};

use headstart::domain::snapshot::BoostIndex;

use crate::{
    invariants::{self, Invariant, Violation},
    leader::{Leader, Mutation, Write},
    scene::{Boost, LAST, SCENES, Scene},
    server::{Kubelet, Refusal, Seen, Stored},
    tenant::Act,
};

/// The number of a pod or a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Id(NonZeroU32);

/// Everything that a next step depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) scene: u8,
    pub(crate) now: u8,
    pub(crate) boost: Boost,
    pub(crate) pod: Option<Id>,
    pub(crate) leaders: [Mind; 2],
    /// Times that the tenant may still act.
    pub(crate) actions: u8,
}

/// What a leader knows, and what it has on its way.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Mind {
    /// The pod as it was when last looked at.
    pub(crate) seen: Option<Id>,
    /// See [`Leader::memory`].
    memory: Option<Id>,
    /// The write whose answer it waits for.
    pub(crate) waiting: Option<Id>,
    /// A write for whose answer nobody waits any more, and which may land all the same.
    pub(crate) adrift: Option<Id>,
}

/// What happens next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The pod of a scene is there.
    Begin,
    /// A leader reads the pod.
    Look(usize),
    /// It decides on its copy, and sends a write.
    Send(usize),
    /// The write lands, and its answer arrives or is lost.
    Land { leader: usize, answered: bool },
    /// It crashes, or gives up waiting; what it has sent is adrift.
    Crash(usize),
    /// A write that is adrift lands.
    LandAdrift(usize),
    /// The next instant.
    Tick,
    /// Kubelet or scheduler.
    Cluster(Event),
    /// The tenant does something to the pod.
    Tenant(Act),
    /// The pod is deleted.
    Delete,
    /// The pod is deleted, and another one made under its name.
    Recreate,
    /// The boost is edited or deleted.
    Change(Boost),
}

/// Something that the cluster does to a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Schedule,
    /// One container becomes ready, and the pod when all are.
    Ready(u8),
    /// The container dies and runs again.
    Restart,
    Actuate,
    Defer,
    Refuse,
}

/// What becomes of a write.
#[derive(Clone)]
enum Landing {
    Accepted(Id),
    Refused,
    Broken(Violation),
}

/// Where a step leads.
pub(crate) type Next = Result<World, Violation>;

/// All that a decision depends on: scene, instant, boost, copy and memory.
type Moment = (u8, u8, Boost, Id, Option<Id>);

/// What may be done to a pod, and what it is then.
type Changes = Rc<[(Step, Id)]>;

/// The rules of the world.
pub(crate) struct Model {
    mutation: Mutation,
    tolerated: &'static [Invariant],
    pods: Pool<Stored>,
    writes: Pool<Write>,
    boosts: HashMap<(u8, Boost), Rc<BoostIndex>>,
    sends: HashMap<Moment, Option<(Id, bool)>>,
    landings: HashMap<(u8, Id, Id), Landing>,
    dead: HashMap<(Id, Id), bool>,
    events: HashMap<(u8, u8, Id), Changes>,
    acts: HashMap<(u8, u8, Id), Changes>,
}

impl Model {
    /// The world with a program that has this fault. What is tolerated is not looked for.
    pub(crate) fn new(mutation: Mutation, tolerated: &'static [Invariant]) -> Self {
        Self {
            mutation,
            tolerated,
            pods: Pool::default(),
            writes: Pool::default(),
            boosts: HashMap::new(),
            sends: HashMap::new(),
            landings: HashMap::new(),
            dead: HashMap::new(),
            events: HashMap::new(),
            acts: HashMap::new(),
        }
    }

    /// Where a search begins.
    pub(crate) fn begin(&mut self, actions: u8, wanted: impl Fn(&Scene) -> bool) -> Vec<World> {
        let scenes = (0..).zip(SCENES).filter(|(_, scene)| wanted(scene));
        scenes
            .map(|(number, scene)| World {
                scene: number,
                now: 0,
                boost: Boost::Unchanged,
                pod: Some(self.pods.id(Stored::new(scene, 0, 0))),
                leaders: <[Mind; 2]>::default(),
                actions,
            })
            .collect()
    }

    pub(crate) fn pod(&self, id: Id) -> &Stored {
        self.pods.get(id)
    }

    pub(crate) fn write(&self, id: Id) -> &Write {
        self.writes.get(id)
    }

    /// Distinct versions of pods that were met.
    pub(crate) fn pods(&self) -> usize {
        self.pods.all.len()
    }

    /// Every step from here.
    pub(crate) fn steps(&mut self, world: &World) -> Vec<(Step, Next)> {
        let mut steps = Vec::with_capacity(16);
        for leader in 0..2 {
            self.steps_of(world, leader, &mut steps);
        }
        if world.now < LAST {
            let now = world.now + 1;
            steps.push((Step::Tick, Ok(World { now, ..*world })));
        }
        let Some(pod) = world.pod else { return steps };
        for (step, pod) in self.events(world, pod).iter() {
            let pod = Some(*pod);
            steps.push((*step, Ok(World { pod, ..*world })));
        }
        if let Some(actions) = world.actions.checked_sub(1) {
            let world = World { actions, ..*world };
            for (step, pod) in self.acts(&world, pod).iter() {
                let pod = Some(*pod);
                steps.push((*step, Ok(World { pod, ..world })));
            }
            steps.push((Step::Delete, Ok(World { pod: None, ..world })));
            let changes: &[Boost] = match world.boost {
                Boost::Unchanged => &[Boost::Edited, Boost::Deleted],
                Boost::Edited => &[Boost::Deleted],
                Boost::Deleted => &[],
            };
            for boost in changes.iter().copied() {
                steps.push((Step::Change(boost), Ok(World { boost, ..world })));
            }
        }
        steps
    }

    fn steps_of(&mut self, world: &World, leader: usize, steps: &mut Vec<(Step, Next)>) {
        let mind = world.leaders[leader];
        if mind.waiting.is_some() {
            steps.extend(self.land(world, leader, true).map(|next| {
                (
                    Step::Land {
                        leader,
                        answered: true,
                    },
                    next,
                )
            }));
            steps.extend(self.land(world, leader, false).map(|next| {
                (
                    Step::Land {
                        leader,
                        answered: false,
                    },
                    next,
                )
            }));
        } else {
            steps.extend(
                self.look(world, leader)
                    .map(|next| (Step::Look(leader), Ok(next))),
            );
            steps.extend(
                self.send(world, leader)
                    .map(|next| (Step::Send(leader), Ok(next))),
            );
        }
        let crashed = Mind {
            adrift: mind.waiting.or(mind.adrift),
            ..Mind::default()
        };
        // Without a write or a memory there is nothing to lose but a look.
        if mind.waiting.is_some() || mind.memory.is_some() {
            steps.push((Step::Crash(leader), Ok(world.with(leader, crashed))));
        }
        if let Some(write) = mind.adrift {
            let world = world.with(
                leader,
                Mind {
                    adrift: None,
                    ..mind
                },
            );
            let next = match self.landing(&world, write) {
                Landing::Accepted(pod) => Ok(World {
                    pod: Some(pod),
                    ..world
                }),
                Landing::Refused => Ok(world),
                Landing::Broken(violation) => Err(violation),
            };
            steps.push((Step::LandAdrift(leader), next));
        }
    }

    /// One world for all that can't be told apart, and whether the leaders have changed places in it.
    ///
    /// A write that can't be accepted any more changes nothing when it lands: it counts as refused already. A copy that is
    /// more than one version old leads to no other writes; one that is one version old is kept, to show that. Nor does it
    /// matter which leader is which.
    pub(crate) fn canonical(&mut self, mut world: World) -> (World, bool) {
        for leader in 0..2 {
            let mut mind = world.leaders[leader];
            mind.adrift = mind.adrift.filter(|write| !self.is_dead(&world, *write));
            let waits_for_nothing = mind
                .waiting
                .is_some_and(|write| self.is_dead(&world, write));
            if waits_for_nothing || mind.seen.is_some_and(|copy| self.is_old(&world, copy)) {
                (mind.seen, mind.waiting) = (None, None);
                mind.memory = self.remembered(mind.memory);
            }
            world.leaders[leader] = mind;
        }
        let swap = world.leaders[0] < world.leaders[1];
        if swap {
            world.leaders.swap(0, 1);
        }
        (world, swap)
    }

    fn is_old(&self, world: &World, copy: Id) -> bool {
        let Some(pod) = world.pod else { return true };
        let (pod, copy) = (self.pod(pod), self.pod(copy));
        if pod.uid == copy.uid {
            copy.version + 1 < pod.version
        } else {
            copy.uid + 1 < pod.uid || pod.version > 1
        }
    }

    fn is_dead(&mut self, world: &World, write: Id) -> bool {
        let Some(pod) = world.pod else { return true };
        let known = self.dead.get(&(pod, write)).copied();
        known.unwrap_or_else(|| {
            let dead = !self.pod(pod).may_accept(self.write(write));
            self.dead.insert((pod, write), dead);
            dead
        })
    }

    /// A leader reads the pod, unless it knows it already.
    pub(crate) fn look(&self, world: &World, leader: usize) -> Option<World> {
        let pod = world.pod?;
        let mut mind = world.leaders[leader];
        if mind.seen == Some(pod) {
            return None;
        }
        mind.seen = Some(pod);
        mind.memory = self.remembered(mind.memory);
        if self.mutation == Mutation::JudgedFirst {
            let uid = |id: Id| self.pod(id).uid;
            let first = mind.memory.filter(|first| uid(*first) == uid(pod));
            mind.memory = first.or(Some(pod));
        }
        Some(world.with(leader, mind))
    }

    /// What a leader remembers when it has to look again. The program as it is: nothing.
    fn remembered(&self, memory: Option<Id>) -> Option<Id> {
        memory.filter(|_| matches!(self.mutation, Mutation::JudgedFirst | Mutation::FinishFirst))
    }

    /// It decides, and sends what there is to write.
    pub(crate) fn send(&mut self, world: &World, leader: usize) -> Option<World> {
        let mind = world.leaders[leader];
        let seen = mind.seen?;
        let key = (world.scene, world.now, world.boost, seen, mind.memory);
        let known = self.sends.get(&key).copied();
        let sent = known.unwrap_or_else(|| {
            let sent = self.decide(world, seen, mind.memory);
            self.sends.insert(key, sent);
            sent
        });
        let (write, remember) = sent?;
        let judged = mind
            .memory
            .filter(|_| self.mutation == Mutation::JudgedFirst);
        let mind = Mind {
            seen: None,
            memory: remember.then_some(seen).or(judged),
            waiting: Some(write),
            ..mind
        };
        Some(world.with(leader, mind))
    }

    fn decide(&mut self, world: &World, seen: Id, memory: Option<Id>) -> Option<(Id, bool)> {
        let scene = world.scene();
        let boosts = self.boosts.entry((world.scene, world.boost));
        let boosts = boosts.or_insert_with(|| Rc::new(world.boost.index(scene)));
        let leader = Leader {
            scene,
            mutation: self.mutation,
            boosts,
            now: world.now,
            seen: self.pods.get(seen),
            memory: memory.map(|memory| self.pods.get(memory)),
        };
        let (write, remember) = leader.write()?;
        Some((self.writes.id(write), remember))
    }

    /// The write of a leader lands.
    pub(crate) fn land(&mut self, world: &World, leader: usize, answered: bool) -> Option<Next> {
        let mind = world.leaders[leader];
        let landing = self.landing(world, mind.waiting?);
        let looks_again = Mind {
            seen: None,
            memory: self.remembered(mind.memory),
            waiting: None,
            ..mind
        };
        match landing {
            Landing::Broken(violation) => Some(Err(violation)),
            Landing::Accepted(pod) => {
                let world = World {
                    pod: Some(pod),
                    ..*world
                };
                let knows = Mind {
                    seen: Some(pod),
                    waiting: None,
                    ..mind
                };
                Some(Ok(
                    world.with(leader, if answered { knows } else { looks_again })
                ))
            }
            // That its loss is the same saves a step.
            Landing::Refused => answered.then(|| Ok(world.with(leader, looks_again))),
        }
    }

    fn landing(&mut self, world: &World, write: Id) -> Landing {
        let Some(pod) = world.pod else {
            return Landing::Refused;
        };
        let key = (world.scene, pod, write);
        if let Some(landing) = self.landings.get(&key) {
            return landing.clone();
        }
        let landing = self.accept(world.scene(), pod, write);
        self.landings.insert(key, landing.clone());
        landing
    }

    fn accept(&mut self, scene: &Scene, pod: Id, write: Id) -> Landing {
        let (before, write) = (self.pods.get(pod), self.writes.get(write));
        let tolerated = |violation: &Violation| self.tolerated.contains(&violation.invariant);
        match before.accept(scene, write) {
            Ok(after) => {
                let broken = invariants::broken(scene, write, before, &after);
                match broken.into_iter().find(|violation| !tolerated(violation)) {
                    Some(violation) => Landing::Broken(violation),
                    None => Landing::Accepted(self.pods.id(after)),
                }
            }
            Err(Refusal::Conflict | Refusal::OtherUid) => Landing::Refused,
            Err(Refusal::Invalid(what)) => Landing::Broken(Violation {
                invariant: Invariant::Valid,
                what: what.to_owned(),
            }),
        }
    }

    /// What the cluster may do to a pod.
    fn events(&mut self, world: &World, pod: Id) -> Changes {
        let key = (world.scene, world.now, pod);
        if let Some(events) = self.events.get(&key) {
            return Rc::clone(events);
        }
        let (scene, stored) = (world.scene(), self.pods.get(pod).clone());
        let mut events = Vec::new();
        for event in cluster_events(scene, &stored, world.now) {
            if let Some(after) = stored.change(|pod| event.on(pod, world.now)) {
                events.push((Step::Cluster(event), self.pods.id(after)));
            }
        }
        let events: Rc<[_]> = events.into();
        self.events.insert(key, Rc::clone(&events));
        events
    }

    /// What the tenant may do to a pod.
    fn acts(&mut self, world: &World, pod: Id) -> Changes {
        let key = (world.scene, world.now, pod);
        if let Some(acts) = self.acts.get(&key) {
            return Rc::clone(acts);
        }
        let (scene, stored) = (world.scene(), self.pods.get(pod).clone());
        let mut acts = Vec::new();
        for act in Act::all(scene) {
            if let Some(after) = act.on(scene, &stored) {
                acts.push((Step::Tenant(act), self.pods.id(after)));
            }
        }
        if world.now < LAST {
            let another = Stored::new(scene, stored.uid + 1, world.now);
            acts.push((Step::Recreate, self.pods.id(another)));
        }
        let acts: Rc<[_]> = acts.into();
        self.acts.insert(key, Rc::clone(&acts));
        acts
    }

    /// The kubelet does what is asked of it; `None` where nothing is.
    pub(crate) fn actuate(&mut self, world: &World) -> Option<World> {
        let events = self.events(world, world.pod?);
        let actuate = Step::Cluster(Event::Actuate);
        let (_, pod) = events.iter().find(|(step, _)| *step == actuate)?;
        Some(World {
            pod: Some(*pod),
            ..*world
        })
    }
}

impl World {
    pub(crate) fn scene(&self) -> &'static Scene {
        &SCENES[usize::from(self.scene)]
    }

    fn with(&self, leader: usize, mind: Mind) -> Self {
        let mut world = *self;
        world.leaders[leader] = mind;
        world
    }

    /// Where one leader lives on, and nothing else happens any more.
    pub(crate) fn alone(&self, leader: usize) -> Self {
        let mind = Mind {
            adrift: None,
            ..self.leaders[leader]
        };
        Self {
            leaders: [mind, Mind::default()],
            actions: 0,
            ..*self
        }
    }
}

fn cluster_events(scene: &Scene, pod: &Stored, now: u8) -> Vec<Event> {
    if !pod.has_node() {
        // Later there would be no instant after its deadline.
        return if now < LAST {
            vec![Event::Schedule]
        } else {
            Vec::new()
        };
    }
    let containers = (0..).zip(scene.containers);
    let mut events: Vec<_> = containers.map(|(index, _)| Event::Ready(index)).collect();
    // Later there would be no instant after the deadline, and earlier it could not be told from the first start.
    if scene.restarts && 0 < now && now < LAST && pod.may_restart() {
        events.push(Event::Restart);
    }
    if pod.kubelet.has_work() {
        events.push(Event::Actuate);
    }
    if pod.kubelet.is_behind() {
        events.extend([Event::Defer, Event::Refuse]);
    }
    events
}

impl Event {
    fn on(self, pod: &mut Stored, now: u8) {
        match self {
            Self::Schedule => pod.schedule(now),
            Self::Ready(container) => pod.becomes_ready(usize::from(container), now),
            Self::Restart => pod.restart(now),
            Self::Actuate => pod.actuate(),
            Self::Defer => pod.sees(Kubelet::Deferred(Seen::Yes)),
            Self::Refuse => pod.sees(Kubelet::Infeasible(Seen::Yes)),
        }
    }
}

/// Values that are kept once, numbered from 1.
struct Pool<T> {
    all: Vec<Rc<T>>,
    ids: HashMap<Rc<T>, Id>,
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self {
            all: Vec::new(),
            ids: HashMap::new(),
        }
    }
}

impl<T: Eq + Hash> Pool<T> {
    fn id(&mut self, value: T) -> Id {
        if let Some(id) = self.ids.get(&value) {
            return *id;
        }
        let value = Rc::new(value);
        self.all.push(Rc::clone(&value));
        let number = u32::try_from(self.all.len()).ok();
        let id = Id(number.and_then(NonZeroU32::new).expect("there are few"));
        self.ids.insert(value, id);
        id
    }

    fn get(&self, id: Id) -> &T {
        &self.all[id.0.get() as usize - 1]
    }
}
