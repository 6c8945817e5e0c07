//! The answer of a decode override, and what the built-in `predicted-disagg` compared. Its `src/rule.rs` is
//! the rule; a test of the gateway runs the policy's cases through both.

use serde_json::Value;

use super::{Addresses, named};
use crate::{
    api::{Decision, Facts, Plan},
    text::counted,
};

/// Age from which it does not count an engine's figures, milliseconds.
const OLD_MS: f64 = 10_000.0;
/// Share of the KV cache in use from which it takes an engine for full. The policy and receipts have 32 bits.
const FULL: f64 = 0.9_f32 as f64;

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
    let decode = Row { facts: &stage.decode, row: 0 };
    let prompt = Prompt::of(&stage.request)?;
    let own = prompt.own(decode)?;
    if plan.word == "remote"
        && let Some(why) = forbids_local(decode, &prompt, own)
    {
        return Some(format!("Remote, because {why}."));
    }
    let prefill = (0..one.candidates.len()).filter_map(|row| {
        let row = Row { facts: &stage.workers, row };
        Some((row.number("active-prefill-tokens")?, prompt.own(row)?, one.candidates.get(row.row)?))
    });
    let (waiting, new, worker) = prefill.min_by(|a, b| (a.0 + a.1).total_cmp(&(b.0 + b.1)))?;
    let before = decode.number("active-prefill-tokens")?;
    let (word, saves) = match &*plan.word {
        "remote" => ("Remote", "too little"),
        "local" => ("Local", "enough"),
        _ => return None,
    };
    Some(format!(
        "{word}, because the decode worker saves {saves}: until it has the prompt it computes {} ({before} waiting, \
         {own} not cached) and delays {}; {}, the best for prefill, computes {} ({waiting} waiting, {new} not \
         cached). The settings margin-tokens and delayed-weight say how much is enough.",
        counted(whole(before + own), "token"),
        counted(whole(decode.requests()), "request"),
        named(worker.0, worker.1, addresses),
        whole(waiting + new),
    ))
}

/// Returns why a prompt is prefilled remotely, whatever is cheaper.
fn forbids_local(decode: Row<'_>, prompt: &Prompt, own: f64) -> Option<String> {
    let number = |name| decode.number(name).unwrap_or_default();
    if number("local-prefill") != 1.0 {
        return Some("the decode worker cannot prefill".to_owned());
    }
    let usage = number("kv-usage");
    if !decode.is_old() && usage >= FULL {
        return Some(format!("the engine of the decode worker uses {:.0} % of its KV cache", usage * 100.0));
    }
    let time = number("prefill-us-per-ktoken");
    let takes = own * time / 1e3;
    if prompt.itl_target <= 0.0 || decode.requests() <= 0.0 || (time > 0.0 && takes <= prompt.itl_target) {
        return None;
    }
    let target = prompt.itl_target / 1e3;
    Some(if time > 0.0 {
        format!(
            "the decode worker would compute for {:.1} ms, longer than the ITL target of {target} ms",
            takes / 1e3
        )
    } else {
        format!("the request has an ITL target ({target} ms), and the decode worker's speed is not measured")
    })
}

/// The prompt's facts.
struct Prompt {
    tokens: f64,
    block: f64,
    itl_target: f64,
}

impl Prompt {
    fn of(request: &Facts) -> Option<Self> {
        let number = |name| request.get(name).and_then(Value::as_f64);
        Some(Self {
            tokens: number("prompt-tokens")?,
            block: number("block-size")?.max(1.0),
            itl_target: number("itl-target-us").unwrap_or_default(),
        })
    }

    /// Tokens that a worker computes.
    fn own(&self, worker: Row<'_>) -> Option<f64> {
        let cached = worker.number("cached-blocks-device")? * self.block;
        Some((self.tokens - cached).max(1.0))
    }
}

/// The facts of one worker.
#[derive(Clone, Copy)]
struct Row<'a> {
    facts: &'a Facts,
    row: usize,
}

impl Row<'_> {
    fn number(self, name: &str) -> Option<f64> {
        self.facts.get(name)?.get(self.row)?.as_f64()
    }

    fn is_old(self) -> bool {
        self.number("load-age-ms").is_none_or(|age| age > OLD_MS)
    }

    fn requests(self) -> f64 {
        let number = |name| self.number(name).unwrap_or_default();
        let reported = if self.is_old() { 0.0 } else { number("engine-running") + number("engine-queue") };
        number("active-requests").max(reported)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "sums of whole numbers of 32 bits"
)]
fn whole(number: f64) -> u64 {
    number as u64
}
