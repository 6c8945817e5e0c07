//! A receipt as sentences.

use serde::Deserialize as _;

use crate::{
    api::{Decision, Outcome},
    status::short,
    text::{clean, counted, millis, moment},
};

/// Explains a decision: the request, the decider, the choice and its reason, and how the request ended.
pub(crate) fn explain(one: &Decision) -> String {
    told(one).map(|sentence| format!("{sentence}\n")).collect()
}

/// Explains a receipt of `GET /decisions/{id}` as `pointsman decisions ID` does. Empty: it is not a receipt.
#[must_use]
pub fn sentences(receipt: &serde_json::Value) -> Vec<String> {
    Decision::deserialize(receipt).map(|one| told(&one).collect()).unwrap_or_default()
}

fn told(one: &Decision) -> impl Iterator<Item = String> {
    let sentences = [
        Some(asked(one)),
        Some(decided(one)),
        Some(chosen(one)),
        one.reason.as_ref().filter(|reason| !reason.is_empty()).map(|reason| format!("The policy's reason: {reason}.")),
        left(one),
        one.cached_blocks.map(|(device, host, disk)| {
            format!("Blocks of the prompt expected in its cache: {device} on the device, {host} on the host, {disk} on disk.")
        }),
        shadow(one),
        one.outcome.as_ref().and_then(stream_failed),
        one.outcome.as_ref().and_then(|outcome| outcome.continues.as_ref()).map(|before| {
            format!("It generated the rest of the stream that the engine of decision {before} began.")
        }),
        Some(ended(one.outcome.as_ref())),
    ];
    sentences.into_iter().flatten().map(|sentence| clean(&sentence).into_owned())
}

/// The name of a candidate.
pub(crate) fn candidate(worker: u64, rank: u32) -> String {
    format!("{worker}/{rank}")
}

fn named(worker: u64, rank: u32) -> String {
    format!("worker {worker} (rank {rank})")
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
    let digest =
        one.digest.as_deref().map(|digest| format!(", digest {}", short(digest))).unwrap_or_default();
    let content = match &one.policy {
        Some(policy) => format!("policy {policy} (generation {}{digest}, lane {})", one.generation, one.mode),
        None => format!("a native selector (generation {})", one.generation),
    };
    let (by, detail) = (&one.decider, one.decider.detail.as_deref().unwrap_or_default());
    let how = match by.by.as_str() {
        "policy" => "It decided.".to_owned(),
        "native" => format!("The native selector `{}` decided.", by.mode.as_deref().unwrap_or("default")),
        "fallback" => {
            let detail = if detail.is_empty() { String::new() } else { format!(": {detail}") };
            format!(
                "It failed ({}{detail}), and the native fallback decided.",
                by.reason.as_deref().unwrap_or("unknown")
            )
        }
        "pin" => "It was not asked: a hint of the request named the worker.".to_owned(),
        "session" => "It was not asked: the session of the request is bound to the worker.".to_owned(),
        "plan" => "It was not asked: the decode override had chosen the worker.".to_owned(),
        other => format!("Decided by {other}."),
    };
    format!("Slot {} ran {content}. {how}", one.slot)
}

fn chosen(one: &Decision) -> String {
    let among = one.candidates.len();
    let took = format!("The decision took {:.0} µs.", one.took_us);
    if let Some(plan) = &one.plan {
        let means = match &*plan.word {
            "remote" => ": prefill and decode on two workers",
            "local" => ": prefill and decode on one worker",
            "shed" => ": the request is refused",
            _ => "",
        };
        let about = plan.decode.map(|(worker, rank)| format!(", with {} for decode", named(worker, rank)));
        return format!("The answer was {}{means}{}. {took}", plan.word, about.unwrap_or_default());
    }
    if let Some(refused) = &one.refused {
        return format!("No candidate was chosen: {} {}. {took}", refused.code, refused.detail);
    }
    let Some(choice) = &one.choice else { return format!("No candidate was chosen. {took}") };
    let cost = choice.cost.map(|cost| format!(" at cost {cost:.2}")).unwrap_or_default();
    let among = if one.inputs_dropped {
        "; the inputs were too large to record".to_owned()
    } else {
        format!(" among {}", counted(among as u64, "candidate"))
    };
    let second = match (&one.runner_up, choice.cost) {
        (Some(second), Some(cost)) => second.cost.map(|other| {
            let more = format!("{:.2}", other - cost);
            let more = if more == "0.00" {
                "the same cost".to_owned()
            } else {
                format!("cost {other:.2}, {more} dearer")
            };
            format!(" The runner-up was {} at {more}.", named(second.worker, second.dp_rank))
        }),
        _ => None,
    };
    format!(
        "{} was chosen{cost}{among}.{} {took}",
        capital(&named(choice.worker, choice.dp_rank)),
        second.unwrap_or_default()
    )
}

