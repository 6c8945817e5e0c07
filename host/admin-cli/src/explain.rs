//! A receipt as sentences.

use serde::Deserialize as _;

use crate::{
    api::{Costed, Decision, LegRun, Outcome, Stage},
    status::short,
    text::{clean, counted, millis, moment},
};

mod plan;

/// Returns the address of the worker with an id; `None`: the id names it.
type Addresses<'a> = &'a dyn Fn(u64) -> Option<String>;

/// Explains a receipt of `GET /decisions/{id}`: the request, the decider, the choice and its reason, and how
/// the request ended. Empty: it is not a receipt. `addresses` returns the address of the worker with an id;
/// `None`: the id names it. `predicted_disagg` is the digest of the built-in policy of that name, whose rule
/// this knows.
#[must_use]
pub fn sentences(
    receipt: &serde_json::Value,
    addresses: Addresses<'_>,
    predicted_disagg: &str,
) -> Vec<String> {
    Decision::deserialize(receipt).map(|one| told(&one, addresses, predicted_disagg)).unwrap_or_default()
}

fn told(one: &Decision, addresses: Addresses<'_>, predicted_disagg: &str) -> Vec<String> {
    let sentences = [
        Some(asked(one)),
        Some(decided(one)),
        Some(chosen(one, addresses)),
        plan::reason(one, addresses, predicted_disagg),
        one.reason.as_ref().filter(|reason| !reason.is_empty()).map(|reason| format!("The policy's reason: {reason}.")),
        one.cached_blocks.map(|(device, host, disk)| {
            format!("Blocks of the prompt expected in its cache: {device} on the device, {host} on the host, {disk} on disk.")
        }),
        shadow(one, addresses),
        one.outcome.as_ref().and_then(stream_failed),
        one.outcome.as_ref().and_then(|outcome| outcome.continues.as_ref()).map(|before| {
            format!("It generated the rest of the stream that the engine of decision {before} began.")
        }),
        Some(ended(one.outcome.as_ref())),
    ];
    sentences.into_iter().flatten().map(|sentence| clean(&sentence).into_owned()).collect()
}

/// The name of a candidate.
pub(crate) fn candidate(worker: u64, rank: u32) -> String {
    format!("{worker}/{rank}")
}

fn named(worker: u64, rank: u32, addresses: Addresses<'_>) -> String {
    let name = addresses(worker).unwrap_or_else(|| worker.to_string());
    format!("worker {name} (rank {rank})")
}

fn asked(one: &Decision) -> String {
    let attempt = if one.attempt > 0 { format!(", attempt {}", one.attempt + 1) } else { String::new() };
    format!(
        "Decision {} of {}: the {} leg of request {} for model {}{attempt}.",
        one.id,
        moment(one.call.now_us / 1_000),
        one.leg,
        one.request_id,
        one.model
    )
}

fn decided(one: &Decision) -> String {
    let stages = one.stages.iter().chain(&one.called);
    let called: Vec<&Stage> = stages.filter(|stage| stage.policy.is_some()).collect();
    let ended_in_filter = called.last().is_some_and(|stage| is_filter(stage));
    let it = if ended_in_filter { "The filter" } else { "It" };
    let by = &one.decider;
    let how = match (by.by.as_str(), one.refused.as_ref().map(|refused| &*refused.code)) {
        ("policy", Some("nobody_left")) => String::new(),
        ("policy", Some("policy_failed")) => format!(" {it} gave no usable answer."),
        ("policy", _) => " It decided.".to_owned(),
        ("native", _) => {
            format!(" The native selector `{}` decided.", by.mode.as_deref().unwrap_or("default"))
        }
        ("fallback", _) => {
            let why = no_answer(by.reason.as_deref().unwrap_or("unknown"), by.detail.as_deref());
            format!(" {it} {why}, and the native fallback decided.")
        }
        ("pin", _) => " It was not asked: a hint of the request named the worker.".to_owned(),
        ("session", _) => " It was not asked: the session of the request is bound to the worker.".to_owned(),
        ("plan", _) => " It was not asked: the decode override had chosen the worker.".to_owned(),
        (other, _) => format!(" Decided by {other}."),
    };
    let of = one.slot_model.as_ref().map(|model| format!(" of model {model}")).unwrap_or_default();
    format!("Slot {}{of} ran {}.{how}", one.slot, program(one, &called, ended_in_filter))
}

