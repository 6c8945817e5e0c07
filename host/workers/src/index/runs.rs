//! Blocks of one engine by the engine's hashes, in *runs*: each block is the parent of the next. What a block costs is its
//! hashes and its counts; the tree stands only where runs branch. A run grows and shrinks at its tail.

#![expect(clippy::indexing_slicing, reason = "tiers are 0, 1 and 2")]

use super::{
    bytes::{fit, heap, room},
    order::{Ripe, RunId},
    places::{Place, Places},
};
use crate::id::BlockHash;

/// Twentieths that are counted beside, because resident memory was 1.27 and 1.34 times what was allocated for runs and the
/// block table together (`cargo xtask churn`, whose figures this is fitted to). Supposedly it is lost between tables that are
/// written anew and the runs that take their old room; that has not been shown.
const SCATTERED: usize = 9;

/// How often a block is stored, by tier.
pub(super) type Counts = [u16; 3];

/// The blocks.
#[derive(Debug, Default)]
pub(super) struct Runs {
    places: Places,
    runs: Vec<Run>,
    /// Places in `runs` that are free.
    free: Vec<u32>,
    /// Bytes that runs' blocks and branches take.
    inner: usize,
    /// Runs that ever began.
    births: u32,
    /// What the order of eviction has to know.
    ripe: Ripe,
}

#[derive(Debug, Default)]
struct Run {
    parent: Option<Place>,
    seed: u64,
    /// Hashes of ours for each block of the engine's; 0 if the run is free.
    step: u32,
    born: u32,
    /// It has a place in the order of eviction.
    queued: bool,
    /// It was used since it got that place.
    used: bool,
    blocks: Vec<Block>,
    ours: Vec<BlockHash>,
    /// Where other runs go on from this one, by place.
    branches: Vec<Branch>,
}

/// What is to be done with a run whose turn it is to give way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// It is gone, or others go on from its tail: it has no place in the order any more.
    Pass,
    /// It was used: it gets another turn.
    Later,
    /// Its last block, which gives way.
    Now(Place),
}

#[derive(Debug)]
struct Block {
    engine: u64,
    stored: Counts,
}

#[derive(Debug)]
struct Branch {
    at: u32,
    /// Runs that begin here.
    runs: u32,
    /// Of those, how many have their first block stored, by tier.
    stored: [u32; 3],
}

impl Runs {
    /// Runs there are.
    pub(super) fn len(&self) -> usize {
        self.runs.len() - self.free.len()
    }

    /// Bytes that all of it takes, with what the allocator loses between them.
    pub(super) fn bytes(&self) -> usize {
        let taken = self.inner
            + self.places.bytes()
            + heap(self.runs.capacity() * size_of::<Run>())
            + heap(self.free.capacity() * size_of::<u32>());
        taken + taken / 20 * SCATTERED
    }

    /// What the order of eviction has to know since it was told the last time.
    pub(super) fn ripe(&mut self) -> &mut Ripe {
        &mut self.ripe
    }

    /// Asks for blocks' places before they are needed: to wait for many at once takes as long as for one.
    pub(super) fn touch(&self, engine: &[u64]) {
        let touched = engine.iter().map(|hash| self.places.touch(*hash));
        std::hint::black_box(touched.fold(0, u64::wrapping_add));
    }

    /// Where a block is.
    pub(super) fn find(&self, engine: u64) -> Option<Place> {
        self.places.find(engine)
    }

    /// Whether a run is there that waits for its turn.
    pub(super) fn waits(&self, run: RunId) -> bool {
        self.runs.get(run.number as usize).is_some_and(|one| one.born == run.born && one.queued)
    }

    /// A block was named: its run is in use.
    pub(super) fn used(&mut self, place: Place) {
        if let Some(run) = self.runs.get_mut(place.run as usize) {
            run.used = true;
        }
    }

    /// What is to be done with a run whose turn has come.
    pub(super) fn turn(&mut self, run: RunId) -> Turn {
        if !self.waits(run) {
            return Turn::Pass;
        }
        let tail = self.tail(Place { run: run.number, at: 0 });
        let Some(one) = self.runs.get_mut(run.number as usize) else { return Turn::Pass };
        match tail {
            Some(_) if std::mem::take(&mut one.used) => Turn::Later,
            Some(tail) => Turn::Now(tail),
            None => {
                one.queued = false;
                Turn::Pass
            }
        }
    }