fn left(one: &Decision) -> Option<String> {
    let left = one.left.as_ref()?;
    let all = counted(one.candidates.len() as u64, "candidate");
    Some(format!("Filters left {} of {all}.", left.len()))
}

fn shadow(one: &Decision) -> Option<String> {
    let shadow = one.shadow.as_ref()?;
    let choice = shadow.choice.map_or("nothing".to_owned(), |(worker, rank)| named(worker, rank));
    let agrees = match shadow.agrees {
        Some(true) => ", the same",
        Some(false) => ", not the same",
        None => "",
    };
    Some(format!("The shadow (generation {}) would have chosen {choice}{agrees}.", shadow.generation))
}

fn stream_failed(outcome: &Outcome) -> Option<String> {
    let failed = outcome.stream_failed.as_ref()?;
    let by = failed.rest.as_ref().map(|rest| format!(" by decision {rest}")).unwrap_or_default();
    let followed = match (&*failed.result, &failed.why) {
        ("continued_exact", _) => format!("The rest was generated from the token ids{by}."),
        ("continued", None) => format!("The rest was generated from the text{by}."),
        ("continued", Some(why)) => format!("The rest was generated from the text{by}: {}.", explained(why)),
        ("failed", _) => "No other worker could generate the rest.".to_owned(),
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
    if let Some(tokens) = end.output_tokens {
        text.push_str(&format!("; {tokens} output tokens"));
    }
    let cached = &end.cached_tokens;
    if let (Some(predicted), Some(reported)) = (cached.predicted, cached.reported) {
        text.push_str(&format!("; {predicted} cached tokens predicted, {reported} reported by the engine"));
    }
    text.push('.');
    if end.moved {
        text.push_str(
            " The stream left this worker: it drained, or a request of a higher priority needed room.",
        );
    } else if end.retried {
        text.push_str(" The leg was decided again, so this worker did not serve it.");
    }
    text
}

fn capital(text: &str) -> String {
    let mut characters = text.chars();
    characters.next().map(|first| first.to_uppercase().chain(characters).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn receipt(change: impl FnOnce(&mut serde_json::Value)) -> Decision {
        let mut value = json!({
            "id": "6b03751d00000001", "request_id": "r\u{1b}1", "model": "tiny", "leg": "prefill", "attempt": 0,
            "slot": "prefill", "generation": 3, "mode": "active", "policy": "kv-aware",
            "digest": "9e9a00112233445566", "decider": { "by": "policy" }, "reason": null,
            "call": { "seed": 1, "now_us": 1_000_000, "temperature": null }, "candidates": [[1, 0], [2, 1]],
            "left": null, "choice": { "row": 1, "worker": 2, "dp_rank": 1, "cost": 1.5 },
            "runner_up": { "row": 0, "worker": 1, "dp_rank": 0, "cost": 4.0 }, "plan": null, "refused": null,
            "cached_blocks": [3, 0, 0], "shadow": null, "inputs_dropped": false, "took_us": 12.4, "outcome": null,
        });
        change(&mut value);
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_receipt_reads_as_sentences() {
        let text = explain(&receipt(|_| {}));
        let expected = "\
            Decision 6b03751d00000001 of 1970-01-01T00:00:01.000Z: the prefill leg of request r\u{fffd}1 for model tiny.\n\
            Slot prefill ran policy kv-aware (generation 3, digest 9e9a00112233, lane active). It decided.\n\
            Worker 2 (rank 1) was chosen at cost 1.50 among 2 candidates. The runner-up was worker 1 (rank 0) at cost \
            4.00, 2.50 dearer. The decision took 12 µs.\n\
            Blocks of the prompt expected in its cache: 3 on the device, 0 on the host, 0 on disk.\n\
            The request is still in flight.\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_plan_says_what_it_means_and_equal_costs_are_no_difference() {
        let plan =
            |word| explain(&receipt(|receipt| receipt["plan"] = json!({ "word": word, "decode": [5, 1] })));
        let remote =
            "The answer was remote: prefill and decode on two workers, with worker 5 (rank 1) for decode.";
        assert!(plan("remote").contains(remote), "{}", plan("remote"));
        assert!(plan("shed").contains("The answer was shed: the request is refused"), "{}", plan("shed"));
        let tie = explain(&receipt(|receipt| receipt["runner_up"]["cost"] = json!(1.501)));
        assert!(tie.contains(" The runner-up was worker 1 (rank 0) at the same cost. "), "{tie}");
    }

    #[test]
    fn l5_a_stream_that_left_its_worker_is_told() {
        let text = explain(&receipt(|receipt| {
            receipt["outcome"] = json!({
                "status": 200, "code": "ok", "retried": false, "moved": true, "ttft_ms": 41.0, "itl_ms": 2.0,
                "output_tokens": 7, "duration_ms": 60.0, "cached_tokens": { "predicted": null, "reported": null },
            });
        }));
        // L5.6
        assert!(text.contains(" The stream left this worker: it drained, or a request of a higher priority"));
    }

    #[test]
    fn a_fallback_a_shadow_and_the_end_are_told() {
        let text = explain(&receipt(|receipt| {
            receipt["decider"] = json!({ "by": "fallback", "reason": "deadline", "detail": "after 5 ms" });
            receipt["shadow"] = json!({ "generation": 4, "choice": [1, 0], "agrees": false });
            receipt["outcome"] = json!({
                "status": 200, "code": "ok", "retried": true, "ttft_ms": 41.0, "itl_ms": 2.0, "output_tokens": 7,
                "duration_ms": 60.0, "cached_tokens": { "predicted": 48, "reported": 32 },
            });
        }));
        for sentence in [
            "It failed (deadline: after 5 ms), and the native fallback decided.",
            "The shadow (generation 4) would have chosen worker 1 (rank 0), not the same.",
            "The request ended after 60 ms with status 200 (ok); TTFT 41 ms, ITL 2.0 ms; 7 output tokens; 48 cached \
             tokens predicted, 32 reported by the engine. The leg was decided again, so this worker did not serve it.",
        ] {
            assert!(text.contains(sentence), "{sentence}\n{text}");
        }
    }

    #[test]
    fn i14_both_legs_of_a_stream_that_went_on_elsewhere_are_told() {
        let outcome = |failed: serde_json::Value, continues: serde_json::Value| {
            explain(&receipt(|receipt| {
                receipt["outcome"] = json!({
                    "status": 200, "code": "ok", "retried": true, "ttft_ms": 41.0, "itl_ms": 2.0, "output_tokens": 7,
                    "duration_ms": 60.0, "cached_tokens": { "predicted": 48, "reported": 32 },
                    "stream_failed": failed, "continues": continues,
                });
            }))
        };
        let failed = |result: &str, why: Option<&str>, rest: Option<&str>| {
            let failed = json!({ "result": result, "why": why, "delivered_tokens": 5, "rest": rest });
            outcome(failed, serde_json::Value::Null)
        };
        let begins = "Its engine failed within the stream, after 5 output tokens. ";
        let rows = [
            (
                failed("continued_exact", None, Some("2")),
                "The rest was generated from the token ids by decision 2.",
            ),
            (failed("continued", None, Some("2")), "The rest was generated from the text by decision 2."),
            (
                failed("continued", Some("sampled"), Some("2")),
                "The rest was generated from the text by decision 2: token ids are of use only at a temperature of 0 \
                 (`sampled`).",
            ),
            (failed("failed", None, None), "No other worker could generate the rest."),
            (
                failed("penalties", None, None),
                "The stream was not continued: `penalties` (docs/continuation.md).",
            ),
        ];
        for (text, sentence) in rows {
            // I14.15
            assert!(text.contains(&format!("{begins}{sentence}\n")), "{sentence}\n{text}");
        }
        let rest = outcome(serde_json::Value::Null, json!("1"));
        assert!(
            rest.contains("It generated the rest of the stream that the engine of decision 1 began.\n"),
            "{rest}"
        );
    }
}
