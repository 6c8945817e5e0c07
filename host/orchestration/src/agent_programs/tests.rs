use std::sync::Arc;

use pointsman_routing::AgentProgram;
use pointsman_workers::{DpRank, Registry, Worker, WorkerId, WorkerSpec};

use super::{aged::MAX_VALUES, *};

/// No block of the prompt is cached.
const NONE: [u32; 3] = [0; 3];

fn worker(registry: &Registry, id: u64) -> (Arc<Worker>, Candidate) {
    let spec = format!("id={id},role=aggregated,engine=vllm,url=http://a:{id},model=m");
    let worker = registry.upsert(WorkerSpec::parse_flag(&spec).unwrap());
    let candidate = worker.candidates().remove(0);
    (worker, candidate)
}

/// A request of `tokens` prompt tokens, with the facts of its program.
fn request(programs: &AgentPrograms, session: u64, parent: Option<u64>, tokens: u32) -> RoutingRequest {
    let program = AgentProgram { session, parent, ..AgentProgram::default() };
    let mut request = RoutingRequest {
        prompt_tokens: tokens,
        block_size: 16,
        program: Some(Box::new(program)),
        ..RoutingRequest::default()
    };
    programs.fill(&mut request);
    request
}

fn facts(request: &RoutingRequest) -> (u64, u32, Option<u32>) {
    let program = request.program.as_deref().unwrap();
    (program.hash, program.turn, program.idle_ms)
}

fn held(request: &RoutingRequest) -> Vec<(u64, u32)> {
    let mut held: Vec<_> = request
        .program
        .iter()
        .flat_map(|it| &it.held)
        .map(|((worker, _), tokens)| (worker.0, *tokens))
        .collect();
    held.sort_unstable();
    held
}

#[tokio::test(start_paused = true)]
async fn f11_a_program_is_a_root_session_with_all_its_descendants() {
    let (programs, registry) = (AgentPrograms::default(), Registry::default());
    let (_worker, here) = worker(&registry, 1);
    let mut root = request(&programs, 7, None, 100);
    // F11.1, F11.2
    assert_eq!(facts(&root), (7, 0, None));
    // A preview asks and changes nothing.
    assert_eq!(facts(&request(&programs, 7, None, 100)), (7, 0, None));
    programs.routed(&mut root, &here, NONE);
    // Its second leg, and a retry, are not further turns.
    programs.routed(&mut root, &here, NONE);
    tokio::time::advance(Duration::from_millis(250)).await;
    let mut child = request(&programs, 8, Some(7), 120);
    // F11.1, F11.2, F11.3
    assert_eq!(facts(&child), (7, 1, Some(250)));
    programs.routed(&mut child, &here, NONE);
    // F11.1: a sub-agent of the sub-agent, and a request of the sub-agent that no longer names its parent.
    assert_eq!(facts(&request(&programs, 9, Some(8), 1)), (7, 2, Some(0)));
    assert_eq!(facts(&request(&programs, 8, None, 1)), (7, 2, Some(0)));
    // A session that names itself as its parent is a root.
    assert_eq!(facts(&request(&programs, 5, Some(5), 1)).0, 5);
    tokio::time::advance(KNOWN_FOR + Duration::from_millis(1)).await;
    // F11.6
    assert_eq!(facts(&request(&programs, 8, None, 1)), (8, 0, None));
    assert_eq!(facts(&request(&programs, 7, None, 1)), (7, 0, None));
}

#[tokio::test(start_paused = true)]
async fn f11_programs_that_ended_silently_are_forgotten_without_requests_of_others() {
    let (programs, registry) = (AgentPrograms::default(), Registry::default());
    let (_worker, here) = worker(&registry, 1);
    for session in 0..300 {
        programs.routed(&mut request(&programs, session, None, 16), &here, NONE);
    }
    assert_eq!(here.load().view().program_tokens(), 4_800);
    tokio::time::advance(RUNNING_FOR + Duration::from_millis(1)).await;
    programs.expire();
    // F11.5
    assert_eq!(here.load().view().program_tokens(), 0);
}

