//! Whether the page calls a policy faster than the router.

use clap::Parser;
use pointsman_lab::{Arm, BlockIds, EngineGroup, Fleet, Trace, TraceRequest};
use pointsman_workers::Role;
use tokio::time::Duration;

use super::*;
use crate::observe::{ObserveArgs, assign::How, finish};

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    observe: ObserveArgs,
}

/// Forecasts 300 requests with one of eight prompts, of which the router sent each to an engine of two, and
/// returns what the page says about the router.
fn verdict(prompt_tokens: u32, engine: impl Fn(u32) -> u32) -> String {
    let request = |number: u32| {
        let prompt = u64::from(number * 7 % 11 % 8);
        let blocks: Vec<u64> = (0..u64::from(prompt_tokens / 16)).map(|block| prompt << 20 | block).collect();
        TraceRequest {
            at: Duration::from_millis(200) * number,
            input_tokens: prompt_tokens,
            output_tokens: 10,
            blocks: BlockIds::from(blocks),
            ..TraceRequest::default()
        }
    };
    let requests = (0..300).map(request).collect();
    let trace = Trace { block_tokens: 16, requests, ..Trace::default() };
    let engines = vec![EngineGroup::new(Role::Aggregated, 2)];
    let fleet = Fleet { block_tokens: 16, engines, ..Fleet::default() };
    let assigned: Vec<Assigned> =
        (0..300).map(|number| Assigned { engine: engine(number), how: How::Answer }).collect();
    let logs = [EngineLog::default(), EngineLog::default()];
    let args =
        Command::parse_from(["observe", "--workers", "http://a", "--out", "x", "--seeds", "1"]).observe;
    let arms = Arm::parse_all(["kv", "round-robin"]).unwrap();
    let forecast = finish::forecast(&args, &arms, &trace, (&assigned, &logs), (fleet, None)).unwrap();
    reasons(&forecast).concat()
}

#[test]
fn s5_21_the_page_names_a_winner_only_beyond_what_a_few_requests_make() {
    // Engines in turn: eight prompts are computed on both engines, and then never again.
    let turns = verdict(1_600, |number| number % 2);
    assert!(
        turns.starts_with("No difference was found: the policy with the shortest mean TTFT, "),
        "{turns}"
    );
    assert!(turns.contains("(99 % interval: ±"), "{turns}");
    // All requests on one engine, which is too busy with them.
    let one = verdict(16_000, |_| 0);
    assert!(one.contains(" % shorter than that of your router (99 % interval: ±"), "{one}");
}
