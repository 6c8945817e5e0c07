//! Clients: requests at a fixed rate or of a fixed number of clients, each judged to its last byte.

use std::{
    future::Future,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::{StreamExt as _, stream};
use parking_lot::Mutex;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use self::request::Asked;
use crate::{
    client::Client,
    stats::{quantile, sorted},
};

mod request;

/// Requests that one load has open at most. More means that answers do not come.
const MAX_OPEN: usize = 2_000;
/// Problems that are kept for a person to read.
const SHOWN: usize = 5;

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Arrivals {
    /// So many a second, whatever becomes of them (open loop).
    Rate(f64),
    /// So many a second by so many clients. A slow answer delays the requests of its own client only.
    Paced(f64, u32),
    /// By so many clients, each of which sends its next request after an answer (closed loop).
    Clients(usize),
}

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Whole,
    Stream,
    /// A client that disconnects after a random time below this number of milliseconds.
    Leaves {
        stream: bool,
        within_ms: u64,
    },
    /// A client that disconnects when the head of its answer came.
    LeavesAtHead,
    /// A body that is not JSON: one valid error is right.
    Malformed,
}

/// The text of a prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Prompt {
    Same,
    /// So many prompts in turn.
    Distinct(u64),
    /// All differ. Sixty-four words are those of all, and a hundred prompts share an end.
    Conversation,
}

/// Requests of one kind of client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Name, for tables.
    pub(crate) name: &'static str,
    pub(crate) arrivals: Arrivals,
    /// Kinds in turn.
    pub(crate) kinds: &'static [Kind],
    pub(crate) prompt: Prompt,
    /// Least and most output tokens of a request.
    pub(crate) tokens: (u32, u32),
    /// A header of all requests; the name is empty for none.
    pub(crate) header: (&'static str, &'static str),
    /// Number of requests after which the load ends.
    pub(crate) requests: u64,
    /// Number of requests after which the load begins with new connections.
    pub(crate) renew: u64,
}

/// Small requests of well-behaved clients.
pub(crate) const STEADY: Load = Load {
    name: "steady",
    arrivals: Arrivals::Paced(50.0, 10),
    kinds: &[Kind::Whole],
    prompt: Prompt::Same,
    tokens: (1, 1),
    header: ("", ""),
    requests: u64::MAX,
    renew: u64::MAX,
};

/// How a request ended for its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// A whole answer or a complete stream.
    Complete,
    OneError,
    /// A malformed request was refused with one valid error.
    Refused,
    /// The client disconnected, with the `id` of an answer of which a token had come, and the time on the
    /// machine's monotonic clock, nanoseconds.
    Left(Option<(String, u64)>),
    /// Neither a whole answer nor one valid error.
    Neither,
}

/// One request and its end.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) load: &'static str,
    /// Number of the process that was asked.
    pub(crate) instance: u32,
    pub(crate) due: Instant,
    /// When it was sent: later than `due` when this process was busy.
    pub(crate) sent: Instant,
    pub(crate) ended: Instant,
    /// From sending the request to the first token.
    pub(crate) ttft: Option<Duration>,
    /// Output tokens that were asked for.
    pub(crate) tokens: u32,
    /// Status of the answer; 0 without an answer.
    pub(crate) status: u16,
    pub(crate) end: End,
}

/// Where requests are sent.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) address: String,
    /// Authority of the listener's certificate; `None`: it has no TLS.
    pub(crate) authority: Option<PathBuf>,
    /// Number of the process that listens.
    pub(crate) instance: u32,
}

/// What requests recorded.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    answers: Mutex<Vec<Answer>>,
    problems: Mutex<Vec<String>>,
    sent: AtomicU64,
}

/// A running load.
pub(crate) struct Running {
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Answer {
    /// From when the request was due to its end.
    pub(crate) fn took(&self) -> Duration {
        self.ended - self.due
    }

    /// Whether the request did not get what it asked for.
    pub(crate) fn failed(&self) -> bool {
        matches!(self.end, End::OneError | End::Neither)
    }
}

impl Target {
    /// A client with connections of its own.
    pub(crate) fn client(&self) -> anyhow::Result<Client> {
        match &self.authority {
            Some(authority) => Client::secure(&self.address, authority),
            None => Ok(Client::new(&self.address)),
        }
    }
}

impl Recorder {
    /// Removes and returns what was recorded since the last call.
    pub(crate) fn take(&self) -> Vec<Answer> {
        std::mem::take(&mut *self.answers.lock())
    }

    /// Number of requests sent so far.
    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(Relaxed)
    }

    /// The first problems, for a person to read.
    pub(crate) fn problems(&self) -> Vec<String> {
        self.problems.lock().clone()
    }

    fn problem(&self, text: String) {
        let mut problems = self.problems.lock();
        if problems.len() < SHOWN {
            problems.push(text);
        }
    }

