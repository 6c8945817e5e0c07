use std::collections::{HashMap, HashSet};

use super::*;
use crate::{
    generate::{Shape, generate},
    trace::Trace,
};

const AGENTS: Workload =
    Workload { shape: Shape::Agents { groups: 10 }, requests: 3_000, rate: 0.1, burstiness: 1.0, seed: 7 };

/// Returns the turns of each session, in order.
fn by_session(trace: &Trace) -> HashMap<&str, Vec<&TraceRequest>> {
    let mut sessions: HashMap<&str, Vec<&TraceRequest>> = HashMap::new();
    for request in &trace.requests {
        sessions.entry(request.session.as_deref().unwrap()).or_default().push(request);
    }
    sessions
}

fn median(mut values: Vec<u32>) -> u32 {
    values.sort_unstable();
    values[values.len() / 2]
}

fn mean(values: &[u32]) -> f64 {
    values.iter().map(|value| f64::from(*value)).sum::<f64>() / values.len() as f64
}

#[test]
fn equal_seeds_give_equal_traces_with_as_many_requests_as_asked_for() {
    let trace = generate(&AGENTS);
    assert_eq!((trace.requests.len(), trace.block_tokens), (3_000, BLOCK));
    assert_eq!(trace, generate(&AGENTS));
    assert_ne!(trace, generate(&Workload { seed: 8, ..AGENTS }));
    assert_eq!(generate(&Workload { requests: 1, ..AGENTS }).requests.len(), 1);
}

#[test]
fn lengths_and_pauses_keep_their_ranges_and_have_the_documented_medians() {
    let trace = generate(&AGENTS);
    let sessions = by_session(&trace);
    let within = |value: u32, spread: Spread| (spread.low..=spread.high).contains(&f64::from(value));
    let (mut answers, mut results, mut pauses) = (Vec::new(), Vec::new(), Vec::new());
    for turns in sessions.values() {
        for turn in turns {
            assert!(turn.input_tokens <= MAX_PROMPT_TOKENS, "{turn:?}");
            assert!(within(turn.output_tokens, ANSWER_TOKENS), "{turn:?}");
            assert_eq!(turn.blocks.len() as u32, turn.input_tokens.div_ceil(BLOCK));
            answers.push(turn.output_tokens);
        }
        for pair in turns.windows(2) {
            let result = pair[1].input_tokens - pair[0].input_tokens - pair[0].output_tokens;
            let pause = u32::try_from(pair[1].delay.unwrap().as_millis()).unwrap();
            assert!(within(result, RESULT_TOKENS) && within(pause, HUMAN_PAUSE_MS), "{result} {pause}");
            results.push(result);
            pauses.push(pause);
        }
        let first = turns[0];
        if first.parent.is_none() {
            assert!(within(first.input_tokens - SYSTEM_TOKENS - GROUP_TOKENS, FIRST_TOKENS), "{first:?}");
        }
    }
    let close = |value: u32, expected: f64| (f64::from(value) / expected - 1.0).abs() < 0.1;
    // Values outside the ranges are drawn again, which moves the medians by less than 10 %.
    assert!(close(median(answers), 800.0) && close(median(results.clone()), 4_000.0));
    assert!(mean(&results) > 4_500.0 && mean(&results) < 6_000.0, "{}", mean(&results));
    assert!(median(pauses.clone()) > 2_000 && median(pauses.clone()) < 5_000, "{}", median(pauses));
    let turns: Vec<u32> = sessions
        .iter()
        .filter(|(name, _)| !name.contains("sub"))
        .map(|(_, turns)| turns.len() as u32)
        .collect();
    assert!(mean(&turns) > 8.0 && mean(&turns) < 16.0, "{}", mean(&turns));
}

#[test]
fn all_share_the_system_prompt_groups_their_prefix_and_turns_the_session_so_far() {
    let trace = generate(&AGENTS);
    let (system, group) = ((SYSTEM_TOKENS / BLOCK) as usize, (GROUP_TOKENS / BLOCK) as usize);
    let first = trace.requests.first().unwrap();
    let mut groups: HashMap<&[u64], HashSet<&str>> = HashMap::new();
    for request in &trace.requests {
        assert_eq!(request.blocks[..system], first.blocks[..system]);
        let root = request.session.as_deref().unwrap().split("-sub-").next().unwrap();
        groups.entry(&request.blocks[system..system + group]).or_default().insert(root);
    }
    assert_eq!(groups.len(), 10);
    let all: usize = groups.values().map(HashSet::len).sum();
    assert_eq!(all, groups.values().flatten().collect::<HashSet<_>>().len(), "a session has one group");
    // The following blocks are the session's own.
    let mut owners: HashMap<u64, &str> = HashMap::new();
    for request in &trace.requests {
        let root = request.session.as_deref().unwrap().split("-sub-").next().unwrap();
        for block in &request.blocks[system + group..] {
            assert_eq!(*owners.entry(*block).or_insert(root), root);
        }
    }
    for turns in by_session(&trace).values() {
        for pair in turns.windows(2) {
            assert!(pair[1].blocks.starts_with(&pair[0].blocks), "{pair:?}");
        }
    }
    assert!(trace.endless_cache_hit_rate() > 0.85, "{}", trace.endless_cache_hit_rate());
}

#[test]
fn a_sub_agent_begins_with_its_parent_s_context_and_the_parent_waits_for_it() {
    let trace = generate(&AGENTS);
    let sessions = by_session(&trace);
    let children: Vec<_> = sessions.values().filter(|turns| turns[0].parent.is_some()).collect();
    assert!(children.len() > 50, "{}", children.len());
    for turns in &children {
        let parent = &sessions[turns[0].parent.as_deref().unwrap()];
        let before = parent.iter().rfind(|turn| turn.at < turns[0].at).unwrap();
        // These are the full blocks of the parent's prompt and answer, which the parent's next turn also has.
        let shared = ((before.input_tokens + before.output_tokens) / BLOCK) as usize;
        assert!(turns[0].blocks.starts_with(&before.blocks[..(before.input_tokens / BLOCK) as usize]));
        if let Some(next) = parent.iter().find(|turn| turn.at > before.at) {
            assert_eq!(turns[0].blocks[..shared], next.blocks[..shared]);
            assert_ne!(turns[0].blocks[shared], next.blocks[shared]);
            assert!(next.join && next.at >= turns.last().unwrap().at);
        }
        assert!(turns.len() <= CHILD_TURNS.1 as usize && turns.iter().all(|turn| !turn.join));
    }
    let joins = trace.requests.iter().filter(|request| request.join).count();
    assert!(joins > 20 && joins <= children.len(), "{joins}");
}