/// The filters that were called with what each kept, and the policy that ranks.
fn program(one: &Decision, called: &[&Stage], ended_in_filter: bool) -> String {
    let short = |digest: &Option<String>| digest.as_deref().map(short).unwrap_or_default();
    let settings = |digest: &Option<String>| match digest {
        Some(_) => format!(", settings {}", short(digest)),
        None => String::new(),
    };
    let ranks = match &one.policy {
        Some(policy) => format!(
            "policy {policy} (generation {}, digest {}{}, lane {})",
            one.generation,
            short(&one.digest),
            settings(&one.settings_digest),
            one.mode
        ),
        None => format!("a native selector (generation {})", one.generation),
    };
    let nobody_left = one.refused.as_ref().is_some_and(|refused| refused.code == "nobody_left");
    let filters =
        called.iter().enumerate().take_while(|(_, stage)| is_filter(stage)).map(|(place, stage)| {
            let kept = match called.get(place + 1) {
                Some(next) => next.rows,
                None => nobody_left.then_some(0),
            };
            let kept = kept.zip(stage.rows).map(|(kept, rows)| format!(", which kept {kept} of {rows}"));
            let kept = kept.unwrap_or_default();
            let name = stage.policy.as_deref().unwrap_or_default();
            let settings = settings(&stage.settings_digest);
            format!("filter {name} (digest {}{settings}){kept}", short(&stage.digest))
        });
    let filters = filters.collect::<Vec<_>>().join(", then ");
    match (filters.is_empty(), ended_in_filter) {
        (true, _) => ranks,
        (_, true) => format!("{filters}; {ranks} was not called"),
        _ => format!("{filters}, then {ranks}"),
    }
}

fn is_filter(stage: &Stage) -> bool {
    stage.world.as_deref() == Some("filter")
}

/// Why a policy gave no usable answer.
fn no_answer(reason: &str, detail: Option<&str>) -> String {
    let detail = detail.unwrap_or_default();
    match reason {
        "abstain" => "abstained".to_owned(),
        "breaker_open" => "was not called, because its breaker is open after failures".to_owned(),
        "not_ready" => "was not called, because each of its instances was busy or being rebuilt".to_owned(),
        "committed" => format!("refused the request after its prefill ({detail})"),
        // Most messages of failures begin with the reason.
        _ if detail.is_empty() => format!("failed ({reason})"),
        _ if detail.starts_with(reason) => format!("failed ({detail})"),
        _ => format!("failed ({reason}: {detail})"),
    }
}

fn chosen(one: &Decision, addresses: Addresses<'_>) -> String {
    let took = format!("The decision took {:.0} µs.", one.took_us);
    if let Some(plan) = &one.plan {
        return format!("{} {took}", plan::answer(plan, addresses));
    }
    if let Some(refused) = &one.refused {
        return format!("No candidate was chosen: {} ({}). {took}", refused.detail, refused.code);
    }
    let Some(choice) = &one.choice else { return format!("No candidate was chosen. {took}") };
    let cost = choice.cost.map(|cost| format!(" at cost {cost:.2}")).unwrap_or_default();
    let among = among(one);
    let second = one.runner_up.as_ref().zip(choice.cost);
    let second = second.and_then(|(second, cost)| runner_up(second, cost, addresses));
    format!(
        "{} was chosen{cost}{among}.{} {took}",
        capital(&named(choice.worker, choice.dp_rank, addresses)),
        second.unwrap_or_default()
    )
}

/// Returns the number of candidates among which the policy chose.
fn among(one: &Decision) -> String {
    let listed = one.candidates.len() as u64;
    let left = one.left.as_ref().map_or(listed, |left| left.len() as u64);
    let all = one.eligible.unwrap_or(listed).max(listed);
    match one.decider.by.as_str() {
        "pin" | "session" | "plan" => String::new(),
        _ if one.inputs_dropped => "; the inputs were too large to record".to_owned(),
        _ if left < all => format!(" among {left} of {}", counted(all, "candidate")),
        _ => format!(" among {}", counted(left, "candidate")),
    }
}

