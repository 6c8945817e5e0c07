//! The answer of a decode override, and what the built-in `predicted-disagg` compared, by its own code.

use serde_json::Value;

use super::{Addresses, named};
use crate::{
    api::{Decision, Facts, Plan},
    text::counted,
};

#[path = "../../../../policies/predicted-disagg/src/rule.rs"]
mod rule;

use rule::{Load, Obstacle, Prompt, Worker, best};

/// Returns what was answered, and about which worker the question was.
pub(super) fn answer(plan: &Plan, addresses: Addresses<'_>) -> String {
    let means = match &*plan.word {
        "remote" => ": prefill and decode on two workers",
        "local" => ": prefill and decode on one worker",
        "shed" => ": the request is refused",
        _ => "",
    };
    let Some((worker, rank)) = plan.decode else { return format!("The answer was {}{means}.", plan.word) };
    let about = named(worker, rank, addresses);
    let about = match &*plan.word {
        "local" => format!(", with {about} for decode"),
        "remote" => {
            format!(". The question was about {about} for decode; the decode leg has a decision of its own")
        }
        _ => format!(". The question was about {about} for decode"),
    };
    format!("The answer was {}{means}{about}.", plan.word)
}

/// Returns why a prompt is prefilled where it is, when the policy with this digest decided that.
pub(super) fn reason(one: &Decision, addresses: Addresses<'_>, digest: &str) -> Option<String> {
    let plan = one.plan.as_ref().filter(|_| one.decider.by == "policy")?;
    let stage = one.stages.iter().find(|stage| stage.digest.as_deref() == Some(digest))?;
    let prompt = Prompt::of(&stage.request)?;
    let (decode, load) = (Worker::of(&stage.decode, 0)?, Load::of(&stage.decode));
    let own = decode.own(prompt);
    if plan.word == "remote"
        && let Some(obstacle) = load.obstacle(prompt, own)
    {
        return Some(format!("Remote, because {}.", why(obstacle, prompt)));
    }
    let prefill = (0..one.candidates.len()).map(|row| Worker::of(&stage.workers, row));
    let prefill: Vec<Worker> = prefill.collect::<Option<_>>()?;
    let (row, computes) = best(prompt, prefill.iter().copied())?;
    let (other, (worker, rank)) = (prefill.get(row)?, one.candidates.get(row)?);
    let (word, saves) = match &*plan.word {
        "remote" => ("Remote", "too little"),
        "local" => ("Local", "enough"),
        _ => return None,
    };
    Some(format!(
        "{word}, because the decode worker saves {saves}: until it has the prompt it computes {} ({} waiting, \
         {own} not cached) and delays {}; {}, the best for prefill, computes {computes} ({} waiting, {} not \
         cached). The settings margin-tokens and delayed-weight say how much is enough.",
        counted(decode.until_computed(prompt) as u64, "token"),
        decode.waiting,
        counted(load.requests().into(), "request"),
        named(*worker, *rank, addresses),
        other.waiting,
        other.own(prompt),
    ))
}

/// Says what forbids a local prefill.
fn why(obstacle: Obstacle, prompt: Prompt) -> String {
    let target = f64::from(prompt.itl_target) / 1e3;
    match obstacle {
        Obstacle::CannotPrefill => "the decode worker cannot prefill".to_owned(),
        Obstacle::Full(usage) => {
            format!("the engine of the decode worker uses {:.0} % of its KV cache", usage * 100.0)
        }
        Obstacle::MissesTarget(takes) => format!(
            "the decode worker would compute for {:.1} ms, longer than the ITL target of {target} ms",
            takes / 1e3
        ),
        Obstacle::UnknownSpeed => {
            format!(
                "the request has an ITL target ({target} ms), and the decode worker's speed is not measured"
            )
        }
    }
}

impl Prompt {
    fn of(request: &Facts) -> Option<Self> {
        let number = |name| request.get(name).and_then(Value::as_f64).map(|number| number as u32);
        Some(Self {
            tokens: number("prompt-tokens")?,
            block: number("block-size")?.max(1),
            itl_target: number("itl-target-us").unwrap_or_default(),
        })
    }
}

impl Worker {
    fn of(facts: &Facts, row: usize) -> Option<Self> {
        let count = |name| number(facts, name, row).map(|number| number as u32);
        Some(Self { waiting: count("active-prefill-tokens")?, cached: count("cached-blocks-device")? })
    }
}

impl Load {
    /// Returns the load of the decode worker. Figures without an age are old.
    fn of(decode: &Facts) -> Self {
        let given = |name| number(decode, name, 0);
        let count = |name| given(name).unwrap_or_default() as u32;
        Self {
            can_prefill: given("local-prefill") == Some(1.0),
            booked: count("active-requests"),
            running: count("engine-running"),
            queue: count("engine-queue"),
            kv_usage: given("kv-usage").unwrap_or_default() as f32,
            age: given("load-age-ms").map_or(u32::MAX, |age| age as u32),
            prefill_time: count("prefill-us-per-ktoken"),
        }
    }
}

/// Returns a fact of a worker.
fn number(facts: &Facts, name: &str, row: usize) -> Option<f64> {
    facts.get(name)?.get(row)?.as_f64()
}
