use std::sync::Arc;

use prefix_index::Prefix;
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use super::*;
use crate::{
    booking::{BookingRequest, RankLoad},
    columns::Columns,
    id::Leg,
};

/// An engine: fixed and growing time of a prefill, and time between tokens, each with jitter.
struct Engine {
    overhead: f64,
    per_token: f64,
    itl: f64,
    random: SmallRng,
}

impl Engine {
    fn jitter(&mut self) -> f64 {
        self.random.random_range(0.9..1.1)
    }

    fn prefill(&mut self, tokens: u32) -> f64 {
        (self.overhead + self.per_token * f64::from(tokens)) * self.jitter()
    }

    fn generation(&mut self, tokens: u32) -> f64 {
        self.itl * f64::from(tokens.saturating_sub(1)) * self.jitter()
    }

    /// A length between two, as many short ones as long ones.
    fn length(&mut self, from: f64, to: f64) -> u32 {
        (from.ln() + (to.ln() - from.ln()) * self.random.random_range(0.0..1.0)).exp() as u32
    }
}

fn new_load() -> Arc<RankLoad> {
    Arc::new(RankLoad::noted(Columns::default().allocate(1).remove(0), None))
}

fn book(load: &Arc<RankLoad>, tokens: u32) -> Booking {
    let request = BookingRequest::new(Leg::Aggregated, Prefix::default(), tokens, 16);
    Booking::new(load.clone(), &request)
}

/// The median and the 90th percentile.
fn quantiles(mut errors: Vec<f64>) -> (f64, f64) {
    errors.sort_by(f64::total_cmp);
    (errors[errors.len() / 2], errors[errors.len() * 9 / 10])
}

/// Errors of the end of the prefill and of the whole time over mixed lengths, each as median and 90th
/// percentile. `streams`: first, as many answers were streamed; `whole`: answers that are only learned from.
fn errors(streams: u32, whole: u32) -> [(f64, f64); 2] {
    let load = new_load();
    let mut engine =
        Engine { overhead: 0.03, per_token: 0.0006, itl: 0.028, random: SmallRng::seed_from_u64(7) };
    let seconds = Duration::from_secs_f64;
    for _ in 0..streams {
        let prompt = engine.length(16.0, 16_384.0);
        let took = seconds(engine.prefill(prompt));
        book(&load, prompt).first_token(took, true);
        load.observe_itl(seconds(engine.itl * engine.jitter()));
    }
    let (mut of_prefill, mut of_all) = (Vec::new(), Vec::new());
    for turn in 0..whole + 400 {
        let (prompt, output) = (engine.length(16.0, 16_384.0), engine.length(1.0, 1_024.0));
        let booking = book(&load, prompt);
        let estimate = booking.estimate(true, 1, Some(output));
        let (prefill, generation) = (engine.prefill(prompt), engine.generation(output));
        let error = booking.answered(&estimate, seconds(prefill + generation), true, output);
        if turn >= whole {
            of_all.push(error);
            of_prefill.push((estimate.prefill.as_secs_f64() - prefill).abs() / prefill);
        }
    }
    [quantiles(of_prefill), quantiles(of_all)]
}

#[test]
fn f4_estimates_of_mixed_lengths_are_right_after_streams_and_after_whole_answers_alone() {
    // F4.10
    for (streams, whole) in [(200, 0), (0, 200)] {
        let [prefill, all] = errors(streams, whole);
        println!(
            "{streams} streams, {whole} whole answers: p50 and p90 of prefill {prefill:.2?}, of all {all:.2?}"
        );
        assert!(prefill.0 < 0.15 && prefill.1 < 0.5, "{streams} {whole} {prefill:?}");
        assert!(all.0 < 0.1 && all.1 < 0.25, "{streams} {whole} {all:?}");
    }
}

#[test]
fn f4_an_estimate_grows_with_the_output_up_to_max_tokens_and_ends_the_prefill() {
    let load = new_load();
    // Nothing was measured: 30 ms and 0.2 ms a token, then 15 ms a token.
    let mut booking = book(&load, 1_600);
    let estimate = booking.estimate(true, 1, Some(40));
    let ms = Duration::from_millis;
    assert_eq!(estimate.tokens(ms(349)), None);
    booking.advance(&estimate, ms(349));
    assert_eq!((load.active_prefill_tokens(), load.decode_blocks()), (1_600, 100));
    assert_eq!(estimate.next(ms(0)), Some(ms(350)));
    // F4.10
    booking.advance(&estimate, ms(350));
    assert_eq!((load.active_prefill_tokens(), load.decode_blocks()), (0, 101));
    assert_eq!(estimate.next(ms(350)), Some(ms(350 + 16 * 15)));
    booking.advance(&estimate, ms(350 + 15 * 32));
    assert_eq!(load.decode_blocks(), 103);
    booking.advance(&estimate, ms(60_000));
    assert_eq!((load.decode_blocks(), estimate.next(ms(60_000))), (103, None), "40 tokens at most");
    booking.output_tokens(3);
    assert_eq!(load.decode_blocks(), 101, "corrected");
    let choices = booking.estimate(true, 4, Some(100));
    assert_eq!((choices.tokens(ms(350)), choices.tokens(ms(365))), (Some(4), Some(8)));
    assert_eq!(booking.estimate(true, 0, None).tokens(ms(500)), Some(0), "an embedding");
    assert_eq!(choices.tokens(Duration::MAX), Some(400));
}

#[test]
fn nothing_that_an_engine_takes_or_tells_breaks_an_estimate() {
    let load = new_load();
    let booking = book(&load, u32::MAX);
    for (took, tokens) in
        [(Duration::ZERO, 0), (Duration::from_secs(86_400), u32::MAX), (Duration::from_nanos(1), u32::MAX)]
    {
        let estimate = booking.estimate(true, u32::MAX, None);
        let error = booking.answered(&estimate, took, true, tokens);
        assert!(error.is_finite() && error >= 0.0);
        assert!(estimate.tokens(took).is_none_or(|tokens| tokens > 0));
    }
}