fn runner_up(second: &Costed, chosen: f64, addresses: Addresses<'_>) -> Option<String> {
    let cost = second.cost?;
    let more = format!("{:.2}", (cost - chosen).abs());
    let compared = match more.as_str() {
        "0.00" => "the same cost".to_owned(),
        _ if cost < chosen => format!("cost {cost:.2}, {more} cheaper: the cheapest was not chosen"),
        _ => format!("cost {cost:.2}, {more} dearer"),
    };
    let second = named(second.worker, second.dp_rank, addresses);
    Some(format!(" The runner-up was {second} at {compared}."))
}

fn shadow(one: &Decision, addresses: Addresses<'_>) -> Option<String> {
    let shadow = one.shadow.as_ref()?;
    let (generation, detail) = (shadow.generation, shadow.detail.as_deref().unwrap_or_default());
    let instead = match (&*shadow.answer, shadow.status) {
        ("refused", Some(status)) if shadow.agrees != Some(true) => {
            let reason = if detail.is_empty() { String::new() } else { format!(": {detail}") };
            Some(format!("would have refused it with {status}{reason}"))
        }
        ("nobody_left", _) => {
            Some("would have refused it, because its filters dropped every candidate".to_owned())
        }
        ("abstained", _) => Some("abstained, so that the native fallback would have decided".to_owned()),
        ("failed", _) => Some(no_answer(shadow.kind.as_deref().unwrap_or("unknown"), Some(detail))),
        _ => None,
    };
    if let Some(instead) = instead {
        return Some(format!("The shadow (generation {generation}) {instead}."));
    }
    let choice = match (&shadow.plan, shadow.choice) {
        (Some(plan), _) => plan.clone(),
        (None, Some((worker, rank))) => named(worker, rank, addresses),
        (None, None) => "nothing".to_owned(),
    };
    let agrees = match shadow.agrees {
        Some(true) => ", the same",
        Some(false) => ", not the same",
        None => "",
    };
    Some(format!("The shadow (generation {generation}) would have chosen {choice}{agrees}."))
}

fn stream_failed(outcome: &Outcome) -> Option<String> {
    let failed = outcome.stream_failed.as_ref()?;
    let by = failed.rest.as_ref().map(|rest| format!(" by decision {rest}")).unwrap_or_default();
    let followed = match (&*failed.result, &failed.why) {
        ("continued_exact", _) => format!("The rest was generated from the token ids{by}."),
        ("continued", None) => format!("The rest was generated from the text{by}."),
        ("continued", Some(why)) => format!("The rest was generated from the text{by}: {}.", explained(why)),
        ("failed", None) => "No other worker could generate the rest.".to_owned(),
        ("failed", Some(code)) => format!("No other worker could generate the rest (`{code}`)."),
        (reason, _) => format!("The stream was not continued: {}.", explained(reason)),
    };
    Some(format!(
        "Its engine failed within the stream, after {} output tokens. {followed}",
        failed.delivered_tokens
    ))
}

/// What the code of a reason means.
fn explained(reason: &str) -> String {
    let text = match reason {
        "exhausted" => "it was continued before, or two engines broke on the request",
        "alone" => "its engine works on its other requests, so this one may have broken it",
        "finished" => "the client had the finish reason",
        "memory" => "the transcripts of all streams together took their limit of memory",
        "too_long" => "it is longer than a transcript may be",
        "engine" => "an engine of the model cannot begin with it",
        "sampled" => "token ids are of use only at a temperature of 0",
        "text" => "models.NAME.continuation is not \"exact\"",
        "no_token_ids" => "the engine listed no token ids",
        "not_text_only" => "the messages are not only text",
        "other_content" => "the answer has more than text",
        "within_a_character" => "it ended within a character",
        "within_a_stop_string" | "held_back_text" => "it may have ended within a stop string",
        "ends_with_a_space" => "it ended with a space, which templates trim",
        "nothing_is_left" => "all tokens of max_tokens had been delivered",
        "other_field" => "the request has a field whose effect is not known",
        "last_message" => "the last message is the assistant's",
        "prompt_is_not_a_text" => "the prompt is not a text",
        "no_max_tokens" => "the request has no max_tokens",
        other => return format!("`{other}` (docs/continuation.md)"),
    };
    format!("{text} (`{reason}`)")
}

