use serde_json::json;

use super::*;

/// Digest of the built-in `predicted-disagg`.
const BUILT_IN: &str = "c96931f1b27e";

fn explain(one: &Decision) -> String {
    told(one, &|_| None, BUILT_IN).into_iter().map(|sentence| format!("{sentence}\n")).collect()
}

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
    // T2.6
    let remote = "The answer was remote: prefill and decode on two workers. The question was about worker 5 (rank 1) \
                  for decode; the decode leg has a decision of its own. ";
    let local = "The answer was local: prefill and decode on one worker, with worker 5 (rank 1) for decode. ";
    assert!(plan("local").contains(local), "{}", plan("local"));
    assert!(plan("remote").contains(remote), "{}", plan("remote"));
    assert!(plan("shed").contains("The answer was shed: the request is refused"), "{}", plan("shed"));
    let shadow = explain(&receipt(|receipt| {
        receipt["plan"] = json!({ "word": "remote", "decode": null });
        receipt["shadow"] = json!({ "generation": 4, "choice": null, "plan": "local", "agrees": false });
    }));
    // T2.5
    let other = "The shadow (generation 4) would have chosen local, not the same.";
    assert!(shadow.contains(other), "{shadow}");
    let tie = explain(&receipt(|receipt| receipt["runner_up"]["cost"] = json!(1.501)));
    assert!(tie.contains(" The runner-up was worker 1 (rank 0) at the same cost. "), "{tie}");
}

#[test]
fn t8_sentences_tell_what_the_shadow_answered_and_which_rule_decided() {
    let shadow = |answer: serde_json::Value| {
        explain(&receipt(|receipt| {
            receipt["shadow"] = json!({ "generation": 4, "choice": null, "agrees": false });
            for (key, value) in answer.as_object().unwrap() {
                receipt["shadow"][key] = value.clone();
            }
        }))
    };
    for (answer, expected) in [
        (
            json!({ "answer": "refused", "status": 429, "detail": "full" }),
            "would have refused it with 429: full.",
        ),
        (json!({ "answer": "refused", "status": 429, "detail": "" }), "would have refused it with 429."),
        (
            json!({ "answer": "nobody_left" }),
            "would have refused it, because its filters dropped every candidate.",
        ),
        (json!({ "answer": "abstained" }), "abstained, so that the native fallback would have decided."),
        (
            json!({ "answer": "failed", "kind": "trap", "detail": "trap: panicked" }),
            "failed (trap: panicked).",
        ),
    ] {
        let text = shadow(answer);
        // T8.2
        assert!(text.contains(&format!("The shadow (generation 4) {expected}")), "{expected}\n{text}");
    }
    let of_model = explain(&receipt(|receipt| {
        receipt["slot_model"] = json!("big");
        receipt["settings_digest"] = json!("fedcba9876543210");
    }));
    let slot = of_model.lines().find(|line| line.starts_with("Slot ")).unwrap();
    // T8.4
    assert!(slot.contains(" of model big ran policy "), "{slot}");
    // T8.5
    assert!(slot.contains(", settings fedcba987654, lane "), "{slot}");
}

#[test]
fn o1_sentences_name_workers_by_address() {
    let addresses = |worker| (worker != 1).then(|| format!("10.0.0.{worker}:8000"));
    let one = receipt(|receipt| {
        receipt["shadow"] = json!({ "generation": 4, "choice": [2, 1], "agrees": true });
    });
    let text = told(&one, &addresses, BUILT_IN).join("\n");
    for sentence in [
        "Worker 10.0.0.2:8000 (rank 1) was chosen at cost 1.50",
        "The runner-up was worker 1 (rank 0) at cost 4.00",
        "The shadow (generation 4) would have chosen worker 10.0.0.2:8000 (rank 1), the same.",
    ] {
        // O1.26
        assert!(text.contains(sentence), "{sentence}\n{text}");
    }
}