#[tokio::test(start_paused = true)]
async fn f11_candidates_hold_the_longest_request_of_a_running_program() {
    let (programs, registry) = (AgentPrograms::default(), Registry::default());
    let ((_, here), (_, there)) = (worker(&registry, 1), worker(&registry, 2));
    let sums = || (here.load().view().program_tokens(), there.load().view().program_tokens());
    let mut first = request(&programs, 7, None, 1_600);
    programs.routed(&mut first, &here, NONE);
    // F11.4: the prompt counts at once, the answer when it has ended.
    assert_eq!((held(&request(&programs, 7, None, 1)), sums()), (vec![(1, 1_600)], (1_600, 0)));
    programs.answered(&mut first, &here, 320);
    let mut other = request(&programs, 6, None, 800);
    programs.routed(&mut other, &here, [30, 10, 0]);
    // Later, the program's own tokens are cached, too.
    programs.routed(&mut request(&programs, 6, None, 800), &here, [50, 0, 0]);
    // F11.4, F11.5
    assert_eq!(sums(), (1_920 + 160, 0));
    tokio::time::advance(RUNNING_FOR / 2).await;
    let mut child = request(&programs, 8, Some(7), 800);
    programs.routed(&mut child, &here, NONE);
    let mut child = request(&programs, 8, Some(7), 800);
    programs.routed(&mut child, &there, NONE);
    assert_eq!(held(&request(&programs, 7, None, 1)), [(1, 1_920), (2, 800)]);
    tokio::time::advance(RUNNING_FOR / 2 + Duration::from_secs(1)).await;
    // The other program does not run any more.
    assert_eq!((held(&request(&programs, 6, None, 1)), sums()), (vec![], (1_920, 800)));
    programs.ended(&child);
    assert_eq!(facts(&request(&programs, 8, None, 1)).0, 7, "it was not answered");
    programs.answered(&mut child, &there, 0);
    programs.ended(&child);
    assert_eq!((facts(&request(&programs, 8, None, 1)).0, sums()), (8, (1_920, 800)));
    let mut second = request(&programs, 7, None, 1_600);
    programs.routed(&mut second, &here, NONE);
    programs.ended(&first);
    // F11.6
    assert_eq!((facts(&request(&programs, 7, None, 1)), sums()), ((7, 0, None), (0, 0)));
    programs.routed(&mut second, &there, NONE);
    programs.answered(&mut second, &here, 320);
    // F11.6: the program has ended
    assert_eq!((facts(&request(&programs, 7, None, 1)), sums()), ((7, 0, None), (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn f11_a_worker_that_joins_again_holds_nothing() {
    let (programs, registry) = (AgentPrograms::default(), Registry::default());
    let (_, before) = worker(&registry, 1);
    programs.routed(&mut request(&programs, 7, None, 1_600), &before, NONE);
    registry.remove(WorkerId(1));
    let (_, after) = worker(&registry, 1);
    programs.routed(&mut request(&programs, 7, None, 160), &after, NONE);
    assert_eq!(held(&request(&programs, 7, None, 1)), [(1, 160)]);
    assert_eq!(after.load().view().program_tokens(), 160);
    assert_eq!(before.load().view().program_tokens(), 0);
    assert_eq!(after.rank, DpRank(0));
}

#[tokio::test(start_paused = true)]
async fn f11_programs_and_their_holders_are_bounded() {
    let (programs, registry) = (AgentPrograms::default(), Registry::default());
    let (_worker, here) = worker(&registry, 1);
    for session in 0..=MAX_VALUES as u64 {
        let mut child = request(&programs, session, Some(session + 1_000_000), 16);
        programs.routed(&mut child, &here, NONE);
    }
    {
        let tables = programs.0.lock();
        // F11.6
        assert_eq!([tables.turns.len(), tables.roots.len(), tables.held.len()], [MAX_VALUES; 3]);
        assert!(tables.turns.get(1_000_000).is_none() && tables.roots.get(0).is_none());
    }
    assert_eq!(here.load().view().program_tokens(), MAX_VALUES as u32 * 16);
    let all: Vec<_> = (2..20).map(|id| worker(&registry, id)).collect();
    for (_, candidate) in &all {
        tokio::time::advance(Duration::from_millis(1)).await;
        programs.routed(&mut request(&programs, 1, None, 16), candidate, NONE);
    }
    assert_eq!(held(&request(&programs, 1, None, 1)).len(), MAX_HOLDERS);
    assert_eq!(all[0].1.load().view().program_tokens(), 0);
}
