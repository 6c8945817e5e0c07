//! Clients whose requests and answers are recorded. Each answer is judged to its last byte.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use serde::Deserialize;
use tokio::time::Instant;

use super::{Arrivals, MAX_OPEN, Running, Turn, start};
use crate::{
    client::{Client, Received},
    stats::{quantile, sorted},
};

mod request;

/// Problems that are kept for a person to read.
const SHOWN: usize = 5;

/// A kind of request.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum Kind {
    /// A client that reads a whole answer.
    Whole,
    /// A client that reads a stream to its end.
    Stream,
    /// A client that disconnects after a random time below this number of milliseconds.
    Leaves {
        /// Whether it asks for a stream.
        stream: bool,
        /// Bound of the time, milliseconds.
        within_ms: u64,
    },
    /// A client that disconnects when the head of its answer arrived.
    LeavesAtHead,
    /// A body that is not JSON: one valid error is right.
    Malformed,
}

/// The text of a prompt.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Prompt {
    /// All are equal.
    Same,
    /// So many prompts in turn.
    Distinct(u64),
    /// All differ. Sixty-four words are those of all, and a hundred prompts share an end.
    Conversation,
}

/// Requests of one kind of client.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Load {
    /// Name, for tables.
    pub name: Arc<str>,
    /// When requests are sent.
    pub arrivals: Arrivals,
    /// Kinds in turn.
    pub kinds: Vec<Kind>,
    /// Text of the prompts.
    pub prompt: Prompt,
    /// Least and most output tokens of a request.
    pub tokens: (u32, u32),
    /// A header of all requests; the name is empty for none.
    pub header: (String, String),
    /// Number of requests after which the load ends.
    pub requests: u64,
    /// Number of requests after which the load begins with new connections.
    pub renew: u64,
}

impl Default for Load {
    /// Small requests of well-behaved clients.
    fn default() -> Self {
        Self {
            name: "steady".into(),
            arrivals: Arrivals::Paced(50.0, 10),
            kinds: vec![Kind::Whole],
            prompt: Prompt::Same,
            tokens: (1, 1),
            header: Default::default(),
            requests: u64::MAX,
            renew: u64::MAX,
        }
    }
}

/// How a request ended for its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// A whole answer or a complete stream.
    Complete,
    /// One valid error.
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
pub struct Answer {
    /// Name of the load.
    pub load: Arc<str>,
    /// Number of the process that was asked.
    pub instance: u32,
    /// When it was due.
    pub due: Instant,
    /// When it was sent: later than `due` when this process was busy.
    pub sent: Instant,
    /// When it ended.
    pub ended: Instant,
    /// From sending the request to the first token.
    pub ttft: Option<Duration>,
    /// Output tokens that were asked for.
    pub tokens: u32,
    /// Status of the answer; 0 without an answer.
    pub status: u16,
    /// How it ended.
    pub end: End,
}

/// Where requests are sent.
#[derive(Clone, Debug)]
pub struct Target {
    /// Address, `host:port`.
    pub address: String,
    /// Authority of the listener's certificate; `None`: it has no TLS.
    pub authority: Option<PathBuf>,
    /// Number of the process that listens.
    pub instance: u32,
}

/// What requests recorded.
#[derive(Debug, Default)]
pub struct Recorder {
    answers: Mutex<Vec<Answer>>,
    problems: Mutex<Vec<String>>,
    sent: AtomicU64,
}

impl Answer {
    /// From when the request was due to its end.
    pub fn took(&self) -> Duration {
        self.ended - self.due
    }

    /// Whether the request did not get what it asked for.
    pub fn failed(&self) -> bool {
        matches!(self.end, End::OneError | End::Neither)
    }
}

impl Target {
    /// Returns a client with connections of its own.
    ///
    /// # Errors
    /// The certificate of the authority cannot be read.
    pub fn client(&self) -> anyhow::Result<Client> {
        match &self.authority {
            Some(authority) => Client::secure(&self.address, authority),
            None => Ok(Client::new(&self.address)),
        }
    }
}

impl Recorder {
    /// Removes and returns what was recorded since the last call.
    pub fn take(&self) -> Vec<Answer> {
        std::mem::take(&mut *self.answers.lock())
    }

    /// Number of requests sent so far.
    pub fn sent(&self) -> u64 {
        self.sent.load(Relaxed)
    }

    /// The first problems, for a person to read.
    pub fn problems(&self) -> Vec<String> {
        self.problems.lock().clone()
    }

    fn problem(&self, text: String) {
        let mut problems = self.problems.lock();
        if problems.len() < SHOWN {
            problems.push(text);
        }
    }

    /// Starts a load.
    ///
    /// # Errors
    /// The certificate of the authority cannot be read.
    pub fn start(self: &Arc<Self>, load: Load, target: &Target) -> anyhow::Result<Running> {
        let (arrivals, requests) = (load.arrivals, load.requests);
        let source = Arc::new(Source {
            recorder: self.clone(),
            load,
            target: target.clone(),
            client: Mutex::new(target.client()?),
        });
        Ok(start(arrivals, requests, move |turn| source.clone().send(turn)))
    }
}

/// What the clients of a load share.
struct Source {
    recorder: Arc<Recorder>,
    load: Load,
    target: Target,
    client: Mutex<Client>,
}

impl Source {
    async fn send(self: Arc<Self>, turn: Turn) {
        let Self { recorder, load, target, .. } = &*self;
        if turn.number % load.renew == load.renew - 1 {
            match target.client() {
                Ok(new) => *self.client.lock() = new,
                Err(error) => recorder.problem(format!("{error:#}")),
            }
        }
        if turn.is_too_many {
            recorder.problem(format!("{MAX_OPEN} requests are open"));
            return recorder.note(load, target, turn.due, &Received::default(), End::Neither, 0);
        }
        let client = self.client.lock().clone();
        recorder.one(load, target, &client, turn.number, turn.due).await;
    }
}

/// A quantile of the times from due to end, milliseconds; NaN when there is no answer.
pub fn latency_ms<'a>(answers: impl Iterator<Item = &'a Answer>, share: f64) -> f64 {
    quantile(&sorted(answers.map(|answer| answer.took().as_secs_f64() * 1e3).collect()), share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_that_cannot_be_sent_are_failures_with_every_kind_of_arrivals() {
        let address = format!("127.0.0.1:{}", crate::fleet::free_port().unwrap());
        for arrivals in [Arrivals::Rate(1_000.0), Arrivals::Paced(1_000.0, 4), Arrivals::Clients(4)] {
            let recorder = Arc::<Recorder>::default();
            let target = Target { address: address.clone(), authority: None, instance: 1 };
            let mut running =
                recorder.start(Load { arrivals, requests: 8, ..Load::default() }, &target).unwrap();
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