/// A receipt of `predicted-disagg` about a prompt of 1,000 tokens.
fn planned(word: &str, change: impl FnOnce(&mut serde_json::Value)) -> String {
    explain(&receipt(|receipt| {
        receipt["plan"] = json!({ "word": word, "decode": [5, 1] });
        receipt["choice"] = serde_json::Value::Null;
        let mut stage = json!({
            "policy": "predicted-disagg", "digest": BUILT_IN, "rows": 2,
            "request": { "prompt-tokens": 1_000, "block-size": 16, "itl-target-us": 0 },
            "decode": {
                "active-prefill-tokens": [30], "cached-blocks-device": [2], "active-requests": [3],
                "engine-running": [4], "engine-queue": [1], "kv-usage": [0.5], "load-age-ms": [200],
                "prefill-us-per-ktoken": [50_000], "local-prefill": [1],
            },
            "workers": { "active-prefill-tokens": [500, 100], "cached-blocks-device": [20, 0] },
        });
        change(&mut stage);
        receipt["stages"] = json!([stage]);
    }))
}

#[test]
fn o1_a_plan_of_predicted_disagg_is_told_with_what_it_compared() {
    let compared = "until it has the prompt it computes 998 tokens (30 waiting, 968 not cached) and delays 5 requests; \
                    worker 2 (rank 1), the best for prefill, computes 1100 (100 waiting, 1000 not cached). The \
                    settings margin-tokens and delayed-weight say how much is enough.\n";
    for (word, saves) in [
        ("remote", "Remote, because the decode worker saves too little: "),
        ("local", "Local, because the decode worker saves enough: "),
    ] {
        let text = planned(word, |_| {});
        // O1.27
        assert!(text.contains(&format!("\n{saves}{compared}")), "{text}");
    }
    // Figures of the engine that are old count for nothing.
    let old = planned("remote", |stage| {
        stage["decode"]["load-age-ms"] = json!([10_001]);
        stage["decode"]["kv-usage"] = json!([0.95]);
    });
    assert!(old.contains(" and delays 3 requests; "), "{old}");
    for (fact, value, why) in [
        ("local-prefill", json!([0]), "the decode worker cannot prefill"),
        ("kv-usage", json!([0.93]), "the engine of the decode worker uses 93 % of its KV cache"),
    ] {
        let text = planned("remote", |stage| stage["decode"][fact] = value);
        // O1.27
        assert!(text.contains(&format!("\nRemote, because {why}.\n")), "{text}");
    }
}

