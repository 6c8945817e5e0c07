//! The clairvoyant search: an assignment of requests to engines that beats every arm.
//!
//! It starts with the assignment of the best arm. For each request that arrives, it tries other engines, for
//! this request alone or together with the later requests that continue its prompt. It simulates the next
//! arrivals, up to a horizon, with the current assignment of the other requests. It keeps the engines with
//! the smallest sum of times to first token (a rollout: Bertsekas, Tsitsiklis and Wu, 1997). It repeats this
//! until its budget is used up. The budget is in engine steps, not in time, so equal inputs give equal
//! results.

use std::{collections::HashMap, time::Duration};

use pointsman_workers::Role;

use super::{
    continued::Continued,
    replay::{Scene, World},
};
use crate::{monitor::Monitor, outcome::Place, run::RunError};

/// Number of arrivals over which a choice is judged, for each engine that may compute the prompt.
const HORIZON_OF_ENGINE: u32 = 6;
/// Smallest and largest horizon, arrivals.
const HORIZONS: (u32, u32) = (24, 512);
/// Maximum number of engines that are tried for a request.
const MAX_TRIED: usize = 8;
/// Cost of copying an engine, in steps of that engine.
const STEPS_OF_COPY: u64 = 32;
/// Maximum number of passes over the trace.
const MAX_PASSES: u32 = 20;

/// Number of steps that a search may simulate.
struct Budget {
    left: u64,
    /// Number of steps that the current pass may have used so far.
    allowed: u64,
    used: u64,
}

/// An assignment that is being improved, and the budget for it.
struct Search<'s, 'a> {
    scene: &'s Scene<'a>,
    arms: &'s [Vec<Place>],
    continued: Continued,
    places: Vec<Place>,
    horizon: u32,
    budget: Budget,
}

/// Requests that move together to other engines.
struct Move {
    requests: Vec<u32>,
    to: Place,
}

/// Searches for an assignment with the least mean time to first token. `arms` are the assignments of the
/// arms, the best arm first. `runs` limits the number of simulated steps, as a multiple of the steps of one
/// run.
///
/// # Errors
/// [`RunError::Interrupted`]
pub(crate) fn search(
    scene: &Scene<'_>,
    arms: &[Vec<Place>],
    runs: u32,
    monitor: &Monitor,
) -> Result<Vec<Place>, RunError> {
    let Some(first) = arms.first() else { return Ok(Vec::new()) };
    let mut best = first.clone();
    let mut world = World::new(scene);
    world.run_counted(scene, &best, Duration::MAX);
    let mut best_ttft = world.ttft;
    let mut search = Search {
        scene,
        arms,
        continued: Continued::of(scene.prepared),
        places: Vec::new(),
        horizon: horizon(scene),
        budget: Budget { left: world.steps.saturating_mul(u64::from(runs)), allowed: 0, used: 0 },
    };
    for _ in 0..MAX_PASSES {
        search.places.clone_from(&best);
        let ttft = search.pass(monitor)?;
        search.budget.left = search.budget.left.saturating_sub(search.budget.used);
        if ttft < best_ttft {
            (best, best_ttft) = (search.places.clone(), ttft);
        } else {
            // The changes reduced the sum within the horizon but increased it after the horizon.
            search.horizon = search.horizon.saturating_mul(2);
        }
        if search.budget.left == 0 || search.budget.used == 0 {
            break;
        }
    }
    Ok(best)
}

impl Search<'_, '_> {
    /// Improves the engines of the requests in the order of their arrival. Returns the sum of their times to
    /// first token.
    fn pass(&mut self, monitor: &Monitor) -> Result<Duration, RunError> {
        let mut world = World::new(self.scene);
        let requests = self.places.len().max(1) as u64;
        self.budget.used = 0;
        for done in 1_u64.. {
            let Some(number) = world.run_to_arrival(self.scene, &self.places) else { break };
            if monitor.is_stopped() {
                return Err(RunError::Interrupted);
            }
            // Spreads the budget over the trace.
            self.budget.allowed = self.budget.left.saturating_mul(done) / requests;
            if self.budget.used < self.budget.allowed {
                let moves = self.moves(&world, number);
                let best = if self.scene.is_separable() {
                    self.best_by_engine(&world, number, &moves)
                } else {
                    self.best_of_all(&world, &moves)
                };
                best.into_iter().for_each(|one| self.apply(one));
            }
            world.step(self.scene, &self.places);
        }
        Ok(world.ttft)
    }

    fn place(&self, number: u32) -> Place {
        self.places.get(number as usize).copied().unwrap_or(Place::NONE)
    }

    fn apply(&mut self, one: &Move) {
        for number in &one.requests {
            if let Some(place) = self.places.get_mut(*number as usize) {
                *place = one.to;
            }
        }
    }

