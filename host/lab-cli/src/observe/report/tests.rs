//! Whether the page calls a policy faster than the router.

use clap::Parser;
use pointsman_lab::{Arm, BlockIds, EngineGroup, Fleet, StepTimeSpec, Trace, TraceRequest};
use pointsman_workers::Role;
use tokio::time::Duration;

use super::*;
use crate::observe::{ObserveArgs, assign::How, finish};

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    observe: ObserveArgs,
}

/// Returns what the page says about the router after the forecast of 300 requests.
fn verdict(prompt_tokens: u32, engine: impl Fn(u32) -> u32) -> String {
    let step_time = EngineGroup::new(Role::Aggregated, 2).step_time;
    reasons(&forecast(prompt_tokens, step_time, engine).1).concat()
}

/// Forecasts 300 requests with one of eight prompts, of which the router sent each to an engine of two.
/// Returns the engines, too.
fn forecast(
    prompt_tokens: u32,
    step_time: StepTimeSpec,
    engine: impl Fn(u32) -> u32,
) -> (Vec<Assigned>, Forecast) {
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
    let engines = vec![EngineGroup { step_time, ..EngineGroup::new(Role::Aggregated, 2) }];
    let fleet = Fleet { block_tokens: 16, engines, ..Fleet::default() };
    let assigned: Vec<Assigned> =
        (0..300).map(|number| Assigned { engine: engine(number), how: How::Answer }).collect();
    let logs = [EngineLog::default(), EngineLog::default()];
    let args =
        Command::parse_from(["observe", "--workers", "http://a", "--out", "x", "--seeds", "1"]).observe;
    let arms = Arm::parse_all(["kv", "round-robin"]).unwrap();
    let forecast = finish::forecast(&args, &arms, &trace, (&assigned, &logs), (fleet, Some(9))).unwrap();
    (assigned, forecast)
}

#[test]
fn s5_24_the_page_warns_of_prompts_that_are_free_and_of_guesses_only_where_there_are_some() {
    let counts = Counts::default();
    let (answers, followed) = (HashMap::new(), Followed::default());
    let total = Window { queried_tokens: 100.0, cached_tokens: 99.0, ..Window::default() };
    let page = |step_time: StepTimeSpec, how: How| {
        let (mut assigned, forecast) = forecast(1_600, step_time, |number| number % 2);
        assigned.iter_mut().skip(299).for_each(|assigned| assigned.how = how);
        let seen = Observation {
            seconds: 60.0,
            counts: &counts,
            written: &[],
            failed: 0,
            assigned: &assigned,
            followed: &followed,
            answers: &answers,
            incomplete: None,
            logs: &[],
            total,
        };
        crate::observe::document::text(&blocks(&seen, Some(&forecast)))
    };
    let linear = |c3: f64| StepTimeSpec::Linear { c0: 10.0, c1: 0.0, c2: 0.0, c3, c4: 0.0 };
    let (free, costly) = (page(linear(0.0), How::Answer), page(linear(0.1), How::Guessed));
    let told = "no time of a prompt token was found: the engines computed 1.0 % of the prompt tokens";
    // S5.24
    assert!(free.contains(told) && !costly.contains(told), "{free}");
    // S5.4
    assert!(
        costly.contains("some engines are guessed wrongly") && !free.contains("guessed wrongly"),
        "{free}"
    );
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
