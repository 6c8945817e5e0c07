//! Addresses of the names in the URLs of workers. The answer of a look-up is remembered: while no name server
//! answers, connections use the addresses of the last one. Open connections follow a name, too: one whose
//! peer is missing from its addresses for a while is not used again.

use std::{
    collections::{HashMap, VecDeque},
    fmt, io, mem,
    net::{IpAddr, SocketAddr, ToSocketAddrs as _},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

use crate::log_limit::LogLimit;

mod given;
mod peer;

pub use peer::Peer;

/// How long addresses are used without another look-up.
const FRESH_FOR: Duration = Duration::from_secs(2);
/// Time after which the addresses of a name that no longer exists are forgotten: another host may get them.
const MAX_AGE: Duration = Duration::from_mins(10);
/// How long a connection waits for a look-up when it has the addresses of an earlier one.
const MAX_WAIT: Duration = Duration::from_millis(250);
/// Maximum number of look-ups at a time, each on a thread. The rest wait in the order in which they came.
const MAX_AT_ONCE: usize = 32;
/// Maximum number of look-ups at a time of names whose last look-up was slow: their name server may be down,
/// and other names must not wait for it.
const MAX_SLOW_AT_ONCE: usize = MAX_AT_ONCE / 2;
/// Time from which on a look-up is slow.
const SLOW: Duration = Duration::from_secs(1);
/// Maximum number of names that are remembered.
const MAX_NAMES: usize = 8_192;
/// Maximum number of addresses of a name that are remembered.
const MAX_ADDRESSES: usize = 256;
/// How long look-ups must lack an address until connections to it are closed: name servers may give a part of
/// the addresses in turn.
const STAY: Duration = Duration::from_mins(1);
/// Maximum number of addresses of a name that stay although the last look-up lacks them.
const MAX_MISSING: usize = 1_024;
/// Generation of a name that was forgotten.
const FORGOTTEN: u64 = u64::MAX;
/// Maximum number of addresses of a name that are tried.
pub(crate) const MAX_TRIED: usize = 8;
/// Problem of a name whose look-up found nothing.
const NO_ADDRESS: &str = "it has no address";
/// Shortest time between two log lines about names that cannot be resolved.
const LOG_INTERVAL: Duration = Duration::from_mins(1);

/// Addresses of a name, in the order in which the first of them are tried. Their port is 0.
type Addresses = Arc<[SocketAddr]>;
type Answer = Result<Addresses, Arc<str>>;
type LookUp = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// Looks names up as the system does (`/etc/hosts`, `nsswitch.conf`, DNS), unless a source of workers gives
/// their addresses, and remembers the answers. Clones share them.
#[derive(Clone)]
pub struct Resolver(Arc<Shared>);

/// A name without an address.
#[derive(Debug, thiserror::Error)]
#[error("the name `{name}` cannot be resolved: {problem}")]
pub(crate) struct Unresolved {
    name: String,
    problem: Arc<str>,
}

struct Shared {
    look_up: Box<LookUp>,
    stay: Duration,
    names: Mutex<Names>,
    lines: LogLimit,
}

#[derive(Default)]
struct Names {
    known: HashMap<Arc<str>, Name>,
    /// Addresses that sources of workers give.
    given: HashMap<String, Vec<IpAddr>>,
    waiting: Queue,
    /// Names that wait and whose last look-up was slow.
    waiting_slow: Queue,
    /// Number of threads that look names up; of these, those with a name whose last look-up was slow.
    threads: usize,
    slow_threads: usize,
}

type Queue = VecDeque<Arc<str>>;

struct Name {
    /// The last good answer; empty before the first.
    addresses: Addresses,
    /// Addresses that the last good answer lacks, and since when.
    missing: HashMap<IpAddr, Instant>,
    /// Number of times that addresses were dropped, or [`FORGOTTEN`].
    generation: Arc<AtomicU64>,
    /// When the last look-up ended.
    looked_up: Option<Instant>,
    /// When the last look-up succeeded.
    resolved: Option<Instant>,
    used: Instant,
    is_slow: bool,
    pending: Option<Pending>,
}

/// A look-up that waits or runs.
struct Pending {
    since: Instant,
    answer: watch::Sender<Option<Answer>>,
}

/// A look-up as a connection waits for it.
struct Waiting {
    since: Instant,
    answer: watch::Receiver<Option<Answer>>,
}

impl Default for Resolver {
    fn default() -> Self {
        Self::new(|name| Ok((name, 0).to_socket_addrs()?.collect()))
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolver").finish_non_exhaustive()
    }
}

impl Resolver {
    /// Returns a resolver that looks names up with `look_up`, which may block.
    pub fn new(look_up: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static) -> Self {
        Self::with_stay(STAY, look_up)
    }

    /// Returns such a resolver that lets connections stay for `stay` while look-ups lack their peers.
    pub fn with_stay(
        stay: Duration,
        look_up: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Self {
        let lines = LogLimit::new(LOG_INTERVAL);
        Self(Arc::new(Shared { look_up: Box::new(look_up), stay, names: Mutex::default(), lines }))
    }

    /// Returns the addresses of `host:port`. An IP address is not looked up.
    ///
    /// # Errors
    /// It is not of this form, or the name was never resolved and cannot be now.
    pub async fn addresses(&self, authority: &str) -> io::Result<Vec<SocketAddr>> {
        if let Ok(address) = authority.parse() {
            return Ok(vec![address]);
        }
        let parts = authority.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
        let (host, port) =
            parts.ok_or_else(|| io::Error::other("the address is not of the form host:port"))?;
        let addresses = self.resolve(host).await.map_err(io::Error::other)?;
        let with_port = addresses.iter().take(MAX_TRIED).map(|address| {
            let mut address = *address;
            address.set_port(port);
            address
        });
        Ok(with_port.collect())
    }

    /// Returns the addresses of a name: those of a look-up, or the last ones if that fails or takes long.
    ///
    /// # Errors
    /// The name was never resolved and cannot be now.
    pub(crate) async fn resolve(&self, name: &str) -> Result<Addresses, Unresolved> {
        let (last, pending) = self.last_addresses(name);
        let Some(Waiting { since, mut answer }) = pending else { return Ok(last) };
        let answered =
            async { answer.wait_for(Option::is_some).await.ok().and_then(|answer| answer.clone()) };
        let answer = if last.is_empty() {
            answered.await
        } else {
            timeout_at(since + MAX_WAIT, answered).await.ok().flatten()
        };
        match answer {
            Some(Ok(addresses)) => Ok(addresses),
            _ if !last.is_empty() => Ok(last),
            Some(Err(problem)) => Err(Unresolved { name: name.to_owned(), problem }),
            None => Err(Unresolved { name: name.to_owned(), problem: "the look-up ended".into() }),
        }
    }

    /// Returns the addresses of the last look-up that succeeded, and the look-up that runs or was started now
    /// unless they are fresh.
    fn last_addresses(&self, name: &str) -> (Addresses, Option<Waiting>) {
        let now = Instant::now();
        let mut names = self.0.names.lock();
        if !names.known.contains_key(name) {
            names.make_room();
        }
        let Names { known, waiting, waiting_slow, .. } = &mut *names;
        let name: Arc<str> = name.into();
        let found = known.entry(name.clone()).or_insert_with(|| Name::new(now));
        found.used = now;
        let last = found.addresses.clone();
        let is_fresh = found.looked_up.is_some_and(|at| now.duration_since(at) < FRESH_FOR);
        if is_fresh && !last.is_empty() {
            return (last, None);
        }
        let is_new = found.pending.is_none();
        let pending =
            found.pending.get_or_insert_with(|| Pending { since: now, answer: watch::Sender::default() });
        let pending = Waiting { since: pending.since, answer: pending.answer.subscribe() };
        if is_new {
            if found.is_slow { waiting_slow } else { waiting }.push_back(name);
            let starts = names.may_start();
            drop(names);
            if starts {
                self.start();
            }
        }
        (last, Some(pending))
    }

    /// Starts a thread, which is counted already.
    fn start(&self) {
        let resolver = self.clone();
        let thread = thread::Builder::new().name("pointsman-names".to_owned());
        if let Err(error) = thread.spawn(move || resolver.look_up_all()) {
            let mut names = self.0.names.lock();
            names.threads -= 1;
            // The others go on with what waits.
            if names.threads == 0 {
                let problem: Arc<str> = format!("no thread can be started: {error}").into();
                let waiting = mem::take(&mut names.waiting).into_iter();
                for name in waiting.chain(mem::take(&mut names.waiting_slow)) {
                    names.ended(&name, Duration::ZERO, Err(problem.clone()), self.0.stay);
                }
            }
        }
    }

    /// Looks up the names that wait, until none does that this thread may take.
    fn look_up_all(&self) {
        loop {
            let mut names = self.0.names.lock();
            let Some((name, is_slow)) = names.next() else {
                names.threads -= 1;
                return;
            };
            let given = names.given(&name);
            drop(names);
            let (started, is_given) = (Instant::now(), given.is_some());
            let answer = match given.map_or_else(|| (self.0.look_up)(&name), Ok) {
                Ok(addresses) if addresses.is_empty() => Err(NO_ADDRESS.into()),
                Ok(addresses) => Ok(addresses.into_iter().take(MAX_ADDRESSES).collect()),
                Err(error) => Err(Arc::from(error.to_string())),
            };
            let problem = answer.as_ref().err().cloned();
            let mut names = self.0.names.lock();
            names.slow_threads -= usize::from(is_slow);
            if names.given.contains_key(&*name) != is_given {
                names.waiting.push_back(name);
                continue;
            }
            let uses_last = names.ended(&name, started.elapsed(), answer, self.0.stay);
            drop(names);
            if let Some(problem) = problem
                && let Some(suppressed) = self.0.lines.due()
            {
                tracing::warn!(name = &*name, %problem, uses_last, suppressed, "name of a worker not resolved");
            }
        }
    }
}

impl Name {
    fn new(now: Instant) -> Self {
        Self {
            addresses: Arc::new([]),
            missing: HashMap::new(),
            generation: Arc::default(),
            looked_up: None,
            resolved: None,
            used: now,
            is_slow: false,
            pending: None,
        }
    }

    fn forget(&mut self) {
        self.addresses = Arc::new([]);
        self.missing.clear();
    }

    /// Takes a good answer.
    fn resolved(&mut self, addresses: Addresses, now: Instant, stay: Duration) {
        let before = mem::replace(&mut self.addresses, addresses);
        for lost in before.iter().filter(|one| !self.addresses.contains(one)) {
            self.missing.insert(lost.ip(), now);
        }
        for found in self.addresses.iter() {
            self.missing.remove(&found.ip());
        }
        let count = self.missing.len();
        self.missing.retain(|_, since| now.duration_since(*since) < stay);
        while self.missing.len() > MAX_MISSING {
            let oldest = self.missing.values().min().copied();
            self.missing.retain(|_, since| Some(*since) != oldest);
        }
        if before.is_empty() || self.missing.len() < count {
            self.generation.fetch_add(1, Ordering::Release);
        }
        self.resolved = Some(now);
    }
}

impl Names {
    /// Forgets the name that was not used for the longest time, if there are too many.
    fn make_room(&mut self) {
        if self.known.len() < MAX_NAMES {
            return;
        }
        let idle = self.known.iter().filter(|(_, name)| name.pending.is_none());
        if let Some(oldest) = idle.min_by_key(|(_, name)| name.used).map(|(name, _)| name.clone()) {
            // Its connections ask from now on whether it is known again.
            if let Some(forgotten) = self.known.remove(&oldest) {
                forgotten.generation.store(FORGOTTEN, Ordering::Release);
            }
        }
    }

    /// Returns whether another thread may be started, and counts it.
    fn may_start(&mut self) -> bool {
        let has_work = !self.waiting.is_empty() || self.slow_threads < MAX_SLOW_AT_ONCE;
        let starts = has_work && self.threads < MAX_AT_ONCE;
        self.threads += usize::from(starts);
        starts
    }

    /// Returns the name to look up next, and whether it counts as slow.
    fn next(&mut self) -> Option<(Arc<str>, bool)> {
        if let Some(name) = self.waiting.pop_front() {
            return Some((name, false));
        }
        if self.slow_threads == MAX_SLOW_AT_ONCE {
            return None;
        }
        let name = self.waiting_slow.pop_front()?;
        self.slow_threads += 1;
        Some((name, true))
    }

    /// Notes the answer of a look-up, and gives it to all that wait for it. Returns whether the addresses of
    /// an earlier one are used.
    fn ended(&mut self, name: &str, took: Duration, answer: Answer, stay: Duration) -> bool {
        // A name with a look-up is not forgotten.
        let Some(name) = self.known.get_mut(name) else { return false };
        let now = Instant::now();
        name.looked_up = Some(now);
        name.is_slow = took >= SLOW;
        match &answer {
            Ok(addresses) => name.resolved(addresses.clone(), now, stay),
            Err(problem) => {
                let is_old = name.resolved.is_some_and(|at| now.duration_since(at) >= MAX_AGE);
                if is_old && says_no_such_name(problem) {
                    name.forget();
                }
            }
        }
        if let Some(pending) = name.pending.take() {
            pending.answer.send_replace(Some(answer));
        }
        !name.addresses.is_empty()
    }
}

/// Returns whether a name server answered that a name has no address. The standard library has the text of
/// the C library only: of glibc, and of musl.
fn says_no_such_name(problem: &str) -> bool {
    [NO_ADDRESS, "not known", "No address associated", "does not resolve"]
        .iter()
        .any(|text| problem.contains(text))
}

#[cfg(test)]
mod tests;
