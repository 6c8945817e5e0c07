//! Agent programs of a trace reach policies as facts, through the gateway's own table.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs, reason = "a test")]

use std::collections::{HashMap, HashSet};

use pointsman_lab::{
    Arm, Ended, EngineGroup, Fleet, RunOptions, RunResult, Trace,
    generate::{Shape, Workload, generate},
    run,
};
use pointsman_workers::Role;

fn agents() -> Trace {
    let shape = Shape::Agents { groups: 4 };
    generate(&Workload { shape, requests: 80, rate: 0.5, burstiness: 1.0, seed: 3 })
}

fn result(formula: &str, trace: &Trace) -> RunResult {
    let group = EngineGroup { blocks: Some(65_536), ..EngineGroup::new(Role::Aggregated, 4) };
    let fleet = Fleet { block_tokens: 64, engines: vec![group], ..Fleet::default() };
    let arm = Arm::parse(&format!("formula@{{\"cost\": \"{formula}\"}}")).unwrap();
    let result = run(&arm, trace, &fleet, RunOptions::default()).unwrap();
    assert!(result.outcomes.iter().all(|one| one.ended == Ended::Complete && !one.fell_back));
    result
}

/// The engines that served each program. Sub-agents are named after their root.
fn engines(trace: &Trace, result: &RunResult) -> HashMap<String, HashSet<u32>> {
    let mut engines: HashMap<String, HashSet<u32>> = HashMap::new();
    for (request, outcome) in trace.requests.iter().zip(&result.outcomes) {
        let session = request.session.as_deref().unwrap();
        let root = session.split("-sub-").next().unwrap();
        engines.entry(root.to_owned()).or_default().insert(outcome.decode_engine);
    }
    engines
}

#[test]
fn f11_a_program_of_a_trace_stays_where_its_tokens_are() {
    let trace = agents();
    assert!(trace.requests.iter().any(|request| request.parent.is_some()), "the trace has sub-agents");
    let moved = |formula: &str| {
        engines(&trace, &result(formula, &trace)).values().filter(|engines| engines.len() > 1).count()
    };
    // F11.1, F11.4: sub-agents run with the session that started them.
    assert_eq!(moved("-program_tokens"), 0);
    assert!(moved("0") > 3);
    // F11.2: only later turns have held tokens to look at.
    assert_eq!(moved("program_turn == 0 ? 0 : -program_tokens"), 0);
}

#[test]
fn f11_new_programs_spread_by_the_tokens_of_running_ones() {
    let trace = agents();
    let result = result("program_turn == 0 ? running_program_tokens : -program_tokens", &trace);
    let mut programs = [0_u32; 4];
    for engines in engines(&trace, &result).values() {
        // F11.5
        assert_eq!(engines.len(), 1);
        engines.iter().for_each(|engine| programs[*engine as usize] += 1);
    }
    let (least, most) = (programs.iter().min().unwrap(), programs.iter().max().unwrap());
    assert!(*least > 0 && most - least <= 2, "{programs:?}");
}
