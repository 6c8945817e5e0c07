//! A selector against `wit/released/0.1.0` that uses all a selector of that release could: facts, settings,
//! `log`, `state`, a reason and costs. It was built once and is kept as
//! `tests/fixtures/guests/selector-0.1.0.wasm`: every later host must serve those bytes. Nothing here may
//! change; a later release gets a fixture of its own.

#[cfg(target_family = "wasm")]
#[allow(missing_docs, unsafe_code, unreachable_pub, clippy::all, reason = "generated")]
mod bindings {
    wit_bindgen::generate!({ path: "../../../wit/released/0.1.0", world: "stateful-selector" });

    use exports::pointsman::policy::{
        policy::{About, Guest as Policy, Wants},
        selecting::{Call, Choice, Decision, Error, Guest as Selecting, ShedReason},
    };
    use pointsman::policy::{
        log::{Level, log},
        state,
    };

    struct Frozen;

    impl Policy for Frozen {
        fn describe() -> About {
            About { name: "frozen".into(), version: "0.1.0".into() }
        }

        fn configure(settings: String) -> Result<Wants, String> {
            if settings != "{}" {
                return Err("settings: there are none".into());
            }
            Ok(Wants {
                request_facts: vec!["explain".into(), "session-hash".into()],
                worker_facts: vec!["worker-id".into(), "active-requests".into(), "kv-usage".into()],
            })
        }
    }

    impl Selecting for Frozen {
        fn select(call: Call, facts: Vec<u32>) -> Result<Decision, Error> {
            let rows = call.rows as usize;
            // Three request slots, two columns of ids, one of requests, one of usage.
            if facts.len() != 3 + 4 * rows {
                return Err(Error::Internal("facts of another length".into()));
            }
            let cost =
                |row: usize| facts[3 + 2 * rows + row] as f32 + f32::from_bits(facts[3 + 3 * rows + row]);
            let mut best = None;
            for row in 0..rows {
                if best.is_none_or(|best| cost(row) < cost(best)) {
                    best = Some(row);
                }
            }
            let Some(row) = best else { return Ok(Decision::Abstain) };
            let Ok(count) = state::increment("calls", 1, 60_000) else {
                return Ok(Decision::Shed(ShedReason { status: 503, reason: "no room".into() }));
            };
            if state::set("last", &[row as u8], 0).is_err() || state::get("last").is_none() {
                log(Level::Warn, "what was written is not there");
            }
            state::delete("last");
            let costs = if facts[0] == 1 { (0..rows).map(cost).collect() } else { Vec::new() };
            let reason = if count > 1 { "seen before" } else { "first" };
            Ok(Decision::Choose(Choice { row: row as u32, costs, reason: Some(reason.into()) }))
        }
    }

    export!(Frozen);
}
