//! Agent programs: a root session together with the sessions of all sub-agents that descend from it.
//!
//! A request names its session, and the parent of a sub-agent's session. The root's hash names the program. A
//! sub-agent of a sub-agent is found by the root that its parent's requests had. One short lock guards the
//! tables, as that of session bindings does; only requests that name a session take it.

use parking_lot::Mutex;
use pointsman_routing::{CandidateId, RoutingRequest};
use pointsman_workers::{Candidate, HeldTokens};
use tokio::time::{Duration, Instant};

mod aged;

use aged::Aged;

/// A program runs as long as it had a request within this time. An ended program looks the same as one whose
/// tool runs, unless the client says that it ended.
pub const RUNNING_FOR: Duration = Duration::from_secs(120);
/// How long the turns of a program and the root of a sub-agent's session are known after the last request.
const KNOWN_FOR: Duration = Duration::from_secs(3_600);
/// Maximum number of candidates for which the tokens of one program are known.
const MAX_HOLDERS: usize = 8;

/// What one gateway knows of the agent programs that it serves.
#[derive(Debug, Default)]
pub struct AgentPrograms(Mutex<Tables>);

#[derive(Debug, Default)]
struct Tables {
    /// Number of requests of each program that were routed.
    turns: Aged<u32>,
    /// Program of each sub-agent's session.
    roots: Aged<u64>,
    /// What candidates hold of running programs.
    held: Aged<Vec<Holder>>,
}

/// A candidate that served requests of a program.
#[derive(Debug)]
struct Holder {
    candidate: CandidateId,
    /// Tokens that were cached before the program's first request here: those of other programs.
    shared: u32,
    /// Prompt and answer of the longest request, without the shared tokens.
    tokens: u32,
    at: Instant,
    counted: HeldTokens,
}

impl AgentPrograms {
    /// Completes the facts of a request's program.
    pub fn fill(&self, request: &mut RoutingRequest) {
        let Some(program) = request.program.as_deref_mut() else { return };
        let now = Instant::now();
        let mut tables = self.0.lock();
        tables.expire(now);
        program.hash = tables.root(program.session, program.parent);
        if let Some((at, turns)) = tables.turns.get(program.hash) {
            let idle = now.saturating_duration_since(at).as_millis();
            (program.turn, program.idle_ms) = (*turns, Some(u32::try_from(idle).unwrap_or(u32::MAX)));
        }
        if let Some((_, holders)) = tables.held.get(program.hash) {
            let fresh = holders.iter().filter(|holder| holder.is_fresh(now));
            program.held = fresh.map(|holder| (holder.candidate, holder.tokens)).collect();
        }
    }

    /// Notes that a leg was booked on a candidate, which had these blocks of the prompt cached. The first leg
    /// of a request counts as a turn.
    pub fn routed(&self, request: &mut RoutingRequest, candidate: &Candidate, cached_blocks: [u32; 3]) {
        let (tokens, size) = (request.prompt_tokens, request.block_size);
        let cached = cached_blocks.into_iter().fold(0, u32::saturating_add).saturating_mul(size);
        let Some(program) = request.program.as_deref_mut() else { return };
        let (first, now) = (!std::mem::replace(&mut program.counted, true), Instant::now());
        let mut tables = self.0.lock();
        tables.expire(now);
        if !first && !tables.knows(program.hash) {
            return;
        }
        let turns = tables.turns.touch(program.hash, now);
        *turns = turns.saturating_add(u32::from(first));
        if program.hash != program.session {
            *tables.roots.touch(program.session, now) = program.hash;
        }
        tables.hold(program.hash, candidate, (cached, tokens), now);
    }

    /// Notes that a candidate answered. An answer that comes after the program has ended does not begin it
    /// again.
    pub fn answered(&self, request: &mut RoutingRequest, candidate: &Candidate, output_tokens: u32) {
        let tokens = request.prompt_tokens.saturating_add(output_tokens);
        let Some(program) = request.program.as_deref_mut() else { return };
        program.answered = true;
        let now = Instant::now();
        let mut tables = self.0.lock();
        if tables.knows(program.hash) {
            tables.turns.touch(program.hash, now);
            tables.hold(program.hash, candidate, (0, tokens), now);
        }
    }

    /// Forgets the session of a request, because it was the last one, unless it was not answered: its client
    /// may send it again. A program ends with its root.
    pub fn ended(&self, request: &RoutingRequest) {
        let Some(program) = request.program.as_deref().filter(|program| program.answered) else { return };
        let mut tables = self.0.lock();
        if program.hash == program.session {
            tables.turns.remove(program.hash);
            tables.held.remove(program.hash);
        } else {
            tables.roots.remove(program.session);
        }
    }
}

impl Tables {
    fn root(&self, session: u64, parent: Option<u64>) -> u64 {
        let known = parent.unwrap_or(session);
        self.roots.get(known).map_or(known, |(_, root)| *root)
    }

    /// Whether a program began and has not ended.
    fn knows(&self, program: u64) -> bool {
        self.turns.get(program).is_some()
    }

    fn expire(&mut self, now: Instant) {
        self.turns.expire(now, KNOWN_FOR);
        self.roots.expire(now, KNOWN_FOR);
        self.held.expire(now, RUNNING_FOR);
    }

    fn hold(&mut self, program: u64, candidate: &Candidate, (cached, tokens): (u32, u32), now: Instant) {
        let holders = self.held.touch(program, now);
        let id = (candidate.worker_id(), candidate.rank);
        let before = holders.iter().position(|holder| holder.candidate == id);
        // A worker that left and joined again holds nothing.
        let before = before.map(|at| holders.swap_remove(at));
        let before = before.filter(|holder| holder.is_fresh(now) && holder.counted.is_on(candidate.load()));
        let (shared, longest) = before.map_or((cached, 0), |holder| (holder.shared, holder.tokens));
        let tokens = tokens.saturating_sub(shared).max(longest);
        holders.retain(|holder| holder.is_fresh(now));
        if holders.len() >= MAX_HOLDERS
            && let Some((oldest, _)) = holders.iter().enumerate().min_by_key(|(_, holder)| holder.at)
        {
            holders.swap_remove(oldest);
        }
        let counted = candidate.hold(tokens);
        holders.push(Holder { candidate: id, shared, tokens, at: now, counted });
    }
}

impl Holder {
    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) <= RUNNING_FOR
    }
}

#[cfg(test)]
mod tests;
