//! The inputs of a decision that most policies and the native cost rank by, as columns of the pool: load,
//! blocks after admission, cached blocks. Read once for each decision, so that every policy of the slot, the
//! shadow and the receipt see the same values.

use pointsman_workers::{Candidate, Pool};
use prefix_index::{Overlaps, Prefix, PrefixIndex};

use crate::{
    config::RouterConfig,
    facts::{Wants, WorkerColumn, WorkerFact},
    query::Query,
    slot::{NativeMode, Program},
};

/// Reusable columns, indexed by row of the pool. Rows that were not asked for have any value.
#[derive(Default)]
pub(crate) struct Inputs {
    /// Content of the columns.
    computed: Needs,
    /// Tokens in a block of the request.
    block_size: u32,
    overlaps: Overlaps,
    load: Load,
    after_admission: Vec<u32>,
    /// Requests that are booked with much of the same prompt.
    like: Vec<u32>,
    /// Numbers of cached blocks on device, in host memory and on disk.
    cached: [Vec<u32>; 3],
    /// Rows of `cached` that may not be 0.
    holders: Vec<u32>,
}

/// The load of a pool's candidates. It stays for the next decision, which reads what has changed.
#[derive(Default)]
struct Load {
    /// Serial of the pool.
    pool: u64,
    /// Changes that are in the columns.
    seen: Vec<u64>,
    requests: Vec<u32>,
    prefill_tokens: Vec<u32>,
    blocks: Vec<u32>,
}

/// The inputs that a decision needs.
#[derive(Clone, Copy, Default)]
pub(crate) struct Needs {
    pub(crate) load: bool,
    pub(crate) cached: bool,
    pub(crate) after_admission: bool,
    pub(crate) like: bool,
}

impl Needs {
    /// What the native cost needs.
    pub(crate) const COST: Self = Self { load: true, cached: true, after_admission: true, like: false };

    pub(crate) fn of(wants: &Wants) -> Self {
        let mut needs = Self::default();
        for column in &wants.worker {
            match column {
                WorkerColumn::Fact(
                    WorkerFact::CachedBlocksDevice
                    | WorkerFact::CachedBlocksHost
                    | WorkerFact::CachedBlocksDisk,
                ) => needs.cached = true,
                WorkerColumn::Fact(WorkerFact::DecodeBlocks) => needs.after_admission = true,
                WorkerColumn::Fact(WorkerFact::PrefixRequests) => needs.like = true,
                WorkerColumn::Fact(WorkerFact::ActiveRequests | WorkerFact::ActivePrefillTokens) => {
                    needs.load = true;
                }
                _ => {}
            }
        }
        needs
    }

    /// The inputs that a program needs.
    pub(crate) fn of_program(program: &Program) -> Self {
        match program {
            Program::Native(NativeMode::Kv) => Self::COST,
            Program::Native(NativeMode::LeastLoaded) => Self { load: true, ..Self::default() },
            Program::DecodeOverride(_) => Self::default(),
            _ => program
                .policies()
                .map(|policy| Self::of(&policy.info().wants))
                .fold(Self::default(), Self::or),
        }
    }

    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            load: self.load || other.load,
            cached: self.cached || other.cached,
            after_admission: self.after_admission || other.after_admission,
            like: self.like || other.like,
        }
    }
}

impl Inputs {
    /// Computes what `needs` names for the `rows` of `pool`, which rise.
    pub(crate) fn compute(
        &mut self,
        needs: Needs,
        query: &Query<'_>,
        config: &RouterConfig,
        pool: &Pool,
        rows: &[u32],
        index: &PrefixIndex,
    ) {
        self.computed = needs;
        self.block_size = query.request.block_size;
        if needs.load || needs.after_admission {
            self.load.read(pool, rows);
        }
        if needs.after_admission {
            let new = query.request.request_blocks();
            self.after_admission.clear();
            self.after_admission.extend(self.load.blocks.iter().map(|blocks| blocks.saturating_add(new)));
        }
        if needs.like {
            self.computed.cached = true;
            self.like.clear();
            self.like.resize(pool.len(), 0);
        }
        if needs.cached || needs.like {
            self.look_up(query, pool, index);
        }
        if needs.like || (needs.after_admission && config.assume_kv_reuse) {
            self.share(query, config, pool, rows);
        }
    }

