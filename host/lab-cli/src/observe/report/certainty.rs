//! How sure the page is: what was seen and missed, whose engines are known, and how well the model fits.

use pointsman_lab::Window;

use super::{Forecast, Means, Observation, change, number, ratio, row};
use crate::observe::{
    assign::{How, has_other_answers},
    document::Block,
    engines::MAX_METRICS,
    writer::Written,
};

/// Difference of a forecast and what was measured, percent, above which the page warns.
const POOR_PERCENT: f64 = 20.0;
/// Share of requests that were seen below which the page warns.
const FEW_SEEN: f64 = 0.95;

/// Share of guessed engines above which policies are not compared with the router, percent.
const MOST_GUESSED: f64 = 50.0;

/// Returns the share of the requests whose engine is known in this way, percent.
fn percent(seen: &Observation<'_>, how: How) -> f64 {
    let count = seen.assigned.iter().filter(|assigned| assigned.how == how).count();
    100.0 * ratio(number(count), number(seen.assigned.len()))
}

/// Returns why no policy can be said to be faster than the router, when most engines are guessed.
pub(super) fn cannot_tell(seen: &Observation<'_>) -> Option<Block> {
    let guessed = percent(seen, How::Guessed);
    (guessed > MOST_GUESSED).then(|| {
        Block::Warning(format!(
            "this cannot tell whether a policy is faster than your router: the engines of {guessed:.1} % of the requests \
             are guessed. {}",
            to_know_engines(seen)
        ))
    })
}