    /// Starts a load.
    pub(crate) fn start(self: &Arc<Self>, load: Load, target: &Target) -> anyhow::Result<Running> {
        let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
        let turns = Arc::new(AtomicU64::new(0));
        let client = target.client()?;
        let (clients, pace) = match load.arrivals {
            Arrivals::Rate(rate) => {
                tasks.spawn(at_rate(
                    Source { recorder: self.clone(), load, target: target.clone() },
                    client,
                    rate,
                    stop.clone(),
                ));
                return Ok(Running { stop, tasks });
            }
            Arrivals::Paced(rate, clients) => {
                (clients as usize, Some((Instant::now(), Duration::from_secs_f64(1.0 / rate), clients)))
            }
            Arrivals::Clients(clients) => (clients, None),
        };
        for place in 0..u32::try_from(clients)? {
            let pace = pace.map(|(start, gap, clients)| (start + gap * place, gap * clients));
            let source = Source { recorder: self.clone(), load, target: target.clone() };
            tasks.spawn(in_turn(source, client.clone(), turns.clone(), pace, stop.clone()));
        }
        Ok(Running { stop, tasks })
    }
}

impl Running {
    /// Whether every request of the load was answered.
    pub(crate) fn is_over(&mut self) -> bool {
        while self.tasks.try_join_next().is_some() {}
        self.tasks.is_empty()
    }

    /// Ends the load, and waits for the open requests.
    pub(crate) async fn stop(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

/// What a task of clients needs.
#[derive(Clone)]
struct Source {
    recorder: Arc<Recorder>,
    load: Load,
    target: Target,
}

async fn at_rate(source: Source, mut client: Client, rate: f64, stop: CancellationToken) {
    let Source { recorder, load, target } = &source;
    let (began, mut open) = (Instant::now(), JoinSet::new());
    for turn in 0..load.requests {
        let due = began + Duration::from_secs_f64(turn as f64 / rate);
        tokio::select! {
            () = stop.cancelled() => break,
            () = sleep_until(due) => {}
        }
        while open.try_join_next().is_some() {}
        if turn % load.renew == load.renew - 1 {
            match target.client() {
                Ok(new) => client = new,
                Err(error) => recorder.problem(format!("{error:#}")),
            }
        }
        if open.len() >= MAX_OPEN {
            recorder.problem(format!("{MAX_OPEN} requests are open"));
            recorder.note(load, target, due, Asked::default(), End::Neither, 0);
            continue;
        }
        let (source, client) = (source.clone(), client.clone());
        open.spawn(
            async move { source.recorder.one(&source.load, &source.target, &client, turn, due).await },
        );
    }
    open.join_all().await;
}

/// Sends one request after the other. `pace`: when the first one is due, and the time between two.
async fn in_turn(
    source: Source,
    client: Client,
    turns: Arc<AtomicU64>,
    mut pace: Option<(Instant, Duration)>,
    stop: CancellationToken,
) {
    let Source { recorder, load, target } = &source;
    while !stop.is_cancelled() {
        let mut due = Instant::now();
        if let Some((at, gap)) = &mut pace {
            due = *at;
            *at += *gap;
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep_until(due) => {}
            }
        }
        let turn = turns.fetch_add(1, Relaxed);
        if turn >= load.requests {
            return;
        }
        recorder.one(load, target, &client, turn, due).await;
    }
}

/// A quantile of the times from due to end, milliseconds; NaN when there is no answer.
pub(crate) fn latency_ms<'a>(answers: impl Iterator<Item = &'a Answer>, share: f64) -> f64 {
    quantile(&sorted(answers.map(|answer| answer.took().as_secs_f64() * 1e3).collect()), share)
}

/// Runs `work` for each turn below `count`, at most `clients` at once (closed loop).
pub(crate) async fn closed_loop<F: Future<Output = ()>>(
    count: u64,
    clients: usize,
    work: impl FnMut(u64) -> F,
) {
    stream::iter(0..count).map(work).buffer_unordered(clients).for_each(|()| std::future::ready(())).await;
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, sync::Arc, time::Duration};

    use tokio::time::Instant;

    use super::{Arrivals, End, Load, Recorder, STEADY, Target, closed_loop};

    #[tokio::test(start_paused = true)]
    async fn a_closed_loop_runs_every_turn_with_so_many_at_once() {
        let (turns, now, most) = (Cell::new(0), Cell::new(0), Cell::new(0));
        let (turns, now, most) = (&turns, &now, &most);
        let started = Instant::now();
        closed_loop(100, 10, |turn| async move {
            now.set(now.get() + 1);
            most.set(most.get().max(now.get()));
            tokio::time::sleep(Duration::from_secs(1)).await;
            now.set(now.get() - 1);
            turns.set(turns.get() + turn);
        })
        .await;
        assert_eq!((turns.get(), most.get()), (4_950, 10));
        assert_eq!(started.elapsed().as_secs(), 10);
    }

    #[tokio::test]
    async fn requests_that_cannot_be_sent_are_failures_with_every_kind_of_arrivals() {
        let address = format!("127.0.0.1:{}", crate::fleet::free_port().unwrap());
        for arrivals in [Arrivals::Rate(1_000.0), Arrivals::Paced(1_000.0, 4), Arrivals::Clients(4)] {
            let recorder = Arc::<Recorder>::default();
            let target = Target { address: address.clone(), authority: None, instance: 1 };
            let mut running = recorder.start(Load { arrivals, requests: 8, ..STEADY }, &target).unwrap();
            while !running.is_over() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let answers = recorder.take();
            assert_eq!((answers.len(), recorder.sent()), (8, 8), "{arrivals:?}");
            assert!(answers.iter().all(|answer| answer.end == End::Neither), "{answers:?}");
            assert!(recorder.problems()[0].contains("could not send a request"));
        }
    }
}
