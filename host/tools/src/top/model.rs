//! Last state that the gateway reported, and the operator's choice of what to show.

use std::{cmp::Ordering, collections::HashMap};

use pointsman_admin_cli::{
    api::{Live, Slot, Worker, Workers},
    worker_name::{address, is_hash},
};
use serde::Deserialize;

use super::events::Event;

/// Last state that the gateway reported.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub(super) url: String,
    pub(super) version: String,
    pub(super) may_change: bool,
    pub(super) workers: Vec<Worker>,
    pub(super) slots: Vec<Slot>,
    pub(super) live: Live,
    /// Whether the gateway says that it cannot serve.
    pub(super) not_ready: bool,
    /// What is wrong with the gateway.
    pub(super) reasons: Vec<String>,
    /// Prompt tokens of the newest decisions by worker: those in its cache, and all.
    pub(super) prefix_hits: HashMap<u64, (f64, f64)>,
    /// When the connection was lost, and why.
    pub(super) lost: Option<(String, String)>,
    /// How the last command ended.
    pub(super) message: Option<String>,
    /// Kinds of events that arrived.
    pub(super) seen: [bool; 5],
}

#[derive(Deserialize)]
struct Hello {
    version: String,
    may_change: bool,
}

#[derive(Deserialize)]
struct Slots {
    slots: Vec<Slot>,
}

/// The state of the gateway in the event `stats`.
#[derive(Deserialize)]
struct Readiness {
    ready: Option<bool>,
    #[serde(default)]
    reasons: Vec<String>,
}

#[derive(Deserialize)]
struct Newest {
    decisions: Vec<Brief>,
}

/// The part of a decision that counts for prefix hits.
#[derive(Deserialize)]
struct Brief {
    leg: String,
    choice: Option<Choice>,
    outcome: Option<Outcome>,
}

#[derive(Deserialize)]
struct Choice {
    worker: u64,
}

#[derive(Deserialize)]
struct Outcome {
    prompt_tokens: u32,
    cached_tokens: Cached,
}

#[derive(Deserialize)]
struct Cached {
    reported: Option<u32>,
}

impl Model {
    /// Takes an event. Unknown kinds are ignored; a known kind of another shape is an error.
    pub(super) fn apply(&mut self, event: &Event) -> serde_json::Result<()> {
        let place = match event.kind.as_str() {
            "hello" => {
                let hello: Hello = serde_json::from_str(&event.data)?;
                (self.version, self.may_change) = (hello.version, hello.may_change);
                0
            }
            "workers" => {
                self.workers = serde_json::from_str::<Workers>(&event.data)?.workers;
                1
            }
            "slots" => {
                self.slots = serde_json::from_str::<Slots>(&event.data)?.slots;
                2
            }
            "stats" => {
                self.live = serde_json::from_str(&event.data)?;
                let Readiness { ready, reasons } = serde_json::from_str(&event.data)?;
                (self.not_ready, self.reasons) = (ready == Some(false), reasons);
                3
            }
            "decisions" => {
                self.prefix_hits = hits(&serde_json::from_str::<Newest>(&event.data)?.decisions);
                4
            }
            _ => return Ok(()),
        };
        if let Some(seen) = self.seen.get_mut(place) {
            *seen = true;
        }
        Ok(())
    }

    /// Returns whether every kind of event arrived that a frame shows.
    pub(super) fn is_complete(&self) -> bool {
        self.seen.iter().all(|seen| *seen)
    }
}

/// Counts the prompt tokens that were in the worker's cache, as its engine reports. The decode leg's prompt
/// comes by the handoff.
fn hits(decisions: &[Brief]) -> HashMap<u64, (f64, f64)> {
    let mut hits: HashMap<u64, (f64, f64)> = HashMap::new();
    for one in decisions.iter().filter(|one| one.leg != "decode") {
        let (Some(choice), Some(outcome)) = (&one.choice, &one.outcome) else { continue };
        let Some(reported) = outcome.cached_tokens.reported else { continue };
        let (cached, all) = hits.entry(choice.worker).or_default();
        // Routing may have estimated the prompt as shorter.
        *cached += f64::from(reported.min(outcome.prompt_tokens));
        *all += f64::from(outcome.prompt_tokens);
    }
    hits
}

/// Order of the workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Sort {
    #[default]
    Name,
    Active,
    Queue,
    KvUsage,
    Ttft,
}

impl Sort {
    /// Returns the next order.
    pub(super) fn next(self) -> Self {
        match self {
            Self::Name => Self::Active,
            Self::Active => Self::Queue,
            Self::Queue => Self::KvUsage,
            Self::KvUsage => Self::Ttft,
            Self::Ttft => Self::Name,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Active => "active",
            Self::Queue => "queue",
            Self::KvUsage => "KV",
            Self::Ttft => "TTFT",
        }
    }

    /// Largest first, except for names.
    fn compare(self, a: &Worker, b: &Worker) -> Ordering {
        let queue = |worker: &Worker| worker.engine_load.as_ref().and_then(|load| load.waiting).unwrap_or(0);
        let usage =
            |worker: &Worker| worker.engine_load.as_ref().and_then(|load| load.kv_usage).unwrap_or(0.0);
        let ttft = |worker: &Worker| worker.ttft_ms().unwrap_or(0.0);
        let order = match self {
            Self::Name => Ordering::Equal,
            Self::Active => b.active().cmp(&a.active()),
            Self::Queue => queue(b).cmp(&queue(a)),
            Self::KvUsage => usage(b).total_cmp(&usage(a)),
            Self::Ttft => ttft(b).total_cmp(&ttft(a)),
        };
        order.then_with(|| name_order(a).cmp(&name_order(b)))
    }
}

/// A worker is shown with its id, or only with its address if the id is a hash.
fn name_order(worker: &Worker) -> (bool, u64, &str) {
    let is_hash = is_hash(&worker.id.to_string());
    (is_hash, if is_hash { 0 } else { worker.id }, address(worker))
}

/// A change that waits for the operator's `y`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) worker: u64,
    pub(super) undo: bool,
}

/// The operator's choice of what to show.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    pub(super) sort: Sort,
    pub(super) filter: String,
    /// Keys go to the filter.
    pub(super) typing: bool,
    pub(super) help: bool,
    pub(super) selected: usize,
    pub(super) confirm: Option<Change>,
    /// Model that is shown instead of the newest one.
    pub(super) paused: Option<Box<Model>>,
}

impl View {
    /// The workers that match the filter, in order.
    pub(super) fn rows<'a>(&self, model: &'a Model) -> Vec<&'a Worker> {
        let wanted = self.filter.to_lowercase();
        let matches = |worker: &&Worker| {
            let text = format!(
                "{} {} {} {} {} {}",
                worker.id,
                worker.spec.role,
                worker.spec.engine,
                worker.state(),
                worker.spec.url,
                worker.models.join(" ")
            );
            text.to_lowercase().contains(&wanted)
        };
        let mut rows: Vec<&Worker> = model.workers.iter().filter(matches).collect();
        rows.sort_by(|a, b| self.sort.compare(a, b));
        rows
    }
}