/// Says what to give so that more engines are known.
pub(super) fn to_know_engines(seen: &Observation<'_>) -> &'static str {
    if seen.followed.has_feeds {
        "See below what KV events came; prompts of text need --tokenizer"
    } else {
        "Give the engines' KV events (--kv-events), and --tokenizer for prompts of text"
    }
}

/// Adds what is known and what is not.
pub(super) fn add(blocks: &mut Vec<Block>, seen: &Observation<'_>, forecast: Option<&Forecast>) {
    seen_and_missed(blocks, seen);
    known_engines(blocks, seen);
    lengths(blocks, seen);
    if let Some(forecast) = forecast {
        calibration(blocks, seen, forecast);
    }
}

fn seen_and_missed(blocks: &mut Vec<Block>, seen: &Observation<'_>) {
    let arrived = seen.counts.arrived();
    let missed = seen.counts.missed();
    let reasons: Vec<String> = missed.iter().map(|(why, count)| format!("{count} {why}")).collect();
    let (kept, answers) = (sequences(seen.written), seen.total.first_tokens);
    let mut told = format!("{arrived} copies arrived, {} are in the trace", seen.written.len());
    if seen.failed > 0 {
        told.push_str(&format!(", {} are not compared because their answers were errors", seen.failed));
    }
    if !reasons.is_empty() {
        told.push_str(&format!(", missed: {}", reasons.join(", ")));
    }
    blocks.push(Block::Sentence(format!("{told}. The engines began {answers:.0} answers in that time.")));
    blocks.extend(seen.incomplete.clone().map(Block::Warning));
    blocks.extend(seen.counts.elsewhere().map(if arrived == 0 { Block::Warning } else { other_paths }));
    if has_other_answers(seen.written, answers) {
        // The settings of limits are flags.
        let has_limit = missed.iter().any(|(why, _)| why.contains("--"));
        other_answers(blocks, kept / answers, has_limit, seen.logs.len());
    }
    let several = seen.written.iter().filter(|request| request.sequences > 1).count();
    if several > 0 {
        blocks.push(Block::Warning(format!(
            "{several} requests ask for several answers (`n`), {kept:.0} answers in all with the other requests. The \
             engines count each answer; the trace has one of each request, so the forecast is that of less load"
        )));
    }
    if answers > 0.0 && answers < FEW_SEEN * kept {
        blocks.push(Block::Warning(
            "the engines answered fewer requests than were copied: --workers may lack some, or the router refused requests"
                .to_owned(),
        ));
    }
    for log in seen.logs.iter().filter(|log| log.failures == log.readings) {
        blocks.push(Block::Warning(format!(
            "{}: none of {} readings of /metrics succeeded, so nothing is known of this engine",
            log.url, log.readings
        )));
    }
    for log in seen.logs.iter().filter(|log| log.too_large > 0) {
        blocks.push(Block::Warning(format!(
            "{}: {} answers of /metrics were not read, because they are above {} MiB",
            log.url,
            log.too_large,
            MAX_METRICS >> 20
        )));
    }
    if seen.counts.refused_connections() > 0 {
        blocks.push(Block::Warning(format!(
            "{} connections were closed at once, because too many were open",
            seen.counts.refused_connections()
        )));
    }
}

/// Warns of a trace that has only this share of what the engines answered.
fn other_answers(blocks: &mut Vec<Block>, share: f64, has_limit: bool, engines: usize) {
    let limits = if has_limit { ", and raise the limits that are named above" } else { "" };
    blocks.push(Block::Warning(format!(
        "the trace has {:.1} % of what the engines answered: the forecast is that of less load. Mirror every \
         route{limits}. After a copy that failed, as before the observer listened, nginx sends none for its \
         `fail_timeout`",
        100.0 * share
    )));
    if engines > 1 {
        let others = "the engines' counters have answers of requests that were not copied, as when a second router or \
                      client sends to the same engines: they tell no engine of a request, and those are guessed. \
                      Observe all of their traffic, or give the engines' KV events (--kv-events)";
        blocks.push(Block::Warning(others.to_owned()));
    }
}

/// Tells of requests to other paths, which may be those of other endpoints.
fn other_paths(told: String) -> Block {
    Block::Sentence(format!("{told}."))
}

/// Returns the number of answers that requests ask for.
fn sequences(written: &[Written]) -> f64 {
    written.iter().map(|request| f64::from(request.sequences)).sum()
}

fn known_engines(blocks: &mut Vec<Block>, seen: &Observation<'_>) {
    let share = |how: How| percent(seen, how);
    blocks.push(Block::Sentence(format!(
        "Engine of a request: {:.1} % told with the answer, {:.1} % by KV events, {:.1} % by counters (in a second, one engine began as many \
         answers as requests waited), {:.1} % guessed from the shares of the engines.",
        share(How::Answer),
        share(How::Events),
        share(How::Counters),
        share(How::Guessed)
    )));
    for log in seen.logs.iter().filter(|log| log.ranks() > 1) {
        blocks.push(Block::Warning(format!(
            "{} has {} data-parallel ranks: each is an engine of the simulation, and they take turns in that of your \
             router, because metrics do not tell which rank served. An address of --kv-events has the events of one rank",
            log.url,
            log.ranks()
        )));
    }
    let url = |engine: &u32| seen.logs.get(*engine as usize).map(|log| log.url.as_str());
    for url in seen.followed.unconnected.iter().filter_map(url) {
        blocks.push(Block::Warning(format!(
            "{url}: its KV events could not be read: check its address in --kv-events"
        )));
    }
    for url in seen.followed.silent.iter().filter_map(url) {
        blocks.push(Block::Warning(format!(
            "{url}: no KV event came, so that none tells which requests it served: check that it publishes them at its \
             address in --kv-events"
        )));
    }
    if seen.followed.left_out > 0 {
        blocks.push(Block::Warning(format!(
            "{} requests were not compared with KV events, because too many waited for theirs at once",
            seen.followed.left_out
        )));
    }
    if seen.followed.bad_messages > 0 {
        blocks.push(Block::Warning(format!(
            "{} messages of KV events were malformed or too long: what their engines have cached was forgotten",
            seen.followed.bad_messages
        )));
    }
    if share(How::Guessed) > MOST_GUESSED {
        blocks.push(Block::Warning(
            "most engines are guessed: the simulated hit rate of your router is that of an assignment at random; compare \
             it with the measured one"
                .to_owned(),
        ));
    }
}

fn lengths(blocks: &mut Vec<Block>, seen: &Observation<'_>) {
    let estimated = seen.written.iter().filter(|request| request.is_estimated).count();
    // The engines count the prompt once for each answer.
    let prompts =
        seen.written.iter().map(|request| f64::from(request.input_tokens) * f64::from(request.sequences));
    let own = ratio(prompts.sum(), sequences(seen.written));
    let engines = ratio(seen.total.prompt_tokens, seen.total.first_tokens);
    blocks.push(Block::Sentence(format!(
        "Prompt tokens: {:.1} % of the requests are estimated from bytes. The mean prompt has {own:.0} tokens in the trace \
         and {engines:.0} by the engines' counters.",
        100.0 * ratio(number(estimated), number(seen.written.len())),
    )));
    if estimated > 0 && engines > 0.0 && change(own, engines).abs() > POOR_PERCENT {
        blocks.push(Block::Warning(
            "the estimate of prompt tokens is far off: give --tokenizer, or set --bytes-per-token so that both means agree"
                .to_owned(),
        ));
    }
    let told = |request: &&Written| {
        seen.answers.get(&request.number).is_some_and(|answer| answer.output_tokens.is_some())
    };
    let told = seen.written.iter().filter(told).count();
    blocks.push(Block::Sentence(format!(
        "Output tokens: {:.1} % of the requests have those of their answer. Those of the others are not seen: each has \
         the client's limit or less, so that the mean is the engines', {:.0}. Requests arrive at their times in every row: \
         what a faster answer would have changed in the arrivals is not known.",
        100.0 * ratio(number(told), number(seen.written.len())),
        ratio(seen.total.generated_tokens, seen.total.first_tokens)
    )));
}

fn calibration(blocks: &mut Vec<Block>, seen: &Observation<'_>, forecast: &Forecast) {
    let (measured, own) = (Means::measured(&seen.total), Means::forecast(&forecast.observed));
    let mut rows = vec![row(&["your router", "measured", "simulated", "error %"])];
    for (name, measured, own, decimals) in [
        ("TTFT mean ms", measured.ttft_ms, own.ttft_ms, 1),
        ("ITL mean ms", measured.itl_ms, own.itl_ms, 2),
        ("hit rate", measured.hit_rate, own.hit_rate, 3),
    ] {
        let error = if measured > 0.0 { format!("{:+.1}", change(own, measured)) } else { String::new() };
        rows.push(vec![
            name.to_owned(),
            format!("{measured:.decimals$}"),
            format!("{own:.decimals$}"),
            error,
        ]);
    }
    blocks.push(Block::Table(rows));
    match forecast.equations {
        None => blocks.push(Block::Warning(
            "the engines' metrics have no latencies, or too few requests: the step time is a default, and no forecast is \
             in your milliseconds"
                .to_owned(),
        )),
        Some(count) => blocks.push(Block::Sentence(format!(
            "The step time of the engines is fitted to {count} means of their metrics."
        ))),
    }
    blocks.extend(free_prompts(seen, forecast));
    if seen.logs.iter().any(|log| log.has_late_counters) {
        blocks.push(Block::Warning(
            "SGLang counts tokens at the ends of requests: the step time is fitted to sums over 60 readings, which says \
             less than readings do. Observe for an hour, or fit the engines with `pointsman calibrate`"
                .to_owned(),
        ));
    }
    blocks.extend(poor("TTFT", measured.ttft_ms, own.ttft_ms));
    blocks.extend(poor("ITL", measured.itl_ms, own.itl_ms));
}

/// Warns when the simulation of what the router did is far from what was measured.
fn poor(name: &str, measured_ms: f64, simulated_ms: f64) -> Option<Block> {
    (measured_ms > 0.0 && change(simulated_ms, measured_ms).abs() > POOR_PERCENT).then(|| {
        Block::Warning(format!(
            "the simulation of what your router did misses the measured {name} by more than {POOR_PERCENT:.0} %: trust \
             the order of the policies, and only where it is clear, or fit the engines with `pointsman calibrate`"
        ))
    })
}

/// Warns when the fit found no time that a prompt token takes.
fn free_prompts(seen: &Observation<'_>, forecast: &Forecast) -> Option<Block> {
    (forecast.equations.is_some() && !forecast.has_prompt_cost).then(|| no_prompt_cost(&seen.total))
}

fn no_prompt_cost(Window { queried_tokens, cached_tokens, .. }: &Window) -> Block {
    // Some engines do not count what they look up in their caches.
    let computed = if *queried_tokens > 0.0 {
        let percent = 100.0 * ratio(queried_tokens - cached_tokens, *queried_tokens);
        format!(
            ": the engines computed {percent:.1} % of the prompt tokens, and had the others in their caches"
        )
    } else {
        String::new()
    };
    Block::Warning(format!(
        "no time of a prompt token was found{computed}. In the simulation, prompts are free, and a policy gains nothing \
         by more hits. Observe traffic with new prompts, or fit the engines with `pointsman calibrate`"
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::observe::{
        assign::Assigned,
        counts::{Counts, Missed},
        document::text,
        engines::EngineLog,
        tracker::Followed,
    };

    #[test]
    fn the_share_of_cached_prompt_tokens_is_that_of_engines_that_report_it() {
        let page = |queried_tokens: f64| {
            text(&[no_prompt_cost(&Window {
                queried_tokens,
                cached_tokens: 0.9 * queried_tokens,
                ..Window::default()
            })])
        };
        let (counted, not_counted) = (page(1_000.0), page(0.0));
        assert!(
            counted.contains("was found: the engines computed 10.0 % of the prompt tokens, and"),
            "{counted}"
        );
        assert!(not_counted.contains("was found. In the simulation, prompts are free"), "{not_counted}");
    }

    #[test]
    fn the_page_says_how_many_requests_kv_events_were_not_compared_with() {
        let counts = Counts::default();
        let followed = Followed { left_out: 3, bad_messages: 2, ..Followed::default() };
        let seen = Observation {
            seconds: 1.0,
            counts: &counts,
            written: &[],
            failed: 4,
            assigned: &[],
            followed: &followed,
            answers: &HashMap::new(),
            incomplete: Some("cannot write the trace".to_owned()),
            logs: &[],
            total: Window::default(),
        };
        let mut blocks = Vec::new();
        add(&mut blocks, &seen, None);
        let page = text(&blocks);
        assert!(
            page.contains("are in the trace, 4 are not compared because their answers were errors."),
            "{page}"
        );
        assert!(page.contains("warning: 3 requests were not compared with KV events"), "{page}");
        assert!(page.contains("warning: 2 messages of KV events were malformed or too long"), "{page}");
        assert!(page.contains("warning: cannot write the trace"), "{page}");
        let one = Written {
            number: 0,
            at: std::time::Duration::ZERO,
            input_tokens: 100,
            max_tokens: None,
            sequences: 4,
            is_estimated: false,
        };
        let total = Window { first_tokens: 80.0, prompt_tokens: 8_000.0, ..Window::default() };
        let mut blocks = Vec::new();
        // S5.13, S5.14
        seen.counts.miss(Missed::SeveralPrompts);
        for written in [vec![one; 20], vec![Written { sequences: 1, ..one }; 20]] {
            add(&mut blocks, &Observation { written: &written, total, incomplete: None, ..seen }, None);
        }
        let page = text(&blocks);
        assert!(page.contains("20 requests ask for several answers (`n`), 80 answers in all"), "{page}");
        // S5.13, S5.22
        let few = "the trace has 25.0 % of what the engines answered: the forecast is that of less load. Mirror every \
                   route. After a copy that failed, as before the observer listened, nginx sends none for its \
                   `fail_timeout`\n";
        assert_eq!(page.matches(few).count(), 1, "{page}");
        assert_eq!(page.matches("has 100 tokens in the trace and 100 by").count(), 2, "{page}");
        assert!(!page.contains("a second router"), "there is one engine: {page}");
        let logs = [EngineLog::default(), EngineLog::default()];
        let mut blocks = Vec::new();
        let of_two = Observation { written: &[one; 10], total, logs: &logs, incomplete: None, ..seen };
        add(&mut blocks, &of_two, None);
        // S5.23
        assert!(text(&blocks).contains("as when a second router or client sends to the same engines"));
        // S5.25
        assert!(poor("ITL", 10.0, 13.0).is_some() && poor("ITL", 10.0, 11.0).is_none());
        let assigned =
            |all: &[How]| all.iter().map(|how| Assigned { engine: 0, how: *how }).collect::<Vec<_>>();
        let told =
            |all: &[How]| cannot_tell(&Observation { assigned: &assigned(all), incomplete: None, ..seen });
        // S5.4
        assert_eq!(told(&[How::Guessed, How::Counters]), None);
        let warning = told(&[How::Guessed, How::Guessed, How::Events]);
        let page = text(&[warning.expect("a warning")]);
        assert!(page.contains("the engines of 66.7 % of the requests are guessed"), "{page}");
    }
}
