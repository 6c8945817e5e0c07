//! Mooncake's JSONL in which a later turn of a session has only what it adds, as in AIPerf's agentic
//! datasets. The prompt of a turn is the previous prompt, the answer to it, and what the line adds.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use super::{BlockIds, ReadLines, TraceRequest, mooncake, nominal_time, tokens};

/// Largest block id that a file may contain. Blocks that the file does not name get larger ids.
const MAX_BLOCK_ID: u64 = 1 << 62;

/// A session while the file is read.
struct Session {
    /// Blocks of the first prompt. Later blocks contain answers, so no other session shares them.
    first_blocks: Vec<u64>,
    /// Its requests: the position in the trace, and the number of tokens of the whole prompt.
    requests: Vec<(usize, u32)>,
    /// Number of tokens of the newest prompt and its answer.
    tokens: u32,
    /// Arrival of its newest request.
    newest: Duration,
    /// Time at which the newest answer ends if no other load delays it.
    end: Duration,
    /// Positions of the sessions that were forked from it after its newest request.
    forks: Vec<usize>,
}

/// Reads lines. Requests get their blocks after all lines are read, because the turns of a session share one
/// list.
#[derive(Default)]
pub(super) struct Reader {
    lines: mooncake::Reader,
    numbers: HashMap<String, usize>,
    sessions: Vec<Session>,
    block_tokens: u32,
    largest_id: u64,
    read: usize,
}

impl ReadLines for Reader {
    fn line(&mut self, text: &str, block_tokens: u32) -> Result<Option<TraceRequest>, String> {
        self.block_tokens = block_tokens.max(1);
        let mut request = self.lines.line(text, block_tokens)?;
        request.as_mut().map_or(Ok(()), |request| self.add(request))?;
        Ok(request)
    }

    fn moved(&self) -> u64 {
        self.lines.moved()
    }

    fn finish(&mut self, requests: &mut [TraceRequest]) {
        let mut fresh = self.largest_id + 1;
        // Blocks of which a first prompt has a part, and the answers of one session the rest.
        let mut continued = HashSet::new();
        for mut session in std::mem::take(&mut self.sessions) {
            let count = |tokens: u32| tokens.div_ceil(self.block_tokens) as usize;
            let longest = session.requests.iter().map(|(_, tokens)| count(*tokens)).max().unwrap_or(0);
            let mut blocks = session.first_blocks;
            if let [(_, first_tokens), _, ..] = session.requests[..] {
                let whole = (first_tokens / self.block_tokens) as usize;
                // Another session has other answers there, so this one gets a block of its own. Its first
                // prompt keeps the blocks of its line.
                if blocks.get(whole).is_some_and(|partial| !continued.insert(*partial)) {
                    blocks.truncate(whole);
                    session.requests.remove(0);
                }
            }
            let more = longest.saturating_sub(blocks.len()) as u64;
            blocks.extend(fresh..fresh + more);
            fresh += more;
            let blocks: Arc<[u64]> = blocks.into();
            for (place, tokens) in session.requests {
                if let Some(request) = requests.get_mut(place) {
                    request.blocks = BlockIds::first(&blocks, count(tokens));
                }
            }
        }
    }
}

impl Reader {
    pub(super) fn new() -> Self {
        Self { lines: mooncake::Reader::of_sessions(), ..Self::default() }
    }

    /// Takes a request that has the values of its line, and makes its prompt that of the whole turn. A
    /// request without a session stays as it is.
    fn add(&mut self, request: &mut TraceRequest) -> Result<(), String> {
        let largest = request.blocks.iter().copied().max().unwrap_or(0);
        if largest > MAX_BLOCK_ID {
            return Err(format!("`hash_ids` has {largest}; expected at most {MAX_BLOCK_ID}"));
        }
        if let Some(name) = request.session.clone() {
            self.add_turn(name, request)?;
        }
        self.largest_id = self.largest_id.max(largest);
        self.read += 1;
        Ok(())
    }

    fn add_turn(&mut self, name: String, request: &mut TraceRequest) -> Result<(), String> {
        let added = request.input_tokens;
        let (number, start) = match self.numbers.get(&name).copied() {
            Some(number) => {
                let before = self.sessions.get(number).map_or(0, |session| session.tokens);
                request.input_tokens = tokens("input_length", u64::from(before) + u64::from(added), 1)
                    .map_err(|error| format!("{error} (with the turns before it)"))?;
                (number, self.follow(number, request))
            }
            None => (self.sessions.len(), self.begin(name, request)),
        };
        let Some(session) = self.sessions.get_mut(number) else { return Ok(()) };
        session.requests.push((self.read, request.input_tokens));
        let answered = request.output_tokens.max(1);
        session.tokens = request.input_tokens.saturating_add(answered);
        (session.newest, session.end) = (request.at, start + nominal_time(added, answered));
        Ok(())
    }

    /// Begins a session, which may be a fork. Returns when its first request starts if no other load delays
    /// its parent.
    ///
    /// A fork gets the arrival of its parent's newest request, so that the parent's next request is behind it
    /// in a stable sort by arrival.
    fn begin(&mut self, name: String, request: &mut TraceRequest) -> Duration {
        let number = self.sessions.len();
        let parent = request.parent.as_ref().and_then(|parent| self.numbers.get(parent)).copied();
        let mut start = request.at;
        request.delay = match parent.and_then(|parent| self.sessions.get_mut(parent)) {
            Some(parent) => {
                let delay = request.delay.unwrap_or_default();
                request.at = request.at.max(parent.newest);
                start = request.at.max(parent.end + delay);
                parent.forks.push(number);
                Some(delay)
            }
            None => None,
        };
        self.numbers.insert(name, number);
        self.sessions.push(Session::new(request.blocks.to_vec()));
        start
    }

    /// Sets the pause before a session's later request, and its arrival, which is returned.
    fn follow(&mut self, number: usize, request: &mut TraceRequest) -> Duration {
        let Some(session) = self.sessions.get_mut(number) else { return request.at };
        let (mut end, forks) = (session.end, std::mem::take(&mut session.forks));
        if request.join {
            let forks = forks.iter().filter_map(|fork| self.sessions.get(*fork));
            end = forks.map(|fork| fork.end).fold(end, Duration::max);
        }
        // A line without a `timestamp` has the time of a request that it waits for: it follows at once.
        let delay = request.delay.unwrap_or_else(|| request.at.saturating_sub(end));
        request.delay = Some(delay);
        request.at = request.at.max(end + delay);
        request.at
    }
}

/// Makes whole prompts of requests of which each has what its line has, in the order of the lines. Removes
/// the requests that cannot have such a prompt, and returns the problem of the first.
pub(super) fn accumulate(requests: &mut Vec<TraceRequest>, block_tokens: u32) -> Option<String> {
    let mut reader = Reader { block_tokens: block_tokens.max(1), ..Reader::default() };
    let mut first_problem = None;
    requests.retain_mut(|request| {
        let result = reader.add(request);
        let is_whole = result.is_ok();
        first_problem = first_problem.take().or(result.err());
        is_whole
    });
    reader.finish(requests);
    first_problem
}

impl Session {
    fn new(first_blocks: Vec<u64>) -> Self {
        let (requests, forks) = (Vec::with_capacity(1), Vec::new());
        Self { first_blocks, requests, tokens: 0, newest: Duration::ZERO, end: Duration::ZERO, forks }
    }
}

#[cfg(test)]
mod tests;