    /// Returns the moves to try: to the engines that the arms chose, and to the engines that have the least
    /// to compute before the first token. Each move is tried for the request alone, and together with the
    /// later requests that continue its prompt on the same engines.
    fn moves(&self, world: &World, number: u32) -> Vec<Move> {
        let (scene, present) = (self.scene, self.place(number));
        let later = self.continued.after(number).into_iter();
        let later: Vec<u32> = later.filter(|later| self.place(*later) == present).collect();
        let mut moves = Vec::new();
        for to in candidates(scene, world, present, self.arms, number) {
            moves.push(Move { requests: vec![number], to });
            let mut with_later = vec![number];
            with_later.extend(later.iter().filter(|later| world.holds(scene, to, **later)));
            if with_later.len() > 1 {
                moves.push(Move { requests: with_later, to });
            }
        }
        moves
    }

    /// Returns the move after which the sum over all engines is smallest, if it is smaller than now.
    fn best_of_all<'m>(&mut self, world: &World, moves: &'m [Move]) -> Option<&'m Move> {
        let mut least = self.sum(world.clone(), Duration::MAX).unwrap_or(Duration::MAX);
        let mut best = None;
        for one in moves {
            let before = self.replace(one);
            if let Some(sum) = self.sum(world.clone(), least).filter(|sum| *sum < least) {
                (least, best) = (sum, Some(one));
            }
            self.restore(one, &before);
        }
        best
    }

    /// Like [`Self::best_of_all`], for engines that are independent of each other. A move then changes the
    /// sums of two engines only, and each of them is simulated alone.
    fn best_by_engine<'m>(&mut self, world: &World, number: u32, moves: &'m [Move]) -> Option<&'m Move> {
        let from = self.place(number).decode;
        let (mut now, mut without) = (HashMap::new(), HashMap::new());
        let mut best = None;
        let mut least = 0.0;
        for one in moves {
            let to = one.to.decode;
            for engine in [from, to] {
                now.entry(engine).or_insert_with(|| self.sum_of(world, engine));
            }
            let before = self.replace(one);
            let new = self.sum_of(world, to);
            let old = *without.entry(one.requests.len()).or_insert_with(|| self.sum_of(world, from));
            self.restore(one, &before);
            let of = |engine: u32| now.get(&engine).copied().unwrap_or_default();
            let change = new + old - of(from) - of(to);
            if change < least {
                (least, best) = (change, Some(one));
            }
        }
        best
    }

    /// Applies a move. Returns the engines that the requests had before.
    fn replace(&mut self, one: &Move) -> Vec<Place> {
        let before = one.requests.iter().map(|number| self.place(*number)).collect();
        self.apply(one);
        before
    }

    fn restore(&mut self, one: &Move, before: &[Place]) {
        for (number, place) in one.requests.iter().zip(before) {
            self.apply(&Move { requests: vec![*number], to: *place });
        }
    }

    fn sum_of(&mut self, world: &World, engine: u32) -> f64 {
        self.sum(world.only(engine), Duration::MAX).unwrap_or_default().as_secs_f64()
    }

    /// Returns the sum of the times to first token over the horizon; `None` if it exceeds `limit`.
    fn sum(&mut self, mut world: World, limit: Duration) -> Option<Duration> {
        world.count_next(self.horizon);
        let ended = world.run_counted(self.scene, &self.places, limit);
        self.budget.used += world.steps + STEPS_OF_COPY * world.simulated();
        ended.then_some(world.ttft)
    }
}

/// Returns other engines for a request, without the current ones.
fn candidates(
    scene: &Scene<'_>,
    world: &World,
    present: Place,
    arms: &[Vec<Place>],
    number: u32,
) -> Vec<Place> {
    let mut tried: Vec<Place> = Vec::new();
    let mut add = |place: Place| {
        if place != present
            && world.holds(scene, place, number)
            && !tried.contains(&place)
            && tried.len() < MAX_TRIED
        {
            tried.push(place);
        }
    };
    arms.iter().filter_map(|arm| arm.get(number as usize).copied()).for_each(&mut add);
    let engines = || (0..).zip(&scene.roles);
    let idle_decode = engines()
        .filter(|(engine, role)| **role == Role::Decode && world.holds(scene, Place::whole(*engine), number))
        .min_by_key(|(engine, _)| (world.sequences(*engine), *engine));
    let mut computing: Vec<(u64, u32)> = engines()
        .filter(|(_, role)| **role == Role::Prefill || !scene.fleet.routing.enforce_disagg)
        .map(|(engine, _)| (world.tokens_ahead(scene, engine, number), engine))
        .collect();
    computing.sort_unstable();
    for (_, engine) in computing {
        match (scene.role(engine), idle_decode) {
            (Role::Prefill, Some((decode, _))) => add(Place { prefill: engine, decode }),
            (Role::Prefill, None) => {}
            _ => add(Place::whole(engine)),
        }
    }
    tried
}

fn horizon(scene: &Scene<'_>) -> u32 {
    let engines = scene.roles.iter().filter(|role| **role != Role::Decode).count();
    let engines = u32::try_from(engines).unwrap_or(u32::MAX);
    engines.saturating_mul(HORIZON_OF_ENGINE).clamp(HORIZONS.0, HORIZONS.1)
}