    /// Counts blocks that the request shares with booked ones once, where it shares any (G), and the requests
    /// that share them.
    fn share(&mut self, query: &Query<'_>, config: &RouterConfig, pool: &Pool, rows: &[u32]) {
        let request = query.request;
        let first = request.prefix.hashes().first().filter(|_| !request.skips_cache);
        let Some(first) = first else { return };
        let last = self.last_cached(&request.prefix).filter(|_| self.computed.like);
        let Self { computed, after_admission, like, .. } = self;
        pool.for_each_booking(rows, *first, |row| {
            let row = row as usize;
            let Some(load) = pool.get(row).map(Candidate::load) else { return };
            if computed.after_admission && config.assume_kv_reuse {
                let after = load.blocks_after_admission(&request.prefix, request.request_blocks(), true);
                set(after_admission, row, after);
            }
            if let Some(last) = last {
                set(like, row, load.requests_like(&request.prefix, last));
            }
        });
    }

    /// Returns the number of the last hash of the prompt that a worker has cached.
    fn last_cached(&self, prefix: &Prefix) -> Option<usize> {
        let blocks = self.holders.iter().map(|row| self.cached(*row).iter().sum::<u32>()).max()?;
        let hashes = u32::try_from(prefix.hashes().len()).unwrap_or(u32::MAX);
        let (mut low, mut high) = (0, hashes);
        while low < high {
            let middle = low.midpoint(high);
            if prefix.blocks(middle + 1) < blocks {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        (blocks > 0 && low < hashes).then_some(low as usize)
    }

    fn look_up(&mut self, query: &Query<'_>, pool: &Pool, index: &PrefixIndex) {
        let (prefix, block_size) = (&query.request.prefix, query.request.block_size);
        let Self { cached, holders, overlaps, .. } = self;
        for column in cached.iter_mut() {
            holders.iter().for_each(|row| set(column, *row as usize, 0));
            column.resize(pool.len(), 0);
        }
        holders.clear();
        if query.request.skips_cache {
            return;
        }
        index.matches(prefix.hashes(), overlaps);
        let [device, host, disk] = cached;
        overlaps.for_each_holder(pool.rows(), |row, matched| {
            holders.push(row);
            let row = row as usize;
            let mut blocks = prefix.blocks(matched.device);
            if (matched.host, matched.disk) == (0, 0) {
                // An engine with larger blocks reuses whole ones only.
                let at_once =
                    pool.get(row).map_or(1, |candidate| candidate.load().view().blocks_at_once(block_size));
                blocks -= blocks % at_once;
            }
            set(device, row, blocks);
            set(host, row, prefix.blocks(matched.host));
            set(disk, row, prefix.blocks(matched.disk));
        });
    }

    /// The active requests and prefill tokens of a candidate, if they were computed.
    pub(crate) fn load(&self, row: u32) -> Option<(u32, u32)> {
        let row = row as usize;
        let requests = *self.requests()?.get(row)?;
        Some((requests, *self.prefill_tokens()?.get(row)?))
    }

    /// Replaces the content of `out` by the number of blocks that each of `rows` has cached in any tier.
    pub(crate) fn write_cached(&self, rows: &[u32], out: &mut Vec<u32>) {
        out.clear();
        let [device, host, disk] = &self.cached;
        if rows.len() == device.len() {
            let lower = host.iter().zip(disk);
            let blocks = device
                .iter()
                .zip(lower)
                .map(|(device, (host, disk))| device.saturating_add(*host).saturating_add(*disk));
            return out.extend(blocks);
        }
        out.extend(rows.iter().map(|row| self.cached(*row).into_iter().fold(0, u32::saturating_add)));
    }

    /// Writes the load of each of `rows` after admission to `out`: numbers that are ordered as the blocks
    /// that are booked and those of the prompts that wait.
    pub(crate) fn write_load(&self, rows: &[u32], out: &mut Vec<u32>) {
        out.clear();
        let each_token = 1.0 / self.block_size.max(1) as f32;
        // The bits of numbers above 0 are ordered as the numbers.
        let load = |blocks: u32, tokens: u32| (blocks as f32 + tokens as f32 * each_token).to_bits();
        if rows.len() == self.after_admission.len() {
            let cells = self.after_admission.iter().zip(&self.load.prefill_tokens);
            return out.extend(cells.map(|(blocks, tokens)| load(*blocks, *tokens)));
        }
        out.extend(rows.iter().map(|row| {
            let tokens = self.load(*row).map_or(0, |(_, tokens)| tokens);
            load(self.after_admission(*row), tokens)
        }));
    }

    pub(crate) fn requests(&self) -> Option<&[u32]> {
        self.computed.load.then_some(&*self.load.requests)
    }

    pub(crate) fn prefill_tokens(&self) -> Option<&[u32]> {
        self.computed.load.then_some(&*self.load.prefill_tokens)
    }

    /// Blocks of the candidate after admission; 0 if they were not computed.
    pub(crate) fn after_admission(&self, row: u32) -> u32 {
        self.after_admission_column().get(row as usize).copied().unwrap_or(0)
    }

    pub(crate) fn after_admission_column(&self) -> &[u32] {
        if self.computed.after_admission { &self.after_admission } else { &[] }
    }

    /// Cached blocks of the candidate on device, in host memory, on disk; 0 if they were not computed.
    pub(crate) fn cached(&self, row: u32) -> [u32; 3] {
        let blocks = |column: &Vec<u32>| column.get(row as usize).copied().unwrap_or(0);
        if self.computed.cached { self.cached.each_ref().map(blocks) } else { [0; 3] }
    }

    /// Requests booked with much of the same prompt.
    pub(crate) fn like_column(&self) -> &[u32] {
        if self.computed.like { &self.like } else { &[] }
    }

    /// Cached blocks of one tier.
    pub(crate) fn cached_column(&self, tier: usize) -> &[u32] {
        self.cached.get(tier).filter(|_| self.computed.cached).map_or(&[], Vec::as_slice)
    }
}

impl Load {
    /// Reads the load of the `rows` of `pool`, which rise, where it has changed.
    fn read(&mut self, pool: &Pool, rows: &[u32]) {
        let Self { pool: serial, seen, requests, prefill_tokens, blocks } = self;
        if *serial != pool.serial() {
            *serial = pool.serial();
            seen.clear();
            [&mut *requests, &mut *prefill_tokens, &mut *blocks]
                .into_iter()
                .for_each(|column| column.resize(pool.len(), 0));
        }
        if rows.len() < pool.len() / 2 {
            return pool.for_each(rows, |row, load| {
                let row = row as usize;
                set(requests, row, load.active_requests());
                set(prefill_tokens, row, load.active_prefill_tokens());
                set(blocks, row, load.decode_blocks());
            });
        }
        for (first, loads) in pool.changed(seen) {
            let rest = [&mut *requests, &mut *prefill_tokens, &mut *blocks]
                .map(|column| column.get_mut(first..).unwrap_or_default());
            let [requests, prefill_tokens, blocks] = rest;
            let cells = requests.iter_mut().zip(prefill_tokens).zip(blocks);
            for (load, ((requests, tokens), blocks)) in loads.zip(cells) {
                *requests = load.active_requests();
                *tokens = load.active_prefill_tokens();
                *blocks = load.decode_blocks();
            }
        }
    }
}

fn set(column: &mut [u32], row: usize, value: u32) {
    if let Some(cell) = column.get_mut(row) {
        *cell = value;
    }
}

#[cfg(test)]
mod tests;