fn ended(outcome: Option<&Outcome>) -> String {
    let Some(end) = outcome else { return "The request is still in flight.".to_owned() };
    let mut text = format!(
        "The request ended after {} with status {} ({})",
        millis(Some(end.duration_ms)),
        end.status,
        end.code
    );
    if end.ttft_ms.is_some() {
        text.push_str(&format!("; TTFT {}, ITL {}", millis(end.ttft_ms), millis(end.itl_ms)));
    }
    let tokens = [(end.prompt_tokens, "prompt"), (end.output_tokens, "output")];
    for (count, kind) in tokens.iter().filter_map(|(count, kind)| Some(((*count)?, kind))) {
        text.push_str(&format!("; {}", counted(count, &format!("{kind} token"))));
    }
    let cached = &end.cached_tokens;
    if let (Some(predicted), Some(reported)) = (cached.predicted, cached.reported) {
        text.push_str(&format!("; {predicted} cached tokens predicted, {reported} reported by the engine"));
    }
    text.push('.');
    let times = &end.times_ms;
    if times.queued.is_some() {
        text.push_str(&format!(" It waited {} in the queue.", millis(times.queued)));
    }
    if let (Some(sent), Some(ended)) = (times.prefill_sent, times.prefill_ended) {
        text.push_str(&format!(" Its prefill leg took {}.", millis(Some(ended - sent))));
    }
    text.push_str(&answered(end));
    if end.moved {
        text.push_str(
            " The stream left this worker: it drained, or a request of a higher priority needed room.",
        );
    } else if let Some(failed) = end.run.as_ref().and_then(failed_leg) {
        let again = if end.retried { " and was decided again" } else { "" };
        text.push_str(&format!(" The leg failed on this worker {failed}{again}."));
    } else if end.retried {
        text.push_str(" The leg was decided again, so this worker did not serve it.");
    }
    text
}

/// Says how long the first token and the rest of the answer took. The times are of the last legs, which may
/// have sent the rest of a stream.
fn answered(end: &Outcome) -> String {
    let times = &end.times_ms;
    let Some(sent) = times.answer_sent else { return String::new() };
    let (began, after) = match times.prefill_ended {
        Some(ended) => (ended, "the prefill leg ended"),
        None => (sent, "its leg was sent"),
    };
    match end.ttft_ms {
        Some(first) if first >= began => format!(
            " The first token came {} after {after}, and the rest of the answer took {}.",
            millis(Some(first - began)),
            millis(Some((end.duration_ms - first).max(0.0)))
        ),
        None if end.status < 400 => {
            format!(" The leg that answers took {}.", millis(Some((end.duration_ms - sent).max(0.0))))
        }
        _ => String::new(),
    }
}

/// Says why a leg failed, if it did.
pub(crate) fn why_failed(run: &LegRun) -> Option<String> {
    Some(match (run.failed.as_deref()?, run.status) {
        (_, Some(status)) => format!("HTTP {status}"),
        ("connect", _) => "no connection".to_owned(),
        ("closed" | "broken", _) => "the connection broke".to_owned(),
        ("timeout", _) => "no answer in time".to_owned(),
        ("down", _) => "the engine was down".to_owned(),
        (kind, _) => kind.replace('_', " "),
    })
}

/// Says when and why a leg failed, if it did.
fn failed_leg(run: &LegRun) -> Option<String> {
    let why = why_failed(run)?;
    let after = run.ended_ms.map(|ended| format!("after {} ", millis(Some(ended - run.sent_ms))));
    Some(format!("{}({why})", after.unwrap_or_default()))
}

fn capital(text: &str) -> String {
    let mut characters = text.chars();
    characters.next().map(|first| first.to_uppercase().chain(characters).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests;