#[test]
fn o1_a_plan_for_a_request_with_an_itl_target_is_told_with_its_reason() {
    let targeted = |time: u32| {
        planned("remote", |stage| {
            stage["request"]["itl-target-us"] = json!(40_000);
            stage["decode"]["prefill-us-per-ktoken"] = json!([time]);
        })
    };
    for (time, why) in [
        (50_000, "the decode worker would compute for 48.4 ms, longer than the ITL target of 40 ms"),
        (0, "the request has an ITL target (40 ms), and the decode worker's speed is not measured"),
        (10_000, "the decode worker saves too little: "),
    ] {
        // O1.27
        assert!(targeted(time).contains(&format!("\nRemote, because {why}")), "{}", targeted(time));
    }
    // Nothing is said of what another version of the policy compared.
    let other = planned("remote", |stage| stage["digest"] = json!("aabbccddeeff00"));
    // O1.27
    assert!(!other.contains("because"), "{other}");
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
fn t2_the_time_in_the_queue_and_of_the_prefill_leg_is_told() {
    let text = |times: serde_json::Value| {
        explain(&receipt(|receipt| {
            receipt["outcome"] = json!({
                "status": 200, "code": "ok", "retried": false, "ttft_ms": 2_557.0, "itl_ms": 57.0, "output_tokens": 7, "prompt_tokens": 9_000,
                "duration_ms": 3_110.0, "cached_tokens": { "predicted": null, "reported": null }, "times_ms": times,
            });
        }))
    };
    let waited = json!({ "queued": 2_395.0, "prefill_sent": 2_400.0, "prefill_ended": 2_500.0, "answer_sent": 2_501.0 });
    let told = " 9000 prompt tokens; 7 output tokens. It waited 2395 ms in the queue. Its prefill leg took 100 ms. \
                The first token came 57 ms after the prefill leg ended, and the rest of the answer took 553 ms.\n";
    // T2.9
    assert!(text(waited.clone()).ends_with(told), "{}", text(waited));
    let not = json!({ "queued": null, "prefill_sent": 1.0, "prefill_ended": null, "answer_sent": 2.0 });
    assert!(text(not.clone()).ends_with(" 7 output tokens. The first token came 2555 ms after its leg was sent, and the rest of the answer took 553 ms.\n"), "{}", text(not));
}

#[test]
fn t2_the_time_of_an_answer_that_is_not_streamed_is_told() {
    let text = explain(&receipt(|receipt| {
        receipt["outcome"] = json!({
            "status": 200, "code": "ok", "retried": false, "ttft_ms": null, "itl_ms": null, "output_tokens": 7,
            "duration_ms": 60.0, "cached_tokens": { "predicted": null, "reported": null },
            "times_ms": { "queued": null, "prefill_sent": null, "prefill_ended": null, "answer_sent": 2.0 },
        });
    }));
    // T2.9
    assert!(text.ends_with(" 7 output tokens. The leg that answers took 58 ms.\n"), "{text}");
}

#[test]
fn t2_the_candidates_that_the_policy_chose_among_are_counted() {
    let among = |change: serde_json::Value| {
        explain(&receipt(|receipt| {
            receipt["eligible"] = json!(2);
            receipt["runner_up"] = json!(null);
            for (key, value) in change.as_object().unwrap() {
                receipt[key] = value.clone();
            }
        }))
    };
    for (change, expected) in [
        (json!({}), " at cost 1.50 among 2 candidates. "),
        (json!({ "left": [1] }), " at cost 1.50 among 1 of 2 candidates. "),
        (json!({ "eligible": 1_000 }), " at cost 1.50 among 2 of 1000 candidates. "),
        (json!({ "decider": { "by": "session" } }), " at cost 1.50. "),
    ] {
        let text = among(change);
        // T2.10
        assert!(text.contains(&format!("Worker 2 (rank 1) was chosen{expected}")), "{text}");
    }
}

#[test]
fn t2_a_leg_that_failed_is_told_with_its_cause() {
    let told = |retried: bool, run: serde_json::Value| {
        explain(&receipt(|receipt| {
            receipt["outcome"] = json!({
                "status": 200, "code": "ok", "retried": retried, "ttft_ms": 41.0, "itl_ms": 2.0, "output_tokens": 7,
                "duration_ms": 60.0, "cached_tokens": { "predicted": null, "reported": null }, "run": run,
            });
        }))
    };
    let run = |failed: Option<&str>, status: Option<u16>| json!({ "sent_ms": 2.0, "ended_ms": 1_030.0, "failed": failed, "status": status });
    // T2.7
    let failed = told(true, run(Some("status_5xx"), Some(500)));
    assert!(
        failed.contains(" The leg failed on this worker after 1028 ms (HTTP 500) and was decided again."),
        "{failed}"
    );
    let last = told(false, run(Some("connect"), None));
    assert!(last.ends_with(" The leg failed on this worker after 1028 ms (no connection).\n"), "{last}");
    let other = told(true, run(None, None));
    assert!(other.contains(" The leg was decided again, so this worker did not serve it."), "{other}");
}

#[test]
fn t1_filters_are_told_with_what_each_kept() {
    let filter = |name: &str, rows: u32| json!({ "policy": name, "digest": "aabbccddeeff00", "world": "filter", "rows": rows });
    let ranker =
        |rows: u32| json!({ "policy": "kv-aware", "digest": "9e9a", "world": "selector", "rows": rows });
    // The facts that are recorded for every leg.
    let always = json!({ "rows": 5 });
    let text = explain(&receipt(|receipt| {
        receipt["stages"] = json!([always, filter("near", 5), filter("formula", 3), ranker(2)]);
    }));
    let ran = "Slot prefill ran filter near (digest aabbccddeeff), which kept 3 of 5, then filter formula (digest \
               aabbccddeeff), which kept 2 of 3, then policy kv-aware (generation 3, digest 9e9a00112233, lane \
               active). It decided.";
    // T1.1
    assert!(text.contains(ran), "{text}");
    let text = explain(&receipt(|receipt| {
        receipt["stages"] = json!([filter("near", 5)]);
        receipt["decider"] = json!({ "by": "fallback", "reason": "trap", "detail": "trap: unreachable" });
    }));
    let ran = "Slot prefill ran filter near (digest aabbccddeeff); policy kv-aware (generation 3, digest \
               9e9a00112233, lane active) was not called. The filter failed (trap: unreachable), and the native \
               fallback decided.";
    // T1.1
    assert!(text.contains(ran), "{text}");
}

#[test]
fn t1_filters_are_told_without_recorded_inputs_too() {
    let called = |name: &str, world: &str| json!({ "policy": name, "version": "1", "digest": "aabbccddeeff00", "world": world });
    let text = explain(&receipt(|receipt| {
        receipt["inputs_dropped"] = json!(true);
        receipt["candidates"] = json!([]);
        receipt["called"] = json!([called("near", "filter"), called("kv-aware", "selector")]);
    }));
    let ran = "Slot prefill ran filter near (digest aabbccddeeff), then policy kv-aware (generation 3, digest \
               9e9a00112233, lane active). It decided.";
    // T1.1
    assert!(text.contains(ran), "{text}");
    let text = explain(&receipt(|receipt| {
        receipt["inputs_dropped"] = json!(true);
        receipt["called"] = json!([called("near", "filter")]);
        receipt["refused"] = json!({ "code": "nobody_left", "detail": "no candidate is left" });
    }));
    let ran = "Slot prefill ran filter near (digest aabbccddeeff); policy kv-aware (generation 3, digest \
               9e9a00112233, lane active) was not called.";
    // T1.1
    assert!(text.contains(ran), "{text}");
}

#[test]
fn t2_each_reason_for_a_fallback_has_its_own_words() {
    for (reason, detail, words) in [
        ("abstain", "", "It abstained"),
        ("breaker_open", "", "It was not called, because its breaker is open after failures"),
        ("not_ready", "no instance ready", "It was not called, because each of its instances was busy"),
        ("committed", "not now", "It refused the request after its prefill (not now)"),
        ("timeout", "stopped after 2 ms", "It failed (timeout: stopped after 2 ms)"),
        ("error", "", "It failed (error)"),
    ] {
        let text = explain(&receipt(|receipt| {
            receipt["decider"] = json!({ "by": "fallback", "reason": reason, "detail": detail });
        }));
        // T2.1
        assert!(text.contains(&format!(" {words}")), "{text}");
        assert!(text.contains(", and the native fallback decided.\n"), "{text}");
    }
    let text = explain(&receipt(|receipt| {
        receipt["refused"] = json!({ "code": "policy_failed", "detail": "routing policy failed" });
    }));
    // T2.1
    assert!(text.contains(" It gave no usable answer.\n"), "{text}");
    assert!(text.contains("No candidate was chosen: routing policy failed (policy_failed)."), "{text}");
}

#[test]
fn t2_a_runner_up_that_is_cheaper_than_the_choice_is_told() {
    let text = explain(&receipt(|receipt| receipt["runner_up"]["cost"] = json!(0.5)));
    // T2.3
    assert!(text.contains(" at cost 0.50, 1.00 cheaper: the cheapest was not chosen. "), "{text}");
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
            failed("failed", Some("overloaded"), None),
            "No other worker could generate the rest (`overloaded`).",
        ),
        (
            failed("alone", None, None),
            "The stream was not continued: its engine works on its other requests, so this one may have broken it \
             (`alone`).",
        ),
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