    /// Our hashes of a block.
    pub(super) fn ours(&self, place: Place) -> &[BlockHash] {
        let Some(run) = self.run(place) else { return &[] };
        let step = run.step as usize;
        let from = place.at as usize * step;
        run.ours.get(from..from + step).unwrap_or_default()
    }

    /// The seed of the local hashes along a run.
    pub(super) fn seed(&self, place: Place) -> u64 {
        self.run(place).map_or(0, |run| run.seed)
    }

    pub(super) fn parent(&self, place: Place) -> Option<Place> {
        match place.at {
            0 => self.run(place)?.parent,
            at => Some(Place { at: at - 1, ..place }),
        }
    }

    pub(super) fn stored(&self, place: Place) -> Counts {
        self.block(place).map_or([0; 3], |block| block.stored)
    }

    /// Whether a child of a block is stored in a tier.
    pub(super) fn has_child(&self, place: Place, tier: usize) -> bool {
        let next = Place { at: place.at + 1, ..place };
        self.block(next).is_some_and(|block| block.stored[tier] > 0)
            || self.run(place).and_then(|run| run.branch(place.at)).is_some_and(|one| one.stored[tier] > 0)
    }

    /// Counts a block's stores in a tier; the block knows of it, and where its run branches off.
    pub(super) fn set_stored(&mut self, place: Place, tier: usize, count: u16) {
        let Some(block) =
            self.runs.get_mut(place.run as usize).and_then(|run| run.blocks.get_mut(place.at as usize))
        else {
            return;
        };
        let before = std::mem::replace(&mut block.stored[tier], count);
        if place.at > 0 || (before > 0) == (count > 0) {
            return;
        }
        let Some(parent) = self.parent(place) else { return };
        if let Some(branch) = self.branch_mut(parent) {
            branch.stored[tier] = if count > 0 { branch.stored[tier] + 1 } else { branch.stored[tier] - 1 };
        }
    }

    /// Puts a block below another: behind it where that is its run's tail, otherwise as a run of its own. Room for `more`
    /// blocks is made, which are to follow. `ours` adds our hashes of the block.
    pub(super) fn push(
        &mut self,
        parent: Option<Place>,
        engine: u64,
        (seed, step, more): (u64, u32, usize),
        ours: impl FnOnce(&mut Vec<BlockHash>),
    ) -> Place {
        let tail = parent
            .filter(|place| self.run(*place).is_some_and(|run| run.step == step && run.ends_at(place.at)));
        let number = tail.map_or_else(|| self.begin(parent, seed, step), |place| place.run);
        let at = self.change(number, |run| {
            room(&mut run.blocks, more);
            room(&mut run.ours, more * step as usize);
            ours(&mut run.ours);
            run.blocks.push(Block { engine, stored: [0; 3] });
            u32::try_from(run.blocks.len() - 1).unwrap_or(u32::MAX)
        });
        let place = Place { run: number, at: at.unwrap_or(0) };
        self.places.insert(engine, place);
        place
    }

    fn begin(&mut self, parent: Option<Place>, seed: u64, step: u32) -> u32 {
        self.births = self.births.wrapping_add(1);
        let run = Run { parent, seed, step, born: self.births, queued: true, ..Run::default() };
        if let Some(above) = parent {
            self.change(above.run, |run| run.begin_at(above.at));
        }
        let number = self.free.pop().unwrap_or_else(|| {
            room(&mut self.runs, 1);
            self.runs.push(Run::default());
            u32::try_from(self.runs.len() - 1).unwrap_or(u32::MAX)
        });
        self.ripe.new.push(RunId { number, born: run.born });
        if let Some(free) = self.runs.get_mut(number as usize) {
            *free = run;
        }
        number
    }

    /// Changes a run, whose bytes may be others then.
    fn change<T>(&mut self, number: u32, change: impl FnOnce(&mut Run) -> T) -> Option<T> {
        let run = self.runs.get_mut(number as usize)?;
        let before = run.bytes();
        let out = change(run);
        self.inner = self.inner + run.bytes() - before;
        Some(out)
    }

    /// The last block of the run that a block is in, unless other runs go on from it.
    pub(super) fn tail(&self, place: Place) -> Option<Place> {
        let run = self.run(place)?;
        let at = u32::try_from(run.blocks.len().checked_sub(1)?).ok()?;
        run.branch(at).is_none().then_some(Place { at, ..place })
    }

    /// Drops the blocks at the tail of a run that nobody stores and nothing goes on from, and then those of the run above
    /// if this one is gone.
    pub(super) fn trim(&mut self, place: Place) {
        let mut next = Some(place);
        while let Some(place) = next.take() {
            while let Some(tail) = self.tail(place).filter(|tail| self.stored(*tail) == [0; 3]) {
                let Some(run) = self.runs.get_mut(tail.run as usize) else { break };
                run.ours.truncate(tail.at as usize * run.step as usize);
                if let Some(block) = run.blocks.pop() {
                    self.places.remove(block.engine);
                }
            }
            next = self.give_back(place);
        }
        if self.free.len() == self.runs.len() {
            (self.runs, self.free) = (Vec::new(), Vec::new());
        }
    }

    /// Gives back the room that a shorter run leaves; all of it, and its branch on the run above, when it is empty.
    fn give_back(&mut self, place: Place) -> Option<Place> {
        let parent = self.change(place.run, |run| {
            if run.blocks.is_empty() && run.step > 0 {
                return Some(std::mem::take(run).parent);
            }
            fit(&mut run.blocks);
            fit(&mut run.ours);
            None
        })??;
        room(&mut self.free, 1);
        self.free.push(place.run);
        let parent = parent?;
        self.change(parent.run, |run| run.end_at(parent.at));
        let above = self.tail(parent).filter(|tail| tail.at == parent.at).is_some();
        let run = self.runs.get_mut(parent.run as usize)?;
        if above && !run.queued {
            (run.queued, run.used) = (true, false);
            self.ripe.again.push(RunId { number: parent.run, born: run.born });
        }
        Some(parent)
    }

    /// Takes all blocks out: how often each is stored, and our hashes of it.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = (Counts, Vec<BlockHash>)> + use<> {
        let runs = std::mem::replace(self, Self { births: self.births, ..Self::default() }).runs;
        runs.into_iter().flat_map(|run| {
            let blocks = run.blocks.into_iter().zip(run.ours.chunks(run.step.max(1) as usize));
            blocks.map(|(block, ours)| (block.stored, ours.to_vec())).collect::<Vec<_>>()
        })
    }

    fn run(&self, place: Place) -> Option<&Run> {
        self.runs.get(place.run as usize)
    }

    fn block(&self, place: Place) -> Option<&Block> {
        self.run(place)?.blocks.get(place.at as usize)
    }

    fn branch_mut(&mut self, place: Place) -> Option<&mut Branch> {
        let run = self.runs.get_mut(place.run as usize)?;
        let found = run.find_branch(place.at).ok()?;
        run.branches.get_mut(found)
    }
}

impl Run {
    /// Bytes beside its own.
    fn bytes(&self) -> usize {
        heap(self.blocks.capacity() * size_of::<Block>())
            + heap(self.ours.capacity() * size_of::<BlockHash>())
            + heap(self.branches.capacity() * size_of::<Branch>())
    }

    fn ends_at(&self, at: u32) -> bool {
        at as usize + 1 == self.blocks.len() && self.branch(at).is_none()
    }

    fn branch(&self, at: u32) -> Option<&Branch> {
        self.branches.get(self.find_branch(at).ok()?)
    }

    fn find_branch(&self, at: u32) -> Result<usize, usize> {
        self.branches.binary_search_by_key(&at, |branch| branch.at)
    }

    /// One more run begins below a block.
    fn begin_at(&mut self, at: u32) {
        match self.find_branch(at) {
            Ok(found) => self.branches[found].runs += 1,
            Err(free) => {
                room(&mut self.branches, 1);
                self.branches.insert(free, Branch { at, runs: 1, stored: [0; 3] });
            }
        }
    }

    /// One less does.
    fn end_at(&mut self, at: u32) {
        let Ok(found) = self.find_branch(at) else { return };
        self.branches[found].runs -= 1;
        if self.branches[found].runs == 0 {
            self.branches.remove(found);
            fit(&mut self.branches);
        }
    }
}
